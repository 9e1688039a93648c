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
        let is_deletion = |change: &&NameChange| {
            let deletes = change.actions.iter().any(|action| matches!(action, Action::Delete(_)));
            deletes && !change.actions.iter().any(|action| matches!(action, Action::Create(_)))
        };
        self.changes.iter().filter(is_deletion).count()
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
    /// The type is not managed.
    #[error("records of this type are not managed; add the type to managed_record_types")]
    UnmanagedType,
    /// A record of an unmanaged type occupies the name.
    #[error(
        "the name has a record of type {record_type}, and a CNAME excludes all others; remove one of
    #them"
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
    /// The zone of the name is unavailable.
    #[error("cannot list zone {zone}; nothing changes there")]
    ZoneUnavailable {
        /// Apex of the zone in question.
        zone: Name,
    },
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
