//! Names of owner records.

use ring::digest;

use crate::record::{Name, RecordType};

/// Placeholder for the record type within an affix.
const TEMPLATE: &str = "%{record_type}";

/// Types that external-dns recognises in the name of an owner record.
const MAPPED_BACK: [RecordType; 7] = [
    RecordType::A,
    RecordType::AAAA,
    RecordType::CNAME,
    RecordType::NS,
    RecordType::MX,
    RecordType::SRV,
    RecordType::NAPTR,
];

/// Maps a record to the name of its owner record, as external-dns does.
///
/// The owner record of `api.example.org A` is `a-api.example.org`. A prefix precedes the first
/// label, a suffix follows it; `%{record_type}` in the affix is replaced by the type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mapper {
    affix: Affix,
    wildcard: String,
}

/// Position and text of the configured affix, in lower case.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Affix {
    #[default]
    None,
    Prefix(String),
    Suffix(String),
}

impl Mapper {
    /// Creates a mapper. `wildcard` replaces a first label `*`, unless it is empty.
    pub fn new(prefix: &str, suffix: &str, wildcard: &str) -> Result<Self, AffixError> {
        let affix = match (prefix.trim(), suffix.trim()) {
            ("", "") => Affix::None,
            (prefix, "") => Affix::Prefix(prefix.to_ascii_lowercase()),
            ("", suffix) => Affix::Suffix(suffix.to_ascii_lowercase()),
            _ => return Err(AffixError::Both),
        };
        let mapper = Self { affix, wildcard: wildcard.trim().to_ascii_lowercase() };
        // An affix that is invalid in names would leave every record without an owner.
        let probe = mapper.text_of("x.invalid", "cname");
        Name::parse(&probe).map_err(|error| AffixError::Unusable(error.to_string()))?;
        Ok(mapper)
    }

    /// Returns the name in external-dns's form. It may be too long to be valid.
    pub fn text_of(&self, name: &str, record_type: &str) -> String {
        let record_type = record_type.to_ascii_lowercase();
        let (first, behind) = name.split_once('.').unwrap_or((name, ""));
        let first = if first == "*" && !self.wildcard.is_empty() { &self.wildcard } else { first };
        let label = match &self.affix {
            Affix::None => format!("{record_type}-{first}"),
            Affix::Prefix(text) if text.contains(TEMPLATE) => {
                format!("{}{first}", text.replace(TEMPLATE, &record_type))
            }
            Affix::Suffix(text) if text.contains(TEMPLATE) => {
                format!("{first}{}", text.replace(TEMPLATE, &record_type))
            }
            Affix::Prefix(text) => format!("{text}{record_type}-{first}"),
            Affix::Suffix(text) => format!("{record_type}-{first}{text}"),
        };
        if behind.is_empty() { label } else { format!("{label}.{behind}") }
    }

    /// Returns the name under which the owner record is written: external-dns's form if it is valid
    /// within `apex`, otherwise the same form with a hashed label.
    ///
    /// The hashed label replaces the first label, or as many as necessary to stay within 255
    /// octets. `None` if no name fits even directly below the apex.
    pub fn owner_name(&self, name: &Name, record_type: RecordType, apex: &Name) -> Option<Name> {
        let record_type = record_type.to_string();
        let usable = |text: String| Name::parse(&text).ok().filter(|owner| owner.is_within(apex));
        if let Some(owner) = usable(self.text_of(name.as_str(), &record_type)) {
            return Some(owner);
        }
        let hash = digest::digest(&digest::SHA256, name.as_str().as_bytes());
        let label: String = hash.as_ref()[..16].iter().map(|octet| format!("{octet:02x}")).collect();
        let mut above = if name == apex { Some(name.clone()) } else { name.parent() };
        while let Some(parent) = above.filter(|parent| parent.is_within(apex)) {
            let below = if parent.is_root() { label.clone() } else { format!("{label}.{parent}") };
            if let Some(owner) = usable(self.text_of(&below, &record_type)) {
                return Some(owner);
            }
            above = parent.parent();
        }
        None
    }

    /// Returns the name in the older form, which contains no type.
    pub fn old_owner_name(&self, name: &Name) -> Option<Name> {
        let (first, behind) = name.as_str().split_once('.').unwrap_or((name.as_str(), ""));
        let first = if first == "*" && !self.wildcard.is_empty() { &self.wildcard } else { first };
        let label = match &self.affix {
            Affix::None => first.to_owned(),
            Affix::Prefix(text) => format!("{}{first}", text.replace(TEMPLATE, "")),
            Affix::Suffix(text) => format!("{first}{}", text.replace(TEMPLATE, "")),
        };
        Name::parse(&if behind.is_empty() { label } else { format!("{label}.{behind}") }).ok()
    }

    /// Maps an owner record back to name and type, as external-dns does. The type is `None`
    /// in the older form; the result is `None` if the name lacks the affix.
    ///
    /// The mapping is ambiguous: a record `a-team` of the older form reads as type A of
    /// `team`. The registry therefore looks owner records up from the records.
    pub fn record_of(&self, owner: &Name) -> Option<(String, Option<RecordType>)> {
        let text = owner.as_str();
        match &self.affix {
            Affix::None => Some(split_type(text)),
            Affix::Prefix(prefix) => strip(prefix, |affix| text.strip_prefix(affix)),
            Affix::Suffix(suffix) => {
                let dots = suffix.matches('.').count();
                let end = text.match_indices('.').nth(dots).map_or(text.len(), |(index, _)| index);
                let (head, behind) = text.split_at(end);
                let (name, record_type) = strip(suffix, |affix| head.strip_suffix(affix))?;
                Some((name + behind, record_type))
            }
        }
    }
}

/// Removes an affix with `cut`, and returns the rest and the type.
fn strip<'a>(affix: &str, cut: impl Fn(&str) -> Option<&'a str>) -> Option<(String, Option<RecordType>)> {
    if affix.contains(TEMPLATE) {
        for record_type in MAPPED_BACK {
            let affix = affix.replace(TEMPLATE, &record_type.to_string().to_ascii_lowercase());
            if let Some(name) = cut(&affix) {
                return Some((name.to_owned(), Some(record_type)));
            }
        }
    }
    cut(&affix.replace(TEMPLATE, "")).map(split_type)
}

/// Splits `a-api.example.org` into name and type.
fn split_type(text: &str) -> (String, Option<RecordType>) {
    let split = text.split_once('-').and_then(|(first, rest)| {
        let is_first = |record_type: &RecordType| record_type.to_string().eq_ignore_ascii_case(first);
        Some((rest.to_owned(), MAPPED_BACK.into_iter().find(is_first)?))
    });
    split.map_or_else(|| (text.to_owned(), None), |(name, record_type)| (name, Some(record_type)))
}

/// Reason why an affix cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AffixError {
    /// Prefix and suffix are mutually exclusive.
    #[error("txt-prefix and txt-suffix are both set; remove one of them")]
    Both,
    /// The affix gives invalid domain names.
    #[error("txt-prefix or txt-suffix produces invalid names: {0}")]
    Unusable(String),
}
