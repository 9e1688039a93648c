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
    hook::Hook,
    maps::Scratch,
};

/// Bytes of an Ethernet header.
const ETHERNET_LEN: usize = 14;
/// Bytes of one 802.1Q tag.
const TAG_LEN: usize = 4;
/// Bytes of an IPv4 header without options.
pub const IPV4_LEN: usize = 20;
/// Bytes of an IPv6 header.
pub const IPV6_LEN: usize = 40;
/// Bytes of a UDP header.
pub const UDP_LEN: usize = 8;
/// Offset of the checksum in it.
pub const UDP_SUM: usize = 6;

/// Protocol number of UDP.
pub const UDP: u8 = 17;
/// EtherTypes as they lie in memory.
const IPV4: u16 = 0x0800u16.to_be();
/// See [`IPV4`].
const IPV6: u16 = 0x86ddu16.to_be();
/// 802.1Q.
const TAGGED: u16 = 0x8100u16.to_be();
/// 802.1ad.
const SERVICE_TAGGED: u16 = 0x88a8u16.to_be();

/// Where things lie in a frame that is a datagram for us.
#[derive(Clone, Copy)]
pub struct Frame {
    /// There is a VLAN tag before the IP header.
    pub tagged: bool,
    /// IPv6 instead of IPv4.
    pub v6: bool,
    /// Offset of the DNS message.
    pub message: usize,
    /// Bytes of DNS message.
    pub message_len: usize,
}

impl Frame {
    /// Makes one path of the four kinds of frames, see [`crate::bytes::forget`].
    #[inline(always)]
    pub fn forget(self, scratch: *mut Scratch) -> Self {
        self.keep(scratch);
        Self::kept(scratch)
    }

    /// Leaves it where [`Self::kept`] finds it, in the program that is called next too.
    #[inline(always)]
    pub fn keep(self, scratch: *mut Scratch) {
        let Self { tagged, v6, message, message_len } = self;
        // SAFETY: this CPU's own element.
        unsafe {
            let kept = &raw mut (*scratch).frame as *mut usize;
            kept.write_volatile(tagged as usize);
            kept.add(1).write_volatile(v6 as usize);
            kept.add(2).write_volatile(message);
            kept.add(3).write_volatile(message_len);
        }
    }

    /// The frame that was kept last.
    #[inline(always)]
    pub fn kept(scratch: *mut Scratch) -> Self {
        // SAFETY: this CPU's own element.
        unsafe {
            let kept = &raw const (*scratch).frame as *const usize;
            Self {
                tagged: opaque(kept.read_volatile()) & 1 != 0,
                v6: opaque(kept.add(1).read_volatile()) & 1 != 0,
                message: opaque(kept.add(2).read_volatile()) & 0x7f,
                message_len: opaque(kept.add(3).read_volatile()) & 0xffff,
            }
        }
    }
}

/// Finds the datagram in the frame, if it is for us.
#[inline(always)]
pub fn filter<H: Hook>(hook: &H, control: &Control) -> Result<Frame, Outcome> {
    let data = hook.reach(ETHERNET_LEN + IPV4_LEN + UDP_LEN).ok_or(Outcome::NotOurs)?;
    // SAFETY: inside the 42 bytes just compared with the end.
    let ethertype: u16 = unsafe { load(data + 12) };
    match ethertype {
        IPV4 => ipv4(hook, control, ETHERNET_LEN),
        IPV6 => ipv6(hook, control, ETHERNET_LEN),
        // SAFETY: as above.
        TAGGED => match unsafe { load::<u16>(data + ETHERNET_LEN + 2) } {
            IPV4 => ipv4(hook, control, ETHERNET_LEN + TAG_LEN),
            IPV6 => ipv6(hook, control, ETHERNET_LEN + TAG_LEN),
            TAGGED | SERVICE_TAGGED => Err(Outcome::Unsupported),
            _ => Err(Outcome::NotOurs),
        },
        SERVICE_TAGGED => Err(Outcome::Unsupported),
        _ => Err(Outcome::NotOurs),
    }
}

/// The datagram in an IPv4 packet (RFC 791) that begins at `ip`.
#[inline(always)]
fn ipv4<H: Hook>(hook: &H, control: &Control, ip: usize) -> Result<Frame, Outcome> {
    let udp = ip + IPV4_LEN;
    let data = hook.reach(udp + UDP_LEN).ok_or(Outcome::NotOurs)?;
    // SAFETY (all loads): inside the bytes just compared with the end.
    if unsafe { load::<u8>(data + ip + 9) } != UDP {
        return Err(Outcome::NotOurs);
    }
    // Version 4, five words, no options; neither more fragments nor an offset.
    if unsafe { load::<u8>(data + ip) } != 0x45
        || unsafe { load::<u16>(data + ip + 6) } & 0x3fffu16.to_be() != 0
    {
        return Err(Outcome::Unsupported);
    }
    let port: u16 = unsafe { load(data + udp + 2) };
    let address: u32 = unsafe { load(data + ip + 16) };
    if !is_ours_v4(control, port, address) {
        return Err(Outcome::NotOurs);
    }
    let total_len = u16::from_be(unsafe { load(data + ip + 2) }) as usize;
    let udp_len = u16::from_be(unsafe { load(data + udp + 4) }) as usize;
    if total_len != IPV4_LEN + udp_len || udp_len < UDP_LEN {
        return Err(Outcome::BadLength);
    }
    Ok(Frame {
        tagged: ip != ETHERNET_LEN,
        v6: false,
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
        0 | 43 | 44 | 50 | 51 | 60 => return Err(Outcome::Unsupported),
        _ => return Err(Outcome::NotOurs),
    }
    if unsafe { load::<u8>(data + ip) } & 0xf0 != 0x60 {
        return Err(Outcome::Unsupported);
    }
    let port: u16 = unsafe { load(data + udp + 2) };
    let address: [u64; 2] = unsafe { [load(data + ip + 24), load(data + ip + 32)] };
    if !is_ours_v6(control, port, address) {
        return Err(Outcome::NotOurs);
    }
    let payload_len = u16::from_be(unsafe { load(data + ip + 4) }) as usize;
    let udp_len = u16::from_be(unsafe { load(data + udp + 4) }) as usize;
    if payload_len != udp_len || udp_len < UDP_LEN {
        return Err(Outcome::BadLength);
    }
    Ok(Frame { tagged: ip != ETHERNET_LEN, v6: true, message: udp + UDP_LEN, message_len: udp_len - UDP_LEN })
}

/// Makes the whole message readable, where part of it is not yet.
#[inline(always)]
pub fn pull_message<H: Hook>(hook: &H, frame: &Frame) -> Result<(), Outcome> {
    // Masked for verifiers (Linux 6.1) that cannot tell it is not negative.
    let len = masked(frame.message + frame.message_len, 0xffff);
    if !H::IS_TC || hook.data() + len <= hook.data_end() {
        return Ok(());
    }
    if len > hook.length() || !hook.pull(len) {
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
