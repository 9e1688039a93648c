//! Adds the replies of the fast path to the families that speak of all replies.

use prometheus::proto::{Counter, MetricFamily, MetricType};

use super::{labels, names};

/// What the program has answered since it was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FastReplies {
    /// Replies by label of the type, and RCODE.
    pub replies: Vec<(&'static str, u8, u64)>,
}

impl FastReplies {
    /// All replies.
    pub fn total(&self) -> u64 {
        self.replies.iter().map(|(_, _, count)| count).sum()
    }

    /// Counts the replies in. The program does not know an address family that
    /// is counted apart, so `family` is empty for its share.
    pub(super) fn add_to(&self, families: &mut Vec<MetricFamily>, server: &str) {
        let total = self.total();
        add(families, names::REQUESTS_INTERNAL_TOTAL, "Requests for names of the fleet.", &[], total);
        add(
            families,
            names::REPLIES_TOTAL,
            "Replies by the path that gave them.",
            &[("path", "fast")],
            total,
        );
        let common = [("server", server), ("zone", labels::ZONE), ("view", labels::VIEW)];
        for &(query_type, rcode, count) in self.replies.iter().filter(|(_, _, count)| *count > 0) {
            let mut request = common.to_vec();
            request.extend([("proto", "udp"), ("family", ""), ("type", query_type)]);
            add(families, names::COREDNS_REQUESTS_TOTAL, "Requests.", &request, count);
            let rcode = labels::rcode_label(rcode);
            let mut response = common.to_vec();
            response.extend([("rcode", rcode.as_ref()), ("plugin", "xdp")]);
            add(families, names::COREDNS_RESPONSES_TOTAL, "Responses.", &response, count);
        }
    }
}

/// Adds `count` to the counter `name` with these labels, making family and
/// metric where they are missing. Families stay sorted by name.
fn add(families: &mut Vec<MetricFamily>, name: &str, help: &str, labels: &[(&str, &str)], count: u64) {
    let place = match families.binary_search_by(|family| family.name().cmp(name)) {
        Ok(place) => place,
        Err(place) => {
            let mut family = MetricFamily::default();
            family.set_name(name.to_owned());
            family.set_help(help.to_owned());
            family.set_field_type(MetricType::COUNTER);
            families.insert(place, family);
            place
        }
    };
    let metrics = families[place].mut_metric();
    let mut labels = labels.to_vec();
    labels.sort_unstable();
    let known = metrics.iter_mut().find(|metric| {
        metric.get_label().iter().map(|label| (label.name(), label.value())).eq(labels.iter().copied())
    });
    match known {
        Some(metric) => {
            let before = metric.get_counter().get_value();
            metric.set_counter(counter(before + count as f64));
        }
        None => {
            let mut metric = labels::labelled(&labels);
            metric.set_counter(counter(count as f64));
            metrics.push(metric);
        }
    }
}

/// A counter that stands at `value`.
fn counter(value: f64) -> Counter {
    let mut counter = Counter::default();
    counter.set_value(value);
    counter
}
