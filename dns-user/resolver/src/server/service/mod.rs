//! Turns a query into its reply, for all sockets. A query is parsed once and answered from one
//! [`AnswerState`]. From the inside outwards:
//! * `state::Route`: selects the answerer.
//! * truncation: [`truncate_to_client`] truncates forwarded replies to the client's limit; local replies are built
//!   to fit.
//! * [`identity`]: class CH and the EDNS options that request the server's identity.
//! * [`QueryHandler::add_options`]: the EDNS options of replies, in one order: [`cookies`], identity, reasons.
//! * [`QueryHandler::observe`]: counts and logs replies.

pub(super) mod cookies;
pub(super) mod identity;

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use arc_swap::Guard;
use futures_util::future::BoxFuture;
use hickory_proto::op::ResponseCode;

use self::identity::{Identity, chaos_reply};
use super::{
    Options, ServerMetrics,
    metrics::{Counted, Observed, Responder, Stripe},
};
use crate::{
    ops::tap::Tap,
    state::{AnswerState, LookedUp, Route, ServerState},
};
use dns_core::{
    name::Name,
    resolve::{Existence, LocalAnswer, Resolution},
    wire::{
        CLASS_ANY, CLASS_CH, CLASS_IN, ExtendedError, InfoCode, MAX_UDP_SIZE, OPTION_NSID,
        OwnedQuery, Query, ReplyFlags, ReplySettings, Shuffle, Transport, empty_reply, error_reply,
        local_reply, truncate_to_client,
    },
};
use dns_dnstap::Exchange;
use dns_fastpath::{AnswerKey, is_answerable};
use dns_kit::logs::{Request, requests};
use dns_upstream::{Answer, admission::Permit, reverse_reply};

/// How often a stopping server checks for waiting queries.
const IDLE_POLL: Duration = Duration::from_millis(5);
/// Answer to up-check names.
const UPCHECK: LocalAnswer<'_> = LocalAnswer {
    existence: Existence::Found,
    v4: &[Ipv4Addr::LOCALHOST],
    v6: &[Ipv6Addr::LOCALHOST],
};

/// Turns queries into replies, within the configured limits.
pub(super) struct QueryHandler {
    /// Source of the state from which queries are answered.
    pub(super) server_state: Arc<ServerState>,
    /// The server's name and version.
    identity: Arc<Identity>,
    pub(super) metrics: ServerMetrics,
    pub(super) options: Options,
    /// The part of the options that changes the form of replies.
    pub(super) reply_settings: ReplySettings,
    /// Shared by the waiting queries of this server.
    waiting: Arc<()>,
}

/// The slot of a waiting query, released when dropped.
pub(super) struct WaitingPlace {
    _permit: Permit,
    _waiting: Arc<()>,
    _counted: Counted,
}

/// The answerer of a query, in the state in which it is answered.
struct Routed {
    /// Generation of the answers that interfaces give, as of the state or earlier.
    generation: u64,
    state: Guard<Arc<AnswerState>>,
    route: Route,
    /// The answerer, for metrics: with [`Route::Refused`], who would have answered in another class.
    responder: Responder,
}

/// The result of answering without waiting.
pub(super) enum Immediate {
    /// The reply has been written.
    Replied {
        responder: Responder,
        /// The resolution of a local name.
        resolution: Option<Resolution>,
    },
    /// The query must wait: call [`QueryHandler::answer_deferred`].
    Deferred(Deferred),
}

/// A query that must wait.
pub(super) struct Deferred {
    /// The query with a copy of its message.
    pub(super) query: OwnedQuery,
    /// The source for which it waits.
    source: Awaited,
    /// The answerer, for metrics.
    pub(super) responder: Responder,
}

/// The source for which a query waits.
enum Awaited {
    /// First checks of the instances of this local name in this state.
    FirstChecks(Arc<AnswerState>, Name),
    Other(Arc<dyn Answer>),
    /// The answer has begun to be made.
    Begun(BoxFuture<'static, Vec<u8>>),
}

impl Deferred {
    /// Returns the answerer, unless a task must wait for something else.
    pub(super) fn answerer(&self) -> Option<Arc<dyn Answer>> {
        match &self.source {
            Awaited::Other(answer) => Some(Arc::clone(answer)),
            Awaited::FirstChecks(..) | Awaited::Begun(_) => None,
        }
    }

