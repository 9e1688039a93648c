//! Baseline programs, used only by tests and benches: the minimum cost of any answer.
//!
//! The bare reflector ([`reflect`]) returns every query without an answer, which is the cost of a
//! packet without answering. The constant reflector neither looks up nor checks anything. It turns
//! an IPv4 datagram to port 53 around and appends as many A records as the bench sets, all with one
//! address. It grows the packet like the server's programs: at its start at XDP in the driver, at
//! its end everywhere else.
//!
//! A query must end with its question; an OPT record is not supported.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

#[path = "../../../../../dns-ebpf/src/bytes.rs"]
#[expect(dead_code, reason = "the server's programs use the rest")]
mod bytes;

use aya_ebpf::{
    bindings::xdp_action,
    helpers::{bpf_redirect, bpf_skb_change_tail, bpf_xdp_adjust_head},
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};

use crate::bytes::{barrier, barrier_and, load, store};

/// Answers per reply, at most [`MAX_ANSWERS`]; set by the loader.
#[unsafe(no_mangle)]
static ANSWERS: u32 = 8;

/// No decision: the packet continues to the network stack.
const TC_ACT_UNSPEC: i32 = -1;
/// Maximum number of answers: as many as fit into the headroom of a packet at XDP.
const MAX_ANSWERS: usize = 13;
/// Bytes of one A record whose name is a pointer to the question's.
const ANSWER_LEN: usize = 16;
/// Bytes of Ethernet, IPv4 and UDP headers and the DNS header.
const HEAD_LEN: usize = 14 + 20 + 8 + 12;
/// Longest query: a frame with a name of 255 bytes.
const MAX_QUERY_LEN: usize = HEAD_LEN + 255 + 4;

/// Passes every packet to the network stack. Attached to the client's end of a veth pair, because
/// native `XDP_TX` needs NAPI on the peer.
#[xdp]
pub fn pass(_context: XdpContext) -> u32 {
    xdp_action::XDP_PASS
}

/// Runs the bare reflector at XDP.
#[xdp]
pub fn reflector_xdp(context: XdpContext) -> u32 {
    match reflect(context.data(), context.data_end()) {
        Some(()) => xdp_action::XDP_TX,
        None => xdp_action::XDP_PASS,
    }
}

/// Runs the bare reflector at tc.
#[classifier]
pub fn reflector_tc(context: TcContext) -> i32 {
    match reflect(context.data(), context.data_end()) {
        Some(()) => redirect(&context),
        None => TC_ACT_UNSPEC,
    }
}

/// Runs the constant reflector at XDP in the driver.
#[xdp]
pub fn constant_xdp(context: XdpContext) -> u32 {
    at_xdp(&context)
}

/// Runs the constant reflector at tc.
#[classifier]
pub fn constant_tc(context: TcContext) -> i32 {
    let skb = context.skb.skb;
    let length = context.len() as usize;
    let longer = length + ANSWER_LEN * answers();
    // SAFETY: the context is the kernel's own.
    let grown = || unsafe { bpf_skb_change_tail(skb, longer as u32, 0) == 0 };
    let answered = reflect(context.data(), context.data_end()).is_some()
        && grown()
        && append(context.data(), context.data_end(), length).is_some();
    if answered {
        redirect(&context)
    } else {
        TC_ACT_UNSPEC
    }
}

/// Sends the packet back out of the interface it arrived on.
#[inline(always)]
fn redirect(context: &TcContext) -> i32 {
    // SAFETY: the context is the kernel's own; the helper has no precondition.
    unsafe { bpf_redirect((*context.skb.skb).ifindex, 0) as i32 }
}

/// Answers at XDP, with room made before the packet.
#[inline(always)]
fn at_xdp(context: &XdpContext) -> u32 {
    let length = barrier(context.data_end() - context.data());
    if reflect(context.data(), context.data_end()).is_none() {
        return xdp_action::XDP_PASS;
    }
    let more = (ANSWER_LEN * answers()) as i32;
    // SAFETY: the context is the kernel's own.
    let grown = unsafe { bpf_xdp_adjust_head(context.ctx, -more) } == 0;
    // After a helper call the verifier requires the packet's addresses to be read again. SAFETY:
    // the context is the kernel's own.
    let data = unsafe { (&raw const (*context.ctx).data).read_volatile() as usize };
    let end = unsafe { (&raw const (*context.ctx).data_end).read_volatile() as usize };
    let moved = grown && move_forward(data, end, more as usize, length).is_some();
    if moved && append(data, end, length).is_some() {
        xdp_action::XDP_TX
    } else {
        // It has been turned around, so the stack can do nothing with it.
        xdp_action::XDP_DROP
    }
}

#[inline(always)]
fn answers() -> usize {
    // SAFETY: set by the loader and not written while programs run.
    let answers = unsafe { (&raw const ANSWERS).read_volatile() } as usize;
    barrier_and(answers, 0xf).min(MAX_ANSWERS)
}

