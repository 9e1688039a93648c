//! Settings of the programs, in one mmap-able element. The server writes it with plain stores,
//! without system calls. Endpoints and interfaces are in [`crate::scope`].

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The single element of the `CONTROL` map.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Control {
    /// End of the lease, in nanoseconds of `CLOCK_MONOTONIC`: afterwards every query is passed to
    /// the network stack. The publisher renews it; 0 switches the fast path off.
    pub lease_deadline_ns: u64,
    /// Seed of [`crate::name::NameHasher`]. Constant for the life of the maps.
    pub hash_seed: u64,
    /// Maximum reply size, in bytes of DNS message. Queries with a longer reply are left to
    /// userspace, which knows the limit for each client. 0: limited by the client's EDNS size and
    /// the interface only.
    pub max_reply: u32,
    /// Sampling rate of the tap: one query in this many; 0: off, 1: every query.
    pub tap_every: u32,
    /// 1: last-used times are exact (`bpf_ktime_get_ns`), because health tracking evicts names by
    /// their order; 0: they have tick resolution, which is cheaper.
    pub exact_last_used: u32,
    /// Bits for the OPT of queries and replies: [`ECHO_OPT`], [`COOKIES`].
    pub edns: u32,
    /// End of load shedding, in nanoseconds of `CLOCK_MONOTONIC`. Until then the programs drop part
    /// of the queries for userspace, according to `pass_shares`. The server sets it only a short
    /// time ahead, so that shedding soon ends if the server hangs or dies.
    pub shed_until_ns: u64,
    /// End of probing, in nanoseconds of `CLOCK_MONOTONIC`. Until then probes
    /// ([`crate::scope::Probe`]) are passed to the network stack and the server reports their
    /// arrival. The server sets it a short time ahead with each report, so that at most one query
    /// per interface is lost if the server hangs, and to 0 before it stops.
    pub probe_until_ns: u64,
    /// Generation of the forwarded answers that the programs may use; 0: none. A higher number
    /// immediately invalidates all earlier answers: after a flush, and when another server may be
    /// responsible for a name.
    pub answer_generation: u64,
    /// Share of queries passed to userspace while shedding, by [`client_bucket`], as a fraction of
    /// 2^32 - 1.
    pub pass_shares: [u32; CLIENT_BUCKETS],
}

/// Bit of [`Control::edns`]: the OPT of a reply repeats the client's payload size and clears DO; otherwise it
/// announces [`crate::UDP_PAYLOAD_SIZE`] and copies DO.
pub const ECHO_OPT: u32 = 1;

/// Bit of [`Control::edns`]: queries with a cookie (RFC 7873) are left to userspace.
pub const COOKIES: u32 = 2;

/// Number of client groups with separate shares under overload, a power of two.
pub const CLIENT_BUCKETS: usize = 64;

/// Returns the group of a client by the last four bytes of its address: the part in which the
/// containers of one machine differ, both in IPv4 and in IPv6.
#[inline(always)]
pub const fn client_bucket(last_four: [u8; 4]) -> usize {
    // Fibonacci hashing: the upper bits of a product with 2^32 over the golden ratio.
    let product = u32::from_be_bytes(last_four).wrapping_mul(0x9e37_79b9);
    (product >> (u32::BITS - CLIENT_BUCKETS.ilog2())) as usize & (CLIENT_BUCKETS - 1)
}
