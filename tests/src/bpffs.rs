//! A private bpffs per test, so that pins of different tests do not collide, and a fast path
//! configuration that uses it.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use dns_core::config::{HookMode, OnStop, XdpConfig};
use nix::mount::{MntFlags, umount2};

/// A folder for a bpffs, unmounted on drop.
#[derive(Debug)]
pub struct Bpffs {
    folder: tempfile::TempDir,
}

impl Bpffs {
    /// Creates the folder; the fast path mounts the bpffs.
    pub fn new() -> io::Result<Self> {
        let folder = tempfile::TempDir::with_prefix("bdx-bpf-")?;
        // Lets a fast path of another user enter.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        Ok(Self { folder })
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("bpf")
    }

    /// Returns all pinned files, recursively.
    pub fn pinned(&self) -> Vec<PathBuf> {
        // The kernel itself creates `maps.debug` and `progs.debug`.
        files_below(&self.path())
            .into_iter()
            .filter(|path| path.extension().is_none())
            .collect()
    }

    /// Returns the pinned links.
    pub fn links(&self) -> Vec<PathBuf> {
        self.pinned()
            .into_iter()
            .filter(|path| path.to_string_lossy().contains("/links/"))
            .collect()
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        // Nothing is mounted if no fast path got that far.
        let _ = umount2(&self.path(), MntFlags::MNT_DETACH);
    }
}

/// Returns a fast path configuration with defaults except for `mode`, the pins and a small map.
pub fn config(mode: HookMode, bpffs: &Bpffs) -> XdpConfig {
    XdpConfig {
        enabled: true,
        vlans: Vec::new(),
        respect_filters: Vec::new(),
        shed: true,
        // Named, so that interfaces are attached before any query arrives: most tests have no
        // server behind.
        interfaces: Some(["lo", "srv", "late"].map(str::to_owned).into()),
        mode,
        max_names: 1000,
        cache_entries: 1000,
        cache_bytes: 1 << 20,
        other_types: false,
        lease: Duration::from_secs(10),
        bpffs: bpffs.path(),
        on_stop: OnStop::Detach,
        user: None,
        attach_socket: None,
        attach_user: None,
    }
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    entries
        .flatten()
        .flat_map(|entry| {
            if entry.path().is_dir() {
                files_below(&entry.path())
            } else {
                vec![entry.path()]
            }
        })
        .collect()
}
