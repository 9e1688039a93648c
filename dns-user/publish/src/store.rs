//! Store of the resources written through the API: a folder with one document for each, which the
//! publisher reads like the operator's documents.
//!
//! A resource is acknowledged after its file is on disk. The file is written beside, synchronised
//! and renamed, so `kill -9` or a power loss at any time leaves the state before or after a write. What such a
//! kill leaves of an unfinished write is hidden: it is never read, and is removed by the next start.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use dns_kit::files::atomic::{self, Attributes, ReplaceError};
use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};

use crate::documents::{DocumentId, Kind, digest, read_json, write_pretty};

/// An open store. Only one process can open it at a time; others read the folder.
#[derive(Debug)]
pub(crate) struct Store {
    pub folder: PathBuf,
    resources: Mutex<BTreeMap<DocumentId, Resource>>,
    _lock: Flock<File>,
}

/// A document stored through the API.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Resource {
    pub id: DocumentId,
    /// Number of different contents so far, from 1.
    pub generation: u64,
    /// `{metadata, spec}` as accepted.
    pub body: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// Leaves an existing resource unchanged.
    Create,
    /// Replaces an existing resource.
    Put,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    Created,
    Replaced,
    /// The resource exists and was not changed.
    Exists,
    Deleted,
    Missing,
    /// The condition of the write does not hold; nothing was changed.
    Unmet,
}

/// Condition of a write on the resource before.
pub(crate) type Condition<'a> = &'a dyn Fn(Option<&Resource>) -> bool;

#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// Another process has opened it.
    #[error("{}: in use by another bosh-dns-publish; use that one through its control socket", .0.display())]
    InUse(PathBuf),
    #[error("{}: {reason}", path.display())]
    Unusable { path: PathBuf, reason: String },
}

impl Resource {
    /// Returns the entity tag of metadata and spec (RFC 9110, section 8.8.3).
    pub(crate) fn tag(&self) -> String {
        // The generation alone would repeat after a deletion and a new creation of the resource.
        format!("\"{}-{}\"", self.generation, digest(&self.body.to_string()))
    }

    /// Returns the resource as a document, in which the path of the API is part of the content.
    fn document(&self) -> Value {
        let Self {
            id,
            generation,
            body,
        } = self;
        let mut document = body.clone();
        document["apiVersion"] = id.kind.api_version().into();
        document["kind"] = id.kind.name().into();
        document["metadata"]["generation"] = (*generation).into();
        // Lists of clusters belong to no project.
        if !id.namespace.is_empty() {
            document["metadata"]["namespace"] = id.namespace.as_str().into();
        }
        match id.name.split_once('/') {
            Some(("cluster", cluster)) => document["spec"]["cluster"] = cluster.into(),
            Some((_, cloud)) => document["spec"]["logicalCloud"] = cloud.into(),
            None => {}
        }
        document
    }

    /// Parses a document of the store; `None` for any other.
    fn of_document(mut document: Value) -> Option<Self> {
        let kind = Kind::named(document["kind"].as_str()?)?;
        let metadata = document["metadata"].as_object_mut()?;
        let generation = metadata.remove("generation")?.as_u64()?;
        let namespace = match metadata.remove("namespace") {
            Some(Value::String(namespace)) => namespace,
            _ => String::new(),
        };
        let mut name = metadata.get("name")?.as_str()?.to_owned();
        let spec = document["spec"].as_object_mut()?;
        // In the API the path names the owner of a list, in a file its `spec`.
        if kind == Kind::List {
            name = match spec.remove("logicalCloud") {
                Some(cloud) => format!("logical-cloud/{}", cloud.as_str()?),
                None => format!("cluster/{}", spec.remove("cluster")?.as_str()?),
            };
        }
        let id = DocumentId {
            kind,
            namespace,
            name,
        };
        Some(Self {
            id,
            generation,
            body: json!({ "metadata": document["metadata"], "spec": document["spec"] }),
        })
    }
}

