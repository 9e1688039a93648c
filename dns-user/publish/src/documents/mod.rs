//! The folder of documents: read completely after every change, each document independently.
//!
//! An unreadable document affects only itself. Records that it published stay unchanged (*held*),
//! and a DNS Update Record, list or intent that was valid before stays in use.

mod folder;

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use dns_kit::files::atomic::{self, Attributes};
use serde::{Deserialize, Serialize};

pub(crate) use self::folder::{FileState, Folder, Scan, Watch};
use crate::{
    endpoint::{self, Endpoints, Labels, read_labels},
    fleet::{self, FleetNames},
    text::{Fields, Member, Node, Problems, Reader, Value, remedy_for_unknown},
    update_record::{
        DEFAULT_PROJECT, Intent, ListOwner, Metadata, RecordList, UpdateRecord, read_identifier,
    },
};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StatusFile {
    pub documents: Vec<DocumentStatus>,
    /// Problems of the file that belong to no document.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentStatus {
    #[serde(flatten)]
    pub id: DocumentId,
    /// `metadata.generation`, or the number of content changes seen by the publisher.
    #[serde(rename = "observedGeneration")]
    pub observed_generation: u64,
    /// Digest of the content at this generation.
    pub digest: String,
    /// Result by provider (`PROJECT/RECORD`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub providers: BTreeMap<String, ProviderResult>,
    /// Latest error; absent if there is none.
    #[serde(rename = "lastError", default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
}

/// Result of a document at one provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProviderResult {
    /// Whether every record set is published as wanted.
    pub synced: bool,
    /// Number of record sets wanted there.
    pub records: usize,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

impl StatusFile {
    /// Reads the status file of a file of documents; `None` if it is missing or unreadable.
    pub(crate) fn read(documents: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path_beside(documents)).ok()?).ok()
    }

    /// Writes the status file of a file of documents if the status has changed.
    pub(crate) fn write(&self, documents: &Path) -> io::Result<()> {
        if Self::read(documents).as_ref() == Some(self) {
            return Ok(());
        }
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        atomic::replace(&path_beside(documents), &text, Attributes::PUBLIC).map_err(|error| error.cause)?;
        Ok(())
    }

    /// Removes the status files of documents that no longer exist in a folder.
    pub(crate) fn sweep(folder: &Path) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let is_status = path.extension().is_some_and(|extension| extension == "status");
            let documents = path.with_extension("");
            if is_status && folder::is_document_file(&documents) && !documents.exists() {
                // The next round tries again.
                let _ = fs::remove_file(&path);
            }
        }
    }
}

fn path_beside(documents: &Path) -> PathBuf {
    let mut name = documents.as_os_str().to_owned();
    name.push(".status");
    PathBuf::from(name)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Endpoints in the form of external-dns's CRD.
    #[serde(rename = "DNSEndpoint")]
    Endpoint,
    #[serde(rename = "FleetName")]
    Fleet,
    #[serde(rename = "DNSUpdateRecord")]
    UpdateRecord,
    /// A list that binds DNS Update Records.
    #[serde(rename = "DNSUpdateRecordList")]
    List,
    #[serde(rename = "InboundIntent")]
    Intent,
}

/// Identity of a document, unique among all files.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DocumentId {
    pub kind: Kind,
    /// Namespace, which is the project; empty for lists of clusters.
    pub namespace: String,
    pub name: String,
}

/// A document whose identity is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    pub id: DocumentId,
    pub labels: Labels,
    /// `metadata.generation`, which Kubernetes counts.
    pub generation: Option<u64>,
    pub line: u64,
    pub last_line: u64,
    /// Content; `None` if it is invalid.
    pub content: Option<Content>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Record sets of a `DNSEndpoint`, shared by the scans that keep them.
    Endpoints(Arc<Endpoints>),
    Fleet(FleetNames),
    UpdateRecord(UpdateRecord),
    List(ListOwner, RecordList),
    Intent(Intent),
}

/// `apiVersion` of the publisher's own kinds.
const API_VERSION: &str = "bosh-dns-publish/v1";

impl Kind {
    const ALL: [Self; 5] = [Self::Endpoint, Self::Fleet, Self::UpdateRecord, Self::List, Self::Intent];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns the value of `kind` in documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::Endpoint => "DNSEndpoint",
            Self::Fleet => "FleetName",
            Self::UpdateRecord => "DNSUpdateRecord",
            Self::List => "DNSUpdateRecordList",
            Self::Intent => "InboundIntent",
        }
    }

    pub fn api_version(self) -> &'static str {
        match self {
            Self::Endpoint => endpoint::API_VERSION,
            Self::Fleet | Self::UpdateRecord | Self::List | Self::Intent => API_VERSION,
        }
    }
}

impl DocumentId {
    /// Returns the resource label for owner records of the document's record sets; external-dns
    /// writes `crd/NAMESPACE/NAME` for a `DNSEndpoint`.
    pub fn resource(&self) -> String {
        let Self { kind, namespace, name } = self;
        let kind = match kind {
            Kind::Endpoint => "crd",
            Kind::Fleet => "fleet",
            Kind::UpdateRecord => "update-record",
            Kind::List => "list",
            Kind::Intent => "intent",
        };
        format!("{kind}/{namespace}/{name}")
    }

