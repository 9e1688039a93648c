//! Decides which deletions need a confirmation, and which ones another writer keeps undoing. Pure.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

use crate::{
    plan::{Action, NameChange, Plan},
    record::{Key, Name, Record},
};

/// Number of deletions within [`WINDOW`] that need no confirmation, whatever the zone's size.
const FREE_DELETIONS: usize = 10;

/// Share of the owned names, in percent, that may be deleted within [`WINDOW`] without confirmation.
const FREE_PERCENT: usize = 10;

/// Time over which deletions, and conflicts over a name, are counted.
const WINDOW: Duration = Duration::from_hours(1);

/// Number of deletions of a set after which it is kept if it exists again.
const MAX_REPEATED_DELETIONS: u32 = 2;

/// Number of creations of a set, without a deletion by this publisher, that shows a second writer.
const REPEATED_CREATIONS: u32 = 3;

/// Size of a zone and of its sources, by which deletions are judged.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// Number of owned names in the zone.
    pub owned: usize,
    /// Number of wanted records.
    pub wanted: usize,
    /// Number of names deleted in the last hour without a confirmation.
    pub recent: usize,
}

/// Checks a plan. `confirmed` is the number of deletions that the operator allows.
pub fn check(plan: &Plan, scale: Scale, confirmed: Option<usize>) -> Result<(), Refusal> {
    let Scale { owned, wanted, recent } = scale;
    let deletions = plan.deletions();
    if deletions == 0 || confirmed.is_some_and(|confirmed| deletions <= confirmed) {
        return Ok(());
    }
    if wanted == 0 {
        return Err(Refusal::EmptySource { deletions });
    }
    let limit = FREE_DELETIONS.max((owned + recent) * FREE_PERCENT / 100);
    match deletions + recent > limit {
        true => Err(Refusal::TooMany { deletions, owned, recent, limit }),
        false => Ok(()),
    }
}

/// Reason why the deletions of a plan need confirmation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Refusal {
    #[error(
        "the documents want no records, which would delete {deletions} names; check the documents, or allow \
         it with `bosh-dns-publish apply --confirm-deletions {deletions}`"
    )]
    EmptySource { deletions: usize },
    #[error(
        "{deletions} of {owned} names would be deleted{}, above the limit of {limit} in an hour; the other \
         changes are made; check filters and documents, or allow the deletions with `bosh-dns-publish apply \
         --confirm-deletions {deletions}`",
        Recent(*recent)
    )]
    TooMany { deletions: usize, owned: usize, recent: usize, limit: usize },
}

impl Refusal {
    /// Returns the number of deletions that wait.
    pub fn deletions(&self) -> usize {
        match self {
            Self::EmptySource { deletions } | Self::TooMany { deletions, .. } => *deletions,
        }
    }
}

/// Formats earlier deletions within a sentence.
struct Recent(usize);

impl std::fmt::Display for Recent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " after {count} others in the last hour"),
        }
    }
}

/// Unconfirmed deletions of the last hour, by zone: seconds since 1970 and number of names. They
/// are saved for the next process, so that a sequence of runs cannot delete everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentDeletions(BTreeMap<String, Vec<(u64, usize)>>);

impl RecentDeletions {
    /// Returns the number of deletions in a zone.
    pub fn count(&self, zone: &str, now: SystemTime) -> usize {
        let of_zone = self.0.get(zone).into_iter().flatten();
        of_zone.filter(|(at, _)| is_recent(*at, now)).map(|(_, count)| count).sum()
    }

    /// Adds deletions, and forgets those before the last hour.
    pub fn add(&mut self, zone: &str, count: usize, now: SystemTime) {
        for deletions in self.0.values_mut() {
            deletions.retain(|(at, _)| is_recent(*at, now));
        }
        self.0.retain(|_, deletions| !deletions.is_empty());
        if count > 0 {
            self.0.entry(zone.to_owned()).or_default().push((seconds(now), count));
        }
    }
}

