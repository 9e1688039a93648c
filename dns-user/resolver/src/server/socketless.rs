//! The server without sockets: says what it would reply. Sends nothing, waits for nothing, and publishes nothing.

use std::{net::SocketAddr, sync::Arc};

use super::{
    Cookies, Identity, Options, ServerMetrics,
    metrics::Responder,
    service::{Immediate, QueryHandler},
};
use crate::state::ServerState;
use dns_core::{
    name::Name,
    resolve::{Resolution, resolve_local},
    wire::{Parsed, RequestInfo, Shuffle, Transport, local_reply, parse_from},
};

/// Answers queries of one state.
pub struct SocketlessServer {
    handler: QueryHandler,
    shuffle: Shuffle,
}

/// The server's reaction to a message.
#[derive(Debug)]
pub struct Considered {
    /// The reply; `None` if it sends none at once.
    pub reply: Option<Vec<u8>>,
    /// Part of the server that answers.
    pub responder: Responder,
    /// The resolution of a name of the fleet.
    pub resolution: Option<Resolution>,
}

impl SocketlessServer {
    /// Creates a server that answers from this state with the options that change replies.
    pub fn new(
        state: Arc<ServerState>,
        identity: Arc<Identity>,
        compat: dns_core::config::Compat,
        cookies: Cookies,
    ) -> Self {
        let options = Options {
            compat,
            cookies,
            ..Options::default()
        };
        // The handler counts in any case; nothing registers or reads these counters.
        let metrics = ServerMetrics::new("socketless".to_owned());
        Self {
            handler: QueryHandler::new(state, identity, metrics, options),
            shuffle: Shuffle::default(),
        }
    }

    /// Returns whether the name has no data, and names below it are answered here.
    pub fn is_above_ours(&self, name: &Name) -> bool {
        self.handler.server_state.state().is_above_ours(name)
    }

    /// Returns what the server would do with a message; `None` if it is no query.
    pub fn consider(
        &mut self,
        message: &[u8],
        client: SocketAddr,
        transport: Transport,
    ) -> Option<Considered> {
        let from = RequestInfo {
            client: Some(client.ip().to_canonical()),
            transport,
        };
        let handler = &self.handler;
        let query = match parse_from(message, from, &handler.reply_settings) {
            Parsed::Query(query) => handler.reserve_options(query),
            Parsed::Reply(mut reply) => {
                let cookies = &handler.options.cookies;
                cookies.answer_without_question(message, client.ip(), &mut reply);
                return Some(Considered {
                    reply: Some(reply),
                    responder: Responder::None,
                    resolution: None,
                });
            }
            Parsed::Drop => return None,
        };
        let name = query.question.name();
        let mut reply = Vec::new();
        let immediate = handler.answer_at_once(&query, &name, &mut self.shuffle, &mut reply);
        Some(match immediate {
            Immediate::Replied {
                responder,
                resolution,
            } => Considered {
                reply: Some(reply),
                responder,
                resolution,
            },
            Immediate::Deferred(deferred) if deferred.responder == Responder::Local => {
                // First checks (`y1`): the caller decides what health it knows.
                let state = &handler.server_state;
                let resolution = resolve_local(&state.snapshot(), &*state.health, &name);
                local_reply(&query, resolution.answer(), &mut self.shuffle, &mut reply);
                handler.add_options(&query, Responder::Local, &mut reply);
                Considered {
                    reply: Some(reply),
                    responder: Responder::Local,
                    resolution: Some(resolution),
                }
            }
            // Recursors and handlers are not asked: the caller compares by route where it has no
            // reply.
            Immediate::Deferred(deferred) => Considered {
                reply: None,
                responder: deferred.responder,
                resolution: None,
            },
        })
    }
}
