//! The server's surroundings that faults manipulate: log disk, certificates, clock.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use fastrand::Rng;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    health::{Authority, write_files},
    server,
};

/// Size of the log disk.
const DISK: &str = "size=8m";

/// Log size in bytes at which it is truncated.
const LONG_LOG: u64 = 4 << 20;

/// Server name in the API's certificates.
const API_NAME: &str = "api.bosh-dns";

pub(crate) struct Surroundings {
    disk: Disk,
    certificates: TempDir,
    authority: Authority,
    /// Holds the wrapper script and the clock offset.
    clock: TempDir,
}

impl Surroundings {
    /// Creates the surroundings of the server in `folder`.
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        let disk = Disk::new()?;
        symlink(disk.file("log"), folder.join("log"))?;
        let (certificates, clock) = (TempDir::new()?, TempDir::new()?);
        let new = Self {
            disk,
            certificates,
            authority: Authority::new("soak")?,
            clock,
        };
        new.rotate()?;
        new.set_clock_ahead(0)?;
        let offset = new.clock.path().join("ahead");
        let script = format!(
            "#!/bin/sh\nexec unshare --time --monotonic \"$(cat {})\" -- {} \"$@\"\n",
            offset.display(),
            server::program()?.display()
        );
        fs::write(new.program(), script)?;
        fs::set_permissions(new.program(), fs::Permissions::from_mode(0o755))?;
        Ok(new)
    }

    /// Returns the command that starts the server in a new time namespace.
    pub(crate) fn program(&self) -> PathBuf {
        self.clock.path().join("server")
    }

    /// Returns the configuration that refers to the disk and the certificates.
    pub(crate) fn settings(&self) -> Value {
        let file = |name: &str| self.certificates.path().join(name);
        json!({"api": {
            "port": 53080,
            "certificate_file": file("certificate.pem"),
            "private_key_file": file("key.pem"),
            "ca_file": file("ca.pem"),
        }})
    }

    pub(crate) fn rotate(&self) -> Result<()> {
        let identity = self.authority.issue(API_NAME)?;
        write_files(
            self.certificates.path(),
            &identity,
            &self.authority.certificate,
        )
        .map(drop)
    }

    /// Installs mismatched or malformed certificates.
    pub(crate) fn spoil_certificates(&self, random: &mut Rng) -> Result<()> {
        let file = ["certificate.pem", "key.pem", "ca.pem"][random.usize(..3)];
        Ok(fs::write(
            self.certificates.path().join(file),
            "-----BEGIN NONSENSE-----\n",
        )?)
    }

    /// Sets the monotonic clock of processes started from now on `seconds` ahead.
    pub(crate) fn set_clock_ahead(&self, seconds: u32) -> Result<()> {
        Ok(fs::write(
            self.clock.path().join("ahead"),
            seconds.to_string(),
        )?)
    }

    /// Fills the log disk.
    pub(crate) fn fill_disk(&self) -> Result<()> {
        let mut filler = File::create(self.disk.file("filler"))?;
        let chunk = vec![0; 1 << 16];
        loop {
            match filler.write_all(&chunk) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(crate) fn free_disk(&self) -> Result<()> {
        Ok(fs::remove_file(self.disk.file("filler"))?)
    }

    /// Truncates the log once it is too long.
    pub(crate) fn shorten_log(&self) -> Result<()> {
        let log = OpenOptions::new().write(true).open(self.disk.file("log"))?;
        if log.metadata()?.len() > LONG_LOG {
            log.set_len(0)?;
        }
        Ok(())
    }
}

/// A small tmpfs, unmounted on drop.
struct Disk(TempDir);

impl Disk {
    fn new() -> Result<Self> {
        let folder = TempDir::new()?;
        let kind = Some("tmpfs");
        mount(kind, folder.path(), kind, MsFlags::empty(), Some(DISK))
            .context("mounting a tmpfs")?;
        Ok(Self(folder))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = umount2(self.0.path(), MntFlags::MNT_DETACH) {
            eprintln!("cannot unmount {}: {error}", self.0.path().display());
        }
    }
}