/// A time in the future counts, because the clock was probably set back.
fn is_recent(at: u64, now: SystemTime) -> bool {
    seconds(now).saturating_sub(at) < WINDOW.as_secs()
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Own changes that another writer undoes. Such a writer has the same owner label, because changes
/// of other owners are never touched.
#[derive(Debug, Default)]
pub struct UndoneChanges {
    deleted: HashMap<Key, Repeated>,
    created: HashMap<Key, Repeated>,
}

/// Number of equal changes of one set, and the time of the last one.
#[derive(Debug, Clone, Copy)]
struct Repeated {
    times: u32,
    last: SystemTime,
}

impl UndoneChanges {
    /// Returns whether all sets of a deletion exist again after repeated deletions.
    pub fn keeps(&self, change: &NameChange, now: SystemTime) -> bool {
        self.deleted_before(change, now, MAX_REPEATED_DELETIONS)
    }

    /// Returns whether a change deletes only what was deleted in the last hour. That is not counted
    /// again.
    pub fn has_deleted(&self, change: &NameChange, now: SystemTime) -> bool {
        self.deleted_before(change, now, 1)
    }

    fn deleted_before(&self, change: &NameChange, now: SystemTime, times: u32) -> bool {
        let is_known = |record: &Record| {
            let deleted = self.deleted.get(&record.key());
            deleted.is_some_and(|deleted| deleted.times >= times && deleted.is_recent(now))
        };
        change.is_deletion() && change.deleted().all(is_known)
    }

    /// Records that the sets of a name were kept, which prolongs the conflict.
    pub fn kept(&mut self, name: &Name, now: SystemTime) {
        for (_, deleted) in self.deleted.iter_mut().filter(|(key, _)| key.name == *name) {
            deleted.last = now;
        }
    }

    /// Records an applied change. Returns whether a set was created again and again.
    pub fn applied(&mut self, change: &NameChange, now: SystemTime) -> bool {
        let is_replacement = change.deleted().next().is_some();
        for record in change.deleted() {
            self.created.remove(&record.key());
            if change.is_deletion() {
                Repeated::count(&mut self.deleted, record.key(), now);
            }
        }
        let mut is_repeated = false;
        for action in &change.actions {
            let Action::Create(record) = action else { continue };
            self.deleted.remove(&record.key());
            if !is_replacement {
                is_repeated |= Repeated::count(&mut self.created, record.key(), now) >= REPEATED_CREATIONS;
            }
        }
        is_repeated
    }
}

impl Repeated {
    fn is_recent(self, now: SystemTime) -> bool {
        now.duration_since(self.last).is_ok_and(|elapsed| elapsed < WINDOW)
    }

    fn count(changes: &mut HashMap<Key, Self>, key: Key, now: SystemTime) -> u32 {
        let change = changes.entry(key).or_insert(Self { times: 0, last: now });
        let before = if change.is_recent(now) { change.times } else { 0 };
        *change = Self { times: before + 1, last: now };
        change.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RecordType;

    fn deletions(count: usize) -> Plan {
        let change = |number: usize| {
            let record = Record::parse(&format!("n{number}.example.org"), RecordType::A, ["192.0.2.1"]);
            let record = record.unwrap();
            NameChange { name: record.name.clone(), actions: vec![Action::Delete(record)] }
        };
        Plan { changes: (0..count).map(change).collect(), notes: Vec::new() }
    }

    #[test]
    fn deletions_add_up_over_an_hour() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let mut recent = RecentDeletions::default();
        let mut owned = 120;
        let mut check_ten = |minute: u64, recent: &mut RecentDeletions| {
            let now = start + Duration::from_secs(60 * minute);
            let scale = Scale { owned, wanted: owned - 10, recent: recent.count("z", now) };
            let result = check(&deletions(10), scale, None);
            if result.is_ok() {
                recent.add("z", 10, now);
                owned -= 10;
            }
            result.is_ok()
        };
        assert!(check_ten(0, &mut recent));
        assert!(!check_ten(1, &mut recent) && !check_ten(59, &mut recent));
        let text = serde_json::to_string(&recent).unwrap();
        let mut recent: RecentDeletions = serde_json::from_str(&text).unwrap();
        assert!(!check_ten(59, &mut recent), "a restart does not forget");
        assert!(check_ten(61, &mut recent));
        let scale = Scale { owned: 100, wanted: 90, recent: 10 };
        assert!(check(&deletions(10), scale, Some(10)).is_ok(), "a confirmation suffices");
    }

    #[test]
    fn repeatedly_undone_deletion_is_kept() {
        let change = deletions(1).changes.remove(0);
        let now = SystemTime::now();
        let mut undone = UndoneChanges::default();
        for expected in [false, false, true] {
            assert_eq!(undone.keeps(&change, now), expected);
            undone.applied(&change, now);
        }
        assert!(!undone.keeps(&change, now + WINDOW));
        let mut of_both = change.clone();
        let other = Record::parse("n0.example.org", RecordType::TXT, ["text"]).unwrap();
        of_both.actions.push(Action::Delete(other));
        assert!(!undone.keeps(&of_both, now), "sets of other types are counted apart");
        let Action::Delete(record) = change.actions[0].clone() else { unreachable!() };
        let created = NameChange { name: change.name.clone(), actions: vec![Action::Create(record)] };
        // A creation by this publisher ends the conflict.
        assert!(!undone.applied(&created, now) && !undone.keeps(&change, now));
        assert!(!undone.applied(&created, now) && undone.applied(&created, now));
    }
}
