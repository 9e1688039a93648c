//! Records on which interfaces queries arrive. The fast path serves an endpoint on an interface
//! only after the kernel has delivered queries for that endpoint from that interface.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use dns_fastpath::{Arrival, MOST_CLIENTS};
use parking_lot::Mutex;

/// Maximum number of pairs of interface and endpoint per report. Further pairs appear in the next
/// report.
const MOST_PAIRS: usize = 2048;

/// Arrivals since the last report, by interface and endpoint, shared by all UDP workers. Off by
/// default: without a fast path nothing is counted.
#[derive(Clone, Default)]
pub struct Arrivals(Option<Arc<Mutex<Pairs>>>);

type Pairs = BTreeMap<(u32, SocketAddr), Seen>;

/// Arrivals at one endpoint through one interface.
#[derive(Debug, Default)]
struct Seen {
    /// Queries answered immediately by the worker.
    queries: u32,
    /// Senders of datagrams of any kind.
    clients: Vec<IpAddr>,
    /// Whether there were more senders.
    more: bool,
}

impl Arrivals {
    /// Creates the shared counts, switched on.
    pub fn on() -> Self {
        Self(Some(Arc::default()))
    }

    pub(super) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the arrivals since the last call, and resets them.
    pub fn take(&self) -> Vec<Arrival> {
        let Some(pairs) = &self.0 else { return Vec::new() };
        let pairs = std::mem::take(&mut *pairs.lock());
        let arrival = |((ifindex, endpoint), Seen { queries, clients, more })| Arrival {
            ifindex,
            endpoint,
            queries,
            clients,
            more,
        };
        pairs.into_iter().map(arrival).collect()
    }
}

impl fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_on() { "on" } else { "off" })
    }
}

/// Counts the datagrams of one worker and publishes them per batch.
pub(super) struct ArrivalCounter {
    all: Arrivals,
    /// The datagrams of the current batch; the flag is set if one was answered immediately.
    batch: Vec<(u32, SocketAddr, IpAddr, bool)>,
}

impl ArrivalCounter {
    pub(super) fn new(all: Arrivals) -> Self {
        Self { all, batch: Vec::new() }
    }

    /// Counts a datagram from `client` that arrived at an endpoint through an interface.
    pub(super) fn arrived(&mut self, ifindex: u32, endpoint: SocketAddr, client: IpAddr, answered: bool) {
        if self.all.is_on() {
            self.batch.push((ifindex, endpoint, client, answered));
        }
    }

    /// Adds the batch to the shared counts.
    pub(super) fn batch_ended(&mut self) {
        let Some(pairs) = &self.all.0 else { return };
        if self.batch.is_empty() {
            return;
        }
        let mut pairs = pairs.lock();
        for (ifindex, endpoint, client, answered) in self.batch.drain(..) {
            if pairs.len() >= MOST_PAIRS && !pairs.contains_key(&(ifindex, endpoint)) {
                continue;
            }
            let seen = pairs.entry((ifindex, endpoint)).or_default();
            seen.queries = seen.queries.saturating_add(u32::from(answered));
            if !seen.clients.contains(&client) {
                if seen.clients.len() < MOST_CLIENTS {
                    seen.clients.push(client);
                } else {
                    seen.more = true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_apart() {
        let all = Arrivals::on();
        let mut worker = ArrivalCounter::new(all.clone());
        let endpoint: SocketAddr = "169.254.0.2:53".parse().unwrap();
        for number in 0..40 {
            worker.arrived(7, endpoint, IpAddr::from([10, 0, 0, number]), number % 2 == 0);
        }
        worker.arrived(8, endpoint, IpAddr::from([10, 0, 0, 1]), true);
        assert_eq!(all.take(), [], "not before the batch has ended");
        worker.batch_ended();
        let taken = all.take();
        assert_eq!(taken.len(), 2);
        assert_eq!(
            (taken[0].ifindex, taken[0].queries, taken[0].clients.len(), taken[0].more),
            (7, 20, MOST_CLIENTS, true)
        );
        assert_eq!((taken[1].ifindex, taken[1].queries, taken[1].more), (8, 1, false));
        assert_eq!(all.take(), []);
    }
}
