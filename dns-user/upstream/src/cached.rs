//! A source of answers with its optional cache. All clients that wait for the same answer share one query.
//!
//! A client that could cause many identical questions to be sent at once would have many chances to
//! guess a reply (RFC 5452, section 5). Sharing also ends forwarding loops: if two servers forward
//! to each other, a query that joins the flight of its predecessor goes no further.

use std::{
    cell::Cell,
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;

use super::{
    Answer, TryError, WaitingQuery,
    admission::{Admission, AdmissionStatus, Permit},
    cache::{Cache, Entry, Lookup},
    contents::Selection,
    flights::{FlightKey, FlightResult, Leader, Part, SingleFlight},
    forward::{FirstOutcome, FirstTry, Forwarder, LandedTry},
    http::HttpSource,
    message::{self, CacheKey, Form, Forwarded},
    recursor::PreparedQuery,
    store::Generation,
    udp::{Landing, SentQuery},
};
use dns_core::{
    config::Compat,
    wire::{
        ExtendedError, ForwardedAnswer, InfoCode, OwnedQuery, Query, ReplyFlags, Transport,
        UDP_PAYLOAD_SIZE, append_opt, begin_reply,
    },
};
use dns_kit::eager::resume_woken;

/// Maximum number of queries that wait for the recursors of the configuration, or of one handler.
const MAX_WAITING_FOR_DNS: usize = 8192;
/// Maximum number of queries that wait for one HTTP handler.
const MAX_WAITING_FOR_HTTP: usize = 1024;
/// Time for which a client waits for the renewal of an expired answer before it gets the stale one
/// (RFC 8767, section 5: "client response timer", 1.8 s).
const STALE_TIMEOUT: Duration = Duration::from_millis(1800);

/// The reason of a denial.
const BLOCKED: ExtendedError =
    ExtendedError::new(InfoCode::Blocked, "denied by a handler of this server");

/// Answers queries from one source. Clones share source and cache.
#[derive(Clone, Debug)]
pub struct CachedSource {
    /// State shared by all clones.
    shared: Arc<Shared>,
}

/// A [`CachedSource`] that may have been dropped.
#[derive(Debug)]
pub(crate) struct WeakSource(Weak<Shared>);

impl WeakSource {
    pub(crate) fn upgrade(&self) -> Option<CachedSource> {
        self.0.upgrade().map(|shared| CachedSource { shared })
    }
}

/// State shared by all clones of a source.
#[derive(Debug)]
struct Shared {
    /// The recursors, the HTTP server or the denial that answers.
    source: UncachedSource,
    /// The cache; `None` if it is disabled.
    cache: Option<Arc<Cache>>,
    /// Limits shared with the same source without its cache.
    common: Arc<Common>,
}

/// Limits and shared look-ups of a source.
#[derive(Debug)]
struct Common {
    /// The parts of a client's query that are forwarded.
    form: Form,
    admission: Arc<Admission>,
    /// Queries that wait for the same answer.
    flights: Arc<SingleFlight>,
    /// Recent failures (RFC 9520); `None` if `compat.forget_failures` is set.
    failures: Option<Failures>,
}

/// A source of answers.
#[derive(Clone, Debug)]
pub(crate) enum UncachedSource {
    Dns(Arc<Forwarder>),
    Http(Arc<HttpSource>),
    Deny(Denial),
}

/// Reply to a query for a denied domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// Answers every query for the domain with NXDOMAIN.
    Nxdomain,
    /// Answers every query for the domain with REFUSED.
    Refused,
}

impl Denial {
    pub(crate) fn rcode(self) -> u8 {
        match self {
            Self::Nxdomain => message::NXDOMAIN,
            Self::Refused => message::REFUSED,
        }
    }
}

/// Where an answer is stored.
#[derive(Clone, Copy)]
struct Place<'a> {
    cache: &'a Cache,
    key: &'a [u8],
    /// The generation of the cache when the query arrived.
    generation: Generation,
    /// The generation of the interfaces' answers then.
    mirrored: u64,
}

impl<'a> Place<'a> {
    fn new(cache: &'a Cache, key: &'a [u8], generation: Generation) -> Self {
        Self {
            cache,
            key,
            generation,
            mirrored: cache.interfaces().generation(),
        }
    }
}

/// A reply for the client, with its classification as a failure.
struct Fetched {
    reply: Vec<u8>,
    failed: bool,
}

impl CachedSource {
    pub(crate) fn new(
        source: UncachedSource,
        cache: Option<Arc<Cache>>,
        form: Form,
        compat: Compat,
    ) -> Self {
        let most = match source {
            UncachedSource::Http(_) => MAX_WAITING_FOR_HTTP,
            UncachedSource::Dns(_) | UncachedSource::Deny(_) => MAX_WAITING_FOR_DNS,
        };
        let mut failures = None;
        if !compat.forget_failures {
            failures = Some(Failures::default());
        }
        let common = Common {
            form,
            admission: Admission::new(most),
            flights: Arc::default(),
            failures,
        };
        Self {
            shared: Arc::new(Shared {
                source,
                cache,
                common: Arc::new(common),
            }),
        }
    }

    pub(crate) fn downgrade(&self) -> WeakSource {
        WeakSource(Arc::downgrade(&self.shared))
    }

