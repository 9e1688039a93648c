//! Batches of changes within the limits of `ChangeResourceRecordSets`. Pure.

use super::{sets, xml::Element};
use crate::{
    provider::{Step, Transaction},
    record::Record,
};

/// Maximum number of changes in a batch.
pub(super) const MAX_CHANGES: usize = 1_000;

/// Maximum number of characters of all values in a batch.
const MAX_OCTETS: usize = 32_000;

/// Maximum number of values in a batch.
const MAX_VALUES: usize = 1_000;

/// Change of one record set, in the order within a batch: deletions first, then by name and type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Delete,
    Create,
}

impl Verb {
    fn text(self) -> &'static str {
        match self {
            Self::Delete => "DELETE",
            Self::Create => "CREATE",
        }
    }
}

/// Quantities that Route 53 limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) changes: usize,
    pub(super) octets: usize,
    pub(super) values: usize,
}

impl Size {
    /// Returns the size of one set. An alias counts as one value.
    pub(super) fn of(set: &Element) -> Self {
        if let Some(alias) = set.child("AliasTarget") {
            return Self {
                changes: 1,
                octets: alias.text_of("DNSName").trim_end_matches('.').len(),
                values: 1,
            };
        }
        let values = set.list("ResourceRecords").map(|value| value.text_of("Value").len());
        let (octets, values) = values.fold((0, 0), |(octets, count), length| (octets + length, count + 1));
        Self { changes: 1, octets, values }
    }

    fn add(&mut self, other: Self) {
        self.changes += other.changes;
        self.octets += other.octets;
        self.values += other.values;
    }

    fn fits(self, max_changes: usize) -> bool {
        self.changes <= max_changes && self.octets <= MAX_OCTETS && self.values <= MAX_VALUES
    }
}

/// Changes of one transaction, always sent in one batch.
#[derive(Debug, Clone)]
pub(super) struct Changes {
    changes: Vec<(Verb, Element)>,
    pub(super) size: Size,
}

impl Changes {
    /// Converts steps to changes. `listed` returns a set exactly as Route 53 listed it.
    ///
    /// A deletion must name the exact set, so it also compares: a set that must stay is deleted and
    /// created in the same batch. A creation fails if the set exists.
    pub(super) fn new(transaction: &Transaction, listed: impl Fn(&Record) -> Option<Element>) -> Self {
        let old = |record: &Record| listed(record).unwrap_or_else(|| sets::write(record));
        let mut changes = Vec::new();
        for step in &transaction.steps {
            match step {
                Step::Create(record) => changes.push((Verb::Create, sets::write(record))),
                Step::Delete(record) => changes.push((Verb::Delete, old(record))),
                Step::Replace { before, after } => {
                    changes.push((Verb::Delete, old(before)));
                    changes.push((Verb::Create, sets::write(after)));
                }
                Step::Require(record) => {
                    changes.push((Verb::Delete, old(record)));
                    changes.push((Verb::Create, old(record)));
                }
                // Route 53 itself refuses a CNAME beside other sets.
                Step::RequireAbsent(..) => {}
            }
        }
        let mut size = Size::default();
        for (_, set) in &changes {
            size.add(Size::of(set));
        }
        Self { changes, size }
    }

    /// Returns whether the changes fit into one batch.
    pub(super) fn fits(&self, max_changes: usize) -> bool {
        self.size.fits(max_changes)
    }
}

/// Returns the number of leading transactions that fit into one batch.
pub(super) fn fitting(transactions: &[Changes], max_changes: usize) -> usize {
    let mut size = Size::default();
    let fits = |changes: &&Changes| {
        size.add(changes.size);
        size.fits(max_changes)
    };
    transactions.iter().take_while(fits).count()
}

