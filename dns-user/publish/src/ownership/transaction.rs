//! Combines the changes of a name with the changes of its owner records.

use std::collections::{BTreeMap, HashSet};

use super::{Registry, Texts, View};
use crate::{
    plan::{Action, NameChange},
    provider::{Step, Transaction},
    record::{Key, Name, Record, RecordType, Target},
};

/// Types that must be absent for a new CNAME.
const BESIDE_ALIAS: [RecordType; 8] = [
    RecordType::A,
    RecordType::AAAA,
    RecordType::MX,
    RecordType::NAPTR,
    RecordType::NS,
    RecordType::PTR,
    RecordType::SRV,
    RecordType::TXT,
];

impl Registry {
    /// Returns the transaction for a change planned on `view`.
    ///
    /// Every step states the listed set. A record of which only the labels change is required
    /// unchanged; owner records in earlier forms are replaced by the current form.
    pub fn transaction(&self, view: &View, change: &NameChange) -> Result<Transaction, OwnershipError> {
        let mut pending = PendingSets { registry: self, view, sets: BTreeMap::new() };
        for action in &change.actions {
            pending.apply(action)?;
        }
        pending.replace_earlier_forms(change)?;
        Ok(Transaction { name: change.name.clone(), steps: pending.steps(&change.name) })
    }
}

/// Removes transactions that would put an owner record and a CNAME at one name, which servers
/// ignore silently (RFC 2136, section 3.4.2.2). An owner record wins over a new CNAME, and an
/// existing CNAME over a new owner record.
pub(crate) fn remove_collisions(
    view: &View,
    transactions: &mut Vec<Transaction>,
) -> Vec<(Name, OwnershipError)> {
    let created = |step: &Step, record_type: RecordType| match step {
        Step::Create(record) if record.record_type == record_type => Some(record.name.clone()),
        _ => None,
    };
    let texts: HashSet<Name> = transactions
        .iter()
        .flat_map(|transaction| &transaction.steps)
        .filter_map(|step| created(step, RecordType::TXT))
        .collect();
    let deletes = |transaction: &Transaction, name: &Name, record_type: RecordType| {
        let is_it = |record: &Record| record.name == *name && record.record_type == record_type;
        transaction.steps.iter().any(|step| matches!(step, Step::Delete(record) if is_it(record)))
    };
    let collision = |transaction: &Transaction| {
        transaction.steps.iter().find_map(|step| {
            let alias = created(step, RecordType::CNAME).filter(|name| {
                let stays = view.has(name, RecordType::TXT) && !deletes(transaction, name, RecordType::TXT);
                stays || texts.contains(name)
            });
            let text = created(step, RecordType::TXT).filter(|name| {
                view.has(name, RecordType::CNAME) && !deletes(transaction, name, RecordType::CNAME)
            });
            alias.or(text)
        })
    };
    let mut collisions = Vec::new();
    transactions.retain(|transaction| {
        let Some(at) = collision(transaction) else { return true };
        let name = transaction.name.clone();
        collisions.push((name.clone(), OwnershipError::Collision { name, at }));
        false
    });
    collisions
}

/// Future state of the sets that a transaction changes.
struct PendingSets<'a> {
    registry: &'a Registry,
    view: &'a View,
    sets: BTreeMap<Key, Option<Record>>,
}

