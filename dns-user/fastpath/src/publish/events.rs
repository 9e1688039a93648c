//! The events that wait for the publisher. None may be lost, and a publisher that hangs must not hold memory without
//! bound, although records, health and evictions go on: when there is no more room, the waiting events are folded
//! into one that publishes everything again.

use std::{collections::VecDeque, net::IpAddr, sync::Arc};

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::{replies::HeldReply, source::NameSource};
use crate::map::answer::AnswerQuestion;
use dns_core::{config::OnStop, name::Name};
use dns_kit::logs::LineLimit;

/// Maximum weight of the waiting events, of which each instance, name and answer has one.
pub(super) const MAX_WEIGHT: usize = 16 << 10;

/// Maximum number of waiting events with a source of names: a snapshot of a large fleet takes megabytes.
pub(super) const MAX_SOURCES: usize = 32;

/// Requests to the publisher's thread.
pub(super) enum Event {
    Install(Arc<dyn NameSource>),
    /// Names within these domains have new answers.
    Refresh(Arc<dyn NameSource>, Box<[Name]>),
    /// The health of these instances changed.
    HealthChanged(Box<[IpAddr]>),
    Withdraw(Box<[Name]>),
    /// Any name may have a new answer, or none any more: in this source, or in the current one.
    RenewNames(Option<Arc<dyn NameSource>>),
    /// The forwarded answer with this key was evicted from the cache in userspace.
    RemoveAnswer(u64),
    /// Any forwarded answer may have been evicted.
    RemoveAnswers,
    /// All forwarded answers of earlier generations are void; renewals are requested through the sender.
    BeginAnswers(u64, mpsc::Sender<AnswerQuestion>),
    ListReplies(oneshot::Sender<Vec<HeldReply>>),
    /// Note this number when all earlier events have taken effect.
    Flush(u64),
    /// Stop; with `Detach` the programs stop answering.
    Stop(OnStop),
}

impl Event {
    fn weight(&self) -> usize {
        const SOURCE: usize = MAX_WEIGHT / MAX_SOURCES;
        match self {
            Self::Install(_) | Self::RenewNames(_) => SOURCE,
            Self::Refresh(_, domains) => SOURCE + domains.len(),
            Self::HealthChanged(instances) => 1 + instances.len(),
            Self::Withdraw(names) => 1 + names.len(),
            Self::RemoveAnswer(_)
            | Self::RemoveAnswers
            | Self::BeginAnswers(..)
            | Self::ListReplies(_)
            | Self::Flush(_)
            | Self::Stop(_) => 1,
        }
    }
}

/// Creates the two ends of the queue.
pub(super) fn channel() -> (EventSender, EventReceiver) {
    let waiting = Arc::<Mutex<Waiting>>::default();
    // One signal suffices: the receiver takes events until none is left.
    let (wake, woken) = bounded(1);
    let sender = EventSender {
        waiting: Arc::clone(&waiting),
        wake,
    };
    (sender, EventReceiver { waiting, woken })
}

pub(super) struct EventSender {
    waiting: Arc<Mutex<Waiting>>,
    wake: Sender<()>,
}

impl EventSender {
    /// Adds an event, which is dropped if the publisher has ended.
    pub(super) fn send(&self, event: Event) {
        // The lock is released before the thread is woken, which needs it at once.
        let is_folded = self.waiting.lock().push(event);
        self.wake();
        static LIMIT: LineLimit = LineLimit::new();
        if is_folded && let Some(suppressed) = LIMIT.admit_any() {
            tracing::warn!(
                suppressed,
                "the publisher is behind: it publishes all names again instead of {MAX_WEIGHT} changes one by one"
            );
        }
    }

    /// Adds a flush; returns its number, which is larger than those before.
    pub(super) fn flush(&self) -> u64 {
        let mut waiting = self.waiting.lock();
        waiting.flushes += 1;
        let number = waiting.flushes;
        waiting.push(Event::Flush(number));
        drop(waiting);
        self.wake();
        number
    }

    fn wake(&self) {
        // An error means that a signal waits already, or that the publisher has ended.
        let _ = self.wake.try_send(());
    }
}

pub(super) struct EventReceiver {
    waiting: Arc<Mutex<Waiting>>,
    woken: Receiver<()>,
}

impl EventReceiver {
    /// Takes the oldest event.
    pub(super) fn next(&self) -> Option<Event> {
        self.waiting.lock().pop()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.lock().queue.is_empty()
    }

    /// Returns the signals that events have arrived; disconnected once all senders are gone.
    pub(super) fn woken(&self) -> &Receiver<()> {
        &self.woken
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        let mut waiting = self.waiting.lock();
        waiting.has_ended = true;
        // Callers that wait for a reply learn that none will come.
        waiting.queue.clear();
    }
}

#[derive(Default)]
struct Waiting {
    queue: VecDeque<Event>,
    /// Sum of the weights, at most [`MAX_WEIGHT`].
    weight: usize,
    /// Number of the latest flush.
    flushes: u64,
    has_ended: bool,
}

impl Waiting {
    /// Adds an event; returns whether the waiting ones had to be folded.
    fn push(&mut self, event: Event) -> bool {
        // It would never be taken.
        if self.has_ended {
            return false;
        }
        self.weight += event.weight();
        self.queue.push_back(event);
        let is_full = self.weight > MAX_WEIGHT;
        // Folding loses no change: it replaces what changed by the statement that anything may
        // have.
        if is_full {
            let mut folded = Folded::default();
            for event in self.queue.drain(..) {
                folded.add(event);
            }
            self.queue.extend(folded.into_events());
            self.weight = self.queue.iter().map(Event::weight).sum();
        }
        is_full
    }

