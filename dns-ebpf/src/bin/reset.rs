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
    helpers::{bpf_skb_change_tail, bpf_skb_store_bytes, bpf_xdp_adjust_head, bpf_xdp_adjust_tail},
    macros::{classifier, map, xdp},
    maps::{Array, ProgramArray},
    programs::{TcContext, XdpContext},
};
use dns_common::reset::{HEAD_LEN, MAX_LEN, Original};

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

/// Offset of the question's name.
const NAME: usize = 14 + 20 + 8 + 12;

/// Copies one value: as a loop over bytes the whole would become a call.
///
/// # Safety
/// The verifier has seen that it can be read at `from` and written at `to`.
#[inline(always)]
unsafe fn copy<T: Copy>(to: usize, from: usize) {
    // BPF takes any alignment.
    // SAFETY: the caller's promise.
    unsafe { (to as *mut T).write_volatile((from as *const T).read_volatile()) }
}

/// Gives the packet its old place and content.
#[inline(always)]
fn renew_xdp(context: &XdpContext) -> Option<()> {
    let original = ORIGINAL.get_ptr(0)?;
    // SAFETY: the element is there as long as the program; userspace writes it
    // only between runs.
    let original = unsafe { &*original };
    // In 64 bits: the verifier takes no arithmetic on addresses in fewer.
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
    // Cut into words as the programs read them: where a load takes from two stores just
    // before it, it waits for both, and no packet that came in has just been stored.
    // SAFETY (all): in the packet as compared with its end, and in the element.
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
        // The rest of less than a word, with what lies before it.
        let last = (original.len as usize).wrapping_sub(8) & 0xff;
        if last > MAX_LEN - 8 || data + last + 8 > end {
            return None;
        }
        copy::<u64>(data + last, bytes + last);
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
        let head = &raw const (*original).bytes;
        (bpf_skb_store_bytes(skb, 0, head.cast(), HEAD_LEN as u32, 0) == 0).then_some(())
    }
}

/// Nothing here can panic; the compiler wants a handler all the same.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
