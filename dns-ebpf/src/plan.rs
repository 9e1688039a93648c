//! Everything about a reply, decided before anything is written.

use dns_common::counters::Outcome;

use crate::{
    bytes::{Zero, has, masked},
    frame::Frame,
    maps::Answered,
    question::Question,
};

/// Most bytes from an entry's start to one of its lists, rounded up to a mask.
const LIST_MASK: usize = 0x1fff;

/// Everything about a reply, decided before anything is written.
#[derive(Clone, Copy)]
pub struct Plan {
    /// Where things lie in the frame.
    pub frame: Frame,
    /// What was asked.
    pub question: Question,
    /// RCODE of the reply.
    pub rcode: u8,
    /// Address of the entry's header.
    pub entry: usize,
    /// Bytes from there to the first address of the list.
    pub list: usize,
    /// Addresses in the list.
    pub available: usize,
    /// Addresses that are given.
    pub given: usize,
    /// 1 if more addresses are available than given, and the client is to be told.
    pub truncated: usize,
    /// TTL of the records as it lies in the packet.
    pub ttl: usize,
    /// 1 if nobody is said to recurse here.
    pub no_recursion: usize,
    /// All ones in 16 bits if the checksum is to be left unfinished, as the
    /// query's was; else 0. A mask, so that IPv4 needs no branch, and the verifier
    /// does not follow what comes then once more.
    pub partial: usize,
    /// Offset of the end of the question in the frame.
    pub answers_offset: usize,
    /// Bytes of DNS message in the reply.
    pub reply_len: usize,
    /// Bytes of the whole frame of the reply.
    pub frame_len: usize,
}

impl Plan {
    /// Makes one path of the many ways to a plan, see [`Zero`].
    #[inline(always)]
    pub fn launder(self, zero: Zero) -> Self {
        let reply_len = zero.launder(self.reply_len, 0x1fff);
        Self {
            rcode: zero.launder(self.rcode as usize, 0xf) as u8,
            list: zero.launder(self.list, LIST_MASK),
            available: zero.launder(self.available, 0x7ff),
            given: zero.launder(self.given, 0x7ff),
            truncated: zero.launder(self.truncated, 1),
            reply_len,
            frame_len: self.frame.message + reply_len,
            ..self
        }
    }

    /// The same with the state of the query's checksum.
    #[inline(always)]
    pub fn with_partial(self, partial: bool, zero: Zero) -> Self {
        Self { partial: zero.launder(if partial { 0xffff } else { 0 }, 0xffff), ..self }
    }

    /// Whether the checksum is to be left unfinished.
    #[inline(always)]
    pub fn is_partial(&self) -> bool {
        has(self.partial, 0xffff)
    }

    /// Address of the first address of the entry's list.
    #[inline(always)]
    pub fn addresses(&self) -> usize {
        self.entry + masked(self.list, LIST_MASK)
    }

    /// What to count.
    #[inline(always)]
    pub fn answered(&self) -> Answered {
        Answered {
            outcome: if self.truncated != 0 { Outcome::HitTruncated } else { Outcome::Hit },
            kind: self.question.kind(),
            rcode: self.rcode,
            query_len: self.frame.message_len,
            reply_len: self.reply_len,
            answers: self.given as u16,
            slot: self.frame.slot,
        }
    }
}
