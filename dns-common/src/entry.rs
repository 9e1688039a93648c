//! Layout of published names in the store.
//!
//! The store is an mmap-able BPF array of [`CHUNK_SIZE`]-byte chunks, allocated in cells of
//! [`CELL_SIZE`] bytes. An entry is a run of cells inside one chunk:
//!
//! ```text
//! EntryHeader | name, zero-padded to 8 | [AnswerPolicy] | IPv4 addresses, padded to 8 | IPv6 addresses
//! ```
//!
//! An entry has [`AnswerPolicy`] only if its header has the flag [`HAS_POLICY`].
//!
//! An entry is live while its header holds the hash of its name. The publisher writes the hash last
//! and clears it when the entry is withdrawn; between these writes only `last_used_ns` changes. A
//! changed answer is written as a new entry at another location. The old cells are reused only
//! after an RCU grace period, when no program run that began before the change can still read them.
//! A reply is therefore always built from one consistent entry, no matter when the program looked
//! it up in the index ([`crate::index`]).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::name::MAX_NAME_LEN;

/// Bytes in a cell, the unit of allocation: one cache line.
pub const CELL_SIZE: usize = 64;

/// Cells of a chunk in which entries may begin: 1 MiB.
pub const CHUNK_CELLS: u32 = 1 << 14;

/// Bytes in a chunk, one element of the store's array. The last bytes are never used: the longest
/// entry fits at any start, so the verifier accepts accesses without a comparison. The reserve is
/// twice the longest entry, because the verifier of Linux 6.1 adds up maximum lengths that cannot
/// occur together.
pub const CHUNK_SIZE: usize = CHUNK_CELLS as usize * CELL_SIZE + 2 * MAX_ENTRY_SIZE;

/// Maximum number of IPv4 addresses in an entry. Names with more are not published.
pub const MAX_V4: usize = 1024;

/// Maximum number of IPv6 addresses in an entry. Names with more are not published.
pub const MAX_V6: usize = 256;

/// Maximum size of an entry in bytes.
pub const MAX_ENTRY_SIZE: usize = (size_of::<EntryHeader>()
    // The name is padded to whole words.
    + (MAX_NAME_LEN + 1)
    + size_of::<AnswerPolicy>()
    + MAX_V4 * 4
    + MAX_V6 * 16)
    .next_multiple_of(CELL_SIZE);

/// Maximum number of cells in a store, over all chunks: 512 MiB.
pub const MAX_CELLS: u32 = 1 << 23;

/// Position of an entry in the store: the number of its first cell, counted across all chunks.
/// Below [`MAX_CELLS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Location(pub u32);

impl Location {
    /// Returns the index of the chunk in the store's array.
    #[inline(always)]
    pub const fn chunk(self) -> u32 {
        self.0 / CHUNK_CELLS
    }

    /// Returns the offset from the start of the chunk in bytes.
    #[inline(always)]
    pub const fn offset(self) -> u32 {
        self.0 % CHUNK_CELLS * CELL_SIZE as u32
    }
}

// 24 bytes without padding: a further field would cost every name eight.
/// Header of every entry. Integers are in host byte order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct EntryHeader {
    /// Time of the last answer from this entry, in nanoseconds of `CLOCK_MONOTONIC_COARSE`
    /// (`bpf_ktime_get_coarse_ns`, kernel 5.11); 0: never. The program writes it at most once per
    /// tick, so that a hot entry does not dirty its cache line on every query. With
    /// [`crate::control::Control::exact_last_used`] it is written on every query, from
    /// `CLOCK_MONOTONIC`.
    pub last_used_ns: u64,
    /// [`crate::name::hash_name`] of the name after the header.
    pub hash: u64,
    /// Length of the name after the header in bytes, root label included: 1..=255.
    pub name_len: u16,
    /// Number of IPv4 addresses, at most [`MAX_V4`].
    pub v4_count: u16,
    /// Number of IPv6 addresses, at most [`MAX_V6`].
    pub v6_count: u16,
    /// RCODE of replies to A and AAAA queries: NOERROR (0), FORMERR (1) or NXDOMAIN (3). Unless it
    /// is NOERROR, both lists are empty.
    pub rcode: u8,
    /// RCODE of replies to queries of other types, NOERROR (0) or NXDOMAIN (3), plus [`HAS_POLICY`]
    /// if the entry has [`AnswerPolicy`].
    pub rcode_other: u8,
}

