//! Conversion of record sets between Route 53's XML and the record model, and batches of changes within the
//! limits of `ChangeResourceRecordSets`. Pure.

use super::api::Element;
use crate::{
    provider::{Step, Transaction},
    record::{Name, NameError, Record, RecordError, RecordType, Target},
};

/// Default TTL of new sets, and the TTL with which alias sets are compared.
pub(super) const DEFAULT_TTL: u32 = 300;

/// Properties that correspond to an element, in the order of the schema.
const ROUTING: [(&str, &str); 5] = [
    ("aws/weight", "Weight"),
    ("aws/region", "Region"),
    ("aws/failover", "Failover"),
    ("aws/multi-value-answer", "MultiValueAnswer"),
    ("aws/health-check-id", "HealthCheckId"),
];

/// Properties that correspond to a child of `GeoLocation`.
const GEOLOCATION: [(&str, &str); 3] = [
    ("aws/geolocation-continent-code", "ContinentCode"),
    ("aws/geolocation-country-code", "CountryCode"),
    ("aws/geolocation-subdivision-code", "SubdivisionCode"),
];

const ALIAS: &str = "alias";
const TARGET_ZONE: &str = "aws/target-hosted-zone";
const TARGET_HEALTH: &str = "aws/evaluate-target-health";

pub(super) fn is_alias(record: &Record) -> bool {
    record.property(ALIAS) == "true"
}

/// Largest weight of a set that Route 53 accepts.
const MAX_WEIGHT: u8 = u8::MAX;

/// Returns the reason, if any, why Route 53 would refuse a record because of its properties.
pub(super) fn unfit(record: &Record) -> Option<String> {
    // Route 53 refuses a batch as a whole, and its message may not name the property.
    for (name, value) in &record.properties {
        let remedy = match name.as_str() {
            "aws/weight" if value.parse::<u8>().is_err() => {
                format!("a number from 0 to {MAX_WEIGHT}")
            }
            "aws/failover" if !["PRIMARY", "SECONDARY"].contains(&value.as_str()) => {
                "PRIMARY or SECONDARY".to_owned()
            }
            "aws/multi-value-answer" | TARGET_HEALTH if value.parse::<bool>().is_err() => {
                "true or false".to_owned()
            }
            _ => continue,
        };
        return Some(format!("its property {name} is {value:?}; write {remedy}"));
    }
    None
}

/// Parses a name as Route 53 writes it, with octal escapes.
pub(super) fn read_name(text: &str) -> Result<Name, NameError> {
    Name::parse(&octal_to_decimal(text))
}

pub(super) fn read(set: &Element) -> Result<Record, RecordError> {
    let name = read_name(set.text_of("Name"))?;
    let record_type: RecordType = set.text_of("Type").parse()?;
    let mut record = Record::new(name, record_type, []);
    set.text_of("SetIdentifier")
        .clone_into(&mut record.set_identifier);
    read_properties(&mut record, set, &ROUTING);
    if let Some(location) = set.child("GeoLocation") {
        read_properties(&mut record, location, &GEOLOCATION);
    }
    if let Some(alias) = set.child("AliasTarget") {
        let target = read_name(alias.text_of("DNSName"))?;
        record.targets.insert(Target::alias(&target));
        // An alias set has no TTL of its own; with one, wanted and listed sets are equal.
        record.ttl = Some(DEFAULT_TTL);
        for (property, value) in [
            (ALIAS, "true"),
            (TARGET_ZONE, alias.text_of("HostedZoneId")),
            (TARGET_HEALTH, alias.text_of("EvaluateTargetHealth")),
        ] {
            record.set_property(property, value);
        }
        return Ok(record);
    }
    record.ttl = set.text_of("TTL").parse().ok();
    for value in set.list("ResourceRecords") {
        let text = value.text_of("Value");
        // Only names and texts are escaped by Route 53.
        let text = if record_type == RecordType::TXT {
            octal_to_decimal(text)
        } else {
            text.to_owned()
        };
        record.targets.insert(Target::parse(record_type, &text)?);
    }
    Ok(record)
}

fn read_properties(record: &mut Record, from: &Element, elements: &[(&str, &str)]) {
    for (property, element) in elements {
        if let Some(value) = from.child(element) {
            record.set_property(property, value.text.trim());
        }
    }
}

