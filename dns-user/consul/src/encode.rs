//! Encodes records into a reply, and reads the client subnet option (RFC 7871).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dns_core::{
    name::Name,
    wire::{CLASS_IN, HEADER_LEN, Query, TYPE_A, TYPE_AAAA, TYPE_PTR, TYPE_TXT},
};
use hashbrown::{HashMap, hash_map::Entry};

use crate::{
    question::TYPE_SRV,
    record::{Answers, Data, Record, TYPE_CNAME, TYPE_NS, TYPE_SOA},
};

/// Largest offset that a compression pointer can hold (RFC 1035, section 4.1.4).
const MAX_POINTER: usize = 0x3fff;
/// Capacity for header, question and OPT, in bytes.
const FRAME: usize = 320;
/// Capacity for an SRV record with its address, in bytes.
const TYPICAL_RECORD: usize = 64;
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
    pub(crate) compress: bool,
    pub(crate) answers: &'a Answers,
    /// Number of leading answers to encode.
    pub(crate) count: usize,
    pub(crate) authority: &'a [Record],
    /// Additional section without OPT.
    pub(crate) additional: &'a [&'a Record],
    /// Options of the OPT record, which is present if the query has one.
    pub(crate) options: &'a [u8],
}

impl Reply<'_> {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Self {
            query,
            name,
            flags,
            compress,
            answers,
            count,
            authority,
            additional,
            options,
        } = *self;
        let raw_name = query.question.raw_name;
        let owner = owner_of_answers(raw_name, compress);
        let size = answers
            .size_of_addresses(count, owner.len())
            .unwrap_or(count * TYPICAL_RECORD);
        let out = Vec::with_capacity(size + FRAME);
        let mut writer = Writer {
            out,
            names: HashMap::default(),
            compress,
        };
        let question = &query.message[HEADER_LEN..HEADER_LEN + query.question.wire_len()];
        writer.u16(query.id);
        writer.u16(flags | query.flags & COPIED);
        let opt = usize::from(query.edns.is_some());
        for count in [1, count, authority.len(), additional.len() + opt] {
            // A section with more records exceeds the size of a message anyway.
            writer.u16(count as u16);
        }
        // Lists of addresses point to the question by a constant, so nothing need be remembered.
        if let Answers::Records(_) = answers {
            writer.remember(name);
        }
        writer.out.extend_from_slice(question);
        match answers {
            Answers::Records(answers) => {
                answers[..count]
                    .iter()
                    .for_each(|record| writer.record(record, raw_name));
            }
            Answers::V4(ttl, addresses) => writer.addresses(*ttl, &addresses[..count], raw_name),
            Answers::Mixed(ttl, addresses) => {
                writer.mixed_addresses(*ttl, &addresses[..count], raw_name)
            }
        }
        for record in authority.iter().chain(additional.iter().copied()) {
            writer.record(record, raw_name);
        }
        // Without the last two octets, the length of the options: these replies have their own.
        if let Some([fields @ .., _, _]) = query.reply_opt(0) {
            writer.out.extend_from_slice(&fields);
            writer.u16(options.len() as u16);
            writer.out.extend_from_slice(options);
        }
        writer.out
    }
}

/// Returns the owner of records that belong to the question's name: a pointer to it, or the name.
pub(crate) fn owner_of_answers(question: &[u8], compress: bool) -> &[u8] {
    /// The question follows the header.
    const POINTER: [u8; 2] = [0xc0, HEADER_LEN as u8];
    if compress && question.len() > 1 {
        &POINTER
    } else {
        question
    }
}

