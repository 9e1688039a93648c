//! Taking what a socket holds with one system call: `recvmmsg` (kernel 2.6.33).

use std::{cell::RefCell, io, mem, os::fd::RawFd, ptr};

/// Datagrams that are taken at once.
const BATCH: usize = 8;
/// The largest UDP datagram.
const MAX_DATAGRAM: usize = 65_535;

thread_local! {
    /// Room for a batch. Pages that no datagram reaches take no memory.
    static ROOM: RefCell<Vec<u8>> = RefCell::new(vec![0; BATCH * MAX_DATAGRAM]);
}

/// Hands all datagrams that a connected socket holds to `each`, which must not
/// take any itself. Ends with the error that the kernel has once there are none:
/// `WouldBlock`, or what ICMP told.
pub(super) fn take_all(socket: RawFd, mut each: impl FnMut(&[u8])) -> io::Error {
    ROOM.with_borrow_mut(|room| {
        loop {
            match take(socket, room, &mut each) {
                Ok(BATCH) => {}
                // The kernel has looked for one more: that saves us the call. An
                // error that it met instead is kept for the next one.
                Ok(_) => return io::ErrorKind::WouldBlock.into(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error,
            }
        }
    })
}

/// Takes a batch; says how many datagrams it was, at least one.
fn take(socket: RawFd, room: &mut [u8], mut each: impl FnMut(&[u8])) -> io::Result<usize> {
    // SAFETY: all-zero bytes are valid headers and slices: they consist of
    // integers and raw pointers.
    let (mut headers, mut slices): ([libc::mmsghdr; BATCH], [libc::iovec; BATCH]) =
        unsafe { (mem::zeroed(), mem::zeroed()) };
    for ((header, slice), place) in headers.iter_mut().zip(&mut slices).zip(room.chunks_mut(MAX_DATAGRAM)) {
        *slice = libc::iovec { iov_base: place.as_mut_ptr().cast(), iov_len: place.len() };
        header.msg_hdr.msg_iov = ptr::from_mut(slice);
        header.msg_hdr.msg_iovlen = 1;
    }
    // SAFETY: each of the BATCH headers leads to a slice, and each slice to bytes
    // of `room` that no other one has; all of them outlive the call.
    let count = unsafe {
        libc::recvmmsg(
            socket,
            headers.as_mut_ptr(),
            BATCH as libc::c_uint,
            libc::MSG_DONTWAIT,
            ptr::null_mut(),
        )
    };
    let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
    for (header, place) in headers.iter().zip(room.chunks(MAX_DATAGRAM)).take(count) {
        // The kernel never says more than it had room for.
        each(&place[..(header.msg_len as usize).min(MAX_DATAGRAM)]);
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::{net::UdpSocket, os::fd::AsRawFd};

    use super::*;

    /// Two sockets connected to one another.
    fn pair() -> [UdpSocket; 2] {
        let [one, other] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        one.connect(other.local_addr().unwrap()).unwrap();
        other.connect(one.local_addr().unwrap()).unwrap();
        [one, other]
    }

    /// Takes all from a socket: length and last byte of each, and how it ended.
    fn all(socket: &UdpSocket) -> (Vec<(usize, Option<u8>)>, io::ErrorKind) {
        let mut taken = Vec::new();
        let error = take_all(socket.as_raw_fd(), |datagram| {
            taken.push((datagram.len(), datagram.last().copied()));
        });
        (taken, error.kind())
    }

    #[test]
    fn all_that_is_there_is_taken_in_order() {
        let [sender, receiver] = pair();
        for count in [0, 1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH] {
            // Of several sizes, an empty and a large one among them.
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
    fn a_closed_port_is_an_error() {
        let [sender, receiver] = pair();
        drop(receiver);
        sender.send(b"x").unwrap();
        assert_eq!(all(&sender), (vec![], io::ErrorKind::ConnectionRefused));
        assert_eq!(all(&sender), (vec![], io::ErrorKind::WouldBlock));
    }
}
