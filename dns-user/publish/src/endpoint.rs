//! `DNSEndpoint` documents, as external-dns's CRD source reads them, with their labels and label selectors in
//! the syntax of `kubectl -l`. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use crate::{
    record::{Key, Name, Record, RecordType, Target},
    text::{Fields, Reader},
};

/// Highest TTL in seconds (RFC 2181, section 8).
pub(crate) const MAX_TTL: u32 = i32::MAX as u32;

/// Value of `apiVersion` in a `DNSEndpoint`.
pub(crate) const API_VERSION: &str = "externaldns.k8s.io/v1alpha1";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// Record sets. An invalid entry becomes a set without targets, which leaves the existing
    /// records of its name and type unchanged.
    pub records: Vec<Record>,
    /// Entries with an empty list of targets, which get the provider's default targets.
    pub untargeted: Vec<Record>,
    /// Whether the list, or name or type of an entry, is unreadable, so that all records of the document stay unchanged.
    pub is_unreadable: bool,
}

/// Parses `spec.endpoints`. An invalid entry does not affect the others.
pub(crate) fn read(spec: &Reader<'_>) -> Endpoints {
    let (endpoints, is_unreadable) = spec.only_list("endpoints");
    let mut found = Endpoints {
        is_unreadable,
        ..Endpoints::default()
    };
    let mut seen = BTreeSet::new();
    for item in endpoints {
        // `read_endpoint` returns a record in spite of problems, so that its name is known; the
        // count tells whether there were any.
        let before = item.problems.count();
        let record = item
            .fields()
            .and_then(|fields| read_endpoint(fields, &mut seen));
        match record {
            Some(record) if item.problems.count() == before => {
                if record.targets.is_empty() {
                    found.untargeted.push(record)
                } else {
                    found.records.push(record)
                }
            }
            // Without targets it withdraws nothing: the existing set of the name and type stays.
            Some(record) => found.records.push(Record {
                targets: BTreeSet::new(),
                ..record
            }),
            None => found.is_unreadable = true,
        }
    }
    found
}

/// Parses an entry; `None` if its name or type is unreadable.
fn read_endpoint(mut fields: Fields<'_>, seen: &mut BTreeSet<Key>) -> Option<Record> {
    let entry = fields.map.clone();
    let name = fields.required_as("dnsName", read_name);
    let record_type = match fields.optional("recordType") {
        Some(reader) => read_type(&reader),
        // external-dns defaults to A.
        None => Some(RecordType::A),
    };
    let ttl = fields.optional_as("recordTTL", |ttl| ttl.integer(0..=MAX_TTL));
    let set_identifier = fields.optional_as("setIdentifier", Reader::text);
    let labels = fields.optional_as("labels", Reader::text_map);
    let properties = fields.optional_as("providerSpecific", |list| Some(read_properties(list)));
    let targets = fields.required_as("targets", Reader::items);
    fields.finish();

    let name = name?;
    let record_type = record_type?;
    let mut parsed = BTreeSet::new();
    for target in targets.into_iter().flatten() {
        let Some(text) = target.filled_text() else {
            continue;
        };
        match Target::parse(record_type, text) {
            Ok(target) => drop(parsed.insert(target)),
            Err(error) => target.problem(
                error.to_string(),
                format!("use valid data for type {record_type}"),
            ),
        }
    }
    // RFC 2181, section 10.1.
    if record_type.is_alias() && parsed.len() > 1 {
        entry.problem(
            format!("a {record_type} must have exactly one target"),
            "keep one target, or publish addresses with A or AAAA",
        );
    }
    let mut record = Record::new(name.clone(), record_type, parsed);
    // As in external-dns, a TTL of 0 is none.
    record.ttl = ttl.filter(|ttl| *ttl > 0);
    record.set_identifier = set_identifier.unwrap_or_default().to_owned();
    record.labels.0 = labels.unwrap_or_default();
    record.properties = properties.unwrap_or_default();
    if !seen.insert(record.key()) {
        entry.problem(
            format!("{name} has another entry of type {record_type} in this document"),
            "list all targets in one entry, or distinguish the entries by setIdentifier",
        );
    }
    Some(record)
}

