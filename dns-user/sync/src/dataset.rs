//! The dataset: the content of `records.json`, byte for byte as a director writes it.
//!
//! Compact JSON without a final newline; members are in the order of the structs here. Rows are ordered by
//! the instances' numbers, which never change: unchanged rows keep their position, which keeps patches small.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet},
};

use dns_core::{catalog::RECORD_KEYS, link_address::canonical};
use serde::{Deserialize, Serialize, de::IgnoredAny};

use crate::inventory::{Instance, Inventory};

pub(crate) const LAST_VERSION: u64 = (1 << 53) - 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dataset {
    /// Pairs for `/etc/hosts`: address, name.
    records: Vec<(String, String)>,
    pub(crate) infos: Vec<Row>,
    aliases: BTreeMap<String, Vec<AliasRow>>,
}

/// One row; the columns are [`RECORD_KEYS`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Row(
    String,
    String,
    String,
    Vec<String>,
    Option<String>,
    Option<String>,
    String,
    String,
    String,
    String,
    String,
    Option<String>,
    u64,
);

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct AliasRow {
    root_domain: String,
    group_id: String,
    /// Health filter for the instances.
    health_filter: Option<String>,
    /// Whether the first query waits for health checks.
    initial_health_check: Option<String>,
    placeholder_type: Option<String>,
}

#[derive(Serialize)]
struct Written<'a> {
    records: &'a [(String, String)],
    version: u64,
    /// Names of the columns.
    record_keys: [&'static str; 13],
    record_infos: &'a [Row],
    aliases: &'a BTreeMap<String, Vec<AliasRow>>,
}

impl Dataset {
    /// Builds the dataset of an inventory and allocates missing ids.
    ///
    /// All names in `inventory` have a canonical form, because it is validated.
    pub(crate) fn build(inventory: &Inventory, ids: &mut Ids) -> Self {
        let numbers: Vec<u64> = inventory
            .instances
            .iter()
            .map(|instance| ids.instance(&instance.id))
            .collect();
        let mut ordered: Vec<_> = numbers.into_iter().zip(&inventory.instances).collect();
        // In the order of the files, one new instance would move every row behind it, and no patch
        // would be small.
        ordered.sort_by_key(|(number, _)| *number);
        // Before the rows, which refer to them; ids are allocated in a fixed order, so that the
        // same inventory gets the same ones.
        let groups = group_ids(inventory, ids);
        let mut dataset = Self {
            records: Vec::new(),
            infos: Vec::new(),
            aliases: BTreeMap::new(),
        };
        for (number, instance) in ordered {
            let groups = &groups[&(instance.deployment.as_str(), instance.group.as_str())];
            dataset.add(inventory, instance, number, groups, ids);
        }
        for link in &inventory.links {
            let group_id = ids
                .group(&link.deployment, LINK, &link.group_name())
                .to_string();
            for alias in &link.aliases {
                let row = AliasRow {
                    root_domain: inventory.domain.clone(),
                    group_id: group_id.clone(),
                    health_filter: alias.health_filter.clone(),
                    initial_health_check: alias.initial_health_check.clone(),
                    placeholder_type: alias.placeholder_type.clone(),
                };
                let rows = dataset.aliases.entry(alias.domain.clone()).or_default();
                // Several groups of a deployment may provide one link, with the same aliases.
                if !rows.contains(&row) {
                    rows.push(row);
                }
            }
        }
        dataset
    }

