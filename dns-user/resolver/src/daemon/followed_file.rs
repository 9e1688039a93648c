//! The files followed at runtime: their existence, changes and contents.
//!
//! Each source queries the file system on a dedicated thread ([`FileReader`]) with a deadline of
//! [`TIMEOUT`], so that a hung mount blocks neither the main loop nor other sources. Only the
//! first read of a source, at start or after a configuration change, may take [`FIRST_TIMEOUT`].

use std::{
    fs,
    hash::{BuildHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime},
};

use crossbeam_channel::{Receiver, Sender, bounded};
use tracing::warn;

use dns_core::{
    catalog::{IndexedRecords, NameRules},
    config::{Config, ConfigError, ParsedFiles},
};
use dns_kit::files::{
    FileStamp, bounded,
    glob::{folders, glob},
    watch::Writes,
};
use dns_kit::threads::{self, OnPanic};

/// A file written more recently than this may change again without a new time stamp (the kernel's
/// stamps have tick resolution, 1 to 10 ms), so it is read once more later.
const SETTLED: Duration = Duration::from_millis(50);

/// Number of times an unparsable, recently written file is read again, [`SETTLED`] apart.
const READ_AGAIN: u32 = 4;

/// Maximum number of errors logged individually for each kind of file.
const MAX_LOGGED_ERRORS: usize = 20;

/// Time limit for a source to answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit of a source's first read: a slow disk during boot, or thousands of alias files, must
/// not keep the server from starting.
const FIRST_TIMEOUT: Duration = Duration::from_secs(10);

/// Which files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// Files that may have changed.
    IfChanged,
    /// Every file; its contents are applied again.
    Always,
}

/// Location of one kind of data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FileSource {
    /// A single file, which may be missing.
    File(PathBuf),
    /// All files matching any of these patterns, in pattern order; an empty pattern matches none.
    Patterns(Vec<String>),
}

/// The sources of all data that can change at runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sources {
    /// No pattern if none is configured.
    pub(super) records: FileSource,
    pub(super) aliases: FileSource,
    pub(super) handlers: FileSource,
    pub(super) addresses: FileSource,
    pub(super) rules: NameRules,
    /// Whether an invalid alias file ends the start (`compat.require_alias_files`).
    pub(super) require_alias_files: bool,
}

impl Sources {
    pub(super) fn of(config: &Config) -> Self {
        Self {
            records: match &config.records_file {
                Some(path) => FileSource::File(path.clone()),
                None => FileSource::Patterns(Vec::new()),
            },
            aliases: FileSource::of_pattern(&config.alias_files_glob),
            handlers: FileSource::of_pattern(&config.handlers_files_glob),
            addresses: FileSource::of_pattern(&config.addresses_files_glob),
            rules: NameRules {
                formerr_for_malformed: config.compat.formerr_for_malformed_names,
                nxdomain_for_empty_non_terminals: config.compat.nxdomain_for_empty_non_terminals,
            },
            require_alias_files: config.compat.require_alias_files,
        }
    }
}

impl FileSource {
    fn of_pattern(pattern: &str) -> Self {
        Self::Patterns(vec![pattern.to_owned()])
    }

    /// Returns the current files in bosh-dns's order, each with a stamp of its version, and the skipped matches
    /// that are not regular files, such as FIFOs and directories.
    fn walk(&self) -> (Stamps, Vec<PathBuf>) {
        let (special, paths) = match self {
            // Not looked at before reading: a missing file is an error that the status reports.
            Self::File(path) => (Vec::new(), vec![path.clone()]),
            Self::Patterns(patterns) => matches(patterns)
                .into_iter()
                // Opening a FIFO blocks without a writer, and a device may have side effects.
                .partition(|path| bounded::is_special(path)),
        };
        (
            Stamps(
                paths
                    .into_iter()
                    .map(|path| (FileStamp::of(&path), path))
                    .collect(),
            ),
            special,
        )
    }

