//! Consul's names: connects the crate `dns-consul`, which performs no I/O, to routing and recursors.
//! * [`ConsulNames`]: answers queries from the current catalog.
//! * [`ReverseConsulNames`]: does the same for names below `arpa.`.
//! * [`Catalogs`]: merges definition files and a live Consul.
//! * [`follow`]: keeps the catalog up to date with a live Consul.
//! * [`recursors_of`]: the recursors of the object `"consul"`, queried as by Consul.

mod catalogs;
#[cfg(feature = "live-consul")]
mod live;

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use arc_swap::{ArcSwap, ArcSwapOption};
use futures_util::future::{BoxFuture, join_all};
use hickory_proto::op::ResponseCode;

use prometheus::{Registry, proto::MetricFamily};
use tokio::sync::watch;

pub(crate) use catalogs::{Catalogs, NewZone, Published, load_config};
use dns_consul::{
    Asker, PendingAnswer, Zone, chain_of, config::Config as ConsulConfig, record::Record,
    source::LiveStatus,
};
#[cfg(feature = "live-consul")]
use dns_consul_source::LiveConsul;
use dns_core::{
    config::{CacheConfig, Config, RecursionConfig},
    name::Name,
    wire::{
        ExtendedError, FLAG_RD, InfoCode, Parsed, Query, ReplyFlags, TYPE_A, TYPE_AAAA, Transport,
        empty_reply, parse_by, query_message,
    },
};
use dns_fastpath::{AnswerKey, FastPathHandle};
use dns_kit::{clock::kernel_monotonic_ns, metrics::families};
use dns_upstream::{Answer, CachedSource, NoInterfaces, OwnAddresses, Upstream};
#[cfg(feature = "live-consul")]
pub(crate) use live::follow;
#[cfg(not(feature = "live-consul"))]
use no_live::LiveConsul;
#[cfg(not(feature = "live-consul"))]
pub(crate) use no_live::follow;

/// How long an answer waits for data that a live Consul has not delivered yet.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Consul's names: the current zone, and the recursors for host names.
pub(crate) struct ConsulNames {
    /// Configuration and catalog, replaced as a whole.
    zone: ArcSwap<Zone>,
    /// Resolves host names outside the catalog; `None` without recursors.
    recursors: ArcSwap<Option<Arc<dyn Answer>>>,
    /// Version of the current zone; announces each new one.
    version: watch::Sender<u64>,
    /// Requests data from a live Consul; empty if none is configured.
    source: ArcSwapOption<LiveConsul>,
    /// Publishes names that interfaces can answer.
    fast_path: FastPathHandle,
    /// Names that interfaces can answer, with their services.
    used: catalogs::Used,
    seed: u64,
}

impl ConsulNames {
    /// Answers from `zone` until another one is installed, without recursors.
    pub(crate) fn new(NewZone { version, zone }: NewZone, fast_path: FastPathHandle) -> Self {
        Self {
            zone: ArcSwap::from_pointee(zone),
            recursors: ArcSwap::from_pointee(None),
            version: watch::channel(version).0,
            source: ArcSwapOption::empty(),
            fast_path,
            used: catalogs::Used::default(),
            // Differs between servers, so that a fleet as a whole uses all instances of a service
            // with more than an entry holds.
            seed: fastrand::u64(..),
        }
    }

    /// Returns the names that interfaces may answer now.
    pub(crate) fn published(&self) -> Published {
        let recursion = self.recursors.load().is_some();
        Published {
            zone: self.zone.load_full(),
            recursion,
            seed: self.seed,
        }
    }

    /// Installs a new catalog; returns whether it was newer than the current one.
    pub(crate) fn install(&self, NewZone { version, zone }: NewZone) -> bool {
        let zone = Arc::new(zone);
        self.version.send_if_modified(|in_force| {
            // Both files and a live Consul deliver zones; the newer one wins.
            let is_newer = version >= *in_force;
            if is_newer {
                self.zone.store(zone);
                *in_force = version;
            }
            is_newer
        })
    }

    /// Returns the operators' view: the registrations and the status of a live Consul.
    pub(crate) fn view(&self) -> serde_json::Value {
        let zone = self.zone.load();
        serde_json::json!({
            "domain": zone.config.domain.to_string(),
            "datacenter": zone.config.datacenter,
            "nodes": zone.catalog.node_count(),
            "instances": zone.catalog.instance_count(),
            "source": self.source_status(),
        })
    }

    /// Returns the status of the live Consul; `None` if none is configured.
    fn source_status(&self) -> Option<LiveStatus> {
        self.source.load().as_ref().map(|source| source.status())
    }

