//! Messages of external-dns's webhook protocol. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::go_json::present;
use crate::record::{DomainFilter, NameError, Record, RecordError, RecordType};

pub(crate) const MEDIA_TYPE: &str = "application/external.dns.webhook+json;version=1";

/// Returns whether a header names the media type of this version, or for `Accept` allows it. Other parameters, such as
/// a charset, change nothing (RFC 9110, section 8.3.1).
pub(crate) fn is_media_type(header: &str) -> bool {
    header.split(',').any(is_one_media_type)
}

fn is_one_media_type(text: &str) -> bool {
    let mut parts = text.split(';').map(str::trim);
    let essence = parts.next().unwrap_or_default().to_ascii_lowercase();
    // Clients that are not external-dns, such as an operator's curl, name no version.
    if ["*/*", "application/*"].contains(&essence.as_str()) {
        return true;
    }
    let version = parts.find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim()
            .eq_ignore_ascii_case("version")
            .then(|| value.trim().trim_matches('"'))
    });
    essence == "application/external.dns.webhook+json" && version == Some("1")
}

/// Maximum size of a message in octets.
pub(crate) const MAX_MESSAGE: usize = 32 << 20;

/// Domains that a provider serves, in the form of `GET /`: lists of suffixes, or regular expressions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Domains {
    /// Suffixes of names to include; all if it is empty.
    #[serde(alias = "filters", skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<String>,
    /// Suffixes of names to exclude.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// Regular expression of names to include; all if it is empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub regex_include: String,
    /// Regular expression of names to exclude.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub regex_exclude: String,
}

/// Reason why a domain filter is unusable.
#[derive(Debug, thiserror::Error)]
pub enum DomainsError {
    #[error("the domain filter has suffixes and regular expressions; use either")]
    Mixed,
    #[error("the domain filter has an invalid suffix: {0}")]
    Suffix(#[from] NameError),
    #[error("the domain filter has an invalid regular expression: {0}")]
    Regex(#[from] regex::Error),
}

impl Domains {
    pub fn filter(&self) -> Result<DomainFilter, DomainsError> {
        let Self {
            include,
            exclude,
            regex_include,
            regex_exclude,
        } = self;
        let has_regex = !regex_include.is_empty() || !regex_exclude.is_empty();
        // external-dns ignores the suffixes then, which is surprising for a filter.
        if has_regex && !(include.is_empty() && exclude.is_empty()) {
            return Err(DomainsError::Mixed);
        }
        let include = include.iter().map(String::as_str);
        let exclude = exclude.iter().map(String::as_str);
        let filter = DomainFilter::new(include, exclude)?;
        Ok(filter.with_patterns(filled(regex_include), filled(regex_exclude))?)
    }
}

fn filled(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

/// A record set on the wire.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Endpoint {
    pub(crate) dns_name: String,
    pub(crate) targets: Vec<String>,
    pub(crate) record_type: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) set_identifier: String,
    #[serde(rename = "recordTTL", skip_serializing_if = "is_zero")]
    pub(crate) record_ttl: i64,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) provider_specific: Vec<Property>,
}

/// A list of record sets as a body, in which Go may write a nil pointer.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct EndpointList(#[serde(deserialize_with = "present")] pub(crate) Vec<Endpoint>);

#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Property {
    pub(crate) name: String,
    pub(crate) value: String,
}

/// Body of `POST /records`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Changes {
    #[serde(deserialize_with = "present")]
    pub(crate) create: Vec<Endpoint>,
    #[serde(deserialize_with = "present")]
    pub(crate) update_old: Vec<Endpoint>,
    #[serde(deserialize_with = "present")]
    pub(crate) update_new: Vec<Endpoint>,
    #[serde(deserialize_with = "present")]
    pub(crate) delete: Vec<Endpoint>,
}

fn is_zero(number: &i64) -> bool {
    *number == 0
}

