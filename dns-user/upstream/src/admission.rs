//! Fair admission of queries that must wait.
//!
//! The number of places is limited, and a client may hold at most as many as are free: a single
//! client gets half of them, two get a third each, and so on (dynamic thresholds, Choudhury and
//! Hahne 1998). A flood from one client thus always leaves room for the next one, admitted queries
//! are never dropped for later ones, and an admission costs one table look-up.

use std::{
    collections::HashMap,
    hash::Hash,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
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

/// A limit on queries that wait at a time, or on other work of the clients, which `K`
/// distinguishes.
#[derive(Debug)]
pub struct Admission<K: Copy + Eq + Hash = Client> {
    /// Most queries at a time.
    limit: usize,
    held: Mutex<InFlight<K>>,
    /// Queries refused because their client held too many places.
    refused: AtomicU64,
}

#[derive(Debug)]
struct InFlight<K> {
    total: usize,
    /// Places by client; a client without places has no entry.
    by_client: HashMap<K, usize, foldhash::fast::RandomState>,
}

/// The state of an [`Admission`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct AdmissionStatus {
    /// Most queries at a time.
    pub limit: usize,
    /// Queries that wait now.
    pub waiting: usize,
    /// Number of clients with waiting queries.
    pub clients: usize,
    /// The client with the most waiting queries, and their number.
    pub heaviest: Option<(Client, usize)>,
    /// Queries refused since the start.
    pub refused: u64,
}

impl<K: Copy + Eq + Hash> Admission<K> {
    /// Creates a limit of `limit` queries, none waiting.
    pub fn new(limit: usize) -> Arc<Self> {
        let held = InFlight { total: 0, by_client: HashMap::default() };
        Arc::new(Self { limit, held: Mutex::new(held), refused: AtomicU64::new(0) })
    }

    /// Returns a place for one more piece of work of `client`; `None` if the client holds as many
    /// as are free.
    pub fn admit_as(self: &Arc<Self>, client: K) -> Option<Permit<K>> {
        let mut held = self.held.lock();
        if !held.has_room(client, self.limit) {
            drop(held);
            self.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        held.total += 1;
        *held.by_client.entry(client).or_default() += 1;
        Some(Permit { admission: Arc::clone(self), client })
    }

    /// Returns whether no query is waiting for an answer.
    pub fn is_idle(&self) -> bool {
        self.held.lock().total == 0
    }
}

impl Admission {
    /// Returns a place for a query of the client at `address`; `None` if the client holds as many
    /// as are free.
    pub fn admit(self: &Arc<Self>, address: Option<IpAddr>) -> Option<Permit> {
        self.admit_as(client_or_self(address))
    }

    /// Returns whether [`Self::admit`] would refuse a query of this client, and counts a refusal.
    pub fn refuses(&self, address: Option<IpAddr>) -> bool {
        let refuses = !self.held.lock().has_room(client_or_self(address), self.limit);
        if refuses {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        refuses
    }

    /// Returns the number of waiting queries, the limit, and the refusals so far.
    pub fn status(&self) -> AdmissionStatus {
        let held = self.held.lock();
        AdmissionStatus {
            limit: self.limit,
            waiting: held.total,
            clients: held.by_client.len(),
            heaviest: held
                .by_client
                .iter()
                .max_by_key(|(_, count)| **count)
                .map(|(&client, &count)| (client, count)),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}

impl<K: Copy + Eq + Hash> InFlight<K> {
    /// Returns whether one more query of `client` is admitted.
    fn has_room(&self, client: K, limit: usize) -> bool {
        let free = limit.saturating_sub(self.total);
        self.by_client.get(&client).copied().unwrap_or(0) < free
    }
}

/// Returns the client, or the unspecified address for queries that the server itself sends.
fn client_or_self(address: Option<IpAddr>) -> Client {
    client_of(address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)))
}

/// The place of one query, released when dropped.
#[derive(Debug)]
pub struct Permit<K: Copy + Eq + Hash = Client> {
    /// The limit that the place belongs to.
    admission: Arc<Admission<K>>,
    client: K,
}

impl<K: Copy + Eq + Hash> Drop for Permit<K> {
    fn drop(&mut self) {
        let mut held = self.admission.held.lock();
        held.total -= 1;
        if let Some(count) = held.by_client.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                held.by_client.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes as many places as `client` gets.
    fn flood(admission: &Arc<Admission>, client: u8) -> Vec<Permit> {
        std::iter::from_fn(|| admission.admit(Some([192, 0, 2, client].into()))).collect()
    }

    #[test]
    fn single_client_leaves_half() {
        let admission: Arc<Admission> = Admission::new(100);
        let first = flood(&admission, 1);
        assert_eq!(first.len(), 50);
        let second = flood(&admission, 2);
        assert_eq!(second.len(), 25);
        assert!(admission.admit(Some([192, 0, 2, 3].into())).is_some());
        assert!(admission.refuses(Some([192, 0, 2, 1].into())));
        let status = admission.status();
        assert_eq!((status.waiting, status.clients, status.refused), (75, 2, 3));
        assert_eq!(status.heaviest, Some(([192, 0, 2, 1].into(), 50)));
        drop((first, second));
        assert!(admission.is_idle() && admission.held.lock().by_client.is_empty());
    }

    #[test]
    fn shares_level_out() {
        let admission: Arc<Admission> = Admission::new(90);
        let mut first = flood(&admission, 1);
        let second = flood(&admission, 2);
        // The first client's queries end, and both keep querying: neither gets ahead.
        first.truncate(20);
        let (mut ones, mut others) = (first.len(), second.len());
        let mut all: Vec<Permit> = first.into_iter().chain(second).collect();
        while let (one, other) =
            (admission.admit(Some([192, 0, 2, 1].into())), admission.admit(Some([192, 0, 2, 2].into())))
            && (one.is_some() || other.is_some())
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
}
