//! The publisher's thread, the only one that changes the programs' answers.

use std::{
    io,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, bounded, select_biased};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use super::{
    answers::{AnswerTable, AnswersStatus},
    events::{self, Event, EventReceiver},
    lease::{GracePeriods, Lease},
    publisher::{AnswersHandle, FrequentQuestion, LearnFilter, Offer, Publisher, QuestionFilter},
    source::NameSource,
    table::{EntryStore, Limits, Table, TableStatus, UnfittingStatus},
};
use crate::{
    Admission,
    map::{answer::AnswerQuestion, index::IndexMemory},
};
use dns_core::{config::OnStop, name::Name, resolve::Health};
use dns_kit::{
    clock::BootInstant,
    threads::{self, OnPanic},
};

/// Maximum number of names waiting to be learned. Further names within one round of the publisher
/// are dropped; their next query hands them over again.
const LEARN_QUEUE: usize = 4096;

/// Maximum number of forwarded answers waiting to be published. Further ones are dropped; their
/// next use hands them over again.
const OFFER_QUEUE: usize = 1024;

/// Longest wait for an event.
const IDLE: Duration = Duration::from_millis(100);

/// Longest wait while a grace period is running.
const RECLAIMING: Duration = Duration::from_millis(10);

/// Longest time for which the rest of the first pass waits for the programs, whose verification needs the CPU more:
/// userspace answers meanwhile, and names are learned as they are queried.
const ATTACHING: Duration = Duration::from_millis(500);

/// Length of one slice of a pass over the names, after which the publisher checks for more urgent
/// events and yields the CPU.
const SLICE: Duration = Duration::from_millis(1);

/// Longest time spent on what waits in one queue, unless something more urgent arrives first.
const LEARNING: Duration = Duration::from_millis(20);

pub(crate) struct ThreadSetting {
    pub(crate) names: Arc<IndexMemory>,
    pub(crate) answers: Arc<IndexMemory>,
    pub(crate) limits: Limits,
    pub(crate) health: Arc<dyn Health + Send + Sync>,
    pub(crate) admission: Arc<dyn Admission>,
    /// Seed of the hash from which keys are computed.
    pub(crate) seed: u64,
    pub(crate) lease: Lease,
    /// Names learned by a predecessor, whose programs answer until the map is complete. Without one (`None`) the
    /// first slice suffices, because userspace answers all other names.
    pub(crate) earlier: Option<Vec<Name>>,
    /// Called when programs may answer from the map.
    pub(crate) request_attach: Box<dyn FnOnce() + Send>,
    /// Becomes true when the interfaces present at the start have their programs.
    pub(crate) attached: watch::Receiver<bool>,
}

/// The running thread, stopped by its owner.
pub(crate) struct PublisherThread {
    pub(crate) publisher: Arc<Publisher>,
    pub(crate) status: Arc<Mutex<TableStatus>>,
    /// The status of the forwarded answers after the latest event.
    pub(crate) answers_status: Arc<Mutex<AnswersStatus>>,
    /// Becomes 1 when the map is filled for the first time, and grows with each snapshot.
    pub(crate) installs: watch::Receiver<u64>,
    thread: JoinHandle<()>,
}

impl PublisherThread {
    /// Starts the thread, with grace periods for the cells of names and of answers. Names learned by a predecessor are
    /// learned as soon as a snapshot can resolve them.
    pub(crate) fn start(setting: ThreadSetting, grace: [GracePeriods; 2]) -> io::Result<Self> {
        let (worker, publisher, installs) = Worker::new(setting, grace);
        let status = worker.status.clone();
        let answers_status = worker.answers_status.clone();
        let thread = threads::spawn("publisher", OnPanic::EndProcess, move || worker.run())?;
        Ok(Self {
            publisher: Arc::new(publisher),
            status,
            answers_status,
            installs,
            thread,
        })
    }

