//! Exact properties of plans and transactions that servers would otherwise have to show.

use dns_publish::{
    ownership::{self, Registry},
    plan::{self, Action, Desired, Plan, PlanRules},
    provider::Step,
    record::{Labels, Name, Record, RecordType, Target},
};

const OWNER: &str = "me";

fn owned(name: &str, record_type: RecordType, targets: &[&str]) -> Record {
    let mut record = Record::parse(name, record_type, targets.iter().copied()).unwrap();
    record.ttl = Some(60);
    record.labels = Labels::of(OWNER, "");
    record
}

fn plan_of(current: &[Record], records: &[Record]) -> Plan {
    let desired = Desired {
        records: records.to_vec(),
        ..Desired::default()
    };
    plan::plan(&PlanRules::of(OWNER), current, &desired)
}

/// A refused plan still makes every change that loses no name's records.
#[test]
fn refused_plan_deletes_nothing() {
    let current = [
        owned("lost.example.org", RecordType::A, &["192.0.2.1"]),
        owned("moved.example.org", RecordType::A, &["192.0.2.2"]),
        owned("half.example.org", RecordType::A, &["192.0.2.3"]),
        owned("half.example.org", RecordType::AAAA, &["2001:db8::3"]),
        owned("changed.example.org", RecordType::A, &["192.0.2.4"]),
    ];
    let wanted = [
        owned("moved.example.org", RecordType::CNAME, &["a.example.net"]),
        owned("half.example.org", RecordType::A, &["192.0.2.30"]),
        owned("changed.example.org", RecordType::A, &["192.0.2.40"]),
        owned("new.example.org", RecordType::A, &["192.0.2.5"]),
    ];
    let plan = plan_of(&current, &wanted);
    assert_eq!(plan.deletions(), 2, "lost, and the IPv6 address of half");
    let kept = plan.without_deletions();
    assert_eq!((kept.deletions(), plan.deletions()), (0, 2));
    let of_name = |plan: &Plan, name: &str| -> Vec<String> {
        let actions = plan.actions().filter(|action| {
            let (Action::Create(record)
            | Action::Delete(record)
            | Action::Release(record)
            | Action::DropOrphan(record)
            | Action::Update { after: record, .. }) = action;
            record.name == Name::parse(name).unwrap()
        });
        actions.map(ToString::to_string).collect()
    };
    assert_eq!(of_name(&plan, "lost.example.org").len(), 1);
    assert_eq!(of_name(&kept, "lost.example.org"), [] as [&str; 0]);
    // A name that changes its type is no deletion, and can only change whole.
    for name in [
        "moved.example.org",
        "changed.example.org",
        "new.example.org",
    ] {
        assert_eq!(of_name(&kept, name), of_name(&plan, name), "{name}");
        assert!(!of_name(&kept, name).is_empty(), "{name}");
    }
    assert_eq!(of_name(&plan, "moved.example.org").len(), 2);
    let half = of_name(&kept, "half.example.org");
    assert_eq!(half.len(), 1, "{half:?}");
    assert!(half[0].starts_with('~'), "{half:?}");
    assert!(kept.changes.iter().all(|change| !change.actions.is_empty()));
}

/// Several documents may want addresses of one name: the set has the smallest TTL, of those that have one.
#[test]
fn merged_addresses_have_smallest_ttl() {
    let candidate = |resource: &str, target: &str, ttl: Option<u32>| {
        let mut record = owned("api.example.org", RecordType::A, &[target]);
        record.ttl = ttl;
        record.labels = Labels::of(OWNER, resource);
        record
    };
    for (ttls, expected) in [
        ([Some(300), Some(20), Some(60)], Some(20)),
        ([Some(20), Some(300), Some(60)], Some(20)),
        ([Some(300), Some(60), Some(20)], Some(20)),
        ([None, Some(60), Some(300)], Some(60)),
        // Zero means none, as in external-dns.
        ([Some(0), Some(60), Some(300)], Some(60)),
        ([None, None, Some(0)], None),
    ] {
        let wanted: Vec<Record> = ttls
            .into_iter()
            .enumerate()
            .map(|(number, ttl)| {
                candidate(
                    &format!("document/{number}"),
                    &format!("192.0.2.{number}"),
                    ttl,
                )
            })
            .collect();
        let plan = plan_of(&[], &wanted);
        let [Action::Create(created)] = &plan.actions().collect::<Vec<_>>()[..] else {
            panic!("{plan:?}")
        };
        assert_eq!(created.targets.len(), 3);
        assert_eq!(created.ttl.filter(|&ttl| ttl > 0), expected, "{ttls:?}");
    }
}

