//! Properties that hold for every current and every wanted state.

use std::collections::BTreeSet;

use dns_publish::{
    engine::{Planned, Refusal, ZonePlan},
    ownership::{self, Cipher, Mapper, Registry},
    plan::{self, Desired, Plan, PlanRules},
    record::{Labels, Name, Record, RecordType, Target},
};
use proptest::prelude::*;

use crate::model::ZoneModel;

const OWNER: &str = "me";

fn apex() -> Name {
    Name::parse("example.org").unwrap()
}

/// Names whose owner records are near each other, and one whose owner record does not fit.
fn name() -> impl Strategy<Value = Name> {
    let long = "x".repeat(63);
    prop::sample::select(vec![
        "api.example.org".to_owned(),
        "db.example.org".to_owned(),
        "*.example.org".to_owned(),
        "example.org".to_owned(),
        "deep.below.example.org".to_owned(),
        format!("{long}.example.org"),
    ])
    .prop_map(|name| Name::parse(&name).unwrap())
}

fn record() -> impl Strategy<Value = Record> {
    let addresses = prop::collection::btree_set(1_u8..6, 1..4);
    (name(), 0..3, addresses, prop::option::of(1_u32..400)).prop_map(
        |(name, kind, numbers, ttl)| {
            let first = numbers.first().copied().unwrap();
            let (record_type, targets): (_, Vec<String>) = match kind {
                0 => (
                    RecordType::A,
                    numbers
                        .iter()
                        .map(|number| format!("192.0.2.{number}"))
                        .collect(),
                ),
                1 => (
                    RecordType::AAAA,
                    numbers
                        .iter()
                        .map(|number| format!("2001:db8::{number}"))
                        .collect(),
                ),
                _ => (RecordType::CNAME, vec![format!("v{first}.example.net")]),
            };
            let targets = targets
                .iter()
                .map(|target| Target::parse(record_type, target).unwrap());
            Record {
                ttl,
                ..Record::new(name, record_type, targets)
            }
        },
    )
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Holder {
    Ours,
    Foreign,
    Nobody,
}

/// Sets that can be in a zone together, each with its holder.
fn zone() -> impl Strategy<Value = Vec<(Record, Holder)>> {
    let holder =
        prop_oneof![3 => Just(Holder::Ours), 1 => Just(Holder::Foreign), 1 => Just(Holder::Nobody)];
    prop::collection::vec((record(), holder), 0..10).prop_map(|records| {
        let mut kept: Vec<(Record, Holder)> = Vec::new();
        for (mut record, holder) in records {
            let apex_alias = record.name == apex() && record.record_type == RecordType::CNAME;
            let clash = kept.iter().any(|(other, _)| {
                other.name == record.name
                    && (other.record_type == record.record_type
                        || other.record_type == RecordType::CNAME
                        || record.record_type == RecordType::CNAME)
            });
            if !apex_alias && !clash {
                record.ttl.get_or_insert(60);
                kept.push((record, holder));
            }
        }
        kept
    })
}

fn registries() -> impl Strategy<Value = Registry> {
    let affixes = vec![
        ("", ""),
        ("own.", ""),
        ("", "-own"),
        ("%{record_type}-own.", ""),
    ];
    let encrypted = prop::option::of(Just("kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk"));
    (prop::sample::select(affixes), encrypted).prop_map(|((prefix, suffix), key)| Registry {
        mapper: Mapper::new(prefix, suffix, "").unwrap(),
        cipher: key.map(|key| Cipher::new(key).unwrap()),
    })
}

/// Builds the zone, with owner records in the current or the older form.
fn build(registry: &Registry, records: &[(Record, Holder)], old_form: bool) -> ZoneModel {
    let mut zone = ZoneModel::default();
    for (record, holder) in records {
        zone.0.insert(record.key(), record.clone());
        let owner = match holder {
            Holder::Ours => OWNER,
            Holder::Foreign => "other",
            Holder::Nobody => continue,
        };
        let is_old = old_form && record.record_type == RecordType::A && record.name != apex();
        let current = || {
            registry
                .mapper
                .owner_name(&record.name, record.record_type, &apex())
                .unwrap()
        };
        // Without an affix the older form is a TXT record of the same name.
        let old = registry
            .mapper
            .old_owner_name(&record.name)
            .filter(|_| is_old);
        let name = old
            .filter(|_| registry.mapper != Mapper::default())
            .unwrap_or_else(current);
        let target = Target::text(ownership::write_labels(&Labels::of(owner, "")).as_bytes());
        let owner_record = Record {
            ttl: Some(60),
            ..Record::new(name, RecordType::TXT, [target])
        };
        zone.0.insert(owner_record.key(), owner_record);
    }
    zone
}

/// Plans and applies once; returns the plan.
fn run(registry: &Registry, zone: &mut ZoneModel, desired: &Desired) -> Plan {
    let view = registry.read(&apex(), zone.records());
    let plan = plan::plan(&PlanRules::of(OWNER), &view.records, desired);
    for change in &plan.changes {
        let transaction = registry.transaction(&view, change).unwrap();
        zone.apply(&transaction)
            .unwrap_or_else(|step| panic!("{}: {step}", change.name));
    }
    plan
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn plan_reaches_wanted_state(
        registry in registries(),
        current in zone(),
        wanted in prop::collection::vec(record(), 0..10),
        old_form in any::<bool>(),
    ) {
        let wanted: Vec<Record> = wanted
            .into_iter()
            .filter(|record| record.name != apex() || record.record_type != RecordType::CNAME)
            .collect();
        let mut zone = build(&registry, &current, old_form);
        let before = zone.clone();
        let desired = Desired { records: wanted.clone(), ..Desired::default() };
        run(&registry, &mut zone, &desired);

        let blocked: BTreeSet<&Name> = current
            .iter()
            .filter(|(_, holder)| *holder != Holder::Ours)
            .map(|(record, _)| &record.name)
            .collect();
        for (record, holder) in &current {
            // Foreign records stay unchanged.
            if *holder != Holder::Ours {
                prop_assert_eq!(zone.0.get(&record.key()), before.0.get(&record.key()));
            }
        }
        let has_others = |name: &Name| {
            wanted.iter().any(|other| other.name == *name && other.record_type != RecordType::CNAME)
        };
        for record in wanted.iter().filter(|record| !blocked.contains(&record.name)) {
            let here = zone.0.get(&record.key());
            if record.record_type.is_address() {
                prop_assert!(here.is_some_and(|here| here.targets.is_superset(&record.targets)), "{}", record);
            } else {
                prop_assert_eq!(here.is_some(), !has_others(&record.name), "{}", record);
            }
        }
        // Every record that is ours and not wanted is gone.
        for (record, _) in current.iter().filter(|(record, _)| !blocked.contains(&record.name)) {
            if !wanted.iter().any(|wanted| wanted.name == record.name) {
                prop_assert!(!zone.0.contains_key(&record.key()));
            }
        }
        // Each remaining owner record has its record.
        let orphans = registry.read(&apex(), zone.records()).notes;
        prop_assert!(orphans.is_empty(), "{:?}", orphans);

        let after = zone.clone();
        let second = run(&registry, &mut zone, &desired);
        prop_assert!(second.is_empty(), "{:?}", second.changes);
        prop_assert_eq!(zone, after);
    }

    #[test]
    fn transfer_moves_only_owners(registry in registries(), current in zone()) {
        let mut zone = build(&registry, &current, false);
        let before = zone.clone();
        let view = registry.read(&apex(), zone.records());
        let ours = view.records.iter().filter(|record| record.labels.owner() == OWNER);
        for change in &plan::transfer(ours, "next").changes {
            zone.apply(&registry.transaction(&view, change).unwrap()).unwrap();
        }
        let moved = registry.read(&apex(), zone.records());
        for (record, holder) in &current {
            prop_assert_eq!(zone.0.get(&record.key()), before.0.get(&record.key()));
            let found = moved.records.iter().find(|found| found.key() == record.key()).unwrap();
            let expected = match holder { Holder::Ours => "next", Holder::Foreign => "other", Holder::Nobody => "" };
            prop_assert_eq!(found.labels.owner(), expected);
        }
        // Transferring back restores the zone, apart from random nonces.
        let theirs = moved.records.iter().filter(|record| record.labels.owner() == "next");
        for change in &plan::transfer(theirs, OWNER).changes {
            zone.apply(&registry.transaction(&moved, change).unwrap()).unwrap();
        }
        let back = registry.read(&apex(), zone.records());
        prop_assert_eq!(back.records, view.records);
    }

    #[test]
    fn names_survive_parsing(labels in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..20), 1..6)) {
        let text: Vec<String> = labels
            .iter()
            .map(|label| label.iter().map(|octet| format!("\\{octet:03}")).collect())
            .collect();
        let name = Name::parse(&text.join(".")).unwrap();
        prop_assert_eq!(Name::parse(name.as_str()).unwrap(), name.clone());
        let raw: Vec<Vec<u8>> = name.raw_labels().collect();
        prop_assert_eq!(raw, labels.iter().map(|label| label.to_ascii_lowercase()).collect::<Vec<_>>());
    }

    #[test]
    fn any_text_parses_without_panic(text in ".*", number in 0_u16..70) {
        let _ = Name::parse(&text);
        let _ = Target::parse(RecordType(number), &text);
        let _ = ownership::parse_labels(&text);
    }
}