    /// Adds the rows of an instance, one for each network.
    fn add(
        &mut self,
        inventory: &Inventory,
        instance: &Instance,
        number: u64,
        groups: &[String],
        ids: &mut Ids,
    ) {
        let Instance {
            id,
            index,
            deployment,
            group,
            zone,
            agent,
            networks,
        } = instance;
        // Validated with the inventory.
        let group = canonical(group).unwrap_or_default();
        let deployment = canonical(deployment).unwrap_or_default();
        for (network, address) in networks {
            let network_id = ids.network(network).to_string();
            let network = canonical(network).unwrap_or_default();
            let address = address.to_string();
            let below = format!("{group}.{network}.{deployment}.{}", inventory.domain);
            self.records
                .push((address.clone(), format!("{id}.{below}")));
            // A director writes these names only if it is configured to.
            if inventory.index_records {
                self.records
                    .push((address.clone(), format!("{index}.{below}")));
            }
            self.infos.push(Row(
                id.clone(),
                number.to_string(),
                group.clone(),
                groups.to_vec(),
                zone.clone(),
                zone.as_ref().map(|zone| ids.zone(zone).to_string()),
                network,
                network_id,
                deployment.clone(),
                address,
                inventory.domain.clone(),
                agent.clone(),
                *index,
            ));
        }
    }

    pub(crate) fn write(&self, version: u64) -> Vec<u8> {
        let Self {
            records,
            infos,
            aliases,
        } = self;
        let written = Written {
            records,
            version,
            record_keys: RECORD_KEYS,
            record_infos: infos,
            aliases,
        };
        // Serialising cannot fail: all keys are strings, and all values are strings and numbers.
        serde_json::to_vec(&written).unwrap_or_default()
    }
}

/// Returns, for each deployment and instance group, the group's id followed by the ids of its
/// links' groups, sorted by the link group's name.
fn group_ids<'a>(
    inventory: &'a Inventory,
    ids: &mut Ids,
) -> BTreeMap<(&'a str, &'a str), Vec<String>> {
    let mut groups: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for instance in &inventory.instances {
        let key = (instance.deployment.as_str(), instance.group.as_str());
        if groups.contains_key(&key) {
            continue;
        }
        let mut links = BTreeSet::new();
        for link in &inventory.links {
            if (link.deployment.as_str(), link.group.as_str()) == key {
                links.insert(link.group_name());
            }
        }
        let mut all = vec![ids.group(key.0, INSTANCE_GROUP, key.1).to_string()];
        for link in &links {
            all.push(ids.group(key.0, LINK, link).to_string());
        }
        groups.insert(key, all);
    }
    groups
}

/// The parts of a dataset that an agent reads; their presence identifies a dataset.
#[derive(Debug, Deserialize)]
pub(crate) struct Read<'a> {
    pub version: u64,
    #[serde(borrow, default)]
    pub records: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    #[serde(borrow)]
    #[expect(
        dead_code,
        reason = "a file without the names of the columns is no dataset"
    )]
    record_keys: Vec<Cow<'a, str>>,
    /// Rows; only the server looks at their content.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "a file without rows is no dataset")
    )]
    record_infos: Vec<IgnoredAny>,
}

impl<'a> Read<'a> {
    /// Parses the JSON of `records.json`.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}

/// The rows of a written dataset.
#[derive(Deserialize)]
pub(crate) struct Rows {
    record_infos: Vec<Vec<serde_json::Value>>,
}

impl Rows {
    /// Returns the ids of the instances in lower case.
    pub(crate) fn instance_ids(&self) -> HashSet<String> {
        // The id is the first of [`RECORD_KEYS`]. Earlier versions kept the case of the inventory.
        let ids = self
            .record_infos
            .iter()
            .filter_map(|row| row.first()?.as_str());
        ids.map(str::to_ascii_lowercase).collect()
    }
}

pub(crate) const INSTANCE_GROUP: &str = "instance-group";

pub(crate) const LINK: &str = "link";

/// All ids ever allocated. Each kind is counted separately from 1.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ids {
    /// Availability zones by name.
    pub(crate) zones: BTreeMap<String, u64>,
    pub(crate) networks: BTreeMap<String, u64>,
    /// Groups by deployment, type and name; instance groups and links share the numbers.
    groups: BTreeMap<String, BTreeMap<String, BTreeMap<String, u64>>>,
    pub(crate) instances: BTreeMap<String, u64>,
    /// Highest number among the groups.
    last_group: u64,
}

impl Ids {
    /// Returns the id of an availability zone; allocates it if missing.
    pub(crate) fn zone(&mut self, name: &str) -> u64 {
        allocate(&mut self.zones, name)
    }

