//! Domain names in the single form used for comparison and hashing.

use std::{fmt, net::IpAddr};

use hickory_proto::{rr, serialize::binary::BinDecodable as _};

use dns_common::name::MAX_NAME_LEN;

/// A domain name in wire format (RFC 1035, section 3.1): lower case, root label included.
///
/// The letter case used by a client stays in its message. Ordering and equality compare the bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<[u8]>);

/// The reason why a text or byte string is not a domain name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// An empty label inside the name.
    #[error("empty label")]
    EmptyLabel,
    /// A label of more than 63 bytes.
    #[error("label longer than 63 bytes")]
    LongLabel,
    /// More than 255 bytes in wire format.
    #[error("name longer than 255 bytes")]
    LongName,
    /// A compression pointer or unknown label type.
    #[error("compressed or unknown label")]
    Compressed,
    /// The bytes end before the root label.
    #[error("name is truncated")]
    Truncated,
    /// A backslash without a following character or three digits.
    #[error("bad escape")]
    BadEscape,
}

impl Name {
    /// Returns the root, a single zero byte.
    pub fn root() -> Self {
        Self(Box::new([0]))
    }

    /// Reads an uncompressed name from the start of `bytes`; also returns its length in bytes.
    pub fn from_wire(bytes: &[u8]) -> Result<(Self, usize), NameError> {
        let mut end = 0;
        loop {
            match *bytes.get(end).ok_or(NameError::Truncated)? {
                0 => break,
                length @ 1..=63 => end += usize::from(length) + 1,
                _ => return Err(NameError::Compressed),
            }
            if end >= MAX_NAME_LEN {
                return Err(NameError::LongName);
            }
        }
        Ok((Self(bytes[..=end].to_ascii_lowercase().into()), end + 1))
    }

    /// Parses presentation format, with or without the final dot and with the escapes `\.`, `\\`
    /// and `\ddd` (RFC 1035, section 5.1).
    pub fn from_text(text: &str) -> Result<Self, NameError> {
        let mut wire = Self::wire_as_written(text)?;
        // Length bytes are below the range of letters.
        wire.make_ascii_lowercase();
        Ok(Self(wire.into()))
    }

    /// Returns the wire format of a name in presentation format, with its letters as written.
    pub fn wire_as_written(text: &str) -> Result<Vec<u8>, NameError> {
        let mut wire = Vec::with_capacity(text.len() + 2);
        let mut label = Vec::new();
        let mut bytes = text.bytes();
        let mut ended = text.is_empty() || text == ".";
        // The root's dot is the only one that ends no label.
        if text == "." {
            bytes.next();
        }
        while let Some(byte) = bytes.next() {
            ended = false;
            match byte {
                b'.' => {
                    push_label(&mut wire, &label)?;
                    label.clear();
                    ended = true;
                }
                b'\\' => label.push(unescape(&mut bytes)?),
                other => label.push(other),
            }
        }
        if !ended {
            push_label(&mut wire, &label)?;
        }
        wire.push(0);
        if wire.len() > MAX_NAME_LEN {
            return Err(NameError::LongName);
        }
        Ok(wire)
    }

    /// Returns the name with labels prepended, the first one leftmost; `None` if a label is empty
    /// or too long, or the name becomes too long.
    pub(crate) fn with_labels<const N: usize>(&self, labels: [&[u8]; N]) -> Option<Self> {
        let length = self.0.len() + labels.iter().map(|label| 1 + label.len()).sum::<usize>();
        if length > MAX_NAME_LEN {
            return None;
        }
        let mut wire = Vec::with_capacity(length);
        for label in labels {
            push_label(&mut wire, label).ok()?;
        }
        // Length bytes are below the range of letters.
        wire.make_ascii_lowercase();
        wire.extend_from_slice(&self.0);
        Some(Self(wire.into()))
    }

    /// Returns the lower-case wire format, root label included.
    pub fn as_wire(&self) -> &[u8] {
        &self.0
    }

