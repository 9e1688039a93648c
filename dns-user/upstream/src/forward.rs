//! Queries recursors one after another, and reports the result faithfully.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;

use super::{
    TryError,
    host_names::HostNames,
    message,
    recursor::{PreparedQuery, ProbeDecision, Recursor, RecursorOptions, TryResult},
    udp::SentQuery,
};
use crate::message::{Form, Forwarded, QueryMessage, ValidatedReply};
use dns_core::{
    config::{Compat, RecursorSelection},
    wire::{ExtendedError, InfoCode, Query, ReplyFlags, Transport},
};
use dns_kit::logs::LineLimit;

/// A list of recursors, tried in turn until one answers.
#[derive(Debug)]
pub(crate) struct Forwarder {
    set: ArcSwap<RecursorSet>,
    /// Settings of all recursors.
    options: RecursorOptions,
    selection: RecursorSelection,
    /// Quirks of bosh-dns to reproduce.
    compat: Compat,
    /// Resolves host names of recursors.
    hosts: Arc<HostNames>,
    /// Rate limit for log lines about queries without any recursor.
    none_lines: LineLimit,
}

/// Recursors and the history that determines their order.
#[derive(Debug)]
pub(crate) struct RecursorSet {
    /// Recursors in configuration order; shuffled with `smart`.
    pub(crate) recursors: Vec<Arc<Recursor>>,
    /// The order in which they are tried.
    pub(crate) order: RecursorOrder,
}

/// The first try of a query, in flight without a task.
pub(crate) struct FirstTry {
    set: Arc<RecursorSet>,
    /// Index of its recursor.
    index: usize,
    /// The recursor's address.
    to: SocketAddr,
    start: Instant,
}

impl FirstTry {
    fn recursor(&self) -> &Arc<Recursor> {
        &self.set.recursors[self.index]
    }

    fn conclude(&self, landed: &LandedTry) {
        let LandedTry {
            message,
            outcome,
            took,
        } = landed;
        self.recursor()
            .conclude(self.to, Transport::Udp, message, outcome, *took);
    }
}

/// The consequence of a first try.
pub(crate) enum FirstOutcome {
    /// The client gets this.
    Answer(Forwarded),
    /// The try failed, or its reply leads to further ones: [`Forwarder::forward_after`] continues.
    Unfinished(LandedTry),
}

/// The outcome of a first try.
pub(crate) struct LandedTry {
    /// The query as sent.
    message: QueryMessage,
    outcome: TryResult,
    took: Duration,
}

impl Forwarder {
    pub(crate) fn new(
        names: &[String],
        options: RecursorOptions,
        selection: RecursorSelection,
        compat: Compat,
        hosts: &Arc<HostNames>,
    ) -> Self {
        let set = ArcSwap::from_pointee(RecursorSet::new(names, options, selection, &[], hosts));
        Self {
            set,
            options,
            selection,
            compat,
            hosts: Arc::clone(hosts),
            none_lines: LineLimit::new(),
        }
    }

    /// Replaces the recursors. Recursors that stay keep their sockets and counters.
    pub(crate) fn replace(&self, names: &[String]) {
        let old = self.set.load();
        let set = RecursorSet::new(
            names,
            self.options,
            self.selection,
            &old.recursors,
            &self.hosts,
        );
        self.set.store(Arc::new(set));
    }

    pub(crate) fn set(&self) -> Arc<RecursorSet> {
        self.set.load_full()
    }

    /// Time limit of a try.
    pub(crate) fn timeout(&self) -> Duration {
        self.options.timeout
    }

    /// Prepares the first try of a query if that needs no waiting until its reply.
    pub(crate) fn prepare(&self, query: &Query<'_>) -> Option<(FirstTry, PreparedQuery)> {
        let set = self.set.load_full();
        // As in `forward_after`: a query to this server itself would come back.
        let index = set
            .order
            .order()
            .find(|&index| !set.recursors[index].is_own())?;
        let prepared = set.recursors[index].prepare(query)?;
        let first = FirstTry {
            set,
            index,
            to: prepared.to(),
            start: Instant::now(),
        };
        Some((first, prepared))
    }

