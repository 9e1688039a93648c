//! What userspace tells the program, in one mmap-able element: written with
//! plain stores, no system call.

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
    /// Largest reply that the program gives, in bytes of DNS message: a longer one is
    /// left to userspace, which knows whom it may go to. 0: no bound but the client's
    /// and the interface's.
    pub max_reply: u32,
    /// One query in this many is sent to the tap; 0: tap off, 1: all.
    pub tap_every: u32,
    /// How many of `endpoints` count, at most [`MAX_ENDPOINTS`].
    pub endpoint_count: u32,
    /// 1: last-used times are exact (`bpf_ktime_get_ns`), because their order
    /// decides which name falls out of health tracking; 0: they have the
    /// resolution of a tick, which costs less.
    pub exact_last_used: u32,
    /// 1: the OPT of a reply repeats the client's size, DO clear; 0: it announces
    /// [`crate::UDP_PAYLOAD_SIZE`] and copies DO.
    pub echo_opt: u32,
    /// Explicit padding, zero.
    pub padding: u32,
    /// Until this moment of `CLOCK_MONOTONIC` (ns) a part of what would go up is shed, as
    /// `pass_shares` says: userspace has more queries than it can answer. Short, so that
    /// a server that hangs or dies sheds nothing for long.
    pub shed_until_ns: u64,
    /// How much goes up meanwhile, for each [`client_bucket`]: so many of 2^32 - 1 queries.
    pub pass_shares: [u32; CLIENT_BUCKETS],
    /// Where the server listens.
    pub endpoints: [Endpoint; MAX_ENDPOINTS],
    /// VLANs whose frames are answered: bit `id` of 4096.
    pub vlans: [u64; VLAN_WORDS],
    /// The interfaces that XDP serves, each at its [`Self::interface`].
    pub interfaces: [Interface; INTERFACES],
}

/// Groups of clients that are told apart under overload, a power of two.
pub const CLIENT_BUCKETS: usize = 64;

/// The group of a client, by the last four bytes of its address: what differs between the
/// containers of a machine, by IPv4 and by IPv6.
#[inline(always)]
pub const fn client_bucket(last_four: [u8; 4]) -> usize {
    // Fibonacci hashing: the upper bits of a product with 2^32 over the golden ratio.
    let product = u32::from_be_bytes(last_four).wrapping_mul(0x9e37_79b9);
    (product >> (u32::BITS - CLIENT_BUCKETS.ilog2())) as usize & (CLIENT_BUCKETS - 1)
}

/// Words of [`Control::vlans`], a power of two.
pub const VLAN_WORDS: usize = 4096 / 64;

/// Slots of [`Control::interfaces`], a power of two.
pub const INTERFACES: usize = 1024;

/// Number of `lo` in every network namespace (`LOOPBACK_IFINDEX`, kernel 2.6.39).
pub const LOOPBACK_IFINDEX: u32 = 1;

/// To whom the frames that come in by an interface may be addressed: at XDP nobody has
/// looked yet, and of a bridge's port the kernel knows it only behind tc.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Interface {
    /// Its address, and two bytes of zero.
    pub address: [u8; 8],
    /// That of the bridge or bond which it is a part of, if it is; else its own.
    pub master: [u8; 8],
    /// Its number; any other one here: what comes in by it goes up.
    pub ifindex: u32,
    /// Explicit padding, zero.
    pub padding: u32,
}

impl Control {
    /// Place of an interface among [`Self::interfaces`].
    #[inline(always)]
    pub const fn interface(ifindex: u32) -> usize {
        ifindex as usize % INTERFACES
    }

    /// Word and bit of a VLAN in [`Self::vlans`], by the tag in host order: its priority
    /// does not matter.
    #[inline(always)]
    pub const fn vlan(tag: u16) -> (usize, u64) {
        (tag as usize / 64 % VLAN_WORDS, 1 << (tag % 64))
    }
}

/// An address and port that the server listens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Endpoint {
    /// Network order. IPv4 as `::ffff:a.b.c.d`. Never a wildcard: the program cannot know
    /// which addresses are local, so userspace lists them one by one.
    pub address: [u8; 16],
    /// Network order.
    pub port: [u8; 2],
    /// 4 or 6.
    pub family: u8,
    /// Explicit padding, zero.
    pub padding: [u8; 5],
}
