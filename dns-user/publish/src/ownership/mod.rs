//! Ownership of records, stored in adjacent TXT records in external-dns's format: their names and texts, and the
//! transactions that change them together with the records. Pure.

mod cipher;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use ring::digest;

pub use self::cipher::{Cipher, KeyError};
use crate::{
    plan::{Action, NameChange, Note, Reason},
    provider::{Step, Transaction},
    record::{Key, Labels, Name, Record, RecordType, Target, by_key, has_set},
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
    listed: BTreeMap<Key, Record>,
    /// Records with owner texts in earlier forms, and the keys of these texts.
    earlier: BTreeMap<Key, (Record, Vec<Key>)>,
}

impl View {
    /// Returns whether the zone has a set of this name and type, including owner records.
    pub(crate) fn has(&self, name: &Name, record_type: RecordType) -> bool {
        has_set(&self.listed, name, record_type)
    }
}

type Texts = Vec<(Target, Labels)>;

impl Registry {
    /// Separates records from owner records. The labels of each record are looked up under the name
    /// in external-dns's current form, then in its earlier forms.
    pub fn read(&self, apex: &Name, records: Vec<Record>) -> View {
        let (texts, mut bare) = self.separate(&records);
        let mut used: HashMap<Key, Key> = HashMap::new();
        for record in &mut bare {
            // Its owner record would exceed 255 octets, so none was ever written.
            let Some(key) = self.owner_key(record, apex) else {
                continue;
            };
            if let Some(labels) = first_labels(&texts, &key) {
                record.labels = labels.clone();
                used.insert(key, record.key());
            }
        }
        // After all current forms: a text that fits a second record, too, is ambiguous.
        let (mut earlier, ambiguous) = self.read_earlier(apex, &texts, &mut bare, &mut used);
        let mut notes = Vec::new();
        let mut earlier_sets = BTreeMap::new();
        for record in &mut bare {
            // A key is an allocation, and hardly any zone has such sets.
            if ambiguous.is_empty() && earlier.is_empty() {
                break;
            }
            let key = record.key();
            if ambiguous.contains(&key) {
                // Without an owner neither of the two is changed.
                record.labels = Labels::default();
                notes.push(Note::on(record, Reason::Ambiguous));
            }
            if let Some(keys) = earlier.remove(&key) {
                earlier_sets.insert(key, (record.clone(), keys));
            }
        }
        let orphans = orphans(texts, &used, &mut notes);
        notes.sort_by(|a, b| a.name.cmp(&b.name));
        View {
            apex: apex.clone(),
            records: bare,
            notes,
            orphans,
            listed: by_key(records),
            earlier: earlier_sets,
        }
    }

