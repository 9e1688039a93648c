//! Identifies the other end of a connection before it has authenticated: the user of a local process,
//! otherwise the network.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};

/// `SOCK_DIAG_BY_FAMILY` (linux/sock_diag.h).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Size of `nlmsghdr` in bytes.
const HEADER: usize = 16;
/// Offset of `idiag_uid` in an `inet_diag_msg` (linux/inet_diag.h): four bytes of family, state,
/// timer and retransmissions, the socket's id of 48 bytes, expiry and two queues.
const UID: usize = 4 + 48 + 12;
/// Time limit for the reply of the kernel, which normally arrives within the call.
const TIMEOUT: Duration = Duration::from_millis(100);

/// Identity of a peer before it has presented a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// User id of a local process.
    User(u32),
    /// IPv4 address, or the /64 network of an IPv6 address, which one host may fill.
    Network(IpAddr),
}

impl Peer {
    /// Returns the peer at `client` of a connection to `server`. Only peers on the loopback interface are
    /// looked up by user.
    pub fn of(client: SocketAddr, server: Option<SocketAddr>) -> Self {
        let network = match client.ip().to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
            address => address,
        };
        let is_local = client.ip().to_canonical().is_loopback();
        let user = server.filter(|_| is_local).and_then(|server| uid_of(client, server).ok());
        user.map_or(Self::Network(network), Self::User)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => write!(f, "user {user}"),
            Self::Network(IpAddr::V6(network)) => write!(f, "{network}/64"),
            Self::Network(address) => write!(f, "{address}"),
        }
    }
}

/// Returns the owner of the socket bound to `local` and connected to `remote`, in this network
/// namespace (sock_diag(7)). Needs no privilege.
fn uid_of(local: SocketAddr, remote: SocketAddr) -> io::Result<u32> {
    let protocol = Protocol::from(libc::NETLINK_SOCK_DIAG);
    let mut socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::RAW, Some(protocol))?;
    socket.set_read_timeout(Some(TIMEOUT))?;
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
    fn local_peer_has_a_user() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let server = listener.local_addr().unwrap();
            let _client = TcpStream::connect(server).unwrap();
            let (_stream, client) = listener.accept().unwrap();
            assert_eq!(Peer::of(client, Some(server)), Peer::User(nix::unistd::getuid().as_raw()));
        }
        let unused = SocketAddr::from(([127, 0, 0, 1], 1));
        assert_eq!(Peer::of(unused, Some(unused)), Peer::Network(unused.ip()));
    }

    #[test]
    fn ipv6_hosts_count_by_network() {
        let peer = |text: &str| Peer::of(SocketAddr::new(text.parse().unwrap(), 1), None);
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::2:3"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_eq!(peer("::ffff:192.0.2.1"), peer("192.0.2.1"));
        assert_eq!(peer("2001:db8::1").to_string(), "2001:db8::/64");
    }
}
