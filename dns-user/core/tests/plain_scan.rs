//! The indexed lookup compared with a plain scan: for random fleets, aliases, health states and
//! names, both must give the same result.
//!
//! The plain scan works on strings, walks every row for every name and shares no code with the
//! library.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot build its input has failed"
)]

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use dns_core::catalog::{AliasFiles, NameRules, Records, Snapshot};
use dns_core::changes;
use dns_core::name::Name;
use dns_core::resolve::{Existence, Health, HealthState, Resolution, resolve};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

/// A row of the fleet, as strings.
#[derive(Clone, Debug)]
struct Row {
    id: String,
    num_id: Option<String>,
    group: String,
    group_ids: Vec<String>,
    az: Option<&'static str>,
    az_id: Option<&'static str>,
    network: &'static str,
    network_id: Option<&'static str>,
    deployment: &'static str,
    ip: IpAddr,
    domain: &'static str,
    agent: String,
    index: i64,
}

/// An alias definition of the records.
#[derive(Clone, Debug)]
struct Definition {
    group_id: &'static str,
    root: &'static str,
    placeholder: &'static str,
    filter: &'static str,
    first: &'static str,
}

/// A target of an alias, and the additional criterion of a placeholder.
type AliasTarget = (String, Option<(&'static str, String)>);

/// All input of a resolution.
#[derive(Clone, Debug)]
struct World {
    rows: Vec<Row>,
    files: BTreeMap<String, Vec<String>>,
    records: BTreeMap<String, Vec<Definition>>,
    /// Salt of the pseudo-random health states.
    salt: u64,
}

/// Pseudo-random health states, constant for an address and group.
struct States(u64);

impl Health for States {
    fn state(&self, ip: IpAddr, group: Option<&str>) -> HealthState {
        let IpAddr::V4(ip) = ip else {
            return HealthState::Unchecked;
        };
        let group: u64 = group.map_or(7, |group| group.bytes().map(u64::from).sum());
        let mixed = (u64::from(ip.to_bits()) ^ (self.0 << 7) ^ (group << 3))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        match mixed >> 61 {
            0..=2 => HealthState::Running,
            3 | 4 => HealthState::Failing,
            5 | 6 => HealthState::Unknown,
            _ => HealthState::Unchecked,
        }
    }
}

/// The result of the plain scan.
#[derive(Debug, PartialEq, Eq)]
struct Plain {
    existence: Existence,
    addresses: Vec<IpAddr>,
    checked: Vec<IpAddr>,
    synchronous: bool,
}

impl World {
    fn build(&self) -> Snapshot {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!([
                    row.index,
                    row.agent,
                    row.domain,
                    row.ip.to_string(),
                    row.deployment,
                    row.network_id,
                    row.network,
                    row.az_id,
                    row.az,
                    row.group_ids,
                    row.group,
                    row.num_id,
                    row.id
                ])
            })
            .collect();
        let keys = json!([
            "instance_index",
            "agent_id",
            "domain",
            "ip",
            "deployment",
            "network_id",
            "network",
            "az_id",
            "az",
            "group_ids",
            "instance_group",
            "num_id",
            "id"
        ]);
        let aliases: serde_json::Map<String, Value> = self
            .records
            .iter()
            .map(|(alias, definitions)| {
                let list = definitions.iter().map(|definition| {
                    json!({
                        "group_id": definition.group_id, "root_domain": definition.root,
                        "placeholder_type": definition.placeholder, "health_filter": definition.filter,
                        "initial_health_check": definition.first
                    })
                });
                (alias.clone(), list.collect())
            })
            .collect();
        let records =
            json!({"record_infos": rows, "record_keys": keys, "aliases": aliases}).to_string();
        let (records, warnings) = Records::parse(records.as_bytes()).unwrap();
        assert!(warnings.is_empty(), "{warnings:?}");
        let files = serde_json::to_vec(&self.files).unwrap();
        let (files, _) = AliasFiles::parse([("a.json", &files[..])]).unwrap();
        Snapshot::build(records, &files).0
    }

    /// Returns all aliases with their targets. Aliases of the records come first, so that aliases of files
    /// replace them.
    fn aliases(&self) -> BTreeMap<String, Vec<AliasTarget>> {
        let mut all: BTreeMap<String, Vec<AliasTarget>> = BTreeMap::new();
        for (alias, definitions) in &self.records {
            for definition in definitions {
                let health = match definition.filter {
                    "unhealthy" => "s1",
                    "healthy" => "s3",
                    "all" => "s4",
                    _ => "s0",
                };
                let first = match definition.first {
                    "synchronous" => "y1",
                    "asynchronous" => "y0",
                    _ => "",
                };
                let rest = format!("q-g{}.{}.", definition.group_id, definition.root);
                let plain = format!("q-{health}{first}.{rest}");
                let members: Vec<&Row> = self
                    .rows
                    .iter()
                    .filter(|row| row.domain == definition.root)
                    .filter(|row| row.group_ids.iter().any(|id| id == definition.group_id))
                    .collect();
                for row in &members {
                    let expanded = match definition.placeholder {
                        "uuid" => {
                            let number = row
                                .num_id
                                .as_ref()
                                .map_or(String::new(), |number| format!("m{number}"));
                            Some((
                                row.id.clone(),
                                format!("q-{number}{health}{first}.{rest}"),
                                None,
                            ))
                        }
                        "index" => {
                            let index = row.index.to_string();
                            Some((index.clone(), plain.clone(), Some(("index", index))))
                        }
                        "az" | "availability_zone" => row
                            .az
                            .map(|az| (az.to_owned(), plain.clone(), Some(("az", az.to_owned())))),
                        "network" => {
                            let network = row.network.to_owned();
                            Some((network.clone(), plain.clone(), Some(("network", network))))
                        }
                        _ => None,
                    };
                    if let Some((text, target, narrowed)) = expanded {
                        let name = alias.replacen('_', &text, 1).to_lowercase();
                        let targets = all.entry(name).or_default();
                        if !targets.contains(&(target.clone(), narrowed.clone())) {
                            targets.push((target, narrowed));
                        }
                    }
                }
                if !["uuid", "index", "az", "availability_zone", "network"]
                    .contains(&definition.placeholder)
                {
                    let targets = all.entry(alias.to_lowercase()).or_default();
                    if !targets.contains(&(plain.clone(), None)) {
                        targets.push((plain, None));
                    }
                }
            }
        }
        for (alias, targets) in &self.files {
            let mut flat = Vec::new();
            for target in targets {
                self.flatten(target, alias.starts_with("_."), &mut flat);
            }
            all.insert(
                alias.to_lowercase(),
                flat.into_iter().map(|target| (target, None)).collect(),
            );
        }
        all
    }

    /// Expands a target of a file that is an alias of a file itself; aliases `_.x` are never
    /// followed, regardless of the target.
    fn flatten(&self, target: &str, below: bool, flat: &mut Vec<String>) {
        let target = target.to_lowercase();
        let exact = self
            .files
            .iter()
            .find(|(alias, _)| alias.to_lowercase() == target && !target.starts_with("_."));
        match exact {
            Some((_, targets)) if !below => targets
                .iter()
                .for_each(|target| self.flatten(target, false, flat)),
            _ => flat.push(match target.strip_prefix("*.") {
                Some(rest) => format!("q-s0.{rest}"),
                None => target,
            }),
        }
    }

    /// Resolves a name by scanning.
    fn ask(&self, name: &str) -> Option<Plain> {
        let name = name.to_lowercase();
        let aliases = self.aliases();
        let zones = aliases
            .keys()
            .map(|alias| alias.strip_prefix("_.").unwrap_or(alias).to_owned());
        let domains = self
            .rows
            .iter()
            .map(|row| row.domain.trim_end_matches('.').to_lowercase());
        let ours = |zone: &str| zone == "." || name == zone || name.ends_with(&format!(".{zone}"));
        if !zones
            .chain(domains)
            .chain([String::from("bosh-agent-id")])
            .any(|zone| ours(&zone))
        {
            return None;
        }
        let below = name
            .split_once('.')
            .and_then(|(label, rest)| Some((label, aliases.get(&format!("_.{rest}"))?)));
        // Each with its result for another label: a target that is malformed for every label is
        // skipped.
        let put = |target: &String, label: &str| match target.strip_prefix("_.") {
            Some(rest) => format!("{label}.{rest}"),
            None => target.clone(),
        };
        let targets: Vec<_> = match (aliases.get(&name), below) {
            (Some(targets), _) if !name.starts_with("_.") => targets
                .iter()
                .map(|(target, narrowed)| (target.clone(), Some(target.clone()), narrowed.clone()))
                .collect(),
            (_, Some((label, targets))) => targets
                .iter()
                .map(|(target, narrowed)| {
                    (put(target, label), Some(put(target, "x")), narrowed.clone())
                })
                .collect(),
            _ => vec![(name.clone(), None, None)],
        };
        let mut plain = Plain {
            existence: Existence::NoSuchName,
            addresses: Vec::new(),
            checked: Vec::new(),
            synchronous: false,
        };
        let mut kept: Vec<usize> = Vec::new();
        for (target, other, narrowed) in targets {
            if let Ok(address) = target.parse() {
                plain.addresses.push(address);
                plain.existence = Existence::Found;
                continue;
            }
            let dotted = |name: String| {
                if name.ends_with('.') {
                    name
                } else {
                    format!("{name}.")
                }
            };
            if other.is_some_and(|other| self.scan(&dotted(other)).is_none()) {
                continue;
            }
            let Some((mut rows, strategy, wait, group)) = self.scan(&dotted(target)) else {
                return Some(Plain {
                    existence: Existence::Malformed,
                    addresses: Vec::new(),
                    checked: Vec::new(),
                    synchronous: false,
                });
            };
            if let Some((kind, value)) = &narrowed {
                rows.retain(|&row| {
                    let row = &self.rows[row];
                    match *kind {
                        "index" => row.index.to_string() == *value,
                        "az" => row.az == Some(value),
                        _ => row.network == value,
                    }
                });
            }
            if !rows.is_empty() {
                plain.existence = Existence::Found;
            }
            let state = |row: usize| States(self.salt).state(self.rows[row].ip, group.as_deref());
            if strategy != "0" || rows.len() > 1 {
                plain
                    .checked
                    .extend(rows.iter().map(|&row| self.rows[row].ip));
                plain.synchronous |= wait && !rows.is_empty();
            }
            let smart = strategy == "0";
            let good: Vec<usize> = rows
                .iter()
                .copied()
                .filter(|&row| match (strategy.as_str(), state(row)) {
                    ("4", _) => true,
                    ("1", state) => state == HealthState::Failing,
                    ("3", state) => state == HealthState::Running,
                    (_, state) => [HealthState::Running, HealthState::Unchecked].contains(&state),
                })
                .collect();
            kept.extend(if smart && good.is_empty() { rows } else { good });
        }
        kept.sort_unstable();
        kept.dedup();
        plain
            .addresses
            .extend(kept.into_iter().map(|row| self.rows[row].ip));
        plain.addresses.sort();
        plain.checked.sort();
        plain.checked.dedup();
        Some(plain)
    }

    /// Returns rows, health strategy, whether to wait, and the group whose state counts, for a name
    /// with a final dot; `None`: malformed.
    fn scan(&self, name: &str) -> Option<(Vec<usize>, String, bool, Option<String>)> {
        let by = |wanted: &dyn Fn(&Row) -> bool| -> Vec<usize> {
            (0..self.rows.len())
                .filter(|&row| wanted(&self.rows[row]))
                .collect()
        };
        let (first, rest) = name.split_once('.').unwrap();
        let smart = String::from("0");
        if rest == "bosh-agent-id." {
            return Some((by(&|row| row.agent == first), smart, false, None));
        }
        let dotted = |domain: &str| {
            if domain.ends_with('.') {
                domain.to_owned()
            } else {
                format!("{domain}.")
            }
        };
        let fits =
            |domain: &str| domain == "." || name == domain || name.ends_with(&format!(".{domain}"));
        let domains = self
            .rows
            .iter()
            .map(|row| dotted(row.domain))
            .filter(|domain| fits(domain));
        let Some(domain) = domains.max_by_key(String::len) else {
            return Some((by(&|row| row.id == first), smart, false, None));
        };
        let middle: Vec<&str> = rest
            .strip_suffix(&format!(".{domain}"))
            .unwrap_or(rest)
            .split('.')
            .collect();
        if middle.len() != 1 && middle.len() != 3 {
            return None;
        }
        let group = middle[0].strip_prefix("q-g");
        let group =
            group.filter(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()));
        let mut pairs: Vec<(char, String)> = Vec::new();
        if let Some(filter) = first.strip_prefix("q-") {
            let mut letter = ' ';
            let mut fresh = false;
            for character in filter.chars() {
                if character.is_ascii_digit() {
                    if fresh {
                        pairs.push((letter, String::new()));
                    }
                    if "aimnsy".contains(letter) {
                        pairs.last_mut().unwrap().1.push(character);
                    }
                    fresh = false;
                } else {
                    letter = character;
                    fresh = "aimnsy".contains(letter);
                }
            }
            if pairs.is_empty() {
                return None;
            }
        }
        let glob = |pattern: &str, text: &str| match (
            pattern.strip_prefix('*'),
            pattern.strip_suffix('*'),
        ) {
            (Some(""), _) => true,
            (Some(ending), _) => text.ends_with(ending),
            (_, Some(beginning)) => text.starts_with(beginning),
            _ if pattern.is_empty() => true,
            _ => pattern == text && !pattern.contains('*'),
        };
        let among = |letter: char, value: Option<&str>| {
            let mut wanted = pairs
                .iter()
                .filter(|(other, _)| *other == letter)
                .peekable();
            wanted.peek().is_none() || wanted.any(|(_, wanted)| Some(wanted.as_str()) == value)
        };
        let rows = by(&|row| {
            dotted(row.domain) == domain
                && (first.starts_with("q-") || row.id == first)
                && group.is_none_or(|group| row.group_ids.iter().any(|id| id == group))
                && (middle.len() == 1
                    || glob(middle[0], &row.group)
                        && glob(middle[1], row.network)
                        && glob(middle[2], row.deployment))
                && among('a', row.az_id)
                && among('m', row.num_id.as_deref())
                && among('n', row.network_id)
                && among('i', Some(&row.index.to_string()))
        });
        let first_of = |letter| {
            pairs
                .iter()
                .find(|(other, _)| *other == letter)
                .map(|(_, value)| value.clone())
        };
        let strategy = first_of('s').filter(|number| ["1", "3", "4"].contains(&number.as_str()));
        let wait = first_of('y').as_deref() == Some("1");
        Some((
            rows,
            strategy.unwrap_or(smart),
            wait,
            group.map(str::to_owned),
        ))
    }
}