/// Parses a domain name that may be published.
pub(crate) fn read_name(reader: &Reader<'_>) -> Option<Name> {
    let name = Name::parse(reader.filled_text()?);
    match reader.accept(name, "use a domain name with labels of up to 63 octets")? {
        name if name.is_root() => reader.refuse(
            "the root cannot be published",
            "use a name below one of your zones",
        ),
        name => Some(name),
    }
}

fn read_type(reader: &Reader<'_>) -> Option<RecordType> {
    let parsed = reader.filled_text()?.parse::<RecordType>();
    match reader.accept(parsed, "use a record type such as A, AAAA or CNAME")? {
        // Servers manage the SOA themselves: its serial number changes with each update.
        RecordType::SOA => reader.refuse(
            "records of type SOA cannot be published",
            "remove the entry",
        ),
        known => Some(known),
    }
}

fn read_properties(list: &Reader<'_>) -> BTreeMap<String, String> {
    let mut properties = BTreeMap::new();
    for item in list.items().into_iter().flatten() {
        let Some(mut fields) = item.fields() else {
            continue;
        };
        let name = fields.required_as("name", Reader::filled_text);
        let value = fields.required_as("value", Reader::text);
        fields.finish();
        if let (Some(name), Some(value)) = (name, value) {
            properties.insert(name.to_owned(), value.to_owned());
        }
    }
    properties
}

pub(crate) type Labels = BTreeMap<String, String>;

/// A label selector: `a=b,c!=d,e in (x,y),f notin (z),g,!h`. All requirements must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    label: String,
    /// The label must not have one of the values, or must not exist.
    is_negated: bool,
    /// Without values the label must exist.
    values: Option<Vec<String>>,
}

impl Selector {
    pub fn read(reader: &Reader<'_>) -> Option<Self> {
        let remedy = "use the syntax of kubectl -l: app=router,tier in (a,b),!canary";
        reader.accept(Self::parse(reader.text()?), remedy)
    }

    /// Parses the text form; an empty text selects everything.
    fn parse(text: &str) -> Result<Self, String> {
        let mut depth = 0_u32;
        // Commas also separate the values within parentheses.
        let parts = text.split(|letter| {
            match letter {
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                _ => {}
            }
            letter == ',' && depth == 0
        });
        let mut requirements = Vec::new();
        for part in parts {
            let part = part.trim();
            if !part.is_empty() {
                requirements.push(Requirement::parse(part)?);
            }
        }
        Ok(Self(requirements))
    }

    /// Returns whether all requirements hold. As in Kubernetes, `!=` and `notin` also hold for a missing label.
    pub fn matches(&self, labels: &Labels) -> bool {
        for Requirement {
            label,
            is_negated,
            values,
        } in &self.0
        {
            let has = match (labels.get(label), values) {
                (Some(value), Some(values)) => values.contains(value),
                (Some(_), None) => true,
                (None, _) => false,
            };
            if has == *is_negated {
                return false;
            }
        }
        true
    }
}

impl Requirement {
    fn parse(text: &str) -> Result<Self, String> {
        // In this order, because `!=` and `==` contain `=`.
        let (label, is_negated, values) = if let Some((label, values)) = split_set(text, " notin ")
        {
            (label, true, Some(values))
        } else if let Some((label, values)) = split_set(text, " in ") {
            (label, false, Some(values))
        } else if let Some((label, value)) = text.split_once("!=") {
            (label, true, Some(vec![value.trim().to_owned()]))
        } else if let Some((label, value)) = text.split_once("==").or_else(|| text.split_once('='))
        {
            (label, false, Some(vec![value.trim().to_owned()]))
        } else if let Some(label) = text.strip_prefix('!') {
            (label, true, None)
        } else {
            (text, false, None)
        };
        let label = label.trim();
        if label.is_empty()
            || !label
                .chars()
                .all(|letter| letter.is_ascii_alphanumeric() || "-._/".contains(letter))
        {
            return Err(format!("{text:?} is not a label requirement"));
        }
        Ok(Self {
            label: label.to_owned(),
            is_negated,
            values,
        })
    }
}

