//! All access to the state folder and the inventory's files, on one thread: a disk that hangs
//! delays new versions, but neither announcements nor shutdown.

use std::{
    collections::HashSet,
    io,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::Duration,
};

use anyhow::Context;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use tokio::sync::mpsc::Sender;

use super::{
    PublishOptions,
    source::{
        CHANGES, FILES, QUIET_MS, Quiet, REMOVAL_QUIET_MS, Stamps, is_old, is_renamed, stamps,
    },
    state::{CommittedVersion, Folder, PublisherState, StateError},
};
use crate::{
    dataset::{Dataset, Rows},
    digest,
    inventory::Inventory,
    message::Patch,
    now_ms,
    store::unix_now,
};

/// Interval of the check for changed files.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// Pause before the inventory is read again after a disk error, in milliseconds.
const DISK_PAUSE_MS: u64 = 2000;

/// Name of the file with the number of removals that an operator confirmed.
pub(crate) const CONFIRMED: &str = "confirmed.json";

/// Number of removals that need no confirmation, however small the fleet.
const FREE_REMOVALS: usize = 10;

/// Maximum size of a patch in bytes: it must fit into a NATS message, and Base64 adds a third.
const MAX_PATCH: usize = 500_000;

/// A request to the thread.
#[derive(Debug)]
pub(super) enum Job {
    /// Commit the inventory as a version above `floor`.
    Commit {
        floor: u64,
    },
    Patch {
        from: u64,
        to: u64,
        bytes: Bytes,
    },
    WriteRegistry(Vec<u8>),
}

#[derive(Debug)]
pub(super) enum StateEvent {
    /// The inventory was read; the ids of its agents.
    Inventory(Vec<String>),
    /// The newest version after a commit.
    Committed(Committed),
    /// The inventory could not be read or committed.
    Failed(anyhow::Error),
    /// A patch; `None` if the old version is gone or the patch would be too long.
    Patch {
        from: u64,
        to: u64,
        patch: Option<Patch>,
    },
    RegistryWritten(Result<(), StateError>),
}

#[derive(Debug)]
pub(super) struct Committed {
    pub(super) made: CommittedVersion,
    pub(super) bytes: Bytes,
    /// Whether this commit created the version.
    pub(super) new: bool,
    /// Deleted versions, whose blobs can be deleted.
    pub(super) gone: Vec<CommittedVersion>,
}

/// Age of files that are read at once.
const COMPLETE: Duration = Duration::from_secs(2);

/// Age of files in which a missing instance counts as removed.
const SETTLED: Duration = Duration::from_millis(REMOVAL_QUIET_MS);

/// The state folder and the inventory.
#[derive(Debug)]
pub(super) struct StateWriter {
    options: PublishOptions,
    pub(super) folder: Folder,
    state: PublisherState,
    quiet: Quiet,
    /// Stamps of the files that commands replace atomically.
    commands: Stamps,
    /// Time of the next read without a file change, in milliseconds.
    read_again: Option<u64>,
    inventory: Option<Inventory>,
    /// Whether instances are missing from files that may be incomplete.
    removals_wait: bool,
    /// Stamps of files that were whole when they were read.
    whole: Option<Stamps>,
    /// Content of [`FILES`].
    saved: Option<Stamps>,
    /// Ids of the instances in the newest version.
    known: HashSet<String>,
    /// Versions that were forgotten since the last commit that succeeded.
    gone: Vec<CommittedVersion>,
}

impl StateWriter {
    /// Opens the folder and locks it.
    pub(super) fn open(options: &PublishOptions) -> Result<Self, StateError> {
        let folder = Folder::lock(&options.state)?;
        let state: PublisherState = folder.read("state.json")?.unwrap_or_default();
        let mut known = HashSet::new();
        if let Some(made) = state.versions.last() {
            let name = format!("datasets/{}.json", made.version);
            // A damaged one is an error: a truncated inventory could remove most of the fleet without a confirmation.
            match folder.read::<Rows>(&name)? {
                Some(rows) => known = rows.instance_ids(),
                None => tracing::warn!(
                    "{}: the file is missing; the next version may remove any number of instances",
                    folder.path.join(name).display()
                ),
            }
        }
        Ok(Self {
            options: options.clone(),
            state,
            // A file that this version cannot read costs a wait.
            quiet: Quiet::after(folder.read(FILES).unwrap_or_default()),
            commands: Stamps::new(),
            read_again: None,
            inventory: None,
            removals_wait: false,
            whole: None,
            saved: None,
            known,
            gone: Vec::new(),
            folder,
        })
    }

