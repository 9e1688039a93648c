//! Asking one recursor after the other, and saying truthfully how it ended.

use std::sync::Arc;

use arc_swap::ArcSwap;

use super::{
    Ask, TryError,
    forwarded::Forwarded,
    message,
    order::RecursorOrder,
    readable::Readable,
    recursor::{Manner, Recursor, Worth},
};
use dns_core::config::{RecursorErrors, RecursorSelection};

/// A list of recursors that is asked until one answers.
#[derive(Debug)]
pub(crate) struct Forwarder {
    /// The recursors as they stand now.
    set: ArcSwap<RecursorSet>,
    /// How each is asked.
    manner: Manner,
    /// In which order.
    selection: RecursorSelection,
    /// What the client gets when all failed.
    errors: RecursorErrors,
}

/// The recursors and what their order has learned.
#[derive(Debug)]
pub(crate) struct RecursorSet {
    /// In the order of the configuration; shuffled with `smart`.
    pub(crate) recursors: Vec<Arc<Recursor>>,
    /// The order to ask in.
    pub(crate) order: RecursorOrder,
}

impl Forwarder {
    /// Asks `names` (`host:port`) in the given manner.
    pub(crate) fn new(
        names: &[String],
        manner: Manner,
        selection: RecursorSelection,
        errors: RecursorErrors,
    ) -> Self {
        let set = ArcSwap::from_pointee(RecursorSet::new(names, manner, selection, &[]));
        Self { set, manner, selection, errors }
    }

    /// Asks others from now on. Those that stay keep their sockets and counters.
    pub(crate) fn replace(&self, names: &[String]) {
        let old = self.set.load();
        let set = RecursorSet::new(names, self.manner, self.selection, &old.recursors);
        self.set.store(Arc::new(set));
    }

    /// The recursors as they stand now.
    pub(crate) fn set(&self) -> Arc<RecursorSet> {
        self.set.load_full()
    }

    /// Asks until a recursor answers with NOERROR.
    pub(crate) async fn forward(&self, ask: &Ask<'_>) -> Forwarded {
        let set = self.set.load_full();
        let mut query = ask.message.to_vec();
        let mut best: Option<Failure> = None;
        for index in set.order.order() {
            let recursor = &set.recursors[index];
            if best.is_some() && !self.is_worth_waiting(recursor, ask) {
                continue;
            }
            let outcome = recursor.ask(ask, &mut query).await;
            set.order.record(index, self.counts_as_failure(&outcome));
            match outcome {
                Ok(readable) if readable.rcode() == message::NOERROR => return readable.finish(ask),
                Ok(readable) => {
                    let failure = Failure::of(readable);
                    if best.as_ref().is_none_or(|best| failure.rank() >= best.rank()) {
                        best = Some(failure);
                    }
                }
                Err(_) => {}
            }
        }
        match (self.errors, best) {
            (RecursorErrors::Nxdomain, best) => {
                let failed = best.is_none_or(|best| best.rank() == 0);
                Forwarded { failed, keep: false, ..Forwarded::bare(ask, false, message::NXDOMAIN) }
            }
            (RecursorErrors::Truthful, Some(failure)) => failure.finish(ask),
            (RecursorErrors::Truthful, None) => {
                Forwarded { keep: false, ..Forwarded::bare(ask, true, message::SERVFAIL) }
            }
        }
    }

    /// Whether a client who has an answer already, if not NOERROR, should wait for
    /// this recursor: not for one that is silent, or every name that does not exist
    /// would take a timeout. The reference waits.
    fn is_worth_waiting(&self, recursor: &Arc<Recursor>, ask: &Ask<'_>) -> bool {
        if self.errors == RecursorErrors::Nxdomain {
            return true;
        }
        match recursor.worth() {
            Worth::Waiting => true,
            Worth::Nothing => false,
            Worth::Probing => {
                let (recursor, message) = (Arc::clone(recursor), ask.message.to_vec());
                let transport = ask.transport;
                tokio::spawn(async move {
                    if let Some(ask) = Ask::new(&message, transport) {
                        // It is the recursor who learns from this.
                        let _ = recursor.ask(&ask, &mut message.clone()).await;
                    }
                });
                false
            }
        }
    }

    /// Whether an outcome speaks against the recursor. That a name does not
    /// exist does not, but to the reference.
    fn counts_as_failure(&self, outcome: &Result<Readable, TryError>) -> bool {
        match outcome {
            Ok(readable) if readable.rcode() == message::NXDOMAIN => self.errors == RecursorErrors::Nxdomain,
            Ok(readable) => readable.rcode() != message::NOERROR,
            Err(_) => true,
        }
    }
}

impl RecursorSet {
    /// The recursors of `names`, known ones taken over.
    fn new(names: &[String], manner: Manner, selection: RecursorSelection, known: &[Arc<Recursor>]) -> Self {
        let mut recursors: Vec<Arc<Recursor>> = Vec::with_capacity(names.len());
        for name in names {
            let known = known.iter().find(|recursor| recursor.name() == name);
            recursors.push(known.map_or_else(|| Arc::new(Recursor::new(name, manner)), Arc::clone));
        }
        if selection == RecursorSelection::Smart {
            fastrand::shuffle(&mut recursors);
        }
        let order = RecursorOrder::new(selection, recursors.len());
        Self { recursors, order }
    }
}

/// A reply with an RCODE other than NOERROR.
#[derive(Debug)]
struct Failure(Readable);

impl Failure {
    /// Takes a reply whose RCODE is not NOERROR.
    fn of(readable: Readable) -> Self {
        Self(readable)
    }

    /// How much this tells a client; of equals the last counts. That the name
    /// does not exist tells most, above all with the SOA that says for how long.
    fn rank(&self) -> u8 {
        let Self(Readable { reply, outline }) = self;
        let with_soa =
            || outline.walk(reply).any(|(section, record)| section == 1 && record.rtype == message::TYPE_SOA);
        match self.0.rcode() {
            message::NXDOMAIN if with_soa() => 2,
            message::NXDOMAIN => 1,
            _ => 0,
        }
    }

    /// The reply for the client: as it came, or newly made where it does not
    /// even repeat the question.
    fn finish(self, ask: &Ask<'_>) -> Forwarded {
        let failed = self.rank() == 0;
        if self.0.outline.questions == 1 {
            return Forwarded { failed, ..self.0.finish(ask) };
        }
        let rcode = self.0.rcode();
        Forwarded { failed, keep: false, ..Forwarded::bare(ask, true, rcode) }
    }
}
