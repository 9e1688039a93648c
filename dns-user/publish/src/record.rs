//! Record sets in the form shared by documents, plans and providers, their data in normalised text form, and
//! filters of their domains.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::{Bytes, FromStr},
    sync::Arc,
};

use regex::Regex;

/// A record set: all records of one name, type and set identifier.
///
/// Two record sets of the same key are equal if their fields are; `Name` and `Target` hold
/// normalised values, so spelling makes no difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Owner name in the DNS sense.
    pub name: Name,
    /// Type of every record of the set.
    pub record_type: RecordType,
    /// Distinguishes weighted or regional sets of one name and type (Route 53); otherwise empty.
    pub set_identifier: String,
    /// Record data. An empty set is wanted for a name that currently has no healthy address.
    pub targets: BTreeSet<Target>,
    /// TTL in seconds, at most 2^31 - 1 (RFC 2181, section 8). `None` leaves the choice to the provider.
    pub ttl: Option<u32>,
    /// Ownership, as read from or written to the TXT registry.
    pub labels: Labels,
    /// Settings that one provider understands, such as `alias` or `aws/weight`.
    pub properties: BTreeMap<String, String>,
}

impl Record {
    /// Returns a set without TTL, identifier, labels or properties.
    pub fn new(
        name: Name,
        record_type: RecordType,
        targets: impl IntoIterator<Item = Target>,
    ) -> Self {
        Self {
            name,
            record_type,
            set_identifier: String::new(),
            targets: targets.into_iter().collect(),
            ttl: None,
            labels: Labels::default(),
            properties: BTreeMap::new(),
        }
    }

    /// Parses name and targets; an error states which part is invalid.
    pub fn parse(
        name: &str,
        record_type: RecordType,
        targets: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<Self, RecordError> {
        let mut record = Self::new(Name::parse(name)?, record_type, []);
        for target in targets {
            let target = Target::parse(record_type, target.as_ref())?;
            record.targets.insert(target);
        }
        if record_type.is_alias() && record.targets.len() > 1 {
            return Err(RecordError::SeveralAliases { name: record.name });
        }
        Ok(record)
    }

    /// Returns whether the set is a CNAME to its own name.
    pub fn is_self_alias(&self) -> bool {
        self.record_type == RecordType::CNAME && self.points_to(&self.name)
    }

    /// Returns whether a target is this name.
    pub(crate) fn points_to(&self, name: &Name) -> bool {
        let mut targets = self.targets.iter();
        targets.any(|target| target.as_str() == name.as_str())
    }

    /// Returns a setting that one provider understands; empty if it is not set.
    pub(crate) fn property(&self, name: &str) -> &str {
        text_of(&self.properties, name)
    }

    pub(crate) fn set_property(&mut self, name: &str, value: &str) {
        self.properties.insert(name.to_owned(), value.to_owned());
    }

    /// Returns the key of the set, which is unique in a zone.
    pub fn key(&self) -> Key {
        Key {
            name: self.name.clone(),
            set_identifier: self.set_identifier.clone(),
            record_type: self.record_type,
        }
    }
}

/// Formats as `name ttl type target,target[ set=identifier]`, with TTL 0 if unset.
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} {} ",
            self.name,
            self.ttl.unwrap_or(0),
            self.record_type
        )?;
        for (index, target) in self.targets.iter().enumerate() {
            write!(f, "{}{target}", if index == 0 { "" } else { "," })?;
        }
        if !self.set_identifier.is_empty() {
            write!(f, " set={}", self.set_identifier)?;
        }
        Ok(())
    }
}

fn text_of<'a>(texts: &'a BTreeMap<String, String>, name: &str) -> &'a str {
    match texts.get(name) {
        Some(text) => text,
        None => "",
    }
}

/// Identity of a record set within a zone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Name in normalised form.
    pub name: Name,
    /// Set identifier; empty except for sets that share name and type.
    pub set_identifier: String,
    /// Type of the set.
    pub record_type: RecordType,
}

impl Key {
    /// Returns a key that precedes the keys of all sets of a name.
    pub(crate) fn before(name: &Name) -> Self {
        Self {
            name: name.clone(),
            set_identifier: String::new(),
            // Type 0 is reserved (RFC 6895, section 3.1), so no set precedes the key.
            record_type: RecordType(0),
        }
    }
}

/// Returns record sets by their keys.
pub(crate) fn by_key(sets: Vec<Record>) -> BTreeMap<Key, Record> {
    let mut found = BTreeMap::new();
    for set in sets {
        found.insert(set.key(), set);
    }
    found
}

/// Returns whether there is a set of this name and type.
pub(crate) fn has_set(sets: &BTreeMap<Key, Record>, name: &Name, record_type: RecordType) -> bool {
    let mut of_name = sets
        .range(Key::before(name)..)
        // Several sets of one type may have different identifiers, so one look-up does not do.
        .take_while(|(key, _)| key.name == *name);
    of_name.any(|(key, _)| key.record_type == record_type)
}