    /// Replaces the recursors, and removes the answers of earlier ones: other servers may answer the
    /// same names differently (split horizon).
    pub(crate) fn replace_recursors(&self, names: &[String]) {
        if let Some(forwarder) = self.forwarder() {
            forwarder.replace(names);
        }
        // Queries in flight to earlier recursors do not fill the cache again.
        self.flush(&Selection::default());
    }

    /// Returns the same source without its cache.
    pub(crate) fn without_cache(&self) -> Self {
        let Shared {
            source,
            cache: _,
            common,
        } = &*self.shared;
        Self {
            shared: Arc::new(Shared {
                source: source.clone(),
                cache: None,
                common: common.clone(),
            }),
        }
    }

    /// Returns the number of queries waiting for the source, and their limit.
    pub fn admission(&self) -> AdmissionStatus {
        self.shared.common.admission.status()
    }

    /// Returns the number of queries answered with a cached failure (RFC 9520).
    pub fn failure_hits(&self) -> u64 {
        self.shared
            .common
            .failures
            .as_ref()
            .map_or(0, Failures::hits)
    }

    pub(crate) fn source(&self) -> &UncachedSource {
        &self.shared.source
    }

    pub(crate) fn forwarder(&self) -> Option<&Forwarder> {
        match self.source() {
            UncachedSource::Dns(forwarder) => Some(forwarder),
            UncachedSource::Http(_) | UncachedSource::Deny(_) => None,
        }
    }

    pub(crate) fn cache(&self) -> Option<&Cache> {
        self.shared.cache.as_deref()
    }

    /// Returns whether queries may wait for the source; they do not if every name is denied.
    pub(crate) fn waits(&self) -> bool {
        !matches!(self.shared.source, UncachedSource::Deny(_))
    }

    /// Drops the selected cached answers, and all failures. Returns the number of answers; `None`
    /// without a cache.
    pub(crate) fn flush(&self, selection: &Selection) -> Option<u64> {
        if let Some(failures) = &self.shared.common.failures {
            // After a flush, operators expect what the recursors say now.
            failures.flush();
        }
        let cache = self.cache()?;
        Some(cache.flush(|fields| selection.admits(fields)))
    }

    async fn reply(&self, query: &Query<'_>) -> Vec<u8> {
        let shared = &self.shared;
        let Some((cache, key)) = shared.cache_and_key(query) else {
            let Some(_permit) = shared.admit(query) else {
                return Fetched::refused(query).reply;
            };
            return shared.fetch_for_all(None, query, true).await.reply;
        };
        // Before the look-up: an answer that a flush has just removed would be stored again.
        let generation = cache.generation();
        let stale = match cache.get(&key, query) {
            Lookup::Fresh(reply) => return reply,
            Lookup::Miss => None,
            Lookup::Stale(entry) => Some(entry),
        };
        match (shared.admit(query), stale) {
            // A stale answer needs no recursor, so too many waiting queries are no reason to refuse
            // it.
            (None, Some(entry)) => cache.stale_reply(&entry, query),
            (None, None) => Fetched::refused(query).reply,
            (Some(permit), Some(entry)) => {
                let place = Place::new(cache, &key, generation);
                // Boxed, because it is rare, and every query's future would have room for it.
                Box::pin(self.renew(permit, place, query, &entry)).await
            }
            (Some(_permit), None) => {
                let place = Place::new(cache, &key, generation);
                let fetched = shared.fetch_for_all(Some(place), query, true).await;
                fetched.or_without_dnssec(Some(place), query)
            }
        }
    }

    /// Tries to renew an answer, and returns it stale if that fails or takes too long.
    async fn renew(
        &self,
        permit: Permit,
        place: Place<'_>,
        query: &Query<'_>,
        entry: &Entry,
    ) -> Vec<u8> {
        let Place {
            cache,
            key,
            generation,
            mirrored,
        } = place;
        let renewal = {
            let shared = Arc::clone(&self.shared);
            let key = CacheKey::from_slice(key);
            let query = query.to_owned();
            async move {
                let _permit = permit;
                let place = shared.cache.as_deref().map(|cache| Place {
                    cache,
                    key: &key,
                    generation,
                    mirrored,
                });
                shared.fetch_for_all(place, &query.as_query(), false).await
            }
        };
        // The renewal continues after this client stops waiting.
        match tokio::time::timeout(STALE_TIMEOUT, tokio::spawn(renewal)).await {
            Ok(Ok(Fetched {
                reply,
                failed: false,
            })) => reply,
            _ => {
                // A renewal that takes too long counts as failed, too. It may still succeed in the
                // background.
                entry.renewal_failed();
                cache.stale_reply(entry, query)
            }
        }
    }
}

