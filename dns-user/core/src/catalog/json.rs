//! What the readers of the two JSON files share.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, SeqAccess, Visitor};

/// Where and why a JSON text was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JsonError {
    pub(super) line: usize,
    /// From 1, in bytes; 0 at the end of a line.
    pub(super) column: usize,
    /// What is wrong there, without the place.
    pub(super) reason: String,
}

/// The bytes as text. Bytes that are no UTF-8 become replacement characters:
/// the reference reads on too, and one odd byte in one row should not take the
/// fleet away.
pub(super) fn text(bytes: &[u8]) -> Cow<'_, str> {
    // The check alone is several times as fast as the search for what to replace.
    str::from_utf8(bytes).map_or_else(|_| String::from_utf8_lossy(bytes), Cow::Borrowed)
}

/// Reads a whole JSON text; only white space may follow the value.
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

/// A text, borrowed from the file where it can be; null is the empty text, as
/// everywhere in Go's JSON.
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

/// Visits a list and hands on each element as it comes; null is an empty list.
pub(super) struct Each<T, F> {
    /// What the list should be, for error messages.
    expected: &'static str,
    take: F,
    element: PhantomData<T>,
}

impl<T, F: FnMut(T)> Each<T, F> {
    /// Calls `take` with each element of a list that should be `expected`.
    pub(super) fn new(expected: &'static str, take: F) -> Self {
        Self { expected, take, element: PhantomData }
    }
}

impl<'de, T: Deserialize<'de>, F: FnMut(T)> Visitor<'de> for Each<T, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
        while let Some(element) = list.next_element()? {
            (self.take)(element);
        }
        Ok(())
    }
}