    /// Ends a first try.
    pub(crate) fn land(
        &self,
        query: &Query<'_>,
        first: &FirstTry,
        sent: &SentQuery<'_>,
        outcome: Result<Vec<u8>, TryError>,
    ) -> FirstOutcome {
        let form = self.options.form;
        // As it was on the wire, for dnstap.
        let mut message = form.message(query);
        message::set_id(&mut message, sent.id);
        message[query.question_range()].copy_from_slice(sent.question);
        let landed = LandedTry {
            message,
            outcome: outcome.and_then(|reply| ValidatedReply::of_datagram(reply, sent.question)),
            took: first.start.elapsed(),
        };
        let is_final = landed.outcome.as_ref().is_ok_and(|validated| {
            // Otherwise the rest is fetched over TCP; with transparent forwarding, the client does that itself.
            let is_whole = form.transparent || !validated.is_truncated();
            validated.rcode() == message::NOERROR && is_whole
        });
        if is_final {
            first.conclude(&landed);
        }
        match landed {
            LandedTry {
                outcome: Ok(validated),
                ..
            } if is_final => {
                first.set.order.record(first.index, false);
                FirstOutcome::Answer(first.recursor().answer(validated, query))
            }
            landed => FirstOutcome::Unfinished(landed),
        }
    }

    /// Queries recursors until one answers NOERROR.
    pub(crate) async fn forward(&self, query: &Query<'_>) -> Forwarded {
        self.forward_after(None, query).await
    }

    /// Queries recursors until one answers NOERROR. The outcome of a first try may be known.
    pub(crate) async fn forward_after(
        &self,
        first: Option<(&FirstTry, LandedTry)>,
        query: &Query<'_>,
    ) -> Forwarded {
        let (set, preferred, mut first) = match first {
            Some((first, landed)) => {
                first.conclude(&landed);
                (Arc::clone(&first.set), first.index, Some(landed.outcome))
            }
            None => {
                let set = self.set.load_full();
                let preferred = set.order.preferred();
                (set, preferred, None)
            }
        };
        if set.recursors.is_empty()
            && let Some(suppressed) = self.none_lines.admit_per_minute()
        {
            tracing::warn!(
                suppressed,
                "no recursor is known: names outside the fleet get SERVFAIL; set `recursors`, or nameservers other \
                 than this server in /etc/resolv.conf"
            );
        }
        let form = self.options.form;
        let mut message = form.message(query);
        let mut best: Option<Failure> = None;
        let mut busy = false;
        let mut last_error = None;
        for index in set.order.order_from(preferred) {
            let recursor = &set.recursors[index];
            let first = first.take();
            // The query would come back, and be forwarded again until it times out.
            if recursor.is_own() {
                continue;
            }
            if best.is_some() && !self.is_worth_waiting(recursor, query) {
                continue;
            }
            let mut outcome = recursor.ask(query, &mut message, first).await;
            // A client that has an answer already need not wait for one more time limit.
            if matches!(outcome, Err(TryError::TimedOut))
                && best.is_none()
                && let Some(reply) = Box::pin(recursor.ask_without_edns(query, &message)).await
            {
                outcome = Ok(reply);
            }
            set.order.record(index, self.counts_as_failure(&outcome));
            match outcome {
                Ok(validated) if validated.rcode() == message::NOERROR => {
                    return recursor.answer(validated, query);
                }
                Ok(validated) => {
                    let failure = Failure {
                        validated,
                        recursor: Arc::clone(&recursor.name),
                    };
                    if best
                        .as_ref()
                        .is_none_or(|best| failure.rank() >= best.rank())
                    {
                        best = Some(failure);
                    }
                }
                Err(error) => {
                    busy |= error.is_own();
                    last_error = Some(error);
                }
            }
        }
        if self.compat.nxdomain_for_failures {
            // bosh-dns gives this answer whatever the cause (observed). Only a recursor's own NXDOMAIN is
            // an answer; the others are remembered as failures (RFC 9520).
            let failed = best.is_none_or(|best| best.rank() == 0);
            return Forwarded {
                failed,
                ..Forwarded::bare(query, message::NXDOMAIN, ReplyFlags::ERROR)
            };
        }
        match best {
            Some(failure) => failure.finish(query, form),
            None => Forwarded {
                busy,
                ..unanswered(query, last_error)
            },
        }
    }

