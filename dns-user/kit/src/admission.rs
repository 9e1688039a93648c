//! Fair admission of queries that must wait.
//!
//! The number of slots is limited, and a client may hold at most as many as are free: a single
//! client gets half of them, two get a third each, and so on (dynamic thresholds, Choudhury and
//! Hahne 1998). A flood from one client therefore always leaves room for the next, admitted queries
//! are never dropped in favour of later ones, and an admission costs one table look-up.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// The unit of fairness: an IPv4 address, or the /64 network of an IPv6 address, because a single
/// host can use any address of its /64 (RFC 4291, section 2.5.4).
pub type Client = IpAddr;

/// Returns the client that an address belongs to.
pub fn client_of(address: IpAddr) -> Client {
    match address.to_canonical() {
        // All link-local neighbours share the network fe80::/64.
        IpAddr::V6(address) if !address.is_unicast_link_local() => {
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !0 << 64))
        }
        address => address,
    }
}

/// Maximum number of clients that are remembered as limited.
const MAX_LIMITED: usize = 16;
/// Time for which a client counts as limited after a refusal.
const LIMITED_FOR: Duration = Duration::from_secs(60);

/// Limit on concurrently waiting queries, or on other work of clients.
#[derive(Debug)]
pub struct Admission {
    /// Maximum number of waiting queries.
    limit: usize,
    held: Mutex<InFlight>,
    /// Number of waiting queries, readable without the lock, with which it is written.
    total: AtomicUsize,
    /// Number of queries refused because their client held too many slots.
    refused: AtomicU64,
}

#[derive(Debug)]
struct InFlight {
    /// Slots by client; a client without slots has no entry.
    by_client: HashMap<Client, usize, foldhash::fast::RandomState>,
    /// Clients refused most recently, in no particular order.
    limited: Vec<Refusals>,
}

#[derive(Debug)]
struct Refusals {
    client: Client,
    count: u64,
    last: Instant,
}

/// State of an [`Admission`].
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct AdmissionStatus {
    /// Maximum number of waiting queries.
    pub limit: usize,
    /// Number of currently waiting queries.
    pub waiting: usize,
    /// Number of clients with waiting queries.
    #[serde(rename = "client_count")]
    pub clients: usize,
    /// Client with the most waiting queries, and their number.
    pub heaviest: Option<(Client, usize)>,
    /// Number of queries refused since the start.
    pub refused: u64,
    /// Clients refused within the last minute, most refusals first.
    pub limited: Vec<LimitedClient>,
}

/// A client with more queries than its share.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LimitedClient {
    /// An address, or the first address of an IPv6 /64 network.
    pub client: Client,
    /// Number of its currently waiting queries.
    pub waiting: usize,
    /// Number of its refused queries, counted from the first one after a minute without any.
    pub refused: u64,
    /// Seconds since the last refusal.
    pub seconds_ago: f64,
}

impl Admission {
    /// Creates a limit of `limit` waiting queries.
    pub fn new(limit: usize) -> Arc<Self> {
        let held = InFlight {
            by_client: HashMap::default(),
            limited: Vec::new(),
        };
        let held = Mutex::new(held);
        let total = AtomicUsize::new(0);
        Arc::new(Self {
            limit,
            held,
            total,
            refused: AtomicU64::new(0),
        })
    }

    /// Returns a slot for a query of the client at `address`; `None` if the client holds as many as are free.
    pub fn admit(self: &Arc<Self>, address: Option<IpAddr>) -> Option<Permit> {
        let client = client_or_self(address);
        let mut held = self.held.lock();
        let free = self.free();
        match held.by_client.entry(client) {
            Entry::Occupied(mut count) if *count.get() < free => *count.get_mut() += 1,
            Entry::Vacant(place) if free > 0 => _ = place.insert(1),
            _ => {
                self.refuse(&mut held, client);
                return None;
            }
        }
        self.total.fetch_add(1, Ordering::Relaxed);
        Some(Permit {
            admission: Arc::clone(self),
            client,
        })
    }

    fn free(&self) -> usize {
        self.limit
            .saturating_sub(self.total.load(Ordering::Relaxed))
    }

