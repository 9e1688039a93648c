//! DNS messages in and out: parsing, encoding, truncation, EDNS. Pure.
//!
//! A plain query (a header, one question, at most one OPT) is read in place and
//! a local reply is written byte by byte: no allocation, and the bytes that
//! hickory's encoder would give. Everything else goes through hickory-proto.
//!
//! * [`parse`]: what came in, and whether it deserves a reply at once.
//! * [`reply`]: replies made here.
//! * [`fit`](mod@fit): replies made elsewhere, cut to what the client takes.

mod fit;
mod read;
pub mod reply;
#[cfg(test)]
mod tests;

pub use dns_common::UDP_PAYLOAD_SIZE;
pub use fit::fit;
pub use read::parse;
pub use reply::{
    OPT_LEN, ReplyFlags, Shuffle, address_reply, append_opt, empty_reply, error_reply, local_reply,
    opt_record,
};

use std::{net::IpAddr, ops::Range};

use crate::name::Name;

/// Bytes of a message header (RFC 1035, section 4.1.1).
pub const HEADER_LEN: usize = 12;

/// Largest UDP reply to a client that says nothing about its size (RFC 1035,
/// section 4.2.1), and the least that a size in an OPT means (RFC 6891,
/// section 6.2.3).
pub const MIN_UDP_SIZE: usize = 512;

/// Largest message that a UDP datagram over IPv4 can hold: 65,535 less the
/// headers of IP (20) and UDP (8). IPv6 would take 20 bytes more.
pub const MAX_UDP_SIZE: usize = 65_507;

/// Largest message over TCP: its length has 16 bits (RFC 1035, section 4.2.2).
pub const MAX_TCP_SIZE: usize = 65_535;

/// Type A.
pub const TYPE_A: u16 = 1;
/// Type PTR.
pub const TYPE_PTR: u16 = 12;
/// Type TXT.
pub const TYPE_TXT: u16 = 16;
/// Type AAAA.
pub const TYPE_AAAA: u16 = 28;
/// Type OPT, the pseudo-record of EDNS.
pub const TYPE_OPT: u16 = 41;
/// Type DS, which belongs to the parent of the name that it is asked for.
pub const TYPE_DS: u16 = 43;
/// Query type ANY.
pub const TYPE_ANY: u16 = 255;
/// Class IN.
pub const CLASS_IN: u16 = 1;
/// Query class ANY.
pub const CLASS_ANY: u16 = 255;
/// Class CH, in which servers tell about themselves.
pub const CLASS_CH: u16 = 3;

/// How a query came and a reply goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// One message in a datagram.
    Udp,
    /// Messages behind their lengths in a stream.
    Tcp,
}

/// What became of an incoming message.
#[derive(Debug)]
pub enum Parsed<'a> {
    /// One question to be answered.
    Query(Query<'a>),
    /// Not to be looked at further: FORMERR, NOTIMP or BADVERS, ready to send.
    Reply(Vec<u8>),
    /// No reply: shorter than a header, or itself a reply.
    Drop,
}

/// A query with opcode QUERY and one question.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// The whole message as it came.
    pub message: &'a [u8],
    /// Id to be echoed.
    pub id: u16,
    /// The second 16 bits of the header, as they came.
    pub flags: u16,
    /// The question.
    pub question: Question<'a>,
    /// What the OPT says, where there is one.
    pub edns: Option<Edns>,
    /// Most bytes of a reply by UDP, whatever the client takes.
    pub most_by_udp: usize,
    /// Address of the client, as far as the receiver of the message knows it.
    pub client: Option<IpAddr>,
    /// Whether the OPT of the reply repeats the client's size with DO clear, as the
    /// reference's does. The receiver of the message sets it.
    pub echoes_opt: bool,
}

impl Query<'_> {
    /// Copies the query and its message, so that it outlives the receive buffer.
    pub fn to_owned(&self) -> OwnedQuery {
        let Query { message, id, flags, question, edns, most_by_udp, client, echoes_opt } = *self;
        let Question { raw_name, qtype, qclass } = question;
        let (message, name_len) = (message.into(), raw_name.len());
        OwnedQuery { message, id, flags, name_len, qtype, qclass, edns, most_by_udp, client, echoes_opt }
    }
}

/// A [`Query`] that owns its message.
#[derive(Clone, Debug)]
pub struct OwnedQuery {
    /// See [`Query::message`].
    message: Box<[u8]>,
    /// See [`Query::id`].
    id: u16,
    /// See [`Query::flags`].
    flags: u16,
    /// Bytes of the question's name, which follows the header.
    name_len: usize,
    /// See [`Question::qtype`].
    qtype: u16,
    /// See [`Question::qclass`].
    qclass: u16,
    /// See [`Query::edns`].
    edns: Option<Edns>,
    /// See [`Query::most_by_udp`].
    most_by_udp: usize,
    /// See [`Query::client`].
    client: Option<IpAddr>,
    /// See [`Query::echoes_opt`].
    echoes_opt: bool,
}

