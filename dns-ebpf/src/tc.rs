//! The tc hook, at ingress, in two steps: a second program writes replies straight into the packet.
//!
//! For a program that writes to packets directly, the kernel copies the headers of every cloned
//! packet before the program even starts, for example of bulk TCP over `lo`. The attached program
//! therefore only reads, and tail-calls the writing program only for a datagram addressed to us.

use aya_ebpf::{
    EbpfContext as _,
    cty::c_void,
    helpers::{bpf_l4_csum_replace, bpf_redirect, bpf_skb_change_tail, bpf_skb_pull_data},
    programs::TcContext,
};
use dns_common::{counters::Outcome, scope::Interface};

use crate::{
    bytes::{barrier_and, load, store},
    filter,
    hook::Hook,
    maps::{self, Context, TC_ANSWER, TC_FORWARDED},
    pipeline,
    question::Layout,
};

/// No decision: the packet continues to the next program, or to the network stack.
pub const TC_ACT_UNSPEC: i32 = -1;
/// Verdict that drops the packet.
pub const TC_ACT_SHOT: i32 = 2;

/// Type of packets to the interface's own address (`linux/if_packet.h`).
const PACKET_HOST: u32 = 0;

/// A packet at tc, in the program of the first moments if `IS_FIRST`, see [`Hook::IS_FIRST`].
pub struct Tc<const IS_FIRST: bool = false> {
    /// The kernel's context.
    context: TcContext,
}

impl<const IS_FIRST: bool> Tc<IS_FIRST> {
    /// Wraps the packet of `context`.
    #[inline(always)]
    pub fn new(context: TcContext) -> Self {
        Self { context }
    }

    /// Tail-calls the answering program if the packet is a datagram for us. Returns if it is not,
    /// or if that program is gone together with a dead server's descriptors.
    #[inline(always)]
    pub fn tail_call_if_ours(&self) {
        let Some(context) = Context::get() else {
            return;
        };
        if let Some(frame) = pipeline::datagram(self, &context) {
            if !maps::acquire_scratch(context.scratch) {
                maps::count(Outcome::Busy as usize);
                return;
            }
            frame.save_to_scratch(context.scratch);
            // SAFETY: nothing is left to drop.
            unsafe { TC_ANSWER.tail_call(&self.context, 0) };
            maps::release_scratch(context.scratch);
            maps::count(Outcome::LeaseExpired as usize);
        }
    }

    /// Sends the packet back out of the interface it arrived on.
    #[inline(always)]
    pub fn redirect(&self) -> i32 {
        // SAFETY: the helper has no precondition.
        unsafe { bpf_redirect(self.ifindex(), 0) as i32 }
    }
}

impl<const IS_FIRST: bool> Hook for Tc<IS_FIRST> {
    const IS_TC: bool = true;
    const IS_FIRST: bool = IS_FIRST;

    #[inline(always)]
    fn data(&self) -> usize {
        // Read each time, so that the verifier sees a separate pointer.
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

    /// Compares only the bridge's address; the kernel has already compared the destination with the
    /// interface's address (`eth_type_trans`).
    #[inline(always)]
    fn is_addressed_to(&self, interface: &Interface, data: usize) -> bool {
        // SAFETY: the context is the kernel's own.
        let kind = unsafe { (*self.context.skb.skb).pkt_type };
        kind == PACKET_HOST || filter::is_to_interface(interface, data)
    }

    /// Returns the tag that the kernel (`skb_vlan_untag`) or the device removed before tc.
    #[inline(always)]
    fn stripped_tag(&self) -> Option<u16> {
        // SAFETY (both): the context is the kernel's own.
        let is_there = unsafe { (*self.context.skb.skb).vlan_present } != 0;
        is_there.then(|| unsafe { (*self.context.skb.skb).vlan_tci } as u16)
    }

    #[inline(always)]
    fn context(&self) -> *mut c_void {
        self.context.as_ptr()
    }

    /// Derives the state from the kernel's behaviour: when updating the checksum for a change of two bytes,
    /// the kernel changes a finished checksum but not an unfinished one, which will be computed from all
    /// bytes later (`inet_proto_csum_replace4`, Linux 4.1 to 6.18).
    #[inline(always)]
    fn is_unfinished(&self, offset: usize) -> Option<bool> {
        const LEN: usize = size_of::<u16>();
        let field = || {
            let at = self.data() + barrier_and(offset, 0x7f);
            (at + LEN <= self.data_end()).then_some(at)
        };
        // SAFETY (both loads and the store): just compared with the packet's end.
        let before = unsafe { load::<u16>(field()?) };
        // SAFETY: the context is the kernel's own.
        if unsafe { bpf_l4_csum_replace(self.context.skb.skb, offset as u32, 0, 1, LEN as u64) }
            != 0
        {
            return None;
        }
        let at = field()?;
        let unfinished = unsafe { load::<u16>(at) } == before;
        unsafe { store(at, before) };
        Some(unfinished)
    }

    #[inline(always)]
    fn call_forwarded(&self) {
        // SAFETY: nothing is left to drop.
        unsafe { TC_FORWARDED.tail_call(&self.context, 0) };
    }

    #[inline(always)]
    fn grow(&self, layout: &Layout) -> bool {
        // SAFETY: the context is the kernel's own.
        if unsafe { bpf_skb_change_tail(self.context.skb.skb, layout.frame_len as u32, 0) } != 0 {
            return false;
        }
        true
    }
}
