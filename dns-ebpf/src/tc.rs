//! The tc hook, at ingress: replies are written in scratch memory and stored
//! into the packet by the kernel.
//!
//! A program that writes to packets directly makes the kernel copy the headers
//! of every cloned packet before the program even begins, bulk TCP over `lo`
//! for one. So this one only reads directly.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_redirect, bpf_skb_change_tail, bpf_skb_pull_data, bpf_skb_store_bytes},
    programs::TcContext,
};
use dns_common::control::HANDED_ON_MARK;

use crate::{
    bytes::{load, masked, opaque, store},
    hook::{Hook, Span},
    maps::{OUT_SIZE, mtu_below, scratch},
    question::HEADER_LEN,
    reply::Plan,
};

/// Not decided here: the next program, or the stack, gets the packet.
pub const TC_ACT_UNSPEC: i32 = -1;

/// A packet at tc.
pub struct Tc {
    /// The kernel's context.
    context: TcContext,
}

impl Tc {
    /// The packet of `context`.
    #[inline(always)]
    pub fn new(context: TcContext) -> Self {
        Self { context }
    }

    /// Sends the packet out where it came in.
    #[inline(always)]
    pub fn redirect(&self) -> i32 {
        // SAFETY: the helper has no precondition.
        unsafe { bpf_redirect(self.ifindex(), 0) as i32 }
    }

    /// Whether XDP handed the packet on, see [`crate::xdp::Xdp`].
    ///
    /// Where the kernel does not drop the mark with the buffer that was too short
    /// (6.18 does, observed), it leaves with the reply. Only another second stage
    /// looks for it, and to that a reply is no query.
    #[inline(always)]
    pub fn is_handed_on(&self) -> bool {
        // SAFETY: the context is the kernel's own.
        let mark = unsafe { (&raw const (*self.context.skb.skb).data_meta).read_volatile() as usize };
        // SAFETY: just compared with the metadata's end.
        mark + size_of::<u64>() <= self.data() && unsafe { load::<u64>(mark) } == HANDED_ON_MARK
    }
}

impl Hook for Tc {
    const IS_TC: bool = true;

    #[inline(always)]
    fn data(&self) -> usize {
        // Read anew each time: an address of its own to the verifier.
        // SAFETY: the context is the kernel's own.
        unsafe { (&raw const (*self.context.skb.skb).data).read_volatile() as usize }
    }

    #[inline(always)]
    fn data_end(&self) -> usize {
        // SAFETY: as in `data`.
        unsafe { (&raw const (*self.context.skb.skb).data_end).read_volatile() as usize }
    }

    #[inline(always)]
    fn length(&self) -> usize {
        self.context.len() as usize
    }

    #[inline(always)]
    fn ifindex(&self) -> u32 {
        // SAFETY: the context is the kernel's own.
        unsafe { (*self.context.skb.skb).ifindex }
    }

    #[inline(always)]
    fn pull(&self, len: usize) -> bool {
        // SAFETY: the context is the kernel's own.
        unsafe { bpf_skb_pull_data(self.context.skb.skb, len as u32) == 0 }
    }

    #[inline(always)]
    fn mtu_below(&self, packet_len: usize) -> Option<usize> {
        mtu_below(self.context.as_ptr(), packet_len)
    }

    #[inline(always)]
    fn grow(&self, plan: &Plan) -> bool {
        // SAFETY: the context is the kernel's own.
        unsafe { bpf_skb_change_tail(self.context.skb.skb, plan.frame_len as u32, 0) == 0 }
    }

    #[inline(always)]
    fn begin(&self, len: usize) -> Option<()> {
        let (data, end) = (self.data(), self.data_end());
        let head = self.head()?;
        if data + len > end || head.start + len > head.end {
            return None;
        }
        let mut word = 0;
        while word * 8 < len {
            // The last one overlaps the one before.
            let at = if word * 8 + 8 <= len { word * 8 } else { len - 8 };
            // SAFETY: both just compared with their ends.
            unsafe { store::<u64>(head.start + at, load(data + at)) };
            word += 1;
        }
        Some(())
    }

    #[inline(always)]
    fn head(&self) -> Option<Span> {
        // SAFETY: no access yet, just the address.
        let start = unsafe { &raw mut (*scratch()?).head } as usize;
        Some(Span { start, end: start + HEAD_SIZE })
    }

    #[inline(always)]
    fn question(&self, plan: &Plan) -> Option<Span> {
        Some(Span { start: self.data() + opaque(plan.frame.message + HEADER_LEN), end: self.data_end() })
    }

    #[inline(always)]
    fn answers(&self, _plan: &Plan) -> Option<Span> {
        // SAFETY: no access yet, just the address.
        let start = unsafe { &raw mut (*scratch()?).out } as usize;
        Some(Span { start, end: start + OUT_SIZE })
    }

    #[inline(always)]
    fn finish(&self, plan: &Plan) -> Option<()> {
        let head_len = opaque(plan.frame.message + HEADER_LEN);
        if head_len > HEAD_SIZE {
            return None;
        }
        self.store(0, self.head()?.start, head_len)?;
        let answers_len = plan.frame_len - plan.answers_offset;
        if answers_len == 0 {
            return Some(());
        }
        // Older verifiers (Linux 6.1) lose that it is not zero.
        let answers_len = masked(answers_len - 1, OUT_SIZE - 1) + 1;
        self.store(plan.answers_offset, self.answers(plan)?.start, answers_len)
    }
}

impl Tc {
    /// Stores `len` bytes from `from` at `offset` of the packet.
    #[inline(always)]
    fn store(&self, offset: usize, from: usize, len: usize) -> Option<()> {
        // SAFETY: the callers' scratch memory holds `len` bytes; the verifier
        // sees to it.
        let stored = unsafe {
            bpf_skb_store_bytes(self.context.skb.skb, offset as u32, from as *const _, len as u32, 0)
        };
        (stored == 0).then_some(())
    }
}

/// Bytes of [`crate::maps::Scratch::head`].
const HEAD_SIZE: usize = 96;
