//! Record sets in the form shared by documents, plans and providers.

mod name;
mod target;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
};

pub use self::{
    name::{Name, NameError},
    target::{Target, TargetError},
};

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
    /// TTL in seconds, at most 2^31 - 1 (RFC 2181, section 8). `None` leaves the choice to the
    /// provider.
    pub ttl: Option<u32>,
    /// Ownership, as read from or written to the TXT registry.
    pub labels: Labels,
    /// Settings that one provider understands, such as `alias` or `aws/weight`.
    pub properties: BTreeMap<String, String>,
}

impl Record {
    /// Returns a set without TTL, identifier, labels or properties.
    pub fn new(name: Name, record_type: RecordType, targets: impl IntoIterator<Item = Target>) -> Self {
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
        let name = Name::parse(name)?;
        let targets = targets.into_iter().map(|target| Target::parse(record_type, target.as_ref()));
        let record = Self::new(name, record_type, targets.collect::<Result<Vec<_>, _>>()?);
        if record_type.is_alias() && record.targets.len() > 1 {
            return Err(RecordError::SeveralAliases { name: record.name });
        }
        Ok(record)
    }

    /// Returns whether the set is a CNAME to its own name.
    pub fn is_self_alias(&self) -> bool {
        self.record_type == RecordType::CNAME
            && self.targets.iter().any(|target| target.as_str() == self.name.as_str())
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
        write!(f, "{} {} {} ", self.name, self.ttl.unwrap_or(0), self.record_type)?;
        for (index, target) in self.targets.iter().enumerate() {
            write!(f, "{}{target}", if index == 0 { "" } else { "," })?;
        }
        if !self.set_identifier.is_empty() {
            write!(f, " set={}", self.set_identifier)?;
        }
        Ok(())
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

/// Numeric DNS record type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordType(pub u16);

impl RecordType {
    /// IPv4 address (RFC 1035).
    pub const A: Self = Self(1);
    /// Name server (RFC 1035).
    pub const NS: Self = Self(2);
    /// Canonical name of an alias (RFC 1035).
    pub const CNAME: Self = Self(5);
    /// Start of authority of a zone (RFC 1035).
    pub const SOA: Self = Self(6);
    /// Domain name of an address (RFC 1035).
    pub const PTR: Self = Self(12);
    /// Mail exchanger (RFC 1035).
    pub const MX: Self = Self(15);
    /// Text strings (RFC 1035), also used for ownership.
    pub const TXT: Self = Self(16);
    /// IPv6 address (RFC 3596).
    pub const AAAA: Self = Self(28);
    /// Location of a service (RFC 2782).
    pub const SRV: Self = Self(33);
    /// Name authority pointer (RFC 3403).
    pub const NAPTR: Self = Self(35);
    /// Redirection of all names below (RFC 6672).
    pub const DNAME: Self = Self(39);
    /// Digest of a delegated zone's key (RFC 4034).
    pub const DS: Self = Self(43);

    /// Types that a publisher manages by default.
    pub const DEFAULT_MANAGED: [Self; 3] = [Self::A, Self::AAAA, Self::CNAME];

    /// Types with a name and a text form. All others use RFC 3597.
    const NAMED: [(Self, &str); 11] = [
        (Self::A, "A"),
        (Self::NS, "NS"),
        (Self::CNAME, "CNAME"),
        (Self::SOA, "SOA"),
        (Self::PTR, "PTR"),
        (Self::MX, "MX"),
        (Self::TXT, "TXT"),
        (Self::AAAA, "AAAA"),
        (Self::SRV, "SRV"),
        (Self::NAPTR, "NAPTR"),
        (Self::DNAME, "DNAME"),
    ];

    /// Returns whether a set has one target, a name that stands for this one or those below it.
    pub fn is_alias(self) -> bool {
        matches!(self, Self::CNAME | Self::DNAME)
    }

    /// Returns whether targets are IP addresses.
    pub fn is_address(self) -> bool {
        matches!(self, Self::A | Self::AAAA)
    }
}

/// Formats as mnemonic, or as `TYPE<number>` (RFC 3597, section 5).
impl fmt::Display for RecordType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMED.iter().find(|(record_type, _)| record_type == self) {
            Some((_, name)) => f.pad(name),
            None => f.pad(&format!("TYPE{}", self.0)),
        }
    }
}

impl FromStr for RecordType {
    type Err = RecordError;

    fn from_str(text: &str) -> Result<Self, RecordError> {
        let upper = text.trim().to_ascii_uppercase();
        let named = Self::NAMED.iter().find(|(_, name)| *name == upper);
        let numbered = || upper.strip_prefix("TYPE")?.parse().ok().map(Self);
        named
            .map(|(record_type, _)| *record_type)
            .or_else(numbered)
            .ok_or_else(|| RecordError::UnknownType(text.to_owned()))
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
        let pairs = [(Self::OWNER, owner), (Self::RESOURCE, resource)];
        let set = pairs.into_iter().filter(|(_, value)| !value.is_empty());
        Self(set.map(|(label, value)| (label.to_owned(), value.to_owned())).collect())
    }

    /// Returns the owner; empty if the record has none.
    pub fn owner(&self) -> &str {
        self.0.get(Self::OWNER).map_or("", String::as_str)
    }

    /// Returns the resource; empty if it is unknown.
    pub fn resource(&self) -> &str {
        self.0.get(Self::RESOURCE).map_or("", String::as_str)
    }
}

/// Reason why a text is not a valid record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The name is malformed.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A target is invalid for the type.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The type is unknown.
    #[error(
        "unknown record type {0:?}; use A, AAAA, CNAME, DNAME, TXT, SRV, NS, PTR, MX, NAPTR or TYPE<number>"
    )]
    UnknownType(String),
    /// A CNAME or DNAME has more than one target (RFC 2181, section 10.1).
    #[error("{name}: a CNAME or DNAME must have exactly one target; use A or AAAA for several addresses")]
    SeveralAliases {
        /// Name of the set.
        name: Name,
    },
}
