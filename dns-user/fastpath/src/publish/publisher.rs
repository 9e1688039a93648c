//! The handle of the publisher's thread, and filters of what queries hand over.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crossbeam_channel::Sender;
use dns_common::{
    control::CLIENT_BUCKETS,
    entry::EntryHeader,
    forwarded::{QueryKey, is_answered, is_left_to_userspace},
    name::hash_name,
};
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    events::{Event, EventSender},
    replies::HeldReply,
    source::NameSource,
};
use crate::map::{
    answer::{AnswerKey, AnswerQuestion},
    control::ControlPage,
    index::IndexMemory,
    layout::{read_header, read_name},
};
use dns_core::{
    name::{Name, NameRef},
    wire::ForwardedAnswer,
};
use dns_kit::{clock::kernel_monotonic_ns, rate::EachSecond};

//----------- Publisher ------------------------------------------------------

/// Handle of the publisher; calls never block. [`FastPathHandle`](crate::FastPathHandle) passes its calls on.
pub(crate) struct Publisher {
    pub(super) events: EventSender,
    /// Number of the latest flush that has taken effect.
    pub(super) flushed: watch::Receiver<u64>,
    pub(super) learn: Sender<Name>,
    pub(super) filter: Arc<LearnFilter>,
    /// Limits denials and questions by client.
    pub(super) allowance: ClientAllowance,
    /// Seed of the hash from which keys are computed.
    pub(super) seed: u64,
    pub(super) names: Arc<IndexMemory>,
    /// The page with the programs' settings.
    pub(super) page: Arc<ControlPage>,
    pub(super) answers: AnswersHandle,
}

/// The part of [`Publisher`] for forwarded answers and local replies.
pub(super) struct AnswersHandle {
    pub(super) offers: Sender<Offer>,
    pub(super) filter: Arc<LearnFilter>,
    pub(super) index: Arc<IndexMemory>,
    pub(super) kept: bool,
    /// Questions for local replies to publish.
    pub(super) questions: Sender<FrequentQuestion>,
    pub(super) keeps_replies: bool,
    pub(super) question_filter: Arc<QuestionFilter>,
}

/// A question that userspace answered by a local reply, twice within a short time.
pub(super) struct FrequentQuestion {
    pub(super) question: AnswerQuestion,
    /// EDNS size of the client; `None` without EDNS.
    pub(super) size: Option<u16>,
}

/// A forwarded answer that was used in userspace.
pub(super) struct Offer {
    pub(super) answer: ForwardedAnswer,
    /// The generation in which it was looked up.
    pub(super) generation: u64,
}

impl Publisher {
    fn may_hand_over(&self, client: Option<IpAddr>) -> bool {
        self.allowance
            .take(client, self.seed, kernel_monotonic_ns())
    }

    pub(crate) fn install(&self, answers: Arc<dyn NameSource>) {
        self.send(Event::Install(answers));
    }

    pub(crate) fn refresh(&self, answers: Arc<dyn NameSource>, domains: &[Name]) {
        self.send(Event::Refresh(answers, domains.into()));
    }

    pub(crate) fn health_changed(&self, instances: &[IpAddr]) {
        if !instances.is_empty() {
            self.send(Event::HealthChanged(instances.into()));
        }
    }

