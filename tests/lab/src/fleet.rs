//! Fleets as records.json: of given instances, and foundations of any size, generated deterministically with
//! realistic records and aliases.
//!
//! Group sizes follow the field: most are small, a few have many instances (Diego cells). Every
//! instance belongs to the group of its instance group and, as with link providers, to one or two
//! further groups.

use std::net::{IpAddr, Ipv4Addr};

use dns_core::catalog::RECORD_KEYS;
use fastrand::Rng;
use serde_json::{Value, json};

/// Sizes of instance groups, cycled through: 8.4 on average, as in the field.
const GROUP_SIZES: [usize; 10] = [1, 2, 3, 2, 12, 3, 5, 40, 2, 14];

/// Names of instance groups, cycled through with a numeric suffix.
const GROUP_NAMES: [&str; 10] = [
    "bbs",
    "api",
    "router",
    "uaa",
    "doppler",
    "database",
    "log-api",
    "diego-cell",
    "credhub",
    "scheduler",
];

const ZONES: usize = 3;

#[derive(Clone, Debug)]
pub struct Fleet {
    rows: Vec<Row>,
    pub version: u64,
}

#[derive(Clone, Debug)]
pub struct Row {
    pub id: String,
    pub number: usize,
    /// Instance group, such as `router-3`.
    pub instance_group: String,
    /// Ids of the groups it belongs to.
    pub groups: Vec<usize>,
    /// Availability zone, counted from 1.
    pub zone: usize,
    /// Deployment, such as `cf-2`.
    pub deployment: String,
    pub ip: IpAddr,
    /// Index in its instance group.
    pub index: usize,
}

/// Returns records.json of instances given by their group and address. In the network `default` of deployment `dep`,
/// group 7 consists of instance group `web-7`; ids are `i0`, `i1` and so on.
pub fn records<Ip: Into<IpAddr>>(
    version: u64,
    instances: impl IntoIterator<Item = (usize, Ip)>,
) -> Vec<u8> {
    let row = |(number, (group, ip)): (usize, (usize, Ip))| Row {
        id: format!("i{number}"),
        number,
        instance_group: format!("web-{group}"),
        groups: vec![group],
        zone: 1,
        deployment: "dep".to_owned(),
        ip: ip.into(),
        index: number,
    };
    Fleet {
        rows: instances.into_iter().enumerate().map(row).collect(),
        version,
    }
    .records_json()
}

