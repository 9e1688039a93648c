//! Domain names in normalised presentation form.

use std::{fmt, sync::Arc};

/// A domain name: lower case, without final dot, with the fewest escapes.
///
/// The root is `.`. Octets outside printable ASCII, dots inside a label, backslashes and a few
/// special characters are escaped (RFC 1035, section 5.1), so that every name in wire format has
/// exactly one text form.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// Maximum length of a label in octets (RFC 1035, section 2.3.4).
    pub const MAX_LABEL: usize = 63;
    /// Maximum length of a name in wire format in octets, including length octets and root.
    pub const MAX_WIRE: usize = 255;

    /// Returns the root name, which has no labels.
    pub fn root() -> Self {
        Self(".".into())
    }

    /// Parses presentation form, with or without final dot, in any letter case.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let trimmed = text.trim();
        if trimmed == "." {
            return Ok(Self(".".into()));
        }
        let error = |reason| NameError { name: trimmed.to_owned(), reason };
        let mut labels: Vec<Vec<u8>> = vec![Vec::new()];
        let mut octets = trimmed.bytes();
        while let Some(octet) = octets.next() {
            // The first label exists from the start, and labels are only added.
            let Some(label) = labels.last_mut() else { break };
            match octet {
                b'.' => labels.push(Vec::new()),
                b'\\' => label.push(unescape(&mut octets).ok_or_else(|| error(Reason::Escape))?),
                b'!'..=b'~' => label.push(octet.to_ascii_lowercase()),
                _ => return Err(error(Reason::Octet)),
            }
        }
        if labels.len() > 1 && labels.last().is_some_and(Vec::is_empty) {
            labels.pop();
        }
        Self::from_labels(&labels).map_err(error)
    }

    /// Builds a name from the octets of its labels, leftmost label first.
    pub(crate) fn from_labels(labels: &[impl AsRef<[u8]>]) -> Result<Self, Reason> {
        if labels.is_empty() {
            return Ok(Self(".".into()));
        }
        let mut text = String::new();
        let mut wire = 1;
        for label in labels.iter().map(AsRef::as_ref) {
            match label.len() {
                0 => return Err(Reason::EmptyLabel),
                length if length > Self::MAX_LABEL => return Err(Reason::LongLabel(length)),
                length => wire += 1 + length,
            }
            if !text.is_empty() {
                text.push('.');
            }
            push_escaped(&mut text, label);
        }
        if wire > Self::MAX_WIRE {
            return Err(Reason::LongName(wire));
        }
        Ok(Self(text.into()))
    }

    /// Returns the normalised text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns whether this is the root.
    pub fn is_root(&self) -> bool {
        &*self.0 == "."
    }

    /// Returns the escaped labels, leftmost first.
    pub fn labels(&self) -> impl Iterator<Item = &str> {
        let mut rest = if self.is_root() { "" } else { &*self.0 };
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (label, behind) = split_first(rest);
            rest = behind;
            Some(label)
        })
    }

    /// Returns the octets of the labels, leftmost first.
    pub fn raw_labels(&self) -> impl Iterator<Item = Vec<u8>> {
        self.labels().map(|label| {
            let mut octets = label.bytes();
            let mut raw = Vec::with_capacity(label.len());
            while let Some(octet) = octets.next() {
                // A `Name` contains only well-formed escapes.
                raw.push(if octet == b'\\' { unescape(&mut octets).unwrap_or(octet) } else { octet });
            }
            raw
        })
    }

    /// Returns the name without its first label; `None` for the root.
    pub fn parent(&self) -> Option<Self> {
        if self.is_root() {
            return None;
        }
        let (_, behind) = split_first(&self.0);
        Some(Self(if behind.is_empty() { "." } else { behind }.into()))
    }

    /// Returns whether this name is `zone` or a subdomain of it.
    pub fn is_within(&self, zone: &Self) -> bool {
        if zone.is_root() {
            return true;
        }
        match self.0.strip_suffix(&*zone.0) {
            Some("") => true,
            Some(before) => before.ends_with('.') && !ends_in_escape(&before[..before.len() - 1]),
            None => false,
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Parses an escape after its backslash: three decimal digits, or one character.
fn unescape(octets: &mut std::str::Bytes<'_>) -> Option<u8> {
    let first = octets.next()?;
    if !first.is_ascii_digit() {
        return first.is_ascii_graphic().then(|| first.to_ascii_lowercase());
    }
    let digits = [first, octets.next()?, octets.next()?];
    let text = std::str::from_utf8(&digits).ok()?;
    text.parse::<u8>().ok().map(|octet| octet.to_ascii_lowercase())
}

/// Appends a label in lower case with the necessary escapes.
fn push_escaped(text: &mut String, label: &[u8]) {
    for &octet in label {
        match octet {
            b'.' | b'\\' | b'"' | b';' | b'(' | b')' | b'@' | b'$' => text.extend(['\\', char::from(octet)]),
            b'!'..=b'~' => text.push(char::from(octet.to_ascii_lowercase())),
            _ => text.push_str(&format!("\\{octet:03}")),
        }
    }
}

/// Splits escaped text at its first unescaped dot.
fn split_first(text: &str) -> (&str, &str) {
    let mut escaped = false;
    for (index, octet) in text.bytes().enumerate() {
        match octet {
            b'.' if !escaped => return (&text[..index], &text[index + 1..]),
            _ => escaped = octet == b'\\' && !escaped,
        }
    }
    (text, "")
}

/// Returns whether a character appended to `text` would be escaped.
fn ends_in_escape(text: &str) -> bool {
    text.bytes().rev().take_while(|octet| *octet == b'\\').count() % 2 == 1
}

/// Error for a malformed domain name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a domain name: {reason}")]
pub struct NameError {
    name: String,
    reason: Reason,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Reason {
    #[error("it has an empty label; remove the extra dot")]
    EmptyLabel,
    #[error("a label has {0} octets; the limit is 63")]
    LongLabel(usize),
    #[error("it takes {0} octets on the wire; the limit is 255")]
    LongName(usize),
    #[error("a backslash is followed by neither a character nor three digits up to 255")]
    Escape,
    #[error("it has a space or a character outside of ASCII; write international names in their xn-- form")]
    Octet,
}