impl Answer for CachedSource {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(self.reply(query))
    }

    fn answer_at_once(&self, query: &Query<'_>, out: &mut Vec<u8>) -> bool {
        let Shared {
            source,
            cache,
            common,
        } = &*self.shared;
        if let UncachedSource::Deny(denial) = source {
            *out = begin_reply(query, denial.rcode(), ReplyFlags::LOCAL);
            append_opt(query, out);
            BLOCKED.push(query, out);
            return true;
        }
        let mut generation = Generation::default();
        if let Some(cache) = cache {
            if let Some(key) = cache.key(query)
                && cache.write_fresh(&key, query, out)
            {
                return true;
            }
            if cache.stale.is_some() || query.dnssec_ok() {
                // The cache may contain an answer that is better than a failure.
                return false;
            }
            generation = cache.generation();
        }
        if let Some(failures) = &common.failures
            // Mostly empty, and then needs no key.
            && !failures.is_empty()
            && let Some(result) = failures.get(&common.flight(query, generation, None))
        {
            *out = Fetched::of_cached_failure(&result, query, common.form).reply;
            return true;
        }
        if common.admission.refuses(query.client) {
            *out = Fetched::refused(query).reply;
            return true;
        }
        false
    }

    fn begin(&self, waiting: Box<dyn WaitingQuery>) {
        match self.beginning(&*waiting) {
            Beginning::InFlight(miss, prepared) => {
                prepared.send(Box::new(WaitingMiss { miss, waiting }));
            }
            Beginning::Reply(mut reply) => waiting.reply(&mut reply),
            Beginning::Task => waiting.wait(None),
        }
    }

    fn cached(&self, query: &Query<'_>) -> Option<ForwardedAnswer> {
        self.shared.cache.as_ref()?.copy(query)
    }

    fn refresh<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let shared = &self.shared;
            let Some((cache, key)) = shared.cache_and_key(query) else {
                return;
            };
            let Some(_permit) = shared.admit(query) else {
                return;
            };
            let place = Place::new(cache, &key, cache.generation());
            shared.fetch_for_all(Some(place), query, false).await;
        })
    }
}

//----------- Misses without a task --------------------------------------------

/// How the answer to a query begins.
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart at once, and a box would be an allocation per query"
)]
enum Beginning {
    /// A recursor must be queried, and answers without a task.
    InFlight(Miss, PreparedQuery),
    /// The reply is known.
    Reply(Vec<u8>),
    /// A task must answer.
    Task,
}

/// The part of a query to a recursor that only this source knows.
struct Miss {
    source: CachedSource,
    forwarder: Arc<Forwarder>,
    first: FirstTry,
    leader: Leader,
    /// Generations of the cache and of the interfaces' answers when the query arrived; `None` if the answer is
    /// not cached.
    generations: Option<(Generation, u64)>,
    _permit: Permit,
}

/// A client's query whose answer is not cached, in flight without a task.
struct WaitingMiss {
    miss: Miss,
    waiting: Box<dyn WaitingQuery>,
}

thread_local! {
    /// Room for a reply, so that replies need no allocation.
    static REPLY: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

impl CachedSource {
    /// Decides how a query is answered whose answer is not cached.
    fn beginning(&self, waiting: &dyn WaitingQuery) -> Beginning {
        let Shared {
            source,
            cache,
            common,
        } = &*self.shared;
        let query = &waiting.query();
        let UncachedSource::Dns(forwarder) = source else {
            return Beginning::Task;
        };
        // The client's time must not be up before the recursor's.
        if forwarder.timeout() > waiting.time_limit() {
            return Beginning::Task;
        }
        let cache = cache.as_deref().filter(|cache| cache.keeps(query));
        let generation = cache.map(Cache::generation).unwrap_or_default();
        let key = common.flight(query, generation, None);
        // The client of a stale answer waits less long for its renewal, which needs a timer.
        if let Some(cache) = cache
            && (!cache.has_keys_of_form() || cache.may_be_stale(cache_key(&key)))
        {
            return Beginning::Task;
        }
        let place = cache.map(|cache| Place::new(cache, cache_key(&key), generation));
        if let Some(result) = common.failed(&key) {
            let fetched = Fetched::of_cached_failure(&result, query, common.form);
            return Beginning::Reply(fetched.or_without_dnssec(place, query));
        }
        let Some((first, prepared)) = forwarder.prepare(query) else {
            return Beginning::Task;
        };
        let Some(permit) = self.shared.admit(query) else {
            return Beginning::Reply(Fetched::refused(query).reply);
        };
        // The same query is in flight for another client: a task waits for its result.
        let Some(leader) = common.flights.lead(&key) else {
            return Beginning::Task;
        };
        if let Some(cache) = cache {
            cache.count_miss();
        }
        let miss = Miss {
            source: self.clone(),
            forwarder: Arc::clone(forwarder),
            first,
            leader,
            generations: place.map(|place| (place.generation, place.mirrored)),
            _permit: permit,
        };
        Beginning::InFlight(miss, prepared)
    }
}

impl Miss {
    fn place(&self) -> Option<Place<'_>> {
        let (generation, mirrored) = self.generations?;
        Some(Place {
            cache: self.source.cache()?,
            key: cache_key(&self.leader.key),
            generation,
            mirrored,
        })
    }

    /// Answers after an outcome of the first try that takes further tries, or is an error.
    async fn continue_after(self, landed: LandedTry, query: OwnedQuery) -> Vec<u8> {
        let query = &query.as_query();
        let first = Some((&self.first, landed));
        let forwarded = self.forwarder.forward_after(first, query).await;
        let fetched = self.land(query, forwarded);
        fetched.or_without_dnssec(self.place(), query)
    }

    fn land(&self, query: &Query<'_>, forwarded: Forwarded) -> Fetched {
        let shared = &self.source.shared;
        shared.land(self.place(), query, true, &self.leader, forwarded)
    }
}

