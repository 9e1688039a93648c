//! Documents: folders and files, read completely after every change, each document independently.
//!
//! An unreadable document affects only itself. Records that it published stay unchanged (*held*),
//! and a DNS Update Record, list or intent that was valid before stays in use.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use dns_kit::files::{
    FileStamp,
    atomic::{self, Attributes, ReplaceError},
    bounded,
};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::sync::mpsc;

use crate::{
    endpoint::{self, Endpoints, Labels},
    fleet::{self, FleetNames},
    text::{self, Fields, Node, Problem, Problems, Reader, Value, remedy_for_unknown},
    update_record::{
        DEFAULT_PROJECT, Intent, ListOwner, Metadata, RecordList, UpdateRecord, read_identifier,
    },
};

/// Maximum size of a file in bytes: 100,000 endpoints take about 12 MB.
const MAX_FILE_SIZE: u64 = 64 << 20;

/// Time that a program may need to write a file.
const WRITING: Duration = Duration::from_mins(1);

/// Follows files and folders of documents.
#[derive(Debug)]
pub(crate) struct Folder {
    paths: Vec<PathBuf>,
    known: BTreeMap<PathBuf, KnownFile>,
}

/// What is known of a file since earlier scans.
#[derive(Debug)]
struct KnownFile {
    /// Last valid documents, which replace invalid ones.
    good: BTreeMap<DocumentId, Option<Document>>,
    /// State at the last scan.
    reading: Option<Reading>,
    /// Text when its documents were last known, to detect that its end is missing.
    text: Option<String>,
}