pub(super) fn write(record: &Record) -> Element {
    let mut children = vec![
        Element::text("Name", &format!("{}.", record.name)),
        Element::text("Type", &record.record_type.to_string()),
    ];
    if !record.set_identifier.is_empty() {
        children.push(Element::text("SetIdentifier", &record.set_identifier));
    }
    // The schema orders the elements, and Route 53 refuses others: HealthCheckId is the last one.
    let [routing @ .., (health_check, health_check_element)] = &ROUTING;
    let mut location = Vec::new();
    for (name, element) in GEOLOCATION {
        if let Some(value) = record.properties.get(name) {
            location.push(Element::text(element, value));
        }
    }
    for (name, element) in routing {
        // In the schema, GeoLocation precedes Failover.
        if *element == "Failover" && !location.is_empty() {
            children.push(Element::of("GeoLocation", std::mem::take(&mut location)));
        }
        children.extend(property_element(record, name, element));
    }
    if is_alias(record) {
        let health = match record.property(TARGET_HEALTH) {
            // As external-dns by default.
            "" => "true",
            health => health,
        };
        children.push(Element::of(
            "AliasTarget",
            [
                Element::text("HostedZoneId", record.property(TARGET_ZONE)),
                Element::text("DNSName", first_target(record)),
                Element::text("EvaluateTargetHealth", health),
            ],
        ));
    } else {
        let ttl = record.ttl.unwrap_or(DEFAULT_TTL);
        children.push(Element::text("TTL", &ttl.to_string()));
        let mut values = Vec::with_capacity(record.targets.len());
        for target in &record.targets {
            let value = Element::text("Value", &value_text(record.record_type, target));
            values.push(Element::of("ResourceRecord", [value]));
        }
        children.push(Element::of("ResourceRecords", values));
    }
    children.extend(property_element(record, health_check, health_check_element));
    Element::of("ResourceRecordSet", children)
}

fn first_target(record: &Record) -> &str {
    record.targets.first().map_or("", Target::as_str)
}

fn property_element(record: &Record, name: &str, element: &str) -> Option<Element> {
    Some(Element::text(element, record.properties.get(name)?))
}

/// Formats a value for Route 53: TXT in quoted strings of at most 255 octets.
fn value_text(record_type: RecordType, target: &Target) -> String {
    if record_type != RecordType::TXT {
        return target.as_str().to_owned();
    }
    let octets = target.text_octets();
    // A TXT record has at least one string (RFC 1035, section 3.3.14).
    if octets.is_empty() {
        return "\"\"".to_owned();
    }
    let mut strings = Vec::new();
    for string in octets.chunks(255) {
        let mut text = String::with_capacity(string.len());
        for octet in string {
            match octet {
                b'"' | b'\\' => text.extend(['\\', char::from(*octet)]),
                b' '..=b'~' => text.push(char::from(*octet)),
                // Route 53 uses octal escapes.
                _ => text.push_str(&format!("\\{octet:03o}")),
            }
        }
        strings.push(format!("\"{text}\""));
    }
    strings.join(" ")
}

/// Converts Route 53's octal escapes, such as `\052` for `*`, to decimal ones. Other escapes are kept.
fn octal_to_decimal(text: &str) -> String {
    let mut rewritten = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        rewritten.push_str(before);
        match escape
            .get(1..4)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok())
        {
            Some(octet) => {
                rewritten.push_str(&format!("\\{octet:03}"));
                rest = &escape[4..];
            }
            // An escape of one character: it must not begin another escape itself.
            None => {
                let length = 1 + escape.chars().nth(1).map_or(0, char::len_utf8);
                rewritten.push_str(&escape[..length]);
                rest = &escape[length..];
            }
        }
    }
    rewritten + rest
}

/// Record sets for a CNAME to a load balancer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BalancerRecords {
    /// The CNAME itself.
    Cname,
    /// Alias sets of both address types.
    Alias {
        /// Whether Route 53 answers only while the balancer is healthy.
        evaluate_health: bool,
    },
}

/// Adjusts wanted sets to the capabilities of Route 53.
pub(super) fn adjust(desired: &mut Vec<Record>, balancers: BalancerRecords) {
    let mut adjusted = Vec::with_capacity(desired.len());
    for mut record in desired.drain(..) {
        record
            .properties
            // A property that Route 53 does not keep would differ from the listed set in every round.
            .retain(|name, value| name.starts_with("aws/") || (name == ALIAS && value == "true"));
        let target = first_target(&record);
        let alias = match balancers {
            BalancerRecords::Alias { evaluate_health }
                if record.record_type == RecordType::CNAME =>
            {
                hosted_zone(target).map(|zone| (zone, evaluate_health))
            }
            _ => None,
        };
        let Some((zone, evaluate_health)) = alias else {
            // Only a CNAME to a known zone can become an alias.
            record.properties.remove(ALIAS);
            adjusted.push(record);
            continue;
        };
        record.ttl = Some(DEFAULT_TTL);
        record.set_property(ALIAS, "true");
        record.set_property(TARGET_ZONE, zone);
        let health = record.properties.entry(TARGET_HEALTH.to_owned());
        // A document may decide for itself.
        health.or_insert_with(|| evaluate_health.to_string());
        // A balancer may have addresses of both families; an alias without any answers nothing.
        for record_type in [RecordType::A, RecordType::AAAA] {
            adjusted.push(Record {
                record_type,
                ..record.clone()
            });
        }
    }
    *desired = adjusted;
}

