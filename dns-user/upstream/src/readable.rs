//! A recursor's reply, looked through before anybody uses it.

use super::{
    Ask, TryError,
    forwarded::Forwarded,
    message::{self, Flags, Outline},
};

/// A recursor's reply that is a whole and sound message ([`Outline`]).
#[derive(Debug)]
pub(crate) struct Readable {
    /// The message.
    pub(crate) reply: Vec<u8>,
    /// Its sections.
    pub(crate) outline: Outline,
}

impl Readable {
    /// Walks a reply. One that is not sound is of no more use than none: clients would
    /// get it broken.
    pub(crate) fn new(reply: Vec<u8>) -> Result<Self, TryError> {
        let outline = Outline::of(&reply).ok_or(TryError::Unreadable)?;
        Ok(Self { reply, outline })
    }

    /// The RCODE, its upper bits from the OPT left out: any of them is an error,
    /// and their lower bits (BADVERS 16, BADCOOKIE 23) do not matter here.
    pub(crate) fn rcode(&self) -> u8 {
        if message::has_extended_rcode(&self.reply, &self.outline) {
            return message::SERVFAIL;
        }
        Flags::of(&self.reply).rcode()
    }

    /// The reply for the client.
    pub(crate) fn finish(self, ask: &Ask<'_>) -> Forwarded {
        let Self { mut reply, outline } = self;
        ask.finish(&mut reply, &outline);
        Forwarded { reply, outline, failed: false, keep: false }
    }
}
