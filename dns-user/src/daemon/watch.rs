//! Notices that watched folders changed: inotify through `notify`, and a look once
//! a second for what inotify misses (overlay file systems, folders that appear).

use std::{collections::HashSet, path::PathBuf, time::Duration};

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::{sync::mpsc, time};
use tracing::{debug, warn};

/// How long nothing more must happen before a change is looked at: writers that
/// rewrite a file in place are given the time to finish.
const QUIET: Duration = Duration::from_millis(25);

/// The longest that [`QUIET`] is waited for, in folders where there is always something.
const LONGEST: Duration = Duration::from_millis(250);

/// The look without any event.
const INTERVAL: Duration = Duration::from_secs(1);

/// Waits for changes in a set of folders.
pub(super) struct Watch {
    /// The kernel's side; `None`: there is none, once a second has to do.
    watcher: Option<RecommendedWatcher>,
    /// Wakes [`Watch::next`]. One place: it says that there was something, not what.
    events: mpsc::Receiver<()>,
    /// What is being watched.
    folders: HashSet<PathBuf>,
}

impl Watch {
    /// Watches nothing yet.
    pub(super) fn new() -> Self {
        let (sender, events) = mpsc::channel(1);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading a file is an event as well, and none of interest.
            if event.is_ok_and(|event| {
                matches!(
                    event.kind,
                    EventKind::Access(notify::event::AccessKind::Open(_) | notify::event::AccessKind::Read)
                )
            }) {
                return;
            }
            // Full: the wake-up is already on its way.
            let _ = sender.try_send(());
        });
        let watcher = watcher
            .inspect_err(|error| warn!("no inotify ({error}): files are looked at once a second"))
            .ok();
        Self { watcher, events, folders: HashSet::new() }
    }

    /// Watches exactly these folders from now on.
    pub(super) fn set(&mut self, folders: Vec<PathBuf>) {
        let Some(watcher) = &mut self.watcher else { return };
        let wanted: HashSet<PathBuf> = folders.into_iter().collect();
        for gone in self.folders.difference(&wanted) {
            // It may be gone for good; then the kernel has let go of it already.
            let _ = watcher.unwatch(gone);
        }
        let mut watched: HashSet<PathBuf> = self.folders.intersection(&wanted).cloned().collect();
        for new in wanted.difference(&self.folders) {
            match watcher.watch(new, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    debug!("watching {}", new.display());
                    watched.insert(new.clone());
                }
                Err(error) => debug!("cannot watch {}: {error}; looking once a second", new.display()),
            }
        }
        self.folders = watched;
    }

    /// Returns when something may have changed, at the latest after a second.
    pub(super) async fn next(&mut self) {
        if self.watcher.is_none() {
            return time::sleep(INTERVAL).await;
        }
        if time::timeout(INTERVAL, self.events.recv()).await.is_err() {
            return;
        }
        let end = time::Instant::now() + LONGEST;
        while time::Instant::now() < end {
            if time::timeout(QUIET, self.events.recv()).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_rename_into_a_watched_folder_wakes() {
        let folder = tempfile::tempdir().unwrap();
        let mut watch = Watch::new();
        watch.set(vec![folder.path().to_owned()]);
        std::fs::write(folder.path().join("a"), "1").unwrap();
        std::fs::rename(folder.path().join("a"), folder.path().join("b")).unwrap();
        // The channel holds the wake-up: no second has to pass.
        time::timeout(Duration::from_secs(30), watch.events.recv()).await.unwrap().unwrap();
        watch.set(vec![]);
        assert!(watch.folders.is_empty());
    }
}
