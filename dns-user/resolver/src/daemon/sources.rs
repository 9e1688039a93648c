//! The files that are watched while the server runs: which they are, whether they
//! changed, what is in them.
//!
//! The file system is asked by a thread of each source's own (`reader.rs`), and
//! answered for within [`PATIENCE`]: one mount whose server is gone neither stops the
//! daemon's loop nor keeps the other sources from being followed. Only the first look
//! at a source, at the start or when another one is configured, has [`FIRST_PATIENCE`].

mod reader;

use std::{
    fs,
    hash::{BuildHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use tracing::warn;

use dns_core::{
    catalog::NameRules,
    config::{Config, ConfigError},
};

use self::reader::{Reader, Seen};
use dns_platform::files::{
    FileStamp, bounded,
    glob::{folders, glob},
};

/// A file written less than this before it was read may change again without its
/// times showing it (the kernel stamps files by its tick, 1 to 10 ms), so it is
/// read once more later.
const SETTLED: Duration = Duration::from_millis(50);

/// How often a file that is still being written is read again, [`SETTLED`] apart.
const READ_AGAIN: u32 = 4;

/// How long a source may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long it may take at the first look: a disk that is slow while a machine boots, or
/// thousands of alias files, must not keep a server from coming up.
const FIRST_PATIENCE: Duration = Duration::from_secs(10);

/// Where one kind of data comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// One file that may be missing.
    File(PathBuf),
    /// All files that match a pattern; empty: none.
    Pattern(String),
    /// All files that match one of several patterns, in their order.
    Patterns(Vec<String>),
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
    /// What names without instances mean.
    pub(super) rules: NameRules,
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
            rules: NameRules {
                formerr_for_malformed: config.compat.formerr_for_malformed_names,
                nxdomain_for_empty_non_terminals: config.compat.nxdomain_for_empty_non_terminals,
            },
        }
    }
}

impl Source {
    /// The files of the moment, in the order of the reference, each with what tells one
    /// version of it from the next. What a pattern matches beside regular files, such as
    /// a FIFO or a folder, is left out.
    fn walk(&self) -> Walk {
        let (left_out, paths) = match self {
            Self::File(path) => (Vec::new(), vec![path.clone()]),
            Self::Pattern(_) | Self::Patterns(_) => {
                self.matches().into_iter().partition(|path| bounded::is_special(path))
            }
        };
        let stamps = Stamps(paths.into_iter().map(|path| (FileStamp::of(&path), path)).collect());
        Walk { stamps, left_out }
    }

    /// What patterns match, each once.
    fn matches(&self) -> Vec<PathBuf> {
        let patterns = match self {
            Self::File(_) => &[][..],
            Self::Pattern(pattern) => std::slice::from_ref(pattern),
            Self::Patterns(patterns) => patterns,
        };
        let mut paths = Vec::new();
        // Patterns were checked when the configuration was read.
        for path in patterns.iter().flat_map(|pattern| glob(pattern).unwrap_or_default()) {
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
        paths
    }

    /// In place of the contents of a source that does not answer.
    fn unresponsive(&self, patience: Duration) -> Contents {
        let path = match self {
            Self::File(path) => path.clone(),
            Self::Pattern(pattern) => PathBuf::from(pattern),
            Self::Patterns(patterns) => PathBuf::from(patterns.join(", ")),
        };
        let problem = format!(
            "the file system did not answer within {} s (a mount whose server is gone?)",
            patience.as_secs()
        );
        let error = io::Error::new(io::ErrorKind::TimedOut, problem);
        Contents { stamps: Stamps::default(), files: vec![(path, Err(error))], settled: true }
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
            Self::Patterns(patterns) => {
                patterns.iter().flat_map(|pattern| folders(pattern).unwrap_or_default()).collect()
            }
        }
    }
}

/// What a walk over a source's patterns finds.
struct Walk {
    /// The files that are read.
    stamps: Stamps,
    /// What is no regular file.
    left_out: Vec<PathBuf>,
}

/// The files of a source and their versions.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Stamps(Vec<(Option<FileStamp>, PathBuf)>);

impl Stamps {
    /// Reads all files.
    ///
    /// The stamps were taken before the contents, so a change in between shows up
    /// as one at the next look.
    fn read(self) -> Contents {
        let files = self.0.iter().map(|(_, path)| (path.clone(), bounded::read(path))).collect();
        let now = SystemTime::now();
        let settled = self.0.iter().all(|(stamp, _)| stamp.is_none_or(|stamp| is_older(stamp, now)));
        Contents { stamps: self, files, settled }
    }
}

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
    /// Asks the file system.
    reader: Reader,
    /// What was there at the last reading.
    stamps: Stamps,
    /// Whether these stamps can be trusted.
    settled: bool,
    /// The folders in which a change may be one of ours.
    folders: Vec<PathBuf>,
    /// What was left out at the last reading.
    left_out: Vec<PathBuf>,
    /// Digest of what was read last; `None`: nothing was.
    digest: Option<u64>,
}

impl Followed {
    /// Follows a source that was not read yet.
    pub(super) fn new(source: Source) -> Self {
        Self {
            reader: Reader::new(source.clone()),
            source,
            stamps: Stamps::default(),
            settled: false,
            folders: Vec::new(),
            left_out: Vec::new(),
            digest: None,
        }
    }

