//! Decides whether a frame is a datagram to one of our endpoints that the kernel would deliver.
//!
//! The cheapest checks come first: most frames are for other sockets, and the time spent here
//! delays each of them. Malformed packets pass to the kernel, which rejects them.

use dns_common::{
    counters::Outcome,
    scope::{
        INTERFACE_TRIES, INTERFACES, Interface, LOOPBACK_IFINDEX, MAX_ENDPOINTS, Scope, source_hash,
    },
};

use crate::{
    IS_SKELETON,
    bytes::{Zero, barrier, barrier_and, load},
    checksum::Sum,
    frame::{ETHERNET_LEN, Frame, IPV4_LEN, IPV6_LEN, UDP, UDP_LEN, VLAN_TAG_LEN},
    hook::Hook,
    maps::pass_to_stack,
};

/// EtherTypes in network byte order.
const IPV4: u16 = 0x0800u16.to_be();
const IPV6: u16 = 0x86ddu16.to_be();
const TAGGED: u16 = 0x8100u16.to_be();
const SERVICE_TAGGED: u16 = 0x88a8u16.to_be();

/// Finds the datagram in the frame if it is for us.
#[inline(always)]
pub fn filter<H: Hook>(hook: &H, scope: &Scope, zero: Zero) -> Result<Frame, Outcome> {
    let data = hook
        .reach(ETHERNET_LEN + IPV4_LEN + UDP_LEN)
        .ok_or(Outcome::NotOurs)?;
    // SAFETY: inside the 42 bytes just compared with the end.
    let ethertype: u16 = unsafe { load(data + 12) };
    match ethertype {
        IPV4 => ipv4(hook, scope, zero, ETHERNET_LEN),
        IPV6 => ipv6(hook, scope, zero, ETHERNET_LEN),
        TAGGED if hook.stripped_tag().is_some() => pass_to_stack(Outcome::Unsupported),
        // SAFETY (both loads): as above.
        TAGGED => match unsafe { load::<u16>(data + ETHERNET_LEN + 2) } {
            TAGGED | SERVICE_TAGGED => pass_to_stack(Outcome::Unsupported),
            _ if !is_our_vlan(scope, u16::from_be(unsafe { load(data + ETHERNET_LEN) })) => {
                pass_to_stack(Outcome::NotOurs)
            }
            IPV4 => ipv4(hook, scope, zero, ETHERNET_LEN + VLAN_TAG_LEN),
            IPV6 => ipv6(hook, scope, zero, ETHERNET_LEN + VLAN_TAG_LEN),
            _ => pass_to_stack(Outcome::NotOurs),
        },
        SERVICE_TAGGED => pass_to_stack(Outcome::Unsupported),
        _ => pass_to_stack(Outcome::NotOurs),
    }
}

/// Finds the datagram in an IPv4 packet (RFC 791) that begins at `ip`.
#[inline(always)]
fn ipv4<H: Hook>(hook: &H, scope: &Scope, zero: Zero, ip: usize) -> Result<Frame, Outcome> {
    let udp = ip + IPV4_LEN;
    let data = hook.reach(udp + UDP_LEN).ok_or(Outcome::NotOurs)?;
    // SAFETY (all loads): inside the bytes just compared with the end.
    if unsafe { load::<u8>(data + ip + 9) } != UDP {
        return pass_to_stack(Outcome::NotOurs);
    }
    // Version 4, five words, no options; not a fragment.
    if unsafe { load::<u8>(data + ip) } != 0x45
        || unsafe { load::<u16>(data + ip + 6) } & 0x3fffu16.to_be() != 0
    {
        return pass_to_stack(Outcome::Unsupported);
    }
    let port: u16 = unsafe { load(data + udp + 2) };
    let (source, address): (u32, u32) = unsafe { (load(data + ip + 12), load(data + ip + 16)) };
    let to_loopback = address.to_ne_bytes()[0] == 127;
    let Some(endpoint) = endpoint_v4(scope, zero, port, address) else {
        return pass_to_stack(Outcome::NotOurs);
    };
    let slot = served_at(hook, scope, zero, data, endpoint, to_loopback)?;
    let total_len = u16::from_be(unsafe { load(data + ip + 2) }) as usize;
    let udp_len = u16::from_be(unsafe { load(data + udp + 4) }) as usize;
    if total_len != IPV4_LEN + udp_len || udp_len < UDP_LEN {
        return pass_to_stack(Outcome::BadLength);
    }
    if !IS_SKELETON
        && (is_refused_v4(scope, source, hook.ifindex() == LOOPBACK_IFINDEX)
            || is_refused_sender(data, unsafe { load(data + udp) }))
    {
        return pass_to_stack(Outcome::BadSender);
    }
    let mut sum = Sum::new();
    sum.add(unsafe { load(data + ip) });
    sum.add(unsafe { load(data + ip + 8) });
    sum.add_half(address);
    if !IS_SKELETON && !sum.is_right() {
        return pass_to_stack(Outcome::BadChecksum);
    }
    Ok(Frame {
        tagged: (ip != ETHERNET_LEN) as usize,
        v6: 0,
        message: udp + UDP_LEN,
        message_len: udp_len - UDP_LEN,
        endpoint,
        slot,
    })
}