    pub(super) fn newest(&self) -> Option<&CommittedVersion> {
        self.state.versions.last()
    }

    /// Reads the inventory if it changed and is complete. Returns the ids of its agents.
    pub(super) fn poll(&mut self) -> Option<anyhow::Result<Vec<String>>> {
        let now = now_ms();
        let commands = stamps(
            [CHANGES, CONFIRMED]
                .map(|name| self.folder.path.join(name))
                .to_vec(),
        );
        // Before the first inventory a command changes nothing that could be read.
        let by_command = commands != self.commands && self.inventory.is_some();
        let again = self.read_again.is_some_and(|at| now >= at);
        let stamps = self.options.source.stamps();
        let replaced = self.quiet.replaced(&stamps).unwrap_or_default();
        let is_replaced = !replaced.is_empty();
        // Other new files are read once they are quiet: their writer may have removed the old one.
        let renamed = is_replaced && replaced.iter().all(|file| is_renamed(file));
        let unchanged_ms = self.quiet.unchanged_ms(&stamps, now);
        let settled = unchanged_ms >= REMOVAL_QUIET_MS || is_old(&stamps, SETTLED);
        let complete = is_old(&stamps, COMPLETE) || renamed;
        // An old or renamed file has no writer that could still be at work.
        let is_quiet = again || complete || unchanged_ms >= QUIET_MS;
        let changed = is_quiet && self.quiet.take(&stamps);
        let is_due = changed || again || by_command || self.removals_wait && settled;
        if !is_due {
            return None;
        }
        self.commands = commands;
        self.read_again = None;
        // Whole files stay whole until they change, also if a command makes them be read.
        let is_whole = settled || changed && is_replaced || self.whole.as_ref() == Some(&stamps);
        self.whole = is_whole.then_some(stamps);
        let read = self.load(is_whole).inspect_err(|error| {
            // The stamps count as read, so nothing else would cause another attempt.
            if is_of_the_disk(error) {
                self.read_again = Some(now + DISK_PAUSE_MS);
            }
        });
        read.transpose()
    }

    /// Schedules another read of the inventory after a pause.
    pub(super) fn retry(&mut self) {
        self.read_again = Some(now_ms() + DISK_PAUSE_MS);
    }

    /// Reads the inventory; `None` if it can only be used once the files are whole: replaced by a rename, or
    /// unchanged for long enough. Otherwise their writer may have paused.
    fn load(&mut self, is_whole: bool) -> anyhow::Result<Option<Vec<String>>> {
        let mut inventory = self.options.source.load(&self.folder)?;
        let instances = inventory.instances.iter();
        let present: HashSet<&str> = instances.map(|instance| &*instance.id).collect();
        let mut removed = 0;
        for id in &self.known {
            removed += usize::from(!present.contains(id.as_str()));
        }
        let waited = std::mem::take(&mut self.removals_wait);
        if !is_whole {
            let cut = match &self.inventory {
                Some(before) => inventory.is_cut(before),
                // After a restart only the ids of the newest version are known.
                None => removed > 0,
            };
            self.removals_wait = cut;
            if cut && !waited {
                tracing::warn!(
                    removed,
                    "the inventory lacks instances or links; they stay until its files are unchanged for 5 s, \
                     or until a file is replaced by a rename"
                );
            }
            match &self.inventory {
                Some(before) if cut => match inventory.keeping(before) {
                    Ok(kept) => inventory = kept,
                    // A new instance has the address of a missing one: both wait.
                    Err(_) => return Ok(None),
                },
                // No inventory has instances to keep, and the fleet has the last version.
                None if cut => return Ok(None),
                _ => {}
            }
        } else {
            self.check_removals(removed)?;
        }
        let mut agents = Vec::new();
        for instance in &inventory.instances {
            agents.extend(instance.agent.clone());
        }
        self.inventory = Some(inventory);
        Ok(Some(agents))
    }

