//! Replaces and removes files atomically and durably: a reader sees either the old or the new contents, also
//! after a crash.
//!
//! The one mechanism for "written, synced, renamed, swept", for every file that a program keeps:
//!
//! 1. [`replace`] (a path that an operator named) or [`replace_own`] (a name that the program made) writes a
//!    hidden file beside the target, syncs it, renames it over the target, and syncs the folder. When it
//!    returns, the change survives a kill and a power failure.
//! 2. [`remove`] removes a file as durably.
//! 3. [`read_folder`] lists a folder without hidden files. A reader that has its own list asks
//!    [`is_unfinished`] for each name.
//! 4. At its start, a writer of a file calls [`sweep`], one of a whole folder [`sweep_folder`]: they remove what
//!    a kill left between steps of 1. Files of living writers are locked, and stay.
//!
//! In a folder that another user can write to, that user may plant a symbolic link under the name that is
//! written next (`protected_symlinks` helps in sticky folders only, and may be off). The hidden name is random
//! and never opened if it exists. Links at the target are followed only if they are root's or the process's
//! own ([`replace`]), or never ([`replace_own`]).

use std::{
    ffi::OsStr,
    fs::{self, File, Metadata, OpenOptions, Permissions, TryLockError},
    io::{self, Write as _},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    },
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

/// Mode and owner of a replaced file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits of the file.
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
#[error("{}: {cause}; {}", path.display(), state(*renamed))]
pub struct ReplaceError {
    path: PathBuf,
    /// The system's error.
    pub cause: io::Error,
    /// Whether readers see the new contents already, which may not survive a power failure.
    pub renamed: bool,
}

fn state(renamed: bool) -> &'static str {
    if renamed {
        "the file is new, but may be the old one after a power failure"
    } else {
        "the file stays unchanged"
    }
}

/// Replaces the file at `path`, which an operator named, or the target of a symbolic link; returns its metadata.
///
/// Only links of root and of the process's user are followed. The new contents are written to a file beside
/// the target, which never has more permissive attributes; after a kill [`sweep`] removes that file.
pub fn replace(
    path: &Path,
    contents: &[u8],
    attributes: Attributes,
) -> Result<Metadata, ReplaceError> {
    match target(path) {
        Ok(target) => replace_own(&target, contents, attributes),
        Err(cause) => Err(ReplaceError {
            path: path.to_owned(),
            cause,
            renamed: false,
        }),
    }
}

/// Replaces the file at `path`, a name that the program itself made; returns its metadata.
///
/// Works as [`replace`] does, but follows no symbolic link: one that was planted there is replaced.
pub fn replace_own(
    path: &Path,
    contents: &[u8],
    attributes: Attributes,
) -> Result<Metadata, ReplaceError> {
    let mut renamed = false;
    try_replace(path, contents, attributes, &mut renamed).map_err(|cause| ReplaceError {
        path: path.to_owned(),
        cause,
        renamed,
    })
}

fn try_replace(
    path: &Path,
    contents: &[u8],
    attributes: Attributes,
    renamed: &mut bool,
) -> io::Result<Metadata> {
    let (folder, name) = parts(path)?;
    // Opened first: afterwards only the disk itself can fail.
    let opened = File::open(folder)?;
    // Removed on every error below.
    let mut beside = create_unfinished(folder, name)?;
    beside.write_all(contents)?;
    let file = beside.as_file();
    let Attributes { mode, user, group } = attributes;
    if user.is_some() || group.is_some() {
        fchown(file, user, group)?;
    }
    file.set_permissions(Permissions::from_mode(mode))?;
    file.sync_all()?;
    let facts = file.metadata()?;
    beside.persist(path).map_err(|error| error.error)?;
    *renamed = true;
    opened.sync_all()?;
    Ok(facts)
}

