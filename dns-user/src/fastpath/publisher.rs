//! The publisher: the one thread that changes what the program answers, and
//! the handle by which everybody else asks it to.

use std::{
    io,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded, select_biased, unbounded};
use dns_common::{entry::EntryHeader, name::hash_name};
use tokio::sync::{oneshot, watch};

use super::{
    arena::ArenaMemory,
    entry::{read_header, read_name},
    gather::Pace,
    index::IndexMemory,
    learn::LearnFilter,
    lease::Lease,
    maps::ControlPage,
    table::{Answers, Table, TableStatus},
};
use crate::name::Name;

/// Names waiting to be learned. More than this within one round of the
/// publisher are dropped; their next query brings them back.
const LEARN_QUEUE: usize = 4096;

/// How long the thread must be idle before it tidies up.
const IDLE: Duration = Duration::from_millis(100);

/// Handle of the publisher. Cheap to clone; calls never block.
#[derive(Clone)]
pub struct Publisher {
    /// `None`: there is no fast path.
    inner: Option<Arc<Handle>>,
}

/// What a handle needs.
struct Handle {
    /// Events that must not be lost.
    control: Sender<Event>,
    /// Names to learn.
    learn: Sender<Name>,
    /// Repetitions, held back.
    filter: Arc<LearnFilter>,
    /// Seed of the keys.
    seed: u64,
    /// The index, for reading marks.
    index: Arc<IndexMemory>,
    /// The entries, for reading marks.
    memory: Arc<ArenaMemory>,
    /// Where the program is told how to mark.
    page: Arc<ControlPage>,
}

/// What the publisher is told.
enum Event {
    /// A new snapshot.
    Install(Arc<dyn Answers>),
    /// The health of these instances changed.
    HealthChanged(Box<[IpAddr]>),
    /// These names may not be published any more.
    Forget(Box<[Name]>),
    /// Tell when everything before this has taken effect.
    Flush(oneshot::Sender<()>),
    /// Stop; with `end_lease` the program is told to answer no more.
    Stop {
        /// Whether the fast path ends with the publisher.
        end_lease: bool,
    },
}

impl Publisher {
    /// The publisher of a server without a fast path: every call does nothing.
    pub fn off() -> Self {
        Self { inner: None }
    }

    /// Publishes what a new snapshot says, and what was learned, as far as it still resolves.
    pub fn install(&self, answers: Arc<dyn Answers>) {
        self.send(Event::Install(answers));
    }

    /// Resolves again the names that hold these instances.
    pub fn health_changed(&self, instances: &[IpAddr]) {
        if !instances.is_empty() {
            self.send(Event::HealthChanged(instances.into()));
        }
    }

    /// Hands over a name that was resolved locally in userspace, so that its
    /// next query is answered by the interface. Dropped when the publisher is behind.
    pub fn learn(&self, name: &Name) {
        let Some(handle) = &self.inner else { return };
        let key = hash_name(handle.seed, name.as_wire());
        if handle.filter.note(key) && handle.learn.try_send(name.clone()).is_err() {
            handle.filter.forget(key);
        }
    }

    /// Takes names out that are no longer admitted.
    pub fn forget(&self, names: &[Name]) {
        if !names.is_empty() {
            self.send(Event::Forget(names.into()));
        }
    }

    /// Whether the interface answers for this name now.
    pub fn is_published(&self, name: &Name) -> bool {
        self.header(name).is_some()
    }

    /// When the program last answered for this name: ns of
    /// `CLOCK_MONOTONIC_COARSE`. `None`: not published, or never used.
    pub fn last_used_ns(&self, name: &Name) -> Option<u64> {
        self.header(name).map(|header| header.last_used_ns).filter(|&mark| mark != 0)
    }

    /// The header of the entry of this name.
    fn header(&self, name: &Name) -> Option<EntryHeader> {
        let handle = self.inner.as_ref()?;
        let location = handle.index.get(hash_name(handle.seed, name.as_wire()))?;
        let header = read_header(&handle.memory, location)?;
        // The name is another one if hashes collide, or if these cells were
        // given to another entry just now.
        (read_name(&handle.memory, location)? == *name).then_some(header)
    }

    /// Whether marks are to be exact, for a caller that needs their order within
    /// one tick of the clock. Takes effect at once; costs the program a clock read.
    pub fn mark_exactly(&self, exact: bool) {
        if let Some(handle) = &self.inner {
            handle.page.set_exact_marks(exact);
        }
    }

    /// Resolves when all earlier calls have taken effect in the map.
    pub async fn flushed(&self) {
        let (done, wait) = oneshot::channel();
        self.send(Event::Flush(done));
        // An error means that the publisher has ended: nothing is left to wait for.
        let _ = wait.await;
    }

    /// Sends an event that must not be lost.
    fn send(&self, event: Event) {
        if let Some(handle) = &self.inner {
            // An error means that the publisher has ended.
            let _ = handle.control.send(event);
        }
    }
}

/// What the thread shares with the rest of the fast path.
#[derive(Clone)]
pub(super) struct Shared {
    /// Counts, after each event.
    status: Arc<Mutex<TableStatus>>,
    /// How many snapshots have been installed completely.
    installs: watch::Receiver<u64>,
}