/// Numeric DNS record type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordType(pub u16);

/// Declares record types: one row each.
macro_rules! record_types {
    ($($name:ident = $number:literal $about:literal;)*) => {
        impl RecordType {
            $(
                #[doc = $about]
                pub const $name: Self = Self($number);
            )*

            /// Types with a name and a text form. All others use RFC 3597.
            const NAMED: &[(Self, &str)] = &[$((Self::$name, stringify!($name))),*];
        }
    };
}

record_types! {
    A = 1 "IPv4 address (RFC 1035).";
    NS = 2 "Name server (RFC 1035).";
    CNAME = 5 "Canonical name of an alias (RFC 1035).";
    SOA = 6 "Start of authority of a zone (RFC 1035).";
    PTR = 12 "Domain name of an address (RFC 1035).";
    MX = 15 "Mail exchanger (RFC 1035).";
    TXT = 16 "Text strings (RFC 1035), also used for ownership.";
    AAAA = 28 "IPv6 address (RFC 3596).";
    SRV = 33 "Location of a service (RFC 2782).";
    NAPTR = 35 "Name authority pointer (RFC 3403).";
    DNAME = 39 "Redirection of all names below (RFC 6672).";
}

impl RecordType {
    /// Digest of a delegated zone's key (RFC 4034).
    pub const DS: Self = Self(43);

    /// Types that a publisher manages by default.
    pub const DEFAULT_MANAGED: [Self; 3] = [Self::A, Self::AAAA, Self::CNAME];

    /// Returns whether a set has one target, a name that stands for this one or those below it.
    pub fn is_alias(self) -> bool {
        matches!(self, Self::CNAME | Self::DNAME)
    }

    /// Returns the type of a set whose target is an address or a host name.
    pub(crate) fn of_host(text: &str) -> Self {
        match text.parse() {
            Ok(IpAddr::V4(_)) => Self::A,
            Ok(IpAddr::V6(_)) => Self::AAAA,
            Err(_) => Self::CNAME,
        }
    }

    /// Returns whether targets are IP addresses.
    pub fn is_address(self) -> bool {
        matches!(self, Self::A | Self::AAAA)
    }
}

/// Formats as mnemonic, or as `TYPE<number>` (RFC 3597, section 5).
impl fmt::Display for RecordType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (record_type, name) in Self::NAMED {
            if record_type == self {
                return f.pad(name);
            }
        }
        f.pad(&format!("TYPE{}", self.0))
    }
}

impl FromStr for RecordType {
    type Err = RecordError;

    fn from_str(text: &str) -> Result<Self, RecordError> {
        let upper = text.trim().to_ascii_uppercase();
        for (record_type, name) in Self::NAMED {
            if *name == upper {
                return Ok(*record_type);
            }
        }
        match upper.strip_prefix("TYPE").map(str::parse) {
            Some(Ok(number)) => Ok(Self(number)),
            _ => Err(RecordError::UnknownType(text.to_owned())),
        }
    }
}

/// Ownership labels of a record set: `owner`, `resource` and any others found in the owner record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Labels(pub BTreeMap<String, String>);

impl Labels {
    /// Label of the publisher that owns the record.
    pub const OWNER: &str = "owner";
    /// Label of the document or object that wants the record.
    pub const RESOURCE: &str = "resource";

    /// Returns labels with this owner and resource; an empty text sets no label.
    pub fn of(owner: &str, resource: &str) -> Self {
        let mut labels = Self::default();
        for (label, value) in [(Self::OWNER, owner), (Self::RESOURCE, resource)] {
            if !value.is_empty() {
                labels.0.insert(label.to_owned(), value.to_owned());
            }
        }
        labels
    }

    /// Returns the owner; empty if the record has none.
    pub fn owner(&self) -> &str {
        text_of(&self.0, Self::OWNER)
    }

    /// Returns the resource; empty if it is unknown.
    pub fn resource(&self) -> &str {
        text_of(&self.0, Self::RESOURCE)
    }
}

/// Reason why a text is not a valid record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum RecordError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(
        "unknown record type {0:?}; use A, AAAA, CNAME, DNAME, TXT, SRV, NS, PTR, MX, NAPTR or TYPE<number>"
    )]
    UnknownType(String),
    /// A CNAME or DNAME has more than one target (RFC 2181, section 10.1).
    #[error(
        "{name}: a CNAME or DNAME must have exactly one target; use A or AAAA for several addresses"
    )]
    SeveralAliases { name: Name },
}

