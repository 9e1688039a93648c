//! The part of Consul's names that interfaces may answer, and the services whose names they answer.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use dns_common::entry::{AnswerPolicy, MAX_V4, MAX_V6};

use dns_consul::{Asker, Publishable, Zone, catalog::Place};
use dns_core::{
    name::Name,
    wire::{Query, TYPE_A, TYPE_AAAA, Transport},
};
use parking_lot::Mutex;

/// Consul's names at one moment.
#[derive(Clone)]
pub(crate) struct Published {
    pub(super) zone: Arc<Zone>,
    /// Whether replies set RA, because there are recursors.
    pub(super) recursion: bool,
    /// Seed for the choice of addresses if there are more than an entry holds.
    pub(super) seed: u64,
}

impl Published {
    /// Returns whether both have the same names with the same answers.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let Self { zone, recursion, seed } = self;
        Arc::ptr_eq(zone, &other.zone) && *recursion == other.recursion && *seed == other.seed
    }

    /// Returns the addresses of a name and the policy for sending them; `None` if interfaces must
    /// not answer it.
    pub(crate) fn look_up(&self, name: &Name) -> Option<(Vec<Ipv4Addr>, Vec<Ipv6Addr>, AnswerPolicy)> {
        let Publishable { mut v4, mut v6, ttl, most, plain_v4, plain_v6, truncates } =
            self.zone.publishable(name)?;
        let policy = AnswerPolicy::new(ttl, most, [plain_v4, plain_v6], truncates, self.recursion);
        self.sample(&mut v4, MAX_V4);
        self.sample(&mut v6, MAX_V6);
        Some((v4, v6, policy))
    }

    /// Returns the reply to a query unless interfaces answer it from its addresses, or it depends on more
    /// than the query: on the client, on host names outside the catalog, or on data not read yet.
    pub(crate) fn reply(&self, query: &Query<'_>, serial: u32, seed: u64) -> Option<Vec<u8>> {
        let Self { zone, recursion, seed: _ } = self;
        if zone.config.dns.disable_compression || zone.lacks(query).is_some() {
            return None;
        }
        let client = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let asker = Asker { transport: Transport::Udp, client, recursion: *recursion, serial };
        let answer = zone.answer(query, &asker, &mut fastrand::Rng::with_seed(seed))?;
        let is_address_list =
            matches!(query.question.qtype, TYPE_A | TYPE_AAAA) && answer.is_only_addresses();
        let waits_for_hosts = *recursion && !answer.hosts().is_empty();
        if is_address_list || !answer.is_for_everyone() || waits_for_hosts {
            return None;
        }
        Some(answer.finish(query, Transport::Udp, &zone.config.dns, &Default::default()))
    }

    /// Selects as many addresses as an entry holds. Each server makes a different choice, but
    /// always the same one for the same list, so that an entry changes only with the list.
    fn sample<T: Ord>(&self, addresses: &mut Vec<T>, most: usize) {
        if addresses.len() > most {
            addresses.sort_unstable();
            fastrand::Rng::with_seed(self.seed).shuffle(addresses);
            addresses.truncate(most);
        }
    }
}

/// Maximum number of names kept, the same as the default limit of published names.
const MOST: usize = 65_536;

/// A name answered within this time is in use.
const IN_USE: Duration = Duration::from_secs(60);

/// Place and service in lower case, by name and by type; type 0 stands for the name's addresses. Userspace does not see these queries, but the live source must
/// know which services are in use.
#[derive(Debug, Default)]
pub(super) struct Used(Mutex<HashMap<(Name, u16), (Place, String)>>);

/// The type under which [`Used`] keeps the addresses of a name.
pub(super) const ADDRESSES: u16 = 0;

impl Used {
    /// Records the service of a name that is passed to the publisher, with the type of the question or
    /// [`ADDRESSES`].
    pub(super) fn note(&self, name: &Name, qtype: u16, service: (Place, String)) {
        let mut names = self.0.lock();
        let key = (name.clone(), qtype);
        if names.len() < MOST || names.contains_key(&key) {
            names.insert(key, service);
        }
    }

    /// Returns the services of names that an interface answered recently. `age` returns the time
    /// since the last answer for a name and type; names without one are dropped when room is scarce.
    pub(super) fn recent(&self, age: impl Fn(&Name, u16) -> Option<Duration>) -> Vec<(Place, String)> {
        let mut names = self.0.lock();
        let crowded = names.len() >= MOST / 2;
        let mut services = Vec::new();
        names.retain(|(name, qtype), service| match age(name, *qtype) {
            Some(age) if age < IN_USE => {
                services.push(service.clone());
                true
            }
            _ => !crowded,
        });
        services.sort_unstable();
        services.dedup();
        services
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recently_answered_services_are_reported() {
        let used = Used::default();
        let key = |service: &str| (Place::Datacenter("dc1".into()), service.to_owned());
        for name in ["web.service.consul", "v1.web.service.consul", "db.service.consul", "old.service.consul"]
        {
            let name = Name::from_text(name).expect("a name");
            let service = if name.to_string().contains("web") { "web" } else { "other" };
            used.note(&name, ADDRESSES, key(service));
        }
        let age = |name: &Name, _qtype: u16| match name.to_string() {
            text if text.contains("web") => Some(Duration::from_secs(5)),
            text if text.starts_with("db") => Some(Duration::from_secs(61)),
            _ => None,
        };
        assert_eq!(used.recent(age), [key("web")]);
        assert_eq!(used.0.lock().len(), 4);
    }
}