impl OwnedQuery {
    /// The query that it was made of, without reading the message again.
    pub fn as_query(&self) -> Query<'_> {
        let Self { message, id, flags, name_len, qtype, qclass, edns, most_by_udp, client, echoes_opt } =
            self;
        let raw_name = &message[HEADER_LEN..HEADER_LEN + name_len];
        let question = Question { raw_name, qtype: *qtype, qclass: *qclass };
        Query {
            message,
            id: *id,
            flags: *flags,
            question,
            edns: *edns,
            most_by_udp: *most_by_udp,
            client: *client,
            echoes_opt: *echoes_opt,
        }
    }
}

/// The question of a query.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The name as sent: wire format, uncompressed, letter case kept, root label included.
    pub raw_name: &'a [u8],
    /// QTYPE.
    pub qtype: u16,
    /// QCLASS.
    pub qclass: u16,
}

/// The OPT pseudo-record (RFC 6891, section 6.1.2) of a query. Its version is 0:
/// others have been answered with BADVERS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edns {
    /// Size of datagram that the client takes, as sent; below 512 it means 512.
    pub udp_size: u16,
    /// DO: the client wants DNSSEC records (RFC 3225).
    pub dnssec_ok: bool,
    /// Start and end of the Client Subnet option in the message, its code and length
    /// included (RFC 7871, section 6).
    pub client_subnet: Option<(u16, u16)>,
}

impl<'a> Query<'a> {
    /// RD: the client wants recursion.
    pub fn recursion_desired(&self) -> bool {
        self.flags & flag::RD != 0
    }

    /// CD: the client wants no DNSSEC checks done for it.
    pub fn checking_disabled(&self) -> bool {
        self.flags & flag::CD != 0
    }

    /// Whether the client understands AD in a reply: it set AD or DO (RFC 6840, section 5.8).
    pub fn wants_authentic_data(&self) -> bool {
        self.flags & flag::AD != 0 || self.dnssec_ok()
    }

    /// DO (RFC 3225); clear without an OPT.
    pub fn dnssec_ok(&self) -> bool {
        self.edns.is_some_and(|edns| edns.dnssec_ok)
    }

    /// Range of the question in the message: name, type, class.
    pub fn question_range(&self) -> Range<usize> {
        HEADER_LEN..HEADER_LEN + self.question.wire_len()
    }

    /// The Client Subnet option with its code and length (RFC 7871, section 6).
    pub fn client_subnet(&self) -> Option<&'a [u8]> {
        let (start, end) = self.edns?.client_subnet?;
        self.message.get(usize::from(start)..usize::from(end))
    }

    /// The OPT of a reply to this query, without options; `None` if the query has none
    /// (RFC 6891, section 6.1.1). DO is copied (RFC 3225, section 3).
    pub fn reply_opt(&self, extended_rcode: u8) -> Option<[u8; OPT_LEN]> {
        let edns = self.edns?;
        Some(if self.echoes_opt {
            opt_record(edns.udp_size, extended_rcode, false)
        } else {
            opt_record(UDP_PAYLOAD_SIZE, extended_rcode, edns.dnssec_ok)
        })
    }

    /// Most bytes that a reply may have.
    pub fn limit(&self, transport: Transport) -> usize {
        match transport {
            Transport::Tcp => MAX_TCP_SIZE,
            Transport::Udp => self
                .edns
                .map_or(MIN_UDP_SIZE, |edns| usize::from(edns.udp_size).clamp(MIN_UDP_SIZE, MAX_UDP_SIZE))
                .min(self.most_by_udp),
        }
    }
}

impl Question<'_> {
    /// The name in the form that is compared and looked up.
    pub fn name(&self) -> Name {
        // `parse` lets only well-formed names pass.
        Name::from_wire(self.raw_name).map_or_else(|_| Name::root(), |(name, _)| name)
    }

    /// Bytes of the question in the message: name, type, class.
    pub fn wire_len(&self) -> usize {
        self.raw_name.len() + 4
    }
}

/// Bits of the second 16 bits of a header (RFC 1035, section 4.1.1; RFC 4035, section 3).
pub(crate) mod flag {
    /// This is a reply.
    pub(crate) const QR: u16 = 0x8000;
    /// The answer is authoritative.
    pub(crate) const AA: u16 = 0x0400;
    /// The reply was cut.
    pub(crate) const TC: u16 = 0x0200;
    /// Recursion is desired.
    pub(crate) const RD: u16 = 0x0100;
    /// Authentic data.
    pub(crate) const AD: u16 = 0x0020;
    /// Recursion is available.
    pub(crate) const RA: u16 = 0x0080;
    /// Checking disabled.
    pub(crate) const CD: u16 = 0x0010;
    /// Bits that every reply takes over from its query.
    pub(crate) const COPIED: u16 = RD | CD;
    /// The four bits of the opcode.
    pub(crate) const OPCODE: u16 = 0x7800;
}

/// Two bytes of `message` at `at` in network order, if they are there.
fn u16_at(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*message.get(at..)?.first_chunk()?))
}

/// End of the name at `at`, which may be or end in a pointer.
fn skip_name(message: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *message.get(at)? {
            0 => return Some(at + 1),
            length @ 1..=63 => at += usize::from(length) + 1,
            0xc0..=0xff => return Some(at + 2),
            _ => return None,
        }
    }
}
