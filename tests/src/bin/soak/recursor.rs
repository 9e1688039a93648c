//! A recursor that dies and returns. It answers every name below one domain with an address that
//! counts its replies.

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
    /// Times of the replies for each name, by serial number.
    sent: Mutex<[Vec<Instant>; NAMES as usize]>,
    alive: AtomicBool,
    /// Time of the last state change.
    changed: Mutex<Option<Instant>>,
}

impl Recursor {
    /// Creates a recursor that has always been alive.
    pub(crate) fn new() -> Self {
        let sent = Mutex::new([const { Vec::new() }; NAMES as usize]);
        Self {
            sent,
            alive: AtomicBool::new(true),
            changed: Mutex::new(None),
        }
    }

    /// Revives or kills the recursor.
    pub(crate) fn live(&self, alive: bool) {
        *self.changed.lock() = Some(Instant::now());
        self.alive.store(alive, Ordering::SeqCst);
    }

    /// Returns whether queries must be answered now: the recursor has been alive for long enough.
    pub(crate) fn is_reliable(&self) -> bool {
        let changed = *self.changed.lock();
        self.alive.load(Ordering::SeqCst)
            && changed.is_none_or(|changed| changed.elapsed() > MOURNING)
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
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) =>
                {
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            if self.alive.load(Ordering::SeqCst)
                && let Some(reply) = self.reply(&buffer[..length])
            {
                // A reply to a killed server may fail.
                let _ = socket.send_to(&reply, client);
            }
        }
        Ok(())
    }

    /// Returns when the reply with this serial number was sent.
    pub(crate) fn sent(&self, number: u8, serial: u16) -> Option<Instant> {
        self.sent.lock()[usize::from(number)]
            .get(usize::from(serial))
            .copied()
    }

    /// Builds the next reply to a query for one of the names, without OPT.
    pub(crate) fn reply(&self, query: &[u8]) -> Option<Vec<u8>> {
        let label = query.get(13..13 + usize::from(*query.get(12)?))?;
        let text = std::str::from_utf8(label).ok()?.to_ascii_lowercase();
        let number: u8 = text.strip_prefix('r')?.parse().ok()?;
        let end = 12 + query[12..].iter().position(|&byte| byte == 0)? + 1 + 4;
        let question = query.get(12..end)?;
        let mut sent = self.sent.lock();
        let sent = sent.get_mut(usize::from(number))?;
        let address = address(number, u16::try_from(sent.len()).ok()?);
        sent.push(Instant::now());
        // QR, RD, RA; one question, one answer.
        let header = [&query[..2], &[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0][..]].concat();
        // A pointer to the name, type A, class IN.
        let record = [0xc0, 12, 0, 1, 0, 1];
        let ttl = ttl(number).to_be_bytes();
        Some([&header, question, &record, &ttl, &[0, 4], &address.octets()].concat())
    }
}

/// Returns the TTL of a name in seconds.
pub(crate) fn ttl(number: u8) -> u32 {
    5 + u32::from(number % 20)
}

pub(crate) fn name(number: u8) -> String {
    format!("r{number}.recursed.test.")
}

fn address(number: u8, serial: u16) -> Ipv4Addr {
    let [high, low] = serial.to_be_bytes();
    Ipv4Addr::new(192, number, high, low)
}

/// Returns the serial number in an address of a name; `None` if it belongs to another name.
pub(crate) fn serial(number: u8, address: Ipv4Addr) -> Option<u16> {
    let [192, other, high, low] = address.octets() else {
        return None;
    };
    (other == number).then_some(u16::from_be_bytes([high, low]))
}

#[cfg(test)]
mod tests {
    use hickory_proto::{op::Message, rr::RecordType};
    use whole_system_tests::client;

    use super::*;

    #[test]
    fn replies_are_numbered() {
        let (recursor, query) = (
            Recursor::new(),
            client::query(&name(7), RecordType::A, Some(1232)).unwrap(),
        );
        for expected in 0..3 {
            let bytes = recursor.reply(&query.to_vec().unwrap()).unwrap();
            let reply = Message::from_vec(&bytes).unwrap();
            let Some(std::net::IpAddr::V4(address)) = client::addresses(&reply).pop() else {
                panic!("{reply}")
            };
            assert_eq!(
                (serial(7, address), serial(8, address)),
                (Some(expected), None)
            );
            assert!(
                recursor.sent(7, expected).is_some() && recursor.sent(7, expected + 1).is_none()
            );
            assert_eq!(
                (reply.metadata.id, reply.answers[0].ttl),
                (query.metadata.id, ttl(7))
            );
        }
    }
}
