//! The publisher's input: the inventory's files with the changes made by command on top.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context, anyhow};
use dns_kit::files::bounded;
use serde::{Deserialize, Serialize};

use super::state::{Folder, StateError};
use crate::inventory::{
    Inventory,
    changes::{Change, Changes, Settled},
    file::{self, RawInventory},
};

/// Name of the file with the changes made by command.
pub(crate) const CHANGES: &str = "changes.json";

#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
#[group(required = true, multiple = false, id = "inventory_source")]
pub(crate) struct InventoryOptions {
    /// Inventory, YAML or JSON: a file, or a folder of *.yml, *.yaml and *.json
    #[arg(long, value_name = "FILE|FOLDER")]
    pub inventory: Option<PathBuf>,
    /// Inventory in the format of /etc/hosts: an instance and an agent per line
    #[arg(long, value_name = "HOSTSFILE")]
    pub nodes: Option<PathBuf>,
}

/// Name of the file with the stamps of the files that were read last.
pub(super) const FILES: &str = "files.json";

/// Identity of a file's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileStamp {
    modified: SystemTime,
    inode: u64,
    /// Birth time, where the file system keeps it: the number of an inode is used again after two replacements.
    born: Option<SystemTime>,
    length: u64,
}

impl FileStamp {
    /// Returns whether both are stamps of the same file, whose content may differ.
    fn is_same_file(&self, other: &Self) -> bool {
        self.inode == other.inode && self.born == other.born
    }
}

/// Identity of the files' content: path and, if it exists, its stamp.
pub(crate) type Stamps = Vec<(PathBuf, Option<FileStamp>)>;

impl InventoryOptions {
    fn path(&self) -> &Path {
        // clap requires one of them.
        self.inventory
            .as_deref()
            .or(self.nodes.as_deref())
            .unwrap_or(Path::new(""))
    }

    /// Reads the files, without the changes made by command.
    pub(crate) fn files(&self) -> anyhow::Result<RawInventory> {
        let Some(path) = &self.nodes else {
            return file::load(self.path());
        };
        let bytes = bounded::read(path).with_context(|| path.display().to_string())?;
        let read = file::read_nodes(&String::from_utf8_lossy(&bytes))
            .map_err(|error| anyhow!("{}: {error}", path.display()))?;
        // Not an error: a fleet may be empty, and a hosts file always has lines.
        if read.instances().next().is_none() {
            tracing::warn!(
                file = %path.display(),
                "the hosts file has no address that other machines can reach; the records are empty: add the \
                 machines' addresses"
            );
        }
        Ok(read)
    }

    /// Reads the inventory. Changes that no longer apply are removed from the folder and logged.
    pub(crate) fn load(&self, folder: &Folder) -> anyhow::Result<Inventory> {
        let files = self.files()?;
        let changes: Changes = folder.read(CHANGES)?.unwrap_or_default();
        // Settled on a copy first: `edit` takes a lock and writes, which most reads need not.
        if !changes.clone().settle(&files).is_empty() {
            let dropped = folder.edit(CHANGES, |changes: &mut Changes| {
                for (id, reason) in changes.settle(&files) {
                    match reason {
                        Settled::Adopted => {
                            tracing::info!(id, "a change made by command is now in the inventory files")
                        }
                        Settled::Superseded => tracing::warn!(
                            id,
                            "the inventory files changed this instance after a command did; the files take \
                             precedence"
                        ),
                    }
                }
                Ok::<(), StateError>(())
            });
            // Such changes are ignored below in any case.
            if let Err(error) = dropped {
                tracing::warn!(
                    "cannot remove changes that the files now contain; trying again at the next change: \
                     {error}"
                );
            }
        }
        self.parse(&changes, files)
    }

    pub(crate) fn parse(
        &self,
        changes: &Changes,
        files: RawInventory,
    ) -> anyhow::Result<Inventory> {
        Inventory::parse(changes.over(files))
            .map_err(|error| anyhow!("{}: {error}", self.path().display()))
    }

    /// Adds a change made by command. A change that makes the inventory invalid is rejected.
    pub(crate) fn change(&self, folder: &Folder, change: Change) -> anyhow::Result<()> {
        let files = self.files()?;
        folder.edit(CHANGES, |changes: &mut Changes| {
            // Before the new change, which may concern an instance that the files changed.
            changes.settle(&files);
            changes.make(change, &files)?;
            // Before the file is written: a change that is accepted must be possible.
            Inventory::parse(changes.over(files))?;
            Ok(())
        })
    }

    pub(crate) fn stamps(&self) -> Stamps {
        // The error of a missing folder is reported by the read, which these stamps cause.
        let paths = file::files(self.path()).unwrap_or_else(|_| vec![self.path().to_owned()]);
        stamps(paths)
    }
}

pub(super) fn stamps(paths: Vec<PathBuf>) -> Stamps {
    let mut stamps = Stamps::default();
    for path in paths {
        let stamp = stamp(&path);
        stamps.push((path, stamp));
    }
    stamps
}

fn stamp(path: &Path) -> Option<FileStamp> {
    let facts = fs::metadata(path).ok()?;
    Some(FileStamp {
        modified: facts.modified().ok()?,
        inode: facts.ino(),
        // Not every file system has it (statx(2), STATX_BTIME).
        born: facts.created().ok(),
        length: facts.len(),
    })
}

/// Decides when changed files are complete: after they have been unchanged for a while. Pure.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    read: Option<Stamps>,
    /// Stamps that an earlier process read last.
    earlier: Option<Stamps>,
    /// The last seen stamps, and the time at which they were first seen.
    seen: Option<(Stamps, u64)>,
}

