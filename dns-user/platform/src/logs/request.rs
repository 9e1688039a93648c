//! What is told of a request that reached userspace, by the log and by the tap.

use std::{net::SocketAddr, time::Duration};

use dns_core::name::Name;

/// What is told of a request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Name that was asked for.
    pub name: &'a Name,
    /// QTYPE.
    pub query_type: u16,
    /// RCODE of the reply.
    pub rcode: u8,
    /// Answers in the reply.
    pub answers: u16,
    /// Bytes of the reply.
    pub bytes: usize,
    /// Who asked.
    pub client: SocketAddr,
    /// `udp` or `tcp`.
    pub transport: &'static str,
    /// Who answered: `local`, `recursor`, `cache`, `handler`...
    pub answered_by: &'static str,
    /// How long it took.
    pub took: Duration,
}
