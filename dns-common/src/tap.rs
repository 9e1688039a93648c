//! The tap: sampled events through a ring buffer, because tcpdump does not see packets answered at
//! XDP.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes reserved in an event for the question's name.
// The longest name (255 bytes), in whole words, which the programs copy.
pub const TAP_NAME_LEN: usize = 256;

/// One query as seen by the program.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct TapEvent {
    /// Time of the query, in nanoseconds of `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    /// Index of the interface that received the query.
    pub ifindex: u32,
    /// Client's port, host order.
    pub client_port: u16,
    /// QTYPE in host byte order.
    pub query_type: u16,
    /// Client's address, network order; IPv4 as `::ffff:a.b.c.d`.
    pub client: [u8; 16],
    /// [`crate::counters::Outcome`] as a number.
    pub outcome: u8,
    /// RCODE of the reply; 0 if the query was passed to the network stack.
    pub rcode: u8,
    /// Answers in the reply.
    pub answers: u16,
    /// Number of bytes used in `name`.
    pub name_len: u16,
    // Padding that the compiler adds would show readers what the buffer held before.
    /// Padding to the next 4 bytes, always zero.
    pub padding: u16,
    /// Question's name in wire format, letter case as sent.
    pub name: [u8; TAP_NAME_LEN],
}
