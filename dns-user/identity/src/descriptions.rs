//! The watched folder: one file `GUID.json` per container.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use dns_kit::files::bounded;

use crate::{
    profile::{Container, Guid},
    rotator::Rotator,
};

/// Delay before an unchanged description that failed is retried.
const RETRY: Duration = Duration::from_secs(10);

/// Keeps a rotator's identities in sync with the files of a folder.
#[derive(Debug)]
pub struct Descriptions {
    folder: PathBuf,
    /// Applied descriptions by guid.
    applied: BTreeMap<Guid, Container>,
    /// Failures by file, so that each is reported once.
    problems: BTreeMap<PathBuf, (String, SystemTime)>,
}

impl Descriptions {
    /// Creates a watcher of `folder`, without reading it.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder, applied: BTreeMap::new(), problems: BTreeMap::new() }
    }

    /// Creates, updates and destroys identities to match the files. If a file cannot be read, its
    /// identity stays unchanged; if the folder cannot be listed, all stay unchanged.
    pub fn reconcile(&mut self, rotator: &mut Rotator, now: SystemTime) {
        tracing::trace!(folder = %self.folder.display(), "reading descriptions");
        let files = match list(&self.folder) {
            Ok(files) => files,
            Err(error) => {
                let folder = self.folder.clone();
                self.report(folder, format!("{error}; identities stay unchanged"), now);
                return;
            }
        };
        self.problems.remove(&self.folder.clone());
        let mut present = BTreeSet::new();
        for path in files {
            let Some(guid) = guid_of(&path) else {
                self.report(path, "the name is not GUID.json; rename the file".to_owned(), now);
                continue;
            };
            present.insert(guid.clone());
            if self.problems.get(&path).is_some_and(|(_, at)| now < *at + RETRY && *at <= now) {
                continue;
            }
            let applied = read(&path, &guid).and_then(|container| {
                if self.applied.get(&guid) != Some(&container) {
                    rotator.create(container.clone(), now).map_err(|error| error.to_string())?;
                    self.applied.insert(guid, container);
                }
                Ok(())
            });
            match applied {
                Ok(()) => drop(self.problems.remove(&path)),
                Err(problem) => self.report(path, problem, now),
            }
        }
        self.problems.retain(|path, _| *path == self.folder || path.exists());
        for guid in rotator.guids().difference(&present) {
            match rotator.destroy(guid) {
                Ok(()) => drop(self.applied.remove(guid)),
                Err(error) => self.report(self.folder.join(guid.as_str()), error.to_string(), now),
            }
        }
    }

    fn report(&mut self, path: PathBuf, problem: String, now: SystemTime) {
        let before = self.problems.insert(path.clone(), (problem.clone(), now));
        if before.is_none_or(|(before, _)| before != problem) {
            tracing::error!("{}: {problem}", path.display());
        }
    }
}

/// Lists the files ending in `.json`, except hidden ones (temporary files of editors and writers).
fn list(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.ends_with(".json") && !name.starts_with('.') {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

fn guid_of(path: &Path) -> Option<Guid> {
    Guid::try_from(path.file_stem()?.to_str()?.to_owned()).ok()
}

/// Reads one description; the error names the position of the mistake.
pub fn read(path: &Path, guid: &Guid) -> Result<Container, String> {
    let text = bounded::read(path).map_err(|error| error.to_string())?;
    let container: Container =
        serde_json::from_slice(&text).map_err(|error| format!("{error}; correct the description"))?;
    if container.guid == *guid {
        Ok(container)
    } else {
        Err(format!("its guid is {}, but the file is named after {guid}; rename it", container.guid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifo_description_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = read(&path, &Guid::try_from("a".to_owned()).unwrap()).unwrap_err();
        assert_eq!(error, "it is not a regular file");
    }
}
