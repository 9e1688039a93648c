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

use crate::original::{HEAD_LEN, MAX_LEN, MAX_PACKETS, Original, Turn};
use aya_ebpf::{
    bindings::xdp_action,
    helpers::{bpf_skb_change_tail, bpf_skb_store_bytes, bpf_xdp_adjust_head, bpf_xdp_adjust_tail},
    macros::{classifier, map, xdp},
    maps::{Array, ProgramArray},
    programs::{TcContext, XdpContext},
};

/// The packets to restore, which take turns.
#[map]
static ORIGINAL: Array<Original> = Array::with_max_entries(MAX_PACKETS, 0);

#[map]
static TURN: Array<Turn> = Array::with_max_entries(1, 0);

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

/// Returns the packet to restore, and the turn with the length of the one before.
#[inline(always)]
fn next() -> Option<(&'static Original, Turn)> {
    let next = TURN.get_ptr_mut(0)?;
    // SAFETY: the element lives as long as the program; nothing else accesses it during runs.
    let turn = unsafe { *next };
    let original = ORIGINAL.get_ptr(turn.count & turn.mask)?;
    // SAFETY: as above; userspace writes the elements only between runs.
    unsafe {
        *next = Turn {
            count: turn.count.wrapping_add(1),
            len: (*original).len,
            ..turn
        };
        Some((&*original, turn))
    }
}

/// Restores the packet's position and content.
#[inline(always)]
fn renew_xdp(context: &XdpContext) -> Option<()> {
    let (original, turn) = next()?;
    // In 64 bits: the verifier rejects narrower arithmetic on addresses.
    let length = core::hint::black_box(context.data_end() - context.data());
    let grown = length as i32 - turn.len as i32;
    let head_room = original.head_room as i32;
    let before = if grown < head_room { grown } else { head_room };
    let missing = original.len as i32 - (length as i32 - before);
    // SAFETY: the context is the kernel's own.
    let renewed = unsafe {
        bpf_xdp_adjust_head(context.ctx, before) == 0
            && bpf_xdp_adjust_tail(context.ctx, missing) == 0
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
    let (original, turn) = next()?;
    let (skb, bytes) = (context.skb.skb, (&raw const original.bytes).cast());
    // SAFETY (all): the context is the kernel's own, and the element has this many bytes.
    if unsafe { bpf_skb_change_tail(skb, original.len, 0) } != 0 {
        return None;
    }
    // A reply to the same query differs from it only at the start.
    if turn.mask == 0 {
        return (unsafe { bpf_skb_store_bytes(skb, 0, bytes, HEAD_LEN as u32, 0) } == 0)
            .then_some(());
    }
    // Read here, where the verifier follows its range to the call.
    let len = core::hint::black_box(original.len);
    if len < HEAD_LEN as u32 || len > MAX_LEN as u32 {
        return None;
    }
    (unsafe { bpf_skb_store_bytes(skb, 0, bytes, len, 0) } == 0).then_some(())
}

/// Unreachable: nothing here can panic, but `no_std` requires a handler.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
