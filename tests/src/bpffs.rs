//! A bpffs of a test's own, so that its pins meet nobody else's.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::mount::{MntFlags, umount2};

/// A folder that gets a bpffs, unmounted at the end.
pub struct Bpffs {
    /// The folder around it.
    folder: tempfile::TempDir,
}

impl Bpffs {
    /// A new one; the fast path mounts it.
    pub fn new() -> io::Result<Self> {
        Ok(Self { folder: tempfile::TempDir::with_prefix("bdx-bpf-")? })
    }

    /// Where pins go.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("bpf")
    }

    /// Files that are pinned, at whatever depth.
    pub fn pinned(&self) -> Vec<PathBuf> {
        // The kernel itself puts `maps.debug` and `progs.debug` there.
        files_below(&self.path()).into_iter().filter(|path| path.extension().is_none()).collect()
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        // Nothing is mounted where no fast path got that far.
        let _ = umount2(&self.path(), MntFlags::MNT_DETACH);
    }
}

/// Files below a folder.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries
        .flatten()
        .flat_map(|entry| if entry.path().is_dir() { files_below(&entry.path()) } else { vec![entry.path()] })
        .collect()
}
