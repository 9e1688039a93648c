//! Who answers a query.

use std::{
    collections::{HashMap, HashSet},
    net::{Ipv4Addr, Ipv6Addr},
    sync::{Arc, OnceLock},
};

use arc_swap::ArcSwap;
use hickory_proto::op::ResponseCode;

use super::{Answer, Local};
use crate::{
    name::Name,
    wire::{CLASS_CH, Query, TYPE_ANY, TYPE_DS, TYPE_TXT, Transport, error_reply},
};

/// What up-check names resolve to.
pub(super) const UPCHECK_V4: [Ipv4Addr; 1] = [Ipv4Addr::LOCALHOST];
/// The same in IPv6.
pub(super) const UPCHECK_V6: [Ipv6Addr; 1] = [Ipv6Addr::LOCALHOST];

/// `arpa.` in wire format.
const ARPA: &[u8] = b"\x04arpa\0";
/// Bytes of a query beside its question, with an OPT that holds no options:
/// header, OPT (RFC 6891, section 6.1.2).
const BARE_QUERY: usize = 12 + 11;

/// The root in wire format.
const ROOT: &[u8] = b"\0";

/// Knows who answers which name. The longest domain that ends the name wins; of
/// equal ones, up-check names before local ones before handlers.
pub struct Router {
    /// Names of the fleet.
    local: Arc<Local>,
    /// All others.
    routes: ArcSwap<Routes>,
    /// What we tell about ourselves in class CH.
    chaos: OnceLock<Arc<dyn Chaos>>,
}

/// Who answers for domains.
pub type ByDomain = HashMap<Name, Arc<dyn Answer>, foldhash::fast::RandomState>;

/// Who answers what is not local; replaced as a whole when files change.
#[derive(Clone, Default)]
pub struct Routes {
    /// Answered with 127.0.0.1 and ::1, they and everything below them.
    pub upchecks: HashSet<Name, foldhash::fast::RandomState>,
    /// Handlers by domain. One for `arpa.` or the root counts only without recursors.
    pub handlers: ByDomain,
    /// Answers names below `arpa.`, falls through by itself to whom
    /// [`Routes::past_reverse`] says; `None`: nobody knows them.
    pub reverse: Option<Arc<dyn Answer>>,
    /// Answers everything else; `None`: recursors are off.
    pub recursors: Option<Arc<dyn Answer>>,
    /// The reference's way with a handler whose domain was also one of the
    /// records: it does not come back when the records lose the domain (observed).
    pub handlers_stay_away: bool,
}

/// What the server tells about itself.
pub trait Chaos: Send + Sync {
    /// The text for a name in class CH, such as `version.bind. TXT`; `None`: not
    /// ours, the query goes on as any other. `has_edns`: whether it has an OPT.
    fn text(&self, name: &Name, has_edns: bool) -> Option<String>;

    /// Adds what the query's EDNS options ask for to its reply. Called for
    /// queries with options only.
    fn add_options(&self, _query: &Query<'_>, _transport: Transport, _reply: &mut Vec<u8>) {}
}

/// Who answers one query.
#[derive(Clone)]
pub(super) enum Route {
    /// 127.0.0.1 and ::1.
    Upcheck,
    /// The fleet.
    Local,
    /// This text.
    Chaos(String),
    /// A handler.
    Handler(Arc<dyn Answer>),
    /// Names below `arpa.`
    Reverse(Arc<dyn Answer>),
    /// Recursors.
    Recursors(Arc<dyn Answer>),
    /// Nobody.
    Refused,
}

impl Router {
    /// Routes names of `local` to it, the others as `routes` says.
    pub fn new(local: Arc<Local>, routes: Routes) -> Self {
        Self { local, routes: ArcSwap::from_pointee(routes), chaos: OnceLock::new() }
    }

    /// What local names are asked.
    pub fn local(&self) -> &Arc<Local> {
        &self.local
    }

    /// Puts other routes in force.
    pub fn install(&self, routes: Routes) {
        self.routes.store(Arc::new(routes));
        // A name may have become somebody else's.
        self.local.invalidate();
    }

    /// Who answers in class CH, once for the life of the router.
    pub fn set_chaos(&self, chaos: Arc<dyn Chaos>) {
        // The first one stays.
        let _ = self.chaos.set(chaos);
    }