    /// Ends the thread after the requests so far. With `Detach` the programs answer nothing afterwards.
    pub(crate) fn stop(self, on_stop: OnStop) {
        self.publisher.send(Event::Stop(on_stop));
        if self.thread.join().is_err() {
            tracing::error!("the publisher thread panicked");
        }
    }
}

struct Worker {
    table: Table,
    answers: AnswerTable,
    /// Renewed while the map is up to date; the programs stop answering when it expires.
    lease: Lease,
    events: EventReceiver,
    learn: Receiver<Name>,
    offers: Receiver<Offer>,
    questions: Receiver<FrequentQuestion>,
    /// Receives requests to renew answers; `None` before the first generation of answers.
    renewals: Option<mpsc::Sender<AnswerQuestion>>,
    status: Arc<Mutex<TableStatus>>,
    answers_status: Arc<Mutex<AnswersStatus>>,
    /// Number of snapshots installed.
    installed: watch::Sender<u64>,
    /// Called when programs may answer from the map; the lease begins then, and it is `None` afterwards.
    request_attach: Option<Box<dyn FnOnce() + Send>>,
    attached: watch::Receiver<bool>,
    /// Until when the rest of the first pass waits for the programs; `None`: it does not.
    held_until: Option<Instant>,
    /// Names learned by a predecessor, whose programs may answer until the map is complete; `None` without one.
    earlier: Option<Vec<Name>>,
    /// Number of the latest flush that has taken effect.
    flushed: watch::Sender<u64>,
    /// Number of the latest flush that waits for the current pass.
    flush: u64,
    /// Number of the latest flush that waits for the following pass.
    later_flush: u64,
    unfitting_log: UnfittingLog,
    /// Time at which the first change of the current pass was handed over; `None` if the map is up to date.
    behind_since: Option<Instant>,
    /// The same for the following pass.
    next_behind_since: Option<Instant>,
}

/// The tables of names and of answers, and what their handles know of them.
struct Tables {
    names: Table,
    answers: AnswerTable,
    filter: Arc<LearnFilter>,
    answer_filter: Arc<LearnFilter>,
    question_filter: Arc<QuestionFilter>,
}

impl Tables {
    fn new(setting: &ThreadSetting, [grace, answer_grace]: [GracePeriods; 2]) -> Self {
        let filter = Arc::new(LearnFilter::new());
        let names = Table::new(
            (EntryStore::of(setting.names.clone()), grace),
            setting.seed,
            setting.limits,
            setting.health.clone(),
            setting.admission.clone(),
            filter.clone(),
        );
        let answer_filter = Arc::new(LearnFilter::new());
        let question_filter = Arc::new(QuestionFilter::default());
        let answers = AnswerTable::new(
            (EntryStore::of(setting.answers.clone()), answer_grace),
            setting.seed,
            (setting.limits.answers, setting.limits.replies),
            answer_filter.clone(),
            question_filter.clone(),
        );
        Self {
            names,
            answers,
            filter,
            answer_filter,
            question_filter,
        }
    }
}

impl Worker {
    /// Creates the worker with the handle that gives it work, and the number of snapshots that it has installed.
    fn new(
        setting: ThreadSetting,
        grace: [GracePeriods; 2],
    ) -> (Self, Publisher, watch::Receiver<u64>) {
        let tables = Tables::new(&setting, grace);
        let (offers, offer_events) = bounded(OFFER_QUEUE);
        let (questions, question_events) = bounded(OFFER_QUEUE);
        let (events, waiting_events) = events::channel();
        let (flushed, last_flushed) = watch::channel(0);
        let (learn, learn_events) = bounded(LEARN_QUEUE);
        let (installed, installs) = watch::channel(0);
        let publisher = Publisher {
            events,
            flushed: last_flushed,
            learn,
            filter: tables.filter,
            allowance: Default::default(),
            seed: setting.seed,
            names: setting.names,
            page: setting.lease.control.clone(),
            answers: AnswersHandle {
                offers,
                filter: tables.answer_filter,
                index: setting.answers,
                kept: tables.answers.keeps_forwarded(),
                // Also if it is not used: a closed queue would end each of the worker's waits at once.
                questions,
                keeps_replies: tables.answers.keeps_replies(),
                question_filter: tables.question_filter,
            },
        };
        let worker = Self {
            status: Arc::new(Mutex::new(tables.names.status())),
            answers_status: Arc::new(Mutex::new(tables.answers.status())),
            table: tables.names,
            answers: tables.answers,
            lease: setting.lease,
            events: waiting_events,
            learn: learn_events,
            offers: offer_events,
            questions: question_events,
            renewals: None,
            installed,
            request_attach: Some(setting.request_attach),
            attached: setting.attached,
            held_until: None,
            earlier: setting.earlier,
            flushed,
            flush: 0,
            later_flush: 0,
            unfitting_log: UnfittingLog::default(),
            behind_since: None,
            next_behind_since: None,
        };
        (worker, publisher, installs)
    }

