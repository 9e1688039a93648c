//! Inbound intents, the key-value lists that select DNS Update Records for them, and the document's
//! algorithm that converts them to endpoints.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{Metadata, read_identifier};
use crate::{
    record::{Name, Record, host_sets},
    text::{Fields, Reader},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intent {
    pub metadata: Metadata,
    /// Application or microservice that is reached under the names.
    pub app: String,
    /// First labels of the published names.
    pub external_name: Option<String>,
    /// Domain of the public name, updated through the logical cloud's records.
    pub public_domain: Option<String>,
    /// Domain of the local name, updated through the clusters' records.
    pub local_domain: Option<String>,
    /// TTL of the endpoints in seconds.
    pub ttl: Option<u32>,
    /// Locations of the application.
    pub placements: Vec<Placement>,
}

/// Clusters of one logical cloud in which the application runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    pub logical_cloud: String,
    /// Clusters whose addresses are published.
    pub clusters: Vec<ClusterAddresses>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterAddresses {
    /// The cluster, as the owner of a list.
    pub cluster: ListOwner,
    /// Addresses reachable from public networks: IP addresses, or one host name.
    pub public: Vec<String>,
    /// Addresses reachable within the cluster's network.
    pub local: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IntentOutcome {
    /// Names of DNS Update Records, each with the record sets of one domain.
    pub bindings: Vec<(String, Vec<Record>)>,
    pub problems: Vec<String>,
}

impl Intent {
    /// Parses `{metadata, spec}`; reports problems, and returns `None` if there are any.
    pub fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let problems = fields.map.problems;
        let before = problems.count();
        let metadata = fields.required_as("metadata", Metadata::read_member);
        let mut spec = fields.required("spec")?.fields()?;
        let app = spec.required_as("app", read_identifier);
        let external_name = read_domain(spec.optional("externalName"));
        let public_domain = read_domain(spec.optional("publicDomain"));
        let local_domain = read_domain(spec.optional("localDomain"));
        if external_name.is_none() && (public_domain.is_some() || local_domain.is_some()) {
            spec.map
                .problem("domain is set, but not externalName", "add externalName");
        }
        let ttl = spec.optional_as("ttl", |ttl| ttl.integer(1..=crate::endpoint::MAX_TTL));
        let placements = spec.optional_as("placements", Reader::items);
        let mut read = Vec::new();
        for placement in placements.into_iter().flatten() {
            read.extend(Placement::read(&placement));
        }
        spec.finish();
        let intent = Self {
            metadata: metadata?,
            app: app?,
            external_name,
            public_domain,
            local_domain,
            ttl,
            placements: read,
        };
        (problems.count() == before).then_some(intent)
    }

    pub fn to_json(&self) -> Value {
        let Self {
            metadata,
            app,
            external_name,
            public_domain,
            local_domain,
            ttl,
            placements,
        } = self;
        let mut spec = json!({ "app": app });
        for (member, text) in [
            ("externalName", external_name),
            ("publicDomain", public_domain),
            ("localDomain", local_domain),
        ] {
            if let Some(text) = text {
                spec[member] = text.as_str().into();
            }
        }
        if let Some(ttl) = ttl {
            spec["ttl"] = (*ttl).into();
        }
        spec["placements"] = placements.iter().map(Placement::to_json).collect();
        json!({ "metadata": metadata.to_json("userdata"), "spec": spec })
    }

    /// Returns the bindings by the document's algorithm.
    ///
    /// `externalName` + `publicDomain` goes to the records of each logical cloud's list, with the public addresses
    /// of its clusters. `externalName` + `localDomain` goes to the records of each cluster's list, with that
    /// cluster's local addresses. Two parts that reach the same record under the same name are merged.
    pub fn bindings(
        &self,
        project: &str,
        lists: &BTreeMap<ListOwner, RecordList>,
        is_record: impl Fn(&str) -> bool,
    ) -> IntentOutcome {
        let mut outcome = IntentOutcome::default();
        // Keyed by update record and by domain.
        let mut wanted: BTreeMap<(String, &str), BTreeSet<&str>> = BTreeMap::new();
        // Without a name nothing is published; `read` has refused domains without one.
        let Some(first) = &self.external_name else {
            return outcome;
        };
        for placement in &self.placements {
            let owner = ListOwner::LogicalCloud {
                project: project.to_owned(),
                name: placement.logical_cloud.clone(),
            };
            if let Some(domain) = &self.public_domain {
                for record in outcome.records_of(&owner, lists, &is_record) {
                    let addresses = wanted.entry((record, domain.as_str())).or_default();
                    for cluster in &placement.clusters {
                        // A logical cloud has one public name for all its clusters.
                        addresses.extend(cluster.public.iter().map(String::as_str));
                    }
                }
            }
            if let Some(domain) = &self.local_domain {
                for cluster in &placement.clusters {
                    for record in outcome.records_of(&cluster.cluster, lists, &is_record) {
                        let addresses = wanted.entry((record, domain.as_str())).or_default();
                        // Addresses of other clusters may not be reachable from this one's network.
                        addresses.extend(cluster.local.iter().map(String::as_str));
                    }
                }
            }
        }
        for ((update_record, domain), addresses) in wanted {
            match records(&format!("{first}.{domain}"), &addresses, self.ttl) {
                Ok(records) => outcome.bindings.push((update_record, records)),
                Err(problem) => outcome.problems.push(problem),
            }
        }
        outcome
    }
}

fn read_domain(reader: Option<Reader<'_>>) -> Option<String> {
    let reader = reader?;
    let name = reader.accept(Name::parse(reader.filled_text()?), "use a domain name")?;
    Some(name.to_string())
}

impl IntentOutcome {
    /// Returns the existing records of a list; reports missing ones.
    fn records_of(
        &mut self,
        owner: &ListOwner,
        lists: &BTreeMap<ListOwner, RecordList>,
        is_record: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let Some(list) = lists.get(owner) else {
            self.problems.push(format!(
                "{owner} has no {}; without one nothing is published there",
                RecordList::NAME
            ));
            return Vec::new();
        };
        let mut found = Vec::new();
        for record in list.records() {
            if is_record(record) {
                found.push(record.to_owned());
            } else {
                self.problems.push(format!(
                    "the list of {owner} names DNS Update Record {record:?}, which does not exist; create \
                     it, or remove it from the list"
                ));
            }
        }
        found
    }
}

fn records(
    name: &str,
    addresses: &BTreeSet<&str>,
    ttl: Option<u32>,
) -> Result<Vec<Record>, String> {
    let owner = Name::parse(name).map_err(|error| error.to_string())?;
    // Without records the name would be withdrawn, which an intent whose addresses are still to
    // come does not mean.
    if addresses.is_empty() {
        return Err(format!(
            "{name}: no cluster has an address for it; add addresses to the placements"
        ));
    }
    let sets = host_sets(addresses.iter().copied()).map_err(|error| format!("{name}: {error}"))?;
    let sets = sets.ok_or_else(|| {
        format!(
            "{name}: a host name cannot be combined with other addresses; use IP addresses only"
        )
    })?;
    let mut records = Vec::new();
    for (record_type, targets) in sets {
        records.push(Record {
            ttl,
            ..Record::new(owner.clone(), record_type, targets)
        });
    }
    Ok(records)
}

impl Placement {
    fn read(reader: &Reader<'_>) -> Option<Self> {
        let mut fields = reader.fields()?;
        let logical_cloud = fields.required_as("logicalCloud", read_identifier);
        let items = fields.required_as("clusters", Reader::items);
        let mut clusters = Vec::new();
        for item in items.into_iter().flatten() {
            clusters.extend(ClusterAddresses::read(&item));
        }
        fields.finish();
        Some(Self {
            logical_cloud: logical_cloud?,
            clusters,
        })
    }

    fn to_json(&self) -> Value {
        let mut clusters = Vec::new();
        for addresses in &self.clusters {
            let ClusterAddresses {
                cluster,
                public,
                local,
            } = addresses;
            let name = match cluster {
                ListOwner::Cluster { provider, name } => format!("{provider}/{name}"),
                ListOwner::LogicalCloud { name, .. } => name.clone(),
            };
            clusters.push(
                json!({ "cluster": name, "publicAddresses": public, "localAddresses": local }),
            );
        }
        json!({ "logicalCloud": self.logical_cloud, "clusters": clusters })
    }
}

impl ClusterAddresses {
    fn read(reader: &Reader<'_>) -> Option<Self> {
        let mut fields = reader.fields()?;
        let cluster = fields.required_as("cluster", ListOwner::read_cluster);
        let public = fields.optional("publicAddresses").map(|list| list.texts());
        let local = fields.optional("localAddresses").map(|list| list.texts());
        fields.finish();
        Some(Self {
            cluster: cluster?,
            public: public.unwrap_or_default(),
            local: local.unwrap_or_default(),
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ListOwner {
    /// A logical cloud of a project.
    LogicalCloud { project: String, name: String },
    /// A cluster, shared by all projects.
    Cluster { provider: String, name: String },
}

/// The list `dns-update-record-list` of a logical cloud or cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordList {
    pub metadata: Metadata,
    /// Pairs of a key, which has no meaning, and the name of a DNS Update Record.
    pub pairs: Vec<(String, String)>,
}

impl RecordList {
    /// The only allowed name of a list that binds records.
    pub const NAME: &str = "dns-update-record-list";

    /// Parses `{metadata, spec}`; reports problems.
    pub fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let (list, spec) = Self::read_open(fields)?;
        spec.finish();
        Some(list)
    }

    /// Like [`RecordList::read`], but leaves other members of `spec` to the caller.
    pub fn read_open<'a>(fields: &mut Fields<'a>) -> Option<(Self, Fields<'a>)> {
        let problems = fields.map.problems;
        let before = problems.count();
        let metadata = fields.required_as("metadata", |reader| {
            let metadata = Metadata::read_member(reader)?;
            // The document binds records by a list of this name only; any other is a list of
            // something else.
            if metadata.name != Self::NAME {
                let name = reader.fields()?.optional("name")?;
                name.problem(
                    format!("a list named {:?} has no effect", metadata.name),
                    format!("name it {}", Self::NAME),
                );
            }
            Some(metadata)
        });
        let mut spec = fields.required("spec")?.fields()?;
        let items = spec.required_as("kv", Reader::items).into_iter().flatten();
        let mut pairs = Vec::new();
        for item in items {
            let Some(mut fields) = item.fields() else {
                continue;
            };
            for (key, value) in fields.others() {
                if let Some(record) = read_identifier(&value) {
                    pairs.push((key.to_owned(), record));
                }
            }
        }
        let list = Self {
            metadata: metadata?,
            pairs,
        };
        (problems.count() == before).then_some((list, spec))
    }

    pub fn to_json(&self) -> Value {
        let Self { metadata, pairs } = self;
        let mut kv = Vec::new();
        for (key, record) in pairs {
            kv.push(json!({ key: record }));
        }
        json!({ "metadata": metadata.to_json("userData"), "spec": { "kv": kv } })
    }

    /// Returns the distinct names of the records, in order.
    pub fn records(&self) -> Vec<&str> {
        // Two keys may name one record, which must not get the same sets twice.
        let mut seen = BTreeSet::new();
        let names = self.pairs.iter().map(|(_, record)| record.as_str());
        names.filter(|name| seen.insert(*name)).collect()
    }
}

impl ListOwner {
    /// Parses a cluster in the form `PROVIDER/NAME`.
    pub fn read_cluster(reader: &Reader<'_>) -> Option<Self> {
        let text = reader.text()?;
        match text.split_once('/') {
            Some((provider, name))
                if super::is_identifier(provider) && super::is_identifier(name) =>
            {
                Some(Self::Cluster {
                    provider: provider.to_owned(),
                    name: name.to_owned(),
                })
            }
            _ => reader.refuse(
                format!("{text:?} is not a cluster"),
                "write it as PROVIDER/NAME",
            ),
        }
    }
}

impl std::fmt::Display for ListOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::LogicalCloud { project, name } => {
                write!(f, "logical cloud {name} of project {project}")
            }
            Self::Cluster { provider, name } => write!(f, "cluster {provider}/{name}"),
        }
    }
}
