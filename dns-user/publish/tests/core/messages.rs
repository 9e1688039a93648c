//! The cases of `rfc2136_cases.json`: the requirements and changes that a run sends.
//!
//! `ours` as lists of lines must be among the lines that are sent; this crate requires more
//! (such as the owner record of a record that changes its type). Each `ours` of text in this crate has a
//! separate assertion; without one, a case of another folder is printed.

use std::{
    collections::BTreeMap,
    env,
    sync::{Arc, Mutex},
};

use dns_publish::{
    engine::Engine,
    ownership::{self, Mapper, Registry},
    plan::{Desired, PlanRules, Reason},
    provider::{
        Batch, Parameters, Progress, Provider, ProviderError, Results, Step, TransactionResult,
        Visibility, Zone,
        rfc2136::{DEFAULT_TTL, Rfc2136, Rfc2136Settings},
    },
    record::{Labels, Name, Record, RecordType, Target},
};
use futures_util::future::BoxFuture;
use serde_json::Value;

use crate::{
    cases::{array, cases, text_of},
    model::ZoneModel,
};

/// Lines that were sent, by zone.
type Sent = Arc<Mutex<BTreeMap<String, Vec<String>>>>;

/// Zones in memory with the adjustments of the real provider.
struct InMemory {
    real: Rfc2136,
    zones: BTreeMap<String, ZoneModel>,
    sent: Sent,
    fault: Fault,
}

/// Failure of a provider.
#[derive(Clone, Default)]
enum Fault {
    #[default]
    Nothing,
    /// The zones cannot be listed.
    ListingRefused,
    /// Somebody else adds a target between the first listing and the first message.
    Addition(Record),
}

impl Provider for InMemory {
    fn adjust(&self, desired: &mut Vec<Record>) {
        self.real.adjust(desired);
    }

    fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>> {
        let zone = |(id, model): (&String, &ZoneModel)| Zone {
            id: id.clone(),
            apex: Name::parse(id).unwrap(),
            visibility: Visibility::Public,
            content: match &self.fault {
                Fault::ListingRefused => Err(ProviderError::Refused {
                    server: "localhost".to_owned(),
                    reason: "REFUSED".to_owned(),
                }),
                _ => Ok(model.records()),
            },
            warnings: Vec::new(),
        };
        let zones = self.zones.iter().map(zone).collect();
        Box::pin(async { Ok(zones) })
    }

    fn apply<'a>(&'a mut self, batch: &'a Batch, _: Progress<'a>) -> Results<'a> {
        let model = self.zones.get_mut(&batch.zone).unwrap();
        let is_disturbed = match std::mem::take(&mut self.fault) {
            Fault::Addition(record) => {
                model
                    .0
                    .get_mut(&record.key())
                    .unwrap()
                    .targets
                    .extend(record.targets);
                true
            }
            fault => {
                self.fault = fault;
                false
            }
        };
        let mut results = Vec::new();
        for transaction in &batch.transactions {
            let applied = model.apply(transaction);
            assert_eq!(applied.is_err(), is_disturbed, "{applied:?}");
            if applied.is_err() {
                results.push(TransactionResult::Conflict);
                continue;
            }
            results.push(TransactionResult::Applied);
            let lines = transaction.steps.iter().flat_map(lines_of);
            self.sent
                .lock()
                .unwrap()
                .entry(batch.zone.clone())
                .or_default()
                .extend(lines);
        }
        Box::pin(async { results })
    }
}

/// Returns the lines of a step.
fn lines_of(step: &Step) -> Vec<String> {
    let same = |record: &Record| -> Vec<String> {
        record
            .targets
            .iter()
            .map(|target| format!("same rrset {} {} {target}", record.name, record.record_type))
            .collect()
    };
    let add = |record: &Record| -> Vec<String> {
        let ttl = record.ttl.unwrap_or(DEFAULT_TTL);
        record
            .targets
            .iter()
            .map(|target| format!("+ {} {ttl} {} {target}", record.name, record.record_type))
            .collect()
    };
    let absent =
        |name: &Name, record_type: RecordType| format!("absent rrset {name} {record_type}");
    let remove = |record: &Record| format!("- rrset {} {}", record.name, record.record_type);
    match step {
        Step::Require(record) => same(record),
        Step::RequireAbsent(name, record_type) => vec![absent(name, *record_type)],
        Step::Create(record) => {
            [vec![absent(&record.name, record.record_type)], add(record)].concat()
        }
        Step::Delete(record) => [same(record), vec![remove(record)]].concat(),
        Step::Replace { before, after } => {
            [same(before), vec![remove(before)], add(after)].concat()
        }
    }
}