    /// Makes a task wait for this answer.
    pub(super) fn wait_for(&mut self, answer: BoxFuture<'static, Vec<u8>>) {
        self.source = Awaited::Begun(answer);
    }
}

impl QueryHandler {
    pub(super) fn new(
        server_state: Arc<ServerState>,
        identity: Arc<Identity>,
        metrics: ServerMetrics,
        options: Options,
    ) -> Self {
        let reply_settings = ReplySettings {
            max_udp_reply: options.max_reply.map_or(MAX_UDP_SIZE, usize::from),
            echo_client_opt: options.compat.echo_opt,
        };
        Self {
            server_state,
            identity,
            metrics,
            options,
            reply_settings,
            waiting: Arc::default(),
        }
    }

    /// Writes the reply into `out` unless the query must wait. `name` is the question's, in lower case.
    pub(super) fn answer_at_once(
        &self,
        query: &Query<'_>,
        name: &Name,
        shuffle: &mut Shuffle,
        out: &mut Vec<u8>,
    ) -> Immediate {
        // Before routing: `version.bind` would otherwise go to the recursors, whose version it
        // would then show.
        if query.question.qclass == CLASS_CH
            && let Some(responder) = self.answer_chaos(query, name, out)
        {
            return Immediate::Replied {
                responder,
                resolution: None,
            };
        }
        let routed = self.route(query, name);
        let responder = routed.responder;
        match self.answer_routed(routed, query, name, shuffle, out) {
            Ok(resolution) => {
                self.add_options(query, responder, out);
                Immediate::Replied {
                    responder,
                    resolution,
                }
            }
            Err(source) => Immediate::Deferred(Deferred {
                query: query.to_owned(),
                source,
                responder,
            }),
        }
    }

    /// Writes the reply into `out`, and returns the resolution of a local name. The error is what the query must
    /// wait for.
    fn answer_routed(
        &self,
        routed: Routed,
        query: &Query<'_>,
        name: &Name,
        shuffle: &mut Shuffle,
        out: &mut Vec<u8>,
    ) -> Result<Option<Resolution>, Awaited> {
        let Routed {
            generation,
            state,
            route,
            responder,
        } = routed;
        match route {
            Route::Local => match self.server_state.look_up(&state, name, query.client) {
                LookedUp::Found(found) => {
                    local_reply(query, found.answer(), shuffle, out);
                    return Ok(Some(found));
                }
                LookedUp::NeedsFirstCheck => {
                    return Err(Awaited::FirstChecks(Arc::clone(&state), name.clone()));
                }
            },
            Route::Upcheck => local_reply(query, UPCHECK, shuffle, out),
            // The name is of the fleet, but not in this class. Forwarding it would ask others about
            // our names.
            Route::Refused if responder != Responder::None => *out = refusal(query, &OTHER_CLASS),
            Route::Refused => {
                // No server is left to ask. The root of the names answered here is no exception: it
                // must exist (RFC 8020), or a resolver that minimises names stops before it reaches
                // them.
                *out = refusal(query, &NOT_OURS);
                admit_existence(&state, query, name, out);
            }
            Route::Reverse(fallback) => {
                self.answer_reverse(&state, query, name, fallback, out)?;
            }
            Route::Consul(answer) | Route::Handler(answer) | Route::Recursors(answer) => {
                if !write_at_once(&*answer, query, out) {
                    return Err(Awaited::Other(answer));
                }
                // An interface would return the cached denial.
                let is_denied = admit_existence(&state, query, name, out);
                if responder == Responder::Consul {
                    self.learn_reply(query, name);
                // The key of an interface's copy has neither class nor RD, so only the usual values
                // may make one.
                } else if !is_denied
                    && query.question.qclass == CLASS_IN
                    && query.recursion_desired()
                {
                    self.offer(query, name, generation, &*answer);
                }
            }
        }
        Ok(None)
    }

    /// Writes the reply to a query for a reverse name into `out`. The error is what the query must wait for.
    fn answer_reverse(
        &self,
        state: &AnswerState,
        query: &Query<'_>,
        name: &Name,
        fallback: Arc<dyn Answer>,
        out: &mut Vec<u8>,
    ) -> Result<(), Awaited> {
        if let Some(reply) = reverse_reply(query, &state.snapshot, fastrand::Rng::new) {
            if !self.has_class(query) {
                // As for the fleet's other names.
                *out = refusal(query, &OTHER_CLASS);
                return Ok(());
            }
            // bosh-dns never truncates a reverse reply (observed); an address with many names would
            // then exceed the datagram.
            *out = truncate_to_client(query, reply);
            self.learn_reply(query, name);
            return Ok(());
        }
        if !write_at_once(&*fallback, query, out) {
            return Err(Awaited::Other(fallback));
        }
        // The fallback may deny a network (a private one, RFC 6303) in which a handler has a smaller
        // one.
        let is_denied = admit_existence(state, query, name, out);
        // Other servers' reverse names have a TTL that only the cache follows.
        if !is_denied && fallback.holds_reverse(query) {
            self.learn_reply(query, name);
        }
        Ok(())
    }

