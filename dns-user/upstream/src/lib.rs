//! Answers queries for names outside the local records: recursors and their cache, handlers, and
//! reverse names.
//!
//! * [`forward`]: tries recursors one after the other, the best first.
//! * [`failed_tries`]: counters and log lines of failures.
//! * [`recursor`], [`udp`] with [`readers`], [`tcp`] (also DNS over TLS): one recursor; [`slots`]: the limits of outgoing
//!   connections; [`own`]: addresses never asked.
//! * [`endpoint`]: written addresses; [`host_names`] and [`host_sources`]: addresses of host names;
//!   [`resolv_conf`]: the recursors of /etc/resolv.conf.
//! * [`cached`], [`flights`], [`cache`], [`store`]: caching and sharing of look-ups in front of a source, and
//!   remembered failures; [`admission`]: the limit of waiting queries per client.
//! * [`handlers`], [`http`], [`connector`], [`json_answer`]: domains with dedicated recursors or servers.
//! * [`reverse`]: names under in-addr.arpa and ip6.arpa; [`special`]: names that no recursor knows.
//! * [`message`]: builds queries to recursors, and reads replies without changing the bytes of their records;
//!   [`rdata`]: validates those bytes.
//! * [`interfaces`]: the interfaces' copies of cached answers.
//! * [`contents`]: lists and flushes caches for operators; [`status`]: recursors, caches, and the way of a name.
//! * [`fuzzing`]: entry points of the fuzz targets.

mod cache;
mod cached;
mod connector;
mod contents;
mod endpoint;
mod failed_tries;
mod flights;
mod forward;
#[doc(hidden)]
pub mod fuzzing;
mod handlers;
mod host_names;
mod host_sources;
mod http;
mod interfaces;
mod json_answer;
mod message;
pub mod metrics;
mod own;
mod rdata;
mod readers;
mod recursor;
mod resolv_conf;
mod reverse;
mod slots;
mod special;
mod status;
mod store;
mod tcp;
#[cfg(test)]
mod tests;
mod udp;

