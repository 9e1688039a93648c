//! Atomic file replacement: written to a temporary file, synced, renamed, folder synced.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

/// Mode and owner of the new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// Mode, such as `0o640`.
    pub mode: u32,
    /// Owner; `None` keeps the process's own.
    pub user: Option<u32>,
    /// Group; `None` keeps the process's own.
    pub group: Option<u32>,
}

impl Permissions {
    /// Readable by the process's user only.
    pub const PRIVATE: Self = Self { mode: 0o600, user: None, group: None };
}

/// A failed replacement; the old file is unchanged.
#[derive(Debug, thiserror::Error)]
#[error("{}: {cause}; the file stays unchanged", path.display())]
pub struct ReplaceError {
    path: PathBuf,
    /// Error from the operating system.
    cause: io::Error,
}

/// Replaces a file atomically: at any moment, and after a crash, it is the old or the new one. If
/// the path is a symbolic link, its target is replaced and the link stays. Returns the metadata of the
/// new file, which another program may already have changed or removed.
pub fn replace(path: &Path, bytes: &[u8], permissions: Permissions) -> Result<Metadata, ReplaceError> {
    target(path)
        .and_then(|target| try_replace(&target, bytes, permissions))
        .map_err(|cause| ReplaceError { path: path.to_owned(), cause })
}

/// Resolves symbolic links at the end of a path; the last target need not exist.
fn target(path: &Path) -> io::Result<PathBuf> {
    const MOST_LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&path) {
            Ok(next) => path = path.parent().unwrap_or(Path::new(".")).join(next),
            // Not a link, or missing.
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::from_raw_os_error(nix::libc::ELOOP))
}

/// Reads a regular file of at most `longest` bytes. A FIFO or a device is an error; this never
/// blocks.
pub fn read(path: &Path, longest: u64) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
    let facts = file.metadata()?;
    if !facts.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    if facts.len() > longest {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("longer than {longest} bytes")));
    }
    let mut bytes = Vec::with_capacity(facts.len() as usize);
    file.take(longest.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > longest {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("longer than {longest} bytes")));
    }
    Ok(bytes)
}

fn try_replace(path: &Path, bytes: &[u8], permissions: Permissions) -> io::Result<Metadata> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    // Dropping it removes the file on every error below. After a kill, [`sweep`] finds it by name.
    let mut beside = tempfile::Builder::new().prefix(&temporary(&name)).suffix("").tempfile_in(folder)?;
    beside.write_all(bytes)?;
    let file = beside.as_file();
    let Permissions { mode, user, group } = permissions;
    if user.is_some() || group.is_some() {
        fchown(file, user, group)?;
    }
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.sync_all()?;
    let facts = file.metadata()?;
    beside.persist(path).map_err(|error| error.error)?;
    File::open(folder)?.sync_all()?;
    Ok(facts)
}

/// Removes temporary files of killed writers. Only a file's single writer may call this.
pub fn sweep(path: &Path) {
    let Ok(path) = target(path) else { return };
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

/// Returns the prefix of a file's temporary names.
fn temporary(name: &str) -> String {
    format!(".{name}.bosh-dns-sync-")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn replacement_sets_the_mode() {
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

    #[test]
    fn symlinks_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (link, real) = (folder.path().join("records.json"), folder.path().join("real"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink("real", &link).unwrap();
        replace(&link, b"new", Permissions::PRIVATE).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"new");
        let circle = folder.path().join("circle");
        std::os::unix::fs::symlink("circle", &circle).unwrap();
        assert!(replace(&circle, b"x", Permissions::PRIVATE).is_err());
    }

    #[test]
    fn fifos_never_block() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(read(&fifo, 10).unwrap_err().to_string(), "not a regular file");
        let file = folder.path().join("file");
        fs::write(&file, "0123456789").unwrap();
        assert_eq!(read(&file, 10).unwrap(), b"0123456789");
        assert!(read(&file, 9).is_err());
    }
}
