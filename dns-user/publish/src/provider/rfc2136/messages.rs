//! Zone transfers, from SOA to SOA (RFC 5936), and updates with prerequisites (RFC 2136). Pure.

use std::collections::HashMap;

use super::wire::{
    CLASS_ANY, CLASS_IN, CLASS_NONE, HEADER, Message, MessageReader, Records, Sets, TYPE_AXFR, UPDATE,
    WireError, decode, encode,
};
use crate::{
    provider::{Step, Transaction},
    record::{Key, Name, Record, RecordType, Target},
};

/// TXT values whose strings differ from how [`encode`] splits them: each with its data as listed.
/// Only this data identifies the record in prerequisites.
pub(super) type ListedTexts = HashMap<Key, Vec<(Target, Vec<u8>)>>;

/// DNSSEC types that are ignored: servers generate them, and they conflict with nothing.
const SIGNATURES: [u16; 4] = [46, 47, 50, 51];

/// Maximum size of a transfer in octets, some five million records.
const MAX_ZONE: usize = 256 << 20;

pub(super) struct Transfer {
    apex: Name,
    id: u16,
    /// Serial number of the first SOA.
    serial: Option<u32>,
    is_complete: bool,
    sets: Sets,
    texts: ListedTexts,
    /// Octets that may still follow.
    left: usize,
}

pub(super) struct Transferred {
    pub(super) records: Vec<Record>,
    pub(super) texts: ListedTexts,
}

/// Defect of a transfer, which is discarded as a whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum TransferError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("it answers a different question")]
    OtherQuestion,
    #[error("response code {0}")]
    Code(u8),
    #[error("the first record is not the SOA of {0}")]
    NoSoa(Name),
    #[error("the zone changed during the transfer: serial numbers {first} and {last}")]
    Changed { first: u32, last: u32 },
    #[error("records follow the last SOA")]
    Trailing,
    #[error("a record of {0} is outside the zone")]
    Outside(Name),
    #[error("it ended before the last SOA")]
    Incomplete,
    #[error("the zone is larger than {} MiB", MAX_ZONE >> 20)]
    TooLarge,
}

impl Transfer {
    pub(super) fn new(apex: &Name, id: u16) -> Self {
        Self {
            apex: apex.clone(),
            id,
            serial: None,
            is_complete: false,
            sets: Sets::default(),
            texts: ListedTexts::new(),
            left: MAX_ZONE,
        }
    }

    /// Processes the next message, without its signature. Returns whether it was the last one.
    pub(super) fn take(&mut self, message: &[u8]) -> Result<bool, TransferError> {
        self.left = self.left.checked_sub(message.len()).ok_or(TransferError::TooLarge)?;
        let mut reader = MessageReader::new(message);
        let header = reader.header()?;
        if header.id != self.id || !header.is_response() {
            return Err(TransferError::OtherQuestion);
        }
        if header.rcode() != 0 {
            return Err(TransferError::Code(header.rcode()));
        }
        // Messages after the first one may omit the question (RFC 5936, section 2.2.1).
        for _ in 0..header.counts[0] {
            let (name, record_type) = reader.question()?;
            if name != self.apex || record_type != TYPE_AXFR {
                return Err(TransferError::OtherQuestion);
            }
        }
        for _ in 0..header.counts[1] {
            let record = reader.record()?;
            if self.is_complete {
                return Err(TransferError::Trailing);
            }
            let is_soa = record.record_type == RecordType::SOA && record.name == self.apex;
            match (self.serial, is_soa) {
                (None, true) => self.serial = Some(soa_serial(message, record.data.start)?),
                (None, false) => return Err(TransferError::NoSoa(self.apex.clone())),
                (Some(first), true) => {
                    let last = soa_serial(message, record.data.start)?;
                    if first != last {
                        return Err(TransferError::Changed { first, last });
                    }
                    self.is_complete = true;
                }
                (Some(_), false) => {
                    if !record.name.is_within(&self.apex) {
                        return Err(TransferError::Outside(record.name));
                    }
                    if record.class == CLASS_IN && !SIGNATURES.contains(&record.record_type.0) {
                        let target = decode(message, &record)?;
                        let name = record.name.clone();
                        let is_new = self.sets.add(name, record.record_type, record.ttl, target.clone());
                        if record.record_type == RecordType::TXT {
                            self.keep_text(record.name, target, &message[record.data], is_new)?;
                        }
                    }
                }
            }
        }
        Ok(self.is_complete)
    }

    /// Keeps the data of a TXT record if it cannot be derived from the value.
    fn keep_text(&mut self, name: Name, target: Target, data: &[u8], is_new: bool) -> Result<(), WireError> {
        let canonical = encode(RecordType::TXT, &target)?;
        if is_new && canonical == data {
            return Ok(());
        }
        let key = Key { name, set_identifier: String::new(), record_type: RecordType::TXT };
        let known = self.texts.entry(key).or_default();
        if !is_new && !known.iter().any(|(value, _)| *value == target) {
            // The record with the same value that came before.
            known.push((target.clone(), canonical));
        }
        known.push((target, data.to_vec()));
        Ok(())
    }

    /// Returns the zone without the SOA and the zone's own NS records, which the server manages.
    pub(super) fn finish(self) -> Result<Transferred, TransferError> {
        let Self { apex, id: _, serial: _, is_complete, sets, texts, left: _ } = self;
        if !is_complete {
            return Err(TransferError::Incomplete);
        }
        let mut records = sets.finish();
        records.retain(|record| record.record_type != RecordType::NS || record.name != apex);
        Ok(Transferred { records, texts })
    }
}

fn soa_serial(message: &[u8], data: usize) -> Result<u32, WireError> {
    let mut reader = MessageReader::at(message, data);
    reader.name()?;
    reader.name()?;
    reader.u32()
}

/// Maximum size of an update in octets, below the limit of TCP with room for a signature.
const MAX_MESSAGE: usize = 64_000;

/// Maximum size of header and zone section in octets.
const MAX_HEAD: usize = HEADER + Name::MAX_WIRE + 4;

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
