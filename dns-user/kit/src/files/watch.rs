//! Watches folders for changes with inotify (`notify`), and once a second reports a possible change
//! for events that inotify misses (overlay file systems, folders that appear).

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use nix::sys::statfs;
use notify::{
    EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode, ModifyKind},
};
use parking_lot::Mutex;
use tokio::{sync::Notify, time};
use tracing::{debug, warn};

/// Quiet period after a change of unknown extent. A file closed by its writer or renamed is
/// complete and needs none.
const QUIET: Duration = Duration::from_millis(25);

/// Upper bound of the quiet period, for folders that change constantly.
const MAX_QUIET: Duration = Duration::from_millis(250);

/// Interval of checks without any event.
const INTERVAL: Duration = Duration::from_secs(1);

/// Waits for changes in a set of folders.
pub struct Watch {
    /// `None` if inotify is unavailable; files are then only checked every [`INTERVAL`].
    watcher: Option<RecommendedWatcher>,
    events: Arc<Events>,
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
        // The thread that takes events locks the folders too, and answers calls of the watcher: none is made while
        // they are locked.
        let watched: HashSet<PathBuf> = self.events.folders.lock().keys().cloned().collect();
        for gone in watched.difference(&wanted) {
            // A deleted folder is no longer watched by the kernel anyway.
            let _ = watcher.unwatch(gone);
            self.events.folders.lock().remove(gone);
        }
        for new in wanted.difference(&watched) {
            // Another folder may have been at this path before.
            let _ = watcher.unwatch(new);
            match watcher.watch(new, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    debug!("watching {}", new.display());
                    let kind = reports_every_write(new);
                    self.events.folders.lock().insert(new.clone(), kind);
                }
                Err(error) => debug!(
                    "cannot watch {}: {error}; checking once a second",
                    new.display()
                ),
            }
        }
    }

    /// Returns the writes that this watch is told of.
    pub fn writes(&self) -> Writes {
        Writes(self.events.clone())
    }

    /// Waits until something may have changed, at most a second. Cancel-safe, for use in a
    /// `select!` with shorter intervals.
    pub async fn next(&mut self) {
        let Events {
            whole, something, ..
        } = &*self.events;
        loop {
            let settled = self
                .changing
                .map(|Changing { first, last }| (last + QUIET).min(first + MAX_QUIET));
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

/// Returns whether the kernel reports every write below a folder. On a network file system other machines write, in an
/// overlay other containers may, and neither is reported here.
fn reports_every_write(folder: &Path) -> bool {
    const LOCAL: [statfs::FsType; 4] = [
        statfs::BTRFS_SUPER_MAGIC,
        statfs::EXT4_SUPER_MAGIC,
        statfs::TMPFS_MAGIC,
        statfs::XFS_SUPER_MAGIC,
    ];
    statfs::statfs(folder).is_ok_and(|kind| LOCAL.contains(&kind.filesystem_type()))
}

/// The writes to files in watched folders. A time stamp of a file that was read within the kernel's tick (1 to 10 ms)
/// does not tell of a write in the same tick; this count does.
#[derive(Clone)]
pub struct Writes(Arc<Events>);

impl Writes {
    /// Returns a number that changes with every write to a file in these folders; `None` if the kernel does not report
    /// all of them.
    pub fn count(&self, folders: &[PathBuf]) -> Option<u64> {
        let watched = self.0.folders.lock();
        for folder in folders {
            if watched.get(folder) != Some(&true) {
                return None;
            }
        }
        Some(self.0.writes.load(Ordering::Acquire))
    }
}

/// Coalesced kernel events. Each notification wakes one wait, even a later one.
#[derive(Default)]
struct Events {
    /// Watched folders, and whether the kernel reports every write in them.
    folders: Mutex<HashMap<PathBuf, bool>>,
    /// Number of events of which contents may have changed.
    writes: AtomicU64,
    /// A file was closed after writing, or renamed.
    whole: Notify,
    /// Any other event except opening and reading.
    something: Notify,
}

impl Events {
    fn take(&self, event: notify::Result<notify::Event>) {
        if let Ok(event) = &event {
            // A folder that is moved or removed itself is no longer the one at its path.
            let mut folders = self.folders.lock();
            for path in &event.paths {
                folders.remove(path);
            }
        }
        match event.map(|event| event.kind) {
            Ok(EventKind::Access(AccessKind::Open(_) | AccessKind::Read)) => {}
            // A rename leaves contents as they are.
            Ok(EventKind::Modify(ModifyKind::Name(_))) => self.whole.notify_one(),
            Ok(EventKind::Access(AccessKind::Close(AccessMode::Write))) => {
                self.writes.fetch_add(1, Ordering::Release);
                self.whole.notify_one();
            }
            // An error, or a request to look again, may mean that events were lost.
            Ok(_) | Err(_) => {
                self.writes.fetch_add(1, Ordering::Release);
                self.something.notify_one();
            }
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
        assert!(watch.events.folders.lock().is_empty());
    }

    /// Waits until the count differs from `before`.
    async fn changed_count(writes: &Writes, folders: &[PathBuf], before: Option<u64>) {
        for _ in 0..3_000 {
            if writes.count(folders) != before {
                return;
            }
            time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the count stays at {before:?}");
    }

    #[tokio::test]
    async fn writes_are_counted_and_renames_are_not() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let folders = [folder.path().to_owned()];
        let path = folder.path().join("a");
        std::fs::write(&path, "1").unwrap();
        let mut watch = Watch::new();
        let writes = watch.writes();
        assert_eq!(writes.count(&folders), None);
        watch.set(folders.to_vec());
        let first = writes.count(&folders);
        assert!(first.is_some());

        std::fs::rename(&path, folder.path().join("b")).unwrap();
        watch.events.whole.notified().await;
        assert_eq!(writes.count(&folders), first);
        std::fs::write(folder.path().join("b"), "2").unwrap();
        changed_count(&writes, &folders, first).await;
    }

    #[tokio::test]
    async fn moved_folder_counts_nothing() {
        let parent = tempfile::tempdir_in("/dev/shm").unwrap();
        let folders = [parent.path().join("watched")];
        std::fs::create_dir(&folders[0]).unwrap();
        let mut watch = Watch::new();
        watch.set(folders.to_vec());
        let before = watch.writes().count(&folders);
        assert!(before.is_some());
        std::fs::rename(&folders[0], parent.path().join("moved")).unwrap();
        changed_count(&watch.writes(), &folders, before).await;
        assert_eq!(watch.writes().count(&folders), None);
    }

    #[test]
    fn pseudo_file_systems_are_not_trusted() {
        assert!(reports_every_write(Path::new("/dev/shm")));
        assert!(!reports_every_write(Path::new("/proc")));
        assert!(!reports_every_write(Path::new("/nowhere")));
    }

    #[tokio::test]
    async fn settled_change_is_reported() {
        let mut watch = Watch::new();
        watch.events.something.notify_one();
        let begun = time::Instant::now();
        watch.next().await;
        // A timer never ends early.
        assert!(begun.elapsed() >= QUIET);
        assert!(watch.changing.is_none());
        // A file that was closed is complete.
        watch.events.whole.notify_one();
        watch.next().await;
    }
}
