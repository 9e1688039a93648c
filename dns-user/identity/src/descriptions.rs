//! The watched folder: one file `GUID.json` per container.
//!
//! [`RemovalGuard`] holds up the removal of many entries at once: a replaced folder or an empty file is more
//! often a mistake than the end of a fleet.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{anyhow, ensure};
use dns_kit::files::{FileStamp, atomic, bounded};

use crate::{
    certificate::seconds,
    profile::{Container, Guid},
    rotator::{Problem, Rotator, RotatorError},
};

/// Maximum size of a description in bytes.
const MAX_DESCRIPTION: u64 = 1 << 20;

/// Delay before an unchanged description that failed is retried.
const RETRY: Duration = Duration::from_secs(10);

/// Keeps a rotator's identities in sync with the files of a folder.
#[derive(Debug)]
pub struct Descriptions {
    folder: PathBuf,
    /// Applied descriptions by guid, with the stamps of files that need not be read again.
    applied: BTreeMap<Guid, (Container, Option<FileStamp>)>,
    /// Failures by file and the time of the last attempt, so that each is reported once.
    problems: BTreeMap<PathBuf, (String, SystemTime)>,
    guard: RemovalGuard,
}

impl Descriptions {
    /// Creates a watcher of `folder`, without reading it.
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            applied: BTreeMap::new(),
            problems: BTreeMap::new(),
            guard: RemovalGuard::default(),
        }
    }

    /// Returns the files and folders without an identity.
    pub fn problems(&self) -> impl Iterator<Item = Problem> {
        self.problems.iter().map(|(path, (message, _))| Problem {
            path: path.clone(),
            message: message.clone(),
        })
    }

    /// Confirms that up to `number` identities may be removed at once.
    pub fn confirm_removals(&mut self, number: usize) {
        self.guard.confirm(number);
    }

    /// Creates, updates and destroys identities to match the files. If a file cannot be read, its
    /// identity stays unchanged; if the folder cannot be listed, all stay unchanged.
    pub fn reconcile(&mut self, rotator: &mut Rotator, now: SystemTime) {
        tracing::trace!(folder = %self.folder.display(), "reading descriptions");
        let folder = self.folder.clone();
        let files = match list(&folder) {
            Ok(files) => files,
            Err(error) => {
                // A folder that cannot be read is not an empty one.
                self.report(folder, format!("{error}; identities stay unchanged"), now);
                return;
            }
        };
        let mut present = BTreeSet::new();
        for path in files {
            let Some(guid) = guid_of(&path) else {
                self.report(
                    path,
                    "the name is not GUID.json; rename the file".to_owned(),
                    now,
                );
                continue;
            };
            // Before the file is read: a mistake in a description must not remove its identity.
            present.insert(guid.clone());
            if self
                .problems
                .get(&path)
                // A time in the future dates from before the clock was set back.
                .is_some_and(|(_, at)| now < *at + RETRY && *at <= now)
            {
                continue;
            }
            match self.apply(&path, guid, rotator, now) {
                Ok(()) => drop(self.problems.remove(&path)),
                Err((problem, failure)) => {
                    if self.report(path, problem, now)
                        && let Some(failure) = failure
                    {
                        rotator.count_failure(&failure);
                    }
                }
            }
        }
        let known = rotator.guids();
        self.problems.retain(|path, _| {
            *path == folder
                || path.exists()
                // Of an identity that cannot be removed: it would be logged again every time.
                || known.iter().any(|guid| folder.join(guid.as_str()) == *path)
        });
        let missing: Vec<&Guid> = known.difference(&present).collect();
        if let Err(held) = self.guard.check(known.len(), missing.len(), now) {
            self.report(folder, held, now);
            return;
        }
        self.problems.remove(&folder);
        for guid in missing {
            match rotator.destroy(guid) {
                Ok(()) => drop(self.applied.remove(guid)),
                Err(error) => drop(self.report(folder.join(guid.as_str()), error.to_string(), now)),
            }
        }
    }

    /// Applies one description if it changed; the error also has the rotator's, if it is one.
    fn apply(
        &mut self,
        path: &Path,
        guid: Guid,
        rotator: &mut Rotator,
        now: SystemTime,
    ) -> Result<(), (String, Option<RotatorError>)> {
        // Without a settled stamp, the file is read again next time: it may change unnoticed.
        let stamp = FileStamp::of(path).filter(is_settled);
        let applied = self.applied.get(&guid);
        if stamp.is_some() && applied.is_some_and(|(_, before)| *before == stamp) {
            return Ok(());
        }
        let container = read(path, &guid).map_err(|error| (error.to_string(), None))?;
        // A file that was only touched or written again must not renew a pair.
        if applied.is_none_or(|(before, _)| *before != container) {
            rotator
                .create(container.clone(), now)
                .map_err(|error| (error.to_string(), Some(error)))?;
        }
        self.applied.insert(guid, (container, stamp));
        Ok(())
    }

    /// Records a problem; returns whether it is new.
    fn report(&mut self, path: PathBuf, problem: String, now: SystemTime) -> bool {
        let before = self.problems.insert(path.clone(), (problem.clone(), now));
        let is_new = before.is_none_or(|(before, _)| before != problem);
        if is_new {
            tracing::error!("{}: {problem}", path.display());
        }
        is_new
    }
}