    /// Selects the answerer: [`Route::Refused`] with its responder if it has no data of the query's class.
    fn route(&self, query: &Query<'_>, name: &Name) -> Routed {
        // Read before the state, so that answers obtained through an older state are void.
        let generation = self.server_state.fast_path.answer_generation();
        let state = self.server_state.state();
        let route = Route::of(&state, name, query.question.qtype);
        let responder = responder_of(&route);
        let has_data = !matches!(route, Route::Local | Route::Upcheck) || self.has_class(query);
        Routed {
            generation,
            state,
            route: if has_data { route } else { Route::Refused },
            responder,
        }
    }

    /// Returns whether local data, which is of class IN, answers queries of this class.
    fn has_class(&self, query: &Query<'_>) -> bool {
        matches!(query.question.qclass, CLASS_IN | CLASS_ANY)
            // bosh-dns answers every class with records of class IN (observed).
            || self.options.compat.any_class
    }

    /// Answers a query of class CH; `None` if it is handled like any other.
    fn answer_chaos(&self, query: &Query<'_>, name: &Name, out: &mut Vec<u8>) -> Option<Responder> {
        let responder = match self.identity.chaos_text(query, name) {
            Some(text) => {
                *out = chaos_reply(query, text);
                Responder::Chaos
            }
            None if self.options.compat.any_class => return None,
            None => {
                *out = refusal(query, &OTHER_CLASS);
                Responder::None
            }
        };
        self.add_options(query, responder, out);
        Some(responder)
    }

    /// Hands over to the interfaces a cached answer that was used again.
    fn offer(&self, query: &Query<'_>, name: &Name, generation: u64, answer: &dyn Answer) {
        let question = answer_key(query, name);
        self.server_state
            .fast_path
            .offer_answer(&question, generation, || answer.cached(query));
    }

    /// Hands over to the interfaces a question that was answered by a local reply.
    fn learn_reply(&self, query: &Query<'_>, name: &Name) {
        if query.transport == Transport::Udp && is_answerable(query) {
            // The publisher lays the reply out for this size, since a larger one would need TC.
            let size = query.edns.map(|edns| edns.udp_size);
            self.server_state
                .fast_path
                .learn_reply(&answer_key(query, name), size, query.client);
        }
    }

