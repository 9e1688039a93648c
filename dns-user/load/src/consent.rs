//! Whether a server may be loaded: its address, and its answer to a first query.
//!
//! The load exceeds what the Internet bears, so an address that was mistyped, or a server that refuses, must end it
//! before it begins.

use std::{
    net::{IpAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use nix::sys::socket::SockaddrStorage;

/// Length of the DNS header.
const HEADER_LEN: usize = 12;

/// Expected RCODE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Expected {
    Noerror,
    Servfail,
    Nxdomain,
    Refused,
}

impl Expected {
    fn code(self) -> u8 {
        match self {
            Self::Noerror => 0,
            Self::Servfail => 2,
            Self::Nxdomain => 3,
            Self::Refused => 5,
        }
    }

    /// Requires a reply to the question of `query` with this RCODE.
    pub(crate) fn verify(self, query: &[u8], reply: &[u8]) -> Result<()> {
        let Some((header, rest)) = reply.split_at_checked(HEADER_LEN) else {
            bail!("a message of {} bytes is no reply", reply.len());
        };
        // QR; the OPCODE is that of a query, 0.
        ensure!(header[2] & 0xf8 == 0x80, "the message is no reply");
        let found = header[3] & 0x0f;
        ensure!(
            found == self.code(),
            "its RCODE is {}, expected {} (--expect)",
            hickory_proto::op::ResponseCode::from(0, found),
            hickory_proto::op::ResponseCode::from(0, self.code()),
        );
        let question = question_of(query);
        ensure!(
            header[4..6] == [0, 1]
                && rest
                    .get(..question.len())
                    .is_some_and(|echo| echo.eq_ignore_ascii_case(question)),
            "it answers another question"
        );
        Ok(())
    }
}

/// Returns the question of a query that [`crate::queries`] read.
fn question_of(query: &[u8]) -> &[u8] {
    let Some(rest) = query.get(HEADER_LEN..) else {
        return &[];
    };
    let mut end = 0;
    while let Some(&length) = rest.get(end) {
        end += 1 + usize::from(length);
        if length == 0 {
            break;
        }
    }
    // Type and class.
    rest.get(..end + 4).unwrap_or(rest)
}

/// Time limit of the first query.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(1);
/// Maximum length of its reply in bytes.
const MAX_REPLY: usize = 4096;

/// Sends a query and returns its reply.
pub(crate) fn ask(socket: &UdpSocket, message: &[u8]) -> Option<Vec<u8>> {
    let begun = Instant::now();
    socket.send(message).ok()?;
    let mut reply = [0; MAX_REPLY];
    while begun.elapsed() < MAX_WAIT {
        let length = socket.recv(&mut reply).ok()?;
        if length >= 2 && reply[..2] == message[..2] {
            return Some(reply[..length].to_vec());
        }
    }
    None
}

/// Refuses an address that is neither loopback nor private (RFC 1918, RFC 4193) nor on the interface's link.
pub(crate) fn refuse_strangers(server: IpAddr, interface: &str) -> Result<()> {
    let is_ours = match server {
        IpAddr::V4(server) => server.is_loopback() || server.is_private() || server.is_link_local(),
        IpAddr::V6(server) => {
            server.is_loopback() || server.is_unique_local() || server.is_unicast_link_local()
        }
    };
    ensure!(
        is_ours || is_on_link(server, interface)?,
        "{server} is a public address that is not on the link of {interface}, and the load would cross networks of \
         others; name --public if its operator and theirs agree"
    );
    Ok(())
}

/// Returns whether an address of the interface has `server` in its prefix, or as its peer.
fn is_on_link(server: IpAddr, interface: &str) -> Result<bool> {
    for found in nix::ifaddrs::getifaddrs()? {
        if found.interface_name != interface {
            continue;
        }
        let Some(own) = ip_of(found.address) else {
            continue;
        };
        let mask = ip_of(found.netmask).map_or(u128::MAX, bits);
        // A prefix of no bits (`ip address add 192.0.2.1/0`) has the whole Internet "on the link".
        let shares_prefix = own.is_ipv6() == server.is_ipv6()
            && mask != 0
            && bits(own) & mask == bits(server) & mask;
        if shares_prefix || ip_of(found.destination) == Some(server) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn ip_of(address: Option<SockaddrStorage>) -> Option<IpAddr> {
    let address = address?;
    match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(address), _) => Some(address.ip().into()),
        (None, Some(address)) => Some(address.ip().into()),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUERY: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01A\x04bosh\0\0\x01\0\x01";

    #[test]
    fn other_answers_are_refused() {
        let reply = |flags: [u8; 2], name: &[u8]| {
            [
                &b"\x12\x34"[..],
                &flags,
                b"\0\x01\0\0\0\0\0\0",
                name,
                b"\0\x01\0\x01",
            ]
            .concat()
        };
        let own = b"\x01a\x04bosh\0";
        let verify = |expected: Expected, reply: &[u8]| {
            expected
                .verify(QUERY, reply)
                .map_err(|problem| problem.to_string())
        };
        assert_eq!(verify(Expected::Noerror, &reply([0x85, 0], own)), Ok(()));
        assert_eq!(verify(Expected::Nxdomain, &reply([0x85, 3], own)), Ok(()));
        for (message, problem) in [
            (reply([0x81, 5], own), "Refused"),
            (reply([0x81, 3], own), "Non-Existent"),
            (reply([0x85, 0], b"\x01b\x04bosh\0"), "another question"),
            (QUERY.to_vec(), "no reply"),
            (reply([0x85, 0], own)[..11].to_vec(), "11 bytes"),
        ] {
            let found = verify(Expected::Noerror, &message).unwrap_err();
            assert!(found.contains(problem), "{found}");
        }
    }

    #[test]
    fn public_addresses_are_refused() {
        for address in [
            "127.0.0.1",
            "10.9.0.2",
            "172.31.0.1",
            "192.168.1.1",
            "169.254.0.2",
            "::1",
            "fd00::2",
            "fe80::1",
        ] {
            refuse_strangers(address.parse().unwrap(), "lo").unwrap();
        }
        for address in [
            "192.0.2.1",
            "9.9.9.9",
            "172.32.0.1",
            "255.255.255.255",
            "224.0.0.1",
            "2001:db8::1",
            "ff02::1",
        ] {
            let problem = refuse_strangers(address.parse().unwrap(), "lo").unwrap_err();
            assert!(problem.to_string().contains("--public"), "{problem}");
        }
    }
}
