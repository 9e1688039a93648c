use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    ops::Range,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr as UnixAddress, UnixListener},
    },
    process,
    sync::Mutex,
};

/// Ports below the range that the kernel gives to clients (`net.ipv4.ip_local_port_range`).
const PORTS: Range<u16> = 10_000..32_000;

/// Reservations of this process, which end with it.
static RESERVED: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());

/// Returns a loopback address for a server that a test starts: its port is free for TCP and UDP, no
/// client socket of another process takes it, and no other call on this machine returns it while
/// this process lives.
///
/// # Panics
///
/// Panics when all ports are in use.
pub fn free_address() -> SocketAddr {
    let first = process::id() as usize * 64;
    let range = usize::from(PORTS.end - PORTS.start);
    let ports = (0..range).map(|next| PORTS.start + ((first + next) % range) as u16);
    ports
        .map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .find(is_reserved)
        .expect("a port is free")
}

/// Reserves a port by an abstract socket of its number; returns whether it succeeded and the port is free.
fn is_reserved(address: &SocketAddr) -> bool {
    let name = UnixAddress::from_abstract_name(format!("bosh-dns-xdp-test-{}", address.port()));
    let Ok(reserved) = name.and_then(|name| UnixListener::bind_addr(&name)) else {
        return false;
    };
    if TcpListener::bind(address).is_err() || UdpSocket::bind(address).is_err() {
        return false;
    }
    RESERVED
        .lock()
        .expect("no thread panics with it")
        .push(reserved);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_given_once() {
        let mut addresses: Vec<SocketAddr> = (0..200).map(|_| free_address()).collect();
        addresses.sort();
        addresses.dedup();
        assert_eq!(addresses.len(), 200);
        assert!(
            addresses
                .iter()
                .all(|address| TcpListener::bind(address).is_ok())
        );
    }
}
