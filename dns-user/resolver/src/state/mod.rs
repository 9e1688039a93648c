//! The server state: the [`AnswerState`] from which queries are answered, and its replacement.
//!
//! A query loads the state once and is answered from it, even if another one is installed in the
//! meantime. Only [`ServerState`] replaces the state; it notifies the fast path and the health
//! tracker.

use std::{
    any::Any,
    collections::{HashMap, HashSet},
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;
use futures_util::future::BoxFuture;
use hickory_proto::op::ResponseCode;
use parking_lot::Mutex;

use crate::consul::{ConsulNames, Published};
use dns_common::entry::AnswerPolicy;
use dns_core::{
    catalog::Snapshot,
    changes::{self, Changes, Facet, Facets},
    listing,
    name::{self, Name, NameRef},
    resolve::{self, Checks, Existence, Health, Resolution, resolve_local},
    wire::{ExtendedError, InfoCode, Query, TYPE_A, TYPE_DS, error_reply},
};
use dns_fastpath::{FastPathHandle, NameSource};
use dns_health::{InstanceSet, Tracked, Tracker};
use dns_upstream::{Answer, reverse_reply};

/// The data from which queries are answered at one moment; never changed, only replaced.
#[derive(Clone)]
pub struct AnswerState {
    /// Names of the fleet.
    pub snapshot: Arc<Snapshot>,
    /// Answerers of all other names.
    pub routes: Arc<Routes>,
    /// Domains of all records that have ever been in use.
    domains: Arc<HashSet<Name>>,
}

impl AnswerState {
    /// Returns whether `domain` (wire format) is or was one of the records.
    fn had_domain(&self, domain: &[u8]) -> bool {
        self.domains.contains(domain)
    }

    /// Returns a copy with another snapshot, or other routes, or both.
    fn with(&self, snapshot: Option<Arc<Snapshot>>, routes: Option<Arc<Routes>>) -> Self {
        let mut state = self.clone();
        if let Some(snapshot) = snapshot {
            // Domains are added only: bosh-dns never returns to a handler whose domain the records
            // once had.
            Arc::make_mut(&mut state.domains).extend(snapshot.domains().cloned());
            state.snapshot = snapshot;
        }
        state.routes = routes.unwrap_or(state.routes);
        state
    }
}

/// The current state, and the components that follow it.
pub struct ServerState {
    state: ArcSwap<AnswerState>,
    /// Health of instances for answers.
    pub(crate) health: Arc<dyn Health + Send + Sync>,
    pub(crate) fast_path: FastPathHandle,
    /// The health tracker; `None` while health checks are off.
    tracker: Option<Arc<Tracker>>,
    /// Consul's names; `None` without Consul.
    consul: Option<Arc<ConsulNames>>,
    /// Held while the fast path is updated, so that it receives the newest state last.
    publishing: Mutex<()>,
    /// Incremented when the state has changed.
    generation: AtomicU64,
}

/// Result of [`ServerState::look_up`], which never waits.
#[derive(Debug)]
pub enum LookedUp {
    /// The resolution of a local name.
    Found(Resolution),
    /// The query must wait for first checks: use [`ServerState::look_up_checked`].
    NeedsFirstCheck,
}

impl ServerState {
    /// Creates a state that answers from `snapshot` without routes until others are installed.
    pub(crate) fn new(
        snapshot: Snapshot,
        health: Arc<dyn Health + Send + Sync>,
        fast_path: FastPathHandle,
        tracker: Option<Arc<Tracker>>,
        consul: Option<Arc<ConsulNames>>,
    ) -> Self {
        let state = AnswerState {
            domains: Arc::new(snapshot.domains().cloned().collect()),
            snapshot: Arc::new(snapshot),
            routes: Arc::new(Routes::default()),
        };
        Self {
            state: ArcSwap::from_pointee(state),
            health,
            fast_path,
            tracker,
            consul,
            publishing: Mutex::new(()),
            generation: AtomicU64::new(0),
        }
    }

    /// Returns the current state. Each query calls this once.
    #[inline]
    pub fn state(&self) -> arc_swap::Guard<Arc<AnswerState>> {
        self.state.load()
    }

    /// Returns the current state, for longer use.
    pub fn state_full(&self) -> Arc<AnswerState> {
        self.state.load_full()
    }

    /// Returns the current snapshot.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.state.load().snapshot.clone()
    }

    /// Installs routes. Updates the fast path, because a name may have moved to another answerer or
    /// to the fleet.
    pub fn set_routes(&self, routes: Routes) {
        self.change(None, Some(routes));
    }

    /// Installs a new snapshot, other routes, or both atomically.
    pub fn change(&self, snapshot: Option<Arc<Snapshot>>, routes: Option<Routes>) {
        let routes = routes.map(Arc::new);
        if snapshot.is_none() && routes.is_none() {
            return;
        }
        self.state
            .rcu(|state| state.with(snapshot.clone(), routes.clone()));
        // After the state: a worker that still reads the old number drops what it resolves now. The
        // other way round it would keep an old answer under the new number.
        self.generation.fetch_add(1, Ordering::Release);
        // Another server or the fleet may now be responsible for any name.
        self.fast_path.void_answers();
        self.publish();
        if let (Some(tracker), Some(snapshot)) = (&self.tracker, snapshot) {
            tracker.install(snapshot);
        }
    }

    pub(crate) fn publish(&self) {
        let _newest_last = self.publishing.lock();
        self.fast_path.install(&self.published_names());
    }

    /// Publishes Consul's names again after a change of their zone.
    pub(crate) fn consul_changed(&self) {
        let Some(consul) = &self.consul else { return };
        let _newest_last = self.publishing.lock();
        self.fast_path
            .refresh(&self.published_names(), &consul.domains());
    }

    pub(crate) fn published_names(&self) -> Arc<dyn NameSource> {
        let consul = self.consul.as_ref().map(|names| names.published());
        Arc::new(PublishedNames {
            state: self.state_full(),
            consul,
        })
    }

    /// Resolves a local name of `state` for a client's query, tracks the name and publishes it.
    /// Never waits.
    pub fn look_up(&self, state: &AnswerState, name: &Name, client: Option<IpAddr>) -> LookedUp {
        let resolution = resolve_local(&state.snapshot, &*self.health, name);
        if self.tracker.is_some() && resolution.checks.tracked && resolution.checks.synchronous {
            // `look_up_checked` tracks the name, and publishes it only once the checks have ended.
            return LookedUp::NeedsFirstCheck;
        }
        self.track(name, &resolution);
        self.learn(name.into(), resolution.existence, client);
        LookedUp::Found(resolution)
    }

    /// Like [`Self::look_up`], but waits for first checks of instances that have not been checked
    /// yet (`y1`).
    pub async fn look_up_checked(
        &self,
        state: &AnswerState,
        name: &Name,
        client: Option<IpAddr>,
    ) -> Resolution {
        let resolution = resolve_local(&state.snapshot, &*self.health, name);
        self.track(name, &resolution);
        let resolution = match &self.tracker {
            Some(tracker) if resolution.checks.tracked && resolution.checks.synchronous => {
                // The resolution before told only which instances to check.
                tracker.first_checks(name, &resolution).await;
                resolve_local(&state.snapshot, &*self.health, name)
            }
            _ => resolution,
        };
        self.learn(name.into(), resolution.existence, client);
        resolution
    }

    #[inline]
    fn learn(&self, name: NameRef<'_>, existence: Existence, client: Option<IpAddr>) {
        match existence {
            Existence::Found => self.fast_path.learn(name),
            Existence::NoSuchName | Existence::Malformed => {
                // Anybody can invent names that do not exist, so each client hands over only some a
                // second.
                self.fast_path.learn_denial(name, client)
            }
        }
    }

    /// Reports a query for a name with a cached answer to the tracker and to the fast path, which
    /// may have withdrawn the name since. Returns false if the name is no longer tracked, so that the
    /// caller must look it up.
    #[inline]
    pub(crate) fn touch(
        &self,
        name: NameRef<'_>,
        existence: Existence,
        tracked: Option<&Tracked>,
        client: Option<IpAddr>,
    ) -> bool {
        let is_known = match (&self.tracker, tracked) {
            (Some(tracker), Some(tracked)) => tracker.touch(tracked),
            _ => true,
        };
        if is_known {
            self.learn(name, existence, client);
        }
        is_known
    }

    /// Keeps the instances of a name of the fleet checked, as a query for the name does.
    pub(crate) fn keep_checked(&self, state: &AnswerState, name: &Name) {
        if state.is_local(name) {
            self.track(name, &resolve_local(&state.snapshot, &*self.health, name));
        }
    }

    fn track(&self, name: &Name, resolution: &Resolution) {
        if let Some(tracker) = &self.tracker
            && resolution.checks.tracked
        {
            tracker.track(name, resolution);
        }
    }

    /// Returns the generation of resolutions. Must be read before resolving: a cached answer is valid as
    /// long as the routes and records are the same, and the health of its instances.
    #[inline]
    pub(crate) fn generation(&self) -> Generation {
        let health = self
            .tracker
            .as_ref()
            .map_or(0, |tracker| tracker.states().changes());
        Generation {
            state: self.generation.load(Ordering::Acquire),
            health,
        }
    }

    /// Returns whether the health of these instances may have changed after the first `changes` changes.
    #[inline]
    pub(crate) fn has_health_changed(&self, instances: InstanceSet, changes: u64) -> bool {
        self.tracker
            .as_ref()
            .is_some_and(|tracker| tracker.states().has_changed(instances, changes))
    }

    /// Returns what a cache must keep with the resolution of a name; `None` if it must not keep it, because
    /// the name should be tracked and is not yet.
    pub(crate) fn dependence(&self, name: &Name, checks: &Checks) -> Option<Dependence> {
        match &self.tracker {
            Some(tracker) if checks.tracked => Some(Dependence {
                instances: tracker.states().set_of(&checks.instances),
                tracked: if tracker.is_on() {
                    Some(tracker.tracked(name)?)
                } else {
                    None
                },
            }),
            _ => Some(Dependence::default()),
        }
    }
}