    /// Reports to the live Consul which services interfaces answer for, because those queries never
    /// reach userspace.
    pub(crate) fn report_use(&self) {
        let source = self.source.load();
        // A source that watches every service needs no hint.
        let Some(source) = source.as_ref().filter(|source| !source.watches_all()) else {
            return;
        };
        let now = kernel_monotonic_ns();
        let services = self.used.recent(|name, qtype| {
            let last_used = match qtype {
                catalogs::ADDRESSES => self.fast_path.last_used_ns(name)?,
                _ => self.reply_last_used_ns(name, qtype)?,
            };
            Some(Duration::from_nanos(now.saturating_sub(last_used)))
        });
        if !services.is_empty() {
            source.used(services);
        }
    }

    /// Returns when an interface last gave a reply of this type, whatever the flags of the query.
    fn reply_last_used_ns(&self, name: &Name, qtype: u16) -> Option<u64> {
        // DO and CD are part of the key of an interface's reply.
        let flags = [(false, false), (false, true), (true, false), (true, true)];
        let last_used = flags
            .into_iter()
            .filter_map(|(dnssec_ok, checking_disabled)| {
                let question = AnswerKey {
                    name: name.into(),
                    qtype,
                    dnssec_ok,
                    checking_disabled,
                };
                self.fast_path.answer_last_used_ns(&question)
            });
        last_used.max()
    }

    /// Returns why the catalog may be wrong, if a live Consul fails to confirm it.
    pub(crate) fn problem(&self) -> Option<String> {
        match self.source_status()? {
            LiveStatus {
                expired: true,
                problem,
                ..
            } => Some(format!(
                "expired, names get SERVFAIL: {}",
                problem.unwrap_or_default()
            )),
            LiveStatus {
                stale,
                stale_problem: Some(problem),
                ..
            } => Some(format!(
                "{stale} requests fail, their last results are served: {problem}"
            )),
            LiveStatus {
                last_contact_seconds: None,
                problem,
                ..
            } => Some(format!(
                "not read yet: {}",
                problem.unwrap_or_else(|| "no answer".to_owned())
            )),
            _ => None,
        }
    }

    pub(crate) fn zone(&self) -> Arc<Zone> {
        self.zone.load_full()
    }

    /// Requests the data for the query from a live Consul and, if it is missing, waits for it up to
    /// [`TIMEOUT`].
    async fn wait_for_catalog(&self, query: &Query<'_>) {
        let Some(source) = self.source.load_full() else {
            return;
        };
        let mut version = self.version.subscribe();
        let arrived = async {
            loop {
                // Before the zone is read, so that a version installed in between ends the wait.
                version.mark_unchanged();
                let Some(lack) = self.zone.load().lacks(query) else {
                    return;
                };
                // In each round: what is missing may be something else once a part has arrived.
                source.demand(lack);
                // The sender lives as long as `self`.
                let _ = version.changed().await;
            }
        };
        // If the data is still missing, the reply is SERVFAIL.
        let _ = tokio::time::timeout(TIMEOUT, arrived).await;
    }

    /// Returns whether the answer must wait for a live Consul. If not, reports to it that the
    /// service is in use.
    fn waits(&self, query: &Query<'_>) -> bool {
        let source = self.source.load();
        let Some(source) = &*source else { return false };
        let zone = self.zone.load();
        if zone.lacks(query).is_some() {
            return true;
        }
        // Unused watches end after a minute, so each use must be reported.
        if !source.watches_all()
            && let Some((place, service)) = zone.service_of(query)
        {
            source.asked(place, service);
        }
        false
    }

    pub(crate) fn domains(&self) -> Vec<Name> {
        let zone = self.zone.load();
        let config = &zone.config;
        [Some(&config.domain), config.alt_domain.as_ref()]
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }

    pub(crate) fn ask(&self, recursors: Option<Arc<dyn Answer>>) {
        self.recursors.store(Arc::new(recursors));
    }

    /// Returns the inputs of an answer other than the question.
    fn asker(&self, query: &Query<'_>) -> Asker {
        let since_1970 = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Asker {
            // Falls back to the unspecified address, which no node has.
            client: query.client.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            recursion: self.recursors.load().is_some(),
            // Serials are numbers modulo 2^32 (RFC 1982).
            serial: since_1970.as_secs() as u32,
        }
    }

    /// Returns the answer, as far as the catalog contains it, and its zone.
    fn pending(&self, query: &Query<'_>) -> Option<(Arc<Zone>, PendingAnswer)> {
        let zone = self.zone.load_full();
        let answer = zone.answer(query, &self.asker(query), &mut fastrand::Rng::new())?;
        Some((zone, answer))
    }

