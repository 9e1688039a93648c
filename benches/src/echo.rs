//! The floor of a server behind sockets: takes batches of queries by `recvmmsg` and returns each by
//! `sendmmsg`, with constant answers behind the question. Batches and socket options equal the
//! UDP workers' (`server/udp.rs`, `server/sockets.rs`), so the difference is the price of the
//! answer.

use std::{
    convert::Infallible,
    env, io, mem,
    net::{SocketAddr, SocketAddrV4},
    os::fd::AsRawFd as _,
};

use anyhow::Result;
use dns_kit::mmsg::{self, Incoming, ReceiveMetadata};
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
const RECORD: [u8; 16] = [0xc0, HEADER_LEN as u8, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 10, 0, 0, 1];

/// Starts this program as the echo, in the lab's server namespace on the server's CPU.
pub fn start(lab: &Lab, answers: u32) -> Result<Kept> {
    let program = env::current_exe()?;
    let mut command = lab.server.command(program.as_os_str())?;
    let process = on_cpu(SERVER_CPU, || Kept::spawn(command.arg(format!("--echo={answers}"))))?;
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
    // SAFETY: the descriptor is open, and the size is that of the `int`.
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
    let mut incoming = Incoming::<BATCH, SIZE>::new(ReceiveMetadata::Peers);
    let mut replies = vec![Vec::new(); BATCH];
    // SAFETY: all-zero bytes are valid slices and headers: integers and raw pointers.
    let (slice, header): (libc::iovec, libc::mmsghdr) = unsafe { mem::zeroed() };
    let (mut slices, mut headers) = (vec![slice; BATCH], vec![header; BATCH]);
    loop {
        let count = incoming.receive(socket.as_raw_fd(), libc::MSG_WAITFORONE)?;
        for (reply, query) in replies.iter_mut().zip(incoming.datagrams(count)) {
            write_reply(reply, query.bytes, &records);
        }
        for (at, reply) in replies.iter_mut().enumerate().take(count) {
            slices[at] = libc::iovec { iov_base: reply.as_mut_ptr().cast(), iov_len: reply.len() };
            let header = incoming.reply_header(at);
            headers[at].msg_hdr = libc::msghdr { msg_iov: &raw mut slices[at], msg_iovlen: 1, ..header };
        }
        // SAFETY: the headers point to `slices`, by these to `replies`, and to the addresses in `incoming`, which
        // all stay until the next round.
        unsafe { mmsg::send(socket.as_raw_fd(), &mut headers[..count]) };
    }
}

fn write_reply(reply: &mut Vec<u8>, query: &[u8], records: &[u8]) {
    reply.clear();
    reply.extend_from_slice(query);
    if query.len() >= HEADER_LEN && query.len() + records.len() <= SIZE {
        // QR.
        reply[2] |= 0x80;
        let answers = (records.len() / RECORD.len()) as u16;
        reply[6..8].copy_from_slice(&answers.to_be_bytes());
        reply.extend_from_slice(records);
    }
}
