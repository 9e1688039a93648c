//! A bpffs of a test's own, so that its pins meet nobody else's, and a fast path's
//! configuration that names it.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use dns_core::config::{HookMode, OnStop, XdpConfig};
use nix::mount::{MntFlags, umount2};

/// A folder that gets a bpffs, unmounted at the end.
pub struct Bpffs {
    /// The folder around it.
    folder: tempfile::TempDir,
}

impl Bpffs {
    /// A new one; the fast path mounts it.
    pub fn new() -> io::Result<Self> {
        let folder = tempfile::TempDir::with_prefix("bdx-bpf-")?;
        // For fast paths that are another user's.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        Ok(Self { folder })
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

    /// Links that are pinned.
    pub fn links(&self) -> Vec<PathBuf> {
        self.pinned().into_iter().filter(|path| path.to_string_lossy().contains("/links/")).collect()
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        // Nothing is mounted where no fast path got that far.
        let _ = umount2(&self.path(), MntFlags::MNT_DETACH);
    }
}

/// A configuration of the fast path: everything default but `mode`, the pins, and a
/// small map.
pub fn config(mode: HookMode, bpffs: &Bpffs) -> XdpConfig {
    XdpConfig {
        enabled: true,
        vlans: Vec::new(),
        respect_filters: Vec::new(),
        shed: true,
        // Named, and so attached without queries that arrive: most tests have no server behind.
        interfaces: Some(["lo", "srv", "late"].map(str::to_owned).into()),
        mode,
        max_names: 1000,
        lease: Duration::from_secs(10),
        bpffs: bpffs.path(),
        on_stop: OnStop::Detach,
        user: None,
        attach_socket: None,
        attach_user: None,
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