use std::{io, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use futures_util::future::BoxFuture;

pub use self::{
    cached::{CachedSource, Denial},
    contents::{CachedAnswer, Listing, Selection},
    handlers::{HandlerConfig, HandlerSource, Handlers},
    host_names::{HostName, HostNames},
    http::{HttpServer, redacted},
    interfaces::{CachedQuestion, InterfaceAnswers, NoInterfaces},
    own::OwnAddresses,
    reverse::reverse_reply,
    special::SpecialNames,
    status::{
        CacheFinding, CacheStatus, CachedState, ForwardingExplanation, RecursorOutage,
        RecursorStatus,
    },
    tcp::Trust,
};
pub use dns_kit::admission;

use self::{
    admission::AdmissionStatus, cache::Cache, cached::UncachedSource, endpoint::Endpoint,
    forward::Forwarder, message::Form, recursor::RecursorOptions, resolv_conf::Nameservers,
    udp::Matching,
};
use dns_core::{
    config::Config,
    name::Name,
    wire::{ForwardedAnswer, Query},
};

/// The recursors of the configuration.
#[derive(Debug)]
pub struct Upstream {
    /// Forwards to the recursors, through the cache; `None` if recursion is disabled.
    recursors: Option<CachedSource>,
    /// Resolves host names of handlers.
    handler_hosts: Arc<HostNames>,
}

impl Upstream {
    /// Uses the configured recursors, or else the nameservers of /etc/resolv.conf, and follows
    /// changes of that file. `own` are never queried; `interfaces` mirror the cache.
    ///
    /// Must be called inside a tokio runtime.
    pub fn new(
        config: &Config,
        own: &OwnAddresses,
        interfaces: &Arc<dyn InterfaceAnswers>,
    ) -> Self {
        let recursion = &config.recursion;
        let hosts = HostNames::of_recursors(&recursion.recursors, own.clone());
        // Apart, because the nameservers of /etc/resolv.conf may see only the names of recursors
        // (`host_sources`).
        let handler_hosts = HostNames::new(&recursion.recursors, own.clone());
        if recursion.disabled {
            return Self {
                recursors: None,
                handler_hosts,
            };
        }
        let mut names = without_excluded(recursion.recursors.clone(), &recursion.excluded);
        let mut nameservers = None;
        // Nameservers of the system do not replace recursors that are all excluded.
        if recursion.recursors.is_empty() {
            let system = Nameservers::new(own.clone(), recursion.excluded.clone());
            names = system.names().to_vec();
            nameservers = Some(system);
        }
        let forwarder = forwarder(&names, config, &hosts);
        let recursors = source(forwarder, config.cache.enabled, config, interfaces);
        if let Some(nameservers) = nameservers {
            // Weak: a reload replaces the recursors, and their follower must end with them.
            let source = recursors.downgrade();
            let interfaces = Arc::clone(interfaces);
            let used = recursors.downgrade();
            tokio::spawn(nameservers.follow(
                move || used.upgrade().is_some(),
                move |names: &[String]| {
                    if let Some(source) = source.upgrade() {
                        source.replace_recursors(names);
                        // After the flush: entries that are still there could be copied again.
                        interfaces.clear();
                    }
                },
            ));
        }
        Self {
            recursors: Some(recursors),
            handler_hosts,
        }
    }

    /// Returns the resolver of host names, for handlers.
    pub fn host_names(&self) -> &Arc<HostNames> {
        &self.handler_hosts
    }

    /// Returns the recursors as a source of answers; `None` if recursion is disabled.
    pub fn recursors(&self) -> Option<CachedSource> {
        self.recursors.clone()
    }

    /// Returns the source of [`Self::recursors`] without its cache, for reverse names (observed).
    pub fn uncached(&self) -> Option<CachedSource> {
        self.recursors.as_ref().map(CachedSource::without_cache)
    }
}

/// Creates the source that queries these recursors.
fn forwarder(names: &[String], config: &Config, hosts: &Arc<HostNames>) -> UncachedSource {
    let options = RecursorOptions {
        timeout: config.recursion.timeout,
        max_retries: config.recursion.max_retries,
        form: form(config),
        matching: if config.compat.accept_other_questions {
            Matching::Lenient
        } else {
            Matching::Strict
        },
        randomise_case: config.recursion.randomise_case,
    };
    let selection = config.recursion.selection;
    let forwarder = Forwarder::new(names, options, selection, config.compat, hosts);
    UncachedSource::Dns(Arc::new(forwarder))
}

/// Puts the limits and, if it `has_cache`, the cache in front of a source.
fn source(
    source: UncachedSource,
    has_cache: bool,
    config: &Config,
    interfaces: &Arc<dyn InterfaceAnswers>,
) -> CachedSource {
    let form = form(config);
    let mut cache = None;
    if has_cache {
        let empty = Cache::new(&config.cache, form, config.compat);
        cache = Some(Arc::new(empty.mirrored_by(interfaces)));
    }
    CachedSource::new(source, cache, form, config.compat)
}

/// Returns the parts of a client's query that are forwarded.
fn form(config: &Config) -> Form {
    Form {
        transparent: config.compat.transparent_forwarding,
        client_subnet: config.recursion.client_subnet,
    }
}

/// Removes excluded recursors. Their addresses are compared by value, not by spelling.
fn without_excluded(mut names: Vec<String>, excluded: &[String]) -> Vec<String> {
    names.retain(|name| {
        let endpoint = Endpoint::of(name);
        !excluded
            .iter()
            .any(|excluded: &String| endpoint.is_same_server(Endpoint::of(excluded)))
    });
    names
}

/// Reason why a try at a recursor brought no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TryError {
    /// The time limit was exceeded.
    #[error("no reply in time")]
    TimedOut,
    /// The port is closed or the host unreachable.
    #[error("port closed or host unreachable")]
    Refused,
    /// The connection was reset.
    #[error("connection reset")]
    Reset,
    /// The connection was closed normally without a reply. bosh-dns does not count this as a
    /// network error (observed).
    #[error("connection closed without a reply")]
    Closed,
    /// The reply over TCP has another id or question.
    #[error("reply to another query")]
    WrongReply,
    /// The received bytes are not a DNS message.
    #[error("malformed reply")]
    Unreadable,
    /// The TLS handshake failed, for example because of the server's certificate.
    #[error("TLS handshake failed")]
    Tls,
    /// Too many queries are in flight.
    #[error("too many queries in flight")]
    Busy,
    /// This machine has no descriptor, port or memory for a socket.
    #[error("this machine cannot open a socket")]
    NoSocket,
}