    /// Rejects an inventory that removes many instances, unless an operator confirmed the number.
    fn check_removals(&self, removed: usize) -> anyhow::Result<()> {
        let known = self.known.len();
        // A wrong or truncated file removes most of a fleet; a deployment removes a few machines.
        let allowed = FREE_REMOVALS.max(known / 10);
        if removed <= allowed {
            return Ok(());
        }
        let written: Option<usize> = self.folder.read(CONFIRMED)?;
        anyhow::ensure!(
            self.options
                .confirm_removals
                .max(written)
                .is_some_and(|confirmed| removed <= confirmed),
            "the inventory removes {removed} of {known} instances, and more than {allowed} need confirmation; if \
             intended, run bosh-dns-sync confirm-removals {removed} --state FOLDER, or publish --confirm-removals \
             {removed}"
        );
        Ok(())
    }

    /// Commits the last read inventory as a version above `floor`.
    pub(super) fn commit(&mut self, floor: u64) -> anyhow::Result<Committed> {
        let inventory = self.inventory.as_ref().context("no inventory was read")?;
        let now = unix_now().as_secs();
        // Before the new dataset, for which a full disk may have no room otherwise.
        let keep = self.options.keep_bytes;
        let forgotten = self.folder.forget_old(&mut self.state, now, keep);
        // Their blobs would stay for good if the commit failed and nothing remembered them.
        self.gone.extend(forgotten);
        // A copy: ids that are allocated here count only once the state is on disk.
        let mut ids = self.state.ids.clone();
        let dataset = Dataset::build(inventory, &mut ids);
        let new = self
            .folder
            .commit(&mut self.state, ids, &dataset, floor, now)?;
        self.known = inventory
            .instances
            .iter()
            .map(|instance| instance.id.clone())
            .collect();
        // After the commit: a crash before it must not cost the operator's confirmation.
        self.use_up_confirmation()?;
        self.save_stamps()?;
        let made = self
            .state
            .versions
            .last()
            .context("no version was made")?
            .clone();
        if new {
            tracing::info!(
                version = made.version,
                rows = dataset.infos.len(),
                "new version of the records created"
            );
        }
        let bytes = self
            .folder
            .dataset(made.version)
            .context("the newest dataset is missing")?
            .into();
        Ok(Committed {
            made,
            bytes,
            new,
            gone: std::mem::take(&mut self.gone),
        })
    }

    /// Saves what was read last, for the next process.
    fn save_stamps(&mut self) -> Result<(), StateError> {
        let Some(read) = self.quiet.read() else {
            return Ok(());
        };
        if self.saved.as_ref() != Some(read) {
            self.folder.write(FILES, read)?;
            self.saved = Some(read.clone());
        }
        Ok(())
    }

    /// Removes the confirmation with which the inventory was read: it applies to a single version. One that was
    /// written since then belongs to the next version, as do changes: their stamps stay as they were read.
    fn use_up_confirmation(&mut self) -> Result<(), StateError> {
        let now = stamps(vec![self.folder.path.join(CONFIRMED)]);
        if let Some(read) = self.commands.last_mut()
            && now.last() == Some(&*read)
        {
            self.folder.remove(CONFIRMED)?;
            read.1 = None;
        }
        Ok(())
    }

    fn patch(&self, from: u64, bytes: &Bytes) -> Option<Patch> {
        let old = self.folder.dataset(from)?;
        let frame = digest::make_patch(&old, bytes)
            .inspect_err(|error| {
                tracing::warn!("cannot make a patch; agents fetch the whole blob: {error}")
            })
            .ok()?;
        // A patch that is longer than the dataset itself saves nothing.
        (frame.len() <= MAX_PATCH.min(bytes.len())).then(|| Patch {
            from,
            zstd: STANDARD.encode(frame),
        })
    }