    /// Works until a stop event, or until all handles are gone.
    fn run(mut self) {
        let interval = self.lease.interval();
        let mut renewed: Option<Instant> = None;
        loop {
            // Before the first names are in the map there is no lease to renew.
            if self.request_attach.is_none() && renewed.is_none_or(|at| at.elapsed() >= interval) {
                self.lease.renew(age(self.behind_since));
                renewed = Some(Instant::now());
            }
            // In each round: cells stay in quarantine until the next look.
            self.table.reclaim();
            self.tend_answers();
            let is_held = self.is_held();
            let wait = match () {
                () if self.table.is_installing() && !is_held || self.answers.is_behind() => {
                    Duration::ZERO
                }
                () if self.table.is_reclaiming() || is_held => RECLAIMING,
                () => interval.min(IDLE),
            };
            match self.events.next() {
                Some(Event::Stop(on_stop)) => {
                    // The attacher may be gone, and programs that stay attached must not answer for
                    // a server that has left.
                    if on_stop == OnStop::Detach {
                        self.lease.end();
                    } else if self.request_attach.is_none() {
                        // All of the time is left for the next server's start.
                        self.lease.renew(age(self.behind_since));
                    }
                    return;
                }
                Some(event) => {
                    self.handle(event);
                    self.publish_status();
                }
                None if self.wait(wait) => {}
                None => return,
            }
            if self.table.is_installing() && !self.is_held() {
                self.go_on();
            }
        }
    }

    /// Waits for an event or for other work, which is done; `false` once all handles are gone.
    fn wait(&mut self, limit: Duration) -> bool {
        // Events first: what clients hand over may wait, or be lost.
        select_biased! {
            recv(self.events.woken()) -> woken => return woken.is_ok(),
            recv(self.learn) -> name => if let Ok(name) = name {
                self.table.learn(&name);
                self.learn_waiting();
                self.publish_status();
            },
            recv(self.offers) -> offer => if let Ok(offer) = offer {
                self.publish_answers(offer);
            },
            recv(self.questions) -> question => if let Ok(question) = question {
                self.publish_replies(question);
            },
            default(limit) => {}
        }
        true
    }

    /// Works on the pass for a slice of time.
    fn go_on(&mut self) {
        if self.table.go_on(Instant::now() + SLICE) {
            return self.finish_pass();
        }
        // A predecessor's programs answer all names, so they must not be replaced by programs with
        // a part of them.
        if self.earlier.is_none()
            && let Some(request_attach) = self.request_attach.take()
        {
            self.lease.renew(age(self.behind_since));
            // After the lease, or the programs would pass every query at first.
            request_attach();
            self.held_until = Some(Instant::now() + ATTACHING);
        }
        // A pass takes long; let threads that wait for this CPU, such as the reader of even newer records, run
        // before the end of our time slice.
        thread::yield_now();
    }