impl Endpoint {
    pub(crate) fn of(record: &Record) -> Self {
        let Record {
            name,
            record_type,
            set_identifier,
            targets,
            ttl,
            labels,
            properties,
        } = record;
        let mut endpoint = Self {
            dns_name: name.to_string(),
            targets: Vec::with_capacity(targets.len()),
            record_type: record_type.to_string(),
            set_identifier: set_identifier.clone(),
            record_ttl: ttl.map_or(0, i64::from),
            labels: labels.0.clone(),
            provider_specific: Vec::with_capacity(properties.len()),
        };
        for target in targets {
            endpoint.targets.push(match *record_type {
                // As external-dns writes the texts of its owner records; `record` reads them with
                // and without quotes.
                RecordType::TXT => format!("\"{}\"", target.as_str().replace('"', "\\\"")),
                _ => target.as_str().to_owned(),
            });
        }
        for (name, value) in properties {
            endpoint.provider_specific.push(Property {
                name: name.clone(),
                value: value.clone(),
            });
        }
        endpoint
    }

    /// Returns the record set without labels, which owner records hold.
    pub(crate) fn record(&self) -> Result<Record, RecordError> {
        let record_type: RecordType = self.record_type.parse()?;
        let mut record = match Record::parse(&self.dns_name, record_type, &self.targets) {
            Ok(record) => record,
            // Some providers list an alias as an address set whose target is a name.
            Err(error) if record_type.is_address() => {
                let alias = Record::parse(&self.dns_name, RecordType::CNAME, &self.targets);
                let mut alias = alias.map_err(|_| error)?;
                alias.record_type = record_type;
                alias
            }
            Err(error) => return Err(error),
        };
        record.set_identifier.clone_from(&self.set_identifier);
        // Go leaves out a TTL of 0, which is none.
        record.ttl = u32::try_from(self.record_ttl).ok().filter(|ttl| *ttl > 0);
        for Property { name, value } in &self.provider_specific {
            record.properties.insert(name.clone(), value.clone());
        }
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{go_json, record::Name};

    #[test]
    fn endpoints_keep_their_members() {
        let text = r#"{"dnsName": "A.example.org", "targets": ["192.0.2.1"], "recordType": "A", "recordTTL": 60,
            "setIdentifier": "blue", "labels": {"owner": "x"}, "providerSpecific": [{"name": "alias", "value": "true"}]}"#;
        let endpoint: Endpoint = go_json::from_slice(text.as_bytes()).unwrap();
        let record = endpoint.record().unwrap();
        assert_eq!(record.to_string(), "a.example.org 60 A 192.0.2.1 set=blue");
        assert_eq!(record.properties["alias"], "true");
        assert!(
            record.labels.0.is_empty(),
            "labels come from the owner record"
        );
        let again = serde_json::to_value(Endpoint::of(&record)).unwrap();
        assert_eq!(again["recordTTL"], 60);
        let alias =
            r#"{"dnsName": "a.example.org", "targets": ["lb.example.net"], "recordType": "A"}"#;
        let alias: Endpoint = go_json::from_slice(alias.as_bytes()).unwrap();
        assert_eq!(
            alias.record().unwrap().to_string(),
            "a.example.org 0 A lb.example.net"
        );
        let owner = Record::parse(
            "t.example.org",
            RecordType::TXT,
            ["\"heritage=external-dns\""],
        )
        .unwrap();
        assert_eq!(Endpoint::of(&owner).targets, ["\"heritage=external-dns\""]);
        for text in ["", "a", "a\"b", "\"", "\\", "a\\\"", "\n"] {
            let target = crate::record::Target::text(text.as_bytes());
            let record = Record::new(owner.name.clone(), RecordType::TXT, [target]);
            assert_eq!(Endpoint::of(&record).record().unwrap(), record, "{text:?}");
        }
    }

