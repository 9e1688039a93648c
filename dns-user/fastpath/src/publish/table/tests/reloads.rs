//! Reloads: a table that follows changed records equals one that begins with them, and resolves only
//! the names that the change concerns.

use std::{
    any::Any,
    collections::BTreeMap,
    net::Ipv4Addr,
    sync::atomic::{AtomicUsize, Ordering},
};

use dns_common::entry::MAX_V4;
use proptest::prelude::*;

use super::super::{
    fuzz::machine::{Failing, Machine},
    *,
};
use crate::map::layout::read_name;
use dns_core::{
    catalog::{AliasFiles, NameRules, Records, Snapshot},
    changes::Facets,
};

/// A snapshot that counts resolutions.
struct Counted {
    snapshot: Snapshot,
    resolutions: Arc<AtomicUsize>,
}

impl NameSource for Counted {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        self.snapshot.published_names()
    }

    fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution> {
        self.resolutions.fetch_add(1, Ordering::Relaxed);
        NameSource::resolve(&self.snapshot, health, name)
    }

    fn facets(&self, name: &Name) -> Facets {
        NameSource::facets(&self.snapshot, name)
    }

    fn changes_since(&self, older: &dyn NameSource) -> Option<Changes> {
        self.snapshot
            .changes_since(&(older as &dyn Any).downcast_ref::<Self>()?.snapshot)
    }
}

/// A row of records.json: id, number, instance group, network, deployment, zone, groups, address, domain.
#[derive(Clone, Debug)]
struct Row {
    id: String,
    number: u32,
    place: [&'static str; 3],
    zone: &'static str,
    groups: Vec<u32>,
    address: Ipv4Addr,
    domain: &'static str,
}

/// Aliases of the records: one for each row, and one for each zone.
const RECORD_ALIASES: &str = r#"{"_.uuid.alias": [{"group_id": "1", "root_domain": "bosh", "placeholder_type": "uuid"}],
    "_.zone.alias": [{"group_id": "2", "root_domain": "bosh", "placeholder_type": "az", "health_filter": "all"}]}"#;

const FILE_ALIASES: &[u8] =
    br#"{"one.alias": ["*.web.n1.d.bosh", "*.db.n1.d.bosh"], "_.under.alias": ["_.db.n1.d.bosh"],
    "fixed.alias": ["10.9.9.9", "q-s4.q-g3.bosh"]}"#;

/// Returns the snapshot of these rows. The columns start with the one of this number.
fn snapshot(rows: &[Row], first_column: usize) -> Snapshot {
    let mut keys = [
        "id",
        "num_id",
        "instance_group",
        "network",
        "deployment",
        "az",
        "group_ids",
        "ip",
        "domain",
    ];
    keys.rotate_left(first_column % 9);
    let rows: Vec<String> = rows
        .iter()
        .map(|row| {
            let Row {
                id,
                number,
                place: [group, network, deployment],
                zone,
                groups,
                address,
                domain,
            } = row;
            let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
            let mut values = [
                format!("{id:?}"),
                format!("\"{number}\""),
                format!("{group:?}"),
                format!("{network:?}"),
                format!("{deployment:?}"),
                format!("{zone:?}"),
                format!("{groups:?}"),
                format!("\"{address}\""),
                format!("{domain:?}"),
            ];
            values.rotate_left(first_column % 9);
            format!("[{}]", values.join(", "))
        })
        .collect();
    let records = format!(
        r#"{{"record_keys": {keys:?}, "record_infos": [{}], "aliases": {RECORD_ALIASES}}}"#,
        rows.join(", ")
    );
    let (records, warnings) = Records::parse(records.as_bytes()).unwrap();
    assert!(warnings.is_empty(), "{warnings:?}");
    let (aliases, _) = AliasFiles::parse([("aliases.json", FILE_ALIASES)]).unwrap();
    Snapshot::build(records, &aliases).0
}

