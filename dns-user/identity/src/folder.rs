//! A folder whose certificate, key and trust bundle change atomically.
//!
//! The files of each generation are in one data folder; `..data` is a symlink to the current one
//! and is replaced by a rename, as Kubernetes does for mounted secrets. The names at the top level
//! are symlinks through `..data`:
//!
//! ```text
//! ..pair-Xa81k2/instance.crt, instance.key, instance.pem, ca.crt, ...
//! ..data -> ..pair-Xa81k2
//! instance.crt -> ..data/instance.crt
//! ```
//!
//! A reader that opens two of the top-level names can still see two generations; one that resolves
//! `..data` once ([`read_pair`]), or reads `instance.pem`, cannot. The previous generation stays
//! until the next change or start, so that a resolved path does not disappear under a reader.
//!
//! Programs that watch the names must also learn of a change, as they do when the reference renames
//! each file. After `..data` was switched, a fresh link is therefore renamed over each name, keys
//! first: both names of a pair lead to the new one before the first event. A watch on a file itself
//! follows the links to the previous generation, so its files are replaced by copies of themselves.

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown, symlink},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use zeroize::Zeroizing;

use crate::{
    authority::{certifies, parse_chain},
    keys::PrivateKey,
    profile::Owner,
};

/// The symlink to the current generation.
const DATA: &str = "..data";

/// Prefix of the names of data folders.
const GENERATION: &str = "..pair-";

/// End of the name of a link that will be renamed over another.
const NEXT: &str = ".next";

/// Prefix of the name of a folder that is being destroyed.
const REMOVED: &str = ".removed-";

/// The folder of one identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityFolder {
    /// The folder that holds the top-level names.
    pub path: PathBuf,
}

/// One file of a generation.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Name of the file in the folder.
    pub name: &'a str,
    /// Complete content of the file.
    pub contents: &'a [u8],
    /// Whether it contains a key: mode 0600 and the given owner; otherwise 0644.
    pub secret: bool,
}

impl<'a> Entry<'a> {
    pub(crate) fn public(name: &'a str, contents: &'a [u8]) -> Self {
        Self {
            name,
            contents,
            secret: false,
        }
    }

    pub(crate) fn secret(name: &'a str, contents: &'a [u8]) -> Self {
        Self {
            name,
            contents,
            secret: true,
        }
    }
}

/// A failed change; the current generation stays in use.
#[derive(Debug, thiserror::Error)]
#[error("{}: {cause}; the current certificate and key stay in use; {}", path.display(), remedy(cause))]
pub struct FolderError {
    /// The file or folder.
    pub path: PathBuf,
    /// The system's error; not a `source`, because the message contains it.
    pub cause: io::Error,
}

impl FolderError {
    fn at(path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self {
            path: path.to_owned(),
            cause,
        }
    }
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space or enlarge the file system"
        }
        io::ErrorKind::ReadOnlyFilesystem => "mount the file system writable",
        io::ErrorKind::PermissionDenied => "give the rotator's user write permission",
        io::ErrorKind::NotFound => "create the folder above it",
        _ => "check the folder",
    }
}

/// Certificate chain and key of one generation, PEM.
#[derive(Debug)]
pub struct Pair {
    /// Leaf certificate and CA certificates, PEM.
    pub certificate: String,
    /// The leaf's key.
    pub key: Zeroizing<String>,
}

impl Pair {
    /// Returns whether the key is the certificate's.
    pub fn is_matching(&self) -> bool {
        let chain = parse_chain(self.certificate.as_bytes()).ok();
        let key = PrivateKey::from_pem(self.key.as_bytes()).ok();
        chain
            .zip(key)
            .is_some_and(|((_, parsed), key)| certifies(&parsed[0], &key))
    }

    /// Returns certificate chain and key in one text, for `instance.pem`.
    pub fn joined(&self) -> Zeroizing<String> {
        let mut text = Zeroizing::new(String::with_capacity(
            self.certificate.len() + self.key.len(),
        ));
        text.push_str(&self.certificate);
        text.push_str(&self.key);
        text
    }
}