/// Suffix of the target's name, and the hosted zone to use in an alias.
///
/// AWS General Reference: "Elastic Load Balancing endpoints", "CloudFront", "Global Accelerator".
const ZONES: &[(&str, &str)] = &[
    // Application and classic load balancers.
    ("us-east-2.elb.amazonaws.com", "Z3AADJGX6KTTL2"),
    ("us-east-1.elb.amazonaws.com", "Z35SXDOTRQ7X7K"),
    ("us-west-1.elb.amazonaws.com", "Z368ELLRRE2KJ0"),
    ("us-west-2.elb.amazonaws.com", "Z1H1FL5HABSF5"),
    ("ca-central-1.elb.amazonaws.com", "ZQSVJUPU6J1EY"),
    ("ap-east-1.elb.amazonaws.com", "Z3DQVH9N71FHZ0"),
    ("ap-south-1.elb.amazonaws.com", "ZP97RAFLXTNZK"),
    ("ap-northeast-1.elb.amazonaws.com", "Z14GRHDCWA56QT"),
    ("ap-northeast-2.elb.amazonaws.com", "ZWKZPGTI48KDX"),
    ("ap-southeast-1.elb.amazonaws.com", "Z1LMS91P8CMLE5"),
    ("ap-southeast-2.elb.amazonaws.com", "Z1GM3OXH4ZPM65"),
    ("eu-central-1.elb.amazonaws.com", "Z215JYRZR1TBD5"),
    ("eu-west-1.elb.amazonaws.com", "Z32O12XQLNTSW2"),
    ("eu-west-2.elb.amazonaws.com", "ZHURV8PSTC4K8"),
    ("eu-west-3.elb.amazonaws.com", "Z3Q77PNBQS71R4"),
    ("eu-north-1.elb.amazonaws.com", "Z23TAZ6LKFMNIO"),
    ("eu-south-1.elb.amazonaws.com", "Z3ULH7SSC9OV64"),
    ("sa-east-1.elb.amazonaws.com", "Z2P70J7HTTTPLU"),
    ("me-south-1.elb.amazonaws.com", "ZS929ML54UICD"),
    ("af-south-1.elb.amazonaws.com", "Z268VQBMOI5EKX"),
    ("us-gov-west-1.elb.amazonaws.com", "Z33AYJ8TM3BH4J"),
    ("us-gov-east-1.elb.amazonaws.com", "Z166TLBEWOO7G0"),
    // Network load balancers.
    ("elb.us-east-2.amazonaws.com", "ZLMOA37VPKANP"),
    ("elb.us-east-1.amazonaws.com", "Z26RNL4JYFTOTI"),
    ("elb.us-west-1.amazonaws.com", "Z24FKFUX50B4VW"),
    ("elb.us-west-2.amazonaws.com", "Z18D5FSROUN65G"),
    ("elb.ca-central-1.amazonaws.com", "Z2EPGBW3API2WT"),
    ("elb.ap-east-1.amazonaws.com", "Z12Y7K3UBGUAD1"),
    ("elb.ap-south-1.amazonaws.com", "ZVDDRBQ08TROA"),
    ("elb.ap-northeast-1.amazonaws.com", "Z31USIVHYNEOWT"),
    ("elb.ap-northeast-2.amazonaws.com", "ZIBE1TIR4HY56"),
    ("elb.ap-southeast-1.amazonaws.com", "ZKVM4W9LS7TM"),
    ("elb.ap-southeast-2.amazonaws.com", "ZCT6FZBF4DROD"),
    ("elb.eu-central-1.amazonaws.com", "Z3F0SRJ5LGBH90"),
    ("elb.eu-west-1.amazonaws.com", "Z2IFOLAFXWLO4F"),
    ("elb.eu-west-2.amazonaws.com", "ZD4D7Y8KGAS4G"),
    ("elb.eu-west-3.amazonaws.com", "Z1CMS0P5QUZ6D5"),
    ("elb.eu-north-1.amazonaws.com", "Z1UDT6IFJ4EJM"),
    ("elb.eu-south-1.amazonaws.com", "Z23146JA1KNAFP"),
    ("elb.sa-east-1.amazonaws.com", "ZTK26PT1VY4CU"),
    // Other targets.
    ("cloudfront.net", "Z2FDTNDATAQYW2"),
    ("awsglobalaccelerator.com", "Z2BJ6XQ5FK7U4H"),
];