impl Landing for WaitingMiss {
    fn land(self: Box<Self>, sent: &SentQuery<'_>, outcome: Result<&[u8], TryError>) {
        let Self { miss, waiting } = *self;
        let outcome = outcome.map(|received| {
            let mut reply = REPLY.take();
            reply.clear();
            reply.extend_from_slice(received);
            reply
        });
        let query = waiting.query();
        match miss.forwarder.land(&query, &miss.first, sent, outcome) {
            FirstOutcome::Answer(forwarded) => {
                let mut reply = miss.land(&query, forwarded).reply;
                // Before the reply: its client may send the next query at once, and needs the slot
                // again.
                drop(miss);
                waiting.reply(&mut reply);
                REPLY.set(reply);
            }
            FirstOutcome::Unfinished(landed) => {
                let query = query.to_owned();
                waiting.wait(Some(Box::pin(miss.continue_after(landed, query))));
            }
        }
    }

    fn not_sent(self: Box<Self>) {
        let Self { miss, waiting } = *self;
        // The task leads another flight.
        drop(miss);
        waiting.wait(None);
    }
}

/// Number of bytes that [`Common::flight`] appends to a key.
const FLIGHT_SUFFIX: usize = 1 + size_of::<Generation>();

/// Returns the part of a flight's key that is the cache's, if that [has such keys](Cache::has_keys_of_form).
fn cache_key(flight: &FlightKey) -> &[u8] {
    &flight[..flight.len().saturating_sub(FLIGHT_SUFFIX)]
}

impl Common {
    /// Returns the reply to a query that has just failed.
    fn failed(&self, key: &FlightKey) -> Option<Arc<FlightResult>> {
        self.failures.as_ref()?.get(key)
    }
    /// Returns the key of a query's flight. A query after a flush does not join a flight that
    /// started before.
    fn flight(
        &self,
        query: &Query<'_>,
        generation: Generation,
        place: Option<Place<'_>>,
    ) -> FlightKey {
        let mut key = match place {
            Some(Place { cache, key, .. }) if cache.has_keys_of_form() => CacheKey::from_slice(key),
            _ => self.form.key(query),
        };
        // An answer over UDP may be truncated, which a client over TCP could not use.
        key.push(u8::from(query.transport == Transport::Tcp));
        key.extend_from_slice(&generation.to_bytes());
        key
    }
}

impl Shared {
    /// Returns the cache and the key of a query; `None` if its answer is not cached.
    fn cache_and_key(&self, query: &Query<'_>) -> Option<(&Cache, CacheKey)> {
        let cache = self.cache.as_deref()?;
        Some((cache, cache.key(query)?))
    }

    /// Returns a slot for a query; `None` if its client holds too many.
    fn admit(&self, query: &Query<'_>) -> Option<Permit> {
        self.common.admission.admit(query.client)
    }

    /// Fetches an answer, shared by all queries for the same one, and stores it in a cache.
    /// `keep_failures` also stores failures that may be cached.
    async fn fetch_for_all(
        &self,
        place: Option<Place<'_>>,
        query: &Query<'_>,
        keep_failures: bool,
    ) -> Fetched {
        let generation = place.map(|place| place.generation).unwrap_or_default();
        let key = self.common.flight(query, generation, place);
        loop {
            if let Some(result) = self.common.failed(&key) {
                return Fetched::of_cached_failure(&result, query, self.common.form);
            }
            match self.common.flights.join(&key) {
                Part::Leader(leader) => {
                    let forwarded = self.source.fetch(query).await;
                    return self.land(place, query, keep_failures, &leader, forwarded);
                }
                Part::Follower(landing) => {
                    if let Ok(result) = landing.await {
                        return Fetched::with_others(&result, query, self.common.form);
                    }
                    // The leader's client is gone; start another look-up.
                }
            }
        }
    }

    /// Stores an answer, and delivers it to all queries that wait for `leader`.
    fn land(
        &self,
        place: Option<Place<'_>>,
        query: &Query<'_>,
        keep_failures: bool,
        leader: &Leader,
        forwarded: Forwarded,
    ) -> Fetched {
        let Forwarded {
            mut reply,
            mut index,
            failed,
            errors,
            keep,
            busy,
            recursor,
        } = forwarded;
        if let Some(Place {
            cache,
            key,
            generation,
            mirrored,
        }) = place
            && (!failed || keep && keep_failures)
        {
            cache.admit(key, query, (&mut reply, &mut index), recursor, generation);
            cache.update_interfaces(key, query, mirrored);
        }
        let has_opt = index.opt.is_some();
        // An overload of this server says nothing about the name.
        if failed
            && !busy
            && reply.len() <= MAX_REMEMBERED
            && let Some(failures) = &self.common.failures
        {
            // Before the flight ends: a query in between would lead another one.
            let result = FlightResult::copy_of(&reply, &index, failed, &errors);
            failures.insert(FlightKey::from_slice(&leader.key), result);
        }
        let followers = leader.end();
        // Mostly there is no follower, and then nothing is copied.
        if !followers.is_empty() {
            let shared = FlightResult::copy_of(&reply, &index, failed, &errors);
            resume_woken(|| {
                for follower in followers {
                    // The client may be gone.
                    let _ = follower.send(Arc::clone(&shared));
                }
            });
        }
        if !self.common.form.transparent {
            message::set_own_flags(&mut reply, query);
        }
        // With transparent forwarding, the recursor's OPT is still in the reply.
        if !has_opt {
            append_opt(query, &mut reply);
        }
        for error in &errors {
            error.push(query, &mut reply);
        }
        Fetched { reply, failed }
    }
}