#[derive(Clone, Debug)]
struct Reading {
    stamp: Option<FileStamp>,
    state: FileState,
    /// Whether the identity of every document in it is known.
    is_complete: bool,
    /// Whether nothing can be read, not even what kind of document it is.
    is_illegible: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scan {
    /// Every file, sorted by path.
    pub files: Vec<FileState>,
    /// Documents in use, in the order of files and lines.
    pub documents: Vec<Document>,
    /// Resources of unreadable documents, whose records stay unchanged.
    pub held: BTreeSet<String>,
    /// Whether a list or intent is unreadable, so that the records of all intents stay unchanged.
    pub holds_intents: bool,
    /// Whether a file is illegible, and no earlier scan or status file tells what it held. The records
    /// of all documents that are not found stay unchanged.
    pub holds_unknown: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct FileState {
    pub path: PathBuf,
    /// Identity, line and generation of its documents, unreadable ones included.
    pub documents: Vec<Document>,
    pub problems: Vec<Problem>,
}

impl Folder {
    /// Follows files, and all `*.yml`, `*.yaml` and `*.json` files in folders.
    ///
    /// The status files of an earlier process list the documents of a damaged file.
    pub(crate) fn new(paths: Vec<PathBuf>) -> Self {
        Self {
            paths,
            known: BTreeMap::new(),
        }
    }

    pub(crate) fn scan(&mut self) -> Scan {
        let mut scan = Scan::default();
        let mut places: BTreeMap<DocumentId, (PathBuf, u64)> = BTreeMap::new();
        let files = self.files(&mut scan);
        // A removed file withdraws its documents; `files` keeps those of an unreadable folder.
        self.known.retain(|file, _| files.contains(file));
        for path in files {
            let known = self.known.entry(path.clone());
            let known = known.or_insert_with(|| KnownFile::of_status(&path));
            let Reading {
                stamp: _,
                mut state,
                is_complete,
                is_illegible,
            } = known.read(&path);
            let good = &mut known.good;
            // Only the contents of a legible version are known and kept.
            scan.holds_unknown |= is_illegible && good.is_empty();
            let mut next = BTreeMap::new();
            for document in &state.documents {
                // The first one in the order of the paths wins, so that a scan does not depend on
                // which file changed.
                let first = places.get(&document.id);
                if let Some((file, line)) = first {
                    state.problems.push(duplicate(&path, document, file, *line));
                    continue;
                }
                places.insert(document.id.clone(), (path.clone(), document.line));
                let before = good.get(&document.id).cloned().flatten();
                let kept = scan.take(document, before);
                next.insert(document.id.clone(), kept);
            }
            if !is_complete {
                // If a document cannot be identified, all earlier documents of the file stay.
                for (id, before) in good.iter() {
                    if !next.contains_key(id) && !places.contains_key(id) {
                        places.insert(id.clone(), (path.clone(), 1));
                        scan.hold(id, before.clone());
                        next.insert(id.clone(), before.clone());
                    }
                }
            }
            *good = next;
            scan.files.push(state);
        }
        scan
    }

    /// Returns the files of all paths.
    fn files(&self, scan: &mut Scan) -> BTreeSet<PathBuf> {
        let mut files = BTreeSet::new();
        for path in &self.paths {
            match files_of(path) {
                Ok(found) => files.extend(found),
                Err(error) => {
                    // Files in an unreadable folder count as unreadable, not as removed.
                    let mut is_unknown = true;
                    for file in self.known.keys() {
                        if file.starts_with(path) {
                            files.insert(file.clone());
                            is_unknown = false;
                        }
                    }
                    scan.holds_unknown |= is_unknown;
                    scan.files.push(unreadable(path, &error));
                }
            }
        }
        files
    }
}

impl KnownFile {
    /// Returns a file that contained the documents in its status file.
    fn of_status(path: &Path) -> Self {
        let mut good = BTreeMap::new();
        for document in StatusFile::read(path).unwrap_or_default().documents {
            good.insert(document.id, None);
        }
        Self {
            good,
            reading: None,
            text: None,
        }
    }

    /// Returns the content: as read before, if the file has not changed since.
    fn read(&mut self, path: &Path) -> Reading {
        let stamp = FileStamp::of(path);
        if let Some(known) = &self.reading
            // Without a stamp the file was illegible, and is read again in each scan.
            && stamp.is_some()
            && known.stamp == stamp
        {
            return known.clone();
        }
        let reading = read_file(path, stamp, self.good.len(), &mut self.text);
        self.reading = Some(reading.clone());
        reading
    }
}

impl Scan {
    /// Adds a document, or its last valid version, to the documents in use. Returns the valid version for
    /// the next scan.
    fn take(&mut self, document: &Document, before: Option<Document>) -> Option<Document> {
        match &document.content {
            None => {
                self.hold(&document.id, before.clone());
                before
            }
            Some(content) => {
                let is_damaged = match content {
                    Content::Endpoints(endpoints) => endpoints.is_unreadable,
                    Content::Fleet(names) => names.is_unreadable,
                    Content::UpdateRecord(_) | Content::List(..) | Content::Intent(_) => false,
                };
                // An entry is unknown, so any record of the document may be meant.
                if is_damaged {
                    self.held.insert(document.id.resource());
                }
                self.documents.push(document.clone());
                Some(document.clone())
            }
        }
    }

    /// Keeps the effect of an unreadable document.
    fn hold(&mut self, id: &DocumentId, before: Option<Document>) {
        match (id.kind, before) {
            (Kind::Endpoint | Kind::Fleet, _) => drop(self.held.insert(id.resource())),
            (_, Some(before)) => self.documents.push(before),
            // There is no provider to publish with; its records stay in the zones.
            (Kind::UpdateRecord, None) => {}
            (Kind::List | Kind::Intent, None) => self.holds_intents = true,
        }
    }

    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.files.iter().flat_map(|file| &file.problems)
    }

    /// Returns the problems by the document that contains their line, and those outside of documents.
    pub(crate) fn problems_by_document(&self) -> (BTreeMap<DocumentId, Vec<String>>, Vec<String>) {
        let mut of_documents: BTreeMap<_, Vec<String>> = BTreeMap::new();
        let mut of_files = Vec::new();
        for file in &self.files {
            for problem in &file.problems {
                let mut documents = file.documents.iter();
                match documents
                    .find(|document| (document.line..=document.last_line).contains(&problem.line))
                {
                    Some(document) => of_documents
                        .entry(document.id.clone())
                        .or_default()
                        .push(problem.to_string()),
                    None => of_files.push(problem.to_string()),
                }
            }
        }
        (of_documents, of_files)
    }
}

/// Reads a file that held `count` documents before, and had the text `before` when they were last known.
fn read_file(
    path: &Path,
    stamp: Option<FileStamp>,
    count: usize,
    before: &mut Option<String>,
) -> Reading {
    let text = match read_text(path) {
        Ok(text) => text,
        Err(error) => return illegible(unreadable(path, &error)),
    };
    let problems = Problems::of(path.display().to_string());
    // Before parsing: a text that was cut off between two documents has no syntax error.
    check_text(path, &text, count, before.as_deref(), &problems);
    if problems.count() > 0 {
        return illegible(FileState {
            path: path.to_owned(),
            documents: Vec::new(),
            problems: problems.into_vec(),
        });
    }
    let mut documents = Vec::new();
    let mut is_complete = true;
    let mut is_illegible = false;
    for document in text::documents(&text) {
        let last_line = document.line + document.text.lines().count() as u64;
        let found = match text::parse(document, &problems) {
            Some(node) => Document::read_all(&node, last_line, &problems),
            // The other documents of the file are parsed all the same.
            None => {
                is_illegible = true;
                vec![None]
            }
        };
        is_complete &= found.iter().all(Option::is_some);
        documents.extend(found.into_iter().flatten());
    }
    // Only a text that was understood as a whole can tell whether the next one lacks its end.
    if is_complete {
        *before = Some(text);
    }
    let state = FileState {
        path: path.to_owned(),
        documents,
        problems: problems.into_vec(),
    };
    Reading {
        stamp,
        state,
        is_complete,
        is_illegible,
    }
}

/// Reports a text that must not replace the one before: it is empty, or only its beginning is there.
fn check_text(path: &Path, text: &str, count: usize, before: Option<&str>, problems: &Problems) {
    let last_line = text.lines().count().max(1) as u64;
    if text.trim().is_empty() && count == 0 {
        problems.add(
            1,
            "",
            "the file is empty",
            "write documents to it, or remove the file",
        );
    } else if count > 0 && text::documents(text).is_empty() {
        problems.add(
            last_line,
            "",
            format!("the file is empty, but held {count} documents; their records stay unchanged"),
            "restore it, or remove the file to withdraw the records",
        );
    } else if let Some(before) = before
        && let Some(remedy) = missing_end(path, text, before)
    {
        let reason =
            "the file ends within its earlier text; the records of its documents stay unchanged";
        problems.add(last_line, "", reason, remedy);
    }
}

fn illegible(state: FileState) -> Reading {
    // Without a stamp the next scan reads it again.
    Reading {
        stamp: None,
        state,
        is_complete: false,
        is_illegible: true,
    }
}

/// Returns the remedy for a text that lacks the end of `before`; `None` if it lacks nothing, or has done so for
/// [`WRITING`], which must be intended.
fn missing_end(path: &Path, text: &str, before: &str) -> Option<&'static str> {
    // An interrupted write of the same or nearly the same text leaves a beginning of it.
    let rest = before.strip_prefix(text)?;
    if rest.is_empty() {
        return None;
    }
    if !text.ends_with('\n') && !rest.starts_with(['\r', '\n']) {
        // As after a write that was interrupted.
        return Some("write the file completely, and end it with a line break");
    }
    let written = fs::metadata(path).ok()?.modified().ok()?;
    // A modification time in the future gives no age, and the text counts.
    let age = SystemTime::now().duration_since(written).ok()?;
    (age < WRITING)
        .then_some("wait a minute if that is intended; the file may still be being written")
}

