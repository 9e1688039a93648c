//! The messages of `dnstap.proto` (github.com/dnstap/dnstap.pb), as far as this server writes them.

use std::net::{IpAddr, SocketAddr};

use dns_core::config::DnstapMessages;

use super::{Parties, Protocol, Queued};

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Dnstap {
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
    let Queued { parties, protocol, from, to, query, reply, query_time, reply_time, extra: _ } = exchange;
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
    let is_v4 = from.or(to).is_some_and(|address| address.ip().to_canonical().is_ipv4());
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
    let response = reply.filter(|_| wants_reply).map(|reply| Message {
        kind: reply_type as i32,
        response_time_sec: Some(reply_time.as_secs()),
        response_time_nsec: Some(reply_time.subsec_nanos()),
        response_message: Some(reply),
        ..common.clone()
    });
    let query = wants_query.then_some(Message { query_message: Some(query), ..common });
    query.into_iter().chain(response)
}

/// Returns an address in network byte order; `None` if it is unspecified.
fn octets(address: SocketAddr) -> Option<Vec<u8>> {
    match address.ip().to_canonical() {
        ip if ip.is_unspecified() => None,
        IpAddr::V4(ip) => Some(ip.octets().to_vec()),
        IpAddr::V6(ip) => Some(ip.octets().to_vec()),
    }
}
