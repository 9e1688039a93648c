//! For the bench of the programs alone, never part of the server: makes the
//! packet anew, then runs the program under measurement.
//!
//! `BPF_PROG_TEST_RUN` repeats over the packet as the last round left it, and
//! that is a reply. So these programs run before each round. With nothing in
//! `SUBJECT_XDP` and `SUBJECT_TC` they are alone: what the reset costs by itself.
#![no_std]
#![no_main]

use aya_ebpf::{
    bindings::xdp_action,
    helpers::{bpf_skb_change_tail, bpf_skb_store_bytes, bpf_xdp_adjust_tail},
    macros::{classifier, map, xdp},
    maps::{Array, ProgramArray},
    programs::{TcContext, XdpContext},
};
use dns_common::reset::{HEAD_LEN, Original};

/// The packet as it was.
#[map]
static ORIGINAL: Array<Original> = Array::with_max_entries(1, 0);

/// The program for XDP that is measured, in slot 0; it runs in place of the rest.
#[map]
static SUBJECT_XDP: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// The same for tc: such a map holds programs of one type.
#[map]
static SUBJECT_TC: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// Resets at XDP.
#[xdp]
pub fn reset_xdp(context: XdpContext) -> u32 {
    if renew_xdp(&context).is_some() {
        // SAFETY: nothing is left to drop.
        unsafe { SUBJECT_XDP.tail_call(&context, 0) };
    }
    xdp_action::XDP_PASS
}

/// Resets at tc.
#[classifier]
pub fn reset_tc(context: TcContext) -> i32 {
    if renew_tc(&context).is_some() {
        // SAFETY: nothing is left to drop.
        unsafe { SUBJECT_TC.tail_call(&context, 0) };
    }
    -1
}

/// Gives the packet its old length and headers.
#[inline(always)]
fn renew_xdp(context: &XdpContext) -> Option<()> {
    let original = ORIGINAL.get_ptr(0)?;
    // SAFETY: the element is there as long as the program; userspace writes it
    // only between runs.
    let original = unsafe { &*original };
    let too_long = (context.data_end() - context.data()) as i32 - original.len as i32;
    // SAFETY: the context is the kernel's own.
    if unsafe { bpf_xdp_adjust_tail(context.ctx, -too_long) } != 0 {
        return None;
    }
    let data = context.data();
    if data + HEAD_LEN > context.data_end() {
        return None;
    }
    let mut word = 0;
    while word < HEAD_LEN / 8 {
        // Word by word: a copy of the whole becomes a call that copies bytes.
        // SAFETY: just compared with the end.
        unsafe { (data as *mut u64).add(word).write_volatile(original.head[word]) };
        word += 1;
    }
    Some(())
}

/// As [`renew_xdp`], where packets are written to by the kernel.
#[inline(always)]
fn renew_tc(context: &TcContext) -> Option<()> {
    let original = ORIGINAL.get_ptr(0)?;
    // SAFETY: as in `renew_xdp`; the context is the kernel's own.
    unsafe {
        let skb = context.skb.skb;
        if bpf_skb_change_tail(skb, (*original).len, 0) != 0 {
            return None;
        }
        let head = &raw const (*original).head;
        (bpf_skb_store_bytes(skb, 0, head.cast(), HEAD_LEN as u32, 0) == 0).then_some(())
    }
}

/// Nothing here can panic; the compiler wants a handler all the same.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