/// Flag in [`EntryHeader::rcode_other`]: the entry has [`AnswerPolicy`] between name and addresses.
pub const HAS_POLICY: u8 = 0x80;

/// Reply options of an entry, as defined by Consul's DNS interface: a 64-bit number in host order.
///
/// From such an entry the program only answers A and AAAA queries without EDNS options for which it
/// has addresses. Other queries are passed to userspace, whose replies carry more than an empty
/// answer. Each reply leaves [`AnswerPolicy::SPARE`] bytes of the client's limit unused.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct AnswerPolicy(pub u64);

impl AnswerPolicy {
    /// Bytes of the client's limit left unused (observed in Consul).
    pub const SPARE: usize = 7;

    /// Encodes the options.
    ///
    /// `ttl` is in seconds. `most` limits the addresses in a reply (0: no limit); `plain` does the
    /// same for clients limited to 512 bytes, for IPv4 and IPv6 (0: no limit; at most
    /// 15). `truncates` sets TC if addresses are omitted, `recursion` sets RA.
    pub const fn new(
        ttl: u32,
        most: u16,
        plain: [u8; 2],
        truncates: bool,
        recursion: bool,
    ) -> Self {
        // Inverted, so that zero stands for the fleet's replies: TC if addresses are left out, and
        // RA.
        let flags = (!truncates) as u64 | ((!recursion) as u64) << 1;
        let plain = (plain[0] & 15) as u64 | ((plain[1] & 15) as u64) << 4;
        Self(ttl as u64 | (most as u64) << 32 | plain << 48 | flags << 56)
    }

    /// Returns the TTL of the answers in seconds.
    #[inline(always)]
    pub const fn ttl(self) -> u32 {
        self.0 as u32
    }

    /// Returns the maximum number of addresses in a reply; 0: no limit.
    #[inline(always)]
    pub const fn most(self) -> usize {
        (self.0 >> 32) as usize & 0xffff
    }

    /// Returns the maximum number of addresses for clients limited to 512 bytes; 0: no limit.
    #[inline(always)]
    pub const fn plain(self, is_v6: bool) -> usize {
        (self.0 >> (48 + 4 * is_v6 as u32)) as usize & 15
    }

    /// Returns 1 if TC stays clear even if addresses are omitted.
    #[inline(always)]
    pub const fn never_truncates(self) -> usize {
        (self.0 >> 56) as usize & 1
    }

    /// Returns 1 if RA stays clear.
    #[inline(always)]
    pub const fn no_recursion(self) -> usize {
        (self.0 >> 57) as usize & 1
    }
}

/// Returns the number of bytes that a list or name of `len` bytes occupies in an entry.
#[inline(always)]
pub const fn padded(len: usize) -> usize {
    // `next_multiple_of` would test the remainder first: a branch on BPF.
    (len + 7) & !7
}

impl EntryHeader {
    /// Returns whether the entry has [`AnswerPolicy`].
    #[inline(always)]
    pub const fn has_policy(&self) -> bool {
        self.rcode_other & HAS_POLICY != 0
    }

    /// Returns the offset of the [`AnswerPolicy`] in bytes, if the entry has one.
    #[inline(always)]
    pub const fn policy_offset(&self) -> usize {
        size_of::<Self>() + padded(self.name_len as usize)
    }

    /// Returns the offset of the IPv4 addresses in bytes (network order).
    #[inline(always)]
    pub const fn v4_offset(&self) -> usize {
        // Only names of Consul have a policy; all others save its eight bytes.
        self.policy_offset()
            + if self.has_policy() {
                size_of::<AnswerPolicy>()
            } else {
                0
            }
    }

    /// Returns the offset of the IPv6 addresses in bytes (network order).
    #[inline(always)]
    pub const fn v6_offset(&self) -> usize {
        self.v4_offset() + padded(self.v4_count as usize * 4)
    }

    /// Returns the size of the entry in bytes, not rounded up to cells.
    #[inline(always)]
    pub const fn size(&self) -> usize {
        self.v6_offset() + self.v6_count as usize * 16
    }
}
