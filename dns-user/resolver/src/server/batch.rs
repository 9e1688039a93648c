//! Receives queries and sends replies in batches.

use std::{io, mem, os::fd::RawFd};

use dns_platform::mmsg::{self, ControlMessages, Incoming, ReceiveMetadata};

/// Maximum number of datagrams per system call.
pub(super) const BATCH: usize = 32;
/// Maximum length of a query in bytes. Real queries are far shorter; a truncated one cannot be
/// parsed and gets FORMERR.
const QUERY_SIZE: usize = 4096;

/// Buffers for incoming datagrams and their replies. The replies use the addresses and control
/// messages written by the kernel, so a reply is sent from the address to which its query was sent.
pub(super) struct Batch {
    incoming: Incoming<BATCH, QUERY_SIZE>,
    /// The reply to each datagram.
    replies: [Vec<u8>; BATCH],
    /// Headers of the replies to be sent.
    outgoing: Box<[libc::mmsghdr; BATCH]>,
    /// One buffer for each of these headers.
    slices: Box<[libc::iovec; BATCH]>,
}

/// One datagram of a batch, with the room for its reply.
pub(super) struct Datagram<'a> {
    pub(super) query: &'a [u8],
    /// Buffer for the reply; nothing is sent if it stays empty.
    pub(super) reply: &'a mut Vec<u8>,
    pub(super) peer: &'a libc::sockaddr_storage,
    /// The control messages received with it.
    pub(super) control: &'a ControlMessages,
    pub(super) control_len: usize,
}

impl Batch {
    /// Allocates buffers for [`BATCH`] datagrams; `metadata` requests control messages.
    pub(super) fn new(metadata: bool) -> Self {
        // SAFETY: all-zero bytes are valid headers and slices: they consist of integers and
        // raw pointers.
        let (header, slice): (libc::mmsghdr, libc::iovec) = unsafe { (mem::zeroed(), mem::zeroed()) };
        Self {
            incoming: Incoming::new(if metadata {
                ReceiveMetadata::PeersAndControls
            } else {
                ReceiveMetadata::Peers
            }),
            replies: [const { Vec::new() }; BATCH],
            outgoing: Box::new([header; BATCH]),
            slices: Box::new([slice; BATCH]),
        }
    }

    /// Waits for a datagram and takes all that are queued, up to [`BATCH`]; returns their number.
    pub(super) fn receive(&mut self, socket: RawFd) -> io::Result<usize> {
        self.incoming.receive(socket, libc::MSG_WAITFORONE)
    }

    /// Returns the first `count` datagrams received by [`receive`](Self::receive).
    pub(super) fn datagrams(&mut self, count: usize) -> impl Iterator<Item = Datagram<'_>> {
        self.incoming.datagrams(count).zip(&mut self.replies).map(|(datagram, reply)| {
            let mmsg::Datagram { bytes, peer, control, control_len } = datagram;
            reply.clear();
            Datagram { query: bytes, reply, peer, control, control_len }
        })
    }

    /// Sends the non-empty replies to the first `count` datagrams; returns how many the kernel
    /// refused.
    pub(super) fn send(&mut self, socket: RawFd, count: usize) -> usize {
        let mut ready = 0;
        for (at, reply) in self.replies.iter_mut().enumerate().take(count) {
            if reply.is_empty() {
                continue;
            }
            self.slices[ready] = libc::iovec { iov_base: reply.as_mut_ptr().cast(), iov_len: reply.len() };
            let header = &mut self.outgoing[ready].msg_hdr;
            *header = self.incoming.reply_header(at);
            (header.msg_iov, header.msg_iovlen) = (&raw mut self.slices[ready], 1);
            ready += 1;
        }
        // SAFETY: each header points to a reply, an address and control messages of this batch,
        // which outlive the call.
        unsafe { mmsg::send(socket, &mut self.outgoing[..ready]) }
    }
}