/// Returns whether every later change of the file changes its stamp: time stamps have a resolution of
/// up to 10 ms.
fn is_settled(stamp: &FileStamp) -> bool {
    stamp.changed.0 + 1 < seconds(SystemTime::now()).cast_signed()
}

/// Lists the files ending in `.json`, except hidden ones (temporary files of editors and writers).
fn list(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = atomic::read_folder(folder)?;
    files.retain(|path| path.extension().is_some_and(|ending| ending == "json"));
    Ok(files)
}

fn guid_of(path: &Path) -> Option<Guid> {
    Guid::try_from(path.file_stem()?.to_str()?.to_owned()).ok()
}

/// Reads one description; the error names the position of the mistake.
pub fn read(path: &Path, guid: &Guid) -> anyhow::Result<Container> {
    let container = read_any(path)?;
    let own = &container.guid;
    ensure!(
        own == guid,
        "its guid is {own}, but the file is named after {guid}; rename it"
    );
    Ok(container)
}

/// Reads the description of any instance.
pub fn read_any(path: &Path) -> anyhow::Result<Container> {
    // The general limit of files is far larger, and a description is parsed as one value.
    let text = bounded::read_at_most(path, MAX_DESCRIPTION)?;
    serde_json::from_slice(&text).map_err(|error| anyhow!("{error}; correct the description"))
}

/// Time after which a removal that was not confirmed takes effect.
const HOLD: Duration = Duration::from_secs(600);

/// Longest time between two checks.
const MAX_INTERVAL: Duration = Duration::from_secs(60);

/// Number of entries that may always disappear at once.
const FEW: usize = 10;

/// Decides whether entries may be removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RemovalGuard {
    /// Time at which the current removal was last seen, and for how long it has been seen.
    seen: Option<(SystemTime, Duration)>,
    /// Number of removals that an operator confirmed.
    confirmed: usize,
}

impl RemovalGuard {
    /// Returns whether `missing` of `known` entries may be removed at `now`: at most max(10, 10 %),
    /// a confirmed number, or all that have been missing for ten minutes. The error says how to confirm.
    pub(crate) fn check(
        &mut self,
        known: usize,
        missing: usize,
        now: SystemTime,
    ) -> Result<(), String> {
        if missing <= FEW.max(known / 10) {
            self.seen = None;
            return Ok(());
        }
        let (last, seen) = self.seen.unwrap_or((now, Duration::ZERO));
        // A clock that jumps ahead must not end the time in which the entries can return.
        let passed = now.duration_since(last).unwrap_or_default();
        let seen = seen + passed.min(MAX_INTERVAL);
        self.seen = Some((now, seen));
        if missing <= self.confirmed || seen >= HOLD {
            *self = Self::default();
            return Ok(());
        }
        Err(format!(
            "{missing} of {known} disappeared at once; they stay for 10 minutes, in which they can return: if this \
             is meant, run `bosh-dns-identity confirm-removals {missing}`"
        ))
    }

