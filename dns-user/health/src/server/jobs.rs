//! The jobs of this VM: their scripts, which run at an interval, and their groups.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs::{self, Metadata},
    io,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use parking_lot::Mutex;
use tokio::{
    process::Child,
    sync::{Semaphore, watch},
};

use dns_core::config::reader::Json;
use dns_kit::{clock::every, files::bounded, logs::LineLimit};

/// Path of the file with a job's links, below the job's folder (observed).
const LINKS_FILE: &str = ".bosh/links.json";

/// Maximum size of that file in bytes.
const MAX_LINKS: u64 = 1 << 20;

/// Minimum time limit of a script.
const MIN_TIME_LIMIT: Duration = Duration::from_secs(1);

/// Maximum number of scripts that run concurrently.
const MAX_RUNNING_SCRIPTS: usize = 16;

/// The state of all jobs of this VM.
#[derive(Debug)]
pub(super) struct Jobs {
    folder: Option<PathBuf>,
    /// Path of a script below a job's folder.
    script: PathBuf,
    /// Time between two runs.
    interval: Duration,
    /// Jobs by the name of their folder.
    known: Mutex<BTreeMap<OsString, Job>>,
    /// Whether every script of the first round has ended.
    ready: watch::Sender<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Job {
    groups: BTreeSet<String>,
    /// The script's state; `None` without a script.
    script: Option<ScriptState>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ScriptState {
    /// Whether the latest run reported the job as healthy; `None` before the first run has ended.
    healthy: Option<bool>,
    running: bool,
}

/// The combined state of all jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Summary {
    /// Whether every script reports its job as healthy.
    pub(super) all_healthy: bool,
    /// Groups of jobs with a script, with its result; the worst of several.
    pub(super) scripted: BTreeMap<String, bool>,
    /// Groups of jobs without a script.
    pub(super) unscripted: BTreeSet<String>,
}

impl Jobs {
    pub(super) fn new(folder: Option<PathBuf>, script: PathBuf, interval: Duration) -> Self {
        Self {
            folder,
            script,
            interval,
            known: Mutex::default(),
            ready: watch::Sender::new(false),
        }
    }

    /// Reads the jobs and runs their scripts at every interval, until dropped.
    pub(super) async fn run(self: Arc<Self>) {
        let mut ticks = every(self.interval.max(Duration::from_millis(10)));
        let permits = Arc::new(Semaphore::new(MAX_RUNNING_SCRIPTS));
        let mut scripts = tokio::task::JoinSet::new();
        loop {
            ticks.tick().await;
            while scripts.try_join_next().is_some() {}
            let jobs = self.clone();
            // A panic in the task is a bug and logs its own message; continue.
            let due = tokio::task::spawn_blocking(move || jobs.due_scripts())
                .await
                .unwrap_or_default();
            for (name, path) in due {
                let jobs = self.clone();
                let permits = permits.clone();
                scripts.spawn(async move {
                    // The semaphore is never closed.
                    let permit = permits.acquire().await;
                    let limit = jobs.interval.max(MIN_TIME_LIMIT);
                    let (outcome, killed) = run_script(&path, limit).await;
                    jobs.record(&name, &path, outcome);
                    drop(permit);
                    if let Some(mut killed) = killed {
                        // While a disk hangs, the kernel does not end what waits for it. The script is not run again
                        // beside it.
                        let _ = killed.wait().await;
                    }
                    jobs.end(&name);
                });
            }
        }
    }

    /// Waits until every script has ended once.
    pub(super) async fn ready(&self) {
        // The sender lives as long as `self`.
        let _ = self.ready.subscribe().wait_for(|ready| *ready).await;
    }

    pub(super) fn summary(&self) -> Summary {
        let mut summary = Summary {
            all_healthy: true,
            ..Summary::default()
        };
        for job in self.known.lock().values() {
            let Some(script) = job.script else {
                summary.unscripted.extend(job.groups.iter().cloned());
                continue;
            };
            // The script of a new job counts as unhealthy until its first run has ended.
            let healthy = script.healthy.unwrap_or(false);
            summary.all_healthy &= healthy;
            for group in &job.groups {
                *summary.scripted.entry(group.clone()).or_insert(true) &= healthy;
            }
        }
        summary
    }

