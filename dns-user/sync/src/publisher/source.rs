//! What the publisher reads: the inventory's files with the changes by command laid over.

use std::{
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::state::{Folder, StateError};
use crate::inventory::{
    Inventory, InventoryError,
    changes::{Change, Changes},
    file::{self, FileError, RawInventory},
    nodes,
};

/// Name of the file of changes by command.
pub const CHANGES: &str = "changes.json";

/// Where the inventory is.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
#[group(required = true, multiple = false, id = "inventory_source")]
pub struct InventoryOptions {
    /// Inventory, YAML or JSON; of a folder all *.yml, *.yaml, *.json
    #[arg(long, value_name = "FILE|FOLDER")]
    pub inventory: Option<PathBuf>,
    /// Inventory in the form of /etc/hosts: an instance and an agent a line
    #[arg(long, value_name = "HOSTSFILE")]
    pub nodes: Option<PathBuf>,
}

/// Why there is no inventory.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// It makes no sense.
    #[error("{}: {source}", path.display())]
    Inventory {
        /// File or folder.
        path: PathBuf,
        /// What is wrong.
        source: InventoryError,
    },
    /// A change makes no sense.
    #[error(transparent)]
    Change(#[from] InventoryError),
    /// The changes cannot be read or written.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Files as they are on disk.
pub type Stamps = Vec<(PathBuf, Option<(SystemTime, u64)>)>;

impl InventoryOptions {
    /// The file or folder.
    fn path(&self) -> &Path {
        // clap asks for one of them.
        self.inventory.as_deref().or(self.nodes.as_deref()).unwrap_or(Path::new(""))
    }

    /// What the files say, without the changes.
    pub fn files(&self) -> Result<RawInventory, SourceError> {
        let Some(path) = &self.nodes else { return Ok(file::load(self.path())?) };
        let text = fs::read_to_string(path).map_err(|source| FileError::Io { path: path.clone(), source })?;
        nodes::read(&text).map_err(|source| SourceError::Inventory { path: path.clone(), source })
    }

    /// What there is.
    pub fn load(&self, folder: &Folder) -> Result<Inventory, SourceError> {
        let changes: Changes = folder.read(CHANGES)?.unwrap_or_default();
        Inventory::parse(changes.over(self.files()?))
            .map_err(|source| SourceError::Inventory { path: self.path().to_owned(), source })
    }

    /// Takes in a change by command; what does not make an inventory is refused.
    pub fn change(&self, folder: &Folder, change: Change) -> Result<(), SourceError> {
        let files = self.files()?;
        folder.edit(CHANGES, |changes: &mut Changes| {
            changes.settle(&files);
            changes.make(change, &files)?;
            Inventory::parse(changes.over(files))?;
            Ok(())
        })
    }

    /// How the files look: other stamps mean that they changed.
    pub fn stamps(&self, state: &Path) -> Stamps {
        let mut paths = file::files(self.path()).unwrap_or_else(|_| vec![self.path().to_owned()]);
        paths.push(state.join(CHANGES));
        let stamp = |path: &PathBuf| {
            let facts = fs::metadata(path).ok()?;
            Some((facts.modified().ok()?, std::os::unix::fs::MetadataExt::ino(&facts)))
        };
        paths.into_iter().map(|path| (path.clone(), stamp(&path))).collect()
    }
}
