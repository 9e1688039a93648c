//! Notices that watched folders changed: inotify through `notify`, and a look once
//! a second for what inotify misses (overlay file systems, folders that appear).

use std::{collections::HashSet, path::PathBuf, sync::Arc, time::Duration};

use notify::{
    EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode, ModifyKind},
};
use tokio::{sync::Notify, time};
use tracing::{debug, warn};

/// How long nothing more must happen before a change of unknown extent is looked
/// at. A file that was closed by its writer or renamed is whole: it is not waited for.
const QUIET: Duration = Duration::from_millis(25);

/// The longest that [`QUIET`] is waited for, in folders where there is always something.
const LONGEST: Duration = Duration::from_millis(250);

/// The look without any event.
const INTERVAL: Duration = Duration::from_secs(1);

/// Waits for changes in a set of folders.
pub(super) struct Watch {
    /// The kernel's side; `None`: there is none, once a second has to do.
    watcher: Option<RecommendedWatcher>,
    /// What wakes [`Watch::next`].
    events: Arc<Events>,
    /// What is being watched.
    folders: HashSet<PathBuf>,
}

impl Watch {
    /// Watches nothing yet.
    pub(super) fn new() -> Self {
        let events = Arc::new(Events::default());
        let told = events.clone();
        let watcher = notify::recommended_watcher(move |event| told.take(event));
        let watcher = watcher
            .inspect_err(|error| warn!("inotify is unavailable ({error}): files are checked once a second"))
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
        let Events { whole, something } = &*self.events;
        tokio::select! {
            () = whole.notified() => return,
            () = something.notified() => {}
            () = time::sleep(INTERVAL) => return,
        }
        let end = time::Instant::now() + LONGEST;
        while time::Instant::now() < end {
            tokio::select! {
                () = whole.notified() => return,
                () = something.notified() => {}
                () = time::sleep(QUIET) => return,
            }
        }
    }
}

/// Events of the kernel: that there were some, not which. Each wakes once, also
/// when it comes before anybody waits.
#[derive(Default)]
struct Events {
    /// A file was closed by its writer, or got another name.
    whole: Notify,
    /// Anything else but that somebody reads.
    something: Notify,
}

impl Events {
    /// Takes an event in.
    fn take(&self, event: notify::Result<notify::Event>) {
        match event.map(|event| event.kind) {
            Ok(EventKind::Access(AccessKind::Open(_) | AccessKind::Read)) => {}
            Ok(
                EventKind::Access(AccessKind::Close(AccessMode::Write))
                | EventKind::Modify(ModifyKind::Name(_)),
            ) => self.whole.notify_one(),
            // An error may stand for lost events.
            Ok(_) | Err(_) => self.something.notify_one(),
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
        time::timeout(Duration::from_secs(30), watch.events.whole.notified()).await.unwrap();
        watch.set(vec![]);
        assert!(watch.folders.is_empty());
    }
}
