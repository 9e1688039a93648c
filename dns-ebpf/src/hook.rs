//! What the packet core needs of the hook that it runs at.

use aya_ebpf::cty::c_void;
use dns_common::scope::Interface;

use crate::{
    bytes::{Span, opaque},
    plan::Plan,
};

/// A packet at a hook. Addresses are valid until [`Hook::grow`].
pub trait Hook {
    /// tc: packets may be only partly readable.
    const IS_TC: bool;

    /// There is an skb behind the packet, which says of the checksum whether it is
    /// finished, and goes on saying so when the packet has become the reply.
    const HAS_SKB: bool;

    /// Address of the first byte that can be read directly.
    fn data(&self) -> usize;

    /// Address after the last byte that can be read directly.
    fn data_end(&self) -> usize;

    /// Bytes of the whole frame, those included that cannot be read directly.
    fn length(&self) -> usize;

    /// Interface that the packet came in by.
    fn ifindex(&self) -> u32;

    /// Makes the first `len` bytes readable directly; false where that fails.
    /// Addresses taken before are void.
    fn pull(&self, len: usize) -> bool;

    /// Address of the first byte, if `len` bytes can be read directly.
    #[inline(always)]
    fn reach(&self, len: usize) -> Option<usize> {
        let data = self.data();
        if data + len <= self.data_end() {
            return Some(data);
        }
        if !Self::IS_TC || self.length() < len || !self.pull(len) {
            return None;
        }
        let data = self.data();
        (data + len <= self.data_end()).then_some(data)
    }

    /// Whether the frame, whose start is at `data`, is addressed to this machine as far as
    /// Ethernet goes.
    fn is_addressed_to(&self, interface: &Interface, data: usize) -> bool;

    /// The VLAN tag that the kernel took off the frame.
    #[inline(always)]
    fn stripped_tag(&self) -> Option<u16> {
        None
    }

    /// The kernel's context.
    fn context(&self) -> *mut c_void;

    /// Gives the frame the reply's length, all of it writable. The packet is
    /// untouched if that fails.
    fn grow(&self, plan: &Plan) -> bool;

    /// Whether the checksum whose field is at `offset` is unfinished, as the kernel
    /// knows; none: it does not tell here. The packet is left as it is, addresses
    /// taken before are void.
    #[inline(always)]
    fn is_unfinished(&self, _offset: usize) -> Option<bool> {
        None
    }

    /// From `offset` in the frame to the end of what can be read and written directly.
    #[inline(always)]
    fn span(&self, offset: usize) -> Span {
        Span { start: self.data() + opaque(offset), end: self.data_end() }
    }
}