/// The generation of resolutions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Generation {
    /// Increases with each change of records or routes.
    pub(crate) state: u64,
    /// Number of changes of instances' health.
    pub(crate) health: u64,
}

/// The health and the tracked name on which a resolution depends within a generation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dependence {
    /// Instances whose health it depends on.
    pub(crate) instances: InstanceSet,
    /// The tracked name; `None` if it needs no tracking.
    pub(crate) tracked: Option<Arc<Tracked>>,
}

//----------- Route ----------------------------------------------------------

impl AnswerState {
    /// Returns whether `name` is routed to the fleet, for every type that interfaces answer.
    /// Userspace routes all other types.
    pub(crate) fn is_local(&self, name: &Name) -> bool {
        matches!(Route::of(self, name, TYPE_A), Route::Local)
    }

    /// Returns whether `name` is routed to Consul's names, for types A and AAAA.
    pub(crate) fn is_consuls(&self, name: &Name) -> bool {
        matches!(Route::of(self, name, TYPE_A), Route::Consul(_))
    }
}

impl AnswerState {
    /// Returns whether a name that others deny exists, because names below it are answered here: of
    /// the fleet, up-checks, Consul's names or a handler's (RFC 8020).
    pub(crate) fn is_above_ours(&self, name: &Name) -> bool {
        let Routes {
            upchecks,
            consul,
            handlers,
            ..
        } = &*self.routes;
        resolve::is_above_local(&self.snapshot, name)
            // Everything is below the root; its own data is others' business.
            || name.label_count() > 0
                && !self.snapshot.rules().nxdomain_for_empty_non_terminals
                && upchecks
                    .iter()
                    .chain(consul.keys())
                    .chain(handlers.keys())
                    .any(|domain| domain != name && domain.is_within(name))
    }
}