    /// Returns the labels from left to right, without the root.
    pub fn labels(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.0[..];
        std::iter::from_fn(move || {
            let (&length, tail) = rest.split_first()?;
            // The constructors accept only well-formed names.
            let (label, tail) = tail.split_at(usize::from(length));
            rest = tail;
            (length != 0).then_some(label)
        })
    }

    /// Returns the number of labels, not counting the root.
    pub fn label_count(&self) -> usize {
        self.labels().count()
    }

    /// Returns whether this name equals `ancestor` or is below it.
    pub fn is_within(&self, ancestor: &Name) -> bool {
        self.suffixes().any(|suffix| suffix == ancestor.as_wire())
    }

    /// Returns the wire format of this name and of each ancestor up to the root.
    pub fn suffixes(&self) -> impl Iterator<Item = &[u8]> {
        let mut next = Some(&self.0[..]);
        std::iter::from_fn(move || {
            let current = next?;
            let length = usize::from(current[0]);
            next = (length != 0).then(|| &current[length + 1..]);
            Some(current)
        })
    }

    /// Returns the name without its leftmost label; `None` for the root.
    pub fn parent(&self) -> Option<Self> {
        self.suffixes().nth(1).map(|suffix| Self(suffix.into()))
    }
}

/// A [`Name`] borrowed from a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameRef<'a>(&'a [u8]);

impl<'a> NameRef<'a> {
    /// Wraps bytes in the form of [`Name::as_wire`]; other bytes are a bug in the caller.
    pub fn of_wire(bytes: &'a [u8]) -> Self {
        debug_assert!(Name::from_wire(bytes).is_ok_and(|(name, _)| name.as_wire() == bytes));
        Self(bytes)
    }

    /// Returns the lower-case wire format, root label included.
    pub fn as_wire(self) -> &'a [u8] {
        self.0
    }

    /// Copies the bytes into an owned name.
    pub fn to_name(self) -> Name {
        Name(self.0.into())
    }
}

impl<'a> From<&'a Name> for NameRef<'a> {
    fn from(name: &'a Name) -> Self {
        Self(&name.0)
    }
}

/// Formats the name in presentation format with the final dot and escapes.
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.len() == 1 {
            return f.write_str(".");
        }
        for label in self.labels() {
            for &byte in label {
                match byte {
                    // Quotation marks, `;`, `@` and `$` have a meaning only in zone files (RFC 1035,
                    // section 5.1).
                    b'.' | b'\\' => write!(f, "\\{}", char::from(byte))?,
                    b'!'..=b'~' => write!(f, "{}", char::from(byte))?,
                    _ => write!(f, "\\{byte:03}")?,
                }
            }
            f.write_str(".")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Name({self})")
    }
}

impl std::str::FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::from_text(text)
    }
}

/// Allows lookups by wire-format bytes, such as a suffix, in maps keyed by `Name`.
impl std::borrow::Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

fn push_label(wire: &mut Vec<u8>, label: &[u8]) -> Result<(), NameError> {
    match label.len() {
        0 => Err(NameError::EmptyLabel),
        length @ 1..=63 => {
            wire.push(length as u8);
            wire.extend_from_slice(label);
            Ok(())
        }
        _ => Err(NameError::LongLabel),
    }
}

/// Parses the rest of an escape after the backslash: three digits or one character.
fn unescape(bytes: &mut impl Iterator<Item = u8>) -> Result<u8, NameError> {
    let first = bytes.next().ok_or(NameError::BadEscape)?;
    if !first.is_ascii_digit() {
        return Ok(first);
    }
    let mut value = u32::from(first - b'0');
    for _ in 0..2 {
        match bytes.next() {
            Some(digit @ b'0'..=b'9') => value = value * 10 + u32::from(digit - b'0'),
            _ => return Err(NameError::BadEscape),
        }
    }
    u8::try_from(value).map_err(|_| NameError::BadEscape)
}

//----------- Reverse ------------------------------------------------------
//
// Reverse names: addresses as names below in-addr.arpa and ip6.arpa.

