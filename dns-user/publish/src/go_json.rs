//! Reads JSON as Go's `encoding/json` does, whose programs are on the other side of the webhook protocol and of etcd.
//!
//! * `null` is the zero value of every type: a nil slice is written as `null`, also as a whole body.
//! * Names of members are compared without case if none is equal; unknown members are ignored.
//! * Octets that are no UTF-8, and surrogates without their other half, become U+FFFD, and whatever follows the first
//!   value of a body is not read, as by `Decoder.Decode`.
//!
//! Types must have defaults for all members (`#[serde(default)]`), because a Go struct has them. Pointers to structs,
//! such as the endpoints of a list, are read by [`present`].

use serde::{
    Deserialize as _, Deserializer, de,
    de::{
        DeserializeOwned, IntoDeserializer,
        value::{MapDeserializer, SeqDeserializer},
    },
};
use serde_json::{Error, Map, Value};

/// Reads the first value of a text.
pub(crate) fn from_slice<T: DeserializeOwned>(text: &[u8]) -> Result<T, Error> {
    let text = whole_surrogates(&String::from_utf8_lossy(text));
    let mut reader = serde_json::Deserializer::from_str(&text);
    // Into a tree first: only then is it known which members differ from a field in case only.
    let value = Value::deserialize(&mut reader)?;
    T::deserialize(GoValue(value))
}

/// Replaces escapes of single surrogates (`\ud800`), which serde_json refuses.
fn whole_surrogates(text: &str) -> String {
    let mut whole = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        whole.push_str(before);
        let length = match (surrogate(escape), escape.get(6..).and_then(surrogate)) {
            // A pair is one character, which serde_json reads.
            (Some(0xd800..0xdc00), Some(0xdc00..0xe000)) => 12,
            // Go reads a surrogate without its other half as U+FFFD.
            (Some(_), _) => {
                whole.push_str("\\ufffd");
                rest = &escape[6..];
                continue;
            }
            // A backslash and what it escapes.
            (None, _) => 1 + escape.chars().nth(1).map_or(0, char::len_utf8),
        };
        whole.push_str(&escape[..length]);
        rest = &escape[length..];
    }
    whole.push_str(rest);
    whole
}

/// Returns the surrogate that a text begins with, as an escape.
fn surrogate(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    let unit = u16::from_str_radix(digits, 16).ok()?;
    (0xd800..0xe000).contains(&unit).then_some(unit)
}

/// Reads a list of pointers to structs, without the ones that are `null`.
pub(crate) fn present<'de, D: Deserializer<'de>, T: de::Deserialize<'de>>(
    list: D,
) -> Result<Vec<T>, D::Error> {
    let found = Vec::<Option<T>>::deserialize(list)?;
    Ok(found.into_iter().flatten().collect())
}

/// Gives members the names of a struct's fields if they differ in case only.
pub(crate) fn fold_names(members: Map<String, Value>, fields: &[&str]) -> Map<String, Value> {
    let mut folded = Map::new();
    let mut others = Map::new();
    for (name, value) in members {
        if fields.contains(&name.as_str()) {
            folded.insert(name, value);
        } else {
            others.insert(name, value);
        }
    }
    for (name, value) in others {
        let field = fields
            .iter()
            .find(|field| field.eq_ignore_ascii_case(&name));
        let name = field.map_or(name, |field| (*field).to_owned());
        // An equal name wins.
        folded.entry(name).or_insert(value);
    }
    folded
}

/// A value that serde reads as Go does.
struct GoValue(Value);

impl GoValue {
    /// Returns the value, or the zero value of a type in place of `null`.
    fn or_zero(self, zero: impl Into<Value>) -> Value {
        if self.0.is_null() {
            zero.into()
        } else {
            self.0
        }
    }
}

impl IntoDeserializer<'_, Error> for GoValue {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Forwards methods to those of [`Value`], with a zero value in place of `null`.
macro_rules! zero_for_null {
    ($($method:ident: $zero:expr;)*) => {
        $(
            fn $method<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
                self.or_zero($zero).$method(visitor)
            }
        )*
    };
}

impl<'de> Deserializer<'de> for GoValue {
    type Error = Error;

