//! Layout of forwarded answers: replies of other servers, from which the programs answer until the
//! TTL expires.
//!
//! Index and store (`ANSWER_NAMES`, `ANSWER_ENTRIES`) have the same layout as for published names
//! ([`crate::index`], [`crate::entry`]), but are separate maps, so that external names never evict
//! names of the fleet. An entry is a run of cells:
//!
//! ```text
//! AnswerHeader | name, zero-padded to 8 | body, zero-padded to 8
//! ```
//!
//! The body is everything after the question of the reply, without OPT, with every TTL zero. Each
//! reply repeats the client's question with its letter case; its length is the same, so compression
//! pointers in the body remain valid.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{UDP_PAYLOAD_SIZE, entry::padded, name::NameHasher};

/// Maximum number of records per answer. Answers with more are left to userspace.
pub const MAX_RECORDS: usize = 24;

/// Maximum length of a body: the rest of the largest reply that passes every path, after a header
/// and the shortest question.
pub const MAX_BODY_LEN: usize = UDP_PAYLOAD_SIZE as usize - 12 - 5;

/// Minimum length of a body: one record without data, owned by the root.
pub const MIN_BODY_LEN: usize = 11;

/// The parts of a query, other than its name, on which the answer depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct QueryKey(u32);

impl QueryKey {
    /// Returns the key of a query of class IN with this type, DO and CD.
    #[inline(always)]
    pub const fn new(qtype: u16, dnssec_ok: bool, checking_disabled: bool) -> Self {
        Self(qtype as u32 | (dnssec_ok as u32) << 16 | (checking_disabled as u32) << 17)
    }

    /// Returns the key of an answer, given the hash of its name ([`crate::name::hash_name`]).
    #[inline(always)]
    pub const fn hash(self, name_hash: u64) -> u64 {
        let mut hasher = NameHasher::new(name_hash);
        hasher.write(self.0 as u64);
        hasher.finish()
    }
}

/// Returns whether the programs answer queries of this type from forwarded answers. The rest is
/// left to userspace: DS, which the parent zone holds, and question and meta types (RFC 6895,
/// section 3.1).
#[inline(always)]
pub const fn is_answered(qtype: u16) -> bool {
    !matches!(qtype, 41 | 43 | 128..=255)
}

/// Header of every forwarded answer. Integers are in host byte order unless noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct AnswerHeader {
    /// Time of the last reply from this answer, as in [`crate::entry::EntryHeader::last_used_ns`].
    pub last_used_ns: u64,
    /// [`QueryKey::hash`] of the name after the header.
    pub hash: u64,
    /// Arrival of the answer, in nanoseconds of `CLOCK_BOOTTIME`, so that TTLs keep running while
    /// the machine is suspended.
    pub since_ns: u64,
    /// [`crate::control::Control::answer_generation`] when the answer was looked up. The programs
    /// ignore answers of other generations.
    pub generation: u64,
    /// Type, DO and CD of the query.
    pub key: QueryKey,
    /// TTL of all records on arrival, in seconds.
    pub ttl: u32,
    /// Time for which the answer is valid, in seconds: the TTL, or less for a negative answer.
    pub lifetime: u32,
    /// Flags and RCODE, in network order. AD is set if the answer was validated; a reply has it
    /// only for a client that sent AD or DO (RFC 6840, section 5.8).
    pub flags: [u8; 2],
    /// Numbers of records in answer, authority and additional section without OPT, in network
    /// order.
    pub counts: [[u8; 2]; 3],
    /// Length of the name after the header in bytes, root label included.
    pub name_len: u16,
    /// Length of the body in bytes, [`MIN_BODY_LEN`] to [`MAX_BODY_LEN`].
    pub body_len: u16,
    /// One's complement sum of the body in memory order, TTLs zero; for UDP checksums over IPv6.
    pub body_sum: u16,
    /// Number of offsets in `ttls`.
    pub ttl_count: u8,
    /// Number of TTLs at odd offsets.
    pub odd_ttls: u8,
    /// Padding to the next 8 bytes, always zero.
    pub padding: [u8; 4],
    /// Offsets of the TTLs from the start of the body.
    pub ttls: [u16; MAX_RECORDS],
}

impl AnswerHeader {
    /// Returns the offset of the body from the start of the entry.
    #[inline(always)]
    pub const fn body_offset(name_len: usize) -> usize {
        size_of::<Self>() + padded(name_len)
    }

    /// Returns the size of the entry in bytes, not rounded up to cells.
    #[inline(always)]
    pub const fn size(&self) -> usize {
        Self::body_offset(self.name_len as usize) + padded(self.body_len as usize)
    }
}

// The index reads the hash of any entry at the same offset.
const _: () = assert!(
    core::mem::offset_of!(AnswerHeader, hash) == core::mem::offset_of!(crate::entry::EntryHeader, hash)
        && core::mem::offset_of!(AnswerHeader, last_used_ns)
            == core::mem::offset_of!(crate::entry::EntryHeader, last_used_ns)
);

/// Nanoseconds in a second.
const SECOND_NS: u64 = 1_000_000_000;

/// Returns the TTL of the records in a reply sent `age_ns` after the answer arrived, in seconds;
/// `None` once the answer has expired. Programs and userspace share this function, so that their
/// replies are equal at the same time.
#[inline(always)]
pub const fn remaining_ttl(ttl: u32, lifetime: u32, age_ns: u64) -> Option<u32> {
    let age = age_ns / SECOND_NS;
    if age >= lifetime as u64 { None } else { Some(ttl.saturating_sub(age as u32)) }
}

/// Returns the one's complement sum of `bytes` in memory order (RFC 1071), as if they began at an
/// even offset.
pub fn ones_sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u16::from_ne_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    let mut sum: u64 = words.map(u64::from).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ttl_counts_whole_seconds() {
        assert_eq!(remaining_ttl(300, 300, 0), Some(300));
        assert_eq!(remaining_ttl(300, 300, SECOND_NS - 1), Some(300));
        assert_eq!(remaining_ttl(300, 300, SECOND_NS), Some(299));
        assert_eq!(remaining_ttl(300, 300, 300 * SECOND_NS - 1), Some(1));
        assert_eq!(remaining_ttl(300, 300, 300 * SECOND_NS), None);
        assert_eq!(remaining_ttl(300, 60, 60 * SECOND_NS), None, "a negative answer ends earlier");
        assert_eq!(remaining_ttl(5, 5, u64::MAX), None);
    }

    #[test]
    fn keys_differ_by_type_and_flags() {
        let mut hashes: Vec<u64> = Vec::new();
        for qtype in [1, 28, 65, 257, u16::MAX] {
            for (dnssec_ok, checking_disabled) in [(false, false), (false, true), (true, false), (true, true)]
            {
                hashes.push(QueryKey::new(qtype, dnssec_ok, checking_disabled).hash(7));
            }
        }
        let count = hashes.len();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), count);
    }

    proptest! {
        #[test]
        fn sums_add_up(
            first in prop::collection::vec(any::<u8>(), 0..40),
            second in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let whole: Vec<u8> = first.iter().chain(&second).copied().collect();
            let rest = ones_sum(&second);
            let rest = if first.len() % 2 == 1 { rest.swap_bytes() } else { rest };
            let parts = u32::from(ones_sum(&first)) + u32::from(rest);
            prop_assert_eq!(parts % 0xffff, u32::from(ones_sum(&whole)) % 0xffff);
        }
    }
}
