//! The folder of documents: read completely after every change, each document independently.
//!
//! An unreadable document affects only itself. Records that it published stay unchanged (*held*),
//! and a DNS Update Record, list or intent that was valid before stays in use.

mod document;
mod folder;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use dns_kit::files::atomic::{self, Attributes};
use serde::{Deserialize, Serialize};

pub use self::{
    document::{Content, Document, DocumentId, Kind},
    folder::{FileState, Folder, Scan, Watch},
};

/// Status of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusFile {
    /// Status of its documents, in order.
    pub documents: Vec<DocumentStatus>,
    /// Problems of the file that belong to no document.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// Status of one document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentStatus {
    /// Kind and name of the document.
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
    /// Remarks, such as parameters without effect.
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
    /// Reasons why records are not published as wanted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

impl StatusFile {
    /// Reads the status file of a file of documents; `None` if it is missing or unreadable.
    pub fn read(documents: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path_beside(documents)).ok()?).ok()
    }

    /// Writes the status file of a file of documents if the status has changed.
    pub fn write(&self, documents: &Path) -> io::Result<()> {
        if Self::read(documents).as_ref() == Some(self) {
            return Ok(());
        }
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        atomic::replace(&path_beside(documents), &text, Attributes::PUBLIC).map_err(|error| error.cause)?;
        Ok(())
    }

    /// Removes the status files of documents that no longer exist in a folder.
    pub fn sweep(folder: &Path) {
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

#[cfg(test)]
mod tests;
