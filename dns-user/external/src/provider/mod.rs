//! What a provider does: it lists its zones, and applies batches of changes.

use std::time::Duration;

use futures::future::BoxFuture;

use crate::record::{Name, Record, RecordType};

/// A DNS service that holds zones.
pub trait Provider: Send {
    /// Name in `spec.provider`.
    fn kind(&self) -> &'static str;

    /// Adjusts wishes to what the service can hold: default and minimum TTL, aliases.
    /// It runs before the plan, so that a second plan is empty.
    fn adjust(&self, _desired: &mut Vec<Record>) {}

    /// Lists all zones completely. A zone that cannot be listed to its end is reported
    /// as failed, and contributes no records; an error means that no zone is known.
    fn list(&mut self) -> BoxFuture<'_, Result<Listing, ProviderError>>;

    /// Applies a batch that was planned on the last listing. `progress` is called with the
    /// number of transactions that are done.
    fn apply<'a>(
        &'a mut self,
        batch: &'a Batch,
        progress: &'a (dyn Fn(usize) + Send + Sync),
    ) -> BoxFuture<'a, Outcome>;
}

/// All record sets of a provider's zones at one moment.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// Sets of all types, including owner records and those of others.
    pub records: Vec<Record>,
    /// Every zone, in the order of the configuration.
    pub zones: Vec<ZoneState>,
}

/// A zone and whether it was listed.
#[derive(Debug, Clone)]
pub struct ZoneState {
    /// Apex.
    pub name: Name,
    /// Why its records are unknown.
    pub failure: Option<ProviderError>,
}

/// Transactions in the order in which they are applied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Each is applied as a whole, or not at all.
    pub transactions: Vec<Transaction>,
}

/// Changes of one name and its owner records, which happen together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transaction {
    /// Name that the documents contain.
    pub name: Name,
    /// Changes and requirements.
    pub steps: Vec<Step>,
}

/// One change of a record set, or a requirement.
///
/// Every change states the old set: a provider refuses the transaction if it finds another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The set must not exist; it is created.
    Create(Record),
    /// The set must be as it was listed; it is replaced.
    Replace {
        /// Set as listed.
        before: Record,
        /// Set to write.
        after: Record,
    },
    /// The set must be as it was listed; it is deleted.
    Delete(Record),
    /// The set must be as it was listed; it stays.
    Require(Record),
    /// No set of this name and type must exist.
    RequireAbsent(Name, RecordType),
}

/// Results of a batch.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// One result per transaction, in the batch's order.
    pub results: Vec<TransactionResult>,
}

/// What became of a transaction.
#[derive(Debug, Clone)]
pub enum TransactionResult {
    /// All its changes are visible.
    Applied,
    /// Another writer was there first: list again and plan anew.
    Conflict,
    /// The provider refused it, or its fate is unknown (the next listing decides).
    Failed(ProviderError),
}

/// Failure of a provider, for status and log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProviderError {
    /// The configuration is unusable.
    #[error("{0}")]
    Settings(String),
    /// The server cannot be reached or broke off.
    #[error("{server}: {reason}")]
    Unreachable {
        /// Address or URL.
        server: String,
        /// Error of the transport.
        reason: String,
    },
    /// The server said no.
    #[error("{server} refused: {reason}")]
    Refused {
        /// Address or URL.
        server: String,
        /// Code and remedy.
        reason: String,
    },
    /// The server's answer is malformed or incomplete.
    #[error("{server}: bad answer: {reason}")]
    BadAnswer {
        /// Address or URL.
        server: String,
        /// Defect.
        reason: String,
    },
    /// The server asks to slow down.
    #[error("{server} throttles; the next attempt waits {} s", wait.as_secs())]
    Throttled {
        /// Address or URL.
        server: String,
        /// Pause before the next attempt.
        wait: Duration,
    },
    /// A single name exceeds a limit of the provider.
    #[error("{name}: {reason}")]
    TooBig {
        /// Name of the transaction.
        name: Name,
        /// Limit and remedy.
        reason: String,
    },
}
