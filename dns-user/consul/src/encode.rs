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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientSubnet<'a> {
    /// Address with the bits after the prefix cleared.
    pub(crate) address: IpAddr,
    pub(crate) prefix: u8,
    /// The option as received: code, length, family, prefixes and address.
    option: &'a [u8],
}

impl ClientSubnet<'_> {
    /// Appends the reply's option: a copy of the query's, with the scope for which the answer is valid.
    pub(crate) fn write(&self, scope: u8, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(self.option);
        out[start + 7] = scope;
    }
}

/// Returns the client subnet of a query; `None` if it is missing or malformed.
pub(crate) fn client_subnet<'a>(query: &Query<'a>) -> Option<ClientSubnet<'a>> {
    let option = query.client_subnet()?;
    // As many bytes of the address follow as the prefix needs.
    let (&[_, _, _, _, family_high, family_low, prefix, _], bytes) = option.split_first_chunk()?;
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

#[cfg(test)]
mod tests {
    use dns_core::wire::{Parsed, Transport, parse_by};

    use super::*;

    const QUESTION: &[u8] = b"\x03Web\x07service\x06consul\0\0\x01\0\x01";

    /// Returns a query for `Web.service.consul.`, with an OPT that has these options.
    fn message(options: Option<&[u8]>) -> Vec<u8> {
        // CD and AD as well: CD is repeated, AD is not.
        let mut message = vec![0x12, 0x34, 0x01, 0x30, 0, 1, 0, 0, 0, 0, 0, 0];
        message.extend(QUESTION);
        if let Some(options) = options {
            message[11] = 1;
            message.extend([0, 0, 41, 0x10, 0, 0, 0, 0x80, 0, 0, options.len() as u8]);
            message.extend(options);
        }
        message
    }

