//! One way to an answer: a source and, where it is switched on, its cache.

use std::{sync::Arc, time::Duration};

use super::{
    Ask,
    cache::{Cache, Entry, Key, Lookup, hide_authentic},
    flight::{Flights, Landed, Landing, Leader, Part},
    forward::Forwarder,
    forwarded::Forwarded,
    http::HttpSource,
    message,
};
use dns_core::wire::{Query, ReplyFlags, Transport, empty_reply};

/// So long a client waits for the renewal of an answer that is past its time
/// before it gets that (RFC 8767, section 5: "client response timer", 1.8 s).
const STALE_PATIENCE: Duration = Duration::from_millis(1800);

/// Answers queries from one source. Clones share source and cache.
#[derive(Clone, Debug)]
pub struct CachedSource {
    /// What the clones share.
    shared: Arc<Shared>,
}

/// What all clones of a source have in common.
#[derive(Debug)]
struct Shared {
    /// Where answers come from.
    source: Source,
    /// Where they are kept.
    cache: Option<Arc<Cache>>,
    /// Who waits for the same answer.
    flights: Arc<Flights>,
}

/// Where answers come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Recursors.
    Dns(Arc<Forwarder>),
    /// JSON over HTTP.
    Http(Arc<HttpSource>),
    /// Nowhere.
    Deny(Denial),
}

/// What a denied client gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// NXDOMAIN.
    Nxdomain,
    /// REFUSED.
    Refused,
}

impl Denial {
    /// The RCODE.
    pub(crate) fn rcode(self) -> u8 {
        match self {
            Self::Nxdomain => message::NXDOMAIN,
            Self::Refused => message::REFUSED,
        }
    }
}

/// A reply for the client, and whether it is a failure.
struct Fetched {
    /// The reply, whole.
    reply: Vec<u8>,
    /// There was no usable answer.
    failed: bool,
}

impl CachedSource {
    /// Answers from `source`, and from `cache` before.
    pub(crate) fn new(source: Source, cache: Option<Arc<Cache>>) -> Self {
        Self { shared: Arc::new(Shared { source, cache, flights: Arc::default() }) }
    }

    /// Answers from the same source, past the cache.
    pub(crate) fn past_cache(&self) -> Self {
        let Shared { source, cache: _, flights } = &*self.shared;
        Self { shared: Arc::new(Shared { source: source.clone(), cache: None, flights: flights.clone() }) }
    }

    /// The whole reply to a query: the client's id and letter case, not yet cut to size.
    pub async fn answer(&self, query: &Query<'_>, transport: Transport) -> Vec<u8> {
        let Some(ask) = Ask::new(query.message, transport) else {
            // `wire::parse` has let this message pass, so this is not reached;
            // should the two ever differ, the client is told.
            return empty_reply(query, hickory_proto::op::ResponseCode::FormErr, ReplyFlags::ERROR);
        };
        let Some((cache, key)) = self.shared.cache.as_ref().and_then(|cache| Some((cache, cache.key(&ask)?)))
        else {
            return self.shared.fetch_for_all(None, &ask, true).await.reply;
        };
        match cache.get(&key, &ask) {
            Lookup::Fresh(reply) => reply,
            Lookup::Miss => self.shared.fetch_for_all(Some((cache, &key)), &ask, true).await.reply,
            Lookup::Stale(entry) => self.renew(cache, &key, &ask, &entry).await,
        }
    }

    /// Writes the reply to a query into `out` if it is in the cache, and says
    /// whether it did; what is not will be asked for with [`Self::answer`].
    pub fn answer_at_once(&self, query: &Query<'_>, transport: Transport, out: &mut Vec<u8>) -> bool {
        let Some(cache) = &self.shared.cache else { return false };
        let Some(ask) = Ask::new(query.message, transport) else { return false };
        cache.key(&ask).is_some_and(|key| cache.write_fresh(&key, &ask, out))
    }