/// Finds the datagram in an IPv6 packet (RFC 8200) that begins at `ip`.
#[inline(always)]
fn ipv6<H: Hook>(hook: &H, scope: &Scope, zero: Zero, ip: usize) -> Result<Frame, Outcome> {
    let udp = ip + IPV6_LEN;
    let data = hook.reach(udp + UDP_LEN).ok_or(Outcome::NotOurs)?;
    // SAFETY (all loads): inside the bytes just compared with the end.
    match unsafe { load::<u8>(data + ip + 6) } {
        UDP => {}
        // Hop-by-hop, routing, fragment, ESP, authentication, destination options.
        0 | 43 | 44 | 50 | 51 | 60 => return pass_to_stack(Outcome::Unsupported),
        _ => return pass_to_stack(Outcome::NotOurs),
    }
    if unsafe { load::<u8>(data + ip) } & 0xf0 != 0x60 {
        return pass_to_stack(Outcome::Unsupported);
    }
    let port: u16 = unsafe { load(data + udp + 2) };
    let source: [u64; 2] = unsafe { [load(data + ip + 8), load(data + ip + 16)] };
    let address: [u64; 2] = unsafe { [load(data + ip + 24), load(data + ip + 32)] };
    let to_loopback = address == [0, 1u64.to_be()];
    let Some(endpoint) = endpoint_v6(scope, zero, port, address) else {
        return pass_to_stack(Outcome::NotOurs);
    };
    let slot = served_at(hook, scope, zero, data, endpoint, to_loopback)?;
    let payload_len = u16::from_be(unsafe { load(data + ip + 4) }) as usize;
    let udp_len = u16::from_be(unsafe { load(data + udp + 4) }) as usize;
    if payload_len != udp_len || udp_len < UDP_LEN {
        return pass_to_stack(Outcome::BadLength);
    }
    if !IS_SKELETON
        && (is_refused_v6(scope, source, hook.ifindex() == LOOPBACK_IFINDEX)
            || is_refused_sender(data, unsafe { load(data + udp) }))
    {
        return pass_to_stack(Outcome::BadSender);
    }
    Ok(Frame {
        tagged: (ip != ETHERNET_LEN) as usize,
        v6: 1,
        message: udp + UDP_LEN,
        message_len: udp_len - UDP_LEN,
        endpoint,
        slot,
    })
}

/// Returns the slot of the interface on which the frame at `data` arrived, if the kernel would
/// accept the frame for this machine (its Ethernet address; no VLAN, or a served one) and the
/// interface is served for this endpoint. Only `lo` serves loopback addresses.
#[inline(always)]
fn served_at<H: Hook>(
    hook: &H,
    scope: &Scope,
    zero: Zero,
    data: usize,
    endpoint: usize,
    to_loopback: bool,
) -> Result<usize, Outcome> {
    let ifindex = hook.ifindex();
    if to_loopback && ifindex != LOOPBACK_IFINDEX {
        return pass_to_stack(Outcome::NotOurs);
    }
    let Some(slot) = interface_slot(scope, ifindex) else {
        return pass_to_stack(Outcome::NotServed);
    };
    let slot = zero.value_barrier(slot, INTERFACES - 1);
    let interface = &scope.interfaces[slot];
    if !hook
        .stripped_tag()
        .is_none_or(|tag| is_our_vlan(scope, tag))
        || !hook.is_addressed_to(interface, data)
    {
        return pass_to_stack(Outcome::NotOurs);
    }
    if interface.endpoints >> endpoint & 1 == 0 {
        return pass_to_stack(Outcome::NotServed);
    }
    Ok(slot)
}

#[inline(always)]
fn interface_slot(scope: &Scope, ifindex: u32) -> Option<usize> {
    let first = Scope::first_slot(ifindex);
    // Almost always; the loop costs more.
    if scope.interfaces[first].ifindex == ifindex {
        return Some(first);
    }
    let mut tries = 1;
    while tries < INTERFACE_TRIES {
        let slot = barrier(first + tries) & (INTERFACES - 1);
        if scope.interfaces[slot].ifindex == ifindex {
            return Some(slot);
        }
        tries = barrier(tries + 1);
    }
    None
}

/// Returns whether the frame at `data` is addressed to the interface, or to the bridge that it
/// belongs to. Broadcast and multicast frames are not: a reply cannot be sent from their address.
#[inline(always)]
pub fn is_to_interface(interface: &Interface, data: usize) -> bool {
    const ADDRESS: usize = usize::from_ne_bytes([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]);
    // SAFETY: both addresses are eight bytes, aligned to them by their struct.
    let at = |address: &[u8; 8]| unsafe { load::<u64>(&raw const *address as usize) as usize };
    // SAFETY: an Ethernet header starts at `data`.
    let to = unsafe { load::<u64>(data) as usize } & ADDRESS;
    // Opaque, so that the compiler loads the second address only if the first one does not match.
    to == at(&interface.address) || to == barrier(at(&interface.master))
}

