//! The bare reflector: returns every IPv4 datagram to port 53 as an empty reply, without a look-up.
//! Measures the cost of a packet without answering.

use crate::bytes::{load, store};

/// Bytes of Ethernet, IPv4, UDP and the first four of DNS.
const HEAD_LEN: usize = 14 + 20 + 8 + 4;

/// Turns the packet from `data` to `end` around in place. At tc as well, because the bench sends
/// only queries, so writing to packets costs no other traffic.
#[inline(always)]
pub fn reflect(data: usize, end: usize) -> Option<()> {
    if data + HEAD_LEN > end || !is_query(data) {
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
        store(at + 40, 0u16);
        // QR, AA and RD; RA.
        store(at + 44, u16::from_ne_bytes([0x85, 0x80]));
    }
}
