//! `/local-groups`: the links of this machine's jobs, with the health of their groups.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::{sync::Mutex, time::sleep};

use crate::ops::service_status::{Part, ServiceStatus};
use dns_health::InstanceHealth;
use dns_kit::files::{Reading, bounded};

/// Interval between looks at the folder, for `status`.
const INTERVAL: Duration = Duration::from_secs(5);

/// A line of `/local-groups`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Job name; empty in the line for the VM as a whole.
    pub job_name: String,
    /// Name of the link provided by the job.
    pub link_name: String,
    /// Type of the link.
    pub link_type: String,
    /// Id of the link's group.
    pub group_id: String,
    /// Health state; empty if unknown or if checks are off (observed).
    pub health_state: String,
}

/// A link in a job's `links.json`; other members are ignored.
#[derive(Debug, Deserialize)]
pub(super) struct Link {
    group: String,
    name: String,
    /// Type of the link.
    #[serde(rename = "type")]
    link_type: String,
}

/// Returns the lines: the VM as a whole, then each link with the state of its group.
pub(super) fn groups(links: Vec<(String, Link)>, health: Option<&InstanceHealth>) -> Vec<Group> {
    let mut states = HashMap::new();
    for (group, state) in health.into_iter().flat_map(|health| &health.groups) {
        states.insert(&**group, state.label());
    }
    let of_vm = health.map_or("", |health| health.state.label());
    let mut lines = vec![Group {
        health_state: of_vm.to_owned(),
        ..Group::default()
    }];
    for (job_name, link) in links {
        let Link {
            group,
            name,
            link_type,
        } = link;
        let state = states.get(group.as_str()).copied().unwrap_or_default();
        lines.push(Group {
            job_name,
            link_name: name,
            link_type,
            health_state: state.to_owned(),
            group_id: group,
        });
    }
    lines
}

//----------- Jobs -----------------------------------------------------------

/// The jobs in the folder `jobs_dir`, and what keeps them from being read.
pub(crate) struct LocalJobs {
    folder: PathBuf,
    /// One at a time: on a mount that hangs each would take a thread for ever.
    reading: Mutex<Reading<io::Result<Found>>>,
    /// Unusable files, as of the last look.
    unusable: parking_lot::Mutex<Vec<String>>,
    service_status: ServiceStatus,
}

/// The links of all jobs, sorted by the name of the job, and the files that cannot be used.
#[derive(Debug, Default)]
struct Found {
    links: Vec<(String, Link)>,
    unusable: Vec<String>,
}

impl LocalJobs {
    pub(crate) fn new(folder: PathBuf, service_status: ServiceStatus) -> Self {
        Self {
            folder,
            reading: Mutex::default(),
            unusable: parking_lot::Mutex::default(),
            service_status,
        }
    }

    /// Looks at the folder until the process ends: it may appear, and vanish, at any time.
    pub(crate) async fn watch(self: Arc<Self>) {
        loop {
            self.links().await;
            sleep(INTERVAL).await;
        }
    }

    /// Returns the links of each job by its name; none while the folder cannot be read, which `status` shows.
    pub(super) async fn links(&self) -> Vec<(String, Link)> {
        let folder = self.folder.clone();
        let mut reading = self.reading.lock().await;
        let result = reading.result(move || read_jobs(&folder)).await;
        drop(reading);
        let Found { links, unusable } = match result.flatten() {
            Ok(found) => {
                self.service_status.set_off(Part::LocalGroups, None);
                found
            }
            Err(error) => {
                let folder = self.folder.display();
                let error = match error.kind() {
                    io::ErrorKind::NotFound => "no such folder".to_owned(),
                    _ => error.to_string(),
                };
                let problem = format!("jobs_dir: {folder}: {error}; /local-groups stays empty");
                self.service_status
                    .set_off(Part::LocalGroups, Some(problem));
                return Vec::new();
            }
        };
        let mut before = self.unusable.lock();
        for problem in &unusable {
            // Once, not at each look.
            if !before.contains(problem) {
                tracing::warn!("{problem}; the links of this job are omitted");
            }
        }
        *before = unusable;
        links
    }
}

