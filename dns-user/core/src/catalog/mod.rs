//! The catalog: records and aliases as one immutable snapshot. Indexes make the cost of a lookup
//! proportional to its result. Pure.

mod alias_files;
mod aliases;
mod columns;
mod instances;
mod outline;
mod records;
mod rows;

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    io,
    marker::PhantomData,
    net::IpAddr,
    sync::Arc,
};

use crate::{name::Name, query::AGENT_DOMAIN};
pub(crate) use alias_files::FileTarget;
pub use alias_files::{AliasError, AliasFiles};
use aliases::Definitions;
pub(crate) use aliases::{Aliases, PlaceholderFilter, Target};
pub(crate) use columns::{Dictionary, NO_VALUE, Row, Symbol};
use columns::{Edits, Piece};
pub use instances::Instance;
pub(crate) use instances::{InstanceIndex, Place, PlaceNumber};
use outline::{Difference, Outline};
use records::Pair;
pub use records::{RECORD_KEYS, Records, RecordsError};
use rows::RowsReader;

/// Records and aliases at one point in time. Immutable: changed files make a new snapshot.
#[derive(Debug)]
pub struct Snapshot {
    records: IndexedRecords,
    aliases: Aliases,
    reverse: Reverse,
    agent_domain: Name,
    /// Wire-format names with aliases below them.
    alias_parents: HashSet<Box<[u8]>, foldhash::fast::FixedState>,
    rules: NameRules,
}

/// The part of a snapshot that comes from records.json, to be combined with other alias files. Clones
/// share it.
#[derive(Clone, Debug)]
pub struct IndexedRecords {
    instances: Arc<InstanceIndex>,
    /// `records` of the file.
    pairs: Arc<Pairs>,
    /// `aliases` of the file.
    definitions: Definitions,
    /// `version` of the file.
    version: Option<u64>,
    /// For the next file; `None` if that must be parsed as a whole.
    outline: Option<Arc<Outline>>,
}

impl From<Records> for IndexedRecords {
    fn from(
        Records {
            instances,
            pairs,
            aliases,
            version,
            columns: _,
        }: Records,
    ) -> Self {
        let instances = Arc::new(instances.build());
        let pairs = Arc::new(Pairs::new(&pairs, &instances));
        Self {
            instances,
            pairs,
            definitions: aliases.into(),
            version,
            outline: None,
        }
    }
}

impl IndexedRecords {
    /// Reads and indexes the file that follows the one these records were read from. The result equals the
    /// index of [`Records::parse`]. Rows with the same text are not parsed again, and shared.
    pub fn next(&self, file: &[u8]) -> Result<(Self, Vec<String>), RecordsError> {
        if let Some(next) = self.follow(file) {
            return Ok((next, Vec::new()));
        }
        let (records, warnings) = Records::parse(file)?;
        let columns = records.columns.clone();
        let mut next = Self::from(records);
        // A row that was dropped would be missing in the index.
        if warnings.is_empty() {
            // Edits name rows and pairs by position, so index and outline must have the same ones.
            // A pair without an address, for example, is left out without a warning.
            let outline = Outline::of(file, columns);
            next.outline = outline
                .filter(|outline: &Outline| {
                    outline.rows.len() == next.instances.len()
                        && outline.pairs.len() == next.pairs.list.len()
                })
                .map(Arc::new);
        }
        Ok((next, warnings))
    }

    /// Reads the next file through a window and returns its records if it differs little; `None` if it must be read
    /// again and parsed as a whole, which [`Self::next`] does.
    pub fn follow(&self, file: impl io::Read) -> Option<Self> {
        let (outline, difference) = self.outline.as_ref()?.follow(file)?;
        let Difference {
            rows,
            pairs,
            version,
        } = difference;
        let instances = if rows.edits.is_empty() {
            self.instances.clone()
        } else {
            let reader = RowsReader::new(outline.columns.clone());
            let (added, warnings) = rows.read(reader)?.finish();
            let added = added.build();
            // A row that was dropped would be missing in the index.
            if !warnings.is_empty() || added.len() != rows.edits.added().count() {
                return None;
            }
            Arc::new(self.instances.edited(&rows.edits, &added)?)
        };
        let mut added = Vec::new();
        for pair in pairs.read(PhantomData::<Vec<Pair>>)? {
            // A complete reading leaves such a pair out, which moves the positions of all that
            // follow.
            added.push(pair.0?);
        }
        let renamed = Renamed::new(&rows.edits, &self.instances, &instances);
        let pairs = if pairs.edits.is_empty() && renamed.is_empty() {
            self.pairs.clone()
        } else {
            Arc::new(self.pairs.edited(&pairs.edits, &added, &renamed))
        };
        Some(Self {
            instances,
            pairs,
            definitions: self.definitions.clone(),
            version,
            outline: Some(Arc::new(outline)),
        })
    }