impl Store {
    /// Opens a store, and creates it if it is missing. Unreadable files are left unchanged; the
    /// scan of documents reports them.
    pub(crate) fn open(folder: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(folder).map_err(|error| unusable(folder, &error))?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(folder.join(".lock"))
            .map_err(|error| unusable(folder, &error))?;
        // The kernel frees it when the process ends, however it ends (flock(2)).
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
            .map_err(|_| StoreError::InUse(folder.to_owned()))?;
        // With the lock, this process is the only writer.
        atomic::sweep_folder(folder);
        let mut resources = BTreeMap::new();
        let files = atomic::read_folder(folder).map_err(|error| unusable(folder, &error))?;
        for path in files {
            // The scan of documents reports a damaged one.
            let document = read_json(&path).unwrap_or_default();
            let Some(resource) = Resource::of_document(document) else {
                continue;
            };
            // A copy under another name, such as an editor's backup, may be older than the resource.
            if path == path_of(folder, &resource.id) {
                resources.insert(resource.id.clone(), resource);
            }
        }
        Ok(Self {
            folder: folder.to_owned(),
            resources: Mutex::new(resources),
            _lock: lock,
        })
    }

    pub(crate) fn all(&self) -> Vec<Resource> {
        self.resources.lock().values().cloned().collect()
    }

    pub(crate) fn get(&self, id: &DocumentId) -> Option<Resource> {
        self.resources.lock().get(id).cloned()
    }

    /// Writes a resource. It is on disk when the function returns.
    pub(crate) fn write(
        &self,
        id: &DocumentId,
        body: Value,
        how: Write,
        condition: Condition<'_>,
    ) -> Result<(Written, Resource), StoreError> {
        // Held while the file is written: two writers of one resource must not leave memory and
        // disk in different states.
        let mut resources = self.resources.lock();
        let before = resources.get(id);
        if let (Write::Create, Some(before)) = (how, before) {
            return Ok((Written::Exists, before.clone()));
        }
        let generation = match before {
            // A client may repeat a request whose response was lost.
            Some(before) if before.body == body => before.generation,
            Some(before) => before.generation + 1,
            None => 1,
        };
        let resource = Resource {
            id: id.clone(),
            generation,
            body,
        };
        // Under the lock, so that the condition still holds when the file is written.
        if !condition(before) {
            return Ok((Written::Unmet, resource));
        }
        let written = if before.is_some() {
            Written::Replaced
        } else {
            Written::Created
        };
        if let Err(error) = self.save(&resource) {
            // It is not acknowledged, because a power loss may undo it, but the next start reads it.
            if error.renamed {
                resources.insert(id.clone(), resource);
            }
            return Err(self.failed(id, &error.cause));
        }
        resources.insert(id.clone(), resource.clone());
        Ok((written, resource))
    }

    pub(crate) fn delete(
        &self,
        id: &DocumentId,
        condition: Condition<'_>,
    ) -> Result<Written, StoreError> {
        let mut resources = self.resources.lock();
        let Some(before) = resources.get(id) else {
            return Ok(Written::Missing);
        };
        if !condition(Some(before)) {
            return Ok(Written::Unmet);
        }
        atomic::remove(&path_of(&self.folder, id)).map_err(|error| self.failed(id, &error))?;
        resources.remove(id);
        Ok(Written::Deleted)
    }

    fn save(&self, resource: &Resource) -> Result<(), ReplaceError> {
        write_pretty(
            &path_of(&self.folder, &resource.id),
            &resource.document(),
            // Parameters contain secrets.
            Attributes::PRIVATE,
        )
    }

    fn failed(&self, id: &DocumentId, error: &io::Error) -> StoreError {
        StoreError::Unusable {
            path: path_of(&self.folder, id),
            reason: format!("cannot be written: {error}"),
        }
    }
}

fn unusable(folder: &Path, error: &io::Error) -> StoreError {
    StoreError::Unusable {
        path: folder.to_owned(),
        reason: format!("{error}; name a folder that the publisher may write to"),
    }
}

/// Returns the file of a resource in a store.
fn path_of(folder: &Path, id: &DocumentId) -> PathBuf {
    let DocumentId {
        kind,
        namespace,
        name,
    } = id;
    // No identifier contains a tilde.
    folder.join(format!(
        "{}~{namespace}~{}.json",
        kind.name(),
        name.replace('/', "~")
    ))
}

