//! DNS messages for zone transfers, from SOA to SOA (RFC 5936), for updates with prerequisites (RFC 2136), and for
//! queries that prove them. Pure.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use crate::{
    provider::{Step, Transaction},
    record::{Key, Name, Record, RecordType, Target, quoted_strings},
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
    records: BTreeMap<Key, Record>,
    texts: ListedTexts,
    /// Octets that may still follow.
    left: usize,
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
            records: BTreeMap::new(),
            texts: ListedTexts::new(),
            left: MAX_ZONE,
        }
    }

    /// Processes the next message, without its signature. Returns whether it was the last one.
    pub(super) fn take(&mut self, message: &[u8]) -> Result<bool, TransferError> {
        // A server that never sends the last SOA would fill the memory.
        self.left = self
            .left
            .checked_sub(message.len())
            .ok_or(TransferError::TooLarge)?;
        let mut reader = MessageReader::new(message);
        let header = reader.header()?;
        // RFC 5936, section 2.2.1: all messages of a transfer have the ID of the query.
        if header.id != self.id || !header.is_response() {
            return Err(TransferError::OtherQuestion);
        }
        // Also in a later message: a server may give up in the middle.
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
            // What follows the last SOA belongs to no transfer; the server may have mixed two.
            if self.is_complete {
                return Err(TransferError::Trailing);
            }
            let is_soa = record.record_type == RecordType::SOA && record.name == self.apex;
            match (self.serial, is_soa) {
                (None, true) => self.serial = Some(soa_serial(message, record.data.start)?),
                (None, false) => return Err(TransferError::NoSoa(self.apex.clone())),
                (Some(first), true) => {
                    let last = soa_serial(message, record.data.start)?;
                    // Records of two versions would be mixed.
                    if first != last {
                        return Err(TransferError::Changed { first, last });
                    }
                    self.is_complete = true;
                }
                (Some(_), false) => self.keep(message, record)?,
            }
        }
        Ok(self.is_complete)
    }

    /// Keeps a record between the first SOA and the last one.
    fn keep(&mut self, message: &[u8], record: RawRecord) -> Result<(), TransferError> {
        // It would be planned in a zone to which it does not belong.
        if !record.name.is_within(&self.apex) {
            return Err(TransferError::Outside(record.name));
        }
        if record.class != CLASS_IN || SIGNATURES.contains(&record.record_type.0) {
            return Ok(());
        }
        let target = decode(message, &record)?;
        let mut set = Record::new(record.name, record.record_type, []);
        // The first record's: all records of a set have one TTL (RFC 2181, section 5.2).
        set.ttl = Some(record.ttl);
        let key = set.key();
        let set = self.records.entry(key.clone()).or_insert(set);
        let is_new = set.targets.insert(target.clone());
        if record.record_type == RecordType::TXT {
            self.keep_text(key, target, &message[record.data], is_new)?;
        }
        Ok(())
    }

    /// Keeps the data of a TXT record if it cannot be derived from the value.
    fn keep_text(
        &mut self,
        key: Key,
        target: Target,
        data: &[u8],
        is_new: bool,
    ) -> Result<(), WireError> {
        let canonical = encode(RecordType::TXT, &target)?;
        // Nearly all texts: one string, or strings that are full but for the last one.
        if is_new && canonical == data {
            return Ok(());
        }
        let known = self.texts.entry(key).or_default();
        if !is_new && !known.iter().any(|(value, _)| *value == target) {
            // The record with the same value that came before.
            known.push((target.clone(), canonical));
        }
        known.push((target, data.to_vec()));
        Ok(())
    }

    /// Returns the zone without the SOA and the zone's own NS records, which the server manages.
    pub(super) fn finish(self) -> Result<(Vec<Record>, ListedTexts), TransferError> {
        let Self {
            apex,
            id: _,
            serial: _,
            is_complete,
            records,
            texts,
            left: _,
        } = self;
        if !is_complete {
            // What is missing would look deleted. (External-dns takes a broken transfer for an empty zone.)
            return Err(TransferError::Incomplete);
        }
        let mut sets: Vec<Record> = records.into_values().collect();
        // A server ignores the deletion of this NS set (RFC 2136, section 3.4.2.3).
        sets.retain(|set| set.record_type != RecordType::NS || set.name != apex);
        Ok((sets, texts))
    }
}

