//! Refuses plans that delete too much. Pure.

use crate::plan::Plan;

/// Number of deletions that need no confirmation, whatever the zone's size.
const FREE_DELETIONS: usize = 10;

/// Share of the owned names, in percent, that may be deleted without confirmation.
const FREE_PERCENT: usize = 10;

/// Checks a plan. `owned` is the number of owned names, `wanted` the number of wanted records, and
/// `confirmed` the number of deletions that the operator allows.
pub fn check(plan: &Plan, owned: usize, wanted: usize, confirmed: Option<usize>) -> Result<(), Refusal> {
    let deletions = plan.deletions();
    if deletions == 0 || confirmed.is_some_and(|confirmed| deletions <= confirmed) {
        return Ok(());
    }
    if wanted == 0 {
        return Err(Refusal::EmptySource { deletions });
    }
    let limit = FREE_DELETIONS.max(owned * FREE_PERCENT / 100);
    if deletions > limit { Err(Refusal::TooMany { deletions, owned, limit }) } else { Ok(()) }
}

/// Reason why a plan needs confirmation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No record is wanted.
    #[error(
        "the documents want no records, which would delete {deletions} names; check the documents, or allow \
         it with --confirm-deletions {deletions}"
    )]
    EmptySource {
        /// Number of names to delete.
        deletions: usize,
    },
    /// The plan deletes more names than the limit.
    #[error(
        "{deletions} of {owned} names would be deleted, above the limit of {limit}; check filters and documents, \
         or allow it with --confirm-deletions {deletions}"
    )]
    TooMany {
        /// Number of names to delete.
        deletions: usize,
        /// Number of owned names.
        owned: usize,
        /// Number of deletions that need no confirmation.
        limit: usize,
    },
}
