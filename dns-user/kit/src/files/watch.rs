//! Watches folders for changes with inotify (`notify`), and once a second reports a possible change
//! for events that inotify misses (overlay file systems, folders that appear).

use std::{collections::HashSet, path::PathBuf, sync::Arc, time::Duration};

use notify::{
    EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode, ModifyKind},
};
use tokio::{sync::Notify, time};
use tracing::{debug, warn};

/// Quiet period after a change of unknown extent. A file closed by its writer or renamed is
/// complete and needs none.
const QUIET: Duration = Duration::from_millis(25);

/// Upper bound of the quiet period, for folders that change constantly.
const LONGEST: Duration = Duration::from_millis(250);

/// Interval of checks without any event.
const INTERVAL: Duration = Duration::from_secs(1);

/// Waits for changes in a set of folders.
pub struct Watch {
    /// `None` if inotify is unavailable; files are then only checked every [`INTERVAL`].
    watcher: Option<RecommendedWatcher>,
    events: Arc<Events>,
    folders: HashSet<PathBuf>,
    /// Checks without any event.
    ticks: time::Interval,
    /// Changes of unknown extent that have not been reported yet.
    changing: Option<Changing>,
}

/// Times of the first and the last event of a change of unknown extent.
#[derive(Clone, Copy)]
struct Changing {
    first: time::Instant,
    last: time::Instant,
}

impl Watch {
    /// Creates a watch without folders. Must be called inside a tokio runtime.
    #[expect(
        clippy::new_without_default,
        reason = "it starts a thread and needs a runtime"
    )]
    pub fn new() -> Self {
        let mut ticks = time::interval_at(time::Instant::now() + INTERVAL, INTERVAL);
        ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        let events = Arc::new(Events::default());
        let notified = events.clone();
        let watcher = notify::recommended_watcher(move |event| notified.take(event));
        let watcher = watcher
            .inspect_err(|error| {
                warn!("inotify is unavailable ({error}): files are checked once a second")
            })
            .ok();
        Self {
            watcher,
            events,
            folders: HashSet::new(),
            ticks,
            changing: None,
        }
    }

    /// Replaces the set of watched folders.
    pub fn set(&mut self, folders: Vec<PathBuf>) {
        let Some(watcher) = &mut self.watcher else {
            return;
        };
        let wanted: HashSet<PathBuf> = folders.into_iter().collect();
        for gone in self.folders.difference(&wanted) {
            // A deleted folder is no longer watched by the kernel anyway.
            let _ = watcher.unwatch(gone);
        }
        let mut watched: HashSet<PathBuf> = self.folders.intersection(&wanted).cloned().collect();
        for new in wanted.difference(&self.folders) {
            match watcher.watch(new, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    debug!("watching {}", new.display());
                    watched.insert(new.clone());
                }
                Err(error) => debug!(
                    "cannot watch {}: {error}; checking once a second",
                    new.display()
                ),
            }
        }
        self.folders = watched;
    }

    /// Waits until something may have changed, at most a second. Cancel-safe, for use in a
    /// `select!` with shorter intervals.
    pub async fn next(&mut self) {
        let Events { whole, something } = &*self.events;
        loop {
            let settled = self
                .changing
                .map(|Changing { first, last }| (last + QUIET).min(first + LONGEST));
            let settling = async {
                match settled {
                    Some(time) => time::sleep_until(time).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = whole.notified() => break,
                () = settling => break,
                () = something.notified() => {
                    let last = time::Instant::now();
                    let first = self.changing.map_or(last, |changing| changing.first);
                    self.changing = Some(Changing { first, last });
                }
                _ = self.ticks.tick() => break,
            }
        }
        self.changing = None;
        self.ticks.reset();
    }
}

/// Coalesced kernel events. Each notification wakes one wait, even a later one.
#[derive(Default)]
struct Events {
    /// A file was closed after writing, or renamed.
    whole: Notify,
    /// Any other event except opening and reading.
    something: Notify,
}

impl Events {
    fn take(&self, event: notify::Result<notify::Event>) {
        match event.map(|event| event.kind) {
            Ok(EventKind::Access(AccessKind::Open(_) | AccessKind::Read)) => {}
            Ok(
                EventKind::Access(AccessKind::Close(AccessMode::Write))
                | EventKind::Modify(ModifyKind::Name(_)),
            ) => self.whole.notify_one(),
            // An error may mean that events were lost.
            Ok(_) | Err(_) => self.something.notify_one(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn interrupted_wait_keeps_events() {
        let mut watch = Watch::new();
        // As in a loop whose other intervals are shorter.
        let checked = async {
            while time::timeout(Duration::from_millis(10), watch.next())
                .await
                .is_err()
            {}
        };
        time::timeout(Duration::from_secs(30), checked)
            .await
            .expect("a check without events");
        watch.events.something.notify_one();
        let interrupted = time::timeout(Duration::ZERO, watch.next()).await.is_err();
        assert!(
            !interrupted || watch.changing.is_some(),
            "an event was lost"
        );
    }

    #[tokio::test]
    async fn rename_into_folder_wakes() {
        let folder = tempfile::tempdir().unwrap();
        let mut watch = Watch::new();
        watch.set(vec![folder.path().to_owned()]);
        std::fs::write(folder.path().join("a"), "1").unwrap();
        std::fs::rename(folder.path().join("a"), folder.path().join("b")).unwrap();
        time::timeout(Duration::from_secs(30), watch.events.whole.notified())
            .await
            .unwrap();
        watch.set(vec![]);
        assert!(watch.folders.is_empty());
    }
}