    /// Returns whether a query that already has an answer other than NOERROR should wait for this
    /// recursor: not for a silent one, otherwise every nonexistent name would take a timeout.
    fn is_worth_waiting(&self, recursor: &Arc<Recursor>, query: &Query<'_>) -> bool {
        if self.compat.wait_for_silent_recursors {
            return true;
        }
        match recursor.probe_decision() {
            ProbeDecision::Wait => true,
            ProbeDecision::Skip => false,
            ProbeDecision::Probe => {
                let recursor = Arc::clone(recursor);
                let query = query.to_owned();
                let form = self.options.form;
                tokio::spawn(async move {
                    let query = query.as_query();
                    // The result updates the recursor's counters.
                    let _ = recursor.ask(&query, &mut form.message(&query), None).await;
                });
                false
            }
        }
    }

    /// Returns whether an outcome counts against the recursor. NXDOMAIN does not, nor does an
    /// overload or a lack of sockets of this server.
    fn counts_as_failure(&self, outcome: &TryResult) -> bool {
        match outcome {
            Ok(validated) if validated.rcode() == message::NXDOMAIN => {
                self.compat.nxdomain_is_failure
            }
            Ok(validated) => validated.rcode() != message::NOERROR,
            Err(error) => !error.is_own(),
        }
    }
}

/// Returns the reply to a query that no recursor answered.
fn unanswered(query: &Query<'_>, last_error: Option<TryError>) -> Forwarded {
    let text = match last_error {
        Some(error) => format!("no recursor answered: {error}"),
        None => "no recursor is known".to_owned(),
    };
    let errors = vec![ExtendedError::with_text(
        InfoCode::NoReachableAuthority,
        text,
    )];
    Forwarded {
        errors,
        ..Forwarded::bare(query, message::SERVFAIL, ReplyFlags::RECURSION)
    }
}

impl RecursorSet {
    /// Returns the recursors of `names`, reusing known ones.
    fn new(
        names: &[String],
        options: RecursorOptions,
        selection: RecursorSelection,
        known: &[Arc<Recursor>],
        hosts: &Arc<HostNames>,
    ) -> Self {
        let mut recursors: Vec<Arc<Recursor>> = Vec::with_capacity(names.len());
        for name in names {
            let known = known.iter().find(|recursor| *recursor.name == **name);
            recursors.push(
                known.map_or_else(|| Arc::new(Recursor::new(name, options, hosts)), Arc::clone),
            );
        }
        if selection == RecursorSelection::Smart {
            // As bosh-dns does: the machines of a fleet prefer different recursors.
            fastrand::shuffle(&mut recursors);
        }
        let order = RecursorOrder::new(selection, recursors.len());
        Self { recursors, order }
    }
}

/// A reply with an RCODE other than NOERROR.
#[derive(Debug)]
struct Failure {
    validated: ValidatedReply,
    /// Name of its sender.
    recursor: Arc<str>,
}

impl Failure {
    /// Returns how informative the reply is for a client; among equals the last one is used.
    /// NXDOMAIN is the most informative, especially with the SOA that limits its lifetime.
    fn rank(&self) -> u8 {
        let ValidatedReply { reply, index } = &self.validated;
        if self.validated.rcode() != message::NXDOMAIN {
            return 0;
        }
        let has_soa = index
            .walk(reply)
            .any(|(section, record)| section == 1 && record.rtype == message::TYPE_SOA);
        if has_soa { 2 } else { 1 }
    }

