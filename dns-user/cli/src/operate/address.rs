//! `address`: builds query names in the syntax of BOSH links.

use std::{collections::BTreeMap, path::PathBuf};

use clap::{Args, ValueEnum};

use super::{Problem, print};
use dns_core::{
    catalog::{AliasFiles, Records, RecordsError, Snapshot},
    link_address::{AddressGroup, Criteria, FirstLabel, LinkAddress, LinkStatus},
    name::Name,
};

#[derive(Debug, Args)]
pub(crate) struct Address {
    /// Group id of a link, for the short form q-....q-g<ID>.<domain>
    #[arg(long, value_name = "ID", required_unless_present = "instance_group", conflicts_with_all = ["instance_group", "network", "deployment"])]
    group: Option<String>,
    /// Instance group, for the long form; needs --network and --deployment
    #[arg(
        long,
        value_name = "NAME",
        requires = "network",
        requires = "deployment"
    )]
    instance_group: Option<String>,
    /// Network of the long form
    #[arg(long, value_name = "NAME")]
    network: Option<String>,
    /// Deployment of the long form
    #[arg(long, value_name = "NAME")]
    deployment: Option<String>,
    /// Domain that the name ends in
    #[arg(long, default_value = "bosh")]
    domain: String,
    /// Id of a single instance, instead of a query
    #[arg(long, value_name = "ID", conflicts_with_all = ["az", "index", "num_id", "network_id", "status", "initial_health_check"])]
    instance: Option<String>,
    /// Put `*` in place of the query, for a certificate
    #[arg(long, conflicts_with_all = ["instance", "az", "index", "num_id", "network_id", "status", "initial_health_check"])]
    wildcard: bool,
    /// Availability zone, by id (digits) or name (looked up in the records); repeatable, any may match
    #[arg(long, value_name = "AZ", value_delimiter = ',')]
    az: Vec<String>,
    /// Instance index; repeatable, any may match
    #[arg(long, value_name = "NUMBER", value_delimiter = ',')]
    index: Vec<u64>,
    /// Numerical instance id; repeatable, any may match
    #[arg(long, value_name = "NUMBER", value_delimiter = ',')]
    num_id: Vec<u64>,
    /// Network id; repeatable, any may match
    #[arg(long, value_name = "NUMBER", value_delimiter = ',')]
    network_id: Vec<u64>,
    /// Instances to include, by health
    #[arg(long, value_enum, default_value_t = HealthFilter::Smart)]
    status: HealthFilter,
    /// Whether the first query waits for health checks
    #[arg(long, value_enum, value_name = "WHEN")]
    initial_health_check: Option<InitialCheck>,
    /// records.json, for the names of availability zones
    #[arg(long, value_name = "FILE")]
    records: Option<PathBuf>,
    /// config.json of the server, which names records.json
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// `status` of a link's address, `health_filter` of an alias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum HealthFilter {
    /// Healthy ones; all if there are none.
    Smart,
    /// Only the unhealthy ones
    Unhealthy,
    /// Only the healthy ones
    Healthy,
    /// All, whatever their health
    All,
}

impl From<HealthFilter> for LinkStatus {
    fn from(filter: HealthFilter) -> Self {
        match filter {
            HealthFilter::Smart => Self::Smart,
            HealthFilter::Unhealthy => Self::Unhealthy,
            HealthFilter::Healthy => Self::Healthy,
            HealthFilter::All => Self::All,
        }
    }
}

/// `initial_health_check` of an alias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum InitialCheck {
    /// The query does not wait for the checks
    Asynchronous,
    /// The query waits for the checks
    Synchronous,
}

impl Address {
    pub(super) fn run(self) -> Result<(), Problem> {
        let zones = self.zones()?;
        let text = self.name(zones).to_string();
        // Names from manifests may be too long for a label or for the whole.
        Name::from_text(&text).map_err(|error| Problem::BadAnswer(format!("{text}: {error}")))?;
        if self.json {
            print(&format!("{}\n", serde_json::json!({ "name": text })))
        } else {
            print(&(text + "\n"))
        }
    }

    fn name(&self, zones: Vec<String>) -> LinkAddress {
        let first = match &self.instance {
            Some(id) => FirstLabel::Instance(id.clone()),
            None if self.wildcard => FirstLabel::Wildcard,
            None => FirstLabel::Query(Criteria {
                zones,
                indexes: self.index.clone(),
                numbers: self.num_id.clone(),
                networks: self.network_id.clone(),
                status: self.status.into(),
                synchronous: self
                    .initial_health_check
                    .map(|when| when == InitialCheck::Synchronous),
            }),
        };
        let group = match &self.group {
            Some(id) => AddressGroup::Id(id.clone()),
            None => {
                // clap requires all three if there is no group id.
                AddressGroup::Names {
                    instance_group: self.instance_group.clone().unwrap_or_default(),
                    network: self.network.clone().unwrap_or_default(),
                    deployment: self.deployment.clone().unwrap_or_default(),
                }
            }
        };
        LinkAddress {
            group,
            first,
            domain: self.domain.clone(),
        }
    }

