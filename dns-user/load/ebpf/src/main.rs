//! The load generator's programs.
//!
//! `BPF_PROG_TEST_RUN` with live frames (Linux 5.18) runs [`generate`] on a CPU of the client, once per frame. Each
//! frame for which it returns `XDP_TX` leaves by the interface given to the run. At that interface [`count`] compares
//! the replies with the queries in flight, counts them and drops them. One core generates more queries than a server's
//! core answers, with time left for the replies; sockets, including `AF_XDP`, are far slower.
//!
//! [`respond`] is the other end: it returns every query as an empty answer.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

#[path = "../../../../dns-ebpf/src/bytes.rs"]
#[expect(dead_code, reason = "the server's programs use the rest")]
mod bytes;
#[path = "../../src/orders.rs"]
#[expect(dead_code, reason = "userspace uses the rest")]
mod orders;

use core::arch::asm;

use crate::{
    bytes::{barrier, barrier_and, load, store},
    orders::{
        BUCKETS, Counts, FRACTION_BITS, Frame, MAX_FRAME_LEN, Orders, Replies, STALL_BITS, Slot,
        bucket_of,
    },
};
use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, xdp_action},
    helpers::{
        bpf_get_smp_processor_id, bpf_ktime_get_ns, bpf_xdp_adjust_head, bpf_xdp_adjust_tail,
        bpf_xdp_store_bytes,
    },
    macros::{map, xdp},
    maps::{Array, PerCpuArray},
    programs::XdpContext,
};

/// The queries. The loader sets the number of elements of this map and the next five.
#[map]
static FRAMES: Array<Frame> = Array::with_max_entries(1, 0);

/// Indices of frames, in the order of sending.
#[map]
static SEQUENCE: Array<u32> = Array::with_max_entries(1, 0);

/// Loads by CPU.
#[map]
static ORDERS: Array<Orders> = Array::with_max_entries(1, 0);

/// Queries in flight.
#[map]
static SLOTS: Array<Slot> = Array::with_max_entries(1, 0);

/// Queries by the moment in which they were due, and replies by that of their query. In two maps, because different CPUs
/// count in them.
#[map]
static SENT_AT: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);
#[map]
static RECEIVED_AT: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);

#[map]
static REPLIES: Array<Replies> = Array::with_max_entries(1, 0);

#[map]
static COUNTS: PerCpuArray<Counts> = PerCpuArray::with_max_entries(1, 0);

/// Replies by latency.
#[map]
static LATENCIES: PerCpuArray<[u64; BUCKETS]> = PerCpuArray::with_max_entries(1, 0);

#[map]
static MEMORY: PerCpuArray<Memory> = PerCpuArray::with_max_entries(1, 0);

/// Progress of a generator.
#[repr(C)]
struct Memory {
    /// The current load, to detect a new one.
    load: u64,
    /// Start of the load (`bpf_ktime_get_ns`).
    began: u64,
    /// When the current or next burst is due: nanoseconds since the start times 2^[`FRACTION_BITS`].
    due: u64,
    /// Queries of the current burst that are left.
    left: u64,
    /// Index of the next element of the sequence.
    next: u64,
    /// Queries sent in all loads: their lowest 16 bits are ids.
    number: u64,
}

/// Ethernet header.
const ETHERNET: usize = 14;

/// UDP header behind IPv4 and behind IPv6.
const UDP_V4: usize = ETHERNET + 20;
const UDP_V6: usize = ETHERNET + 40;

/// Last 16 bits of the source address.
const SOURCE_V4: usize = ETHERNET + 14;
const SOURCE_V6: usize = ETHERNET + 22;

/// Sends a query if one is due; otherwise drops the frame, the cheapest way to wait.
#[xdp]
pub fn generate(context: XdpContext) -> u32 {
    match query(&context) {
        Some(()) => xdp_action::XDP_TX,
        None => xdp_action::XDP_DROP,
    }
}

/// Counts a reply to one of our queries; passes every other packet to the network stack.
#[xdp]
pub fn count(context: XdpContext) -> u32 {
    match reply(&context) {
        Some(()) => xdp_action::XDP_DROP,
        None => xdp_action::XDP_PASS,
    }
}

/// Returns every query as an empty answer: what a link and a generator can do without a server.
#[xdp]
pub fn respond(context: XdpContext) -> u32 {
    match answer(&context) {
        Some(()) => xdp_action::XDP_TX,
        None => xdp_action::XDP_PASS,
    }
}