    /// Returns the identity of the list of `owner`.
    pub fn of_list(owner: &ListOwner) -> Self {
        let (namespace, name) = match owner {
            ListOwner::LogicalCloud { project, name } => (project.clone(), format!("logical-cloud/{name}")),
            ListOwner::Cluster { provider, name } => (String::new(), format!("cluster/{provider}/{name}")),
        };
        Self { kind: Kind::List, namespace, name }
    }
}

impl fmt::Display for DocumentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name } = self;
        write!(f, "{} {namespace}/{name}", kind.name())
    }
}

impl Document {
    /// Parses a document that ends at `last_line`, or the items of a Kubernetes list, and reports
    /// problems. `None` stands for a document whose identity is unknown.
    pub fn read_all(node: &Node, last_line: u64, problems: &Problems) -> Vec<Option<Self>> {
        let root = Reader::root(node, problems);
        match list_items(&root) {
            None => vec![Self::read(&root, last_line)],
            Some(items) => {
                let firsts: Vec<u64> = items.iter().map(Reader::line).collect();
                let ends = firsts.iter().skip(1).map(|line| line.saturating_sub(1)).chain([last_line]);
                items.iter().zip(ends).map(|(item, end)| Self::read(item, end)).collect()
            }
        }
    }

    fn read(root: &Reader<'_>, last_line: u64) -> Option<Self> {
        let mut fields = root.fields()?;
        let kind = fields.required("kind").and_then(|kind| read_kind(&kind))?;
        if let Some(version) = fields.required("apiVersion")
            && version.text().is_some_and(|text| text != kind.api_version())
        {
            version.problem(
                format!("{} has another apiVersion", kind.name()),
                format!("write apiVersion: {}", kind.api_version()),
            );
        }
        // Accepted and ignored, because Kubernetes writes a `status`.
        drop(fields.optional("status"));
        let metadata = fields.required("metadata")?;
        let mut members = metadata.fields()?;
        let namespace = members
            .optional("namespace")
            .map_or(Some(DEFAULT_PROJECT.to_owned()), |name| read_identifier(&name));
        let labels = read_labels(members.optional("labels"));
        let generation = members.optional("generation").and_then(|value| value.integer(0..=u64::MAX));
        let name = Metadata::read_fields(&mut members).map(|metadata| metadata.name);
        let (id, content) = match kind {
            Kind::List => {
                finish(fields);
                read_list(root, namespace?)?
            }
            _ => {
                let id = DocumentId { kind, namespace: namespace?, name: name? };
                let content = read_content(kind, root, fields);
                (id, content)
            }
        };
        Some(Self { id, labels, generation, line: root.line(), last_line, content })
    }
}

/// Returns the items of a list as `kubectl get -o yaml` writes it; `None` for any other document.
fn list_items<'a>(root: &Reader<'a>) -> Option<Vec<Reader<'a>>> {
    let Value::Map(members) = root.value() else { return None };
    let is_list = |member: &Member| {
        let kinds = ["List", "DNSEndpointList"].map(|kind| Value::Text(kind.to_owned()));
        member.name == "kind" && kinds.contains(&member.node.value)
    };
    members.iter().find(|member| is_list(member))?;
    Some(root.fields()?.required("items")?.items()?.collect())
}

fn read_kind(reader: &Reader<'_>) -> Option<Kind> {
    let text = reader.text()?;
    let found = Kind::named(text);
    if found.is_none() {
        reader
            .problem(format!("unknown kind {text:?}"), remedy_for_unknown(text, &Kind::ALL.map(Kind::name)));
    }
    found
}

fn read_content(kind: Kind, root: &Reader<'_>, mut fields: Fields<'_>) -> Option<Content> {
    match kind {
        Kind::Endpoint | Kind::Fleet => {
            let spec = fields.required("spec")?;
            finish(fields);
            Some(match kind {
                Kind::Fleet => Content::Fleet(fleet::read(&spec)),
                _ => Content::Endpoints(Arc::new(endpoint::read(&spec))),
            })
        }
        Kind::UpdateRecord => {
            finish(fields);
            UpdateRecord::read(&mut root.fields()?).map(Content::UpdateRecord)
        }
        Kind::Intent => {
            finish(fields);
            Intent::read(&mut root.fields()?).map(Content::Intent)
        }
        // A list's identity depends on its content.
        Kind::List => None,
    }
}

fn finish(mut fields: Fields<'_>) {
    drop(fields.optional("spec"));
    fields.finish();
}

/// Parses a list; in a file, the owner is part of `spec`, because there is no path as in the API.
fn read_list(root: &Reader<'_>, namespace: String) -> Option<(DocumentId, Option<Content>)> {
    let spec = root.fields()?.optional("spec")?;
    let mut members = spec.fields()?;
    let cloud = members.optional("logicalCloud");
    let cluster = members.optional("cluster");
    let owner = match (cloud, cluster) {
        (Some(cloud), None) => ListOwner::LogicalCloud { project: namespace, name: read_identifier(&cloud)? },
        (None, Some(cluster)) => ListOwner::read_cluster(&cluster)?,
        _ => {
            spec.problem(
                "the owner of the list is ambiguous",
                "set either logicalCloud or cluster (PROVIDER/NAME)",
            );
            return None;
        }
    };
    let id = DocumentId::of_list(&owner);
    let list = RecordList::read_open(&mut root.fields()?).map(|(list, mut spec)| {
        drop((spec.optional("logicalCloud"), spec.optional("cluster")));
        spec.finish();
        list
    });
    Some((id, list.map(|list| Content::List(owner, list))))
}

#[cfg(test)]
mod tests;
