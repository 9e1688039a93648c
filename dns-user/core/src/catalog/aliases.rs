//! Aliases from files and records combined, checked against the domains of the records.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::alias_files::{AliasFiles, FileAlias, FileTarget, dead_wildcard, warning};
use super::columns::{NO_VALUE, Row, Symbol};
use super::instances::InstanceIndex;
use super::records::AliasDefinition;
use crate::name::Name;
use crate::query::{Pattern, QueryCriteria, QueryTarget};

/// A target of an alias.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Address(IpAddr),
    /// A name to look up in the records.
    Name(Name),
    /// A name to look up with an additional criterion, from a placeholder. There may be one per
    /// instance, so they share the name.
    Placeholder {
        /// Index of the name in [`Aliases::bases`].
        base: u32,
        filter: PlaceholderFilter,
    },
}

/// The additional criterion that a placeholder in an alias of `records.json` adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlaceholderFilter {
    /// uuid: numeric id of the instance, in place of its id.
    Number(Symbol),
    /// index: index of the instance in its group.
    Index(i64),
    /// availability_zone: name of the zone.
    Zone(Symbol),
    /// network: name of the network.
    Network(Symbol),
}

type ByName<T> = HashMap<Name, T, foldhash::fast::FixedState>;

#[derive(Debug, Default)]
pub(crate) struct Aliases {
    /// Aliases by name. Aliases from files take precedence over aliases from the records.
    pub(crate) exact: ByName<Vec<Target>>,
    /// Aliases `_.x`, by `x`: any single label in front matches.
    pub(crate) below: ByName<Vec<FileTarget>>,
    /// Names shared by [`Target::Placeholder`].
    bases: Vec<Name>,
    files: AliasFiles,
    /// The aliases of the records as written there.
    definitions: Definitions,
}

/// The aliases of the records, each with its definitions.
pub(super) type Definitions = Arc<[(String, Vec<AliasDefinition>)]>;

impl Aliases {
    /// Combines the aliases; invalid ones are skipped and reported.
    pub(crate) fn build(
        files: &AliasFiles,
        definitions: &Definitions,
        instances: &InstanceIndex,
    ) -> (Self, Vec<String>) {
        let mut builder = Builder {
            instances,
            files,
            aliases: Self::default(),
            warnings: Vec::new(),
        };
        builder.add_files();
        for (alias, definitions) in &**definitions {
            if let Some(problem) = dead_wildcard(alias) {
                builder.warn(RECORDS, alias, problem);
            }
            for definition in definitions {
                builder.add_definition(alias, definition);
            }
        }
        let Builder {
            aliases, warnings, ..
        } = builder;
        (
            Self {
                files: files.clone(),
                definitions: definitions.clone(),
                ..aliases
            },
            warnings,
        )
    }

    /// Returns whether both were built from the same definitions, so that they differ at most in the
    /// aliases that placeholders make of each row.
    pub(crate) fn has_source_of(&self, other: &Self) -> bool {
        self.files == other.files && self.definitions == other.definitions
    }

    /// Returns the aliases that exist whatever the rows are.
    pub(crate) fn fixed(&self) -> impl Iterator<Item = Name> {
        let mut of_records = Vec::new();
        for (alias, definitions) in &*self.definitions {
            let is_fixed = definitions
                .iter()
                .any(|definition| Placeholder::read(&definition.placeholder_type).is_none());
            if is_fixed && let Ok(name) = Name::from_text(alias) {
                of_records.push(name);
            }
        }
        self.files.exact.keys().cloned().chain(of_records)
    }

    /// Returns the aliases that placeholders make of a row.
    pub(crate) fn names_of_row(&self, instances: &InstanceIndex, row: Row) -> Vec<Name> {
        let groups = instances.groups_of(row);
        let domain = instances.domains.text(instances.place_of(row).domain);
        let mut names = Vec::new();
        for (alias, definitions) in &*self.definitions {
            for AliasDefinition {
                group_id,
                root_domain,
                placeholder_type,
                ..
            } in definitions
            {
                if domain.strip_suffix('.') == Some(root_domain)
                    && let Some(text) = Placeholder::read(placeholder_type)
                        .and_then(|kind| kind.text(instances, row))
                    && groups
                        .iter()
                        .any(|&group| instances.groups.text(group) == group_id)
                    && let Ok(name) = Name::from_text(&alias.replacen('_', &text, 1))
                {
                    names.push(name);
                }
            }
        }
        names
    }