    /// Returns whether the rest of the first pass waits. Newer records end that, because programs may be attached to
    /// some interfaces.
    fn is_held(&mut self) -> bool {
        let Self {
            table,
            attached,
            held_until,
            ..
        } = self;
        held_until
            .take_if(|until| *attached.borrow() || table.is_outdated || *until <= Instant::now());
        held_until.is_some()
    }

    fn publish_answers(&mut self, first: Offer) {
        let now_ns = BootInstant::now().kernel_ns();
        let Self {
            answers,
            events,
            offers,
            ..
        } = self;
        answers.publish(&first.answer, first.generation, now_ns);
        take_waiting(offers, events, |offer| {
            answers.publish(&offer.answer, offer.generation, now_ns);
        });
        *self.answers_status.lock() = self.answers.status();
    }

    fn publish_replies(&mut self, first: FrequentQuestion) {
        let now_ns = BootInstant::now().kernel_ns();
        // One source for all of them: it is replaced by events only, which this thread takes later.
        let source = self.table.answers();
        // The programs look for local replies only while they look for whole answers at all.
        if !self.answers.keeps_forwarded() {
            self.lease.control.begin_answers();
        }
        let Self {
            answers,
            events,
            questions,
            ..
        } = self;
        let mut learn =
            |FrequentQuestion { question, size }| answers.learn(&*source, question, size, now_ns);
        learn(first);
        take_waiting(questions, events, learn);
        *self.answers_status.lock() = self.answers.status();
    }

    /// Removes expired answers, requests renewals, and continues work on local replies.
    fn tend_answers(&mut self) {
        self.answers.reclaim();
        if self.answers.is_empty() && !self.answers.is_behind() {
            return;
        }
        let now_ns = BootInstant::now().kernel_ns();
        let source = self.table.answers();
        self.answers.catch_up(&*source, now_ns);
        let renewals = self.answers.expire(&*source, now_ns);
        if let Some(sender) = &self.renewals {
            for renewal in renewals {
                // Fails if there are too many at a time: the answer then expires, and the next query
                // fetches it.
                let _ = sender.try_send(renewal);
            }
        }
        *self.answers_status.lock() = self.answers.status();
    }

    fn handle(&mut self, event: Event) {
        let begun = Instant::now();
        match event {
            Event::Install(source) => {
                self.keep_lease_during(begun, |table, answers, progress| {
                    let older = table.answers();
                    table.install(source.clone(), progress);
                    refresh_answers(answers, &*older, &*source, progress);
                });
                self.note_installed(begun);
            }
            Event::Refresh(source, domains) => {
                let had_work = (self.table.is_installing(), self.table.is_outdated);
                self.keep_lease_during(begun, |table, answers, progress| {
                    let older = table.answers();
                    table.refresh_within(source.clone(), &domains, progress);
                    refresh_answers(answers, &*older, &*source, progress);
                });
                // Otherwise everything is in the map already, and no caller waits for a pass.
                if (self.table.is_installing(), self.table.is_outdated) != had_work {
                    self.note_installed(begun);
                }
            }
            Event::HealthChanged(instances) => {
                self.keep_lease_during(begun, |table, _, progress| {
                    table.health_changed(&instances, progress);
                });
            }
            Event::Withdraw(names) => self.table.withdraw(&names),
            Event::RenewNames(source) => {
                self.keep_lease_during(begun, |table, answers, progress| {
                    let older = table.answers();
                    let source = source.unwrap_or_else(|| older.clone());
                    table.renew(source.clone(), progress);
                    refresh_answers(answers, &*older, &*source, progress);
                });
                self.note_installed(begun);
            }
            Event::RemoveAnswer(key) => self.answers.withdraw(key),
            Event::RemoveAnswers => self.answers.withdraw_all(),
            Event::BeginAnswers(generation, renewals) => {
                self.answers.begin(generation);
                self.renewals = Some(renewals);
            }
            Event::ListReplies(done) => {
                // The caller may have stopped waiting.
                let _ = done.send(self.answers.replies());
            }
            Event::Flush(number) => self.flush_later(number),
            // Ends the loop, which handles it.
            Event::Stop { .. } => {}
        }
    }

