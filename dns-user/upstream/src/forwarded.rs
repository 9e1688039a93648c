//! The result of a query to another server.

use std::sync::Arc;

use super::message::MessageIndex;
use dns_core::wire::{ExtendedError, Query, ReplyFlags, begin_reply};

/// The result of a forwarded query.
#[derive(Debug)]
pub(crate) struct Forwarded {
    /// Reply with the client's id and letter case, not yet truncated. It contains an OPT only with
    /// transparent forwarding.
    pub(crate) reply: Vec<u8>,
    pub(crate) index: MessageIndex,
    /// Whether there is no usable answer: no recursor replied, or all replies were errors.
    pub(crate) failed: bool,
    /// Extended DNS Errors for clients: the recursor's or our own.
    pub(crate) errors: Vec<ExtendedError>,
    /// Whether the answer cache keeps the reply although it is a failure.
    pub(crate) keep: bool,
    /// Whether the query was refused because this server is overloaded, which is independent of the name.
    pub(crate) busy: bool,
    /// Name of the recursor that sent the reply; `None` for replies created here.
    pub(crate) recursor: Option<Arc<str>>,
}

impl Forwarded {
    /// Returns a reply without records, marked as a failure.
    pub(crate) fn bare(query: &Query<'_>, rcode: u8, flags: ReplyFlags) -> Self {
        Self { keep: false, ..Self::own(begin_reply(query, rcode, flags), true) }
    }

    /// Returns a reply created by this server. The answer cache keeps it even if it is a failure.
    pub(crate) fn own(reply: Vec<u8>, failed: bool) -> Self {
        let index = MessageIndex::of(&reply).unwrap_or_default();
        Self { reply, index, failed, errors: Vec::new(), keep: failed, busy: false, recursor: None }
    }
}