/// Parses `name ttl type target,target`.
fn record_of(line: &str) -> Option<Record> {
    let words: Vec<&str> = line.splitn(4, ' ').collect();
    let [name, ttl, record_type, targets] = words[..] else {
        return None;
    };
    let record_type: RecordType = record_type.parse().ok()?;
    let whole = [targets];
    let targets: Vec<&str> = if record_type == RecordType::TXT {
        whole.into()
    } else {
        targets.split(',').collect()
    };
    let ttl = ttl.parse().ok().filter(|ttl| *ttl > 0);
    Some(Record {
        ttl,
        ..Record::parse(name, record_type, targets).ok()?
    })
}

fn is_owner_record(record: &Record) -> bool {
    record
        .targets
        .first()
        .is_some_and(|target| ownership::parse_labels(target.as_str()).is_some())
}

/// Returns an engine on the zones of a case, its wishes, and the lines that it will send.
fn prepare(case: &Value, fault: Fault) -> (Engine, Desired, Sent) {
    let lines = |list: &Value| -> Vec<String> {
        list.as_array()
            .into_iter()
            .flatten()
            .filter_map(|line| line.as_str().map(str::to_owned))
            .collect()
    };
    let changes = &case["changes"];
    let updates: Vec<Vec<String>> = changes["update"]
        .as_array()
        .into_iter()
        .flatten()
        .map(lines)
        .collect();
    let before = updates
        .iter()
        .map(|pair| pair[0].clone())
        .chain(lines(&changes["delete"]));
    let after = updates
        .iter()
        .map(|pair| pair[1].clone())
        .chain(lines(&changes["create"]));
    let before: Vec<Record> = before.filter_map(|line| record_of(&line)).collect();
    let records = after
        .filter_map(|line| record_of(&line))
        .filter(|record| !is_owner_record(record))
        .collect();

    let named = case["zones"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str);
    let mut zones: Vec<Name> = named.map(|zone| Name::parse(zone).unwrap()).collect();
    if zones.is_empty() {
        zones.push(Name::parse("example.org").unwrap());
    }
    let mut models: BTreeMap<String, ZoneModel> = zones
        .iter()
        .map(|zone| (zone.to_string(), ZoneModel::default()))
        .collect();
    for record in before {
        let zone = zones.iter().filter(|zone| record.name.is_within(zone));
        let Some(zone) = zone.max_by_key(|zone| zone.labels().count()) else {
            continue;
        };
        let owner = Mapper::default()
            .owner_name(&record.name, record.record_type, zone)
            .unwrap();
        let target = Target::text(ownership::write_labels(&Labels::of("me", "")).as_bytes());
        let model = models.get_mut(zone.as_str()).unwrap();
        for record in [
            Record {
                ttl: record.ttl,
                ..Record::new(owner, RecordType::TXT, [target])
            },
            record,
        ] {
            model.0.insert(record.key(), record);
        }
    }
    let min_ttl = case["options"]["min_ttl"].as_u64().unwrap_or(0);
    let parameters = [
        ("rfc2136-host", "localhost".to_owned()),
        ("rfc2136-zone", "example.org".to_owned()),
        ("rfc2136-insecure", "true".to_owned()),
        ("rfc2136-min-ttl", format!("{min_ttl}s")),
    ];
    let parameters = Parameters(
        parameters
            .map(|(name, value)| (name.to_owned(), value))
            .into(),
    );
    let real = Rfc2136::new(Rfc2136Settings::from_parameters(&parameters).unwrap());
    let sent = Sent::default();
    let provider = Box::new(InMemory {
        real,
        zones: models,
        sent: sent.clone(),
        fault,
    });
    let mut rules = PlanRules::of("me");
    rules.managed.extend([
        RecordType::SRV,
        RecordType::MX,
        RecordType::NAPTR,
        RecordType::PTR,
        RecordType::NS,
        RecordType::TXT,
    ]);
    let engine = Engine::new(provider, Registry::default(), rules);
    (
        engine,
        Desired {
            records,
            ..Desired::default()
        },
        sent,
    )
}

