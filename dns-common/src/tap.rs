//! The tap: sampled events through the ring buffer, because tcpdump does not
//! see what XDP answers.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of the question's name that an event carries.
pub const TAP_NAME_LEN: usize = 256;

/// One query as the program saw it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct TapEvent {
    /// `CLOCK_MONOTONIC`, ns.
    pub time_ns: u64,
    /// Interface that the query came in by.
    pub ifindex: u32,
    /// Client's port, host order.
    pub client_port: u16,
    /// QTYPE, host order.
    pub query_type: u16,
    /// Client's address, network order; IPv4 as `::ffff:a.b.c.d`.
    pub client: [u8; 16],
    /// [`crate::counters::Outcome`] as a number.
    pub outcome: u8,
    /// RCODE of the reply; 0 where the query went up.
    pub rcode: u8,
    /// Answers in the reply.
    pub answers: u16,
    /// Bytes of `name` that count.
    pub name_len: u16,
    /// Explicit padding, zero.
    pub padding: u16,
    /// The question's name as sent, wire format, letter case kept.
    pub name: [u8; TAP_NAME_LEN],
}