    /// Reserves room in the reply for the options that a client needs. A client that has had a cookie drops a
    /// reply without one (RFC 7873, section 5.3), and a truncated one most of all must reach it.
    #[inline]
    pub(super) fn reserve_options<'m>(&self, query: Query<'m>) -> Query<'m> {
        // Most clients send no option, and are spared both look-ups.
        if !query.has_options() {
            return query;
        }
        let options = self.options.cookies.reply_len(&query) + self.identity.nsid_len(&query);
        query.with_room_for_options(options)
    }

    /// Adds EDNS options that depend on the query's options. Most queries have none.
    #[inline]
    pub(super) fn add_options(&self, query: &Query<'_>, responder: Responder, reply: &mut Vec<u8>) {
        if query.has_options() {
            self.add_requested_options(query, responder, reply);
        }
    }

    /// Adds cookies, the server's name, and the reason why a name of the fleet does not exist. Interfaces give
    /// the same denial without a reason, but leave every query for the server's name to userspace.
    #[cold]
    fn add_requested_options(&self, query: &Query<'_>, responder: Responder, reply: &mut Vec<u8>) {
        // First, because a malformed cookie replaces the whole reply (RFC 7873, section 5.2.2).
        self.options.cookies.add(query, reply);
        if query.option(OPTION_NSID).is_none() {
            return;
        }
        self.identity.add_nsid(query, reply);
        if matches!(responder, Responder::Local) && rcode_of(reply) == ResponseCode::NXDomain.low()
        {
            NO_INSTANCE.push(query, reply);
        }
    }

    /// Reserves a slot for a waiting query; `None` if the client holds too many.
    pub(super) fn admit(&self, query: &Query<'_>) -> Option<WaitingPlace> {
        // A client that asks for unreachable names gets at most as many slots as are still free, so
        // others always find one.
        let permit = self.options.waiting.admit(query.client)?;
        Some(WaitingPlace {
            _permit: permit,
            _waiting: Arc::clone(&self.waiting),
            _counted: self.metrics.in_flight(),
        })
    }

    pub(super) async fn idle(&self) {
        // Polled only when the server stops: a notification would cost every waiting query a lock.
        while Arc::strong_count(&self.waiting) > 1 {
            tokio::time::sleep(IDLE_POLL).await;
        }
    }

    /// Waits for the reply and truncates it to the client's limit; returns SERVFAIL after the time
    /// limit.
    pub(super) async fn answer_deferred(
        &self,
        deferred: &mut Deferred,
        limit: Duration,
    ) -> Vec<u8> {
        let Deferred {
            query,
            source,
            responder,
        } = deferred;
        let query = &query.as_query();
        let answer = async {
            match source {
                Awaited::Other(answer) => self.fit(query, answer.answer(query).await),
                Awaited::Begun(answer) => self.fit(query, answer.await),
                Awaited::FirstChecks(state, name) => {
                    // Boxed, because forwarded queries would have room for it.
                    let checked = self.server_state.look_up_checked(state, name, query.client);
                    let resolution = Box::pin(checked).await;
                    let mut out = Vec::new();
                    local_reply(
                        query,
                        resolution.answer(),
                        &mut Shuffle::default(),
                        &mut out,
                    );
                    out
                }
            }
        };
        let mut reply = match tokio::time::timeout(limit, answer).await {
            Ok(reply) => reply,
            // The client has given up or is about to. SERVFAIL still tells it, and caches behind
            // it, not to ask at once again (RFC 9520).
            Err(_) => failure(query, &TOO_SLOW),
        };
        self.add_options(query, *responder, &mut reply);
        reply
    }

    /// Fits an answerer's reply to the client and to the names of this server.
    fn fit(&self, query: &Query<'_>, reply: Vec<u8>) -> Vec<u8> {
        let mut reply = truncate_to_client(query, reply);
        // The name is copied for denials alone, which are few.
        if is_denial(&reply) {
            let name = query.question.name();
            admit_existence(&self.server_state.state(), query, &name, &mut reply);
        }
        reply
    }

    /// Completes the reply of an answerer, as [`Self::answer_deferred`] does.
    pub(super) fn complete(&self, deferred: &Deferred, reply: &mut Vec<u8>) {
        let query = &deferred.query.as_query();
        *reply = self.fit(query, std::mem::take(reply));
        self.add_options(query, deferred.responder, reply);
    }

    /// Returns the reply to a query when too many are waiting.
    pub(super) fn overload_reply(&self, query: &Query<'_>) -> Vec<u8> {
        let mut reply = failure(query, &TOO_MANY);
        // The answerer was not asked, so it does not explain this reply.
        self.add_options(query, Responder::None, &mut reply);
        reply
    }
}

/// Writes the reply of an answerer, cut to the client's limit, unless that must wait; returns whether it did.
fn write_at_once(answer: &dyn Answer, query: &Query<'_>, out: &mut Vec<u8>) -> bool {
    out.clear();
    let is_written = answer.answer_at_once(query, out);
    if is_written {
        *out = truncate_to_client(query, std::mem::take(out));
    }
    is_written
}

/// Returns the key of the answer to a query of class IN.
fn answer_key<'n>(query: &Query<'_>, name: &'n Name) -> AnswerKey<'n> {
    AnswerKey {
        name: name.into(),
        qtype: query.question.qtype,
        dnssec_ok: query.dnssec_ok(),
        checking_disabled: query.checking_disabled(),
    }
}

/// Replaces a denial by NOERROR without data, as for names of the fleet, if names below the denied one
/// are answered here: a resolver that minimises query names (RFC 9156) would never ask for them.
/// Returns whether it did.
fn admit_existence(
    state: &AnswerState,
    query: &Query<'_>,
    name: &Name,
    reply: &mut Vec<u8>,
) -> bool {
    let is_in = matches!(query.question.qclass, CLASS_IN | CLASS_ANY);
    if !is_denial(reply) || !is_in || !state.is_above_ours(name) {
        return false;
    }
    // Rebuilt rather than patched: the denial's SOA would let caches keep it as a denial (RFC
    // 2308).
    *reply = empty_reply(query, ResponseCode::NoError, ReplyFlags::LOCAL);
    true
}

fn is_denial(reply: &[u8]) -> bool {
    let rcode = rcode_of(reply);
    // After either, a resolver that minimises names asks for none below; SERVFAIL is tried again.
    rcode == ResponseCode::NXDomain.low() || rcode == ResponseCode::Refused.low()
}

