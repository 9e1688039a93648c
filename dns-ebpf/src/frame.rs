//! Where things lie in a frame that is a datagram for us.

use dns_common::scope::{INTERFACES, Interface, MAX_ENDPOINTS, Scope};

use crate::{
    bytes::{Zero, has, masked, opaque},
    headers::{ETHERNET_LEN, IPV4_LEN, IPV4_SOURCE_END, IPV6_LEN, IPV6_SOURCE_END, UDP_LEN, VLAN_TAG_LEN},
    maps::Scratch,
};

/// Where things lie in a frame that is a datagram for us.
#[derive(Clone, Copy)]
pub struct Frame {
    /// 1: there is a VLAN tag before the IP header.
    pub tagged: usize,
    /// 1: IPv6 instead of IPv4.
    pub v6: usize,
    /// Offset of the DNS message.
    pub message: usize,
    /// Bytes of DNS message.
    pub message_len: usize,
    /// Slot of the endpoint that it was sent to.
    pub endpoint: usize,
    /// Slot of the interface by which it came.
    pub slot: usize,
}

impl Frame {
    /// Makes one path of the four kinds of frames, see [`Zero`].
    #[inline(always)]
    pub fn launder(self, zero: Zero) -> Self {
        let Self { tagged, v6, message, message_len, endpoint, slot } = self;
        Self {
            tagged: zero.launder(tagged, 1),
            v6: zero.launder(v6, 1),
            message: zero.launder(message, 0x7f),
            message_len: zero.launder(message_len, 0xffff),
            endpoint: zero.launder(endpoint, MAX_ENDPOINTS - 1),
            slot: zero.launder(slot, INTERFACES - 1),
        }
    }

    /// Leaves it to the program that is called next, which finds it by [`Self::kept`].
    #[inline(always)]
    pub fn keep(self, scratch: *mut Scratch) {
        let Self { tagged, v6, message, message_len, endpoint, slot } = self;
        let kept = [tagged, v6, message, message_len, endpoint, slot];
        // SAFETY: this CPU's own element.
        unsafe { (&raw mut (*scratch).frame).write_volatile(kept) };
    }

    /// The frame that the calling program kept.
    #[inline(always)]
    pub fn kept(scratch: *mut Scratch) -> Self {
        // SAFETY: this CPU's own element.
        let [tagged, v6, message, message_len, endpoint, slot] =
            unsafe { (&raw const (*scratch).frame).read_volatile() };
        Self {
            tagged: opaque(tagged) & 1,
            v6: opaque(v6) & 1,
            message: opaque(message) & 0x7f,
            message_len: opaque(message_len) & 0xffff,
            endpoint: opaque(endpoint) & (MAX_ENDPOINTS - 1),
            slot: opaque(slot) & (INTERFACES - 1),
        }
    }

    /// The interface by which it came.
    #[inline(always)]
    pub fn interface<'a>(&self, scope: &'a Scope) -> &'a Interface {
        &scope.interfaces[opaque(self.slot) & (INTERFACES - 1)]
    }

    /// Whether there is a VLAN tag before the IP header.
    #[inline(always)]
    pub fn is_tagged(&self) -> bool {
        has(self.tagged, 1)
    }

    /// Whether it is IPv6.
    #[inline(always)]
    pub fn is_v6(&self) -> bool {
        has(self.v6, 1)
    }

    /// Offset of the IP header.
    #[inline(always)]
    pub fn ip(&self) -> usize {
        ETHERNET_LEN + opaque(masked(self.tagged, 1) * VLAN_TAG_LEN)
    }

    /// Offset behind the sender's IP address.
    #[inline(always)]
    pub fn source_end(&self) -> usize {
        self.ip() + IPV4_SOURCE_END + opaque(masked(self.v6, 1) * (IPV6_SOURCE_END - IPV4_SOURCE_END))
    }

    /// Bytes of IP and UDP headers.
    #[inline(always)]
    pub fn headers_len(&self) -> usize {
        IPV4_LEN + UDP_LEN + opaque(masked(self.v6, 1) * (IPV6_LEN - IPV4_LEN))
    }
}