impl Machine {
    /// Returns the entry of each name, without the time of its last use.
    fn entries(&self) -> BTreeMap<Name, Vec<u64>> {
        let entries = self.table.records.iter().map(|(_, record)| {
            let words = self
                .memory
                .read(record.location, record.size() / 8)
                .unwrap();
            (
                read_name(&self.memory, record.location).unwrap(),
                words[1..].to_vec(),
            )
        });
        entries.collect()
    }

    fn reload(&mut self, answers: Arc<dyn NameSource>) {
        self.table.install(answers, &mut || {});
        while self.table.is_installing() {
            self.table.go_on(Instant::now());
        }
        self.check();
    }
}

/// Returns `count` instances in groups of 20.
fn large_fleet(count: u32) -> Vec<Row> {
    let row = |number: u32| Row {
        id: format!("id-{number}"),
        number,
        place: ["web", "n1", ["d", "e", "f"][number as usize % 3]],
        zone: ["z1", "z2"][number as usize % 2],
        groups: vec![1000 + number / 20],
        address: Ipv4Addr::from_bits(0x0a00_0000 + number),
        domain: "bosh",
    };
    (0..count).map(row).collect()
}

#[test]
fn reload_resolves_only_concerned_names() {
    let resolutions = Arc::new(AtomicUsize::new(0));
    let source = |rows: &[Row], first_column| -> Arc<dyn NameSource> {
        Arc::new(Counted {
            snapshot: snapshot(rows, first_column),
            resolutions: resolutions.clone(),
        })
    };
    let mut bench = Machine::new(20_000, 64, 4);
    let mut rows = large_fleet(2_000);
    bench.reload(source(&rows, 0));
    assert!(resolutions.swap(0, Ordering::Relaxed) > 6_000);
    let written = bench.table.status().written;
    // Other columns, the same values.
    bench.reload(source(&rows, 4));
    assert_eq!(resolutions.swap(0, Ordering::Relaxed), 0);
    rows[700].address = Ipv4Addr::new(10, 99, 0, 1);
    bench.reload(source(&rows, 4));
    let resolved = resolutions.swap(0, Ordering::Relaxed);
    // A long and two short names of the instance, its group, its place.
    assert!((5..=10).contains(&resolved), "{resolved}");
    assert_eq!(bench.table.status().written, written + 5);
    assert_eq!(bench.answer("id-700.q-g1035.bosh"), Some(Ok(vec![1])));
    let gone = rows.remove(900);
    rows.insert(
        3,
        Row {
            id: "new".into(),
            number: 9_999,
            ..gone
        },
    );
    bench.reload(source(&rows, 4));
    let resolved = resolutions.swap(0, Ordering::Relaxed);
    assert!((4..=16).contains(&resolved), "{resolved}");
    assert!(
        bench.answer("new.q-g1045.bosh").is_some() && bench.answer("id-900.q-g1045.bosh").is_none()
    );
}

#[test]
fn shrunk_group_is_published_by_reload() {
    let mut bench = Machine::new(20_000, 64, 4);
    let most = MAX_V4 as u32;
    let mut rows = large_fleet(most + 20);
    rows.iter_mut().for_each(|row| row.groups = vec![7]);
    bench.reload(Arc::new(snapshot(&rows, 0)));
    assert_eq!(bench.answer("q-s0.q-g7.bosh"), None, "too many addresses");
    let left_out = rows.split_off(MAX_V4);
    bench.reload(Arc::new(snapshot(&rows, 0)));
    assert_eq!(
        bench
            .answer("q-s0.q-g7.bosh")
            .map(|answer| answer.map(|found| found.len())),
        Some(Ok(MAX_V4))
    );
    assert_eq!(bench.table.status().unfitting.total(), 0);
    rows.extend(left_out);
    bench.reload(Arc::new(snapshot(&rows, 0)));
    assert_eq!(bench.table.status().unfitting.total(), 1);
}

