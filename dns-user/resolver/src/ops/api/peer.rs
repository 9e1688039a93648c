//! Determines the user at the other end of a local TCP connection.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use nix::libc;
use socket2::{Domain, Protocol, Socket, Type};

/// `SOCK_DIAG_BY_FAMILY` (linux/sock_diag.h).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Size of `nlmsghdr` in bytes.
const HEADER: usize = 16;
/// Offset of `idiag_uid` in an `inet_diag_msg` (linux/inet_diag.h): four bytes of family, state,
/// timer and retransmissions, the socket's id of 48 bytes, expiry and two queues.
const UID: usize = 4 + 48 + 12;
/// Time limit for the reply of the kernel, which normally arrives within the call.
const PATIENCE: Duration = Duration::from_millis(100);

/// Identity of a peer before it has presented a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    /// User id of a local process.
    User(u32),
    /// IP address, if the kernel does not report the user.
    Address(IpAddr),
}

impl Peer {
    /// Returns the peer at `client` of a connection to `server`.
    pub(super) fn of(client: SocketAddr, server: SocketAddr) -> Self {
        uid_of(client, server).map_or(Self::Address(client.ip()), Self::User)
    }
}

/// Returns the owner of the socket bound to `local` and connected to `remote`, in this network
/// namespace (sock_diag(7)). Needs no privilege.
fn uid_of(local: SocketAddr, remote: SocketAddr) -> io::Result<u32> {
    let protocol = Protocol::from(libc::NETLINK_SOCK_DIAG);
    let mut socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::RAW, Some(protocol))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.write_all(&request(local, remote))?;
    let mut reply = [0; 512];
    let length = socket.read(&mut reply)?;
    let reply = &reply[..length];
    let field = |at: usize| reply.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    let kind = reply.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    match (kind, field(HEADER + UID)) {
        (Some(SOCK_DIAG_BY_FAMILY), Some(uid)) => Ok(u32::from_ne_bytes(uid)),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Builds an `inet_diag_req_v2` for exactly this socket, with its `nlmsghdr`.
fn request(local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 } as u8;
    let mut message = Vec::with_capacity(72);
    message.extend_from_slice(&72u32.to_ne_bytes());
    message.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message.extend_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    // Sequence number and port id.
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(&[family, libc::IPPROTO_TCP as u8, 0, 0]);
    // Any TCP state.
    message.extend_from_slice(&u32::MAX.to_ne_bytes());
    message.extend_from_slice(&local.port().to_be_bytes());
    message.extend_from_slice(&remote.port().to_be_bytes());
    for address in [local.ip(), remote.ip()] {
        let mut field = [0; 16];
        match address {
            IpAddr::V4(address) => field[..4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => field = address.octets(),
        }
        message.extend_from_slice(&field);
    }
    // Any interface; INET_DIAG_NOCOOKIE.
    message.extend_from_slice(&[0; 4]);
    message.extend_from_slice(&[0xff; 8]);
    message
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_local_peer_has_a_user() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let server = listener.local_addr().unwrap();
            let _client = TcpStream::connect(server).unwrap();
            let (_stream, client) = listener.accept().unwrap();
            assert_eq!(Peer::of(client, server), Peer::User(nix::unistd::getuid().as_raw()));
        }
        let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
        assert_eq!(Peer::of(nobody, nobody), Peer::Address(nobody.ip()));
    }
}
