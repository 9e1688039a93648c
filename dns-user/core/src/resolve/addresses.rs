//! The addresses of a name for zones of other servers: what `bosh-dns-publish` asks a running server.

use std::{cell::RefCell, collections::BTreeSet, fmt, net::IpAddr};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error as _, SeqAccess, Visitor},
};

use super::{AllRunning, Existence, Health, HealthState, resolve};
use crate::{catalog::Snapshot, name::Name};

/// A request for the addresses of a name, which also keeps its instances checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressQuery {
    /// A name of the fleet.
    pub name: String,
    /// Addresses that count as failing while they are unhealthy or unchecked; all others count as running.
    pub withdrawn: BTreeSet<IpAddr>,
}

/// Maximum number of names in one request.
pub const MAX_ADDRESS_QUERIES: usize = 1_000;

/// The names of one request, at most [`MAX_ADDRESS_QUERIES`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressQueries(pub Vec<AddressQuery>);

impl<'de> Deserialize<'de> for AddressQueries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(FewQueries)
    }
}

/// Reads a list until it is too long: a body of 8 MiB has room for 200,000 names.
struct FewQueries;

impl<'de> Visitor<'de> for FewQueries {
    type Value = AddressQueries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX_ADDRESS_QUERIES} names")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<AddressQueries, A::Error> {
        let mut queries = Vec::new();
        while let Some(query) = list.next_element()? {
            if queries.len() == MAX_ADDRESS_QUERIES {
                let problem = format!("more than {MAX_ADDRESS_QUERIES} names in one request");
                return Err(A::Error::custom(problem));
            }
            queries.push(query);
        }
        Ok(AddressQueries(queries))
    }
}

/// The addresses of a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetAddresses {
    /// Addresses after the health filter; all of the name if it would leave none.
    pub addresses: BTreeSet<IpAddr>,
    /// Instances that are failing or unknown, whether or not they are withdrawn.
    pub unhealthy: BTreeSet<IpAddr>,
    /// Instances of which nothing is known yet, as after a restart of the server.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub unchecked: BTreeSet<IpAddr>,
}

/// The reason why a name has no addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the messages say it")]
pub enum NoAddresses {
    #[error("is not a name of the fleet; correct it, or add the alias to the server")]
    Foreign,
    #[error("matches no instance; correct the name")]
    NoInstance,
    #[error("is not a valid query; see docs/architecture.md")]
    Malformed,
    #[error("has no addresses: its instances have none, or its filter excludes all")]
    Filtered,
}

/// Health in which an instance fails only if it is withdrawn, and not known to be running.
struct Withdrawal<'a> {
    health: &'a dyn Health,
    withdrawn: &'a BTreeSet<IpAddr>,
    unhealthy: RefCell<BTreeSet<IpAddr>>,
    unchecked: RefCell<BTreeSet<IpAddr>>,
}

impl Health for Withdrawal<'_> {
    fn state(&self, ip: IpAddr, group: Option<&str>) -> HealthState {
        match self.health.state(ip, group) {
            HealthState::Running => return HealthState::Running,
            // No news: an instance that was withdrawn before a restart of the server stays so.
            HealthState::Unchecked => self.unchecked.borrow_mut().insert(ip),
            HealthState::Failing | HealthState::Unknown => self.unhealthy.borrow_mut().insert(ip),
        };
        if self.withdrawn.contains(&ip) {
            HealthState::Failing
        } else {
            HealthState::Running
        }
    }
}

/// Returns the addresses of a name. If health would remove every address, all are returned.
pub fn addresses(
    snapshot: &Snapshot,
    health: &dyn Health,
    name: &Name,
    withdrawn: &BTreeSet<IpAddr>,
) -> Result<FleetAddresses, NoAddresses> {
    let withdrawal = Withdrawal {
        health,
        withdrawn,
        // `Health::state` takes a shared reference, because other sources are shared by threads.
        unhealthy: RefCell::default(),
        unchecked: RefCell::default(),
    };
    let mut addresses = find(snapshot, &withdrawal, name)?;
    // A zone without the name would be an outage for clients of other servers. An address that may
    // work is better, as with smart.
    if addresses.is_empty() {
        addresses = find(snapshot, &AllRunning, name)?;
    }
    if addresses.is_empty() {
        return Err(NoAddresses::Filtered);
    }
    Ok(FleetAddresses {
        addresses,
        unhealthy: withdrawal.unhealthy.into_inner(),
        unchecked: withdrawal.unchecked.into_inner(),
    })
}

