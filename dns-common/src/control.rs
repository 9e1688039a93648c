//! Orders of the server to the programs, in one mmap-able element: written with plain stores, no
//! system call. Endpoints and interfaces stand in [`crate::scope`].

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

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
    /// 1: last-used times are exact (`bpf_ktime_get_ns`), because their order
    /// decides which name falls out of health tracking; 0: they have the
    /// resolution of a tick, which costs less.
    pub exact_last_used: u32,
    /// 1: the OPT of a reply repeats the client's size, DO clear; 0: it announces
    /// [`crate::UDP_PAYLOAD_SIZE`] and copies DO.
    pub echo_opt: u32,
    /// Until this moment of `CLOCK_MONOTONIC` (ns) a part of what would go up is shed, as
    /// `pass_shares` says: userspace has more queries than it can answer. Short, so that
    /// a server that hangs or dies sheds nothing for long.
    pub shed_until_ns: u64,
    /// How much goes up meanwhile, for each [`client_bucket`]: so many of 2^32 - 1 queries.
    pub pass_shares: [u32; CLIENT_BUCKETS],
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