/// The answerer of a query.
#[derive(Clone)]
pub(crate) enum Route {
    /// The up-check: 127.0.0.1 and ::1.
    Upcheck,
    /// The fleet: the name has a local zone in the state used for routing.
    Local,
    /// The names of Consul's catalog.
    Consul(Arc<dyn Answer>),
    Handler(Arc<dyn Answer>),
    /// Reverse names: first from the state, then from this answerer.
    Reverse(Arc<dyn Answer>),
    Recursors(Arc<dyn Answer>),
    Refused,
}

impl Route {
    /// Returns the answerer of `name`: the longest domain that is a suffix of the name wins. Of
    /// equal domains, up-check names come first, then local names, Consul's names and handlers.
    pub(crate) fn of(state: &AnswerState, name: &Name, qtype: u16) -> Self {
        // The DS record is on the parent's side of a zone cut (RFC 4035, section 2.4).
        if qtype == TYPE_DS {
            return Self::of_parent(state, name);
        }
        let local_zone = state.snapshot.local_zone(name).map(Name::as_wire);
        name.suffixes()
            // Suffixes come longest first, and only one of them can be the local zone: it is looked
            // up once.
            .find_map(|suffix| Self::exactly(state, suffix, local_zone == Some(suffix)))
            .unwrap_or_else(|| Self::root(state))
    }

