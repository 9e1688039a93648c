//! Names deleted without a confirmation within an hour, which count towards the limit of the guard.
//!
//! A name counts before its deletion is sent: a publisher that is killed meanwhile, or whose response is lost, may have
//! deleted it all the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::{documents::read_json, plan::Plan, record::Name, store::write_json};

/// Time over which deletions, and conflicts over a name, are counted.
pub(crate) const WINDOW: Duration = Duration::from_hours(1);

/// Deleted names by zone, each with seconds since 1970.
type DeletedNames = BTreeMap<String, BTreeMap<String, u64>>;

/// The recent deletions of a provider, by all processes that publish to it.
#[derive(Debug, Default)]
pub struct RecentDeletions {
    /// File of all providers, and the name of this one in it; `None` if no other process is to know them.
    file: Option<(PathBuf, String)>,
    names: DeletedNames,
}

impl RecentDeletions {
    /// Returns the deletions that a file has of a provider, once they are read.
    pub(crate) fn of_file(file: &Path, provider: &str) -> Self {
        Self {
            file: Some((file.to_owned(), provider.to_owned())),
            names: DeletedNames::new(),
        }
    }

    /// Reads the deletions of other processes. After an error the known ones count.
    pub(crate) fn read(&mut self) -> Result<(), String> {
        if let Some((file, provider)) = &self.file {
            let mut all: BTreeMap<String, Value> = read_json(file)?;
            let own = all.remove(provider).unwrap_or_default();
            // Version 1.0.0 counted without names.
            let own: DeletedNames = serde_json::from_value(own).unwrap_or_default();
            for (zone, names) in own {
                self.names.entry(zone).or_default().extend(names);
            }
        }
        Ok(())
    }

    /// Returns the number of recently deleted names of a zone, without the ones that a plan deletes.
    pub(crate) fn count(&self, zone: &str, plan: &Plan, now: SystemTime) -> usize {
        // A name whose deletion is repeated, after an error or because another writer undid it, counts once.
        let planned: BTreeSet<&str> = plan.deleted_names().map(Name::as_str).collect();
        let mut count = 0;
        for (name, at) in self.names.get(zone).into_iter().flatten() {
            count += usize::from(is_recent(*at, now) && !planned.contains(name.as_str()));
        }
        count
    }

    /// Adds the names that a plan deletes, and saves them.
    pub(crate) fn add(&mut self, zone: &str, plan: &Plan, now: SystemTime) {
        if plan.deletions() == 0 {
            return;
        }
        // Workers delete at the same time; the file that both have read would lose what one of them adds. What a
        // command and the running publisher lose in this way comes back with the next deletion.
        static SAVING: Mutex<()> = Mutex::new(());
        let _saving = SAVING.lock();
        // `launch` has reported an unreadable file.
        let _ = self.read();
        let of_zone = self.names.entry(zone.to_owned()).or_default();
        for name in plan.deleted_names() {
            of_zone.insert(name.to_string(), seconds(now));
        }
        for of_zone in self.names.values_mut() {
            // They would otherwise grow with every name that ever was.
            of_zone.retain(|_, at| is_recent(*at, now));
        }
        if let Some((file, provider)) = &self.file {
            let mut all: BTreeMap<String, Value> = read_json(file).unwrap_or_default();
            all.insert(provider.clone(), json!(self.names));
            if let Err(error) = write_json(file, &all) {
                tracing::warn!(
                    file = %file.display(), %error,
                    "cannot save the recent deletions: after a restart the guard allows as many again"
                );
            }
        }
    }
}

/// A time in the future counts, because the clock was probably set back.
fn is_recent(at: u64, now: SystemTime) -> bool {
    seconds(now).saturating_sub(at) < WINDOW.as_secs()
}

