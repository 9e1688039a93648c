//! The publisher: the one thread that changes what the program answers, and
//! the handle by which everybody else asks it to.

use std::{
    io,
    net::IpAddr,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded, select_biased, unbounded};
use dns_common::{control::CLIENT_BUCKETS, entry::EntryHeader, name::hash_name};
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

use crate::{
    map::{
        control::ControlPage,
        index::IndexMemory,
        layout::{read_header, read_name},
        store::EntryMemory,
    },
    publish::{
        learn::LearnFilter,
        lease::Lease,
        table::{NameSource, Table, TableStatus},
    },
};
use dns_core::name::{Name, NameRef};
use dns_platform::{
    clock::kernel_monotonic_ns,
    threads::{self, OnPanic},
};

/// Names waiting to be learned. More than this within one round of the
/// publisher are dropped; their next query brings them back.
const LEARN_QUEUE: usize = 4096;

/// How long the thread waits for something to do.
const IDLE: Duration = Duration::from_millis(100);

/// How long it waits while cells are about to become free.
const RECLAIMING: Duration = Duration::from_millis(10);

/// How long it goes on with a pass over the names before it looks whether something more
/// urgent has come, and lets others have the CPU.
const SLICE: Duration = Duration::from_millis(1);

/// How long it learns what is waiting, if nothing more urgent comes.
const LEARNING: Duration = Duration::from_millis(20);

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
    /// The index, for reading when they were last used.
    index: Arc<IndexMemory>,
    /// The entries, for reading when they were last used.
    memory: Arc<EntryMemory>,
    /// Where the program is told how exact last-used times are to be.
    page: Arc<ControlPage>,
}

/// What the publisher is told.
enum Event {
    /// A new snapshot.
    Install(Arc<dyn NameSource>),
    /// Names within these domains mean something else.
    Refresh(Arc<dyn NameSource>, Box<[Name]>),
    /// The health of these instances changed.
    HealthChanged(Box<[IpAddr]>),
    /// These names may not be published any more.
    Withdraw(Box<[Name]>),
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
    pub fn install(&self, answers: Arc<dyn NameSource>) {
        self.send(Event::Install(answers));
    }

    /// Publishes what names within these domains say now; nothing else has changed.
    pub fn refresh(&self, answers: Arc<dyn NameSource>, domains: &[Name]) {
        self.send(Event::Refresh(answers, domains.into()));
    }

    /// Resolves again the names that hold these instances.
    pub fn health_changed(&self, instances: &[IpAddr]) {
        if !instances.is_empty() {
            self.send(Event::HealthChanged(instances.into()));
        }
    }

