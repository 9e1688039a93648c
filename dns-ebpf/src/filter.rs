//! Is this frame a datagram to one of our addresses and ports?
//!
//! The cheapest checks first: most frames are somebody else's, and each costs
//! its sender the time spent here.

use dns_common::{
    control::{Control, MAX_ENDPOINTS},
    counters::Outcome,
};

use crate::{
    bytes::{load, masked, opaque},
    frame::Frame,
    headers::{ETHERNET_LEN, IPV4_LEN, IPV6_LEN, UDP, UDP_LEN, VLAN_TAG_LEN},
    hook::Hook,
    outcome::goes_up,
};

/// EtherTypes as they lie in memory.
const IPV4: u16 = 0x0800u16.to_be();
/// See [`IPV4`].
const IPV6: u16 = 0x86ddu16.to_be();
/// 802.1Q.
const TAGGED: u16 = 0x8100u16.to_be();
/// 802.1ad.
const SERVICE_TAGGED: u16 = 0x88a8u16.to_be();

/// Finds the datagram in the frame, if it is for us.
#[inline(always)]
pub fn filter<H: Hook>(hook: &H, control: &Control) -> Result<Frame, Outcome> {
    let data = hook.reach(ETHERNET_LEN + IPV4_LEN + UDP_LEN).ok_or(Outcome::NotOurs)?;
    // SAFETY: inside the 42 bytes just compared with the end.
    let ethertype: u16 = unsafe { load(data + 12) };
    match ethertype {
        IPV4 => ipv4(hook, control, ETHERNET_LEN),
        IPV6 => ipv6(hook, control, ETHERNET_LEN),
        TAGGED if hook.stripped_tag().is_some() => goes_up(Outcome::Unsupported),
        // SAFETY (both loads): as above.
        TAGGED => match unsafe { load::<u16>(data + ETHERNET_LEN + 2) } {
            TAGGED | SERVICE_TAGGED => goes_up(Outcome::Unsupported),
            _ if !is_our_vlan(control, u16::from_be(unsafe { load(data + ETHERNET_LEN) })) => {
                goes_up(Outcome::NotOurs)
            }
            IPV4 => ipv4(hook, control, ETHERNET_LEN + VLAN_TAG_LEN),
            IPV6 => ipv6(hook, control, ETHERNET_LEN + VLAN_TAG_LEN),
            _ => goes_up(Outcome::NotOurs),
        },
        SERVICE_TAGGED => goes_up(Outcome::Unsupported),
        _ => goes_up(Outcome::NotOurs),
    }
}

/// The datagram in an IPv4 packet (RFC 791) that begins at `ip`.
#[inline(always)]
fn ipv4<H: Hook>(hook: &H, control: &Control, ip: usize) -> Result<Frame, Outcome> {
    let udp = ip + IPV4_LEN;
    let data = hook.reach(udp + UDP_LEN).ok_or(Outcome::NotOurs)?;
    // SAFETY (all loads): inside the bytes just compared with the end.
    if unsafe { load::<u8>(data + ip + 9) } != UDP {
        return goes_up(Outcome::NotOurs);
    }
    // Version 4, five words, no options; neither more fragments nor an offset.
    if unsafe { load::<u8>(data + ip) } != 0x45
        || unsafe { load::<u16>(data + ip + 6) } & 0x3fffu16.to_be() != 0
    {
        return goes_up(Outcome::Unsupported);
    }
    let port: u16 = unsafe { load(data + udp + 2) };
    let address: u32 = unsafe { load(data + ip + 16) };
    let to_loopback = address.to_ne_bytes()[0] == 127;
    if !is_ours_v4(control, port, address) || !is_meant_for_us(hook, control, data, to_loopback) {
        return goes_up(Outcome::NotOurs);
    }
    let total_len = u16::from_be(unsafe { load(data + ip + 2) }) as usize;
    let udp_len = u16::from_be(unsafe { load(data + udp + 4) }) as usize;
    if total_len != IPV4_LEN + udp_len || udp_len < UDP_LEN {
        return goes_up(Outcome::BadLength);
    }
    Ok(Frame {
        tagged: (ip != ETHERNET_LEN) as usize,
        v6: 0,
        message: udp + UDP_LEN,
        message_len: udp_len - UDP_LEN,
    })
}

