//! Queries that were taken at once, and the replies that leave at once.

use std::{io, mem, os::fd::RawFd};

use dns_platform::mmsg::{self, ControlMessages, Incoming, Told};

/// Datagrams that are taken at once.
pub(super) const BATCH: usize = 32;
/// Bytes that a query may have. Real ones are far below; what is cut off
/// cannot be read and gets FORMERR.
const QUERY_SIZE: usize = 4096;

/// Buffers for incoming datagrams and the replies to them. The kernel writes
/// addresses and control messages where the replies take them from, so a reply
/// leaves from the address that its query was sent to.
pub(super) struct Batch {
    incoming: Incoming<BATCH, QUERY_SIZE>,
    /// The reply to each.
    replies: [Vec<u8>; BATCH],
    /// Headers of the replies that are sent.
    outgoing: Box<[libc::mmsghdr; BATCH]>,
    /// One buffer for each of these.
    slices: Box<[libc::iovec; BATCH]>,
}

/// One datagram of a batch, with the room for its reply.
pub(super) struct Datagram<'a> {
    pub(super) query: &'a [u8],
    /// The reply; left empty: there is none.
    pub(super) reply: &'a mut Vec<u8>,
    pub(super) peer: &'a libc::sockaddr_storage,
    /// The control messages that came with it.
    pub(super) control: &'a ControlMessages,
    pub(super) control_len: usize,
}

impl Batch {
    /// Room for [`BATCH`] datagrams; `told`: with control messages.
    pub(super) fn new(told: bool) -> Self {
        // SAFETY: all-zero bytes are valid headers and slices: they consist of integers and
        // raw pointers.
        let (header, slice): (libc::mmsghdr, libc::iovec) = unsafe { (mem::zeroed(), mem::zeroed()) };
        Self {
            incoming: Incoming::new(if told { Told::PeersAndControls } else { Told::Peers }),
            replies: [const { Vec::new() }; BATCH],
            outgoing: Box::new([header; BATCH]),
            slices: Box::new([slice; BATCH]),
        }
    }

    /// Waits for a datagram and takes all that are there; says how many.
    pub(super) fn receive(&mut self, socket: RawFd) -> io::Result<usize> {
        self.incoming.receive(socket, libc::MSG_WAITFORONE)
    }

    /// The first `count` datagrams, as [`receive`](Self::receive) left them.
    pub(super) fn datagrams(&mut self, count: usize) -> impl Iterator<Item = Datagram<'_>> {
        self.incoming.datagrams(count).zip(&mut self.replies).map(|(datagram, reply)| {
            let mmsg::Datagram { bytes, peer, control, control_len } = datagram;
            reply.clear();
            Datagram { query: bytes, reply, peer, control, control_len }
        })
    }

    /// Sends the replies to the first `count` datagrams, those that are not
    /// empty; says how many the kernel did not take.
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
        // SAFETY: each header leads to a reply, an address and control messages of this batch,
        // which live longer than the call.
        unsafe { mmsg::send(socket, &mut self.outgoing[..ready]) }
    }
}