impl TryError {
    pub(crate) fn is_network_error(self) -> bool {
        match self {
            Self::TimedOut | Self::Refused | Self::Reset | Self::WrongReply => true,
            // The same recursor would give the same malformed reply, certificate or overload once
            // more, and this machine the same error.
            Self::Closed | Self::Unreadable | Self::Tls | Self::Busy | Self::NoSocket => false,
        }
    }

    /// Returns whether the recursor was not queried, for a reason that is not its own.
    pub(crate) fn is_own(self) -> bool {
        matches!(self, Self::Busy | Self::NoSocket)
    }
}

impl From<io::Error> for TryError {
    fn from(error: io::Error) -> Self {
        // EAGAIN: connect(2) finds no free port for UDP. EADDRNOTAVAIL would be none for TCP, but mostly this machine has
        // no IPv6 address, for which each query would try the recursor again.
        if let Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EAGAIN) =
            error.raw_os_error()
        {
            return Self::NoSocket;
        }
        match error.kind() {
            io::ErrorKind::InvalidData => Self::WrongReply,
            io::ErrorKind::TimedOut => Self::TimedOut,
            io::ErrorKind::UnexpectedEof => Self::Closed,
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::NotConnected => Self::Reset,
            // Mostly what ICMP reports: ECONNREFUSED, EHOSTUNREACH, ENETUNREACH (ip(7)).
            _ => Self::Refused,
        }
    }
}

//----------- Answerers ------------------------------------------------------

/// Answers queries: recursors, a handler, reverse names, Consul's names.
pub trait Answer: Send + Sync {
    /// Returns a complete reply with the client's id and the letter case of its question. It may be
    /// larger than the client accepts; the caller truncates it.
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>>;

    /// Writes the reply into the empty `out` if that requires no waiting. Returns whether it did.
    /// Must be cheap, because other queries wait in the meantime.
    fn answer_at_once(&self, _query: &Query<'_>, _out: &mut Vec<u8>) -> bool {
        false
    }

    /// Begins to answer a query that [`Self::answer_at_once`] has not answered. The reply is given to `waiting`,
    /// without a task if possible.
    fn begin(&self, waiting: Box<dyn WaitingQuery>) {
        waiting.wait(None);
    }

    /// Returns whether a reverse query is answered from names that this server holds, which interfaces can
    /// give too.
    fn holds_reverse(&self, _query: &Query<'_>) -> bool {
        false
    }

    /// Returns the fresh cached answer to a query, for use without this answerer until its TTL has
    /// passed; `None` if there is none, or if the reply depends on more than name, type, DO and CD.
    fn cached(&self, _query: &Query<'_>) -> Option<ForwardedAnswer> {
        None
    }

    /// Replaces the cached answer to a query with a new one. The old one stays if that fails.
    fn refresh<'a>(&'a self, _query: &'a Query<'a>) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// A client's query that waits for its reply.
pub trait WaitingQuery: Send {
    /// Returns the query.
    fn query(&self) -> Query<'_>;

    /// Returns the time within which the client must have a reply.
    fn time_limit(&self) -> Duration;

    /// Sends a complete reply as [`Answer::answer`] returns it, without blocking. Its memory may be used again.
    fn reply(self: Box<Self>, reply: &mut Vec<u8>);

    /// Waits in a task for a reply that has begun to be made, or else for [`Answer::answer`].
    fn wait(self: Box<Self>, begun: Option<BoxFuture<'static, Vec<u8>>>);
}

//----------- Current upstreams ----------------------------------------------

/// The recursors and handlers in use; each is replaced as a whole.
#[derive(Debug)]
pub struct CurrentUpstreams {
    /// The recursors of the configuration, replaced as a whole on reload.
    pub upstream: ArcSwap<Upstream>,
    /// The handlers by domain, replaced as a whole on reload.
    pub handlers: ArcSwap<Handlers>,
}

impl CurrentUpstreams {
    /// Starts with these recursors and handlers.
    pub fn new(upstream: Upstream, handlers: Handlers) -> Arc<Self> {
        Arc::new(Self {
            upstream: ArcSwap::from_pointee(upstream),
            handlers: ArcSwap::from_pointee(handlers),
        })
    }

