//! Layout of whole answers: replies of other servers, from which the programs answer until the TTL
//! expires, and local replies that are no address lists.
//!
//! Index and store (`ANSWER_NAMES`, `ANSWER_ENTRIES`) have the same layout as for published names
//! ([`crate::index`], [`crate::entry`]), but are separate maps, so that external names never evict
//! names of the fleet. An entry is a run of cells:
//!
//! ```text
//! AnswerHeader | name, zero-padded to 8 | Variant, ... | body, zero-padded to 8 | ...
//! ```
//!
//! A body is everything after the question of the reply, without OPT, with every TTL zero. Each
//! reply repeats the client's question with its letter case; its length is the same, so compression
//! pointers in the body remain valid.
//!
//! A forwarded answer has one variant. A local reply ([`LOCAL`]) whose records userspace shuffles has
//! several, with the records in different orders, from which the programs choose at random.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{MIN_UDP_SIZE, UDP_PAYLOAD_SIZE, entry::padded, name::NameHasher};

/// Maximum number of records per answer. Answers with more are left to userspace.
// The programs add each TTL in a loop, and the verifier follows each of its turns.
pub const MAX_RECORDS: usize = 24;

/// Maximum length of a body: the rest of the largest reply that passes every path, after a header
/// and the shortest question.
// A header of 12 bytes, and the question for the root: a byte of name, type and class.
pub const MAX_BODY_LEN: usize = UDP_PAYLOAD_SIZE as usize - 12 - 5;

/// Maximum number of variants of an entry, a power of two.
pub const MAX_VARIANTS: usize = 32;

/// Maximum number of variants for a group of clients.
pub const MAX_GROUP_VARIANTS: usize = 8;

const _: () = assert!(GROUPS * MAX_GROUP_VARIANTS <= MAX_VARIANTS);

/// Maximum size of an entry in bytes: all offsets are below this power of two.
pub const MAX_ANSWER_SIZE: usize = 8192;

const _: () = assert!(MAX_ANSWER_SIZE <= crate::entry::MAX_ENTRY_SIZE);

/// [`AnswerHeader::generation`] of a local reply. It is valid whatever the generation of forwarded
/// answers; its publisher withdraws it.
// Forwarded answers count from 1, so none ever gets here.
pub const LOCAL: u64 = u64::MAX;

/// Minimum length of a body that is not empty: one record without data, owned by the root.
pub const MIN_BODY_LEN: usize = 11;

/// The parts of a query, other than its name, on which the answer depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct QueryKey(u32);

impl QueryKey {
    /// Returns the key of a query of class IN with this type, DO and CD.
    #[inline(always)]
    pub const fn new(qtype: u16, dnssec_ok: bool, checking_disabled: bool) -> Self {
        // RD is not among them: without it, userspace answers.
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

/// Returns whether the programs leave every query of this type to userspace: OPT, which cannot be queried; DS, which
/// the parent zone holds; and question and meta types but ANY (RFC 6895, section 3.1).
#[inline(always)]
pub const fn is_left_to_userspace(qtype: u16) -> bool {
    matches!(qtype, 41 | 43 | 128..=254)
}

/// Returns whether the programs answer queries of this type from forwarded answers. ANY they answer from local replies
/// only: what a recursor gives for it is any part of the name's data (RFC 8482).
#[inline(always)]
pub const fn is_answered(qtype: u16) -> bool {
    const ANY: u16 = 255;
    qtype != ANY && !is_left_to_userspace(qtype)
}

/// Header of every entry. Integers are in host byte order unless noted.
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
    /// [`crate::control::Control::answer_generation`] when the answer was looked up, or [`LOCAL`].
    /// The programs ignore forwarded answers of other generations.
    pub generation: u64,
    /// Type, DO and CD of the query.
    pub key: QueryKey,
    /// TTL of all records on arrival, in seconds. Of a local reply, whose TTLs are constant: the
    /// serial of its SOA at `since_ns`, which counts the seconds.
    pub ttl: u32,
    /// Time for which the answer is valid, in seconds: the TTL, or less for a negative answer.
    pub lifetime: u32,
    /// Length of the name after the header in bytes, root label included.
    pub name_len: u16,
    /// Number of offsets in `ttls`.
    pub ttl_count: u8,
    /// Number of TTLs at odd offsets.
    pub odd_ttls: u8,
    /// First variant and number of variants, for each group of clients ([`client_group`]).
    pub variants: [[u8; 2]; GROUPS],
    /// Smallest and largest EDNS size in bytes for which the variants of [`WIDE`] are valid.
    pub wide_limits: [u16; 2],
    /// Padding to the next 8 bytes, always zero.
    pub padding: [u8; 6],
    /// Offsets of the TTLs, or of the serial, from the start of the body.
    pub ttls: [u16; MAX_RECORDS],
}

/// [`AnswerHeader::wide_limits`] of variants that are valid for every client of the group.
pub const ANY_LIMIT: [u16; 2] = [0, u16::MAX];

/// Number of groups of clients whose replies may differ.
pub const GROUPS: usize = 3;

/// Clients without EDNS.
pub const PLAIN: usize = 0;

/// Clients with EDNS that accept no more than without it.
pub const NARROW: usize = 1;

/// Clients that accept more than [`MIN_UDP_SIZE`] bytes.
pub const WIDE: usize = 2;

/// Returns the group of a client: `opt_count` is 1 if its query has an OPT, else 0, and `limit` the
/// largest reply that it accepts, at least [`MIN_UDP_SIZE`].
#[inline(always)]
pub const fn client_group(opt_count: usize, limit: usize) -> usize {
    // Branch-free: the verifier would follow both results of a branch separately from here on.
    opt_count + (MIN_UDP_SIZE.wrapping_sub(limit) >> (usize::BITS - 1))
}

/// One form of an answer. Integers are in host byte order unless noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Variant {
    /// Flags and RCODE, in network order. AD is set if the answer was validated; a reply has it
    /// only for a client that sent AD or DO (RFC 6840, section 5.8).
    pub flags: [u8; 2],
    /// Numbers of records in answer, authority and additional section without OPT, in network
    /// order.
    pub counts: [[u8; 2]; 3],
    /// Offset of the body from the start of the entry in bytes.
    pub body_at: u16,
    /// Length of the body in bytes: 0, or [`MIN_BODY_LEN`] to [`MAX_BODY_LEN`].
    pub body_len: u16,
    /// One's complement sum of the body in memory order, TTLs zero; for UDP checksums over IPv6.
    pub body_sum: u16,
    /// Padding to the next 8 bytes, always zero.
    pub padding: [u8; 2],
}

