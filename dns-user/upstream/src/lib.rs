//! Answers queries for names outside the local records: recursors and their cache, handlers, and
//! reverse names.
//!
//! * [`forward`]: tries recursors one after the other, the best first.
//! * [`explain`]: the way of a name, for operators.
//! * [`failed_tries`]: counters and log lines of failures.
//! * [`recursor`], [`udp`], [`tcp`] (also DNS over TLS): one recursor; [`host_names`]: its addresses.
//! * [`cached`], [`cache`], [`store`], [`failures`], [`flight`]: caching and sharing of look-ups in
//!   front of a source; [`admission`]: the limit of waiting queries per client.
//! * [`handlers`], [`http`], [`json_answer`]: domains with dedicated recursors or servers; [`trust`]:
//!   verification of TLS servers.
//! * [`reverse`]: names under in-addr.arpa and ip6.arpa; [`special`]: names that no recursor knows.
//! * [`outgoing`]: builds queries to recursors; [`message`], [`fields`]: read replies without
//!   changing the bytes of their records; [`sound`]: validates those bytes.
//! * [`interfaces`]: the interfaces' copies of cached answers.
//! * [`contents`]: lists and flushes caches for operators.
//! * [`fuzzing`]: entry points of the fuzz targets.

mod answer;
mod cache;
mod cached;
mod contents;
mod explain;
mod failed_tries;
mod failures;
mod fields;
mod flight;
mod forward;
mod forwarded;
#[doc(hidden)]
pub mod fuzzing;
mod handlers;
mod host_names;
mod http;
mod in_force;
mod interfaces;
mod json_answer;
mod message;
pub mod metrics;
mod outgoing;
mod recursor;
mod resolv_conf;
mod reverse;
mod sound;
mod special;
mod status;
mod store;
mod tcp;
#[cfg(test)]
mod tests;
mod trust;
mod udp;
mod validated;

use std::{io, net::SocketAddr, sync::Arc};

use arc_swap::ArcSwap;

pub use dns_kit::admission;

pub use self::{
    answer::Answer,
    cached::{CachedSource, Denial},
    contents::{CachedAnswer, Listing, Selection},
    explain::{CacheFinding, CachedState, ForwardingExplanation},
    handlers::{HandlerConfig, HandlerSource, Handlers, HttpServer},
    host_names::{HostName, HostNames},
    http::shown,
    in_force::InForce,
    interfaces::{CachedQuestion, InterfaceAnswers, NoInterfaces},
    reverse::reverse_reply,
    special::SpecialNames,
    status::{CacheStatus, RecursorStatus},
    trust::Trust,
};
use self::{
    cache::Cache, cached::Source, forward::Forwarder, outgoing::Form, recursor::RecursorOptions,
    resolv_conf::Nameservers, udp::Matching,
};
use dns_core::config::Config;

/// The recursors of the configuration.
#[derive(Debug)]
pub struct Upstream {
    /// Forwards to the recursors, through the cache; `None` if recursion is disabled.
    recursors: Option<CachedSource>,
    /// Listen addresses of this server, excluded from the recursors.
    own: Arc<ArcSwap<Vec<SocketAddr>>>,
    /// Resolves host names of recursors and handlers.
    hosts: Arc<HostNames>,
}

impl Upstream {
    /// Uses the configured recursors, or else the nameservers of /etc/resolv.conf, and follows
    /// changes of that file. `own` lists this server's listen addresses, which are never queried;
    /// `interfaces` mirror the cache.
    ///
    /// Must be called inside a tokio runtime.
    pub fn new(config: &Config, own: &[SocketAddr], interfaces: &Arc<dyn InterfaceAnswers>) -> Self {
        let recursion = &config.recursion;
        let own = Arc::new(ArcSwap::from_pointee(own.to_vec()));
        let hosts = HostNames::new(&recursion.recursors, own.clone());
        if recursion.disabled {
            return Self { recursors: None, own, hosts };
        }
        let new = |names: &[String]| {
            Arc::new(Forwarder::new(names, options(config), recursion.selection, config.compat, &hosts))
        };
        let nameservers =
            recursion.recursors.is_empty().then(|| Nameservers::new(own.clone(), recursion.excluded.clone()));
        let forwarder = match &nameservers {
            Some(nameservers) => new(nameservers.names()),
            None => new(&without_excluded(recursion.recursors.clone(), &recursion.excluded)),
        };
        let (form, compat) = (form(config), config.compat);
        let cache = config
            .cache
            .enabled
            .then(|| Arc::new(Cache::new(&config.cache, form, compat).mirrored_by(interfaces)));
        let recursors = CachedSource::new(Source::Dns(forwarder), cache, form, compat);
        if let Some(nameservers) = nameservers {
            let (source, interfaces) = (recursors.downgrade(), Arc::clone(interfaces));
            let used = recursors.downgrade();
            let replace = move |names: &[String]| {
                if let Some(source) = source.upgrade() {
                    source.replace_recursors(names);
                    interfaces.clear();
                }
            };
            tokio::spawn(nameservers.follow(move || used.upgrade().is_some(), replace));
        }
        Self { recursors: Some(recursors), own, hosts }
    }

    /// Returns the resolver of host names, for handlers.
    pub fn host_names(&self) -> &Arc<HostNames> {
        &self.hosts
    }

    /// Replaces the server's listen addresses, which are excluded from the recursors.
    pub fn listens_on(&self, own: &[SocketAddr]) {
        self.own.store(Arc::new(own.to_vec()));
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

/// Returns the settings for the configured recursors.
fn options(config: &Config) -> RecursorOptions {
    RecursorOptions {
        timeout: config.recursion.timeout,
        max_retries: config.recursion.max_retries,
        form: form(config),
        matching: match config.compat.accept_other_questions {
            false => Matching::Strict,
            true => Matching::Lenient,
        },
        randomise_case: config.recursion.randomise_case,
    }
}

/// Returns the parts of a client's query that are forwarded.
fn form(config: &Config) -> Form {
    Form { transparent: config.compat.transparent_forwarding, client_subnet: config.recursion.client_subnet }
}

/// Removes excluded recursors. Addresses are compared by value, not by spelling.
fn without_excluded(mut names: Vec<String>, excluded: &[String]) -> Vec<String> {
    let address = |name: &String| name.parse::<SocketAddr>().ok();
    let same = |one: &String, other: &String| {
        one == other || address(one).is_some_and(|one| address(other) == Some(one))
    };
    names.retain(|name| !excluded.iter().any(|excluded| same(name, excluded)));
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
}

impl TryError {
    /// Returns whether the same recursor should be tried again.
    pub(crate) fn is_network_error(self) -> bool {
        match self {
            Self::TimedOut | Self::Refused | Self::Reset | Self::WrongReply => true,
            Self::Closed | Self::Unreadable | Self::Tls | Self::Busy => false,
        }
    }

    /// Returns whether a connection was closed, normally or not.
    pub(crate) fn is_end_of_connection(self) -> bool {
        matches!(self, Self::Closed | Self::Reset)
    }
}

impl From<io::Error> for TryError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData => Self::WrongReply,
            io::ErrorKind::TimedOut => Self::TimedOut,
            io::ErrorKind::UnexpectedEof => Self::Closed,
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::NotConnected => Self::Reset,
            _ => Self::Refused,
        }
    }
}