    /// Returns the wire-format names with aliases below them: every ancestor of an alias, and `x`
    /// and its ancestors for an alias `_.x`.
    pub(crate) fn parents(&self) -> HashSet<Box<[u8]>, foldhash::fast::FixedState> {
        let of_exact = self.exact.keys().flat_map(|name| name.suffixes().skip(1));
        let of_below = self.below.keys().flat_map(Name::suffixes);
        let mut parents = HashSet::default();
        for parent in of_exact.chain(of_below) {
            // Copied only if it is new: thousands of aliases share their ancestors.
            if !parents.contains(parent) {
                parents.insert(Box::from(parent));
            }
        }
        parents
    }

    pub(crate) fn len(&self) -> usize {
        self.exact.len() + self.below.len()
    }

    /// Returns the alias, or the `x` of aliases `_.x`, with this wire-format name.
    pub(crate) fn zone(&self, wire: &[u8]) -> Option<&Name> {
        let exact = self.exact.get_key_value(wire).map(|(name, _)| name);
        exact.or_else(|| self.below.get_key_value(wire).map(|(name, _)| name))
    }

    /// Returns whether the name is an alias or matches an alias `_.x`.
    pub(crate) fn covers(&self, name: &Name) -> bool {
        let parent = name.suffixes().nth(1);
        self.exact.contains_key(name)
            || parent.is_some_and(|parent| self.below.contains_key(parent))
    }

    pub(crate) fn exact(&self, name: &Name) -> Option<&[Target]> {
        self.exact.get(name).map(Vec::as_slice)
    }

    /// Returns the targets of the alias `_.x` that matches the name, with its first label inserted.
    pub(crate) fn below(&self, name: &Name) -> Option<Vec<Target>> {
        let label = name.labels().next()?;
        // `_` stands for exactly one label (observed), so only the parent counts.
        let targets = self.below.get(name.suffixes().nth(1)?)?;
        let mut complete = Vec::with_capacity(targets.len());
        for target in targets {
            // With a long label a target may exceed 255 bytes. It then selects nothing.
            if let Some(target) = target.with_label(label) {
                complete.extend(Target::from_file(target));
            }
        }
        Some(complete)
    }

    /// Returns a name shared by targets from placeholders.
    pub(crate) fn base(&self, base: u32) -> &Name {
        &self.bases[base as usize]
    }
}

impl Target {
    /// Converts a target of a file after its label was inserted.
    fn from_file(target: FileTarget) -> Option<Self> {
        match target {
            FileTarget::Address(address) => Some(Self::Address(address)),
            FileTarget::Name(name) => Some(Self::Name(name)),
            FileTarget::Label(_) => None,
        }
    }
}

struct Builder<'a> {
    instances: &'a InstanceIndex,
    files: &'a AliasFiles,
    aliases: Aliases,
    warnings: Vec<String>,
}

/// A value of placeholder_type that replaces the `_` of an alias.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Placeholder {
    Uuid,
    Index,
    Zone,
    Network,
}

impl Placeholder {
    fn read(text: &str) -> Option<Self> {
        match text {
            "uuid" => Some(Self::Uuid),
            "index" => Some(Self::Index),
            "availability_zone" | "az" => Some(Self::Zone),
            "network" => Some(Self::Network),
            _ => None,
        }
    }

    /// Returns the text of a row that replaces the `_`; `None` if the row makes no alias.
    fn text(self, instances: &InstanceIndex, row: Row) -> Option<String> {
        match self {
            Self::Uuid => Some(instances.id.text(row).to_owned()),
            Self::Index => instances.indexes[row as usize].map(|index| index.to_string()),
            Self::Zone if instances.az.values[row as usize] == NO_VALUE => None,
            Self::Zone => Some(instances.az.text(row).to_owned()),
            Self::Network => Some(
                instances
                    .places
                    .networks
                    .text(instances.place_of(row).network)
                    .to_owned(),
            ),
        }
    }
}

/// Source given in warnings about aliases of the records.
const RECORDS: &str = "records.json";