    /// Returns the answerer for type DS, which belongs to the parent: the root if it has an
    /// answerer, else the shortest domain that is a suffix of the name (observed).
    fn of_parent(state: &AnswerState, name: &Name) -> Self {
        if !matches!(Self::root(state), Self::Refused) {
            return Self::root(state);
        }
        let mut suffixes: Vec<&[u8]> = name.suffixes().collect();
        suffixes.reverse();
        for suffix in suffixes {
            // A suffix of a name is a name.
            let is_local = Name::from_wire(suffix)
                .is_ok_and(|(name, _)| state.snapshot.local_zone(&name).is_some());
            if let Some(route) = Self::exactly(state, suffix, is_local) {
                return route;
            }
        }
        Self::Refused
    }

    fn exactly(state: &AnswerState, domain: &[u8], is_local: bool) -> Option<Self> {
        let routes = &state.routes;
        // Self-checks must succeed whatever the records contain, or the server would restart for
        // ever.
        if routes.upchecks.contains(domain) {
            return Some(Self::Upcheck);
        }
        if is_local {
            return Some(Self::Local);
        }
        if let Some(consul) = routes.consul.get(domain) {
            return Some(Self::Consul(consul.clone()));
        }
        if domain == ARPA
            && let Some(reverse) = &routes.reverse
        {
            return Some(Self::Reverse(reverse.clone()));
        }
        // `Self::root` decides about a handler for the root, which recursors override.
        if domain == ROOT || routes.retires_handlers && state.had_domain(domain) {
            return None;
        }
        routes.handlers.get(domain).cloned().map(Self::Handler)
    }

    /// Returns the default route: recursors override a handler for the root.
    fn root(state: &AnswerState) -> Self {
        match (&state.routes.recursors, state.routes.handlers.get(ROOT)) {
            (Some(recursors), _) => Self::Recursors(recursors.clone()),
            (None, Some(handler)) => Self::Handler(handler.clone()),
            (None, None) => Self::Refused,
        }
    }
}

//----------- Routes ---------------------------------------------------------

/// The domain `arpa.` in wire format.
pub(crate) const ARPA: &[u8] = b"\x04arpa\0";

/// The root domain in wire format.
pub(crate) const ROOT: &[u8] = b"\0";

/// Answerers by their domain.
pub type ByDomain = HashMap<Name, Arc<dyn Answer>, foldhash::fast::RandomState>;

/// Answerers of all names that are not local, replaced as a whole when files change.
#[derive(Clone, Default)]
pub struct Routes {
    /// Names answered with 127.0.0.1 and ::1, with everything below them.
    pub upchecks: HashSet<Name, foldhash::fast::RandomState>,
    /// Answerers of Consul's names, by domain.
    pub consul: ByDomain,
    /// Handlers by domain. One for `arpa.` or the root is used only without recursors.
    pub handlers: ByDomain,
    /// Answers names below `arpa.` that the records do not contain; `None` treats them like other
    /// names.
    pub reverse: Option<Arc<dyn Answer>>,
    /// Answers everything else; `None` if recursion is disabled.
    pub recursors: Option<Arc<dyn Answer>>,
    /// Whether a handler whose domain was once in the records stays unused after the records lose
    /// the domain, as in bosh-dns (observed).
    pub retires_handlers: bool,
}

