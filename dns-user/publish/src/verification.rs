//! Verifies changes of every provider by what the service holds afterwards.
//!
//! "Accepted" is no proof: a server may answer NOERROR and leave a record out (RFC 2136, section 3.4.2.2), and the
//! webhook protocol has no result for a single record. What a provider cannot prove itself is listed again; what the
//! listing lacks is repeated once, deletions first, and listed once more.

use std::collections::BTreeMap;

use crate::{
    provider::{
        Batch, OnConflict, Progress, Provider, ProviderError, Step, Transaction, TransactionResult,
    },
    record::{Key, Record, by_key, has_set},
};

/// Record sets of a zone.
pub(crate) type Found = BTreeMap<Key, Record>;

/// Applies a batch. Every result is final: no transaction stays [`TransactionResult::Unproven`].
pub(crate) async fn apply(
    provider: &mut dyn Provider,
    batch: &Batch,
    progress: Progress<'_>,
) -> Vec<TransactionResult> {
    let mut results = provider.apply(batch, progress).await;
    let mut is_repeated = false;
    loop {
        let unproven = unproven(&results);
        if unproven.is_empty() {
            return results;
        }
        let found = match list_zone(provider, &batch.zone).await {
            Ok(found) => found,
            Err(error) => {
                for (place, _) in unproven {
                    results[place] = TransactionResult::Failed(error.clone());
                }
                return results;
            }
        };
        let mut rest = Vec::new();
        for (place, reason) in unproven {
            match remainder(&batch.transactions[place], &found) {
                Remainder::Nothing => results[place] = TransactionResult::Applied,
                Remainder::Changed => results[place] = TransactionResult::Conflict,
                Remainder::Steps(_) if is_repeated => {
                    results[place] = TransactionResult::Failed(reason);
                }
                Remainder::Steps(steps) => rest.push((place, steps)),
            }
        }
        is_repeated = true;
        repeat(provider, batch, rest, &mut results).await;
    }
}

/// Returns the places of unproven results, with the error that each becomes.
fn unproven(results: &[TransactionResult]) -> Vec<(usize, ProviderError)> {
    let mut found = Vec::new();
    for (place, result) in results.iter().enumerate() {
        if let TransactionResult::Unproven(reason) = result {
            found.push((place, reason.clone()));
        }
    }
    found
}

async fn list_zone(provider: &mut dyn Provider, id: &str) -> Result<Found, ProviderError> {
    let zones = provider.list().await?;
    let Some(zone) = zones.into_iter().find(|zone| zone.id == id) else {
        return Err(ProviderError::Settings(format!(
            "the zone {id} is no longer served; the changes are unknown, and the next round decides"
        )));
    };
    Ok(by_key(zone.content?))
}

/// Sends what is left of transactions again: all deletions, then the rest of each whose deletions were accepted.
///
/// Knot with automatic signing counts the signatures of deleted records as other data at the name, and ignores a
/// CNAME in the same message; in the next one they are gone.
async fn repeat(
    provider: &mut dyn Provider,
    batch: &Batch,
    rest: Vec<(usize, Vec<Step>)>,
    results: &mut [TransactionResult],
) {
    let mut deletions = Vec::new();
    let mut additions = Vec::new();
    for (place, steps) in rest {
        let (deleted, added): (Vec<Step>, Vec<Step>) = steps
            .into_iter()
            .partition(|step| matches!(step, Step::Delete(_)));
        if !deleted.is_empty() {
            deletions.push((place, deleted));
        }
        if added.iter().any(Step::is_change) {
            additions.push((place, added));
        }
    }
    for part in [deletions, additions] {
        let mut places = Vec::new();
        let mut transactions = Vec::new();
        for (place, steps) in part {
            if matches!(results[place], TransactionResult::Unproven(_)) {
                let name = batch.transactions[place].name.clone();
                places.push(place);
                transactions.push(Transaction { name, steps });
            }
        }
        if transactions.is_empty() {
            continue;
        }
        let repeated = Batch {
            zone: batch.zone.clone(),
            on_conflict: OnConflict::Isolate,
            transactions,
        };
        let outcomes = provider.apply(&repeated, &|_| {}).await;
        for (place, outcome) in places.into_iter().zip(outcomes) {
            // Accepted steps stay unproven: the next listing proves the whole transaction.
            if matches!(
                outcome,
                TransactionResult::Conflict | TransactionResult::Failed(_)
            ) {
                results[place] = outcome;
            }
        }
    }
}

/// Steps that remain of a transaction that a service accepted.
#[derive(Debug, PartialEq)]
enum Remainder {
    Nothing,
    /// Another writer has changed the records.
    Changed,
    Steps(Vec<Step>),
}

fn remainder(transaction: &Transaction, found: &Found) -> Remainder {
    let mut steps = Vec::new();
    let mut is_done = true;
    for step in &transaction.steps {
        if step.is_done(found) {
            continue;
        }
        is_done = false;
        match step {
            // The set before is deleted, but the one after is missing.
            Step::Create(record) | Step::Replace { after: record, .. }
                if !found.contains_key(&record.key()) =>
            {
                steps.push(Step::Create(record.clone()));
            }
            Step::Replace { .. } | Step::Delete(_) if step.holds(found) => steps.push(step.clone()),
            _ => return Remainder::Changed,
        }
    }
    if is_done {
        Remainder::Nothing
    } else {
        Remainder::Steps(steps)
    }
}

impl Step {
    /// Returns whether the step changes a set.
    fn is_change(&self) -> bool {
        !matches!(self, Self::Require(_) | Self::RequireAbsent(..))
    }

    /// Returns whether what the step states about the sets before holds.
    pub(crate) fn holds(&self, found: &Found) -> bool {
        match self {
            Self::Create(record) => !found.contains_key(&record.key()),
            Self::Replace { before: record, .. } | Self::Delete(record) | Self::Require(record) => {
                is_same(found.get(&record.key()), record)
            }
            Self::RequireAbsent(name, record_type) => !has_set(found, name, *record_type),
        }
    }

    /// Returns whether the sets are as the step leaves them.
    fn is_done(&self, found: &Found) -> bool {
        match self {
            Self::Create(record) | Self::Replace { after: record, .. } => {
                is_same(found.get(&record.key()), record)
            }
            Self::Delete(record) => !is_same(found.get(&record.key()), record),
            Self::Require(_) | Self::RequireAbsent(..) => true,
        }
    }
}

/// Returns whether a set has the wanted data. Services may keep other TTLs and properties.
fn is_same(found: Option<&Record>, wanted: &Record) -> bool {
    found.is_some_and(|found| found.targets == wanted.targets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RecordType;

    #[test]
    fn only_other_targets_are_missing() {
        let record = |targets: &[&str]| {
            Record::parse("a.org", RecordType::A, targets.iter().copied()).unwrap()
        };
        let wanted = record(&["192.0.2.1", "192.0.2.2"]);
        let mut other_ttl = record(&["192.0.2.2", "192.0.2.1"]);
        other_ttl.ttl = Some(7);
        for (found, expected) in [
            (None, false),
            (Some(record(&["192.0.2.1"])), false),
            (Some(record(&["192.0.2.1", "192.0.2.3"])), false),
            (Some(other_ttl), true),
            (Some(wanted.clone()), true),
        ] {
            assert_eq!(is_same(found.as_ref(), &wanted), expected, "{found:?}");
        }
    }
}