#[test]
fn guard_limits_deletions() {
    let records: Vec<Record> = (0..300)
        .map(|number| {
            let name = format!("n{number}.example.org");
            let mut record = Record::parse(&name, RecordType::A, ["192.0.2.1"]).unwrap();
            record.labels = Labels::of(OWNER, "");
            record
        })
        .collect();
    let keep = |kept: usize| {
        let desired = Desired {
            records: records[..kept].to_vec(),
            ..Desired::default()
        };
        plan::plan(&PlanRules::of(OWNER), &records, &desired)
    };
    let check = |kept: usize, confirmed: Option<usize>| -> Result<(), Refusal> {
        let zone = ZonePlan {
            id: String::new(),
            plan: keep(kept),
            owned: 300,
            recent: 0,
        };
        let planned = Planned {
            zones: vec![zone],
            notes: Vec::new(),
            wanted: kept,
        };
        planned.check(&planned.zones[0], confirmed)
    };
    assert!(check(270, None).is_ok(), "30 of 300 are 10 %");
    assert!(check(269, None).is_err());
    assert!(check(269, Some(31)).is_ok());
    assert!(check(269, Some(30)).is_err());
    assert!(
        check(0, None)
            .unwrap_err()
            .to_string()
            .contains("--confirm-deletions 300")
    );
}

#[test]
fn unreadable_document_keeps_records() {
    let mut record = Record::parse("api.example.org", RecordType::A, ["192.0.2.1"]).unwrap();
    record.labels = Labels::of(OWNER, "document/broken");
    let desired = Desired {
        held: ["document/broken".to_owned()].into(),
        ..Desired::default()
    };
    let plan = plan::plan(&PlanRules::of(OWNER), &[record], &desired);
    assert!(plan.is_empty());
    assert_eq!(plan.notes.len(), 1);
}