fn soa_serial(message: &[u8], data: usize) -> Result<u32, WireError> {
    let mut reader = MessageReader::at(message, data);
    // The primary's name and the mailbox of the administrator (RFC 1035, section 3.3.13).
    reader.name()?;
    reader.name()?;
    reader.u32()
}

/// Maximum size of an update in octets, below the limit of TCP with room for a signature.
const MAX_MESSAGE: usize = 64_000;

/// Maximum size of header and zone section in octets.
const MAX_HEAD: usize = HEADER + Name::MAX_WIRE + 4;

/// Default TTL of new records in seconds.
pub const DEFAULT_TTL: u32 = 60;

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
    /// An old set is required with all its data, and deleted as a set before new records are added.
    /// TXT values in `listed` keep their strings.
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
                // RFC 2136, section 2.4.3.
                Step::RequireAbsent(name, record_type) => {
                    prerequisites.push(zone, name, *record_type, CLASS_NONE, 0, &[])?;
                }
                // Another writer may have created it since the listing.
                Step::Create(record) => {
                    prerequisites.push(
                        zone,
                        &record.name,
                        record.record_type,
                        CLASS_NONE,
                        0,
                        &[],
                    )?;
                }
                // A server refuses a CNAME beside other data silently (RFC 2136, section 3.4.2.2), so the set goes
                // before new records come.
                Step::Delete(record) | Step::Replace { before: record, .. } => {
                    same(&mut prerequisites, zone, record, listed)?;
                    updates.push(zone, &record.name, record.record_type, CLASS_ANY, 0, &[])?;
                }
            }
        }
        let mut largest = 0;
        for step in &transaction.steps {
            if let Step::Create(record) | Step::Replace { after: record, .. } = step {
                // Unlike a zone file, an update has no default of its own.
                let ttl = record.ttl.unwrap_or(DEFAULT_TTL);
                largest = largest.max(record.targets.len());
                for data in data_of(record, listed)? {
                    updates.push(zone, &record.name, record.record_type, CLASS_IN, ttl, &data)?;
                }
            }
        }
        Ok(Self {
            name: transaction.name.clone(),
            prerequisites,
            updates,
            largest,
        })
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
        // A server compares data octet by octet, and `"ab"` differs from `"a" "b"`.
        RecordType::TXT if !listed.is_empty() => {
            listed.get(&record.key()).map_or(&[][..], Vec::as_slice)
        }
        _ => &[],
    };
    let mut all = Vec::with_capacity(record.targets.len());
    for target in &record.targets {
        let known = all.len();
        for (value, data) in texts {
            if value == target {
                all.push(data.clone());
            }
        }
        if all.len() == known {
            all.push(encode(record.record_type, target)?);
        }
    }
    Ok(all)
}

pub(super) fn fitting(transactions: &[Encoded]) -> usize {
    let mut octets = MAX_HEAD;
    let mut records = (0_u32, 0_u32);
    transactions
        .iter()
        .take_while(|transaction| {
            octets += transaction.len();
            records.0 += u32::from(transaction.prerequisites.count);
            records.1 += u32::from(transaction.updates.count);
            // Each section counts its records in 16 bits (RFC 1035, section 4.1.1).
            octets <= MAX_MESSAGE && records.0.max(records.1) <= u32::from(u16::MAX)
        })
        .count()
        // A transaction that fits no message was refused by `fits`.
        .max(1)
}