fn find(
    snapshot: &Snapshot,
    health: &dyn Health,
    name: &Name,
) -> Result<BTreeSet<IpAddr>, NoAddresses> {
    let found = resolve(snapshot, health, name).ok_or(NoAddresses::Foreign)?;
    match found.existence {
        Existence::NoSuchName => return Err(NoAddresses::NoInstance),
        Existence::Malformed => return Err(NoAddresses::Malformed),
        Existence::Found => {}
    }
    let mut addresses = BTreeSet::new();
    addresses.extend(found.v4.into_iter().map(IpAddr::V4));
    addresses.extend(found.v6.into_iter().map(IpAddr::V6));
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{AliasFiles, Records};

    /// The health of the instances in the set is failing, or unknown for the last one.
    struct Unhealthy(BTreeSet<IpAddr>);

    impl Health for Unhealthy {
        fn state(&self, ip: IpAddr, _group: Option<&str>) -> HealthState {
            match self.0.contains(&ip) {
                true if self.0.last() == Some(&ip) => HealthState::Unknown,
                true => HealthState::Failing,
                false => HealthState::Running,
            }
        }
    }

    /// Nothing is known, as after a start.
    struct Started;

    impl Health for Started {
        fn state(&self, _ip: IpAddr, _group: Option<&str>) -> HealthState {
            HealthState::Unchecked
        }
    }

    fn set(addresses: &[&str]) -> BTreeSet<IpAddr> {
        addresses
            .iter()
            .map(|address| address.parse().unwrap())
            .collect()
    }

    /// Asks for a name of two instances of group `router`, or of one of `db`.
    fn ask(
        name: &str,
        unhealthy: &[&str],
        withdrawn: &[&str],
    ) -> Result<FleetAddresses, NoAddresses> {
        ask_with(&Unhealthy(set(unhealthy)), name, withdrawn)
    }

    fn ask_with(
        health: &dyn Health,
        name: &str,
        withdrawn: &[&str],
    ) -> Result<FleetAddresses, NoAddresses> {
        let records = br#"{
            "record_keys": ["id", "instance_group", "network", "deployment", "ip", "domain", "group_ids", "az_id"],
            "record_infos": [
                ["r1", "router", "default", "cf", "10.0.0.1", "bosh", ["1"], "1"],
                ["r2", "router", "default", "cf", "10.0.0.2", "bosh", ["1"], "1"],
                ["d1", "db", "default", "cf", "fd00::1", "bosh", ["2"], "1"]
            ],
            "records": []
        }"#;
        let (snapshot, _) =
            Snapshot::build(Records::parse(records).unwrap().0, &AliasFiles::default());
        addresses(
            &snapshot,
            health,
            &Name::from_text(name).unwrap(),
            &set(withdrawn),
        )
    }

    #[test]
    fn only_withdrawn_unhealthy_addresses_leave() {
        let both = ["10.0.0.1", "10.0.0.2"];
        for (unhealthy, withdrawn, expected) in [
            (&[][..], &[][..], &both[..]),
            (&["10.0.0.1"], &[], &both),
            (&[], &["10.0.0.1"], &both),
            (&["10.0.0.1"], &["10.0.0.1"], &["10.0.0.2"]),
            (&both, &["10.0.0.2"], &["10.0.0.1"]),
        ] {
            let found = ask("q-s0.q-g1.bosh", unhealthy, withdrawn).unwrap();
            let expected = FleetAddresses {
                addresses: set(expected),
                unhealthy: set(unhealthy),
                unchecked: BTreeSet::new(),
            };
            assert_eq!(found, expected, "{unhealthy:?} {withdrawn:?}");
        }
    }

    #[test]
    fn unchecked_addresses_stay_withdrawn() {
        let one = ["10.0.0.1"];
        let both = ["10.0.0.1", "10.0.0.2"];
        let found = ask_with(&Started, "q-s0.q-g1.bosh", &one).unwrap();
        let expected = FleetAddresses {
            addresses: set(&["10.0.0.2"]),
            unhealthy: BTreeSet::new(),
            unchecked: set(&both),
        };
        assert_eq!(found, expected);
        let all = ask_with(&Started, "q-s0.q-g1.bosh", &both).unwrap();
        assert_eq!(all.addresses, set(&both), "health empties no set");
    }

    #[test]
    fn health_never_empties_a_set() {
        let both = ["10.0.0.1", "10.0.0.2"];
        for name in [
            "q-s0.q-g1.bosh",
            "q-s3.q-g1.bosh",
            "q-s0.router.default.cf.bosh",
        ] {
            assert_eq!(
                ask(name, &both, &both).unwrap().addresses,
                set(&both),
                "{name}"
            );
        }
    }

    #[test]
    fn both_families_are_found() {
        let every = ["10.0.0.1", "10.0.0.2", "fd00::1"];
        assert_eq!(
            ask("q-s4.q-a1.bosh", &[], &[]).unwrap().addresses,
            set(&every)
        );
    }

    #[test]
    fn names_without_addresses_have_a_reason() {
        for (name, reason) in [
            ("q-s0.q-g9.bosh", NoAddresses::NoInstance),
            ("router.cf.internal", NoAddresses::Foreign),
            ("q-zz.q-g1.bosh", NoAddresses::Malformed),
            ("q-s1.q-g1.bosh", NoAddresses::Filtered),
        ] {
            assert_eq!(ask(name, &[], &[]), Err(reason), "{name}");
        }
    }
}