    /// Resolves a host name through the recursors; empty if that fails.
    async fn chain(&self, host: &Name) -> Vec<Record> {
        let recursors = self.recursors.load_full();
        let Some(recursors) = &*recursors else {
            return Vec::new();
        };
        let message = query_message(fastrand::u16(..), FLAG_RD, host.as_wire(), TYPE_A);
        let mut reply = Vec::new();
        // A reply that UDP truncates is fetched again without the limit of a datagram (RFC 7766,
        // section 5).
        for transport in [Transport::Udp, Transport::Tcp] {
            let Parsed::Query(query) = parse_by(transport, &message) else {
                return Vec::new();
            };
            reply = recursors.answer(&query).await;
            let is_truncated = reply.get(2).is_some_and(|flags| flags & 2 != 0);
            if !is_truncated {
                break;
            }
        }
        chain_of(&reply)
    }
}

impl Answer for ConsulNames {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            self.wait_for_catalog(query).await;
            let Some((zone, answer)) = self.pending(query) else {
                // The domains have changed in the meantime; SERVFAIL makes the client try again.
                let mut reply = dns_core::wire::error_reply(query, ResponseCode::ServFail);
                let error =
                    ExtendedError::new(InfoCode::NotReady, "Consul's domains have just changed");
                error.push(query, &mut reply);
                return reply;
            };
            let hosts = answer.hosts();
            // Together, because each of them may wait for a recursor.
            let chains = join_all(hosts.iter().map(|host| self.chain(host))).await;
            let chains = hosts.into_iter().zip(chains).collect();
            answer.finish(query, &zone.config.dns, &chains)
        })
    }

    fn answer_at_once(&self, query: &Query<'_>, out: &mut Vec<u8>) -> bool {
        if self.waits(query) {
            return false;
        }
        let Some((zone, answer)) = self.pending(query) else {
            return false;
        };
        // Without recursors there is nothing to wait for: the alias alone is the answer.
        if self.recursors.load().is_some() && !answer.hosts().is_empty() {
            return false;
        }
        let qtype = query.question.qtype;
        let is_address_list = matches!(qtype, TYPE_A | TYPE_AAAA) && answer.is_only_addresses();
        let name = query.question.name();
        if let Some(source) = &*self.source.load()
            && !source.watches_all()
            // Invented services must not fill the list of names in use.
            && answer.rcode == ResponseCode::NoError
            && let Some(service) = zone.service_of(query)
        {
            self.used.note(
                &name,
                if is_address_list {
                    catalogs::ADDRESSES
                } else {
                    qtype
                },
                service,
            );
        }
        if is_address_list {
            self.fast_path.learn(&name);
        }
        out.extend_from_slice(&answer.finish(query, &zone.config.dns, &Default::default()));
        true
    }
}

/// Answers reverse names from Consul's catalog, then from the next answerer.
pub(crate) struct ReverseConsulNames {
    /// The catalog of nodes and services.
    pub(crate) names: Arc<ConsulNames>,
    /// Answers for all other addresses; `None` for NXDOMAIN with the SOA of Consul's zone.
    pub(crate) fallback: Option<Arc<dyn Answer>>,
}

impl ReverseConsulNames {
    /// Returns the reply, or the answerer that must be asked for it.
    fn known(&self, query: &Query<'_>) -> Result<Vec<u8>, &Arc<dyn Answer>> {
        let zone = self.names.zone.load();
        let asker = self.names.asker(query);
        let answer = match (zone.reverse(query, &asker), &self.fallback) {
            (Some(answer), _) => answer,
            (None, Some(fallback)) => return Err(fallback),
            // Consul without recursors denies foreign addresses itself.
            (None, None) => zone.no_such_address(&asker),
        };
        Ok(answer.finish(query, &zone.config.dns, &Default::default()))
    }
}

impl Answer for ReverseConsulNames {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            match self.known(query) {
                Ok(reply) => reply,
                Err(fallback) => fallback.answer(query).await,
            }
        })
    }

    fn holds_reverse(&self, query: &Query<'_>) -> bool {
        let zone = self.names.zone.load();
        zone.reverse(query, &self.names.asker(query)).is_some()
    }

    fn answer_at_once(&self, query: &Query<'_>, out: &mut Vec<u8>) -> bool {
        match self.known(query) {
            Ok(reply) => {
                out.extend_from_slice(&reply);
                true
            }
            Err(fallback) => fallback.answer_at_once(query, out),
        }
    }
}

//----------- Recursors ------------------------------------------------------

/// The recursors of the object `"consul"`.
struct Recursors {
    each: Vec<CachedSource>,
    /// Whether they are queried in random order instead of the configured order.
    random: bool,
}