    /// The folders in which a change may be one of ours, as of the last look.
    pub(super) fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// Has the source looked at while other things are done; [`Self::changed`] or
    /// [`Self::parsed`], with the same `force`, fetch what was seen.
    pub(super) fn look_ahead(&mut self, force: bool) {
        let known = self.known(force);
        self.reader.ask(known);
    }

    /// Reads the source if it may have changed; `None`: it holds what it held.
    /// With `force` it is read and returned whatever it holds. A source that does not
    /// answer counts as one that cannot be read.
    pub(super) fn changed(&mut self, force: bool) -> Option<Contents> {
        let contents = self.look(self.known(force))?;
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
        for _ in 0..READ_AGAIN {
            if result.is_ok() || contents.settled {
                break;
            }
            thread::sleep(SETTLED);
            let Some(again) = self.look(None) else { break };
            contents = again;
            self.digest = Some(contents.digest());
            result = parse(&contents);
        }
        Some((contents, result))
    }

    /// The versions that need not be read again.
    fn known(&self, force: bool) -> Option<Stamps> {
        (!force && self.settled).then(|| self.stamps.clone())
    }

    /// Looks at the source and remembers what it saw; `None`: it is as `known`.
    fn look(&mut self, known: Option<Stamps>) -> Option<Contents> {
        let patience = if self.digest.is_none() { FIRST_PATIENCE } else { PATIENCE };
        self.reader.ask(known);
        let Some(Seen { folders, left_out, contents }) = self.reader.answer(patience) else {
            // Whatever it holds when it answers again is read.
            self.settled = false;
            return Some(self.source.unresponsive(patience));
        };
        self.folders = folders;
        if left_out != self.left_out {
            for path in &left_out {
                warn!("{} is not a regular file: it is left out", path.display());
            }
            self.left_out = left_out;
        }
        let contents = contents?;
        self.stamps = contents.stamps.clone();
        self.settled = contents.settled;
        Some(contents)
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
    changed.is_none_or(|changed| now.duration_since(changed).map_or(true, |age| age >= SETTLED))
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
    fn a_change_in_the_future_counts_as_old() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let stamp = FileStamp::of(file.path()).unwrap();
        let (seconds, nanoseconds) = stamp.changed;
        let since_1970 = Duration::from_secs(seconds.cast_unsigned());
        let changed = SystemTime::UNIX_EPOCH + since_1970 + Duration::from_nanos(nanoseconds.cast_unsigned());
        assert!(!is_older(stamp, changed + SETTLED / 2));
        assert!(is_older(stamp, changed + 2 * SETTLED));
        // The clock was put back: the file would be read again at every look.
        assert!(is_older(stamp, changed - Duration::from_secs(3600)));
    }

    #[test]
    fn renames_rewrites_and_new_files_change_the_stamps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        let file = Source::File(path.clone());
        let pattern = Source::Pattern(format!("{}/*.json", folder.path().display()));
        let missing = (file.walk().stamps, pattern.walk().stamps);
        fs::write(&path, "one").unwrap();
        let first = (file.walk().stamps, pattern.walk().stamps);
        assert_ne!(missing.0, first.0);
        assert_ne!(missing.1, first.1);
        assert_eq!(file.walk().stamps, first.0);
        // Same size, another file.
        fs::write(folder.path().join("new"), "two").unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
        let second = file.walk().stamps;
        assert_ne!(first.0, second);
        // In place.
        fs::write(&path, "three").unwrap();
        assert_ne!(file.walk().stamps, second);
    }

    #[test]
    fn what_is_no_regular_file_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("b.json"), "{}").unwrap();
        nix::unistd::mkfifo(&folder.path().join("a.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut followed = Followed::new(Source::Pattern(format!("{}/*.json", folder.path().display())));
        let contents = followed.changed(true).unwrap();
        assert_eq!(contents.paths(), [folder.path().join("b.json")]);
        assert_eq!(followed.left_out, [folder.path().join("a.json")]);
        assert_eq!(followed.folders(), [folder.path().to_owned()]);
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
    fn what_was_looked_at_ahead_is_fetched_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        fs::write(&path, "{}").unwrap();
        let mut followed = Followed::new(Source::File(path.clone()));
        followed.look_ahead(true);
        followed.look_ahead(true);
        assert_eq!(followed.changed(true).unwrap().into_first().unwrap(), b"{}");
        fs::write(&path, "[]").unwrap();
        assert_eq!(followed.changed(true).unwrap().into_first().unwrap(), b"[]");
    }

    #[test]
    fn the_first_look_may_take_longer() {
        let folder = tempfile::tempdir().unwrap();
        let source = Source::File(folder.path().join("records.json"));
        fs::write(folder.path().join("records.json"), "{}").unwrap();
        // A file system that takes longer than is waited for while the server runs.
        let slow = source.clone();
        let reader = Reader::looking(move |known| {
            thread::sleep(PATIENCE * 3 / 2);
            reader::look(&slow, known)
        });
        let mut followed = Followed { reader, ..Followed::new(source) };
        assert_eq!(followed.changed(true).unwrap().into_first().unwrap(), b"{}");
        let error = followed.changed(true).unwrap().readable().unwrap_err();
        assert!(error.to_string().contains("did not answer within 1 s"), "{error}");
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
        assert!(!source.walk().stamps.read().settled);
        thread::sleep(SETTLED * 2);
        let contents = source.walk().stamps.read();
        assert!(contents.settled);
        assert_eq!(contents.files[0].1.as_ref().unwrap(), b"{}");
    }
}