    /// Returns the contents that represent an unresponsive source: a timeout error.
    fn unresponsive(&self, timeout: Duration) -> Contents {
        let path = match self {
            Self::File(path) => path.clone(),
            Self::Patterns(patterns) => PathBuf::from(patterns.join(", ")),
        };
        let problem = format!(
            "the file system did not respond within {} s (a mount whose server is gone?)",
            timeout.as_secs()
        );
        let error = io::Error::new(io::ErrorKind::TimedOut, problem);
        Contents {
            stamps: Stamps::default(),
            files: vec![(path, Err(error))],
            // Reading again at once would hit the same hung mount.
            settled: true,
        }
    }

    /// Folders in which a change may affect this source.
    fn folders(&self) -> Vec<PathBuf> {
        match self {
            Self::File(path) => {
                // The folder of the name and, for a symbolic link, the folder of its target.
                let mut folders = vec![parent(path)];
                // inotify(7) watches inodes: a write to the link's target is not reported in the
                // link's folder.
                if let Ok(target) = fs::canonicalize(path) {
                    folders.push(parent(&target));
                }
                folders
            }
            Self::Patterns(patterns) => patterns
                .iter()
                .flat_map(|pattern| folders(pattern).unwrap_or_default())
                .collect(),
        }
    }
}

/// Returns the files matching the patterns, without duplicates.
fn matches(patterns: &[String]) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    // Patterns are validated when the configuration is read.
    for path in patterns
        .iter()
        .flat_map(|pattern| glob(pattern).unwrap_or_default())
    {
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
    paths
}

/// The files of a source with the stamps of their versions.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Stamps(Vec<(Option<FileStamp>, PathBuf)>);

impl Stamps {
    /// Reads all files.
    ///
    /// Stamps are taken before the contents, so a change in between is noticed at the next check.
    fn read(self) -> Contents {
        let files = self
            .0
            .iter()
            .map(|(_, path)| (path.clone(), bounded::read(path)))
            .collect();
        Contents {
            settled: self.are_settled(),
            stamps: self,
            files,
        }
    }

    /// Returns whether every file is old enough for its stamp to be reliable.
    fn are_settled(&self) -> bool {
        let now = SystemTime::now();
        self.0
            .iter()
            .all(|(stamp, _)| stamp.is_none_or(|stamp| is_older(stamp, now)))
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.0.iter().map(|(_, path)| path.clone()).collect()
    }
}

/// Contents read from a source.
pub(super) struct Contents {
    pub(super) stamps: Stamps,
    /// Contents or error of each file.
    pub(super) files: Vec<(PathBuf, io::Result<Vec<u8>>)>,
    /// Whether every file was old enough for its stamp to be reliable.
    pub(super) settled: bool,
}

impl Contents {
    /// Returns a digest of names and bytes, or of the kind of error.
    fn digest(&self) -> u64 {
        let mut hasher = foldhash::quality::FixedState::default().build_hasher();
        for (path, bytes) in &self.files {
            path.hash(&mut hasher);
            // An error cannot be hashed, and the same kind again is no news.
            bytes.as_ref().map_err(io::Error::kind).hash(&mut hasher);
        }
        hasher.finish()
    }

    pub(super) fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|(path, _)| path.clone()).collect()
    }

    #[cfg(test)]
    pub(super) fn into_first(self) -> Option<Vec<u8>> {
        self.files.into_iter().next()?.1.ok()
    }

    /// Parses the files, given by name and content; adds an error for each unreadable one.
    pub(super) fn parse<T>(
        &self,
        parse: impl FnOnce(&[(&str, &[u8])]) -> ParsedFiles<T>,
    ) -> ParsedFiles<T> {
        let names: Vec<String> = self
            .files
            .iter()
            .map(|(path, _)| path.display().to_string())
            .collect();
        let mut files = Vec::new();
        let mut errors = Vec::new();
        for (name, (_, bytes)) in names.iter().zip(&self.files) {
            match bytes {
                Ok(bytes) => files.push((name.as_str(), bytes.as_slice())),
                Err(error) => errors.push(ConfigError::of_file(
                    name,
                    format!("cannot be read: {error}"),
                )),
            }
        }
        let ParsedFiles {
            valid,
            errors: invalid,
        } = parse(&files);
        errors.extend(invalid);
        ParsedFiles { valid, errors }
    }
}