impl IdentityFolder {
    /// Refers to the folder at `path`, which the first [`Self::replace`] creates.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Returns the path of the current generation; `None` if there is none.
    pub fn current(&self) -> Option<PathBuf> {
        let target = fs::read_link(self.path.join(DATA)).ok()?;
        let path = self.path.join(target);
        // The link outlives a generation that was removed by hand.
        path.is_dir().then_some(path)
    }

    /// Replaces all files atomically. After an error, or a kill at any moment, the old generation
    /// is complete and in use.
    pub fn replace(&self, entries: &[Entry<'_>], owner: Option<Owner>) -> Result<(), FolderError> {
        make_folders(&self.path).map_err(FolderError::at(&self.path))?;
        let before = self.current();
        // Done first, because the space may be needed.
        self.sweep(before.as_deref())?;
        let generation = tempfile::Builder::new()
            .prefix(GENERATION)
            // Other users read certificates and bundles here; keys have a mode of their own.
            .permissions(Permissions::from_mode(0o755))
            .tempdir_in(&self.path)
            .map_err(FolderError::at(&self.path))?;
        for entry in entries {
            // Errors name the path that readers know: the generation's own name differs at every attempt.
            let path = generation.path().join(entry.name);
            let known = self.path.join(entry.name);
            write(&path, entry, owner).map_err(FolderError::at(&known))?;
        }
        // After a power failure, `..data` must not lead to a folder whose entries were never
        // written.
        sync(generation.path()).map_err(FolderError::at(&self.path))?;
        let name = generation.path().file_name().unwrap_or_default().to_owned();
        // The reference renames the key and then the certificate: for a moment, or after a failure, they do not match.
        self.point(DATA, Path::new(&name))?;
        // The generation is in use from here on and must not be removed on drop.
        let _ = generation.keep();
        sync(&self.path).map_err(FolderError::at(&self.path))?;
        // Programs watch these names. As in the reference the key is first, and at its event both are the new ones.
        let mut names: Vec<&str> = entries.iter().map(|entry| entry.name).collect();
        names.sort_by_key(|name| !name.ends_with(".key"));
        for name in names {
            self.point(name, &Path::new(DATA).join(name))?;
        }
        if let Some(before) = before {
            signal_watchers(&before);
        }
        // At the end, because until the switch they led to files of the generation in use.
        self.remove_stale_links(entries);
        Ok(())
    }

    /// Removes what a kill during a change left, among it copies of keys, and renames the links that the change
    /// did not reach, so that watchers learn of it. To be called at the start, before the first change.
    pub fn complete_change(&self) -> Result<(), FolderError> {
        if self.path.is_dir() {
            self.sweep(self.current().as_deref())?;
        }
        let Some(generation) = self.current() else {
            return Ok(());
        };
        let Some(switched) = changed(&self.path.join(DATA)) else {
            return Ok(());
        };
        let failed = FolderError::at(&generation);
        let mut names = Vec::new();
        for entry in fs::read_dir(&generation).map_err(&failed)? {
            names.extend(entry.map_err(&failed)?.file_name().into_string());
        }
        names.sort_by_key(|name| !name.ends_with(".key"));
        for name in names {
            // Links are renamed after `..data`, so the change did not reach an older one.
            if changed(&self.path.join(&name)).is_none_or(|at| at < switched) {
                self.point(&name, &Path::new(DATA).join(&name))?;
            }
        }
        Ok(())
    }

    /// Replaces the files of a single pair and its trust bundle.
    pub fn replace_pair(
        &self,
        pair: &Pair,
        bundle: &str,
        owner: Option<Owner>,
    ) -> Result<(), FolderError> {
        let joined = pair.joined();
        let entries = [
            Entry::public("instance.crt", pair.certificate.as_bytes()),
            Entry::secret("instance.key", pair.key.as_bytes()),
            Entry::secret("instance.pem", joined.as_bytes()),
            Entry::public("ca.crt", bundle.as_bytes()),
        ];
        self.replace(&entries, owner)
    }

    /// Makes `name` a symlink to `target`, by a rename.
    fn point(&self, name: &str, target: &Path) -> Result<(), FolderError> {
        let next = self.path.join(format!("..{name}{NEXT}"));
        let path = self.path.join(name);
        let failed = FolderError::at(&path);
        // symlink(2) refuses an existing name, which a kill may have left.
        match fs::remove_file(&next) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        symlink(target, &next).map_err(&failed)?;
        fs::rename(&next, &path).map_err(&failed)
    }

    /// Removes leftovers of earlier changes: generations except the current one, and links that were not
    /// renamed.
    fn sweep(&self, current: Option<&Path>) -> Result<(), FolderError> {
        let failed = FolderError::at(&self.path);
        for entry in fs::read_dir(&self.path).map_err(&failed)? {
            let path = entry.map_err(&failed)?.path();
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            if Some(path.as_path()) != current && name.starts_with(GENERATION) {
                fs::remove_dir_all(&path).map_err(&failed)?;
            } else if name.starts_with("..") && name.ends_with(NEXT) {
                fs::remove_file(&path).map_err(&failed)?;
            }
        }
        Ok(())
    }

    /// Removes top-level links to files that the generation no longer has.
    fn remove_stale_links(&self, entries: &[Entry<'_>]) {
        let Ok(listed) = fs::read_dir(&self.path) else {
            return;
        };
        for path in listed.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            let ours =
                fs::read_link(&path).is_ok_and(|target| target == Path::new(DATA).join(name));
            if ours && !entries.iter().any(|entry| entry.name == name) {
                // A leftover link dangles; the next change removes it.
                let _ = fs::remove_file(&path);
            }
        }
    }

    /// Removes the folder. A kill in between leaves a hidden folder for the next sweep.
    pub fn destroy(self) -> Result<(), FolderError> {
        let failed = FolderError::at(&self.path);
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let hidden = self.path.with_file_name(format!("{REMOVED}{name}"));
        let remove = || match fs::remove_dir_all(&hidden) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
            _ => Ok(()),
        };
        // An attempt that failed in the middle may have left keys.
        remove()?;
        // Anything else is not ours.
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.is_dir()) {
            // Renamed first, so that no reader finds only some of the files.
            fs::rename(&self.path, &hidden).map_err(&failed)?;
        }
        remove()
    }
}