    /// Takes the labels of records that have none from their earlier owner records. Returns the keys of these owner
    /// records by record, and the records between which one is ambiguous.
    fn read_earlier(
        &self,
        apex: &Name,
        texts: &HashMap<Key, Texts>,
        bare: &mut [Record],
        used: &mut HashMap<Key, Key>,
    ) -> (BTreeMap<Key, Vec<Key>>, BTreeSet<Key>) {
        let mut earlier: BTreeMap<Key, Vec<Key>> = BTreeMap::new();
        let mut ambiguous = BTreeSet::new();
        for record in bare {
            for key in self.earlier_owner_keys(record, apex) {
                let Some(labels) = first_labels(texts, &key) else {
                    continue;
                };
                let is_unowned = record.labels.0.is_empty();
                // Records of several types at one name share the earlier form, which has no type.
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
        (earlier, ambiguous)
    }

    /// Returns the owner texts by TXT set, and the records without them.
    fn separate(&self, records: &[Record]) -> (HashMap<Key, Texts>, Vec<Record>) {
        let mut texts: HashMap<Key, Texts> = HashMap::new();
        let mut bare = Vec::with_capacity(records.len());
        for record in records {
            if record.record_type != RecordType::TXT {
                bare.push(record.clone());
                continue;
            }
            // A TXT set may hold texts of others, which must survive every change.
            let (owner_texts, others) = self.split(record);
            if !owner_texts.is_empty() {
                texts.insert(record.key(), owner_texts);
            }
            if !others.targets.is_empty() {
                bare.push(others);
            }
        }
        (texts, bare)
    }

    /// Parses a TXT value as an owner text, encrypted or not.
    pub fn parse(&self, value: &str) -> Option<Labels> {
        let decrypted = match &self.cipher {
            Some(cipher) => cipher.decrypt(value),
            None => None,
        };
        // Owner records from before the key was set are plain.
        parse_labels(decrypted.as_deref().unwrap_or(value))
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

    fn owner_key(&self, record: &Record, apex: &Name) -> Option<Key> {
        let name = self
            .mapper
            .owner_name(&record.name, record.record_type, apex)?;
        Some(owner_key(record, name))
    }

    /// Returns the keys of a record's owner record in earlier versions of external-dns: before 0.22,
    /// an alias of Route 53 had the one of a CNAME; before 0.12, the name contained no type.
    fn earlier_owner_keys(&self, record: &Record, apex: &Name) -> Vec<Key> {
        let Record {
            name, record_type, ..
        } = record;
        let mut keys = Vec::new();
        if record.property("alias") == "true"
            && *record_type == RecordType::A
            && let Some(name) = self.mapper.owner_name(name, RecordType::CNAME, apex)
        {
            keys.push(owner_key(record, name));
        }
        // Those versions wrote neither AAAA nor TXT. A TXT beside the owner record of another name
        // must not be taken for its record.
        if ![RecordType::AAAA, RecordType::TXT].contains(record_type)
            && let Some(name) = self.mapper.old_owner_name(name)
        {
            keys.push(owner_key(record, name));
        }
        keys
    }
}

/// Returns the labels of the first owner text in a set.
fn first_labels<'a>(texts: &'a HashMap<Key, Texts>, key: &Key) -> Option<&'a Labels> {
    let (_, labels) = texts.get(key)?.first()?;
    Some(labels)
}

fn owner_key(record: &Record, name: Name) -> Key {
    Key {
        name,
        set_identifier: record.set_identifier.clone(),
        record_type: RecordType::TXT,
    }
}

/// Returns the owner texts that belong to no record, and notes them.
fn orphans(
    texts: HashMap<Key, Texts>,
    used: &HashMap<Key, Key>,
    notes: &mut Vec<Note>,
) -> Vec<Record> {
    let mut orphans = Vec::new();
    for (key, texts) in texts {
        if used.contains_key(&key) {
            continue;
        }
        for (target, labels) in texts {
            let owner = labels.owner().to_owned();
            let orphan = Record {
                labels,
                set_identifier: key.set_identifier.clone(),
                ..Record::new(key.name.clone(), RecordType::TXT, [target])
            };
            notes.push(Note::on(&orphan, Reason::Orphan { owner }));
            orphans.push(orphan);
        }
    }
    // The texts come from a hash map, whose order would change the display from run to run.
    orphans.sort_by(|a, b| (a.key(), a.labels.owner()).cmp(&(b.key(), b.labels.owner())));
    orphans
}

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
    pub fn transaction(
        &self,
        view: &View,
        change: &NameChange,
    ) -> Result<Transaction, OwnershipError> {
        let mut pending = PendingSets {
            registry: self,
            view,
            sets: BTreeMap::new(),
        };
        for action in &change.actions {
            pending.apply(action)?;
        }
        // With the name's own change, so that nothing is written only because of its form.
        pending.replace_earlier_forms(change)?;
        Ok(Transaction {
            name: change.name.clone(),
            steps: pending.steps(&change.name),
        })
    }
}

/// Removes transactions that would put an owner record and a CNAME at one name, which servers ignore silently (RFC
/// 2136, section 3.4.2.2). An owner record wins over a new CNAME, and an existing CNAME over a new owner record.
pub(crate) fn remove_collisions(
    view: &View,
    transactions: &mut Vec<Transaction>,
) -> Vec<(Name, OwnershipError)> {
    // Of all transactions: one name's owner record may meet another one's CNAME.
    let mut texts = HashSet::new();
    for transaction in transactions.iter() {
        for step in &transaction.steps {
            texts.extend(created(step, RecordType::TXT).cloned());
        }
    }
    let mut collisions = Vec::new();
    transactions.retain(|transaction| {
        let Some(at) = collision(view, &texts, transaction) else {
            return true;
        };
        let name = transaction.name.clone();
        collisions.push((name.clone(), OwnershipError::Collision { name, at }));
        false
    });
    collisions
}