    fn query(message: &[u8]) -> Query<'_> {
        let Parsed::Query(query) = parse_by(Transport::Tcp, message) else {
            panic!("a query")
        };
        query
    }

    fn name(text: &str) -> Name {
        Name::from_text(text).unwrap()
    }

    fn record(owner: Option<&str>, ttl: u32, data: Data) -> Record {
        let owner = owner.map(name);
        Record { owner, ttl, data }
    }

    struct Sections {
        answers: Answers,
        authority: Vec<Record>,
        additional: Vec<Record>,
    }

    fn encode(message: &[u8], sections: &Sections, compress: bool, options: &[u8]) -> Vec<u8> {
        let additional: Vec<&Record> = sections.additional.iter().collect();
        let reply = Reply {
            query: &query(message),
            name: &name("web.service.consul"),
            flags: 0x8403,
            compress,
            answers: &sections.answers,
            count: sections.answers.len(),
            authority: &sections.authority,
            additional: &additional,
            options,
        };
        reply.encode()
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn record_types_have_wire_formats() {
        let sections = Sections {
            answers: Answers::Records(vec![
                record(None, 1, Data::A([10, 0, 0, 1].into())),
                record(None, 0x0102_0304, Data::Cname(name("db.service.consul"))),
                record(
                    Some("db.service.consul"),
                    2,
                    Data::Aaaa("2001:db8::1".parse().unwrap()),
                ),
                record(
                    None,
                    3,
                    Data::Srv {
                        weight: 0x0506,
                        port: 0x0708,
                        target: name("n1.node.consul"),
                    },
                ),
            ]),
            authority: vec![
                record(Some("consul"), 4, Data::Ns(name("ns.consul"))),
                record(
                    Some("consul"),
                    5,
                    Data::Soa(name("consul"), [1, 2, 3, 4, 5]),
                ),
            ],
            additional: vec![
                record(Some("n1.node.consul"), 6, Data::Ptr(name("x.node.consul"))),
                record(Some("x.node.consul"), 7, Data::Txt(b"ab".as_slice().into())),
                record(Some("x.node.consul"), 7, Data::Txt(Box::default())),
            ],
        };
        let compressed = [
            "123485130001000400020003",
            "03576562 0773657276696365 06636f6e73756c 00 0001 0001",
            // The alias's target is at offset 64.
            "c00c 0001 0001 00000001 0004 0a000001",
            "c00c 0005 0001 01020304 0005 026462c010",
            "c040 001c 0001 00000002 0010 20010db8000000000000000000000001",
            // The target is written in full; other names point to it.
            "c00c 0021 0001 00000003 0016 0001 0506 0708 026e31 046e6f6465 06636f6e73756c 00",
            "c018 0002 0001 00000004 0005 026e73c018",
            "c018 0006 0001 00000005 0026 026e73c018 0a686f73746d6173746572c018",
            "00000001 00000002 00000003 00000004 00000005",
            "c073 000c 0001 00000006 0004 0178c076",
            "c0d2 0010 0001 00000007 0003 026162",
            "c0d2 0010 0001 00000007 0001 00",
        ];
        let compressed = compressed.concat().replace(' ', "");
        assert_eq!(
            hex(&encode(&message(None), &sections, true, &[])),
            compressed
        );
        let question = "03576562077365727669636506636f6e73756c00";
        let consul = "06636f6e73756c00";
        let x = format!("0178046e6f6465{consul}");
        let db = format!("0264620773657276696365{consul}");
        let n1 = format!("026e31046e6f6465{consul}");
        let plain = [
            format!("123485130001000400020003{question}00010001"),
            format!("{question}000100010000000100040a000001"),
            format!("{question}00050001010203040013{db}"),
            format!("{db}001c000100000002001020010db8000000000000000000000001"),
            format!("{question}00210001000000030016000105060708{n1}"),
            format!("{consul}0002000100000004000b026e73{consul}"),
            format!("{consul}00060001000000050032026e73{consul}0a686f73746d6173746572{consul}"),
            "0000000100000002000000030000000400000005".to_owned(),
            format!("{n1}000c000100000006000f{x}"),
            format!("{x}00100001000000070003026162"),
            format!("{x}001000010000000700 0100").replace(' ', ""),
        ];
        assert_eq!(
            hex(&encode(&message(None), &sections, false, &[])),
            plain.concat()
        );
    }

    #[test]
    fn long_texts_are_split() {
        let text: Vec<u8> = (0..=255).collect();
        let sections = Sections {
            answers: Answers::Records(vec![record(None, 0, Data::Txt(text.clone().into()))]),
            authority: Vec::new(),
            additional: Vec::new(),
        };
        let reply = encode(&message(None), &sections, true, &[]);
        let start = 12 + QUESTION.len() + 10;
        assert_eq!(reply[start..start + 2], [1, 2]);
        assert_eq!(reply[start + 2], 255);
        assert_eq!(reply[start + 3..start + 258], text[..255]);
        assert_eq!(reply[start + 258..], [1, 255]);
    }

    #[test]
    fn address_lists_encode_like_records() {
        let v4 = [[10, 0, 0, 1], [10, 0, 0, 2]];
        let v6 = "2001:db8::1".parse().unwrap();
        let mixed = Answers::Mixed(0x0102_0304, vec![v4[0].into(), v6, v4[1].into()]);
        let only_v4 = Answers::V4(0x0102_0304, v4.map(Ipv4Addr::from).to_vec());
        for answers in [mixed, only_v4] {
            for compress in [true, false] {
                for options in [None, Some(&[][..])] {
                    let sections = |answers: Answers| Sections {
                        answers,
                        authority: Vec::new(),
                        additional: Vec::new(),
                    };
                    let records = Answers::Records(answers.clone().into_records(None));
                    let message = message(options);
                    let expected = encode(&message, &sections(records), compress, &[]);
                    let found = encode(&message, &sections(answers.clone()), compress, &[]);
                    assert_eq!(hex(&found), hex(&expected));
                }
            }
        }
        // The records are those of the question's name, with its letters.
        let owner = |question: &'static [u8], compress| owner_of_answers(question, compress);
        assert_eq!(owner(b"\x01a\0", true), b"\xc0\x0c");
        assert_eq!(owner(b"\x01A\0", false), b"\x01A\0");
        assert_eq!(
            owner(b"\0", true),
            b"\0",
            "a pointer to the root would be longer"
        );
    }

    #[test]
    fn reply_opt_has_own_options() {
        let sections = Sections {
            answers: Answers::default(),
            authority: Vec::new(),
            additional: vec![record(Some("."), 1, Data::A([10, 0, 0, 1].into()))],
        };
        let with = encode(&message(Some(&[])), &sections, true, b"\0\x08\0\x01x");
        let end = [
            "00 0001 0001 00000001 0004 0a000001",
            "00 0029 04d0 00 00 8000 0005 0008 0001 78",
        ];
        assert_eq!(
            &hex(&with)[2 * (12 + QUESTION.len())..],
            end.concat().replace(' ', "")
        );
        assert_eq!(with[4..12], [0, 1, 0, 0, 0, 0, 0, 2]);
        let without = encode(&message(None), &sections, true, b"\0\x08\0\x01x");
        assert_eq!(without.len(), with.len() - 16);
        assert_eq!(without[11], 1);
    }

    #[test]
    fn pointers_reach_16383_bytes() {
        // Behind 36 bytes of header and question, 263 bytes each with its record.
        let filler = || record(None, 0, Data::Txt(vec![b'x'; 250].into()));
        let mut answers: Vec<Record> = (0..62).map(|_| filler()).collect();
        let alias = |text: &str| record(None, 0, Data::Cname(name(text)));
        for (padding, reaches) in [(16, true), (17, false)] {
            // A record with a text of `padding` bytes takes 13 more than that.
            answers.truncate(62);
            answers.push(record(None, 0, Data::Txt(vec![b'x'; padding].into())));
            // The alias's target starts behind 16,342 + 13 + padding + 12 bytes.
            answers.push(alias("a.b"));
            answers.push(alias("a.b"));
            let sections = Sections {
                answers: Answers::Records(answers.clone()),
                authority: Vec::new(),
                additional: Vec::new(),
            };
            let reply = encode(&message(None), &sections, true, &[]);
            // The second one is a pointer, or as long as the first.
            let length = reply.len() - (16_367 + padding + 5);
            let expected = if reaches { 12 + 2 } else { 12 + 5 };
            assert_eq!(length, expected, "{padding}");
        }
    }

    #[test]
    fn client_subnets_are_read_and_repeated() {
        for (option, expected) in [
            (&b"\0\x01\x18\0\x0a\x01\x02"[..], Some(("10.1.2.0", 24))),
            (b"\0\x01\x20\0\x0a\x01\x02\x03", Some(("10.1.2.3", 32))),
            (b"\0\x01\0\0", Some(("0.0.0.0", 0))),
            (b"\0\x02\x20\0\x20\x01\x0d\xb8", Some(("2001:db8::", 32))),
            (b"\0\x01\x28\0\x0a\x01\x02\x03\x04", None),
            (b"\0\x03\x08\0\x0a", None),
            (b"\x01\x01\x08\0\x0a", None),
            (b"\0\x01\x18", None),
            (b"", None),
        ] {
            let mut options = vec![0, 8, 0, option.len() as u8];
            options.extend(option);
            let message = message(Some(&options));
            let Some(found) = client_subnet(&query(&message)) else {
                assert_eq!(expected, None, "{option:?}");
                continue;
            };
            let (address, prefix) = expected.expect("none");
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(
                (found.address, found.prefix),
                (address, prefix),
                "{option:?}"
            );
            let mut out = vec![7];
            found.write(5, &mut out);
            options[7] = 5;
            assert_eq!(out[1..], options, "{option:?}");
        }
        assert_eq!(client_subnet(&query(&message(None))), None);
        let v6 = padded::<16>(&[1; 16]);
        assert_eq!((v6, padded::<16>(&[1; 17])), (Some([1; 16]), None));
    }
}