    /// Processes jobs and watches the files until the other side is gone.
    pub(super) fn run(mut self, jobs: &Receiver<Job>, events: &Sender<StateEvent>) {
        loop {
            let event = match jobs.recv_timeout(TICK) {
                Ok(Job::Commit { floor }) => match self.commit(floor) {
                    Ok(committed) => Some(StateEvent::Committed(committed)),
                    Err(error) => Some(StateEvent::Failed(error)),
                },
                Ok(Job::Patch { from, to, bytes }) => Some(StateEvent::Patch {
                    from,
                    to,
                    patch: self.patch(from, &bytes),
                }),
                Ok(Job::WriteRegistry(registry)) => {
                    let written = self
                        .folder
                        .write_bytes("agents.json", &registry)
                        .inspect_err(|_| {
                            // A leftover report could list an agent as synced that no longer is.
                            let _ = self.folder.remove("agents.json");
                        });
                    Some(StateEvent::RegistryWritten(written))
                }
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let polled = self.poll().map(|polled| match polled {
                Ok(agents) => StateEvent::Inventory(agents),
                Err(error) => StateEvent::Failed(error),
            });
            for event in event.into_iter().chain(polled) {
                // The loop always takes results, so this wait ends.
                if events.blocking_send(event).is_err() {
                    return;
                }
            }
        }
    }
}

/// Returns whether a failure may be transient although the inventory stays the same.
pub(super) fn is_of_the_disk(error: &anyhow::Error) -> bool {
    error.is::<StateError>()
        || error.is::<dns_kit::files::atomic::ReplaceError>()
        // A repair of permissions or of a mount leaves the stamps of the files as they are.
        || error.is::<io::Error>()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser as _;

    use super::*;
    use crate::inventory::changes::Change;

    #[derive(clap::Parser)]
    struct CommandLine {
        #[command(flatten)]
        options: PublishOptions,
    }

    fn writer(folder: &Path) -> StateWriter {
        let path = |name: &str| folder.join(name).display().to_string();
        let words = [
            "publish",
            "--state",
            &path("state"),
            "--inventory",
            &path("inventory.json"),
        ];
        let words = words
            .map(str::to_owned)
            .into_iter()
            .chain(["--local".to_owned(), path("records.json")]);
        StateWriter::open(&CommandLine::parse_from(words).options).unwrap()
    }

    /// Polls until the inventory was read.
    fn read(writer: &mut StateWriter) {
        std::iter::repeat_with(|| writer.poll())
            .flatten()
            .next()
            .unwrap()
            .unwrap();
    }

    #[test]
    fn longer_patch_is_not_sent() {
        let folder = tempfile::tempdir().unwrap();
        let writer = writer(folder.path());
        let old = vec![b'x'; 10_000];
        std::fs::write(folder.path().join("state/datasets/1.json"), &old).unwrap();
        // The new bytes are random, so that they enter the patch unchanged.
        let mut random = fastrand::Rng::with_seed(72);
        let random: Vec<u8> = std::iter::repeat_with(|| random.u8(..))
            .take(MAX_PATCH)
            .collect();
        let new = |added: usize| Bytes::from([&old[..], &random[..added]].concat());
        let length = |added: usize| digest::make_patch(&old, &new(added)).unwrap().len();
        let some = MAX_PATCH - 1_000;
        let most = MAX_PATCH - (length(some) - some);
        assert_eq!(length(most), MAX_PATCH);
        for (added, is_sent) in [(most - 1, true), (most, true), (most + 1, false)] {
            assert_eq!(writer.patch(1, &new(added)).is_some(), is_sent, "{added}");
        }
        // Nor is a patch that is longer than the dataset.
        assert!(writer.patch(1, &Bytes::from_static(b"short")).is_none());
        assert!(writer.patch(2, &new(0)).is_none(), "version 2 is not kept");
    }

    #[test]
    fn command_before_commit_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let inventory = r#"{"deployments": [{"name": "d", "instance_groups": [{"name": "g", "instances": [
            {"id": "i0", "networks": {"n": "10.0.0.1"}}, {"id": "i1", "networks": {"n": "10.0.0.2"}}]}]}]}"#;
        let path = folder.path().join("inventory.json");
        std::fs::write(&path, inventory).unwrap();
        // An old file is whole.
        let file = std::fs::File::options().append(true).open(&path).unwrap();
        file.set_modified(std::time::SystemTime::now() - Duration::from_secs(60))
            .unwrap();
        let mut writer = writer(folder.path());
        read(&mut writer);
        let source = writer.options.source.clone();
        source
            .change(
                &writer.folder,
                Change::Remove {
                    id: "i1".to_owned(),
                },
            )
            .unwrap();
        writer.folder.write(CONFIRMED, &7).unwrap();
        writer.commit(0).unwrap();
        assert_eq!(
            writer.folder.read(CONFIRMED).unwrap(),
            Some(7),
            "for the next version"
        );
        writer.poll().unwrap().unwrap();
        writer.commit(0).unwrap();
        assert_eq!(writer.known, HashSet::from(["i0".to_owned()]));
        assert_eq!(writer.folder.read::<usize>(CONFIRMED).unwrap(), None);
        assert!(writer.poll().is_none());
    }

    /// Writes an inventory of these instances that has been unchanged for a minute.
    fn write_inventory(folder: &Path, instances: std::ops::Range<usize>) {
        let mut texts = Vec::new();
        for number in instances {
            texts.push(format!(
                r#"{{"id": "i{number}", "agent_id": "agent-{number}", "networks": {{"n": "10.0.1.{number}"}}}}"#
            ));
        }
        let text = format!(
            r#"{{"deployments": [{{"name": "d", "instance_groups": [{{"name": "g", "instances": [{}]}}]}}]}}"#,
            texts.join(",")
        );
        let path = folder.join("inventory.json");
        std::fs::write(&path, text).unwrap();
        let file = std::fs::File::options().append(true).open(&path).unwrap();
        let before = std::time::SystemTime::now() - Duration::from_secs(60);
        file.set_modified(before).unwrap();
    }

    #[test]
    fn removals_of_a_tenth_need_no_confirmation() {
        for (known, left, confirmed, is_accepted) in [
            (11, 1, None, true),
            (12, 1, None, false),
            (12, 1, Some(10), false),
            (12, 1, Some(11), true),
            (120, 108, None, true),
            (120, 107, None, false),
        ] {
            let folder = tempfile::tempdir().unwrap();
            write_inventory(folder.path(), 0..known);
            let mut writer = writer(folder.path());
            read(&mut writer);
            let made = writer.commit(3).unwrap();
            assert_eq!((made.made.version, made.new, made.gone.len()), (4, true, 0));
            assert_eq!(writer.newest().map(|made| made.version), Some(4));
            assert_eq!(writer.known.len(), known);
            writer.options.confirm_removals = confirmed;
            write_inventory(folder.path(), 0..left);
            let loaded = writer.load(true);
            let shown = format!("{known} {left} {confirmed:?}");
            assert_eq!(loaded.is_ok(), is_accepted, "{shown}");
            if let Err(problem) = loaded {
                let count = format!("removes {} of {known} instances", known - left);
                assert!(problem.to_string().contains(&count), "{problem}");
                assert!(!is_of_the_disk(&problem));
            }
            let again = writer.commit(0).unwrap();
            let version = if is_accepted { 5 } else { 4 };
            assert_eq!((again.made.version, again.new), (version, is_accepted));
        }
    }

    #[test]
    fn missing_instances_stay_until_the_file_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        write_inventory(folder.path(), 0..3);
        let mut writer = writer(folder.path());
        let agents = writer.load(false).unwrap();
        let all = ["agent-0", "agent-1", "agent-2"]
            .map(str::to_owned)
            .to_vec();
        assert_eq!(agents, Some(all.clone()), "nothing is missing");
        writer.commit(0).unwrap();
        write_inventory(folder.path(), 0..2);
        assert_eq!(writer.load(false).unwrap(), Some(all.clone()));
        assert!(writer.removals_wait);
        assert_eq!(writer.load(true).unwrap(), Some(all[..2].to_vec()));
        assert!(!writer.removals_wait);
        // A new process knows the ids from the newest version only.
        writer.inventory = None;
        assert_eq!(writer.load(false).unwrap(), None);
        assert!(writer.removals_wait);
        write_inventory(folder.path(), 0..4);
        assert_eq!(
            writer.load(false).unwrap().map(|agents| agents.len()),
            Some(4)
        );
        assert!(!writer.removals_wait);
        // A new instance with the address of a missing one waits with it.
        let text = std::fs::read_to_string(folder.path().join("inventory.json")).unwrap();
        std::fs::write(
            folder.path().join("inventory.json"),
            text.replace("\"i3\"", "\"new\""),
        )
        .unwrap();
        assert_eq!(writer.load(false).unwrap(), None);
    }

    #[test]
    fn failures_of_the_disk_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        write_inventory(folder.path(), 0..3);
        let mut writer = writer(folder.path());
        read(&mut writer);
        assert!(writer.poll().is_none());
        writer.read_again = Some(0);
        assert!(writer.poll().is_some(), "although no file changed");
        assert_eq!(writer.read_again, None);
        let now = now_ms();
        writer.retry();
        let pause = writer.read_again.unwrap() - now;
        assert!(
            (DISK_PAUSE_MS..DISK_PAUSE_MS + 60_000).contains(&pause),
            "{pause}"
        );
        writer.read_again = Some(u64::MAX);
        assert!(writer.poll().is_none());
        let state = folder.path().join("state/state.json");
        std::fs::write(&state, "{").unwrap();
        let problem = writer
            .folder
            .read::<PublisherState>("state.json")
            .unwrap_err();
        assert!(is_of_the_disk(&problem.into()));
        assert!(!is_of_the_disk(&anyhow::anyhow!("other")));
    }

    #[test]
    fn unreadable_inventory_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("inventory.json");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut writer = writer(folder.path());
        let problem = std::iter::repeat_with(|| writer.poll())
            .flatten()
            .next()
            .unwrap()
            .unwrap_err();
        let expected = format!("{}: it is not a regular file", path.display());
        assert_eq!(format!("{problem:#}"), expected);
        assert!(writer.read_again.is_some());
        // A mistake in the content ends with another content only.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "[").unwrap();
        let problem = writer.load(true).unwrap_err();
        assert!(!is_of_the_disk(&problem), "{problem}");
    }

    #[test]
    fn failed_commit_forgets_no_blobs() {
        let folder = tempfile::tempdir().unwrap();
        write_inventory(folder.path(), 0..3);
        let mut writer = writer(folder.path());
        read(&mut writer);
        for version in 0..3 {
            writer.commit(version).unwrap();
        }
        writer.options.keep_bytes = 0;
        assert!(writer.commit(u64::MAX).is_err());
        let gone = writer.commit(0).unwrap().gone;
        assert_eq!(gone.len(), 1);
        assert_eq!(gone[0].version, 1);
        assert_eq!(writer.commit(0).unwrap().gone, []);
    }

    #[test]
    fn damaged_dataset_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        write_inventory(folder.path(), 0..3);
        let mut writer = writer(folder.path());
        read(&mut writer);
        writer.commit(0).unwrap();
        let options = writer.options.clone();
        drop(writer);
        let dataset = folder.path().join("state/datasets/1.json");
        std::fs::write(&dataset, "{").unwrap();
        let problem = StateWriter::open(&options).unwrap_err().to_string();
        let start = format!("{}: EOF while parsing", dataset.display());
        assert!(problem.starts_with(&start), "{problem}");
        std::fs::remove_file(&dataset).unwrap();
        assert_eq!(StateWriter::open(&options).unwrap().known, HashSet::new());
    }

    #[test]
    fn read_state_outlives_the_process() {
        use std::os::unix::fs::MetadataExt as _;

        let folder = tempfile::tempdir().unwrap();
        write_inventory(folder.path(), 0..3);
        let mut writer = writer(folder.path());
        read(&mut writer);
        assert_eq!(writer.folder.read::<Stamps>(FILES).unwrap(), None);
        writer.commit(0).unwrap();
        let stamps = writer.options.source.stamps();
        assert_eq!(writer.folder.read(FILES).unwrap(), Some(stamps));
        let path = writer.folder.path.join(FILES);
        let inode = || std::fs::metadata(&path).unwrap().ino();
        let before = inode();
        writer.commit(0).unwrap();
        assert_eq!(inode(), before, "it is written once");
    }

    #[test]
    fn renamed_file_is_read_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("inventory.json");
        write_inventory(folder.path(), 0..3);
        let mut writer = writer(folder.path());
        read(&mut writer);
        writer.commit(0).unwrap();
        let touch = |path: &Path, modified| {
            let file = std::fs::File::options().append(true).open(path).unwrap();
            file.set_modified(modified).unwrap();
        };
        let now = std::time::SystemTime::now();
        // Written in place by a clock that is ahead: by its age, the file is never complete.
        let text = std::fs::read_to_string(&path).unwrap();
        write_inventory(folder.path(), 0..2);
        touch(&path, now + Duration::from_secs(3600));
        assert!(writer.poll().is_none());
        // Renamed, it is read, and what it lacks is removed.
        let next = folder.path().join("next");
        std::fs::write(&next, text.replace("i2", "j2")).unwrap();
        touch(&next, now - Duration::from_secs(60));
        std::fs::rename(&next, &path).unwrap();
        let agents = writer.poll().unwrap().unwrap();
        assert_eq!(agents, ["agent-0", "agent-1", "agent-2"]);
        assert!(!writer.removals_wait);
        writer.commit(0).unwrap();
        let known = ["i0", "i1", "j2"].map(str::to_owned);
        assert_eq!(writer.known, HashSet::from(known));
    }
}
