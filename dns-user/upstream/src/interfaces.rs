//! The interfaces' copies of cached answers, as a cache sees them.
//!
//! The interfaces mirror the caches: their answers are copies of entries, count as uses of them, are
//! replaced with them and disappear with them. So clients get the same answer on either path, and
//! operators find each answer in a cache.

use std::{fmt, sync::Arc};

use dns_core::{
    name::NameRef,
    wire::{CLASS_IN, ForwardedAnswer},
};

use super::message::KeyFields;

/// A question of class IN with the flags that decide about its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedQuestion<'a> {
    /// Name of the question in lower case.
    pub name: NameRef<'a>,
    /// Type of the question.
    pub qtype: u16,
    /// DO of the query.
    pub dnssec_ok: bool,
    /// CD of the query.
    pub checking_disabled: bool,
}

impl<'a> CachedQuestion<'a> {
    /// Returns the question of a cache's entry; `None` if interfaces never answer it.
    pub(crate) fn of(fields: KeyFields<'a>) -> Option<Self> {
        let KeyFields {
            dnssec_ok,
            checking_disabled,
            qtype,
            qclass,
            name,
        } = fields;
        // 0: the cache ignores the class (`compat.cache_as_authority`).
        (qclass == CLASS_IN || qclass == 0).then(|| Self {
            name: NameRef::of_wire(name),
            qtype,
            dnssec_ok,
            checking_disabled,
        })
    }
}

/// The answers that interfaces give.
pub trait InterfaceAnswers: fmt::Debug + Send + Sync {
    /// Returns the current generation, to be read before an answer is looked up.
    fn generation(&self) -> u64;

    /// Returns whether interfaces have an answer to a question.
    fn holds(&self, question: &CachedQuestion<'_>) -> bool;

    /// Returns when an interface last gave the answer to a question, in nanoseconds of a clock that
    /// never goes back; `None` if they have none or never gave it.
    fn last_used_ns(&self, question: &CachedQuestion<'_>) -> Option<u64>;

    /// Replaces an answer by one that was looked up in `generation`.
    fn replace(&self, answer: ForwardedAnswer, generation: u64);

    /// Removes the answer to a question.
    fn remove(&self, question: &CachedQuestion<'_>);

    /// Removes all answers: interfaces no longer give any that was looked up before.
    fn clear(&self);
}

/// Interfaces that answer nothing.
#[derive(Debug)]
pub struct NoInterfaces;

impl NoInterfaces {
    /// Returns the interfaces of a source that only userspace uses.
    pub fn shared() -> Arc<dyn InterfaceAnswers> {
        Arc::new(Self)
    }
}

impl InterfaceAnswers for NoInterfaces {
    fn generation(&self) -> u64 {
        0
    }

    fn holds(&self, _question: &CachedQuestion<'_>) -> bool {
        false
    }

    fn last_used_ns(&self, _question: &CachedQuestion<'_>) -> Option<u64> {
        None
    }

    fn replace(&self, _answer: ForwardedAnswer, _generation: u64) {}

    fn remove(&self, _question: &CachedQuestion<'_>) {}

    fn clear(&self) {}
}
