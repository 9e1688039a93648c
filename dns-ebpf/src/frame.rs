//! Offsets within a frame that is a datagram for us; lengths of headers and records, and the numbers in them.

use dns_common::{
    name::MAX_NAME_LEN,
    scope::{INTERFACES, Interface, MAX_ENDPOINTS, Scope},
};

use crate::{
    bytes::{Zero, barrier, barrier_and, has},
    maps::Scratch,
};

/// Offsets within a frame that is a datagram for us.
#[derive(Clone, Copy)]
pub struct Frame {
    /// 1 if a VLAN tag precedes the IP header.
    pub tagged: usize,
    /// 1 for IPv6, 0 for IPv4.
    pub v6: usize,
    /// Offset of the DNS message.
    pub message: usize,
    /// Length of the DNS message in bytes.
    pub message_len: usize,
    /// Slot of the destination endpoint.
    pub endpoint: usize,
    /// Slot of the receiving interface.
    pub slot: usize,
}

impl Frame {
    /// Merges the paths of the four kinds of frames, see [`Zero`].
    #[inline(always)]
    pub fn value_barrier(self, zero: Zero) -> Self {
        let Self {
            tagged,
            v6,
            message,
            message_len,
            endpoint,
            slot,
        } = self;
        Self {
            tagged: zero.value_barrier(tagged, 1),
            v6: zero.value_barrier(v6, 1),
            message: zero.value_barrier(message, 0x7f),
            message_len: zero.value_barrier(message_len, 0xffff),
            endpoint: zero.value_barrier(endpoint, MAX_ENDPOINTS - 1),
            slot: zero.value_barrier(slot, INTERFACES - 1),
        }
    }

    /// Saves the frame for the program called next, which loads it with [`Self::load`].
    #[inline(always)]
    pub fn save_to_scratch(self, scratch: *mut Scratch) {
        // One word: each of six would pass through the stack (measured: 2 of 100 instructions of a reply).
        let kept = self.tagged
            | self.v6 << 1
            | self.endpoint << 2
            | self.message << 8
            | self.message_len << 16
            | self.slot << 32;
        // SAFETY: this CPU's own element.
        unsafe { (&raw mut (*scratch).frame).write_volatile(kept) };
    }

    /// Loads the frame saved by the calling program.
    #[inline(always)]
    pub fn load(scratch: *mut Scratch) -> Self {
        // SAFETY: this CPU's own element.
        let kept = unsafe { (&raw const (*scratch).frame).read_volatile() };
        Self {
            tagged: barrier(kept) & 1,
            v6: barrier(kept >> 1) & 1,
            endpoint: barrier(kept >> 2) & (MAX_ENDPOINTS - 1),
            message: barrier(kept >> 8) & 0x7f,
            message_len: barrier(kept >> 16) & 0xffff,
            slot: barrier(kept >> 32) & (INTERFACES - 1),
        }
    }

    /// Returns the receiving interface.
    #[inline(always)]
    pub fn interface<'a>(&self, scope: &'a Scope) -> &'a Interface {
        &scope.interfaces[barrier(self.slot) & (INTERFACES - 1)]
    }

    /// Returns whether a VLAN tag precedes the IP header.
    #[inline(always)]
    pub fn is_tagged(&self) -> bool {
        has(self.tagged, 1)
    }

    #[inline(always)]
    pub fn is_v6(&self) -> bool {
        has(self.v6, 1)
    }

    /// Returns the offset of the IP header.
    #[inline(always)]
    pub fn ip(&self) -> usize {
        ETHERNET_LEN + barrier(barrier_and(self.tagged, 1) * VLAN_TAG_LEN)
    }

    /// Returns the offset of the byte after the sender's IP address.
    #[inline(always)]
    pub fn source_end(&self) -> usize {
        self.ip()
            + IPV4_SOURCE_END
            + barrier(barrier_and(self.v6, 1) * (IPV6_SOURCE_END - IPV4_SOURCE_END))
    }

    /// Returns the length of the IP and UDP headers.
    #[inline(always)]
    pub fn headers_len(&self) -> usize {
        IPV4_LEN + UDP_LEN + barrier(barrier_and(self.v6, 1) * (IPV6_LEN - IPV4_LEN))
    }
}

/// Bytes of an Ethernet header.
pub const ETHERNET_LEN: usize = 14;
/// Bytes of one 802.1Q tag.
pub const VLAN_TAG_LEN: usize = 4;
/// Bytes of an IPv4 header without options.
pub const IPV4_LEN: usize = 20;
/// Offset of the byte after the sender's address in an IPv4 header.
pub const IPV4_SOURCE_END: usize = 16;
/// Bytes of an IPv6 header.
pub const IPV6_LEN: usize = 40;
/// Offset of the byte after the sender's address in an IPv6 header.
pub const IPV6_SOURCE_END: usize = 24;
/// Protocol number of UDP.
pub const UDP: u8 = 17;
/// Bytes of a UDP header.
pub const UDP_LEN: usize = 8;
/// Offset of the checksum in a UDP header.
pub const UDP_SUM: usize = 6;

/// Bytes of a DNS header.
pub const HEADER_LEN: usize = 12;
/// Bytes of QTYPE and QCLASS.
pub const TYPE_CLASS_LEN: usize = 4;
/// Longest question section: a name of maximum length, type and class.
pub const MAX_QUESTION_LEN: usize = MAX_NAME_LEN + TYPE_CLASS_LEN;
/// Bytes of an OPT record without options (RFC 6891, section 6.1.2).
pub const OPT_LEN: usize = 11;
/// Longest query that is parsed; only a query with very many EDNS options is longer.
pub const MAX_QUERY_LEN: usize = 1500;

/// Bytes of an A record whose owner is a pointer to the question's name.
pub const A_LEN: usize = 16;
/// Bytes of an AAAA record whose owner is a pointer to the question's name.
pub const AAAA_LEN: usize = 28;
/// Longest message sent by the programs, in bytes. Longer replies, for clients that accept them,
/// are left to userspace.
pub const MAX_REPLY_LEN: usize = 4096;