/// Instance ids, including some that no query can contain.
const IDS: [&str; 8] = ["i0", "i1", "i2", "i3", "q-s0", "Cap", "bosh", "my"];
/// Domains: nested, multi-label, with capitals, with a final dot.
const DOMAINS: [&str; 6] = [
    "bosh",
    "inner.bosh",
    "my.custom.tld",
    "Upper.Dom",
    "other.",
    "xbosh",
];
const GROUPS: [&str; 4] = ["1", "2", "01", "3"];
/// First and middle labels: ids, filters, groups, patterns and malformed ones.
const LABELS: [&str; 40] = [
    "i0", "i1", "i3", "cap", "bosh", "nobody", "q-s0", "q-s1", "q-s3y1", "q-s4", "q-i1", "q-a1a2",
    "q-m1m2m3", "q-n1i0", "q-", "q-x", "q-a1-i00", "q-y1", "q-g1", "q-g2", "q-g01", "q-g9", "q-g",
    "x", "web", "db", "webby", "*", "w*", "*b", "*e*", "n1", "n2", "d1", "d*", "z1", "0", "_", "5",
    "a7",
];
/// Suffixes of the generated names.
const ENDINGS: [&str; 18] = [
    "bosh",
    "inner.bosh",
    "my.custom.tld",
    "upper.dom",
    "other",
    "xbosh",
    "bosh-agent-id",
    "one.alias",
    "two.alias",
    "under.alias",
    "idx.blob",
    "zone.blob",
    "net.blob",
    "uuid.blob",
    "all.blob",
    "example.com",
    "tld",
    "under.blob",
];

