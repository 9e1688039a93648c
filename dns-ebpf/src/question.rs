//! The question of a plain query.

use dns_common::{UDP_PAYLOAD_SIZE, name::MAX_NAME_WORDS};

use crate::{
    bytes::{Zero, has, masked, opaque},
    headers::OPT_LEN,
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
    /// Merges the paths on which a loop over the name's words ends, which tell the verifier the
    /// length of the name. See [`Zero`].
    #[inline(always)]
    pub fn value_barrier(self, zero: Zero) -> Self {
        Self { name_len: zero.value_barrier(self.name_len, 0xff), ..self }
    }

    /// Returns the list that answers the query: a [`QueryKind`] as a number.
    #[inline(always)]
    pub fn kind(&self) -> usize {
        masked(self.kind, 3)
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

    /// Returns the length of the reply's OPT: [`OPT_LEN`] if the query has one, else 0.
    #[inline(always)]
    pub fn opt_len(&self) -> usize {
        // The type is 41; testing one bit of it is enough.
        opaque(masked(self.opt as usize >> 16, 1) * OPT_LEN)
    }
}

/// Type OPT, at its place in the record's first eight bytes.
const OPT_TYPE: usize = 41 << 16;

/// Lower-cased words of a name; the words after its end belong to an earlier name.
pub type Words = [u64; MAX_NAME_WORDS];