fn fixed(kind: u16, ttl: u32, length: u8) -> [u8; 10] {
    let ([kind_high, kind_low], [class_high, class_low]) =
        (kind.to_be_bytes(), CLASS_IN.to_be_bytes());
    let [a, b, c, d] = ttl.to_be_bytes();
    [
        kind_high, kind_low, class_high, class_low, a, b, c, d, 0, length,
    ]
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
    /// Appends IPv4 addresses of the question's name.
    fn addresses(&mut self, ttl: u32, addresses: &[Ipv4Addr], question: &[u8]) {
        // Built once: large answers repeat it thousands of times with another address.
        let record = [
            owner_of_answers(question, self.compress),
            &fixed(TYPE_A, ttl, 4),
            &[0; 4],
        ]
        .concat();
        let start = self.out.len();
        self.out.resize(start + addresses.len() * record.len(), 0);
        let records = self.out[start..].chunks_exact_mut(record.len());
        for (place, address) in records.zip(addresses) {
            place.copy_from_slice(&record);
            place[record.len() - 4..].copy_from_slice(&address.octets());
        }
    }

    /// Appends addresses of any family of the question's name.
    fn mixed_addresses(&mut self, ttl: u32, addresses: &[IpAddr], question: &[u8]) {
        let owner = owner_of_answers(question, self.compress);
        let fixed_v4 = fixed(TYPE_A, ttl, 4);
        let fixed_v6 = fixed(TYPE_AAAA, ttl, 16);
        for address in addresses {
            self.out.extend_from_slice(owner);
            match address {
                IpAddr::V4(address) => {
                    self.out.extend_from_slice(&fixed_v4);
                    self.out.extend_from_slice(&address.octets());
                }
                IpAddr::V6(address) => {
                    self.out.extend_from_slice(&fixed_v6);
                    self.out.extend_from_slice(&address.octets());
                }
            }
        }
    }

    fn record(&mut self, record: &'a Record, question: &[u8]) {
        match &record.owner {
            Some(owner) => self.name(owner),
            None => self
                .out
                .extend_from_slice(owner_of_answers(question, self.compress)),
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
            // `PendingAnswer::finish` replaces them before encoding.
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
            Data::Cname(name) | Data::Ns(name) | Data::Ptr(name) | Data::Follow(name, _) => {
                self.name(name)
            }
            Data::Srv {
                weight,
                port,
                target,
            } => {
                for number in [PRIORITY, *weight, *port] {
                    self.u16(number);
                }
                // RFC 2782 forbids compressing the target, but other names may point to it.
                self.remember(target);
                self.out.extend_from_slice(target.as_wire());
            }
            // TXT data has at least one string, even an empty one (RFC 1035, section 3.3.14).
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
            // A pointer to the root would be longer than the root.
            if suffix.len() == 1 {
                break;
            }
            match self.names.get(suffix) {
                Some(&at) if self.compress => return self.u16(0xc000 | at),
                Some(_) => {}
                None => {
                    self.remember_one(suffix, self.out.len());
                }
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
            // With a name, all names above it were recorded, as far as pointers reach.
            if !self.remember_one(suffix, self.out.len() + length - suffix.len()) {
                break;
            }
        }
    }

    /// Records the offset of a suffix; returns whether it is new and within reach of a pointer.
    fn remember_one(&mut self, suffix: &'a [u8], at: usize) -> bool {
        if !self.compress || at > MAX_POINTER {
            return false;
        }
        match self.names.entry(suffix) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(at as u16);
                true
            }
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

//----------- Client subnet --------------------------------------------------

/// Option code of the client subnet.
const CLIENT_SUBNET: u16 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientSubnet<'a> {
    /// Address with the bits after the prefix cleared.
    pub(crate) address: IpAddr,
    pub(crate) prefix: u8,
    /// Option data as received: family, prefixes and address.
    option: &'a [u8],
}

impl ClientSubnet<'_> {
    /// Appends the reply's option: a copy of the query's, with the scope for which the answer is valid.
    pub(crate) fn write(&self, scope: u8, out: &mut Vec<u8>) {
        out.extend_from_slice(&CLIENT_SUBNET.to_be_bytes());
        // The received length also had 16 bits.
        out.extend_from_slice(&(self.option.len() as u16).to_be_bytes());
        let start = out.len();
        out.extend_from_slice(self.option);
        out[start + 3] = scope;
    }
}

/// Returns the client subnet of a query; `None` if it is missing or malformed.
pub(crate) fn client_subnet<'a>(query: &Query<'a>) -> Option<ClientSubnet<'a>> {
    // Skips option code and length; then come family, source prefix, scope prefix, and as many address bytes as
    // the prefix needs.
    let option = query.client_subnet()?.get(4..)?;
    let (&[family_high, family_low, prefix, _scope], bytes) = option.split_first_chunk()?;
    let address = match u16::from_be_bytes([family_high, family_low]) {
        1 => IpAddr::V4(Ipv4Addr::from(padded::<4>(bytes)?)),
        2 => IpAddr::V6(Ipv6Addr::from(padded::<16>(bytes)?)),
        _ => return None,
    };
    Some(ClientSubnet {
        address,
        prefix,
        option,
    })
}

/// Returns the bytes padded with zeros; `None` if there are too many.
fn padded<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
    let mut whole = [0; N];
    whole.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(whole)
}
