//! Store of the resources written through the API.
//!
//! It uses redb, because a resource is acknowledged only after its transaction is on disk, and a
//! `kill -9` or power loss at any time must leave the state before or after a transaction: redb
//! writes pages copy-on-write and switches between two checksummed commit slots. It is one file and
//! pure Rust, without a server, a C library or a log to replay. A JSON file that is replaced as a
//! whole would write every resource again for each change, and could not serve two changes at once.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use redb::{Database, DatabaseError, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::documents::{DocumentId, Kind};

/// Resources by kind, namespace and name, separated by zero octets.
const RESOURCES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("resources");

/// An open store. Only one process can open it at a time.
#[derive(Debug)]
pub struct Store {
    database: Database,
    path: PathBuf,
}

/// A document stored through the API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resource {
    /// Kind and name of the document.
    pub id: DocumentId,
    /// Number of different contents so far, from 1.
    pub generation: u64,
    /// `{metadata, spec}` as accepted.
    pub body: Value,
}

/// Mode of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// Leaves an existing resource unchanged.
    Create,
    /// Replaces an existing resource.
    Put,
}

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The resource did not exist before.
    Created,
    /// An existing resource was overwritten.
    Replaced,
    /// The resource exists and was not changed.
    Exists,
    /// The resource was deleted.
    Deleted,
    /// There is nothing to delete.
    Missing,
    /// The condition of the write does not hold; nothing was changed.
    Unmet,
}

/// Condition of a write, checked in its transaction.
pub type Condition<'a> = &'a dyn Fn(Option<&Resource>) -> bool;

impl Resource {
    /// Returns the entity tag of metadata and spec (RFC 9110, section 8.8.3).
    pub fn tag(&self) -> String {
        let digest = ring::digest::digest(&ring::digest::SHA256, self.body.to_string().as_bytes());
        let digest: String = digest.as_ref()[..8].iter().map(|octet| format!("{octet:02x}")).collect();
        format!("\"{}-{digest}\"", self.generation)
    }
}

/// Failure of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has opened it.
    #[error("{}: in use by another bosh-dns-publish; use that one through its control socket", .0.display())]
    InUse(PathBuf),
    /// The file or folder cannot be opened or its content is invalid.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// Path of the store's file or folder.
        path: PathBuf,
        /// Cause of the failure, and a remedy.
        reason: String,
    },
}