    /// Returns every source with the domain of its handler: first the configured recursors, with
    /// `None`.
    pub(crate) fn sources(&self) -> Vec<(Option<Name>, CachedSource)> {
        let mut sources = Vec::new();
        if let Some(recursors) = self.upstream.load().recursors() {
            sources.push((None, recursors));
        }
        for (domain, source) in self.handlers.load().sources() {
            sources.push((Some(domain.clone()), source.clone()));
        }
        sources
    }

    /// Returns the status of every recursor: the configured recursors first, then the handlers'.
    pub fn recursors(&self) -> Vec<RecursorStatus> {
        let mut all = Vec::new();
        for (_, source) in self.sources() {
            if let Some(forwarder) = source.forwarder() {
                all.extend(status::recursor_statuses(forwarder));
            }
        }
        all
    }

    /// Returns why no recursor of the configuration answers; `None` while one does, or recursion is
    /// disabled.
    pub fn outage(&self) -> Option<RecursorOutage> {
        let source = self.upstream.load().recursors()?;
        RecursorOutage::of(&status::recursor_statuses(source.forwarder()?))
    }

    /// Returns the domains of the handlers whose servers answer no query, each with the reason.
    pub fn handler_outages(&self) -> Vec<(String, String)> {
        let mut outages = Vec::new();
        let handlers = self.handlers.load();
        for (domain, source) in handlers.sources() {
            if let Some(why) = source.outage() {
                outages.push((domain.to_string(), why));
            }
        }
        outages
    }

    /// Returns the waiting queries of each source with the domain of its handler; `None` for the
    /// configured recursors.
    pub fn admissions(&self) -> Vec<(Option<String>, AdmissionStatus)> {
        let mut all = Vec::new();
        for (domain, source) in self.sources() {
            if source.waits() {
                let domain = domain.map(|domain| domain.to_string());
                all.push((domain, source.admission()));
            }
        }
        all
    }

    /// Returns the status of the recursors' cache; `None` without a cache.
    pub fn cache(&self) -> Option<CacheStatus> {
        let recursors = self.upstream.load().recursors()?;
        Some(CacheStatus::of(recursors.cache()?))
    }

    /// Explains how a name is forwarded: by the handler of a domain, or by the configured
    /// recursors. Returns `None` if that source does not exist.
    pub fn explain(&self, handler: Option<&Name>, name: &Name) -> Option<ForwardingExplanation> {
        let (_, source) = self
            .sources()
            .into_iter()
            .find(|(domain, _)| domain.as_ref() == handler)?;
        Some(source.explain(name))
    }

    /// Lists at most `limit` of the selected answers in all caches.
    pub fn list(&self, selection: &Selection, limit: usize) -> Listing {
        let sources = self.sources();
        let caches = sources
            .iter()
            .filter_map(|(domain, source)| Some((domain.as_ref(), source.cache()?)));
        Listing::of(caches, selection, limit)
    }

    /// Removes the selected answers from all caches. An answer requested before is not stored
    /// afterwards. Returns the number of removed answers; `None` without any cache.
    pub fn flush(&self, selection: &Selection) -> Option<u64> {
        let mut removed = None;
        for (_, source) in self.sources() {
            if let Some(count) = source.flush(selection) {
                *removed.get_or_insert(0) += count;
            }
        }
        removed
    }
}

#[cfg(test)]
mod unit_tests {
    use super::*;
    use crate::tests::{parsed, query};

