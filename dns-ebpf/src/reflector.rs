//! The yardstick of the benches: sends every IPv4 datagram to port 53 back as
//! an empty reply, with no look-up. What a packet costs besides the answering.

use aya_ebpf::{
    helpers::bpf_skb_store_bytes,
    programs::{TcContext, XdpContext},
};

use crate::{
    bytes::{load, store},
    maps::scratch,
};

/// Bytes of Ethernet, IPv4, UDP and the first four of DNS.
const HEAD_LEN: usize = 14 + 20 + 8 + 4;

/// Turns the packet round in place.
#[inline(always)]
pub fn reflect(context: &XdpContext) -> Option<()> {
    let (data, end) = (context.data(), context.data_end());
    if data + HEAD_LEN > end || !is_query(data) {
        return None;
    }
    turn(data, data);
    Some(())
}

/// The same at tc, where packets are not written to directly.
#[inline(always)]
pub fn reflect_tc(context: &TcContext) -> Option<()> {
    let (data, end) = (context.data(), context.data_end());
    if data + HEAD_LEN > end || !is_query(data) {
        return None;
    }
    // SAFETY: no access yet, just the address.
    let start = unsafe { &raw mut (*scratch()?).head } as usize;
    let mut at = 0;
    while at < HEAD_LEN - 6 {
        // SAFETY: inside the head compared with the end, and inside the scratch head.
        unsafe { store::<u64>(start + at, load(data + at)) };
        at += 8;
    }
    turn(data, start);
    // SAFETY: the context is the kernel's own, the scratch head holds the bytes.
    let stored = unsafe { bpf_skb_store_bytes(context.skb.skb, 0, start as *const _, HEAD_LEN as u32, 0) };
    (stored == 0).then_some(())
}

/// Whether it is an IPv4 datagram to port 53.
#[inline(always)]
fn is_query(data: usize) -> bool {
    // SAFETY: inside the head that the callers compared with the end.
    unsafe {
        load::<u16>(data + 12) == 0x0800u16.to_be()
            && load::<u8>(data + 14) == 0x45
            && load::<u8>(data + 23) == 17
            && load::<u16>(data + 36) == 53u16.to_be()
    }
}

/// Writes the head at `from`, turned round, to `to`.
#[inline(always)]
fn turn(from: usize, to: usize) {
    // SAFETY: inside the heads that the callers have.
    unsafe {
        let (receiver, receiver_end): (u32, u16) = (load(from), load(from + 4));
        let (sender, sender_end): (u32, u16) = (load(from + 6), load(from + 10));
        store(to, sender);
        store(to + 4, sender_end);
        store(to + 6, receiver);
        store(to + 10, receiver_end);
        let (client, server): (u32, u32) = (load(from + 26), load(from + 30));
        store(to + 26, server);
        store(to + 30, client);
        store(to + 34, load::<u32>(from + 34).rotate_left(16));
        store(to + 38, load::<u16>(from + 38));
        store(to + 40, 0u16);
        // QR, AA and RD; RA.
        store(to + 42, load::<u16>(from + 42));
        store(to + 44, u16::from_ne_bytes([0x85, 0x80]));
    }
}
