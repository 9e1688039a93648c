//! The domains of the records.

use std::collections::HashMap;

use super::columns::{Dictionary, Symbol};
use crate::name::Name;

/// The domains of the records as names.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    /// All that are names at all, in lower case: these names are ours.
    names: HashMap<Name, Option<Symbol>, foldhash::fast::FixedState>,
    /// By symbol: the name, unless no name ends in this domain.
    by_symbol: Vec<Option<Name>>,
}

impl Domains {
    /// Reads the texts as names.
    ///
    /// A domain with capitals makes its names ours, but as names are compared
    /// in lower case with the records as they are written, none ends in it
    /// (observed): such a domain has no symbol here.
    pub(super) fn new(domains: &Dictionary) -> Self {
        let mut names: HashMap<Name, Option<Symbol>, _> = HashMap::default();
        let mut by_symbol = vec![None; domains.len()];
        for (symbol, text) in domains.iter() {
            let Ok(name) = Name::from_text(text) else { continue };
            let plain = !text.bytes().any(|byte| byte.is_ascii_uppercase());
            let known = names.entry(name.clone()).or_default();
            if plain {
                *known = Some(symbol);
                by_symbol[symbol as usize] = Some(name);
            }
        }
        Self { names, by_symbol }
    }

    /// All names.
    pub(super) fn names(&self) -> impl Iterator<Item = &Name> {
        self.names.keys()
    }

    /// The domain with this wire-format name, in any letter case.
    pub(super) fn get(&self, wire: &[u8]) -> Option<&Name> {
        self.names.get_key_value(wire).map(|(name, _)| name)
    }

    /// The domain with this symbol, if names can end in it.
    pub(super) fn name(&self, symbol: Symbol) -> Option<&Name> {
        self.by_symbol[symbol as usize].as_ref()
    }

    /// The longest domain that the name ends in, on a label boundary, and how
    /// many labels it has.
    pub(crate) fn longest(&self, name: &Name) -> Option<(Symbol, usize)> {
        let labels = name.label_count();
        name.suffixes().enumerate().find_map(|(left, suffix)| {
            let symbol = (*self.names.get(suffix)?)?;
            Some((symbol, labels - left))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_domain_wins_on_a_label_boundary() {
        let mut texts = Dictionary::default();
        for text in ["bosh.", "inner.bosh.", "Upper.bosh.", "a..b."] {
            texts.intern(text);
        }
        let domains = Domains::new(&texts);
        let longest = |text: &str| domains.longest(&Name::from_text(text).unwrap());
        assert_eq!(longest("x.inner.bosh"), Some((1, 2)));
        assert_eq!(longest("xinner.bosh"), Some((0, 1)));
        assert_eq!(longest("bosh"), Some((0, 1)));
        assert_eq!(longest("xbosh"), None);
        assert_eq!(longest("x.upper.bosh"), Some((0, 1)));
        assert!(domains.get(Name::from_text("upper.bosh").unwrap().as_wire()).is_some());
    }
}
