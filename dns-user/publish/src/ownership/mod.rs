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
    /// Owner texts in the older form, by the key of the record that they belong to.
    old_form: BTreeMap<Key, Key>,
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
    /// in external-dns's current form, then in its older form.
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
        let mut old_form = BTreeMap::new();
        let mut ambiguous = BTreeSet::new();
        for record in &mut bare {
            // external-dns never wrote the older form for AAAA.
            if !record.labels.0.is_empty() || record.record_type == RecordType::AAAA {
                continue;
            }
            let Some(key) = self.old_owner_key(record) else { continue };
            let Some(labels) = texts.get(&key).and_then(|texts| texts.first()) else { continue };
            match used.get(&key) {
                Some(other) if other.name != record.name => {
                    ambiguous.extend([record.key(), other.clone()]);
                }
                _ => {
                    record.labels = labels.1.clone();
                    used.insert(key.clone(), record.key());
                    old_form.insert(record.key(), key);
                }
            }
        }
        let mut notes = Vec::new();
        for record in bare.iter_mut().filter(|record| ambiguous.contains(&record.key())) {
            record.labels = Labels::default();
            notes.push(note(record.name.clone(), record.record_type, Reason::Ambiguous));
        }
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
        View { apex: apex.clone(), records: bare, notes, orphans, listed, old_form }
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
        let name = self.mapper.owner_name(&record.name, owner_type(record), apex)?;
        Some(Key { name, set_identifier: record.set_identifier.clone(), record_type: RecordType::TXT })
    }

    /// Returns the key of a record's owner record in the older form.
    fn old_owner_key(&self, record: &Record) -> Option<Key> {
        let name = self.mapper.old_owner_name(&record.name)?;
        Some(Key { name, set_identifier: record.set_identifier.clone(), record_type: RecordType::TXT })
    }
}

/// Returns the type in the name of the owner record: external-dns uses CNAME for an alias of Route
/// 53, whose type is A.
fn owner_type(record: &Record) -> RecordType {
    let is_alias = record.properties.get("alias").is_some_and(|alias| alias == "true");
    if is_alias && record.record_type == RecordType::A { RecordType::CNAME } else { record.record_type }
}

fn note(name: Name, record_type: RecordType, reason: Reason) -> Note {
    Note { name, record_type, reason }
}