/// Runs a case; returns the lines that were sent and the reasons of notes.
async fn run(case: &Value) -> (BTreeMap<String, Vec<String>>, Vec<Reason>) {
    let (mut engine, desired, sent) = prepare(case, Fault::Nothing);
    let report = engine.reconcile(&desired, Some(10), &|_| {}).await.unwrap();
    assert!(report.is_complete(), "{report:?}");
    let again = engine.reconcile(&desired, Some(10), &|_| {}).await.unwrap();
    assert_eq!(again.applied(), 0, "{}", text_of(case, "id"));
    let notes = report
        .notes
        .iter()
        .chain(report.zones.iter().flat_map(|zone| &zone.notes));
    let sent = sent.lock().unwrap().clone();
    (sent, notes.map(|note| note.reason.clone()).collect())
}

/// Returns a line in the spelling of this crate: owner texts without quotes.
fn normal(line: &str) -> String {
    line.replace('"', "")
}

#[tokio::test]
async fn messages_match_cases() {
    for case in array(&cases("rfc2136_cases.json")) {
        let id = text_of(case, "id");
        let (sent, notes) = run(case).await;
        let all: Vec<&String> = sent.values().flatten().collect();
        let check = |zone: Option<&str>, lists: &Value| {
            let lines: Vec<String> = match zone {
                Some(zone) => sent.get(zone).cloned().unwrap_or_default(),
                None => all.iter().map(|line| (*line).clone()).collect(),
            };
            for expected in lists.as_array().into_iter().flatten() {
                for line in expected
                    .as_array()
                    .map_or(vec![expected], |list| list.iter().collect())
                {
                    let line = normal(line.as_str().unwrap());
                    assert!(
                        lines.contains(&line),
                        "{id}: {line:?} is not among {lines:#?}"
                    );
                }
            }
        };
        match &case["ours"] {
            Value::Object(zones) => zones
                .iter()
                .for_each(|(zone, lists)| check(Some(zone), lists)),
            Value::Array(_) => check(None, &case["ours"]),
            Value::String(text) if text.starts_with("no change") => {
                assert!(all.is_empty(), "{id}: {all:?}")
            }
            Value::String(text) if text.starts_with("no zone") => {
                assert!(all.is_empty(), "{id}: {all:?}");
                assert_eq!(notes, [Reason::NoZone], "{id}");
            }
            Value::String(text) => {
                let all: Vec<&str> = all.iter().map(|line| line.as_str()).collect();
                if !is_asserted(id, case, &all).await {
                    println!("{id}: no assertion for {text:?}");
                    assert!(
                        env::var_os("BOSH_DNS_EXTERNAL_CASES").is_some(),
                        "{id} has no assertion"
                    );
                }
            }
            other => println!("{id}: only planned twice, because `ours` is {other}"),
        }
    }
}

