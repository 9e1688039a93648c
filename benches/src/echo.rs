//! The floor of a server behind sockets: takes batches of queries by `recvmmsg` and returns each by
//! `sendmmsg`, with constant answers behind the question. Batches and socket options equal the
//! UDP workers' (`server/udp.rs`, `server/sockets.rs`), so the difference is the price of the
//! answer.

use std::{
    convert::Infallible,
    env, io, mem,
    net::{SocketAddr, SocketAddrV4},
    os::fd::AsRawFd as _,
    ptr,
};

use anyhow::Result;
use socket2::{Domain, Socket, Type};
use whole_system_tests::{cpu::on_cpu, process::Kept};

use crate::{
    lab::{Lab, SERVER_ADDRESS, SERVER_CPU},
    servers::wait_for_answer,
};

/// Bytes of the socket's buffers, as of the server's.
const RECEIVE_BUFFER: libc::c_int = 4 << 20;
const SEND_BUFFER: usize = 1 << 20;
/// Datagrams per system call.
const BATCH: usize = 32;
/// Bytes of a buffer, which holds a query and then its reply.
const SIZE: usize = 4096;
/// Length of a DNS header.
const HEADER_LEN: usize = 12;
/// An address of the question's name: pointer, type A, class IN, TTL 0, four bytes.
const RECORD: [u8; 16] = [
    0xc0,
    HEADER_LEN as u8,
    0,
    1,
    0,
    1,
    0,
    0,
    0,
    0,
    0,
    4,
    10,
    0,
    0,
    1,
];

/// Starts this program as the echo, in the lab's server namespace on the server's CPU.
pub fn start(lab: &Lab, answers: u32) -> Result<Kept> {
    let program = env::current_exe()?;
    let mut command = lab.server.command(program.as_os_str())?;
    // The child inherits the CPU, so it never runs on another one.
    let process = on_cpu(SERVER_CPU, || {
        Kept::spawn(command.arg(format!("--echo={answers}")))
    })?;
    wait_for_answer(&lab.client, (SERVER_ADDRESS, 53).into(), "echo.")?;
    Ok(process)
}

/// Opens the socket of the echo at the address of the lab's server.
pub fn at_server() -> io::Result<Socket> {
    open(SocketAddrV4::new(SERVER_ADDRESS, 53))
}

/// Opens a socket with the options of the server's sockets.
pub fn open(address: SocketAddrV4) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    socket.set_reuse_port(true)?;
    socket.bind(&SocketAddr::from(address).into())?;
    let receive_buffer = RECEIVE_BUFFER;
    // Fails without CAP_NET_ADMIN: the buffer then keeps its default size, and the echo works
    // nevertheless.
    // SAFETY: the descriptor is open, and the size is the `int`'s.
    let _smaller = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVBUFFORCE,
            (&raw const receive_buffer).cast(),
            size_of_val(&receive_buffer) as libc::socklen_t,
        )
    };
    socket.set_send_buffer_size(SEND_BUFFER)?;
    Ok(socket)
}

/// Returns every query with this number of answers. Queries have a question and nothing behind it.
pub fn serve(socket: &Socket, answers: u16) -> io::Result<Infallible> {
    let records = RECORD.repeat(answers.into());
    let mut buffers = vec![[0_u8; SIZE]; BATCH];
    // SAFETY: all-zero bytes are valid addresses, slices and headers: integers and raw pointers.
    let (peer, header): (libc::sockaddr_storage, libc::mmsghdr) =
        unsafe { (mem::zeroed(), mem::zeroed()) };
    let mut peers = vec![peer; BATCH];
    let mut slices: Vec<libc::iovec> = buffers
        .iter_mut()
        .map(|buffer| libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: SIZE,
        })
        .collect();
    let mut headers = vec![header; BATCH];
    for ((header, peer), slice) in headers.iter_mut().zip(&mut peers).zip(&mut slices) {
        header.msg_hdr.msg_name = (&raw mut *peer).cast();
        header.msg_hdr.msg_iov = &raw mut *slice;
        header.msg_hdr.msg_iovlen = 1;
    }
    let mut used = BATCH;
    loop {
        // Only these were changed by the last batch: the names' lengths by the kernel, the slices'
        // by the replies.
        for (header, slice) in headers.iter_mut().zip(&mut slices).take(used) {
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            slice.iov_len = SIZE;
        }
        // SAFETY: the headers point to `peers`, `slices` and, by these, to `buffers`, with their lengths.
        // The vectors outlive the loop and are never resized, and nothing else uses them during a call.
        let count = unsafe {
            // Without it the call would wait for a full batch (recvmmsg(2)).
            let flags = libc::MSG_WAITFORONE;
            libc::recvmmsg(
                socket.as_raw_fd(),
                headers.as_mut_ptr(),
                BATCH as u32,
                flags,
                ptr::null_mut(),
            )
        };
        used = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for (at, header) in headers.iter().enumerate().take(used) {
            slices[at].iov_len = reply(&mut buffers[at], header.msg_len as usize, &records);
        }
        let mut sent = 0;
        // The kernel may send fewer than it was given (sendmmsg(2)).
        while sent < used {
            let rest = &mut headers[sent..used];
            // SAFETY: as above; the lengths are those of the queries' addresses and of the replies.
            let count = unsafe {
                libc::sendmmsg(socket.as_raw_fd(), rest.as_mut_ptr(), rest.len() as u32, 0)
            };
            sent += usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        }
    }
}

/// Makes a reply of the query in `buffer`; returns its length.
fn reply(buffer: &mut [u8; SIZE], query_len: usize, records: &[u8]) -> usize {
    let end = query_len + records.len();
    if query_len < HEADER_LEN || end > SIZE {
        return query_len;
    }
    // QR.
    buffer[2] |= 0x80;
    let answers = (records.len() / RECORD.len()) as u16;
    buffer[6..8].copy_from_slice(&answers.to_be_bytes());
    buffer[query_len..end].copy_from_slice(records);
    end
}