impl Routes {
    /// Returns the answerer of names below `arpa.` that the records do not contain: recursors, else
    /// the handler for `arpa.` or the root, else one that refuses.
    pub fn reverse_fallback(
        recursors: Option<&Arc<dyn Answer>>,
        handlers: &ByDomain,
    ) -> Arc<dyn Answer> {
        let next = recursors
            .or_else(|| handlers.get(ARPA))
            .or_else(|| handlers.get(ROOT));
        next.cloned().unwrap_or_else(|| Arc::new(Refused))
    }

    /// Returns whether a handler answers names below `arpa.` without recursors.
    pub(crate) fn has_reverse_fallback(handlers: &ByDomain) -> bool {
        handlers.contains_key(ARPA) || handlers.contains_key(ROOT)
    }
}

struct Refused;

impl Refused {
    fn reply(query: &Query<'_>) -> Vec<u8> {
        let mut reply = error_reply(query, ResponseCode::Refused);
        ExtendedError::new(InfoCode::NotAuthoritative, "recursion is disabled")
            .push(query, &mut reply);
        reply
    }
}

impl Answer for Refused {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(std::future::ready(Self::reply(query)))
    }

    fn answer_at_once(&self, query: &Query<'_>, out: &mut Vec<u8>) -> bool {
        *out = Self::reply(query);
        true
    }
}

//----------- Published names ------------------------------------------------

/// Names that interfaces may answer: names routed to the fleet, and names routed to Consul that have only
/// addresses there. A handler below a domain of the records keeps its names.
struct PublishedNames {
    state: Arc<AnswerState>,
    /// Consul's names at the same moment; `None` without Consul.
    consul: Option<Published>,
}

impl PublishedNames {
    /// Returns the names of the address whose reverse name this is, unless others answer for it.
    fn reverse_names(&self, name: &Name) -> Option<Vec<Box<[u8]>>> {
        let address = name::address_of(name.as_wire())?;
        if !matches!(Route::of(&self.state, name, TYPE_A), Route::Reverse(_)) {
            return None;
        }
        let names = self.state.snapshot.reverse(address);
        (!names.is_empty()).then_some(names)
    }

    /// Returns whether the name is a reverse name that the fleet does not have: Consul may have it.
    fn is_foreign_reverse(&self, name: &Name) -> bool {
        matches!(Route::of(&self.state, name, TYPE_A), Route::Reverse(_))
            && self.reverse_names(name).is_none()
    }
}

