//! Providers list zones and apply batches of changes.

pub mod aws;
pub mod coredns;
mod http;
mod parameters;
pub mod rfc2136;
pub mod webhook;

use std::time::Duration;

use futures_util::future::BoxFuture;

use self::{aws::Aws, coredns::CoreDns, rfc2136::Rfc2136, webhook::Webhook};
pub use self::{http::TlsFiles, parameters::Parameters};
use crate::record::{Name, Record, RecordType};

/// Providers by name in `spec.provider`. A new provider is a row here, a variant of
/// `update_record::Provider` and rows in its table of parameters.
const PROVIDERS: &[ProviderFactory] = &[
    ProviderFactory {
        kind: "rfc2136",
        open: |given| Ok(Box::new(Rfc2136::new(rfc2136::Settings::from_parameters(given)?))),
    },
    ProviderFactory {
        kind: "coredns",
        open: |given| Ok(Box::new(CoreDns::new(coredns::Settings::from_parameters(given)?)?)),
    },
    ProviderFactory {
        kind: "aws",
        open: |given| Ok(Box::new(Aws::new(aws::Settings::from_parameters(given)?)?)),
    },
    ProviderFactory {
        kind: "webhook",
        open: |given| Ok(Box::new(Webhook::new(webhook::Settings::from_parameters(given)?)?)),
    },
];

/// Constructor of a provider.
struct ProviderFactory {
    kind: &'static str,
    open: fn(&Parameters) -> Result<Box<dyn Provider>, ProviderError>,
}

/// Opens the provider with this name, without sending a request.
pub fn open(kind: &str, parameters: &Parameters) -> Result<Box<dyn Provider>, ProviderError> {
    let Some(factory) = PROVIDERS.iter().find(|factory| factory.kind == kind) else {
        let known: Vec<&str> = PROVIDERS.iter().map(|factory| factory.kind).collect();
        let message =
            format!("provider {kind:?} is not supported at run time; use one of {}", known.join(", "));
        return Err(ProviderError::Settings(message));
    };
    (factory.open)(parameters)
}

/// A DNS service that holds zones.
pub trait Provider: Send {
    /// Asks the service to adjust wanted records, before [`Provider::adjust`] applies the result.
    fn prepare<'a>(&'a mut self, _desired: &'a [Record]) -> BoxFuture<'a, Result<(), ProviderError>> {
        Box::pin(async { Ok(()) })
    }

    /// Adjusts wanted records to the capabilities of the service: minimum TTL, aliases, properties.
    /// It runs before the plan, so that a second plan is empty.
    fn adjust(&self, _desired: &mut Vec<Record>) {}

    /// Returns whether the service may hold records of a name, once it was listed.
    fn serves(&self, _name: &Name) -> bool {
        true
    }

    /// Lists all zones. An error means that not even the zones are known; a zone that cannot be
    /// listed completely carries its own error.
    fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>>;

    /// Applies a batch that was planned on the last listing. `progress` is called with the number
    /// of transactions completed since the last call.
    fn apply<'a>(&'a mut self, batch: &'a Batch, progress: Progress<'a>) -> BoxFuture<'a, Outcome>;
}

/// Callback for the number of completed transactions.
pub type Progress<'a> = &'a (dyn Fn(usize) + Send + Sync);

/// A zone, with all its record sets at the time of listing.
#[derive(Debug, Clone)]
pub struct Zone {
    /// Identity within the provider.
    pub id: String,
    /// Apex; every name of the zone is at or below it.
    pub apex: Name,
    /// Clients that see the zone.
    pub visibility: Visibility,
    /// Sets of all types, including owner records and foreign ones, or the error if the zone could
    /// not be listed.
    pub records: Result<Vec<Record>, ProviderError>,
    /// Problems of unreadable foreign data, which is left unchanged.
    pub warnings: Vec<String>,
}

/// Visibility of a zone. A name belongs to the longest public zone, and to every private zone that
/// contains it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Visibility {
    /// Visible to all clients on the Internet.
    #[default]
    Public,
    /// Visible within a private network only.
    Private,
}

/// Transactions in the order in which they are applied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Id of the zone that contains all names.
    pub zone: String,
    /// Whether transactions that share a message with a conflicting one are retried in smaller
    /// groups. Otherwise all of them count as conflicts, and the next listing decides.
    pub isolate: bool,
    /// Transactions, each applied as a whole or not at all.
    pub transactions: Vec<Transaction>,
}

