//! The files that are watched while the server runs: which they are, whether they
//! changed, what is in them.

use std::{
    fs,
    hash::{BuildHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use crate::{
    config::{
        Config, ConfigError,
        glob::{folders, glob},
    },
    file_stamp::FileStamp,
};

/// A file written less than this before it was read may change again without its
/// times showing it (the kernel stamps files by its tick, 1 to 10 ms), so it is
/// read once more later.
const SETTLED: Duration = Duration::from_millis(50);

/// How often a file that is still being written is read again, [`SETTLED`] apart.
const PATIENCE: u32 = 4;

/// Where one kind of data comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// One file that may be missing.
    File(PathBuf),
    /// All files that match a pattern; empty: none.
    Pattern(String),
}

/// The sources of everything that can change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sources {
    /// records.json; a pattern of nothing where none is configured.
    pub(super) records: Source,
    /// The alias files.
    pub(super) aliases: Source,
    /// The handler files.
    pub(super) handlers: Source,
    /// The addresses files.
    pub(super) addresses: Source,
}

impl Sources {
    /// Those that a configuration names.
    pub(super) fn of(config: &Config) -> Self {
        Self {
            records: match &config.records_file {
                Some(path) => Source::File(path.clone()),
                None => Source::Pattern(String::new()),
            },
            aliases: Source::Pattern(config.alias_files_glob.clone()),
            handlers: Source::Pattern(config.handlers_files_glob.clone()),
            addresses: Source::Pattern(config.addresses_files_glob.clone()),
        }
    }

    /// The folders in which a change may be one of ours.
    pub(super) fn folders(&self) -> Vec<PathBuf> {
        let Self { records, aliases, handlers, addresses } = self;
        let mut all = Vec::new();
        for source in [records, aliases, handlers, addresses] {
            for folder in source.folders() {
                if !all.contains(&folder) {
                    all.push(folder);
                }
            }
        }
        all
    }
}

impl Source {
    /// The files of the moment, in the order of the reference.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        match self {
            Self::File(path) => vec![path.clone()],
            // Patterns were checked when the configuration was read.
            Self::Pattern(pattern) => glob(pattern).unwrap_or_default(),
        }
    }

    /// The files with what tells one version of them from the next.
    pub(super) fn stamps(&self) -> Stamps {
        Stamps(self.paths().into_iter().map(|path| (FileStamp::of(&path), path)).collect())
    }

    /// Reads everything.
    ///
    /// The stamps are taken before the contents, so a change in between shows up
    /// as one at the next look.
    pub(super) fn read(&self) -> Contents {
        let stamps = self.stamps();
        let files = stamps.0.iter().map(|(_, path)| (path.clone(), fs::read(path))).collect();
        let now = SystemTime::now();
        let settled = stamps.0.iter().all(|(stamp, _)| stamp.is_none_or(|stamp| is_older(stamp, now)));
        Contents { stamps, files, settled }
    }

    /// The folders in which a change may be one of ours.
    fn folders(&self) -> Vec<PathBuf> {
        match self {
            Self::File(path) => {
                // The folder of the name, and that of the file behind a symbolic link.
                let mut folders = vec![parent(path)];
                if let Ok(target) = fs::canonicalize(path) {
                    folders.push(parent(&target));
                }
                folders
            }
            Self::Pattern(pattern) => folders(pattern).unwrap_or_default(),
        }
    }
}

/// The files of a source and their versions.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Stamps(Vec<(Option<FileStamp>, PathBuf)>);

/// What was read from a source.
pub(super) struct Contents {
    /// The versions that were read.
    pub(super) stamps: Stamps,
    /// Each file's bytes or why there are none.
    pub(super) files: Vec<(PathBuf, io::Result<Vec<u8>>)>,
    /// Whether every file was old enough for its stamp to be trusted.
    pub(super) settled: bool,
}

impl Contents {
    /// Tells contents apart: names and bytes, or the kind of error.
    fn digest(&self) -> u64 {
        let mut hasher = foldhash::quality::FixedState::default().build_hasher();
        for (path, bytes) in &self.files {
            path.hash(&mut hasher);
            bytes.as_ref().map_err(io::Error::kind).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// The names of the files.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|(path, _)| path.clone()).collect()
    }

    /// The bytes of the first file.
    pub(super) fn into_first(self) -> Option<Vec<u8>> {
        self.files.into_iter().next()?.1.ok()
    }

    /// Names and bytes of all files, for a parser.
    pub(super) fn readable(&self) -> Result<Vec<(String, &[u8])>, ConfigError> {
        let file = |(path, bytes): &'_ (PathBuf, io::Result<Vec<u8>>)| {
            let name = path.display().to_string();
            match bytes {
                Ok(_) => Ok(name),
                Err(error) => Err(ConfigError { file: name, problem: format!("cannot be read: {error}") }),
            }
        };
        let names = self.files.iter().map(file).collect::<Result<Vec<_>, _>>()?;
        let bytes = self.files.iter().filter_map(|(_, bytes)| bytes.as_deref().ok());
        Ok(names.into_iter().zip(bytes).collect())
    }
}