/// Returns the recursors of the object `"consul"`; `None` if it names none. `own` are never asked. Must be
/// called inside a tokio runtime.
pub(crate) fn recursors_of(
    consul: &ConsulConfig,
    config: &Config,
    own: &OwnAddresses,
) -> Option<Arc<dyn Answer>> {
    let mut each = Vec::with_capacity(consul.recursors.len());
    for recursor in &consul.recursors {
        let recursion = RecursionConfig {
            disabled: false,
            recursors: vec![recursor.clone()],
            excluded: Vec::new(),
            timeout: consul.dns.recursor_timeout,
            ..config.recursion.clone()
        };
        // Consul does not cache what its recursors say.
        let cache = CacheConfig {
            enabled: false,
            ..config.cache
        };
        let config = Config {
            recursion,
            cache,
            ..config.clone()
        };
        each.extend(Upstream::new(&config, own, &NoInterfaces::shared()).recursors());
    }
    let recursors = Recursors {
        each,
        random: consul.dns.random_recursors,
    };
    (!recursors.each.is_empty()).then(|| Arc::new(recursors) as Arc<dyn Answer>)
}

impl Answer for Recursors {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            let mut order: Vec<&CachedSource> = self.each.iter().collect();
            if self.random {
                fastrand::shuffle(&mut order);
            }
            for recursor in order {
                let reply = recursor.answer(query).await;
                let rcode = reply.get(3).map(|flags| ResponseCode::from_low(flags & 15));
                // Like Consul: any other RCODE leads to the next recursor.
                if matches!(rcode, Some(ResponseCode::NoError | ResponseCode::NXDomain)) {
                    return reply;
                }
            }
            let mut reply = empty_reply(query, ResponseCode::ServFail, ReplyFlags::RECURSION);
            let error = ExtendedError::new(InfoCode::NoReachableAuthority, "no recursor answered");
            error.push(query, &mut reply);
            reply
        })
    }
}

//----------- Metrics --------------------------------------------------------

pub(crate) fn register_metrics(
    registry: &Registry,
    consul: Arc<ConsulNames>,
) -> prometheus::Result<()> {
    families::CONSUL_INSTANCES.scrape(registry, move || {
        let zone = consul.zone();
        let catalog = &zone.catalog;
        let mut all = vec![
            families::CONSUL_NODES.is(catalog.node_count() as f64),
            families::CONSUL_INSTANCES.is(catalog.instance_count() as f64),
        ];
        all.extend(consul.source_status().iter().flat_map(of_source));
        all
    })
}

fn of_source(status: &LiveStatus) -> Vec<MetricFamily> {
    vec![
        families::CONSUL_UP.is(f64::from(
            !status.away && !status.unconfirmed && status.last_contact_seconds.is_some(),
        )),
        families::CONSUL_CATALOG_AGE_SECONDS.of(status
            .last_contact_seconds
            .map(|seconds| ([] as [&str; 0], seconds))),
        families::CONSUL_SERVICES.of([
            (["known"], status.services as f64),
            (["told"], status.services_told as f64),
            (["watched"], status.services_watched as f64),
        ]),
        families::CONSUL_CONNECTIONS.is(status.connections as f64),
        families::CONSUL_REQUESTS_TOTAL.is(status.requests),
        families::CONSUL_REQUEST_FAILURES_TOTAL.is(status.failures),
        families::CONSUL_INDEX_RESETS_TOTAL.is(status.index_resets),
        families::CONSUL_STALE_QUESTIONS.is(status.stale as f64),
        families::CONSUL_INVALID_ENTRIES.is(status.invalid_entries as f64),
    ]
}

/// Replaces `live` in a build without the feature `live-consul`: names come from definition files only.
#[cfg(not(feature = "live-consul"))]
mod no_live {
    use std::future;

    use super::{Arc, Catalogs, ConsulNames, LiveStatus};
    use dns_consul::{Lack, catalog::Place};
    use dns_upstream::CurrentUpstreams;

    /// A live source, of which this build has none.
    pub(super) enum LiveConsul {}

    impl LiveConsul {
        pub(super) fn demand(&self, _lack: Lack) {
            match *self {}
        }

        pub(super) fn watches_all(&self) -> bool {
            match *self {}
        }

        pub(super) fn asked(&self, _place: Place, _service: String) {
            match *self {}
        }

        pub(super) fn used(&self, _services: Vec<(Place, String)>) {
            match *self {}
        }

        pub(super) fn status(&self) -> LiveStatus {
            match *self {}
        }
    }

    /// Never returns: the configuration has no live Consul.
    pub(crate) async fn follow(
        _names: Arc<ConsulNames>,
        _catalogs: Arc<Catalogs>,
        _upstreams: Arc<CurrentUpstreams>,
        _installed: impl Fn() + Send + Sync + 'static,
    ) {
        future::pending().await
    }
}
