//! The question of a plain query.

use dns_common::{UDP_PAYLOAD_SIZE, name::MAX_NAME_WORDS};

use crate::{
    bytes::{Zero, has, masked, opaque},
    headers::OPT_LEN,
};

/// The question of a plain query.
#[derive(Clone, Copy)]
pub struct Question {
    /// First eight bytes of the header as they lie in memory.
    pub header: u64,
    /// Bytes of the name, root label included.
    pub name_len: usize,
    /// Which list answers it: a [`QueryKind`] as a number.
    pub kind: usize,
    /// First eight bytes of the query's OPT, all flags but DO cleared; 0 without one.
    pub opt: u64,
    /// The client's size for replies: 512 without OPT, never less.
    pub limit: usize,
}

impl Question {
    /// Makes one path of the many that a loop over the name's words ends with: how it ended
    /// told the verifier how long the name is. See [`Zero`].
    #[inline(always)]
    pub fn launder(self, zero: Zero) -> Self {
        Self { name_len: zero.launder(self.name_len, 0xff), ..self }
    }

    /// Which list answers it: a [`QueryKind`] as a number.
    #[inline(always)]
    pub fn kind(&self) -> usize {
        masked(self.kind, 3)
    }

    /// Whether the query has an OPT.
    #[inline(always)]
    pub fn has_opt(&self) -> bool {
        has(self.opt as usize, OPT_TYPE)
    }

    /// First eight bytes of the reply's OPT: our size and the client's DO, or the client's
    /// size alone; 0 without one.
    #[inline(always)]
    pub fn reply_opt(&self, echo: u32) -> u64 {
        const SIZE: u64 = u64::from_ne_bytes([0, 0, 0, 0xff, 0xff, 0, 0, 0]);
        const DO: u64 = u64::from_ne_bytes([0, 0, 0, 0, 0, 0, 0, 0x80]);
        const OURS: u64 = {
            let [high, low] = UDP_PAYLOAD_SIZE.to_be_bytes();
            u64::from_ne_bytes([0, 0, 0, high, low, 0, 0, 0])
        };
        // Masks in place of branches, which the verifier would follow apart from here on.
        let echo = (echo as u64 & 1).wrapping_neg();
        let has_opt = (self.opt >> 16 & 1).wrapping_neg();
        self.opt & !(SIZE & !echo | DO & echo) | OURS & has_opt & !echo
    }

    /// Bytes of the reply's OPT: [`OPT_LEN`] if the query has one, else none.
    #[inline(always)]
    pub fn opt_len(&self) -> usize {
        // 41, of which one bit will do.
        opaque(masked(self.opt as usize >> 16, 1) * OPT_LEN)
    }
}

/// The type of the OPT among its first eight bytes.
const OPT_TYPE: usize = 41 << 16;

/// Lower-cased words of a name; those past its end are of an earlier one.
pub type Words = [u64; MAX_NAME_WORDS];
