//! How published names lie in the store.
//!
//! The store is an mmap-able BPF array of [`CHUNK_SIZE`]-byte chunks, handed
//! out in cells of [`CELL_SIZE`] bytes. An entry is a run of cells inside one
//! chunk:
//!
//! ```text
//! EntryHeader | name, zero-padded to 8 | [Rules] | IPv4 addresses, padded to 8 | IPv6 addresses
//! ```
//!
//! Only entries whose header says so ([`RULED`]) have [`Rules`].
//!
//! An entry lives while its header holds the hash of its name: the hash is written
//! after all the rest, and taken away when the entry is no longer to be answered
//! from. Between the two nothing changes but its `last_used_ns`. A changed answer is
//! a new entry at a new place; the old cells are used again only after an RCU grace
//! period, when no program run that began before the change can still be reading
//! them. So a reply is always made from one consistent entry, however the program
//! came to it: by the index ([`crate::index`]) or because it was there before.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::name::MAX_NAME_LEN;

/// Bytes in a cell, the unit of allocation: a cache line.
pub const CELL_SIZE: usize = 64;

/// Cells of a chunk where entries lie: 1 MiB of them.
pub const CHUNK_CELLS: u32 = 1 << 14;

/// Bytes in a chunk, one element of the store's array. The last ones are never
/// used: wherever an entry begins, the longest one fits behind it, which needs
/// no comparison to satisfy the verifier. Twice the longest one, because Linux
/// 6.1's verifier adds up lengths to more than they can be together.
pub const CHUNK_SIZE: usize = CHUNK_CELLS as usize * CELL_SIZE + 2 * MAX_ENTRY_SIZE;

/// Most IPv4 addresses that an entry holds. A name with more is not published.
pub const MAX_V4: usize = 1024;

/// Most IPv6 addresses that an entry holds. A name with more is not published.
pub const MAX_V6: usize = 256;

/// Most bytes that an entry takes up.
pub const MAX_ENTRY_SIZE: usize =
    (size_of::<EntryHeader>() + (MAX_NAME_LEN + 1) + size_of::<Rules>() + MAX_V4 * 4 + MAX_V6 * 16)
        .next_multiple_of(CELL_SIZE);

/// Most cells that a store may have, in all chunks: half a GiB.
pub const MAX_CELLS: u32 = 1 << 23;

/// Place of an entry in the store: the number of its first cell, counted
/// through all chunks. Below [`MAX_CELLS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Location(pub u32);

impl Location {
    /// Number of the chunk: index into the store's array.
    #[inline(always)]
    pub const fn chunk(self) -> u32 {
        self.0 / CHUNK_CELLS
    }

    /// Bytes from the start of the chunk.
    #[inline(always)]
    pub const fn offset(self) -> u32 {
        self.0 % CHUNK_CELLS * CELL_SIZE as u32
    }
}

/// Start of every entry. Integers are in host byte order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct EntryHeader {
    /// When the program last answered from this entry: nanoseconds of
    /// `CLOCK_MONOTONIC_COARSE` (`bpf_ktime_get_coarse_ns`, kernel 5.11), 0 for
    /// never. Written by the program, at most once a tick, so that a hot entry
    /// does not dirty its cache line at every query; at every query and exact
    /// (`CLOCK_MONOTONIC`) where [`crate::control::Control::exact_last_used`] says so.
    pub last_used_ns: u64,
    /// [`crate::name::hash_name`] of the name that follows.
    pub hash: u64,
    /// Bytes of the name that follows, root label included: 1..=255.
    pub name_len: u16,
    /// IPv4 addresses, at most [`MAX_V4`].
    pub v4_count: u16,
    /// IPv6 addresses, at most [`MAX_V6`].
    pub v6_count: u16,
    /// RCODE of replies to A and AAAA queries: NOERROR (0), FORMERR (1) or
    /// NXDOMAIN (3). With any but NOERROR both lists are empty.
    pub rcode: u8,
    /// RCODE of replies to queries of other types (never ANY, which goes up):
    /// NOERROR (0) or NXDOMAIN (3). With [`RULED`] added, the entry has [`Rules`].
    pub rcode_other: u8,
}