impl Fleet {
    /// Generates a foundation; equal arguments give equal foundations.
    pub fn generate(instances: usize, seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let mut rows = Vec::with_capacity(instances);
        for group in 0.. {
            let size = GROUP_SIZES[group % GROUP_SIZES.len()].min(instances - rows.len());
            if size == 0 {
                break;
            }
            let deployment = format!("cf-{}", group / 40);
            let instance_group = format!(
                "{}-{}",
                GROUP_NAMES[group % GROUP_NAMES.len()],
                group / GROUP_NAMES.len()
            );
            for index in 0..size {
                let number = rows.len() + 1;
                rows.push(Row {
                    id: uuid(&mut random),
                    number,
                    instance_group: instance_group.clone(),
                    // A private group, and one shared by two neighbours.
                    groups: vec![group * 2 + 1, group / 2 * 4 + 2],
                    zone: index % ZONES + 1,
                    deployment: deployment.clone(),
                    ip: address(number).into(),
                    index,
                });
            }
        }
        Self { rows, version: 1 }
    }

    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Returns records.json. The keys precede the rows, as a director writes them; serialising a
    /// map would sort the members alphabetically, and the server would parse the rows twice.
    pub fn records_json(&self) -> Vec<u8> {
        let rows: Vec<Value> = self.rows.iter().map(Row::to_json).collect();
        let (keys, rows, version) = (json!(RECORD_KEYS), json!(rows), self.version);
        format!(r#"{{"record_keys":{keys},"record_infos":{rows},"version":{version}}}"#)
            .into_bytes()
    }

    /// Returns an alias file: one alias per instance group of the first deployment, and one with an
    /// underscore for its Diego cells.
    pub fn aliases_json(&self) -> Vec<u8> {
        let mut aliases = serde_json::Map::new();
        for row in self.rows.iter().filter(|row| row.deployment == "cf-0") {
            let group = &row.instance_group;
            aliases
                .entry(format!("{group}.service.cf.internal"))
                .or_insert_with(|| json!([format!("*.{group}.default.cf-0.bosh")]));
            if group.starts_with("diego-cell") {
                aliases
                    .entry(format!("_.{group}.service.cf.internal"))
                    .or_insert_with(|| json!([format!("_.{group}.default.cf-0.bosh")]));
            }
        }
        serde_json::to_vec(&Value::Object(aliases)).unwrap_or_default()
    }

    /// Returns an alias file with one alias for the Diego cells of all deployments, as in
    /// foundations with isolation segments, and a variant with an underscore.
    pub fn cell_aliases_json(&self) -> Vec<u8> {
        let cells = self
            .rows
            .iter()
            .filter(|row| row.instance_group.starts_with("diego-cell"));
        let mut groups: Vec<(&str, &str)> = cells
            .map(|row| (row.instance_group.as_str(), row.deployment.as_str()))
            .collect();
        groups.dedup();
        let targets = |first: &str| -> Vec<String> {
            groups
                .iter()
                .map(|(group, deployment)| format!("{first}.{group}.default.{deployment}.bosh"))
                .collect()
        };
        let aliases = json!({
            "cell.service.cf.internal": targets("*"),
            "_.cell.service.cf.internal": targets("_"),
        });
        serde_json::to_vec(&aliases).unwrap_or_default()
    }

    /// Returns names that applications query, without the final dot, in the mix seen in the field:
    /// group names, aliases, long forms and single instances.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        let mut last_group = None;
        for row in &self.rows {
            let Row {
                id,
                instance_group,
                deployment,
                groups,
                ..
            } = row;
            if last_group != Some(instance_group) {
                names.extend(groups.iter().map(|group| format!("q-s0.q-g{group}.bosh")));
                names.push(format!("q-s0.{instance_group}.default.{deployment}.bosh"));
                if deployment == "cf-0" {
                    names.push(format!("{instance_group}.service.cf.internal"));
                }
                names.push(format!("{id}.{instance_group}.default.{deployment}.bosh"));
                last_group = Some(instance_group);
            }
        }
        names.sort();
        names.dedup();
        names
    }
}

impl Row {
    /// Returns the row in the order of [`RECORD_KEYS`].
    fn to_json(&self) -> Value {
        let Self {
            id,
            number,
            instance_group,
            groups,
            zone,
            deployment,
            ip,
            index,
        } = self;
        let groups: Vec<String> = groups.iter().map(usize::to_string).collect();
        json!([
            id,
            number.to_string(),
            instance_group,
            groups,
            format!("z{zone}"),
            zone.to_string(),
            "default",
            "1",
            deployment,
            ip.to_string(),
            "bosh",
            format!("agent-{id}"),
            index,
        ])
    }
}

/// Returns address number `number` in 10.0.0.0/8.
fn address(number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0a00_0000 | (number as u32 & 0x00ff_ffff))
}

/// Generates a random UUID in the form of version 4.
fn uuid(random: &mut Rng) -> String {
    let bits = random.u128(..);
    let digits = format!("{bits:032x}");
    format!(
        "{}-{}-4{}-a{}-{}",
        &digits[..8],
        &digits[8..12],
        &digits[13..16],
        &digits[17..20],
        &digits[20..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fleet_generation_is_deterministic() {
        let fleet = Fleet::generate(1_000, 7);
        assert_eq!(fleet.rows().len(), 1_000);
        assert_eq!(
            fleet.records_json(),
            Fleet::generate(1_000, 7).records_json()
        );
        assert_eq!(fleet.rows()[0].id.len(), 36);
        let deployments: std::collections::BTreeSet<&str> = fleet
            .rows()
            .iter()
            .map(|row| row.deployment.as_str())
            .collect();
        assert!(deployments.len() > 1, "{deployments:?}");
    }

    #[test]
    fn fleet_names_cover_every_form() {
        let names = Fleet::generate(500, 7).names();
        for ending in ["q-g1.bosh", "service.cf.internal", "default.cf-0.bosh"] {
            assert!(
                names.iter().any(|name| name.ends_with(ending)),
                "no name ends in {ending}"
            );
        }
    }
}