fn hosted_zone(target: &str) -> Option<&'static str> {
    for (suffix, zone) in ZONES {
        if let Some(before) = target.strip_suffix(suffix)
            // At the boundary of a label: `notcloudfront.net` is another domain.
            && before.ends_with('.')
        {
            return Some(zone);
        }
    }
    None
}

pub(super) const MAX_CHANGES: usize = 1_000;

/// Maximum number of characters of all values in a batch.
const MAX_OCTETS: usize = 32_000;

const MAX_VALUES: usize = 1_000;

const DELETE: &str = "DELETE";

const CREATE: &str = "CREATE";

/// Quantities that Route 53 limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) changes: usize,
    pub(super) octets: usize,
    pub(super) values: usize,
}

impl Size {
    pub(super) fn of(set: &Element) -> Self {
        let mut size = Self {
            changes: 1,
            ..Self::default()
        };
        if let Some(alias) = set.child("AliasTarget") {
            size.octets = alias.text_of("DNSName").trim_end_matches('.').len();
            size.values = 1;
        }
        for value in set.list("ResourceRecords") {
            size.octets += value.text_of("Value").len();
            size.values += 1;
        }
        size
    }

    fn add(&mut self, other: Self) {
        self.changes += other.changes;
        self.octets += other.octets;
        self.values += other.values;
    }

    pub(super) fn fits(self, max_changes: usize) -> bool {
        self.changes <= max_changes && self.octets <= MAX_OCTETS && self.values <= MAX_VALUES
    }
}