/// Returns whether a reply cannot reach the sender: port 0, or a broadcast or multicast source MAC
/// (of the frame at `data`).
#[inline(always)]
fn is_refused_sender(data: usize, port: u16) -> bool {
    const MANY: u8 = 1;
    // SAFETY: an Ethernet header starts at `data`.
    port == 0 || unsafe { load::<u8>(data + 6) } & MANY != 0
}

/// Returns whether the kernel rejects this IPv4 sender (`ip_route_input_slow`): 0.0.0.0/8,
/// multicast, class E, broadcast; other than on `lo` also 127.0.0.0/8, local and broadcast
/// addresses.
#[inline(always)]
fn is_refused_v4(scope: &Scope, source: u32, on_lo: bool) -> bool {
    let first = source.to_ne_bytes()[0];
    if first == 0 || first >= 224 {
        return true;
    }
    !on_lo && (first == 127 || is_listed(scope, [0, 0, 0, source]))
}

/// Returns whether the kernel rejects this IPv6 sender (`ip6_rcv_core`) or cannot reach it:
/// multicast, ::, IPv4-mapped; other than on `lo` also ::1 and local addresses.
#[inline(always)]
fn is_refused_v6(scope: &Scope, source: [u64; 2], on_lo: bool) -> bool {
    const LOOPBACK: u64 = 1u64.to_be();
    if source[0].to_ne_bytes()[0] == 0xff {
        return true;
    }
    if source[0] == 0 {
        let third = source[1] as u32;
        let is_reserved = third == 0 || third == u32::from_ne_bytes([0, 0, 0xff, 0xff]);
        return is_reserved && !(on_lo && source[1] == LOOPBACK);
    }
    let words = [
        source[0] as u32,
        (source[0] >> 32) as u32,
        source[1] as u32,
        (source[1] >> 32) as u32,
    ];
    !on_lo && is_listed(scope, words)
}

/// Returns whether the sender is a local or broadcast address, or by chance seems to be one.
#[inline(always)]
fn is_listed(scope: &Scope, source: [u32; 4]) -> bool {
    let (word, bits) = Scope::refused_source(source_hash(source));
    scope.refused_sources[word] & bits == bits
}

/// Returns whether frames with this VLAN tag are answered.
#[inline(always)]
fn is_our_vlan(scope: &Scope, tag: u16) -> bool {
    let (word, bit) = Scope::vlan(tag);
    scope.vlans[word] & bit != 0
}

/// Makes the whole message directly readable.
#[inline(always)]
pub fn pull_message<H: Hook>(hook: &H, frame: &Frame) -> Result<(), Outcome> {
    if !H::IS_TC {
        return Ok(());
    }
    // Masked for verifiers (Linux 6.1) that cannot prove that it is not negative.
    let len = barrier_and(frame.message + frame.message_len, 0xffff);
    if hook.data() + len <= hook.data_end() {
        return Ok(());
    }
    if len > hook.length() || !hook.pull(len) {
        // Without `pass_to_stack`, with which the verifier of Linux 5.15 would examine nearly twice as
        // many instructions.
        return Err(Outcome::BadLength);
    }
    Ok(())
}

/// Returns the slot of the endpoint with this IPv4 address and port (network order).
#[inline(always)]
fn endpoint_v4(scope: &Scope, zero: Zero, port: u16, address: u32) -> Option<usize> {
    let mut index = 0;
    while index < MAX_ENDPOINTS {
        if index >= scope.endpoint_slots as usize {
            return None;
        }
        let endpoint = &scope.endpoints[index];
        // SAFETY: the last four of 16 bytes, aligned to 8 by their struct.
        let ours: u32 = unsafe { load(&raw const endpoint.address as usize + 12) };
        if u16::from_ne_bytes(endpoint.port) == port && endpoint.family == 4 && ours == address {
            return Some(zero.value_barrier(index, MAX_ENDPOINTS - 1));
        }
        index += 1;
    }
    None
}

/// Returns the slot of the endpoint with this IPv6 address and port (network order).
#[inline(always)]
fn endpoint_v6(scope: &Scope, zero: Zero, port: u16, address: [u64; 2]) -> Option<usize> {
    let mut index = 0;
    while index < MAX_ENDPOINTS {
        if index >= scope.endpoint_slots as usize {
            return None;
        }
        let endpoint = &scope.endpoints[index];
        let base = &raw const endpoint.address as usize;
        // SAFETY: the address is 16 bytes, aligned to 8 by its struct.
        let ours: [u64; 2] = unsafe { [load(base), load(base + 8)] };
        if u16::from_ne_bytes(endpoint.port) == port && endpoint.family == 6 && ours == address {
            return Some(zero.value_barrier(index, MAX_ENDPOINTS - 1));
        }
        index += 1;
    }
    None
}