/// Splits `label WORD (value,value)`.
fn split_set<'a>(text: &'a str, word: &str) -> Option<(&'a str, Vec<String>)> {
    let (label, values) = text.split_once(word)?;
    let values = values.trim().strip_prefix('(')?.strip_suffix(')')?;
    let values = values.split(',').map(|value| value.trim().to_owned());
    Some((label, values.collect()))
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (
            index,
            Requirement {
                label,
                is_negated,
                values,
            },
        ) in self.0.iter().enumerate()
        {
            f.write_str(if index > 0 { "," } else { "" })?;
            let (not, word) = if *is_negated {
                ("!", "notin")
            } else {
                ("", "in")
            };
            match values.as_deref() {
                None => write!(f, "{not}{label}")?,
                Some([value]) => write!(f, "{label}{not}={value}")?,
                Some(values) => write!(f, "{label} {word} ({})", values.join(","))?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{Problems, documents, parse};

    fn read_text(text: &str) -> (Endpoints, Vec<String>) {
        let problems = Problems::of("records.yml");
        let node = parse(documents(text)[0], &problems).unwrap();
        let endpoints = read(&Reader::root(&node, &problems));
        (
            endpoints,
            problems
                .into_vec()
                .iter()
                .map(ToString::to_string)
                .collect(),
        )
    }

    #[test]
    fn entries_become_record_sets() {
        let (found, problems) = read_text(
            "endpoints:\n- {dnsName: ABC.123.com., recordTTL: 180, targets: [1.2.3.4, 5.6.7.8]}\n\
             - dnsName: '*.example.org'\n  recordType: CNAME\n  targets: [abc.123.com]\n  setIdentifier: eu\n  \
             providerSpecific: [{name: aws/region, value: eu-west-1}]\n",
        );
        assert_eq!(problems, [] as [String; 0]);
        let shown: Vec<_> = found.records.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "abc.123.com 180 A 1.2.3.4,5.6.7.8",
                "*.example.org 0 CNAME abc.123.com set=eu"
            ]
        );
        assert_eq!(found.records[1].properties["aws/region"], "eu-west-1");
        assert_eq!(found.records[0].ttl, Some(180));
    }

    #[test]
    fn bad_entry_spares_good_entries() {
        let (found, problems) = read_text(
            "endpoints:\n- dnsName: a.example.org\n  targets: [300.0.0.1]\n- dnsName: b..org\n  targets: [1.2.3.4]\n\
             - dnsName: c.example.org\n  targets: [1.2.3.4]\n- dnsName: c.example.org\n  targets: [1.2.3.5]\n\
             - dnsName: d.example.org\n  recordTTL: -1\n  targets: [1.2.3.4]\n- dnsName: e.example.org\n  targets: []\n",
        );
        let shown: Vec<_> = found.records.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "a.example.org 0 A ",
                "c.example.org 0 A 1.2.3.4",
                "c.example.org 0 A ",
                "d.example.org 0 A ",
            ]
        );
        assert_eq!(found.untargeted[0].to_string(), "e.example.org 0 A ");
        assert!(found.is_unreadable);
        let places: Vec<_> = problems
            .iter()
            .map(|problem| problem.split(": ").nth(1).unwrap())
            .collect();
        assert_eq!(
            places,
            [
                "endpoints[0].targets[0]",
                "endpoints[1].dnsName",
                "endpoints[3]",
                "endpoints[4].recordTTL"
            ]
        );
        assert!(
            problems[0].starts_with("records.yml:3: ")
                && problems[0].contains("not an IPv4 address")
        );
        assert!(
            problems.iter().all(|problem| problem.contains("; ")),
            "{problems:?}"
        );
    }

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs
            .iter()
            .map(|(label, value)| ((*label).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn requirements_follow_kubernetes() {
        let router = labels(&[("app", "router"), ("tier", "a")]);
        for (text, wanted) in [
            ("", true),
            ("app=router", true),
            ("app == router, tier in (a, b)", true),
            ("app!=router", false),
            ("stage!=test", true),
            ("tier notin (a,b)", false),
            ("stage notin (test)", true),
            ("tier,!canary", true),
            ("canary", false),
            ("stage in (test)", false),
        ] {
            let selector = Selector::parse(text).unwrap();
            assert_eq!(selector.matches(&router), wanted, "{text}");
            assert_eq!(
                Selector::parse(&selector.to_string()).unwrap(),
                selector,
                "{text}"
            );
        }
        for text in ["=router", "a b", "tier in a,b"] {
            assert!(Selector::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn requirements_are_shown_as_read() {
        for (text, shown) in [
            ("a=b", "a=b"),
            ("a == b", "a=b"),
            ("a!=b", "a!=b"),
            ("a", "a"),
            ("!a", "!a"),
            ("a in (b, c)", "a in (b,c)"),
            ("a notin (b,c)", "a notin (b,c)"),
            ("a in (b,c),d", "a in (b,c),d"),
            ("", ""),
        ] {
            let selector = Selector::parse(text).unwrap();
            assert_eq!(selector.to_string(), shown, "{text}");
            assert_eq!(Selector::parse(shown).as_ref(), Ok(&selector));
        }
        for text in ["=b", "a b", "a$", "!"] {
            assert!(Selector::parse(text).is_err(), "{text}");
        }
        let labels: Labels = [("a".to_owned(), "b".to_owned())].into();
        for (text, expected) in [
            ("a=b", true),
            ("a=c", false),
            ("a!=b", false),
            ("a!=c", true),
            ("x!=c", true),
            ("a in (c,b)", true),
            ("x in (c,b)", false),
            ("a notin (c)", true),
            ("!a", false),
            ("!x", true),
            ("a,x", false),
            ("", true),
        ] {
            assert_eq!(
                Selector::parse(text).unwrap().matches(&labels),
                expected,
                "{text}"
            );
        }
    }

    #[test]
    fn aliases_have_one_target() {
        for (record_type, targets, problem) in [
            ("CNAME", "[a.org]", None),
            ("CNAME", "[a.org, a.org]", None),
            ("CNAME", "[]", None),
            (
                "CNAME",
                "[a.org, b.org]",
                Some("a CNAME must have exactly one target"),
            ),
            (
                "CNAME",
                "[a.org, b.org, c.org]",
                Some("a CNAME must have exactly one target"),
            ),
            ("NS", "[a.org, b.org]", None),
        ] {
            let (_, problems) = read_text(&format!(
                "endpoints:\n- {{dnsName: x.org, recordType: {record_type}, targets: {targets}}}\n"
            ));
            let expected: Vec<&str> = problem.into_iter().collect();
            assert_eq!(problems.len(), expected.len(), "{problems:?}");
            for (found, expected) in problems.iter().zip(expected) {
                assert!(found.contains(expected), "{found}");
            }
        }
    }

    #[test]
    fn entries_are_read_completely() {
        let (found, problems) = read_text(
            "endpoints:\n- {dnsName: a.example.org, recordTTL: 2147483647, recordType: aaaa, targets: ['2001:DB8::1'], \
             setIdentifier: eu, labels: {owner: x}, providerSpecific: [{name: alias, value: 'true'}]}\n\
             - {dnsName: b.example.org, recordTTL: 0, targets: [192.0.2.1]}\n",
        );
        assert_eq!(problems, [] as [&str; 0]);
        let mut first = Record::parse("a.example.org", RecordType::AAAA, ["2001:db8::1"]).unwrap();
        first.ttl = Some(2_147_483_647);
        first.set_identifier = "eu".to_owned();
        first.labels.0 = labels(&[("owner", "x")]);
        first.properties = labels(&[("alias", "true")]);
        let second = Record::parse("b.example.org", RecordType::A, ["192.0.2.1"]).unwrap();
        let expected = Endpoints {
            records: vec![first, second],
            ..Endpoints::default()
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn mistakes_of_entries_are_described() {
        for (entry, is_unreadable, expected) in [
            (
                "{targets: [192.0.2.1]}",
                true,
                "endpoints[0]: member \"dnsName\" is missing; add \"dnsName\"",
            ),
            (
                "{dnsName: a.b}",
                false,
                "endpoints[0]: member \"targets\" is missing; add \"targets\"",
            ),
            (
                "{dnsName: ., targets: [192.0.2.1]}",
                true,
                "endpoints[0].dnsName: the root cannot be published; use a name below one of your zones",
            ),
            (
                "{dnsName: a.b, recordType: SOA, targets: [x]}",
                true,
                "endpoints[0].recordType: records of type SOA cannot be published; remove the entry",
            ),
            (
                "{dnsName: a.b, recordTTL: 2147483648, targets: [192.0.2.1]}",
                false,
                "endpoints[0].recordTTL: 2147483648 is out of range; give a whole number from 0 to 2147483647",
            ),
            (
                "{dnsName: a.b, targets: [x]}",
                false,
                "endpoints[0].targets[0]: \"x\" is not valid data for a record of type A: it is not an IPv4 address; use \
                 valid data for type A",
            ),
            (
                "{dnsName: a.b, targets: ['']}",
                false,
                "endpoints[0].targets[0]: it is empty; set a value, or remove the member",
            ),
            (
                "{dnsName: a.b, target: [x], targets: [192.0.2.1]}",
                false,
                "endpoints[0].target: unknown member \"target\"; did you mean \"targets\"? If not, remove it",
            ),
            (
                "{dnsName: a.b, recordType: NS, targets: [a..b]}",
                false,
                "endpoints[0].targets[0]: \"a..b\" is not valid data for a record of type NS: \"a..b\" is not a domain \
                 name: it has an empty label; remove the extra dot; use valid data for type NS",
            ),
            (
                "{dnsName: a.b, targets: [192.0.2.1], providerSpecific: [{name: x}]}",
                false,
                "endpoints[0].providerSpecific[0]: member \"value\" is missing; add \"value\"",
            ),
            (
                "{dnsName: a.b, targets: [192.0.2.1], labels: {n: 1}}",
                false,
                "endpoints[0].labels.n: 1 instead of text; put it in quotes: \"1\"",
            ),
            ("1", true, "endpoints[0]: 1 instead of a map; give a map"),
        ] {
            let (found, problems) = read_text(&format!("endpoints:\n- {entry}\n"));
            assert_eq!(problems, [format!("records.yml:2: {expected}")]);
            assert_eq!(found.is_unreadable, is_unreadable, "{entry}");
            // Its name stays as it is, if it is known.
            let kept = found
                .records
                .iter()
                .filter(|record| record.targets.is_empty());
            assert_eq!(kept.count(), usize::from(!is_unreadable), "{entry}");
        }
        let (found, problems) = read_text("endpoints: 1\nmore: 2\n");
        assert!(found.records.is_empty() && found.is_unreadable);
        assert_eq!(
            problems,
            [
                "records.yml:1: endpoints: 1 instead of a list; give a list",
                "records.yml:2: more: unknown member \"more\"; remove it; known members are endpoints"
            ]
        );
    }
}
