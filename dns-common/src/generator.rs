//! What the benches tell their load generator, and what it counts
//! (`dns-ebpf/src/bin/generator.rs`).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Most bytes of a frame: a query for a name of 190 bytes.
pub const MAX_FRAME_LEN: usize = 248;

/// Queries leave from this port and those after it: below those that sockets choose.
pub const FIRST_PORT: u16 = 2048;

/// So many ports.
pub const PORTS: u16 = 16;

/// Element of the `FRAMES` map: a query as it goes over the wire.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Frame {
    /// Bytes of the frame, Ethernet header included.
    pub len: u64,
    /// The frame, and zeros.
    pub bytes: [u64; MAX_FRAME_LEN / 8],
}

/// Element of the `ORDERS` map: how to ask.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Orders {
    /// Number of the load: another one begins anew.
    pub load: u64,
    /// How many frames there are, asked for in this order again and again; 0: ask nothing.
    pub frames: u64,
    /// Queries a nanosecond, times 2^32; 0: as many as go.
    pub rate: u64,
    /// So many are sent together, at the rate.
    pub burst: u64,
}

impl Orders {
    /// A rate from queries a second.
    pub const fn rate_of(queries: u32) -> u64 {
        ((queries as u64) << 32) / 1_000_000_000
    }
}

/// Element of the `COUNTS` map: what was sent and what came back, in all loads so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Counts {
    /// Queries handed to the client's end.
    pub sent: u64,
    /// Queries that the rate asked for while the generator had no CPU: they were never sent.
    pub skipped: u64,
    /// Replies with RCODE NOERROR.
    pub no_error: u64,
    /// All others.
    pub other: u64,
}