impl Store {
    /// Opens a store, and creates it if it is missing.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let unusable = |reason: String| StoreError::Unusable { path: path.to_owned(), reason };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|error: io::Error| unusable(error.to_string()))?;
        }
        let database = Database::create(path).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => StoreError::InUse(path.to_owned()),
            DatabaseError::UpgradeRequired(version) => unusable(format!(
                "its format {version} is too old for this program; export it with the older version"
            )),
            other => unusable(other.to_string()),
        })?;
        let store = Self { database, path: path.to_owned() };
        let transaction = store.begin()?;
        transaction.open_table(RESOURCES).map_err(|error| store.failed(error))?;
        transaction.commit().map_err(|error| store.failed(error))?;
        Ok(store)
    }

    /// Returns every resource, sorted by identity.
    pub fn all(&self) -> Result<Vec<Resource>, StoreError> {
        let transaction = self.database.begin_read().map_err(|error| self.failed(error))?;
        let table = transaction.open_table(RESOURCES).map_err(|error| self.failed(error))?;
        let mut found = Vec::new();
        for entry in table.iter().map_err(|error| self.failed(error))? {
            let (_, value) = entry.map_err(|error| self.failed(error))?;
            found.push(self.decode(value.value())?);
        }
        Ok(found)
    }

    /// Returns one resource; `None` if it does not exist.
    pub fn get(&self, id: &DocumentId) -> Result<Option<Resource>, StoreError> {
        let transaction = self.database.begin_read().map_err(|error| self.failed(error))?;
        let table = transaction.open_table(RESOURCES).map_err(|error| self.failed(error))?;
        let found = table.get(key(id).as_str()).map_err(|error| self.failed(error))?;
        found.map(|value| self.decode(value.value())).transpose()
    }

    /// Writes a resource. It is on disk when the function returns.
    pub fn write(
        &self,
        id: &DocumentId,
        body: Value,
        how: Write,
        condition: Condition<'_>,
    ) -> Result<(Written, Resource), StoreError> {
        let transaction = self.begin()?;
        let result = {
            let mut table = transaction.open_table(RESOURCES).map_err(|error| self.failed(error))?;
            let before = table.get(key(id).as_str()).map_err(|error| self.failed(error))?;
            let before = before.map(|value| self.decode(value.value())).transpose()?;
            if let (Write::Create, Some(before)) = (how, &before) {
                return Ok((Written::Exists, before.clone()));
            }
            if !condition(before.as_ref()) {
                let resource = Resource { id: id.clone(), generation: 0, body };
                return Ok((Written::Unmet, before.unwrap_or(resource)));
            }
            let generation = match &before {
                Some(before) if before.body == body => before.generation,
                Some(before) => before.generation + 1,
                None => 1,
            };
            let resource = Resource { id: id.clone(), generation, body };
            let bytes = serde_json::to_vec(&resource).map_err(|error| self.failed(error))?;
            table.insert(key(id).as_str(), bytes.as_slice()).map_err(|error| self.failed(error))?;
            (if before.is_some() { Written::Replaced } else { Written::Created }, resource)
        };
        transaction.commit().map_err(|error| self.failed(error))?;
        Ok(result)
    }

    /// Deletes a resource.
    pub fn delete(&self, id: &DocumentId, condition: Condition<'_>) -> Result<Written, StoreError> {
        let transaction = self.begin()?;
        let was_there = {
            let mut table = transaction.open_table(RESOURCES).map_err(|error| self.failed(error))?;
            let before = table.get(key(id).as_str()).map_err(|error| self.failed(error))?;
            let before = before.map(|value| self.decode(value.value())).transpose()?;
            if before.is_some() && !condition(before.as_ref()) {
                return Ok(Written::Unmet);
            }
            let removed = table.remove(key(id).as_str()).map_err(|error| self.failed(error))?;
            removed.is_some()
        };
        transaction.commit().map_err(|error| self.failed(error))?;
        Ok(if was_there { Written::Deleted } else { Written::Missing })
    }

    fn begin(&self) -> Result<redb::WriteTransaction, StoreError> {
        self.database.begin_write().map_err(|error| self.failed(error))
    }

    fn decode(&self, bytes: &[u8]) -> Result<Resource, StoreError> {
        serde_json::from_slice(bytes)
            .map_err(|error| self.failed(format!("a resource cannot be read: {error}")))
    }

    fn failed(&self, error: impl ToString) -> StoreError {
        StoreError::Unusable { path: self.path.clone(), reason: error.to_string() }
    }
}

fn key(id: &DocumentId) -> String {
    let DocumentId { kind, namespace, name } = id;
    debug_assert!(matches!(kind, Kind::UpdateRecord | Kind::List | Kind::Intent));
    format!("{}\0{namespace}\0{name}", kind.name())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn id(name: &str) -> DocumentId {
        DocumentId { kind: Kind::UpdateRecord, namespace: "default".to_owned(), name: name.to_owned() }
    }

    #[test]
    fn generation_counts_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/store.redb");
        let store = Store::open(&path).unwrap();
        let write = |body, how| {
            let (written, resource) = store.write(&id("a"), body, how, &|_| true).unwrap();
            (written, resource.generation)
        };
        assert_eq!(write(json!(1), Write::Create), (Written::Created, 1));
        assert_eq!(write(json!(2), Write::Create), (Written::Exists, 1));
        assert_eq!(write(json!(2), Write::Put), (Written::Replaced, 2));
        assert_eq!(write(json!(2), Write::Put), (Written::Replaced, 2));
        assert!(matches!(Store::open(&path), Err(StoreError::InUse(_))));
        drop(store);
        let store = Store::open(&path).unwrap();
        assert_eq!(store.get(&id("a")).unwrap().unwrap().body, json!(2));
        assert_eq!(store.delete(&id("a"), &|_| false).unwrap(), Written::Unmet);
        assert_eq!(store.delete(&id("a"), &|_| true).unwrap(), Written::Deleted);
        assert_eq!(store.delete(&id("a"), &|_| true).unwrap(), Written::Missing);
        assert_eq!(store.all().unwrap(), []);
    }

    #[test]
    fn damaged_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store.redb");
        fs::write(&path, "this is not a database").unwrap();
        let error = Store::open(&path).unwrap_err().to_string();
        assert!(error.contains("store.redb"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"this is not a database");
    }
}
