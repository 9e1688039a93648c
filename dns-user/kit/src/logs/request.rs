//! Description of a userspace request, for the log and the tap.

use std::{net::SocketAddr, time::Duration};

use dns_core::name::Name;

/// A request answered in userspace.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Name in the question.
    pub name: &'a Name,
    /// QTYPE of the question.
    pub query_type: u16,
    /// RCODE of the reply.
    pub rcode: u8,
    /// Number of answers in the reply.
    pub answers: u16,
    /// Size of the reply in bytes.
    pub bytes: usize,
    /// Address and port of the client.
    pub client: SocketAddr,
    /// Transport protocol: `udp` or `tcp`.
    pub transport: &'static str,
    /// Source of the answer: `local`, `recursor`, `cache`, `handler`...
    pub answered_by: &'static str,
    /// Time from receiving the query to the reply.
    pub took: Duration,
}
