//! Adds the replies of the fast path to the families that speak of all replies.

use prometheus::proto::{Counter, MetricFamily};

use dns_platform::metrics::{families, labels};

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
    pub(super) fn add_to(&self, all: &mut Vec<MetricFamily>, server: &str) {
        let total = self.total();
        add(all, families::REQUESTS_INTERNAL_TOTAL.is(total));
        add(all, families::REPLIES_TOTAL.of([(["fast"], total)]));
        let replies = || self.replies.iter().filter(|(_, _, count)| *count > 0);
        let requests = replies().map(|&(query_type, _, count)| {
            ([server, labels::ZONE, labels::VIEW, "udp", "", query_type], count)
        });
        let responses = replies().map(|&(_, rcode, count)| {
            let rcode = labels::rcode_label(rcode);
            ([server.into(), labels::ZONE.into(), labels::VIEW.into(), rcode, "xdp".into()], count)
        });
        add(all, families::COREDNS_REQUESTS_TOTAL.of(requests));
        add(all, families::COREDNS_RESPONSES_TOTAL.of(responses));
    }
}

/// Adds the counters of a family to those that there are, which stay sorted by name.
fn add(all: &mut Vec<MetricFamily>, mut family: MetricFamily) {
    let place = match all.binary_search_by(|known| known.name().cmp(family.name())) {
        Ok(place) => place,
        Err(_) if family.get_metric().is_empty() => return,
        Err(place) => {
            let mut empty = family.clone();
            empty.set_metric(Vec::new());
            all.insert(place, empty);
            place
        }
    };
    let known = all[place].mut_metric();
    for metric in family.take_metric() {
        match known.iter_mut().find(|known| known.get_label() == metric.get_label()) {
            Some(known) => {
                let mut sum = Counter::default();
                sum.set_value(known.get_counter().get_value() + metric.get_counter().get_value());
                known.set_counter(sum);
            }
            None => known.push(metric),
        }
    }
}