    fn zones(&self) -> Result<Vec<String>, Problem> {
        // Then no file is needed.
        if self.az.iter().all(|zone| is_id(zone)) {
            return Ok(self.az.clone());
        }
        let known = self.known_zones()?;
        let mut ids = Vec::with_capacity(self.az.len());
        for zone in &self.az {
            if is_id(zone) {
                ids.push(zone.clone());
            } else if let Some(id) = known.get(zone) {
                ids.push(id.clone());
            } else {
                return Err(unknown_zone(zone, &known));
            }
        }
        Ok(ids)
    }

    /// Reads the names and ids of the availability zones from the records.
    fn known_zones(&self) -> Result<BTreeMap<String, String>, Problem> {
        let file = match (&self.records, &self.config) {
            (Some(file), _) => file.clone(),
            (None, Some(config)) => {
                let loaded = dns_kit::files::load_config(config)
                    .map_err(|error| Problem::BadAnswer(error.to_string()))?;
                loaded.config.records_file.ok_or_else(|| {
                    Problem::BadAnswer(format!("{}: records_file is missing", config.display()))
                })?
            }
            (None, None) => {
                let hint = "looking up a zone by name needs --records FILE or --config FILE; or use its id";
                return Err(Problem::BadAnswer(hint.to_owned()));
            }
        };
        let bytes = std::fs::read(&file)
            .map_err(|error| Problem::BadAnswer(format!("{}: {error}", file.display())))?;
        zones_of(&bytes).map_err(|error| Problem::BadAnswer(format!("{}: {error}", file.display())))
    }
}

/// Returns whether a zone is given by its id. A name of digits alone cannot be told from one.
fn is_id(zone: &str) -> bool {
    !zone.is_empty() && zone.bytes().all(|byte| byte.is_ascii_digit())
}

fn unknown_zone(zone: &str, known: &BTreeMap<String, String>) -> Problem {
    let names: Vec<&str> = known.keys().map(String::as_str).collect();
    Problem::BadAnswer(format!(
        "the records do not contain the availability zone {zone}; they contain {}",
        names.join(", ")
    ))
}

/// Returns the id of each availability zone in records.json, by its name.
fn zones_of(bytes: &[u8]) -> Result<BTreeMap<String, String>, RecordsError> {
    let (records, _warnings) = Records::parse(bytes)?;
    let (snapshot, _warnings) = Snapshot::build(records, &AliasFiles::default());
    let mut zones = BTreeMap::new();
    for instance in snapshot.instances() {
        // Records of directors without zones lack these columns.
        if !instance.az.is_empty() && !instance.az_id.is_empty() {
            zones.insert(instance.az.to_owned(), instance.az_id.to_owned());
        }
    }
    Ok(zones)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;

    /// A command line that consists of `address` alone.
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        address: Address,
    }

    /// Returns the name built from these options.
    fn built(options: &str) -> String {
        let words = std::iter::once("address").chain(options.split_whitespace());
        let line = Line::try_parse_from(words).unwrap_or_else(|error| panic!("{error}"));
        let zones = line.address.zones().unwrap();
        line.address.name(zones).to_string()
    }

    #[test]
    fn names_match_link_addresses() {
        for (options, name) in [
            ("--group 5", "q-s0.q-g5.bosh"),
            ("--group 5 --status healthy --az 1,2", "q-a1a2s3.q-g5.bosh"),
            (
                "--group 5 --status all --index 0 --num-id 7 --network-id 3",
                "q-i0m7n3s4.q-g5.bosh",
            ),
            (
                "--group 5 --initial-health-check synchronous --domain x.y.",
                "q-s0y1.q-g5.x.y",
            ),
            (
                "--instance-group web --network net --deployment dep",
                "q-s0.web.net.dep.bosh",
            ),
            (
                "--instance abc --instance-group web --network net --deployment dep",
                "abc.web.net.dep.bosh",
            ),
            ("--instance abc --group 1", "abc.q-g1.bosh"),
            (
                "--group 5 --az 2,10,1 --network-id 1 --status healthy",
                "q-a1a10a2n1s3.q-g5.bosh",
            ),
            (
                "--wildcard --instance-group web --network net --deployment dep",
                "*.web.net.dep.bosh",
            ),
        ] {
            assert_eq!(built(options), name, "{options}");
        }
    }

    #[test]
    fn incomplete_long_form_is_refused() {
        for options in [
            "",
            "--instance-group web",
            "--group 1 --network net",
            "--group 1 --instance a --az 1",
            "--group 1 --wildcard --az 1",
        ] {
            let words = std::iter::once("address").chain(options.split_whitespace());
            assert!(Line::try_parse_from(words).is_err(), "{options}");
        }
    }

    #[test]
    fn zones_by_name_come_from_the_records() {
        let mut rows = Vec::new();
        for (number, zone) in [(1, "1"), (2, "2"), (3, "1")] {
            let address = format!("10.0.0.{number}");
            let name = format!("z{zone}");
            rows.push(json!(["i", "g", "n", "d", address, "bosh", zone, name]));
        }
        rows.push(json!(["i", "g", "n", "d", "10.0.0.4", "bosh", null, null]));
        let keys = [
            "id",
            "instance_group",
            "network",
            "deployment",
            "ip",
            "domain",
            "az_id",
            "az",
        ];
        let records = json!({"record_keys": keys, "record_infos": rows}).to_string();
        let zones = zones_of(records.as_bytes()).unwrap();
        let expected =
            [("z1", "1"), ("z2", "2")].map(|(name, id)| (name.to_owned(), id.to_owned()));
        assert_eq!(zones, BTreeMap::from(expected));
    }
}