/// Labels and endings of the names that clients query.
const LABELS: [&str; 20] = [
    "i0", "i1", "i2", "i7", "q-s0", "q-s1", "q-s3", "q-s4", "q-m1s0", "q-i0", "q-g1", "q-g2",
    "q-g3", "web", "db", "n1", "d", "*", "nobody", "z1",
];
const ENDINGS: [&str; 10] = [
    "bosh",
    "q-g1.bosh",
    "web.n1.d.bosh",
    "*.n1.*.bosh",
    "other",
    "uuid.alias",
    "zone.alias",
    "one.alias",
    "under.alias",
    "fixed.alias",
];

/// Returns a random row.
fn random_row(random: &mut fastrand::Rng) -> Row {
    Row {
        id: format!("i{}", random.u32(..8)),
        number: random.u32(..8),
        place: [
            ["web", "db"][random.usize(..2)],
            ["n1", "n2"][random.usize(..2)],
            ["d", "e"][random.usize(..2)],
        ],
        zone: ["z1", "z2", ""][random.usize(..3)],
        groups: (0..random.u32(..3)).map(|_| random.u32(1..4)).collect(),
        address: Ipv4Addr::new(10, 0, 0, random.u8(..20)),
        domain: if random.u8(..8) == 0 { "other" } else { "bosh" },
    }
}

/// Changes a few rows, or their order.
fn edit(rows: &mut Vec<Row>, random: &mut fastrand::Rng) {
    let at = random.usize(..rows.len());
    match random.u8(..7) {
        0 => rows.insert(at, random_row(random)),
        1 if rows.len() > 4 => drop(rows.remove(at)),
        2 => random.shuffle(rows),
        3 => rows[at].groups.push(random.u32(1..4)),
        4 => rows[at].address = Ipv4Addr::new(10, 0, 0, random.u8(..20)),
        5 => {
            rows[at] = Row {
                domain: rows[at].domain,
                ..random_row(random)
            }
        }
        _ => rows[at].zone = ["z1", "z2", ""][random.usize(..3)],
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// After any number of reloads and changes of health the table equals one that begins with the
    /// latest snapshot.
    #[test]
    fn reloaded_table_equals_new_one(seed in any::<u64>()) {
        let random = &mut fastrand::Rng::with_seed(seed);
        let health = Arc::new(Failing::default());
        let rules = NameRules {
            formerr_for_malformed: random.bool(),
            nxdomain_for_empty_non_terminals: random.bool(),
        };
        let mut rows: Vec<Row> = (0..random.u32(4..30)).map(|_| random_row(random)).collect();
        let mut bench = Machine::with_health(5_000, 2_000, 1, health.clone());
        bench.reload(Arc::new(snapshot(&rows, 0).with_rules(rules)));
        for _ in 0..6 {
            for _ in 0..20 {
                let labels: Vec<&str> = (0..random.usize(..3)).map(|_| LABELS[random.usize(..LABELS.len())]).collect();
                let ending = ENDINGS[random.usize(..ENDINGS.len())];
                bench.learn(&[&labels[..], &[ending]].concat().join("."));
            }
            let instance = IpAddr::from([10, 0, 0, random.u8(..20)]);
            health.0.lock().push(instance);
            bench.table.health_changed(&[instance], &mut || {});
            for _ in 0..random.u8(1..3) {
                edit(&mut rows, random);
            }
            let newest = || Arc::new(snapshot(&rows, seed as usize).with_rules(rules));
            bench.reload(newest());
            let mut anew = Machine::with_health(5_000, 2_000, 1, health.clone());
            anew.reload(newest());
            let entries = bench.entries();
            for (name, words) in anew.entries() {
                prop_assert_eq!(entries.get(&name), Some(&words), "{} is listed", name);
            }
            entries.keys().for_each(|name| anew.table.learn(name));
            prop_assert_eq!(entries, anew.entries());
        }
    }
}