/// Reasons of refusals, failures and denials (RFC 8914).
const OTHER_CLASS: ExtendedError = ExtendedError::new(
    InfoCode::NotSupported,
    "this server has no records of this class",
);
const NOT_OURS: ExtendedError = ExtendedError::new(
    InfoCode::NotAuthoritative,
    "recursion is disabled, and no handler has this domain",
);
const NO_INSTANCE: ExtendedError =
    ExtendedError::new(InfoCode::Other, "no instance matches this name");
const TOO_SLOW: ExtendedError = ExtendedError::new(
    InfoCode::NoReachableAuthority,
    "no answer within the time limit",
);
const TOO_MANY: ExtendedError =
    ExtendedError::new(InfoCode::Other, "too many queries of this client wait");

/// Returns REFUSED with its reason.
fn refusal(query: &Query<'_>, reason: &ExtendedError) -> Vec<u8> {
    let mut reply = error_reply(query, ResponseCode::Refused);
    reason.push(query, &mut reply);
    reply
}

/// Returns SERVFAIL with its reason.
fn failure(query: &Query<'_>, reason: &ExtendedError) -> Vec<u8> {
    let mut reply = empty_reply(query, ResponseCode::ServFail, ReplyFlags::RECURSION);
    reason.push(query, &mut reply);
    reply
}

fn responder_of(route: &Route) -> Responder {
    match route {
        Route::Upcheck => Responder::Upcheck,
        Route::Local => Responder::Local,
        Route::Consul(_) => Responder::Consul,
        Route::Handler(_) => Responder::Handler,
        Route::Reverse(_) => Responder::Reverse,
        Route::Recursors(_) => Responder::Recursors,
        Route::Refused => Responder::None,
    }
}

//----------- Observation ----------------------------------------------------

/// A message of a client with its reply.
pub(super) struct Handled<'a> {
    pub(super) client: SocketAddr,
    pub(super) transport: Transport,
    pub(super) message: &'a [u8],
    /// Empty if there is none.
    pub(super) reply: &'a [u8],
    /// Time from reading the message from the socket to the reply.
    pub(super) took: Duration,
}

impl QueryHandler {
    /// Counts a reply, and passes the request to the log, the tap and dnstap if they are active. The query is `None`
    /// for a message without a readable question.
    pub(super) fn observe(
        &self,
        stripe: &Stripe,
        handled: &Handled<'_>,
        query: Option<&Query<'_>>,
        responder: Responder,
    ) {
        let Handled {
            client,
            transport,
            message,
            reply,
            took,
        } = *handled;
        stripe.observe(&Observed {
            transport,
            from_v6: !client.ip().to_canonical().is_ipv4(),
            qtype: query.map(|query| query.question.qtype),
            dnssec_ok: query.is_some_and(|query| query.dnssec_ok()),
            rcode: rcode_of(reply),
            responder,
            query_len: message.len(),
            reply_len: reply.len(),
            took,
        });
        if let Some(query) = query
            // Two loads decide, since formatting the name of each query would cost more than its
            // answer.
            && (requests::wanted() || self.options.tap.is_wanted())
        {
            log(&self.options.tap, handled, query, responder);
        }
        if let Some(dnstap) = dns_dnstap::get() {
            let exchange = Exchange {
                protocol: transport.into(),
                from: Some(client),
                to: self.options.listen,
                query: message,
                reply: (!reply.is_empty()).then_some(reply),
                age: Duration::ZERO,
                took,
            };
            dnstap.client(&exchange, responder.label());
        }
    }
}

/// Returns the RCODE in a reply's header, without the extension in its OPT; 0 for no reply.
fn rcode_of(reply: &[u8]) -> u8 {
    reply.get(3).map_or(0, |byte| byte & 15)
}

/// Passes a request to the log and the tap.
#[cold]
fn log(tap: &Tap, handled: &Handled<'_>, query: &Query<'_>, responder: Responder) {
    let Handled {
        client,
        transport,
        message: _,
        reply,
        took,
    } = *handled;
    let request = Request {
        name: &query.question.name(),
        query_type: query.question.qtype,
        rcode: rcode_of(reply),
        answers: reply
            .get(6..8)
            .map_or(0, |count| u16::from_be_bytes([count[0], count[1]])),
        bytes: reply.len(),
        client,
        transport: match transport {
            Transport::Udp => "udp",
            Transport::Tcp => "tcp",
        },
        answered_by: responder.label(),
        took,
    };
    requests::log(&request);
    tap.observe(&request);
}
