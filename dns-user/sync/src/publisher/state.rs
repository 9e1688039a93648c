//! The publisher's memory: a folder of files, each replaced as a whole and synced.
//!
//! A file and no embedded database: it is read once, at the start, and written once a version,
//! all of it or nothing; an operator can read it, copy it and keep it under version control.
//!
//! | File | Holds |
//! |---|---|
//! | `state.json` | ids, the newest version, the blobs that are kept |
//! | `datasets/<version>.json` | datasets that patches start from |
//! | `changes.json` | changes by command that the inventory's files do not have yet |
//! | `agents.json` | who has what; lost, all are asked again |
//! | `lock` | held by the one publisher |

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    dataset::Dataset,
    digest,
    files::{self, Permissions},
    ids::Ids,
};

/// Blobs and datasets that are kept however old they are.
pub(crate) const KEPT: usize = 10;

/// Age in seconds up to which a blob is kept however many there are.
const KEPT_SECONDS: u64 = 3600;

/// `state.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Ids.
    pub ids: Ids,
    /// Versions that were made, oldest first; the last one is what the fleet should have.
    pub versions: Vec<Made>,
}

/// A version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Made {
    /// Version.
    pub version: u64,
    /// Id of its blob.
    pub blob: String,
    /// `sha256:...`.
    pub digest: String,
    /// When, in seconds since 1970.
    pub at: u64,
}

/// The folder, locked.
#[derive(Debug)]
pub struct Folder {
    /// Where.
    path: PathBuf,
    /// Held while the publisher lives.
    _lock: Option<Flock<File>>,
}

/// Why the state cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The system refuses something.
    #[error("{}: {source}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// What it says.
        source: io::Error,
    },
    /// Another publisher has it.
    #[error("{} is in use by another publisher; stop it, or give this one another folder", .0.display())]
    Locked(PathBuf),
    /// A file is not what it was.
    #[error("{}: {problem}; ids must not be given away twice: restore the file from a copy", path.display())]
    Content {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file could not be written.
    #[error(transparent)]
    Replace(#[from] files::ReplaceError),
}

impl Folder {
    /// Opens a folder as its one publisher; makes it where it is missing.
    pub fn lock(path: &Path) -> Result<Self, StateError> {
        let failed = |source| StateError::Io { path: path.to_owned(), source };
        fs::create_dir_all(path.join("datasets")).map_err(failed)?;
        let file = File::create(path.join("lock")).map_err(failed)?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|_| StateError::Locked(path.to_owned()))?;
        // The one writer of these: what a killed predecessor left goes.
        for name in ["state.json", "agents.json"] {
            files::sweep(&path.join(name));
        }
        Ok(Self { path: path.to_owned(), _lock: Some(lock) })
    }

    /// Opens a folder to read it, and to change what is changed by command.
    pub fn look(path: &Path) -> Self {
        Self { path: path.to_owned(), _lock: None }
    }

    /// Reads one of its files; `None` where there is none.
    pub fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StateError> {
        let path = self.path.join(name);
        match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(StateError::Io { path, source }),
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(value) => Ok(Some(value)),
                Err(error) => Err(StateError::Content { path, problem: error.to_string() }),
            },
        }
    }

    /// Writes one of its files.
    pub fn write(&self, name: &str, value: &impl Serialize) -> Result<(), StateError> {
        let path = self.path.join(name);
        let bytes = serde_json::to_vec(value)
            .map_err(|error| StateError::Content { path: path.clone(), problem: error.to_string() })?;
        Ok(files::replace(&path, &bytes, Permissions::PRIVATE)?)
    }

    /// Changes a file while no other command does.
    pub fn edit<T: DeserializeOwned + Serialize + Default, E: From<StateError>>(
        &self,
        name: &str,
        change: impl FnOnce(&mut T) -> Result<(), E>,
    ) -> Result<(), E> {
        let lock = self.path.join(format!("{name}.lock"));
        let failed = |source| StateError::Io { path: lock.clone(), source };
        let file = File::create(&lock).map_err(failed)?;
        let _held = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| failed(errno.into()))?;
        let mut value = self.read::<T>(name)?.unwrap_or_default();
        change(&mut value)?;
        Ok(self.write(name, &value)?)
    }

    /// The dataset of a version, if it is still there.
    pub fn dataset(&self, version: u64) -> Option<Vec<u8>> {
        fs::read(self.dataset_path(version)).ok()
    }

    /// Where the dataset of a version is.
    fn dataset_path(&self, version: u64) -> PathBuf {
        self.path.join(format!("datasets/{version}.json"))
    }

    /// Makes a version of a dataset, above `floor`, unless the newest one says the same.
    ///
    /// First the dataset, then the state: a crash between them leaves a file that the next
    /// version replaces. Once this is done the version is never given to anything else.
    pub fn commit(
        &self,
        state: &mut State,
        ids: Ids,
        dataset: &Dataset,
        floor: u64,
        now: u64,
    ) -> Result<bool, StateError> {
        let newest = state.versions.last().map_or(0, |made| made.version);
        let same = newest > floor && self.dataset(newest).is_some_and(|old| old == dataset.write(newest));
        if same && ids == state.ids {
            return Ok(false);
        }
        let mut next = State { ids, versions: state.versions.clone() };
        if !same {
            let version = newest.max(floor) + 1;
            let bytes = dataset.write(version);
            files::replace(&self.dataset_path(version), &bytes, Permissions::PRIVATE)?;
            let digest = digest::sha256(&bytes);
            next.versions.push(Made { version, blob: blob_id(), digest, at: now });
        }
        self.write("state.json", &next)?;
        *state = next;
        Ok(!same)
    }

    /// Forgets old versions: ten remain, and all of the last hour. Returns the forgotten.
    pub fn forget_old(&self, state: &mut State, now: u64) -> Result<Vec<Made>, StateError> {
        let surplus = state.versions.len().saturating_sub(KEPT);
        let old = |made: &&Made| made.at + KEPT_SECONDS < now;
        let count = state.versions.iter().take(surplus).take_while(old).count();
        if count == 0 {
            return Ok(Vec::new());
        }
        let gone: Vec<Made> = state.versions.drain(..count).collect();
        self.write("state.json", state)?;
        for made in &gone {
            // What is left of a dataset costs room only.
            let _ = fs::remove_file(self.dataset_path(made.version));
        }
        Ok(gone)
    }
}