    fn deserialize_any<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(_) => self.deserialize_seq(visitor),
            Value::Object(_) => self.deserialize_map(visitor),
            other => other.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.0.is_null() {
            visitor.visit_none()
        } else {
            visitor.visit_some(self)
        }
    }

    fn deserialize_seq<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.or_zero(Vec::<Value>::new()) {
            Value::Array(items) => {
                visitor.visit_seq(SeqDeserializer::new(items.into_iter().map(GoValue)))
            }
            other => other.deserialize_seq(visitor),
        }
    }

    fn deserialize_map<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.or_zero(Map::new()) {
            Value::Object(members) => {
                let members = members
                    .into_iter()
                    .map(|(name, value)| (name, GoValue(value)));
                visitor.visit_map(MapDeserializer::new(members))
            }
            other => other.deserialize_map(visitor),
        }
    }

    fn deserialize_struct<V: de::Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.0 {
            Value::Object(members) => {
                GoValue(fold_names(members, fields).into()).deserialize_map(visitor)
            }
            other => GoValue(other).deserialize_map(visitor),
        }
    }

    fn deserialize_newtype_struct<V: de::Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    zero_for_null! {
        deserialize_bool: false;
        deserialize_i8: 0;
        deserialize_i16: 0;
        deserialize_i32: 0;
        deserialize_i64: 0;
        deserialize_u8: 0;
        deserialize_u16: 0;
        deserialize_u32: 0;
        deserialize_u64: 0;
        deserialize_f32: 0;
        deserialize_f64: 0;
        deserialize_str: "";
        deserialize_string: "";
    }

    serde::forward_to_deserialize_any! {
        i128 u128 char bytes byte_buf unit unit_struct tuple tuple_struct enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(rename_all = "camelCase", default)]
    struct Item {
        dns_name: String,
        ttl: i64,
        is_set: bool,
        targets: Vec<String>,
        labels: BTreeMap<String, String>,
        #[serde(deserialize_with = "present")]
        others: Vec<Item>,
    }

    #[test]
    fn null_is_the_zero_value() {
        let all = br#"{"dnsName": null, "ttl": null, "isSet": null, "targets": null, "labels": null, "others": null}"#;
        for text in [&b"null"[..], b"{}", all] {
            assert_eq!(from_slice::<Item>(text).unwrap(), Item::default());
        }
        assert_eq!(from_slice::<Vec<Item>>(b"null\n").unwrap(), []);
        let inner =
            br#"{"targets": ["a", null], "labels": {"A": null}, "others": [null, {"ttl": 1}]}"#;
        let item: Item = from_slice(inner).unwrap();
        assert_eq!(item.targets, ["a", ""]);
        assert_eq!(item.labels["A"], "");
        assert_eq!(item.others.len(), 1);
        assert_eq!(item.others[0].ttl, 1);
    }

    #[test]
    fn names_are_compared_without_case() {
        let text =
            br#"{"DNSNAME": "a", "Ttl": 60, "unknown": {"x": [1]}, "Labels": {"Owner": "me"}}"#;
        let item: Item = from_slice(text).unwrap();
        assert_eq!((item.dns_name.as_str(), item.ttl), ("a", 60));
        assert_eq!(item.labels["Owner"], "me", "names in maps are data");
        let both: Item = from_slice(br#"{"TTL": 1, "ttl": 2, "tTL": 3}"#).unwrap();
        assert_eq!(both.ttl, 2);
    }

    #[test]
    fn other_types_and_half_values_are_errors() {
        for text in [
            &b""[..],
            b"[",
            br#"{"ttl": "60"}"#,
            br#"{"ttl": 1.5}"#,
            br#"{"targets": "a"}"#,
            br#"[]"#,
        ] {
            assert!(from_slice::<Item>(text).is_err(), "{text:?}");
        }
        let item: Item = from_slice(b"{\"dnsName\": \"a\xff\"} trailing").unwrap();
        assert_eq!(item.dns_name, "a\u{fffd}");
    }

    #[test]
    fn half_surrogates_are_replaced() {
        for (text, expected) in [
            (r"\ud83d\ude00", "\u{1f600}"),
            (r"a\ud83d", "a\u{fffd}"),
            (r"\ude00b", "\u{fffd}b"),
            (r"\ud83d\ud83d\ude00", "\u{fffd}\u{1f600}"),
            (r"\\ud83d\n", "\\ud83d\n"),
            (r"\ud83dé", "\u{fffd}é"),
        ] {
            let body = format!("{{\"dnsName\": \"{text}\"}}");
            let item: Item = from_slice(body.as_bytes()).unwrap();
            assert_eq!(item.dns_name, expected, "{text}");
        }
        assert!(from_slice::<Item>(br#"{"dnsName": "\"#).is_err());
        assert!(from_slice::<Item>(br#"{"dnsName": "\u12"}"#).is_err());
    }
}
