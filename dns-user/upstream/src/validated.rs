//! A recursor's reply, validated before it is used.

use super::{
    TryError,
    forwarded::Forwarded,
    message::{self, Flags, MessageIndex},
    outgoing::Form,
};
use dns_core::wire::{ExtendedError, OPT_LEN, Query};

/// A recursor's reply that is a complete and well-formed message ([`MessageIndex`]).
#[derive(Debug)]
pub(crate) struct ValidatedReply {
    pub(crate) reply: Vec<u8>,
    pub(crate) index: MessageIndex,
}

impl ValidatedReply {
    /// Validates a reply. A malformed one is treated like a missing one, because clients would get
    /// it malformed.
    pub(crate) fn new(reply: Vec<u8>) -> Result<Self, TryError> {
        let index = MessageIndex::of(&reply).ok_or(TryError::Unreadable)?;
        Ok(Self { reply, index })
    }

    /// Validates a reply by UDP to a query with this question. A truncated one (TC) may be cut
    /// anywhere; its content is ignored (RFC 2181, section 9).
    pub(crate) fn of_datagram(reply: Vec<u8>, question: &[u8]) -> Result<Self, TryError> {
        if !Flags::of(&reply).truncated() {
            return Self::new(reply);
        }
        match MessageIndex::of(&reply) {
            Some(index) if index.questions > 0 => Ok(Self { reply, index }),
            _ => Self::new(message::truncated_reply(&reply, question)),
        }
    }

    /// Returns the RCODE. Upper bits in the OPT make it an error of the exchange with the recursor
    /// (BADVERS 16, BADCOOKIE 23), for which a client gets SERVFAIL.
    pub(crate) fn rcode(&self) -> u8 {
        if self.has_extended_rcode() {
            return message::SERVFAIL;
        }
        Flags::of(&self.reply).rcode()
    }

    /// Returns whether the RCODE has upper bits in the OPT.
    pub(crate) fn has_extended_rcode(&self) -> bool {
        message::has_extended_rcode(&self.reply, &self.index)
    }

    pub(crate) fn is_truncated(&self) -> bool {
        Flags::of(&self.reply).truncated()
    }

    /// Returns the Extended DNS Errors in the OPT.
    pub(crate) fn errors(&self) -> Vec<ExtendedError> {
        let Some(opt) = &self.index.opt else { return Vec::new() };
        // The owner of the OPT is the root.
        self.reply.get(opt.start + OPT_LEN..opt.end).map(ExtendedError::read_all).unwrap_or_default()
    }

    /// Returns the reply with the client's id and letter case and without the recursor's OPT, which
    /// concerns only this hop (RFC 6891, section 6.1.1).
    pub(crate) fn finish(self, query: &Query<'_>, form: Form) -> Forwarded {
        // With transparent forwarding, the client gets the whole OPT.
        let errors = if form.transparent { Vec::new() } else { self.errors() };
        let Self { mut reply, mut index } = self;
        reply.truncate(index.end);
        message::set_id(&mut reply, query.id);
        message::restore_case(&mut reply, &index, query);
        if !form.transparent {
            message::remove_opt(&mut reply, &mut index);
        }
        Forwarded { reply, index, failed: false, errors, keep: false, busy: false, recursor: None }
    }
}