pub(super) fn message(id: u16, zone: &Name, group: &[Encoded]) -> Vec<u8> {
    let mut message = question(id, UPDATE, zone, RecordType::SOA.0);
    // All prerequisites precede the updates, and all must hold (RFC 2136, section 3.2).
    for transaction in group {
        append(&mut message, 1, &transaction.prerequisites);
    }
    for transaction in group {
        append(&mut message, 2, &transaction.updates);
    }
    message
}

/// Size of a message header in octets.
pub(super) const HEADER: usize = 12;
pub(super) const CLASS_IN: u16 = 1;
/// Class NONE: a set must not exist (RFC 2136, section 2.4.3).
const CLASS_NONE: u16 = 254;
/// Class ANY: a set is deleted (RFC 2136, section 2.5.2).
pub(super) const CLASS_ANY: u16 = 255;
pub(super) const TYPE_AXFR: u16 = 252;
pub(super) const TYPE_TSIG: u16 = 250;
const UPDATE: u16 = 5;
/// Pointer to the name in the question or zone section, which follows the header.
const ZONE_POINTER: [u8; 2] = [0xc0, HEADER as u8];
/// Maximum length of a string within TXT data.
const MAX_STRING: usize = 255;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct WireError(pub(super) &'static str);

/// Starts a message with the question, or zone, `name record_type IN`.
pub(super) fn question(id: u16, opcode: u16, name: &Name, record_type: u16) -> Vec<u8> {
    let mut message = Vec::with_capacity(512);
    // Flags are zero but for the opcode: recursion is not desired of an authoritative server.
    for word in [id, opcode << 11, 1, 0, 0, 0] {
        message.extend(word.to_be_bytes());
    }
    push_name(&mut message, name);
    message.extend(record_type.to_be_bytes());
    message.extend(CLASS_IN.to_be_bytes());
    message
}

/// Appends encoded records to the section with this index (1 for prerequisites or answers, 2
/// for updates) and adds to its count.
pub(super) fn append(message: &mut Vec<u8>, section: usize, records: &Records) {
    let at = 4 + 2 * section;
    let before = u16::from_be_bytes([message[at], message[at + 1]]);
    message[at..at + 2].copy_from_slice(&before.saturating_add(records.count).to_be_bytes());
    message.extend_from_slice(&records.octets);
}

#[derive(Debug, Clone, Default)]
pub(super) struct Records {
    pub(super) octets: Vec<u8>,
    pub(super) count: u16,
}

impl Records {
    /// Appends a record whose name is within `zone`, the name of the message's question.
    pub(super) fn push(
        &mut self,
        zone: &Name,
        name: &Name,
        record_type: RecordType,
        class: u16,
        ttl: u32,
        data: &[u8],
    ) -> Result<(), WireError> {
        let length =
            u16::try_from(data.len()).map_err(|_| WireError("data above 65,535 octets"))?;
        push_name_below(&mut self.octets, name, zone);
        self.octets.extend(record_type.0.to_be_bytes());
        self.octets.extend(class.to_be_bytes());
        self.octets.extend(ttl.to_be_bytes());
        self.octets.extend(length.to_be_bytes());
        self.octets.extend_from_slice(data);
        self.count = self
            .count
            .checked_add(1)
            .ok_or(WireError("above 65,535 records"))?;
        Ok(())
    }
}

/// Appends a name without compression.
pub(super) fn push_name(octets: &mut Vec<u8>, name: &Name) {
    for label in name.raw_labels() {
        // Labels have at most 63 octets.
        octets.push(label.len() as u8);
        octets.extend(label);
    }
    octets.push(0);
}

/// Appends a name that ends with a pointer to the message's zone.
fn push_name_below(octets: &mut Vec<u8>, name: &Name, zone: &Name) {
    // A pointer to the root takes two octets, the root itself one.
    if zone.is_root() || !name.is_within(zone) {
        return push_name(octets, name);
    }
    let own = name.labels().count() - zone.labels().count();
    for label in name.raw_labels().take(own) {
        octets.push(label.len() as u8);
        octets.extend(label);
    }
    // Every server reads pointers (RFC 1035, section 4.1.4), and the zone ends each owner name.
    octets.extend(ZONE_POINTER);
}

/// Data that no [`Target`] has.
const MALFORMED: WireError = WireError("malformed data");

fn push_numbers(octets: &mut Vec<u8>, numbers: &str) -> Result<(), WireError> {
    for number in numbers.split_ascii_whitespace() {
        octets.extend(number.parse::<u16>().map_err(|_| MALFORMED)?.to_be_bytes());
    }
    Ok(())
}

pub(super) fn encode(record_type: RecordType, target: &Target) -> Result<Vec<u8>, WireError> {
    let text = target.as_str();
    let mut data = Vec::new();
    match record_type {
        RecordType::A | RecordType::AAAA => match text.parse().map_err(|_| MALFORMED)? {
            IpAddr::V4(address) => data.extend(address.octets()),
            IpAddr::V6(address) => data.extend(address.octets()),
        },
        RecordType::CNAME | RecordType::DNAME | RecordType::NS | RecordType::PTR => {
            push_host(&mut data, text)?
        }
        RecordType::TXT => {
            let value = target.text_octets();
            // TXT data has one string at least (RFC 1035, section 3.3.14).
            if value.is_empty() {
                data.push(0);
            }
            for string in value.chunks(MAX_STRING) {
                data.push(string.len() as u8);
                data.extend(string);
            }
        }
        RecordType::MX | RecordType::SRV => {
            let (numbers, host) = text.rsplit_once(' ').ok_or(MALFORMED)?;
            push_numbers(&mut data, numbers)?;
            push_host(&mut data, host)?;
        }
        RecordType::NAPTR => {
            let (head, replacement) = text.rsplit_once(' ').ok_or(MALFORMED)?;
            let (numbers, strings) = head.split_once('"').ok_or(MALFORMED)?;
            push_numbers(&mut data, numbers)?;
            let strings = format!("\"{strings}");
            let strings = quoted_strings(&strings).ok_or(MALFORMED)?;
            for string in strings {
                data.push(
                    u8::try_from(string.len())
                        .map_err(|_| WireError("a string above 255 octets"))?,
                );
                data.extend(string);
            }
            push_host(&mut data, replacement)?;
        }
        _ => {
            let (head, hex) = text.rsplit_once(' ').ok_or(MALFORMED)?;
            // Without data, the length is last (RFC 3597, section 5).
            let hex = if head == r"\#" { "" } else { hex };
            for pair in hex.as_bytes().chunks(2) {
                let digits = std::str::from_utf8(pair).unwrap_or_default();
                data.push(u8::from_str_radix(digits, 16).map_err(|_| MALFORMED)?);
            }
        }
    }
    Ok(data)
}

fn push_host(octets: &mut Vec<u8>, text: &str) -> Result<(), WireError> {
    let name = Name::parse(text).map_err(|_| MALFORMED)?;
    // Not compressed: names in the data of SRV, NAPTR and DNAME must not be (RFC 3597, section 4).
    push_name(octets, &name);
    Ok(())
}

/// Cursor over the bytes of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageReader<'a> {
    message: &'a [u8],
    pub(super) at: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) id: u16,
    pub(super) flags: u16,
    /// Number of records in each section; the first are questions.
    pub(super) counts: [u16; 4],
}

