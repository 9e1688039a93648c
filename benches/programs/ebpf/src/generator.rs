//! In-kernel load generator, used only by benches, never by the server.
//!
//! `BPF_PROG_TEST_RUN` with live frames (Linux 5.18) runs [`generate`] on the client's CPU, once
//! per frame. Each frame for which it returns `XDP_TX` leaves by the client's end of the veth pair,
//! the interface given to the run. At that end [`count`] counts the replies and drops them. One
//! core generates more queries than a server's core answers, with time left for the replies;
//! sockets, including `AF_XDP`, are far slower.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

#[path = "../../../../dns-ebpf/src/bytes.rs"]
#[expect(dead_code, reason = "the server's programs use the rest")]
mod bytes;
#[path = "../../src/generator.rs"]
#[expect(dead_code, reason = "userspace uses the rest")]
mod orders;

use crate::{
    bytes::{barrier, barrier_and, load},
    orders::{Counts, FIRST_PORT, Frame, MAX_FRAME_LEN, Orders, PORTS},
};
use aya_ebpf::{
    bindings::xdp_action,
    helpers::{bpf_ktime_get_ns, bpf_xdp_adjust_tail, bpf_xdp_store_bytes},
    macros::{map, xdp},
    maps::Array,
    programs::XdpContext,
};

/// The queries. The loader sets the number of elements.
#[map]
static FRAMES: Array<Frame> = Array::with_max_entries(1, 0);

/// Rate and other parameters, written by userspace.
#[map]
static ORDERS: Array<Orders> = Array::with_max_entries(1, 0);

/// Queries sent and replies received. Each counter has a single writer, on one CPU at a time, and
/// only rises.
#[map]
static COUNTS: Array<Counts> = Array::with_max_entries(1, 0);

#[map]
static MEMORY: Array<Memory> = Array::with_max_entries(1, 0);

#[repr(C)]
struct Memory {
    /// The current load, to detect a new one.
    load: u64,
    /// Start of the load (`bpf_ktime_get_ns`).
    began: u64,
    /// Queries sent or skipped since then.
    sent: u64,
    /// Index of the next frame.
    next: u64,
}

/// Maximum backlog: if the CPU could not send queries on time, queries beyond this number are
/// skipped.
const BACKLOG: u64 = 64;

/// Sends a query if one is due; otherwise drops the frame, the cheapest way to wait.
#[xdp]
pub fn generate(context: XdpContext) -> u32 {
    match query(&context) {
        Some(()) => xdp_action::XDP_TX,
        None => xdp_action::XDP_DROP,
    }
}

/// Counts a reply to one of our queries at the client's end; passes every other packet to the
/// network stack.
#[xdp]
pub fn count(context: XdpContext) -> u32 {
    match reply(&context) {
        Some(()) => xdp_action::XDP_DROP,
        None => xdp_action::XDP_PASS,
    }
}

/// Turns the frame into the next query, if one is due.
#[inline(always)]
fn query(context: &XdpContext) -> Option<()> {
    let (orders, counts, memory) = (
        ORDERS.get_ptr(0)?,
        COUNTS.get_ptr_mut(0)?,
        MEMORY.get_ptr_mut(0)?,
    );
    // SAFETY (all): elements live as long as the program. Concurrent writers only write aligned
    // words, so no read is torn.
    let (orders, counts, memory) = unsafe { (&*orders, &mut *counts, &mut *memory) };
    if orders.frames == 0 || !is_due(orders, counts, memory) {
        return None;
    }
    let at = if memory.next < orders.frames {
        memory.next
    } else {
        0
    };
    let frame = FRAMES.get_ptr(at as u32)?;
    // SAFETY: as above; userspace writes frames only between loads.
    let frame = unsafe { &*frame };
    let len = barrier_and(frame.len as usize, 0xff);
    if len == 0 || len > MAX_FRAME_LEN {
        return None;
    }
    // In 64 bits: the verifier rejects narrower arithmetic on addresses.
    let more = len as i32 - barrier(context.data_end() - context.data()) as i32;
    let bytes = (&raw const frame.bytes).cast_mut().cast();
    // SAFETY: the context is the kernel's own, and the bytes belong to an element.
    let written = unsafe {
        bpf_xdp_adjust_tail(context.ctx, more) == 0
            && bpf_xdp_store_bytes(context.ctx, 0, bytes, len as u32) == 0
    };
    written.then(|| {
        memory.next = at + 1;
        memory.sent += 1;
        counts.sent += 1;
    })
}

/// Returns whether another query is due at the ordered rate.
#[inline(always)]
fn is_due(orders: &Orders, counts: &mut Counts, memory: &mut Memory) -> bool {
    if orders.rate == 0 {
        return true;
    }
    // SAFETY: no precondition.
    let now = unsafe { bpf_ktime_get_ns() };
    if memory.load != orders.load {
        memory.load = orders.load;
        memory.began = now;
        memory.sent = 0;
    }
    let mut due = ((now - memory.began) * orders.rate) >> 32;
    if orders.burst > 1 {
        due -= due % orders.burst;
    }
    if due <= memory.sent {
        return false;
    }
    let backlog = BACKLOG + orders.burst;
    let late = due - memory.sent;
    if late > backlog {
        counts.skipped += late - backlog;
        memory.sent = due - backlog;
    }
    true
}

/// Counts a reply to one of our ports.
#[inline(always)]
fn reply(context: &XdpContext) -> Option<()> {
    let data = context.data();
    if data + 14 > context.data_end() {
        return None;
    }
    // SAFETY: inside the header that was compared with the packet's end.
    let rcode = match u16::from_be(unsafe { load(data + 12) }) {
        0x0800 => rcode::<23, 34>(context)?,
        0x86dd => rcode::<20, 54>(context)?,
        _ => return None,
    };
    let counts = COUNTS.get_ptr_mut(0)?;
    // SAFETY: the element lives as long as the program.
    unsafe {
        if rcode == 0 {
            (*counts).no_error += 1;
        } else {
            (*counts).other += 1;
        }
    }
    Some(())
}

/// Returns the RCODE of a reply to one of our ports, by the places of the protocol number and the UDP header.
#[inline(always)]
fn rcode<const PROTOCOL: usize, const UDP: usize>(context: &XdpContext) -> Option<u8> {
    let data = context.data();
    // The UDP header and the first four bytes of DNS.
    if data + UDP + 8 + 4 > context.data_end() {
        return None;
    }
    // SAFETY (all): inside the head that was compared with the packet's end.
    let protocol: u8 = unsafe { load(data + PROTOCOL) };
    let [from, to] = [UDP, UDP + 2].map(|at| u16::from_be(unsafe { load(data + at) }));
    let is_ours = protocol == 17 && from == 53 && to.wrapping_sub(FIRST_PORT) < PORTS;
    is_ours.then(|| unsafe { load::<u8>(data + UDP + 8 + 3) } & 0x0f)
}

/// Unreachable: nothing here can panic, but `no_std` requires a handler.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