/// Returns the address of a complete reverse name (RFC 1035, section 3.5; RFC 3596, section 2.5) in
/// wire format, in any letter case. Only the canonical spelling is one: no sign, no leading zeros.
pub fn address_of(name: &[u8]) -> Option<IpAddr> {
    // Nearly all names end here, before hickory parses and copies them.
    if !name.last_chunk::<6>()?.eq_ignore_ascii_case(b"\x04arpa\0") {
        return None;
    }
    let name = rr::Name::from_bytes(name).ok()?;
    let network = name.parse_arpa_name().ok()?;
    // The parser accepts names of networks, and decimal labels with a sign or leading zeros.
    let is_canonical = match network.addr() {
        IpAddr::V4(address) => rr::Name::from(address) == name,
        IpAddr::V6(_) => network.prefix_len() == 128,
    };
    is_canonical.then(|| network.addr())
}

/// Returns the reverse name of an address, of which [`address_of`] returns the address.
pub fn reverse_of(address: IpAddr) -> Name {
    let name = rr::Name::from(address).to_string();
    Name::from_text(&name).expect("it has at most 34 short labels")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reverse_names_lead_back() {
        for text in ["192.0.2.1", "2001:db8::20ef"] {
            let address = text.parse().unwrap();
            assert_eq!(address_of(reverse_of(address).as_wire()), Some(address));
        }
    }

    #[test]
    fn text_and_wire_agree() {
        let name = Name::from_text("Q-S0.q-g1.BOSH").unwrap();
        assert_eq!(name.as_wire(), b"\x04q-s0\x04q-g1\x04bosh\0");
        assert_eq!(name.to_string(), "q-s0.q-g1.bosh.");
        assert_eq!(Name::from_wire(name.as_wire()), Ok((name.clone(), 16)));
        assert_eq!(Name::from_text("q-s0.q-g1.bosh."), Ok(name));
    }

    #[test]
    fn empty_text_is_the_root() {
        assert_eq!(Name::from_text("."), Ok(Name::root()));
        assert_eq!(Name::from_text(""), Ok(Name::root()));
        assert_eq!(Name::root().to_string(), ".");
    }

    #[test]
    fn malformed_text_is_refused() {
        assert_eq!(Name::from_text("a..b"), Err(NameError::EmptyLabel));
        assert_eq!(Name::from_text(".a"), Err(NameError::EmptyLabel));
        assert_eq!(Name::from_text(&"a".repeat(64)), Err(NameError::LongLabel));
        assert_eq!(Name::from_text(&"a.".repeat(128)), Err(NameError::LongName));
        for escape in ["a\\2", "\\", "\\25", "\\256", "\\2x5", "\\25x"] {
            assert_eq!(
                Name::from_text(escape),
                Err(NameError::BadEscape),
                "{escape}"
            );
        }
        assert_eq!(
            Name::from_text(&"a".repeat(63)).map(|name| name.as_wire().len()),
            Ok(65)
        );
        // 254 bytes and the root.
        let longest = "a.".repeat(127);
        assert_eq!(
            Name::from_text(&longest).map(|name| name.as_wire().len()),
            Ok(255)
        );
    }

    #[test]
    fn escapes_are_kept() {
        let name = Name::from_text("a\\.b\\\\\\032\\255.C").unwrap();
        assert_eq!(name.as_wire(), b"\x06a.b\\ \xff\x01c\0");
        assert_eq!(name.to_string(), "a\\.b\\\\\\032\\255.c.");
        assert_eq!(format!("{name:?}"), format!("Name({name})"));
        assert_eq!(name.to_string().parse(), Ok(name.clone()));
        assert_eq!(NameRef::from(&name).to_name(), name);
        assert_eq!(NameRef::of_wire(name.as_wire()).as_wire(), name.as_wire());
        assert_eq!(Name::wire_as_written("Ab.c").unwrap(), b"\x02Ab\x01c\0");
    }

    #[test]
    fn suffixes_stop_at_the_root() {
        let name = Name::from_text("a.b").unwrap();
        let suffixes: Vec<&[u8]> = name.suffixes().collect();
        assert_eq!(suffixes, [&b"\x01a\x01b\0"[..], b"\x01b\0", b"\0"]);
        assert!(name.is_within(&Name::from_text("b").unwrap()));
        assert!(!name.is_within(&Name::from_text("a").unwrap()));
        assert_eq!((name.label_count(), Name::root().label_count()), (2, 0));
        assert_eq!(name.labels().collect::<Vec<_>>(), [b"a", b"b"]);
        assert_eq!(name.parent(), Name::from_text("b").ok());
        assert_eq!(Name::root().parent(), None);
    }

    #[test]
    fn oversized_labels_are_refused() {
        let name = Name::from_text("b.c").unwrap();
        assert_eq!(
            name.with_labels([&b"X"[..], b"a"]),
            Name::from_text("x.a.b.c").ok()
        );
        assert_eq!(name.with_labels([&[b'a'; 64][..]]), None);
        assert_eq!(name.with_labels([&b""[..]]), None);
        let longest = name
            .with_labels([[b'a'; 61]; 4].each_ref().map(|label| &label[..]))
            .unwrap();
        assert_eq!(longest.as_wire().len(), 253);
        assert_eq!(
            longest
                .with_labels([&b"a"[..]])
                .map(|name| name.as_wire().len()),
            Some(255)
        );
        assert_eq!(longest.with_labels([&b"aa"[..]]), None);
    }

    #[test]
    fn malformed_wire_names_are_refused() {
        assert_eq!(Name::from_wire(b"\x05abc"), Err(NameError::Truncated));
        assert_eq!(Name::from_wire(b"\xc0\x0c"), Err(NameError::Compressed));
        assert_eq!(
            Name::from_wire(&[b"\x01a".repeat(200), vec![0]].concat()),
            Err(NameError::LongName)
        );
        // 254 bytes and the root, with bytes behind the name.
        let longest = [b"\x01a".repeat(127), vec![0, 9]].concat();
        let (name, length) = Name::from_wire(&longest).unwrap();
        assert_eq!((name.as_wire(), length), (&longest[..255], 255));
        assert_eq!(Name::from_wire(&[64; 70]), Err(NameError::Compressed));
        assert_eq!(Name::from_wire(&[63; 65]), Err(NameError::Truncated));
    }
}

