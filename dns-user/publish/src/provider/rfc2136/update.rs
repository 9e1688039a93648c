//! Updates with prerequisites (RFC 2136). Pure.

use super::transfer::ListedTexts;
use super::wire::{CLASS_ANY, CLASS_IN, CLASS_NONE, HEADER, Message, Records, UPDATE, WireError, encode};
use crate::{
    provider::{Step, Transaction},
    record::{Name, Record, RecordType},
};

/// Maximum size of an update in octets, below the limit of TCP with room for a signature.
const MAX_MESSAGE: usize = 64_000;

/// Maximum size of header and zone section in octets.
const MAX_HEAD: usize = HEADER + Name::MAX_WIRE + 4;

/// Default TTL of new records.
pub(super) const DEFAULT_TTL: u32 = 60;

pub(super) struct Encoded {
    pub(super) name: Name,
    prerequisites: Records,
    updates: Records,
    /// Number of records in its largest new set.
    pub(super) largest: usize,
}

impl Encoded {
    /// Encodes a transaction of `zone`.
    ///
    /// An old set is required with all its data, and deleted as a set before new records are added,
    /// so a CNAME and addresses never coexist. TXT values in `listed` keep their strings.
    pub(super) fn new(
        zone: &Name,
        transaction: &Transaction,
        listed: &ListedTexts,
    ) -> Result<Self, WireError> {
        let mut prerequisites = Records::default();
        let mut updates = Records::default();
        for step in &transaction.steps {
            match step {
                Step::Require(record) => same(&mut prerequisites, zone, record, listed)?,
                Step::RequireAbsent(name, record_type) => {
                    prerequisites.push(zone, name, *record_type, CLASS_NONE, 0, &[])?;
                }
                Step::Create(record) => {
                    prerequisites.push(zone, &record.name, record.record_type, CLASS_NONE, 0, &[])?;
                }
                Step::Delete(record) | Step::Replace { before: record, .. } => {
                    same(&mut prerequisites, zone, record, listed)?;
                    updates.push(zone, &record.name, record.record_type, CLASS_ANY, 0, &[])?;
                }
            }
        }
        let mut largest = 0;
        for step in &transaction.steps {
            if let Step::Create(record) | Step::Replace { after: record, .. } = step {
                let ttl = record.ttl.unwrap_or(DEFAULT_TTL);
                largest = largest.max(record.targets.len());
                for data in data_of(record, listed)? {
                    updates.push(zone, &record.name, record.record_type, CLASS_IN, ttl, &data)?;
                }
            }
        }
        Ok(Self { name: transaction.name.clone(), prerequisites, updates, largest })
    }

    fn len(&self) -> usize {
        self.prerequisites.octets.len() + self.updates.octets.len()
    }

    /// Returns whether the transaction fits into a message.
    pub(super) fn fits(&self) -> bool {
        self.len() <= MAX_MESSAGE - MAX_HEAD
    }
}

/// Requires a set with exactly this data (RFC 2136, section 2.4.2).
fn same(
    prerequisites: &mut Records,
    zone: &Name,
    record: &Record,
    listed: &ListedTexts,
) -> Result<(), WireError> {
    for data in data_of(record, listed)? {
        prerequisites.push(zone, &record.name, record.record_type, CLASS_IN, 0, &data)?;
    }
    Ok(())
}

/// Returns the data of a set, as listed where it was listed.
fn data_of(record: &Record, listed: &ListedTexts) -> Result<Vec<Vec<u8>>, WireError> {
    let texts = match record.record_type {
        RecordType::TXT if !listed.is_empty() => listed.get(&record.key()).map_or(&[][..], Vec::as_slice),
        _ => &[],
    };
    let mut all = Vec::with_capacity(record.targets.len());
    for target in &record.targets {
        let known = all.len();
        all.extend(texts.iter().filter(|(value, _)| value == target).map(|(_, data)| data.clone()));
        if all.len() == known {
            all.push(encode(record.record_type, target)?);
        }
    }
    Ok(all)
}

/// Returns the number of leading transactions that fit into one message.
pub(super) fn fitting(transactions: &[Encoded]) -> usize {
    let mut octets = MAX_HEAD;
    let mut records = (0_u32, 0_u32);
    let fits = |transaction: &&Encoded| {
        octets += transaction.len();
        records.0 += u32::from(transaction.prerequisites.count);
        records.1 += u32::from(transaction.updates.count);
        octets <= MAX_MESSAGE && records.0.max(records.1) <= u32::from(u16::MAX)
    };
    transactions.iter().take_while(fits).count().max(1)
}

/// Builds the message for a group.
pub(super) fn message(id: u16, zone: &Name, group: &[Encoded]) -> Vec<u8> {
    let mut message = Message::new(id, UPDATE, zone, RecordType::SOA.0);
    for transaction in group {
        message.append(1, transaction.prerequisites.count, &transaction.prerequisites.octets);
    }
    for transaction in group {
        message.append(2, transaction.updates.count, &transaction.updates.octets);
    }
    message.finish()
}
