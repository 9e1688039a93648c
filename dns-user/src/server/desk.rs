//! What all sockets share: from a query to its reply.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{DNSClass, Name as MessageName, RData, Record, rdata::TXT},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    Looked, Options, Router, ServerMetrics,
    metrics::{By, Observed, Stripe},
    router::{Route, UPCHECK_V4, UPCHECK_V6},
};
use crate::{
    name::Name,
    ops::logs::requests,
    resolve::Resolution,
    wire::{
        self, Parsed, Query, ReplyFlags, Shuffle, Transport, address_reply, empty_reply, error_reply, fit,
        local_reply,
    },
};

/// The way from a query to its reply, and its limits.
pub(super) struct Desk {
    /// Who answers.
    pub(super) router: Arc<Router>,
    /// What is counted.
    pub(super) metrics: ServerMetrics,
    /// Limits.
    pub(super) options: Options,
    /// One permit for each query that may wait for somebody else.
    in_flight: Arc<Semaphore>,
}

/// What became of a query at once.
pub(super) enum AtOnce {
    /// The reply is written.
    Replied {
        /// Who answered.
        by: By,
        /// The answer, if it is a local one.
        resolution: Option<Arc<Resolution>>,
    },
    /// Somebody else has to be waited for: [`Desk::answer_later`].
    Later(Later),
}

/// A query that has to wait.
pub(super) struct Later {
    /// For whom.
    route: Route,
    /// The question's name.
    name: Name,
}

impl Later {
    /// Who is going to answer.
    pub(super) fn by(&self) -> By {
        by(&self.route)
    }
}

impl Desk {
    /// For queries that `router` routes.
    pub(super) fn new(router: Arc<Router>, metrics: ServerMetrics, options: Options) -> Self {
        let in_flight = Arc::new(Semaphore::new(options.max_in_flight.min(Semaphore::MAX_PERMITS)));
        Self { router, metrics, options, in_flight }
    }

    /// Writes the reply into `out` if nobody has to be waited for.
    pub(super) fn answer_at_once(
        &self,
        query: &Query<'_>,
        transport: Transport,
        shuffle: &mut Shuffle,
        out: &mut Vec<u8>,
    ) -> AtOnce {
        let name = query.question.name();
        let route =
            self.router.route(&name, query.question.qtype, query.question.qclass, query.edns.is_some());
        let limit = query.limit(transport);
        let by = by(&route);
        match &route {
            Route::Local => match self.router.local().look(&name) {
                Looked::Found(resolution) => {
                    local_reply(query, &resolution, limit, shuffle, out);
                    self.router.add_options(query, transport, out);
                    return AtOnce::Replied { by, resolution: Some(resolution) };
                }
                // `NotLocal`: a new snapshot came in between.
                Looked::Wait | Looked::NotLocal => return AtOnce::Later(Later { route, name }),
            },
            Route::Upcheck => address_reply(query, &UPCHECK_V4, &UPCHECK_V6, limit, shuffle, out),
            Route::Chaos(text) => *out = chaos_reply(query, text, transport),
            Route::Refused => *out = error_reply(query, ResponseCode::Refused),
            Route::Handler(answer) | Route::Reverse(answer) | Route::Recursors(answer) => {
                out.clear();
                if !answer.answer_at_once(query, transport, out) {
                    return AtOnce::Later(Later { route, name });
                }
                *out = fit(query, std::mem::take(out), transport);
            }
        }
        self.router.add_options(query, transport, out);
        AtOnce::Replied { by, resolution: None }
    }

    /// A place among the queries that wait; `None`: there are too many.
    pub(super) fn admit(&self) -> Option<OwnedSemaphorePermit> {
        self.in_flight.clone().try_acquire_owned().ok()
    }

    /// Waits until no query waits any more.
    pub(super) async fn idle(&self) {
        let all = u32::try_from(self.options.max_in_flight).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        let _ = self.in_flight.acquire_many(all).await;
    }