    /// Reads the jobs' folder; returns the scripts to run now.
    fn due_scripts(&self) -> Vec<(OsString, PathBuf)> {
        let Some(folder) = &self.folder else {
            self.set_ready_if_ended(&BTreeMap::new());
            return Vec::new();
        };
        let before = self.known.lock().clone();
        let found = find_jobs(folder, &self.script, &before);
        let mut known = self.known.lock();
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                static LIMIT: LineLimit = LineLimit::new();
                // Tried again at every interval.
                if let Some(suppressed) = LIMIT.admit_per_minute() {
                    tracing::warn!(folder = %folder.display(), suppressed, "cannot list the jobs: {error}");
                }
                // Without its jobs, a machine with a failing one would report itself healthy, for
                // example while no descriptor is left (EMFILE).
                match error.kind() {
                    io::ErrorKind::NotFound => BTreeMap::new(),
                    // No listing has succeeded yet: nothing is known, and nothing reported.
                    _ if known.is_empty() && !*self.ready.borrow() => return Vec::new(),
                    _ => known.clone(),
                }
            }
        };
        let mut due = Vec::new();
        let mut current = BTreeMap::new();
        for (name, mut job) in found {
            if let Some(script) = &mut job.script {
                if let Some(before) = known.get(&name).and_then(|job| job.script) {
                    *script = before;
                }
                if !script.running {
                    script.running = true;
                    due.push((name.clone(), folder.join(&name).join(&self.script)));
                }
            }
            current.insert(name, job);
        }
        *known = current;
        self.set_ready_if_ended(&known);
        due
    }

    fn record(&self, name: &OsString, path: &Path, outcome: anyhow::Result<()>) {
        let healthy = outcome.is_ok();
        let mut known = self.known.lock();
        // The job or its script may have been removed in the meantime.
        if let Some(script) = known.get_mut(name).and_then(|job| job.script.as_mut()) {
            if script.healthy != Some(healthy) {
                match outcome {
                    Ok(()) => tracing::info!(script = %path.display(), "job is healthy"),
                    Err(reason) => {
                        tracing::warn!(script = %path.display(), "job is not healthy: {reason:#}")
                    }
                }
            }
            script.healthy = Some(healthy);
        }
        self.set_ready_if_ended(&known);
    }

    /// Lets a script run again at the next interval.
    fn end(&self, name: &OsString) {
        let mut known = self.known.lock();
        if let Some(script) = known.get_mut(name).and_then(|job| job.script.as_mut()) {
            script.running = false;
        }
    }

    fn set_ready_if_ended(&self, known: &BTreeMap<OsString, Job>) {
        let all_ended = known
            .values()
            .all(|job| job.script.is_none_or(|script| script.healthy.is_some()));
        self.ready
            .send_if_modified(|ready| all_ended && !std::mem::replace(ready, true));
    }
}

/// Returns the jobs in `folder`: each folder in it, or link to a folder, is a job. One that cannot be examined stays as it
/// was `before`.
fn find_jobs(
    folder: &Path,
    script: &Path,
    before: &BTreeMap<OsString, Job>,
) -> io::Result<BTreeMap<OsString, Job>> {
    let mut jobs = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        let job = match find_job(&path, script) {
            Ok(job) => job,
            Err(error) => {
                static LIMIT: LineLimit = LineLimit::new();
                // Tried again at every interval.
                if let Some(suppressed) = LIMIT.admit_per_minute() {
                    tracing::warn!(job = %path.display(), suppressed, "cannot examine a job: {error}");
                }
                before.get(&entry.file_name()).cloned()
            }
        };
        if let Some(job) = job {
            jobs.insert(entry.file_name(), job);
        }
    }
    Ok(jobs)
}

