//! JSON with the semantics of Go's decoder: members in document order and any letter case, the last
//! of several wins, `null` leaves a setting unchanged.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A JSON value that keeps the order of members and repeated names.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// The literal `null`, which leaves a setting at its default.
    Null,
    /// One of the literals `true` and `false`.
    Bool(bool),
    /// Any number, exactly as written.
    Number(serde_json::Number),
    /// A string; invalid UTF-8 is replaced by U+FFFD.
    Text(String),
    /// A list of values of any kind.
    List(Vec<Json>),
    /// An object with its members in document order.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Parses a whole file. Invalid UTF-8 is replaced by U+FFFD, as in Go. The error contains line,
    /// column and reason.
    pub fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_str(&String::from_utf8_lossy(bytes))
    }

    /// Removes the member at `path`, such as `xdp.mode` or `logging.tags[0].name`, in every
    /// spelling; returns whether there was one.
    pub(super) fn remove(&mut self, path: &str) -> bool {
        let (first, rest) = path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
        let (name, index) = match first.strip_suffix(']').and_then(|text| text.split_once('[')) {
            Some((name, index)) => (name, index.parse::<usize>().ok()),
            None => (first, None),
        };
        let Self::Object(members) = self else { return false };
        let before = members.len();
        let mut inside = false;
        match (rest, index) {
            (None, None) => members.retain(|(member, _)| !member.eq_ignore_ascii_case(name)),
            _ => {
                let named = members.iter_mut().filter(|(member, _)| member.eq_ignore_ascii_case(name));
                for (_, value) in named {
                    match (value, index) {
                        // List items have required members, so an invalid one is removed as a
                        // whole.
                        (Self::List(items), Some(index)) if index < items.len() => {
                            items.remove(index);
                            inside = true;
                        }
                        (value, None) => inside |= rest.is_some_and(|rest| value.remove(rest)),
                        _ => {}
                    }
                }
            }
        }
        inside || members.len() < before
    }

    /// Returns the kind of the value with its article, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a text",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }
}

/// Formats the value as JSON, shortened to fit in a message.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Number(value) => write!(f, "{value}"),
            Self::Text(value) if value.chars().count() > 60 => {
                write!(f, "{:?}...", value.chars().take(60).collect::<String>())
            }
            Self::Text(value) => write!(f, "{value:?}"),
            Self::List(_) | Self::Object(_) => f.write_str(self.kind()),
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(serde_json::Number::from_f64(value).map_or(Json::Null, Json::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Json, E> {
        Ok(Json::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = entries.next_entry()? {
            members.push(member);
        }
        Ok(Json::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_repeats_are_kept() {
        let json = Json::parse(br#"{"b": 1, "a": [null, true, "x"], "b": -2.5}"#).unwrap();
        let Json::Object(members) = json else { panic!("no object") };
        let names: Vec<&str> = members.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["b", "a", "b"]);
        assert_eq!(members[1].1, Json::List(vec![Json::Null, Json::Bool(true), Json::Text("x".into())]));
    }

    #[test]
    fn trailing_text_is_refused() {
        let error = Json::parse(b"{}\n x").unwrap_err();
        assert_eq!((error.line(), error.column()), (2, 2));
        assert!(Json::parse(b"").is_err());
        assert!(Json::parse("\u{feff}{}".as_bytes()).is_err());
    }
}