fn read_text(path: &Path) -> io::Result<String> {
    // The tree of a document takes several times its text, so a large file could take all memory; a FIFO in the
    // folder must not block.
    let bytes = bounded::read_at_most(path, MAX_FILE_SIZE)?;
    String::from_utf8(bytes).map_err(|_| io::Error::other("it is not UTF-8"))
}

fn unreadable(path: &Path, error: &io::Error) -> FileState {
    let remedy = "correct the path or its permissions; the records of its documents stay unchanged";
    let problem = Problem::new(
        path.display().to_string(),
        1,
        "",
        format!("cannot be read: {error}"),
        remedy,
    );
    FileState {
        path: path.to_owned(),
        documents: Vec::new(),
        problems: vec![problem],
    }
}

fn duplicate(path: &Path, document: &Document, file: &Path, line: u64) -> Problem {
    let reason = format!(
        "{} is already defined at {}:{line}",
        document.id,
        file.display()
    );
    let remedy = "remove or rename one of them";
    Problem::new(
        path.display().to_string(),
        document.line,
        "metadata.name",
        reason,
        remedy,
    )
}

/// Returns the files of a path, sorted, without hidden files.
fn files_of(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = atomic::read_folder(path)?;
    // Editors and package managers leave other files there, such as `x.yml~` and `x.yml.dpkg-new`.
    found.retain(|file| is_document_file(file));
    Ok(found)
}