/// Returns the job at a path; `None` if there is no folder.
fn find_job(path: &Path, script: &Path) -> io::Result<Option<Job>> {
    // Follows links: on a VM, jobs are links to their installation.
    if !exists(path, Metadata::is_dir)? {
        return Ok(None);
    }
    let has_script = exists(&path.join(script), Metadata::is_file)?;
    Ok(Some(Job {
        groups: groups(&path.join(LINKS_FILE)),
        script: has_script.then(ScriptState::default),
    }))
}

/// Returns whether there is a file of this kind. An error that may pass, such as that of a disk, is no absence: without
/// its script, a failing job would count as healthy.
fn exists(path: &Path, is_kind: fn(&Metadata) -> bool) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(data) => Ok(is_kind(&data)),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(false),
            _ => Err(error),
        },
    }
}

/// Returns the groups of a job's links; empty without a usable file.
fn groups(path: &Path) -> BTreeSet<String> {
    read_groups(path).unwrap_or_else(|problem| {
        static LIMIT: LineLimit = LineLimit::new();
        // Read again at every interval.
        if let Some(suppressed) = LIMIT.admit_per_minute() {
            tracing::warn!(file = %path.display(), suppressed, "the links of a job are left out: {problem:#}");
        }
        BTreeSet::new()
    })
}

fn read_groups(path: &Path) -> anyhow::Result<BTreeSet<String>> {
    let bytes = match bounded::read_at_most(path, MAX_LINKS) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        bytes => bytes?,
    };
    let links = match Json::parse(&bytes).context("is not JSON")? {
        Json::List(links) => links,
        Json::Null => Vec::new(),
        other => bail!("is {}; a list is needed", other.kind()),
    };
    let mut groups = BTreeSet::new();
    for link in links {
        let Json::Object(members) = link else {
            continue;
        };
        // The last one of equal names counts, as in Go.
        let group = members
            .into_iter()
            .rev()
            .find_map(|(name, value)| match value {
                Json::Text(group) if name.eq_ignore_ascii_case("group") => Some(group),
                _ => None,
            });
        groups.extend(group.filter(|group| !group.is_empty()));
    }
    Ok(groups)
}

/// Runs a script in its own process group; `Ok` for exit status 0. After `limit`, the script is
/// killed with all its children, and returned to be waited for.
async fn run_script(path: &Path, limit: Duration) -> (anyhow::Result<()>, Option<Child>) {
    let mut child = match spawn_script(path) {
        Ok(child) => child,
        Err(error) => return (Err(error), None),
    };
    let group = child
        .id()
        .and_then(|id| i32::try_from(id).ok())
        .map(Pid::from_raw);
    let mut group = Group(group);
    match tokio::time::timeout(limit, child.wait()).await {
        Ok(ended) => {
            // Background processes started by the script may continue.
            group.0 = None;
            (status_of(ended), None)
        }
        Err(_) => {
            let late = anyhow!("it did not exit within {limit:?}");
            (Err(late), Some(child))
        }
    }
}