    /// Returns the reply for the client: unchanged, or a new one if it does not repeat the question
    /// or concerns only the exchange with the recursor.
    fn finish(self, query: &Query<'_>, form: Form) -> Forwarded {
        let failed = self.rank() == 0;
        let Self {
            validated,
            recursor,
        } = self;
        let recursor = Some(recursor);
        // An extended RCODE without the recursor's OPT would be read as another one, mostly NOERROR (BADVERS, 16).
        if validated.index.questions == 1 && !validated.has_extended_rcode() {
            return Forwarded {
                failed,
                recursor,
                ..validated.finish(query, form)
            };
        }
        let rcode = validated.rcode();
        let errors = validated.errors();
        Forwarded {
            failed,
            recursor,
            errors,
            ..Forwarded::bare(query, rcode, ReplyFlags::RECURSION)
        }
    }
}

//----------- Failover -----------------------------------------------------
//
// The order in which recursors are tried. Performs no I/O.

/// Number of recent tries that count.
pub(crate) const HISTORY: u32 = 25;
/// Number of failures in the history from which the next recursor is preferred.
const MAX_FAILURES: u32 = 5;

/// Order of a fixed number of recursors, determined by the results of their tries.
#[derive(Debug)]
pub(crate) struct RecursorOrder {
    /// Configured way of ordering.
    mode: RecursorSelection,
    /// Index of the recursor to try first.
    preferred: AtomicUsize,
    histories: Box<[History]>,
}

/// Recent tries of one recursor: one bit per try, set if it failed, the latest in the lowest bit.
#[derive(Debug, Default)]
struct History {
    /// Tries since the recursor was last preferred, which decide whether it stays preferred.
    turn: AtomicU32,
    /// All tries, for operators.
    all: AtomicU32,
}

impl History {
    fn record(&self, failed: bool) -> u32 {
        let Self { turn, all } = self;
        add(all, failed);
        add(turn, failed)
    }
}

/// Adds a try to a history; returns the number of failures in it.
fn add(history: &AtomicU32, failed: bool) -> u32 {
    let before = history.load(Ordering::Relaxed);
    if before == 0 && !failed {
        // The common case: nothing to write.
        return 0;
    }
    // Two tries that end at the same time may count as one, which is harmless.
    let after = (before << 1 | u32::from(failed)) & ((1 << HISTORY) - 1);
    history.store(after, Ordering::Relaxed);
    after.count_ones()
}

impl RecursorOrder {
    /// Creates the order of `count` recursors; the first is preferred.
    pub(crate) fn new(mode: RecursorSelection, count: usize) -> Self {
        let histories = (0..count).map(|_| History::default()).collect();
        Self {
            mode,
            preferred: AtomicUsize::new(0),
            histories,
        }
    }

    /// Returns indexes in the order in which they are tried.
    pub(crate) fn order(&self) -> impl Iterator<Item = usize> + use<> {
        self.order_from(self.preferred())
    }

    /// Returns indexes in the order in which they are tried if this one is first.
    fn order_from(&self, first: usize) -> impl Iterator<Item = usize> + use<> {
        (first..self.histories.len()).chain(0..first)
    }

    /// Returns the index of the recursor to try first.
    pub(crate) fn preferred(&self) -> usize {
        self.preferred.load(Ordering::Relaxed)
    }

    pub(crate) fn recent_failures(&self, index: usize) -> u32 {
        let Some(history) = self.histories.get(index) else {
            return 0;
        };
        history.all.load(Ordering::Relaxed).count_ones()
    }

