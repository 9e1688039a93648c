//! The question of a plain query, and the plan of its reply, complete before the first write.

use dns_common::{
    UDP_PAYLOAD_SIZE,
    counters::{Outcome, QueryKind},
    entry::padded,
    name::MAX_NAME_WORDS,
};

use crate::{
    bytes::{Zero, barrier, barrier_and, has},
    checksum::Sum,
    frame::{A_LEN, Frame, HEADER_LEN, OPT_LEN, TYPE_CLASS_LEN},
    maps::{Answered, Scratch},
};

/// The question of a plain query.
#[derive(Clone, Copy)]
pub struct Question {
    /// First eight bytes of the header, in network byte order.
    pub header: u64,
    /// Length of the name in bytes, root label included.
    pub name_len: usize,
    /// The list that answers the query: a [`QueryKind`] as a number.
    pub kind: usize,
    /// First eight bytes of the query's OPT, all flags but DO cleared; 0 without one.
    pub opt: u64,
    /// Largest reply that the client accepts, in bytes: 512 without OPT, never less.
    pub limit: usize,
}

impl Question {
    /// Merges the paths on which a loop over the name's words ends; otherwise the verifier would
    /// keep one path per length of the name. See [`Zero`].
    #[inline(always)]
    pub fn value_barrier(self, zero: Zero) -> Self {
        Self {
            name_len: zero.value_barrier(self.name_len, 0xff),
            ..self
        }
    }

    /// Saves the question with the hash and the sum of its name for the program called next, which
    /// loads it with [`Self::load`]. The lower-cased words of the name are in the scratch space
    /// already.
    #[inline(always)]
    pub fn save_to_scratch(&self, scratch: *mut Scratch, name_hash: u64, name_sum: Sum) {
        let Self {
            header,
            name_len,
            kind,
            opt,
            limit,
        } = *self;
        let kept = [
            header,
            opt,
            name_hash,
            name_sum.raw(),
            name_len as u64,
            kind as u64,
            limit as u64,
        ];
        // SAFETY: this CPU's own element.
        unsafe { (&raw mut (*scratch).question).write_volatile(kept) };
    }

    /// Loads the question saved by the calling program, with the hash and the sum of its name.
    #[inline(always)]
    pub fn load(scratch: *mut Scratch) -> (Self, u64, Sum) {
        // SAFETY: this CPU's own element.
        let [header, opt, name_hash, name_sum, name_len, kind, limit] =
            unsafe { (&raw const (*scratch).question).read_volatile() };
        let question = Self {
            header,
            opt,
            name_len: barrier(name_len as usize) & 0xff,
            kind: barrier(kind as usize) & 3,
            limit: barrier(limit as usize) & 0xffff,
        };
        (question, name_hash, Sum::of(name_sum))
    }

    /// Returns the offset of the end of the question in the message.
    #[inline(always)]
    pub fn end(&self) -> usize {
        HEADER_LEN + self.name_len + TYPE_CLASS_LEN
    }

    /// Returns whether the query has RD set.
    #[inline(always)]
    pub fn recursion_desired(&self) -> bool {
        has(self.header as usize, RD)
    }

    /// Returns whether the query has CD set.
    #[inline(always)]
    pub fn checking_disabled(&self) -> bool {
        has(self.header as usize, CD)
    }

    /// Returns whether the query has an OPT with DO set.
    #[inline(always)]
    pub fn dnssec_ok(&self) -> bool {
        has(self.opt as usize, DO)
    }

    /// Returns a mask for the first eight bytes of the reply's header that clears AD unless the
    /// client understands it, that is, has set AD or DO (RFC 6840, section 5.8).
    #[inline(always)]
    pub fn authentic_mask(&self) -> u64 {
        if has(self.header as usize, AD) || self.dnssec_ok() {
            u64::MAX
        } else {
            !AD as u64
        }
    }

    /// Returns the list that answers the query: a [`QueryKind`] as a number.
    #[inline(always)]
    pub fn kind(&self) -> usize {
        barrier_and(self.kind, 3)
    }

    #[inline(always)]
    pub fn has_opt(&self) -> bool {
        has(self.opt as usize, OPT_TYPE)
    }

    /// Returns the first eight bytes of the reply's OPT: our size and the client's DO, or the
    /// client's size alone; 0 without OPT.
    #[inline(always)]
    pub fn reply_opt(&self, echo: u32) -> u64 {
        const SIZE: u64 = u64::from_ne_bytes([0, 0, 0, 0xff, 0xff, 0, 0, 0]);
        const DO: u64 = u64::from_ne_bytes([0, 0, 0, 0, 0, 0, 0, 0x80]);
        const OURS: u64 = {
            let [high, low] = UDP_PAYLOAD_SIZE.to_be_bytes();
            u64::from_ne_bytes([0, 0, 0, high, low, 0, 0, 0])
        };
        // Masks instead of branches, which the verifier would follow separately from here on.
        let echo = (echo as u64 & 1).wrapping_neg();
        let has_opt = (self.opt >> 16 & 1).wrapping_neg();
        self.opt & !(SIZE & !echo | DO & echo) | OURS & has_opt & !echo
    }

