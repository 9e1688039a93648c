//! The publisher's persistent state: a folder of files, each replaced atomically and synced.
//!
//! Plain files instead of an embedded database: the state is read once at startup and written once
//! per version; operators can read it, copy it and put it under version control.
//!
//! | File | Content |
//! |---|---|
//! | `state.json` | ids, kept versions, the newest last |
//! | `datasets/<version>.json` | datasets that patches start from |
//! | `changes.json` | changes by command that the inventory's files do not contain yet |
//! | `confirmed.json` | number of removals that an operator has confirmed |
//! | `agents.json` | the version that each agent reported; all agents are asked again at a start |
//! | `lock` | held by the one publisher |

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use dns_kit::files::atomic::{self, Attributes};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    dataset::{Dataset, Ids, LAST_VERSION},
    digest,
};

/// Number of versions kept regardless of age.
const KEPT: usize = 10;

/// Age in seconds up to which further versions are kept, within the byte limit.
const KEPT_SECONDS: u64 = 3600;

/// Number of versions kept regardless of size: the newest and the previous one.
const KEPT_AT_LEAST: usize = 2;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PublisherState {
    /// Numeric ids allocated to instances and groups.
    pub ids: Ids,
    /// Kept versions, oldest first; the last one is the fleet's current version.
    pub versions: Vec<CommittedVersion>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CommittedVersion {
    pub version: u64,
    pub blob: String,
    /// `sha256:...` of its dataset.
    pub digest: String,
    /// Time of the commit, in seconds since 1970.
    pub at: u64,
}

/// An open state folder; locked if the publisher opened it.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) path: PathBuf,
    /// Held while the publisher runs.
    _lock: Option<Flock<File>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    #[error("{}: {cause}", path.display())]
    Io { path: PathBuf, cause: io::Error },
    #[error("{}: no publisher has used this folder; correct the path, or start `publish` first", .0.display())]
    NoPublisher(PathBuf),
    #[error("{} is in use by another publisher; stop it, or use another folder", .0.display())]
    Locked(PathBuf),
    #[error(
        "{}: {problem}; without it ids could be assigned twice, or instances removed by mistake: restore the file \
         from a backup", path.display()
    )]
    Content { path: PathBuf, problem: String },
    #[error(transparent)]
    Replace(#[from] atomic::ReplaceError),
    /// A higher version could not be represented exactly as a JSON number.
    #[error(
        "version {0} is the highest possible; start again with an empty state folder and empty agents"
    )]
    NoMoreVersions(u64),
}

impl StateError {
    fn io(path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Io {
            path: path.to_owned(),
            cause,
        }
    }
}