    /// The reply of somebody else, cut to what the client takes; SERVFAIL if it
    /// does not come in time.
    pub(super) async fn answer_later(
        &self,
        query: &Query<'_>,
        later: &Later,
        transport: Transport,
    ) -> Vec<u8> {
        let Later { route, name } = later;
        let answer = async {
            match route {
                Route::Handler(answer) | Route::Reverse(answer) | Route::Recursors(answer) => {
                    fit(query, answer.answer(query, transport).await, transport)
                }
                _ => self.answer_local(query, name, transport).await,
            }
        };
        let _waiting = self.metrics.in_flight();
        match tokio::time::timeout(self.options.request_timeout, answer).await {
            Ok(mut reply) => {
                self.router.add_options(query, transport, &mut reply);
                reply
            }
            Err(_) => empty_reply(query, ResponseCode::ServFail, ReplyFlags::RECURSION),
        }
    }

    /// A local answer after its first checks.
    async fn answer_local(&self, query: &Query<'_>, name: &Name, transport: Transport) -> Vec<u8> {
        match self.router.local().lookup(name).await {
            Some(resolution) => {
                let mut out = Vec::new();
                let limit = query.limit(transport);
                local_reply(query, &resolution, limit, &mut Shuffle::default(), &mut out);
                out
            }
            // It was local when it was routed: a new snapshot came in between,
            // and the client does best to ask again.
            None => error_reply(query, ResponseCode::ServFail),
        }
    }

    /// What a client gets when too many queries wait already.
    pub(super) fn overload_reply(&self, query: &Query<'_>) -> Vec<u8> {
        empty_reply(query, ResponseCode::ServFail, ReplyFlags::RECURSION)
    }
}

/// Counts a reply and logs it if asked to.
pub(super) fn observe(
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
    if requests::wanted() {
        log(client, transport, query, reply, by, took);
    }
}

/// Counts a reply to a message without a readable question.
pub(super) fn observe_unreadable(
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

/// The line per request.
#[cold]
fn log(client: SocketAddr, transport: Transport, query: &Query<'_>, reply: &[u8], by: By, took: Duration) {
    requests::log(&requests::Request {
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
    });
}

/// Who answers on a route.
fn by(route: &Route) -> By {
    match route {
        Route::Upcheck => By::Upcheck,
        Route::Local => By::Local,
        Route::Chaos(_) => By::Chaos,
        Route::Handler(_) => By::Handler,
        Route::Reverse(_) => By::Reverse,
        Route::Recursors(_) => By::Recursors,
        Route::Refused => By::Nobody,
    }
}

/// A TXT record of class CH; longer texts are split into strings of 255 bytes.
fn chaos_reply(query: &Query<'_>, text: &str, transport: Transport) -> Vec<u8> {
    let plain = empty_reply(query, ResponseCode::NoError, ReplyFlags::LOCAL);
    let Ok(mut reply) = Message::from_vec(&plain) else {
        return plain;
    };
    let owner = reply.queries.first().map_or_else(MessageName::root, |question| question.name().clone());
    let strings: Vec<&[u8]> = text.as_bytes().chunks(255).collect();
    let mut record = Record::from_rdata(owner, 0, RData::TXT(TXT::from_bytes(strings)));
    record.dns_class = DNSClass::CH;
    reply.add_answer(record);
    // Taken out and put back by `fit`, which keeps the client's size as it is.
    reply.edns = None;
    reply.to_vec().map_or(plain, |reply| fit(query, reply, transport))
}

/// A message that was parsed once is parsed again from its own copy, to be
/// answered by a task.
pub(super) fn parse_again(message: &[u8]) -> Option<Query<'_>> {
    match wire::parse(message) {
        Parsed::Query(query) => Some(query),
        Parsed::Reply(_) | Parsed::Drop => None,
    }
}
