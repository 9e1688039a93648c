//! Refuses plans that delete too much. Pure.

use crate::plan::Plan;

/// Deletions that need no confirmation, whatever the zone's size.
const FREE_DELETIONS: usize = 10;

/// Share of our names, in percent, that may be deleted without confirmation.
const FREE_PERCENT: usize = 10;

/// Checks a plan. `owned` counts the names that are ours, `wanted` the records that the
/// sources want, and `confirmed` is the number of deletions that the operator allows.
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

/// A plan that needs confirmation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The sources want nothing.
    #[error(
        "the sources want no record at all, which would delete {deletions} names; check the documents, \
         or allow it with --confirm-deletions {deletions}"
    )]
    EmptySource {
        /// Names that would be deleted.
        deletions: usize,
    },
    /// More names would go than usual.
    #[error(
        "{deletions} of {owned} names would be deleted, above the limit of {limit}; check filters and documents, \
         or allow it with --confirm-deletions {deletions}"
    )]
    TooMany {
        /// Names that would be deleted.
        deletions: usize,
        /// Names that are ours.
        owned: usize,
        /// Deletions that need no confirmation.
        limit: usize,
    },
}