/// Returns the name, if any, at which a transaction would put an owner record and a CNAME. `texts` are the names of
/// all new TXT records.
fn collision(view: &View, texts: &HashSet<Name>, transaction: &Transaction) -> Option<Name> {
    for step in &transaction.steps {
        if let Some(alias) = created(step, RecordType::CNAME) {
            let stays =
                view.has(alias, RecordType::TXT) && !deletes(transaction, alias, RecordType::TXT);
            if stays || texts.contains(alias) {
                return Some(alias.clone());
            }
        }
        if let Some(text) = created(step, RecordType::TXT)
            && view.has(text, RecordType::CNAME)
            && !deletes(transaction, text, RecordType::CNAME)
        {
            return Some(text.clone());
        }
    }
    None
}

fn created(step: &Step, record_type: RecordType) -> Option<&Name> {
    match step {
        Step::Create(record) if record.record_type == record_type => Some(&record.name),
        _ => None,
    }
}

fn deletes(transaction: &Transaction, name: &Name, record_type: RecordType) -> bool {
    for step in &transaction.steps {
        if let Step::Delete(record) = step
            && record.name == *name
            && record.record_type == record_type
        {
            return true;
        }
    }
    false
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
                // An owner record without a record may belong to a publisher that lost the record
                // and will create it again.
                self.refuse_claimed(record)?;
                self.put(record, None);
                self.own(record)
            }
            Action::Update { before, after } => {
                self.put(after, Some(before));
                self.own(after)
            }
            Action::Delete(record) => {
                self.remove_targets(record.key(), |target| record.targets.contains(target));
                self.disown(record);
                Ok(())
            }
            Action::Release(record) => {
                // Requires the record as listed: what is released is what the operator saw.
                self.touch(record.key());
                self.disown(record);
                Ok(())
            }
            Action::DropOrphan(record) => {
                // Between the listing and this change its publisher may have created the record,
                // which would then lose its owner.
                self.require_claimants(record);
                self.remove_texts(record.key(), record.labels.owner());
                Ok(())
            }
        }
    }

    /// Requires the records that an owner record may belong to as listed.
    fn require_claimants(&mut self, orphan: &Record) {
        let mut claimants = vec![(orphan.name.clone(), None)];
        if let Some((name, record_type)) = self.registry.mapper.record_of(&orphan.name)
            && let Ok(name) = Name::parse(&name)
        {
            claimants.push((name, record_type));
        }
        for (name, record_type) in claimants {
            if !name.is_within(&self.view.apex) {
                continue;
            }
            // A name in the old form tells no type.
            let types = match record_type {
                Some(record_type) => vec![record_type],
                None => RecordType::DEFAULT_MANAGED.into(),
            };
            for record_type in types {
                self.touch(Key {
                    name: name.clone(),
                    set_identifier: orphan.set_identifier.clone(),
                    record_type,
                });
            }
        }
    }

    fn touch(&mut self, key: Key) -> &mut Option<Record> {
        // Every set that a transaction looks at is part of it, so that the provider compares it.
        let listed = self.view.listed.get(&key);
        self.sets.entry(key).or_insert_with(|| listed.cloned())
    }

    /// Writes targets. Owner texts in the same TXT set are kept.
    fn put(&mut self, record: &Record, before: Option<&Record>) {
        let set = self.touch(record.key());
        if let Some(before) = before
            && before.targets == record.targets
            && before.properties == record.properties
            // A wanted set without a TTL keeps the one that it has.
            && (record.ttl.is_none() || record.ttl == before.ttl)
        {
            return;
        }
        let mut after = Record {
            // No listed set has labels, so each would seem to differ from it.
            labels: Default::default(),
            ..record.clone()
        };
        if let Some(listed) = set {
            after.ttl = after.ttl.or(listed.ttl);
            if let Some(before) = before {
                for target in &listed.targets {
                    if !before.targets.contains(target) {
                        after.targets.insert(target.clone());
                    }
                }
            }
        }
        *set = Some(after);
    }

    /// Removes targets of a set. Others, such as owner texts in the same TXT set, are kept.
    fn remove_targets(&mut self, key: Key, is_removed: impl Fn(&Target) -> bool) {
        let set = self.touch(key);
        if let Some(listed) = set {
            listed.targets.retain(|target| !is_removed(target));
            if listed.targets.is_empty() {
                *set = None;
            }
        }
    }

    /// Writes the owner record, unless the zone contains an equal one.
    fn own(&mut self, record: &Record) -> Result<(), OwnershipError> {
        // With `registry: noop` there are no owner records.
        if record.labels.owner().is_empty() {
            return Ok(());
        }
        // A comma would end the label, and the rest would be read as further labels.
        for value in record.labels.0.values() {
            check_value(value)?;
        }
        let Some(key) = self.registry.owner_key(record, &self.view.apex) else {
            return Err(OwnershipError::NoName {
                name: record.name.clone(),
            });
        };
        let texts = self.owner_texts(&key);
        // An encrypted text differs each time, because of its nonce; writing it again would change
        // the zone in every round.
        if texts.iter().any(|(_, labels)| *labels == record.labels) {
            return Ok(());
        }
        let plain = write_labels(&record.labels);
        let value = match &self.registry.cipher {
            Some(cipher) => cipher.encrypt(&plain).ok_or(OwnershipError::Cipher)?,
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
        let Some(key) = self.registry.owner_key(record, &self.view.apex) else {
            return Ok(());
        };
        let owner = record.labels.owner();
        for (_, labels) in self.owner_texts(&key) {
            // The own text without a record is an orphan, which the new record takes over.
            if !owner.is_empty() && labels.owner() != owner {
                return Err(OwnershipError::Claimed {
                    name: record.name.clone(),
                    owner_record: key.name,
                    owner: labels.owner().to_owned(),
                });
            }
        }
        Ok(())
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

    fn remove_texts(&mut self, key: Key, owner: &str) {
        let mut texts = self.owner_texts(&key);
        texts.retain(|(_, labels)| labels.owner() == owner);
        self.remove_targets(key, |target| texts.iter().any(|(text, _)| text == target));
    }

    fn owner_texts(&mut self, key: &Key) -> Texts {
        let registry = self.registry;
        match self.touch(key.clone()) {
            Some(set) => registry.split(set).0,
            None => Texts::new(),
        }
    }

    /// Moves the ownership of all records of the name that use an owner record in an earlier form to
    /// the current form, and removes the earlier one.
    fn replace_earlier_forms(&mut self, change: &NameChange) -> Result<(), OwnershipError> {
        let view = self.view;
        let of_name = view
            .earlier
            .range(Key::before(&change.name)..)
            .take_while(|(key, _)| key.name == change.name);
        for (_, (record, earlier)) in of_name {
            if !change
                .actions
                .iter()
                .any(|action| action.record().key() == record.key())
            {
                // Its ownership moves to another owner record, so it must still be as listed.
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
        let view = self.view;
        let mut steps = Vec::new();
        let mut creates = Vec::new();
        for (key, after) in self.sets {
            // The differences between listing and result: whoever wrote in between makes the
            // transaction fail.
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
        // Only a new set can meet a rival: an existing one excludes it already.
        let rivals: &[RecordType] = match creates[..] {
            [] => &[],
            [RecordType::CNAME, ..] => &BESIDE_ALIAS,
            _ => &[RecordType::CNAME],
        };
        // Another writer may have created one since the listing; the server would drop the change silently (RFC 2136,
        // section 3.4.2.2).
        for rival in rivals {
            if !view.has(name, *rival) {
                steps.push(Step::RequireAbsent(name.clone(), *rival));
            }
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

/// Returns the properties of an owner record: the record's (Route 53 requires the same routing
/// policy for all sets with a set identifier) without the properties of its targets.
fn owner_properties(record: &Record) -> BTreeMap<String, String> {
    let about_targets = [
        "alias",
        "aws/evaluate-target-health",
        "aws/target-hosted-zone",
    ];
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
    Claimed {
        name: Name,
        owner_record: Name,
        owner: String,
    },
    #[error(
        "{name}: {at} would hold a CNAME and an owner record; choose another name, or set txt-prefix"
    )]
    Collision { name: Name, at: Name },
    /// The owner record's name would exceed 255 octets.
    #[error(
        "{name}: the name of its owner record exceeds 255 octets; use a shorter name or txt-prefix"
    )]
    NoName { name: Name },
    #[error(transparent)]
    Value(#[from] ValueError),
    #[error("cannot encrypt an owner record: no random numbers")]
    Cipher,
}

/// Placeholder for the record type within an affix.
const TEMPLATE: &str = "%{record_type}";

/// Types that external-dns recognises in the name of an owner record.
const MAPPED_BACK: [RecordType; 7] = [
    RecordType::A,
    RecordType::AAAA,
    RecordType::CNAME,
    RecordType::NS,
    RecordType::MX,
    RecordType::SRV,
    RecordType::NAPTR,
];

/// Maps a record to the name of its owner record, as external-dns does.
///
/// The owner record of `api.example.org A` is `a-api.example.org`. A prefix precedes the first
/// label, a suffix follows it; `%{record_type}` in the affix is replaced by the type.
///
/// All texts are in lower case; prefix or suffix is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mapper {
    prefix: String,
    suffix: String,
    wildcard: String,
}

impl Mapper {
    /// Creates a mapper. `wildcard` replaces a first label `*`, unless it is empty.
    pub fn new(prefix: &str, suffix: &str, wildcard: &str) -> Result<Self, AffixError> {
        let texts = [prefix, suffix, wildcard];
        let [prefix, suffix, wildcard] = texts.map(|text| text.trim().to_ascii_lowercase());
        // External-dns refuses both as well.
        if !prefix.is_empty() && !suffix.is_empty() {
            return Err(AffixError::Both);
        }
        let mapper = Self {
            prefix,
            suffix,
            wildcard,
        };
        // An affix that is invalid in names would leave every record without an owner. No type that
        // is managed by default has a longer name than `cname`.
        let probe = mapper.text_of("x.invalid", "cname");
        Name::parse(&probe).map_err(|error| AffixError::Unusable(error.to_string()))?;
        Ok(mapper)
    }

    /// Returns the name in external-dns's form. It may be too long to be valid.
    pub fn text_of(&self, name: &str, record_type: &str) -> String {
        // External-dns writes `a-www`.
        let record_type = record_type.to_ascii_lowercase();
        let has_template = self.prefix.contains(TEMPLATE) || self.suffix.contains(TEMPLATE);
        // The type stands where the template is, and only there.
        let before = if has_template {
            String::new()
        } else {
            format!("{record_type}-")
        };
        self.with_label(name, &record_type, &before)
    }

    /// Returns a name whose first label, behind `before`, is between the affixes, in which `record_type` replaces the
    /// template.
    fn with_label(&self, name: &str, record_type: &str, before: &str) -> String {
        let (mut first, behind) = name.split_once('.').unwrap_or((name, ""));
        if first == "*" && !self.wildcard.is_empty() {
            first = &self.wildcard;
        }
        let [prefix, suffix] =
            [&self.prefix, &self.suffix].map(|affix| affix.replace(TEMPLATE, record_type));
        let label = format!("{prefix}{before}{first}{suffix}");
        if behind.is_empty() {
            label
        } else {
            format!("{label}.{behind}")
        }
    }

    /// Returns the name under which the owner record is written: external-dns's form if it is valid
    /// within `apex`, otherwise the same form with a hashed label.
    ///
    /// The hashed label replaces the first label, or as many as necessary to stay within 255
    /// octets. `None` if no name fits even directly below the apex.
    pub fn owner_name(&self, name: &Name, record_type: RecordType, apex: &Name) -> Option<Name> {
        let record_type = record_type.to_string();
        if let Some(owner) = self.name_within(apex, name.as_str(), &record_type) {
            return Some(owner);
        }
        // With external-dns, such a record stays without an owner, and is never changed again.
        let hash = digest::digest(&digest::SHA256, name.as_str().as_bytes());
        // With 128 bits, two names of a zone hardly ever share an owner record, and 32 digits leave
        // room for an affix.
        let label = dns_kit::hex(&hash.as_ref()[..16]);
        let mut above = if name == apex {
            Some(name.clone())
        } else {
            name.parent()
        };
        // Outside of the zone, the server would refuse the whole message (NOTZONE).
        while let Some(parent) = above.filter(|parent| parent.is_within(apex)) {
            let below = if parent.is_root() {
                label.clone()
            } else {
                format!("{label}.{parent}")
            };
            if let Some(owner) = self.name_within(apex, &below, &record_type) {
                return Some(owner);
            }
            above = parent.parent();
        }
        None
    }

    fn name_within(&self, apex: &Name, name: &str, record_type: &str) -> Option<Name> {
        let owner = Name::parse(&self.text_of(name, record_type)).ok()?;
        owner.is_within(apex).then_some(owner)
    }

    /// Returns the name in the older form, which contains no type.
    pub fn old_owner_name(&self, name: &Name) -> Option<Name> {
        Name::parse(&self.with_label(name.as_str(), "", "")).ok()
    }

    /// Maps an owner record back to name and type, as external-dns does. The type is `None`
    /// in the older form; the result is `None` if the name lacks the affix.
    ///
    /// The mapping is ambiguous: a record `a-team` of the older form reads as type A of
    /// `team`. The registry therefore looks owner records up from the records.
    pub fn record_of(&self, owner: &Name) -> Option<(String, Option<RecordType>)> {
        let text = owner.as_str();
        if self.suffix.is_empty() {
            return strip(&self.prefix, |affix| text.strip_prefix(affix));
        }
        // A suffix may contain dots, so it ends behind as many labels as it has itself.
        let dots = self.suffix.matches('.').count();
        let end = text
            .match_indices('.')
            .nth(dots)
            .map_or(text.len(), |(index, _)| index);
        let (head, behind) = text.split_at(end);
        let (name, record_type) = strip(&self.suffix, |affix| head.strip_suffix(affix))?;
        Some((name + behind, record_type))
    }
}

/// Removes an affix with `cut`, and returns the rest and the type.
fn strip<'a>(
    affix: &str,
    cut: impl Fn(&str) -> Option<&'a str>,
) -> Option<(String, Option<RecordType>)> {
    if affix.contains(TEMPLATE) {
        for record_type in MAPPED_BACK {
            let affix = affix.replace(TEMPLATE, &record_type.to_string().to_ascii_lowercase());
            if let Some(name) = cut(&affix) {
                return Some((name.to_owned(), Some(record_type)));
            }
        }
    }
    cut(&affix.replace(TEMPLATE, "")).map(split_type)
}

/// Splits `a-api.example.org` into name and type.
fn split_type(text: &str) -> (String, Option<RecordType>) {
    if let Some((first, rest)) = text.split_once('-') {
        for record_type in MAPPED_BACK {
            if record_type.to_string().eq_ignore_ascii_case(first) {
                return (rest.to_owned(), Some(record_type));
            }
        }
    }
    (text.to_owned(), None)
}

/// Reason why an affix cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum AffixError {
    #[error("txt-prefix and txt-suffix are both set; remove one of them")]
    Both,
    #[error("txt-prefix or txt-suffix produces invalid names: {0}")]
    Unusable(String),
}

/// Value of `heritage`, and prefix of every label.
const HERITAGE: &str = "external-dns";

/// Parses the text of an owner record; `None` for other TXT records.
///
/// Unknown labels are kept. If a label appears twice, the last one counts.
pub fn parse_labels(text: &str) -> Option<Labels> {
    let mut labels = Labels::default();
    let mut is_ours = false;
    // External-dns writes quotes, which a value that was not read as quoted strings still has.
    for token in text.trim_matches('"').split(',') {
        let Some((key, value)) = token.split_once('=') else {
            continue;
        };
        if key == "heritage" {
            // Another program's text with the same key is no owner record.
            if value != HERITAGE {
                return None;
            }
            is_ours = true;
        } else if key.starts_with(HERITAGE) {
            let label = key.strip_prefix("external-dns/").unwrap_or(key);
            labels.0.insert(label.to_owned(), value.to_owned());
        }
    }
    is_ours.then_some(labels)
}

/// Formats labels, sorted by key, without quotes.
pub fn write_labels(labels: &Labels) -> String {
    let mut text = format!("heritage={HERITAGE}");
    for (label, value) in &labels.0 {
        text.push_str(&format!(",{HERITAGE}/{label}={value}"));
    }
    text
}

/// Checks that a value survives [`write_labels()`] and [`parse_labels()`].
pub fn check_value(value: &str) -> Result<(), ValueError> {
    for character in value.chars() {
        // A quote would end the string, and a backslash begins an escape (RFC 1035, section 5.1).
        let is_separator = matches!(character, ',' | '"' | '\\');
        if is_separator || !character.is_ascii() || character.is_ascii_control() {
            return Err(ValueError {
                value: value.to_owned(),
                character,
            });
        }
    }
    Ok(())
}

/// A value that an owner record cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "owner or resource {value:?} contains {character:?}, which separates labels; choose another text"
)]
pub struct ValueError {
    value: String,
    character: char,
}

#[cfg(test)]
mod tests;
