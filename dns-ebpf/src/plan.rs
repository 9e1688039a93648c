//! The plan of a reply, complete before the first write.

use dns_common::counters::Outcome;

use crate::{
    bytes::{Zero, has, masked},
    frame::Frame,
    maps::Answered,
    question::Question,
};

/// Largest distance from an entry's start to one of its lists, rounded up to a mask.
const LIST_MASK: usize = 0x1fff;

/// The layout of a reply in its frame, complete before the first write.
#[derive(Clone, Copy)]
pub struct Layout {
    /// Offsets in the query's frame.
    pub frame: Frame,
    /// The parsed header and question section of the query; its OPT is used for the reply.
    pub question: Question,
    /// All ones in 16 bits if the checksum stays unfinished, as in the query; else 0. A mask, so
    /// that IPv4 needs no branch and the verifier does not follow the remaining code twice.
    pub partial: usize,
    /// Offset of the end of the question in the frame.
    pub answers_offset: usize,
    /// Length of the reply's DNS message in bytes.
    pub reply_len: usize,
    /// Length of the reply's whole frame in bytes.
    pub frame_len: usize,
}

impl Layout {
    /// Merges the paths that lead to a plan, see [`Zero`].
    #[inline(always)]
    pub fn value_barrier(self, zero: Zero) -> Self {
        let reply_len = zero.value_barrier(self.reply_len, 0x1fff);
        Self { reply_len, frame_len: self.frame.message + reply_len, ..self }
    }

    /// Returns the layout with the state of the query's checksum.
    #[inline(always)]
    pub fn with_partial(self, partial: bool, zero: Zero) -> Self {
        Self { partial: zero.value_barrier(if partial { 0xffff } else { 0 }, 0xffff), ..self }
    }

    /// Returns whether the checksum stays unfinished.
    #[inline(always)]
    pub fn is_partial(&self) -> bool {
        has(self.partial, 0xffff)
    }
}

/// The plan of a reply, complete before the first write.
#[derive(Clone, Copy)]
pub struct Plan {
    pub layout: Layout,
    /// RCODE of the reply.
    pub rcode: u8,
    /// Address of the entry's header.
    pub entry: usize,
    /// Offset of the list's first address from the entry's header.
    pub list: usize,
    /// Number of addresses in the list.
    pub available: usize,
    /// Number of addresses in the reply.
    pub given: usize,
    /// 1 if more addresses are available than given and the reply must set TC.
    pub truncated: usize,
    /// TTL of the records, in network byte order.
    pub ttl: usize,
    /// 1 if the reply must clear RA: no recursion is offered.
    pub no_recursion: usize,
}

impl Plan {
    /// Merges the paths that lead to a plan, see [`Zero`].
    #[inline(always)]
    pub fn value_barrier(self, zero: Zero) -> Self {
        Self {
            layout: self.layout.value_barrier(zero),
            rcode: zero.value_barrier(self.rcode as usize, 0xf) as u8,
            list: zero.value_barrier(self.list, LIST_MASK),
            available: zero.value_barrier(self.available, 0x7ff),
            given: zero.value_barrier(self.given, 0x7ff),
            truncated: zero.value_barrier(self.truncated, 1),
            ..self
        }
    }

    /// Returns the plan with the state of the query's checksum.
    #[inline(always)]
    pub fn with_partial(self, partial: bool, zero: Zero) -> Self {
        Self { layout: self.layout.with_partial(partial, zero), ..self }
    }

    /// Returns the address of the list's first address.
    #[inline(always)]
    pub fn addresses(&self) -> usize {
        self.entry + masked(self.list, LIST_MASK)
    }

    #[inline(always)]
    pub fn answered(&self) -> Answered {
        Answered {
            outcome: if self.truncated != 0 { Outcome::HitTruncated } else { Outcome::Hit } as usize,
            kind: self.layout.question.kind(),
            rcode: self.rcode,
            query_len: self.layout.frame.message_len,
            reply_len: self.layout.reply_len,
            answers: self.given as u16,
            slot: self.layout.frame.slot,
        }
    }
}