/// Asserts the behaviour described in the text of a case; returns false for an unknown case.
async fn is_asserted(id: &str, case: &Value, sent: &[&str]) -> bool {
    match id {
        "update-somebody-added" => {
            let addition = record_of("api.example.org 60 A 192.0.2.9").unwrap();
            let (mut engine, desired, sent) = prepare(case, Fault::Addition(addition));
            let report = engine.reconcile(&desired, None, &|_| {}).await.unwrap();
            assert!(report.is_complete() && report.rounds == 2, "{report:?}");
            // The second plan knows the addition.
            let line = "same rrset api.example.org A 192.0.2.9".to_owned();
            assert!(sent.lock().unwrap()["example.org"].contains(&line));
        }
        "list-refused" | "list-no-axfr" => {
            let (mut engine, _, sent) = prepare(case, Fault::ListingRefused);
            let records = vec![record_of("api.example.org 60 A 192.0.2.1").unwrap()];
            let report = engine
                .reconcile(
                    &Desired {
                        records,
                        ..Desired::default()
                    },
                    None,
                    &|_| {},
                )
                .await;
            let report = report.unwrap();
            assert!(
                !report.is_complete() && report.zones[0].failure.is_some(),
                "{report:?}"
            );
            assert!(sent.lock().unwrap().is_empty());
        }
        "batches" => {
            // The message itself: `names_share_a_message`.
            let mut engine = engine();
            let record =
                |number: u32| record_of(&format!("n{number}.example.org 60 A 192.0.2.1")).unwrap();
            let desired = Desired {
                records: (0..120).map(record).collect(),
                ..Desired::default()
            };
            let listing = engine.list().await.unwrap();
            let planned = engine.plan(&listing, &desired);
            let view = listing[0].content.as_ref().unwrap();
            for change in &planned.zones[0].plan.changes {
                let transaction = engine.registry.transaction(view, change).unwrap();
                let created = transaction
                    .steps
                    .iter()
                    .filter(|step| matches!(step, Step::Create(_)));
                assert_eq!(
                    created.count(),
                    2,
                    "a name and its owner record: {transaction:?}"
                );
            }
        }
        "one-bad-record" => {
            assert_eq!(record_of("bad.example.org 60 A not-an-address"), None);
            assert!(
                sent.contains(&"+ good.example.org 60 A 192.0.2.1"),
                "{sent:?}"
            );
            assert!(!sent.iter().any(|line| line.contains("bad")), "{sent:?}");
        }
        "txt-of-several-strings" => {
            let target = Target::parse(RecordType::TXT, r#""one" "two""#).unwrap();
            assert_eq!(target.text_octets(), b"onetwo");
        }
        "types-unread" => {
            // `run` has listed again and planned nothing.
            let line = "+ _sip._tcp.example.org 60 SRV 10 5 5060 sip.example.org";
            assert!(
                sent.iter().any(|sent| sent.trim_end_matches('.') == line),
                "{sent:?}"
            );
        }
        _ => return false,
    }
    true
}

/// Returns an engine on an empty zone in memory.
fn engine() -> Engine {
    let parameters = [
        ("rfc2136-host", "localhost"),
        ("rfc2136-zone", "example.org"),
        ("rfc2136-insecure", "true"),
    ];
    let parameters = parameters.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let real =
        Rfc2136::new(Rfc2136Settings::from_parameters(&Parameters(parameters.into())).unwrap());
    let zones = [("example.org".to_owned(), ZoneModel::default())].into();
    let provider = Box::new(InMemory {
        real,
        zones,
        sent: Sent::default(),
        fault: Fault::Nothing,
    });
    Engine::new(provider, Registry::default(), PlanRules::of("me"))
}

#[tokio::test]
async fn owner_record_never_meets_cname() {
    let address = record_of("team.example.org 60 A 192.0.2.1").unwrap();
    let alias = record_of("a-team.example.org 60 CNAME target.example.net").unwrap();
    let both = Desired {
        records: vec![address.clone(), alias.clone()],
        ..Desired::default()
    };
    // The first one stays; the zone in memory refuses a CNAME beside other data.
    for first in [
        vec![address.clone(), alias.clone()],
        vec![address],
        vec![alias],
    ] {
        let mut engine = engine();
        let first = Desired {
            records: first,
            ..Desired::default()
        };
        engine.reconcile(&first, None, &|_| {}).await.unwrap();
        for _ in 0..2 {
            let report = engine.reconcile(&both, None, &|_| {}).await.unwrap();
            assert_eq!(
                (report.applied(), report.zones[0].failures.len()),
                (0, 1),
                "{report:?}"
            );
            assert!(
                report.zones[0].failures[0]
                    .1
                    .to_string()
                    .contains("a-team.example.org")
            );
        }
    }
}

#[test]
fn list_without_a_host_is_refused() {
    let parameters = [
        ("rfc2136-host", ","),
        ("rfc2136-zone", "example.org"),
        ("rfc2136-insecure", "true"),
    ];
    let parameters = parameters.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let error = Rfc2136Settings::from_parameters(&Parameters(parameters.into())).unwrap_err();
    assert!(
        error.to_string().starts_with("rfc2136-host is missing"),
        "{error}"
    );
}