fn spawn_script(path: &Path) -> anyhow::Result<Child> {
    tokio::process::Command::new(path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .context("cannot be run")
}

fn status_of(ended: io::Result<ExitStatus>) -> anyhow::Result<()> {
    let status = ended?;
    ensure!(status.success(), "{status}");
    Ok(())
}

/// A process group that is killed on drop; `None` after its leader has exited.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // Fails only if the whole group has already ended.
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// Creates a job with its script and links file.
    fn job(folder: &Path, name: &str, script: Option<&str>, links: Option<&str>) {
        let path = folder.join(name);
        fs::create_dir_all(path.join(".bosh")).unwrap();
        if let Some(text) = script {
            fs::create_dir_all(path.join("bin/dns")).unwrap();
            let path = path.join("bin/dns/healthy");
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        if let Some(text) = links {
            fs::write(path.join(LINKS_FILE), text).unwrap();
        }
    }

    /// Reads the jobs of a folder.
    fn jobs(folder: &Path) -> Arc<Jobs> {
        let interval = Duration::from_millis(50);
        Arc::new(Jobs::new(
            Some(folder.to_owned()),
            PathBuf::from("bin/dns/healthy"),
            interval,
        ))
    }

    #[tokio::test]
    async fn scripts_set_group_states() {
        let folder = tempfile::tempdir().unwrap();
        let real = tempfile::tempdir().unwrap();
        job(
            folder.path(),
            "ok",
            Some("#!/bin/sh\nexit 0\n"),
            Some(r#"[{"group":"1"},{"GROUP":"2","name":"n"}]"#),
        );
        job(
            folder.path(),
            "bad",
            Some("#!/bin/sh\nexit 1\n"),
            Some(r#"[{"group":"3"},{"group":""},{},7]"#),
        );
        job(folder.path(), "none", None, Some(r#"[{"group":"4"}]"#));
        job(folder.path(), "broken", None, Some("["));
        job(real.path(), "linked", None, Some(r#"[{"group":"5"}]"#));
        symlink(real.path().join("linked"), folder.path().join("linked")).unwrap();
        fs::write(folder.path().join("README"), "no job").unwrap();
        let jobs = jobs(folder.path());
        let work = tokio::spawn(jobs.clone().run());
        jobs.ready().await;
        let summary = jobs.summary();
        assert!(!summary.all_healthy);
        let scripted: Vec<_> = summary
            .scripted
            .iter()
            .map(|(group, healthy)| (&group[..], *healthy))
            .collect();
        assert_eq!(scripted, [("1", true), ("2", true), ("3", false)]);
        assert_eq!(
            summary.unscripted,
            BTreeSet::from(["4".to_owned(), "5".to_owned()])
        );

        fs::write(
            folder.path().join("bad/bin/dns/healthy"),
            "#!/bin/sh\nexit 0\n",
        )
        .unwrap();
        while !jobs.summary().all_healthy {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        work.abort();
    }

    #[test]
    fn unreadable_folder_keeps_its_jobs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs");
        job(
            &path,
            "bad",
            Some("#!/bin/sh\n"),
            Some(r#"[{"group":"3"}]"#),
        );
        let jobs = jobs(&path);
        let due = jobs.due_scripts();
        finish(&jobs, "bad", Err(anyhow!("1")));
        let failing = jobs.summary();
        assert!(!failing.all_healthy);
        // Reading a file as a folder fails as lack of descriptors does.
        fs::rename(&path, folder.path().join("aside")).unwrap();
        fs::write(&path, "").unwrap();
        assert_eq!(jobs.due_scripts(), due);
        assert_eq!(jobs.summary(), failing);
        // A folder that is missing has no jobs.
        fs::remove_file(&path).unwrap();
        assert_eq!(jobs.due_scripts(), []);
        assert!(jobs.summary().all_healthy);
    }

    #[test]
    fn unread_folder_delays_the_first_report() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs");
        fs::write(&path, "").unwrap();
        let jobs = jobs(&path);
        assert_eq!(jobs.due_scripts(), []);
        assert!(!*jobs.ready.borrow());
        fs::remove_file(&path).unwrap();
        job(&path, "good", Some("#!/bin/sh\n"), None);
        assert_eq!(jobs.due_scripts().len(), 1);
        assert!(!*jobs.ready.borrow());
        jobs.record(&"good".into(), Path::new("good"), Ok(()));
        assert!(*jobs.ready.borrow());
    }

    #[tokio::test]
    async fn every_script_ends_before_the_first_report() {
        let folder = tempfile::tempdir().unwrap();
        // Longer than several intervals, at each of which no script is due.
        job(folder.path(), "slow", Some("#!/bin/sh\nsleep 0.3\n"), None);
        let jobs = jobs(folder.path());
        let work = tokio::spawn(jobs.clone().run());
        jobs.ready().await;
        let slow = jobs.known.lock()[&OsString::from("slow")].script.unwrap();
        assert!(slow.healthy.is_some());
        work.abort();
    }

    #[test]
    fn running_script_is_not_started_again() {
        let folder = tempfile::tempdir().unwrap();
        job(folder.path(), "a", Some("#!/bin/sh\n"), None);
        job(folder.path(), "b", Some("#!/bin/sh\n"), None);
        let jobs = jobs(folder.path());
        let names = |due: Vec<(OsString, PathBuf)>| -> Vec<OsString> {
            due.into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(jobs.due_scripts()), ["a", "b"]);
        assert_eq!(jobs.due_scripts(), []);
        let is_ready = || *jobs.ready.borrow();
        finish(&jobs, "a", Ok(()));
        assert!(!is_ready() && !jobs.summary().all_healthy);
        // The result counts while its killed process has not ended.
        jobs.record(&"b".into(), Path::new("b"), Err(anyhow!("late")));
        assert!(is_ready() && !jobs.summary().all_healthy);
        assert_eq!(names(jobs.due_scripts()), ["a"]);
        jobs.end(&"a".into());
        jobs.end(&"b".into());
        assert_eq!(names(jobs.due_scripts()), ["a", "b"]);
        // The last result counts until the next one.
        assert_eq!(
            jobs.known.lock()[&OsString::from("a")]
                .script
                .unwrap()
                .healthy,
            Some(true)
        );
        jobs.record(&"b".into(), Path::new("b"), Ok(()));
        assert!(jobs.summary().all_healthy);
        // A job that has gone, and one whose script has.
        fs::remove_dir_all(folder.path().join("a")).unwrap();
        fs::remove_file(folder.path().join("b/bin/dns/healthy")).unwrap();
        assert_eq!(jobs.due_scripts(), []);
        jobs.record(&"a".into(), Path::new("a"), Err(anyhow::anyhow!("late")));
        jobs.record(&"b".into(), Path::new("b"), Err(anyhow::anyhow!("late")));
        assert!(jobs.summary().all_healthy && jobs.known.lock().len() == 1);
    }

    /// Records the result of a script whose process has ended.
    fn finish(jobs: &Jobs, name: &str, outcome: anyhow::Result<()>) {
        jobs.record(&name.into(), Path::new(name), outcome);
        jobs.end(&name.into());
    }

    #[test]
    fn worst_script_of_a_group_counts() {
        let folder = tempfile::tempdir().unwrap();
        let links = Some(r#"[{"group":"1"}]"#);
        job(folder.path(), "a", Some("#!/bin/sh\n"), links);
        job(folder.path(), "b", Some("#!/bin/sh\n"), links);
        let jobs = jobs(folder.path());
        jobs.due_scripts();
        for (bad, good) in [("a", "b"), ("b", "a")] {
            jobs.record(&good.into(), Path::new(good), Ok(()));
            jobs.record(&bad.into(), Path::new(bad), Err(anyhow::anyhow!("bad")));
            assert_eq!(
                jobs.summary().scripted,
                BTreeMap::from([("1".to_owned(), false)])
            );
        }
        jobs.record(&"b".into(), Path::new("b"), Ok(()));
        assert_eq!(
            jobs.summary().scripted,
            BTreeMap::from([("1".to_owned(), true)])
        );
    }

    #[tokio::test]
    async fn hanging_script_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let children = folder.path().join("children");
        let text = format!(
            "#!/bin/sh\nsleep 600 &\necho $! > {0}\nsleep 600\n",
            children.display()
        );
        job(folder.path(), "hangs", Some(&text), None);
        let script = folder.path().join("hangs/bin/dns/healthy");
        let (outcome, killed) = run_script(&script, Duration::from_secs(3)).await;
        assert_eq!(
            outcome.unwrap_err().to_string(),
            "it did not exit within 3s"
        );
        assert!(!killed.unwrap().wait().await.unwrap().success());
        let child: i32 = fs::read_to_string(&children)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        // A zombie that init has not reaped counts as ended.
        let ended = || {
            fs::read_to_string(format!("/proc/{child}/stat"))
                .map_or(true, |stat| stat.contains(") Z "))
        };
        while !ended() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn unrunnable_script_is_failing() {
        let folder = tempfile::tempdir().unwrap();
        job(folder.path(), "j", Some("#!/nowhere/sh\n"), None);
        let script = folder.path().join("j/bin/dns/healthy");
        let (outcome, _) = run_script(&script, Duration::from_secs(9)).await;
        assert_eq!(outcome.unwrap_err().to_string(), "cannot be run");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o644)).unwrap();
        let (outcome, _) = run_script(&script, Duration::from_secs(9)).await;
        assert!(outcome.is_err());
        // Without the folder there are no jobs, so all are healthy.
        let none = jobs(&folder.path().join("none"));
        let work = tokio::spawn(none.clone().run());
        none.ready().await;
        assert_eq!(
            none.summary(),
            Summary {
                all_healthy: true,
                ..Summary::default()
            }
        );
        work.abort();
    }

    #[test]
    fn groups_come_from_link_lists() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("links.json");
        assert_eq!(groups(&path), BTreeSet::new(), "no file");
        assert_eq!(groups(folder.path()), BTreeSet::new(), "a folder");
        for (text, expected) in [
            ("", &[][..]),
            ("null", &[]),
            ("{}", &[]),
            ("[]", &[]),
            (
                r#"[{"group": "1"}, {"group": "2"}, {"group": "1"}]"#,
                &["1", "2"],
            ),
            (r#"[{"GROUP": "1", "name": "2"}]"#, &["1"]),
            (r#"[{"group": "1", "Group": "2"}]"#, &["2"]),
            (r#"[{"group": "1", "Group": 2}]"#, &["1"]),
            (r#"[{"group": ""}, {"groups": "1"}, 7, null]"#, &[]),
        ] {
            fs::write(&path, text).unwrap();
            let found: Vec<String> = groups(&path).into_iter().collect();
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn folders_are_jobs() {
        let folder = tempfile::tempdir().unwrap();
        let script = Path::new("bin/dns/healthy");
        job(folder.path(), "scripted", Some("#!/bin/sh\n"), None);
        job(folder.path(), "plain", None, Some(r#"[{"group":"1"}]"#));
        // A folder is no script.
        fs::create_dir_all(folder.path().join("odd").join(script)).unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        symlink("/nowhere", folder.path().join("dangling")).unwrap();
        symlink("loop", folder.path().join("loop")).unwrap();
        let plain = Job {
            groups: BTreeSet::from(["1".to_owned()]),
            script: None,
        };
        let scripted = Job {
            groups: BTreeSet::new(),
            script: Some(ScriptState {
                healthy: None,
                running: false,
            }),
        };
        let expected = [
            ("odd", Job::default()),
            ("plain", plain),
            ("scripted", scripted),
        ]
        .map(|(name, job)| (OsString::from(name), job));
        let none = BTreeMap::new();
        let found = find_jobs(folder.path(), script, &none).unwrap();
        assert_eq!(found, BTreeMap::from(expected));
        // A script that cannot be examined, here because of its name, leaves its job as it was.
        let unexaminable = "x".repeat(300);
        let kept = find_jobs(folder.path(), Path::new(&unexaminable), &found).unwrap();
        assert_eq!(kept, found);
        let missing = find_jobs(&folder.path().join("none"), script, &none).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        // Without a folder there is nothing to run.
        let none = Jobs::new(None, script.to_owned(), Duration::from_secs(60));
        assert_eq!(none.due_scripts(), []);
    }

    #[tokio::test]
    async fn exit_status_is_the_result() {
        let folder = tempfile::tempdir().unwrap();
        job(folder.path(), "a", Some("#!/bin/sh\nexit 0\n"), None);
        job(folder.path(), "b", Some("#!/bin/sh\nexit 3\n"), None);
        let limit = Duration::from_secs(600);
        let script = |name| folder.path().join(name).join("bin/dns/healthy");
        run_script(&script("a"), limit).await.0.unwrap();
        let failed = run_script(&script("b"), limit).await.0.unwrap_err();
        assert_eq!(failed.to_string(), "exit status: 3");
    }

    #[test]
    fn scripts_are_due_by_their_path() {
        let folder = tempfile::tempdir().unwrap();
        job(folder.path(), "a", Some("#!/bin/sh\n"), None);
        let jobs = jobs(folder.path());
        let path = folder.path().join("a/bin/dns/healthy");
        assert_eq!(jobs.due_scripts(), [(OsString::from("a"), path)]);
        assert!(!jobs.summary().all_healthy, "no run has ended");
    }
}