impl Shared {
    /// Counts as of the last event.
    pub(super) fn status(&self) -> TableStatus {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Becomes 1 once the map is filled for the first time, and grows with each snapshot.
    pub(super) fn installs(&self) -> watch::Receiver<u64> {
        self.installs.clone()
    }
}

/// The thread, to be stopped by its owner.
pub(super) struct PublisherThread {
    /// Its handle.
    pub(super) publisher: Publisher,
    /// What it tells.
    pub(super) shared: Shared,
    /// The thread itself.
    thread: JoinHandle<()>,
}

impl PublisherThread {
    /// Starts the thread. `earlier` are names that a predecessor had learned:
    /// they are learned as soon as there is a snapshot to resolve them by.
    pub(super) fn start(
        index: Arc<IndexMemory>,
        memory: Arc<ArenaMemory>,
        seed: u64,
        filter: Arc<LearnFilter>,
        table: Table,
        lease: Lease,
        earlier: Vec<Name>,
    ) -> io::Result<Self> {
        let (control, control_events) = unbounded();
        let (learn, learn_events) = bounded(LEARN_QUEUE);
        let page = lease.page();
        let status = Arc::new(Mutex::new(table.status()));
        let (installed, installs) = watch::channel(0);
        let worker = Worker {
            table,
            lease,
            control: control_events,
            learn: learn_events,
            status: status.clone(),
            installed,
            earlier,
            gathering: Pace::new(Instant::now()),
        };
        let thread = thread::Builder::new().name("publisher".into()).spawn(move || worker.run())?;
        let handle = Handle { control, learn, filter, seed, index, memory, page };
        Ok(Self {
            publisher: Publisher { inner: Some(Arc::new(handle)) },
            shared: Shared { status, installs },
            thread,
        })
    }

    /// Ends the thread after what was asked of it so far. With `end_lease` the
    /// program answers nothing from then on.
    pub(super) fn stop(self, end_lease: bool) {
        let Self { publisher, shared: _, thread } = self;
        publisher.send(Event::Stop { end_lease });
        if thread.join().is_err() {
            tracing::error!("the publisher had panicked");
        }
    }
}

/// The state of the thread.
struct Worker {
    /// What is published.
    table: Table,
    /// What keeps the program answering.
    lease: Lease,
    /// Events that must not be lost.
    control: Receiver<Event>,
    /// Names to learn.
    learn: Receiver<Name>,
    /// Counts, for others to read.
    status: Arc<Mutex<TableStatus>>,
    /// How many snapshots have been installed.
    installed: watch::Sender<u64>,
    /// Names that a predecessor had learned.
    earlier: Vec<Name>,
    /// When to look for entries that lie scattered.
    gathering: Pace,
}

impl Worker {
    /// Works until told to stop, or until all handles are gone.
    fn run(mut self) {
        let interval = self.lease.interval();
        let mut renewed: Option<Instant> = None;
        loop {
            // Before the first snapshot there is nothing to lease.
            if *self.installed.borrow() > 0 && renewed.is_none_or(|at| at.elapsed() >= interval) {
                self.lease.renew();
                renewed = Some(Instant::now());
            }
            if self.gathering.is_due(Instant::now()) {
                let moved = self.table.gather();
                tracing::debug!(moved, "entries in use were looked at");
                self.publish_status();
            }
            let wait = interval.min(IDLE);
            select_biased! {
                recv(self.control) -> event => match event {
                    Ok(Event::Stop { end_lease }) => {
                        if end_lease {
                            self.lease.end();
                        }
                        return;
                    }
                    Ok(event) => {
                        self.handle(event);
                        self.publish_status();
                    }
                    Err(_) => return,
                },
                recv(self.learn) -> name => if let Ok(name) = name {
                    self.table.learn(&name);
                    self.drain_learn();
                    self.publish_status();
                },
                default(wait) => self.table.tidy(),
            }
        }
    }

    /// Carries out one event.
    fn handle(&mut self, event: Event) {
        let Self { table, lease, installed, .. } = self;
        let filled = *installed.borrow() > 0;
        let mut last = Instant::now();
        // Work that makes progress is not a hang: it keeps the lease alive.
        let mut progress = || {
            if filled && last.elapsed() >= lease.interval() {
                lease.renew();
                last = Instant::now();
            }
        };
        match event {
            Event::Install(answers) => {
                let start = Instant::now();
                table.install(answers, &mut progress);
                for name in std::mem::take(&mut self.earlier) {
                    table.learn(&name);
                }
                let status = table.status();
                tracing::info!(
                    published = status.published,
                    learned = status.learned,
                    unfitting = status.unfitting.total(),
                    milliseconds = start.elapsed().as_millis(),
                    "the interface answers from the new records"
                );
                if status.unfitting.total() > 0 {
                    tracing::warn!(unfitting = ?status.unfitting, "names that the interface cannot answer are answered from above");
                }
                self.lease.renew();
                self.gathering = Pace::new(Instant::now());
                self.installed.send_modify(|count| *count += 1);
            }
            Event::HealthChanged(instances) => table.health_changed(&instances, &mut progress),
            Event::Forget(names) => table.forget(&names),
            Event::Flush(done) => {
                self.drain_learn();
                self.publish_status();
                // Who asked may have gone.
                let _ = done.send(());
            }
            // Handled by the loop, which ends.
            Event::Stop { .. } => {}
        }
    }

    /// Learns what is waiting, up to one round.
    fn drain_learn(&mut self) {
        for _ in 0..LEARN_QUEUE {
            match self.learn.try_recv() {
                Ok(name) => self.table.learn(&name),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
            }
        }
    }

    /// Lets others read the counts.
    fn publish_status(&self) {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = self.table.status();
    }
}
