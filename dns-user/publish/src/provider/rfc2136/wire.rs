//! DNS messages for updates and zone transfers. Pure.

use std::{collections::HashMap, net::IpAddr};

use crate::record::{Name, Record, RecordType, Target, quoted_strings};

/// Size of a message header in octets.
pub(super) const HEADER: usize = 12;
pub(super) const CLASS_IN: u16 = 1;
/// Class NONE: a set must not exist (RFC 2136, section 2.4.3).
pub(super) const CLASS_NONE: u16 = 254;
/// Class ANY: a set is deleted (RFC 2136, section 2.5.2).
pub(super) const CLASS_ANY: u16 = 255;
pub(super) const TYPE_AXFR: u16 = 252;
pub(super) const TYPE_TSIG: u16 = 250;
pub(super) const UPDATE: u16 = 5;
/// Pointer to the name in the question or zone section, which follows the header.
const ZONE_POINTER: [u8; 2] = [0xc0, HEADER as u8];
/// Maximum length of a string within TXT data.
const MAX_STRING: usize = 255;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct WireError(pub(super) &'static str);

/// Builds a message with one question or zone.
#[derive(Debug)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// Starts a message with the question `name record_type IN`.
    pub(super) fn new(id: u16, opcode: u16, name: &Name, record_type: u16) -> Self {
        let mut octets = Vec::with_capacity(512);
        for word in [id, opcode << 11, 1, 0, 0, 0] {
            octets.extend(word.to_be_bytes());
        }
        push_name(&mut octets, name);
        octets.extend(record_type.to_be_bytes());
        octets.extend(CLASS_IN.to_be_bytes());
        Self(octets)
    }

    /// Appends encoded records to the section with this index (1 for prerequisites or answers, 2
    /// for updates) and adds to its count.
    pub(super) fn append(&mut self, section: usize, count: u16, records: &[u8]) {
        let at = 4 + 2 * section;
        let before = u16::from_be_bytes([self.0[at], self.0[at + 1]]);
        self.0[at..at + 2].copy_from_slice(&before.saturating_add(count).to_be_bytes());
        self.0.extend_from_slice(records);
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Encoded records of one section.
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
        let length = u16::try_from(data.len()).map_err(|_| WireError("data above 65,535 octets"))?;
        push_name_below(&mut self.octets, name, zone);
        self.octets.extend(record_type.0.to_be_bytes());
        self.octets.extend(class.to_be_bytes());
        self.octets.extend(ttl.to_be_bytes());
        self.octets.extend(length.to_be_bytes());
        self.octets.extend_from_slice(data);
        self.count = self.count.checked_add(1).ok_or(WireError("above 65,535 records"))?;
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
    if zone.is_root() || !name.is_within(zone) {
        return push_name(octets, name);
    }
    let own = name.labels().count() - zone.labels().count();
    for label in name.raw_labels().take(own) {
        octets.push(label.len() as u8);
        octets.extend(label);
    }
    octets.extend(ZONE_POINTER);
}

fn push_numbers(octets: &mut Vec<u8>, numbers: &str) -> Result<(), WireError> {
    for number in numbers.split_ascii_whitespace() {
        let number: u16 = number.parse().map_err(|_| WireError("data with a malformed number"))?;
        octets.extend(number.to_be_bytes());
    }
    Ok(())
}

pub(super) fn encode(record_type: RecordType, target: &Target) -> Result<Vec<u8>, WireError> {
    let text = target.as_str();
    let mut data = Vec::new();
    let name = |text: &str| Name::parse(text).map_err(|_| WireError("data with a malformed name"));
    match record_type {
        RecordType::A | RecordType::AAAA => match text.parse() {
            Ok(IpAddr::V4(address)) => data.extend(address.octets()),
            Ok(IpAddr::V6(address)) => data.extend(address.octets()),
            Err(_) => return Err(WireError("data with a malformed address")),
        },
        RecordType::CNAME | RecordType::DNAME | RecordType::NS | RecordType::PTR => {
            push_name(&mut data, &name(text)?)
        }
        RecordType::TXT => {
            let value = target.text_octets();
            if value.is_empty() {
                data.push(0);
            }
            for string in value.chunks(MAX_STRING) {
                data.push(string.len() as u8);
                data.extend(string);
            }
        }
        RecordType::MX | RecordType::SRV => {
            let (numbers, host) = text.rsplit_once(' ').ok_or(WireError("data without a host"))?;
            push_numbers(&mut data, numbers)?;
            push_name(&mut data, &name(host)?);
        }
        RecordType::NAPTR => {
            let (head, replacement) = text.rsplit_once(' ').ok_or(WireError("data without a replacement"))?;
            let (numbers, strings) = head.split_once('"').ok_or(WireError("data without strings"))?;
            push_numbers(&mut data, numbers)?;
            let strings = format!("\"{strings}");
            let strings = quoted_strings(&strings).ok_or(WireError("data with an open quote"))?;
            for string in strings {
                let length =
                    u8::try_from(string.len()).map_err(|_| WireError("a string above 255 octets"))?;
                data.push(length);
                data.extend(string);
            }
            push_name(&mut data, &name(replacement)?);
        }
        _ => {
            let hex = text.rsplit_once(' ').map_or("", |(head, hex)| if head == r"\#" { "" } else { hex });
            for pair in hex.as_bytes().chunks(2) {
                let digits =
                    std::str::from_utf8(pair).map_err(|_| WireError("malformed hexadecimal data"))?;
                let octet =
                    u8::from_str_radix(digits, 16).map_err(|_| WireError("malformed hexadecimal data"))?;
                data.push(octet);
            }
        }
    }
    Ok(data)
}

/// Cursor over the bytes of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageReader<'a> {
    message: &'a [u8],
    at: usize,
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
        let end = self.at.checked_add(count).ok_or(WireError("a length beyond the message"))?;
        let octets = self.message.get(self.at..end).ok_or(WireError("it is truncated"))?;
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
                    if !is_behind_pointer {
                        self.at = reader.at;
                        is_behind_pointer = true;
                    }
                    if target >= lowest {
                        return Err(WireError("a name's pointer points forward"));
                    }
                    lowest = target;
                    reader.at = target;
                }
                _ => return Err(WireError("a label of an unknown kind")),
            }
            if labels.len() > Name::MAX_WIRE / 2 {
                return Err(WireError("a name with too many labels"));
            }
        }
        if !is_behind_pointer {
            self.at = reader.at;
        }
        Name::from_labels(&labels).map_err(|_| WireError("a malformed name"))
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
        Ok(RawRecord { name, record_type, class, ttl, start, data })
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }
}

