//! Restores the packet, then runs the program under test. Used only by the bench of the programs,
//! never by the server.
//!
//! `BPF_PROG_TEST_RUN` passes each round the packet that the previous one left, which is a reply,
//! so these programs run at the start of each round. With `SUBJECT_XDP` and `SUBJECT_TC` empty the
//! bench measures the cost of the reset alone.
#![no_std]
#![no_main]

#[path = "../../src/reset.rs"]
mod original;

use crate::original::{HEAD_LEN, MAX_LEN, Original};
use aya_ebpf::{
    bindings::xdp_action,
    helpers::{bpf_skb_change_tail, bpf_skb_store_bytes, bpf_xdp_adjust_head, bpf_xdp_adjust_tail},
    macros::{classifier, map, xdp},
    maps::{Array, ProgramArray},
    programs::{TcContext, XdpContext},
};

/// The packet to restore before each round.
#[map]
static ORIGINAL: Array<Original> = Array::with_max_entries(1, 0);

/// The XDP program under test, in slot 0, entered by a tail call.
#[map]
static SUBJECT_XDP: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// The same for tc: a program array holds programs of one type.
#[map]
static SUBJECT_TC: ProgramArray = ProgramArray::with_max_entries(1, 0);

#[xdp]
pub fn reset_xdp(context: XdpContext) -> u32 {
    if renew_xdp(&context).is_some() {
        // SAFETY: nothing is left to drop.
        unsafe { SUBJECT_XDP.tail_call(&context, 0) };
    }
    xdp_action::XDP_PASS
}

#[classifier]
pub fn reset_tc(context: TcContext) -> i32 {
    if renew_tc(&context).is_some() {
        // SAFETY: nothing is left to drop.
        unsafe { SUBJECT_TC.tail_call(&context, 0) };
    }
    -1
}

/// Offset of the question's name.
const NAME: usize = 14 + 20 + 8 + 12;

/// Copies one value; LLVM would turn a loop over bytes into a call.
///
/// # Safety
/// The verifier has checked that the value can be read at `from` and written at `to`.
#[inline(always)]
unsafe fn copy<T: Copy>(to: usize, from: usize) {
    // BPF takes any alignment.
    // SAFETY: the caller's promise.
    unsafe { (to as *mut T).write_volatile((from as *const T).read_volatile()) }
}

/// Restores the packet's position and content.
#[inline(always)]
fn renew_xdp(context: &XdpContext) -> Option<()> {
    let original = ORIGINAL.get_ptr(0)?;
    // SAFETY: the element lives as long as the program; userspace writes it only between runs.
    let original = unsafe { &*original };
    // In 64 bits: the verifier rejects narrower arithmetic on addresses.
    let length = core::hint::black_box(context.data_end() - context.data());
    let too_long = length as i32 - original.len as i32;
    let head_room = original.head_room as i32;
    let before = if too_long < head_room { too_long } else { head_room };
    // SAFETY: the context is the kernel's own.
    let renewed = unsafe {
        bpf_xdp_adjust_head(context.ctx, before) == 0
            && bpf_xdp_adjust_tail(context.ctx, before - too_long) == 0
    };
    if !renewed {
        return None;
    }
    let (data, end) = (context.data(), context.data_end());
    if data + NAME > end {
        return None;
    }
    let bytes = &raw const original.bytes as usize;
    // Stored in the same words that the programs load: a load that spans two recent stores stalls,
    // which would not happen with a received packet. SAFETY (all): inside the packet as compared
    // with its end, and inside the element.
    unsafe {
        copy::<u16>(data, bytes);
        let mut at = 2;
        while at < NAME - 4 {
            copy::<u64>(data + at, bytes + at);
            at += 8;
        }
        copy::<u32>(data + at, bytes + at);
        at = NAME;
        while at + 8 <= MAX_LEN && data + at + 8 <= end {
            copy::<u64>(data + at, bytes + at);
            at += 8;
        }
        // The last, partial word, overlapping the bytes before it.
        let last = (original.len as usize).wrapping_sub(8) & 0xff;
        if last > MAX_LEN - 8 || data + last + 8 > end {
            return None;
        }
        copy::<u64>(data + last, bytes + last);
    }
    Some(())
}

/// Like [`renew_xdp`], with the kernel's helper writing to the packet.
#[inline(always)]
fn renew_tc(context: &TcContext) -> Option<()> {
    let original = ORIGINAL.get_ptr(0)?;
    // SAFETY: as in `renew_xdp`; the context is the kernel's own.
    unsafe {
        let skb = context.skb.skb;
        if bpf_skb_change_tail(skb, (*original).len, 0) != 0 {
            return None;
        }
        let head = &raw const (*original).bytes;
        (bpf_skb_store_bytes(skb, 0, head.cast(), HEAD_LEN as u32, 0) == 0).then_some(())
    }
}

/// Unreachable: nothing here can panic, but `no_std` requires a handler.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
