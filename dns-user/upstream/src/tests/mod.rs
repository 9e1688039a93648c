//! Tests with real sockets on loopback.

mod cache;
mod forward;
mod http;
mod lies;
mod scripted;

use std::time::Duration;

use super::{Ask, forward::Forwarder, message, recursor::Manner, udp::Matching};
use dns_core::{
    config::{RecursorErrors, RecursorSelection},
    wire::Transport,
};

/// Time for one try in tests: long enough on a busy machine, short enough to wait for.
const TIMEOUT: Duration = Duration::from_millis(300);

/// A query for `name` (wire format) and type with RD set, without EDNS.
fn query(name: &[u8], qtype: u16) -> Vec<u8> {
    let mut query = b"\xab\xcd\x01\0\0\x01\0\0\0\0\0\0".to_vec();
    query.extend_from_slice(name);
    query.extend_from_slice(&qtype.to_be_bytes());
    query.extend_from_slice(&[0, 1]);
    query
}

/// A forwarder to these addresses.
fn forwarder(names: &[String], retries: u32, errors: RecursorErrors) -> Forwarder {
    let matching = if errors == RecursorErrors::Nxdomain { Matching::Lenient } else { Matching::Strict };
    let manner = Manner { timeout: TIMEOUT, max_retries: retries, matching, randomise_case: false };
    Forwarder::new(names, manner, RecursorSelection::Serial, errors)
}

/// Forwards a query and checks that the reply is to it.
async fn ask(forwarder: &Forwarder, query: &[u8], transport: Transport) -> Vec<u8> {
    let ask = Ask::new(query, transport).expect("a query of our own making");
    let mut reply = forwarder.forward(&ask).await.reply;
    ask.add_opt(&mut reply);
    assert_eq!(message::id(&reply), message::id(query), "the client's id");
    assert!(message::Flags::of(&reply).is_reply());
    reply
}

/// The RCODE of a reply.
fn rcode(reply: &[u8]) -> u8 {
    message::Flags::of(reply).rcode()
}
