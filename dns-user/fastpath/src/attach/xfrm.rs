//! IPsec policies (`linux/xfrm.h`): the reply of a program leaves past them, so what they cover is
//! left to userspace.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use super::netlink::Socket;

/// `NETLINK_XFRM`.
const PROTOCOL: i32 = 6;
/// `XFRM_MSG_NEWPOLICY`, and the request for all.
const POLICIES: (u16, u16) = (0x13, 0x15);
/// Where the direction stands behind selector, lifetimes, priority and index in `struct
/// xfrm_userpolicy_info`.
const DIRECTION_AT: usize = 56 + 64 + 32 + 4 + 4;

/// A policy, as far as it says whom it concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Policy {
    /// Address of this machine's side.
    ours: IpAddr,
    /// Bits of it that count.
    prefix: u8,
    /// Protocol; 0: any.
    protocol: u8,
    /// Our port and its mask.
    port: (u16, u16),
}

/// All policies of the calling thread's network namespace; a kernel without IPsec has none.
pub(super) fn policies() -> io::Result<Vec<Policy>> {
    let mut socket = match Socket::of(PROTOCOL) {
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(Vec::new()),
        other => other?,
    };
    // struct xfrm_userpolicy_id.
    let all = [0; 64];
    socket.dump(POLICIES.1, &all, |kind, message| (kind == POLICIES.0).then(|| policy(message)).flatten())
}

/// Reads a policy.
fn policy(message: &[u8]) -> Option<Policy> {
    // struct xfrm_selector: receiver, sender, ports with masks, family, prefixes, protocol.
    let direction = *message.get(DIRECTION_AT)?;
    let port = |at: usize| message.get(at..)?.first_chunk().map(|bytes| u16::from_be_bytes(*bytes));
    let family = u16::from_ne_bytes(*message.get(40..)?.first_chunk()?);
    // What goes out has our address as its sender.
    let is_out = direction == 1;
    let at = if is_out { 16 } else { 0 };
    let ours = match i32::from(family) {
        libc::AF_INET => IpAddr::from(*message.get(at..)?.first_chunk::<4>()?),
        _ => IpAddr::from(*message.get(at..)?.first_chunk::<16>()?),
    };
    let prefix = *message.get(if is_out { 43 } else { 42 })?;
    let ports = if is_out { (port(36)?, port(38)?) } else { (port(32)?, port(34)?) };
    Some(Policy { ours, prefix, protocol: *message.get(44)?, port: ports })
}

impl Policy {
    /// Whether the policy concerns queries to an endpoint, or replies from it.
    pub(super) fn covers(&self, endpoint: SocketAddr) -> bool {
        let same = |ours: u128, theirs: u128, bits: u32| {
            let host = bits.saturating_sub(u32::from(self.prefix));
            ours.checked_shr(host).unwrap_or(0) == theirs.checked_shr(host).unwrap_or(0)
        };
        let address = match (self.ours, endpoint.ip()) {
            (IpAddr::V4(ours), IpAddr::V4(ip)) => same(ours.to_bits().into(), ip.to_bits().into(), 32),
            (IpAddr::V6(ours), IpAddr::V6(ip)) => same(ours.to_bits(), ip.to_bits(), 128),
            _ => false,
        };
        let (port, mask) = self.port;
        address && matches!(self.protocol, 0 | 17) && endpoint.port() & mask == port & mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_covers_its_prefix() {
        let mut message = vec![0; 168];
        message[..4].copy_from_slice(&[10, 0, 16, 0]);
        message[40..42].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        message[42] = 24;
        let policy = policy(&message).unwrap();
        assert!(policy.covers("10.0.16.5:53".parse().unwrap()));
        assert!(!policy.covers("10.0.17.5:53".parse().unwrap()));
        assert!(!policy.covers("[fd00::1]:53".parse().unwrap()));
        message[44] = 6;
        assert!(!super::policy(&message).unwrap().covers("10.0.16.5:53".parse().unwrap()), "TCP alone");
    }
}
