//! Who answers names that are not the fleet's own.

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

/// `arpa.` in wire format.
pub(crate) const ARPA: &[u8] = b"\x04arpa\0";

/// The root in wire format.
pub(crate) const ROOT: &[u8] = b"\0";

/// Who answers for domains.
pub type ByDomain = HashMap<Name, Arc<dyn Answer>, foldhash::fast::RandomState>;

/// Who answers what is not local; replaced as a whole when files change.
#[derive(Clone, Default)]
pub struct Routes {
    /// Answered with 127.0.0.1 and ::1, they and everything below them.
    pub upchecks: HashSet<Name, foldhash::fast::RandomState>,
    /// Consul's names, by their domains.
    pub consul: ByDomain,
    /// Handlers by domain. One for `arpa.` or the root counts only without recursors.
    pub handlers: ByDomain,
    /// Answers names below `arpa.` that the records do not know; `None`: those are names like
    /// any other.
    pub reverse: Option<Arc<dyn Answer>>,
    /// Answers everything else; `None`: recursors are off.
    pub recursors: Option<Arc<dyn Answer>>,
    /// How bosh-dns treats a handler whose domain was also one of the records: it does not come
    /// back when the records lose the domain (observed).
    pub handlers_stay_away: bool,
}

impl Routes {
    /// Who answers names below `arpa.` that the records do not know: recursors,
    /// or without them the handler for `arpa.` or the root; else REFUSED.
    pub fn past_reverse(recursors: Option<&Arc<dyn Answer>>, handlers: &ByDomain) -> Arc<dyn Answer> {
        let next = recursors.or_else(|| handlers.get(ARPA)).or_else(|| handlers.get(ROOT));
        next.cloned().unwrap_or_else(|| Arc::new(Refused))
    }

    /// Whether a handler answers names below `arpa.` where there are no recursors.
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
