//! A zone in memory that applies transactions as strictly as a server does.

use std::collections::BTreeMap;

use dns_publish::{
    provider::{Step, Transaction},
    record::{Key, Name, Record, RecordType},
};

/// Record sets by key, without labels.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ZoneModel(pub(crate) BTreeMap<Key, Record>);

impl ZoneModel {
    pub(crate) fn records(&self) -> Vec<Record> {
        self.0.values().cloned().collect()
    }

    /// Applies all steps, or returns the first whose requirement fails.
    pub(crate) fn apply(&mut self, transaction: &Transaction) -> Result<(), String> {
        let mut after = self.clone();
        for step in &transaction.steps {
            let holds = match step {
                Step::Create(record) => !self.0.contains_key(&record.key()),
                Step::Require(record) | Step::Delete(record) => self.holds(record),
                Step::Replace { before, .. } => self.holds(before),
                Step::RequireAbsent(name, record_type) => !self.has(name, *record_type),
            };
            if !holds {
                return Err(format!("{step:?}"));
            }
            match step {
                Step::Create(record) | Step::Replace { after: record, .. } => {
                    after.0.insert(record.key(), record.clone());
                }
                Step::Delete(record) => {
                    after.0.remove(&record.key());
                }
                Step::Require(_) | Step::RequireAbsent(..) => {}
            }
        }
        let alias_beside_others = after.0.keys().find(|key| {
            key.record_type == RecordType::CNAME
                && after
                    .0
                    .keys()
                    .any(|other| other.name == key.name && other.record_type != RecordType::CNAME)
        });
        if let Some(key) = alias_beside_others {
            return Err(format!("a CNAME beside other data at {}", key.name));
        }
        *self = after;
        Ok(())
    }

    fn holds(&self, record: &Record) -> bool {
        self.0
            .get(&record.key())
            .is_some_and(|here| here.targets == record.targets)
    }

    fn has(&self, name: &Name, record_type: RecordType) -> bool {
        self.0
            .keys()
            .any(|key| key.name == *name && key.record_type == record_type)
    }
}