/// A domain name: lower case, without final dot, with the fewest escapes.
///
/// The root is `.`. Octets outside printable ASCII, dots inside a label, backslashes and a few special characters
/// are escaped (RFC 1035, section 5.1), so that every name in wire format has exactly one text form.
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
            return Ok(Self::root());
        }
        Self::parse_labels(trimmed).map_err(|error| NameError {
            name: trimmed.to_owned(),
            ..error
        })
    }

    fn parse_labels(text: &str) -> Result<Self, NameError> {
        let mut labels = Vec::new();
        let mut label = Vec::new();
        let mut octets = text.bytes();
        while let Some(octet) = octets.next() {
            match octet {
                b'.' => labels.push(std::mem::take(&mut label)),
                b'\\' => {
                    let first = octets.clone().next();
                    match escaped(&mut octets) {
                        // A backslash before a space would be legal (RFC 1035, section 5.1), but
                        // hides what the name is; `\032` shows it.
                        Some(octet) if first.is_some_and(|first| first.is_ascii_graphic()) => {
                            label.push(octet.to_ascii_lowercase());
                        }
                        _ => return Err(NameError::unnamed(BAD_ESCAPE)),
                    }
                }
                b'!'..=b'~' => label.push(octet.to_ascii_lowercase()),
                _ => return Err(NameError::unnamed(BAD_OCTET)),
            }
        }
        // The final dot leaves the root's empty label; further ones are a mistake.
        if !label.is_empty() || labels.is_empty() {
            labels.push(label);
        }
        Self::from_labels(&labels)
    }

    /// Builds a name from the octets of its labels, leftmost label first.
    pub(crate) fn from_labels(labels: &[impl AsRef<[u8]>]) -> Result<Self, NameError> {
        if labels.is_empty() {
            return Ok(Self::root());
        }
        let mut text = String::new();
        // The root's length octet.
        let mut wire = 1;
        for label in labels {
            let label = label.as_ref();
            match label.len() {
                0 => {
                    let reason = "it has an empty label; remove the extra dot";
                    return Err(NameError::unnamed(reason));
                }
                length if length > Self::MAX_LABEL => {
                    let reason = format!("a label has {length} octets; the limit is 63");
                    return Err(NameError::unnamed(reason));
                }
                length => wire += 1 + length,
            }
            if !text.is_empty() {
                text.push('.');
            }
            push_escaped(&mut text, label);
        }
        if wire > Self::MAX_WIRE {
            let reason = format!("it takes {wire} octets on the wire; the limit is 255");
            return Err(NameError::unnamed(reason));
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
        self.labels().map(unescaped)
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
            // `x\.example.org` has the first label `x.example`, so it is not below `example.org`.
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

/// Appends a label in lower case with the necessary escapes.
fn push_escaped(text: &mut String, label: &[u8]) {
    for &octet in label {
        match octet {
            // Besides the dot, characters with a meaning in zone files (RFC 1035, section 5.1): a
            // name that is shown can be pasted there.
            b'.' | b'\\' | b'"' | b';' | b'(' | b')' | b'@' | b'$' => {
                text.extend(['\\', char::from(octet)])
            }
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
    let before = text.trim_end_matches('\\');
    // An even number of backslashes are escaped ones.
    (text.len() - before.len()) % 2 == 1
}

/// Error for a malformed domain name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a domain name: {reason}")]
pub struct NameError {
    name: String,
    reason: String,
}

impl NameError {
    /// Returns an error whose name the caller knows.
    fn unnamed(reason: impl Into<String>) -> Self {
        Self {
            name: String::new(),
            reason: reason.into(),
        }
    }
}

const BAD_ESCAPE: &str =
    "a backslash is followed by neither a character nor three digits up to 255";

const BAD_OCTET: &str =
    "it has a space or a character outside of ASCII; write international names in their xn-- form";

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
        match normalised(record_type, text) {
            Ok(normal) => Ok(Self(normal.into())),
            Err(reason) => Err(TargetError {
                record_type,
                text: text.to_owned(),
                reason,
            }),
        }
    }

    /// Returns the target of a Route 53 alias set, which has an address type but holds a name.
    pub fn alias(name: &Name) -> Self {
        // Not parsed by its type: the set has an address type, and Route 53 resolves the name.
        Self(name.as_str().into())
    }

    /// Returns the TXT value with these octets.
    pub fn text(octets: &[u8]) -> Self {
        let mut text = String::with_capacity(octets.len());
        for chunk in octets.utf8_chunks() {
            for character in chunk.valid().chars() {
                match character {
                    '\\' => text.push_str(r"\\"),
                    // No plan, log or status may show a control character raw.
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
        unescaped(&self.0)
    }

    /// Returns the normalised text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns the presentation form of data that [`Target`] keeps.
fn normalised(record_type: RecordType, text: &str) -> Result<String, String> {
    match record_type {
        RecordType::A => address::<Ipv4Addr>(text, "it is not an IPv4 address"),
        RecordType::AAAA => address::<Ipv6Addr>(text, "it is not an IPv6 address"),
        RecordType::CNAME | RecordType::DNAME | RecordType::NS | RecordType::PTR => {
            let name = Name::parse(text).map_err(|reason| reason.to_string())?;
            Ok(name.to_string())
        }
        RecordType::TXT => text_value(text).ok_or_else(|| "a quote is not closed".to_owned()),
        RecordType::MX => numbers_and_name::<1>(text, "preference host"),
        RecordType::SRV => numbers_and_name::<3>(text, "priority weight port host"),
        RecordType::NAPTR => naptr(text),
        _ => generic(text).ok_or_else(|| r"write it as \# LENGTH HEX (RFC 3597)".to_owned()),
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Targets of one name by type.
pub(crate) type TargetSets = BTreeMap<RecordType, BTreeSet<Target>>;

/// Parses addresses, or one host name; `None` if a host name is combined with other targets.
pub(crate) fn host_sets<'a>(
    hosts: impl IntoIterator<Item = &'a str>,
) -> Result<Option<TargetSets>, TargetError> {
    let mut sets = TargetSets::new();
    for host in hosts {
        let record_type = RecordType::of_host(host);
        sets.entry(record_type)
            .or_default()
            .insert(Target::parse(record_type, host)?);
    }
    // A CNAME has no other data beside it (RFC 1034, section 3.6.2).
    if let Some(names) = sets.get(&RecordType::CNAME)
        && (names.len() > 1 || sets.len() > 1)
    {
        return Ok(None);
    }
    Ok(Some(sets))
}

/// Parses a TXT value: unquoted, or quoted strings, which are concatenated.
fn text_value(text: &str) -> Option<String> {
    let trimmed = text.trim();
    // Without quotes there are no escapes: a backslash stands for itself.
    if trimmed.len() < 2 || !(trimmed.starts_with('"') && trimmed.ends_with('"')) {
        return Some(Target::text(text.as_bytes()).0.into());
    }
    Some(Target::text(&quoted_strings(trimmed)?.concat()).0.into())
}

/// Parses `"one" "two"` to the octets of its strings; `None` if a quote is not closed.
pub(crate) fn quoted_strings(text: &str) -> Option<Vec<Vec<u8>>> {
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

/// Returns the octets of a normalised text, all of whose escapes are well-formed.
fn unescaped(text: &str) -> Vec<u8> {
    let mut octets = text.bytes();
    let mut raw = Vec::with_capacity(text.len());
    while let Some(octet) = octets.next() {
        raw.push(if octet == b'\\' {
            // A text that only this module makes has no broken escape; a backslash stands for
            // itself otherwise.
            escaped(&mut octets).unwrap_or(octet)
        } else {
            octet
        });
    }
    raw
}

/// Parses an escape after its backslash: three decimal digits, or one character.
fn escaped(octets: &mut Bytes<'_>) -> Option<u8> {
    let first = octets.next()?;
    if !first.is_ascii_digit() {
        return Some(first);
    }
    // Above 255 the parse fails, as RFC 1035, section 5.1, demands of `\DDD`.
    let digits = [first, octets.next()?, octets.next()?];
    std::str::from_utf8(&digits).ok()?.parse().ok()
}

fn address<Address: FromStr + ToString>(text: &str, problem: &str) -> Result<String, String> {
    match text.trim().parse::<Address>() {
        Ok(address) => Ok(address.to_string()),
        Err(_) => Err(problem.to_owned()),
    }
}

/// Normalises `COUNT` numbers and a host name.
fn numbers_and_name<const COUNT: usize>(text: &str, form: &str) -> Result<String, String> {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let (numbers, &[host]) = words.split_at(COUNT.min(words.len())) else {
        return Err(format!("write it as `{form}`"));
    };
    let mut normal = String::new();
    for number in numbers {
        let number: u16 = number
            .parse()
            .map_err(|_| format!("{number} is not a number up to 65535"))?;
        normal.push_str(&format!("{number} "));
    }
    let host = Name::parse(host).map_err(|error| error.to_string())?;
    Ok(normal + host.as_str())
}

/// Normalises `order preference "flags" "service" "regexp" replacement`.
fn naptr(text: &str) -> Result<String, String> {
    const FORM: &str = r#"write it as `order preference "flags" "service" "regexp" replacement`"#;
    // From the first quote to the last one, because strings may contain spaces and escaped quotes.
    let open = text.find('"').ok_or(FORM)?;
    let close = text.rfind('"').ok_or(FORM)?;
    let numbers: Vec<&str> = text[..open].split_ascii_whitespace().collect();
    let [order, preference] = numbers[..] else {
        return Err(FORM.to_owned());
    };
    let order: u16 = order.parse().map_err(|_| FORM)?;
    let preference: u16 = preference.parse().map_err(|_| FORM)?;
    let strings = quoted_strings(&text[open..=close])
        .filter(|strings| strings.len() == 3)
        .ok_or(FORM)?;
    let replacement = Name::parse(&text[close + 1..]).map_err(|error| error.to_string())?;
    let mut normal = format!("{order} {preference}");
    for string in strings {
        let string = Target::text(&string).0.replace('"', "\\\"");
        normal.push_str(&format!(" \"{string}\""));
    }
    Ok(format!("{normal} {replacement}"))
}

/// Normalises the generic form of RFC 3597, section 5.
fn generic(text: &str) -> Option<String> {
    let mut words = text.split_ascii_whitespace();
    if words.next()? != r"\#" {
        return None;
    }
    let length: u16 = words.next()?.parse().ok()?;
    let hex: String = words.collect::<String>().to_ascii_lowercase();
    let is_hex =
        hex.bytes().all(|octet| octet.is_ascii_hexdigit()) && hex.len() == 2 * usize::from(length);
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

/// Label that no filter is likely to contain.
const PROBE: &str = "any-name-below";

/// Suffixes to include and to exclude. Exclusion wins; without inclusions everything else is included.
#[derive(Debug, Clone, Default)]
pub struct DomainFilter {
    include: Vec<Suffix>,
    exclude: Vec<Suffix>,
    /// Regular expressions to include and to exclude, which replace the suffixes.
    patterns: Option<[Option<Regex>; 2]>,
}

impl DomainFilter {
    /// Parses suffixes. A leading dot excludes the apex itself; blank entries are ignored.
    pub fn new<'a>(
        include: impl IntoIterator<Item = &'a str>,
        exclude: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, NameError> {
        Ok(Self {
            include: suffixes(include)?,
            exclude: suffixes(exclude)?,
            patterns: None,
        })
    }

    /// Returns the filter with regular expressions in place of the suffixes, if there are any.
    pub fn with_patterns(
        self,
        include: Option<&str>,
        exclude: Option<&str>,
    ) -> Result<Self, regex::Error> {
        let include = include.map(Regex::new).transpose()?;
        let exclude = exclude.map(Regex::new).transpose()?;
        let patterns = [include, exclude];
        Ok(Self {
            // As in external-dns, a regular expression makes the suffixes ineffective.
            patterns: patterns.iter().any(Option::is_some).then_some(patterns),
            ..self
        })
    }

    /// Returns whether a zone may contain names that match.
    pub fn may_contain(&self, apex: &Name) -> bool {
        // Whether a regular expression matches any name of the zone cannot be decided.
        if self.patterns.is_some() || self.include.is_empty() {
            return true;
        }
        let mut domains = self.include.iter().map(|suffix| &suffix.domain);
        // A filter for a part of the zone needs it as well.
        domains.any(|domain| domain.is_within(apex) || apex.is_within(domain))
    }

    /// Returns whether both filters match a name at or below one of `apexes`.
    pub fn overlaps(&self, other: &Self, apexes: &[Name]) -> bool {
        if self.patterns.is_some() || other.patterns.is_some() {
            // Whether two regular expressions match a common name cannot be decided by examples.
            return true;
        }
        let of_filters = self.include.iter().chain(&other.include);
        let of_filters = of_filters.map(|suffix| &suffix.domain);
        for domain in apexes.iter().chain(of_filters) {
            // Filters are suffixes, so an unlikely label stands for all names below a domain.
            let below = if domain.is_root() {
                Name::parse(PROBE)
            } else {
                Name::parse(&format!("{PROBE}.{domain}"))
            };
            for name in below.iter().chain([domain]) {
                let is_published = apexes.iter().any(|apex| name.is_within(apex));
                if is_published && self.matches(name) && other.matches(name) {
                    return true;
                }
            }
        }
        false
    }

    /// Returns whether a name may be touched.
    pub fn matches(&self, name: &Name) -> bool {
        if let Some([include, exclude]) = &self.patterns {
            let is_included = include
                .as_ref()
                .is_none_or(|one| one.is_match(name.as_str()));
            let is_excluded = exclude
                .as_ref()
                .is_some_and(|one| one.is_match(name.as_str()));
            return is_included && !is_excluded;
        }
        let included =
            self.include.is_empty() || self.include.iter().any(|suffix| suffix.matches(name));
        included && !self.exclude.iter().any(|suffix| suffix.matches(name))
    }
}

#[derive(Debug, Clone)]
struct Suffix {
    domain: Name,
    below_only: bool,
}

impl Suffix {
    fn matches(&self, name: &Name) -> bool {
        name.is_within(&self.domain) && !(self.below_only && *name == self.domain)
    }
}

fn suffixes<'a>(entries: impl IntoIterator<Item = &'a str>) -> Result<Vec<Suffix>, NameError> {
    let mut suffixes = Vec::new();
    for entry in entries {
        let entry = entry.trim();
        // A template may leave a comma at the end, which names no domain.
        if entry.is_empty() {
            continue;
        }
        let domain = entry.strip_prefix('.').filter(|domain| !domain.is_empty());
        suffixes.push(Suffix {
            domain: Name::parse(domain.unwrap_or(entry))?,
            below_only: domain.is_some(),
        });
    }
    Ok(suffixes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_replace_suffixes() {
        let plain = DomainFilter::new(["example.org"], []).unwrap();
        let filter = plain
            .clone()
            .with_patterns(Some(r"^(a|b)\.example\.net$"), Some("^b"))
            .unwrap();
        let matches = |name: &str| filter.matches(&Name::parse(name).unwrap());
        assert!(matches("A.example.net") && !matches("b.example.net") && !matches("x.example.org"));
        let same = plain.clone().with_patterns(None, None).unwrap();
        assert!(same.matches(&Name::parse("x.example.org").unwrap()));
        assert!(plain.with_patterns(Some("("), None).is_err());
    }

    #[test]
    fn common_names_make_filters_overlap() {
        let filter = |include: &[&str], exclude: &[&str]| {
            DomainFilter::new(include.iter().copied(), exclude.iter().copied()).unwrap()
        };
        let apexes = [Name::parse("example.org").unwrap()];
        for (one, other, expected) in [
            (filter(&[], &[]), filter(&[], &[]), true),
            (
                filter(&["a.example.org"], &[]),
                filter(&["b.example.org"], &[]),
                false,
            ),
            (
                filter(&["a.example.org"], &[]),
                filter(&["x.a.example.org"], &[]),
                true,
            ),
            (
                filter(&["a.example.org"], &[]),
                filter(&[], &["a.example.org"]),
                false,
            ),
            (
                filter(&[".a.example.org"], &[]),
                filter(&["a.example.org"], &[".a.example.org"]),
                false,
            ),
            (
                filter(&["example.net"], &[]),
                filter(&["example.net"], &[]),
                false,
            ),
        ] {
            assert_eq!(one.overlaps(&other, &apexes), expected, "{one:?} {other:?}");
            assert_eq!(other.overlaps(&one, &apexes), expected, "{other:?} {one:?}");
        }
    }

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    #[test]
    fn name_and_type_find_sets() {
        let mut first = Record::parse("b", RecordType::A, ["192.0.2.1"]).unwrap();
        first.set_identifier = "x".to_owned();
        let text = Record::parse("b", RecordType::TXT, ["t"]).unwrap();
        let other = Record::parse("c", RecordType::MX, ["1 m"]).unwrap();
        let sets = by_key(vec![first.clone(), text.clone(), other]);
        assert_eq!(sets.len(), 3);
        assert_eq!(sets[&first.key()], first);
        for (at, record_type, expected) in [
            ("b", RecordType::A, true),
            ("b", RecordType::TXT, true),
            ("b", RecordType::MX, false),
            ("a", RecordType::A, false),
            ("c", RecordType::MX, true),
            ("c", RecordType::A, false),
            ("d", RecordType::A, false),
        ] {
            assert_eq!(
                has_set(&sets, &name(at), record_type),
                expected,
                "{at} {record_type}"
            );
        }
        assert!(Key::before(&name("b")) < text.key() && Key::before(&name("b")) < first.key());
        assert!(Key::before(&name("b")) > Key::before(&name("a")));
    }

    #[test]
    fn names_are_parsed_label_by_label() {
        for (text, expected) in [
            (".", "."),
            (" . ", "."),
            ("A.b.", "a.b"),
            (r"\065b", "ab"),
            (r"a\.b", r"a\.b"),
            (r"\.", r"\."),
            (r"\a", "a"),
            (r"\032", r"\032"),
            (r"a\092b", r"a\\b"),
            ("a\"b", "a\\\"b"),
            ("~!", "~!"),
        ] {
            assert_eq!(name(text).as_str(), expected, "{text}");
        }
        for (text, reason) in [
            ("", "it has an empty label; remove the extra dot"),
            ("..", "it has an empty label; remove the extra dot"),
            ("a..", "it has an empty label; remove the extra dot"),
            (".a", "it has an empty label; remove the extra dot"),
            ("a b", BAD_OCTET),
            ("a\u{7f}b", BAD_OCTET),
            (r"a\ b", BAD_ESCAPE),
            (r"\", BAD_ESCAPE),
            (r"\25", BAD_ESCAPE),
            (r"\256", BAD_ESCAPE),
            (r"\2x5", BAD_ESCAPE),
            ("\\\u{1}", BAD_ESCAPE),
        ] {
            assert_eq!(
                Name::parse(text).unwrap_err().to_string(),
                format!("{text:?} is not a domain name: {reason}")
            );
        }
        let label = "a".repeat(64);
        assert_eq!(
            Name::parse(&label).unwrap_err().to_string(),
            format!("{label:?} is not a domain name: a label has 64 octets; the limit is 63")
        );
        let long = format!("{}b", "a.".repeat(127));
        assert_eq!(
            Name::parse(&long).unwrap_err().reason,
            "it takes 257 octets on the wire; the limit is 255"
        );
        assert!(Name::parse(&long[2..]).is_ok());
        let none: [&[u8]; 0] = [];
        assert_eq!(Name::from_labels(&none), Ok(Name::root()));
        assert_eq!(
            Name::from_labels(&[&b"A."[..], b"\xff"]).unwrap().as_str(),
            r"a\..\255"
        );
    }

    #[test]
    fn labels_end_at_unescaped_dots() {
        for (text, first, rest) in [
            ("a.b.c", "a", "b.c"),
            (r"a\.b.c", r"a\.b", "c"),
            (r"a\\.b", r"a\\", "b"),
            (r"a\\\.b.c", r"a\\\.b", "c"),
            ("a", "a", ""),
        ] {
            assert_eq!(split_first(text), (first, rest), "{text}");
        }
        let whole = name(r"a\.b.c\\.d");
        assert_eq!(whole.labels().collect::<Vec<_>>(), [r"a\.b", r"c\\", "d"]);
        assert_eq!(
            whole.raw_labels().collect::<Vec<_>>(),
            [&b"a.b"[..], b"c\\", b"d"]
        );
        let above: Vec<String> = std::iter::successors(Some(whole), Name::parent)
            .map(|name| name.to_string())
            .collect();
        assert_eq!(above, [r"a\.b.c\\.d", r"c\\.d", "d", "."]);
        for (below, zone, expected) in [
            (r"a\.b", "b", false),
            (r"a\\.b", "b", true),
            (r"a\\\.b", "b", false),
            ("xb", "b", false),
            ("b", "b", true),
            ("b", "x.b", false),
            ("b", ".", true),
        ] {
            assert_eq!(
                name(below).is_within(&name(zone)),
                expected,
                "{below} {zone}"
            );
        }
    }

    #[test]
    fn aliases_may_not_point_to_themselves() {
        let alias = |record_type, target: &str| {
            Record::parse("a.example.org", record_type, [target]).unwrap()
        };
        assert!(alias(RecordType::CNAME, "A.example.org.").is_self_alias());
        assert!(!alias(RecordType::CNAME, "b.example.org").is_self_alias());
        assert!(!alias(RecordType::NS, "a.example.org").is_self_alias());
        let servers = Record::parse("x", RecordType::NS, ["a", "b"]).unwrap();
        for (target, expected) in [("a", true), ("b", true), ("c", false)] {
            assert_eq!(servers.points_to(&name(target)), expected);
        }
        let two = Record::parse("a", RecordType::DNAME, ["b", "c"]).unwrap_err();
        assert_eq!(
            two.to_string(),
            "a: a CNAME or DNAME must have exactly one target; use A or AAAA for several addresses"
        );
    }

    #[test]
    fn types_have_mnemonics_and_numbers() {
        for (text, number, shown) in [
            ("A", 1, "A"),
            ("ns", 2, "NS"),
            ("CNAME", 5, "CNAME"),
            ("SOA", 6, "SOA"),
            ("PTR", 12, "PTR"),
            ("MX", 15, "MX"),
            (" txt ", 16, "TXT"),
            ("AAAA", 28, "AAAA"),
            ("SRV", 33, "SRV"),
            ("NAPTR", 35, "NAPTR"),
            ("DNAME", 39, "DNAME"),
            ("type43", 43, "TYPE43"),
            ("TYPE1", 1, "A"),
        ] {
            let found: RecordType = text.parse().unwrap();
            assert_eq!((found.0, found.to_string().as_str()), (number, shown));
        }
        assert_eq!(RecordType::DS.0, 43);
        for text in ["DS", "TYPE", "TYPE65536", "TYPE-1", ""] {
            assert_eq!(
                text.parse::<RecordType>().unwrap_err().to_string(),
                format!(
                    "unknown record type {text:?}; use A, AAAA, CNAME, DNAME, TXT, SRV, NS, PTR, MX, NAPTR or \
                     TYPE<number>"
                )
            );
        }
        for (host, expected) in [
            ("192.0.2.1", RecordType::A),
            ("::1", RecordType::AAAA),
            ("192.0.2", RecordType::CNAME),
        ] {
            assert_eq!(RecordType::of_host(host), expected);
        }
    }

    #[test]
    fn labels_name_owner_and_resource() {
        let labels = Labels::of("me", "r");
        assert_eq!(
            (labels.owner(), labels.resource(), labels.0.len()),
            ("me", "r", 2)
        );
        assert_eq!(Labels::of("", ""), Labels::default());
        assert_eq!(
            (Labels::default().owner(), Labels::default().resource()),
            ("", "")
        );
    }

    #[test]
    fn hosts_are_addresses_or_a_name() {
        let sets = |hosts: &[&str]| host_sets(hosts.iter().copied());
        let found = sets(&["192.0.2.1", "::1", "192.0.2.2", "192.0.2.1"])
            .unwrap()
            .unwrap();
        let counts: Vec<(RecordType, usize)> = found
            .iter()
            .map(|(record_type, targets)| (*record_type, targets.len()))
            .collect();
        assert_eq!(counts, [(RecordType::A, 2), (RecordType::AAAA, 1)]);
        assert_eq!(
            sets(&["a", "A."]).unwrap().unwrap()[&RecordType::CNAME].len(),
            1
        );
        assert_eq!(sets(&["a", "b"]), Ok(None));
        assert_eq!(sets(&["a", "192.0.2.1"]), Ok(None));
        assert_eq!(sets(&[]), Ok(Some(TargetSets::new())));
        assert_eq!(
            sets(&["a..b"]).unwrap_err().to_string(),
            "\"a..b\" is not valid data for a record of type CNAME: \"a..b\" is not a domain name: it has an empty \
             label; remove the extra dot"
        );
    }

    #[test]
    fn further_types_have_a_form() {
        for (record_type, text, expected) in [
            (RecordType::MX, "10 a.", Ok("10 a")),
            (RecordType::MX, "a", Err("write it as `preference host`")),
            (RecordType::MX, "10", Err("write it as `preference host`")),
            (RecordType::MX, "", Err("write it as `preference host`")),
            (RecordType::MX, "x a", Err("x is not a number up to 65535")),
            (RecordType::SRV, "0 1 65535 A", Ok("0 1 65535 a")),
            (
                RecordType::SRV,
                "0 1 65536 a",
                Err("65536 is not a number up to 65535"),
            ),
            (
                RecordType::SRV,
                "0 1 a",
                Err("write it as `priority weight port host`"),
            ),
            (RecordType::TXT, "\"a\" \t\"b\"", Ok("ab")),
            (RecordType::TXT, "\"", Ok("\"")),
            (RecordType::TXT, "\"\"", Ok("")),
            (RecordType::TXT, " a ", Ok(" a ")),
            (RecordType::TXT, "\"a\\\"", Err("a quote is not closed")),
            (RecordType::TXT, "\"a\"x\"b\"", Err("a quote is not closed")),
            (
                RecordType::NAPTR,
                r#" 1  2 "a b" "\"" "" x. "#,
                Ok(r#"1 2 "a b" "\"" "" x"#),
            ),
            (
                RecordType::NAPTR,
                r#"1 2 "a" "b" x"#,
                Err(r#"write it as `order preference "flags" "service" "regexp" replacement`"#),
            ),
            (
                RecordType::NAPTR,
                r#"1 65536 "a" "b" "c" x"#,
                Err(r#"write it as `order preference "flags" "service" "regexp" replacement`"#),
            ),
            (RecordType(99), r"\# 1 FF", Ok(r"\# 1 ff")),
            (RecordType(99), r"\# 2 f f f f", Ok(r"\# 2 ffff")),
            (RecordType(99), r"\# 0", Ok(r"\# 0")),
            (
                RecordType(99),
                r"\# 1 f",
                Err(r"write it as \# LENGTH HEX (RFC 3597)"),
            ),
            (
                RecordType(99),
                r"\# 1 fg",
                Err(r"write it as \# LENGTH HEX (RFC 3597)"),
            ),
            (
                RecordType(99),
                r"# 1 ff",
                Err(r"write it as \# LENGTH HEX (RFC 3597)"),
            ),
            (
                RecordType(99),
                r"\#",
                Err(r"write it as \# LENGTH HEX (RFC 3597)"),
            ),
        ] {
            let found = Target::parse(record_type, text);
            let expected = expected.map(str::to_owned).map_err(|reason| {
                format!("{text:?} is not valid data for a record of type {record_type}: {reason}")
            });
            let found = found
                .map(|target| target.to_string())
                .map_err(|error| error.to_string());
            assert_eq!(found, expected);
        }
        assert_eq!(
            quoted_strings("\"a\"\"b\" "),
            Some(vec![b"a".to_vec(), b"b".to_vec()])
        );
        assert_eq!(quoted_strings(""), Some(vec![]));
        assert_eq!(quoted_strings("a"), None);
        assert_eq!(
            Target::text(b"\\ \x1f\x7f\xff\xc3\xa9").as_str(),
            r"\\ \031\127\255é"
        );
        assert_eq!(Target::text(b"\xff\\").text_octets(), b"\xff\\");
    }

    #[test]
    fn filters_are_suffixes_of_names() {
        let filter = DomainFilter::new(
            [" example.org ", "", ".a.example.net"],
            [".", "x.example.org"],
        );
        // A dot alone is the root.
        assert!(!filter.unwrap().matches(&name("a.example.org")));
        let filter =
            DomainFilter::new(["example.org", ".a.example.net"], ["x.example.org"]).unwrap();
        for (text, matches, may_contain) in [
            ("example.org", true, true),
            ("b.example.org", true, true),
            ("x.example.org", false, true),
            ("y.x.example.org", false, true),
            ("a.example.net", false, true),
            ("b.a.example.net", true, true),
            ("example.net", false, true),
            ("net", false, true),
            ("example.com", false, false),
        ] {
            assert_eq!(filter.matches(&name(text)), matches, "{text}");
            assert_eq!(filter.may_contain(&name(text)), may_contain, "{text}");
        }
        assert!(DomainFilter::default().may_contain(&name("a")));
        let pattern = filter.clone().with_patterns(None, Some("^a")).unwrap();
        assert!(pattern.may_contain(&name("example.com")));
        assert!(pattern.matches(&name("b")) && !pattern.matches(&name("a")));
        assert!(pattern.overlaps(&filter, &[]) && filter.overlaps(&pattern, &[]));
        // In the root, too.
        assert!(DomainFilter::default().overlaps(&DomainFilter::default(), &[Name::root()]));
        assert!(
            DomainFilter::new(["a..b"], []).is_err() && DomainFilter::new([], ["a..b"]).is_err()
        );
    }
}