    fn refuse(&self, held: &mut InFlight, client: Client) {
        held.refused(client);
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of refusals since the start.
    pub fn refusals(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns whether [`Self::admit`] would refuse a query from this client; counts a refusal if so.
    pub fn refuses(&self, address: Option<IpAddr>) -> bool {
        let free = self.free();
        // The usual case, decided without the lock.
        if free > self.limit / 2 {
            // No client can hold that many.
            return false;
        }
        let client = client_or_self(address);
        let mut held = self.held.lock();
        let refuses = held.by_client.get(&client).copied().unwrap_or(0) >= free;
        if refuses {
            self.refuse(&mut held, client);
        }
        refuses
    }

    /// Returns the number of waiting queries, the limit, and the refusals so far.
    pub fn status(&self) -> AdmissionStatus {
        let held = self.held.lock();
        let recent = held
            .limited
            .iter()
            .filter(|refusals| refusals.last.elapsed() < LIMITED_FOR);
        let mut limited: Vec<LimitedClient> = recent
            .map(
                |&Refusals {
                     client,
                     count,
                     last,
                 }| LimitedClient {
                    client,
                    waiting: held.by_client.get(&client).copied().unwrap_or(0),
                    refused: count,
                    seconds_ago: last.elapsed().as_secs_f64(),
                },
            )
            .collect();
        limited.sort_by_key(|client| std::cmp::Reverse(client.refused));
        AdmissionStatus {
            limit: self.limit,
            waiting: self.total.load(Ordering::Relaxed),
            clients: held.by_client.len(),
            heaviest: held
                .by_client
                .iter()
                .max_by_key(|(_, count)| **count)
                .map(|(&client, &count)| (client, count)),
            refused: self.refusals(),
            limited,
        }
    }
}

impl InFlight {
    /// Records a refusal, in place of the client whose last refusal is the oldest.
    fn refused(&mut self, client: Client) {
        let now = Instant::now();
        let known = self
            .limited
            .iter()
            .position(|refusals| refusals.client == client);
        let position = match known {
            Some(position) => position,
            None if self.limited.len() < MAX_LIMITED => {
                self.limited.push(Refusals {
                    client,
                    count: 0,
                    last: now,
                });
                self.limited.len() - 1
            }
            // The list is full, so one of them is the oldest.
            None => (0..MAX_LIMITED)
                .min_by_key(|&at| self.limited[at].last)
                .unwrap_or(0),
        };
        let before = &mut self.limited[position];
        let continues = before.client == client && now.duration_since(before.last) < LIMITED_FOR;
        *before = Refusals {
            client,
            count: if continues { before.count + 1 } else { 1 },
            last: now,
        };
        // In a flood, the next refusal is probably for the same client.
        self.limited.swap(0, position);
    }
}

/// Returns the client, or the unspecified address for queries that the server itself sends.
fn client_or_self(address: Option<IpAddr>) -> Client {
    client_of(address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)))
}

/// The slot of one query, released when dropped.
#[derive(Debug)]
pub struct Permit {
    /// The limit that the slot belongs to.
    admission: Arc<Admission>,
    client: Client,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut held = self.admission.held.lock();
        self.admission.total.fetch_sub(1, Ordering::Relaxed);
        if let Entry::Occupied(mut count) = held.by_client.entry(self.client) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes as many slots as `client` gets.
    fn flood(admission: &Arc<Admission>, client: u8) -> Vec<Permit> {
        std::iter::from_fn(|| admission.admit(Some([192, 0, 2, client].into()))).collect()
    }

    #[test]
    fn single_client_leaves_half() {
        let admission = Admission::new(100);
        let first = flood(&admission, 1);
        assert_eq!(first.len(), 50);
        let second = flood(&admission, 2);
        assert_eq!(second.len(), 25);
        assert!(admission.admit(Some([192, 0, 2, 3].into())).is_some());
        assert!(admission.refuses(Some([192, 0, 2, 1].into())));
        let status = admission.status();
        assert_eq!((status.waiting, status.clients, status.refused), (75, 2, 3));
        assert_eq!(status.heaviest, Some(([192, 0, 2, 1].into(), 50)));
        let limited: Vec<_> = status
            .limited
            .iter()
            .map(|one| (one.client, one.waiting, one.refused))
            .collect();
        assert_eq!(
            limited,
            [
                ([192, 0, 2, 1].into(), 50, 2),
                ([192, 0, 2, 2].into(), 25, 1)
            ]
        );
        drop((first, second));
        assert!(admission.status().waiting == 0 && admission.held.lock().by_client.is_empty());
    }

    #[test]
    fn limited_clients_are_bounded() {
        let admission = Admission::new(0);
        let refuse = |last: u8| assert!(admission.refuses(Some([192, 0, 2, last].into())));
        for last in 0..200 {
            refuse(last);
            refuse(255);
        }
        let limited = admission.status().limited;
        assert_eq!(limited.len(), MAX_LIMITED);
        assert_eq!(
            (limited[0].client, limited[0].refused),
            ([192, 0, 2, 255].into(), 200)
        );
    }

