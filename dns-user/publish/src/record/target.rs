//! Record data in normalised text form.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use super::{Name, RecordType};

/// Data of one record, normalised so that equal data is equal.
///
/// Addresses are in canonical spelling, names in the form of [`Name`]. TXT is the concatenated
/// value of all its strings, without quotes; octets that are not UTF-8 appear as `\DDD`, and a
/// backslash as `\\`. All other types use RFC 3597 (`\# length hex`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target(Box<str>);

impl Target {
    /// Parses the text form of a type's data, as used in documents.
    pub fn parse(record_type: RecordType, text: &str) -> Result<Self, TargetError> {
        let error = |reason: String| TargetError { record_type, text: text.to_owned(), reason };
        let name = |text: &str| Name::parse(text).map_err(|reason| error(reason.to_string()));
        let normal = match record_type {
            RecordType::A => {
                let address = text.trim().parse::<Ipv4Addr>();
                address.map_err(|_| error("it is not an IPv4 address".to_owned()))?.to_string()
            }
            RecordType::AAAA => {
                let address = text.trim().parse::<Ipv6Addr>();
                address.map_err(|_| error("it is not an IPv6 address".to_owned()))?.to_string()
            }
            RecordType::CNAME | RecordType::DNAME | RecordType::NS | RecordType::PTR => {
                name(text)?.to_string()
            }
            RecordType::TXT => text_value(text).ok_or_else(|| error("a quote is not closed".to_owned()))?,
            RecordType::MX => numbers_and_name::<1>(text, "preference host").map_err(error)?,
            RecordType::SRV => numbers_and_name::<3>(text, "priority weight port host").map_err(error)?,
            RecordType::NAPTR => naptr(text).map_err(error)?,
            _ => generic(text).ok_or_else(|| error(r"write it as \# LENGTH HEX (RFC 3597)".to_owned()))?,
        };
        Ok(Self(normal.into()))
    }

    /// Returns the target of a Route 53 alias set, which has an address type but holds a name.
    pub fn alias(name: &Name) -> Self {
        Self(name.as_str().into())
    }

    /// Returns the TXT value with these octets.
    pub fn text(octets: &[u8]) -> Self {
        let mut text = String::with_capacity(octets.len());
        for chunk in octets.utf8_chunks() {
            for character in chunk.valid().chars() {
                match character {
                    '\\' => text.push_str(r"\\"),
                    control if control.is_ascii_control() => {
                        text.push_str(&format!("\\{:03}", control as u32))
                    }
                    other => text.push(other),
                }
            }
            for octet in chunk.invalid() {
                text.push_str(&format!("\\{octet:03}"));
            }
        }
        Self(text.into())
    }

    /// Returns the octets of a TXT value.
    pub fn text_octets(&self) -> Vec<u8> {
        let mut octets = self.0.bytes();
        let mut value = Vec::with_capacity(self.0.len());
        while let Some(octet) = octets.next() {
            value.push(if octet == b'\\' { escaped(&mut octets).unwrap_or(octet) } else { octet });
        }
        value
    }

    /// Parses `"one" "two"` to the octets of its strings; `None` if a quote is not closed.
    pub(crate) fn quoted(text: &str) -> Option<Vec<Vec<u8>>> {
        quoted_strings(text)
    }

    /// Returns the normalised text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Parses a TXT value: unquoted, or quoted strings, which are concatenated.
fn text_value(text: &str) -> Option<String> {
    let trimmed = text.trim();
    if trimmed.len() < 2 || !(trimmed.starts_with('"') && trimmed.ends_with('"')) {
        return Some(Target::text(text.as_bytes()).0.into());
    }
    Some(Target::text(&quoted_strings(trimmed)?.concat()).0.into())
}

/// Parses `"one" "two"` to the octets of its strings.
fn quoted_strings(text: &str) -> Option<Vec<Vec<u8>>> {
    let mut strings = Vec::new();
    let mut octets = text.bytes();
    loop {
        match octets.next() {
            None => return Some(strings),
            Some(b'"') => {}
            Some(octet) if octet.is_ascii_whitespace() => continue,
            Some(_) => return None,
        }
        let mut string = Vec::new();
        loop {
            match octets.next()? {
                b'"' => break,
                b'\\' => string.push(escaped(&mut octets)?),
                octet => string.push(octet),
            }
        }
        strings.push(string);
    }
}

/// Parses an escape after its backslash: three decimal digits, or one character.
fn escaped(octets: &mut std::str::Bytes<'_>) -> Option<u8> {
    let first = octets.next()?;
    if !first.is_ascii_digit() {
        return Some(first);
    }
    let digits = [first, octets.next()?, octets.next()?];
    std::str::from_utf8(&digits).ok()?.parse().ok()
}

/// Normalises `COUNT` numbers and a host name.
fn numbers_and_name<const COUNT: usize>(text: &str, form: &str) -> Result<String, String> {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let (numbers, &[host]) = words.split_at(COUNT.min(words.len())) else {
        return Err(format!("write it as `{form}`"));
    };
    let mut normal = String::new();
    for number in numbers {
        let number: u16 = number.parse().map_err(|_| format!("{number} is not a number up to 65535"))?;
        normal.push_str(&format!("{number} "));
    }
    let host = Name::parse(host).map_err(|error| error.to_string())?;
    Ok(normal + host.as_str())
}

/// Normalises `order preference "flags" "service" "regexp" replacement`.
fn naptr(text: &str) -> Result<String, String> {
    let form = || r#"write it as `order preference "flags" "service" "regexp" replacement`"#.to_owned();
    let open = text.find('"').ok_or_else(form)?;
    let close = text.rfind('"').ok_or_else(form)?;
    let numbers: Vec<&str> = text[..open].split_ascii_whitespace().collect();
    let [order, preference] = numbers[..] else { return Err(form()) };
    let number = |word: &str| word.parse::<u16>().map_err(|_| form());
    let strings =
        quoted_strings(&text[open..=close]).filter(|strings| strings.len() == 3).ok_or_else(form)?;
    let replacement = Name::parse(&text[close + 1..]).map_err(|error| error.to_string())?;
    let mut normal = format!("{} {}", number(order)?, number(preference)?);
    for string in strings {
        normal.push_str(&format!(" \"{}\"", Target::text(&string).0.replace('"', "\\\"")));
    }
    Ok(format!("{normal} {replacement}"))
}

/// Normalises the generic form of RFC 3597, section 5.
fn generic(text: &str) -> Option<String> {
    let mut words = text.split_ascii_whitespace();
    (words.next()? == r"\#").then_some(())?;
    let length: u16 = words.next()?.parse().ok()?;
    let hex: String = words.collect::<String>().to_ascii_lowercase();
    let is_hex = hex.bytes().all(|octet| octet.is_ascii_hexdigit()) && hex.len() == 2 * usize::from(length);
    is_hex.then(|| format!(r"\# {length} {hex}").trim_end().to_owned())
}

/// Record data that is invalid for its type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not valid data for a record of type {record_type}: {reason}")]
pub struct TargetError {
    record_type: RecordType,
    text: String,
    reason: String,
}
