//! Encodes records into a reply.

use dns_core::{
    name::Name,
    wire::{CLASS_IN, HEADER_LEN, Query, TYPE_A, TYPE_AAAA, TYPE_PTR, TYPE_TXT},
};
use hashbrown::HashMap;

use crate::{
    question::TYPE_SRV,
    record::{Data, Record, TYPE_CNAME, TYPE_NS, TYPE_SOA},
};

/// Largest offset that a compression pointer can hold (RFC 1035, section 4.1.4).
const MAX_POINTER: usize = 0x3fff;
/// Priority of all SRV records.
const PRIORITY: u16 = 1;

/// A reply before encoding.
pub(crate) struct Reply<'a> {
    /// The query, whose id, copied flags and question are repeated.
    pub(crate) query: &'a Query<'a>,
    /// The question's name in lower case.
    pub(crate) name: &'a Name,
    /// Flags and RCODE, except flags copied from the query.
    pub(crate) flags: u16,
    /// Whether names are compressed.
    pub(crate) compress: bool,
    pub(crate) answers: &'a [Record],
    pub(crate) authority: &'a [Record],
    /// Additional section without OPT.
    pub(crate) additional: &'a [&'a Record],
    /// Options of the OPT record, which is present if the query has one.
    pub(crate) options: &'a [u8],
}

impl Reply<'_> {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Self { query, name, flags, compress, answers, authority, additional, options } = *self;
        let mut writer = Writer { out: Vec::with_capacity(512), names: HashMap::default(), compress };
        let question = &query.message[HEADER_LEN..HEADER_LEN + query.question.wire_len()];
        writer.u16(query.id);
        writer.u16(flags | query.flags & COPIED);
        let opt = usize::from(query.edns.is_some());
        for count in [1, answers.len(), authority.len(), additional.len() + opt] {
            // A section with more records exceeds the size of a message anyway.
            writer.u16(count as u16);
        }
        writer.remember(name);
        writer.out.extend_from_slice(question);
        let raw_name = query.question.raw_name;
        for record in answers.iter().chain(authority).chain(additional.iter().copied()) {
            writer.record(record, raw_name);
        }
        if let Some([fields @ .., _, _]) = query.reply_opt(0) {
            writer.out.extend_from_slice(&fields);
            writer.u16(options.len() as u16);
            writer.out.extend_from_slice(options);
        }
        writer.out
    }
}

/// RD and CD, which are copied from the query.
const COPIED: u16 = 0x0110;

/// A partly encoded message.
struct Writer<'a> {
    out: Vec<u8>,
    /// Offsets of written names and their suffixes, by lower-case wire format.
    names: HashMap<&'a [u8], u16, foldhash::fast::RandomState>,
    compress: bool,
}

impl<'a> Writer<'a> {
    fn record(&mut self, record: &'a Record, question: &[u8]) {
        match &record.owner {
            Some(owner) => self.name(owner),
            None if self.compress && question.len() > 1 => self.u16(0xc000 | HEADER_LEN as u16),
            None => self.out.extend_from_slice(question),
        }
        self.u16(match &record.data {
            Data::A(_) => TYPE_A,
            Data::Aaaa(_) => TYPE_AAAA,
            Data::Cname(_) => TYPE_CNAME,
            Data::Ns(_) => TYPE_NS,
            Data::Ptr(_) => TYPE_PTR,
            Data::Srv { .. } => TYPE_SRV,
            Data::Txt(_) => TYPE_TXT,
            Data::Soa(..) => TYPE_SOA,
            // `Draft::finish` replaces them before encoding.
            Data::Follow(..) => TYPE_CNAME,
        });
        self.u16(CLASS_IN);
        self.u32(record.ttl);
        let length_at = self.out.len();
        self.u16(0);
        self.data(&record.data);
        // All data here is shorter than 2^16 bytes: names, numbers, texts of a few hundred bytes.
        let length = (self.out.len() - length_at - 2) as u16;
        self.out[length_at..length_at + 2].copy_from_slice(&length.to_be_bytes());
    }

    fn data(&mut self, data: &'a Data) {
        match data {
            Data::A(address) => self.out.extend_from_slice(&address.octets()),
            Data::Aaaa(address) => self.out.extend_from_slice(&address.octets()),
            Data::Cname(name) | Data::Ns(name) | Data::Ptr(name) | Data::Follow(name, _) => self.name(name),
            Data::Srv { weight, port, target } => {
                for number in [PRIORITY, *weight, *port] {
                    self.u16(number);
                }
                // RFC 2782 forbids compressing the target, but other names may point to it.
                self.remember(target);
                self.out.extend_from_slice(target.as_wire());
            }
            Data::Txt(text) if text.is_empty() => self.out.push(0),
            Data::Txt(text) => {
                for string in text.chunks(255) {
                    self.out.push(string.len() as u8);
                    self.out.extend_from_slice(string);
                }
            }
            Data::Soa(domain, numbers) => {
                for host in [&b"\x02ns"[..], b"\x0ahostmaster"] {
                    self.out.extend_from_slice(host);
                    self.name(domain);
                }
                for number in numbers {
                    self.u32(*number);
                }
            }
        }
    }

    /// Appends a name, with a pointer for its longest suffix already written.
    fn name(&mut self, name: &'a Name) {
        for suffix in name.suffixes() {
            if suffix.len() == 1 {
                break;
            }
            match self.names.get(suffix) {
                Some(&at) if self.compress => return self.u16(0xc000 | at),
                Some(_) => {}
                None => self.remember_one(suffix, self.out.len()),
            }
            let label = usize::from(suffix[0]) + 1;
            self.out.extend_from_slice(&suffix[..label]);
        }
        self.out.push(0);
    }

    /// Records the suffixes of `name`, which is about to be written in full.
    fn remember(&mut self, name: &'a Name) {
        let length = name.as_wire().len();
        for suffix in name.suffixes().take_while(|suffix| suffix.len() > 1) {
            self.remember_one(suffix, self.out.len() + length - suffix.len());
        }
    }

    /// Records the offset of a suffix.
    fn remember_one(&mut self, suffix: &'a [u8], at: usize) {
        if self.compress && at <= MAX_POINTER {
            self.names.entry(suffix).or_insert(at as u16);
        }
    }

    /// Appends a number in network byte order.
    fn u16(&mut self, number: u16) {
        self.out.extend_from_slice(&number.to_be_bytes());
    }

    /// Appends a number in network byte order.
    fn u32(&mut self, number: u32) {
        self.out.extend_from_slice(&number.to_be_bytes());
    }
}
