//! What the bench tells its resetting programs (`dns-ebpf/src/bin/reset.rs`).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes at the start of the packet that are written anew where a reply grows at its
/// end: Ethernet, IPv4, UDP and DNS headers, rounded up to eight. Such a reply differs
/// from its query in these and in its length alone.
pub const HEAD_LEN: usize = (14 + 20 + 8 + 12usize).next_multiple_of(8);

/// Longest packet, rounded up to eight: these headers, a name of 90 bytes, QTYPE and QCLASS.
pub const MAX_LEN: usize = (14 + 20 + 8 + 12 + 90 + 4usize).next_multiple_of(8);

/// Element of the `ORIGINAL` map: the packet before a program has run on it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Original {
    /// Bytes of the packet, [`HEAD_LEN`] to [`MAX_LEN`].
    pub len: u32,
    /// How far the program moves the start of the packet before it makes its end
    /// longer, in bytes.
    pub head_room: u32,
    /// The packet, and zeros.
    pub bytes: [u64; MAX_LEN / 8],
}
