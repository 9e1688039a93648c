//! Frame Streams (github.com/farsightsec/fstrm): a stream of data frames between control frames.
//!
//! A data frame is its length in 32 bits and its bytes. A control frame begins with a length of zero, an escape,
//! and then has its own length, its type and its fields. A sender to a socket offers its content type
//! (READY), the receiver accepts it (ACCEPT), and confirms the end (STOP) by FINISH; a file only has START
//! and STOP.
//!
//! The messages follow `dnstap.proto` (github.com/dnstap/dnstap.pb), as far as this server writes them.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr},
};

use crate::{Parties, Protocol, Queued};
use dns_core::config::DnstapMessages;

const CONTENT_TYPE: &[u8] = b"protobuf:dnstap.Dnstap";
/// Maximum length of a control frame (`FSTRM_CONTROL_FRAME_LENGTH_MAX`).
const MAX_CONTROL: u32 = 512;
/// The only field of control frames: a content type.
const FIELD_CONTENT_TYPE: u32 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Control {
    Accept = 1,
    Start = 2,
    Stop = 3,
    Ready = 4,
    Finish = 5,
}

/// Appends a data frame; `encode` writes its content.
pub(super) fn data(out: &mut Vec<u8>, encode: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    encode(out);
    // Two messages of at most 65,535 bytes and a few fields.
    let length = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&length.to_be_bytes());
}

/// Returns a control frame; a frame that opens a stream names its content.
pub(super) fn control(kind: Control) -> Vec<u8> {
    let mut fields = (kind as u32).to_be_bytes().to_vec();
    if matches!(kind, Control::Ready | Control::Accept | Control::Start) {
        fields.extend_from_slice(&FIELD_CONTENT_TYPE.to_be_bytes());
        fields.extend_from_slice(&(CONTENT_TYPE.len() as u32).to_be_bytes());
        fields.extend_from_slice(CONTENT_TYPE);
    }
    let mut frame = 0_u32.to_be_bytes().to_vec();
    frame.extend_from_slice(&(fields.len() as u32).to_be_bytes());
    frame.extend_from_slice(&fields);
    frame
}

/// Opens a stream on a socket, whose reads and writes must have a time limit.
pub(super) fn open(socket: &mut (impl Read + Write)) -> io::Result<()> {
    socket.write_all(&control(Control::Ready))?;
    let fields = expect(socket, Control::Accept)?;
    if !accepts(&fields) {
        return Err(io::Error::other(
            "the reader accepts other content than dnstap",
        ));
    }
    socket.write_all(&control(Control::Start))
}

/// Ends a stream on a socket; returns once the reader has everything.
pub(super) fn close(socket: &mut (impl Read + Write)) -> io::Result<()> {
    socket.write_all(&control(Control::Stop))?;
    expect(socket, Control::Finish).map(drop)
}

/// Reads a control frame of this type and returns its fields.
fn expect(socket: &mut impl Read, kind: Control) -> io::Result<Vec<u8>> {
    let escape = word(socket)?;
    let length = word(socket)?;
    // The reader is another program: its lengths are not believed.
    if escape != 0 || !(4..=MAX_CONTROL).contains(&length) || word(socket)? != kind as u32 {
        return Err(io::Error::other(format!(
            "the reader sent something else than a frame {kind:?}"
        )));
    }
    let mut fields = vec![0; length as usize - 4];
    socket.read_exact(&mut fields)?;
    Ok(fields)
}

fn word(socket: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    socket.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

/// Returns whether the fields of ACCEPT allow dnstap: they name it, or nothing.
fn accepts(mut fields: &[u8]) -> bool {
    if fields.is_empty() {
        return true;
    }
    while let Some((header, rest)) = fields.split_first_chunk::<8>() {
        let [a, b, c, d, e, f, g, h] = *header;
        let length = u32::from_be_bytes([e, f, g, h]) as usize;
        let Some((content, after)) = rest.split_at_checked(length) else {
            return false;
        };
        // A reader may accept several kinds of content.
        if u32::from_be_bytes([a, b, c, d]) == FIELD_CONTENT_TYPE && content == CONTENT_TYPE {
            return true;
        }
        fields = after;
    }
    false
}

//----------- Schema ---------------------------------------------------------

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct DnstapFrame {
    #[prost(bytes = "vec", optional, tag = "1")]
    pub(super) identity: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "2")]
    pub(super) version: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "3")]
    pub(super) extra: Option<Vec<u8>>,
    #[prost(message, optional, tag = "14")]
    pub(super) message: Option<Message>,
    /// Enumeration `Dnstap.Type`; [`MESSAGE`] is its only value.
    #[prost(int32, required, tag = "15")]
    pub(super) kind: i32,
}

pub(super) const MESSAGE: i32 = 1;

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Message {
    #[prost(enumeration = "MessageType", required, tag = "1")]
    pub(super) kind: i32,
    /// Enumeration `SocketFamily`: 1 for IPv4, 2 for IPv6.
    #[prost(int32, optional, tag = "2")]
    pub(super) socket_family: Option<i32>,
    /// Enumeration `SocketProtocol`: 1 for UDP, 2 for TCP, 3 for DNS over TLS.
    #[prost(int32, optional, tag = "3")]
    pub(super) socket_protocol: Option<i32>,
    #[prost(bytes = "vec", optional, tag = "4")]
    pub(super) query_address: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "5")]
    pub(super) response_address: Option<Vec<u8>>,
    #[prost(uint32, optional, tag = "6")]
    pub(super) query_port: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    pub(super) response_port: Option<u32>,
    #[prost(uint64, optional, tag = "8")]
    pub(super) query_time_sec: Option<u64>,
    #[prost(fixed32, optional, tag = "9")]
    pub(super) query_time_nsec: Option<u32>,
    #[prost(bytes = "vec", optional, tag = "10")]
    pub(super) query_message: Option<Vec<u8>>,
    #[prost(uint64, optional, tag = "12")]
    pub(super) response_time_sec: Option<u64>,
    #[prost(fixed32, optional, tag = "13")]
    pub(super) response_time_nsec: Option<u32>,
    #[prost(bytes = "vec", optional, tag = "14")]
    pub(super) response_message: Option<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum MessageType {
    ClientQuery = 5,
    ClientResponse = 6,
    ForwarderQuery = 7,
    ForwarderResponse = 8,
}

