//! What the bench tells its resetting programs (`dns-ebpf/src/bin/reset.rs`).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes at the start of the packet that are written anew: Ethernet, IPv4, UDP
/// and DNS headers, rounded up to eight. A reply differs from its query in
/// these and in its length alone.
pub const HEAD_LEN: usize = (14 + 20 + 8 + 12usize).next_multiple_of(8);

/// Element of the `ORIGINAL` map: the packet before a program has run on it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Original {
    /// Bytes of the packet, at least [`HEAD_LEN`].
    pub len: u32,
    /// Explicit padding, zero.
    pub padding: u32,
    /// Its first bytes.
    pub head: [u64; HEAD_LEN / 8],
}