    pub(crate) fn network(&mut self, name: &str) -> u64 {
        allocate(&mut self.networks, name)
    }

    pub(crate) fn instance(&mut self, id: &str) -> u64 {
        allocate(&mut self.instances, id)
    }

    pub(crate) fn find_group(&self, deployment: &str, kind: &str, name: &str) -> Option<u64> {
        self.groups.get(deployment)?.get(kind)?.get(name).copied()
    }

    /// Returns the id of a group; allocates it if missing. `kind` is [`INSTANCE_GROUP`] or [`LINK`].
    pub(crate) fn group(&mut self, deployment: &str, kind: &str, name: &str) -> u64 {
        let of_kind = self
            .groups
            .entry(deployment.to_owned())
            .or_default()
            .entry(kind.to_owned())
            .or_default();
        *of_kind.entry(name.to_owned()).or_insert_with(|| {
            self.last_group += 1;
            self.last_group
        })
    }
}

/// Returns the number of a name; allocates it if missing. Entries are never removed, so the number
/// of entries is the highest number.
fn allocate(numbers: &mut BTreeMap<String, u64>, name: &str) -> u64 {
    // An id is never given to another name: clients may have it in the names that they ask for.
    if let Some(number) = numbers.get(name) {
        return *number;
    }
    let number = numbers.len() as u64 + 1;
    numbers.insert(name.to_owned(), number);
    number
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::file;

    /// An inventory that uses every feature.
    const INVENTORY: &str = r#"
index_records: false
deployments:
- name: App_Service
  instance_groups:
  - name: diego_cell
    links:
    - name: cell
      type: conn
      aliases:
      - {domain: _.cell.internal, placeholder_type: uuid, health_filter: all, initial_health_check: synchronous}
      - {domain: _.cell-index.internal, placeholder_type: index}
      - {domain: _.cell-az.internal, placeholder_type: az}
      - {domain: _.cell-net.internal, placeholder_type: network, health_filter: smart}
    - name: api
      type: address
      aliases: [{domain: cell.internal}, {domain: "*.cells.internal", health_filter: healthy}]
    instances:
    - {id: 4d516417-e1e5-4aa5-a038-91e369716821, az: z1, agent_id: agent-0, networks: {default: 10.0.0.1, Big_Net: 10.1.0.1}}
    - {id: 6615c4f0-9a52-4ba0-b15c-6534b9bd99a9, networks: {default: "fd00::1"}}
"#;

    /// The bytes that a director writes for it.
    const GOLDEN: &str = concat!(
        r#"{"records":[["10.1.0.1","4d516417-e1e5-4aa5-a038-91e369716821.diego-cell.big-net.app-service.bosh"],"#,
        r#"["10.0.0.1","4d516417-e1e5-4aa5-a038-91e369716821.diego-cell.default.app-service.bosh"],"#,
        r#"["fd00::1","6615c4f0-9a52-4ba0-b15c-6534b9bd99a9.diego-cell.default.app-service.bosh"]],"#,
        r#""version":7,"record_keys":["id","num_id","instance_group","group_ids","az","az_id","network","#,
        r#""network_id","deployment","ip","domain","agent_id","instance_index"],"record_infos":["#,
        r#"["4d516417-e1e5-4aa5-a038-91e369716821","1","diego-cell",["1","2","3"],"z1","1","big-net","1","#,
        r#""app-service","10.1.0.1","bosh","agent-0",0],"#,
        r#"["4d516417-e1e5-4aa5-a038-91e369716821","1","diego-cell",["1","2","3"],"z1","1","default","2","#,
        r#""app-service","10.0.0.1","bosh","agent-0",0],"#,
        r#"["6615c4f0-9a52-4ba0-b15c-6534b9bd99a9","2","diego-cell",["1","2","3"],null,null,"default","2","#,
        r#""app-service","fd00::1","bosh",null,1]],"aliases":{"#,
        r#""*.cells.internal":[{"root_domain":"bosh","group_id":"2","health_filter":"healthy","initial_health_check":null,"placeholder_type":null}],"#,
        r#""_.cell-az.internal":[{"root_domain":"bosh","group_id":"3","health_filter":null,"initial_health_check":null,"placeholder_type":"az"}],"#,
        r#""_.cell-index.internal":[{"root_domain":"bosh","group_id":"3","health_filter":null,"initial_health_check":null,"placeholder_type":"index"}],"#,
        r#""_.cell-net.internal":[{"root_domain":"bosh","group_id":"3","health_filter":"smart","initial_health_check":null,"placeholder_type":"network"}],"#,
        r#""_.cell.internal":[{"root_domain":"bosh","group_id":"3","health_filter":"all","initial_health_check":"synchronous","placeholder_type":"uuid"}],"#,
        r#""cell.internal":[{"root_domain":"bosh","group_id":"2","health_filter":null,"initial_health_check":null,"placeholder_type":null}]}}"#,
    );

    /// Returns the dataset of an inventory in YAML.
    fn dataset(text: &str, ids: &mut Ids) -> Dataset {
        Dataset::build(
            &Inventory::parse(file::read(text.as_bytes()).unwrap()).unwrap(),
            ids,
        )
    }

    #[test]
    fn dataset_matches_a_director() {
        let bytes = dataset(INVENTORY, &mut Ids::default()).write(7);
        assert_eq!(String::from_utf8(bytes.clone()).unwrap(), GOLDEN);
        let read = Read::parse(&bytes).unwrap();
        assert_eq!(
            (read.version, read.records.len(), read.record_infos.len()),
            (7, 3, 3)
        );
    }

    /// Ids are in order of arrival and link groups are sorted by name: a link added later with an
    /// earlier name precedes the existing ones.
    #[test]
    fn link_groups_sort_by_name() {
        let text = |links: &str| {
            format!(
                "deployments: [{{name: d, instance_groups: [{{name: g, links: [{links}], \
                 instances: [{{id: a, networks: {{n: 10.0.0.1}}}}]}}]}}]"
            )
        };
        let (zebra, ape, ape_b) = (
            "{name: zebra, type: t}",
            "{name: ape, type: t}",
            "{name: ape, type: b}",
        );
        let mut ids = Ids::default();
        for (links, golden) in [
            (zebra.to_owned(), r#"["1","2"]"#),
            (format!("{zebra}, {ape}"), r#"["1","3","2"]"#),
            (format!("{ape}, {zebra}, {ape_b}"), r#"["1","4","3","2"]"#),
            (format!("{zebra}, {ape_b}"), r#"["1","4","2"]"#),
        ] {
            let bytes = dataset(&text(&links), &mut ids).write(1);
            assert_eq!(
                String::from_utf8(bytes).unwrap(),
                format!(
                    r#"{{"records":[["10.0.0.1","a.g.n.d.bosh"]],"version":1,"record_keys":["id","num_id","instance_group","group_ids","az","az_id","network","network_id","deployment","ip","domain","agent_id","instance_index"],"record_infos":[["a","1","g",{golden},null,null,"n","1","d","10.0.0.1","bosh",null,0]],"aliases":{{}}}}"#
                ),
                "{links}"
            );
        }
    }

    #[test]
    fn the_index_may_stand_beside_the_id() {
        let text = INVENTORY.replace("index_records: false", "index_records: true");
        let bytes = dataset(&text, &mut Ids::default()).write(1);
        let read = Read::parse(&bytes).unwrap();
        assert_eq!(read.records.len(), 6);
        assert_eq!(
            read.records[5],
            (
                "fd00::1".into(),
                "1.diego-cell.default.app-service.bosh".into()
            )
        );
    }

    #[test]
    fn resolver_answers_every_alias() {
        use dns_core::{
            catalog::{AliasFiles, Records, Snapshot},
            name::Name,
            resolve::{AllRunning, resolve},
        };
        let (records, warnings) =
            Records::parse(&dataset(INVENTORY, &mut Ids::default()).write(7)).unwrap();
        assert!(warnings.is_empty(), "{warnings:?}");
        let (snapshot, warnings) = Snapshot::build(records, &AliasFiles::default());
        // As bosh-dns, the server takes the star literally, and warns.
        assert!(
            warnings.len() == 1 && warnings[0].contains("\"*.cells.internal\""),
            "{warnings:?}"
        );
        for (name, addresses) in [
            ("cell.internal", vec!["10.0.0.1", "10.1.0.1", "fd00::1"]),
            (
                "4d516417-e1e5-4aa5-a038-91e369716821.cell.internal",
                vec!["10.0.0.1", "10.1.0.1"],
            ),
            ("1.cell-index.internal", vec!["fd00::1"]),
            ("z1.cell-az.internal", vec!["10.0.0.1", "10.1.0.1"]),
            ("big-net.cell-net.internal", vec!["10.1.0.1"]),
            ("q-s0.q-g3.bosh", vec!["10.0.0.1", "10.1.0.1", "fd00::1"]),
            ("q-a1n2s0.q-g1.bosh", vec!["10.0.0.1"]),
        ] {
            let found = resolve(&snapshot, &AllRunning, &Name::from_text(name).unwrap()).unwrap();
            let v4 = found.v4.iter().map(ToString::to_string);
            let mut all: Vec<String> = v4.chain(found.v6.iter().map(ToString::to_string)).collect();
            all.sort_unstable();
            assert_eq!(all, addresses, "{name}");
        }
    }

    #[test]
    fn rows_keep_inventory_order() {
        let one = |order: &str| {
            format!(
                "deployments: [{{name: d, instance_groups: [{{name: g, instances: [{order}]}}]}}]"
            )
        };
        let a = "{id: a, index: 0, networks: {n: 10.0.0.1}}";
        let b = "{id: b, index: 1, networks: {n: 10.0.0.2}}";
        let mut ids = Ids::default();
        let first = dataset(&one(&format!("{a}, {b}")), &mut ids);
        assert_eq!(first, dataset(&one(&format!("{b}, {a}")), &mut ids));
        assert_eq!(dataset("deployments: []", &mut Ids::default()).write(1), *br#"{"records":[],"version":1,"record_keys":["id","num_id","instance_group","group_ids","az","az_id","network","network_id","deployment","ip","domain","agent_id","instance_index"],"record_infos":[],"aliases":{}}"#);
    }

    #[test]
    fn an_id_is_given_once() {
        let mut ids = Ids::default();
        assert_eq!((ids.zone("z1"), ids.zone("z2"), ids.zone("z1")), (1, 2, 1));
        assert_eq!(
            (
                ids.group("d", INSTANCE_GROUP, "g"),
                ids.group("d", LINK, "g")
            ),
            (1, 2)
        );
        assert_eq!(
            (
                ids.group("e", INSTANCE_GROUP, "g"),
                ids.group("d", LINK, "g")
            ),
            (3, 2)
        );
        let text = serde_json::to_vec(&ids).unwrap();
        let mut again: Ids = serde_json::from_slice(&text).unwrap();
        assert_eq!(
            (
                again.group("f", LINK, "x"),
                again.zone("z3"),
                again.network("n")
            ),
            (4, 3, 1)
        );
    }

    #[test]
    fn first_column_holds_instance_ids() {
        let ids = |text: &str| Some(serde_json::from_str::<Rows>(text).ok()?.instance_ids());
        let expected = [
            "4d516417-e1e5-4aa5-a038-91e369716821",
            "6615c4f0-9a52-4ba0-b15c-6534b9bd99a9",
        ];
        assert_eq!(
            ids(GOLDEN),
            Some(HashSet::from(expected.map(str::to_owned)))
        );
        assert_eq!(ids("{}"), None);
        let odd = ids(r#"{"record_infos":[[],[7],["A"]]}"#);
        assert_eq!(odd, Some(HashSet::from(["a".to_owned()])));
    }
}