    fn pop(&mut self) -> Option<Event> {
        let event = self.queue.pop_front()?;
        self.weight -= event.weight();
        Some(event)
    }
}

/// Work that remains after a series of events.
#[derive(Default)]
struct Folded {
    /// Whether any name may have a new answer.
    are_names_new: bool,
    /// The newest source.
    source: Option<Arc<dyn NameSource>>,
    /// Whether answers were removed.
    is_removed: bool,
    /// The newest generation of answers.
    begun: Option<Event>,
    flush: Option<Event>,
    stop: Option<Event>,
}

impl Folded {
    fn add(&mut self, event: Event) {
        match event {
            Event::Install(source) | Event::Refresh(source, _) => {
                self.source = Some(source);
                self.are_names_new = true;
            }
            Event::RenewNames(source) => {
                self.source = source.or(self.source.take());
                self.are_names_new = true;
            }
            Event::HealthChanged(_) | Event::Withdraw(_) => self.are_names_new = true,
            Event::RemoveAnswer(_) | Event::RemoveAnswers => self.is_removed = true,
            // It removes every answer.
            Event::BeginAnswers(..) => self.begun = Some(event),
            // The list of a publisher that is this far behind would be of no use.
            Event::ListReplies(_) => {}
            // The latest one includes all before.
            Event::Flush(_) => self.flush = Some(event),
            Event::Stop(_) => self.stop = Some(event),
        }
    }

    fn into_events(self) -> impl Iterator<Item = Event> {
        let names = if self.are_names_new {
            Some(Event::RenewNames(self.source))
        } else {
            None
        };
        let answers = match self.begun {
            None if self.is_removed => Some(Event::RemoveAnswers),
            begun => begun,
        };
        // In this order: a flush follows everything before it, and nothing follows a stop.
        [names, answers, self.flush, self.stop]
            .into_iter()
            .flatten()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use dns_core::{
        name::Name,
        resolve::{Health, Resolution},
    };

    use super::*;

    struct Numbered(usize);

    impl NameSource for Numbered {
        fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
            Box::new(std::iter::empty())
        }

        fn resolve(&self, _: &dyn Health, _: &Name) -> Option<Resolution> {
            None
        }
    }

    fn number_of(source: &Arc<dyn NameSource>) -> usize {
        let source: &dyn std::any::Any = &**source;
        source.downcast_ref::<Numbered>().unwrap().0
    }

    #[test]
    fn waiting_events_have_a_bound() {
        const EVENTS: usize = 100_000;
        let (sender, receiver) = channel();
        let (renewals, _requested) = mpsc::channel(1);
        let instance = IpAddr::from([10, 0, 0, 1]);
        let (reply, mut list) = oneshot::channel();
        sender.send(Event::ListReplies(reply));
        let mut sources: Vec<Weak<dyn NameSource>> = Vec::new();
        let mut flush = 0;
        for number in 0..EVENTS {
            let source: Arc<dyn NameSource> = Arc::new(Numbered(number));
            sources.push(Arc::downgrade(&source));
            sender.send(match number % 7 {
                0 => Event::Install(source),
                1 => Event::Refresh(source, [Name::root()].into()),
                2 => Event::HealthChanged([instance; 40].into()),
                3 => Event::Withdraw([Name::root()].into()),
                4 => Event::RemoveAnswer(7),
                5 => Event::BeginAnswers(number as u64, renewals.clone()),
                _ => {
                    flush = sender.flush();
                    continue;
                }
            });
            let waiting = receiver.waiting.lock();
            assert!(waiting.weight <= MAX_WEIGHT, "{number}");
            assert!(waiting.queue.len() <= MAX_WEIGHT, "{number}");
        }
        sender.send(Event::Stop(OnStop::Detach));
        let living = sources.iter().filter(|source| source.strong_count() > 0);
        assert!(living.count() <= MAX_SOURCES);
        assert!(list.try_recv().is_err(), "it was dropped");

        let mut newest = None;
        let mut generation = 0;
        let mut flushed = 0;
        let mut stopped = false;
        let mut is_renewed = false;
        while let Some(event) = receiver.next() {
            match event {
                Event::Install(source) | Event::Refresh(source, _) => {
                    newest = Some(number_of(&source));
                }
                Event::RenewNames(source) => {
                    newest = source.as_ref().map(number_of);
                    is_renewed = true;
                }
                Event::BeginAnswers(number, _) => generation = number,
                Event::Flush(number) => flushed = number,
                Event::Stop(_) => stopped = true,
                _ => {}
            }
        }
        // The last of each kind.
        let last = |kind| (EVENTS - 7..EVENTS).find(|number| number % 7 == kind);
        assert_eq!(newest, last(0).max(last(1)));
        assert_eq!(Some(generation as usize), last(5));
        assert_eq!(flushed, flush);
        assert!(is_renewed && stopped);
        assert_eq!(receiver.waiting.lock().weight, 0);
    }

    #[test]
    fn evictions_leave_names_alone() {
        let (sender, receiver) = channel();
        for key in 0..=MAX_WEIGHT {
            sender.send(Event::RemoveAnswer(key as u64));
        }
        assert!(matches!(receiver.next(), Some(Event::RemoveAnswers)));
        assert!(receiver.next().is_none());
    }

    #[test]
    fn ended_publisher_holds_nothing() {
        let (sender, receiver) = channel();
        let (reply, mut before) = oneshot::channel();
        sender.send(Event::ListReplies(reply));
        drop(receiver);
        let (reply, mut after) = oneshot::channel();
        sender.send(Event::ListReplies(reply));
        for list in [&mut before, &mut after] {
            assert!(matches!(
                list.try_recv(),
                Err(oneshot::error::TryRecvError::Closed)
            ));
        }
        assert!(sender.waiting.lock().queue.is_empty());
    }
}