/// Moves a frame of `length` bytes from `data + by` to `data`, in words, the last of which ends
/// with the frame.
#[inline(always)]
fn move_forward(data: usize, end: usize, by: usize, length: usize) -> Option<()> {
    let source = data + barrier_and(by, 0xff);
    let mut word = 0;
    while word < MAX_QUERY_LEN / 8 {
        let (from, to) = (source + word * 8, data + word * 8);
        if word >= length / 8 || from + 8 > end || to + 8 > end {
            break;
        }
        // SAFETY: both were compared with the packet's end.
        unsafe { store::<u64>(to, load::<u64>(from)) };
        word = barrier(word + 1);
    }
    let last = barrier_and(length - 8, 0x1ff);
    let (from, to) = (source + last, data + last);
    if from + 8 > end || to + 8 > end {
        return None;
    }
    // SAFETY: as above.
    unsafe { store::<u64>(to, load::<u64>(from)) };
    Some(())
}

/// Appends the answers to a frame of `length` bytes and updates its headers.
#[inline(always)]
fn append(data: usize, end: usize, length: usize) -> Option<()> {
    let answers = answers();
    if data + HEAD_LEN > end {
        return None;
    }
    // SAFETY: just compared with the packet's end.
    unsafe {
        let old = load::<u16>(data + 16);
        let new = u16::from_be(old)
            .wrapping_add((answers * ANSWER_LEN) as u16)
            .to_be();
        store(data + 16, new);
        // Updates the checksum for one changed word of the header (RFC 1624, equation 3).
        let sum = u32::from(!load::<u16>(data + 24)) + u32::from(!old) + u32::from(new);
        let sum = (sum & 0xffff) + (sum >> 16);
        store(data + 24, !((sum & 0xffff) + (sum >> 16)) as u16);
        let udp = u16::from_be(load::<u16>(data + 38)).wrapping_add((answers * ANSWER_LEN) as u16);
        store(data + 38, udp.to_be());
        store(data + 48, (answers as u16).to_be());
    }
    let first = data + barrier_and(length, 0x1ff);
    let mut answer = 0;
    while answer < MAX_ANSWERS {
        let at = first + answer * ANSWER_LEN;
        if answer == answers {
            break;
        }
        if at + ANSWER_LEN > end {
            return None;
        }
        // SAFETY: just compared with the packet's end.
        unsafe {
            // Pointer to the question's name, A, IN; TTL 0; four bytes, 10.0.0.1.
            store(at, u64::from_ne_bytes([0xc0, 12, 0, 1, 0, 1, 0, 0]));
            store(at + 8, u64::from_ne_bytes([0, 0, 0, 4, 10, 0, 0, 1]));
        }
        answer = barrier(answer + 1);
    }
    Some(())
}

/// Unreachable: nothing here can panic, but `no_std` requires a handler.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// Bytes of Ethernet, IPv4, UDP and the first four of DNS.
const QUERY_HEAD_LEN: usize = 14 + 20 + 8 + 4;

/// Returns an IPv4 datagram to port 53 as an empty reply: turns the packet from `data` to `end` around in place. At tc as
/// well, because the bench sends
/// only queries, so writing to packets costs no other traffic.
#[inline(always)]
pub fn reflect(data: usize, end: usize) -> Option<()> {
    if data + QUERY_HEAD_LEN > end || !is_query(data) {
        return None;
    }
    turn(data);
    Some(())
}

/// Returns whether the packet is an IPv4 datagram to port 53.
#[inline(always)]
fn is_query(data: usize) -> bool {
    // SAFETY: inside the head that the caller compared with the end.
    unsafe {
        load::<u16>(data + 12) == 0x0800u16.to_be()
            && load::<u8>(data + 14) == 0x45
            && load::<u8>(data + 23) == 17
            && load::<u16>(data + 36) == 53u16.to_be()
    }
}

/// Swaps the addresses and ports in the headers at `at` and sets the reply flags.
#[inline(always)]
fn turn(at: usize) {
    // SAFETY: inside the head that the caller compared with the end.
    unsafe {
        let (receiver, receiver_end): (u32, u16) = (load(at), load(at + 4));
        let (sender, sender_end): (u32, u16) = (load(at + 6), load(at + 10));
        store(at, sender);
        store(at + 4, sender_end);
        store(at + 6, receiver);
        store(at + 10, receiver_end);
        let (client, server): (u32, u32) = (load(at + 26), load(at + 30));
        store(at + 26, server);
        store(at + 30, client);
        store(at + 34, load::<u32>(at + 34).rotate_left(16));
        // No checksum, as UDP over IPv4 allows (RFC 768).
        store(at + 40, 0u16);
        // QR, AA and RD; RA.
        store(at + 44, u16::from_ne_bytes([0x85, 0x80]));
    }
}
