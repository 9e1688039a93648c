//! Files that are always one whole version: written beside, synced, renamed, folder synced.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{PermissionsExt, fchown},
    path::{Path, PathBuf},
};

/// Mode and owner of a file that is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// Mode, such as `0o640`.
    pub mode: u32,
    /// User, unless it is ours.
    pub user: Option<u32>,
    /// Group, unless it is ours.
    pub group: Option<u32>,
}

impl Permissions {
    /// For us alone.
    pub const PRIVATE: Self = Self { mode: 0o600, user: None, group: None };
}

/// Why a file could not be replaced; the old one is as it was.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}; the file stays as it was", path.display())]
pub struct ReplaceError {
    /// The file.
    path: PathBuf,
    /// What the system says.
    source: io::Error,
}

/// Replaces a file: at any moment, and after a crash, it is the old one or the new one.
pub fn replace(path: &Path, bytes: &[u8], permissions: Permissions) -> Result<(), ReplaceError> {
    try_replace(path, bytes, permissions).map_err(|source| ReplaceError { path: path.to_owned(), source })
}

/// As [`replace`], with the bare error.
fn try_replace(path: &Path, bytes: &[u8], permissions: Permissions) -> io::Result<()> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    // Removed again whatever fails below. A kill leaves it; its name says whose it is,
    // and [`sweep`] takes it away.
    let mut beside = tempfile::Builder::new().prefix(&temporary(&name)).suffix("").tempfile_in(folder)?;
    beside.write_all(bytes)?;
    let file = beside.as_file();
    let Permissions { mode, user, group } = permissions;
    if user.is_some() || group.is_some() {
        fchown(file, user, group)?;
    }
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.sync_all()?;
    beside.persist(path).map_err(|error| error.error)?;
    File::open(folder)?.sync_all()
}

/// Removes what killed writers of a file left beside it. Only for its one writer.
pub fn sweep(path: &Path) {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return };
    let prefix = temporary(&name.to_string_lossy());
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            // The next start tries again.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Start of the names beside a file.
fn temporary(name: &str) -> String {
    format!(".{name}.bosh-dns-sync-")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_file_is_replaced_with_its_mode_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        let permissions = Permissions { mode: 0o640, ..Permissions::PRIVATE };
        for bytes in [b"one".as_slice(), b"two"] {
            replace(&path, bytes, permissions).unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        fs::write(folder.path().join(".records.json.bosh-dns-sync-left"), "half").unwrap();
        sweep(&path);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let error = replace(&folder.path().join("no/records.json"), b"x", permissions).unwrap_err();
        assert!(error.to_string().contains("no/records.json"), "{error}");
    }
}
