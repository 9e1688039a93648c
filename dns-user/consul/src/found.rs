//! Result of a search: records, or the reason for their absence.

use crate::record::Record;

/// Records that answer a question, or a host name that one of them leads to.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) answers: Vec<Record>,
    /// Records that spare the client a question.
    pub(crate) additional: Vec<Record>,
    /// Whether the SOA goes along where there are no answers.
    pub(crate) soa: bool,
    /// Whether the answer was made for the client's place in the network.
    pub(crate) for_client: bool,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    NoSuchName,
    /// Bare SERVFAIL: the authoritative agent is unreachable or the token lacks permission.
    Server,
}
