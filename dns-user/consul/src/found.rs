//! Result of a search: records, or the reason for their absence.

use crate::record::Record;

/// Records that answer a question.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) answers: Vec<Record>,
    /// Records that save the client a further query.
    pub(crate) additional: Vec<Record>,
    /// Whether the SOA is included if there are no answers.
    pub(crate) soa: bool,
    /// Whether the answer depends on the client's location in the network.
    pub(crate) for_client: bool,
}

/// Reason for the lack of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    NoSuchName,
    /// SERVFAIL without records: the authoritative agent is unreachable or the token lacks
    /// permission.
    Server,
}
