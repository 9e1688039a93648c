//! Types that the programs in the kernel (`ebpf/src/main.rs`) and userspace share: frames, orders and counters.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum frame size in bytes: a query for any name with an OPT over IPv6, or one with 40 bytes of options.
pub const MAX_FRAME_LEN: usize = 384;

/// Fraction bits of a time in the generator's schedule: at ten million queries a second an interval of 100 ns is exact
/// to one part in 10^8, and an hour fits into 64 bits.
pub const FRACTION_BITS: u32 = 20;

/// Buckets of a histogram for each power of two.
pub const BUCKETS_PER_DOUBLING: u64 = 128;

/// Buckets of the histogram of latencies in nanoseconds, up to 17 s. The kernel gives a value of a map per CPU at most 32 KiB.
pub const BUCKETS: usize = 28 * BUCKETS_PER_DOUBLING as usize;

/// Bits of the nanoseconds, about a millisecond, from which on the CPU of a generator was taken away: it sends its frames
/// in batches that take a tenth of that.
pub const STALL_BITS: u32 = 20;

/// Number of RCODEs in a header.
pub const RCODES: usize = 16;

/// Element of `FRAMES`: one query as sent on the wire, and what became of it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Frame {
    /// Queries sent.
    pub sent: u64,
    /// Replies in time.
    pub received: u64,
    /// Number of answers in the first reply, plus one; 0 before it.
    pub answers: u64,
    /// Length in bytes, Ethernet header included.
    pub len: u32,
    /// Whether it is an IPv6 packet.
    pub is_ipv6: u32,
    /// Sum of the IPv4 header without the part that varies (RFC 1071).
    pub header_sum: u32,
    /// Sum of pseudo-header, UDP header and message without the parts that vary.
    pub udp_sum: u32,
    /// The last 16 bits of the first source address.
    pub source: u64,
    /// The frame, zero-padded. Id, source port, the last 16 bits of the source address and the checksums are 0: the
    /// generator sets them for each query.
    pub bytes: [u64; MAX_FRAME_LEN / 8],
}

/// Element of `ORDERS`, by CPU: the load that it generates.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C, align(8))]
pub struct Orders {
    /// Number of the load; the schedule starts over when it changes.
    pub load: u64,
    /// First element of `SEQUENCE`.
    pub first: u64,
    /// Time between two queries on average, in nanoseconds times 2^[`FRACTION_BITS`]; 0: as many as possible.
    pub interval: u64,
    /// Time before the first one, so that the CPUs take turns.
    pub delay: u64,
    /// Number of queries that are due at the same moment when a rate is set, at least 1.
    pub burst: u64,
    /// Maximum number of queries that are sent late; those before them are skipped.
    pub backlog: u64,
    /// First source port.
    pub port: u64,
    /// Number of source ports.
    pub ports: u64,
    /// Number of source addresses.
    pub addresses: u64,
    /// First element of `SLOTS`.
    pub slots: u64,
    /// Its number of [`sets`], minus one.
    pub set_mask: u64,
    /// Number of elements of `SEQUENCE`, sent in this order and repeated; 0: send nothing. Userspace changes the other
    /// fields only while it is 0.
    pub length: u64,
}

/// The only element of `REPLIES`: which packets are replies to the load.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Replies {
    /// Ports of the servers.
    pub servers: [u64; 2],
    /// First source port of the first generator.
    pub port: u64,
    /// Source ports of each generator.
    pub ports: u64,
    /// Number of generators.
    pub generators: u64,
    /// The number of [`sets`] of each, minus one.
    pub set_mask: u64,
    /// Number of moments that are recorded, a power of two; 0: none.
    pub moments: u64,
    /// Bits of a moment's nanoseconds.
    pub moment_bits: u64,
}

/// Sets of 2^16 queries in flight that a generator can tell apart by id and port: the largest power of two in its
/// number of ports. With 16 of them a reply may take half a second at two million queries a second.
pub const fn sets(ports: u64) -> u64 {
    let power = 1 << ports.trailing_zeros();
    if power < 16 { power } else { 16 }
}

/// Element of `SLOTS`: a query in flight.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Slot {
    /// When the query was due; at full speed, when it was sent.
    pub time: u64,
    /// Index of its frame.
    pub frame: u32,
    /// Its source port, counted from the generator's first one, plus one; 0 if nothing is awaited.
    pub port: u32,
}

/// Element of `COUNTS`, by CPU: all loads so far.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C, align(8))]
pub struct Counts {
    /// Queries handed to the interface's driver; of `respond`, queries answered.
    pub sent: u64,
    /// Queries never sent, because the generator had no CPU when they were due.
    pub skipped: u64,
    /// Those of them that were skipped at once, because something had the CPU for as long as [`STALL_BITS`] says.
    pub stalled: u64,
    /// Replies that nothing awaits: repeated ones, and those of queries whose id has been used again.
    pub late: u64,
    /// Replies with another number of answers than the first one to the same query.
    pub different: u64,
    /// Replies by RCODE.
    pub rcodes: [u64; RCODES],
}

impl Counts {
    /// Returns the replies with any RCODE.
    pub fn received(&self) -> u64 {
        self.rcodes.iter().sum()
    }

    /// Returns the replies with RCODE NOERROR.
    pub const fn no_error(&self) -> u64 {
        self.rcodes[0]
    }

    /// Adds those of another CPU.
    pub fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.skipped += other.skipped;
        self.stalled += other.stalled;
        self.late += other.late;
        self.different += other.different;
        for (sum, more) in self.rcodes.iter_mut().zip(other.rcodes) {
            *sum += more;
        }
    }

    /// Returns the differences from an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut rcodes = self.rcodes;
        for (count, before) in rcodes.iter_mut().zip(earlier.rcodes) {
            *count -= before;
        }
        Self {
            sent: self.sent - earlier.sent,
            skipped: self.skipped - earlier.skipped,
            stalled: self.stalled - earlier.stalled,
            late: self.late - earlier.late,
            different: self.different - earlier.different,
            rcodes,
        }
    }
}

/// Returns the bucket of a latency in nanoseconds.
#[inline(always)]
pub fn bucket_of(latency: u64) -> usize {
    if latency < BUCKETS_PER_DOUBLING {
        return latency as usize;
    }
    let shift = 56 - latency.leading_zeros() as u64;
    let bucket = shift * BUCKETS_PER_DOUBLING + (latency >> shift);
    if bucket < BUCKETS as u64 {
        bucket as usize
    } else {
        BUCKETS - 1
    }
}