/// Returns lines for the log: up to [`MAX_LOGGED_ERRORS`] errors and the number of the others. The caller
/// logs them, because its module decides the tag.
pub(super) fn error_lines(what: &str, errors: &[ConfigError], consequence: &str) -> Vec<String> {
    let mut lines: Vec<String> = errors
        .iter()
        .take(MAX_LOGGED_ERRORS)
        .map(|problem: &ConfigError| format!("{what}: {problem}; {consequence}"))
        .collect();
    if let Some(more) = errors.len().checked_sub(MAX_LOGGED_ERRORS + 1) {
        lines.push(format!(
            "{what}: and {} more errors, which bosh-dns-xdp check lists",
            more + 1
        ));
    }
    lines
}

//----------- Followed -------------------------------------------------------

/// A source followed for changes.
pub(super) struct Followed {
    source: FileSource,
    reader: FileReader,
    /// Versions at the last read.
    stamps: Stamps,
    /// Whether `stamps` are reliable.
    settled: bool,
    /// Writes that the kernel reports in the folders; `None` if nothing watches them.
    writes: Option<Writes>,
    /// Count of writes before the last read; `None` if not all are reported.
    count_at_read: Option<u64>,
    /// Folders to watch, as of the last check: a change in them may affect this source.
    pub(super) folders: Vec<PathBuf>,
    /// Non-regular files skipped at the last read.
    special: Vec<PathBuf>,
    /// Digest of the last contents; `None` before the first read, and if the last ones were edits of records.
    digest: Option<u64>,
    /// Whether the source has been read.
    has_answered: bool,
    /// Whether the last read has not ended in time.
    pub(super) hangs: bool,
}

/// A records file that has changed.
pub(super) enum ChangedRecords {
    /// The file must be parsed as a whole.
    Text(Contents),
    /// The file differs little from the records with which it was compared; its text was not kept.
    Edited {
        files: Vec<PathBuf>,
        records: IndexedRecords,
    },
}

impl Followed {
    pub(super) fn new(source: FileSource) -> Self {
        Self {
            reader: FileReader::new(source.clone()),
            source,
            stamps: Stamps::default(),
            settled: false,
            writes: None,
            count_at_read: None,
            folders: Vec::new(),
            special: Vec::new(),
            digest: None,
            has_answered: false,
            hangs: false,
        }
    }

    /// Relies on these reports: a file that is younger than [`SETTLED`] when it is read is not read a second time, unless
    /// a write is reported.
    pub(super) fn rely_on(&mut self, writes: Writes) {
        self.writes = Some(writes);
    }

    /// Starts reading the source in the background; the method that reads it with the same `reading`, and for
    /// records with the same `base`, returns the result.
    pub(super) fn look_ahead(&mut self, reading: Reading, base: Option<&IndexedRecords>) {
        self.request(self.known(reading), base);
    }

    /// Reads the source; `None` if only changes are wanted and the contents are the same. An unresponsive
    /// source is treated as unreadable.
    pub(super) fn changed(&mut self, reading: Reading) -> Option<Contents> {
        match self.read_now(self.known(reading), None) {
            Found::Text(contents) => self.if_new(reading, contents),
            // Only records are compared with others.
            Found::Known | Found::Edited { .. } => None,
        }
    }

    /// Reads a records file that may be an edited version of `base`; `None` if only changes are wanted and the
    /// contents are the same.
    pub(super) fn changed_records(
        &mut self,
        reading: Reading,
        base: Option<&IndexedRecords>,
    ) -> Option<ChangedRecords> {
        match self.read_now(self.known(reading), base) {
            Found::Known => None,
            Found::Text(contents) => self.if_new(reading, contents).map(ChangedRecords::Text),
            Found::Edited { records, .. } => {
                // The text was not kept, so a digest of it would be of an earlier one.
                self.digest = None;
                let is_same = base.is_some_and(|base| records.equals_previous(base));
                if is_same && reading == Reading::IfChanged {
                    return None;
                }
                Some(ChangedRecords::Edited {
                    files: self.stamps.paths(),
                    records,
                })
            }
        }
    }