impl Fetched {
    /// Returns the reply, or in place of a failure a cached answer without DNSSEC.
    fn or_without_dnssec(self, place: Option<Place<'_>>, query: &Query<'_>) -> Vec<u8> {
        if self.failed
            && let Some(place) = place
            && let Some(plain) = place.cache.without_dnssec(query)
        {
            return plain;
        }
        self.reply
    }

    /// Returns the reply for a client that joined another client's query: with its own id, flags,
    /// letter case and EDNS.
    fn with_others(result: &FlightResult, query: &Query<'_>, form: Form) -> Self {
        let FlightResult {
            reply,
            index,
            failed,
            errors,
        } = result;
        let mut reply = reply.clone();
        // The leader's client may have EDNS where this one has none, or other options.
        message::remove_opt(&mut reply, &mut index.clone());
        message::set_id(&mut reply, query.id);
        message::restore_case(&mut reply, index, query);
        if form.transparent {
            message::hide_authentic(&mut reply, query);
        } else {
            message::set_own_flags(&mut reply, query);
        }
        append_opt(query, &mut reply);
        for error in errors {
            error.push(query, &mut reply);
        }
        Self {
            reply,
            failed: *failed,
        }
    }

    /// Returns the reply to a query whose look-up has just failed for another client.
    fn of_cached_failure(result: &FlightResult, query: &Query<'_>, form: Form) -> Self {
        let mut fetched = Self::with_others(result, query, form);
        ExtendedError::new(InfoCode::CachedError, "").push(query, &mut fetched.reply);
        fetched
    }

    /// Returns the reply to a query whose client has too many others waiting.
    fn refused(query: &Query<'_>) -> Self {
        let mut reply = begin_reply(query, message::SERVFAIL, ReplyFlags::RECURSION);
        append_opt(query, &mut reply);
        ExtendedError::new(InfoCode::Other, "too many queries of this client wait")
            .push(query, &mut reply);
        Self {
            reply,
            failed: true,
        }
    }
}

impl UncachedSource {
    async fn fetch(&self, query: &Query<'_>) -> Forwarded {
        match self {
            // In two allocations: a single one would be larger than the allocator keeps for a thread.
            Self::Dns(forwarder) => Box::pin(forwarder.forward(query)).await,
            Self::Http(http) => Box::pin(http.fetch(query)).await,
            Self::Deny(denial) => {
                let reply = begin_reply(query, denial.rcode(), ReplyFlags::LOCAL);
                Forwarded {
                    errors: vec![BLOCKED],
                    ..Forwarded::own(reply, false)
                }
            }
        }
    }
}

//----------- Failures -------------------------------------------------------

/// Time for which a failure is cached: the minimum of RFC 9520, section 3.2, because the recursors
/// of a machine recover within moments.
const FAILURE_LIFETIME: Duration = Duration::from_secs(1);
/// Maximum number of remembered failures; another one replaces the oldest.
pub(crate) const MAX_FAILURES: usize = 4096;
/// Maximum length of a remembered reply in bytes. That of an error rarely has a record; as many of 64 KiB would take
/// 256 MiB.
const MAX_REMEMBERED: usize = UDP_PAYLOAD_SIZE as usize;

/// Failed resolutions of one source.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    remembered: Mutex<Remembered>,
    /// Number of failures, readable without the lock.
    count: AtomicUsize,
    /// Number of queries answered with a remembered failure.
    hits: AtomicU64,
}

/// Failures by key and in order of expiry.
#[derive(Debug, Default)]
struct Remembered {
    by_key: HashMap<FlightKey, (Instant, Arc<FlightResult>), foldhash::fast::RandomState>,
    /// Keys with their time of insertion.
    order: VecDeque<(Instant, FlightKey)>,
}

impl Failures {
    /// Returns whether no failure is remembered, without taking the lock.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Returns the reply that failed less than [`FAILURE_LIFETIME`] ago.
    pub(crate) fn get(&self, key: &FlightKey) -> Option<Arc<FlightResult>> {
        if self.is_empty() {
            return None;
        }
        let mut remembered = self.remembered.lock();
        remembered.forget_expired(Instant::now());
        // Once none is left, queries need no lock again.
        self.count.store(remembered.by_key.len(), Ordering::Relaxed);
        let (_, result) = remembered.by_key.get(key)?;
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(Arc::clone(result))
    }

    pub(crate) fn insert(&self, key: FlightKey, result: Arc<FlightResult>) {
        let now = Instant::now();
        let mut remembered = self.remembered.lock();
        remembered.forget_expired(now);
        if remembered.order.len() >= MAX_FAILURES {
            remembered.forget_oldest();
        }
        remembered.order.push_back((now, key.clone()));
        remembered.by_key.insert(key, (now, result));
        self.count.store(remembered.by_key.len(), Ordering::Relaxed);
    }

    pub(crate) fn flush(&self) {
        *self.remembered.lock() = Remembered::default();
        self.count.store(0, Ordering::Relaxed);
    }

    /// Returns the number of queries answered with a remembered failure since the start.
    pub(crate) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }
}

