//! Replaces files atomically and durably: a reader sees either the old or the new contents, also after a
//! crash.

use std::{
    fs::{self, File, Metadata, Permissions},
    io::{self, Write as _},
    os::unix::fs::{PermissionsExt as _, fchown},
    path::{Path, PathBuf},
};

/// Mode and owner of a replaced file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits.
    pub mode: u32,
    /// Owner; `None` for the process's user.
    pub user: Option<u32>,
    /// Group; `None` for the process's group.
    pub group: Option<u32>,
}

impl Attributes {
    /// Readable for the process's user only.
    pub const PRIVATE: Self = Self {
        mode: 0o600,
        user: None,
        group: None,
    };

    /// Readable for all users.
    pub const PUBLIC: Self = Self {
        mode: 0o644,
        ..Self::PRIVATE
    };
}

/// Step of a replacement that failed, with its cause.
#[derive(Debug, thiserror::Error)]
#[error("{}: {cause}; the file stays unchanged", path.display())]
pub struct ReplaceError {
    path: PathBuf,
    /// The system's error.
    pub cause: io::Error,
}

/// Replaces the file at `path`, or the target of a symbolic link, and returns its metadata.
///
/// The new contents are written to a file beside it, which never has more permissive attributes; after a
/// kill [`sweep`] removes that file.
pub fn replace(
    path: &Path,
    contents: &[u8],
    attributes: Attributes,
) -> Result<Metadata, ReplaceError> {
    try_replace(path, contents, attributes).map_err(|cause| ReplaceError {
        path: path.to_owned(),
        cause,
    })
}

fn try_replace(path: &Path, contents: &[u8], attributes: Attributes) -> io::Result<Metadata> {
    let path = target(path)?;
    let (folder, prefix) = place(&path)?;
    // Removed on every error below.
    let mut beside = tempfile::Builder::new()
        .prefix(&prefix)
        .suffix("")
        .tempfile_in(folder)?;
    beside.write_all(contents)?;
    let file = beside.as_file();
    let Attributes { mode, user, group } = attributes;
    if user.is_some() || group.is_some() {
        fchown(file, user, group)?;
    }
    file.set_permissions(Permissions::from_mode(mode))?;
    file.sync_all()?;
    let facts = file.metadata()?;
    beside.persist(&path).map_err(|error| error.error)?;
    File::open(folder)?.sync_all()?;
    Ok(facts)
}

/// Removes what killed writers of a file left beside it. Only the file's single writer may call this.
pub fn sweep(path: &Path) {
    let Ok(path) = target(path) else { return };
    let Ok((folder, prefix)) = place(&path) else {
        return;
    };
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            // The next start tries again.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Follows symbolic links, also to a missing file.
fn target(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    // As many links as the kernel follows (path_resolution(7)).
    for _ in 0..40 {
        match fs::read_link(&path) {
            Ok(link) => path = path.parent().unwrap_or(Path::new("")).join(link),
            // Not a link, or missing.
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// Returns the folder of a file and the prefix of its temporary names.
fn place(path: &Path) -> io::Result<(&Path, String)> {
    let name = path
        .file_name()
        .ok_or(io::ErrorKind::InvalidInput)?
        .to_string_lossy();
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    Ok((folder.unwrap_or(Path::new(".")), format!(".{name}.part-")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn replacement_sets_mode_and_follows_links() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (
            folder.path().join("records.json"),
            folder.path().join("link"),
        );
        symlink("records.json", &link).unwrap();
        for contents in [b"one".as_slice(), b"two"] {
            let facts = replace(
                &link,
                contents,
                Attributes {
                    mode: 0o640,
                    ..Attributes::PRIVATE
                },
            )
            .unwrap();
            assert_eq!(
                (fs::read(&path).unwrap(), facts.len()),
                (contents.to_vec(), 3)
            );
        }
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
            0o640
        );
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        fs::write(folder.path().join(".records.json.part-left"), "half").unwrap();
        sweep(&link);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn missing_folder_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let error = replace(&folder.path().join("no/file"), b"", Attributes::PRIVATE).unwrap_err();
        assert_eq!(error.cause.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().contains("no/file"), "{error}");
        let circle = folder.path().join("circle");
        symlink("circle", &circle).unwrap();
        assert!(replace(&circle, b"", Attributes::PRIVATE).is_err());
    }
}