    #[test]
    fn zero_ttl_means_none() {
        for (ttl, expected) in [(0, None), (-1, None), (1, Some(1)), (4_294_967_296, None)] {
            let endpoint = Endpoint {
                dns_name: "a.example.org".to_owned(),
                record_type: "A".to_owned(),
                record_ttl: ttl,
                ..Endpoint::default()
            };
            assert_eq!(endpoint.record().unwrap().ttl, expected, "{ttl}");
            let again = serde_json::to_value(Endpoint::of(&endpoint.record().unwrap())).unwrap();
            let written = again.get("recordTTL").and_then(serde_json::Value::as_u64);
            assert_eq!(written, expected.map(u64::from));
        }
        let bad = Endpoint {
            dns_name: "a.example.org".to_owned(),
            targets: vec!["a..b".to_owned()],
            record_type: "A".to_owned(),
            ..Endpoint::default()
        };
        let error = bad.record().unwrap_err().to_string();
        assert!(error.ends_with("it is not an IPv4 address"), "{error}");
    }

    #[test]
    fn empty_lists_may_be_null() {
        let changes: Changes = go_json::from_slice(
            br#"{"create": null, "delete": [{"dnsName": "a.example.org", "targets": null, "recordType": "A",
                "labels": null, "providerSpecific": null}]}"#,
        )
        .unwrap();
        assert!(changes.create.is_empty() && changes.update_new.is_empty());
        assert!(changes.delete[0].targets.is_empty() && changes.delete[0].labels.is_empty());
        let domains: Domains = go_json::from_slice(br#"{"filters": ["example.org"]}"#).unwrap();
        assert_eq!(domains.include, ["example.org"]);
    }

    #[test]
    fn media_types_may_have_parameters() {
        for text in [
            MEDIA_TYPE,
            "*/*",
            "application/external.dns.webhook+json; version=1",
            "application/external.dns.webhook+json;version=1; charset=utf-8",
            "Application/External.DNS.webhook+json;charset=utf-8;Version=\"1\"",
            "text/html, application/external.dns.webhook+json;version=1;q=0.9",
        ] {
            assert!(is_media_type(text), "{text}");
        }
        for text in [
            "",
            "application/json",
            "application/external.dns.webhook+json",
            "application/external.dns.webhook+json;version=2",
            "application/external.dns.webhook+json;version=1x",
        ] {
            assert!(!is_media_type(text), "{text}");
        }
    }

    #[test]
    fn filters_have_suffixes_or_expressions() {
        let read = |text: &str| go_json::from_slice::<Domains>(text.as_bytes()).unwrap();
        for (text, matching, other) in [
            ("{}", "a.example.net", None),
            (
                r#"{"include": null, "exclude": ["b.example.org"]}"#,
                "example.org",
                Some("a.b.example.org"),
            ),
            (
                r#"{"include": ["example.org."], "exclude": [".b.example.org"]}"#,
                "b.example.org",
                Some("a.b.example.org"),
            ),
            (
                r#"{"regexInclude": "^a[.]"}"#,
                "a.example.org",
                Some("b.example.org"),
            ),
            (
                r#"{"regexInclude": "[.]org$", "regexExclude": "^b[.]"}"#,
                "a.example.org",
                Some("b.example.org"),
            ),
            (
                r#"{"regexExclude": "^b[.]"}"#,
                "a.example.net",
                Some("b.example.org"),
            ),
        ] {
            let filter = read(text).filter().unwrap();
            let matches = |name: &str| filter.matches(&Name::parse(name).unwrap());
            assert!(matches(matching) && !other.is_some_and(matches), "{text}");
            let again = serde_json::to_string(&read(text)).unwrap();
            assert_eq!(read(&again), read(text));
        }
        assert_eq!(serde_json::to_string(&Domains::default()).unwrap(), "{}");
        for (text, reason) in [
            (
                r#"{"include": ["example.org"], "regexExclude": "^b"}"#,
                "use either",
            ),
            (r#"{"regexInclude": "("}"#, "invalid regular expression"),
            (r#"{"exclude": ["a..b"]}"#, "invalid suffix"),
        ] {
            let error = read(text).filter().unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
