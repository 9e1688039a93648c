//! Ownership of records, stored in adjacent TXT records in external-dns's format. Pure.

mod mapper;
pub mod text;
mod transaction;

use std::collections::{BTreeMap, BTreeSet, HashMap};

pub(crate) use self::transaction::remove_collisions;
pub use self::{
    mapper::{AffixError, Mapper},
    text::Cipher,
    transaction::OwnershipError,
};
use crate::{
    plan::{Note, Reason},
    record::{Key, Labels, Name, Record, RecordType, Target},
};

/// Reads and writes owner records.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    /// Names of owner records.
    pub mapper: Mapper,
    /// Encrypts the text of owner records.
    pub cipher: Option<Cipher>,
}

/// A listed zone, with ownership applied.
#[derive(Debug, Clone)]
pub struct View {
    /// Apex of the zone.
    pub apex: Name,
    /// Records without the owner texts, each with the labels from its owner text.
    pub records: Vec<Record>,
    /// Notes on owner records without a record, and on owner records that match two records.
    pub notes: Vec<Note>,
    /// Owner records without a record: each with the texts of a single owner, and their labels.
    pub orphans: Vec<Record>,
    /// All sets as listed.
    listed: BTreeMap<Key, Record>,
    /// Records with owner texts in earlier forms, and the keys of these texts.
    earlier: BTreeMap<Key, (Record, Vec<Key>)>,
}

impl View {
    /// Returns whether the zone has a set of this name and type, including owner records.
    pub(crate) fn has(&self, name: &Name, record_type: RecordType) -> bool {
        let from = Key { name: name.clone(), set_identifier: String::new(), record_type: RecordType(0) };
        let mut sets = self.listed.range(from..).take_while(|(key, _)| key.name == *name);
        sets.any(|(key, _)| key.record_type == record_type)
    }
}

/// Owner texts of one TXT set.
type Texts = Vec<(Target, Labels)>;

impl Registry {
    /// Separates records from owner records. The labels of each record are looked up under the name
    /// in external-dns's current form, then in its earlier forms.
    pub fn read(&self, apex: &Name, records: Vec<Record>) -> View {
        let mut texts: HashMap<Key, Texts> = HashMap::new();
        let mut bare = Vec::with_capacity(records.len());
        for record in &records {
            if record.record_type == RecordType::TXT {
                let (owner_texts, others) = self.split(record);
                if !owner_texts.is_empty() {
                    texts.insert(record.key(), owner_texts);
                }
                if others.targets.is_empty() {
                    continue;
                }
                bare.push(others);
            } else {
                bare.push(record.clone());
            }
        }
        let mut used: HashMap<Key, Key> = HashMap::new();
        for record in &mut bare {
            let Some(key) = self.owner_key(record, apex) else { continue };
            if let Some(labels) = texts.get(&key).and_then(|texts| texts.first()) {
                record.labels = labels.1.clone();
                used.insert(key, record.key());
            }
        }
        let mut earlier: BTreeMap<Key, Vec<Key>> = BTreeMap::new();
        let mut ambiguous = BTreeSet::new();
        for record in &mut bare {
            for key in self.earlier_owner_keys(record, apex) {
                let Some((_, labels)) = texts.get(&key).and_then(|texts| texts.first()) else { continue };
                let is_unowned = record.labels.0.is_empty();
                let other = used.get(&key).filter(|other| other.name != record.name);
                match other {
                    Some(other) if is_unowned => ambiguous.extend([record.key(), other.clone()]),
                    // Versions of external-dns wrote both forms.
                    None if is_unowned || record.labels.owner() == labels.owner() => {
                        if is_unowned {
                            record.labels = labels.clone();
                        }
                        used.insert(key.clone(), record.key());
                        earlier.entry(record.key()).or_default().push(key);
                    }
                    _ => {}
                }
            }
        }
        let mut notes = Vec::new();
        let is_ambiguous = |record: &Record| !ambiguous.is_empty() && ambiguous.contains(&record.key());
        for record in bare.iter_mut().filter(|record| is_ambiguous(record)) {
            record.labels = Labels::default();
            notes.push(note(record.name.clone(), record.record_type, Reason::Ambiguous));
        }
        let earlier = match earlier.is_empty() {
            true => BTreeMap::new(),
            false => bare
                .iter()
                .filter_map(|record| Some((record.key(), (record.clone(), earlier.remove(&record.key())?))))
                .collect(),
        };
        let mut orphans = Vec::new();
        for (key, texts) in texts.into_iter().filter(|(key, _)| !used.contains_key(key)) {
            for (target, labels) in texts {
                let reason = Reason::Orphan { owner: labels.owner().to_owned() };
                notes.push(note(key.name.clone(), RecordType::TXT, reason));
                let record = Record::new(key.name.clone(), RecordType::TXT, [target]);
                orphans.push(Record { labels, set_identifier: key.set_identifier.clone(), ..record });
            }
        }
        notes.sort_by(|a, b| a.name.cmp(&b.name));
        orphans.sort_by(|a, b| (a.key(), a.labels.owner()).cmp(&(b.key(), b.labels.owner())));
        let listed = records.into_iter().map(|record| (record.key(), record)).collect();
        View { apex: apex.clone(), records: bare, notes, orphans, listed, earlier }
    }

    /// Parses a TXT value as an owner text, encrypted or not.
    pub fn parse(&self, value: &str) -> Option<Labels> {
        let decrypted = self.cipher.as_ref().and_then(|cipher| cipher.decrypt(value));
        text::parse(decrypted.as_deref().unwrap_or(value))
    }

    /// Splits a TXT set into its owner texts and a set of its other values.
    fn split(&self, record: &Record) -> (Texts, Record) {
        let mut others = record.clone();
        let mut texts = Texts::new();
        for target in &record.targets {
            if let Some(labels) = self.parse(target.as_str()) {
                others.targets.remove(target);
                texts.push((target.clone(), labels));
            }
        }
        (texts, others)
    }

    /// Returns the key of a record's owner record.
    fn owner_key(&self, record: &Record, apex: &Name) -> Option<Key> {
        let name = self.mapper.owner_name(&record.name, record.record_type, apex)?;
        Some(owner_key(record, name))
    }

    /// Returns the keys of a record's owner record in earlier versions of external-dns: before 0.22,
    /// an alias of Route 53 had the one of a CNAME; before 0.12, the name contained no type.
    fn earlier_owner_keys(&self, record: &Record, apex: &Name) -> Vec<Key> {
        let is_alias = record.properties.get("alias").is_some_and(|alias| alias == "true");
        let of_alias = (is_alias && record.record_type == RecordType::A)
            .then(|| self.mapper.owner_name(&record.name, RecordType::CNAME, apex))
            .flatten();
        // Those versions wrote neither AAAA nor TXT. A TXT beside the owner record of another name
        // must not be taken for its record.
        let had_no_type = ![RecordType::AAAA, RecordType::TXT].contains(&record.record_type);
        let without_type = had_no_type.then(|| self.mapper.old_owner_name(&record.name)).flatten();
        of_alias.into_iter().chain(without_type).map(|name| owner_key(record, name)).collect()
    }
}

fn owner_key(record: &Record, name: Name) -> Key {
    Key { name, set_identifier: record.set_identifier.clone(), record_type: RecordType::TXT }
}

fn note(name: Name, record_type: RecordType, reason: Reason) -> Note {
    Note { name, record_type, reason }
}
