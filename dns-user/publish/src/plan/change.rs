//! Result of a plan.

use std::fmt;

use crate::record::{Name, Record, RecordType};

/// Changes, and wanted records without effect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Changes by name, in order.
    pub changes: Vec<NameChange>,
    /// Notes on wanted records without effect, for display and metrics.
    pub notes: Vec<Note>,
}

impl Plan {
    /// Returns whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Returns the changes of all names.
    pub fn actions(&self) -> impl Iterator<Item = &Action> {
        self.changes.iter().flat_map(|change| &change.actions)
    }

    /// Returns the number of names that lose a record without a replacement.
    pub fn deletions(&self) -> usize {
        self.changes.iter().filter(|change| change.is_deletion()).count()
    }

    /// Returns the plan without the records that names lose without a replacement.
    pub fn without_deletions(&self) -> Self {
        let mut kept = self.clone();
        for change in kept.changes.iter_mut().filter(|change| change.is_deletion()) {
            change.actions.retain(|action| !matches!(action, Action::Delete(_)));
        }
        kept.changes.retain(|change| !change.actions.is_empty());
        kept
    }

    /// Adds a note on a record.
    pub(crate) fn note(&mut self, record: &Record, reason: Reason) {
        let note = Note { name: record.name.clone(), record_type: record.record_type, reason };
        self.notes.push(note);
    }
}

/// Changes of one name. They are applied together, with their owner records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameChange {
    /// Name of all records in `actions`.
    pub name: Name,
    /// At most one change for each type and set identifier; deletions come first.
    pub actions: Vec<Action>,
}

impl NameChange {
    /// Returns whether the name loses a record without a replacement.
    pub fn is_deletion(&self) -> bool {
        self.deleted().next().is_some() && !self.is_creation()
    }

    /// Returns the sets to delete.
    pub fn deleted(&self) -> impl Iterator<Item = &Record> {
        self.actions.iter().filter_map(|action| match action {
            Action::Delete(record) => Some(record),
            _ => None,
        })
    }

    /// Returns whether the name gains a record.
    pub fn is_creation(&self) -> bool {
        self.actions.iter().any(|action| matches!(action, Action::Create(_)))
    }
}

/// Change of one record set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Creates a record set that does not exist.
    Create(Record),
    /// Replaces a set, or only its labels.
    Update {
        /// Record set as the provider listed it.
        before: Record,
        /// Set to write. Without a TTL it keeps the old one.
        after: Record,
    },
    /// Deletes a record set, given as listed.
    Delete(Record),
    /// Deletes the owner record and keeps the set.
    Release(Record),
    /// Deletes the texts of one owner from an owner record that has no record.
    DropOrphan(Record),
}

/// One line that starts with `+`, `~`, `-` or `=`.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create(record) => write!(f, "+ {record}"),
            Self::Update { before, after } => match change(before, after) {
                Some(change) => write!(f, "~ {} {}: {change}", before.name, before.record_type),
                None => write!(f, "~ {before} -> {after}"),
            },
            Self::Delete(record) => write!(f, "- {record}"),
            Self::Release(record) => write!(f, "= {record}: remains without an owner"),
            Self::DropOrphan(record) => {
                write!(
                    f,
                    "- {} {}: owner record of {:?}",
                    record.name,
                    record.record_type,
                    record.labels.owner()
                )
            }
        }
    }
}

fn change(before: &Record, after: &Record) -> Option<String> {
    let mut parts = Vec::new();
    if let (Some(new), old) = (after.ttl, before.ttl)
        && Some(new) != old
    {
        parts.push(format!("ttl {} -> {new}", old.unwrap_or(0)));
    }
    parts.extend(before.targets.difference(&after.targets).map(|target| format!("-{target}")));
    parts.extend(after.targets.difference(&before.targets).map(|target| format!("+{target}")));
    if before.labels.owner() != after.labels.owner() {
        let shown = |owner: &str| if owner.is_empty() { "none".to_owned() } else { format!("{owner:?}") };
        parts.push(format!("owner {} -> {}", shown(before.labels.owner()), shown(after.labels.owner())));
    }
    if before.properties != after.properties {
        parts.push(format!("properties {:?} -> {:?}", before.properties, after.properties));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// A wanted record without effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Name of the record.
    pub name: Name,
    /// Type of the record.
    pub record_type: RecordType,
    /// Cause, with the remedy in its text.
    pub reason: Reason,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.name, self.record_type, self.reason)
    }
}