impl NameSource for PublishedNames {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        let state = &self.state;
        Box::new(listing::published_names(&state.snapshot).filter(|name| state.is_local(name)))
    }

    fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution> {
        if !self.state.is_local(name) {
            return None;
        }
        resolve::resolve(&self.state.snapshot, health, name)
    }

    fn resolve_with_policy(
        &self,
        health: &dyn Health,
        name: &Name,
    ) -> Option<(Resolution, Option<AnswerPolicy>)> {
        if let Some(resolution) = self.resolve(health, name) {
            return Some((resolution, None));
        }
        let consul = self
            .consul
            .as_ref()
            .filter(|_| self.state.is_consuls(name))?;
        let (v4, v6, policy) = consul.look_up(name)?;
        let resolution = Resolution {
            existence: Existence::Found,
            v4,
            v6,
            checks: Checks::default(),
        };
        Some((resolution, Some(policy)))
    }

    fn reply(&self, query: &Query<'_>, serial: u32, seed: u64) -> Option<Vec<u8>> {
        let Self { state, consul } = self;
        let name = query.question.name();
        match Route::of(state, &name, query.question.qtype) {
            Route::Consul(_) => {
                let reply = consul.as_ref()?.reply(query, serial, seed)?;
                // Userspace turns such a denial into NOERROR (`admit_existence`), and the interface
                // must not differ.
                let is_denial = reply.get(3)? & 15 == ResponseCode::NXDomain.low();
                (!is_denial || !state.is_above_ours(&name)).then_some(reply)
            }
            Route::Reverse(fallback) => {
                let reply = match reverse_reply(query, &state.snapshot, || {
                    fastrand::Rng::with_seed(seed)
                }) {
                    Some(reply) => reply,
                    // Others may answer for addresses that are not Consul's.
                    None if fallback.holds_reverse(query) => {
                        consul.as_ref()?.reverse_reply(query)?
                    }
                    None => return None,
                };
                // Userspace truncates a longer one; the programs send whole replies only.
                (reply.len() <= query.limit()).then_some(reply)
            }
            _ => None,
        }
    }

    fn gives_same_replies(&self, older: &dyn NameSource, name: &Name) -> bool {
        // The fast path knows sources as a trait. Another type says nothing about replies, so all
        // are computed again.
        let Some(older) = (older as &dyn Any).downcast_ref::<Self>() else {
            return false;
        };
        if let Some(new) = self.reverse_names(name)
            && let Some(old) = older.reverse_names(name)
        {
            return new == old;
        }
        let (Some(new), Some(old)) = (&self.consul, &older.consul) else {
            return false;
        };
        let are_foreign = self.is_foreign_reverse(name) && older.is_foreign_reverse(name);
        if are_foreign && Arc::ptr_eq(&self.state.routes, &older.state.routes) {
            return new.is_same(old);
        }
        new.is_same(old)
            && self.state.is_consuls(name)
            && older.state.is_consuls(name)
            && self.state.is_above_ours(name) == older.state.is_above_ours(name)
    }

    fn facets(&self, name: &Name) -> Facets {
        if self.state.is_local(name) {
            changes::facets(&self.state.snapshot, name)
        } else {
            // A live Consul delivers zones, not rows: any of its names may depend on any change.
            [consuls()].into_iter().collect()
        }
    }

    fn changes_since(&self, older: &dyn NameSource) -> Option<Changes> {
        let older = (older as &dyn Any).downcast_ref::<Self>()?;
        let Self { state, consul } = self;
        // Routes decide about names of any form, and the domains, which never become fewer, about routes.
        let are_routed_alike = Arc::ptr_eq(&state.routes, &older.state.routes)
            && state.domains.len() == older.state.domains.len();
        if !are_routed_alike {
            return None;
        }
        let mut changes = changes::between(&older.state.snapshot, &state.snapshot)?;
        // A handler may have a domain below one of the records and answers the names there.
        changes.listed.retain(|name| state.is_local(name));
        let is_same_zone = match (consul, &older.consul) {
            (Some(new), Some(old)) => new.is_same(old),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        };
        // An alias that appears below a domain of Consul's takes the names below it.
        let routes = &state.routes.consul;
        if !is_same_zone
            || changes.zones.iter().any(|zone: &Name| {
                !routes.is_empty() && zone.suffixes().any(|suffix| routes.contains_key(suffix))
            })
        {
            changes.facets.extend([Facet::ANY, consuls()]);
        }
        Some(changes)
    }
}

/// Returns the facet of the names that Consul answers.
fn consuls() -> Facet {
    Facet::of("names of Consul")
}

#[cfg(test)]
mod tests {
    use dns_consul::{config::Config, definition::Definitions};
    use dns_core::{
        catalog::{AliasFiles, Records},
        resolve::AllRunning,
    };

    use super::*;
    use crate::consul::Catalogs;

    /// Names of both answerers, some of which an alias of the records may take from Consul.
    const NAMES: [&str; 12] = [
        "web.service.consul.",
        "db.service.consul.",
        "none.service.consul.",
        "i0.service.consul.",
        "i1.service.consul.",
        "x.i0.service.consul.",
        "here.node.consul.",
        "i0.web.net.dep.bosh.",
        "i1.web.net.dep.bosh.",
        "q-s0.q-g1.bosh.",
        "i0.q-g1.bosh.",
        "elsewhere.example.",
    ];