    /// Returns 1 if the query has an OPT, else 0. Branch-free, because the verifier would follow
    /// both results of a branch separately.
    #[inline(always)]
    pub fn opt_count(&self) -> usize {
        // The type is 41; testing one bit of it is enough.
        barrier_and(self.opt as usize >> 16, 1)
    }

    /// Returns the length of the reply's OPT: [`OPT_LEN`] if the query has one, else 0.
    #[inline(always)]
    pub fn opt_len(&self) -> usize {
        barrier(self.opt_count() * OPT_LEN)
    }
}

/// RD in the first eight bytes of a header.
const RD: usize = usize::from_ne_bytes([0, 0, 0x01, 0, 0, 0, 0, 0]);
const AD: usize = usize::from_ne_bytes([0, 0, 0, 0x20, 0, 0, 0, 0]);
const CD: usize = usize::from_ne_bytes([0, 0, 0, 0x10, 0, 0, 0, 0]);
/// DO in the first eight bytes of an OPT.
const DO: usize = usize::from_ne_bytes([0, 0, 0, 0, 0, 0, 0, 0x80]);

/// Type OPT, at its offset in the record's first eight bytes.
const OPT_TYPE: usize = 41 << 16;

/// Lower-cased words of a name; the words after its end belong to an earlier name.
pub type Words = [u64; MAX_NAME_WORDS];

/// Largest distance from an entry's start to one of its lists, rounded up to a mask.
const LIST_MASK: usize = 0x1fff;

/// The layout of a reply in its frame, complete before the first write.
#[derive(Clone, Copy)]
pub struct Layout {
    /// Offsets in the query's frame.
    pub frame: Frame,
    /// The parsed header and question section of the query.
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
        Self {
            reply_len,
            frame_len: self.frame.message + reply_len,
            ..self
        }
    }

    /// Returns the layout with the state of the query's checksum.
    #[inline(always)]
    pub fn with_partial(self, partial: bool, zero: Zero) -> Self {
        Self {
            partial: zero.value_barrier(if partial { 0xffff } else { 0 }, 0xffff),
            ..self
        }
    }

    /// Returns whether the checksum stays unfinished.
    #[inline(always)]
    pub fn is_partial(&self) -> bool {
        has(self.partial, 0xffff)
    }
}

/// Addresses of one family in an entry, and those of them that the reply gets.
#[derive(Clone, Copy)]
pub struct List {
    /// Address of the first one.
    pub addresses: usize,
    /// Their number.
    pub available: usize,
    /// Number of them in the reply.
    pub given: usize,
    /// Offset in the frame of their records.
    pub written_at: usize,
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
    /// Number of IPv6 addresses after them, in a reply to ANY.
    pub appended: usize,
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
            appended: zero.value_barrier(self.appended, 0x1ff),
            truncated: zero.value_barrier(self.truncated, 1),
            ..self
        }
    }

    /// Returns the plan with the state of the query's checksum.
    #[inline(always)]
    pub fn with_partial(self, partial: bool, zero: Zero) -> Self {
        Self {
            layout: self.layout.with_partial(partial, zero),
            ..self
        }
    }

    /// Returns the IPv4 addresses of a reply to A or ANY.
    #[inline(always)]
    pub fn v4(&self) -> List {
        List {
            addresses: self.entry + barrier_and(self.list, LIST_MASK),
            available: self.available,
            given: self.given,
            written_at: self.layout.answers_offset,
        }
    }

    /// Returns the IPv6 addresses of a reply to AAAA or ANY. Masks instead of branches, because the
    /// verifier would follow the rest of the program for each kind of query.
    #[inline(always)]
    pub fn v6(&self, zero: Zero) -> List {
        let is_only = (self.layout.question.kind() == QueryKind::Aaaa as usize) as usize;
        let only = zero.value_barrier(is_only.wrapping_neg(), usize::MAX);
        let list = self.list + barrier_and(padded(self.available * 4), !only);
        List {
            addresses: self.entry + barrier_and(list, LIST_MASK),
            available: barrier_and(self.available, only) + self.appended,
            given: barrier_and(self.given, only) + self.appended,
            written_at: self.layout.answers_offset + barrier_and(self.given * A_LEN, !only),
        }
    }

    #[inline(always)]
    pub fn answered(&self) -> Answered {
        Answered {
            outcome: if self.truncated != 0 {
                Outcome::HitTruncated
            } else {
                Outcome::Hit
            } as usize,
            kind: self.layout.question.kind(),
            rcode: self.rcode,
            query_len: self.layout.frame.message_len,
            reply_len: self.layout.reply_len,
            answers: (self.given + self.appended) as u16,
            slot: self.layout.frame.slot,
        }
    }
}