/// Removes the leftovers of identities whose creation or destruction was interrupted.
pub fn sweep_interrupted(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let removed = entry.file_name().to_string_lossy().starts_with(REMOVED);
        if entry.file_type()?.is_dir() && (removed || is_unfinished(&entry.path())?) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Returns whether a folder has nothing except a generation that never came into use.
fn is_unfinished(folder: &Path) -> io::Result<bool> {
    let mut generations = 0;
    for entry in fs::read_dir(folder)? {
        match entry?.file_name().to_string_lossy() {
            name if name.starts_with(GENERATION) || name == format!("..{DATA}{NEXT}") => {
                generations += 1
            }
            _ => return Ok(false),
        }
    }
    Ok(generations > 0)
}

/// Creates a folder and its missing ancestors; no umask makes them writable for others.
pub fn make_folders(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

/// Locks a file or a folder for one process until the returned file is closed; `None` if another has it.
pub fn lock(file: File) -> io::Result<Option<Flock<File>>> {
    // A lock on a folder itself leaves no file, and even a kill ends it (flock(2)).
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(error.into()),
    }
}

/// Replaces each file of the previous generation by a copy of itself. A watch on the old file then
/// reports its end, as after a rename over it; a reader that resolved the path still finds the
/// content. Without space for a copy, the file stays as it is.
fn signal_watchers(generation: &Path) {
    let Ok(entries) = fs::read_dir(generation) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if let Err(error) = replace_by_copy(&path) {
            tracing::debug!(
                "{}: watchers of the file itself are not signalled: {error}",
                path.display()
            );
            let _ = fs::remove_file(path.with_file_name("..next"));
        }
    }
}

fn replace_by_copy(path: &Path) -> io::Result<()> {
    let facts = fs::metadata(path)?;
    let next = path.with_file_name("..next");
    let _ = fs::remove_file(&next);
    let mode = facts.mode() & 0o777;
    let owner = Owner {
        uid: facts.uid(),
        gid: facts.gid(),
    };
    let contents = Zeroizing::new(fs::read(path)?);
    let is_root = owner.uid == 0 && owner.gid == 0;
    create(&next, &contents, mode, Some(owner).filter(|_| !is_root))?;
    fs::rename(&next, path)
}

/// Returns the time of a file's last change, also of its links.
fn changed(path: &Path) -> Option<(i64, i64)> {
    let facts = fs::symlink_metadata(path).ok()?;
    Some((facts.ctime(), facts.ctime_nsec()))
}

