//! Records on which interfaces queries arrive. The fast path serves an endpoint on an interface
//! only after the kernel has delivered queries for that endpoint from that interface.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use dns_fastpath::{Arrival, EVIDENCE, MOST_CLIENTS};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Maximum number of pairs of interface and endpoint per report. Further pairs appear in the next
/// report.
const MOST_PAIRS: usize = 2048;

/// Arrivals since the last report, by interface and endpoint. Each UDP worker has separate counts,
/// so that no two CPUs write the same lock. Off by default: without a fast path nothing is counted.
#[derive(Clone, Default)]
pub struct Arrivals(Option<Arc<Shared>>);

#[derive(Default)]
struct Shared {
    workers: Mutex<Vec<WorkerPairs>>,
    /// Whether [`Arrivals::evidence`] waits. Workers read it, and write it once.
    is_awaited: AtomicBool,
    evidence: Notify,
}

/// The counts of one worker.
type WorkerPairs = Arc<OwnLines<Mutex<Pairs>>>;

/// A value in cache lines that hold nothing else, because one worker writes it for each batch.
#[derive(Default)]
#[repr(align(128))]
struct OwnLines<T>(T);

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

impl Seen {
    fn add(&mut self, other: Self) {
        let Self { queries, clients, more } = other;
        self.queries = self.queries.saturating_add(queries);
        self.more |= more;
        clients.into_iter().for_each(|client| self.add_client(client));
    }

    fn add_client(&mut self, client: IpAddr) {
        if self.clients.contains(&client) {
            return;
        }
        if self.clients.len() < MOST_CLIENTS {
            self.clients.push(client);
        } else {
            self.more = true;
        }
    }
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
        let Some(shared) = &self.0 else { return Vec::new() };
        let mut pairs = Pairs::new();
        shared.workers.lock().retain(|worker| {
            for (pair, seen) in std::mem::take(&mut *worker.0.lock()) {
                pairs.entry(pair).or_default().add(seen);
            }
            // The counts of a worker that has ended have just been taken.
            Arc::strong_count(worker) > 1
        });
        let arrival = |((ifindex, endpoint), Seen { queries, clients, more })| Arrival {
            ifindex,
            endpoint,
            queries,
            clients,
            more,
        };
        pairs.into_iter().map(arrival).collect()
    }

    /// Waits until a worker has answered as many queries at one endpoint through one interface, since the last
    /// report, as open its admission. Cancel-safe.
    pub async fn evidence(&self) {
        let Some(shared) = &self.0 else { return std::future::pending().await };
        shared.is_awaited.store(true, Ordering::Relaxed);
        shared.evidence.notified().await;
    }
}

impl fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_on() { "on" } else { "off" })
    }
}

/// Counts the datagrams of one worker and publishes them per batch.
pub(super) struct ArrivalCounter {
    /// This worker's counts, and the counts of all; `None` if nothing is counted.
    pairs: Option<(WorkerPairs, Arc<Shared>)>,
    /// The datagrams of the current batch, as runs from one client to one pair.
    batch: Vec<Run>,
}

/// Consecutive datagrams from one client to one endpoint through one interface.
struct Run {
    pair: (u32, SocketAddr),
    client: IpAddr,
    /// Those answered immediately.
    answered: u32,
}

impl ArrivalCounter {
    pub(super) fn new(all: &Arrivals) -> Self {
        let pairs = all.0.as_ref().map(|shared| {
            let pairs = WorkerPairs::default();
            shared.workers.lock().push(Arc::clone(&pairs));
            (pairs, Arc::clone(shared))
        });
        Self { pairs, batch: Vec::new() }
    }

    pub(super) fn arrived(&mut self, ifindex: u32, endpoint: SocketAddr, client: IpAddr, answered: bool) {
        if self.pairs.is_none() {
            return;
        }
        let (pair, answered) = ((ifindex, endpoint), u32::from(answered));
        match self.batch.last_mut() {
            Some(run) if run.pair == pair && run.client == client => run.answered += answered,
            _ => self.batch.push(Run { pair, client, answered }),
        }
    }

    /// Adds the batch to the counts.
    pub(super) fn batch_ended(&mut self) {
        let Some((pairs, shared)) = &self.pairs else { return };
        if self.batch.is_empty() {
            return;
        }
        let is_awaited = shared.is_awaited.load(Ordering::Relaxed);
        let mut pairs = pairs.0.lock();
        for runs in self.batch.chunk_by(|one, next| one.pair == next.pair) {
            let Some(&Run { pair, .. }) = runs.first() else { continue };
            if pairs.len() >= MOST_PAIRS && !pairs.contains_key(&pair) {
                continue;
            }
            let seen = pairs.entry(pair).or_default();
            for &Run { pair: _, client, answered } in runs {
                seen.queries = seen.queries.saturating_add(answered);
                seen.add_client(client);
            }
            if is_awaited && seen.queries >= EVIDENCE && shared.is_awaited.swap(false, Ordering::Relaxed) {
                shared.evidence.notify_one();
            }
        }
        self.batch.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_apart() {
        let all = Arrivals::on();
        let mut worker = ArrivalCounter::new(&all);
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

    #[test]
    fn workers_share_no_counts() {
        let all = Arrivals::on();
        let mut workers = [ArrivalCounter::new(&all), ArrivalCounter::new(&all)];
        let endpoint: SocketAddr = "169.254.0.2:53".parse().unwrap();
        // The lock of the first worker is taken, which must not keep the second one waiting.
        let first = workers[0].pairs.clone().unwrap().0;
        let held = first.0.lock();
        workers[1].arrived(7, endpoint, IpAddr::from([10, 0, 0, 1]), true);
        workers[1].batch_ended();
        drop(held);
        workers[0].arrived(7, endpoint, IpAddr::from([10, 0, 0, 2]), true);
        workers[0].batch_ended();
        drop((first, workers));
        let taken = all.take();
        assert_eq!((taken.len(), taken[0].queries, taken[0].clients.len()), (1, 2, 2));
        assert_eq!(all.0.unwrap().workers.lock().len(), 0, "workers that have ended are forgotten");
    }

    #[test]
    fn fifth_query_is_evidence() {
        use futures_util::FutureExt as _;
        let all = Arrivals::on();
        let mut worker = ArrivalCounter::new(&all);
        let endpoint: SocketAddr = "169.254.0.2:53".parse().unwrap();
        let mut ask = |number: u32| {
            for number in 0..number {
                worker.arrived(7, endpoint, IpAddr::from([10, 0, 0, number as u8]), true);
            }
            worker.batch_ended();
        };
        let is_evident = || all.evidence().now_or_never().is_some();
        assert!(!is_evident());
        ask(EVIDENCE - 1);
        assert!(!is_evident());
        ask(1);
        assert!(is_evident());
        assert!(!is_evident(), "announced once");
        // The counts go on until they are taken.
        ask(1);
        assert!(is_evident());
        assert_eq!(all.take()[0].queries, EVIDENCE + 1);
        assert!(!is_evident());
        ask(1);
        assert!(!is_evident());
    }
}
