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
            // Records after the last SOA belong to no transfer; the server may have mixed two.
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
        if !self.is_complete {
            // Missing records would look deleted. (External-dns takes a broken transfer for an empty zone.)
            return Err(TransferError::Incomplete);
        }
        let mut sets: Vec<Record> = self.records.into_values().collect();
        // A server ignores the deletion of this NS set (RFC 2136, section 3.4.2.3).
        sets.retain(|set| set.record_type != RecordType::NS || set.name != self.apex);
        Ok((sets, self.texts))
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
                // RFC 2136, section 2.4.3. Another writer may have created the set since the listing.
                Step::RequireAbsent(name, record_type)
                | Step::Create(Record {
                    name, record_type, ..
                }) => {
                    prerequisites.push(zone, name, *record_type, CLASS_NONE, 0, &[])?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    fn apex() -> Name {
        name("example.org")
    }

    fn set(line: &str) -> Record {
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        let record_type: RecordType = words[1].parse().unwrap();
        let targets = words[2].split('|');
        Record::parse(&format!("{}.example.org", words[0]), record_type, targets).unwrap()
    }

    fn hex(octets: &[u8]) -> String {
        dns_kit::hex(octets)
    }

    fn target(record_type: RecordType, text: &str) -> Target {
        Target::parse(record_type, text).unwrap()
    }

    #[test]
    fn data_have_the_types_form() {
        let ten = "01".repeat(10);
        for (record_type, text, expected) in [
            (RecordType::A, "192.0.2.1", "c0000201"),
            (
                RecordType::AAAA,
                "2001:db8::1",
                "20010db8000000000000000000000001",
            ),
            (RecordType::CNAME, "a.bc", "0161026263 00"),
            (RecordType::NS, ".", "00"),
            (RecordType::PTR, r"a\.b", "03612e62 00"),
            (RecordType::DNAME, "a", "0161 00"),
            (RecordType::TXT, "\"\"", "00"),
            (RecordType::TXT, "ab", "026162"),
            (RecordType::MX, "10 a", "000a 0161 00"),
            (RecordType::SRV, "1 2 65535 a", "0001 0002 ffff 0161 00"),
            (
                RecordType::NAPTR,
                r#"1 2 "s" "" "x\"y" a"#,
                "0001 0002 0173 00 03782279 0161 00",
            ),
            (RecordType(65280), r"\# 2 abcd", "abcd"),
            (RecordType(65280), r"\# 0", ""),
            (RecordType(65280), &format!(r"\# 10 {ten}"), &ten),
        ] {
            let data = encode(record_type, &target(record_type, text)).unwrap();
            assert_eq!(
                hex(&data),
                expected.replace(' ', ""),
                "{record_type} {text}"
            );
            // And back again, behind a question to which no name points.
            let mut section = Records::default();
            section
                .push(&Name::root(), &apex(), record_type, CLASS_IN, 7, &data)
                .unwrap();
            let mut message = question(1, 0, &apex(), TYPE_AXFR);
            append(&mut message, 1, &section);
            let mut reader = MessageReader::new(&message);
            reader.header().unwrap();
            reader.question().unwrap();
            let record = reader.record().unwrap();
            assert_eq!((record.ttl, record.class), (7, CLASS_IN));
            assert_eq!(
                decode(&message, &record).unwrap(),
                target(record_type, text)
            );
        }
        // A string has at most 255 octets, and a text as many strings as it needs.
        for (length, lengths) in [
            (255, &[255][..]),
            (256, &[255, 1]),
            (510, &[255, 255]),
            (511, &[255, 255, 1]),
        ] {
            let text = Target::text(&vec![b'x'; length]);
            let data = encode(RecordType::TXT, &text).unwrap();
            let mut at = 0;
            let mut found = Vec::new();
            while at < data.len() {
                found.push(usize::from(data[at]));
                at += 1 + usize::from(data[at]);
            }
            assert_eq!((found.as_slice(), at), (lengths, data.len()));
        }
        let long = "y".repeat(256);
        let text = target(RecordType::NAPTR, &format!(r#"1 2 "s" "" "{long}" a"#));
        assert_eq!(
            encode(RecordType::NAPTR, &text),
            Err(WireError("a string above 255 octets"))
        );
    }

    #[test]
    fn malformed_data_are_refused() {
        let decoded = |record_type: RecordType, data: &[u8]| {
            let mut section = Records::default();
            section
                .push(&Name::root(), &apex(), record_type, CLASS_IN, 0, data)
                .unwrap();
            let mut message = question(1, 0, &apex(), TYPE_AXFR);
            append(&mut message, 1, &section);
            // The bytes that follow are another record's.
            message.extend([1, b'a', 0, 0, 0, 0]);
            let mut reader = MessageReader::new(&message);
            reader.header().unwrap();
            reader.question().unwrap();
            decode(&message, &reader.record().unwrap())
        };
        let address = Err(WireError("an address of another length"));
        assert_eq!(decoded(RecordType::A, &[1, 2, 3]), address);
        assert_eq!(decoded(RecordType::A, &[1; 5]), address);
        assert_eq!(decoded(RecordType::AAAA, &[1; 4]), address);
        assert_eq!(
            decoded(RecordType::AAAA, &[0; 16]),
            Ok(target(RecordType::AAAA, "::"))
        );
        let other = Err(WireError("data of another length"));
        assert_eq!(decoded(RecordType::CNAME, &[1, b'a']), other);
        assert_eq!(decoded(RecordType::CNAME, &[1, b'a', 0, 0]), other);
        assert_eq!(decoded(RecordType::MX, &[0, 1, 1, b'a']), other);
        assert_eq!(decoded(RecordType::TXT, &[2, b'a']), Err(MALFORMED));
        assert_eq!(
            decoded(RecordType::TXT, &[1, b'a', 0]),
            Ok(Target::text(b"a"))
        );
        assert_eq!(
            decoded(RecordType(99), &[]),
            Ok(target(RecordType(99), r"\# 0"))
        );
    }

    #[test]
    fn names_follow_backward_pointers_only() {
        let read = |octets: &[u8], at: usize| {
            let mut reader = MessageReader::at(octets, at);
            let name = reader.name();
            (name.map(|name| name.to_string()), reader.at)
        };
        // `b.c` at 0, and at 5 `a` with a pointer to it.
        let octets = [1, b'b', 1, b'C', 0, 1, b'a', 0xc0, 0, 0xff];
        assert_eq!(read(&octets, 0), (Ok("b.c".to_owned()), 5));
        assert_eq!(read(&octets, 5), (Ok("a.b.c".to_owned()), 9));
        assert_eq!(read(&octets, 7), (Ok("b.c".to_owned()), 9));
        assert_eq!(read(&octets, 2), (Ok("c".to_owned()), 5));
        assert_eq!(read(&[0], 0), (Ok(".".to_owned()), 1));
        // The reader continues behind the first of two pointers.
        let chain = [1, b'b', 0, 0xc0, 0, 0xc0, 3, 9];
        assert_eq!(read(&chain, 5), (Ok("b".to_owned()), 7));
        let error = |octets: &[u8], at| read(octets, at).0.unwrap_err().0;
        let forward = "a name's pointer points forward";
        assert_eq!(error(&[0xc0, 0], 0), forward, "to itself");
        assert_eq!(error(&[0xc0, 2, 0], 0), forward);
        assert_eq!(error(&[0xc0, 2, 0xc0, 0], 2), forward, "back and forth");
        assert_eq!(error(&[64, 0], 0), "a label of an unknown kind");
        assert_eq!(error(&[191, 0], 0), "a label of an unknown kind");
        assert_eq!(error(&[2, b'a'], 0), "it is truncated");
        assert_eq!(error(&[0xc0], 0), "it is truncated");
        // A pointer has 14 bits.
        let mut far = vec![0; 0x1ff];
        far[0x101..0x104].copy_from_slice(&[1, b'z', 0]);
        far[0x110..0x112].copy_from_slice(&[0xc1, 0x01]);
        assert_eq!(read(&far, 0x110), (Ok("z".to_owned()), 0x112));
        let longest = [&[1, b'a'].repeat(127)[..], &[0]].concat();
        assert_eq!(read(&longest, 0).0.unwrap().len(), 253);
        let above = [&[1, b'a'].repeat(128)[..], &[0]].concat();
        assert_eq!(error(&above, 0), "a name with too many labels");
        let wide = [&[[63].as_slice(), &[b'a'; 63]].concat().repeat(4)[..], &[0]].concat();
        assert_eq!(error(&wide, 0), "a malformed name");
        let full = [[63].as_slice(), &[b'a'; 63], &[0]].concat();
        assert_eq!(read(&full, 0), (Ok("a".repeat(63)), 65));
    }

    #[test]
    fn numbers_are_read_in_network_order() {
        let octets = [1, 2, 3, 4, 5, 0, 2, 8, 9, 7];
        let mut reader = MessageReader::new(&octets);
        assert_eq!(
            (reader.u8(), reader.u32(), reader.at),
            (Ok(1), Ok(0x0203_0405), 5)
        );
        assert_eq!(reader.counted(), Ok(&[8, 9][..]));
        assert_eq!(reader.u16(), Err(WireError("it is truncated")));
        assert_eq!(
            (reader.at, reader.octets(1), reader.at),
            (9, Ok(&[7][..]), 10)
        );
        assert_eq!(reader.octets(0), Ok(&[][..]));
        assert_eq!(
            reader.octets(usize::MAX),
            Err(WireError("a length beyond the message"))
        );
        let header = MessageReader::new(&[0, 7, 0x84, 0x23, 0, 1, 0, 2, 0, 3, 0, 4])
            .header()
            .unwrap();
        let expected = Header {
            id: 7,
            flags: 0x8423,
            counts: [1, 2, 3, 4],
        };
        assert_eq!(header, expected);
        assert!(header.is_response());
        assert_eq!(header.rcode(), 3);
        let query = Header {
            flags: 0x7ff0,
            ..expected
        };
        assert!(!query.is_response());
        assert_eq!(query.rcode(), 0);
    }

    #[test]
    fn messages_follow_the_rfc() {
        assert_eq!(
            hex(&question(0x1234, UPDATE, &name("a.b"), 6)),
            "12342800000100000000000001610162000006 0001".replace(' ', "")
        );
        let mut section = Records::default();
        for owner in ["x.a.b", "a.b", "c"] {
            section
                .push(
                    &name("a.b"),
                    &name(owner),
                    RecordType::A,
                    CLASS_ANY,
                    258,
                    &[9],
                )
                .unwrap();
        }
        // Names within the zone end in a pointer to it.
        let rest = "0001 00ff 00000102 0001 09".replace(' ', "");
        let expected = format!("0178c00c{rest}c00c{rest}016300{rest}");
        assert_eq!((section.count, hex(&section.octets)), (3, expected.clone()));
        let mut message = question(1, 0, &name("a.b"), 6);
        let head = message.len();
        append(&mut message, 2, &section);
        append(&mut message, 2, &section);
        append(&mut message, 1, &section);
        assert_eq!(hex(&message[4..12]), "0001000300060000");
        assert_eq!(hex(&message[head..]), expected.repeat(3));
        let mut in_root = Records::default();
        in_root
            .push(&Name::root(), &name("c"), RecordType::A, CLASS_IN, 0, &[])
            .unwrap();
        assert_eq!(hex(&in_root.octets[..3]), "016300");
    }

    #[test]
    fn records_are_counted_in_sixteen_bits() {
        let mut section = Records {
            octets: Vec::new(),
            count: u16::MAX - 1,
        };
        let mut push = |length: usize| {
            let data = vec![0; length];
            section.push(
                &Name::root(),
                &Name::root(),
                RecordType(99),
                CLASS_IN,
                0,
                &data,
            )
        };
        assert_eq!(push(65_535), Ok(()));
        assert_eq!(push(65_536), Err(WireError("data above 65,535 octets")));
        assert_eq!(push(0), Err(WireError("above 65,535 records")));
    }

    /// Reads the records of a section of an update.
    fn lines(message: &[u8]) -> Vec<String> {
        let mut reader = MessageReader::new(message);
        let header = reader.header().unwrap();
        assert_eq!(header.flags, 5 << 11);
        let (zone, record_type) = reader.question().unwrap();
        assert_eq!((zone, record_type), (apex(), 6));
        let mut lines = Vec::new();
        for (section, count) in [("?", header.counts[1]), ("!", header.counts[2])] {
            for _ in 0..count {
                let RawRecord {
                    name,
                    record_type,
                    class,
                    ttl,
                    data,
                    ..
                } = reader.record().unwrap();
                let data = hex(&message[data]);
                lines.push(format!(
                    "{section} {name} {record_type} {class} {ttl} {data}"
                ));
            }
        }
        assert_eq!(reader.at, message.len());
        lines
    }

    #[test]
    fn updates_require_and_change_sets() {
        let mut created = set("c A 192.0.2.3");
        created.ttl = Some(300);
        let steps = vec![
            Step::Require(set("a A 192.0.2.1|192.0.2.2")),
            Step::RequireAbsent(name("b.example.org"), RecordType::CNAME),
            Step::Create(created),
            Step::Delete(set("d A 192.0.2.4")),
            Step::Replace {
                before: set("e A 192.0.2.5"),
                after: set("e A 192.0.2.6|192.0.2.7|192.0.2.8"),
            },
        ];
        let transaction = Transaction {
            name: name("a.example.org"),
            steps,
        };
        let encoded = Encoded::new(&apex(), &transaction, &ListedTexts::new()).unwrap();
        assert_eq!(
            (encoded.name.as_str(), encoded.largest),
            ("a.example.org", 3)
        );
        assert!(encoded.fits());
        assert_eq!(
            lines(&message(9, &apex(), &[encoded])),
            [
                "? a.example.org A 1 0 c0000201",
                "? a.example.org A 1 0 c0000202",
                "? b.example.org CNAME 254 0 ",
                "? c.example.org A 254 0 ",
                "? d.example.org A 1 0 c0000204",
                "? e.example.org A 1 0 c0000205",
                "! d.example.org A 255 0 ",
                "! e.example.org A 255 0 ",
                "! c.example.org A 1 300 c0000203",
                "! e.example.org A 1 60 c0000206",
                "! e.example.org A 1 60 c0000207",
                "! e.example.org A 1 60 c0000208",
            ]
        );
    }

    #[test]
    fn texts_keep_listed_strings() {
        let mut split = ListedTexts::new();
        let record = set("t TXT ab|c");
        let ab = Target::text(b"ab");
        split.insert(
            record.key(),
            vec![
                (ab.clone(), b"\x01a\x01b".to_vec()),
                (ab, b"\x02ab".to_vec()),
            ],
        );
        let data = |record: &Record, listed: &ListedTexts| {
            let found = data_of(record, listed).unwrap();
            found.iter().map(|data| hex(data)).collect::<Vec<_>>()
        };
        assert_eq!(data(&record, &split), ["01610162", "026162", "0163"]);
        assert_eq!(data(&record, &ListedTexts::new()), ["026162", "0163"]);
        assert_eq!(data(&set("other TXT ab"), &split), ["026162"]);
        assert_eq!(data(&set("t A 192.0.2.1"), &split), ["c0000201"]);
    }

    #[test]
    fn messages_hold_fitting_steps() {
        let encoded = |octets: usize, prerequisites: u16, updates: u16| Encoded {
            name: apex(),
            prerequisites: Records {
                octets: Vec::new(),
                count: prerequisites,
            },
            updates: Records {
                octets: vec![0; octets],
                count: updates,
            },
            largest: 0,
        };
        // Header, the zone's name and its type and class take 271 octets at most.
        let room = 64_000 - 271;
        for (transactions, expected) in [
            (vec![encoded(room, 1, 1)], 1),
            (vec![encoded(room, 1, 1), encoded(1, 1, 1)], 1),
            (
                vec![encoded(room - 1, 1, 1), encoded(1, 1, 1), encoded(1, 1, 1)],
                2,
            ),
            (vec![encoded(1, 65_535, 1), encoded(1, 0, 65_534)], 2),
            (vec![encoded(1, 65_535, 1), encoded(1, 1, 1)], 1),
            (vec![encoded(1, 1, 65_535), encoded(1, 1, 1)], 1),
            (vec![encoded(room + 1, 1, 1)], 0),
        ] {
            assert_eq!(fitting(&transactions), expected);
        }
        for (octets, fits) in [(room, true), (room + 1, false)] {
            assert_eq!(encoded(octets, 1, 1).fits(), fits, "{octets}");
        }
        let mut both = encoded(room - 1, 1, 1);
        both.prerequisites.octets = vec![0; 2];
        assert!(!both.fits());
    }

    /// Returns a response with records given by class, type, TTL and data.
    fn response(flags: u16, records: &[(&str, RecordType, u16, u32, &[u8])]) -> Vec<u8> {
        let mut section = Records::default();
        for (owner, record_type, class, ttl, data) in records {
            section
                .push(&apex(), &name(owner), *record_type, *class, *ttl, data)
                .unwrap();
        }
        let mut message = question(9, 0, &apex(), TYPE_AXFR);
        append(&mut message, 1, &section);
        message[2..4].copy_from_slice(&flags.to_be_bytes());
        message
    }

    const SOA: &[u8] = &[
        0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];

    #[test]
    fn listing_omits_server_managed_records() {
        let a = RecordType::A;
        let text = RecordType::TXT;
        let message = response(
            0x8400,
            &[
                ("example.org", RecordType::SOA, 1, 60, SOA),
                ("example.org", RecordType::NS, 1, 60, &[1, b'n', 0]),
                ("sub.example.org", RecordType::NS, 1, 60, &[1, b'n', 0]),
                ("a.example.org", a, 1, 60, &[192, 0, 2, 1]),
                ("a.example.org", a, 1, 90, &[192, 0, 2, 2]),
                ("a.example.org", a, 3, 60, &[192, 0, 2, 3]),
                ("a.example.org", RecordType(46), 1, 60, &[1]),
                ("a.example.org", RecordType(47), 1, 60, &[1]),
                ("a.example.org", RecordType(50), 1, 60, &[1]),
                ("a.example.org", RecordType(51), 1, 60, &[1]),
                ("a.example.org", RecordType(52), 1, 60, &[1]),
                ("a.example.org", text, 1, 60, b"\x02ab"),
                ("b.example.org", text, 1, 60, b"\x01a\x01b"),
                ("c.example.org", text, 1, 60, b"\x02ab"),
                ("c.example.org", text, 1, 60, b"\x01a\x01b"),
                ("example.org", RecordType::SOA, 1, 60, SOA),
            ],
        );
        let mut transfer = Transfer::new(&apex(), 9);
        assert_eq!(transfer.take(&message), Ok(true));
        let (records, texts) = transfer.finish().unwrap();
        let lines: Vec<String> = records.iter().map(ToString::to_string).collect();
        assert_eq!(
            lines,
            [
                "a.example.org 60 A 192.0.2.1,192.0.2.2",
                "a.example.org 60 TXT ab",
                r"a.example.org 60 TYPE52 \# 1 01",
                "b.example.org 60 TXT ab",
                "c.example.org 60 TXT ab",
                "sub.example.org 60 NS n",
            ]
        );
        let mut kept: Vec<String> = texts
            .iter()
            .map(|(key, values)| {
                let values: Vec<String> = values.iter().map(|(_, data)| hex(data)).collect();
                format!("{} {}", key.name, values.join(","))
            })
            .collect();
        kept.sort();
        assert_eq!(
            kept,
            ["b.example.org 01610162", "c.example.org 026162,01610162"]
        );
    }

    #[test]
    fn transfers_answer_their_question() {
        let whole = [
            ("example.org", RecordType::SOA, 1, 60, SOA),
            ("example.org", RecordType::SOA, 1, 60, SOA),
        ];
        let take = |message: &[u8]| Transfer::new(&apex(), 9).take(message);
        assert_eq!(take(&response(0x8400, &whole)), Ok(true));
        assert_eq!(take(&response(0x8400, &whole[..1])), Ok(false));
        assert_eq!(
            take(&response(0x0400, &whole)),
            Err(TransferError::OtherQuestion)
        );
        assert_eq!(take(&response(0x8405, &whole)), Err(TransferError::Code(5)));
        for (apex, record_type) in [("example.net", TYPE_AXFR), ("example.org", 6)] {
            let mut message = question(9, 0, &name(apex), record_type);
            message[2] = 0x84;
            assert_eq!(take(&message), Err(TransferError::OtherQuestion));
        }
        // The question may be missing.
        let mut message = response(0x8400, &whole);
        message[5] = 0;
        message.drain(12..29);
        // Without it, pointers lead elsewhere, so the names are written out.
        let mut section = Records::default();
        for (_, record_type, class, ttl, data) in whole {
            section
                .push(&Name::root(), &apex(), record_type, class, ttl, data)
                .unwrap();
        }
        message.truncate(12);
        message.extend(&section.octets);
        assert_eq!(take(&message), Ok(true));
        for (error, text) in [
            (
                TransferError::OtherQuestion,
                "it answers a different question",
            ),
            (TransferError::Code(5), "response code 5"),
            (
                TransferError::NoSoa(apex()),
                "the first record is not the SOA of example.org",
            ),
            (
                TransferError::Changed { first: 1, last: 2 },
                "the zone changed during the transfer: serial numbers 1 and 2",
            ),
            (TransferError::Trailing, "records follow the last SOA"),
            (
                TransferError::Outside(name("x")),
                "a record of x is outside the zone",
            ),
            (TransferError::Incomplete, "it ended before the last SOA"),
            (TransferError::TooLarge, "the zone is larger than 256 MiB"),
            (TransferError::Wire(WireError("x")), "x"),
        ] {
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn answers_prove_changes() {
        let www = set("a A 192.0.2.1|192.0.2.2");
        let transaction = Transaction {
            name: www.name.clone(),
            steps: vec![
                Step::Require(set("r A 192.0.2.9")),
                Step::RequireAbsent(name("n.example.org"), RecordType::A),
                Step::Create(www.clone()),
                Step::Replace {
                    before: set("b A 192.0.2.9"),
                    after: set("b A 192.0.2.1"),
                },
                Step::Delete(set("c A 192.0.2.9")),
            ],
        };
        let sets = changed_sets(4, &transaction);
        let shown: Vec<String> = sets
            .iter()
            .map(|set| {
                format!(
                    "{} {} {} {}",
                    set.place,
                    set.name,
                    set.record_type,
                    set.expected.len()
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                "4 a.example.org A 2",
                "4 b.example.org A 1",
                "4 c.example.org A 0"
            ]
        );
        let a = RecordType::A;
        let one = ("a.example.org", a, 1, 60, &[192, 0, 2, 1][..]);
        let two = ("a.example.org", a, 1, 60, &[192, 0, 2, 2][..]);
        let both = response(0x8400, &[one, two]);
        for (message, expected) in [
            (both.clone(), true),
            (response(0x8403, &[one, two]), true),
            (response(0x8402, &[one, two]), false),
            (response(0x0400, &[one, two]), false),
            (response(0x8400, &[one]), false),
            (response(0x8400, &[]), false),
            // Of other names, types and classes.
            (
                response(
                    0x8400,
                    &[
                        one,
                        two,
                        ("b.example.org", a, 1, 60, &[192, 0, 2, 3]),
                        ("a.example.org", RecordType::AAAA, 1, 60, &[0; 16]),
                        ("a.example.org", a, 3, 60, &[192, 0, 2, 4]),
                    ],
                ),
                true,
            ),
            (
                response(
                    0x8400,
                    &[one, two, ("a.example.org", a, 1, 60, &[192, 0, 2, 3])],
                ),
                false,
            ),
        ] {
            assert_eq!(sets[0].is_proven(&message), Ok(expected));
        }
        // A deletion is proven by the absence of the set.
        assert_eq!(sets[2].is_proven(&response(0x8403, &[])), Ok(true));
        assert_eq!(sets[2].is_proven(&both), Ok(true));
        let still = response(0x8400, &[("c.example.org", a, 1, 60, &[192, 0, 2, 9])]);
        assert_eq!(sets[2].is_proven(&still), Ok(false));
        assert_eq!(
            sets[0].is_proven(&both[..both.len() - 1]),
            Err(WireError("it is truncated"))
        );
    }
}
