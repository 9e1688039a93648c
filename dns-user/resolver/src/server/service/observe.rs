//! Counts and logs requests and their replies.

use std::{net::SocketAddr, time::Duration};

use super::QueryHandler;
use crate::{
    ops::tap::Tap,
    server::metrics::{By, Observed, Stripe},
};
use dns_core::wire::{Query, Transport};
use dns_platform::logs::{Request, requests};

impl QueryHandler {
    /// Counts a reply and passes the request to the log and the tap if they are active.
    #[expect(clippy::too_many_arguments, reason = "each is a fact about the reply")]
    pub(in crate::server) fn observe(
        &self,
        stripe: &Stripe,
        client: SocketAddr,
        transport: Transport,
        query: &Query<'_>,
        reply: &[u8],
        by: By,
        took: Duration,
    ) {
        let rcode = reply.get(3).map_or(0, |byte| byte & 15);
        stripe.observe(&Observed {
            transport,
            from_v6: !client.ip().to_canonical().is_ipv4(),
            qtype: Some(query.question.qtype),
            dnssec_ok: query.edns.is_some_and(|edns| edns.dnssec_ok),
            rcode,
            by,
            query_len: query.message.len(),
            reply_len: reply.len(),
            took,
        });
        if requests::wanted() || self.options.tap.is_wanted() {
            tell(&self.options.tap, client, transport, query, reply, by, took);
        }
    }
}

/// Counts a reply to a message without a readable question.
pub(in crate::server) fn observe_unreadable(
    stripe: &Stripe,
    client: SocketAddr,
    transport: Transport,
    message: &[u8],
    reply: &[u8],
    took: Duration,
) {
    stripe.observe(&Observed {
        transport,
        from_v6: !client.ip().to_canonical().is_ipv4(),
        qtype: None,
        dnssec_ok: false,
        rcode: reply.get(3).map_or(0, |byte| byte & 15),
        by: By::Nobody,
        query_len: message.len(),
        reply_len: reply.len(),
        took,
    });
}

/// Passes a request to the log and the tap.
#[cold]
fn tell(
    tap: &Tap,
    client: SocketAddr,
    transport: Transport,
    query: &Query<'_>,
    reply: &[u8],
    by: By,
    took: Duration,
) {
    let request = Request {
        name: &query.question.name(),
        query_type: query.question.qtype,
        rcode: reply.get(3).map_or(0, |byte| byte & 15),
        answers: reply.get(6..8).map_or(0, |count| u16::from_be_bytes([count[0], count[1]])),
        bytes: reply.len(),
        client,
        transport: match transport {
            Transport::Udp => "udp",
            Transport::Tcp => "tcp",
        },
        answered_by: by.label(),
        took,
    };
    requests::log(&request);
    tap.observe(&request);
}
