//! Sends transactions in groups, and isolates the ones that make a group fail.

use std::future::Future;

use super::{Progress, ProviderError, TransactionResult};

/// Number of refused groups in a batch after which failing transactions are no longer isolated.
const MAX_REFUSALS: usize = 64;

/// Sends a group of transactions in one message, which succeeds or fails as a whole.
pub(super) trait GroupSender: Send {
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
pub(super) async fn send_groups<Sender: GroupSender>(
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
