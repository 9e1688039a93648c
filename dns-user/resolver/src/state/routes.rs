//! Answerers of names outside the fleet.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use futures::future::BoxFuture;
use hickory_proto::op::ResponseCode;

use dns_core::{
    name::Name,
    wire::{Query, Transport, error_reply},
};
use dns_upstream::Answer;

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
    pub handlers_stay_away: bool,
}

impl Routes {
    /// Returns the answerer of names below `arpa.` that the records do not contain: recursors, else
    /// the handler for `arpa.` or the root, else one that refuses.
    pub fn past_reverse(recursors: Option<&Arc<dyn Answer>>, handlers: &ByDomain) -> Arc<dyn Answer> {
        let next = recursors.or_else(|| handlers.get(ARPA)).or_else(|| handlers.get(ROOT));
        next.cloned().unwrap_or_else(|| Arc::new(Refused))
    }

    /// Returns whether a handler answers names below `arpa.` without recursors.
    pub(crate) fn has_past_reverse(handlers: &ByDomain) -> bool {
        handlers.contains_key(ARPA) || handlers.contains_key(ROOT)
    }
}

struct Refused;

impl Answer for Refused {
    fn answer<'a>(&'a self, query: &'a Query<'a>, _transport: Transport) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(async move { error_reply(query, ResponseCode::Refused) })
    }
}