impl PendingSets<'_> {
    fn apply(&mut self, action: &Action) -> Result<(), OwnershipError> {
        match action {
            Action::Create(record) => {
                self.refuse_claimed(record)?;
                self.put(record, None);
                self.own(record)
            }
            Action::Update { before, after } => {
                self.put(after, Some(before));
                self.own(after)
            }
            Action::Delete(record) => {
                self.remove(record);
                self.disown(record);
                Ok(())
            }
            Action::Release(record) => {
                self.touch(record.key());
                self.disown(record);
                Ok(())
            }
            Action::DropOrphan(record) => {
                self.require_claimants(record);
                self.remove_texts(record.key(), record.labels.owner());
                Ok(())
            }
        }
    }

    /// Requires the records that an owner record may belong to as listed.
    fn require_claimants(&mut self, orphan: &Record) {
        let of_old_form = RecordType::DEFAULT_MANAGED.map(|record_type| (orphan.name.clone(), record_type));
        let mut claimants = Vec::from(of_old_form);
        if let Some((name, record_type)) = self.registry.mapper.record_of(&orphan.name)
            && let Ok(name) = Name::parse(&name)
        {
            let types = record_type.map_or(RecordType::DEFAULT_MANAGED.into(), |found| vec![found]);
            claimants.extend(types.into_iter().map(|record_type| (name.clone(), record_type)));
        }
        for (name, record_type) in claimants.into_iter().filter(|(name, _)| name.is_within(&self.view.apex)) {
            self.touch(Key { name, set_identifier: orphan.set_identifier.clone(), record_type });
        }
    }

    fn touch(&mut self, key: Key) -> &mut Option<Record> {
        let listed = self.view.listed.get(&key);
        self.sets.entry(key).or_insert_with(|| listed.cloned())
    }

    /// Writes targets. Owner texts in the same TXT set are kept.
    fn put(&mut self, record: &Record, before: Option<&Record>) {
        let unchanged = before.is_some_and(|before| {
            before.targets == record.targets
                && before.properties == record.properties
                && record.ttl.is_none_or(|ttl| Some(ttl) == before.ttl)
        });
        let set = self.touch(record.key());
        if unchanged {
            return;
        }
        let mut after = Record { labels: Default::default(), ..record.clone() };
        if let Some(listed) = set {
            after.ttl = after.ttl.or(listed.ttl);
            if let Some(before) = before {
                let kept = listed.targets.iter().filter(|target| !before.targets.contains(target));
                after.targets.extend(kept.cloned());
            }
        }
        *set = Some(after);
    }

    /// Removes a record's targets. Owner texts in the same TXT set are kept.
    fn remove(&mut self, record: &Record) {
        let set = self.touch(record.key());
        if let Some(listed) = set {
            listed.targets.retain(|target| !record.targets.contains(target));
            if listed.targets.is_empty() {
                *set = None;
            }
        }
    }

    /// Writes the owner record, unless the zone contains an equal one.
    fn own(&mut self, record: &Record) -> Result<(), OwnershipError> {
        if record.labels.owner().is_empty() {
            return Ok(());
        }
        for value in record.labels.0.values() {
            super::check_value(value)?;
        }
        let Some(key) = self.registry.owner_key(record, &self.view.apex) else {
            return Err(OwnershipError::NoName { name: record.name.clone() });
        };
        let texts = self.owner_texts(&key);
        if texts.iter().any(|(_, labels)| *labels == record.labels) {
            return Ok(());
        }
        let plain = super::write_labels(&record.labels);
        let value = match &self.registry.cipher {
            Some(cipher) => cipher.encrypt(&plain)?,
            None => plain,
        };
        let set = self.touch(key.clone());
        let written = set.get_or_insert_with(|| Record {
            set_identifier: key.set_identifier,
            ttl: record.ttl,
            properties: owner_properties(record),
            ..Record::new(key.name, RecordType::TXT, [])
        });
        for (target, _) in &texts {
            written.targets.remove(target);
        }
        written.targets.insert(Target::text(value.as_bytes()));
        Ok(())
    }

    /// Fails if the name of the record's owner record already holds another owner's text.
    fn refuse_claimed(&mut self, record: &Record) -> Result<(), OwnershipError> {
        let Some(key) = self.registry.owner_key(record, &self.view.apex) else { return Ok(()) };
        let owner = record.labels.owner();
        match self.owner_texts(&key).into_iter().find(|(_, labels)| labels.owner() != owner) {
            Some((_, labels)) if !owner.is_empty() => Err(OwnershipError::Claimed {
                name: record.name.clone(),
                owner_record: key.name,
                owner: labels.owner().to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Removes the owner texts of a record. Other values of the set are kept.
    fn disown(&mut self, record: &Record) {
        if record.labels.owner().is_empty() {
            return;
        }
        if let Some(key) = self.registry.owner_key(record, &self.view.apex) {
            self.remove_texts(key, record.labels.owner());
        }
    }

    /// Removes the texts of one owner.
    fn remove_texts(&mut self, key: Key, owner: &str) {
        let texts = self.owner_texts(&key);
        let set = self.touch(key);
        if let Some(owner_set) = set {
            for (target, _) in texts.iter().filter(|(_, labels)| labels.owner() == owner) {
                owner_set.targets.remove(target);
            }
            if owner_set.targets.is_empty() {
                *set = None;
            }
        }
    }

    fn owner_texts(&mut self, key: &Key) -> Texts {
        let registry = self.registry;
        self.touch(key.clone()).as_ref().map(|set| registry.split(set).0).unwrap_or_default()
    }

    /// Moves the ownership of all records of the name that use an owner record in an earlier form to
    /// the current form, and removes the earlier one.
    fn replace_earlier_forms(&mut self, change: &NameChange) -> Result<(), OwnershipError> {
        let view = self.view;
        let first =
            Key { name: change.name.clone(), set_identifier: String::new(), record_type: RecordType(0) };
        let of_name = view.earlier.range(first..).take_while(|(key, _)| key.name == change.name);
        for (_, (record, earlier)) in of_name {
            if !change.actions.iter().any(|action| action.key() == record.key()) {
                self.touch(record.key());
                self.own(record)?;
            }
            for key in earlier {
                self.remove_texts(key.clone(), record.labels.owner());
            }
        }
        Ok(())
    }

    /// Returns the differences, and the transaction's requirements on other sets.
    fn steps(self, name: &Name) -> Vec<Step> {
        let Self { registry: _, view, sets } = self;
        let mut steps = Vec::new();
        let mut creates = Vec::new();
        for (key, after) in sets {
            match (view.listed.get(&key).cloned(), after) {
                (None, None) => steps.push(Step::RequireAbsent(key.name, key.record_type)),
                (None, Some(after)) => {
                    if key.name == *name {
                        creates.push(key.record_type);
                    }
                    steps.push(Step::Create(after));
                }
                (Some(before), None) => steps.push(Step::Delete(before)),
                (Some(before), Some(after)) if before == after => steps.push(Step::Require(before)),
                (Some(before), Some(after)) => steps.push(Step::Replace { before, after }),
            }
        }
        let rivals: &[RecordType] = match creates[..] {
            [] => &[],
            [RecordType::CNAME, ..] => &BESIDE_ALIAS,
            _ => &[RecordType::CNAME],
        };
        for rival in rivals.iter().filter(|rival| !view.has(name, **rival)) {
            steps.push(Step::RequireAbsent(name.clone(), *rival));
        }
        // Requirements and deletions come first, because some providers apply steps in order.
        steps.sort_by_key(|step| match step {
            Step::Require(_) | Step::RequireAbsent(..) => 0,
            Step::Delete(_) => 1,
            Step::Replace { .. } => 2,
            Step::Create(_) => 3,
        });
        steps
    }
}

impl Action {
    fn key(&self) -> Key {
        match self {
            Self::Create(record)
            | Self::Delete(record)
            | Self::Release(record)
            | Self::DropOrphan(record) => record.key(),
            Self::Update { after, .. } => after.key(),
        }
    }
}

/// Returns the properties of an owner record: the record's (Route 53 requires the same routing
/// policy for all sets with a set identifier) without the properties of its targets.
fn owner_properties(record: &Record) -> BTreeMap<String, String> {
    let about_targets = ["alias", "aws/evaluate-target-health", "aws/target-hosted-zone"];
    let mut properties = record.properties.clone();
    properties.retain(|name, _| !about_targets.contains(&name.as_str()));
    properties
}

/// Reason why an owner record cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum OwnershipError {
    #[error(
        "{name}: the owner record {owner_record} belongs to {owner:?} and has no record; if that publisher is \
         gone, delete it with `retire --orphans={owner}`"
    )]
    Claimed { name: Name, owner_record: Name, owner: String },
    #[error("{name}: {at} would hold a CNAME and an owner record; choose another name, or set txt-prefix")]
    Collision { name: Name, at: Name },
    /// The owner record's name would exceed 255 octets.
    #[error("{name}: the name of its owner record exceeds 255 octets; use a shorter name or txt-prefix")]
    NoName { name: Name },
    #[error(transparent)]
    Value(#[from] super::ValueError),
    #[error(transparent)]
    Cipher(#[from] super::CipherError),
}