/// The datagram in an IPv6 packet (RFC 8200) that begins at `ip`.
#[inline(always)]
fn ipv6<H: Hook>(hook: &H, control: &Control, ip: usize) -> Result<Frame, Outcome> {
    let udp = ip + IPV6_LEN;
    let data = hook.reach(udp + UDP_LEN).ok_or(Outcome::NotOurs)?;
    // SAFETY (all loads): inside the bytes just compared with the end.
    match unsafe { load::<u8>(data + ip + 6) } {
        UDP => {}
        // Hop-by-hop, routing, fragment, ESP, authentication, destination options.
        0 | 43 | 44 | 50 | 51 | 60 => return goes_up(Outcome::Unsupported),
        _ => return goes_up(Outcome::NotOurs),
    }
    if unsafe { load::<u8>(data + ip) } & 0xf0 != 0x60 {
        return goes_up(Outcome::Unsupported);
    }
    let port: u16 = unsafe { load(data + udp + 2) };
    let address: [u64; 2] = unsafe { [load(data + ip + 24), load(data + ip + 32)] };
    let to_loopback = address == [0, 1u64.to_be()];
    if !is_ours_v6(control, port, address) || !is_meant_for_us(hook, control, data, to_loopback) {
        return goes_up(Outcome::NotOurs);
    }
    let payload_len = u16::from_be(unsafe { load(data + ip + 4) }) as usize;
    let udp_len = u16::from_be(unsafe { load(data + udp + 4) }) as usize;
    if payload_len != udp_len || udp_len < UDP_LEN {
        return goes_up(Outcome::BadLength);
    }
    Ok(Frame {
        tagged: (ip != ETHERNET_LEN) as usize,
        v6: 1,
        message: udp + UDP_LEN,
        message_len: udp_len - UDP_LEN,
    })
}

/// Whether the kernel would have taken the frame, whose start is at `data`, for one of
/// this machine's: that of one of its addresses, in no VLAN or in one that is served.
#[inline(always)]
fn is_meant_for_us<H: Hook>(hook: &H, control: &Control, data: usize, to_loopback: bool) -> bool {
    hook.stripped_tag().is_none_or(|tag| is_our_vlan(control, tag))
        && hook.is_meant_for_us(control, data, to_loopback)
}

/// Whether the frame whose start is at `data` is addressed to the interface, or to the bridge
/// that it is a part of. One to many is not: its address is no sender for a reply.
#[inline(always)]
pub fn is_to_interface(control: &Control, ifindex: u32, data: usize) -> bool {
    const ADDRESS: usize = usize::from_ne_bytes([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]);
    let interface = &control.interfaces[Control::interface(ifindex)];
    // SAFETY: both addresses are eight bytes, aligned to them by their struct.
    let at = |address: &[u8; 8]| unsafe { load::<u64>(&raw const *address as usize) as usize };
    // SAFETY: an Ethernet header lies at `data`.
    let to = unsafe { load::<u64>(data) as usize } & ADDRESS;
    // Looked at only where it has to be, which the compiler would not do by itself.
    interface.ifindex == ifindex && (to == at(&interface.address) || to == opaque(at(&interface.master)))
}

/// Whether frames with this VLAN tag are answered.
#[inline(always)]
fn is_our_vlan(control: &Control, tag: u16) -> bool {
    let (word, bit) = Control::vlan(tag);
    control.vlans[word] & bit != 0
}

/// Makes the whole message readable, where part of it is not yet.
#[inline(always)]
pub fn pull_message<H: Hook>(hook: &H, frame: &Frame) -> Result<(), Outcome> {
    if !H::IS_TC {
        return Ok(());
    }
    // Masked for verifiers (Linux 6.1) that cannot tell it is not negative.
    let len = masked(frame.message + frame.message_len, 0xffff);
    if hook.data() + len <= hook.data_end() {
        return Ok(());
    }
    if len > hook.length() || !hook.pull(len) {
        // Not by `goes_up`: the verifier of Linux 5.15 would look at nearly twice as much.
        return Err(Outcome::BadLength);
    }
    Ok(())
}

/// Whether the server listens on this IPv4 address and port (network order).
#[inline(always)]
fn is_ours_v4(control: &Control, port: u16, address: u32) -> bool {
    let mut index = 0;
    while index < MAX_ENDPOINTS {
        if index >= control.endpoint_count as usize {
            return false;
        }
        let endpoint = &control.endpoints[index];
        // SAFETY: the last four of 16 bytes, aligned to 8 by their struct.
        let ours: u32 = unsafe { load(&raw const endpoint.address as usize + 12) };
        if u16::from_ne_bytes(endpoint.port) == port && endpoint.family == 4 && ours == address {
            return true;
        }
        index += 1;
    }
    false
}

/// Whether the server listens on this IPv6 address and port (network order).
#[inline(always)]
fn is_ours_v6(control: &Control, port: u16, address: [u64; 2]) -> bool {
    let mut index = 0;
    while index < MAX_ENDPOINTS {
        if index >= control.endpoint_count as usize {
            return false;
        }
        let endpoint = &control.endpoints[index];
        let base = &raw const endpoint.address as usize;
        // SAFETY: the address is 16 bytes, aligned to 8 by its struct.
        let ours: [u64; 2] = unsafe { [load(base), load(base + 8)] };
        if u16::from_ne_bytes(endpoint.port) == port && endpoint.family == 6 && ours == address {
            return true;
        }
        index += 1;
    }
    false
}