    /// Adds what EDNS options of the query ask for (NSID). Most have none.
    #[inline]
    pub(super) fn add_options(&self, query: &Query<'_>, transport: Transport, reply: &mut Vec<u8>) {
        if query.edns.is_some()
            && query.message.len() > query.question.wire_len() + BARE_QUERY
            && let Some(chaos) = self.chaos.get()
        {
            chaos.add_options(query, transport, reply);
        }
    }

    /// Who answers `name`.
    pub(super) fn route(&self, name: &Name, qtype: u16, qclass: u16, has_edns: bool) -> Route {
        if qclass == CLASS_CH
            && matches!(qtype, TYPE_TXT | TYPE_ANY)
            && let Some(text) = self.chaos.get().and_then(|chaos| chaos.text(name, has_edns))
        {
            return Route::Chaos(text);
        }
        let routes = self.routes.load();
        let snapshot = self.local.snapshot.load();
        if qtype == TYPE_DS {
            return routes.parent_side(name, &self.local, |name| snapshot.local_zone(name).is_some());
        }
        let local_zone = snapshot.local_zone(name);
        routes.longest(name, &self.local, local_zone.as_ref().map(|zone| zone.as_wire()))
    }
}

impl Routes {
    /// Who answers names below `arpa.` that the records do not know: recursors,
    /// or without them the handler for `arpa.` or the root; else REFUSED.
    pub fn past_reverse(recursors: Option<&Arc<dyn Answer>>, handlers: &ByDomain) -> Arc<dyn Answer> {
        let next = recursors.or_else(|| handlers.get(ARPA)).or_else(|| handlers.get(ROOT));
        next.cloned().unwrap_or_else(|| Arc::new(Refused))
    }

    /// The longest domain that ends `name` wins; `local_zone` is the longest
    /// local one, in wire format.
    fn longest(&self, name: &Name, local: &Local, local_zone: Option<&[u8]>) -> Route {
        for suffix in name.suffixes() {
            if let Some(route) = self.exactly(suffix, local, local_zone == Some(suffix)) {
                return route;
            }
        }
        self.root()
    }

    /// Type DS belongs to the parent: the root if somebody answers for it, else
    /// the shortest domain that ends the name (observed).
    fn parent_side(&self, name: &Name, local: &Local, is_local: impl Fn(&Name) -> bool) -> Route {
        if !matches!(self.root(), Route::Refused) {
            return self.root();
        }
        let mut suffixes: Vec<&[u8]> = name.suffixes().collect();
        suffixes.reverse();
        for suffix in suffixes {
            // A suffix of a name is a name.
            let is_local = Name::from_wire(suffix).is_ok_and(|(name, _)| is_local(&name));
            if let Some(route) = self.exactly(suffix, local, is_local) {
                return route;
            }
        }
        Route::Refused
    }

    /// Who answers for exactly this domain.
    fn exactly(&self, domain: &[u8], local: &Local, is_local: bool) -> Option<Route> {
        if self.upchecks.contains(domain) {
            return Some(Route::Upcheck);
        }
        if is_local {
            return Some(Route::Local);
        }
        if domain == ARPA
            && let Some(reverse) = &self.reverse
        {
            return Some(Route::Reverse(reverse.clone()));
        }
        if domain == ROOT || self.handlers_stay_away && local.had_domain(domain) {
            return None;
        }
        self.handlers.get(domain).cloned().map(Route::Handler)
    }

    /// Who answers what nobody else does: recursors override a handler for the root.
    fn root(&self) -> Route {
        match (&self.recursors, self.handlers.get(ROOT)) {
            (Some(recursors), _) => Route::Recursors(recursors.clone()),
            (None, Some(handler)) => Route::Handler(handler.clone()),
            (None, None) => Route::Refused,
        }
    }
}

/// REFUSED to everything.
struct Refused;

impl Answer for Refused {
    fn answer<'a>(
        &'a self,
        query: &'a Query<'a>,
        _transport: Transport,
    ) -> futures::future::BoxFuture<'a, Vec<u8>> {
        Box::pin(async move { error_reply(query, ResponseCode::Refused) })
    }
}
