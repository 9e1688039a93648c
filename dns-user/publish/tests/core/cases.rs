//! The cases below `tests/cases`, or in the folder that `BOSH_DNS_EXTERNAL_CASES` names.
//!
//! `expect` is the behaviour of external-dns. Where this crate differs on purpose, `ours` is
//! an object with the reason and the expectation. An `ours` that is plain text is a
//! proposal: the result may then differ from `expect`, and is printed.

use std::{collections::BTreeSet, env, fs, path::PathBuf};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use dns_publish::{
    engine::{Planned, ZonePlan},
    ownership::{self, Cipher, Mapper},
    plan::{self, Action, Desired, NameChange, Plan, PlanRules, Policy},
    record::{DomainFilter, Labels, Name, Record, RecordType, Target},
};
use serde::Deserialize;
use serde_json::Value;

/// Returns the folder of the cases.
fn folder() -> PathBuf {
    let default = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    env::var_os("BOSH_DNS_EXTERNAL_CASES").map_or(default, PathBuf::from)
}

/// Reads a file of cases.
pub(crate) fn cases(file: &str) -> Value {
    let path = folder().join(file);
    let text =
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

pub(crate) fn array(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

pub(crate) fn text_of<'a>(case: &'a Value, member: &str) -> &'a str {
    case[member].as_str().unwrap_or("")
}

/// Groups of cases in `registry_cases.json`.
const REGISTRY_GROUPS: [&str; 5] = ["txt_name", "record_of_txt", "parse", "write", "encrypted"];

/// Files with cases, each read by a test (README.md beside them).
const FILES: [&str; 6] = [
    "coredns_cases.json",
    "domain_filter_cases.json",
    "plan_cases.json",
    "registry_cases.json",
    "rfc2136_cases.json",
    "route53_cases.json",
];

#[test]
fn unread_cases_are_named() {
    let mut unread: Vec<String> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".json") && !FILES.contains(&name.as_str()))
        .collect();
    let registry = cases("registry_cases.json");
    let groups = registry
        .as_object()
        .unwrap()
        .keys()
        .filter(|name| !REGISTRY_GROUPS.contains(&name.as_str()));
    unread.extend(groups.map(|name| format!("registry_cases.json: {name}")));
    println!("no test reads {unread:?}");
    // The cases of this crate are all read.
    assert!(
        unread.is_empty() || env::var_os("BOSH_DNS_EXTERNAL_CASES").is_some(),
        "no test reads {unread:?}"
    );
}

/// Compares two values and collects the differences.
#[derive(Default)]
struct Failures(Vec<String>);

impl Failures {
    fn compare<T: PartialEq + std::fmt::Debug>(&mut self, id: &str, found: &T, expected: &T) {
        if found != expected {
            self.0.push(format!(
                "{id}:\n   found    {found:?}\n   expected {expected:?}"
            ));
        }
    }
}

/// Fails if there are differences, and lists them.
impl Drop for Failures {
    fn drop(&mut self) {
        assert!(
            self.0.is_empty() || std::thread::panicking(),
            "{}",
            self.0.join("\n")
        );
    }
}

#[derive(Deserialize)]
struct PlanCase {
    id: String,
    policy: String,
    owner: String,
    types: Vec<String>,
    #[serde(default)]
    exclude_types: Vec<String>,
    #[serde(default)]
    domains: Vec<String>,
    #[serde(default)]
    exclude_domains: Vec<String>,
    migrate_from: Option<String>,
    current: Vec<RecordCase>,
    desired: Vec<RecordCase>,
    expect: Expected,
    ours: Option<Ours>,
}

#[derive(Deserialize)]
struct RecordCase {
    name: String,
    r#type: String,
    targets: Vec<String>,
    ttl: Option<u32>,
    #[serde(default)]
    owner: String,
    #[serde(default)]
    resource: String,
    #[serde(default)]
    set: String,
    #[serde(default)]
    props: std::collections::BTreeMap<String, String>,
}

