//! Input of the programs with which a bench restores packets (`ebpf/src/reset.rs`).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes restored at the start of the packet when a reply grew at its end: Ethernet, IPv4, UDP and
/// DNS headers, rounded up to eight. Such a reply differs from its query only in these bytes and in
/// its length.
pub const HEAD_LEN: usize = (14 + 20 + 8 + 12usize).next_multiple_of(8);

/// Maximum packet length, rounded up to eight: the headers, a name of 90 bytes, QTYPE and QCLASS.
pub const MAX_LEN: usize = (14 + 20 + 8 + 12 + 90 + 4usize).next_multiple_of(8);

/// Maximum number of packets that take turns. A power of two.
pub const MAX_PACKETS: u32 = 64;

/// Element of the `TURN` map: the packet to restore next.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Turn {
    /// Number of packets restored so far.
    pub count: u32,
    /// Number of packets that take turns, a power of two, minus one.
    pub mask: u32,
    /// Length in bytes of the packet restored last; before the first run, of the input.
    pub len: u32,
}

/// Element of the `ORIGINAL` map: a packet before a program runs on it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Original {
    /// Length of the packet in bytes, [`HEAD_LEN`] to [`MAX_LEN`].
    pub len: u32,
    /// Bytes by which the program moves the start of the packet before growing its end.
    pub head_room: u32,
    /// The packet, zero-padded.
    pub bytes: [u64; MAX_LEN / 8],
}