fn optional<T: Clone + std::fmt::Debug + 'static>(
    values: Vec<T>,
) -> impl Strategy<Value = Option<T>> {
    prop_oneof![3 => select(values).prop_map(Some), 1 => Just(None)]
}

fn row() -> impl Strategy<Value = Row> {
    let first = (
        select(IDS.to_vec()),
        optional((0..6).map(|number: u8| number.to_string()).collect()),
        select(vec!["web", "webby", "db", "q-g1"]),
        prop::collection::vec(select(GROUPS.to_vec()), 0..3),
        optional(vec!["z1", "z2", "Z1"]),
        optional(vec!["1", "2"]),
    );
    let second = (
        select(vec!["n1", "n2"]),
        optional(vec!["1", "2"]),
        select(vec!["d1", "d2", "Dep"]),
        (0u32..200)
            .prop_map(|number| IpAddr::from(std::net::Ipv4Addr::from_bits(0x0a00_0000 + number))),
        select(DOMAINS.to_vec()),
        0..4u8,
        0..4i64,
    );
    (first, second).prop_map(|(first, second)| {
        let (id, num_id, group, groups, az, az_id) = first;
        let (network, network_id, deployment, ip, domain, agent, index) = second;
        Row {
            id: id.to_owned(),
            num_id,
            group: group.to_owned(),
            group_ids: groups.into_iter().map(str::to_owned).collect(),
            az,
            az_id,
            network,
            network_id,
            deployment,
            ip,
            domain,
            agent: format!("a{agent}"),
            index,
        }
    })
}