    pub(crate) fn learn<'n>(&self, name: impl Into<NameRef<'n>>) {
        self.learn_if(name.into(), || true);
    }

    pub(crate) fn learn_denial(&self, name: NameRef<'_>, client: Option<IpAddr>) {
        self.learn_if(name, || self.may_hand_over(client));
    }

    fn learn_if(&self, name: NameRef<'_>, is_permitted: impl FnOnce() -> bool) {
        let key = hash_name(self.seed, name.as_wire());
        // The filter first: a name that was handed over before costs neither the client's allowance
        // nor a copy.
        if self.filter.note(key)
            && (!is_permitted() || self.learn.try_send(name.to_name()).is_err())
        {
            self.filter.release(key);
        }
    }

    /// Immediately invalidates all forwarded answers of other generations. Requests to renew an
    /// answer go to `renewals`.
    pub(crate) fn begin_answers(&self, generation: u64, renewals: &mpsc::Sender<AnswerQuestion>) {
        if !self.answers.kept {
            return;
        }
        // At once, by this thread: the publisher may be busy with something else, and void answers
        // must not be given meanwhile.
        self.page.set_answer_generation(generation);
        self.send(Event::BeginAnswers(generation, renewals.clone()));
    }

    pub(crate) fn offer(
        &self,
        question: &AnswerKey<'_>,
        generation: u64,
        answer: impl FnOnce() -> Option<ForwardedAnswer>,
    ) {
        let AnswersHandle {
            kept,
            offers,
            filter,
            ..
        } = &self.answers;
        if !kept || !is_answered(question.qtype) {
            return;
        }
        let key = filter_key(question.key(self.seed), generation);
        if !filter.note(key) {
            return;
        }
        // Copied only now, because copies of answers in use would be made at each query.
        if answer().is_none_or(|answer| offers.try_send(Offer { answer, generation }).is_err()) {
            filter.release(key);
        }
    }

    pub(crate) fn learn_reply(
        &self,
        question: &AnswerKey<'_>,
        size: Option<u16>,
        client: Option<IpAddr>,
    ) {
        let AnswersHandle {
            keeps_replies,
            questions,
            question_filter,
            ..
        } = &self.answers;
        let &AnswerKey {
            name,
            qtype,
            dnssec_ok,
            checking_disabled,
        } = question;
        let key = question.key(self.seed);
        if !keeps_replies
            || is_left_to_userspace(qtype)
            || !question_filter.is_repeated(key, kernel_monotonic_ns())
        {
            return;
        }
        let question = AnswerQuestion {
            name: name.to_name(),
            qtype,
            dnssec_ok,
            checking_disabled,
        };
        // Asked last: a question that is not handed over must not count against the client.
        if !self.may_hand_over(client)
            || questions
                .try_send(FrequentQuestion { question, size })
                .is_err()
        {
            question_filter.release(key);
        }
    }

    pub(crate) fn renew(&self, answer: ForwardedAnswer, generation: u64) {
        if self.answers.kept {
            // If this fails, the old answer expires.
            let _ = self.answers.offers.try_send(Offer { answer, generation });
        }
    }

    pub(crate) fn holds_answer(&self, question: &AnswerKey<'_>) -> bool {
        let key = question.key(self.seed);
        self.answers.index.get(key).is_some()
    }

    pub(crate) fn remove_answer(&self, question: &AnswerKey<'_>) {
        // An eviction from the cache concerns the publisher only if an interface has the answer.
        if self.holds_answer(question) {
            self.send(Event::RemoveAnswer(question.key(self.seed)));
        }
    }

    pub(crate) fn answer_last_used_ns(&self, question: &AnswerKey<'_>) -> Option<u64> {
        let index = &self.answers.index;
        let location = index.get(question.key(self.seed))?;
        Some(index.entries.last_used_ns(location)).filter(|&last_used| last_used != 0)
    }

    pub(crate) fn withdraw(&self, names: &[Name]) {
        if !names.is_empty() {
            self.send(Event::Withdraw(names.into()));
        }
    }

    pub(crate) fn is_published(&self, name: &Name) -> bool {
        self.header(name).is_some()
    }

    pub(crate) fn last_used_ns(&self, name: &Name) -> Option<u64> {
        self.header(name)
            .map(|header| header.last_used_ns)
            .filter(|&last_used| last_used != 0)
    }

    fn header(&self, name: &Name) -> Option<EntryHeader> {
        let memory = &self.names.entries;
        let location = self.names.get(hash_name(self.seed, name.as_wire()))?;
        let header = read_header(memory, location)?;
        // The entry holds another name if hashes collide, or if its cells were just reused.
        (read_name(memory, location)? == *name).then_some(header)
    }

    pub(crate) fn keep_exact_last_used(&self, exact: bool) {
        self.page.set_exact_last_used(exact);
    }

    pub(crate) fn shed(&self, shares: Option<&[u32; CLIENT_BUCKETS]>, time: Duration) {
        match shares {
            Some(shares) => {
                let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
                let until_ns = kernel_monotonic_ns().saturating_add(time);
                self.page.set_shedding(shares, until_ns);
            }
            None => self.page.end_shedding(),
        }
    }

    pub(crate) async fn flushed(&self) {
        let number = self.events.flush();
        let mut flushed = self.flushed.clone();
        // An error means that the publisher has ended, so there is nothing left to wait for.
        let _ = flushed.wait_for(|&done| done >= number).await;
    }

    pub(crate) async fn local_replies(&self) -> Vec<HeldReply> {
        let (done, replies) = oneshot::channel();
        self.send(Event::ListReplies(done));
        // An error means that the publisher has ended, or is far behind.
        replies.await.unwrap_or_default()
    }

    /// Sends an event that must not be lost.
    pub(super) fn send(&self, event: Event) {
        self.events.send(event);
    }
}