/// Replaces a file of the publisher's state by the JSON of a value, in one step. A command of root may write what
/// the service reads.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    write_pretty(path, value, Attributes::PUBLIC).map_err(|error| error.cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::Folder;

    fn id(name: &str) -> DocumentId {
        DocumentId {
            kind: Kind::UpdateRecord,
            namespace: "shop".to_owned(),
            name: name.to_owned(),
        }
    }

    fn body(prefix: &str) -> Value {
        json!({
            "metadata": {"name": "a"},
            "spec": {"provider": "coredns", "external-dns-parameters": {"coredns-prefix": prefix}},
        })
    }

    #[test]
    fn generation_counts_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/store");
        let store = Store::open(&path).unwrap();
        let write = |prefix, how| {
            let (written, resource) = store.write(&id("a"), body(prefix), how, &|_| true).unwrap();
            (written, resource.generation)
        };
        assert_eq!(write("1", Write::Create), (Written::Created, 1));
        assert_eq!(write("2", Write::Create), (Written::Exists, 1));
        assert_eq!(write("2", Write::Put), (Written::Replaced, 2));
        assert_eq!(write("2", Write::Put), (Written::Replaced, 2));
        assert!(matches!(Store::open(&path), Err(StoreError::InUse(_))));
        drop(store);
        let store = Store::open(&path).unwrap();
        assert_eq!(store.get(&id("a")).unwrap().body, body("2"));
        assert_eq!(store.delete(&id("a"), &|_| false).unwrap(), Written::Unmet);
        assert_eq!(store.delete(&id("a"), &|_| true).unwrap(), Written::Deleted);
        assert_eq!(store.delete(&id("a"), &|_| true).unwrap(), Written::Missing);
        assert_eq!(store.all(), []);
    }

    #[test]
    fn unfinished_and_foreign_files_are_no_resources() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let store = Store::open(folder.path()).unwrap();
        for prefix in ["old", "new"] {
            store
                .write(&id("a"), body(prefix), Write::Put, &|_| true)
                .unwrap();
            let written = fs::read(path("DNSUpdateRecord~shop~a.json")).unwrap();
            fs::write(
                path(&format!(".DNSUpdateRecord~shop~a.json.part-{prefix}123")),
                &written,
            )
            .unwrap();
            fs::write(path(&format!("a.{prefix}.bak")), &written).unwrap();
        }
        store.delete(&id("a"), &|_| true).unwrap();
        drop(store);
        let store = Store::open(folder.path()).unwrap();
        assert_eq!(store.all(), [], "a deleted resource is back");
        let left = atomic::read_folder(folder.path()).unwrap();
        assert_eq!(left, [path("a.new.bak"), path("a.old.bak")]);
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            3,
            "and the lock"
        );
    }

    #[test]
    fn resources_are_documents() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let list =
            json!({"metadata": {"name": "dns-update-record-list"}, "spec": {"kv": [{"k": "a"}]}});
        let owned = |namespace: &str, name: &str| DocumentId {
            kind: Kind::List,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let ids = [
            id("a"),
            owned("shop", "logical-cloud/lc1"),
            owned("", "cluster/p/edge"),
        ];
        for (id, body) in ids.iter().zip([body("p"), list.clone(), list]) {
            store.write(id, body, Write::Create, &|_| true).unwrap();
        }
        let scan = Folder::new(vec![folder.path().to_owned()]).scan();
        assert_eq!(
            scan.problems().count(),
            0,
            "{:?}",
            scan.problems().collect::<Vec<_>>()
        );
        let mut found: Vec<DocumentId> = scan
            .documents
            .into_iter()
            .map(|document| document.id)
            .collect();
        found.sort();
        let mut expected = ids.to_vec();
        expected.sort();
        assert_eq!(found, expected);
        let all = store.all();
        drop(store);
        assert_eq!(Store::open(folder.path()).unwrap().all(), all);
    }

    #[test]
    fn file_in_place_of_the_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store.redb");
        fs::write(&path, "this is not a folder").unwrap();
        let error = Store::open(&path).unwrap_err().to_string();
        assert!(
            error.contains("store.redb") && error.contains("name a folder"),
            "{error}"
        );
        assert_eq!(fs::read(&path).unwrap(), b"this is not a folder");
    }

    #[test]
    fn resources_have_file_and_tag() {
        let folder = Path::new("/s");
        let list = DocumentId {
            kind: Kind::List,
            namespace: String::new(),
            name: "cluster/p/edge".to_owned(),
        };
        assert_eq!(
            path_of(folder, &id("a")),
            Path::new("/s/DNSUpdateRecord~shop~a.json")
        );
        assert_eq!(
            path_of(folder, &list),
            Path::new("/s/DNSUpdateRecordList~~cluster~p~edge.json")
        );
        let resource = |generation, prefix: &str| Resource {
            id: id("a"),
            generation,
            body: body(prefix),
        };
        let digest = digest(&body("p").to_string());
        assert_eq!(resource(3, "p").tag(), format!("\"3-{digest}\""));
        assert_ne!(resource(3, "p").tag(), resource(3, "q").tag());
    }

    #[test]
    fn documents_and_resources_are_convertible() {
        let list = |namespace: &str, name: &str| DocumentId {
            kind: Kind::List,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        for (id, member, value) in [
            (id("a"), None, ""),
            (
                list("shop", "logical-cloud/lc1"),
                Some("logicalCloud"),
                "lc1",
            ),
            (list("", "cluster/p/edge"), Some("cluster"), "p/edge"),
        ] {
            let resource = Resource {
                id: id.clone(),
                generation: 7,
                body: body("p"),
            };
            let document = resource.document();
            assert_eq!(document["apiVersion"], "bosh-dns-publish/v1");
            assert_eq!(document["kind"], id.kind.name());
            assert_eq!(document["metadata"]["generation"], 7);
            let namespace = document["metadata"]
                .get("namespace")
                .and_then(Value::as_str);
            assert_eq!(namespace.unwrap_or(""), id.namespace);
            assert_eq!(namespace.is_some(), !id.namespace.is_empty());
            if let Some(member) = member {
                assert_eq!(document["spec"][member], value);
            }
            assert_eq!(
                document["spec"].as_object().unwrap().len(),
                2 + usize::from(member.is_some())
            );
            assert_eq!(Resource::of_document(document.clone()), Some(resource));
            for damage in ["kind", "metadata", "spec"] {
                let mut damaged = document.clone();
                damaged.as_object_mut().unwrap().remove(damage);
                assert_eq!(Resource::of_document(damaged), None, "{damage}");
            }
            let mut damaged = document;
            damaged["metadata"]
                .as_object_mut()
                .unwrap()
                .remove("generation");
            assert_eq!(Resource::of_document(damaged), None);
        }
    }

    #[test]
    fn conditions_see_the_resource_before() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let refused = store.write(&id("a"), body("1"), Write::Put, &|before| before.is_some());
        assert_eq!(refused.unwrap().0, Written::Unmet);
        assert_eq!((store.all().len(), store.get(&id("a"))), (0, None));
        store
            .write(&id("a"), body("1"), Write::Create, &|before| {
                before.is_none()
            })
            .unwrap();
        let tag = store.get(&id("a")).unwrap().tag();
        let is_same = |before: Option<&Resource>| before.is_some_and(|before| before.tag() == tag);
        let (written, resource) = store
            .write(&id("a"), body("2"), Write::Put, &is_same)
            .unwrap();
        assert_eq!((written, resource.generation), (Written::Replaced, 2));
        let (written, resource) = store
            .write(&id("a"), body("3"), Write::Put, &is_same)
            .unwrap();
        assert_eq!((written, resource.generation), (Written::Unmet, 3));
        assert_eq!(store.get(&id("a")).unwrap().body, body("2"));
        // Another user must not read its parameters.
        use std::os::unix::fs::PermissionsExt as _;
        let mode = fs::metadata(path_of(folder.path(), &id("a")))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        let in_use = Store::open(folder.path()).unwrap_err().to_string();
        assert_eq!(
            in_use,
            format!(
                "{}: in use by another bosh-dns-publish; use that one through its control socket",
                folder.path().display()
            )
        );
    }

    #[test]
    fn new_folder_receives_the_state() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/state.json");
        write_json(&path, &[1, 2]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "[\n  1,\n  2\n]\n");
        assert!(write_json(&path.join("below"), &[1]).is_err());
    }
}