impl Header {
    pub(super) fn is_response(self) -> bool {
        self.flags & 0x8000 != 0
    }

    pub(super) fn rcode(self) -> u8 {
        (self.flags & 0xf) as u8
    }
}

/// An undecoded record of a message.
#[derive(Debug, Clone)]
pub(super) struct RawRecord {
    pub(super) name: Name,
    pub(super) record_type: RecordType,
    pub(super) class: u16,
    pub(super) ttl: u32,
    /// Offsets of the record and of its data in the message.
    pub(super) start: usize,
    pub(super) data: std::ops::Range<usize>,
}

impl<'a> MessageReader<'a> {
    pub(super) fn new(message: &'a [u8]) -> Self {
        Self { message, at: 0 }
    }

    pub(super) fn at(message: &'a [u8], at: usize) -> Self {
        Self { message, at }
    }

    pub(super) fn header(&mut self) -> Result<Header, WireError> {
        let mut words = [0; 6];
        for word in &mut words {
            *word = self.u16()?;
        }
        let [id, flags, counts @ ..] = words;
        Ok(Header { id, flags, counts })
    }

    pub(super) fn octets(&mut self, count: usize) -> Result<&'a [u8], WireError> {
        let end = self
            .at
            .checked_add(count)
            .ok_or(WireError("a length beyond the message"))?;
        let octets = self
            .message
            .get(self.at..end)
            .ok_or(WireError("it is truncated"))?;
        self.at = end;
        Ok(octets)
    }

    pub(super) fn u8(&mut self) -> Result<u8, WireError> {
        Ok(self.octets(1)?[0])
    }

    pub(super) fn u16(&mut self) -> Result<u16, WireError> {
        let octets = self.octets(2)?;
        Ok(u16::from_be_bytes([octets[0], octets[1]]))
    }

    pub(super) fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from(self.u16()?) << 16 | u32::from(self.u16()?))
    }

    /// Reads a name, following only backward pointers (RFC 1035, section 4.1.4).
    pub(super) fn name(&mut self) -> Result<Name, WireError> {
        let mut labels: Vec<&[u8]> = Vec::new();
        let mut reader = *self;
        let mut lowest = self.at;
        let mut is_behind_pointer = false;
        loop {
            let length = reader.u8()?;
            match length {
                0 => break,
                1..=63 => labels.push(reader.octets(usize::from(length))?),
                192.. => {
                    let target = usize::from(length & 0x3f) << 8 | usize::from(reader.u8()?);
                    // The reader continues behind the first pointer, wherever that leads.
                    if !is_behind_pointer {
                        self.at = reader.at;
                        is_behind_pointer = true;
                    }
                    // A loop of pointers would never end.
                    if target >= lowest {
                        return Err(WireError("a name's pointer points forward"));
                    }
                    lowest = target;
                    reader.at = target;
                }
                _ => return Err(WireError("a label of an unknown kind")),
            }
            // A chain of pointers may repeat a message's labels; each takes two octets at least.
            if labels.len() > Name::MAX_WIRE / 2 {
                return Err(WireError("a name with too many labels"));
            }
        }
        if !is_behind_pointer {
            self.at = reader.at;
        }
        Name::from_labels(&labels).map_err(|_| WireError("a malformed name"))
    }

    /// Reads octets behind their number, of two octets.
    pub(super) fn counted(&mut self) -> Result<&'a [u8], WireError> {
        let length = usize::from(self.u16()?);
        self.octets(length)
    }

    pub(super) fn question(&mut self) -> Result<(Name, u16), WireError> {
        let name = self.name()?;
        let record_type = self.u16()?;
        self.u16()?;
        Ok((name, record_type))
    }

    pub(super) fn record(&mut self) -> Result<RawRecord, WireError> {
        let start = self.at;
        let name = self.name()?;
        let record_type = RecordType(self.u16()?);
        let class = self.u16()?;
        let ttl = self.u32()?;
        let length = usize::from(self.u16()?);
        let data = self.at..self.at + length;
        self.octets(length)?;
        Ok(RawRecord {
            name,
            record_type,
            class,
            ttl,
            start,
            data,
        })
    }
}

