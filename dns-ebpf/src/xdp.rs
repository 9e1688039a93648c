//! The XDP hook in the driver: replies are written straight into the packet.
//!
//! The packet has no skb yet, so it grows at its start, where growing is cheapest. A packet that
//! cannot be made long enough is passed to the network stack (`no_room`).

use aya_ebpf::{
    EbpfContext as _,
    cty::c_void,
    helpers::{bpf_xdp_adjust_head, bpf_xdp_adjust_tail},
    programs::XdpContext,
};
use dns_common::{XDP_HEAD_ROOM, scope::Interface};

use crate::{
    bytes::{barrier, barrier_and, load, store},
    filter,
    frame::{ETHERNET_LEN, HEADER_LEN, IPV6_LEN, MAX_QUESTION_LEN, UDP_LEN, VLAN_TAG_LEN},
    hook::Hook,
    maps::XDP_FORWARDED,
    question::Layout,
};

/// A packet at XDP in the driver.
pub struct Xdp {
    /// The kernel's context.
    context: XdpContext,
}

impl Xdp {
    /// Wraps the packet of `context`.
    #[inline(always)]
    pub fn new(context: XdpContext) -> Self {
        Self { context }
    }
}

impl Hook for Xdp {
    const IS_TC: bool = false;

    #[inline(always)]
    fn data(&self) -> usize {
        // Read each time, so that the verifier sees a separate pointer.
        // SAFETY: the context is the kernel's own.
        unsafe { (&raw const (*self.context.ctx).data).read_volatile() as usize }
    }

    #[inline(always)]
    fn data_end(&self) -> usize {
        // SAFETY: as in `data`.
        unsafe { (&raw const (*self.context.ctx).data_end).read_volatile() as usize }
    }

    #[inline(always)]
    fn length(&self) -> usize {
        self.data_end() - self.data()
    }

    #[inline(always)]
    fn ifindex(&self) -> u32 {
        self.context.ingress_ifindex() as u32
    }

    #[inline(always)]
    fn pull(&self, _len: usize) -> bool {
        false
    }

    #[inline(always)]
    fn is_addressed_to(&self, interface: &Interface, data: usize) -> bool {
        filter::is_to_interface(interface, data)
    }

    #[inline(always)]
    fn context(&self) -> *mut c_void {
        self.context.as_ptr()
    }

    #[inline(always)]
    fn call_forwarded(&self) {
        // SAFETY: nothing is left to drop.
        unsafe { XDP_FORWARDED.tail_call(&self.context, 0) };
    }

    /// A frame without an skb has no unfinished checksum: its reply is a new frame, which no device
    /// finishes.
    #[inline(always)]
    fn is_unfinished(&self, _offset: usize) -> Option<bool> {
        Some(false)
    }

    /// Extends the packet at its start as far as there is headroom, and by the rest at its end: the
    /// kernel zeroes bytes added at the end, which costs more than moving the question (measured).
    #[inline(always)]
    fn grow(&self, layout: &Layout) -> bool {
        let more = layout.frame_len as i32 - self.length() as i32;
        if more == 0 {
            return true;
        }
        if more < 0 {
            return self.adjust_tail(more);
        }
        let before = if more < HEAD_ROOM { more } else { HEAD_ROOM };
        let behind = more - before;
        if behind != 0 && !self.adjust_tail(behind) {
            return false;
        }
        if self.adjust_head(before) {
            self.move_forward(layout, before as usize);
            return true;
        }
        if self.adjust_tail(before) {
            return true;
        }
        // Cannot fail: it removes the bytes that were just added.
        self.adjust_tail(-behind);
        false
    }
}

impl Xdp {
    /// Adds `more` bytes at the packet's end, or removes bytes if negative. Returns false and
    /// changes nothing if there is not enough room.
    #[inline(always)]
    fn adjust_tail(&self, more: i32) -> bool {
        // SAFETY: the context is the kernel's own.
        unsafe { bpf_xdp_adjust_tail(self.context.ctx, more) == 0 }
    }

    /// Like `adjust_tail`, at the packet's start.
    #[inline(always)]
    fn adjust_head(&self, more: i32) -> bool {
        // SAFETY: as above.
        unsafe { bpf_xdp_adjust_head(self.context.ctx, -more) == 0 }
    }

    /// Moves headers and question `by` bytes towards the new start of the frame.
    #[inline(always)]
    fn move_forward(&self, layout: &Layout, by: usize) {
        let (data, end) = (self.data(), self.data_end());
        let source = data + barrier_and(by, 0xfff);
        // The bytes after the first ones are moved in pairs of words that end where the question ends,
        // so none reaches past the frame. The first pair may overlap the first bytes; it is loaded
        // before they are moved.
        let pairs = (barrier(layout.answers_offset - (FIRST_BYTES - (PAIR - 1))) / PAIR) & 0x1f;
        let rest = barrier_and(layout.answers_offset.wrapping_sub(pairs * PAIR), 0xff);
        let (from, to) = (source + rest, data + rest);
        if source + FIRST_BYTES > end
            || data + FIRST_BYTES > end
            || from + PAIR > end
            || to + PAIR > end
        {
            return;
        }
        // SAFETY: all were compared with the packet's end.
        unsafe {
            let pair: [u64; 2] = [load(from), load(from + 8)];
            let mut at = 0;
            while at < FIRST_BYTES {
                store(data + at, load::<u64>(source + at));
                at += 8;
            }
            store(to, pair[0]);
            store(to + 8, pair[1]);
        }
        let mut pair = 1;
        while pair < MOVED_PAIRS {
            let (from, to) = (from + pair * PAIR, to + pair * PAIR);
            if pair >= pairs || from + PAIR > end || to + PAIR > end {
                break;
            }
            // SAFETY: both were compared with the packet's end. They may overlap, so both words are
            // loaded first.
            unsafe {
                let words: [u64; 2] = [load(from), load(from + 8)];
                store(to, words[0]);
                store(to + 8, words[1]);
            }
            pair = barrier(pair + 1);
        }
    }
}

/// Headroom of a packet. Its tailroom is the rest of its buffer: on a veth less than 64 bytes
/// (observed on 6.18).
const HEAD_ROOM: i32 = XDP_HEAD_ROOM as i32;

/// Bytes moved regardless of the length of headers and question: whole words, fewer than the
/// shortest headers.
const FIRST_BYTES: usize = 40;

/// Bytes in two words.
const PAIR: usize = 16;

/// Pairs of words that hold the rest of the longest headers and question: Ethernet, a VLAN tag, IPv6,
/// UDP and the message up to the end of the question.
const MOVED_PAIRS: usize =
    (ETHERNET_LEN + VLAN_TAG_LEN + IPV6_LEN + UDP_LEN + HEADER_LEN + MAX_QUESTION_LEN
        - FIRST_BYTES)
        .div_ceil(PAIR);