/// Removes one of our files durably; returns whether there was one. Of a symbolic link, the link is removed.
pub fn remove(path: &Path) -> io::Result<bool> {
    let (folder, _) = parts(path)?;
    let opened = File::open(folder);
    match fs::remove_file(path) {
        Ok(()) => opened?.sync_all().map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

//----------- Unfinished files -----------------------------------------------

/// Between the name of the target and the random letters of an unfinished file.
const UNFINISHED: &str = ".part-";

/// Number of random letters at the end of an unfinished file's name.
pub(crate) const RANDOM_LETTERS: usize = 6;

/// Creates an unfinished file, which is locked until its writer ends, so that no sweep removes it.
fn create_unfinished(folder: &Path, name: &OsStr) -> io::Result<NamedTempFile> {
    loop {
        // Created with O_EXCL, which follows no link.
        let unfinished = tempfile::Builder::new()
            .prefix(&prefix(name))
            .rand_bytes(RANDOM_LETTERS)
            .tempfile_in(folder)?;
        // A file system without locks has no second writer either: its sweeps come before its writes.
        let _ = unfinished.as_file().lock();
        // A sweep that came between the two calls held the lock while it removed the file.
        if unfinished.as_file().metadata()?.nlink() > 0 {
            return Ok(unfinished);
        }
    }
}

/// Returns whether a name belongs to an unfinished file, which must never be read as data.
pub fn is_unfinished(name: &OsStr) -> bool {
    target_of(name).is_some()
}

/// Returns the name of the file that an unfinished file would have replaced.
fn target_of(name: &OsStr) -> Option<&[u8]> {
    let hidden = name.as_bytes().strip_prefix(b".")?;
    let (rest, letters) = hidden.split_at_checked(hidden.len().checked_sub(RANDOM_LETTERS)?)?;
    let target = rest.strip_suffix(UNFINISHED.as_bytes())?;
    let is_ours = !target.is_empty() && letters.iter().all(u8::is_ascii_alphanumeric);
    is_ours.then_some(target)
}

/// Returns the paths in a folder, sorted, without hidden and therefore without unfinished files.
pub fn read_folder(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_name().as_bytes().starts_with(b".") {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// Removes what killed writers of a file left beside it.
pub fn sweep(path: &Path) {
    let Ok(path) = target(path) else { return };
    let Ok((folder, name)) = parts(&path) else {
        return;
    };
    sweep_where(folder, |target| target == name.as_bytes());
}

/// Removes what killed writers of any file of a folder left in it.
pub fn sweep_folder(folder: &Path) {
    sweep_where(folder, |_| true);
}

/// Removes what killed writers left in a folder of the files whose names are ours: for a folder to which other programs
/// write in the same way.
pub fn sweep_where(folder: &Path, is_ours: impl Fn(&[u8]) -> bool) {
    // A missing folder has no leftovers. Anything else that prevents reading or removing them fails the next
    // replacement as well, with an error; leftovers themselves are never read.
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    let mut removed = 0_usize;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(target) = target_of(&name) else {
            continue;
        };
        if !is_ours(target) {
            continue;
        }
        // Neither a link nor a FIFO, which another user planted, is opened; both are removed.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(entry.path());
        // Held until the file is removed.
        let lock = file.as_ref().map(File::try_lock);
        if matches!(lock, Ok(Err(TryLockError::WouldBlock))) {
            continue;
        }
        match fs::remove_file(entry.path()) {
            Ok(()) => removed += 1,
            // Its writer finished in between.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(
                "{}: {error}; the unfinished file of a killed writer stays, and is not read; remove it",
                entry.path().display()
            ),
        }
    }
    if removed > 0 {
        tracing::info!(
            folder = %folder.display(),
            removed,
            "unfinished files of a killed writer removed"
        );
    }
}

/// Follows symbolic links, also to a missing file. Refuses links of users other than root and our own.
fn target(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    // As many links as the kernel follows (path_resolution(7)).
    for _ in 0..40 {
        let link = match fs::symlink_metadata(&path) {
            Ok(found) if found.is_symlink() => found,
            // Not a link, or missing.
            _ => return Ok(path),
        };
        // A link of another user would let them choose which of our files is overwritten.
        if link.uid() != 0 && link.uid() != nix::unistd::geteuid().as_raw() {
            let problem = format!(
                "it is a symbolic link of user {}, which is not followed; remove it, or create it as root",
                link.uid()
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
        }
        let link = fs::read_link(&path)?;
        path = path.parent().unwrap_or(Path::new("")).join(link);
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// Returns the folder of a file, and its name.
pub(crate) fn parts(path: &Path) -> io::Result<(&Path, &OsStr)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => Ok((folder, name)),
        _ => Ok((Path::new("."), name)),
    }
}

/// Returns the beginning of the unfinished files' names.
pub(crate) fn prefix(name: &OsStr) -> std::ffi::OsString {
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(name);
    prefix.push(UNFINISHED);
    prefix
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, sync::Mutex};

    use super::*;

    /// Links of root are followed by any user, and those of other users by none.
    #[test]
    fn links_of_root_and_own_links_are_followed() {
        const USER: u32 = 65_534;
        if !test_support::requirements::root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let link = |name: &str, owner: u32| {
            let path = folder.path().join(name);
            symlink("records.json", &path).unwrap();
            std::os::unix::fs::lchown(&path, Some(owner), None).unwrap();
            path
        };
        let links = [link("root", 0), link("own", USER), link("other", 1)];
        let permissions = Permissions::from_mode(0o755);
        fs::set_permissions(folder.path(), permissions).unwrap();
        let follows = |links: &[PathBuf; 3]| links.each_ref().map(|link| target(link).is_ok());
        let as_user = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                // SAFETY: a plain system call, which, unlike the C library's function, concerns this thread only.
                let changed = unsafe { libc::syscall(libc::SYS_setresuid, USER, USER, USER) };
                assert_eq!(changed, 0);
                follows(&links)
            });
            other.join().unwrap()
        });
        assert_eq!(as_user, [true, true, false]);
        assert_eq!(follows(&links), [true, false, false]);
    }

    #[test]
    fn replacement_sets_mode_and_follows_links() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        let link = folder.path().join("link");
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
        fs::write(folder.path().join(".records.json.part-aB3xY9"), "half").unwrap();
        sweep(&link);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn leftovers_are_never_listed_and_swept() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let kept = [
            "b.json",
            "a.json",
            ".hidden",
            ".part-aaaaaa",
            ".b.json.part-short",
            "b.json.part-aaaaaa",
        ];
        for name in kept {
            fs::write(file(name), "data").unwrap();
        }
        for name in [".b.json.part-aaaaaa", ".b.json.part-aaaaaa.part-bbbbbb"] {
            fs::write(file(name), "half").unwrap();
            assert!(is_unfinished(OsStr::new(name)), "{name}");
        }
        assert_eq!(
            read_folder(folder.path()).unwrap(),
            [file("a.json"), file("b.json"), file("b.json.part-aaaaaa")]
        );
        // Of one file, whose name is the beginning of another's.
        sweep(&file("b.json"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 7);
        sweep_folder(folder.path());
        for name in kept {
            assert!(file(name).exists(), "{name}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), kept.len());
        sweep_folder(&file("missing"));
        assert!(remove(&file("a.json")).unwrap() && !remove(&file("a.json")).unwrap());
    }

    #[test]
    fn living_writer_keeps_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let writing = create_unfinished(folder.path(), OsStr::new("a~b.json")).unwrap();
        assert!(is_unfinished(writing.path().file_name().unwrap()));
        assert!(read_folder(folder.path()).unwrap().is_empty());
        sweep_folder(folder.path());
        assert!(writing.path().exists());
        // A kill leaves the file without the lock.
        let (file, left) = writing.keep().unwrap();
        drop(file);
        sweep_folder(folder.path());
        assert!(!left.exists());
        // Sweeps at any moment of a replacement.
        let path = folder.path().join("a");
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for number in 0..300_u32 {
                    replace_own(&path, &number.to_le_bytes(), Attributes::PRIVATE).unwrap();
                }
            });
            while !writer.is_finished() {
                sweep_folder(folder.path());
            }
        });
        assert_eq!(fs::read(&path).unwrap(), 299_u32.to_le_bytes());
    }

    #[test]
    fn planted_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        let link = folder.path().join("link");
        fs::write(&precious, "root's").unwrap();
        symlink(&precious, &link).unwrap();
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::lchown(&link, Some(65_534), None).unwrap();
            let error = replace(&link, b"new", Attributes::PUBLIC).unwrap_err();
            assert!(error.to_string().contains("user 65534"), "{error}");
        }
        replace_own(&link, b"new", Attributes::PUBLIC).unwrap();
        assert_eq!(fs::read(&precious).unwrap(), b"root's");
        assert!(fs::symlink_metadata(&link).unwrap().is_file());
        assert_eq!(fs::read(&link).unwrap(), b"new");
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

    #[test]
    fn names_of_unfinished_files_are_told_from_others() {
        for (name, target) in [
            (".a.part-abc123", Some("a")),
            ("..a.part-abc123", Some(".a")),
            (".part-x.part-ABCdef", Some("part-x")),
            ("a.part-abc123", None),
            (".a.part-abc12", None),
            (".a.part-abc1234", None),
            (".a.part-abc12-", None),
            (".a-part-abc123", None),
            (".part-abc123", None),
            (".", None),
            ("", None),
        ] {
            let found = target_of(OsStr::new(name));
            assert_eq!(found, target.map(str::as_bytes), "{name}");
            assert_eq!(is_unfinished(OsStr::new(name)), target.is_some());
        }
        for (path, folder) in [("/f/a", "/f"), ("f/a", "f"), ("a", "."), ("/a", "/")] {
            assert_eq!(
                parts(Path::new(path)).unwrap(),
                (Path::new(folder), OsStr::new("a"))
            );
        }
        assert!(parts(Path::new("/")).is_err() && parts(Path::new("f/..")).is_err());
        let folder = tempfile::tempdir().unwrap();
        for name in ["b", "a", ".hidden"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(
            read_folder(folder.path()).unwrap(),
            ["a", "b"].map(|name| folder.path().join(name))
        );
        assert!(
            remove(&folder.path().join("a")).unwrap() && !remove(&folder.path().join("a")).unwrap()
        );
        let error = |renamed| ReplaceError {
            path: "/f".into(),
            cause: io::ErrorKind::StorageFull.into(),
            renamed,
        };
        assert!(
            error(true)
                .to_string()
                .ends_with("may be the old one after a power failure")
        );
        assert!(
            error(false)
                .to_string()
                .ends_with("the file stays unchanged")
        );
    }

    #[test]
    fn writer_that_finishes_meanwhile_is_no_problem() {
        let folder = tempfile::tempdir().unwrap();
        let logs = NamedTempFile::new().unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(Mutex::new(logs.reopen().unwrap()))
            .finish();
        let letters = "a".repeat(RANDOM_LETTERS);
        let unfinished = folder
            .path()
            .join(format!(".records.json{UNFINISHED}{letters}"));
        tracing::subscriber::with_default(subscriber, || {
            fs::write(&unfinished, "").unwrap();
            sweep_where(folder.path(), |name| {
                fs::remove_file(&unfinished).unwrap();
                name == b"records.json"
            });
            assert_eq!(fs::read_to_string(logs.path()).unwrap(), "");
            fs::write(&unfinished, "").unwrap();
            sweep_where(folder.path(), |_| false);
            assert!(unfinished.exists());
            sweep_where(folder.path(), |_| true);
        });
        assert!(!unfinished.exists());
        let log = fs::read_to_string(logs.path()).unwrap();
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(log.contains("unfinished files of a killed writer removed"));
    }

    #[test]
    fn files_have_the_requested_owner() {
        assert_eq!(
            [Attributes::PRIVATE.mode, Attributes::PUBLIC.mode],
            [0o600, 0o644]
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let own = (
            nix::unistd::geteuid().as_raw(),
            nix::unistd::getegid().as_raw(),
        );
        let mut cases = vec![(None, None, own)];
        if test_support::requirements::root() {
            cases.push((Some(60_001), None, (60_001, own.1)));
            cases.push((None, Some(60_002), (own.0, 60_002)));
            cases.push((Some(60_001), Some(60_002), (60_001, 60_002)));
        }
        for (user, group, owner) in cases {
            let attributes = Attributes {
                user,
                group,
                ..Attributes::PUBLIC
            };
            let facts = replace_own(&path, b"new", attributes).unwrap();
            assert_eq!((facts.uid(), facts.gid()), owner);
            assert_eq!(facts.mode() & 0o7777, 0o644);
            let found = fs::metadata(&path).unwrap();
            assert_eq!((found.uid(), found.gid()), owner);
        }
    }

    #[test]
    fn only_missing_files_count_as_removed() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("inner");
        assert!(!remove(&inner).unwrap());
        fs::create_dir(&inner).unwrap();
        assert!(remove(&inner).is_err());
        assert!(remove(Path::new("/")).is_err());
    }

    /// Another user may plant anything in a folder that all can write to.
    #[test]
    fn planted_leftovers_are_removed_unopened() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        let fifo = place(".a.part-aaaaaa");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        let precious = place("precious");
        fs::write(&precious, "root's").unwrap();
        symlink(&precious, place(".a.part-bbbbbb")).unwrap();
        // The lock of the target is not that of the link.
        let locked = File::open(&precious).unwrap();
        locked.lock().unwrap();
        let logs = NamedTempFile::new().unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(Mutex::new(logs.reopen().unwrap()))
            .finish();
        let kept = place(".a.part-cccccc");
        fs::create_dir(&kept).unwrap();
        tracing::subscriber::with_default(subscriber, || sweep_folder(folder.path()));
        let mut left: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        left.sort();
        assert_eq!(left, [kept.clone(), precious]);
        let log = fs::read_to_string(logs.path()).unwrap();
        assert_eq!(log.lines().count(), 2, "{log}");
        let path = kept.display();
        assert!(log.contains(&format!("{path}: Is a directory")), "{log}");
        assert!(log.contains("removed=2"), "{log}");
    }
}