    /// Records the result of a try.
    pub(crate) fn record(&self, index: usize, failed: bool) {
        let Some(history) = self.histories.get(index) else {
            return;
        };
        let failures = history.record(failed);
        // A success never moves the preference, although older failures may still count.
        if self.mode == RecursorSelection::Smart && failures >= MAX_FAILURES && failed {
            let next = (index + 1) % self.histories.len();
            // Tries that fail at the same time move the preference once.
            let moved = self
                .preferred
                .compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
            if moved {
                // The recursor starts without failures when it is preferred again.
                history.turn.store(0, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod failover_tests {
    use super::*;

    /// Returns indexes in the order in which they are tried.
    fn order(recursors: &RecursorOrder) -> Vec<usize> {
        recursors.order().collect()
    }

    #[test]
    fn five_failures_move_preference() {
        let recursors = RecursorOrder::new(RecursorSelection::Smart, 3);
        for _ in 0..4 {
            recursors.record(0, true);
            recursors.record(0, false);
        }
        assert_eq!(order(&recursors), [0, 1, 2]);
        recursors.record(0, true);
        assert_eq!(order(&recursors), [1, 2, 0]);
        assert_eq!(
            recursors.recent_failures(0),
            5,
            "operators still see the failures"
        );
    }

    #[test]
    fn failures_expire_after_25_tries() {
        let recursors = RecursorOrder::new(RecursorSelection::Smart, 2);
        for _ in 0..10 {
            recursors.record(0, true);
            (0..6).for_each(|_| recursors.record(0, false));
        }
        assert_eq!(order(&recursors), [0, 1]);
    }

    #[test]
    fn unpreferred_failures_keep_preference() {
        let recursors = RecursorOrder::new(RecursorSelection::Smart, 2);
        (0..20).for_each(|_| recursors.record(1, true));
        assert_eq!(order(&recursors), [0, 1]);
    }

    #[test]
    fn serial_stays() {
        let recursors = RecursorOrder::new(RecursorSelection::Serial, 2);
        (0..20).for_each(|_| recursors.record(0, true));
        assert_eq!(order(&recursors), [0, 1]);
        assert_eq!(recursors.recent_failures(0), 20);
    }

    #[test]
    fn a_single_recursor_stays_preferred() {
        let recursors = RecursorOrder::new(RecursorSelection::Smart, 1);
        (0..20).for_each(|_| recursors.record(0, true));
        assert_eq!(order(&recursors), [0]);
    }

    use crate::tests::{options, parsed, query};

    fn forwarder(names: &[&str], compat: Compat) -> Forwarder {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let selection = RecursorSelection::Serial;
        Forwarder::new(
            &names,
            options(0, compat),
            selection,
            compat,
            &Arc::default(),
        )
    }

    /// Returns a reply with this RCODE, and with an SOA in the answer (0) or authority (1) section.
    fn reply(rcode: u8, soa: Option<usize>) -> ValidatedReply {
        let mut reply = query(b"\x01a\0", 1);
        reply[2..4].copy_from_slice(&[0x81, 0x80 | rcode]);
        if let Some(section) = soa {
            reply[7 + 2 * section] = 1;
            reply.extend_from_slice(b"\0\0\x06\0\x01\0\0\0\x3c\0\x16\0\0");
            reply.extend_from_slice(&[0; 20]);
        }
        ValidatedReply::new(reply).unwrap()
    }

    #[tokio::test]
    async fn history_has_25_tries() {
        let recursors = RecursorOrder::new(RecursorSelection::Serial, 1);
        for tried in 1..=30 {
            recursors.record(0, true);
            assert_eq!(recursors.recent_failures(0), tried.min(25));
        }
        for left in (0..25).rev() {
            recursors.record(0, false);
            assert_eq!(recursors.recent_failures(0), left);
        }
        recursors.record(7, true);
        assert_eq!(recursors.recent_failures(7), 0, "there is none");
    }

    #[test]
    fn first_recursor_follows_the_last() {
        let recursors = RecursorOrder::new(RecursorSelection::Smart, 3);
        for (index, next) in [(0, 1), (1, 2), (2, 0), (0, 1)] {
            for _ in 0..4 {
                recursors.record(index, true);
                assert_eq!(recursors.preferred(), index);
            }
            // A success moves nothing, though failures count.
            recursors.record(index, false);
            assert_eq!(recursors.preferred(), index);
            recursors.record(index, true);
            assert_eq!(recursors.preferred(), next);
        }
        assert_eq!(recursors.order_from(2).collect::<Vec<_>>(), [2, 0, 1]);
    }

    #[tokio::test]
    async fn outcomes_count_against_recursors() {
        for nxdomain_is_failure in [false, true] {
            let compat = Compat {
                nxdomain_is_failure,
                ..Compat::default()
            };
            let forwarder = forwarder(&[], compat);
            for (outcome, expected) in [
                (Ok(reply(message::NOERROR, None)), false),
                (Ok(reply(message::FORMERR, None)), true),
                (Ok(reply(message::SERVFAIL, None)), true),
                (Ok(reply(message::NXDOMAIN, None)), nxdomain_is_failure),
                (Ok(reply(message::REFUSED, None)), true),
                (Err(TryError::TimedOut), true),
                (Err(TryError::Unreadable), true),
                (Err(TryError::Busy), false),
                (Err(TryError::NoSocket), false),
            ] {
                let found = forwarder.counts_as_failure(&outcome);
                assert_eq!(found, expected, "{outcome:?}");
            }
        }
    }

    #[test]
    fn denials_with_an_soa_say_most() {
        for (rcode, soa, rank) in [
            (message::NXDOMAIN, Some(1), 2),
            (message::NXDOMAIN, Some(0), 1),
            (message::NXDOMAIN, None, 1),
            (message::SERVFAIL, Some(1), 0),
            (message::REFUSED, None, 0),
        ] {
            let failure = Failure {
                validated: reply(rcode, soa),
                recursor: "r".into(),
            };
            assert_eq!(failure.rank(), rank, "{rcode} {soa:?}");
            let message = query(b"\x01A\0", 1);
            let compat = Compat::default();
            let finished = failure.finish(&parsed(&message), options(0, compat).form);
            assert_eq!(finished.failed, rank == 0);
            assert_eq!(finished.recursor.as_deref(), Some("r"));
            assert_eq!(finished.reply[12..15], *b"\x01A\0");
            assert_eq!(finished.reply[3] & 15, rcode);
            assert_eq!(finished.reply[9], u8::from(soa == Some(1)));
        }
    }

    #[test]
    fn exchange_errors_get_own_replies() {
        let message = query(b"\x01A\0", 1);
        let question = query(b"\x01a\0", 1);
        let options = options(0, Compat::default());
        // BADVERS has RCODE 16: 0 in the header, 1 in the OPT.
        let mut extended = question.clone();
        extended[2..4].copy_from_slice(&[0x81, 0x80]);
        extended[11] = 1;
        extended.extend_from_slice(b"\0\0\x29\x04\xd0\x01\0\0\0\0\x06\0\x0f\0\x02\0\x06");
        let mut questionless = question[..12].to_vec();
        questionless[2..6].copy_from_slice(&[0x81, 0x80 | message::REFUSED, 0, 0]);
        for (received, rcode, errors) in [
            (extended, message::SERVFAIL, 1),
            (questionless, message::REFUSED, 0),
        ] {
            let failure = Failure {
                validated: ValidatedReply::new(received).unwrap(),
                recursor: "r".into(),
            };
            let finished = failure.finish(&parsed(&message), options.form);
            let mut expected = message.clone();
            expected[2..4].copy_from_slice(&[0x81, 0x80 | rcode]);
            assert_eq!(finished.reply, expected);
            assert!(finished.failed && !finished.keep);
            assert_eq!(finished.errors.len(), errors);
            assert_eq!(finished.recursor.as_deref(), Some("r"));
        }
    }

    #[tokio::test]
    async fn without_recursors_there_is_no_answer() {
        let message = query(b"\x01a\0", 1);
        let query = parsed(&message);
        let mut truthful = forwarder(&[], Compat::default()).forward(&query).await;
        assert!(truthful.failed && !truthful.busy && !truthful.keep);
        let error = truthful.errors.remove(0);
        assert_eq!(
            (error.code, &*error.text),
            (22, &b"no recursor is known"[..])
        );
        assert_eq!(truthful.reply[3], 0x80 | message::SERVFAIL);
        let compat = Compat {
            nxdomain_for_failures: true,
            ..Compat::default()
        };
        let denied = forwarder(&[], compat).forward(&query).await;
        assert!(denied.failed, "so it is not remembered as an answer");
        assert_eq!(denied.reply[3] & 15, message::NXDOMAIN);
        let busy = unanswered(&query, Some(TryError::Busy));
        let text = &b"no recursor answered: too many queries in flight"[..];
        assert_eq!(&*busy.errors[0].text, text);
    }

    #[tokio::test]
    async fn first_try_skips_own_address() {
        let message = query(b"\x01a\0", 1);
        let query = parsed(&message);
        let own = crate::OwnAddresses::new(&["192.0.2.1:53".parse().unwrap()]);
        let hosts = HostNames::new(&[], own);
        let compat = Compat::default();
        let selection = RecursorSelection::Serial;
        for (names, expected) in [
            (
                &["192.0.2.1:53", "192.0.2.2:53", "192.0.2.3:53"][..],
                Some((1, "192.0.2.2:53")),
            ),
            (&["192.0.2.3:53", "192.0.2.1:53"], Some((0, "192.0.2.3:53"))),
            (&["192.0.2.1:53"], None),
            (&[], None),
        ] {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            let forwarder = Forwarder::new(&names, options(0, compat), selection, compat, &hosts);
            let found = forwarder.prepare(&query).map(|(first, prepared)| {
                assert_eq!(first.to, prepared.to());
                assert_eq!(&*first.recursor().name, &names[first.index]);
                (first.index, first.to.to_string())
            });
            let expected = expected.map(|(index, to)| (index, to.to_owned()));
            assert_eq!(found, expected, "{names:?}");
        }
        assert_eq!(forwarder(&[], compat).timeout(), options(0, compat).timeout);
    }

    /// Returns what becomes of a first try with this outcome.
    fn landed(compat: Compat, outcome: Result<Vec<u8>, TryError>) -> FirstOutcome {
        let message = query(b"\x01a\0", 1);
        let query = parsed(&message);
        let forwarder = forwarder(&["192.0.2.1:53"], compat);
        let (first, _) = forwarder.prepare(&query).unwrap();
        let question = &message[12..];
        let sent = SentQuery { id: 7, question };
        forwarder.land(&query, &first, &sent, outcome)
    }

    #[tokio::test]
    async fn whole_answers_end_first_tries() {
        let whole = reply(message::NOERROR, None).reply;
        let mut truncated = whole.clone();
        truncated[2] |= 0x02;
        let denial = reply(message::NXDOMAIN, Some(1)).reply;
        for (outcome, truthful, transparent) in [
            (Ok(whole), true, true),
            (Ok(truncated), false, true),
            (Ok(denial), false, false),
            (Ok(b"nope".to_vec()), false, false),
            (Err(TryError::TimedOut), false, false),
        ] {
            for (transparent_forwarding, expected) in [(false, truthful), (true, transparent)] {
                let compat = Compat {
                    transparent_forwarding,
                    ..Compat::default()
                };
                match landed(compat, outcome.clone()) {
                    FirstOutcome::Answer(forwarded) => {
                        assert!(expected, "{outcome:?} {compat:?}");
                        assert_eq!(forwarded.recursor.as_deref(), Some("192.0.2.1:53"));
                    }
                    FirstOutcome::Unfinished(landed) => {
                        assert!(!expected, "{outcome:?} {compat:?}");
                        // As it was sent.
                        assert_eq!(message::id(&landed.message), 7);
                    }
                }
            }
        }
    }
}