    fn if_new(&mut self, reading: Reading, contents: Contents) -> Option<Contents> {
        let digest = Some(contents.digest());
        // A file may be touched, or renamed over, without a change; publishing it again would cost
        // a pass.
        let is_new = reading == Reading::Always || digest != self.digest;
        self.digest = digest;
        is_new.then_some(contents)
    }

    /// Reads and parses the source if it may have changed.
    pub(super) fn parsed<T>(
        &mut self,
        reading: Reading,
        parse: impl Fn(&[(&str, &[u8])]) -> ParsedFiles<T>,
    ) -> Option<(Contents, ParsedFiles<T>)> {
        let contents = self.changed(reading)?;
        Some(self.parse(contents, parse))
    }

    /// Parses what was read from this source.
    ///
    /// An unparsable file that was written recently is probably still being written: it is read
    /// again a few times before it is reported as invalid.
    pub(super) fn parse<T>(
        &mut self,
        mut contents: Contents,
        parse: impl Fn(&[(&str, &[u8])]) -> ParsedFiles<T>,
    ) -> (Contents, ParsedFiles<T>) {
        let mut parsed = contents.parse(&parse);
        for _ in 0..READ_AGAIN {
            if parsed.errors.is_empty() || contents.settled {
                break;
            }
            thread::sleep(SETTLED);
            // Without known stamps, since these are the ones that cannot be trusted yet.
            let Found::Text(again) = self.read_now(None, None) else {
                break;
            };
            contents = again;
            self.digest = Some(contents.digest());
            parsed = contents.parse(&parse);
        }
        (contents, parsed)
    }

    /// Returns the versions that need not be read again.
    fn known(&self, reading: Reading) -> Option<Stamps> {
        if reading == Reading::Always {
            return None;
        }
        // Both must be counted: a lost watch makes either `None`, and then only time settles a
        // file.
        let is_unwritten = self.count_at_read.is_some() && self.count() == self.count_at_read;
        (self.settled || is_unwritten).then(|| self.stamps.clone())
    }

    fn count(&self) -> Option<u64> {
        // Before the first read the folders are unknown.
        if self.folders.is_empty() {
            return None;
        }
        self.writes.as_ref()?.count(&self.folders)
    }

    fn request(&mut self, known: Option<Stamps>, base: Option<&IndexedRecords>) {
        // Before the reader looks at the files, so that a write in between counts.
        let count = self.count();
        let request = Request {
            known,
            base: base.cloned(),
        };
        // A pending request was counted when it was made; counting again would miss writes in
        // between.
        if self.reader.request(request) {
            self.count_at_read = count;
        }
    }

    /// Reads the source and remembers its state.
    fn read_now(&mut self, known: Option<Stamps>, base: Option<&IndexedRecords>) -> Found {
        let timeout = if self.has_answered {
            TIMEOUT
        } else {
            FIRST_TIMEOUT
        };
        self.request(known, base);
        let result = self.reader.result(timeout);
        // After a timeout, too: a mount that hangs may delay the start once, not every check.
        self.has_answered = true;
        self.hangs = result.is_none();
        let Some(ReadResult {
            folders,
            special,
            found,
        }) = result
        else {
            // Once it answers, read it again regardless of its stamps.
            self.settled = false;
            self.count_at_read = None;
            return Found::Text(self.source.unresponsive(timeout));
        };
        self.folders = folders;
        // Logged once, not at each check.
        if special != self.special {
            for path in &special {
                warn!("{} is not a regular file; skipped", path.display());
            }
            self.special = special;
        }
        match &found {
            Found::Known => {}
            Found::Text(contents) => {
                self.stamps = contents.stamps.clone();
                self.settled = contents.settled;
            }
            Found::Edited {
                stamps, settled, ..
            } => {
                self.stamps = stamps.clone();
                self.settled = *settled;
            }
        }
        found
    }
}

