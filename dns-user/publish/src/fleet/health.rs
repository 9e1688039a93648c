//! Health with a hold time, and the resulting addresses. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant, SystemTime},
};

use dns_core::{
    catalog::Snapshot,
    name::Name as FleetDomain,
    resolve::{AllRunning, Existence, Health, HealthState, Resolution},
};

use serde::{Deserialize, Serialize};

use super::FleetName;
use crate::record::{Record, RecordType, Target};

/// Time since which each instance has been unhealthy, by fleet name, because a name may select the
/// health of a single job.
#[derive(Debug, Default)]
pub struct HealthBook {
    ill: BTreeMap<FleetDomain, BTreeMap<IpAddr, Instant>>,
}

/// A [`HealthBook`] saved for the next process: milliseconds since 1970 by name and address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedHealth(BTreeMap<String, BTreeMap<IpAddr, u64>>);

/// Current record sets of a mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// One set per address family with addresses.
    pub records: Vec<Record>,
    /// Time at which the next unhealthy address reaches its hold time.
    pub next_change: Option<Instant>,
}

impl HealthBook {
    /// Records the instances of a name that are unhealthy at `now`; all others are healthy.
    pub fn observe(&mut self, name: &FleetDomain, ill: &BTreeSet<IpAddr>, now: Instant) {
        let known = self.ill.entry(name.clone()).or_default();
        known.retain(|address, _| ill.contains(address));
        for address in ill {
            known.entry(*address).or_insert(now);
        }
    }

    /// Returns the state to save for the next process.
    pub fn save(&self, now: Instant, wall: SystemTime) -> SavedHealth {
        let wall = milliseconds(wall);
        let since = |since: &Instant| {
            let elapsed = now.saturating_duration_since(*since).as_millis();
            wall.saturating_sub(u64::try_from(elapsed).unwrap_or(u64::MAX))
        };
        let names = self.ill.iter().filter(|(_, ill)| !ill.is_empty()).map(|(name, ill)| {
            (name.to_string(), ill.iter().map(|(address, begin)| (*address, since(begin))).collect())
        });
        SavedHealth(names.collect())
    }

    /// Restores a saved state. A time in the future is replaced by `now`.
    pub fn restore(saved: &SavedHealth, now: Instant, wall: SystemTime) -> Self {
        let wall = milliseconds(wall);
        let since =
            |since: u64| now.checked_sub(Duration::from_millis(wall.saturating_sub(since))).unwrap_or(now);
        let names = saved.0.iter().filter_map(|(name, ill)| {
            let ill = ill.iter().map(|(address, begin)| (*address, since(*begin))).collect();
            Some((FleetDomain::from_text(name).ok()?, ill))
        });
        Self { ill: names.collect() }
    }

    /// Removes names that are no longer published.
    pub fn keep(&mut self, names: &BTreeSet<FleetDomain>) {
        self.ill.retain(|name, _| names.contains(name));
    }
}

impl SavedHealth {
    /// Returns whether the same instances are unhealthy.
    pub fn is_like(&self, other: &Self) -> bool {
        let addresses = |saved: &Self| -> BTreeSet<(String, IpAddr)> {
            let pairs =
                saved.0.iter().flat_map(|(name, ill)| ill.keys().map(|address| (name.clone(), *address)));
            pairs.collect()
        };
        addresses(self) == addresses(other)
    }
}

fn milliseconds(wall: SystemTime) -> u64 {
    let elapsed = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// Health of a name's instances, unhealthy only after the hold time.
struct Held<'a> {
    ill: Option<&'a BTreeMap<IpAddr, Instant>>,
    hold: Duration,
    now: Instant,
}

impl Health for Held<'_> {
    fn state(&self, ip: IpAddr, _group: Option<&str>) -> HealthState {
        let since = self.ill.and_then(|ill| ill.get(&ip));
        match since {
            Some(since) if self.now.saturating_duration_since(*since) >= self.hold => HealthState::Failing,
            _ => HealthState::Running,
        }
    }
}

/// Resolves a mapping. If health would remove every address, all addresses are published.
///
/// Returns an error if the name has no addresses at all.
pub fn resolve(
    name: &FleetName,
    snapshot: &Snapshot,
    book: &HealthBook,
    now: Instant,
) -> Result<Resolved, String> {
    let FleetName { external, internal, ttl, hold } = name;
    let ill = book.ill.get(internal);
    let held = Held { ill, hold: *hold, now };
    let find = |health: &dyn Health| dns_core::resolve::resolve(snapshot, health, internal);
    let Some(mut found) = find(&held) else {
        return Err(format!(
            "{internal} is not a name of the fleet; correct it, or add the alias to the server"
        ));
    };
    match found.existence {
        Existence::Found => {}
        Existence::NoSuchName => return Err(format!("{internal} matches no instance; correct the name")),
        Existence::Malformed => {
            return Err(format!("{internal} is not a valid query; see docs/architecture.md"));
        }
    }
    if is_empty(&found) {
        // The same name was resolved above.
        found = find(&AllRunning).unwrap_or(found);
    }
    let Resolution { existence: _, v4, v6, checks: _ } = found;
    let record = |record_type, addresses: Vec<String>| {
        let targets = addresses.iter().filter_map(|address| Target::parse(record_type, address).ok());
        let record = Record { ttl: *ttl, ..Record::new(external.clone(), record_type, targets) };
        (!record.targets.is_empty()).then_some(record)
    };
    let v4 = record(RecordType::A, v4.iter().map(ToString::to_string).collect());
    let v6 = record(RecordType::AAAA, v6.iter().map(ToString::to_string).collect());
    let records: Vec<_> = v4.into_iter().chain(v6).collect();
    if records.is_empty() {
        return Err(format!(
            "{internal} has no addresses: its instances have none, or its filter excludes all"
        ));
    }
    let ends = ill.into_iter().flatten().map(|(_, since)| *since + *hold);
    Ok(Resolved { records, next_change: ends.filter(|end| *end > now).min() })
}

