//! The catalog: records and aliases as one immutable snapshot. Indexes make the cost of a lookup
//! proportional to its result. Pure.

mod alias_files;
mod aliases;
mod columns;
mod instances;
mod json;
mod places;
mod records;
mod reverse;
mod rows;

use std::{collections::HashSet, net::IpAddr};

pub use alias_files::{AliasError, AliasFiles, AliasWarning};
pub use instances::Instance;
pub use records::{RECORD_KEYS, Records, RecordsError, RowWarning};

pub(crate) use alias_files::FileTarget;
pub(crate) use aliases::{Aliases, Narrowing, Target};
pub(crate) use columns::{NO_VALUE, Postings, Row, Symbol};
pub(crate) use instances::InstanceIndex;
pub(crate) use places::PlaceNumber;

use crate::name::Name;
use crate::query::AGENT_DOMAIN;
use reverse::Reverse;

/// Records and aliases at one point in time. Immutable: changed files make a new snapshot.
#[derive(Debug)]
pub struct Snapshot {
    instances: InstanceIndex,
    aliases: Aliases,
    reverse: Reverse,
    /// `version` of the records file.
    version: Option<u64>,
    agent_domain: Name,
    /// Wire-format names with aliases below them.
    alias_parents: HashSet<Box<[u8]>, foldhash::fast::FixedState>,
    rules: NameRules,
}

/// Replies to names that match no instance; the default is bosh-dns' behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameRules {
    /// Whether a name that violates the query language gets FORMERR; otherwise NXDOMAIN.
    pub formerr_for_malformed: bool,
    /// Whether an empty non-terminal gets NXDOMAIN, like other names without instances; otherwise
    /// NOERROR without records (RFC 8020).
    pub nxdomain_for_empty_non_terminals: bool,
}

impl Default for NameRules {
    fn default() -> Self {
        Self { formerr_for_malformed: true, nxdomain_for_empty_non_terminals: true }
    }
}

impl Snapshot {
    /// Indexes records and aliases; returns warnings about unusable aliases.
    pub fn build(records: Records, aliases: &AliasFiles) -> (Self, Vec<AliasWarning>) {
        let Records { instances, pairs, aliases: definitions, version } = records;
        let instances = instances.build();
        let reverse = Reverse::new(pairs, aliases);
        let (aliases, warnings) = Aliases::build(aliases, &definitions, &instances);
        // The constant is a well-formed name.
        let (agent_domain, _) = Name::from_wire(AGENT_DOMAIN).unwrap_or((Name::root(), 0));
        let alias_parents = aliases.parents();
        let rules = NameRules::default();
        (Self { instances, aliases, reverse, version, agent_domain, alias_parents, rules }, warnings)
    }

    /// Returns the snapshot with other rules.
    pub fn with_rules(self, rules: NameRules) -> Self {
        Self { rules, ..self }
    }

    pub(crate) fn rules(&self) -> NameRules {
        self.rules
    }

    /// Returns whether an alias exists below the wire-format name.
    pub(crate) fn has_alias_below(&self, wire: &[u8]) -> bool {
        self.alias_parents.contains(wire)
    }

    /// Returns the snapshot used before any file is read: only the agents' domain is local.
    pub fn empty() -> Self {
        Self::build(Records::default(), &AliasFiles::default()).0
    }

    /// Returns `version` of the records file, if present.
    pub fn version(&self) -> Option<u64> {
        self.version
    }

    /// Returns all instances, in file order.
    pub fn instances(&self) -> impl ExactSizeIterator<Item = Instance<'_>> {
        (0..self.instances.len() as Row).map(|row| self.instances.instance(row))
    }

    /// Returns the domains of the records.
    pub fn domains(&self) -> impl Iterator<Item = &Name> {
        self.instances.domain_names.names()
    }

    /// Returns the number of aliases; an alias with a placeholder counts once per expansion.
    pub fn alias_count(&self) -> usize {
        self.aliases.len()
    }

    /// Returns the zone that makes a name local: the longest of the records' domains, the aliases
    /// and the agents' domain that contains it. `None`: the name is not local.
    pub fn local_zone(&self, name: &Name) -> Option<&Name> {
        name.suffixes().find_map(|suffix| {
            if suffix == AGENT_DOMAIN {
                return Some(&self.agent_domain);
            }
            self.instances.domain_names.get(suffix).or_else(|| self.aliases.zone(suffix))
        })
    }

    /// Returns the names of an address for PTR queries, in wire format with the letter case of the
    /// file, without duplicates: first from `records`, then the aliases that point to the
    /// address or to one of these names.
    pub fn reverse(&self, address: IpAddr) -> Vec<Box<[u8]>> {
        self.reverse.names(address)
    }

    pub(crate) fn instance_index(&self) -> &InstanceIndex {
        &self.instances
    }

    pub(crate) fn aliases(&self) -> &Aliases {
        &self.aliases
    }
}