fn is_document_file(path: &Path) -> bool {
    let Some(name) = path.file_name() else {
        return false;
    };
    let extension = path.extension().and_then(|extension| extension.to_str());
    !name.as_encoded_bytes().starts_with(b".") && matches!(extension, Some("yml" | "yaml" | "json"))
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
    /// All kinds in the order of their declaration, with the value of `kind` in documents and the word in owner
    /// records; external-dns writes `crd/NAMESPACE/NAME` for a `DNSEndpoint`.
    const ALL: [(Self, &str, &str); 5] = [
        (Self::Endpoint, "DNSEndpoint", "crd"),
        (Self::Fleet, "FleetName", "fleet"),
        (Self::UpdateRecord, "DNSUpdateRecord", "update-record"),
        (Self::List, "DNSUpdateRecordList", "list"),
        (Self::Intent, "InboundIntent", "intent"),
    ];

    pub fn named(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        let (kind, ..) = all.find(|(_, known, _)| *known == name)?;
        Some(kind)
    }

    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    pub fn api_version(self) -> &'static str {
        match self {
            Self::Endpoint => endpoint::API_VERSION,
            Self::Fleet | Self::UpdateRecord | Self::List | Self::Intent => API_VERSION,
        }
    }
}

impl DocumentId {
    /// Returns the resource label for owner records of the document's record sets.
    pub fn resource(&self) -> String {
        let Self {
            kind,
            namespace,
            name,
        } = self;
        format!("{}/{namespace}/{name}", Kind::ALL[*kind as usize].2)
    }

    pub fn of_list(owner: &ListOwner) -> Self {
        let (namespace, name) = match owner {
            ListOwner::LogicalCloud { project, name } => {
                (project.clone(), format!("logical-cloud/{name}"))
            }
            ListOwner::Cluster { provider, name } => {
                (String::new(), format!("cluster/{provider}/{name}"))
            }
        };
        Self {
            kind: Kind::List,
            namespace,
            name,
        }
    }
}

impl fmt::Display for DocumentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            namespace,
            name,
        } = self;
        write!(f, "{} {namespace}/{name}", kind.name())
    }
}

impl Document {
    /// Parses a document that ends at `last_line`, or the items of a Kubernetes list, and reports
    /// problems. `None` stands for a document whose identity is unknown.
    pub fn read_all(node: &Node, last_line: u64, problems: &Problems) -> Vec<Option<Self>> {
        let root = Reader::root(node, problems);
        if !is_list(node) {
            return vec![Self::read(&root, last_line)];
        }
        // Without items, nothing of the list is known.
        let Some(items) = list_items(&root) else {
            return vec![None];
        };
        let mut found = Vec::with_capacity(items.len());
        for (number, item) in items.iter().enumerate() {
            let end = match items.get(number + 1) {
                Some(next) => next.node.line.saturating_sub(1),
                None => last_line,
            };
            found.push(Self::read(item, end));
        }
        found
    }