    /// Confirms the removal of up to `number` entries, once.
    pub(crate) fn confirm(&mut self, number: usize) {
        self.confirmed = number;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::tests::{START, World, at};

    #[test]
    fn fifo_description_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = read(&path, &Guid::try_from("a".to_owned()).unwrap()).unwrap_err();
        assert_eq!(error.to_string(), "it is not a regular file");
        let file = fs::File::create(folder.path().join("b.json")).unwrap();
        for (len, is_larger) in [(MAX_DESCRIPTION, false), (MAX_DESCRIPTION + 1, true)] {
            file.set_len(len).unwrap();
            // Zeros are no JSON either.
            let error = read_any(&folder.path().join("b.json")).unwrap_err();
            assert_eq!(
                error.to_string().starts_with("it is larger than 1 MiB"),
                is_larger,
                "{len}: {error}"
            );
        }
    }

    #[test]
    fn mass_removals_wait() {
        let mut guard = RemovalGuard::default();
        let start = SystemTime::now();
        assert_eq!(guard.check(50, 10, start), Ok(()));
        assert_eq!(guard.check(1000, 100, start), Ok(()));
        assert!(guard.check(50, 11, start).is_err());
        for minute in 1..10 {
            let now = start + minute * MAX_INTERVAL;
            assert!(guard.check(50, 50, now).is_err(), "{minute}");
        }
        assert_eq!(guard.check(50, 50, start + HOLD), Ok(()));
        assert!(
            guard.check(50, 50, start + HOLD).is_err(),
            "the next removal waits again"
        );
        // The entries return.
        assert_eq!(guard.check(50, 0, start + HOLD), Ok(()));
        assert!(guard.check(50, 50, start + 2 * HOLD).is_err());
    }

    #[test]
    fn confirmation_counts_once() {
        let mut guard = RemovalGuard::default();
        let now = SystemTime::now();
        guard.confirm(20);
        assert!(guard.check(100, 21, now).is_err());
        assert_eq!(guard.check(100, 20, now), Ok(()));
        assert!(guard.check(100, 20, now).is_err());
    }

    #[test]
    fn wrong_clock_neither_prolongs_nor_ends_the_wait() {
        let mut guard = RemovalGuard::default();
        let now = SystemTime::now();
        assert!(guard.check(50, 50, now).is_err());
        let earlier = now - 10 * HOLD;
        let later = now + 5000 * HOLD;
        for jump in [later, now, earlier] {
            assert!(guard.check(50, 50, jump).is_err());
        }
        // The jump ahead counted as one interval.
        for minute in 1..9 {
            let now = earlier + minute * MAX_INTERVAL;
            assert!(guard.check(50, 50, now).is_err(), "{minute}");
        }
        assert_eq!(guard.check(50, 50, earlier + 9 * MAX_INTERVAL), Ok(()));
    }