/// Turns the frame into the next query, if one is due.
#[inline(always)]
fn query(context: &XdpContext) -> Option<()> {
    // SAFETY: no precondition.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    let orders = ORDERS.get(cpu)?;
    let memory = MEMORY.get_ptr_mut(0)?;
    let counts = COUNTS.get_ptr_mut(0)?;
    // SAFETY (all): elements live as long as the program; those of this CPU have one writer, and userspace only writes
    // aligned words.
    let (memory, counts) = unsafe { (&mut *memory, &mut *counts) };
    // Between two loads the thread stays in its system call, and its frames are dropped.
    if orders.length == 0 {
        return None;
    }
    let due = due(orders, counts, memory)?;
    let at = if memory.next < orders.length {
        memory.next
    } else {
        0
    };
    let index = *SEQUENCE.get((orders.first + at) as u32)?;
    let frame = FRAMES.get_ptr_mut(index)?;
    // SAFETY: as above; counters are changed atomically, the rest before the load.
    let frame = unsafe { &*frame };
    write(context, frame)?;
    let ports = orders.ports.max(1);
    let set = memory.number >> 16;
    // Shifted with each set, so that each id meets each port.
    let port = (memory.number + set) % ports;
    let varying = Varying {
        source: (frame.source + memory.number % orders.addresses.max(1)) as u16,
        port: (orders.port + port) as u16,
        id: memory.number as u16,
    };
    varying.put(context, frame)?;
    let slot = orders.slots + ((set & orders.set_mask) << 16) + (memory.number & 0xffff);
    let slot = SLOTS.get_ptr_mut(slot as u32)?;
    // SAFETY: as above; a reply to the query that had this slot reads either of them.
    unsafe {
        *slot = Slot {
            time: due,
            frame: index,
            port: port as u32 + 1,
        };
    }
    memory.next = at + 1;
    memory.number += 1;
    counts.sent += 1;
    increment(&raw const frame.sent);
    count_at(&SENT_AT, REPLIES.get(0)?, due)
}

/// Makes the packet as long as the frame, and writes the frame into it.
#[inline(always)]
fn write(context: &XdpContext, frame: &Frame) -> Option<()> {
    let len = barrier_and(frame.len as usize, 0x1ff);
    // A helper's length must not be 0, and the verifier of Linux 6.1 learns nothing from a comparison with 0.
    if len < ETHERNET {
        return None;
    }
    let len = barrier(len);
    if len > MAX_FRAME_LEN {
        return None;
    }
    // In 64 bits: the verifier rejects narrower arithmetic on addresses.
    let more = len as i32 - barrier(context.data_end() - context.data()) as i32;
    let bytes = (&raw const frame.bytes).cast_mut().cast();
    // SAFETY: the context is the kernel's own, and the bytes belong to an element.
    let written = unsafe {
        // A frame that begins longer than any query is shortened at its start: the bytes behind it are to stay few.
        let fits = if more < -(MAX_FRAME_LEN as i32) {
            bpf_xdp_adjust_head(context.ctx, -more)
        } else {
            bpf_xdp_adjust_tail(context.ctx, more)
        };
        fits == 0 && bpf_xdp_store_bytes(context.ctx, 0, bytes, len as u32) == 0
    };
    written.then_some(())
}

/// Counts a query or a reply in the moment in which the query was due, if the load is recorded.
#[inline(always)]
fn count_at(moments: &Array<u64>, replies: &Replies, due: u64) -> Option<()> {
    if replies.moments != 0 {
        let moment = (due >> replies.moment_bits) & (replies.moments - 1);
        increment(moments.get_ptr(moment as u32)?);
    }
    Some(())
}

/// The parts of a query that differ from its frame.
struct Varying {
    source: u16,
    port: u16,
    id: u16,
}

impl Varying {
    /// Writes them into the packet, with its checksums.
    #[inline(always)]
    fn put(&self, context: &XdpContext, frame: &Frame) -> Option<()> {
        // After a helper call the verifier requires the packet's addresses to be read again. SAFETY (both): the context
        // is the kernel's own.
        let data = unsafe { (&raw const (*context.ctx).data).read_volatile() as usize };
        let end = unsafe { (&raw const (*context.ctx).data_end).read_volatile() as usize };
        if frame.is_ipv6 != 0 {
            return self.put_at::<SOURCE_V6, UDP_V6>(data, end, frame);
        }
        self.put_at::<SOURCE_V4, UDP_V4>(data, end, frame)?;
        let sum = !folded(frame.header_sum + u32::from(self.source));
        // SAFETY: before the UDP header that was compared with the packet's end.
        unsafe { store(data + ETHERNET + 10, sum.to_be()) };
        Some(())
    }

