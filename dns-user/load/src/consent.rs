//! Whether a server may be loaded: its address, and its answer to a first query.
//!
//! The load exceeds what the Internet bears, so an address that was mistyped, or a server that refuses, must end it
//! before it begins.

use std::{
    net::{IpAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
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
        // Only the echoed question tells whose reply it is (RFC 5452, section 9.1). The case of its
        // letters may differ (RFC 4343).
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
        // The socket has a time limit of its own, so that the loop ends without a reply.
        let length = socket.recv(&mut reply).ok()?;
        // Another id is a reply to a program that had the port before.
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

/// Returns the interface with this address.
pub(crate) fn interface_of(own: IpAddr) -> Result<String> {
    let mut all = nix::ifaddrs::getifaddrs()?;
    let found = all.find(|found| ip_of(found.address) == Some(own));
    let found = found
        .with_context(|| format!("no interface has the address {own}; name it (--interface)"))?;
    Ok(found.interface_name)
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
        // getifaddrs(3) has one field for the peer and the broadcast address; nix calls it `destination` on point-to-point
        // interfaces only.
        let peer = found.destination.or(found.broadcast);
        if shares_prefix || ip_of(peer) == Some(server) {
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

    #[test]
    fn only_replies_are_answers() {
        let reply = [&b"\x12\x34\x80\0\0\x01\0\0\0\0\0\0"[..], &QUERY[12..]].concat();
        for (expected, code) in [
            (Expected::Noerror, 0),
            (Expected::Servfail, 2),
            (Expected::Nxdomain, 3),
            (Expected::Refused, 5),
        ] {
            for found in [0, 1, 2, 3, 5] {
                let mut reply = reply.clone();
                reply[3] = 0xf0 | found;
                assert_eq!(
                    expected.verify(QUERY, &reply).is_ok(),
                    found == code,
                    "{found}"
                );
            }
        }
        let verify = |at: usize, byte: u8| {
            let mut reply = reply.clone();
            reply[at] = byte;
            Expected::Noerror.verify(QUERY, &reply).is_ok()
        };
        // RD, TC and AA may be set; no other OPCODE.
        assert!(verify(2, 0x87) && !verify(2, 0x07) && !verify(2, 0x88) && !verify(2, 0xc0));
        assert!(!verify(5, 0) && !verify(5, 2) && !verify(4, 1));
        assert!(!verify(reply.len() - 1, 3) && !verify(reply.len() - 3, 28));
        assert!(
            Expected::Noerror
                .verify(QUERY, &reply[..reply.len() - 1])
                .is_err()
        );
        assert!(
            Expected::Noerror
                .verify(QUERY, &[&reply[..], b"more"].concat())
                .is_ok()
        );
        assert_eq!(question_of(QUERY), &QUERY[12..]);
        assert_eq!(question_of(&[QUERY, b"opt"].concat()), &QUERY[12..]);
        assert_eq!(question_of(&QUERY[..12]), b"");
        assert_eq!(question_of(&QUERY[..11]), b"");
        assert_eq!(
            question_of(&QUERY[..QUERY.len() - 1]),
            &QUERY[12..QUERY.len() - 1]
        );
    }

    #[test]
    fn reply_has_the_id_of_the_query() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(server.local_addr().unwrap()).unwrap();
        server.connect(client.local_addr().unwrap()).unwrap();
        // Waits in the socket before the query is sent.
        for reply in [
            &b"\x12\x35other"[..],
            b"\x12",
            b"\x13\x34other",
            b"\x12\x34own",
            b"\x12\x34late",
        ] {
            server.send(reply).unwrap();
        }
        assert_eq!(ask(&client, QUERY).as_deref(), Some(&b"\x12\x34own"[..]));
        let mut asked = [0; 64];
        assert_eq!(server.recv(&mut asked).unwrap(), QUERY.len());
        client
            .set_read_timeout(Some(Duration::from_millis(1)))
            .unwrap();
        assert_eq!(ask(&client, QUERY).as_deref(), Some(&b"\x12\x34late"[..]));
        assert_eq!(ask(&client, QUERY), None);
    }

    #[test]
    fn addresses_of_the_link_are_ours() {
        // The prefix of `lo` is 127.0.0.0/8, and ::1/128.
        for (address, interface, is_on_link) in [
            ("127.255.0.9", "lo", true),
            ("128.0.0.1", "lo", false),
            ("::1", "lo", true),
            ("::2", "lo", false),
            // The same bits as 127.0.0.5, of another family.
            ("::7f00:5", "lo", false),
            ("127.255.0.9", "no-interface", false),
        ] {
            let found = super::is_on_link(address.parse().unwrap(), interface).unwrap();
            assert_eq!(found, is_on_link, "{address} {interface}");
        }
        assert_eq!(interface_of([127, 0, 0, 1].into()).unwrap(), "lo");
        let problem = interface_of([192, 0, 2, 1].into()).unwrap_err();
        assert!(problem.to_string().contains("--interface"), "{problem}");
        assert_eq!(bits([10, 0, 0, 1].into()), 0x0a00_0001);
        assert_eq!(bits("1::2".parse().unwrap()), (1 << 112) + 2);
        assert_eq!(ip_of(None), None);
    }

    #[test]
    fn only_link_hosts_are_peers() {
        if !test_support::requirements::root() {
            return;
        }
        let test = || {
            crate::generator::pair();
            for arguments in [
                "address add 192.0.2.1 peer 198.51.100.7 dev one",
                "address add 203.0.113.1/0 dev other",
            ] {
                let mut ip = std::process::Command::new("ip");
                assert!(ip.args(arguments.split(' ')).status().unwrap().success());
            }
            for (address, interface, expected) in [
                ("198.51.100.7", "one", true),
                ("198.51.100.8", "one", false),
                // The prefix 10.9.0.0/24.
                ("10.9.0.255", "one", true),
                ("10.9.1.0", "one", false),
                ("10.9.0.2", "other", false),
                // A prefix of no bits.
                ("9.9.9.9", "other", false),
            ] {
                let found = is_on_link(address.parse().unwrap(), interface).unwrap();
                assert_eq!(found, expected, "{address} {interface}");
            }
        };
        std::thread::scope(|scope| scope.spawn(test).join().unwrap());
    }
}