    #[test]
    fn network_errors_deserve_a_retry() {
        for (error, expected, text) in [
            (TryError::TimedOut, true, "no reply in time"),
            (TryError::Refused, true, "port closed or host unreachable"),
            (TryError::Reset, true, "connection reset"),
            (TryError::WrongReply, true, "reply to another query"),
            (TryError::Closed, false, "connection closed without a reply"),
            (TryError::Unreadable, false, "malformed reply"),
            (TryError::Tls, false, "TLS handshake failed"),
            (TryError::Busy, false, "too many queries in flight"),
            (
                TryError::NoSocket,
                false,
                "this machine cannot open a socket",
            ),
        ] {
            assert_eq!(error.is_network_error(), expected, "{error}");
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn socket_errors_have_a_reason() {
        use io::ErrorKind;

        for (kind, expected) in [
            (ErrorKind::InvalidData, TryError::WrongReply),
            (ErrorKind::TimedOut, TryError::TimedOut),
            (ErrorKind::UnexpectedEof, TryError::Closed),
            (ErrorKind::ConnectionReset, TryError::Reset),
            (ErrorKind::ConnectionAborted, TryError::Reset),
            (ErrorKind::BrokenPipe, TryError::Reset),
            (ErrorKind::NotConnected, TryError::Reset),
            (ErrorKind::ConnectionRefused, TryError::Refused),
            (ErrorKind::HostUnreachable, TryError::Refused),
            (ErrorKind::NetworkUnreachable, TryError::Refused),
            (ErrorKind::Other, TryError::Refused),
        ] {
            assert_eq!(TryError::from(io::Error::from(kind)), expected, "{kind}");
        }
        for (code, expected) in [
            (libc::EMFILE, TryError::NoSocket),
            (libc::ENFILE, TryError::NoSocket),
            (libc::ENOBUFS, TryError::NoSocket),
            (libc::ENOMEM, TryError::NoSocket),
            (libc::EAGAIN, TryError::NoSocket),
            // A recursor's IPv6 address on a machine without IPv6.
            (libc::EADDRNOTAVAIL, TryError::Refused),
            (libc::ENETUNREACH, TryError::Refused),
        ] {
            let error = io::Error::from_raw_os_error(code);
            assert_eq!(TryError::from(error), expected, "{code}");
        }
    }

    #[test]
    fn excluded_recursors_are_left_out() {
        let names =
            |names: &[&str]| -> Vec<String> { names.iter().map(ToString::to_string).collect() };
        let all = names(&["10.0.0.1:53", "[::1]:53", "ns.example:53", "10.0.0.1:54"]);
        for (excluded, left) in [
            (&[][..], &all[..]),
            (&["10.0.0.9:53"], &all[..]),
            (
                &["[0:0::1]:53"],
                &names(&["10.0.0.1:53", "ns.example:53", "10.0.0.1:54"]),
            ),
            (
                &["10.0.0.1:53", "NS.example:53"],
                &names(&["[::1]:53", "10.0.0.1:54"]),
            ),
        ] {
            let found = without_excluded(all.clone(), &names(excluded));
            assert_eq!(found, left, "{excluded:?}");
        }
    }

    #[test]
    fn form_follows_the_settings() {
        for (text, transparent, client_subnet) in [
            ("", false, false),
            (r#", "recursor_client_subnet": true"#, false, true),
            (
                r#", "compat": {"transparent_forwarding": true}"#,
                true,
                false,
            ),
        ] {
            let text = format!(r#"{{"address": "127.0.0.1", "port": 53{text}}}"#);
            let config = Config::parse("config.json", text.as_bytes())
                .unwrap()
                .config;
            let expected = Form {
                transparent,
                client_subnet,
            };
            assert_eq!(form(&config), expected, "{text}");
        }
    }

    /// Answers every query with an empty reply, with nothing else of its own.
    struct Plain;

    impl Answer for Plain {
        fn answer<'a>(&'a self, _query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
            Box::pin(std::future::ready(Vec::new()))
        }
    }

    /// A query that records whether a task waits for its reply.
    struct Waits(Arc<std::sync::atomic::AtomicBool>);

    impl WaitingQuery for Waits {
        fn query(&self) -> Query<'_> {
            parsed(b"\0\0\x01\0\0\x01\0\0\0\0\0\0\0\0\x01\0\x01")
        }

        fn time_limit(&self) -> Duration {
            Duration::ZERO
        }

        fn reply(self: Box<Self>, _reply: &mut Vec<u8>) {
            panic!("there is no reply");
        }

        fn wait(self: Box<Self>, begun: Option<BoxFuture<'static, Vec<u8>>>) {
            assert!(begun.is_none());
            self.0.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn answerers_leave_queries_to_tasks() {
        let message = query(b"\0", 1);
        let query = parsed(&message);
        let mut out = Vec::new();
        assert!(!Plain.answer_at_once(&query, &mut out) && out.is_empty());
        assert!(!Plain.holds_reverse(&query));
        assert_eq!(Plain.cached(&query), None);
        Plain.refresh(&query).await;
        let waits = Arc::default();
        Plain.begin(Box::new(Waits(Arc::clone(&waits))));
        assert!(waits.load(std::sync::atomic::Ordering::Relaxed));
    }
}