/// Decodes record data, whose names may be compressed.
pub(super) fn decode(message: &[u8], record: &RawRecord) -> Result<Target, WireError> {
    let data = &message[record.data.clone()];
    let mut reader = MessageReader::at(message, record.data.start);
    let text = match record.record_type {
        RecordType::A => {
            let octets: [u8; 4] = data.try_into().map_err(|_| WireError("an address of another length"))?;
            IpAddr::from(octets).to_string()
        }
        RecordType::AAAA => {
            let octets: [u8; 16] = data.try_into().map_err(|_| WireError("an address of another length"))?;
            IpAddr::from(octets).to_string()
        }
        RecordType::CNAME | RecordType::DNAME | RecordType::NS | RecordType::PTR => {
            reader.name()?.to_string()
        }
        RecordType::TXT => {
            let mut value = Vec::with_capacity(data.len());
            while reader.position() < record.data.end {
                let length = usize::from(reader.u8()?);
                value.extend_from_slice(reader.octets(length)?);
            }
            // A string must not reach into the next record.
            return match reader.position() == record.data.end {
                true => Ok(Target::text(&value)),
                false => Err(WireError("malformed data")),
            };
        }
        RecordType::MX => format!("{} {}", reader.u16()?, reader.name()?),
        RecordType::SRV => {
            format!("{} {} {} {}", reader.u16()?, reader.u16()?, reader.u16()?, reader.name()?)
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
            let hex: String = data.iter().map(|octet| format!("{octet:02x}")).collect();
            format!(r"\# {} {hex}", data.len())
        }
    };
    let is_read = reader.position() > record.data.start;
    if is_read && reader.position() != record.data.end {
        return Err(WireError("data of another length"));
    }
    Target::parse(record.record_type, &text).map_err(|_| WireError("malformed data"))
}

#[derive(Debug, Default)]
pub(super) struct Sets {
    index: HashMap<(Name, RecordType), usize>,
    records: Vec<Record>,
}

impl Sets {
    /// Adds a record. Returns whether its set did not contain the same value.
    pub(super) fn add(&mut self, name: Name, record_type: RecordType, ttl: u32, target: Target) -> bool {
        let index = *self.index.entry((name.clone(), record_type)).or_insert_with(|| {
            self.records.push(Record { ttl: Some(ttl), ..Record::new(name, record_type, []) });
            self.records.len() - 1
        });
        self.records[index].targets.insert(target)
    }

    pub(super) fn finish(self) -> Vec<Record> {
        self.records
    }
}