fn name() -> impl Strategy<Value = String> {
    (
        prop::collection::vec(select(LABELS.to_vec()), 0..5),
        select(ENDINGS.to_vec()),
    )
        .prop_map(|(labels, ending)| {
            let mut labels = labels;
            labels.push(ending);
            labels.join(".")
        })
}

fn target() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => name(),
        1 => name().prop_map(|name| format!("_.{name}")),
        1 => name().prop_map(|name| format!("*.{name}")),
        1 => (0..5u8).prop_map(|number| format!("192.0.2.{number}")),
    ]
}

fn definitions() -> impl Strategy<Value = Vec<Definition>> {
    let definition = (
        select(GROUPS.to_vec()),
        select(vec!["bosh", "inner.bosh", "my.custom.tld"]),
        select(vec![
            "uuid",
            "index",
            "az",
            "availability_zone",
            "network",
            "",
            "other",
        ]),
        select(vec!["", "smart", "unhealthy", "healthy", "all", "bogus"]),
        select(vec!["", "synchronous", "asynchronous"]),
    );
    let definition =
        definition.prop_map(|(group_id, root, placeholder, filter, first)| Definition {
            group_id,
            root,
            placeholder,
            filter,
            first,
        });
    prop::collection::vec(definition, 1..4)
}