fn seconds(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        plan::{Action, NameChange},
        record::{Record, RecordType},
    };

    /// Returns a plan that deletes these names.
    fn deleting(names: &[&str]) -> Plan {
        let mut plan = Plan::default();
        for name in names {
            let record = Record::parse(name, RecordType::A, ["192.0.2.1"]).unwrap();
            plan.changes.push(NameChange {
                name: record.name.clone(),
                actions: vec![Action::Delete(record)],
            });
        }
        plan
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds)
    }

    #[test]
    fn zones_count_deletions_for_an_hour() {
        let mut recent = RecentDeletions::default();
        recent.add("a", &deleting(&["n1", "n2", "n3"]), at(0));
        recent.add("a", &deleting(&["n3", "n4"]), at(100));
        recent.add("b", &deleting(&["n1"]), at(100));
        recent.add("c", &deleting(&[]), at(100));
        for (zone, seconds, planned, expected) in [
            ("a", 100, &[][..], 4),
            ("a", 100, &["n1", "n4", "n5"], 2),
            ("a", 3_599, &[], 4),
            ("a", 3_600, &[], 2),
            ("a", 3_699, &["n3"], 1),
            ("a", 3_700, &[], 0),
            ("b", 3_699, &[], 1),
            ("c", 100, &[], 0),
        ] {
            let count = recent.count(zone, &deleting(planned), at(seconds));
            assert_eq!(count, expected, "{zone} {seconds} {planned:?}");
        }
        // A clock that was set back forgets nothing.
        let early = SystemTime::UNIX_EPOCH;
        assert_eq!(recent.count("a", &Plan::default(), early), 4);
    }

    #[test]
    fn deletions_outlive_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("state/deletions.json");
        let known = |provider: &str| {
            let mut recent = RecentDeletions::of_file(&file, provider);
            recent.read().unwrap();
            recent.count("z", &Plan::default(), at(60))
        };
        let mut one = RecentDeletions::of_file(&file, "shop/a");
        one.read().unwrap();
        one.add("z", &Plan::default(), at(0));
        assert!(!file.exists(), "nothing was deleted");
        one.add("z", &deleting(&["n1", "n2"]), at(0));
        RecentDeletions::of_file(&file, "shop/b").add("z", &deleting(&["n1"]), at(0));
        assert_eq!(
            [known("shop/a"), known("shop/b"), known("shop/c")],
            [2, 1, 0]
        );
        // A command deletes beside the running publisher: each knows what the other one did.
        let mut command = RecentDeletions::of_file(&file, "shop/a");
        command.add("z", &deleting(&["n2", "n3"]), at(30));
        one.add("z", &deleting(&["n4"]), at(40));
        assert_eq!(known("shop/a"), 4);
        one.read().unwrap();
        assert_eq!(one.count("z", &Plan::default(), at(60)), 4);
        // After an hour nothing is left.
        one.add("z", &deleting(&["n5"]), at(3_620));
        let saved: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let left = json!({"n2": 1_000_030, "n3": 1_000_030, "n4": 1_000_040, "n5": 1_003_620});
        assert_eq!(
            saved,
            json!({"shop/a": {"z": left}, "shop/b": {"z": {"n1": 1_000_000}}})
        );
        // The next deletion replaces a damaged file.
        fs::write(&file, "[").unwrap();
        assert!(one.read().is_err());
        assert_eq!(one.count("z", &Plan::default(), at(3_620)), 4);
        one.add("z", &deleting(&["n6"]), at(3_620));
        assert_eq!(known("shop/a"), 5);
        // Version 1.0.0 has left numbers of names.
        let old = json!({"shop/a": {"z": [[1_000_000, 3]]}, "shop/b": {"z": {"n1": 1_000_000}}});
        fs::write(&file, old.to_string()).unwrap();
        assert_eq!([known("shop/a"), known("shop/b")], [0, 1]);
    }

    #[test]
    fn deletions_of_simultaneous_rounds_are_saved() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deletions.json");
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let file = &file;
                scope.spawn(move || {
                    for number in 0..20 {
                        let provider = format!("shop/{worker}-{number}");
                        let mut recent = RecentDeletions::of_file(file, &provider);
                        recent.add("z", &deleting(&["n"]), SystemTime::now());
                    }
                });
            }
        });
        let saved: BTreeMap<String, Value> =
            serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(saved.len(), 80);
    }
}