/// Returns the wanted messages of an exchange, the query first.
pub(super) fn messages(exchange: Queued, wanted: DnstapMessages) -> impl Iterator<Item = Message> {
    let Queued {
        parties,
        protocol,
        from,
        to,
        query,
        reply,
        query_time,
        reply_time,
        extra: _,
    } = exchange;
    let (query_type, wants_query, reply_type, wants_reply) = match parties {
        Parties::ClientAndServer => (
            MessageType::ClientQuery,
            wanted.client_query,
            MessageType::ClientResponse,
            wanted.client_response,
        ),
        Parties::ServerAndRecursor => (
            MessageType::ForwarderQuery,
            wanted.forwarder_query,
            MessageType::ForwarderResponse,
            wanted.forwarder_response,
        ),
    };
    // Both have one family; a query to a recursor has no sender here.
    let is_v4 = from.or(to).is_some_and(is_v4);
    let common = Message {
        kind: query_type as i32,
        socket_family: Some(if is_v4 { 1 } else { 2 }),
        socket_protocol: Some(match protocol {
            Protocol::Udp => 1,
            Protocol::Tcp => 2,
            Protocol::Dot => 3,
        }),
        query_address: from.and_then(octets),
        query_port: from.map(|address| address.port().into()),
        response_address: to.and_then(octets),
        response_port: to.map(|address| address.port().into()),
        query_time_sec: Some(query_time.as_secs()),
        query_time_nsec: Some(query_time.subsec_nanos()),
        ..Message::default()
    };
    let mut response = None;
    if wants_reply && let Some(reply) = reply {
        response = Some(Message {
            kind: reply_type as i32,
            response_time_sec: Some(reply_time.as_secs()),
            response_time_nsec: Some(reply_time.subsec_nanos()),
            response_message: Some(reply),
            ..common.clone()
        });
    }
    let query = wants_query.then_some(Message {
        query_message: Some(query),
        ..common
    });
    query.into_iter().chain(response)
}

fn is_v4(address: SocketAddr) -> bool {
    // A socket for both families gives IPv4 addresses as IPv6 ones.
    address.ip().to_canonical().is_ipv4()
}

/// Returns an address in network byte order; `None` if it is unspecified.
fn octets(address: SocketAddr) -> Option<Vec<u8>> {
    match address.ip().to_canonical() {
        // A socket of a wildcard does not tell at which address the query arrived; readers must not
        // show 0.0.0.0.
        ip if ip.is_unspecified() => None,
        IpAddr::V4(ip) => Some(ip.octets().to_vec()),
        IpAddr::V6(ip) => Some(ip.octets().to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket whose peer has sent `input`.
    struct Peer<'a> {
        input: &'a [u8],
        output: Vec<u8>,
    }

    impl Read for Peer<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.input.read(buffer)
        }
    }

    impl Write for Peer<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.output.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn open_with(input: &[u8]) -> (io::Result<()>, Vec<u8>) {
        let mut peer = Peer {
            input,
            output: Vec::new(),
        };
        (open(&mut peer), peer.output)
    }

    #[test]
    fn handshake_follows_protocol() {
        let (opened, sent) = open_with(&control(Control::Accept));
        opened.unwrap();
        assert_eq!(
            sent,
            [control(Control::Ready), control(Control::Start)].concat()
        );
        assert_eq!(
            sent[..20],
            *b"\0\0\0\0\0\0\0\x22\0\0\0\x04\0\0\0\x01\0\0\0\x16"
        );
        // A reader that accepts anything names nothing.
        open_with(b"\0\0\0\0\0\0\0\x04\0\0\0\x01").0.unwrap();
    }

    #[test]
    fn other_peers_are_refused() {
        for input in [
            &b"HTTP/1.1 400 Bad Request"[..],
            b"\0\0\0\0\xff\xff\xff\xff\0\0\0\x01",
            b"\0\0\0\0\0\0\0\x02\0\0\0\x01",
            b"\0\0\0\0\0\0\0\x04\0\0\0\x05",
            b"\0\0\0\0\0\0\0\x0e\0\0\0\x01\0\0\0\x01\0\0\0\x02ab",
            b"\0\0\0\0\0\0\0\x0c\0\0\0\x01\0\0\0\x01\0\0\0\xff",
            b"\0\0\0\0",
        ] {
            let (opened, sent) = open_with(input);
            assert!(opened.is_err(), "{input:?}");
            assert_eq!(sent, control(Control::Ready), "no START");
        }
    }

    #[test]
    fn data_frames_have_lengths() {
        let mut out = Vec::new();
        data(&mut out, |out| out.extend_from_slice(b"abc"));
        data(&mut out, |out| out.extend_from_slice(b""));
        assert_eq!(out, b"\0\0\0\x03abc\0\0\0\0");
    }
}