fn is_empty(resolution: &Resolution) -> bool {
    resolution.v4.is_empty() && resolution.v6.is_empty()
}

#[cfg(test)]
mod tests {
    use dns_core::catalog::{AliasFiles, Records};

    use super::*;
    use crate::record::Name;

    /// Two instances of group `router`, on addresses 10.0.0.1 and 10.0.0.2, and one of `db`.
    fn snapshot() -> Snapshot {
        let records = br#"{
            "record_keys": ["id", "instance_group", "network", "deployment", "ip", "domain", "group_ids", "az_id"],
            "record_infos": [
                ["r1", "router", "default", "cf", "10.0.0.1", "bosh", ["1"], "1"],
                ["r2", "router", "default", "cf", "10.0.0.2", "bosh", ["1"], "1"],
                ["d1", "db", "default", "cf", "fd00::1", "bosh", ["2"], "1"]
            ],
            "records": []
        }"#;
        Snapshot::build(Records::parse(records).unwrap().0, &AliasFiles::default()).0
    }

    fn mapping(internal: &str) -> FleetName {
        FleetName {
            external: Name::parse("x.example.org").unwrap(),
            internal: FleetDomain::from_text(internal).unwrap(),
            ttl: Some(60),
            hold: Duration::from_secs(30),
        }
    }

    fn ill(addresses: &[&str]) -> BTreeSet<IpAddr> {
        addresses.iter().map(|address| address.parse().unwrap()).collect()
    }

    fn shown(resolved: Result<Resolved, String>) -> Vec<String> {
        resolved.unwrap().records.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn address_leaves_after_hold() {
        let (snapshot, name) = (snapshot(), mapping("q-s0.q-g1.bosh"));
        let mut book = HealthBook::default();
        let begin = Instant::now();
        let both = ["x.example.org 60 A 10.0.0.1,10.0.0.2"];
        book.observe(&name.internal, &ill(&["10.0.0.1"]), begin);
        let first = resolve(&name, &snapshot, &book, begin).unwrap();
        assert_eq!(first.next_change, Some(begin + name.hold));
        assert_eq!(shown(Ok(first)), both);
        let almost = begin + Duration::from_millis(29_999);
        book.observe(&name.internal, &ill(&["10.0.0.1"]), almost);
        assert_eq!(shown(resolve(&name, &snapshot, &book, almost)), both);
        let after = begin + name.hold;
        assert_eq!(shown(resolve(&name, &snapshot, &book, after)), ["x.example.org 60 A 10.0.0.2"]);
        // Recovery takes effect at once, and a relapse must last for the hold time again.
        book.observe(&name.internal, &ill(&[]), after);
        assert_eq!(shown(resolve(&name, &snapshot, &book, after)), both);
        book.observe(&name.internal, &ill(&["10.0.0.1"]), after);
        assert_eq!(shown(resolve(&name, &snapshot, &book, after + Duration::from_secs(1))), both);
    }

    #[test]
    fn illness_outlives_a_restart() {
        let (snapshot, name) = (snapshot(), mapping("q-s0.q-g1.bosh"));
        let mut book = HealthBook::default();
        let (begin, wall) = (Instant::now(), SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000));
        book.observe(&name.internal, &ill(&["10.0.0.1"]), begin);
        let saved = book.save(begin + Duration::from_secs(20), wall);
        assert!(saved.is_like(&saved) && !saved.is_like(&SavedHealth::default()));
        let text = serde_json::to_string(&saved).unwrap();
        let saved: SavedHealth = serde_json::from_str(&text).unwrap();
        let later = Instant::now() + Duration::from_secs(3600);
        let book = HealthBook::restore(&saved, later, wall + Duration::from_secs(9));
        assert!(shown(resolve(&name, &snapshot, &book, later))[0].contains("10.0.0.1"));
        let book = HealthBook::restore(&saved, later, wall + Duration::from_secs(10));
        assert!(!shown(resolve(&name, &snapshot, &book, later))[0].contains("10.0.0.1"));
    }

    #[test]
    fn health_never_empties_a_set() {
        let snapshot = snapshot();
        let begin = Instant::now();
        for query in ["q-s0.q-g1.bosh", "q-s3.q-g1.bosh", "q-s0.router.default.cf.bosh"] {
            let name = mapping(query);
            let mut book = HealthBook::default();
            book.observe(&name.internal, &ill(&["10.0.0.1", "10.0.0.2"]), begin);
            let later = begin + Duration::from_secs(3600);
            assert_eq!(
                shown(resolve(&name, &snapshot, &book, later)),
                ["x.example.org 60 A 10.0.0.1,10.0.0.2"]
            );
        }
    }

    #[test]
    fn addresses_divide_by_family() {
        let name = mapping("q-s4.q-g2.bosh");
        let found = resolve(&name, &snapshot(), &HealthBook::default(), Instant::now());
        assert_eq!(shown(found), ["x.example.org 60 AAAA fd00::1"]);
    }

    #[test]
    fn unknown_names_are_errors() {
        for (query, reason) in [
            ("q-s0.q-g9.bosh", "matches no instance"),
            ("router.cf.internal", "not a name of the fleet"),
            ("q-zz.q-g1.bosh", "not a valid query"),
        ] {
            let error =
                resolve(&mapping(query), &snapshot(), &HealthBook::default(), Instant::now()).unwrap_err();
            assert!(error.contains(reason), "{query}: {error}");
        }
    }
}
