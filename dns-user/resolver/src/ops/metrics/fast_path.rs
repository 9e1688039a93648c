//! Adds the fast path's replies to the families that count all replies.

use prometheus::proto::{Counter, MetricFamily};

use dns_kit::metrics::{families, labels};

/// Replies sent by the BPF programs since they were loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FastReplies {
    /// Replies by query type label and RCODE.
    pub replies: Vec<(&'static str, u8, u64)>,
    /// Replies among these from forwarded answers.
    pub forwarded: u64,
}

impl FastReplies {
    /// Returns the total number of replies.
    pub fn total(&self) -> u64 {
        self.replies.iter().map(|(_, _, count)| count).sum()
    }

    /// Adds these replies to the families in `all`. The programs do not count by address family, so
    /// the label `family` is empty for their share.
    pub(super) fn add_to(&self, all: &mut Vec<MetricFamily>, server: &str) {
        let total = self.total();
        // The counters are read one after the other while the programs run.
        add(all, families::REQUESTS_INTERNAL_TOTAL.is(total.saturating_sub(self.forwarded)));
        add(all, families::REQUESTS_EXTERNAL_TOTAL.is(self.forwarded));
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

/// Adds the counters of a family, keeping the families sorted by name.
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
