//! What userspace tells the program, in one mmap-able element: written with
//! plain stores, no system call.

use crate::counters::INTERFACE_SLOTS;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Most addresses and ports that the server listens on with the fast path.
/// Queries to further ones are answered by userspace.
pub const MAX_ENDPOINTS: usize = 16;

/// The one element of the `CONTROL` map.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Control {
    /// Past this moment of `CLOCK_MONOTONIC` (ns) every query goes up. The
    /// publisher renews it; 0 switches the fast path off.
    pub lease_deadline_ns: u64,
    /// Seed of [`crate::name::NameHasher`]. Fixed for the life of the maps.
    pub hash_seed: u64,
    /// Largest reply that the program gives, in bytes of IP packet; beyond the
    /// client's own limit this bounds what one hook may send. 0: no bound but
    /// the interface's.
    pub max_reply: u32,
    /// One query in this many is sent to the tap; 0: tap off, 1: all.
    pub tap_every: u32,
    /// How many of `endpoints` count, at most [`MAX_ENDPOINTS`].
    pub endpoint_count: u32,
    /// 1: marks of use are exact (`bpf_ktime_get_ns`), because their order
    /// decides which name falls out of health tracking; 0: they have the
    /// resolution of a tick, which costs less.
    pub exact_marks: u32,
    /// Where the server listens.
    pub endpoints: [Endpoint; MAX_ENDPOINTS],
    /// Where XDP may hand packets on to the tc program behind it: bit `ifindex %
    /// INTERFACE_SLOTS` is set while that program is attached to every interface
    /// of that slot that XDP serves, all bits while programs are being attached.
    pub second_stages: [u64; INTERFACE_SLOTS / 64],
}

impl Control {
    /// Word and bit of an interface in [`Self::second_stages`].
    #[inline(always)]
    pub const fn second_stage(ifindex: u32) -> (usize, u64) {
        (ifindex as usize / 64 % (INTERFACE_SLOTS / 64), 1 << (ifindex % 64))
    }
}

/// First word of the metadata that XDP puts before a packet which it hands on to
/// the tc program behind it. Only a hint: that program looks at the packet itself
/// as if nobody had before, so nothing is gained by a mark of somebody else's.
pub const HANDED_ON_MARK: u64 = u64::from_ne_bytes(*b"bosh-dns");

/// An address and port that the server listens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Endpoint {
    /// Network order. IPv4 as `::ffff:a.b.c.d`; all zeros with `wildcard`.
    pub address: [u8; 16],
    /// Network order.
    pub port: [u8; 2],
    /// 4 or 6.
    pub family: u8,
    /// 1: any address of the family that is local to this machine. The program
    /// cannot know which are, so userspace lists them one by one instead and
    /// this stays 0; kept so that a reader of the map sees it was considered.
    pub wildcard: u8,
    /// Explicit padding, zero.
    pub padding: [u8; 4],
}