/// Reason why a wanted record has no effect, or only a partial one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// The record, or another one with its name, belongs to another owner or to none.
    #[error("the name has a record of {}; take it over with `adopt` or `transfer-owner`", Owner(owner))]
    Foreign {
        /// Owner label; empty if there is none.
        owner: String,
    },
    /// The domain filter excludes the name.
    #[error("the name is out of scope: domain-filter or exclude-domains excludes it")]
    OutOfDomain,
    /// The record is owned, but the domain filter now excludes it.
    #[error("no longer in scope of domain-filter and exclude-domains; `retire` with its domain deletes it")]
    LeftBehind,
    /// The type is not managed.
    #[error("records of this type are not managed; add the type to managed_record_types")]
    UnmanagedType,
    /// A record of an unmanaged type occupies the name.
    #[error(
        "the name has a record of type {record_type}, and a CNAME excludes all others; remove one of them"
    )]
    Occupied {
        /// Type of the record in the way.
        record_type: RecordType,
    },
    /// The policy forbids the deletion that a change of type requires.
    #[error(
        "blocked by the record of type {record_type}, which the policy does not allow to delete; use policy sync"
    )]
    NeedsDeletion {
        /// Type of the record in the way.
        record_type: RecordType,
    },
    /// The documents want both a CNAME and another type.
    #[error("the CNAME is dropped because other records of the name are wanted; remove one of them")]
    AliasConflict,
    /// No address is currently known.
    #[error("no target is known; existing records stay unchanged")]
    NoTargets,
    /// The document that wanted the record is unreadable.
    #[error("its document cannot be read; the record stays unchanged until it can")]
    SourceUnreadable,
    /// The owner record belongs to no record.
    #[error(
        "the owner record of {} has no record; if its publisher is gone, `retire --orphans={owner}` deletes it",
        Owner(owner)
    )]
    Orphan {
        /// Owner label; empty if there is none.
        owner: String,
    },
    /// One owner record matches two records, by the new and the old form of names.
    #[error("its owner record also matches another record; neither changes until `adopt` names the owner")]
    Ambiguous,
    /// No zone contains the name.
    #[error("none of the provider's zones contains the name")]
    NoZone,
    /// The CNAME's target is its own name.
    #[error("the CNAME points to its own name; correct its target")]
    SelfAlias,
    /// The zone's own NS records.
    #[error("the server manages the NS records of its zone; change them there, and remove the record here")]
    ApexServers,
    /// Resolvers never see the name, because another record redirects them.
    #[error(
        "resolvers do not see the name: {at} has a record of type {record_type}; publish it in that zone"
    )]
    Hidden {
        /// Name of the delegation or redirection.
        at: Name,
        /// NS or DNAME.
        record_type: RecordType,
    },
    /// Another writer creates the name again after every deletion.
    #[error(
        "kept, because another writer with the same owner creates it again after every deletion; give each \
         publisher its own txt-owner-id"
    )]
    Contested,
}

/// Formats an owner within a sentence.
struct Owner<'a>(&'a str);

impl fmt::Display for Owner<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "" => f.write_str("no owner"),
            owner => write!(f, "owner {owner:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_single_sentences() {
        let (record_type, at) = (RecordType::A, Name::root());
        let reasons = [
            Reason::Foreign { owner: String::new() },
            Reason::OutOfDomain,
            Reason::LeftBehind,
            Reason::UnmanagedType,
            Reason::Occupied { record_type },
            Reason::NeedsDeletion { record_type },
            Reason::AliasConflict,
            Reason::NoTargets,
            Reason::SourceUnreadable,
            Reason::Orphan { owner: String::new() },
            Reason::Ambiguous,
            Reason::NoZone,
            Reason::SelfAlias,
            Reason::ApexServers,
            Reason::Hidden { at, record_type },
            Reason::Contested,
        ];
        for reason in reasons {
            let text = reason.to_string();
            assert!(!text.contains("  ") && !text.contains('\n') && !text.contains('#'), "{text:?}");
        }
    }
}
