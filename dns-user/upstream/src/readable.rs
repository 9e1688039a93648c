//! A recursor's reply that has been checked before anything is made of it.

use super::{
    TryError,
    forwarded::Forwarded,
    message::{self, Flags, Outline},
    outgoing::Form,
};
use dns_core::wire::Query;

/// A recursor's reply that is a whole and sound message ([`Outline`]).
#[derive(Debug)]
pub(crate) struct Readable {
    pub(crate) reply: Vec<u8>,
    pub(crate) outline: Outline,
}

impl Readable {
    /// Checks a reply. One that is not sound is worth no more than none: clients would get
    /// it broken.
    pub(crate) fn new(reply: Vec<u8>) -> Result<Self, TryError> {
        let outline = Outline::of(&reply).ok_or(TryError::Unreadable)?;
        Ok(Self { reply, outline })
    }

    /// The RCODE. With upper bits in the OPT it is an error of the exchange between us and
    /// the recursor (BADVERS 16, BADCOOKIE 23), of which a client gets SERVFAIL.
    pub(crate) fn rcode(&self) -> u8 {
        if self.has_extended_rcode() {
            return message::SERVFAIL;
        }
        Flags::of(&self.reply).rcode()
    }

    /// Whether the RCODE has upper bits in the OPT.
    pub(crate) fn has_extended_rcode(&self) -> bool {
        message::has_extended_rcode(&self.reply, &self.outline)
    }

    /// TC: the reply was cut.
    pub(crate) fn is_truncated(&self) -> bool {
        Flags::of(&self.reply).truncated()
    }

    /// The reply with the client's id and letter case. The recursor's OPT was for us
    /// (RFC 6891, section 6.1.1).
    pub(crate) fn finish(self, query: &Query<'_>, form: Form) -> Forwarded {
        let Self { mut reply, mut outline } = self;
        reply.truncate(outline.end);
        message::set_id(&mut reply, query.id);
        message::restore_case(&mut reply, query);
        if !form.transparent {
            message::remove_opt(&mut reply, &mut outline);
        }
        Forwarded { reply, outline, failed: false, keep: false, busy: false }
    }
}