fn world() -> impl Strategy<Value = World> {
    let files = (
        prop::collection::vec(target(), 0..4),
        prop::collection::vec(target(), 0..4),
        prop::collection::vec(target(), 0..4),
    );
    let records = (
        definitions(),
        definitions(),
        definitions(),
        definitions(),
        definitions(),
        definitions(),
    );
    let rows = prop::collection::vec(row(), 0..40);
    (rows, files, records, any::<u64>()).prop_map(|(rows, files, records, salt)| {
        // Aliases only refer to later ones, so there are no loops.
        let one = files
            .0
            .into_iter()
            .filter(|target| !target.ends_with("one.alias"))
            .collect();
        let two = files
            .1
            .into_iter()
            .filter(|target| !target.ends_with(".alias") || target.ends_with("under.alias"));
        let two: Vec<String> = two.collect();
        let files = [
            (String::from("one.alias"), one),
            (String::from("Two.alias"), two),
            (String::from("_.under.alias"), files.2),
        ];
        let records = [
            (String::from("_.idx.blob"), records.0),
            (String::from("_.zone.blob"), records.1),
            (String::from("x-_.net.blob"), records.2),
            (String::from("_.uuid.blob"), records.3),
            (String::from("All.blob"), records.4),
            (String::from("_.under.blob"), records.5),
        ];
        World {
            rows,
            files: files.into(),
            records: records.into(),
            salt,
        }
    })
}

