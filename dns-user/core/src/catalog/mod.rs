//! The catalog: records and aliases as one immutable snapshot, with the indexes
//! that make a look-up cost what its answer costs. Pure.

mod alias_files;
mod aliases;
mod columns;
mod fleet;
mod json;
mod places;
mod records;
mod reverse;
mod rows;

use std::{collections::HashSet, net::IpAddr};

pub use alias_files::{AliasError, AliasFiles, AliasWarning};
pub use fleet::Instance;
pub use records::{RECORD_KEYS, Records, RecordsError, RowWarning};

pub(crate) use alias_files::FileTarget;
pub(crate) use aliases::{Aliases, Narrowing, Target};
pub(crate) use columns::{NO_VALUE, Postings, Row, Symbol};
pub(crate) use fleet::Fleet;
pub(crate) use places::PlaceNumber;

use crate::name::Name;
use crate::query::AGENT_DOMAIN;
use reverse::Reverse;

/// Records and aliases of one moment. Never changed: new files make a new one.
#[derive(Debug)]
pub struct Snapshot {
    fleet: Fleet,
    aliases: Aliases,
    reverse: Reverse,
    /// `version` of the records.
    version: Option<u64>,
    agent_domain: Name,
    /// Wire-format names below which there are aliases.
    alias_parents: HashSet<Box<[u8]>, foldhash::fast::FixedState>,
    /// What names without instances mean.
    rules: NameRules,
}

/// What names below a domain mean that lead to no instance. The default is the reference's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameRules {
    /// A name that does not follow the query language gets FORMERR; else NXDOMAIN.
    pub formerr_for_malformed: bool,
    /// A name with names below it gets NXDOMAIN, as any other without instances; else
    /// NOERROR without records (RFC 8020).
    pub nxdomain_for_empty_non_terminals: bool,
}

impl Default for NameRules {
    fn default() -> Self {
        Self { formerr_for_malformed: true, nxdomain_for_empty_non_terminals: true }
    }
}

impl Snapshot {
    /// Indexes records and aliases; reports aliases that cannot work.
    pub fn build(records: Records, aliases: &AliasFiles) -> (Self, Vec<AliasWarning>) {
        let Records { fleet, pairs, aliases: definitions, version } = records;
        let fleet = fleet.build();
        let reverse = Reverse::new(pairs, aliases);
        let (aliases, warnings) = Aliases::build(aliases, &definitions, &fleet);
        // The constant is a well-formed name.
        let (agent_domain, _) = Name::from_wire(AGENT_DOMAIN).unwrap_or((Name::root(), 0));
        let alias_parents = aliases.parents();
        let rules = NameRules::default();
        (Self { fleet, aliases, reverse, version, agent_domain, alias_parents, rules }, warnings)
    }

    /// The same with other rules.
    pub fn with_rules(self, rules: NameRules) -> Self {
        Self { rules, ..self }
    }

    /// What names without instances mean.
    pub(crate) fn rules(&self) -> NameRules {
        self.rules
    }

    /// Whether there is an alias below the wire-format name.
    pub(crate) fn has_alias_below(&self, wire: &[u8]) -> bool {
        self.alias_parents.contains(wire)
    }

    /// Before any file was read: nothing but the agents' domain is ours.
    pub fn empty() -> Self {
        Self::build(Records::default(), &AliasFiles::default()).0
    }

    /// `version` of the records file, if it has one.
    pub fn version(&self) -> Option<u64> {
        self.version
    }

    /// All instances, in the order of the file.
    pub fn instances(&self) -> impl ExactSizeIterator<Item = Instance<'_>> {
        (0..self.fleet.len() as Row).map(|row| self.fleet.instance(row))
    }

    /// The domains of the records.
    pub fn domains(&self) -> impl Iterator<Item = &Name> {
        self.fleet.domain_names.names()
    }

    /// How many aliases there are, those of placeholders counted one by one.
    pub fn alias_count(&self) -> usize {
        self.aliases.len()
    }

    /// Which name makes this one ours: the longest of the records' domains, the
    /// aliases and the agents' domain that it is or lies below; `None`: it is not.
    pub fn local_zone(&self, name: &Name) -> Option<&Name> {
        name.suffixes().find_map(|suffix| {
            if suffix == AGENT_DOMAIN {
                return Some(&self.agent_domain);
            }
            self.fleet.domain_names.get(suffix).or_else(|| self.aliases.zone(suffix))
        })
    }

    /// Names that the address is called, in wire format with the letter case of
    /// the file, each once: those of `records`, then the aliases that point to
    /// the address or to one of these names.
    pub fn reverse(&self, address: IpAddr) -> Vec<Box<[u8]>> {
        self.reverse.names(address)
    }

    pub(crate) fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    pub(crate) fn aliases(&self) -> &Aliases {
        &self.aliases
    }
}