/// Reads a matching pair: `NAME.crt` and `NAME.key` of one generation.
pub fn read_pair(folder: &Path, name: &str) -> io::Result<Pair> {
    let mut tried = 0;
    loop {
        let data = folder.join(fs::read_link(folder.join(DATA))?);
        match read_generation(&data, name) {
            // There were two changes since the link was read, so the generation is gone.
            Err(error)
                // Ten in a row are no race any more.
                if error.kind() == io::ErrorKind::NotFound && tried < 10 && !data.exists() =>
            {
                tried += 1;
            }
            other => return other,
        }
    }
}

fn read_generation(data: &Path, name: &str) -> io::Result<Pair> {
    Ok(Pair {
        certificate: fs::read_to_string(data.join(format!("{name}.crt")))?,
        key: Zeroizing::new(fs::read_to_string(data.join(format!("{name}.key")))?),
    })
}

/// Writes a new file, private from its creation if it is secret.
fn write(path: &Path, entry: &Entry<'_>, owner: Option<Owner>) -> io::Result<()> {
    let mode = if entry.secret { 0o600 } else { 0o644 };
    create(path, entry.contents, mode, owner.filter(|_| entry.secret))?.sync_all()
}

fn create(path: &Path, contents: &[u8], mode: u32, owner: Option<Owner>) -> io::Result<File> {
    let mut file = OpenOptions::new()
        .write(true)
        // An existing file would keep its mode, and a link would be followed.
        .create_new(true)
        .mode(mode)
        .open(path)?;
    if let Some(Owner { uid, gid }) = owner {
        fchown(&file, Some(uid), Some(gid))?;
    }
    file.write_all(contents)?;
    Ok(file)
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_remedies() {
        for (kind, text) in [
            (io::ErrorKind::StorageFull, "free space"),
            (io::ErrorKind::QuotaExceeded, "free space"),
            (
                io::ErrorKind::ReadOnlyFilesystem,
                "mount the file system writable",
            ),
            (io::ErrorKind::PermissionDenied, "write permission"),
            (io::ErrorKind::NotFound, "create the folder above it"),
            (io::ErrorKind::Other, "check the folder"),
        ] {
            let error = FolderError {
                path: "/f".into(),
                cause: kind.into(),
            };
            assert!(
                error.to_string().starts_with("/f: ") && error.to_string().contains(text),
                "{error}"
            );
        }
    }

    #[test]
    fn interrupted_changes_are_swept() {
        let place = tempfile::tempdir().unwrap();
        let make = |identity: &str, content: &str| {
            let path = place.path().join(identity);
            make_folders(&path.join(content)).unwrap();
            path
        };
        let unfinished = make("a", "..pair-1");
        make("a", "..pair-2");
        symlink("..pair-2", unfinished.join("....data.next")).unwrap();
        let used = make("b", "..pair-1");
        symlink("..pair-1", used.join(DATA)).unwrap();
        let other = make("c", "other");
        let empty = place.path().join("d");
        make_folders(&empty).unwrap();
        let removed = make(".removed-e", "..pair-1");
        fs::write(place.path().join(".removed-file"), "").unwrap();
        for (path, expected) in [
            (&unfinished, true),
            (&used, false),
            (&other, false),
            (&empty, false),
        ] {
            assert_eq!(is_unfinished(path).unwrap(), expected, "{}", path.display());
        }
        sweep_interrupted(place.path()).unwrap();
        assert!(!unfinished.exists() && !removed.exists());
        assert!(used.exists() && other.exists() && empty.exists());
        assert!(place.path().join(".removed-file").exists());
    }

    #[test]
    fn folder_is_locked_once() {
        let place = tempfile::tempdir().unwrap();
        let open = || File::open(place.path()).unwrap();
        let first = lock(open()).unwrap();
        assert!(first.is_some() && lock(open()).unwrap().is_none());
        drop(first);
        assert!(lock(open()).unwrap().is_some());
    }

    #[test]
    fn generations_replace_each_other() {
        let place = tempfile::tempdir().unwrap();
        let folder = IdentityFolder::new(place.path().join("i"));
        assert_eq!(folder.current(), None);
        let entry = |name, contents, secret| Entry {
            name,
            contents,
            secret,
        };
        let first = [
            entry("x.crt", b"crt 1", false),
            entry("x.key", b"key 1", true),
            entry("old", b"old", false),
        ];
        folder.replace(&first, None).unwrap();
        let before = folder.current().unwrap();
        let mode = |name: &str| fs::metadata(folder.path.join(name)).unwrap().mode() & 0o777;
        assert_eq!((mode("x.crt"), mode("x.key")), (0o644, 0o600));
        let pair = read_pair(&folder.path, "x").unwrap();
        assert_eq!((&*pair.certificate, &**pair.key), ("crt 1", "key 1"));
        assert_eq!(&**pair.joined(), "crt 1key 1");
        assert!(!pair.is_matching());
        folder
            .replace(
                &[
                    entry("x.crt", b"crt 2", false),
                    entry("x.key", b"key 2", true),
                ],
                None,
            )
            .unwrap();
        assert_ne!(folder.current().unwrap(), before);
        // Readers of the former generation still find it; its name at the top is gone.
        assert_eq!(fs::read(before.join("x.crt")).unwrap(), b"crt 1");
        assert!(fs::symlink_metadata(folder.path.join("old")).is_err());
        fs::write(folder.path.join("..left.next"), "").unwrap();
        fs::remove_file(folder.path.join("x.key")).unwrap();
        folder.complete_change().unwrap();
        assert!(!before.exists() && !folder.path.join("..left.next").exists());
        assert_eq!(fs::read(folder.path.join("x.key")).unwrap(), b"key 2");
        folder.clone().destroy().unwrap();
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        folder.destroy().unwrap();
    }

    #[test]
    fn keys_are_named_before_certificates() {
        let place = tempfile::tempdir().unwrap();
        let folder = IdentityFolder::new(place.path().join("i"));
        // A folder in the way of the certificate's name stops the change there.
        make_folders(&folder.path.join("x.crt").join("full")).unwrap();
        let [certificate, key] = ["x.crt", "x.key"].map(|name| Entry {
            name,
            contents: b"new",
            secret: false,
        });
        folder.replace(&[certificate, key], None).unwrap_err();
        assert_eq!(fs::read(folder.path.join("x.key")).unwrap(), b"new");
    }

    #[test]
    fn pair_is_read_from_its_generation() {
        let place = tempfile::tempdir().unwrap();
        let make = |generation: &str, text: &str| {
            fs::create_dir_all(place.path().join(generation)).unwrap();
            for kind in ["crt", "key"] {
                let path = place
                    .path()
                    .join(generation)
                    .join(format!("instance.{kind}"));
                fs::write(path, format!("{text} {kind}")).unwrap();
            }
        };
        assert_eq!(
            read_pair(place.path(), "instance").err().unwrap().kind(),
            io::ErrorKind::NotFound
        );
        make("..pair-1", "old");
        make("..pair-2", "new");
        symlink("..pair-2", place.path().join(DATA)).unwrap();
        let pair = read_pair(place.path(), "instance").unwrap();
        assert_eq!((&*pair.certificate, &**pair.key), ("new crt", "new key"));
        // A generation without the pair is no race, and one that stays away is none after some tries.
        for missing in ["other", "instance"] {
            let error = read_pair(place.path(), missing);
            assert_eq!(error.is_err(), missing == "other");
        }
        fs::remove_dir_all(place.path().join("..pair-2")).unwrap();
        let error = read_pair(place.path(), "instance").err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    /// Returns the names in a folder, sorted.
    fn names_in(folder: &Path) -> Vec<String> {
        let mut names = Vec::new();
        for entry in fs::read_dir(folder).unwrap() {
            names.push(entry.unwrap().file_name().into_string().unwrap());
        }
        names.sort();
        names
    }

    #[test]
    fn folder_has_links_and_two_generations() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let folder = IdentityFolder::new(place.path().join("a/i"));
        let pair = Pair {
            certificate: "crt\n".to_owned(),
            key: Zeroizing::new("key\n".to_owned()),
        };
        folder.replace_pair(&pair, "ca\n", None).unwrap();
        let first = folder.current().unwrap();
        let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
        let links = ["ca.crt", "instance.crt", "instance.key", "instance.pem"];
        let expected = |generations: &[&Path]| {
            let mut names: Vec<String> = generations.iter().map(|path| name(path)).collect();
            names.sort();
            names.insert(0, "..data".to_owned());
            names.extend(links.map(str::to_owned));
            names
        };
        assert_eq!(names_in(&folder.path), expected(&[&first]));
        for (file, contents, mode) in [
            ("ca.crt", "ca\n", 0o644),
            ("instance.crt", "crt\n", 0o644),
            ("instance.key", "key\n", 0o600),
            ("instance.pem", "crt\nkey\n", 0o600),
        ] {
            let path = folder.path.join(file);
            assert_eq!(fs::read_link(&path).unwrap(), Path::new(DATA).join(file));
            assert_eq!(fs::read_to_string(&path).unwrap(), contents);
            let facts = fs::metadata(&path).unwrap();
            assert_eq!(facts.mode() & 0o777, mode, "{file}");
        }
        let inode = |path: &Path| fs::metadata(path.join("instance.key")).unwrap().ino();
        let before = inode(&first);
        folder.replace_pair(&pair, "ca 2\n", None).unwrap();
        let second = folder.current().unwrap();
        assert_eq!(names_in(&folder.path), expected(&[&first, &second]));
        // Watchers of the former file learn of its end, and find the same contents.
        assert_ne!(inode(&first), before);
        assert_eq!(names_in(&first), links);
        assert_eq!(fs::read_to_string(first.join("ca.crt")).unwrap(), "ca\n");
        assert_eq!(
            fs::metadata(first.join("instance.key")).unwrap().mode() & 0o777,
            0o600
        );
        // A third removes the first.
        folder.replace_pair(&pair, "ca 3\n", None).unwrap();
        let third = folder.current().unwrap();
        assert_eq!(names_in(&folder.path), expected(&[&second, &third]));
        fs::remove_dir_all(&third).unwrap();
        assert_eq!(folder.current(), None);
    }

    #[test]
    fn completed_change_is_not_touched() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let folder = IdentityFolder::new(place.path().join("i"));
        folder.complete_change().unwrap();
        assert!(!folder.path.exists());
        let pair = Pair {
            certificate: String::new(),
            key: Zeroizing::new(String::new()),
        };
        folder.replace_pair(&pair, "", None).unwrap();
        let inode = |name: &str| {
            let facts = fs::symlink_metadata(folder.path.join(name)).unwrap();
            facts.ino()
        };
        let before = ["ca.crt", "instance.crt", "instance.key"].map(inode);
        folder.complete_change().unwrap();
        assert_eq!(
            ["ca.crt", "instance.crt", "instance.key"].map(inode),
            before
        );
        // Something else in the way stays, and says so.
        let file = place.path().join("file");
        fs::write(&file, "").unwrap();
        IdentityFolder::new(file.clone()).destroy().unwrap();
        assert!(file.exists());
        let error = IdentityFolder::new(file.join("below"))
            .replace_pair(&pair, "", None)
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "{}: Not a directory (os error 20); the current certificate and key stay in use; check the folder",
                file.join("below").display()
            )
        );
        // Something else in the way of the hidden one.
        let hidden = place.path().join(".removed-i");
        fs::write(&hidden, "").unwrap();
        let error = folder.clone().destroy().unwrap_err();
        assert_eq!(error.path, folder.path);
        fs::remove_file(&hidden).unwrap();
        // What failed attempts left goes with the folder, and after it.
        for _ in 0..2 {
            make_folders(&hidden.join("full")).unwrap();
            folder.clone().destroy().unwrap();
            assert_eq!(names_in(place.path()), ["file"]);
        }
    }

    #[test]
    fn pair_matches_its_key() {
        let pair = |certificate: &str, key: &str| Pair {
            certificate: certificate.to_owned(),
            key: Zeroizing::new(key.to_owned()),
        };
        let [one, other] = ["one", "other"].map(crate::tests::TestCa::new);
        for (certificate, key, is_matching) in [
            (&*one.chain, &*one.key, true),
            (&one.chain, &other.key, false),
            ("x", &one.key, false),
            (&one.chain, "x", false),
        ] {
            assert_eq!(pair(certificate, key).is_matching(), is_matching);
        }
    }
}