    /// Returns whether [`Self::follow`] found nothing that differs from `before`.
    pub fn equals_previous(&self, before: &Self) -> bool {
        // A followed file always has the same definitions.
        Arc::ptr_eq(&self.instances, &before.instances)
            && Arc::ptr_eq(&self.pairs, &before.pairs)
            && self.version == before.version
    }
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
        Self {
            formerr_for_malformed: true,
            nxdomain_for_empty_non_terminals: true,
        }
    }
}

impl Snapshot {
    /// Indexes records and aliases; returns warnings about unusable aliases.
    pub fn build(records: impl Into<IndexedRecords>, aliases: &AliasFiles) -> (Self, Vec<String>) {
        let records: IndexedRecords = records.into();
        let reverse = Reverse::new(records.pairs.clone(), aliases);
        let (aliases, warnings) = Aliases::build(aliases, &records.definitions, &records.instances);
        // The constant is a well-formed name.
        let (agent_domain, _) = Name::from_wire(AGENT_DOMAIN).unwrap_or((Name::root(), 0));
        let alias_parents = aliases.parents();
        let rules = NameRules::default();
        (
            Self {
                records,
                aliases,
                reverse,
                agent_domain,
                alias_parents,
                rules,
            },
            warnings,
        )
    }

    /// Returns the part that comes from records.json.
    pub fn records(&self) -> IndexedRecords {
        self.records.clone()
    }

    /// Returns the snapshot with other rules.
    pub fn with_rules(self, rules: NameRules) -> Self {
        Self { rules, ..self }
    }

    /// Returns the rules for names that match no instance.
    pub fn rules(&self) -> NameRules {
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
        self.records.version
    }

    /// Returns all instances, in file order.
    pub fn instances(&self) -> impl ExactSizeIterator<Item = Instance<'_>> {
        (0..self.instance_index().len() as Row).map(|row| self.instance_index().instance(row))
    }

    /// Returns an instance by its position in file order; `None` if there are fewer.
    pub fn instance(&self, position: u32) -> Option<Instance<'_>> {
        ((position as usize) < self.instance_index().len())
            .then(|| self.instance_index().instance(position))
    }

    /// Returns the domains of the records.
    pub fn domains(&self) -> impl Iterator<Item = &Name> {
        self.records.instances.domain_names.names()
    }

    /// Returns the number of aliases; an alias with a placeholder counts once per expansion.
    pub fn alias_count(&self) -> usize {
        self.aliases.len()
    }

    /// Returns the zone that makes a name local: the longest of the records' domains, the aliases
    /// and the agents' domain that contains it. `None`: the name is not local.
    pub fn local_zone(&self, name: &Name) -> Option<&Name> {
        // The longest suffix comes first.
        name.suffixes().find_map(|suffix| {
            if suffix == AGENT_DOMAIN {
                return Some(&self.agent_domain);
            }
            self.records
                .instances
                .domain_names
                .get(suffix)
                .or_else(|| self.aliases.zone(suffix))
        })
    }

    /// Returns the names of an address for PTR queries, in wire format with the letter case of the
    /// file, without duplicates: first from `records`, then the aliases that point to the
    /// address or to one of these names.
    pub fn reverse(&self, address: IpAddr) -> Vec<Box<[u8]>> {
        self.reverse.names(&self.records.instances, address)
    }

    pub(crate) fn instance_index(&self) -> &InstanceIndex {
        &self.records.instances
    }

    pub(crate) fn aliases(&self) -> &Aliases {
        &self.aliases
    }
}

//----------- Pairs ----------------------------------------------------------

/// `records` of the file. A director writes the long form of each instance there: the row is stored instead of the
/// text, which would take a megabyte at 10,000 instances.
#[derive(Debug, Default)]
struct Pairs {
    /// In the order of the file.
    list: Box<[(IpAddr, PairName)]>,
    /// Positions in `list`, stably sorted by address.
    order: Box<[u32]>,
    others: Dictionary,
}

/// The name of an address.
#[derive(Clone, Copy, Debug)]
enum PairName {
    /// The long form of this row's instance.
    LongForm(Row),
    /// Symbol of any other text.
    Other(Symbol),
}