/// Returns whether a file's last change is at least [`SETTLED`] before `now`.
fn is_older(stamp: FileStamp, now: SystemTime) -> bool {
    let (seconds, nanoseconds) = stamp.changed;
    let changed = u64::try_from(seconds)
        .ok()
        .and_then(|seconds| {
            Duration::from_secs(seconds)
                .checked_add(Duration::from_nanos(nanoseconds.unsigned_abs()))
        })
        .and_then(|since_epoch| SystemTime::UNIX_EPOCH.checked_add(since_epoch));
    // A time in the future proves nothing. It counts as old; otherwise the file would be read at
    // every check.
    changed.is_none_or(|changed| {
        now.duration_since(changed)
            .map_or(true, |age| age >= SETTLED)
    })
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

//----------- Reader ---------------------------------------------------------

/// Files that are read, and files that need not be.
struct Request {
    /// Versions that need not be read again.
    known: Option<Stamps>,
    /// The records with which a records file is compared.
    base: Option<IndexedRecords>,
}

/// Result of reading a source.
struct ReadResult {
    /// Folders in which a change may affect the source.
    folders: Vec<PathBuf>,
    /// Matches that are not regular files.
    special: Vec<PathBuf>,
    found: Found,
}

enum Found {
    /// The files have the known stamps.
    Known,
    Text(Contents),
    /// The records of a file that differs little from the records in the request.
    Edited {
        stamps: Stamps,
        settled: bool,
        records: IndexedRecords,
    },
}

/// Handle to a source's thread, which ends when the handle is dropped or its blocking call returns.
struct FileReader {
    requests: Sender<Request>,
    results: Receiver<ReadResult>,
    /// Number of timed-out requests whose results have not arrived yet.
    overdue: usize,
    /// Time of the pending request.
    requested_at: Option<Instant>,
}

impl FileReader {
    fn new(source: FileSource) -> Self {
        Self::reading(move |request| read(&source, request))
    }

    /// Spawns a reader that calls `read` for each request.
    fn reading(read: impl Fn(Request) -> ReadResult + Send + 'static) -> Self {
        // One request at a time, so a hung file system holds one thread and nothing piles up.
        let (requests, requested) = bounded::<Request>(1);
        let (sender, results) = bounded(1);
        // Without a thread no result arrives, and the owner reports a timeout.
        if let Err(error) = threads::spawn("files", OnPanic::EndProcess, move || {
            for request in requested {
                // The source was replaced, for example by a reload with another path.
                if sender.send(read(request)).is_err() {
                    return;
                }
            }
        }) {
            tracing::error!("cannot start a thread to read files: {error}");
        }
        Self {
            requests,
            results,
            overdue: 0,
            requested_at: None,
        }
    }

    /// Requests the contents, which [`Self::result`] returns. Does nothing while an earlier request
    /// is pending; returns whether it has requested them.
    fn request(&mut self, request: Request) -> bool {
        while self.overdue > 0 {
            if self.results.try_recv().is_err() {
                return false;
            }
            // The result of a request that has timed out.
            self.overdue -= 1;
        }
        if self.requested_at.is_some() || self.requests.try_send(request).is_err() {
            return false;
        }
        self.requested_at = Some(Instant::now());
        true
    }

    /// Returns the contents if they arrive within `timeout` of the request.
    fn result(&mut self, timeout: Duration) -> Option<ReadResult> {
        let result = self
            .results
            .recv_deadline(self.requested_at.take()? + timeout)
            .ok();
        if result.is_none() {
            // Its result comes later, and must not pass for the result of the next request.
            self.overdue += 1;
        }
        result
    }
}

fn read(source: &FileSource, request: Request) -> ReadResult {
    let (stamps, special) = source.walk();
    // Compared as a whole list: a removed file is a change, too.
    let found = if request.known.as_ref() == Some(&stamps) {
        Found::Known
    } else if let Some(records) = edited(source, request.base) {
        Found::Edited {
            settled: stamps.are_settled(),
            stamps,
            records,
        }
    } else {
        Found::Text(stamps.read())
    };
    ReadResult {
        folders: source.folders(),
        special,
        found,
    }
}

/// Returns the records of a file that differs little from `base`. A file that cannot be read is read again as a whole,
/// which reports the error.
fn edited(source: &FileSource, base: Option<IndexedRecords>) -> Option<IndexedRecords> {
    let FileSource::File(path) = source else {
        return None;
    };
    base?.follow(bounded::open(path).ok()?)
}

#[cfg(test)]
impl Followed {
    /// Follows no files; does not answer until the sender is dropped.
    pub(super) fn hanging() -> (Self, Sender<()>) {
        let (answer, answered) = bounded::<()>(0);
        let source = FileSource::Patterns(Vec::new());
        let files = source.clone();
        let reader = FileReader::reading(move |request| {
            // Fails when the sender is gone.
            let _ = answered.recv();
            read(&files, request)
        });
        let followed = Self {
            reader,
            has_answered: true,
            ..Self::new(source)
        };
        (followed, answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_kit::files::watch::Watch;

    #[test]
    fn future_mtime_counts_as_old() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let stamp = FileStamp::of(file.path()).unwrap();
        let (seconds, nanoseconds) = stamp.changed;
        let since_1970 = Duration::from_secs(seconds.cast_unsigned());
        let changed =
            SystemTime::UNIX_EPOCH + since_1970 + Duration::from_nanos(nanoseconds.cast_unsigned());
        assert!(!is_older(stamp, changed + SETTLED / 2));
        assert!(is_older(stamp, changed + 2 * SETTLED));
        // After the clock is set back, the file would be read at every check.
        assert!(is_older(stamp, changed - Duration::from_secs(3600)));
    }

    #[test]
    fn renames_rewrites_and_new_files_change_the_stamps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        let file = FileSource::File(path.clone());
        let pattern = FileSource::Patterns(vec![format!("{}/*.json", folder.path().display())]);
        let missing = (file.walk().0, pattern.walk().0);
        fs::write(&path, "one").unwrap();
        let first = (file.walk().0, pattern.walk().0);
        assert_ne!(missing.0, first.0);
        assert_ne!(missing.1, first.1);
        assert_eq!(file.walk().0, first.0);
        // Same size, different file.
        fs::write(folder.path().join("new"), "two").unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
        let second = file.walk().0;
        assert_ne!(first.0, second);
        // Rewritten in place.
        fs::write(&path, "three").unwrap();
        assert_ne!(file.walk().0, second);
    }

    #[test]
    fn non_regular_files_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("b.json"), "{}").unwrap();
        nix::unistd::mkfifo(&folder.path().join("a.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut followed = Followed::new(FileSource::Patterns(vec![format!(
            "{}/*.json",
            folder.path().display()
        )]));
        let contents = followed.changed(Reading::Always).unwrap();
        assert_eq!(contents.paths(), [folder.path().join("b.json")]);
        assert_eq!(followed.special, [folder.path().join("a.json")]);
        assert_eq!(followed.folders, [folder.path().to_owned()]);
    }

    #[test]
    fn unchanged_contents_are_not_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        let mut followed = Followed::new(FileSource::File(path.clone()));
        assert!(
            followed.changed(Reading::IfChanged).unwrap().files[0]
                .1
                .is_err()
        );
        assert!(followed.changed(Reading::IfChanged).is_none());
        fs::write(&path, "{}").unwrap();
        assert!(followed.changed(Reading::IfChanged).is_some());
        assert!(followed.changed(Reading::IfChanged).is_none());
        fs::write(&path, "{}").unwrap();
        assert!(followed.changed(Reading::IfChanged).is_none());
        assert!(followed.changed(Reading::Always).is_some());
        fs::write(&path, "[]").unwrap();
        assert!(followed.changed(Reading::IfChanged).is_some());
    }

    #[test]
    fn prefetched_contents_are_returned_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        fs::write(&path, "{}").unwrap();
        let mut followed = Followed::new(FileSource::File(path.clone()));
        followed.look_ahead(Reading::Always, None);
        followed.look_ahead(Reading::Always, None);
        assert_eq!(
            followed
                .changed(Reading::Always)
                .unwrap()
                .into_first()
                .unwrap(),
            b"{}"
        );
        fs::write(&path, "[]").unwrap();
        assert_eq!(
            followed
                .changed(Reading::Always)
                .unwrap()
                .into_first()
                .unwrap(),
            b"[]"
        );
    }

    #[test]
    fn first_read_has_longer_limit() {
        let folder = tempfile::tempdir().unwrap();
        let source = FileSource::File(folder.path().join("records.json"));
        fs::write(folder.path().join("records.json"), "{}").unwrap();
        // Slower than the time limit that applies after the first read.
        let slow = source.clone();
        let reader = FileReader::reading(move |request| {
            thread::sleep(TIMEOUT * 3 / 2);
            read(&slow, request)
        });
        let mut followed = Followed {
            reader,
            ..Followed::new(source)
        };
        assert_eq!(
            followed
                .changed(Reading::Always)
                .unwrap()
                .into_first()
                .unwrap(),
            b"{}"
        );
        let ParsedFiles { valid, errors } =
            followed
                .changed(Reading::Always)
                .unwrap()
                .parse(|files: &[(&str, &[u8])]| ParsedFiles {
                    valid: files.len(),
                    errors: Vec::new(),
                });
        assert_eq!((valid, errors.len()), (0, 1));
        assert!(
            errors[0].problem.contains("did not respond within 1 s"),
            "{}",
            errors[0]
        );
    }

    #[test]
    fn partially_written_file_is_retried() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        fs::write(&path, "half").unwrap();
        let mut followed = Followed::new(FileSource::File(path.clone()));
        let mut contents = followed.changed(Reading::IfChanged).unwrap();
        // As on a fast machine, where the file is younger than its time stamp is exact.
        contents.settled = false;
        // The writer continues while the first half is being parsed.
        let (_, parsed) = followed.parse(contents, |files: &[(&str, &[u8])]| {
            let (name, bytes) = files[0];
            let mut errors = Vec::new();
            if bytes != b"whole" {
                fs::write(&path, "whole").unwrap();
                errors.push(ConfigError::of_file(name, "is half"));
            }
            ParsedFiles { valid: (), errors }
        });
        parsed.whole().unwrap();
    }

    #[test]
    fn an_old_file_is_settled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        fs::write(&path, "{}").unwrap();
        let source = FileSource::File(path.clone());
        thread::sleep(SETTLED * 2);
        let contents = source.walk().0.read();
        assert!(contents.settled);
        assert_eq!(contents.files[0].1.as_ref().unwrap(), b"{}");
    }

    /// Waits until writes to the folder of `path` are reported, and none of earlier ones is left.
    fn watch(path: &Path) -> Watch {
        let mut watch = Watch::new();
        watch.set(vec![parent(path)]);
        watch
    }

    #[tokio::test]
    async fn replaced_file_is_read_once() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("records.json");
        fs::write(&path, "{}").unwrap();
        let mut watch = watch(&path);
        let mut followed = Followed::new(FileSource::File(path.clone()));
        followed.rely_on(watch.writes());
        followed.changed(Reading::IfChanged).unwrap();

        let next = folder.path().join("next");
        fs::write(&next, "[]").unwrap();
        // All events of the new file have been counted when the rename is reported.
        fs::rename(&next, &path).unwrap();
        while followed.changed(Reading::IfChanged).is_none() {
            watch.next().await;
        }
        // As on a fast machine, where the file is younger than its time stamp is exact.
        followed.settled = false;
        while followed.known(Reading::IfChanged).is_none() {
            watch.next().await;
            followed.changed(Reading::IfChanged);
            followed.settled = false;
        }

        // A write in place within the same tick of the clock leaves the stamp as it is.
        fs::write(&path, "{}").unwrap();
        while followed.changed(Reading::IfChanged).is_none() {
            watch.next().await;
        }
    }

    #[test]
    fn unreported_writes_are_found_by_reading_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        fs::write(&path, "{}").unwrap();
        let mut followed = Followed::new(FileSource::File(path));
        followed.changed(Reading::IfChanged).unwrap();
        // As on a fast machine.
        followed.settled = false;
        assert_eq!(followed.known(Reading::IfChanged), None);
    }
}
