//! Orders and counters of the benches' load generator (`ebpf/src/generator.rs`).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum frame size in bytes: a query for a name of 190 bytes.
pub const MAX_FRAME_LEN: usize = 248;

/// First source port of the queries, below the kernel's ephemeral range.
pub const FIRST_PORT: u16 = 2048;

/// Number of source ports, from [`FIRST_PORT`] upwards.
pub const PORTS: u16 = 16;

/// Element of the `FRAMES` map: one query as sent on the wire.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Frame {
    /// Length of the frame in bytes, Ethernet header included.
    pub len: u64,
    /// The frame, zero-padded.
    pub bytes: [u64; MAX_FRAME_LEN / 8],
}

/// Element of the `ORDERS` map: the load to generate.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Orders {
    /// Number of the load; the generator starts over when it changes.
    pub load: u64,
    /// Number of frames, sent in this order and repeated; 0: send nothing.
    pub frames: u64,
    /// Rate in queries per nanosecond, times 2^32; 0: unlimited.
    pub rate: u64,
    /// Number of queries sent together when a rate is set.
    pub burst: u64,
}

impl Orders {
    /// Converts queries per second to [`Self::rate`].
    pub const fn rate_of(queries: u32) -> u64 {
        ((queries as u64) << 32) / 1_000_000_000
    }
}

/// Element of the `COUNTS` map: queries and replies of all loads so far.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C, align(8))]
pub struct Counts {
    /// Queries handed to the client's end of the veth pair.
    pub sent: u64,
    /// Queries never sent, because the generator had no CPU when they were due.
    pub skipped: u64,
    /// Replies with RCODE NOERROR.
    pub no_error: u64,
    /// Replies with any other RCODE.
    pub other: u64,
}

impl Counts {
    /// Replies with any RCODE.
    pub const fn replies(&self) -> u64 {
        self.no_error + self.other
    }
}
