//! Key-value lists: the DNS Update Records used by a logical cloud or a cluster.

use serde_json::{Map, Value, json};

use super::{Metadata, Spelling, read_identifier};
use crate::text::{Fields, Reader};

/// Owner of a list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ListOwner {
    /// A logical cloud of a project.
    LogicalCloud {
        /// Project that contains the logical cloud.
        project: String,
        /// Name of the logical cloud.
        name: String,
    },
    /// A cluster, shared by all projects.
    Cluster {
        /// Provider that registered the cluster.
        provider: String,
        /// Name of the cluster.
        name: String,
    },
}

/// The list `dns-update-record-list` of a logical cloud or cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordList {
    /// Name and free text.
    pub metadata: Metadata,
    /// Pairs of a key, which has no meaning, and the name of a DNS Update Record.
    pub pairs: Vec<(String, String)>,
}

impl RecordList {
    /// The only allowed name of a list that binds records.
    pub const NAME: &str = "dns-update-record-list";

    /// Parses `{metadata, spec}`; reports problems, and returns `None` if there are any.
    pub fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let (list, spec) = Self::read_open(fields)?;
        let before = spec.map().problems().count();
        let problems = spec.map().problems();
        spec.finish(&["kv"]);
        (problems.count() == before).then_some(list)
    }

    /// Like [`RecordList::read`], but leaves other members of `spec` to the caller.
    pub fn read_open<'a>(fields: &mut Fields<'a>) -> Option<(Self, Fields<'a>)> {
        let problems = fields.map().problems();
        let before = problems.count();
        let metadata = fields.required("metadata");
        let name = metadata.as_ref().and_then(|metadata| metadata.fields()?.optional("name"));
        let metadata = metadata.and_then(|metadata| Metadata::read(&metadata));
        if let (Some(reader), Some(metadata)) = (name, &metadata)
            && metadata.name != Self::NAME
        {
            reader.problem(
                format!("a list named {:?} has no effect", metadata.name),
                format!("name it {}", Self::NAME),
            );
        }
        let mut spec = fields.required("spec")?.fields()?;
        let mut pairs = Vec::new();
        if let Some(items) = spec.required("kv").and_then(|kv| kv.items()) {
            for item in items {
                let Some(mut members) = item.fields() else { continue };
                for (key, value) in members.others() {
                    pairs.extend(read_identifier(&value).map(|record| (key.to_owned(), record)));
                }
            }
        }
        let list = Self { metadata: metadata?, pairs };
        (problems.count() == before).then_some((list, spec))
    }

    /// Formats the list as in API responses.
    pub fn to_json(&self) -> Value {
        let Self { metadata, pairs } = self;
        let pair = |(key, record): &(String, String)| {
            Value::Object(Map::from_iter([(key.clone(), record.as_str().into())]))
        };
        json!({
            "metadata": metadata.to_json(Spelling::Camel),
            "spec": { "kv": pairs.iter().map(pair).collect::<Vec<_>>() },
        })
    }

    /// Returns the distinct names of the records, in order.
    pub fn records(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for (_, record) in &self.pairs {
            if !names.contains(&record.as_str()) {
                names.push(record);
            }
        }
        names
    }
}

impl ListOwner {
    /// Parses a cluster in the form `PROVIDER/NAME`.
    pub fn read_cluster(reader: &Reader<'_>) -> Option<Self> {
        let text = reader.text()?;
        match text.split_once('/') {
            Some((provider, name)) if super::is_identifier(provider) && super::is_identifier(name) => {
                Some(Self::Cluster { provider: provider.to_owned(), name: name.to_owned() })
            }
            _ => {
                reader.problem(format!("{text:?} is not a cluster"), "write it as PROVIDER/NAME");
                None
            }
        }
    }
}

impl std::fmt::Display for ListOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::LogicalCloud { project, name } => write!(f, "logical cloud {name} of project {project}"),
            Self::Cluster { provider, name } => write!(f, "cluster {provider}/{name}"),
        }
    }
}
