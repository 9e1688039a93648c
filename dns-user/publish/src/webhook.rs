//! Messages of external-dns's webhook protocol. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::record::{DomainFilter, NameError, Record, RecordError, RecordType, Target};

pub(crate) const MEDIA_TYPE: &str = "application/external.dns.webhook+json;version=1";

/// Maximum size of a message in octets.
pub(crate) const MAX_MESSAGE: usize = 32 << 20;

/// Domains that a provider serves, in the form of `GET /`: lists of suffixes, or regular expressions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Domains {
    /// Suffixes of names to include; all if it is empty.
    #[serde(
        alias = "filters",
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "or_default"
    )]
    pub include: Vec<String>,
    /// Suffixes of names to exclude.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "or_default")]
    pub exclude: Vec<String>,
    /// Regular expression of names to include; all if it is empty.
    #[serde(
        skip_serializing_if = "String::is_empty",
        deserialize_with = "or_default"
    )]
    pub regex_include: String,
    /// Regular expression of names to exclude.
    #[serde(
        skip_serializing_if = "String::is_empty",
        deserialize_with = "or_default"
    )]
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
        if has_regex && !(include.is_empty() && exclude.is_empty()) {
            return Err(DomainsError::Mixed);
        }
        let [include, exclude] = [include, exclude].map(|list| list.iter().map(String::as_str));
        let [regex_include, regex_exclude] = [regex_include, regex_exclude]
            .map(|text| Some(text.as_str()).filter(|text| !text.is_empty()));
        Ok(DomainFilter::new(include, exclude)?.with_patterns(regex_include, regex_exclude)?)
    }
}

/// A record set on the wire.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Endpoint {
    pub(crate) dns_name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) targets: Vec<String>,
    #[serde(default)]
    pub(crate) record_type: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) set_identifier: String,
    #[serde(default, rename = "recordTTL", skip_serializing_if = "is_zero")]
    pub(crate) record_ttl: i64,
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "or_default"
    )]
    pub(crate) labels: BTreeMap<String, String>,
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "or_default"
    )]
    pub(crate) provider_specific: Vec<Property>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Property {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) value: String,
}

/// Body of `POST /records`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Changes {
    #[serde(deserialize_with = "or_default")]
    pub(crate) create: Vec<Endpoint>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) update_old: Vec<Endpoint>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) update_new: Vec<Endpoint>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) delete: Vec<Endpoint>,
}

/// Go writes an empty list or map as `null`.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    value: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
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
        let text = |target: &Target| match *record_type {
            RecordType::TXT => format!("\"{}\"", target.as_str()),
            _ => target.as_str().to_owned(),
        };
        let property = |(name, value): (&String, &String)| Property {
            name: name.clone(),
            value: value.clone(),
        };
        Self {
            dns_name: name.to_string(),
            targets: targets.iter().map(text).collect(),
            record_type: record_type.to_string(),
            set_identifier: set_identifier.clone(),
            record_ttl: ttl.map_or(0, i64::from),
            labels: labels.0.clone(),
            provider_specific: properties.iter().map(property).collect(),
        }
    }

    /// Returns the record set without labels, which owner records hold.
    pub(crate) fn record(&self) -> Result<Record, RecordError> {
        let record_type: RecordType = self.record_type.parse()?;
        let parsed = Record::parse(&self.dns_name, record_type, &self.targets);
        let mut record = parsed.or_else(|error| {
            // Some providers list an alias as an address set whose target is a name.
            let alias = Record::parse(&self.dns_name, RecordType::CNAME, &self.targets);
            let alias = alias.ok().filter(|_| record_type.is_address());
            alias
                .map(|alias| Record {
                    record_type,
                    ..alias
                })
                .ok_or(error)
        })?;
        record.set_identifier.clone_from(&self.set_identifier);
        record.ttl = u32::try_from(self.record_ttl).ok().filter(|ttl| *ttl > 0);
        let properties = self.provider_specific.iter();
        record.properties = properties
            .map(|property| (property.name.clone(), property.value.clone()))
            .collect();
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Name;

    #[test]
    fn endpoints_keep_their_members() {
        let text = r#"{"dnsName": "A.example.org", "targets": ["192.0.2.1"], "recordType": "A", "recordTTL": 60,
            "setIdentifier": "blue", "labels": {"owner": "x"}, "providerSpecific": [{"name": "alias", "value": "true"}]}"#;
        let endpoint: Endpoint = serde_json::from_str(text).unwrap();
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
        let alias: Endpoint = serde_json::from_str(alias).unwrap();
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
    }

    #[test]
    fn empty_lists_may_be_null() {
        let changes: Changes = serde_json::from_str(
            r#"{"create": null, "delete": [{"dnsName": "a.example.org", "targets": null, "recordType": "A",
                "labels": null, "providerSpecific": null}]}"#,
        )
        .unwrap();
        assert!(changes.create.is_empty() && changes.update_new.is_empty());
        assert!(changes.delete[0].targets.is_empty() && changes.delete[0].labels.is_empty());
        let domains: Domains = serde_json::from_str(r#"{"filters": ["example.org"]}"#).unwrap();
        assert_eq!(domains.include, ["example.org"]);
    }

    #[test]
    fn filters_have_suffixes_or_expressions() {
        let read = |text: &str| serde_json::from_str::<Domains>(text).unwrap();
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