//----------- LearnFilter ----------------------------------------------------

/// Slots of the filter: 8 bytes each.
const SLOTS: usize = 1 << 13;

/// The keys handed over most recently: a hash table with one key per slot, in which a newer key
/// replaces an older one. A replaced key costs only a superfluous message.
#[derive(Debug)]
pub(crate) struct LearnFilter {
    /// The last key for each value of the lowest bits; 0 is empty, so a name with key 0 is always
    /// handed over.
    slots: Box<[AtomicU64]>,
}

impl LearnFilter {
    pub(crate) fn new() -> Self {
        Self {
            slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Records `key`; `false` if it was recorded already and need not be handed over.
    pub(crate) fn note(&self, key: u64) -> bool {
        let slot = self.slot(key);
        if key != 0 && slot.load(Ordering::Relaxed) == key {
            return false;
        }
        // Not an exchange: if two threads note a key at once, both hand it over, and the second
        // finds it learned.
        slot.store(key, Ordering::Relaxed);
        true
    }

    /// Permits the next query for the name to be handed over again, because the name is not in the map.
    pub(crate) fn release(&self, key: u64) {
        // If another key has taken the slot in the meantime, there is nothing to release.
        let _ = self
            .slot(key)
            .compare_exchange(key, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn slot(&self, key: u64) -> &AtomicU64 {
        // Truncation is intended: the lowest bits choose the slot.
        &self.slots[key as usize % SLOTS]
    }
}

/// Returns the key of an answer in the filter, which differs in each generation.
pub(crate) fn filter_key(key: u64, generation: u64) -> u64 {
    key ^ generation.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

//----------- QuestionFilter -------------------------------------------------

/// Longest time between two queries that make a question worth publishing, in seconds.
const REPEATED_WITHIN: u64 = 10;

/// The questions answered by local replies in userspace: each is handed over at its second query within
/// [`REPEATED_WITHIN`], and then not again until it is released or the names change.
#[derive(Debug)]
pub(crate) struct QuestionFilter {
    /// The last question for each value of the lowest bits: the upper bits of its key, and the time of its
    /// first query in the lowest [`TIME_BITS`].
    first: Box<[AtomicU64]>,
    handed_over: LearnFilter,
    /// Number of changes of the names.
    changes: AtomicU64,
}

/// Bits of a time in seconds that a slot of [`QuestionFilter`] keeps.
const TIME_BITS: u32 = 16;

impl Default for QuestionFilter {
    fn default() -> Self {
        Self {
            first: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
            handed_over: LearnFilter::new(),
            changes: AtomicU64::new(0),
        }
    }
}

impl QuestionFilter {
    /// Records a query at this time of `CLOCK_MONOTONIC`; returns whether to hand its question over.
    pub(crate) fn is_repeated(&self, key: u64, now_ns: u64) -> bool {
        let now = (now_ns / 1_000_000_000) & ((1 << TIME_BITS) - 1);
        // Truncation is intended: the lowest bits choose the slot.
        let slot = &self.first[key as usize % SLOTS];
        let upper = key >> TIME_BITS << TIME_BITS;
        let seen = slot.load(Ordering::Relaxed);
        // Modulo 18 hours: a question seen about so long ago counts as repeated, and is published a
        // query early.
        let age = now.wrapping_sub(seen) & ((1 << TIME_BITS) - 1);
        if seen >> TIME_BITS << TIME_BITS != upper || age > REPEATED_WITHIN {
            slot.store(upper | now, Ordering::Relaxed);
            return false;
        }
        self.handed_over.note(self.key(key))
    }

    /// Lets a question be handed over again.
    pub(crate) fn release(&self, key: u64) {
        self.handed_over.release(self.key(key));
    }

    /// Lets all questions be handed over again, because the names have changed.
    pub(crate) fn begin(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    fn key(&self, key: u64) -> u64 {
        filter_key(key, self.changes.load(Ordering::Relaxed))
    }
}

//----------- ClientAllowance ------------------------------------------------

/// Denials and questions that the clients of a group may hand over per second.
const MAX_EACH_SECOND: u32 = 32;

/// Groups of clients.
const GROUPS: usize = 256;

/// Limits how fast each client hands over denials and questions, of which random names make any number: a
/// client that floods leaves room for other clients' names.
#[derive(Debug)]
pub(crate) struct ClientAllowance {
    groups: Box<[EachSecond]>,
}

impl Default for ClientAllowance {
    fn default() -> Self {
        Self {
            groups: (0..GROUPS).map(|_| EachSecond::new()).collect(),
        }
    }
}

impl ClientAllowance {
    /// Counts a hand-over at this time of `CLOCK_MONOTONIC`; returns whether the client may make it. `seed`
    /// decides which clients share a group; an IPv6 client counts with its /64.
    pub(crate) fn take(&self, client: Option<IpAddr>, seed: u64, now_ns: u64) -> bool {
        let number = match client.map(|client| client.to_canonical()) {
            Some(IpAddr::V4(client)) => client.to_bits().into(),
            // Truncation is intended: the upper half is the network.
            Some(IpAddr::V6(client)) => (client.to_bits() >> 64) as u64,
            None => 0,
        };
        // By a keyed hash: a client cannot choose whose group it shares.
        let group = QueryKey::new(0, false, false).hash(number ^ seed) as usize % GROUPS;
        self.groups[group].take(MAX_EACH_SECOND, (now_ns / 1_000_000_000) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flooding_client_uses_own_allowance() {
        const SECOND: u64 = 1_000_000_000;
        let allowance = ClientAllowance::default();
        let taken = |client: &str, at: u64| {
            (0..1000)
                .filter(|_| allowance.take(Some(client.parse().unwrap()), 7, at))
                .count() as u32
        };
        assert_eq!(taken("10.0.0.1", SECOND), MAX_EACH_SECOND);
        let others: u32 = (2..10)
            .map(|last| taken(&format!("10.0.0.{last}"), SECOND))
            .sum();
        assert!(others >= 6 * MAX_EACH_SECOND, "{others}");
        assert_eq!(taken("::ffff:10.0.0.1", SECOND), 0, "the same client");
        assert_eq!(taken("10.0.0.1", 2 * SECOND), MAX_EACH_SECOND);
        assert_eq!(taken("fd00::1", SECOND), MAX_EACH_SECOND);
        assert_eq!(taken("fd00::2", SECOND), 0, "the same network");
    }

    #[test]
    fn repetitions_are_held_back_until_forgotten() {
        let filter = LearnFilter::new();
        assert!(filter.note(5));
        assert!(!filter.note(5));
        filter.release(5);
        assert!(filter.note(5));
        let rival = 5 + SLOTS as u64;
        assert!(filter.note(rival));
        filter.release(5);
        assert!(
            !filter.note(rival),
            "releasing a key leaves its rival alone"
        );
        assert!(filter.note(5));
    }

    #[test]
    fn a_key_of_zero_is_never_held_back() {
        let filter = LearnFilter::new();
        assert!(filter.note(0) && filter.note(0));
    }

    #[test]
    fn second_query_hands_question_over() {
        const SECOND: u64 = 1_000_000_000;
        let filter = QuestionFilter::default();
        assert!(!filter.is_repeated(7 << 20, SECOND));
        assert!(filter.is_repeated(7 << 20, 11 * SECOND));
        assert!(
            !filter.is_repeated(7 << 20, 11 * SECOND),
            "it was handed over"
        );
        filter.begin();
        assert!(
            filter.is_repeated(7 << 20, 11 * SECOND),
            "the names changed"
        );
        filter.release(7 << 20);
        assert!(
            !filter.is_repeated(7 << 20, 12 * SECOND),
            "the first query was too long ago"
        );
        assert!(filter.is_repeated(7 << 20, 12 * SECOND));
        assert!(
            !filter.is_repeated(9 << 20, 12 * SECOND),
            "another question"
        );
    }
}
