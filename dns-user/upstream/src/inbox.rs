//! Reads all datagrams queued in a recursor's socket.

use std::{cell::RefCell, io, os::fd::RawFd};

use dns_kit::mmsg::{Incoming, ReceiveMetadata};

/// Maximum number of datagrams per system call.
const BATCH: usize = 8;
/// Maximum length of a UDP datagram.
const MAX_DATAGRAM: usize = 65_535;

thread_local! {
    /// Buffers for a batch.
    static INCOMING: RefCell<Incoming<BATCH, MAX_DATAGRAM>> = RefCell::new(Incoming::new(ReceiveMetadata::Nothing));
}

/// Passes all datagrams queued in a connected socket to `each`, which must not call this function.
/// Returns the error that ends the queue: `WouldBlock`, or one reported by ICMP.
pub(super) fn take_all(socket: RawFd, mut each: impl FnMut(&[u8])) -> io::Error {
    INCOMING.with_borrow_mut(|incoming| {
        loop {
            match incoming.receive(socket, libc::MSG_DONTWAIT) {
                Ok(count) => {
                    incoming.datagrams(count).for_each(|datagram| each(datagram.bytes));
                    if count < BATCH {
                        // The kernel found the queue empty, so another call is unnecessary. If it
                        // found an error instead, that is kept for the next call.
                        return io::ErrorKind::WouldBlock.into();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::{net::UdpSocket, os::fd::AsRawFd};

    use super::*;

    /// Returns two sockets connected to each other.
    fn pair() -> [UdpSocket; 2] {
        let [one, other] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        one.connect(other.local_addr().unwrap()).unwrap();
        other.connect(one.local_addr().unwrap()).unwrap();
        [one, other]
    }

    /// Reads a socket until it is empty; returns the length and last byte of each datagram, and the
    /// final error.
    fn all(socket: &UdpSocket) -> (Vec<(usize, Option<u8>)>, io::ErrorKind) {
        let mut taken = Vec::new();
        let error = take_all(socket.as_raw_fd(), |datagram| {
            taken.push((datagram.len(), datagram.last().copied()));
        });
        (taken, error.kind())
    }

    #[test]
    fn pending_datagrams_keep_order() {
        let [sender, receiver] = pair();
        for count in [0, 1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH] {
            // Various sizes, including an empty and a large one.
            let sizes = (0..count).map(|number| if number == 1 { 60_000 } else { number * 100 });
            let expected: Vec<(usize, Option<u8>)> =
                sizes.zip(0..).map(|(size, number)| (size, (size > 0).then_some(number))).collect();
            for &(size, last) in &expected {
                let datagram = vec![last.unwrap_or(0); size];
                assert_eq!(sender.send(&datagram).unwrap(), size);
            }
            assert_eq!(all(&receiver), (expected, io::ErrorKind::WouldBlock));
        }
    }

    #[test]
    fn closed_port_is_an_error() {
        let [sender, receiver] = pair();
        drop(receiver);
        sender.send(b"x").unwrap();
        assert_eq!(all(&sender), (vec![], io::ErrorKind::ConnectionRefused));
        assert_eq!(all(&sender), (vec![], io::ErrorKind::WouldBlock));
    }
}