    fn read(root: &Reader<'_>, last_line: u64) -> Option<Self> {
        let mut fields = root.fields()?;
        let kind = fields.required_as("kind", read_kind)?;
        if let Some(version) = fields.required("apiVersion")
            && let Some(text) = version.text()
            && text != kind.api_version()
        {
            // The document is read nevertheless, so that its other problems are shown at once.
            version.problem(
                format!("{} has another apiVersion", kind.name()),
                format!("write apiVersion: {}", kind.api_version()),
            );
        }
        // Accepted and ignored, because Kubernetes writes a `status`.
        drop(fields.optional("status"));
        let metadata = fields.required("metadata")?;
        let mut members = metadata.fields()?;
        let namespace = match members.optional("namespace") {
            Some(name) => read_identifier(&name),
            None => Some(DEFAULT_PROJECT.to_owned()),
        };
        let before = root.problems.count();
        let labels = members
            .optional_as("labels", Reader::text_map)
            .unwrap_or_default();
        let has_all_labels = root.problems.count() == before;
        // Kubernetes and the store count it; in an operator's file it is usually missing.
        let generation = members.optional_as("generation", |value| value.integer(0..=u64::MAX));
        let named = Metadata::read(&mut members);
        let (id, content) = match kind {
            Kind::List => {
                finish(fields);
                read_list(root, namespace?)?
            }
            _ => {
                let id = DocumentId {
                    kind,
                    namespace: namespace?,
                    name: named?.name,
                };
                (id, read_content(kind, root, fields))
            }
        };
        Some(Self {
            id,
            labels,
            generation,
            line: root.node.line,
            last_line,
            // Without one of its labels it would be withdrawn from the provider that selects it.
            content: content.filter(|_| has_all_labels),
        })
    }
}

/// Returns a digest from which changes are detected.
pub(crate) fn digest(text: &str) -> String {
    // It is kept in status files, so it must be the same in every version of this program, which
    // the standard library does not promise of its hashes.
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    dns_kit::hex(&digest.as_ref()[..8])
}

/// Returns whether a document is a list as `kubectl get -o yaml` writes it.
fn is_list(node: &Node) -> bool {
    // Without `fields`, which would report a problem: other documents are no lists.
    let Value::Map(members) = &node.value else {
        return false;
    };
    let mut members = members.iter();
    let kind = members.find(|(name, _)| name == "kind");
    let kind = kind.map(|(_, kind)| &kind.value);
    matches!(kind, Some(Value::Text(kind)) if ["List", "DNSEndpointList"].contains(&&**kind))
}

fn list_items<'a>(list: &Reader<'a>) -> Option<Vec<Reader<'a>>> {
    Some(list.fields()?.required("items")?.items()?.collect())
}

fn read_kind(reader: &Reader<'_>) -> Option<Kind> {
    let text = reader.text()?;
    if let Some(kind) = Kind::named(text) {
        return Some(kind);
    }
    let remedy = remedy_for_unknown(text, &Kind::ALL.map(|(_, name, _)| name));
    reader.refuse(format!("unknown kind {text:?}"), remedy)
}