/// Flag in [`EntryHeader::rcode_other`]: between the name and the addresses lie [`Rules`].
pub const RULED: u8 = 0x80;

/// How the addresses of an entry are given, in the words of Consul's DNS interface; a
/// number of 64 bits in host order.
///
/// A question of another type than A and AAAA, one for a family without addresses, and one
/// with EDNS options goes up: more is said to it than nothing. [`Rules::SPARE`] bytes of
/// what the client takes stay free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Rules(pub u64);

impl Rules {
    /// Bytes that stay free (observed of Consul).
    pub const SPARE: usize = 7;
    /// Most answers that can be said for clients without EDNS.
    pub const MAX_PLAIN: u8 = 15;

    /// `ttl` in seconds; `most` addresses in a reply (0: no limit); `plain`: the same for
    /// clients that take no more than 512 bytes, of IPv4 and of IPv6 (0: no limit; at most
    /// [`Self::MAX_PLAIN`]); whether TC tells of addresses that were left out, and RA that
    /// there are recursors.
    pub const fn new(ttl: u32, most: u16, plain: [u8; 2], truncates: bool, recursion: bool) -> Self {
        let flags = (!truncates) as u64 | ((!recursion) as u64) << 1;
        let plain = (plain[0] & 15) as u64 | ((plain[1] & 15) as u64) << 4;
        Self(ttl as u64 | (most as u64) << 32 | plain << 48 | flags << 56)
    }

    /// Returns the TTL of the answers in seconds.
    #[inline(always)]
    pub const fn ttl(self) -> u32 {
        self.0 as u32
    }

    /// Most addresses in a reply; 0: no limit.
    #[inline(always)]
    pub const fn most(self) -> usize {
        (self.0 >> 32) as usize & 0xffff
    }

    /// Most addresses for clients that take no more than 512 bytes; 0: no limit.
    #[inline(always)]
    pub const fn plain(self, is_v6: bool) -> usize {
        (self.0 >> (48 + 4 * is_v6 as u32)) as usize & 15
    }

    /// 1: TC is not set, whatever was left out.
    #[inline(always)]
    pub const fn never_truncates(self) -> usize {
        (self.0 >> 56) as usize & 1
    }

    /// 1: RA is not set.
    #[inline(always)]
    pub const fn no_recursion(self) -> usize {
        (self.0 >> 57) as usize & 1
    }
}

/// Bytes that a list or name of `len` bytes takes up in an entry.
#[inline(always)]
pub const fn padded(len: usize) -> usize {
    // `next_multiple_of` would look at the remainder first: a branch on BPF.
    (len + 7) & !7
}

impl EntryHeader {
    /// Whether the entry has [`Rules`].
    #[inline(always)]
    pub const fn is_ruled(&self) -> bool {
        self.rcode_other & RULED != 0
    }

    /// Bytes from the start of the entry to its [`Rules`], if it has any.
    #[inline(always)]
    pub const fn rules_offset(&self) -> usize {
        size_of::<Self>() + padded(self.name_len as usize)
    }

    /// Bytes from the start of the entry to its IPv4 addresses (network order).
    #[inline(always)]
    pub const fn v4_offset(&self) -> usize {
        self.rules_offset() + if self.is_ruled() { size_of::<Rules>() } else { 0 }
    }

    /// Bytes from the start of the entry to its IPv6 addresses (network order).
    #[inline(always)]
    pub const fn v6_offset(&self) -> usize {
        self.v4_offset() + padded(self.v4_count as usize * 4)
    }

    /// Bytes of the whole entry, not rounded up to cells.
    #[inline(always)]
    pub const fn size(&self) -> usize {
        self.v6_offset() + self.v6_count as usize * 16
    }
}