    /// Returns a snapshot of random instances; each makes an alias below a domain of Consul's.
    fn snapshot(random: &mut fastrand::Rng) -> Arc<Snapshot> {
        let count = random.u8(..4);
        let mut rows =
            vec![r#"["keep", "web", "net", "dep", [], "10.0.1.1", "bosh", "9"]"#.to_owned()];
        rows.extend((0..count).map(|_| {
            let id = random.u8(..3);
            let last = random.u8(..4);
            format!(r#"["i{id}", "web", "net", "dep", ["1"], "10.0.0.{last}", "bosh", "{id}"]"#)
        }));
        let records = format!(
            r#"{{"record_keys": ["id", "instance_group", "network", "deployment", "group_ids", "ip", "domain", "num_id"],
                "record_infos": [{}],
                "aliases": {{"_.service.consul": [
                    {{"group_id": "1", "root_domain": "bosh", "placeholder_type": "uuid"}}]}}}}"#,
            rows.join(", ")
        );
        let (records, _) = Records::parse(records.as_bytes()).expect("records");
        Arc::new(Snapshot::build(records, &AliasFiles::default()).0)
    }

    /// Returns Consul's names with random services.
    fn consul(random: &mut fastrand::Rng) -> Published {
        let document = br#"{"consul": {"node_name": "here", "advertise_addr": "10.0.0.9"}}"#;
        let (config, _) = Config::of_document("config.json", document)
            .valid
            .expect("a configuration");
        let services = ["web", "db", "i0"].map(|name| {
            let last = random.u8(..3);
            format!(r#"{{"service": {{"name": "{name}", "address": "10.1.0.{last}"}}}}"#)
        });
        let files = services
            .iter()
            .take(random.usize(1..4))
            .map(|text| ("a.json", text.as_bytes()));
        let definitions = Definitions::read(files, &config);
        assert!(definitions.errors.is_empty(), "{:?}", definitions.errors);
        let catalogs = Catalogs::new(config);
        catalogs.set_files(definitions.valid.registrations);
        ConsulNames::new(catalogs.zone(), FastPathHandle::default()).published()
    }

    /// A name that shares no facet with the changes means the same before and after, whether the fleet
    /// or Consul answers it.
    #[test]
    fn unconcerned_names_keep_their_meaning() {
        let random = &mut fastrand::Rng::with_seed(5);
        let refused: Arc<dyn Answer> = Arc::new(Refused);
        let domain = Name::from_text("consul").expect("a name");
        let routes = Arc::new(Routes {
            consul: [(domain, refused)].into_iter().collect(),
            ..Routes::default()
        });
        let mut compared = 0;
        for _ in 0..400 {
            let [old, new] = [(); 2].map(|()| snapshot(random));
            let domains: Arc<HashSet<Name>> = Arc::new(old.domains().cloned().collect());
            let zone = consul(random);
            let newer = if random.bool() {
                zone.clone()
            } else {
                consul(random)
            };
            let source = |snapshot: &Arc<Snapshot>, consul| PublishedNames {
                state: Arc::new(AnswerState {
                    snapshot: snapshot.clone(),
                    routes: routes.clone(),
                    domains: domains.clone(),
                }),
                consul: Some(consul),
            };
            let before = source(&old, zone);
            let after = source(&new, newer);
            let Some(changes) = after.changes_since(&before) else {
                continue;
            };
            for text in NAMES {
                let name = Name::from_text(text).expect("a name");
                let is_concerned = before
                    .facets(&name)
                    .iter()
                    .any(|&facet| changes.concern(facet))
                    || changes.renewed.contains(&name);
                let meaning = |names: &PublishedNames| {
                    let (mut resolution, policy) = names.resolve_with_policy(&AllRunning, &name)?;
                    resolution.v4.sort_unstable();
                    Some((resolution, policy))
                };
                let was = meaning(&before);
                let is = meaning(&after);
                compared += usize::from(was.is_some() && !is_concerned);
                assert!(
                    was.is_none() || is_concerned || was == is,
                    "{text}: {was:?}, {is:?}"
                );
            }
        }
        assert!(compared > 500, "{compared}");
    }
}
