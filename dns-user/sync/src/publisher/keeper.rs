//! All work on the state folder and the inventory's files, on one thread: a disk that hangs holds up
//! new versions, and neither announcements nor the end of the process.

use std::{
    collections::HashSet,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::Duration,
};

use anyhow::Context;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use tokio::sync::mpsc::UnboundedSender;

use super::{
    source::{CHANGES, InventoryOptions, Quiet, SourceError, Stamps, is_old, is_renamed, stamps},
    state::{Folder, Made, State, StateError},
};
use crate::{
    clock::now_ms,
    dataset::{self, Dataset},
    inventory::Inventory,
    message::Patch,
    patch,
    store::unix_now,
};

/// Time between two looks at the files.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// Pause before an inventory is read again after a failure of the disk, in milliseconds.
const DISK_PAUSE_MS: u64 = 2000;

/// File with the number of removals that an operator confirmed.
pub const CONFIRMED: &str = "confirmed.json";

/// Removals that need no confirmation, however small the fleet.
const FREE_REMOVALS: usize = 10;

/// Longest patch that is made: it has to fit a message of NATS, and Base64 adds a third.
const LONGEST_PATCH: usize = 500_000;

/// An inventory that removes more instances than a mistake should be able to.
#[derive(Debug, thiserror::Error)]
#[error(
    "the inventory removes {removed} of {known} instances, and more than {allowed} need a confirmation; \
     if this is intended: bosh-dns-sync confirm-removals {removed} --state FOLDER, or publish --confirm-removals {removed}"
)]
pub struct MassRemoval {
    /// Instances that are gone.
    pub removed: usize,
    /// Number of instances before the change.
    pub known: usize,
    /// Removals that need no confirmation.
    pub allowed: usize,
}

/// A request to the thread.
#[derive(Debug)]
pub(super) enum Job {
    /// Commit the inventory as a version above `floor`.
    Commit {
        floor: u64,
    },
    /// Make the patch from a kept version to these bytes.
    Patch {
        from: u64,
        to: u64,
        bytes: Bytes,
    },
    WriteBook(Vec<u8>),
}

/// A result of the thread.
#[derive(Debug)]
pub(super) enum Note {
    /// The inventory was read; the ids of its agents.
    Inventory(Vec<String>),
    /// The newest version, after a commit.
    Committed(Committed),
    /// The inventory was not read, or not committed.
    Failed(anyhow::Error),
    /// A patch; `None` if the old version is gone or the patch would be too long.
    Patch { from: u64, to: u64, patch: Option<Patch> },
    /// `agents.json` was written.
    BookWritten(Result<(), StateError>),
}

/// The newest version after a commit.
#[derive(Debug)]
pub(super) struct Committed {
    pub(super) made: Made,
    pub(super) bytes: Bytes,
    /// Whether this commit made it.
    pub(super) new: bool,
    /// Versions that were forgotten; their blobs can be deleted.
    pub(super) gone: Vec<Made>,
}

/// The state folder and the inventory.
#[derive(Debug)]
pub(super) struct Keeper {
    source: InventoryOptions,
    folder: Folder,
    state: State,
    keep_bytes: u64,
    /// Removals confirmed on the command line.
    confirmed: Option<usize>,
    quiet: Quiet,
    /// Stamps of the files that commands write atomically.
    commands: Stamps,
    /// Time to read again although no file changed.
    read_again: Option<u64>,
    inventory: Option<Inventory>,
    /// Ids of the newest version's instances.
    known: HashSet<String>,
}

impl Keeper {
    /// Opens the folder as its one publisher.
    pub(super) fn open(options: &super::PublishOptions) -> Result<Self, StateError> {
        let folder = Folder::lock(&options.state)?;
        let state: State = folder.read("state.json")?.unwrap_or_default();
        let newest = state.versions.last().and_then(|made| folder.dataset(made.version));
        let known = newest.and_then(|bytes| dataset::instance_ids(&bytes).ok()).unwrap_or_default();
        Ok(Self {
            source: options.source.clone(),
            folder,
            state,
            keep_bytes: options.keep_bytes,
            confirmed: options.confirm_removals,
            quiet: Quiet::default(),
            commands: Stamps::new(),
            read_again: None,
            inventory: None,
            known,
        })
    }

    /// Returns the newest version.
    pub(super) fn newest(&self) -> Option<&Made> {
        self.state.versions.last()
    }

    /// Reads one of the folder's files.
    pub(super) fn read<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StateError> {
        self.folder.read(name)
    }

