//! The tap: samples one query in `tap_every` as an event for userspace, because tcpdump does not
//! see packets answered at XDP. None of its code runs while the tap is off.

use aya_ebpf::helpers::{bpf_get_prandom_u32, bpf_ktime_get_ns};
use dns_common::{
    control::Control,
    name::{first_zero, zero_byte},
    tap::{TAP_NAME_LEN, TapEvent},
};

use crate::{
    bytes::{Zero, barrier, load, store},
    frame::{Frame, HEADER_LEN, IPV4_LEN, IPV6_LEN},
    hook::Hook,
    maps::TAP,
};

/// The outcome of a query, as reported by the tap.
pub struct Seen {
    /// [`dns_common::counters::Outcome`] as a number.
    pub outcome: u8,
    /// Whether the query was answered: the packet then holds the reply.
    pub answered: bool,
    /// RCODE of the reply.
    pub rcode: u8,
    /// Answers in the reply.
    pub answers: u16,
}

impl Seen {
    /// Merges the paths of all outcomes, see [`Zero`].
    #[inline(always)]
    pub fn value_barrier(self, zero: Zero) -> Self {
        let Self {
            outcome,
            answered,
            rcode,
            answers,
        } = self;
        Self {
            outcome: zero.value_barrier(outcome as usize, 0xff) as u8,
            answered: zero.value_barrier(answered as usize, 1) != 0,
            rcode: zero.value_barrier(rcode as usize, 0xff) as u8,
            answers: zero.value_barrier(answers as usize, 0xffff) as u16,
        }
    }
}

/// Returns whether to sample this query. True for one in `tap_every` at random, because clients
/// that alternate between A and AAAA would bias a counter.
#[inline(always)]
pub fn is_due(control: &Control) -> bool {
    // SAFETY: the helper has no precondition.
    let random = unsafe { bpf_get_prandom_u32() } as u64;
    (random * control.tap_every as u64) >> 32 == 0
}

/// Sends the event, unless the ring is full or has no reader.
#[inline(always)]
pub fn send<H: Hook>(hook: &H, zero: Zero, frame: &Frame, seen: &Seen) -> Option<()> {
    let mut slot = TAP.reserve::<TapEvent>(0)?;
    let event = slot.as_mut_ptr();
    // SAFETY: the slot is memory for one event; every field is written before the slot is
    // submitted.
    let filled = unsafe {
        (*event).time_ns = bpf_ktime_get_ns();
        (*event).ifindex = hook.ifindex();
        (*event).outcome = seen.outcome;
        (*event).rcode = seen.rcode;
        (*event).answers = seen.answers;
        (*event).padding = 0;
        (*event).client_port = 0;
        (*event).query_type = 0;
        (*event).name_len = 0;
        fill_client(hook, frame, seen.answered, event)
            .and_then(|()| fill_name(hook, zero, frame, event))
    };
    match filled {
        Some(()) => slot.submit(0),
        None => slot.discard(0),
    }
    filled
}

/// Fills in the client's address and port: the sender of a query, the receiver of a reply.
///
/// # Safety
/// `event` can be written.
#[inline(always)]
unsafe fn fill_client<H: Hook>(
    hook: &H,
    frame: &Frame,
    answered: bool,
    event: *mut TapEvent,
) -> Option<()> {
    let (data, end) = (hook.data(), hook.data_end());
    let ip = data + frame.ip();
    // SAFETY: takes the address only, without an access.
    let client = unsafe { &raw mut (*event).client } as usize;
    let udp = if frame.is_v6() {
        if ip + IPV6_LEN + 4 > end {
            return None;
        }
        // SAFETY: just compared with the end; sixteen bytes of the event.
        unsafe {
            let (from, to): ([u64; 2], [u64; 2]) = (
                [load(ip + 8), load(ip + 16)],
                [load(ip + 24), load(ip + 32)],
            );
            store(client, if answered { to[0] } else { from[0] });
            store(client + 8, if answered { to[1] } else { from[1] });
        }
        ip + IPV6_LEN
    } else {
        if ip + IPV4_LEN + 4 > end {
            return None;
        }
        // SAFETY: as above. `::ffff:a.b.c.d`.
        unsafe {
            let (from, to): (u32, u32) = (load(ip + 12), load(ip + 16));
            store(client, 0u64);
            store(client + 8, u32::from_ne_bytes([0, 0, 0xff, 0xff]));
            store(client + 12, if answered { to } else { from });
        }
        ip + IPV4_LEN
    };
    // SAFETY: the ports were compared with the end.
    unsafe {
        let (from, to): (u16, u16) = (load(udp), load(udp + 2));
        (*event).client_port = u16::from_be(if answered { to } else { from });
    }
    Some(())
}

/// Fills in the question's name as sent, and its type, as far as present.
///
/// # Safety
/// `event` can be written.
#[inline(always)]
unsafe fn fill_name<H: Hook>(
    hook: &H,
    zero: Zero,
    frame: &Frame,
    event: *mut TapEvent,
) -> Option<()> {
    let (data, end) = (hook.data(), hook.data_end());
    let name = data + barrier(frame.message + HEADER_LEN);
    // SAFETY: takes the address only, without an access.
    let to = unsafe { &raw mut (*event).name } as usize;
    let mut word = 0;
    let mut ended = 0;
    while word < TAP_NAME_LEN / 8 {
        let at = name + word * 8;
        if at + 8 > end {
            ended = last_bytes(at, end, to + word * 8, word * 8);
            break;
        }
        // SAFETY: just compared with the end, and inside the name. Bytes after the name are ignored
        // because of `name_len`.
        let bytes = unsafe { load::<u64>(at) };
        unsafe { store(to + word * 8, bytes) };
        let zeros = zero_byte(bytes);
        if zeros != 0 {
            ended = word * 8 + first_zero(zeros) + 1;
            break;
        }
        word = barrier(word + 1);
    }
    let ended = zero.value_barrier(ended, 0x1ff);
    if ended == 0 {
        return Some(());
    }
    let after = hook.data() + barrier(frame.message + HEADER_LEN + ended);
    if after + 2 > hook.data_end() {
        return Some(());
    }
    // SAFETY: just compared with the end.
    unsafe {
        (*event).name_len = ended as u16;
        (*event).query_type = u16::from_be(load(after));
    }
    Some(())
}

/// Reads the last bytes of a name that ends less than eight bytes before the frame does. Returns
/// the name's length, including the `before` bytes read earlier, or 0.
#[inline(always)]
fn last_bytes(from: usize, end: usize, to: usize, before: usize) -> usize {
    let mut index = 0;
    while index < 7 {
        if from + index + 1 > end {
            return 0;
        }
        // SAFETY: just compared with the end; the event has room for a word.
        let byte: u8 = unsafe { load(from + index) };
        // SAFETY: as above.
        unsafe { store(to + index, byte) };
        index += 1;
        if byte == 0 {
            return before + index;
        }
    }
    0
}