/// A random uuid (RFC 9562, version 4), as a director names its blobs.
pub(crate) fn blob_id() -> String {
    let random = (fastrand::u128(..) & !(0xf << 76) & !(0x3 << 62)) | (0x4 << 76) | (0x2 << 62);
    let hex = format!("{random:032x}");
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::{Inventory, file};

    /// A dataset of one instance with this address, and its ids.
    fn dataset(address: &str, mut ids: Ids) -> (Dataset, Ids) {
        let text = format!(
            "deployments: [{{name: d, instance_groups: [{{name: g, instances: [{{id: a, networks: {{n: {address}}}}}]}}]}}]"
        );
        let inventory = Inventory::parse(file::read(text.as_bytes()).unwrap()).unwrap();
        (Dataset::build(&inventory, &mut ids), ids)
    }

    #[test]
    fn a_version_is_made_only_when_something_changed() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::lock(place.path()).unwrap();
        assert!(matches!(Folder::lock(place.path()), Err(StateError::Locked(_))));
        let mut state = State::default();
        for (address, floor, changed, version) in [
            ("10.0.0.1", 0, true, 1),
            ("10.0.0.1", 0, false, 1),
            ("10.0.0.2", 0, true, 2),
            ("10.0.0.2", 7, true, 8),
        ] {
            let (dataset, ids) = dataset(address, state.ids.clone());
            assert_eq!(folder.commit(&mut state, ids, &dataset, floor, 100).unwrap(), changed, "{address}");
            let newest = state.versions.last().unwrap();
            assert_eq!((newest.version, folder.dataset(version)), (version, Some(dataset.write(version))));
        }
        assert_eq!(folder.read::<State>("state.json").unwrap(), Some(state));
        fs::write(place.path().join("state.json"), "{").unwrap();
        assert!(folder.read::<State>("state.json").unwrap_err().to_string().contains("given away twice"));
    }

    #[test]
    fn ten_versions_and_the_last_hour_remain() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::lock(place.path()).unwrap();
        let mut state = State::default();
        for number in 0..15_u64 {
            let (dataset, ids) = dataset(&format!("10.0.0.{number}"), state.ids.clone());
            folder.commit(&mut state, ids, &dataset, 0, number).unwrap();
        }
        assert_eq!(folder.forget_old(&mut state, 100).unwrap(), []);
        let gone = folder.forget_old(&mut state, 5000).unwrap();
        assert_eq!((gone.len(), state.versions.len(), folder.dataset(5)), (5, 10, None));
    }

    #[test]
    fn blobs_are_named_by_uuids() {
        let id = blob_id();
        assert_eq!((id.len(), &id[14..15]), (36, "4"));
        assert!(matches!(&id[19..20], "8" | "9" | "a" | "b"), "{id}");
    }
}
