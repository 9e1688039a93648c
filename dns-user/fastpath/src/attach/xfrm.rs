//! IPsec policies (`linux/xfrm.h`). A program's reply bypasses them, so endpoints that they cover
//! are left to userspace.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use super::netlink::Socket;

/// `XFRM_MSG_NEWPOLICY`, and the request for all policies.
const POLICIES: (u16, u16) = (0x13, 0x15);
/// Offset of the direction, after selector, lifetimes, priority and index, in `struct
/// xfrm_userpolicy_info`.
const DIRECTION_AT: usize = 56 + 64 + 32 + 4 + 4;

/// The selector of a policy: the local endpoints that it covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Policy {
    /// The local address, or network, of the policy.
    ours: IpAddr,
    /// Length of its prefix in bits.
    prefix: u8,
    protocol: u8,
    /// The local port and its mask.
    port: (u16, u16),
}

/// Returns the policies of the calling thread's network namespace; none on a kernel without IPsec.
pub(super) fn policies() -> io::Result<Vec<Policy>> {
    let mut socket = match Socket::ipsec() {
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(Vec::new()),
        other => other?,
    };
    // struct xfrm_userpolicy_id.
    let all = [0; 64];
    socket.dump(POLICIES.1, &all, |kind, message| (kind == POLICIES.0).then(|| policy(message)).flatten())
}

fn policy(message: &[u8]) -> Option<Policy> {
    // struct xfrm_selector: destination, source, ports with masks, family, prefixes, protocol.
    let direction = *message.get(DIRECTION_AT)?;
    let port = |at: usize| message.get(at..)?.first_chunk().map(|bytes| u16::from_be_bytes(*bytes));
    let family = u16::from_ne_bytes(*message.get(40..)?.first_chunk()?);
    // Outbound packets carry our address as their source.
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
    /// Returns whether the policy covers queries to an endpoint, or replies from it.
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
    fn policy_covers_prefix() {
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
