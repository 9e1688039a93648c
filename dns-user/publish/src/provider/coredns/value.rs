//! Keys and values in the format of SkyDNS. Pure.

use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::record::{Name, RecordType, Target};

/// Value of a key. Empty members are omitted; unknown ones are kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Service {
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub(super) host: String,
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub(super) text: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) ttl: Option<u32>,
    /// Number of labels in the key that do not belong to the name.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub(super) targetstrip: u32,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) owner: Option<String>,
    #[serde(flatten)]
    pub(super) others: BTreeMap<String, Value>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Service {
    /// Returns a value with one target.
    pub(super) fn of(record_type: RecordType, target: &Target) -> Self {
        if record_type != RecordType::TXT {
            return Self { host: target.as_str().to_owned(), ..Self::default() };
        }
        let octets = target.text_octets();
        let text = String::from_utf8(octets).unwrap_or_else(|_| target.as_str().to_owned());
        // external-dns writes owner texts with their quotes.
        let text = if text.starts_with("heritage=") { format!("\"{text}\"") } else { text };
        Self { text, ..Self::default() }
    }

    /// Returns the records of the value: one for the host, and one for the text.
    pub(super) fn records(&self, name: &Name) -> Vec<(RecordType, Target)> {
        let mut records = Vec::new();
        if !self.host.is_empty() {
            let record_type = host_type(&self.host, name);
            // CoreDNS cannot answer an invalid host name either.
            records.extend(Target::parse(record_type, &self.host).ok().map(|target| (record_type, target)));
        }
        if !self.text.is_empty() {
            let target = Target::parse(RecordType::TXT, &self.text);
            records.extend(target.ok().map(|target| (RecordType::TXT, target)));
        }
        records
    }

    /// Returns whether this value has the target of `wanted`.
    pub(super) fn has_target_of(&self, wanted: &Self, record_type: RecordType) -> bool {
        if record_type == RecordType::TXT {
            let value = |text: &str| Target::parse(RecordType::TXT, text).ok();
            value(&self.text) == value(&wanted.text)
        } else {
            let value = |host: &str| Target::parse(record_type, host).ok();
            value(&self.host) == value(&wanted.host)
        }
    }

    /// Returns the value without the target of the given type.
    pub(super) fn without(mut self, record_type: RecordType) -> Self {
        if record_type == RecordType::TXT {
            self.text.clear()
        } else {
            self.host.clear()
        }
        self
    }

    /// Returns whether no target is left.
    pub(super) fn is_empty(&self) -> bool {
        self.host.is_empty() && self.text.is_empty()
    }
}

/// Returns the type with which CoreDNS answers for a host.
fn host_type(host: &str, name: &Name) -> RecordType {
    let is_reverse = [".in-addr.arpa", ".ip6.arpa"].iter().any(|suffix| name.as_str().ends_with(suffix));
    match host.parse() {
        Ok(IpAddr::V4(_)) => RecordType::A,
        Ok(IpAddr::V6(_)) => RecordType::AAAA,
        Err(_) if is_reverse => RecordType::PTR,
        Err(_) => RecordType::CNAME,
    }
}

/// Returns the key of a name, with its labels in reverse order.
pub(super) fn key_of(prefix: &str, name: &Name) -> Vec<u8> {
    let labels: Vec<&str> = name.labels().collect();
    let path: Vec<&str> = labels.into_iter().rev().collect();
    format!("{prefix}{}", path.join("/")).into_bytes()
}

/// Returns the name of a key without its first `strip` labels.
pub(super) fn name_of(prefix: &str, key: &[u8], strip: u32) -> Option<Name> {
    let path = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?;
    let labels: Vec<&str> = path.split('/').rev().skip(usize::try_from(strip).ok()?).collect();
    if labels.is_empty() {
        return None;
    }
    Name::parse(&labels.join(".")).ok()
}
