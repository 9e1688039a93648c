//! `/local-groups`: the health of this VM's jobs.

use std::sync::Arc;
use std::{collections::BTreeMap, fs, io, path::Path};

use axum::{extract::State, response::Response};
use serde::{Deserialize, Serialize};

use super::{Backend, json_lines};
use dns_kit::files::bounded;

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

/// States reported by this VM's health server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalHealth {
    /// State of the VM as a whole.
    pub state: String,
    /// States of link groups, by group id.
    pub groups: BTreeMap<String, String>,
}

pub(super) async fn local_groups(State(backend): State<Arc<Backend>>) -> Response {
    json_lines(backend.local_groups().await)
}

/// A link in a job's `links.json`; other members are ignored.
#[derive(Debug, Deserialize)]
struct Link {
    group: String,
    name: String,
    /// Type of the link.
    #[serde(rename = "type")]
    link_type: String,
}

/// Reads the links of all jobs in `jobs_dir` (`JOB/.bosh/links.json`), sorted by job name, with the
/// states of `health`. The first line is the VM as a whole. Jobs without links are omitted; an
/// invalid file is logged and omitted.
pub fn read_jobs(jobs_dir: &Path, health: &LocalHealth) -> Vec<Group> {
    let mut lines = vec![Group { health_state: health.state.clone(), ..Group::default() }];
    for job in job_names(jobs_dir) {
        let file = jobs_dir.join(&job).join(".bosh/links.json");
        match read_links(&file) {
            Ok(links) => lines.extend(links.into_iter().map(|Link { group, name, link_type }| Group {
                job_name: job.clone(),
                link_name: name,
                link_type,
                health_state: health.groups.get(&group).cloned().unwrap_or_default(),
                group_id: group,
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(file = %file.display(), %error, "cannot read the links of a job"),
        }
    }
    lines
}

/// Returns the sorted names of the folders below `jobs_dir`, including symbolic links to folders.
fn job_names(jobs_dir: &Path) -> Vec<String> {
    let entries = match fs::read_dir(jobs_dir) {
        Ok(entries) => entries,
        Err(error) => {
            tracing::warn!(folder = %jobs_dir.display(), %error, "cannot read the folder of the jobs");
            return Vec::new();
        }
    };
    let mut names: Vec<String> = entries
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    names
}

/// Reads a regular file; anything else would let a job block the server or fill its memory.
fn read_links(file: &Path) -> io::Result<Vec<Link>> {
    serde_json::from_slice(&bounded::read(file)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_without_usable_links_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        for (job, links) in [
            ("b", r#"[{"group": "2", "name": "link", "type": "conn", "more": 1}]"#),
            ("a", r#"[{"group": "1", "name": "link", "type": "conn"}]"#),
            ("broken", "{"),
            ("c", r#"[{"group": "../../../etc/passwd", "name": "../..", "type": "/"}]"#),
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
        let health = LocalHealth {
            state: "running".into(),
            groups: BTreeMap::from([("1".to_owned(), "failing".to_owned())]),
        };
        let lines: Vec<(String, String, String)> = read_jobs(folder.path(), &health)
            .into_iter()
            .map(|line| (line.job_name, line.group_id, line.health_state))
            .collect();
        let expected =
            [("", "", "running"), ("a", "1", "failing"), ("b", "2", ""), ("c", "../../../etc/passwd", "")]
                .map(|(job, group, state)| (job.to_owned(), group.to_owned(), state.to_owned()));
        assert_eq!(lines, expected);
    }
}