fn address<const LENGTH: usize>(data: &[u8]) -> Result<String, WireError>
where
    IpAddr: From<[u8; LENGTH]>,
{
    let octets =
        <[u8; LENGTH]>::try_from(data).map_err(|_| WireError("an address of another length"))?;
    Ok(IpAddr::from(octets).to_string())
}

/// Decodes record data, whose names may be compressed.
pub(super) fn decode(message: &[u8], record: &RawRecord) -> Result<Target, WireError> {
    let data = &message[record.data.clone()];
    let mut reader = MessageReader::at(message, record.data.start);
    let text = match record.record_type {
        RecordType::A => address::<4>(data)?,
        RecordType::AAAA => address::<16>(data)?,
        RecordType::CNAME | RecordType::DNAME | RecordType::NS | RecordType::PTR => {
            reader.name()?.to_string()
        }
        RecordType::TXT => {
            let mut value = Vec::with_capacity(data.len());
            while reader.at < record.data.end {
                let length = usize::from(reader.u8()?);
                value.extend_from_slice(reader.octets(length)?);
            }
            // A string must not reach into the next record.
            return if reader.at == record.data.end {
                Ok(Target::text(&value))
            } else {
                Err(MALFORMED)
            };
        }
        RecordType::MX => format!("{} {}", reader.u16()?, reader.name()?),
        RecordType::SRV => {
            format!(
                "{} {} {} {}",
                reader.u16()?,
                reader.u16()?,
                reader.u16()?,
                reader.name()?
            )
        }
        RecordType::NAPTR => {
            let mut text = format!("{} {}", reader.u16()?, reader.u16()?);
            for _ in 0..3 {
                let length = usize::from(reader.u8()?);
                let string = Target::text(reader.octets(length)?);
                text.push_str(&format!(" \"{}\"", string.as_str().replace('"', "\\\"")));
            }
            format!("{text} {}", reader.name()?)
        }
        _ => {
            let hex = dns_kit::hex(data);
            format!(r"\# {} {hex}", data.len())
        }
    };
    let is_read = reader.at > record.data.start;
    // A name in the data must not reach into the next record.
    if is_read && reader.at != record.data.end {
        return Err(WireError("data of another length"));
    }
    Target::parse(record.record_type, &text).map_err(|_| MALFORMED)
}

