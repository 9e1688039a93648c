//! Resolves conflicts between documents that want the same name.

use std::collections::BTreeMap;

use super::{Plan, Reason};
use crate::record::{Record, RecordType};

/// Wanted sets of one name and set identifier, by type.
pub(super) type Candidates<'a> = BTreeMap<RecordType, Vec<&'a Record>>;

/// Drops CNAMEs where other types of the same name are wanted, under any set identifier.
pub(super) fn drop_conflicting_aliases<'a: 'b, 'b>(
    rows: impl Iterator<Item = &'b mut Candidates<'a>>,
    plan: &mut Plan,
) {
    let mut rows: Vec<_> = rows.collect();
    let is_other = |record_type: &RecordType| *record_type != RecordType::CNAME;
    if !rows.iter().any(|row| row.keys().any(is_other)) {
        return;
    }
    for alias in rows.iter_mut().filter_map(|row| row.remove(&RecordType::CNAME)).flatten() {
        plan.note(alias, Reason::AliasConflict);
    }
}

/// Merges candidates into one set.
///
/// Addresses of all candidates are combined. For other types, the candidate with the resource of
/// the existing set wins, or else the one with the fewest, then the least targets. `None` without
/// candidates.
pub(super) fn merge(candidates: &[&Record], current: Option<&Record>) -> Option<Record> {
    let resource = current.map_or("", |current| current.labels.resource());
    let holder =
        candidates.iter().find(|candidate| !resource.is_empty() && candidate.labels.resource() == resource);
    let least = || candidates.iter().min_by(|a, b| order(a).cmp(&order(b)));
    let mut merged = (*holder.or_else(least)?).clone();
    if merged.record_type.is_address() {
        for candidate in candidates {
            merged.targets.extend(candidate.targets.iter().cloned());
        }
        merged.ttl = candidates.iter().filter_map(|candidate| candidate.ttl.filter(|ttl| *ttl > 0)).min();
    }
    Some(merged)
}

/// Returns the sort key by preference. A set without targets comes last, because it gives no
/// answer.
fn order(record: &Record) -> (bool, usize, Vec<&str>, &str) {
    let targets: Vec<&str> = record.targets.iter().map(|target| target.as_str()).collect();
    (targets.is_empty(), targets.len(), targets, record.labels.resource())
}