/// Time without a change after which a file counts as complete, in milliseconds.
pub(super) const QUIET_MS: u64 = 200;

/// Time without a change after which missing instances count as removed, in milliseconds: a writer may
/// pause inside a file.
pub(super) const REMOVAL_QUIET_MS: u64 = 5000;

impl Quiet {
    /// Begins with what an earlier process read last.
    pub(super) fn after(earlier: Option<Stamps>) -> Self {
        Self {
            earlier,
            ..Self::default()
        }
    }

    /// Records the stamps at `now`. Returns for how long they have been the same, in milliseconds.
    pub(super) fn unchanged_ms(&mut self, stamps: &Stamps, now: u64) -> u64 {
        match &self.seen {
            Some((seen, since)) if seen == stamps => now - since,
            _ => {
                self.seen = Some((stamps.clone(), now));
                0
            }
        }
    }

    /// Returns whether files with these stamps, which are complete, should be read: other ones were read last. They
    /// count as read then.
    pub(super) fn take(&mut self, stamps: &Stamps) -> bool {
        let is_news = self.read.as_ref() != Some(stamps);
        if is_news {
            self.read = Some(stamps.clone());
        }
        is_news
    }

    /// Returns what was read last.
    pub(super) fn read(&self) -> Option<&Stamps> {
        self.read.as_ref()
    }

    /// Returns the changed files since the last read; `None` if there was none, or if a file was written in place.
    ///
    /// A changed file that is another file than before was put there by a rename. The times of the rename and of the
    /// last write do not say so: both may fall into one tick of the kernel's clock (4 ms with CONFIG_HZ=250).
    pub(super) fn replaced<'a>(&self, stamps: &'a Stamps) -> Option<Vec<&'a Path>> {
        let read = self.read.as_ref().or(self.earlier.as_ref())?;
        let mut replaced = Vec::new();
        for (path, stamp) in stamps {
            let known = read.iter().find(|(known, _)| known == path);
            let before = known.and_then(|(_, before)| before.as_ref());
            match (before, stamp) {
                (Some(before), Some(now)) if before == now => {}
                // Written in place, so its writer may have paused in the middle.
                (Some(before), Some(now)) if before.is_same_file(now) => return None,
                (None, None) => {}
                _ => replaced.push(path.as_path()),
            }
        }
        Some(replaced)
    }
}

/// Returns whether a file's inode changed later than its content, as a rename does: it is complete.
pub(super) fn is_renamed(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|facts| {
        (facts.ctime(), facts.ctime_nsec()) > (facts.mtime(), facts.mtime_nsec())
    })
}

/// Returns whether the newest file last changed at least `age` ago by the machine's clock.
pub(super) fn is_old(stamps: &Stamps, age: Duration) -> bool {
    stamps.iter().all(|(_, stamp)| match stamp {
        Some(stamp) => stamp.modified.elapsed().is_ok_and(|elapsed| elapsed >= age),
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the stamps of one file.
    fn file_stamp(inode: u64, length: u64) -> Stamps {
        let stamp = FileStamp {
            modified: SystemTime::UNIX_EPOCH,
            inode,
            born: None,
            length,
        };
        vec![(PathBuf::from("f"), Some(stamp))]
    }

    #[test]
    fn growing_file_is_not_read() {
        let stamp = |length: u64| file_stamp(1, length);
        let mut quiet = Quiet::default();
        for step in 0..20 {
            assert_eq!(quiet.unchanged_ms(&stamp(step), step * 100), 0);
        }
        assert_eq!(quiet.unchanged_ms(&stamp(19), 2000), 100);
        assert!(quiet.take(&stamp(19)));
        assert_eq!(quiet.unchanged_ms(&stamp(19), 9000), 7100);
        assert!(!quiet.take(&stamp(19)));
        assert!(quiet.take(&stamp(20)));
    }

    #[test]
    fn renamed_file_is_complete() {
        let mut quiet = Quiet::default();
        let first = file_stamp(1, 1);
        let second = file_stamp(2, 1);
        assert_eq!(quiet.replaced(&first), None, "nothing was read before");
        quiet.take(&first);
        assert_eq!(quiet.replaced(&second), Some(vec![Path::new("f")]));
        assert_eq!(quiet.replaced(&first), Some(vec![]));
        assert_eq!(quiet.replaced(&file_stamp(1, 2)), None, "written in place");
        let quiet = Quiet::after(Some(first.clone()));
        assert_eq!(quiet.replaced(&second), Some(vec![Path::new("f")]));
        // The second replacement has the number of the first file's inode.
        let mut again = first;
        let stamp = again[0].1.as_mut().unwrap();
        (stamp.born, stamp.length) = (Some(SystemTime::UNIX_EPOCH), 2);
        assert_eq!(quiet.replaced(&again), Some(vec![Path::new("f")]));
    }

    #[test]
    fn missing_files_stay_missing() {
        let missing = vec![(PathBuf::from("f"), None)];
        let mut quiet = Quiet::default();
        assert_eq!(quiet.read(), None);
        assert!(quiet.take(&missing));
        assert_eq!(quiet.read(), Some(&missing));
        assert_eq!(quiet.replaced(&missing), Some(vec![]));
        let f = Path::new("f");
        assert_eq!(quiet.replaced(&file_stamp(1, 1)), Some(vec![f]));
        let quiet = Quiet::after(Some(file_stamp(1, 1)));
        assert_eq!(quiet.replaced(&missing), Some(vec![f]));
    }
}