impl Pairs {
    /// Number of edits from which sorting is faster than inserting one by one.
    const MAX_INSERTED: usize = 64;

    fn new(pairs: &[(IpAddr, Box<str>)], instances: &InstanceIndex) -> Self {
        let mut others = Dictionary::default();
        let mut list = Vec::with_capacity(pairs.len());
        for (address, text) in pairs {
            list.push((*address, PairName::of(text, instances, &mut others)));
        }
        let mut order: Box<[u32]> = (0..list.len() as u32).collect();
        order.sort_by_key(|&position| list[position as usize].0);
        Self {
            list: list.into(),
            order,
            others,
        }
    }

    /// Returns the pairs after edits of the file's list, and of its rows.
    fn edited(&self, edits: &Edits, added: &[(IpAddr, Box<str>)], renamed: &Renamed<'_>) -> Self {
        let mut list = Vec::with_capacity(edits.len());
        let mut others = Dictionary::default();
        for piece in edits.pieces() {
            match piece {
                Piece::Kept(run) => {
                    for &(address, name) in &self.list[run.clone()] {
                        let name = match name {
                            PairName::LongForm(row) => renamed.name(row, &mut others),
                            PairName::Other(symbol) => {
                                PairName::Other(others.intern(self.others.text(symbol)))
                            }
                        };
                        list.push((address, name));
                    }
                }
                Piece::Added(number) => {
                    let (address, text) = &added[*number];
                    list.push((*address, PairName::of(text, renamed.new, &mut others)));
                }
            }
        }
        let mut order = self.order.to_vec();
        if let Some(positions) = edits.positions(self.list.len()) {
            order.clear();
            for &position in &self.order {
                order.extend(positions[position as usize]);
            }
        } else if !edits.is_empty() {
            // Each added pair replaces one at its position, but may have another address: only
            // these are sorted in again.
            order.retain(|&position| edits.removed().binary_search(&(position as usize)).is_err());
        }
        let added = edits.added().map(|(position, _)| position as u32);
        if edits.count() <= Self::MAX_INSERTED {
            for position in added {
                // Pairs of one address keep the order of the file, as after the stable sort of
                // `new`.
                let key = (list[position as usize].0, position);
                let place = order.partition_point(|&other| (list[other as usize].0, other) < key);
                order.insert(place, position);
            }
        } else {
            order.extend(added);
            order.sort_by_key(|&position| (list[position as usize].0, position));
        }
        Self {
            list: list.into(),
            order: order.into(),
            others,
        }
    }

    /// Returns the names of an address, as in the file.
    fn names<'a>(
        &'a self,
        instances: &'a InstanceIndex,
        address: IpAddr,
    ) -> impl Iterator<Item = Cow<'a, str>> {
        let start = self
            .order
            .partition_point(|&position| self.list[position as usize].0 < address);
        let pairs = self.order[start..]
            .iter()
            .map(|&position| self.list[position as usize])
            .take_while(move |&(other, _)| other == address);
        pairs.map(|(_, name)| match name {
            PairName::LongForm(row) => Cow::Owned(instances.long_form(row)),
            PairName::Other(symbol) => Cow::Borrowed(self.others.text(symbol)),
        })
    }
}

impl PairName {
    fn of(text: &str, instances: &InstanceIndex, others: &mut Dictionary) -> Self {
        match instances.row_with_long_form(text) {
            Some(row) => Self::LongForm(row),
            None => Self::Other(others.intern(text)),
        }
    }
}

/// The rows that have another number, or another long form, after edits.
struct Renamed<'i> {
    old: &'i InstanceIndex,
    new: &'i InstanceIndex,
    /// New number of each old row; `None` if all stay the same.
    numbers: Option<Vec<Option<Row>>>,
    /// Replaced rows with another long form, in ascending order, while numbers stay the same.
    rows: Vec<Row>,
}

impl<'i> Renamed<'i> {
    fn new(edits: &Edits, old: &'i InstanceIndex, new: &'i InstanceIndex) -> Self {
        let numbers = edits.positions(old.len());
        let mut rows = Vec::new();
        if numbers.is_none() {
            rows.extend(edits.removed().iter().map(|&row| row as Row));
            rows.retain(|&row| old.long_form(row) != new.long_form(row));
        }
        Self {
            old,
            new,
            numbers,
            rows,
        }
    }

    fn is_empty(&self) -> bool {
        self.numbers.is_none() && self.rows.is_empty()
    }