impl Remembered {
    fn forget_expired(&mut self, now: Instant) {
        while let Some((since, _)) = self.order.front()
            && now.duration_since(*since) >= FAILURE_LIFETIME
        {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        let Some((since, key)) = self.order.pop_front() else {
            return;
        };
        // The name may have failed again, which `order` lists as well.
        if let Some((latest, _)) = self.by_key.get(&key)
            && *latest == since
        {
            self.by_key.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_failure_makes_room() {
        let failures = Failures::default();
        let result = Arc::new(FlightResult {
            reply: Vec::new(),
            index: Default::default(),
            failed: true,
            errors: Vec::new(),
        });
        let key = |number: usize| FlightKey::from_slice(&number.to_be_bytes());
        for number in 0..=MAX_FAILURES {
            failures.insert(key(number), Arc::clone(&result));
        }
        assert!(failures.get(&key(0)).is_none());
        assert!(failures.remembered.lock().by_key.len() <= MAX_FAILURES);
        failures.flush();
        assert!(failures.get(&key(MAX_FAILURES)).is_none());
    }

    use crate::tests::{form, options, parsed, parsed_by, query, small_cache};
    use dns_core::config::RecursorSelection;

    const NAME: &[u8] = b"\x02oK\x07example\0";

    fn result() -> Arc<FlightResult> {
        Arc::new(FlightResult {
            reply: Vec::new(),
            index: Default::default(),
            failed: true,
            errors: Vec::new(),
        })
    }

    fn key(number: u8) -> FlightKey {
        FlightKey::from_slice(&[number])
    }

    /// Remembers a failure of this long ago.
    fn remember(failures: &Failures, number: u8, age: Duration) {
        let since = Instant::now().checked_sub(age).unwrap();
        let mut remembered = failures.remembered.lock();
        remembered.by_key.insert(key(number), (since, result()));
        remembered.order.push_back((since, key(number)));
        let count = remembered.order.len();
        failures.count.store(count, Ordering::Relaxed);
    }

    #[test]
    fn failures_are_remembered_for_a_second() {
        let failures = Failures::default();
        assert!(failures.is_empty() && failures.get(&key(1)).is_none());
        remember(&failures, 1, FAILURE_LIFETIME);
        assert!(!failures.is_empty() && failures.get(&key(1)).is_none());
        assert!(failures.is_empty(), "queries need no lock");
        assert_eq!(failures.hits(), 0);
        remember(&failures, 1, FAILURE_LIFETIME);
        // Another one takes the place of those that are over.
        failures.insert(key(2), result());
        assert_eq!(failures.remembered.lock().by_key.len(), 1);
        assert_eq!(failures.count.load(Ordering::Relaxed), 1);
        // Long enough for the slowest machine.
        let later = Instant::now() + Duration::from_secs(3600);
        for (since, _) in failures.remembered.lock().by_key.values_mut() {
            *since = later;
        }
        for hits in 1..4 {
            assert!(failures.get(&key(2)).is_some() && failures.get(&key(3)).is_none());
            assert_eq!(failures.hits(), hits);
        }
        failures.flush();
        assert!(failures.is_empty() && failures.get(&key(2)).is_none());
        assert_eq!(failures.hits(), 3);
    }

    #[test]
    fn only_full_memory_evicts_failures() {
        let failures = Failures::default();
        // None of them expires during the test.
        let later = Instant::now() + Duration::from_secs(3600);
        let number = |number: usize| FlightKey::from_slice(&number.to_be_bytes());
        {
            let mut remembered = failures.remembered.lock();
            for count in 1..MAX_FAILURES {
                remembered.order.push_back((later, number(count)));
                remembered.by_key.insert(number(count), (later, result()));
            }
        }
        let holds = |count| {
            failures
                .remembered
                .lock()
                .by_key
                .contains_key(&number(count))
        };
        failures.insert(number(MAX_FAILURES), result());
        assert!(holds(1) && holds(2) && holds(MAX_FAILURES));
        assert_eq!(failures.count.load(Ordering::Relaxed), MAX_FAILURES);
        failures.insert(number(MAX_FAILURES + 1), result());
        assert!(!holds(1) && holds(2) && holds(MAX_FAILURES + 1));
        assert_eq!(failures.count.load(Ordering::Relaxed), MAX_FAILURES);
    }

    #[test]
    fn latest_failure_starts_the_memory() {
        let failures = Failures::default();
        remember(&failures, 1, 3 * FAILURE_LIFETIME);
        remember(&failures, 1, Duration::ZERO);
        remember(&failures, 2, Duration::ZERO);
        let mut remembered = failures.remembered.lock();
        remembered.forget_oldest();
        assert!(remembered.by_key.contains_key(&key(1)));
        remembered.forget_oldest();
        assert!(!remembered.by_key.contains_key(&key(1)));
        assert!(remembered.by_key.contains_key(&key(2)));
        remembered.forget_oldest();
        remembered.forget_oldest();
        assert!(remembered.by_key.is_empty() && remembered.order.is_empty());
    }

    fn denying(denial: Denial, compat: Compat) -> CachedSource {
        CachedSource::new(UncachedSource::Deny(denial), None, form(compat), compat)
    }

    #[tokio::test]
    async fn denied_names_need_no_recursor() {
        let mut message = query(NAME, 1);
        message::append_opt(&mut message, 1232);
        let query = parsed(&message);
        for (denial, rcode) in [
            (Denial::Nxdomain, message::NXDOMAIN),
            (Denial::Refused, message::REFUSED),
        ] {
            let source = denying(denial, Compat::default());
            assert!(!source.waits() && source.forwarder().is_none());
            assert_eq!(source.flush(&Selection::default()), None);
            let mut at_once = Vec::new();
            assert!(source.answer_at_once(&query, &mut at_once));
            let later = source.answer(&query).await;
            assert_eq!(later, at_once);
            assert_eq!(later[3] & 15, rcode);
            assert!(later.ends_with(b"\0\x0fdenied by a handler of this server"));
            assert_eq!(source.admission().limit, MAX_WAITING_FOR_DNS);
        }
    }

    #[test]
    fn equal_queries_share_flights() {
        let compat = Compat::default();
        let message = query(NAME, 28);
        let udp = parsed(&message);
        let tcp = parsed_by(Transport::Tcp, &message);
        let config = small_cache(None);
        let cache = Cache::new(&config, form(compat), compat);
        cache.flush(|_| true);
        let second = cache.generation();
        let common = &denying(Denial::Refused, compat).shared.common;
        let key = [&[4, 0, 28, 0, 1][..], b"\x02ok\x07example\0"].concat();
        for (query, generation, transport, number) in [
            (&udp, Generation::default(), 0, 0u64),
            (&tcp, Generation::default(), 1, 0),
            (&udp, second, 0, 1),
        ] {
            let expected = [&key[..], &[transport], &number.to_ne_bytes()].concat();
            let found = common.flight(query, generation, None);
            assert_eq!(found[..], expected);
            assert_eq!(cache_key(&found), key);
            let place = Place::new(&cache, &key, generation);
            assert_eq!(common.flight(query, generation, Some(place))[..], expected);
            // Where the cache has its own keys, those of the query count.
            let compat = Compat {
                cache_as_authority: true,
                ..compat
            };
            let other = Cache::new(&config, form(compat), compat);
            let place = Place::new(&other, b"other", generation);
            assert_eq!(common.flight(query, generation, Some(place))[..], expected);
        }
    }

    #[test]
    fn long_replies_are_not_remembered() {
        let asked = query(NAME, 1);
        let query = parsed(&asked);
        let shared = denying(Denial::Refused, Compat::default()).shared;
        let failures = shared.common.failures.as_ref().unwrap();
        let mut refused = asked.clone();
        refused[2..4].copy_from_slice(&[0x81, 0x80 | message::REFUSED]);
        for (length, is_remembered) in [(MAX_REMEMBERED + 1, false), (MAX_REMEMBERED, true)] {
            let mut reply = refused.clone();
            let room = length - reply.len() - 12;
            assert!(message::push_answer(
                &mut reply,
                &message::QUESTION_NAME,
                10,
                60,
                &vec![0; room]
            ));
            assert_eq!(reply.len(), length);
            let key = FlightKey::from_slice(&length.to_be_bytes());
            let leader = shared.common.flights.lead(&key).unwrap();
            let forwarded = Forwarded::own(reply, true);
            shared.land(None, &query, true, &leader, forwarded);
            let remembered = failures.remembered.lock();
            assert_eq!(remembered.by_key.contains_key(&key), is_remembered);
        }
    }

    #[test]
    fn refused_clients_are_told_why() {
        let mut message = query(NAME, 1);
        message::append_opt(&mut message, 1232);
        let refused = Fetched::refused(&parsed(&message));
        assert!(refused.failed);
        assert_eq!(refused.reply[2..4], [0x81, 0x80 | message::SERVFAIL]);
        let text = b"\0\x0f\0\x26\0\0too many queries of this client wait";
        assert!(refused.reply.ends_with(text), "{:02x?}", refused.reply);
    }

    #[test]
    fn joined_queries_get_own_replies() {
        let mut asked = query(b"\x02Ok\x07exAmple\0", 1);
        message::set_id(&mut asked, 0x0102);
        asked[3] |= 0x10;
        let mut leaders = query(NAME, 1);
        leaders[2..4].copy_from_slice(&[0x81, 0xa2]);
        message::append_opt(&mut leaders, 1400);
        let index = message::MessageIndex::of(&leaders).unwrap();
        let error = ExtendedError::new(InfoCode::NetworkError, "why");
        let result = FlightResult {
            reply: leaders,
            index,
            failed: true,
            errors: vec![error],
        };
        for (transparent, low) in [(false, 0x92), (true, 0x82)] {
            let form = Form {
                transparent,
                client_subnet: false,
            };
            let fetched = Fetched::with_others(&result, &parsed(&asked), form);
            let mut expected = asked.clone();
            expected[2..4].copy_from_slice(&[0x81, low]);
            assert_eq!(fetched.reply, expected);
            assert!(fetched.failed);
        }
        message::append_opt(&mut asked, 1232);
        let fetched = Fetched::of_cached_failure(&result, &parsed(&asked), Form::default());
        let errors = b"\0\x0f\0\x05\0\x17why\0\x0f\0\x02\0\x0d";
        assert!(fetched.reply.ends_with(errors), "{:02x?}", fetched.reply);
    }

    #[tokio::test]
    async fn recursor_sources_wait_for_recursors() {
        let compat = Compat::default();
        let recursors = ["127.0.0.1:53".to_owned()];
        let selection = RecursorSelection::Serial;
        let forwarder = Forwarder::new(
            &recursors,
            options(0, compat),
            selection,
            compat,
            &Arc::default(),
        );
        let source = UncachedSource::Dns(Arc::new(forwarder));
        let forgetful = Compat {
            forget_failures: true,
            ..compat
        };
        let source = CachedSource::new(source, None, form(compat), forgetful);
        assert!(source.waits() && source.forwarder().is_some());
        assert_eq!(
            (source.cache().is_some(), source.failure_hits()),
            (false, 0)
        );
        assert!(source.shared.common.failures.is_none());
        let refused = source.downgrade();
        drop(source);
        assert!(refused.upgrade().is_none());
    }

    /// A query that gets its reply at once.
    struct Impatient(OwnedQuery, Arc<Mutex<Vec<u8>>>);

    impl WaitingQuery for Impatient {
        fn query(&self) -> Query<'_> {
            self.0.as_query()
        }

        fn time_limit(&self) -> Duration {
            Duration::MAX
        }

        fn reply(self: Box<Self>, reply: &mut Vec<u8>) {
            self.1.lock().clone_from(reply);
        }

        fn wait(self: Box<Self>, _begun: Option<BoxFuture<'static, Vec<u8>>>) {
            panic!("the reply is known");
        }
    }

    #[tokio::test]
    async fn plain_answer_beats_remembered_failure() {
        let compat = Compat::default();
        let selection = RecursorSelection::Serial;
        let recursors = ["127.0.0.1:9".to_owned()];
        let forwarder = Forwarder::new(
            &recursors,
            options(0, compat),
            selection,
            compat,
            &Arc::default(),
        );
        let config = small_cache(None);
        let cache = Arc::new(Cache::new(&config, form(compat), compat));
        let source = UncachedSource::Dns(Arc::new(forwarder));
        let source = CachedSource::new(source, Some(Arc::clone(&cache)), form(compat), compat);
        let plain = query(NAME, 1);
        let mut signed = plain.clone();
        signed[11] = 1;
        signed.extend_from_slice(b"\0\0\x29\x04\xd0\0\0\x80\0\0\0");
        let query = parsed(&signed);
        let common = &source.shared.common;
        let flight = common.flight(&query, cache.generation(), None);
        let mut refused = plain.clone();
        refused[2..4].copy_from_slice(&[0x81, 0x85]);
        let index = message::MessageIndex::of(&refused).unwrap();
        let failure = FlightResult::copy_of(&refused, &index, true, &[]);
        // It does not expire during the test.
        let later = Instant::now() + Duration::from_secs(3600);
        let failures = common.failures.as_ref().unwrap();
        let mut remembered = failures.remembered.lock();
        remembered.by_key.insert(flight, (later, failure));
        drop(remembered);
        failures.count.store(1, Ordering::Relaxed);
        let begin = || {
            let reply = Arc::default();
            source.begin(Box::new(Impatient(query.to_owned(), Arc::clone(&reply))));
            let reply = reply.lock();
            (reply[3] & 15, reply[7])
        };
        // The cache may have an answer, so a failure is not given at once.
        let mut out = Vec::new();
        assert!(!source.answer_at_once(&query, &mut out) && out.is_empty());
        assert_eq!(begin(), (message::REFUSED, 0));
        assert_eq!(source.failure_hits(), 1);
        let mut reply = plain.clone();
        reply[2..4].copy_from_slice(&[0x81, 0x80]);
        reply[7] = 1;
        reply.extend_from_slice(b"\xc0\x0c\0\x01\0\x01\0\0\x01\x2c\0\x04\xc0\0\x02\x01");
        let mut index = message::MessageIndex::of(&reply).unwrap();
        let asked = parsed(&plain);
        let key = cache.key(&asked).unwrap();
        let parts = (&mut reply, &mut index);
        cache.admit(&key, &asked, parts, None, cache.generation());
        assert_eq!(begin(), (message::NOERROR, 1));
        // Without DO there is no failure, but an answer.
        assert!(source.answer_at_once(&asked, &mut out));
        assert_eq!((out[3] & 15, out[7]), (message::NOERROR, 1));
    }

    #[tokio::test]
    async fn stale_answers_precede_failures() {
        let compat = Compat::default();
        let message = query(NAME, 1);
        let query = parsed(&message);
        for (serve_stale, is_answered) in [(None, true), (Some(Duration::from_secs(60)), false)] {
            let recursors = ["127.0.0.1:9".to_owned()];
            let selection = RecursorSelection::Serial;
            let forwarder = Forwarder::new(
                &recursors,
                options(0, compat),
                selection,
                compat,
                &Arc::default(),
            );
            let config = small_cache(serve_stale);
            let cache = Arc::new(Cache::new(&config, form(compat), compat));
            let source = UncachedSource::Dns(Arc::new(forwarder));
            let source = CachedSource::new(source, Some(cache), form(compat), compat);
            let common = &source.shared.common;
            let failures = common.failures.as_ref().unwrap();
            let flight = common.flight(&query, Generation::default(), None);
            let mut reply = message.clone();
            reply[2..4].copy_from_slice(&[0x81, 0x85]);
            let index = message::MessageIndex::of(&reply).unwrap();
            let failure = FlightResult::copy_of(&reply, &index, true, &[]);
            // It does not expire during the test.
            let later = Instant::now() + Duration::from_secs(3600);
            let mut remembered = failures.remembered.lock();
            remembered.by_key.insert(flight, (later, failure));
            drop(remembered);
            failures.count.store(1, Ordering::Relaxed);
            let mut out = Vec::new();
            assert_eq!(source.answer_at_once(&query, &mut out), is_answered);
            assert_eq!(out, if is_answered { reply } else { Vec::new() });
            // After a flush, operators expect what the recursors say now.
            assert_eq!(source.flush(&Selection::default()), Some(0));
            out.clear();
            assert!(!source.answer_at_once(&query, &mut out));
        }
    }
}
