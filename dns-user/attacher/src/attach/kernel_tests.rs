//! A thread in place of the kernel at the other end of a netlink socket.

use std::{
    os::fd::AsRawFd as _,
    thread::{self, JoinHandle},
};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};

use super::netlink::{Socket, array_at};

/// Returns a socket whose requests about interfaces are answered with an object or an error, and the thread that answers
/// them. It ends with the socket, and returns the types of the requests, by system call.
pub(super) fn stand_in(
    answer: impl Fn(u16, u32) -> Result<Option<Vec<u8>>, i32> + Send + 'static,
) -> (Socket, JoinHandle<Vec<Vec<u16>>>) {
    let flags = SockFlag::empty();
    let (ours, kernels) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
    let kernel = thread::spawn(move || {
        let mut calls = Vec::new();
        let mut datagram = vec![0; 1 << 16];
        loop {
            let length = recv(kernels.as_raw_fd(), &mut datagram, MsgFlags::empty()).unwrap();
            if length == 0 {
                return calls;
            }
            let mut kinds = Vec::new();
            let mut rest = &datagram[..length];
            while let Some(length) = array_at(rest, 0).map(u32::from_ne_bytes) {
                let (request, next) = rest.split_at(length as usize);
                rest = next;
                let kind = u16::from_ne_bytes(array_at(request, 4).unwrap());
                kinds.push(kind);
                let reply = |kind: u16, body: &[u8]| {
                    let mut reply = (16 + body.len() as u32).to_ne_bytes().to_vec();
                    reply.extend(kind.to_ne_bytes());
                    reply.extend([0; 2]);
                    // The sequence number, and a port.
                    reply.extend(&request[8..16]);
                    reply.extend(body);
                    send(kernels.as_raw_fd(), &reply, MsgFlags::empty()).unwrap();
                };
                let ifindex = u32::from_ne_bytes(array_at(request, 20).unwrap());
                let code = match answer(kind, ifindex) {
                    Ok(Some(object)) => {
                        // The type of an object precedes that of the request for it by two.
                        reply(kind - 2, &object);
                        0
                    }
                    Ok(None) => 0,
                    Err(code) => -code,
                };
                reply(libc::NLMSG_ERROR as u16, &code.to_ne_bytes());
            }
            calls.push(kinds);
        }
    });
    (Socket::of(ours), kernel)
}
