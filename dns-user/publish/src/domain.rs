//! Domain filters: the names that a publisher may touch.

use crate::record::{Name, NameError};

/// Suffixes to include and to exclude. Exclusion wins; without inclusions everything else
/// is included.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DomainFilter {
    include: Vec<Suffix>,
    exclude: Vec<Suffix>,
}

impl DomainFilter {
    /// Parses suffixes. A leading dot excludes the apex itself; blank entries are ignored.
    pub fn new<'a>(
        include: impl IntoIterator<Item = &'a str>,
        exclude: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, NameError> {
        Ok(Self { include: suffixes(include)?, exclude: suffixes(exclude)? })
    }

    /// Returns whether a zone may contain names that match.
    pub fn may_contain(&self, apex: &Name) -> bool {
        self.include.is_empty()
            || self
                .include
                .iter()
                .any(|suffix| suffix.domain.is_within(apex) || apex.is_within(&suffix.domain))
    }

    /// Returns whether a name may be touched.
    pub fn matches(&self, name: &Name) -> bool {
        let included = self.include.is_empty() || self.include.iter().any(|suffix| suffix.matches(name));
        included && !self.exclude.iter().any(|suffix| suffix.matches(name))
    }
}

/// One entry of a filter.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    let entries = entries.into_iter().map(str::trim).filter(|entry| !entry.is_empty());
    let suffix = |entry: &str| match entry.strip_prefix('.') {
        Some(domain) if !domain.is_empty() => Ok(Suffix { domain: Name::parse(domain)?, below_only: true }),
        _ => Ok(Suffix { domain: Name::parse(entry)?, below_only: false }),
    };
    entries.map(suffix).collect()
}