fn read_content(kind: Kind, root: &Reader<'_>, mut fields: Fields<'_>) -> Option<Content> {
    match kind {
        // Their entries are read one by one, so the content is valid whatever an entry is.
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
        (Some(cloud), None) => ListOwner::LogicalCloud {
            project: namespace,
            name: read_identifier(&cloud)?,
        },
        (None, Some(cluster)) => ListOwner::read_cluster(&cluster)?,
        _ => {
            let remedy = "set either logicalCloud or cluster (PROVIDER/NAME)";
            return spec.refuse("the owner of the list is ambiguous", remedy);
        }
    };
    let id = DocumentId::of_list(&owner);
    let mut content = None;
    if let Some((list, mut spec)) = RecordList::read_open(&mut root.fields()?) {
        // They have been read above; the list itself does not know them.
        drop((spec.optional("logicalCloud"), spec.optional("cluster")));
        spec.finish();
        content = Some(Content::List(owner, list));
    }
    Some((id, content))
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StatusFile {
    pub documents: Vec<DocumentStatus>,
    /// Problems of the file that belong to no document.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DocumentStatus {
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
    #[serde(rename = "lastError", default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProviderResult {
    /// Whether every record set is published as wanted.
    pub synced: bool,
    pub records: usize,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

impl StatusFile {
    /// Reads the status file of a file of documents; `None` if it is missing or unreadable.
    pub(crate) fn read(documents: &Path) -> Option<Self> {
        // A damaged status file costs generations and the memory of damaged files, never records,
        // so it is replaced without a word.
        serde_json::from_slice(&bounded::read(&path_beside(documents)).ok()?).ok()
    }

    /// Writes the status file of a file of documents if the status has changed.
    pub(crate) fn write(&self, documents: &Path) -> Result<(), ReplaceError> {
        // A link may lead to a file with the same status that another user can change.
        let is_link =
            fs::symlink_metadata(path_beside(documents)).is_ok_and(|found| found.is_symlink());
        if !is_link && Self::read(documents).as_ref() == Some(self) {
            return Ok(());
        }
        write_pretty(&path_beside(documents), self, Attributes::PUBLIC)
    }

    /// Removes what a killed publisher left of unfinished status files in a folder, which is the operator's.
    pub(crate) fn sweep_unfinished(folder: &Path) {
        atomic::sweep_where(folder, |name| name.ends_with(b".status"));
    }

    /// Removes the status files of documents that no longer exist in a folder.
    pub(crate) fn sweep(folder: &Path) {
        let Ok(entries) = fs::read_dir(folder) else {
            return;
        };
        for entry in entries.flatten() {
            let path = entry.path();
            let documents = path.with_extension("");
            let is_status = path.extension() == Some("status".as_ref());
            if is_status && is_document_file(&documents) && !documents.exists() {
                // The next round tries again.
                let _ = fs::remove_file(&path);
            }
        }
    }
}

/// Reads the JSON of the publisher's own state; the default if the file is missing.
pub(crate) fn read_json<T: Default + DeserializeOwned>(path: &Path) -> Result<T, String> {
    match bounded::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
        // The first start has no state.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        Err(error) => Err(error.to_string()),
    }
}

/// Replaces a file, whose name the publisher chose, by the indented JSON of a value, in one step.
///
/// Another user who may write to the folder could have planted a symbolic link there, which is not followed.
pub(crate) fn write_pretty(
    path: &Path,
    value: &impl Serialize,
    attributes: Attributes,
) -> Result<(), ReplaceError> {
    // Every value here has text as keys, so it can be written.
    let mut text = serde_json::to_vec_pretty(value).unwrap_or_default();
    text.push(b'\n');
    atomic::replace_own(path, &text, attributes).map(drop)
}

fn path_beside(documents: &Path) -> PathBuf {
    let mut name = documents.as_os_str().to_owned();
    name.push(".status");
    PathBuf::from(name)
}

/// Reports changes of the documents.
///
/// Events are only a hint: everything is also read at an interval, so a lost event only causes a delay.
pub(crate) struct Watch {
    // Dropping it ends the watch.
    _watcher: Option<RecommendedWatcher>,
    events: mpsc::Receiver<()>,
}

impl Watch {
    /// Watches folders of documents, and the folders in which single files lie.
    pub(crate) fn start(documents: &[PathBuf]) -> Self {
        let (sender, events) = mpsc::channel(1);
        let mut single = documents.to_vec();
        // A file that the configuration names may have any extension, so its path is compared.
        single.retain(|path| !path.is_dir());
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if may_change_documents(&event, &single) {
                // One pending event is enough.
                let _ = sender.try_send(());
            }
        });
        let watcher = watcher.and_then(|mut watcher| {
            watch_folders(&mut watcher, documents)?;
            Ok(watcher)
        });
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, "cannot watch files; changes are noticed at the next interval");
        });
        Self {
            _watcher: watcher.ok(),
            events,
        }
    }

    pub(crate) async fn changed(&mut self) {
        // The watcher could not be started, or has ended; the interval remains.
        if self.events.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}

fn may_change_documents(event: &notify::Result<notify::Event>, single: &[PathBuf]) -> bool {
    let Ok(event) = event else {
        // Events may have been lost.
        return true;
    };
    let mut paths = event.paths.iter();
    // Reading the documents is an access itself: without this, each scan would cause the next one.
    !event.kind.is_access() && paths.any(|path| is_document_file(path) || single.contains(path))
}

fn watch_folders(watcher: &mut impl Watcher, documents: &[PathBuf]) -> notify::Result<()> {
    let mut folders: Vec<&Path> = Vec::new();
    for path in documents {
        let folder = match path.parent() {
            _ if path.is_dir() => path.as_path(),
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        // The folder of a single file is watched: a watch of the file follows its inode, which a
        // rename replaces.
        if !folders.contains(&folder) && folder.is_dir() {
            folders.push(folder);
            watcher.watch(folder, RecursiveMode::NonRecursive)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