    /// Tries to renew an answer, and gives it as it is if that fails or takes too long.
    async fn renew(&self, cache: &Arc<Cache>, key: &Key, ask: &Ask<'_>, entry: &Arc<Entry>) -> Vec<u8> {
        let renewal = {
            let (shared, cache, key) = (Arc::clone(&self.shared), Arc::clone(cache), key.clone());
            let (message, transport) = (ask.message.to_vec(), ask.transport);
            async move {
                let ask = Ask::new(&message, transport)?;
                Some(shared.fetch_for_all(Some((&cache, &key)), &ask, false).await)
            }
        };
        // It goes on when this client no longer waits for it.
        match tokio::time::timeout(STALE_PATIENCE, tokio::spawn(renewal)).await {
            Ok(Ok(Some(Fetched { reply, failed: false }))) => reply,
            _ => {
                entry.renewal_failed();
                cache.stale_reply(entry, ask)
            }
        }
    }
}

impl Shared {
    /// Asks for an answer, together with all who wait for the same, and keeps it in a
    /// cache. `keep_failures`: failures that may be kept are.
    async fn fetch_for_all(
        &self,
        cache: Option<(&Cache, &Key)>,
        ask: &Ask<'_>,
        keep_failures: bool,
    ) -> Fetched {
        let travels = !matches!(self.source, Source::Deny(_));
        let Some(key) = travels.then(|| Flights::key(ask)).flatten() else {
            return self.fetch(cache, ask, keep_failures, None).await;
        };
        let mut asked_by_another = false;
        loop {
            match self.flights.join(key.clone()) {
                Part::Leader(leader) => return self.fetch(cache, ask, keep_failures, Some(leader)).await,
                Part::Follower(landing) => match landing.await {
                    Ok(Landing::Reply(landed)) => {
                        if asked_by_another || !landed.is_cut_below(ask.reply_limit()) {
                            return Fetched::with_others(&landed, ask);
                        }
                        // Once: after that, by TCP.
                        asked_by_another = true;
                    }
                    Ok(Landing::GivenUp) => return Fetched::failure(ask),
                    // Whoever asked has gone: ask anew.
                    Err(_) => {}
                },
            }
        }
    }

    /// Asks for an answer, keeps it, and gives it to all who wait with `leader`.
    async fn fetch(
        &self,
        cache: Option<(&Cache, &Key)>,
        ask: &Ask<'_>,
        keep_failures: bool,
        leader: Option<Leader<'_>>,
    ) -> Fetched {
        let Forwarded { mut reply, mut outline, failed, keep } = self.source.fetch(ask).await;
        if let Some((cache, key)) = cache
            && (!failed || keep && keep_failures)
        {
            cache.admit(key, ask, &mut reply, &mut outline);
        }
        if let Some(leader) = leader {
            let limit = ask.reply_limit();
            leader.land(|| Landed { reply: reply.clone(), outline: outline.clone(), failed, limit });
        }
        if outline.opt.is_none() {
            ask.add_opt(&mut reply);
        }
        Fetched { reply, failed }
    }
}

impl Fetched {
    /// The reply for a client whose question somebody else has asked: with the client's
    /// id, letter case and EDNS. The upstream's OPT was for who asked.
    fn with_others(landed: &Landed, ask: &Ask<'_>) -> Self {
        let Landed { reply, outline, failed, limit: _ } = landed;
        if message::has_extended_rcode(reply, outline) {
            return Self::failure(ask);
        }
        let mut reply = reply.clone();
        message::remove_opt(&mut reply, &mut outline.clone());
        message::set_id(&mut reply, message::id(ask.message));
        ask.restore_case(&mut reply);
        hide_authentic(&mut reply, ask);
        ask.add_opt(&mut reply);
        Self { reply, failed: *failed }
    }

    /// SERVFAIL.
    fn failure(ask: &Ask<'_>) -> Self {
        let Forwarded { mut reply, .. } = Forwarded::bare(ask, true, message::SERVFAIL);
        ask.add_opt(&mut reply);
        Self { reply, failed: true }
    }
}

impl Source {
    /// Asks for an answer.
    async fn fetch(&self, ask: &Ask<'_>) -> Forwarded {
        match self {
            Self::Dns(forwarder) => forwarder.forward(ask).await,
            Self::Http(http) => http.fetch(ask).await,
            Self::Deny(denial) => {
                let rcode = denial.rcode();
                let reply = message::begin_reply(ask.message, ask.question.clone(), true, true, rcode);
                Forwarded::own(reply, false)
            }
        }
    }
}
