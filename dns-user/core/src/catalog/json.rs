//! JSON helpers for reading records and alias files.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};

/// Position and reason of a JSON error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JsonError {
    pub(super) line: usize,
    /// Column in bytes, from 1; 0 at the end of a line.
    pub(super) column: usize,
    /// Reason without the position.
    pub(super) reason: String,
}

/// Decodes UTF-8, replacing invalid bytes by U+FFFD: bosh-dns accepts them too, and one bad byte in
/// one row must not lose the whole fleet.
pub(super) fn text(bytes: &[u8]) -> Cow<'_, str> {
    // Validation alone is several times as fast as the lossy conversion.
    str::from_utf8(bytes).map_or_else(|_| String::from_utf8_lossy(bytes), Cow::Borrowed)
}

/// Deserialises a whole JSON text; only white space may follow the value.
pub(super) fn read<'de, S: DeserializeSeed<'de>>(text: &'de str, seed: S) -> Result<S::Value, JsonError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = seed.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

impl From<serde_json::Error> for JsonError {
    fn from(error: serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        let mut reason = error.to_string();
        let place = format!(" at line {line} column {column}");
        if reason.ends_with(&place) {
            reason.truncate(reason.len() - place.len());
        }
        Self { line, column, reason }
    }
}

/// A string, borrowed from the file if possible. null is read as the empty string, as by Go's JSON
/// decoder.
pub(super) struct Text<'de>(pub(super) Cow<'de, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;

        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_unit<E>(self) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed("")))
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }

        deserializer.deserialize_any(TextVisitor)
    }
}

/// The members of an object in file order; `None` if the file says null.
pub(super) struct Entries<T>(pub(super) Option<Vec<(String, T)>>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for EntriesVisitor<T> {
            type Value = Entries<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of aliases, each with a list of targets")
            }

            fn visit_unit<E>(self) -> Result<Entries<T>, E> {
                Ok(Entries(None))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<T>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(Some(entries)))
            }
        }

        deserializer.deserialize_any(EntriesVisitor(PhantomData))
    }
}