    /// Changes the tables, which may take longer than a lease.
    fn keep_lease_during(
        &mut self,
        begun: Instant,
        work: impl FnOnce(&mut Table, &mut AnswerTable, &mut dyn FnMut()),
    ) {
        let lease = &self.lease;
        let is_answering = self.request_attach.is_none();
        // The time of the first change counts, if several are on their way to the map.
        let behind_since = self.behind_since.unwrap_or(begun);
        let mut last = begun;
        // Work that makes progress renews the lease, as long as nothing in the map is older than a lease.
        work(&mut self.table, &mut self.answers, &mut || {
            if is_answering && last.elapsed() >= lease.interval() {
                lease.renew(behind_since.elapsed());
                last = Instant::now();
            }
        });
    }

    /// Notes a request to tell when everything before it is in the map.
    fn flush_later(&mut self, number: u64) {
        // Names handed over before the flush are among what its caller waits for.
        self.learn_waiting();
        // Newer records wait for the next pass, and the caller may have installed them.
        if self.table.is_outdated {
            self.later_flush = number;
        } else {
            self.flush = number;
        }
        if !self.table.is_installing() {
            self.flush();
        }
    }

    /// Records that new records were installed, which the table may still have to finish.
    fn note_installed(&mut self, begun: Instant) {
        let since = if self.table.is_outdated {
            &mut self.next_behind_since
        } else {
            &mut self.behind_since
        };
        since.get_or_insert(begun);
        if !self.table.is_installing() {
            self.finish_pass();
        }
    }

    /// Ends a pass: the records installed before it began are now in the map.
    fn finish_pass(&mut self) {
        let milliseconds = age(self.behind_since).as_millis();
        self.behind_since = self.next_behind_since.take();
        for name in self.earlier.take().into_iter().flatten() {
            self.table.learn(&name);
        }
        let status = self.table.status();
        tracing::info!(
            published = status.published,
            learned = status.learned,
            unfitting = status.unfitting.total(),
            milliseconds,
            "published the new records to the fast path"
        );
        if self.unfitting_log.is_due(status.unfitting, Instant::now()) {
            tracing::warn!(
                names = status.unfitting.total(),
                why = status.unfitting.in_words(),
                "names are not at the interfaces: userspace answers them"
            );
        }
        // Counted from the next change that waits, because everything before it is in the map.
        self.lease.renew(age(self.behind_since));
        if let Some(request_attach) = self.request_attach.take() {
            request_attach();
        }
        self.installed.send_modify(|count| *count += 1);
        self.flush();
        // Events that waited for the following pass wait for the current one from now on.
        self.flush = self.flush.max(self.later_flush);
        // Building and installing a snapshot briefly takes 10 to 20 MB at 10,000 instances.
        dns_kit::memory::give_back();
        if *self.installed.borrow() == 1 {
            dns_kit::memory::forget_start();
        }
    }

    /// Notifies the waiting callers that all their earlier requests are in the map.
    fn flush(&mut self) {
        self.publish_status();
        self.flushed.send_replace(self.flush);
    }

    fn learn_waiting(&mut self) {
        let Self {
            table,
            events,
            learn,
            ..
        } = self;
        take_waiting(learn, events, |name| table.learn(&name));
    }

    fn publish_status(&self) {
        *self.status.lock() = self.table.status();
        *self.answers_status.lock() = self.answers.status();
    }
}

/// Minimum time between two log lines about names that are not at the interfaces: with a full map every change of
/// records or health would write one.
const UNFITTING_PAUSE: Duration = Duration::from_secs(60);

/// The last log line about names that are not at the interfaces.
#[derive(Debug, Default)]
struct UnfittingLog(Option<(UnfittingStatus, Instant)>);

