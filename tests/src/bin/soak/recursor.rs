//! A recursor that dies and returns; it knows the address of every name below one domain.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::Result;
use parking_lot::Mutex;

pub(crate) const RECURSOR: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(127, 0, 0, 53)), 5300);

/// Number of queried names.
pub(crate) const NAMES: u8 = 200;

/// How long a query may wait for a dead recursor: the server's limit plus a client's timeout.
const MOURNING: Duration = Duration::from_secs(8);

pub(crate) struct Recursor {
    alive: AtomicBool,
    /// Time of the last state change.
    changed: Mutex<Option<Instant>>,
}

impl Recursor {
    /// Creates a recursor that has always been alive.
    pub(crate) fn new() -> Self {
        Self { alive: AtomicBool::new(true), changed: Mutex::new(None) }
    }

    /// Revives or kills the recursor.
    pub(crate) fn live(&self, alive: bool) {
        *self.changed.lock() = Some(Instant::now());
        self.alive.store(alive, Ordering::SeqCst);
    }

    /// Returns whether queries must be answered now: the recursor has been alive for long enough.
    pub(crate) fn is_reliable(&self) -> bool {
        let changed = *self.changed.lock();
        self.alive.load(Ordering::SeqCst) && changed.is_none_or(|changed| changed.elapsed() > MOURNING)
    }

    /// Binds the socket, inside the namespace.
    pub(crate) fn bind() -> Result<UdpSocket> {
        Ok(UdpSocket::bind(RECURSOR)?)
    }

    /// Answers queries until `ended` returns true.
    pub(crate) fn run(&self, socket: &UdpSocket, ended: impl Fn() -> bool) -> Result<()> {
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let mut buffer = [0; 2048];
        while !ended() {
            let (length, client) = match socket.recv_from(&mut buffer) {
                Ok(received) => received,
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
                {
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            if let Some(reply) = reply(&buffer[..length]).filter(|_| self.alive.load(Ordering::SeqCst)) {
                // A reply to a killed server may fail.
                let _ = socket.send_to(&reply, client);
            }
        }
        Ok(())
    }
}

pub(crate) fn name(number: u8) -> String {
    format!("r{number}.recursed.test.")
}

pub(crate) fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, number)
}

/// Builds the reply to a query for one of the names, without OPT.
fn reply(query: &[u8]) -> Option<Vec<u8>> {
    let label = query.get(13..13 + usize::from(*query.get(12)?))?;
    let text = std::str::from_utf8(label).ok()?.to_ascii_lowercase();
    let number: u8 = text.strip_prefix('r')?.parse().ok()?;
    let end = 12 + query[12..].iter().position(|&byte| byte == 0)? + 1 + 4;
    let question = query.get(12..end)?;
    // QR, RD, RA; one question, one answer.
    let header = [&query[..2], &[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0][..]].concat();
    // A pointer to the name, type A, class IN, a TTL of a second, four bytes.
    let record = [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4];
    Some([&header, question, &record, &address(number).octets()].concat())
}

#[cfg(test)]
mod tests {
    use hickory_proto::{op::Message, rr::RecordType};
    use whole_system_tests::client;

    use super::*;

    #[test]
    fn names_have_distinct_addresses() {
        let query = client::query(&name(7), RecordType::A, Some(1232)).unwrap();
        let reply = Message::from_vec(&reply(&query.to_vec().unwrap()).unwrap()).unwrap();
        assert_eq!(client::addresses(&reply), [std::net::IpAddr::V4(address(7))]);
        assert_eq!(reply.metadata.id, query.metadata.id);
    }
}