/// Changes of one name and its owner records, applied atomically.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transaction {
    /// Name in the documents.
    pub name: Name,
    /// Changes and requirements, applied atomically.
    pub steps: Vec<Step>,
}

/// One change of a record set, or a requirement.
///
/// Every change states the old set: a provider refuses the transaction if the set differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Creates a set, which must not exist.
    Create(Record),
    /// Replaces a set, which must be as listed.
    Replace {
        /// Record set as the provider listed it.
        before: Record,
        /// Record set that replaces `before`.
        after: Record,
    },
    /// Deletes a set, which must be as listed.
    Delete(Record),
    /// Requires a set to be as listed, without a change.
    Require(Record),
    /// Requires that no set of this name and type exists.
    RequireAbsent(Name, RecordType),
}

/// Results of a batch.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// One result per transaction, in the batch's order.
    pub results: Vec<TransactionResult>,
}

/// Result of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransactionResult {
    /// All changes were applied.
    Applied,
    /// The zone has changed since it was listed; list and plan again.
    Conflict,
    /// The provider refused it, or its outcome is unknown (the next listing decides).
    Failed(ProviderError),
}

/// Failure of a provider, for status and log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProviderError {
    /// The configuration is unusable.
    #[error("{0}")]
    Settings(String),
    /// The server is unreachable, or the connection broke.
    #[error("{server}: {reason}")]
    Unreachable {
        /// Address or URL of the server.
        server: String,
        /// Cause of the failure, from the transport.
        reason: String,
    },
    /// The server rejected the request.
    #[error("{server} refused: {reason}")]
    Refused {
        /// Address or URL of the server.
        server: String,
        /// Error code of the server, and a remedy.
        reason: String,
    },
    /// The server's response is malformed or incomplete.
    #[error("{server}: invalid response: {reason}")]
    BadAnswer {
        /// Address or URL of the server.
        server: String,
        /// Defect of the response.
        reason: String,
    },
    /// The server throttles requests.
    #[error("{server} is throttling; next attempt in {} s", wait.as_secs())]
    Throttled {
        /// Address or URL of the server.
        server: String,
        /// Pause before the next attempt.
        wait: Duration,
    },
    /// The provider cannot represent the records of one name.
    #[error("{name}: {reason}")]
    Unfit {
        /// Name of the transaction.
        name: Name,
        /// The exceeded limit, and a remedy.
        reason: String,
    },
}

/// Number of refused groups in a batch after which failing transactions are no longer isolated.
const MAX_REFUSALS: usize = 64;

/// Sends a group of transactions in one message, which succeeds or fails as a whole.
trait GroupSender: Send {
    /// A transaction in the provider's form.
    type Item: Send + Sync;

    /// Returns how many of the first transactions fit into one message; at least 1.
    fn fitting(&self, transactions: &[Self::Item]) -> usize;

    fn send(&mut self, group: &[Self::Item]) -> impl Future<Output = TransactionResult> + Send;
}

/// Sends all transactions.
///
/// A refused group is halved until its failing transactions are isolated; a group in conflict with
/// another writer is halved only if `isolate` is set. If the server is unreachable, or after too
/// many refusals, the rest fails with the last error.
async fn send_groups<Sender: GroupSender>(
    sender: &mut Sender,
    transactions: &[Sender::Item],
    isolate: bool,
    progress: Progress<'_>,
) -> Vec<TransactionResult> {
    let mut results = Vec::with_capacity(transactions.len());
    let mut refusals = 0;
    // Lengths of the next groups, the first one last.
    let mut halves: Vec<usize> = Vec::new();
    while results.len() < transactions.len() {
        let rest = &transactions[results.len()..];
        let fitting = sender.fitting(rest).clamp(1, rest.len());
        let size = halves.pop().map_or(fitting, |half| half.min(fitting));
        let result = sender.send(&rest[..size]).await;
        let is_broken = matches!(
            result,
            TransactionResult::Failed(ProviderError::Unreachable { .. } | ProviderError::Throttled { .. })
        );
        refusals += usize::from(result != TransactionResult::Applied);
        if is_broken || refusals > MAX_REFUSALS {
            results.resize(transactions.len(), result);
        } else if size > 1
            && match result {
                TransactionResult::Applied => false,
                TransactionResult::Conflict => isolate,
                TransactionResult::Failed(_) => true,
            }
        {
            halves.extend([size - size / 2, size / 2]);
            continue;
        } else {
            results.resize(results.len() + size, result);
        }
        progress(size);
    }
    results
}