pub(super) fn request(group: &[Changes]) -> Element {
    let mut changes: Vec<&(Verb, Element)> = group.iter().flat_map(|changes| &changes.changes).collect();
    changes.sort_by_key(|(verb, set)| (*verb == Verb::Create, set.text_of("Name"), set.text_of("Type")));
    let change = |(verb, set): &(Verb, Element)| {
        Element::of("Change", [Element::text("Action", verb.text()), set.clone()])
    };
    let changes = Element::of("Changes", changes.into_iter().map(change));
    let batch = Element::of("ChangeBatch", [Element::text("Comment", "bosh-dns-publish"), changes]);
    Element::of("ChangeResourceRecordSetsRequest", [batch])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Name, RecordType, Target};

    /// Parses `VERB name type target,target` or `VERB name type ALIAS target`.
    fn change(line: &str) -> Changes {
        let words: Vec<&str> = line.split(' ').collect();
        let record_type: RecordType = words[2].parse().unwrap();
        let name = Name::parse(&format!("{}.example.org", words[1])).unwrap();
        let mut record = Record::new(name.clone(), record_type, []);
        if let ["ALIAS", target] = words[3..] {
            record.targets.insert(Target::alias(&Name::parse(target).unwrap()));
            record.properties.insert("alias".to_owned(), "true".to_owned());
        } else {
            record
                .targets
                .extend(words[3].split(',').map(|target| Target::parse(record_type, target).unwrap()));
        }
        // A replacement corresponds to UPSERT: both count the values twice.
        let step = match words[0] {
            "CREATE" => Step::Create(record),
            "DELETE" => Step::Delete(record),
            _ => Step::Replace { before: record.clone(), after: record },
        };
        Changes::new(&Transaction { name, steps: vec![step] }, |_| None)
    }

    #[test]
    fn sizes_match_cases() {
        let default = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases");
        let folder = std::env::var("BOSH_DNS_EXTERNAL_CASES").unwrap_or_else(|_| default.to_owned());
        let file = std::fs::read_to_string(format!("{folder}/route53_cases.json")).unwrap();
        let cases: Vec<serde_json::Value> = serde_json::from_str(&file).unwrap();
        for case in &cases {
            let id = case["id"].as_str().unwrap();
            if let (Some(bytes), Some(changes)) = (case["bytes"].as_u64(), case["changes"].as_array()) {
                let mut size = Size::default();
                for line in changes {
                    size.add(change(line.as_str().unwrap()).size);
                }
                assert_eq!(size.octets as u64, bytes, "{id}");
                assert_eq!(Some(size.values as u64), case["values"].as_u64(), "{id}");
            } else if let Some(ttl) = case["ttl"].as_u64() {
                assert_eq!(u64::from(sets::DEFAULT_TTL), ttl, "{id}");
            } else if let Some(desired) = case["desired"].as_str() {
                let words: Vec<&str> = desired.split(' ').collect();
                let wanted = Record::parse(words[0], words[1].parse().unwrap(), [words[2]]).unwrap();
                let mut adjusted = vec![wanted];
                sets::adjust(&mut adjusted, false, true);
                let kind = |record: &Record| if sets::is_alias(record) { "ALIAS" } else { "" };
                let shown: Vec<String> = adjusted
                    .iter()
                    .map(|record| format!("{} {} {}", record.name, record.record_type, kind(record)))
                    .collect();
                assert_eq!(serde_json::json!(shown), case["becomes"], "{id}");
            } else {
                println!("{id}: skipped, because it describes calls; tests/servers/route53.rs makes them");
            }
        }
    }

    #[test]
    fn deletions_come_first() {
        let record = |name: &str, record_type, target| Record::parse(name, record_type, [target]).unwrap();
        let steps = vec![
            Step::Create(record("b.example.org", RecordType::A, "192.0.2.1")),
            Step::Delete(record("c.example.org", RecordType::CNAME, "x.example.net")),
            Step::Delete(record("a.example.org", RecordType::A, "192.0.2.1")),
        ];
        let name = record("a.example.org", RecordType::A, "192.0.2.1").name;
        let changes = Changes::new(&Transaction { name, steps }, |_| None);
        let request = request(&[changes]);
        let order: Vec<String> = request
            .find("Changes")
            .unwrap()
            .children
            .iter()
            .map(|change| format!("{} {}", change.text_of("Action"), change.children[1].text_of("Name")))
            .collect();
        assert_eq!(order, ["DELETE a.example.org.", "DELETE c.example.org.", "CREATE b.example.org."]);
    }
}