impl UnfittingLog {
    /// Returns whether to write a line about other numbers than before.
    fn is_due(&mut self, status: UnfittingStatus, now: Instant) -> bool {
        let is_told = self.0.is_some_and(|(told, at)| {
            told == status || now.saturating_duration_since(at) < UNFITTING_PAUSE
        });
        if status.total() == 0 || is_told {
            return false;
        }
        self.0 = Some((status, now));
        true
    }
}

/// Resolves the local replies again, whose names the newer source may answer in another way.
fn refresh_answers(
    answers: &mut AnswerTable,
    older: &dyn NameSource,
    newer: &dyn NameSource,
    progress: &mut dyn FnMut(),
) {
    answers.refresh(older, newer, BootInstant::now().kernel_ns(), progress);
}

/// Processes what waits in a queue, until something more urgent arrives.
fn take_waiting<T>(queue: &Receiver<T>, urgent: &EventReceiver, mut process: impl FnMut(T)) {
    let until = Instant::now() + LEARNING;
    while urgent.is_empty()
        && Instant::now() < until
        && let Ok(next) = queue.try_recv()
    {
        process(next);
    }
}

/// Returns the time elapsed since `since`; zero for `None`.
fn age(since: Option<Instant>) -> Duration {
    since.map_or(Duration::ZERO, |since| since.elapsed())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use dns_common::{entry::CHUNK_SIZE, index::Pair};
    use dns_core::resolve::AllRunning;
    use memmap2::{MmapMut, MmapRaw};

    use super::*;
    use crate::{
        AdmitAll,
        map::{ControlPage, index::elements, store::EntryMemory},
    };

    fn index() -> Arc<IndexMemory> {
        let anonymous = |length| MmapRaw::from(MmapMut::map_anon(length).unwrap());
        let entries = Arc::new(EntryMemory::new(anonymous(CHUNK_SIZE)));
        let names = anonymous(elements(16) as usize * size_of::<Pair>());
        Arc::new(IndexMemory::new(names, entries))
    }

    #[test]
    fn idle_publisher_waits() {
        const LIMIT: Duration = Duration::from_millis(20);
        for (answers, replies) in [(0, 0), (16, 0), (0, 16)] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(4096).unwrap();
            let control = Arc::new(ControlPage::map(file.as_fd()).unwrap());
            let setting = ThreadSetting {
                names: index(),
                answers: index(),
                limits: Limits {
                    max_names: 16,
                    answers,
                    replies,
                    max_precomputed: 12,
                    negative: 4,
                },
                health: Arc::new(AllRunning),
                admission: Arc::new(AdmitAll),
                seed: 7,
                lease: Lease::new(control, LIMIT),
                earlier: None,
                request_attach: Box::new(|| ()),
                attached: watch::channel(false).1,
            };
            let grace = [(); 2].map(|()| GracePeriods::start(|| true).unwrap());
            let (mut worker, _publisher, _installs) = Worker::new(setting, grace);
            let begun = Instant::now();
            assert!(worker.wait(LIMIT));
            assert!(
                begun.elapsed() >= LIMIT,
                "{answers} answers, {replies} replies"
            );
        }
    }

    #[test]
    fn full_map_is_told_once_a_minute() {
        let mut log = UnfittingLog::default();
        let begun = Instant::now();
        let status = |no_room| UnfittingStatus {
            no_room,
            ..UnfittingStatus::default()
        };
        assert!(!log.is_due(status(0), begun));
        // Five changes a second for ten minutes.
        let changes = (0..3000).map(|number| {
            let now = begun + Duration::from_millis(200) * number;
            log.is_due(status(1 + number as usize % 7), now)
        });
        assert_eq!(changes.filter(|is_due| *is_due).count(), 10);
        let later = begun + Duration::from_secs(7200);
        assert!(log.is_due(status(9), later));
        assert!(!log.is_due(status(9), later + UNFITTING_PAUSE * 2), "told");
        let both = UnfittingStatus {
            too_many_addresses: 1,
            ..status(12)
        };
        assert_eq!(
            both.in_words(),
            "1 with more addresses than an entry holds, 12 without room (raise xdp.max_names)"
        );
    }
}
