//! Operations that the packet core needs from the hook it runs at.

use aya_ebpf::cty::c_void;
use dns_common::{
    entry::{MAX_V4, MAX_V6},
    index::BUCKET_SLOTS,
    scope::Interface,
};

use crate::{
    bytes::{Span, barrier},
    frame::{HEADER_LEN, MAX_QUERY_LEN, MAX_QUESTION_LEN, OPT_LEN},
    question::Layout,
};

/// [`Hook::MAX_QUERY_LEN`] of the first program: a name of any length, and an OPT without options.
const MAX_FIRST_QUERY_LEN: usize = HEADER_LEN + MAX_QUESTION_LEN + OPT_LEN;

/// A packet at a hook. Addresses are valid until [`Hook::grow`] or [`Hook::pull`].
pub trait Hook {
    /// Whether this is tc: packets may be only partly readable, and each has an skb, which records
    /// whether the checksum is finished and keeps that state when the packet becomes the reply.
    const IS_TC: bool;

    /// Whether this is the program of the first moments after a start, which the verifier accepts in a tenth of the
    /// time: it follows every turn of a loop, and the rest of the program once for each result of a choice. Left to
    /// userspace are long lists, names with a policy, queries for ANY or with EDNS options, and large replies; no
    /// samples are taken.
    const IS_FIRST: bool = false;

    /// Most IPv4 addresses of a name that is answered.
    const MAX_V4: usize = if Self::IS_FIRST { 32 } else { MAX_V4 };

    /// Most IPv6 addresses of a name that is answered.
    const MAX_V6: usize = if Self::IS_FIRST { 16 } else { MAX_V6 };

    /// Most entries of a bucket that are looked at because their tags are the name's. A tag has eight bits, so a third
    /// one is rare.
    const MAX_TRIES: usize = if Self::IS_FIRST { 2 } else { BUCKET_SLOTS };

    /// Longest query that is answered, in bytes.
    const MAX_QUERY_LEN: usize = if Self::IS_FIRST {
        MAX_FIRST_QUERY_LEN
    } else {
        MAX_QUERY_LEN
    };

    /// Returns the address of the first directly readable byte.
    fn data(&self) -> usize;

    /// Returns the address after the last directly readable byte.
    fn data_end(&self) -> usize;

    /// Returns the length of the whole frame, including bytes that cannot be read directly.
    fn length(&self) -> usize;

    /// Returns the index of the receiving interface.
    fn ifindex(&self) -> u32;

    /// Makes the first `len` bytes directly readable; returns false on failure. Invalidates
    /// addresses.
    fn pull(&self, len: usize) -> bool;

    /// Returns the address of the first byte if `len` bytes can be read directly.
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

    /// Returns whether the Ethernet destination of the frame at `data` is this machine.
    fn is_addressed_to(&self, interface: &Interface, data: usize) -> bool;

    /// Returns the VLAN tag that the kernel removed from the frame.
    #[inline(always)]
    fn stripped_tag(&self) -> Option<u16> {
        None
    }

    /// Returns the kernel's context.
    fn context(&self) -> *mut c_void;

    /// Tail-calls the program that answers from forwarded answers. Returns if there is none.
    fn call_forwarded(&self);

    /// Resizes the frame to the reply's length and makes all of it writable. On failure the packet
    /// is unchanged.
    fn grow(&self, layout: &Layout) -> bool;

    /// Returns whether the checksum whose field is at `offset` is unfinished, according to the
    /// kernel; `None` if the kernel does not tell. Leaves the packet unchanged and invalidates
    /// addresses.
    fn is_unfinished(&self, offset: usize) -> Option<bool>;

    /// Returns the range from `offset` in the frame to the end of the directly accessible bytes.
    #[inline(always)]
    fn span(&self, offset: usize) -> Span {
        Span {
            start: self.data() + barrier(offset),
            end: self.data_end(),
        }
    }
}