    /// Hands over a name that was resolved locally in userspace, so that its
    /// next query is answered by the interface. Dropped when the publisher is behind.
    pub fn learn<'n>(&self, name: impl Into<NameRef<'n>>) {
        let Some(handle) = &self.inner else { return };
        let name = name.into();
        let key = hash_name(handle.seed, name.as_wire());
        if handle.filter.note(key) && handle.learn.try_send(name.to_name()).is_err() {
            handle.filter.release(key);
        }
    }

    /// Takes names out that are no longer admitted.
    pub fn withdraw(&self, names: &[Name]) {
        if !names.is_empty() {
            self.send(Event::Withdraw(names.into()));
        }
    }

    /// Whether the interface answers for this name now.
    pub fn is_published(&self, name: &Name) -> bool {
        self.header(name).is_some()
    }

    /// When the program last answered for this name: ns of
    /// `CLOCK_MONOTONIC_COARSE`. `None`: not published, or never used.
    pub fn last_used_ns(&self, name: &Name) -> Option<u64> {
        self.header(name).map(|header| header.last_used_ns).filter(|&last_used| last_used != 0)
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

    /// Whether last-used times are to be exact, for a caller that needs their order within
    /// one tick of the clock. Takes effect at once; costs the program a clock read.
    pub fn keep_exact_last_used(&self, exact: bool) {
        if let Some(handle) = &self.inner {
            handle.page.set_exact_last_used(exact);
        }
    }

    /// For so long no more goes up than `shares` say, by group of clients, of 2^32 - 1 queries;
    /// `None`: all. Takes effect at once.
    pub fn shed(&self, shares: Option<&[u32; CLIENT_BUCKETS]>, time: Duration) {
        let Some(handle) = &self.inner else { return };
        match shares {
            Some(shares) => {
                let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
                handle.page.set_shedding(shares, kernel_monotonic_ns().saturating_add(time));
            }
            None => handle.page.end_shedding(),
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
pub(crate) struct Shared {
    /// Counts, after each event.
    status: Arc<Mutex<TableStatus>>,
    /// How many snapshots have been installed completely.
    installs: watch::Receiver<u64>,
}

impl Shared {
    /// Counts as of the last event.
    pub(crate) fn status(&self) -> TableStatus {
        self.status.lock().clone()
    }

    /// Becomes 1 once the map is filled for the first time, and grows with each snapshot.
    pub(crate) fn installs(&self) -> watch::Receiver<u64> {
        self.installs.clone()
    }
}

/// The thread, to be stopped by its owner.
pub(crate) struct PublisherThread {
    /// Its handle.
    pub(crate) publisher: Publisher,
    /// What it tells.
    pub(crate) shared: Shared,
    /// The thread itself.
    thread: JoinHandle<()>,
}

impl PublisherThread {
    /// Starts the thread. `earlier` are names that a predecessor had learned:
    /// they are learned as soon as there is a snapshot to resolve them by.
    pub(crate) fn start(
        index: Arc<IndexMemory>,
        memory: Arc<EntryMemory>,
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
            flushes: Vec::new(),
            later_flushes: Vec::new(),
            behind_since: None,
            next_behind_since: None,
        };
        let thread = threads::spawn("publisher", OnPanic::EndProcess, move || worker.run())?;
        let handle = Handle { control, learn, filter, seed, index, memory, page };
        Ok(Self {
            publisher: Publisher { inner: Some(Arc::new(handle)) },
            shared: Shared { status, installs },
            thread,
        })
    }

    /// Ends the thread after what was asked of it so far. With `end_lease` the
    /// program answers nothing from then on.
    pub(crate) fn stop(self, end_lease: bool) {
        let Self { publisher, shared: _, thread } = self;
        publisher.send(Event::Stop { end_lease });
        if thread.join().is_err() {
            tracing::error!("the publisher's thread had panicked");
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
    /// Who waits for the pass that is under way.
    flushes: Vec<oneshot::Sender<()>>,
    /// Who waits for the one after it.
    later_flushes: Vec<oneshot::Sender<()>>,
    /// When the first of what the pass under way brings into the map was installed;
    /// `None`: the map says all that was installed.
    behind_since: Option<Instant>,
    /// The same of the pass after it.
    next_behind_since: Option<Instant>,
}

impl Worker {
    /// Works until told to stop, or until all handles are gone.
    fn run(mut self) {
        let interval = self.lease.interval();
        let mut renewed: Option<Instant> = None;
        loop {
            // Before the first snapshot there is nothing to lease.
            if *self.installed.borrow() > 0 && renewed.is_none_or(|at| at.elapsed() >= interval) {
                self.lease.renew(age(self.behind_since));
                renewed = Some(Instant::now());
            }
            self.table.reclaim();
            let wait = match () {
                () if self.table.is_installing() => Duration::ZERO,
                () if self.table.is_reclaiming() => RECLAIMING,
                () => interval.min(IDLE),
            };
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
                default(wait) => {}
            }
            if self.table.is_installing() {
                match self.table.go_on(Instant::now() + SLICE) {
                    true => self.finish_pass(),
                    // A pass takes long: whoever wants this CPU meanwhile, such as who reads
                    // yet newer records, does not wait for the end of our time slice.
                    false => thread::yield_now(),
                }
            }
        }
    }

    /// Carries out one event.
    fn handle(&mut self, event: Event) {
        let begun = Instant::now();
        if let Event::Install(_) = event {
            let waits_for =
                if self.table.is_installing() { &mut self.next_behind_since } else { &mut self.behind_since };
            waits_for.get_or_insert(begun);
        }
        let Self { table, lease, installed, behind_since, .. } = self;
        let filled = *installed.borrow() > 0;
        let behind_since = behind_since.unwrap_or(begun);
        let mut last = begun;
        // Work that makes progress is not a hang: it keeps the lease alive, as long as
        // nothing in the map is older than a lease.
        let mut progress = || {
            if filled && last.elapsed() >= lease.interval() {
                lease.renew(behind_since.elapsed());
                last = Instant::now();
            }
        };
        match event {
            Event::Install(answers) => table.install(answers, &mut progress),
            Event::Refresh(answers, domains) => table.refresh_within(answers, &domains, &mut progress),
            Event::HealthChanged(instances) => table.health_changed(&instances, &mut progress),
            Event::Withdraw(names) => table.withdraw(&names),
            Event::Flush(done) => {
                self.drain_learn();
                let waiting =
                    if self.table.is_outdated() { &mut self.later_flushes } else { &mut self.flushes };
                waiting.push(done);
                if !self.table.is_installing() {
                    self.flush();
                }
            }
            // Handled by the loop, which ends.
            Event::Stop { .. } => {}
        }
    }

    /// What had been installed when the pass began is in the map.
    fn finish_pass(&mut self) {
        let milliseconds = age(self.behind_since).as_millis();
        self.behind_since = self.next_behind_since.take();
        for name in std::mem::take(&mut self.earlier) {
            self.table.learn(&name);
        }
        let status = self.table.status();
        tracing::info!(
            published = status.published,
            learned = status.learned,
            unfitting = status.unfitting.total(),
            milliseconds,
            "the fast path answers from the new records"
        );
        if status.unfitting.total() > 0 {
            tracing::warn!(unfitting = ?status.unfitting, "some names do not fit into the maps: queries for them are answered from userspace");
        }
        self.lease.renew(age(self.behind_since));
        self.installed.send_modify(|count| *count += 1);
        self.flush();
        self.flushes = std::mem::take(&mut self.later_flushes);
        give_memory_back();
    }

    /// Tells those who wait that all they asked for before is in the map.
    fn flush(&mut self) {
        self.publish_status();
        for done in self.flushes.drain(..) {
            // Who asked may have gone.
            let _ = done.send(());
        }
    }

    /// Learns what is waiting, until something more urgent comes.
    fn drain_learn(&mut self) {
        let until = Instant::now() + LEARNING;
        while self.control.is_empty() && Instant::now() < until {
            match self.learn.try_recv() {
                Ok(name) => self.table.learn(&name),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
            }
        }
    }

    /// Lets others read the counts.
    fn publish_status(&self) {
        *self.status.lock() = self.table.status();
    }
}

/// Has the allocator give back to the system what it holds free: the parts that making and
/// installing a snapshot used for a moment, 10 to 20 MB at 10,000 instances. Takes 0.5 ms.
fn give_memory_back() {
    // SAFETY: takes a plain number, and may be called at any time by any thread.
    unsafe { libc::malloc_trim(0) };
}

/// How long ago it was; zero: never.
fn age(since: Option<Instant>) -> Duration {
    since.map_or(Duration::ZERO, |since| since.elapsed())
}