impl Folder {
    /// Opens and locks a folder for the publisher; creates it if it is missing.
    pub(crate) fn lock(path: &Path) -> Result<Self, StateError> {
        fs::create_dir_all(path.join("datasets")).map_err(StateError::io(path))?;
        // The kernel frees the lock when the process ends, however it ends (flock(2)).
        let file = File::create(path.join("lock")).map_err(StateError::io(path))?;
        let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, Errno::EWOULDBLOCK)) => return Err(StateError::Locked(path.to_owned())),
            Err((_, error)) => return Err(StateError::io(path)(error.into())),
        };
        // With the lock, this process is the only one that writes versions.
        atomic::sweep_folder(path);
        atomic::sweep_folder(&path.join("datasets"));
        Ok(Self {
            path: path.to_owned(),
            _lock: Some(lock),
        })
    }

    pub(crate) fn open(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            _lock: None,
        }
    }

    /// Opens the folder of a publisher that has run.
    pub(crate) fn existing(path: &Path) -> Result<Self, StateError> {
        if path.join("datasets").is_dir() {
            Ok(Self::open(path))
        } else {
            Err(StateError::NoPublisher(path.to_owned()))
        }
    }

    /// Reads a file of the folder. Returns `None` if it does not exist.
    pub(crate) fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StateError> {
        let path = self.path.join(name);
        match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(StateError::Io { path, cause }),
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(value) => Ok(Some(value)),
                Err(error) => Err(StateError::Content {
                    path,
                    problem: error.to_string(),
                }),
            },
        }
    }

    pub(crate) fn write(&self, name: &str, value: &impl Serialize) -> Result<(), StateError> {
        let bytes = serde_json::to_vec(value).map_err(|error| StateError::Content {
            path: self.path.join(name),
            problem: error.to_string(),
        })?;
        self.write_bytes(name, &bytes)
    }

    pub(crate) fn write_bytes(&self, name: &str, bytes: &[u8]) -> Result<(), StateError> {
        atomic::replace(&self.path.join(name), bytes, Attributes::PRIVATE)?;
        Ok(())
    }

    /// Edits a file while holding its lock.
    pub(crate) fn edit<T: DeserializeOwned + Serialize + Default, E: From<StateError>>(
        &self,
        name: &str,
        change: impl FnOnce(&mut T) -> Result<(), E>,
    ) -> Result<(), E> {
        // A file of its own: a rename replaces the edited one, and its lock with it.
        let lock = self.path.join(format!("{name}.lock"));
        let file = File::create(&lock).map_err(StateError::io(&lock))?;
        let _held = Flock::lock(file, FlockArg::LockExclusive)
            .map_err(|(_, errno)| StateError::io(&lock)(errno.into()))?;
        // Under the lock, or two commands at once would lose one of the changes.
        let mut value = self.read::<T>(name)?.unwrap_or_default();
        change(&mut value)?;
        Ok(self.write(name, &value)?)
    }

    /// Reads the dataset of a version; `None` if it is not kept.
    pub(crate) fn dataset(&self, version: u64) -> Option<Vec<u8>> {
        fs::read(self.dataset_path(version)).ok()
    }

    fn dataset_path(&self, version: u64) -> PathBuf {
        self.path.join(format!("datasets/{version}.json"))
    }

    pub(crate) fn remove(&self, name: &str) -> Result<(), StateError> {
        let path = self.path.join(name);
        atomic::remove(&path)
            .map(drop)
            .map_err(StateError::io(&path))
    }

    /// Commits a dataset as a version above `floor`, unless the newest version has the same content.
    ///
    /// The dataset is written first, then the state: a crash between them leaves a file that the next commit
    /// replaces. A committed number is never reused for other content. On a full disk, the datasets that only
    /// serve patches are deleted, so that a new version fits without an operator's help.
    pub(crate) fn commit(
        &self,
        state: &mut PublisherState,
        ids: Ids,
        dataset: &Dataset,
        floor: u64,
        now: u64,
    ) -> Result<bool, StateError> {
        let newest = state.versions.last().map_or(0, |made| made.version);
        let same = newest > floor
            && self
                .dataset(newest)
                .is_some_and(|old| old == dataset.write(newest));
        if same && ids == state.ids {
            return Ok(false);
        }
        let mut next = PublisherState {
            ids,
            versions: state.versions.clone(),
        };
        if !same {
            let last = newest.max(floor);
            // Above it, numbers of JSON are not exact everywhere (RFC 8259, section 6).
            if last >= LAST_VERSION {
                return Err(StateError::NoMoreVersions(last));
            }
            let version = last + 1;
            let bytes = dataset.write(version);
            let path = self.dataset_path(version);
            // Any error counts: a full disk has several (ENOSPC, EDQUOT).
            if atomic::replace(&path, &bytes, Attributes::PRIVATE).is_err() {
                self.give_up_datasets(newest);
                atomic::replace(&path, &bytes, Attributes::PRIVATE)?;
            }
            let digest = digest::sha256(&bytes);
            next.versions.push(CommittedVersion {
                version,
                blob: blob_id(),
                digest,
                at: now,
            });
        }
        if self.write("state.json", &next).is_err() {
            self.give_up_datasets(newest);
            self.write("state.json", &next)?;
        }
        // Only now: ahead of the disk, a crash could give one number to two contents.
        *state = next;
        Ok(!same)
    }

    /// Deletes all datasets below the newest committed version.
    fn give_up_datasets(&self, newest: u64) {
        let Ok(entries) = fs::read_dir(self.path.join("datasets")) else {
            return;
        };
        for entry in entries.flatten() {
            let version = entry
                .path()
                .file_stem()
                .and_then(|stem| stem.to_str()?.parse::<u64>().ok());
            // The newest one is what agents download, also after a restart.
            if version.is_some_and(|version| version < newest) {
                // Agents then download the whole blob instead of a patch.
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Deletes old versions before a new one is written: ten are kept, and more from the last hour,
    /// all within `bytes`. Returns the deleted versions, whose blobs can be deleted once a commit succeeded.
    pub(crate) fn forget_old(
        &self,
        state: &mut PublisherState,
        now: u64,
        bytes: u64,
    ) -> Vec<CommittedVersion> {
        let mut kept = 0;
        let mut room = bytes;
        for made in state.versions.iter().rev() {
            let facts = fs::metadata(self.dataset_path(made.version));
            // A dataset that was given up takes no room, but its blob may still be wanted.
            let length = facts.map_or(0, |facts| facts.len());
            // As a director: an agent may still be downloading, and a patch needs the version that an agent has.
            let young = kept < KEPT || made.at.saturating_add(KEPT_SECONDS) >= now;
            // The newest is the fleet's, and patches start from the one before.
            if kept >= KEPT_AT_LEAST && (length > room || !young) {
                break;
            }
            room = room.saturating_sub(length);
            kept += 1;
        }
        let count = state.versions.len() - kept;
        let gone: Vec<CommittedVersion> = state.versions.drain(..count).collect();
        for made in &gone {
            // A leftover only takes up space. On a full disk they make room for the commit, which writes the state.
            let _ = fs::remove_file(self.dataset_path(made.version));
        }
        gone
    }
}

/// Returns a random UUID (RFC 9562, version 4), the form of a director's blob ids.
pub(crate) fn blob_id() -> String {
    // Unique, not secret: who may read a blob is decided by the store or by a signed link.
    let random = (fastrand::u128(..) & !(0xf << 76) & !(0x3 << 62)) | (0x4 << 76) | (0x2 << 62);
    let hex = format!("{random:032x}");
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::{Inventory, file};

    /// Returns a dataset of one instance with this address, and its ids.
    fn dataset(address: &str, mut ids: Ids) -> (Dataset, Ids) {
        let text = format!(
            "deployments: [{{name: d, instance_groups: [{{name: g, instances: [{{id: a, networks: {{n: {address}}}}}]}}]}}]"
        );
        let inventory = Inventory::parse(file::read(text.as_bytes()).unwrap()).unwrap();
        (Dataset::build(&inventory, &mut ids), ids)
    }

    #[test]
    fn unchanged_inventory_makes_no_version() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::lock(place.path()).unwrap();
        assert!(matches!(
            Folder::lock(place.path()),
            Err(StateError::Locked(_))
        ));
        let mut state = PublisherState::default();
        for (address, floor, changed, version) in [
            ("10.0.0.1", 0, true, 1),
            ("10.0.0.1", 0, false, 1),
            ("10.0.0.2", 0, true, 2),
            ("10.0.0.2", 7, true, 8),
        ] {
            let (dataset, ids) = dataset(address, state.ids.clone());
            assert_eq!(
                folder
                    .commit(&mut state, ids, &dataset, floor, 100)
                    .unwrap(),
                changed,
                "{address}"
            );
            let newest = state.versions.last().unwrap();
            assert_eq!(
                (newest.version, folder.dataset(version)),
                (version, Some(dataset.write(version)))
            );
        }
        assert_eq!(
            folder.read::<PublisherState>("state.json").unwrap(),
            Some(state.clone())
        );
        let (dataset, ids) = dataset("10.0.0.3", state.ids.clone());
        let wrapped = folder.commit(&mut state, ids, &dataset, u64::MAX, 100);
        assert!(matches!(wrapped, Err(StateError::NoMoreVersions(u64::MAX))));
        fs::write(place.path().join("state.json"), "{").unwrap();
        assert!(
            folder
                .read::<PublisherState>("state.json")
                .unwrap_err()
                .to_string()
                .contains("assigned twice")
        );
    }

    #[test]
    fn old_versions_are_forgotten() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::lock(place.path()).unwrap();
        let mut state = PublisherState::default();
        for number in 0..15_u64 {
            let (dataset, ids) = dataset(&format!("10.0.0.{number}"), state.ids.clone());
            folder.commit(&mut state, ids, &dataset, 0, number).unwrap();
        }
        assert_eq!(folder.forget_old(&mut state, 100, u64::MAX), []);
        let gone = folder.forget_old(&mut state, 5000, u64::MAX);
        assert_eq!(
            (gone.len(), state.versions.len(), folder.dataset(5)),
            (5, 10, None)
        );
        // If the clock jumps back, more versions are kept, within the byte limit.
        let length = folder.dataset(15).unwrap().len() as u64;
        let gone = folder.forget_old(&mut state, 0, 4 * length + 8);
        assert_eq!(gone.len(), 6);
        assert_eq!(folder.forget_old(&mut state, 0, 0).len(), 2);
        assert_eq!(state.versions.len(), KEPT_AT_LEAST);
    }

    #[test]
    fn blob_ids_are_uuids() {
        let id = blob_id();
        assert_eq!((id.len(), &id[14..15]), (36, "4"));
        assert!(matches!(&id[19..20], "8" | "9" | "a" | "b"), "{id}");
    }

    #[test]
    fn kept_versions_have_limits_of_number_time_and_room() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::lock(place.path()).unwrap();
        let version = |version: u64, at: u64| CommittedVersion {
            version,
            blob: blob_id(),
            digest: String::new(),
            at,
        };
        let length = 100;
        // The state of this many versions, made at these times.
        let kept = |times: &[u64], now: u64, room: u64| {
            let mut state = PublisherState::default();
            for (number, at) in (1..).zip(times) {
                fs::write(folder.dataset_path(number), vec![b' '; length]).unwrap();
                state.versions.push(version(number, *at));
            }
            let gone = folder.forget_old(&mut state, now, room);
            assert_eq!(gone.len() + state.versions.len(), times.len());
            assert!(
                gone.iter()
                    .all(|made| folder.dataset(made.version).is_none())
            );
            assert!(
                state
                    .versions
                    .iter()
                    .all(|made| folder.dataset(made.version).is_some())
            );
            state.versions.len()
        };
        let room = u64::MAX;
        assert_eq!(kept(&[], 0, room), 0);
        // Ten are kept for ever, more of them for an hour.
        assert_eq!(kept(&[0; 10], 9_999_999, room), 10);
        assert_eq!(kept(&[0; 12], KEPT_SECONDS, room), 12);
        assert_eq!(kept(&[0; 12], KEPT_SECONDS + 1, room), 10);
        // As many as fit, but two at least.
        for (room, number) in [(500, 5), (499, 4), (200, 2), (0, 2)] {
            assert_eq!(kept(&[0; 8], 0, room), number, "{room}");
        }
        assert_eq!(kept(&[0], 0, 0), 1);
        assert!(matches!(
            Folder::existing(&place.path().join("x")),
            Err(StateError::NoPublisher(_))
        ));
        let open = Folder::existing(place.path()).unwrap();
        assert_eq!(open.read::<u64>("number").unwrap(), None);
        for _ in 0..2 {
            let edited = open.edit("number", |number: &mut u64| {
                *number += 1;
                Ok::<_, StateError>(())
            });
            edited.unwrap();
        }
        assert_eq!(open.read::<u64>("number").unwrap(), Some(2));
        let refused = open.edit("number", |number: &mut u64| {
            *number = 9;
            Err(StateError::NoMoreVersions(0))
        });
        assert!(refused.is_err() && open.read::<u64>("number").unwrap() == Some(2));
        open.remove("number").unwrap();
        open.remove("number").unwrap();
        assert_eq!(open.read::<u64>("number").unwrap(), None);
        fs::write(folder.dataset_path(3), "x").unwrap();
        fs::write(folder.dataset_path(4), "x").unwrap();
        folder.give_up_datasets(4);
        assert!(folder.dataset(3).is_none() && folder.dataset(4).is_some());
    }

    #[test]
    fn only_version_bits_are_fixed() {
        let (mut all, mut any) = (u128::MAX, 0);
        for _ in 0..256 {
            let id = blob_id();
            for at in [8, 13, 18, 23] {
                assert_eq!(&id[at..=at], "-");
            }
            let number = u128::from_str_radix(&id.replace('-', ""), 16).unwrap();
            all &= number;
            any |= number;
        }
        assert_eq!(format!("{all:032x}"), "00000000000040008000000000000000");
        assert_eq!(format!("{any:032x}"), "ffffffffffff4fffbfffffffffffffff");
    }

    #[test]
    fn folder_errors_name_a_remedy() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("state");
        let shown = path.display();
        let held = Folder::lock(&path).unwrap();
        assert_eq!(
            Folder::lock(&path).unwrap_err().to_string(),
            format!("{shown} is in use by another publisher; stop it, or use another folder")
        );
        assert_eq!(
            Folder::existing(place.path()).unwrap_err().to_string(),
            format!(
                "{}: no publisher has used this folder; correct the path, or start `publish` first",
                place.path().display()
            )
        );
        fs::create_dir(path.join("x")).unwrap();
        assert_eq!(
            held.read::<u64>("x").unwrap_err().to_string(),
            format!("{shown}/x: Is a directory (os error 21)")
        );
        held.write("n", &7_u64).unwrap();
        let facts = fs::metadata(path.join("n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&facts.permissions());
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(
            held.read::<String>("n").unwrap_err().to_string(),
            format!(
                "{shown}/n: invalid type: integer `7`, expected a string at line 1 column 1; without it ids could be \
                 assigned twice, or instances removed by mistake: restore the file from a backup"
            )
        );
        assert_eq!(
            StateError::NoMoreVersions(9).to_string(),
            "version 9 is the highest possible; start again with an empty state folder and empty agents"
        );
        drop(held);
        Folder::lock(&path).unwrap();
    }

    #[test]
    fn last_version_can_be_made() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::lock(place.path()).unwrap();
        let mut state = PublisherState::default();
        let (first, ids) = dataset("10.0.0.1", Ids::default());
        assert!(
            folder
                .commit(&mut state, ids.clone(), &first, LAST_VERSION - 1, 9)
                .unwrap()
        );
        let made = state.versions.last().unwrap();
        assert_eq!((made.version, made.at), (LAST_VERSION, 9));
        assert_eq!(made.digest, digest::sha256(&first.write(LAST_VERSION)));
        let (second, _) = dataset("10.0.0.2", ids.clone());
        let before = state.clone();
        let refused = folder.commit(&mut state, ids, &second, 0, 9);
        assert!(matches!(
            refused,
            Err(StateError::NoMoreVersions(LAST_VERSION))
        ));
        assert_eq!(state, before);
        // New ids alone are saved without a version.
        let mut more = state.ids.clone();
        more.zone("z");
        assert!(!folder.commit(&mut state, more, &first, 0, 9).unwrap());
        assert_eq!(state.versions, before.versions);
        assert_eq!(folder.read("state.json").unwrap(), Some(state.clone()));
        assert_eq!(state.ids.zones.len(), 1);
    }
}