    /// Reads the inventory if it changed and is complete. Returns the ids of its agents.
    pub(super) fn poll(&mut self) -> Option<anyhow::Result<Vec<String>>> {
        let now = now_ms();
        let commands = stamps(vec![self.folder.path().join(CHANGES), self.folder.path().join(CONFIRMED)]);
        let by_command = commands != self.commands && self.inventory.is_some();
        let again = self.read_again.is_some_and(|at| now >= at);
        if again {
            self.quiet.forget();
        }
        let stamps = self.source.stamps();
        let complete = is_old(&stamps) || self.quiet.is_replaced(&stamps, is_renamed);
        let changed = self.quiet.poll(stamps, now, again || complete);
        if !changed && !by_command {
            return None;
        }
        self.commands = commands;
        self.read_again = None;
        Some(self.load().inspect_err(|error| {
            if is_of_the_disk(error) {
                self.read_again = Some(now + DISK_PAUSE_MS);
            }
        }))
    }

    /// Has the inventory read again after a pause.
    pub(super) fn retry(&mut self) {
        self.read_again = Some(now_ms() + DISK_PAUSE_MS);
    }

    fn load(&mut self) -> anyhow::Result<Vec<String>> {
        let inventory = self.source.load(&self.folder)?;
        self.check_removals(&inventory)?;
        let agents = inventory.instances.iter().filter_map(|instance| instance.agent.clone()).collect();
        self.inventory = Some(inventory);
        Ok(agents)
    }

    /// Refuses an inventory that removes many instances, unless an operator confirmed as many.
    fn check_removals(&self, inventory: &Inventory) -> anyhow::Result<()> {
        let present: HashSet<&str> = inventory.instances.iter().map(|instance| &*instance.id).collect();
        let known = self.known.len();
        let removed = self.known.iter().filter(|id| !present.contains(id.as_str())).count();
        let allowed = FREE_REMOVALS.max(known / 10);
        if removed <= allowed {
            return Ok(());
        }
        let written: Option<usize> = self.folder.read(CONFIRMED)?;
        match self.confirmed.max(written).is_some_and(|confirmed| removed <= confirmed) {
            true => Ok(()),
            false => Err(MassRemoval { removed, known, allowed }.into()),
        }
    }

    /// Commits the inventory that was read last as a version above `floor`.
    pub(super) fn commit(&mut self, floor: u64) -> anyhow::Result<Committed> {
        let inventory = self.inventory.as_ref().context("no inventory was read")?;
        let now = unix_now().as_secs();
        let gone = self.folder.forget_old(&mut self.state, now, self.keep_bytes)?;
        let mut ids = self.state.ids.clone();
        let dataset = Dataset::build(inventory, &mut ids);
        let new = self.folder.commit(&mut self.state, ids, &dataset, floor, now)?;
        self.known = inventory.instances.iter().map(|instance| instance.id.clone()).collect();
        // A confirmation is for one version.
        self.folder.remove(CONFIRMED)?;
        self.commands = stamps(vec![self.folder.path().join(CHANGES), self.folder.path().join(CONFIRMED)]);
        let made = self.state.versions.last().context("no version was made")?.clone();
        if new {
            tracing::info!(version = made.version, rows = dataset.rows(), "new version of the records made");
        }
        let bytes = self.folder.dataset(made.version).context("the newest dataset is missing")?.into();
        Ok(Committed { made, bytes, new, gone })
    }

    fn patch(&self, from: u64, bytes: &Bytes) -> Option<Patch> {
        let old = self.folder.dataset(from)?;
        let frame = patch::make(&old, bytes)
            .inspect_err(|error| tracing::warn!("cannot make a patch; agents fetch the whole blob: {error}"))
            .ok()?;
        (frame.len() <= LONGEST_PATCH.min(bytes.len())).then(|| Patch { from, zstd: STANDARD.encode(frame) })
    }

    /// Serves jobs and watches the files until the other side is gone.
    pub(super) fn run(mut self, jobs: &Receiver<Job>, notes: &UnboundedSender<Note>) {
        loop {
            let note = match jobs.recv_timeout(TICK) {
                Ok(Job::Commit { floor }) => match self.commit(floor) {
                    Ok(committed) => Some(Note::Committed(committed)),
                    Err(error) => Some(Note::Failed(error)),
                },
                Ok(Job::Patch { from, to, bytes }) => {
                    Some(Note::Patch { from, to, patch: self.patch(from, &bytes) })
                }
                Ok(Job::WriteBook(book)) => {
                    let written = self.folder.write_bytes("agents.json", &book).inspect_err(|_| {
                        // An old report that stays could call an agent synced that no longer is.
                        let _ = self.folder.remove("agents.json");
                    });
                    Some(Note::BookWritten(written))
                }
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let polled = self.poll().map(|polled| match polled {
                Ok(agents) => Note::Inventory(agents),
                Err(error) => Note::Failed(error),
            });
            for note in note.into_iter().chain(polled) {
                if notes.send(note).is_err() {
                    return;
                }
            }
        }
    }
}

/// Returns whether a failure may pass although the inventory stays the same.
pub(super) fn is_of_the_disk(error: &anyhow::Error) -> bool {
    error.is::<StateError>()
        || error.is::<crate::files::ReplaceError>()
        || matches!(error.downcast_ref(), Some(SourceError::State(_)))
}
