//! Index of names by address, for `in-addr.arpa` and `ip6.arpa`.

use std::collections::HashMap;
use std::net::IpAddr;

use super::alias_files::{AliasFiles, FileTarget};
use crate::name::Name;

/// The index from addresses to names.
#[derive(Debug, Default)]
pub(super) struct Reverse {
    /// `records` of the records file, stably sorted by address.
    pairs: Vec<(IpAddr, Box<str>)>,
    /// Aliases of files by target address.
    by_address: HashMap<IpAddr, Vec<Name>>,
    /// Aliases of files by target name. Aliases of the records point to groups, which have no PTR
    /// records.
    by_name: HashMap<Name, Vec<Name>>,
}

impl Reverse {
    /// Indexes the pairs of the records and the aliases of the files, except aliases `_.x`
    /// (observed).
    pub(super) fn new(mut pairs: Vec<(IpAddr, Box<str>)>, files: &AliasFiles) -> Self {
        pairs.sort_by_key(|&(address, _)| address);
        let mut reverse = Self { pairs, ..Self::default() };
        for (name, alias) in &files.exact {
            for target in &alias.targets {
                match target {
                    FileTarget::Address(address) => {
                        reverse.by_address.entry(*address).or_default().push(name.clone());
                    }
                    FileTarget::Name(target) => {
                        reverse.by_name.entry(target.clone()).or_default().push(name.clone());
                    }
                    FileTarget::Label(_) => {}
                }
            }
        }
        reverse
    }

    /// Returns the names of an address, in wire format with the file's letter case, without
    /// duplicates. IPv4-mapped addresses equal their IPv4 address.
    pub(super) fn names(&self, address: IpAddr) -> Vec<Box<[u8]>> {
        let address = address.to_canonical();
        let start = self.pairs.partition_point(|&(other, _)| other < address);
        let pairs = self.pairs[start..].iter().take_while(|&&(other, _)| other == address);
        let mut seen: Vec<Name> = Vec::new();
        let mut names: Vec<Box<[u8]>> = Vec::new();
        for (_, text) in pairs {
            let Ok(name) = Name::from_text(text) else { continue };
            if !seen.contains(&name) {
                names.push(with_case(&name, text));
                seen.push(name);
            }
        }
        let by_name = seen.clone();
        let by_name = by_name.iter().filter_map(|name| self.by_name.get(name)).flatten();
        for alias in self.by_address.get(&address).into_iter().flatten().chain(by_name) {
            if !seen.contains(alias) {
                names.push(alias.as_wire().into());
                seen.push(alias.clone());
            }
        }
        names
    }
}

/// Returns the name in wire format with the letter case of the text it was parsed from.
fn with_case(name: &Name, text: &str) -> Box<[u8]> {
    if text.contains('\\') {
        return name.as_wire().into();
    }
    let mut wire: Box<[u8]> = name.as_wire().into();
    // Without escapes a text differs from its wire format only in length octets instead of dots,
    // and starts one octet later.
    for (byte, original) in wire[1..].iter_mut().zip(text.bytes()) {
        if original.is_ascii_uppercase() {
            *byte = original;
        }
    }
    wire
}