//----------- Followed -------------------------------------------------------

/// A source that is followed over time.
pub(super) struct Followed {
    /// What is followed.
    source: Source,
    /// What was there at the last reading.
    stamps: Stamps,
    /// Whether these stamps can be trusted.
    settled: bool,
    /// Digest of what was read last; `None`: nothing was.
    digest: Option<u64>,
}

impl Followed {
    /// Follows a source that was not read yet.
    pub(super) fn new(source: Source) -> Self {
        Self { source, stamps: Stamps::default(), settled: false, digest: None }
    }

    /// Reads the source if it may have changed; `None`: it holds what it held.
    /// With `force` it is read and returned whatever it holds.
    pub(super) fn changed(&mut self, force: bool) -> Option<Contents> {
        if !force && self.settled && self.source.stamps() == self.stamps {
            return None;
        }
        let contents = self.read();
        let digest = Some(contents.digest());
        let is_new = force || digest != self.digest;
        self.digest = digest;
        is_new.then_some(contents)
    }

    /// Reads and parses the source if it may have changed.
    ///
    /// A file that cannot be parsed and was written just now is likely to be still
    /// in writing: it is read again a few times before it counts as broken.
    pub(super) fn parsed<T, E>(
        &mut self,
        force: bool,
        parse: impl Fn(&Contents) -> Result<T, E>,
    ) -> Option<(Contents, Result<T, E>)> {
        let mut contents = self.changed(force)?;
        let mut result = parse(&contents);
        for _ in 0..PATIENCE {
            if result.is_ok() || contents.settled {
                break;
            }
            thread::sleep(SETTLED);
            contents = self.read();
            self.digest = Some(contents.digest());
            result = parse(&contents);
        }
        Some((contents, result))
    }

    /// Reads the source and remembers its stamps.
    fn read(&mut self) -> Contents {
        let contents = self.source.read();
        self.stamps = contents.stamps.clone();
        self.settled = contents.settled;
        contents
    }
}

/// Whether the last change of a file lies long enough before `now`.
fn is_older(stamp: FileStamp, now: SystemTime) -> bool {
    let (seconds, nanoseconds) = stamp.changed;
    let changed = u64::try_from(seconds)
        .ok()
        .and_then(|seconds| {
            Duration::from_secs(seconds).checked_add(Duration::from_nanos(nanoseconds.unsigned_abs()))
        })
        .and_then(|since_epoch| SystemTime::UNIX_EPOCH.checked_add(since_epoch));
    // A change in the future says nothing; it counts as old, or it would be read for ever.
    changed.is_none_or(|changed| now.duration_since(changed).is_ok_and(|age| age >= SETTLED))
}

/// The folder that holds a path.
fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renames_rewrites_and_new_files_change_the_stamps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        let file = Source::File(path.clone());
        let pattern = Source::Pattern(format!("{}/*.json", folder.path().display()));
        let missing = (file.stamps(), pattern.stamps());
        fs::write(&path, "one").unwrap();
        let first = (file.stamps(), pattern.stamps());
        assert_ne!(missing.0, first.0);
        assert_ne!(missing.1, first.1);
        assert_eq!(file.stamps(), first.0);
        // Same size, another file.
        fs::write(folder.path().join("new"), "two").unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
        let second = file.stamps();
        assert_ne!(first.0, second);
        // In place.
        fs::write(&path, "three").unwrap();
        assert_ne!(file.stamps(), second);
    }

    #[test]
    fn the_same_contents_are_returned_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        let mut followed = Followed::new(Source::File(path.clone()));
        assert!(followed.changed(false).unwrap().files[0].1.is_err());
        assert!(followed.changed(false).is_none());
        fs::write(&path, "{}").unwrap();
        assert!(followed.changed(false).is_some());
        assert!(followed.changed(false).is_none());
        fs::write(&path, "{}").unwrap();
        assert!(followed.changed(false).is_none());
        assert!(followed.changed(true).is_some());
        fs::write(&path, "[]").unwrap();
        assert!(followed.changed(false).is_some());
    }

    #[test]
    fn a_file_in_writing_is_given_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        fs::write(&path, "half").unwrap();
        let mut followed = Followed::new(Source::File(path.clone()));
        // Its writer goes on while the first half is being parsed.
        let parse = |contents: &Contents| {
            let bytes = contents.files[0].1.as_ref().unwrap();
            if bytes == b"whole" {
                return Ok(());
            }
            fs::write(&path, "whole").unwrap();
            Err(())
        };
        let (_, result) = followed.parsed(false, parse).unwrap();
        assert_eq!(result, Ok(()));
    }

    #[test]
    fn a_fresh_file_is_not_settled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        fs::write(&path, "{}").unwrap();
        let source = Source::File(path.clone());
        assert!(!source.read().settled);
        thread::sleep(SETTLED * 2);
        let contents = source.read();
        assert!(contents.settled);
        assert_eq!(contents.files[0].1.as_ref().unwrap(), b"{}");
    }
}