#[cfg(test)]
mod reverse_tests {
    use proptest::prelude::*;

    use super::{Name, *};

    /// Parses the address from a name in presentation format.
    fn address(text: &str) -> Option<String> {
        address_of(Name::from_text(text).unwrap().as_wire()).map(|address| address.to_string())
    }

    #[test]
    fn only_reverse_names_are_addresses() {
        assert_eq!(
            address("5.0.1.10.in-addr.arpa").as_deref(),
            Some("10.1.0.5")
        );
        let six = "6.1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.3.0.0.0.0.0.0.0.0.0.0.0.0.1.d.f.ip6.arpa";
        assert_eq!(address(six).as_deref(), Some("fd10:0:0:3::16"));
        assert_eq!(
            address_of(b"\x011\x011\x011\x011\x07IN-addr\x04ARPA\0"),
            Some([1, 1, 1, 1].into())
        );
        for other in [
            "in-addr.arpa",
            "arpa",
            "1.2.3.in-addr.arpa",
            "1.2.3.4.5.in-addr.arpa",
            "1.1.1.300.in-addr.arpa",
            "1.1.1.01.in-addr.arpa",
            "1.1.1.+1.in-addr.arpa",
            "x.1.1.1.in-addr.arpa",
            "1.1.1.1.xin-addr.arpa",
            "1.1.1.1.home.arpa",
            "1.ip6.arpa",
            &six[2..],
            &six.replace("d.f.", "df."),
            &six.replace("d.f.", "g.f."),
            ".",
        ] {
            assert_eq!(address(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_names_never_panic(labels in proptest::collection::vec("[0-9a-fA-F.]{1,3}", 0..40)) {
            let text: String = labels.join(".") + ".ip6.arpa";
            if let Ok(name) = Name::from_text(&text) {
                let _ = address_of(name.as_wire());
            }
            if let Ok(name) = Name::from_text(&text.replace("ip6", "in-addr")) {
                let _ = address_of(name.as_wire());
            }
        }
    }
}