/// A change of one row; numbers are taken modulo the number of rows.
#[derive(Clone, Debug)]
enum Edit {
    Insert(usize, Row),
    Remove(usize),
    Move(usize, usize),
    /// Replaces all values but the domain.
    Replace(usize, Row),
    Address(usize, IpAddr),
    Group(usize, &'static str),
}

fn edit() -> impl Strategy<Value = Edit> {
    let at = 0..1000usize;
    prop_oneof![
        (at.clone(), row()).prop_map(|(at, row)| Edit::Insert(at, row)),
        at.clone().prop_map(Edit::Remove),
        (at.clone(), at.clone()).prop_map(|(from, to)| Edit::Move(from, to)),
        (at.clone(), row()).prop_map(|(at, row)| Edit::Replace(at, row)),
        (at.clone(), row()).prop_map(|(at, row)| Edit::Address(at, row.ip)),
        (at, select(GROUPS.to_vec())).prop_map(|(at, group)| Edit::Group(at, group)),
    ]
}

impl Edit {
    fn apply(self, rows: &mut Vec<Row>) {
        let count = rows.len();
        match self {
            Self::Insert(at, row) => rows.insert(at % (count + 1), row),
            _ if count == 0 => {}
            Self::Remove(at) => drop(rows.remove(at % count)),
            Self::Move(from, to) => {
                let row = rows.remove(from % count);
                rows.insert(to % count, row);
            }
            Self::Replace(at, row) => {
                rows[at % count] = Row {
                    domain: rows[at % count].domain,
                    ..row
                }
            }
            Self::Address(at, ip) => rows[at % count].ip = ip,
            Self::Group(at, group) => rows[at % count].group_ids.push(group.to_owned()),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn indexes_match_plain_scan(
        world in world(),
        names in prop::collection::vec(prop_oneof![4 => name(), 1 => select(vec![
            "one.alias".to_owned(), "two.alias".into(), "all.blob".into(), "i0.under.alias".into(), "q-x.under.alias".into(),
            "i1.uuid.blob".into(), "1.idx.blob".into(), "z1.zone.blob".into(), "x-n1.net.blob".into(), "5.under.blob".into(),
            "i0.under.blob".into(), "cap.uuid.blob".into(), "_.under.blob".into(), "bosh".into(), "upper.dom".into(),
        ])], 1..40),
    ) {
        let snapshot = world.build();
        for text in names {
            let name = Name::from_text(&text).unwrap();
            let found = resolve(&snapshot, &States(world.salt), &name).map(|resolution| {
                let v4 = resolution.v4.into_iter().map(IpAddr::V4);
                let mut addresses: Vec<IpAddr> = v4.chain(resolution.v6.into_iter().map(IpAddr::V6)).collect();
                addresses.sort();
                prop_assert_eq!(resolution.checks.tracked, !resolution.checks.instances.is_empty());
                Ok(Plain {
                    existence: resolution.existence,
                    addresses,
                    checked: resolution.checks.instances,
                    synchronous: resolution.checks.synchronous,
                })
            }).transpose()?;
            prop_assert_eq!(found, world.ask(&text), "{}", text);
        }
    }

    #[test]
    fn published_names_exist_once(world in world()) {
        let snapshot = world.build();
        let mut seen = HashSet::new();
        for name in dns_core::listing::published_names(&snapshot) {
            let alias = name.to_string().contains("alias") || name.to_string().contains("blob");
            let resolution = resolve(&snapshot, &States(world.salt), &name);
            prop_assert!(resolution.is_some_and(|found| alias || found.existence == Existence::Found), "{}", name);
            prop_assert!(seen.insert(name.clone()), "{} comes twice", name);
        }
    }

    #[test]
    fn unconcerned_names_keep_their_meaning(
        world in world(),
        edits in prop::collection::vec(edit(), 1..4),
        names in prop::collection::vec(name(), 1..40),
        (formerr_for_malformed, nxdomain_for_empty_non_terminals) in any::<(bool, bool)>(),
    ) {
        let rules = NameRules { formerr_for_malformed, nxdomain_for_empty_non_terminals };
        let old = world.build().with_rules(rules);
        let mut world = world;
        edits.into_iter().for_each(|edit| edit.apply(&mut world.rows));
        let new = world.build().with_rules(rules);
        let Some(changes) = changes::between(&old, &new) else { return Ok(()) };
        let meaning = |snapshot: &Snapshot, name: &Name| {
            let mut resolution = resolve(snapshot, &States(world.salt), name)?;
            resolution.v4.sort_unstable();
            Some(resolution)
        };
        let [before, after]: [HashSet<Name>; 2] =
            [&old, &new].map(|snapshot| dns_core::listing::published_names(snapshot).collect());
        let names = names.iter().map(|text| Name::from_text(text).unwrap());
        for name in names.chain(before.union(&after).cloned()) {
            let is_concerned = changes::facets(&old, &name).iter().any(|&facet| changes.concern(facet))
                || changes.renewed.contains(&name);
            let [was, is] = [&old, &new].map(|snapshot| meaning(snapshot, &name));
            prop_assert!(was.is_none() || is_concerned || was == is, "{}: {:?}, {:?}", name, was, is);
            let exists = |found: &Option<Resolution>| found.as_ref().is_some_and(|found| found.existence == Existence::Found);
            if after.contains(&name) && !before.contains(&name) && exists(&is) {
                prop_assert!(changes.listed.contains(&name) || exists(&was), "{} is not listed", name);
            }
            if before.contains(&name) && !after.contains(&name) && exists(&was) {
                prop_assert!(changes.unlisted.contains(&name) || exists(&is), "{} is still listed", name);
            }
        }
    }
}