/// Changes of one transaction, always sent in one batch.
#[derive(Debug, Clone)]
pub(super) struct SetChanges {
    /// `DELETE` or `CREATE`, and the set.
    changes: Vec<(&'static str, Element)>,
    pub(super) size: Size,
}

impl SetChanges {
    /// Converts steps to changes. `listed` returns a set exactly as Route 53 listed it, if it did.
    ///
    /// A deletion must name the exact set, so it also compares: a set that must stay is deleted and
    /// created in the same batch. A creation fails if the set exists.
    pub(super) fn new(transaction: &Transaction, listed: impl Fn(&Record) -> Element) -> Self {
        let mut changes = Vec::new();
        for step in &transaction.steps {
            let (before, after) = match step {
                Step::Create(record) => (None, Some(write(record))),
                Step::Delete(record) => (Some(record), None),
                Step::Replace { before, after } => (Some(before), Some(write(after))),
                Step::Require(record) => (Some(record), Some(listed(record))),
                // Route 53 itself refuses a CNAME beside other sets.
                Step::RequireAbsent(..) => (None, None),
            };
            if let Some(before) = before {
                changes.push((DELETE, listed(before)));
            }
            if let Some(after) = after {
                changes.push((CREATE, after));
            }
        }
        let mut size = Size::default();
        for (_, set) in &changes {
            size.add(Size::of(set));
        }
        Self { changes, size }
    }
}

pub(super) fn fitting(transactions: &[SetChanges], max_changes: usize) -> usize {
    let mut size = Size::default();
    transactions
        .iter()
        .take_while(|changes| {
            size.add(changes.size);
            size.fits(max_changes)
        })
        .count()
}

pub(super) fn request(group: &[SetChanges]) -> Element {
    let mut sorted = Vec::new();
    for one in group {
        sorted.extend(&one.changes);
    }
    // All deletions first, so that no CREATE meets the set that it replaces. Names and types only
    // make equal batches equal.
    sorted.sort_by_key(|(verb, set)| (*verb == CREATE, set.text_of("Name"), set.text_of("Type")));
    let mut changes = Vec::with_capacity(sorted.len());
    for (verb, set) in sorted {
        let verb = Element::text("Action", verb);
        changes.push(Element::of("Change", [verb, set.clone()]));
    }
    let batch = Element::of(
        "ChangeBatch",
        [
            Element::text("Comment", "bosh-dns-publish"),
            Element::of("Changes", changes),
        ],
    );
    Element::of("ChangeResourceRecordSetsRequest", [batch])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balancer_becomes_alias_of_both_types() {
        let cname = Record::parse(
            "www.example.org",
            RecordType::CNAME,
            ["lb.us-east-1.elb.amazonaws.com"],
        )
        .unwrap();
        let mut desired = vec![cname.clone()];
        adjust(
            &mut desired,
            BalancerRecords::Alias {
                evaluate_health: true,
            },
        );
        let types: Vec<RecordType> = desired.iter().map(|record| record.record_type).collect();
        assert_eq!(types, [RecordType::A, RecordType::AAAA]);
        assert!(
            desired
                .iter()
                .all(|record| is_alias(record) && record.ttl == Some(300))
        );
        let again = read(&write(&desired[0])).unwrap();
        assert_eq!(again, desired[0]);
        let mut kept = vec![cname.clone()];
        adjust(&mut kept, BalancerRecords::Cname);
        assert_eq!(kept, [cname]);
    }

    #[test]
    fn sets_survive_xml() {
        let mut record = Record::parse(
            "*.example.org",
            RecordType::TXT,
            ["a \"b\" \\303 <&> \u{e9}"],
        )
        .unwrap();
        record.ttl = Some(60);
        record.set_identifier = "blue".to_owned();
        record
            .properties
            .insert("aws/weight".to_owned(), "10".to_owned());
        record
            .properties
            .insert("aws/geolocation-country-code".to_owned(), "DE".to_owned());
        let xml = write(&record).document("urn:x");
        let parsed = Element::parse(xml.as_bytes()).unwrap();
        assert_eq!(read(&parsed).unwrap(), record);
        let listed = xml.replace("<Name>*.", "<Name>\\052.");
        assert_eq!(
            read(&Element::parse(listed.as_bytes()).unwrap()).unwrap(),
            record
        );
    }

    /// Parses `VERB name type target,target` or `VERB name type ALIAS target`.
    fn change(line: &str) -> SetChanges {
        let words: Vec<&str> = line.split(' ').collect();
        let record_type: RecordType = words[2].parse().unwrap();
        let name = Name::parse(&format!("{}.example.org", words[1])).unwrap();
        let mut record = Record::new(name.clone(), record_type, []);
        if let ["ALIAS", target] = words[3..] {
            record
                .targets
                .insert(Target::alias(&Name::parse(target).unwrap()));
            record
                .properties
                .insert("alias".to_owned(), "true".to_owned());
        } else {
            record.targets.extend(
                words[3]
                    .split(',')
                    .map(|target| Target::parse(record_type, target).unwrap()),
            );
        }
        // A replacement corresponds to UPSERT: both count the values twice.
        let step = match words[0] {
            "CREATE" => Step::Create(record),
            "DELETE" => Step::Delete(record),
            _ => Step::Replace {
                before: record.clone(),
                after: record,
            },
        };
        SetChanges::new(
            &Transaction {
                name,
                steps: vec![step],
            },
            write,
        )
    }

    #[test]
    fn sizes_match_cases() {
        let default = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases");
        let folder =
            std::env::var("BOSH_DNS_EXTERNAL_CASES").unwrap_or_else(|_| default.to_owned());
        let file = std::fs::read_to_string(format!("{folder}/route53_cases.json")).unwrap();
        let cases: Vec<serde_json::Value> = serde_json::from_str(&file).unwrap();
        for case in &cases {
            let id = case["id"].as_str().unwrap();
            if let (Some(bytes), Some(changes)) =
                (case["bytes"].as_u64(), case["changes"].as_array())
            {
                let mut size = Size::default();
                for line in changes {
                    size.add(change(line.as_str().unwrap()).size);
                }
                assert_eq!(size.octets as u64, bytes, "{id}");
                assert_eq!(Some(size.values as u64), case["values"].as_u64(), "{id}");
            } else if let Some(ttl) = case["ttl"].as_u64() {
                assert_eq!(u64::from(DEFAULT_TTL), ttl, "{id}");
            } else if let Some(desired) = case["desired"].as_str() {
                let words: Vec<&str> = desired.split(' ').collect();
                let wanted =
                    Record::parse(words[0], words[1].parse().unwrap(), [words[2]]).unwrap();
                let mut adjusted = vec![wanted];
                adjust(
                    &mut adjusted,
                    BalancerRecords::Alias {
                        evaluate_health: true,
                    },
                );
                let kind = |record: &Record| if is_alias(record) { "ALIAS" } else { "" };
                let shown: Vec<String> = adjusted
                    .iter()
                    .map(|record| {
                        format!("{} {} {}", record.name, record.record_type, kind(record))
                    })
                    .collect();
                assert_eq!(serde_json::json!(shown), case["becomes"], "{id}");
            } else {
                println!(
                    "{id}: skipped, because it describes calls; tests/servers/route53.rs makes them"
                );
            }
        }
    }

    #[test]
    fn deletions_come_first() {
        let record =
            |name: &str, record_type, target| Record::parse(name, record_type, [target]).unwrap();
        let steps = vec![
            Step::Create(record("b.example.org", RecordType::A, "192.0.2.1")),
            Step::Delete(record("c.example.org", RecordType::CNAME, "x.example.net")),
            Step::Delete(record("a.example.org", RecordType::A, "192.0.2.1")),
        ];
        let name = record("a.example.org", RecordType::A, "192.0.2.1").name;
        let changes = SetChanges::new(&Transaction { name, steps }, write);
        let request = request(&[changes]);
        let order: Vec<String> = request
            .find("Changes")
            .unwrap()
            .children
            .iter()
            .map(|change| {
                format!(
                    "{} {}",
                    change.text_of("Action"),
                    change.children[1].text_of("Name")
                )
            })
            .collect();
        assert_eq!(
            order,
            [
                "DELETE a.example.org.",
                "DELETE c.example.org.",
                "CREATE b.example.org."
            ]
        );
    }

    #[test]
    fn batches_hold_what_fits() {
        let transaction = |changes, octets, values| SetChanges {
            changes: Vec::new(),
            size: Size {
                changes,
                octets,
                values,
            },
        };
        let of = |changes| transaction(changes, 1, 1);
        let octets = |octets| transaction(1, octets, 1);
        let values = |values| transaction(1, 1, values);
        for (transactions, expected) in [
            (vec![], 0),
            (vec![of(10)], 1),
            (vec![of(11)], 0),
            (vec![of(4), of(6)], 2),
            (vec![of(4), of(7), of(1)], 1),
            (vec![octets(MAX_OCTETS - 1), octets(1), octets(1)], 2),
            (vec![values(MAX_VALUES - 1), values(1), values(1)], 2),
            (vec![octets(MAX_OCTETS + 1)], 0),
            (vec![values(MAX_VALUES + 1)], 0),
        ] {
            assert_eq!(fitting(&transactions, 10), expected);
        }
    }

    #[test]
    fn zones_of_balancers_are_known_by_their_suffix() {
        for (target, zone) in [
            ("lb.elb.us-west-2.amazonaws.com", Some("Z18D5FSROUN65G")),
            ("a.b.elb.sa-east-1.amazonaws.com", Some("ZTK26PT1VY4CU")),
            ("d111.cloudfront.net", Some("Z2FDTNDATAQYW2")),
            ("x.awsglobalaccelerator.com", Some("Z2BJ6XQ5FK7U4H")),
            ("cloudfront.net", None),
            ("notcloudfront.net", None),
            ("cloudfront.net.example.org", None),
        ] {
            assert_eq!(hosted_zone(target), zone, "{target}");
        }
    }

    #[test]
    fn properties_must_suit_route_53() {
        for (property, value, remedy) in [
            ("aws/weight", "0", None),
            ("aws/weight", "255", None),
            ("aws/weight", "256", Some("a number from 0 to 255")),
            ("aws/weight", "-1", Some("a number from 0 to 255")),
            ("aws/failover", "PRIMARY", None),
            ("aws/failover", "SECONDARY", None),
            ("aws/failover", "primary", Some("PRIMARY or SECONDARY")),
            ("aws/multi-value-answer", "true", None),
            ("aws/multi-value-answer", "yes", Some("true or false")),
            ("aws/evaluate-target-health", "false", None),
            ("aws/evaluate-target-health", "", Some("true or false")),
            ("aws/region", "anywhere", None),
        ] {
            let mut record = Record::parse("a.example.org", RecordType::A, ["192.0.2.1"]).unwrap();
            record.set_property(property, value);
            let expected = remedy
                .map(|remedy| format!("its property {property} is {value:?}; write {remedy}"));
            assert_eq!(unfit(&record), expected);
        }
    }

    fn written(record: &Record) -> String {
        let mut xml = String::new();
        write(record).write(&mut xml);
        let xml = xml.strip_prefix("<ResourceRecordSet>").unwrap();
        xml.strip_suffix("</ResourceRecordSet>").unwrap().to_owned()
    }

    #[test]
    fn schema_orders_the_elements() {
        let mut record =
            Record::parse("a.example.org", RecordType::A, ["192.0.2.1", "192.0.2.2"]).unwrap();
        let head = "<Name>a.example.org.</Name><Type>A</Type>";
        let values = "<ResourceRecords><ResourceRecord><Value>192.0.2.1</Value></ResourceRecord>\
                      <ResourceRecord><Value>192.0.2.2</Value></ResourceRecord></ResourceRecords>";
        assert_eq!(written(&record), format!("{head}<TTL>300</TTL>{values}"));
        record.ttl = Some(60);
        record.set_identifier = "blue".to_owned();
        for (property, value) in [
            ("aws/weight", "1"),
            ("aws/region", "eu"),
            ("aws/failover", "PRIMARY"),
            ("aws/multi-value-answer", "true"),
            ("aws/health-check-id", "h"),
            ("aws/geolocation-continent-code", "EU"),
            ("aws/geolocation-country-code", "DE"),
            ("aws/geolocation-subdivision-code", "BE"),
        ] {
            record.set_property(property, value);
        }
        assert_eq!(
            written(&record),
            format!(
                "{head}<SetIdentifier>blue</SetIdentifier><Weight>1</Weight><Region>eu</Region><GeoLocation>\
                 <ContinentCode>EU</ContinentCode><CountryCode>DE</CountryCode><SubdivisionCode>BE</SubdivisionCode>\
                 </GeoLocation><Failover>PRIMARY</Failover><MultiValueAnswer>true</MultiValueAnswer><TTL>60</TTL>\
                 {values}<HealthCheckId>h</HealthCheckId>"
            )
        );
        assert_eq!(read(&write(&record)).unwrap(), record);
        let mut alias = Record::new(Name::parse("a.example.org").unwrap(), RecordType::A, []);
        alias
            .targets
            .insert(Target::alias(&Name::parse("lb.example.net").unwrap()));
        alias.set_property("alias", "true");
        alias.set_property("aws/target-hosted-zone", "Z1");
        let target = |health: &str| {
            format!(
                "{head}<AliasTarget><HostedZoneId>Z1</HostedZoneId><DNSName>lb.example.net</DNSName>\
                 <EvaluateTargetHealth>{health}</EvaluateTargetHealth></AliasTarget>"
            )
        };
        assert_eq!(written(&alias), target("true"));
        alias.set_property("aws/evaluate-target-health", "false");
        assert_eq!(written(&alias), target("false"));
        alias.ttl = Some(300);
        assert_eq!(read(&write(&alias)).unwrap(), alias);
    }

    #[test]
    fn listed_sets_are_read() {
        let element = |text: &str| Element::parse(text.as_bytes()).unwrap();
        let listed = element(
            "<S><Name>\\052.example.org.</Name><Type>TXT</Type><TTL>5</TTL><ResourceRecords><ResourceRecord><Value>\
             \"a\\344\" \"b\"</Value></ResourceRecord></ResourceRecords></S>",
        );
        let record = read(&listed).unwrap();
        assert_eq!(record.to_string(), "*.example.org 5 TXT a\\228b");
        let without = element("<S><Name>a.</Name><Type>A</Type></S>");
        assert_eq!(read(&without).unwrap().ttl, None);
        let address = element(
            "<S><Name>a.</Name><Type>A</Type><ResourceRecords><ResourceRecord><Value>x</Value></ResourceRecord>\
             </ResourceRecords></S>",
        );
        assert!(read(&address).is_err());
        assert!(read(&element("<S><Name>a.</Name><Type>NEW</Type></S>")).is_err());
        assert!(read(&element("<S><Name>a..b</Name><Type>A</Type></S>")).is_err());
    }

    #[test]
    fn octal_escapes_become_decimal() {
        for (text, expected) in [
            ("", ""),
            ("a.b", "a.b"),
            (r"\052.a", r"\042.a"),
            (r"a\344\000b", r"a\228\000b"),
            (r"\377", r"\255"),
            (r"\400", r"\400"),
            (r"\\052", r"\\052"),
            ("\\\"x", "\\\"x"),
            (r"a\05", r"a\05"),
            (r"a\", r"a\"),
            ("\\é", "\\é"),
        ] {
            assert_eq!(octal_to_decimal(text), expected, "{text}");
        }
    }

    #[test]
    fn texts_are_written_in_strings() {
        let written = |octets: &[u8]| value_text(RecordType::TXT, &Target::text(octets));
        assert_eq!(written(b""), "\"\"");
        assert_eq!(written(b"a \"b\" \\ ~"), r#""a \"b\" \\ ~""#);
        assert_eq!(written(b"\x1f\x7f\xff"), r#""\037\177\377""#);
        assert_eq!(written(&[b'x'; 255]), format!("\"{}\"", "x".repeat(255)));
        assert_eq!(
            written(&[b'x'; 256]),
            format!("\"{}\" \"x\"", "x".repeat(255))
        );
        let alias = Target::alias(&Name::parse("a.b").unwrap());
        assert_eq!(value_text(RecordType::CNAME, &alias), "a.b");
    }

    #[test]
    fn sizes_count_octets_and_values() {
        let record =
            Record::parse("a.example.org", RecordType::A, ["192.0.2.1", "192.0.2.20"]).unwrap();
        let size = |changes, octets, values| Size {
            changes,
            octets,
            values,
        };
        assert_eq!(Size::of(&write(&record)), size(1, 19, 2));
        let mut alias = Record::new(record.name.clone(), RecordType::A, []);
        alias
            .targets
            .insert(Target::alias(&Name::parse("lb.example.net").unwrap()));
        alias.set_property("alias", "true");
        assert_eq!(Size::of(&write(&alias)), size(1, 14, 1));
        let mut sum = size(1, 2, 3);
        sum.add(size(10, 20, 30));
        assert_eq!(sum, size(11, 22, 33));
        for (size, expected) in [
            (size(10, 32_000, 1_000), true),
            (size(11, 1, 1), false),
            (size(1, 32_001, 1), false),
            (size(1, 1, 1_001), false),
        ] {
            assert_eq!(size.fits(10), expected, "{size:?}");
        }
    }

    #[test]
    fn steps_delete_the_listed_set() {
        let record = |name: &str, target: &str| {
            Record::parse(&format!("{name}.example.org"), RecordType::A, [target]).unwrap()
        };
        let name = record("a", "192.0.2.1").name;
        let transaction = Transaction {
            name: name.clone(),
            steps: vec![
                Step::Require(record("a", "192.0.2.1")),
                Step::RequireAbsent(name, RecordType::MX),
                Step::Replace {
                    before: record("b", "192.0.2.1"),
                    after: record("b", "192.0.2.2"),
                },
                Step::Delete(record("c", "192.0.2.1")),
                Step::Create(record("d", "192.0.2.1")),
            ],
        };
        let exact = Element::of("Exact", [Element::text("Name", "a.example.org.")]);
        let changes = SetChanges::new(&transaction, |wanted| {
            if wanted.name.as_str() == "a.example.org" {
                exact.clone()
            } else {
                write(wanted)
            }
        });
        let shown: Vec<String> = changes
            .changes
            .iter()
            .map(|(verb, set)| format!("{verb} {} {}", set.name, set.text_of("Name")))
            .collect();
        assert_eq!(
            shown,
            [
                "DELETE Exact a.example.org.",
                "CREATE Exact a.example.org.",
                "DELETE ResourceRecordSet b.example.org.",
                "CREATE ResourceRecordSet b.example.org.",
                "DELETE ResourceRecordSet c.example.org.",
                "CREATE ResourceRecordSet d.example.org.",
            ]
        );
        assert_eq!((changes.size.changes, changes.size.values), (6, 4));
        let mut xml = String::new();
        let created = Transaction {
            name: record("d", "192.0.2.1").name,
            steps: vec![Step::Create(record("d", "192.0.2.1"))],
        };
        request(&[SetChanges::new(&created, write)]).write(&mut xml);
        assert_eq!(
            xml,
            "<ChangeResourceRecordSetsRequest><ChangeBatch><Comment>bosh-dns-publish</Comment><Changes><Change>\
             <Action>CREATE</Action><ResourceRecordSet><Name>d.example.org.</Name><Type>A</Type><TTL>300</TTL>\
             <ResourceRecords><ResourceRecord><Value>192.0.2.1</Value></ResourceRecord></ResourceRecords>\
             </ResourceRecordSet></Change></Changes></ChangeBatch></ChangeResourceRecordSetsRequest>"
        );
    }

    #[test]
    fn wanted_sets_match_route_53() {
        let wanted = |target: &str, properties: &[(&str, &str)]| {
            let mut record = Record::parse("www.example.org", RecordType::CNAME, [target]).unwrap();
            record.ttl = Some(60);
            for (name, value) in properties {
                record.set_property(name, value);
            }
            record
        };
        let adjusted = |record: Record, balancers| {
            let mut desired = vec![record];
            adjust(&mut desired, balancers);
            let mut lines = Vec::new();
            for record in desired {
                lines.push(format!("{record} {:?}", record.properties));
            }
            lines
        };
        let alias = BalancerRecords::Alias {
            evaluate_health: false,
        };
        let given = [
            ("alias", "true"),
            ("aws/weight", "1"),
            ("coredns/group", "g"),
        ];
        assert_eq!(
            adjusted(wanted("a.example.net", &given), alias),
            ["www.example.org 60 CNAME a.example.net {\"aws/weight\": \"1\"}"]
        );
        let balancer = "lb.elb.us-west-2.amazonaws.com";
        let properties = |health: &str| {
            format!(
                "{{\"alias\": \"true\", \"aws/evaluate-target-health\": \"{health}\", \"aws/target-hosted-zone\": \
                 \"Z18D5FSROUN65G\"}}"
            )
        };
        assert_eq!(
            adjusted(wanted(balancer, &[("alias", "false")]), alias),
            [
                format!("www.example.org 300 A {balancer} {}", properties("false")),
                format!(
                    "www.example.org 300 AAAA {balancer} {}",
                    properties("false")
                ),
            ]
        );
        let own = wanted(balancer, &[("aws/evaluate-target-health", "true")]);
        assert!(adjusted(own, alias)[0].ends_with(&properties("true")));
        assert_eq!(
            adjusted(
                wanted(balancer, &[("alias", "true")]),
                BalancerRecords::Cname
            ),
            [format!("www.example.org 60 CNAME {balancer} {{}}")]
        );
        let address = Record::parse("www.example.org", RecordType::A, ["192.0.2.1"]).unwrap();
        assert_eq!(
            adjusted(address, alias),
            ["www.example.org 0 A 192.0.2.1 {}"]
        );
    }
}