/// Some providers apply steps in order: a CNAME must be gone before other records come, and nothing is lost if
/// a requirement fails.
#[test]
fn steps_require_then_delete_then_replace_then_create() {
    let apex = Name::parse("example.org").unwrap();
    let registry = Registry::default();
    let owner_text = Target::text(ownership::write_labels(&Labels::of(OWNER, "")).as_bytes());
    let mut listed = Vec::new();
    for record in [
        owned("api.example.org", RecordType::A, &["192.0.2.1"]),
        owned("api.example.org", RecordType::AAAA, &["2001:db8::1"]),
    ] {
        let owner_name = registry
            .mapper
            .owner_name(&record.name, record.record_type, &apex);
        listed.push(Record {
            ttl: Some(60),
            ..Record::new(owner_name.unwrap(), RecordType::TXT, [owner_text.clone()])
        });
        listed.push(Record {
            labels: Labels::default(),
            ..record
        });
    }
    let view = registry.read(&apex, listed);
    let wanted = [
        owned("api.example.org", RecordType::AAAA, &["2001:db8::2"]),
        owned("api.example.org", RecordType::TXT, &["text"]),
    ];
    let mut rules = PlanRules::of(OWNER);
    rules.managed.insert(RecordType::TXT);
    let desired = Desired {
        records: wanted.to_vec(),
        ..Desired::default()
    };
    let plan = plan::plan(&rules, &view.records, &desired);
    let [change] = &plan.changes[..] else {
        panic!("{plan:?}")
    };
    let transaction = registry.transaction(&view, change).unwrap();
    let ranks: Vec<u8> = transaction
        .steps
        .iter()
        .map(|step| match step {
            Step::Require(_) | Step::RequireAbsent(..) => 0,
            Step::Delete(_) => 1,
            Step::Replace { .. } => 2,
            Step::Create(_) => 3,
        })
        .collect();
    assert!(ranks.is_sorted(), "{:#?}", transaction.steps);
    for rank in 0..4 {
        assert!(ranks.contains(&rank), "{rank}: {:#?}", transaction.steps);
    }
}

/// A CNAME is created only where nothing else is, and anything else only where no CNAME is.
#[test]
fn rivals_must_be_absent() {
    let apex = Name::parse("example.org").unwrap();
    let registry = Registry::default();
    let view = registry.read(&apex, Vec::new());
    for (record, expected) in [
        (owned("a.example.org", RecordType::A, &["192.0.2.1"]), 1),
        (
            owned("a.example.org", RecordType::CNAME, &["b.example.org"]),
            8,
        ),
    ] {
        let plan = plan_of(&[], std::slice::from_ref(&record));
        let transaction = registry.transaction(&view, &plan.changes[0]).unwrap();
        let rivals: Vec<RecordType> = transaction
            .steps
            .iter()
            .filter_map(|step| match step {
                Step::RequireAbsent(name, rival) if *name == record.name => Some(*rival),
                _ => None,
            })
            .filter(|rival| *rival != record.record_type)
            .collect();
        assert_eq!(rivals.len(), expected, "{rivals:?}");
        assert_eq!(
            rivals.contains(&RecordType::CNAME),
            record.record_type == RecordType::A
        );
    }
}
