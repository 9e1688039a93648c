//! The domains of the records.

use std::collections::HashMap;

use crate::name::Name;

/// Number of a domain in the records' dictionary of domains.
pub(crate) type DomainNumber = u32;

/// The domains of the records, parsed as names.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    /// All valid domains in lower case; names below them are local.
    names: HashMap<Name, Option<DomainNumber>, foldhash::fast::FixedState>,
    /// Name by number, unless no query can end in this domain.
    by_number: Vec<Option<Name>>,
}

impl Domains {
    /// Parses the domains.
    ///
    /// A domain with capitals makes its names local, but bosh-dns compares lower-cased names with
    /// the records as written, so nothing matches it (observed): such a domain has no number here.
    pub(crate) fn new<'t>(domains: impl Iterator<Item = (DomainNumber, &'t str)>) -> Self {
        let mut names: HashMap<Name, Option<DomainNumber>, _> = HashMap::default();
        let mut by_number = Vec::new();
        for (number, text) in domains {
            by_number.resize(by_number.len().max(number as usize + 1), None);
            let Ok(name) = Name::from_text(text) else { continue };
            let plain = !text.bytes().any(|byte| byte.is_ascii_uppercase());
            let known = names.entry(name.clone()).or_default();
            if plain {
                *known = Some(number);
                by_number[number as usize] = Some(name);
            }
        }
        Self { names, by_number }
    }

    /// Returns whether the other domains have the same names, which queries match alike.
    pub(crate) fn are_named_like(&self, other: &Self) -> bool {
        let is_known = |(name, number): (&Name, &Option<DomainNumber>)| {
            other.names.get(name).is_some_and(|known| known.is_some() == number.is_some())
        };
        self.names.len() == other.names.len() && self.names.iter().all(is_known)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &Name> {
        self.names.keys()
    }

    /// Returns the domain with this wire-format name, regardless of letter case.
    pub(crate) fn get(&self, wire: &[u8]) -> Option<&Name> {
        self.names.get_key_value(wire).map(|(name, _)| name)
    }

    /// Returns the domain with this number if queries can match it.
    pub(crate) fn name(&self, number: DomainNumber) -> Option<&Name> {
        self.by_number.get(number as usize)?.as_ref()
    }

    /// Returns the longest domain that contains the name, and the number of its labels.
    pub(crate) fn longest(&self, name: &Name) -> Option<(DomainNumber, usize)> {
        let labels = name.label_count();
        name.suffixes().enumerate().find_map(|(left, suffix)| {
            let number = (*self.names.get(suffix)?)?;
            Some((number, labels - left))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_domain_wins() {
        let texts = [(0, "bosh."), (1, "inner.bosh."), (2, "Upper.bosh."), (3, "a..b.")];
        let domains = Domains::new(texts.into_iter());
        let longest = |text: &str| domains.longest(&Name::from_text(text).unwrap());
        assert_eq!(longest("x.inner.bosh"), Some((1, 2)));
        assert_eq!(longest("xinner.bosh"), Some((0, 1)));
        assert_eq!(longest("bosh"), Some((0, 1)));
        assert_eq!(longest("xbosh"), None);
        assert_eq!(longest("x.upper.bosh"), Some((0, 1)));
        assert!(domains.get(Name::from_text("upper.bosh").unwrap().as_wire()).is_some());
    }
}
