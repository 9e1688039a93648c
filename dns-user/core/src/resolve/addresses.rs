//! The addresses of a name for zones of other servers: what `bosh-dns-publish` asks a running server.

use std::{cell::RefCell, collections::BTreeSet, net::IpAddr};

use serde::{Deserialize, Serialize};

use super::{AllRunning, Existence, Health, HealthState, resolve};
use crate::{catalog::Snapshot, name::Name};

/// A request for the addresses of a name, which also keeps its instances checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressQuery {
    /// A name of the fleet.
    pub name: String,
    /// Addresses that count as failing while they are unhealthy; all others count as running.
    pub withdrawn: BTreeSet<IpAddr>,
}

/// The addresses of a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetAddresses {
    /// Addresses after the health filter; all of the name if it would leave none.
    pub addresses: BTreeSet<IpAddr>,
    /// Instances that are failing or unknown, whether or not they are withdrawn.
    pub unhealthy: BTreeSet<IpAddr>,
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

/// Health in which an instance fails only if it is unhealthy and withdrawn.
struct Withdrawal<'a> {
    health: &'a dyn Health,
    withdrawn: &'a BTreeSet<IpAddr>,
    unhealthy: RefCell<BTreeSet<IpAddr>>,
}

impl Health for Withdrawal<'_> {
    fn state(&self, ip: IpAddr, group: Option<&str>) -> HealthState {
        match self.health.state(ip, group) {
            // Nothing is known of an unchecked instance.
            HealthState::Running | HealthState::Unchecked => return HealthState::Running,
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
        unhealthy: RefCell::default(),
    };
    let find = |health: &dyn Health| {
        let found = resolve(snapshot, health, name).ok_or(NoAddresses::Foreign)?;
        match found.existence {
            Existence::NoSuchName => return Err(NoAddresses::NoInstance),
            Existence::Malformed => return Err(NoAddresses::Malformed),
            Existence::Found => {}
        }
        let v4 = found.v4.into_iter().map(IpAddr::V4);
        Ok(v4
            .chain(found.v6.into_iter().map(IpAddr::V6))
            .collect::<BTreeSet<_>>())
    };
    let mut addresses = find(&withdrawal)?;
    if addresses.is_empty() {
        addresses = find(&AllRunning)?;
    }
    if addresses.is_empty() {
        return Err(NoAddresses::Filtered);
    }
    Ok(FleetAddresses {
        addresses,
        unhealthy: withdrawal.unhealthy.into_inner(),
    })
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
                false => HealthState::Unchecked,
            }
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
            &Unhealthy(set(unhealthy)),
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
            };
            assert_eq!(found, expected, "{unhealthy:?} {withdrawn:?}");
        }
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