    #[test]
    fn stamp_is_settled_after_a_second() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut stamp = FileStamp::of(file.path()).unwrap();
        let seconds = || {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            now.unwrap().as_secs() as i64
        };
        // Until a whole round falls within one second of the clock.
        loop {
            let now = seconds();
            let found = [1000, 0, -1, -2, -1000].map(|since| {
                stamp.changed.0 = now + since;
                is_settled(&stamp)
            });
            if seconds() == now {
                assert_eq!(found, [false, false, false, true, true]);
                break;
            }
        }
    }

    #[test]
    fn files_are_named_after_instances() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a.json", "b.yml", ".c.json", "d", "e.json.tmp"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(list(folder.path()).unwrap(), [folder.path().join("a.json")]);
        let guid = |name: &str| guid_of(Path::new(name)).map(|guid| guid.to_string());
        assert_eq!(guid("/f/a.b.json").as_deref(), Some("a.b"));
        assert_eq!(guid("/f/a b.json"), None);
    }

    /// A rotator with a folder of descriptions.
    struct Cell {
        world: World,
        descriptions: Descriptions,
        path: PathBuf,
    }

    impl Cell {
        fn new() -> Self {
            let world = World::new();
            let path = world.folder.path().join("containers");
            fs::create_dir(&path).unwrap();
            Self {
                descriptions: Descriptions::new(path.clone()),
                world,
                path,
            }
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.path.join(name), text).unwrap();
        }

        /// Reads the folder; returns the ids of all identities.
        fn reconcile(&mut self, now: u64) -> Vec<String> {
            self.descriptions
                .reconcile(&mut self.world.rotator, at(now));
            let guids = self.world.rotator.guids();
            guids.iter().map(Guid::to_string).collect()
        }

        /// Returns the names of files and their problems.
        fn problems(&self) -> Vec<(String, String)> {
            let mut problems = Vec::new();
            for Problem { path, message } in self.descriptions.problems() {
                let name = path.strip_prefix(&self.path).unwrap().display().to_string();
                problems.push((name, message));
            }
            problems
        }

        fn failures(&self) -> BTreeMap<String, u64> {
            self.world.rotator.status(at(START)).failures
        }
    }

    #[test]
    fn identities_follow_their_files() {
        let mut cell = Cell::new();
        cell.write("a.json", r#"{"guid":"a"}"#);
        cell.write("b.json", r#"{"guid":"b"}"#);
        cell.write("c.json.tmp", r#"{"guid":"c"}"#);
        assert_eq!(cell.reconcile(START), ["a", "b"]);
        let pair = |cell: &Cell| cell.world.read("a", "instance.crt");
        let first = pair(&cell);
        // Written again without a change.
        cell.write("a.json", r#"{ "guid": "a" }"#);
        assert_eq!(cell.reconcile(START + 1), ["a", "b"]);
        assert_eq!(pair(&cell), first);
        cell.write("a.json", r#"{"guid":"a","ous":["app:x"]}"#);
        assert_eq!(cell.reconcile(START + 2), ["a", "b"]);
        assert_ne!(pair(&cell), first);
        fs::remove_file(cell.path.join("b.json")).unwrap();
        assert_eq!(cell.reconcile(START + 3), ["a"]);
        assert!(!cell.world.path("b").exists());
        // A file that returns has a new identity.
        cell.write("b.json", r#"{"guid":"b"}"#);
        assert_eq!(cell.reconcile(START + 4), ["a", "b"]);
        assert_eq!(cell.problems(), []);
    }

    #[test]
    fn mistakes_keep_the_identity() {
        let mut cell = Cell::new();
        cell.write("a.json", r#"{"guid":"a"}"#);
        cell.write("b.json", r#"{"guid":"x"}"#);
        cell.write("b c.json", r#"{"guid":"c"}"#);
        cell.write("d.json", r#"{"guid":"d","ous":[""]}"#);
        assert_eq!(cell.reconcile(START), ["a"]);
        let of = |name: &str, message: &str| (name.to_owned(), message.to_owned());
        let others = [
            of("b c.json", "the name is not GUID.json; rename the file"),
            of(
                "b.json",
                "its guid is x, but the file is named after b; rename it",
            ),
            of(
                "d.json",
                "an organizational unit is empty; remove it from `ous`",
            ),
        ];
        assert_eq!(cell.problems(), others);
        // Only what the rotator refused is its failure.
        assert_eq!(cell.failures(), BTreeMap::from([("profile".to_owned(), 1)]));
        cell.write("a.json", "{");
        assert_eq!(cell.reconcile(START + 1), ["a"]);
        let broken = "EOF while parsing an object at line 1 column 1; correct the description";
        let mut all = vec![of("a.json", broken)];
        all.extend(others);
        assert_eq!(cell.problems(), all);
        // Tried again after ten seconds, or by a clock that was set back.
        cell.write("a.json", r#"{"guid":"a","ous":["app:a"]}"#);
        assert_eq!(cell.reconcile(START + 10), ["a"]);
        assert_eq!(cell.problems(), all);
        assert_eq!(cell.reconcile(START + 11), ["a"]);
        assert_eq!(cell.problems(), all[1..]);
        assert_eq!(
            cell.world.read("a", "container.json"),
            r#"{"guid":"a","ous":["app:a"]}"#
        );
        cell.write("b.json", r#"{"guid":"b"}"#);
        assert_eq!(cell.reconcile(START - 1), ["a", "b"]);
        assert_eq!(cell.failures(), BTreeMap::from([("profile".to_owned(), 1)]));
        fs::remove_file(cell.path.join("d.json")).unwrap();
        cell.reconcile(START + 20);
        assert_eq!(cell.problems(), all[1..2]);
    }

    #[test]
    fn unreadable_folder_is_not_empty() {
        let mut cell = Cell::new();
        cell.write("a.json", r#"{"guid":"a"}"#);
        cell.reconcile(START);
        let away = cell.path.with_extension("away");
        fs::rename(&cell.path, &away).unwrap();
        assert_eq!(cell.reconcile(START + 1), ["a"]);
        let message = "No such file or directory (os error 2); identities stay unchanged";
        assert_eq!(cell.problems(), [(String::new(), message.to_owned())]);
        fs::rename(&away, &cell.path).unwrap();
        assert_eq!(cell.reconcile(START + 2), ["a"]);
        assert_eq!(cell.problems(), []);
    }

    #[test]
    fn failing_removal_is_logged_once() {
        let mut cell = Cell::new();
        cell.write("a.json", r#"{"guid":"a"}"#);
        cell.reconcile(START);
        // The name that the folder gets while it is removed.
        fs::write(cell.world.path(".removed-a"), "").unwrap();
        fs::remove_file(cell.path.join("a.json")).unwrap();
        let log = tempfile::NamedTempFile::new().unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(std::sync::Arc::new(log.reopen().unwrap()))
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            for second in 1..4 {
                assert_eq!(cell.reconcile(START + second), ["a"]);
                assert_eq!(cell.problems().len(), 1);
            }
        });
        let lines = fs::read_to_string(log.path()).unwrap();
        assert_eq!(lines.matches("Not a directory").count(), 1, "{lines}");
        fs::remove_file(cell.world.path(".removed-a")).unwrap();
        assert_eq!(cell.reconcile(START + 4), [""; 0]);
        cell.reconcile(START + 5);
        assert_eq!(cell.problems(), []);
    }

    #[test]
    fn many_removals_wait_for_a_confirmation() {
        let mut cell = Cell::new();
        for number in 0..11 {
            let text = format!(r#"{{"guid":"g{number}"}}"#);
            cell.write(&format!("g{number}.json"), &text);
        }
        assert_eq!(cell.reconcile(START).len(), 11);
        let away = cell.path.with_extension("away");
        fs::rename(&cell.path, &away).unwrap();
        fs::create_dir(&cell.path).unwrap();
        assert_eq!(cell.reconcile(START + 1).len(), 11);
        let held = "11 of 11 disappeared at once; they stay for 10 minutes, in which they can return: if this is \
                    meant, run `bosh-dns-identity confirm-removals 11`";
        assert_eq!(cell.problems(), [(String::new(), held.to_owned())]);
        cell.descriptions.confirm_removals(10);
        assert_eq!(cell.reconcile(START + 2).len(), 11);
        cell.descriptions.confirm_removals(11);
        assert_eq!(cell.reconcile(START + 3), [""; 0]);
        assert_eq!(cell.problems(), []);
    }
}
