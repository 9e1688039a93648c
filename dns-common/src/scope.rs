//! Scope of the programs: endpoints, VLANs and interfaces, in one mmap-able element.
//!
//! The process that attaches the programs writes it; the server never receives this map, so a
//! compromised server cannot extend it. The programs write [`Probe`]s alone.
//!
//! Reused slots are written in three steps, with an RCU grace period between them: clear the
//! word that makes the slot valid, write the rest, set that word. A program run that still reads
//! the old word ends before the rest changes; a run that reads the new word began after the rest
//! was visible to every CPU, whatever order the machine loads them in.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Most addresses and ports that are served. Queries to further ones are answered by userspace.
pub const MAX_ENDPOINTS: usize = 16;

/// Words of [`Scope::vlans`], a power of two.
pub const VLAN_WORDS: usize = 4096 / 64;

/// Slots of [`Scope::interfaces`], a power of two.
pub const INTERFACES: usize = 2048;

/// Slots that may hold an interface, from [`Scope::first_slot`] on.
pub const INTERFACE_TRIES: usize = 16;

/// Words of [`Scope::refused_sources`], a power of two.
pub const SOURCE_WORDS: usize = 1024;

/// Number of `lo` in every network namespace (`LOOPBACK_IFINDEX`, kernel 2.6.39).
pub const LOOPBACK_IFINDEX: u32 = 1;

/// The one element of the `SCOPE` map.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Scope {
    /// Slots of `endpoints` that may be in use; those behind are empty.
    pub endpoint_slots: u32,
    /// Explicit padding, zero.
    pub padding: u32,
    /// Until this moment of `CLOCK_MONOTONIC` (ns) probes are let up: the server reports what
    /// arrives. Short, so that a server that is killed loses no further queries to probes.
    pub probe_until_ns: u64,
    /// Where the server listens. An endpoint keeps its slot as long as it is served.
    pub endpoints: [Endpoint; MAX_ENDPOINTS],
    /// VLANs whose frames are answered: bit `id` of 4096.
    pub vlans: [u64; VLAN_WORDS],
    /// Hashes of the addresses that the kernel accepts from no other machine: local and
    /// broadcast addresses. Bit [`source_hash`]; a client with the hash of one of them is
    /// answered by userspace.
    pub refused_sources: [u64; SOURCE_WORDS],
    /// The interfaces that are served.
    pub interfaces: [Interface; INTERFACES],
}

/// An address and port that the server listens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Endpoint {
    /// Network order. IPv4 as `::ffff:a.b.c.d`. Never a wildcard.
    pub address: [u8; 16],
    /// Network order.
    pub port: [u8; 2],
    /// 4 or 6; 0: the slot is empty.
    pub family: u8,
    /// Explicit padding, zero.
    pub padding: [u8; 5],
}

/// An interface that is served.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Interface {
    /// Its number; 0: the slot is empty.
    pub ifindex: u32,
    /// Bits of [`NEAR`].
    pub flags: u32,
    /// Endpoints that the kernel delivers to from here: bit `index` of [`Scope::endpoints`].
    pub endpoints: u64,
    /// Its Ethernet address, and two bytes of zero.
    pub address: [u8; 8],
    /// That of the bridge or bond which it is a part of, if it is; else its own.
    pub master: [u8; 8],
    /// Queries that were let up to see whether they arrive, by endpoint.
    pub probes: [Probe; MAX_ENDPOINTS],
}

/// [`Interface::flags`]: what comes in here comes from this machine, so replies of more than
/// 1,232 bytes may be given.
pub const NEAR: u32 = 1;

/// [`Interface::flags`]: routes by it set an MTU. `bpf_fib_lookup` does not always take it into
/// account, so replies of more than 576 bytes are left to userspace.
pub const BOUNDED: u32 = 2;

/// Queries for published names that were let up to see whether the kernel delivers them.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Probe {
    /// When the next one is due, ns of `CLOCK_MONOTONIC`.
    pub due_ns: u64,
    /// How many there were. Two CPUs may count one at the same time.
    pub count: u64,
    /// Address of the client that sent the last one, network order; IPv4 as `::ffff:a.b.c.d`.
    pub client: [u8; 16],
}

/// At most one query in this many is a probe, counted by CPU, so that clients who seldom ask lose
/// hardly any to a server that was just killed. A power of two.
pub const PROBE_SHARE: u64 = 4;

/// Time between two probes, in ns.
pub const PROBE_INTERVAL_NS: u64 = 1_000_000_000;

impl Scope {
    /// Where to look for an interface first.
    #[inline(always)]
    pub const fn first_slot(ifindex: u32) -> usize {
        ifindex as usize % INTERFACES
    }

    /// Word and bit of a VLAN in [`Self::vlans`], by the tag in host order, whose priority does
    /// not count.
    #[inline(always)]
    pub const fn vlan(tag: u16) -> (usize, u64) {
        (tag as usize / 64 % VLAN_WORDS, 1 << (tag % 64))
    }

    /// Word and bit of a hash in [`Self::refused_sources`].
    #[inline(always)]
    pub const fn refused_source(hash: u32) -> (usize, u64) {
        (hash as usize / 64 % SOURCE_WORDS, 1 << (hash % 64))
    }
}

/// Hash of a sender's address, in four words as they lie in memory; IPv4 has the last one alone.
#[inline(always)]
pub const fn source_hash(words: [u32; 4]) -> u32 {
    let [a, b, c, d] = words;
    // Fibonacci hashing: the upper bits of products with odd constants.
    let sum = a
        .wrapping_mul(0x85eb_ca6b)
        .wrapping_add(b.wrapping_mul(0xc2b2_ae35))
        .wrapping_add(c.wrapping_mul(0x27d4_eb2f))
        .wrapping_add(d.wrapping_mul(0x9e37_79b9));
    sum >> 16
}