/// Reads the links of all jobs (`JOB/.bosh/links.json`). Jobs without links are omitted.
fn read_jobs(folder: &Path) -> io::Result<Found> {
    let mut found = Found::default();
    for job in job_names(folder)? {
        let file = folder.join(&job).join(".bosh/links.json");
        match read_links(&file) {
            Ok(links) => {
                for link in links {
                    found.links.push((job.clone(), link));
                }
            }
            // A job without links has no such file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => found.unusable.push(format!("{}: {error}", file.display())),
        }
    }
    Ok(found)
}

/// Returns the sorted names of the folders below `folder`, including symbolic links to folders.
fn job_names(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // The agent links each job's folder to its current version, and readdir(3) reports the
        // link.
        if entry.path().is_dir()
            && let Ok(name) = entry.file_name().into_string()
        {
            names.push(name);
        }
    }
    // readdir(3) has no order.
    names.sort_unstable();
    Ok(names)
}

/// Reads a regular file; anything else would let a job block the server or fill its memory.
fn read_links(file: &Path) -> io::Result<Vec<Link>> {
    serde_json::from_slice(&bounded::read(file)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::resolve::HealthState;

    #[test]
    fn jobs_without_usable_links_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        for (job, links) in [
            (
                "b",
                r#"[{"group": "2", "name": "link", "type": "conn", "more": 1}]"#,
            ),
            ("a", r#"[{"group": "1", "name": "link", "type": "conn"}]"#),
            ("broken", "{"),
            (
                "c",
                r#"[{"group": "../../../etc/passwd", "name": "../..", "type": "/"}]"#,
            ),
        ] {
            let bosh = folder.path().join(job).join(".bosh");
            fs::create_dir_all(&bosh).unwrap();
            fs::write(bosh.join("links.json"), links).unwrap();
        }
        fs::create_dir(folder.path().join("no-links")).unwrap();
        // Neither waits for a writer nor reads without end.
        for (job, special) in [("device", "/dev/zero"), ("folder", "/etc")] {
            let bosh = folder.path().join(job).join(".bosh");
            fs::create_dir_all(&bosh).unwrap();
            std::os::unix::fs::symlink(special, bosh.join("links.json")).unwrap();
        }
        let bosh = folder.path().join("fifo/.bosh");
        fs::create_dir_all(&bosh).unwrap();
        nix::unistd::mkfifo(&bosh.join("links.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::write(folder.path().join("README"), "a file").unwrap();
        let health = InstanceHealth {
            state: HealthState::Running,
            groups: Box::new([("1".into(), HealthState::Failing)]),
        };
        let Found { links, unusable } = read_jobs(folder.path()).unwrap();
        assert_eq!(unusable.len(), 4, "{unusable:?}");
        let lines: Vec<(String, String, String)> = groups(links, Some(&health))
            .into_iter()
            .map(|line| (line.job_name, line.group_id, line.health_state))
            .collect();
        let expected = [
            ("", "", "running"),
            ("a", "1", "failing"),
            ("b", "2", ""),
            ("c", "../../../etc/passwd", ""),
        ]
        .map(|(job, group, state)| (job.to_owned(), group.to_owned(), state.to_owned()));
        assert_eq!(lines, expected);
    }

    #[tokio::test]
    async fn folder_is_read_once_it_appears() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs");
        let status = ServiceStatus::default();
        let jobs = LocalJobs::new(path.clone(), status.clone());
        let problem = || status.state().parts_off.pop().map(|(_, problem)| problem);
        for unreadable in ["no such folder", "Not a directory"] {
            for _ in 0..2 {
                assert!(jobs.links().await.is_empty());
                assert!(problem().unwrap().contains(unreadable), "{:?}", problem());
            }
            assert_eq!(status.state().parts_off.len(), 1);
            fs::write(&path, "").unwrap();
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir_all(path.join("web/.bosh")).unwrap();
        let links = r#"[{"group": "1", "name": "link", "type": "conn"}]"#;
        fs::write(path.join("web/.bosh/links.json"), links).unwrap();
        assert_eq!(jobs.links().await.len(), 1);
        assert_eq!(problem(), None);
    }
}