    #[test]
    fn shares_level_out() {
        let admission = Admission::new(90);
        let mut first = flood(&admission, 1);
        let second = flood(&admission, 2);
        // The first client's queries end, and both keep querying: neither gets ahead.
        first.truncate(20);
        let mut ones = first.len();
        let mut others = second.len();
        let mut all: Vec<Permit> = first.into_iter().chain(second).collect();
        while let (one, other) = (
            admission.admit(Some([192, 0, 2, 1].into())),
            admission.admit(Some([192, 0, 2, 2].into())),
        ) && (one.is_some() || other.is_some())
        {
            ones += usize::from(one.is_some());
            others += usize::from(other.is_some());
            all.extend(one.into_iter().chain(other));
        }
        assert!(ones.abs_diff(others) <= 2, "{ones} and {others}");
    }

    #[test]
    fn ipv6_network_counts_as_client() {
        let of = |text: &str| client_of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_ne!(of("fe80::1"), of("fe80::2"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
    }

    #[test]
    fn half_of_the_slots_refuse_nobody() {
        let admission = Admission::new(8);
        let addresses = [1, 2, 3].map(|last| Some(IpAddr::from([192, 0, 2, last])));
        let mut permits: Vec<Permit> = (0..3)
            .map(|_| admission.admit(addresses[0]).unwrap())
            .collect();
        assert!(!admission.refuses(addresses[0]) && admission.refusals() == 0);
        // Four are free: who holds four gets no more.
        permits.push(admission.admit(addresses[0]).unwrap());
        assert!(admission.refuses(addresses[0]) && !admission.refuses(addresses[1]));
        permits.push(admission.admit(addresses[1]).unwrap());
        assert!(admission.admit(addresses[0]).is_none());
        assert_eq!(admission.refusals(), 2);
        permits.truncate(3);
        assert!(!admission.refuses(addresses[0]));
        let limited = admission.status().limited;
        assert_eq!(
            (limited.len(), limited[0].client, limited[0].refused),
            (1, [192, 0, 2, 1].into(), 2)
        );
        assert!(limited[0].seconds_ago < 60.0 && limited[0].waiting == 3);
        // A client without an address is one as well.
        assert!(admission.admit(None).is_some());
    }

    #[test]
    fn admission_requires_slots() {
        let admission = Admission::new(0);
        assert!(admission.admit(None).is_none());
        assert!(admission.admit(Some([192, 0, 2, 1].into())).is_none());
        let status = admission.status();
        assert_eq!((status.waiting, status.clients, status.refused), (0, 0, 2));
    }

    /// Returns the limited clients by the last byte of their addresses, with their refusals.
    fn limited(admission: &Admission) -> Vec<(IpAddr, u64)> {
        let mut limited: Vec<_> = admission
            .status()
            .limited
            .iter()
            .map(|one| (one.client, one.refused))
            .collect();
        limited.sort_unstable();
        limited
    }

    #[test]
    fn refusals_are_forgotten_after_a_minute() {
        let admission = Admission::new(0);
        let [one, other] = [1, 2].map(|last| IpAddr::from([192, 0, 2, last]));
        for address in [one, one, other] {
            assert!(admission.refuses(Some(address)));
        }
        assert_eq!(limited(&admission), [(one, 2), (other, 1)]);
        for refusals in &mut admission.held.lock().limited {
            if refusals.client == one {
                refusals.last -= LIMITED_FOR;
            }
        }
        assert_eq!(limited(&admission), [(other, 1)]);
        // A forgotten client is counted from one.
        assert!(admission.refuses(Some(one)));
        assert_eq!(limited(&admission), [(one, 1), (other, 1)]);
        assert_eq!(admission.refusals(), 4);
    }

    #[test]
    fn limits_begin_with_one_refusal() {
        let admission = Admission::new(0);
        let address = |last| IpAddr::from([192, 0, 2, last]);
        for last in 0..16 {
            for _ in 0..2 {
                assert!(admission.refuses(Some(address(last))));
            }
        }
        for (seconds, refusals) in (1..).zip(&mut admission.held.lock().limited) {
            refusals.last -= Duration::from_secs(seconds);
        }
        let oldest = admission.held.lock().limited[15].client;
        assert!(admission.refuses(Some(address(99))));
        let mut expected: Vec<_> = (0..16).map(|last| (address(last), 2)).collect();
        expected.retain(|(client, _)| *client != oldest);
        expected.push((address(99), 1));
        assert_eq!(limited(&admission), expected);
    }

    #[test]
    fn usual_case_takes_no_lock() {
        let admission = Admission::new(9);
        let _locked = admission.held.lock();
        // It would wait for itself.
        assert!(!admission.refuses(Some([192, 0, 2, 1].into())));
    }
}
