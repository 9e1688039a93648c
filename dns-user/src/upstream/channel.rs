//! One way to an answer: a source and what stands before it.

use std::sync::Arc;

use super::{
    Ask,
    forward::{Forwarded, Forwarder},
};
use crate::wire::{Query, ReplyFlags, Transport, empty_reply};

/// Answers queries from one source.
#[derive(Debug)]
pub struct Channel {
    /// Where answers come from.
    source: Source,
}

/// Where answers come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// Recursors.
    Dns(Arc<Forwarder>),
}

impl Channel {
    /// Answers from `source`.
    pub(crate) fn new(source: Source) -> Self {
        Self { source }
    }

    /// The whole reply to a query: the client's id and letter case, not yet cut to size.
    pub async fn answer(&self, query: &Query<'_>, transport: Transport) -> Vec<u8> {
        let Some(ask) = Ask::new(query.message, transport) else {
            // `wire::parse` has let this message pass, so this is not reached;
            // should the two ever differ, the client is told.
            return empty_reply(query, hickory_proto::op::ResponseCode::FormErr, ReplyFlags::ERROR);
        };
        self.source.fetch(&ask).await.reply
    }
}

impl Source {
    /// Asks for an answer.
    async fn fetch(&self, ask: &Ask<'_>) -> Forwarded {
        match self {
            Self::Dns(forwarder) => forwarder.forward(ask).await,
        }
    }
}