impl Builder<'_> {
    fn add_files(&mut self) {
        let files = self.files;
        for (name, alias) in &*files.exact {
            let targets = self.good(alias, &name.to_string());
            let targets = targets.into_iter().filter_map(Target::from_file).collect();
            self.aliases.exact.insert(name.clone(), targets);
        }
        for (name, alias) in &*files.below {
            let targets = self.good(alias, &format!("_.{name}"));
            self.aliases.below.insert(name.clone(), targets);
        }
    }

    /// Returns the usable targets and reports the others.
    fn good(&mut self, alias: &FileAlias, name: &str) -> Vec<FileTarget> {
        let mut targets = alias.targets.clone();
        targets.retain(|target| {
            // Any label that is not a filter will do for the check.
            let Some(FileTarget::Name(example)) = target.with_label(b"x") else { return true };
            let is_fixed = matches!(target, FileTarget::Name(_));
            let target = example;
            match QueryTarget::read(&target, &self.instances.domain_names) {
                // Kept nevertheless: bosh-dns looks up the first label of such a target as an
                // instance id.
                Ok(QueryTarget::Anywhere(Some(id))) if is_fixed && !self.has_instance(id) => {
                    let problem = "is in no domain of the records, so it has no address; a target is a name \
                                   of the fleet, or an address";
                    self.warn(&alias.file, name, format!("target {target} {problem}"));
                    true
                }
                Ok(QueryTarget::Within(_, QueryCriteria { place: Some(place), .. })) => {
                    if let Some(problem) = self.underscore_in(&place) {
                        self.warn(&alias.file, name, format!("target {target} never matches: {problem}"));
                    }
                    true
                }
                Ok(_) => true,
                // bosh-dns keeps such a target, and answers every query for the alias with FORMERR
                // (docs/differences.md).
                Err(error) => {
                    self.warn(&alias.file, name, format!("target {target} is skipped: {error}"));
                    false
                }
            }
        });
        targets
    }

    /// Returns which label has an underscore that no name of the records has. The director writes
    /// canonical names, with hyphens, whatever the manifest says.
    fn underscore_in(&self, place: &[Pattern<'_>; 3]) -> Option<String> {
        let places = &self.instances.places;
        let known = [
            ("instance group", &places.instance_groups),
            ("network", &places.networks),
            ("deployment", &places.deployments),
        ];
        for (pattern, (kind, names)) in place.iter().zip(known) {
            let Pattern::Exact(label) = *pattern else {
                continue;
            };
            if label.contains(&b'_') && names.find(label).is_none() {
                let label = String::from_utf8_lossy(label);
                let canonical = label.replace('_', "-");
                return Some(format!(
                    "the records have no {kind} {label:?}; BOSH replaces underscores by hyphens, write {canonical:?}"
                ));
            }
        }
        None
    }

    fn has_instance(&self, id: &[u8]) -> bool {
        // Before the first records.json every id would be unknown, and each alias would be
        // reported.
        self.instances.len() == 0 || self.instances.id.dictionary.find(id).is_some()
    }

    fn add_definition(&mut self, alias: &str, definition: &AliasDefinition) {
        let placeholder = Placeholder::read(&definition.placeholder_type);
        let Some(base) = self.base(alias, definition, "") else {
            if placeholder.is_none() {
                // The alias exists nevertheless: it must not be forwarded to recursors.
                self.add(alias, None, None);
            }
            return;
        };
        let Some(placeholder) = placeholder else {
            return self.add(alias, None, Some(Target::Name(base)));
        };
        if placeholder == Placeholder::Uuid {
            return self.add_instances(alias, definition, base);
        }
        let number = self.share(base);
        let instances = self.instances;
        for row in self.members(definition) {
            let filter = match placeholder {
                Placeholder::Uuid | Placeholder::Index => {
                    instances.indexes[row as usize].map(PlaceholderFilter::Index)
                }
                Placeholder::Zone => {
                    Some(PlaceholderFilter::Zone(instances.az.values[row as usize]))
                }
                Placeholder::Network => {
                    Some(PlaceholderFilter::Network(instances.place_of(row).network))
                }
            };
            if let (Some(text), Some(filter)) = (placeholder.text(instances, row), filter) {
                self.add(
                    alias,
                    Some(&text),
                    Some(Target::Placeholder {
                        base: number,
                        filter,
                    }),
                );
            }
        }
    }

    /// Adds an alias for each instance of the group.
    fn add_instances(&mut self, alias: &str, definition: &AliasDefinition, base: Name) {
        let shared = self.share(base.clone());
        let instances = self.instances;
        for row in self.members(definition) {
            let number = instances.num_id.text(row);
            // The number is written into the filter label as a string, so an instance without a number means
            // its whole group (observed).
            let target = if number.is_empty() {
                Some(Target::Name(base.clone()))
            } else if number.bytes().all(|byte| byte.is_ascii_digit()) {
                Some(Target::Placeholder {
                    base: shared,
                    filter: PlaceholderFilter::Number(instances.num_id.values[row as usize]),
                })
            } else {
                // As in bosh-dns the text becomes part of the filter label, whose parser decides.
                self.base(alias, definition, number).map(Target::Name)
            };
            if target.is_some() {
                self.add(alias, Some(instances.id.text(row)), target);
            }
        }
    }

    /// Returns the rows in a definition's group and domain. Both are compared as strings: a root
    /// domain with a final dot has no rows (observed).
    fn members(&self, definition: &AliasDefinition) -> Vec<Row> {
        let instances = self.instances;
        let domain = format!("{}.", definition.root_domain);
        let Some(domain) = instances.domains.find(domain.as_bytes()) else {
            return Vec::new();
        };
        let Some(group) = instances.groups.find(definition.group_id.as_bytes()) else {
            return Vec::new();
        };
        let mut rows = instances.by_group.rows(group).to_vec();
        rows.retain(|&row| instances.place_of(row).domain == domain);
        rows
    }

    /// Returns the name that a definition refers to; `number` is the numeric id of an instance or
    /// empty.
    fn base(&mut self, alias: &str, definition: &AliasDefinition, number: &str) -> Option<Name> {
        let AliasDefinition {
            group_id,
            root_domain,
            health_filter,
            initial_health_check,
            ..
        } = definition;
        let number = if number.is_empty() {
            String::new()
        } else {
            format!("m{number}")
        };
        let health = match health_filter.as_str() {
            "unhealthy" => "s1",
            "healthy" => "s3",
            "all" => "s4",
            _ => "s0",
        };
        let first_check = match initial_health_check.as_str() {
            "asynchronous" => "y0",
            "synchronous" => "y1",
            _ => "",
        };
        let text = format!("q-{number}{health}{first_check}.q-g{group_id}.{root_domain}");
        let problem = match Name::from_text(&text) {
            Err(error) => error.to_string(),
            Ok(name) => match QueryTarget::read(&name, &self.instances.domain_names).err() {
                None => return Some(name),
                Some(error) => error.to_string(),
            },
        };
        self.warn(
            RECORDS,
            alias,
            format!("it expands to {text:?}, which is skipped: {problem}"),
        );
        None
    }

    /// Stores a name shared by targets and returns its index.
    fn share(&mut self, base: Name) -> u32 {
        let bases = &mut self.aliases.bases;
        if bases.last() != Some(&base) {
            bases.push(base);
        }
        (bases.len() - 1) as u32
    }

    /// Adds a target to an alias of the records, with the first `_` replaced by `placeholder`.
    /// Without a target the alias exists but has no addresses.
    fn add(&mut self, alias: &str, placeholder: Option<&str>, target: Option<Target>) {
        let replaced = placeholder.map(|text| alias.replacen('_', text, 1));
        let text = replaced.as_deref().unwrap_or(alias);
        let name = match Name::from_text(text) {
            Ok(name) => name,
            Err(error) => {
                return self.warn(
                    RECORDS,
                    alias,
                    format!("{text:?} is not a domain name and is skipped: {error}"),
                );
            }
        };
        // An instance id can produce the label `_` too; only an unreplaced one makes an alias
        // `_.x`.
        let is_below = placeholder.is_none() && name.labels().next() == Some(b"_");
        match name.parent() {
            Some(parent) if is_below => {
                if !self.files.below.contains_key(&parent) {
                    let targets = self.aliases.below.entry(parent).or_default();
                    // Other targets come from placeholders only.
                    if let Some(Target::Name(target)) = target {
                        push_once(targets, FileTarget::Name(target));
                    }
                }
            }
            _ => {
                if !self.files.exact.contains_key(&name) {
                    let targets = self.aliases.exact.entry(name).or_default();
                    if let Some(target) = target {
                        push_once(targets, target);
                    }
                }
            }
        }
    }

    fn warn(&mut self, source: &str, alias: &str, problem: String) {
        self.warnings.push(warning(source, alias, &problem));
    }
}

fn push_once<T: PartialEq>(targets: &mut Vec<T>, target: T) {
    // An instance has a row for each of its networks, which all make the same target.
    if !targets.contains(&target) {
        targets.push(target);
    }
}
