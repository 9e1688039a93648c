//! How a query to somebody else ended.

use super::{
    Ask,
    message::{self, Outline},
};

/// How a query ended.
#[derive(Debug)]
pub(crate) struct Forwarded {
    /// The reply: the client's id and letter case; no OPT was added yet, and it
    /// is not cut to size.
    pub(crate) reply: Vec<u8>,
    /// Its sections.
    pub(crate) outline: Outline,
    /// There was no usable answer: nobody answered, or only by errors.
    pub(crate) failed: bool,
    /// A failure that is kept for a while all the same.
    pub(crate) keep: bool,
}

impl Forwarded {
    /// A reply of our own without records: a failure.
    pub(crate) fn bare(ask: &Ask<'_>, recursion_available: bool, rcode: u8) -> Self {
        let reply =
            message::begin_reply(ask.message, ask.question.clone(), false, recursion_available, rcode);
        Self::own(reply, true)
    }

    /// A reply of our own making.
    pub(crate) fn own(reply: Vec<u8>, failed: bool) -> Self {
        let outline = Outline::of(&reply).unwrap_or_default();
        Self { reply, outline, failed, keep: failed }
    }
}