    #[inline(always)]
    fn put_at<const SOURCE: usize, const UDP: usize>(
        &self,
        data: usize,
        end: usize,
        frame: &Frame,
    ) -> Option<()> {
        // The UDP header and the message's id.
        if data + UDP + 8 + 2 > end {
            return None;
        }
        let varying = u32::from(self.source) + u32::from(self.port) + u32::from(self.id);
        // Zero would mean no checksum (RFC 768).
        let sum = match !folded(frame.udp_sum + varying) {
            0 => 0xffff,
            sum => sum,
        };
        // SAFETY: just compared with the packet's end.
        unsafe {
            store(data + SOURCE, self.source.to_be());
            store(data + UDP, self.port.to_be());
            store(data + UDP + 6, sum.to_be());
            store(data + UDP + 8, self.id.to_be());
        }
        Some(())
    }
}

#[inline(always)]
fn folded(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// Adds one to a counter that several CPUs change.
#[inline(always)]
fn increment(counter: *const u64) {
    // `core` offers no atomic addition for this target. SAFETY: an aligned word of a map's element, which lives as long
    // as the program.
    unsafe {
        asm!(
            "lock *(u64 *)({counter} + 0) += {one}",
            counter = in(reg) counter,
            one = in(reg) 1u64,
            options(nostack),
        );
    }
}

/// Returns when the next query was due at the ordered rate, if it is due.
#[inline(always)]
fn due(orders: &Orders, counts: &mut Counts, memory: &mut Memory) -> Option<u64> {
    // SAFETY: no precondition.
    let now = unsafe { bpf_ktime_get_ns() };
    if orders.interval == 0 {
        return Some(now);
    }
    // The schedule begins here and not with the order: the thread may have waited for its CPU.
    if memory.load != orders.load {
        memory.load = orders.load;
        memory.began = now;
        memory.due = orders.delay;
        memory.left = 0;
    }
    if memory.left == 0 {
        let late = ((now - memory.began) << FRACTION_BITS).checked_sub(memory.due)?;
        let backlog = orders.interval * (orders.backlog + orders.burst);
        if late > backlog {
            let skipped = (late - backlog) / orders.interval;
            counts.skipped += skipped;
            if skipped * orders.interval >= 1 << (STALL_BITS + FRACTION_BITS) {
                counts.stalled += skipped;
            }
            memory.due += skipped * orders.interval;
            // Else a stall of the CPU, which may be the server's work on it, would improve the latencies.
            record(late >> FRACTION_BITS, skipped)?;
        }
        memory.left = orders.burst;
    }
    memory.left -= 1;
    let due = memory.began + (memory.due >> FRACTION_BITS);
    if memory.left == 0 {
        memory.due += orders.interval * orders.burst;
    }
    Some(due)
}

/// Adds to the histogram of latencies.
#[inline(always)]
fn record(latency: u64, times: u64) -> Option<()> {
    let buckets = LATENCIES.get_ptr_mut(0)?;
    // The verifier must see the bounds check of the very register that is the index. SAFETY: the element of this CPU
    // lives as long as the program; tasks and softirqs of a CPU do not interrupt each other's programs.
    let bucket = unsafe { (*buckets).get_mut(barrier(bucket_of(latency))) }?;
    *bucket += times;
    Some(())
}

/// Counts a reply to one of our ports.
#[inline(always)]
fn reply(context: &XdpContext) -> Option<()> {
    let (data, end) = (context.data(), context.data_end());
    match ethertype(data, end)? {
        0x0800 => reply_at::<23, UDP_V4>(data, end),
        0x86dd => reply_at::<20, UDP_V6>(data, end),
        _ => None,
    }
}

#[inline(always)]
fn ethertype(data: usize, end: usize) -> Option<u16> {
    if data + ETHERNET > end {
        return None;
    }
    // SAFETY: just compared with the packet's end.
    Some(u16::from_be(unsafe { load(data + 12) }))
}

/// Counts a reply by the places of the protocol number and the UDP header.
#[inline(always)]
fn reply_at<const PROTOCOL: usize, const UDP: usize>(data: usize, end: usize) -> Option<()> {
    // The UDP header and the first eight bytes of DNS.
    if data + UDP + 8 + 8 > end {
        return None;
    }
    // SAFETY (all): inside the head that was compared with the packet's end.
    let word = |at: usize| u64::from(u16::from_be(unsafe { load(data + at) }));
    let protocol: u8 = unsafe { load(data + PROTOCOL) };
    let replies = REPLIES.get(0)?;
    if protocol != 17 || !replies.servers.contains(&word(UDP)) {
        return None;
    }
    let flags = word(UDP + 10);
    let port = word(UDP + 2).wrapping_sub(replies.port);
    let is_ours = replies.ports != 0 && port < replies.ports * replies.generators;
    if !is_ours || flags & 0x8000 == 0 {
        return None;
    }
    let counts = COUNTS.get_ptr_mut(0)?;
    // SAFETY: as in `query`.
    let counts = unsafe { &mut *counts };
    let ports = replies.ports;
    let id = word(UDP + 8);
    let set = (port % ports).wrapping_sub(id) & replies.set_mask;
    let first = port / ports * (replies.set_mask + 1);
    let slot = SLOTS.get_ptr_mut(((first + set) << 16 | id) as u32)?;
    // SAFETY: as in `query`.
    let slot = unsafe { &mut *slot };
    if u64::from(slot.port) != port % ports + 1 {
        counts.late += 1;
        return Some(());
    }
    // A second reply to the same query is a late one.
    slot.port = 0;
    // SAFETY: no precondition.
    let now = unsafe { bpf_ktime_get_ns() };
    record(now.saturating_sub(slot.time), 1)?;
    counts.rcodes[barrier(flags as usize) & 0xf] += 1;
    let frame = FRAMES.get_ptr_mut(slot.frame)?;
    // SAFETY: as in `query`; two first replies at once differ in the order of counting only.
    let answers = unsafe { &mut (*frame).answers };
    let found = word(UDP + 14) + 1;
    if *answers == 0 {
        *answers = found;
    } else if *answers != found {
        counts.different += 1;
    }
    // SAFETY: the field of an element.
    increment(unsafe { &raw const (*frame).received });
    count_at(&RECEIVED_AT, replies, slot.time)
}

/// Turns a query around.
#[inline(always)]
fn answer(context: &XdpContext) -> Option<()> {
    let (data, end) = (context.data(), context.data_end());
    match ethertype(data, end)? {
        0x0800 => answer_at::<23, { ETHERNET + 12 }, 4, UDP_V4>(data, end)?,
        0x86dd => answer_at::<20, { ETHERNET + 8 }, 16, UDP_V6>(data, end)?,
        _ => return None,
    }
    let counts = COUNTS.get_ptr_mut(0)?;
    // SAFETY: as in `query`.
    unsafe { (*counts).sent += 1 };
    Some(())
}

/// Swaps hardware addresses, addresses and ports, which leaves the checksums as they are, and sets the flags of a reply.
#[inline(always)]
fn answer_at<
    const PROTOCOL: usize,
    const SOURCE: usize,
    const ADDRESS_LEN: usize,
    const UDP: usize,
>(
    data: usize,
    end: usize,
) -> Option<()> {
    // The UDP header and the DNS header.
    if data + UDP + 8 + 12 > end {
        return None;
    }
    let replies = REPLIES.get(0)?;
    // SAFETY (all): inside the head that was compared with the packet's end.
    unsafe {
        let server = u64::from(u16::from_be(load(data + UDP + 2)));
        let flags: u16 = u16::from_be(load(data + UDP + 10));
        if load::<u8>(data + PROTOCOL) != 17
            || !replies.servers.contains(&server)
            || flags & 0x8000 != 0
        {
            return None;
        }
        for at in [0, 2, 4] {
            let receiver: u16 = load(data + at);
            store(data + at, load::<u16>(data + 6 + at));
            store(data + 6 + at, receiver);
        }
        for word in 0..ADDRESS_LEN / 4 {
            let source: u32 = load(data + SOURCE + 4 * word);
            let destination: u32 = load(data + SOURCE + ADDRESS_LEN + 4 * word);
            store(data + SOURCE + 4 * word, destination);
            store(data + SOURCE + ADDRESS_LEN + 4 * word, source);
        }
        store(data + UDP, load::<u32>(data + UDP).rotate_left(16));
        // QR and AA; the rest is the query's.
        let reply = flags | 0x8400;
        store(data + UDP + 10, reply.to_be());
        if ADDRESS_LEN == 4 {
            // A query from a socket at the other end of a veth pair has no checksum yet, so none can be updated.
            store(data + UDP + 6, 0u16);
        } else {
            // IPv6 allows no packet without one (RFC 8200, section 8.1). RFC 1624, equation 3.
            let old: u16 = u16::from_be(load(data + UDP + 6));
            let sum = folded(u32::from(!old) + u32::from(!flags) + u32::from(reply));
            let sum = if sum == 0xffff { 0 } else { sum };
            store(data + UDP + 6, (!sum).to_be());
        }
    }
    Some(())
}

/// Unreachable: nothing here can panic, but `no_std` requires a handler.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