impl AnswerHeader {
    /// Returns the offset of the first [`Variant`] from the start of the entry.
    #[inline(always)]
    pub const fn variants_offset(name_len: usize) -> usize {
        size_of::<Self>() + padded(name_len)
    }
}

// The index reads the hash of any entry at the same offset.
const _: () = assert!(
    core::mem::offset_of!(AnswerHeader, hash)
        == core::mem::offset_of!(crate::entry::EntryHeader, hash)
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
    if age >= lifetime as u64 {
        None
    } else {
        Some(ttl.saturating_sub(age as u32))
    }
}

/// Returns the number that a reply sent `age_ns` after the answer's arrival has in the fields at
/// [`AnswerHeader::ttls`]; `None` once the answer has expired. TTLs count down, the serial of a local
/// reply counts up.
#[inline(always)]
pub const fn counted(ttl: u32, lifetime: u32, generation: u64, age_ns: u64) -> Option<u32> {
    let age = age_ns / SECOND_NS;
    if age >= lifetime as u64 {
        return None;
    }
    // A mask instead of a branch, which the verifier would follow separately from here on.
    let counts_up = ((generation == LOCAL) as u32).wrapping_neg();
    let up = ttl.wrapping_add(age as u32);
    let down = ttl.saturating_sub(age as u32);
    Some(up & counts_up | down & !counts_up)
}

/// Returns the one's complement sum of `bytes` in memory order (RFC 1071), as if they began at an
/// even offset.
pub fn ones_sum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|pair| u16::from_ne_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    let mut sum: u64 = words.map(u64::from).sum();
    // Repeated, because adding the carry may carry again.
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
        assert_eq!(
            remaining_ttl(300, 60, 60 * SECOND_NS),
            None,
            "a negative answer ends earlier"
        );
        assert_eq!(remaining_ttl(5, 5, u64::MAX), None);
    }

    #[test]
    fn any_is_answered_from_local_replies_only() {
        let left = |types: &[u16]| types.iter().all(|&qtype| is_left_to_userspace(qtype));
        // OPT, DS; TKEY, TSIG, IXFR, AXFR, MAILB and MAILA among the meta types.
        assert!(left(&[41, 43, 128, 249, 250, 251, 252, 253, 254]));
        for qtype in [1, 28, 65, 127, 255, 256, 257, u16::MAX] {
            assert!(!is_left_to_userspace(qtype), "{qtype}");
            assert_eq!(is_answered(qtype), qtype != 255, "{qtype}");
        }
    }

    #[test]
    fn groups_follow_edns() {
        assert_eq!(client_group(0, MIN_UDP_SIZE), PLAIN);
        assert_eq!(client_group(1, MIN_UDP_SIZE), NARROW);
        for limit in [MIN_UDP_SIZE + 1, 1232, 4096, 65_535] {
            assert_eq!(client_group(1, limit), WIDE, "{limit}");
        }
    }

    #[test]
    fn serial_counts_up() {
        assert_eq!(counted(300, 300, 1, SECOND_NS), Some(299));
        for (generation, last) in [(1, 241), (LOCAL, 359)] {
            let at = |age_ns: u64| counted(300, 60, generation, age_ns);
            assert_eq!(at(0), Some(300));
            assert_eq!(at(60 * SECOND_NS - 1), Some(last));
            assert_eq!([at(60 * SECOND_NS), at(u64::MAX)], [None, None]);
        }
        assert_eq!(counted(5, 60, 1, 9 * SECOND_NS), Some(0), "it ends at 0");
        assert_eq!(
            counted(1_700_000_000, u32::MAX, LOCAL, 5 * SECOND_NS),
            Some(1_700_000_005)
        );
        assert_eq!(
            counted(u32::MAX, u32::MAX, LOCAL, SECOND_NS),
            Some(0),
            "modulo 2^32 (RFC 1982)"
        );
    }

    #[test]
    fn keys_differ_by_type_and_flags() {
        let mut hashes: Vec<u64> = Vec::new();
        for qtype in [1, 28, 65, 257, u16::MAX] {
            for (dnssec_ok, checking_disabled) in
                [(false, false), (false, true), (true, false), (true, true)]
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