    /// Returns the name that an old row's long form has now.
    fn name(&self, row: Row, others: &mut Dictionary) -> PairName {
        // While numbers stay, only a replaced row can have lost its long form.
        let same = match &self.numbers {
            Some(numbers) => numbers[row as usize],
            None => self.rows.binary_search(&row).is_err().then_some(row),
        };
        match same {
            Some(row) => PairName::LongForm(row),
            // The text stays in the file. Another row may have this long form now.
            None => PairName::of(&self.old.long_form(row), self.new, others),
        }
    }
}

//----------- Reverse --------------------------------------------------------

/// The index from addresses to names.
#[derive(Debug, Default)]
struct Reverse {
    pairs: Arc<Pairs>,
    /// Aliases of files by target address.
    by_address: HashMap<IpAddr, Vec<Name>>,
    /// Aliases of files by target name. Aliases of the records point to groups, which have no PTR
    /// records.
    by_name: HashMap<Name, Vec<Name>>,
}

impl Reverse {
    /// Indexes the pairs of the records and the aliases of the files.
    fn new(pairs: Arc<Pairs>, files: &AliasFiles) -> Self {
        let mut reverse = Self {
            pairs,
            ..Self::default()
        };
        for (name, alias) in &*files.exact {
            for target in &alias.targets {
                match target {
                    FileTarget::Address(address) => {
                        reverse
                            .by_address
                            .entry(*address)
                            .or_default()
                            .push(name.clone());
                    }
                    FileTarget::Name(target) => {
                        reverse
                            .by_name
                            .entry(target.clone())
                            .or_default()
                            .push(name.clone());
                    }
                    // bosh-dns answers no reverse query with an alias `_.x` (observed).
                    FileTarget::Label(_) => {}
                }
            }
        }
        reverse
    }

    /// Returns the names of an address, in wire format with the file's letter case, without
    /// duplicates. IPv4-mapped addresses equal their IPv4 address.
    fn names(&self, instances: &InstanceIndex, address: IpAddr) -> Vec<Box<[u8]>> {
        let address = address.to_canonical();
        let mut seen: Vec<Name> = Vec::new();
        let mut names: Vec<Box<[u8]>> = Vec::new();
        for text in self.pairs.names(instances, address) {
            // The director writes names only, but the file is not checked for it, and PTR data must
            // be a name (RFC 1035, section 3.3.12).
            let Ok(name) = Name::from_text(&text) else {
                continue;
            };
            if !seen.contains(&name) {
                names.push(with_case(&name, &text));
                seen.push(name);
            }
        }
        // Chains of aliases were resolved when the files were read, so aliases of these names
        // suffice.
        let by_name = seen.clone();
        let by_name = by_name
            .iter()
            .filter_map(|name| self.by_name.get(name))
            .flatten();
        for alias in self
            .by_address
            .get(&address)
            .into_iter()
            .flatten()
            .chain(by_name)
        {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_forms_are_kept_as_rows() {
        let file =
            br#"{"record_keys": ["id", "instance_group", "network", "deployment", "ip", "domain"],
            "record_infos": [["a", "web", "net", "dep", "10.0.0.1", "bosh"],
                             ["a", "web", "other", "dep", "10.0.0.2", "bosh."]],
            "records": [["10.0.0.2", "a.web.other.dep.bosh"], ["10.0.0.1", "a.web.net.dep.bosh"],
                        ["10.0.0.1", "A.web.net.dep.bosh"], ["10.0.0.1", "b.web.net.dep.bosh"],
                        ["10.0.0.1", "a.web.net.dep.boshx"], ["10.0.0.1", "a.web.netx.dep.bosh"],
                        ["10.0.0.2", "a"]]}"#;
        let records: IndexedRecords = Records::parse(file).unwrap().0.into();
        let names = |address: &str| -> Vec<String> {
            records
                .pairs
                .names(&records.instances, address.parse().unwrap())
                .map(Cow::into_owned)
                .collect()
        };
        assert_eq!(names("10.0.0.2"), ["a.web.other.dep.bosh", "a"]);
        let rest = [
            "A.web.net.dep.bosh",
            "b.web.net.dep.bosh",
            "a.web.net.dep.boshx",
            "a.web.netx.dep.bosh",
        ];
        assert_eq!(
            names("10.0.0.1"),
            [&["a.web.net.dep.bosh"][..], &rest].concat()
        );
        let texts: Vec<&str> = records.pairs.others.iter().map(|(_, text)| text).collect();
        assert_eq!(texts, [&rest[..], &["a"]].concat());
    }
}

#[cfg(test)]
mod reading_tests;
