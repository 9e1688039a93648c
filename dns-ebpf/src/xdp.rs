//! The XDP hook: replies are written straight into the packet.
//!
//! A packet that cannot be made long enough is handed on to the tc program behind
//! this one, where there is one: the metadata before the packet (kernel 4.15) tells
//! that program which ones are its.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_xdp_adjust_head, bpf_xdp_adjust_meta, bpf_xdp_adjust_tail},
    programs::XdpContext,
};
use dns_common::{
    control::{Control, HANDED_ON_MARK},
    counters::Outcome,
};

use crate::{
    bytes::{load, masked, opaque, store},
    hook::Hook,
    maps::mtu_below,
    question::{HEADER_LEN, MAX_QUESTION_LEN},
    reply::Plan,
};

/// A packet at XDP, native or generic.
pub struct Xdp {
    /// The kernel's context.
    context: XdpContext,
}

impl Xdp {
    /// The packet of `context`.
    #[inline(always)]
    pub fn new(context: XdpContext) -> Self {
        Self { context }
    }
}

impl Hook for Xdp {
    const IS_TC: bool = false;

    #[inline(always)]
    fn data(&self) -> usize {
        // Read anew each time: an address of its own to the verifier.
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
    fn mtu_below(&self, packet_len: usize) -> Option<usize> {
        mtu_below(self.context.as_ptr(), packet_len)
    }

    /// Behind the packet if there is room for all, before it if that is enough,
    /// otherwise at both ends.
    #[inline(always)]
    fn grow(&self, plan: &Plan) -> bool {
        let more = plan.frame_len as i32 - self.length() as i32;
        if more == 0 || self.adjust_tail(more) {
            return true;
        }
        if more < 0 {
            return false;
        }
        let before = if more < HEAD_ROOM { more } else { HEAD_ROOM };
        let behind = more - before;
        if behind != 0 && !self.adjust_tail(behind) {
            return false;
        }
        if !self.adjust_head(before) {
            // Taking back what was just given does not fail.
            self.adjust_tail(-behind);
            return false;
        }
        self.move_forward(plan, before as usize);
        true
    }

    #[inline(always)]
    fn without_room(&self, control: &Control) -> Outcome {
        let (word, bit) = Control::second_stage(self.ifindex());
        if control.second_stages[word] & bit != 0 && self.mark() {
            Outcome::HandedOn
        } else {
            Outcome::NoRoom
        }
    }
}

impl Xdp {
    /// Gives the packet `more` bytes at its end, or takes them away; false:
    /// there is no room, and nothing has changed.
    #[inline(always)]
    fn adjust_tail(&self, more: i32) -> bool {
        // SAFETY: the context is the kernel's own.
        unsafe { bpf_xdp_adjust_tail(self.context.ctx, more) == 0 }
    }

    /// The same before its start.
    #[inline(always)]
    fn adjust_head(&self, more: i32) -> bool {
        // SAFETY: as above.
        unsafe { bpf_xdp_adjust_head(self.context.ctx, -more) == 0 }
    }

    /// Puts the mark of packets that are handed on before the packet; false: the
    /// driver keeps no metadata, or there is no room for more of it.
    #[inline(always)]
    fn mark(&self) -> bool {
        const LEN: usize = size_of::<u64>();
        // SAFETY: the context is the kernel's own.
        if unsafe { bpf_xdp_adjust_meta(self.context.ctx, -(LEN as i32)) } != 0 {
            return false;
        }
        // SAFETY: as above.
        let mark = unsafe { (&raw const (*self.context.ctx).data_meta).read_volatile() as usize };
        if mark + LEN > self.data() {
            return false;
        }
        // SAFETY: just compared with the metadata's end.
        unsafe { store(mark, HANDED_ON_MARK) };
        true
    }

    /// Moves headers and question `by` bytes towards the new start of the frame.
    #[inline(always)]
    fn move_forward(&self, plan: &Plan, by: usize) {
        let (data, end) = (self.data(), self.data_end());
        let source = data + masked(by, 0xfff);
        // All words but the first end where the question ends, so that none
        // reaches past the frame. The first two may overlap: load both, then
        // store both.
        let rest = plan.answers_offset & 7;
        let (target_rest, source_rest) = (data + opaque(rest), source + opaque(rest));
        if source + 8 > end || source_rest + 8 > end || target_rest + 8 > end || data + 8 > end {
            return;
        }
        // SAFETY: all four were compared with the packet's end.
        unsafe {
            let (first, second) = (load::<u64>(source), load::<u64>(source_rest));
            store(data, first);
            store(target_rest, second);
        }
        let words = (plan.answers_offset >> 3) as u32;
        let mut word = 1;
        while word < MOVED_WORDS {
            let (from, to) = (source_rest + word * 8, target_rest + word * 8);
            if word as u32 >= words || from + 8 > end || to + 8 > end {
                break;
            }
            // SAFETY: both were compared with the packet's end.
            unsafe { store::<u64>(to, load::<u64>(from)) };
            word = opaque(word + 1);
        }
    }
}

/// Room before a packet: what drivers keep there for XDP (256 bytes,
/// `XDP_PACKET_HEADROOM`) less what the kernel keeps of it for itself (`struct
/// xdp_frame`: 40 bytes since Linux 5.18, 32 before). Behind the packet there is
/// whatever its buffer has left: on a veth 304 to 384 bytes in generic mode, less
/// than 64 in native mode (observed on 6.18).
const HEAD_ROOM: i32 = 256 - 40;

/// Words that hold the longest headers and question: Ethernet, a VLAN tag,
/// IPv6, UDP and the message up to the end of the question.
const MOVED_WORDS: usize = (14 + 4 + 40 + 8 + HEADER_LEN + MAX_QUESTION_LEN).div_ceil(8);
