//! The handle through which the server uses the fast path.

use std::{
    iter,
    net::IpAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use dns_common::control::CLIENT_BUCKETS;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use crate::{
    AnswerKey, AnswerQuestion, Counters, FastPath, HeldReply, NameSource, Publisher,
    protocol::InterfacesStatus, publish::lease::UNWATCHED,
};
use dns_core::{
    name::{Name, NameRef},
    wire::ForwardedAnswer,
};

/// Maximum number of pending renewals.
const RENEWAL_QUEUE: usize = 256;

/// Handle of the current fast path, shared by all clones. Empty until the maps exist; until then
/// every call does nothing, and userspace answers. Calls are cheap and never block.
///
/// A restarted attacher brings a new fast path. Until its programs are attached, both the new and
/// the old one receive every change.
#[derive(Clone, Default)]
pub struct FastPathHandle(Arc<Inner>);

/// State that the clones share.
struct Inner {
    /// The current fast path, if any, followed by its predecessor while the predecessor's programs
    /// may still answer.
    members: ArcSwap<Vec<Member>>,
    /// Counters of earlier fast paths, which have left `members`. Locked while `members` changes.
    ended: Mutex<Counters>,
    /// The setting for later publishers.
    exact_last_used: AtomicBool,
    /// Generation of forwarded answers, from 1.
    answer_generation: AtomicU64,
    /// Held while a generation begins, so that every publisher receives the newest generation last.
    beginning: Mutex<()>,
    /// Whether programs of an earlier process may still give its forwarded answers.
    has_previous_programs: watch::Sender<bool>,
    /// Requests to renew answers; the receiving end until it is taken.
    renewals: (
        mpsc::Sender<AnswerQuestion>,
        Mutex<Option<mpsc::Receiver<AnswerQuestion>>>,
    ),
}

impl Default for Inner {
    fn default() -> Self {
        let (renewals, requested) = mpsc::channel(RENEWAL_QUEUE);
        Self {
            members: ArcSwap::default(),
            ended: Mutex::default(),
            exact_last_used: AtomicBool::default(),
            answer_generation: AtomicU64::new(1),
            beginning: Mutex::default(),
            has_previous_programs: watch::Sender::new(false),
            renewals: (renewals, Mutex::new(Some(requested))),
        }
    }
}

/// One fast path behind the handle.
#[derive(Clone)]
struct Member {
    /// `None` if it has ended.
    publisher: Option<Arc<Publisher>>,
    /// Weak: only the owner decides when it ends.
    fast_path: Weak<FastPath>,
}

impl FastPathHandle {
    /// Makes this fast path the current one. Its predecessor keeps receiving changes until [`Self::retire`].
    pub fn fill(&self, fast_path: &Arc<FastPath>) {
        let publisher = fast_path.publisher();
        let member = Member {
            publisher: publisher.clone(),
            fast_path: Arc::downgrade(fast_path),
        };
        // Before the settings: a change of them in between then reaches it as a member.
        self.change_members(|before| iter::once(member).chain(before.first().cloned()).collect());
        if let Some(publisher) = publisher {
            publisher.keep_exact_last_used(self.0.exact_last_used.load(Ordering::SeqCst));
            let _newest_last = self.0.beginning.lock();
            publisher.begin_answers(self.answer_generation(), &self.0.renewals.0);
        }
        // The attacher ended the earlier answers before it sent the maps.
        self.0.has_previous_programs.send_replace(false);
    }

    /// Expects programs of an earlier process, which answer until [`Self::fill`], or for at most `lease`.
    pub fn expect_previous_programs(&self, lease: Duration) {
        self.0.has_previous_programs.send_replace(true);
        let shared = self.clone();
        // The lease of a server that is gone ends with the attacher's last sign of life, however long it is.
        let longest = lease.min(UNWATCHED);
        tokio::spawn(async move {
            tokio::time::sleep(longest).await;
            shared.0.has_previous_programs.send_replace(false);
        });
    }

    /// Waits until no program of an earlier process gives forwarded answers.
    pub async fn earlier_answers_ended(&self) {
        // Fails only if the sender is gone, and the handle owns it.
        let _ = self
            .0
            .has_previous_programs
            .subscribe()
            .wait_for(|has_programs| !has_programs)
            .await;
    }

    /// Drops the predecessor of the current fast path.
    pub fn retire(&self) {
        self.change_members(|before| before.first().cloned().into_iter().collect());
    }

    /// Drops every fast path: each call does nothing, and userspace answers.
    pub fn clear(&self) {
        let none = Member {
            publisher: None,
            fast_path: Weak::new(),
        };
        // Not an empty list, which means that the maps are still to come.
        self.change_members(|_| vec![none]);
    }

    /// Replaces the fast paths; the counters of removed ones are kept.
    fn change_members(&self, change: impl FnOnce(&[Member]) -> Vec<Member>) {
        // Held until the members are replaced: `counters` would miss counts in between or add them twice, and another
        // change could be undone.
        let mut ended = self.0.ended.lock();
        let before = self.0.members.load();
        let members = change(&before);
        for gone in before.iter() {
            let mut is_kept = false;
            for member in &members {
                is_kept |= member.fast_path.ptr_eq(&gone.fast_path);
            }
            if !is_kept && let Some(fast_path) = gone.fast_path.upgrade() {
                *ended = std::mem::take(&mut *ended)
                    .join(fast_path.counters())
                    .ended();
            }
        }
        self.0.members.store(Arc::new(members));
    }

    /// Returns the counters of all fast paths since the start of the process, except for those by
    /// interface, which count since the programs were loaded. No counter falls when the attacher restarts.
    pub fn counters(&self) -> Counters {
        let ended = self.0.ended.lock();
        let mut counters = ended.clone();
        for member in self.0.members.load().iter() {
            if let Some(fast_path) = member.fast_path.upgrade() {
                counters = counters.join(fast_path.counters());
            }
        }
        counters
    }

    /// Returns whether neither [`Self::fill`] nor [`Self::clear`] has been called yet.
    pub fn is_empty(&self) -> bool {
        self.0.members.load().is_empty()
    }

    /// Returns the current fast path.
    pub fn get(&self) -> Option<Arc<FastPath>> {
        self.0.members.load().first()?.fast_path.upgrade()
    }

    /// Publishes the names of a new snapshot, and learned names that still resolve.
    pub fn install(&self, names: &Arc<dyn NameSource>) {
        self.for_each(|publisher| publisher.install(names.clone()));
    }

    /// Publishes the current answers of names within these domains; all other answers are unchanged.
    pub fn refresh(&self, names: &Arc<dyn NameSource>, domains: &[Name]) {
        self.for_each(|publisher| publisher.refresh(names.clone(), domains));
    }

    /// Resolves the names again whose answers contain these instances.
    pub fn health_changed(&self, instances: &[IpAddr]) {
        self.for_each(|publisher| publisher.health_changed(instances));
    }

    /// Hands over a name resolved locally in userspace, so that the interface answers its next query. Dropped
    /// if the publisher is behind.
    #[inline]
    pub fn learn<'n>(&self, name: impl Into<NameRef<'n>>) {
        // The predecessor needs no further names: its programs are replaced in a moment.
        self.current(|publisher| publisher.learn(name));
    }

    /// Like [`Self::learn`], for a name that does not exist: random names are any number, so each client
    /// hands over some per second.
    #[inline]
    pub fn learn_denial<'n>(&self, name: impl Into<NameRef<'n>>, client: Option<IpAddr>) {
        self.current(|publisher| publisher.learn_denial(name.into(), client));
    }

    /// Returns the generation of forwarded answers. Must be read before looking up an answer that
    /// is passed to [`Self::offer_answer`].
    #[inline]
    pub fn answer_generation(&self) -> u64 {
        self.0.answer_generation.load(Ordering::Acquire)
    }

    /// Invalidates all forwarded answers: interfaces no longer use any that was looked up before this call.
    pub fn void_answers(&self) {
        let _newest_last = self.0.beginning.lock();
        let generation = self.0.answer_generation.fetch_add(1, Ordering::AcqRel) + 1;
        self.for_each(|publisher| publisher.begin_answers(generation, &self.0.renewals.0));
    }

    /// Hands over a forwarded answer that was looked up in `generation` and used in userspace, so that the
    /// interface answers the next query. `answer` is called only if it was not handed over before. Dropped if
    /// the publisher is behind.
    #[inline]
    pub fn offer_answer(
        &self,
        question: &AnswerKey<'_>,
        generation: u64,
        answer: impl FnOnce() -> Option<ForwardedAnswer>,
    ) {
        self.current(|publisher| publisher.offer(question, generation, answer));
    }

    /// Hands over a question that was answered by a local reply other than a list of addresses, so that the
    /// interface answers it from the third query on. `size` is the client's EDNS size. Dropped if the publisher
    /// is behind, or the client hands over too many.
    #[inline]
    pub fn learn_reply(&self, question: &AnswerKey<'_>, size: Option<u16>, client: Option<IpAddr>) {
        self.current(|publisher| publisher.learn_reply(question, size, client));
    }

    /// Replaces a forwarded answer by one that was looked up in `generation`. Dropped if the publisher is behind.
    pub fn replace_answer(&self, answer: ForwardedAnswer, generation: u64) {
        // The predecessor's copy expires, or is removed with its generation.
        self.current(|publisher| publisher.renew(answer, generation));
    }

    /// Removes the forwarded answer to this question.
    pub fn remove_answer(&self, question: &AnswerKey<'_>) {
        self.for_each(|publisher| publisher.remove_answer(question));
    }

    /// Returns when an interface last gave the forwarded answer to this question, in ns of
    /// `CLOCK_MONOTONIC_COARSE`; `None` if there is none or it was never used. Approximate: another question may
    /// have the same hash.
    pub fn answer_last_used_ns(&self, question: &AnswerKey<'_>) -> Option<u64> {
        self.current(|publisher| publisher.answer_last_used_ns(question))?
    }

    /// Returns whether interfaces hold a forwarded answer to this question.
    pub fn holds_answer(&self, question: &AnswerKey<'_>) -> bool {
        self.current(|publisher| publisher.holds_answer(question)) == Some(true)
    }

    /// Returns the local replies of other types that interfaces give, in no particular order.
    pub async fn local_replies(&self) -> Vec<HeldReply> {
        match self.current(Arc::clone) {
            Some(publisher) => publisher.local_replies().await,
            None => Vec::new(),
        }
    }

    /// Takes the receiver of requests to renew answers in use; `None` after the first call.
    pub fn renewals(&self) -> Option<mpsc::Receiver<AnswerQuestion>> {
        self.0.renewals.1.lock().take()
    }

    /// Removes names that are no longer admitted.
    pub fn withdraw(&self, names: &[Name]) {
        self.for_each(|publisher| publisher.withdraw(names));
    }

    /// Limits the queries passed to userspace during this time to `shares`, one per group of clients, as
    /// fractions of 2^32 - 1; `None` lifts the limit. Takes effect immediately.
    pub fn shed(&self, shares: Option<&[u32; CLIENT_BUCKETS]>, time: Duration) {
        // Programs of both may run, each at the interfaces that they have.
        self.for_each(|publisher| publisher.shed(shares, time));
    }

    /// Returns the number of queries that interfaces have passed to userspace; `None` without a fast path.
    pub fn passed_to_userspace(&self) -> Option<u64> {
        self.get()
            .map(|fast_path| fast_path.counters.passed_to_userspace())
    }

    /// Returns when an interface last answered for a name, in ns of `CLOCK_MONOTONIC_COARSE`; `None` if it is not
    /// published or was never used.
    pub fn last_used_ns(&self, name: &Name) -> Option<u64> {
        self.current(|publisher| publisher.last_used_ns(name))?
    }

    /// Sets whether last-used times are exact, for callers that need the order within one tick of the clock.
    /// Takes effect immediately; costs the program a clock read.
    pub fn keep_exact_last_used(&self, exact: bool) {
        // Stored first, so that a publisher added concurrently sees it either way.
        self.0.exact_last_used.store(exact, Ordering::SeqCst);
        self.for_each(|publisher| publisher.keep_exact_last_used(exact));
    }

    /// Waits until the interfaces answer from everything installed so far.
    pub async fn flushed(&self) {
        if let Some(publisher) = self.current(Arc::clone) {
            publisher.flushed().await;
        }
    }

    /// Returns whether interfaces answer a name now.
    pub fn is_published(&self, name: &Name) -> bool {
        self.current(|publisher| publisher.is_published(name)) == Some(true)
    }

    /// Returns the reason why no interface is served although one should be.
    pub fn unserved(&self) -> Option<String> {
        self.get()?.status().interfaces.unserved
    }

    /// Describes whether interfaces answer, and the reason if none does.
    pub fn in_words(&self) -> String {
        let Some(fast_path) = self.get() else {
            return "off".to_owned();
        };
        let InterfacesStatus {
            interfaces,
            unserved,
            ..
        } = fast_path.status().interfaces;
        match unserved {
            Some(why) => format!("on no interface: {why}"),
            None if interfaces.iter().any(|interface| interface.hook.is_some()) => "on".to_owned(),
            None => "on no interface yet: each is served once enough queries have arrived on it"
                .to_owned(),
        }
    }

    /// Calls `read` with the current publisher; `None` without one.
    #[inline]
    fn current<T>(&self, read: impl FnOnce(&Arc<Publisher>) -> T) -> Option<T> {
        let members = self.0.members.load();
        let publisher = members.first()?.publisher.as_ref()?;
        Some(read(publisher))
    }

    fn for_each(&self, change: impl Fn(&Publisher)) {
        for member in self.0.members.load().iter() {
            if let Some(publisher) = &member.publisher {
                change(publisher);
            }
        }
    }
}