/// A changed set, and the data that it should have now.
pub(super) struct ChangedSet<'a> {
    /// Place of the transaction in its batch.
    pub(super) place: usize,
    pub(super) name: &'a Name,
    pub(super) record_type: RecordType,
    /// Empty for a deleted set.
    expected: &'a BTreeSet<Target>,
}

static NOTHING: BTreeSet<Target> = BTreeSet::new();

/// Returns the sets that a transaction changes.
pub(super) fn changed_sets(place: usize, transaction: &Transaction) -> Vec<ChangedSet<'_>> {
    let mut found = Vec::new();
    for step in &transaction.steps {
        let (record, expected) = match step {
            Step::Create(record) | Step::Replace { after: record, .. } => (record, &record.targets),
            Step::Delete(record) => (record, &NOTHING),
            Step::Require(_) | Step::RequireAbsent(..) => continue,
        };
        found.push(ChangedSet {
            place,
            name: &record.name,
            record_type: record.record_type,
            expected,
        });
    }
    found
}

impl ChangedSet<'_> {
    /// Returns whether the response to a query for the set shows exactly the expected data.
    pub(super) fn is_proven(&self, message: &[u8]) -> Result<bool, WireError> {
        let mut reader = MessageReader::new(message);
        let header = reader.header()?;
        // NXDOMAIN proves a deletion as well.
        let is_answer = header.is_response() && matches!(header.rcode(), 0 | 3);
        if !is_answer {
            return Ok(false);
        }
        for _ in 0..header.counts[0] {
            reader.question()?;
        }
        let mut found = BTreeSet::new();
        for _ in 0..header.counts[1] {
            let record = reader.record()?;
            // Behind a CNAME, records of its target follow, which are not the set.
            let is_asked = record.name == *self.name
                && record.record_type == self.record_type
                && record.class == CLASS_IN;
            if is_asked {
                found.insert(decode(message, &record)?);
            }
        }
        // A wildcard may answer for a deleted name; then the next listing decides.
        Ok(found == *self.expected)
    }
}