#[derive(Deserialize, Debug, Clone, PartialEq, Default)]
struct Expected {
    create: Vec<String>,
    update: Vec<(String, String)>,
    delete: Vec<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ours {
    Difference {
        expect: Option<Expected>,
        /// Whether the guard refuses the plan.
        #[serde(default)]
        refused: bool,
        /// Number of wanted records that a document may not contain.
        #[serde(default)]
        unreadable: usize,
        /// Number of transactions, each of which deletes first.
        transactions: Option<usize>,
        /// Beginnings of all notes.
        notes: Option<Vec<String>>,
    },
    Proposal(String),
}

impl RecordCase {
    /// Returns the record, unless a document with it would be refused.
    fn record(&self) -> Option<Record> {
        let record_type: RecordType = self.r#type.parse().ok()?;
        let mut record = Record::parse(&self.name, record_type, &self.targets).ok()?;
        record.ttl = self.ttl.filter(|ttl| *ttl > 0);
        record.labels = Labels::of(&self.owner, &self.resource);
        record.set_identifier.clone_from(&self.set);
        record.properties.clone_from(&self.props);
        Some(record)
    }
}

impl PlanCase {
    fn plan(&self) -> (Plan, usize, usize) {
        let texts = |texts: &[String]| texts.to_vec();
        let types = |names: &[String]| -> BTreeSet<RecordType> {
            names.iter().map(|name| name.parse().unwrap()).collect()
        };
        let (include, exclude) = (texts(&self.domains), texts(&self.exclude_domains));
        let filter = DomainFilter::new(
            include.iter().map(String::as_str),
            exclude.iter().map(String::as_str),
        )
        .unwrap();
        let rules = PlanRules {
            policy: Policy::named(&self.policy).unwrap(),
            managed: types(&self.types)
                .difference(&types(&self.exclude_types))
                .copied()
                .collect(),
            domains: filter,
            migrate_from: self.migrate_from.clone(),
            ..PlanRules::of(&self.owner)
        };
        let current: Vec<Record> = self.current.iter().filter_map(RecordCase::record).collect();
        let records: Vec<Record> = self.desired.iter().filter_map(RecordCase::record).collect();
        let wanted = records.len();
        let plan = plan::plan(
            &rules,
            &current,
            &Desired {
                records,
                ..Desired::default()
            },
        );
        (plan, current.len(), wanted)
    }
}

/// Returns the lines of a plan, sorted.
fn lines(plan: &Plan) -> Expected {
    let mut lines = Expected::default();
    for action in plan.actions() {
        match action {
            Action::Create(record) => lines.create.push(record.to_string()),
            Action::Update { before, after } => {
                lines.update.push((before.to_string(), after.to_string()))
            }
            Action::Delete(record) => lines.delete.push(record.to_string()),
            Action::Release(_) | Action::DropOrphan(_) => panic!("a plan never gives a record up"),
        }
    }
    sorted(lines)
}

fn sorted(mut lines: Expected) -> Expected {
    lines.create.sort();
    lines.update.sort();
    lines.delete.sort();
    lines
}

/// Returns a line in the spelling of this crate.
fn normal(line: &str) -> String {
    let mut words = line.splitn(4, ' ');
    let (name, ttl, record_type) = (
        words.next().unwrap(),
        words.next().unwrap(),
        words.next().unwrap(),
    );
    let (targets, set) = words
        .next()
        .unwrap_or("")
        .split_once(" set=")
        .unwrap_or((line_targets(line), ""));
    let targets = targets.split(',').filter(|target| !target.is_empty());
    let mut record = Record::parse(name, record_type.parse().unwrap(), targets).unwrap();
    record.ttl = Some(ttl.parse().unwrap()).filter(|ttl| *ttl > 0);
    set.clone_into(&mut record.set_identifier);
    record.to_string()
}

fn line_targets(line: &str) -> &str {
    line.splitn(4, ' ').nth(3).unwrap_or("")
}

impl Expected {
    fn normal(&self) -> Self {
        let all = |lines: &[String]| lines.iter().map(|line| normal(line)).collect();
        let pairs = self
            .update
            .iter()
            .map(|(old, new)| (normal(old), normal(new)));
        sorted(Self {
            create: all(&self.create),
            update: pairs.collect(),
            delete: all(&self.delete),
        })
    }
}

#[test]
fn plans_match_cases() {
    let mut failures = Failures::default();
    let file = cases("plan_cases.json");
    for case in array(&file) {
        let case: PlanCase = serde_json::from_value(case.clone()).unwrap();
        let (plan, owned, wanted) = case.plan();
        let found = lines(&plan);
        let theirs = case.expect.normal();
        match &case.ours {
            Some(Ours::Proposal(why)) if found != theirs => {
                println!("{}: differs from external-dns ({why}): {found:?}", case.id);
                // The cases of this crate are decided.
                if env::var_os("BOSH_DNS_EXTERNAL_CASES").is_none() {
                    failures.compare(&case.id, &found, &theirs);
                }
            }
            Some(Ours::Difference {
                expect,
                refused,
                unreadable,
                transactions,
                notes,
            }) => {
                let expected = expect.as_ref().map_or(theirs, Expected::normal);
                failures.compare(&case.id, &found, &expected);
                let zone = ZonePlan {
                    id: String::new(),
                    plan: plan.clone(),
                    owned,
                    recent: 0,
                };
                let planned = Planned {
                    zones: vec![zone],
                    notes: Vec::new(),
                    wanted,
                };
                let refusal = planned.check(&planned.zones[0], None);
                failures.compare(&case.id, &refusal.is_err(), refused);
                let refused = case
                    .desired
                    .iter()
                    .filter(|wish| wish.record().is_none())
                    .count();
                failures.compare(&case.id, &refused, unreadable);
                if let Some(transactions) = transactions {
                    failures.compare(&case.id, &plan.changes.len(), transactions);
                    let deletes_first =
                        |change: &NameChange| matches!(change.actions[..], [Action::Delete(_), ..]);
                    assert!(
                        plan.changes.iter().all(deletes_first),
                        "{}: {plan:?}",
                        case.id
                    );
                }
                if let Some(notes) = notes {
                    let found: Vec<String> = plan.notes.iter().map(ToString::to_string).collect();
                    let agrees = found.len() == notes.len()
                        && found
                            .iter()
                            .zip(notes)
                            .all(|(note, start)| note.starts_with(start.as_str()));
                    assert!(agrees, "{}: {found:?}", case.id);
                }
            }
            _ => failures.compare(&case.id, &found, &theirs),
        }
    }
}

#[test]
fn filters_match_cases() {
    let mut failures = Failures::default();
    for case in array(&cases("domain_filter_cases.json")) {
        let entries = |member: &str| {
            array(&case[member])
                .iter()
                .map(|entry| entry.as_str().unwrap().to_owned())
        };
        let (include, exclude): (Vec<_>, Vec<_>) =
            (entries("include").collect(), entries("exclude").collect());
        let filter = DomainFilter::new(
            include.iter().map(String::as_str),
            exclude.iter().map(String::as_str),
        )
        .unwrap();
        let name = Name::parse(text_of(case, "name")).unwrap();
        failures.compare(
            text_of(case, "id"),
            &filter.matches(&name),
            &case["expect"].as_bool().unwrap(),
        );
    }
}

fn mapper(case: &Value) -> Option<Mapper> {
    Mapper::new(
        text_of(case, "prefix"),
        text_of(case, "suffix"),
        text_of(case, "wildcard"),
    )
    .ok()
}

#[test]
fn owner_names_match_cases() {
    let mut failures = Failures::default();
    let file = cases("registry_cases.json");
    for case in array(&file["txt_name"]) {
        let (name, record_type) = (text_of(case, "name"), text_of(case, "type"));
        let found = mapper(case).map(|mapper| mapper.text_of(name, record_type));
        failures.compare(
            text_of(case, "id"),
            &found.unwrap_or_default(),
            &text_of(case, "expect").to_owned(),
        );
    }
    for case in array(&file["record_of_txt"]) {
        let owner = Name::parse(text_of(case, "txt")).unwrap();
        let found = mapper(case).and_then(|mapper| mapper.record_of(&owner));
        let (name, record_type) = found.unwrap_or_default();
        let found = vec![
            name,
            record_type
                .map(|found| found.to_string())
                .unwrap_or_default(),
        ];
        let expected: Vec<String> = array(&case["expect"])
            .iter()
            .map(|text| text.as_str().unwrap().to_owned())
            .collect();
        failures.compare(text_of(case, "id"), &found, &expected);
    }
}

#[test]
fn long_labels_get_owner_records() {
    let apex = Name::parse("example.org").unwrap();
    for case in array(&cases("registry_cases.json")["txt_name"]) {
        let Some(mapper) = mapper(case) else { continue };
        let Ok(name) = Name::parse(text_of(case, "name")) else {
            continue;
        };
        if !name.is_within(&apex) {
            continue;
        }
        let owner = mapper.owner_name(&name, RecordType::A, &apex).unwrap();
        assert!(owner.is_within(&apex), "{owner}");
    }
}

/// Returns the labels of an object; `None` for `null`.
fn labels(value: &Value) -> Option<Labels> {
    let members = value.as_object()?.iter();
    Some(Labels(
        members
            .map(|(key, value)| (key.clone(), value.as_str().unwrap().to_owned()))
            .collect(),
    ))
}

#[test]
fn owner_texts_match_cases() {
    let mut failures = Failures::default();
    let file = cases("registry_cases.json");
    for case in array(&file["parse"]) {
        failures.compare(
            text_of(case, "id"),
            &ownership::parse_labels(text_of(case, "text")),
            &labels(&case["expect"]),
        );
    }
    for case in array(&file["write"]) {
        let plain = ownership::write_labels(&labels(&case["labels"]).unwrap());
        let found = if case["quotes"] == true {
            format!("\"{plain}\"")
        } else {
            plain
        };
        failures.compare(
            text_of(case, "id"),
            &found,
            &text_of(case, "expect").to_owned(),
        );
    }
}

#[test]
fn encrypted_texts_match_cases() {
    let mut failures = Failures::default();
    for case in array(&cases("registry_cases.json")["encrypted"]) {
        let cipher = Cipher::new(text_of(case, "key")).unwrap();
        let expected = Some(text_of(case, "text").to_owned());
        failures.compare(
            text_of(case, "id"),
            &cipher.decrypt(text_of(case, "cipher")),
            &expected,
        );
        let again = cipher.encrypt(text_of(case, "text")).unwrap();
        failures.compare(text_of(case, "id"), &cipher.decrypt(&again), &expected);
        let mut damaged = STANDARD.decode(text_of(case, "cipher")).unwrap();
        *damaged.last_mut().unwrap() ^= 1;
        failures.compare(
            text_of(case, "id"),
            &cipher.decrypt(&STANDARD.encode(damaged)),
            &None,
        );
    }
}

#[test]
fn unusable_values_are_refused() {
    assert!(ownership::check_value("a,b").is_err());
    assert!(ownership::check_value("bosh/cf/api").is_ok());
    assert!(Cipher::new("short").is_err());
    assert!(Mapper::new("pre-", "-suf", "").is_err());
    assert!(Mapper::new("bad..", "", "").is_err());
}

#[test]
fn text_values_preserve_octets() {
    let value = Target::parse(RecordType::TXT, r#""a\"b" "c\\d\200""#).unwrap();
    assert_eq!(value.text_octets(), b"a\"bc\\d\xc8");
    assert_eq!(Target::text(&value.text_octets()), value);
    assert_eq!(
        Target::parse(RecordType::TXT, r"raw\text")
            .unwrap()
            .text_octets(),
        br"raw\text"
    );
}
