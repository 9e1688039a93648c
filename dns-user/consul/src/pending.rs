//! An answer before it is sent: fills in host names, applies size limits, encodes.

use dns_core::{
    name::Name,
    wire::{HEADER_LEN, MIN_UDP_SIZE, OPT_LEN, Query, Transport},
};
use hashbrown::{HashMap, HashSet};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RData,
};

use crate::{
    config::DnsConfig,
    encode::{Reply, client_subnet, owner_of_answers},
    record::{Answers, Data, Failure, Found, MAX_CHAIN, Record, limit_chain},
};

/// The records of an answer. [`PendingAnswer::hosts`] returns the host names to query a recursor for;
/// [`PendingAnswer::finish`] builds the reply.
#[derive(Clone, Debug)]
pub struct PendingAnswer {
    /// RCODE of the answer, before host names are followed.
    pub rcode: ResponseCode,
    pub(crate) answers: Answers,
    pub(crate) authority: Vec<Record>,
    /// Additional section without OPT.
    pub(crate) additional: Vec<Record>,
    recursion_available: bool,
    /// Whether the answer is valid for the client's subnet only.
    for_client: bool,
}

/// Flags QR and AA.
const AUTHORITATIVE_REPLY: u16 = 0x8400;
const RECURSION_AVAILABLE: u16 = 0x0080;
const TRUNCATED: u16 = 0x0200;
/// Maximum number of answers over UDP without EDNS, even if `udp_answer_limit` is higher.
pub(crate) const MAX_PLAIN_ANSWERS: usize = 8;
/// Maximum reply size over UDP, whatever the client accepts.
const MAX_UDP_SIZE: usize = 65_467;
/// Maximum reply size over TCP.
const MAX_TCP_SIZE: usize = 65_523;
/// Bytes kept free in UDP replies.
pub(crate) const SPARE: usize = 7;

impl PendingAnswer {
    pub(crate) fn authoritative(recursion_available: bool) -> Self {
        Self {
            rcode: ResponseCode::NoError,
            answers: Answers::default(),
            authority: Vec::new(),
            additional: Vec::new(),
            recursion_available,
            for_client: false,
        }
    }

    pub(crate) fn fill(&mut self, found: Result<Found, Failure>, soa: impl FnOnce() -> Record) {
        match found {
            Ok(Found {
                answers,
                additional,
                soa: with_soa,
                for_client,
            }) => {
                if answers.is_empty() && with_soa {
                    self.authority.push(soa());
                }
                (self.answers, self.additional) = (answers, additional);
                self.for_client = for_client;
            }
            Err(Failure::NoSuchName) => {
                // Its minimum limits how long resolvers keep the denial (RFC 2308, section 5).
                self.rcode = ResponseCode::NXDomain;
                self.authority.push(soa());
            }
            Err(Failure::Server) => self.rcode = ResponseCode::ServFail,
        }
    }

    /// Returns whether the answer consists of addresses only and is valid for every client.
    pub fn is_only_addresses(&self) -> bool {
        let are_addresses = self.answers.records().iter().all(|record| {
            record.owner.is_none() && matches!(record.data, Data::A(_) | Data::Aaaa(_))
        });
        !self.answers.is_empty()
            && !self.for_client
            && self.additional.is_empty()
            && self.authority.is_empty()
            && are_addresses
    }

    /// Returns whether the answer is valid for every client.
    pub fn is_for_everyone(&self) -> bool {
        !self.for_client
    }

    /// Returns the distinct host names to resolve through a recursor.
    pub fn hosts(&self) -> Vec<Name> {
        let mut hosts: Vec<Name> = Vec::new();
        for record in self.answers.records().iter().chain(&self.additional) {
            if let Data::Follow(name, _) = &record.data
                && !hosts.contains(name)
            {
                hosts.push(name.clone());
            }
        }
        hosts
    }

    /// Encodes the reply, cut to Consul's limits and the client's size. `chains` holds the
    /// recursors' answers for [`hosts`](Self::hosts); missing ones are omitted.
    pub fn finish(
        mut self,
        query: &Query<'_>,
        config: &DnsConfig,
        chains: &HashMap<Name, Vec<Record>>,
    ) -> Vec<u8> {
        if let Answers::Records(records) = self.answers {
            self.answers = Answers::Records(filled_in(records, chains));
        }
        self.additional = filled_in(self.additional, chains);
        // Consul repeats a record for each SRV record that leads to it.
        let mut is_new = are_new(&self.additional).into_iter();
        self.additional.retain(|_| is_new.next() == Some(true));
        let mut options = Vec::new();
        if let Some(subnet) = client_subnet(query) {
            // Scope 0: the same answer for every client (RFC 7871, section 7.2.1).
            subnet.write(
                if self.for_client { subnet.prefix } else { 0 },
                &mut options,
            );
        }
        let name = query.question.name();
        let page = Page {
            answer: &self,
            query,
            name: &name,
            compress: !config.disable_compression,
            options: &options,
        };
        page.cut(config)
    }
}

/// A pending answer with everything that determines its encoding.
struct Page<'a> {
    answer: &'a PendingAnswer,
    query: &'a Query<'a>,
    /// The question's name in lower case.
    name: &'a Name,
    compress: bool,
    options: &'a [u8],
}

impl Page<'_> {
    /// Returns the reply within all limits.
    ///
    /// Without EDNS, or with a size of at most 512 bytes, the number of answers is limited; if some
    /// are omitted, the uncompressed size counts (tests/cases). Limits count final records: the aliases
    /// before them come in addition, because without an address they are of no use.
    fn cut(&self, config: &DnsConfig) -> Vec<u8> {
        let all = self.answer.answers.len();
        let transport = self.query.transport;
        let size = match transport {
            Transport::Udp => self.query.limit().min(MAX_UDP_SIZE),
            Transport::Tcp => MAX_TCP_SIZE,
        };
        // A client that states 512 bytes or less is treated like one without EDNS (tests/cases).
        let is_plain = transport == Transport::Udp && size == MIN_UDP_SIZE;
        let aliases = self.answer.answers.leading_aliases();
        let most = if is_plain {
            // A limit of 0 leaves nothing (tests/cases).
            config.udp_answer_limit.min(MAX_PLAIN_ANSWERS) + aliases
        } else {
            all
        };
        let count = all.min(most);
        let measured_plain = is_plain && all > most;
        let room = if transport == Transport::Udp {
            size - SPARE
        } else {
            size
        };
        let compress = self.compress && !measured_plain;
        let mut whole_size = None;
        if count == all {
            // Nearly all replies fit completely; these are encoded once.
            match self.size_of_addresses(all, compress) {
                // Addresses alone have a known size, so nothing is encoded in vain.
                Some(size) if size > room => whole_size = Some(size),
                _ => {
                    let reply = self.write(all, false, self.compress, 0);
                    if reply.len() <= room {
                        return reply;
                    }
                    whole_size = Some(reply.len());
                }
            }
        }
        let most_size = whole_size.unwrap_or_else(|| self.measure(count, compress));
        // At least one final answer is tried; it is removed below if the reply is too large.
        let count = largest_within(
            room,
            count.min(aliases + 1),
            (count, most_size),
            |count: usize| self.measure(count, compress),
        );
        // Aliases without an address only help a client that asks again over TCP.
        let is_useless = aliases > 0 && count == aliases && count < all;
        let truncated = config.enable_truncate && count < all || is_useless;
        let flags = if truncated { TRUNCATED } else { 0 };
        let reply = self.write(count, count < all, self.compress, flags);
        if reply.len() <= size {
            return reply;
        }
        self.without_additional(count, size, flags)
    }

    /// Returns the size of the reply with the first `count` answers.
    fn measure(&self, count: usize, compress: bool) -> usize {
        if let Some(known) = self.size_of_addresses(count, compress) {
            return known;
        }
        let is_cut = count < self.answer.answers.len();
        self.write(count, is_cut, compress, 0).len()
    }

    /// Returns the size of a reply with the first `count` addresses and no other records; `None` for answers
    /// of another kind.
    fn size_of_addresses(&self, count: usize, compress: bool) -> Option<usize> {
        let Self {
            answer,
            query,
            options,
            ..
        } = self;
        let owner = owner_of_answers(query.question.raw_name, compress);
        let opt = if query.edns.is_some() {
            OPT_LEN + options.len()
        } else {
            0
        };
        let size = HEADER_LEN + query.question.wire_len() + opt;
        Some(size + answer.answers.size_of_addresses(count, owner.len())?)
    }

    /// Returns the reply without additional records, which are optional; if that is still too
    /// large, without answers and with TC.
    fn without_additional(&self, count: usize, size: usize, flags: u16) -> Vec<u8> {
        let bare = PendingAnswer {
            additional: Vec::new(),
            ..self.answer.clone()
        };
        let page = Page {
            answer: &bare,
            ..*self
        };
        let reply = page.write(count, false, true, flags);
        if reply.len() <= size {
            reply
        } else {
            page.write(0, false, true, flags | TRUNCATED)
        }
    }

    /// Encodes the first `count` answers; if `synced`, with only the additional records that they lead to.
    fn write(&self, count: usize, synced: bool, compress: bool, flags: u16) -> Vec<u8> {
        let Self {
            answer,
            query,
            name,
            compress: _,
            options,
        } = *self;
        let PendingAnswer {
            answers, authority, ..
        } = answer;
        let additional: Vec<&Record> = match answers {
            Answers::Records(answers) if synced => reachable(&answers[..count], &answer.additional),
            _ => answer.additional.iter().collect(),
        };
        let available = if answer.recursion_available {
            RECURSION_AVAILABLE
        } else {
            0
        };
        let rcode = u16::from(answer.rcode.low());
        // AA also for denials and reverse names (tests/cases).
        let flags = AUTHORITATIVE_REPLY | available | rcode | flags;
        let additional = &additional;
        Reply {
            query,
            name,
            flags,
            compress,
            answers,
            count,
            authority,
            additional,
            options,
        }
        .encode()
    }
}

/// Returns the additional records that the answers lead to, directly or through CNAMEs.
fn reachable<'a>(answers: &[Record], additional: &'a [Record]) -> Vec<&'a Record> {
    let mut wanted: WantedNames<'_> = answers.iter().filter_map(Record::leads_to).collect();
    // Bounds the length of a CNAME chain.
    for _ in 0..MAX_CHAIN {
        let mut further = Vec::new();
        for record in additional {
            if is_wanted(record, &wanted) {
                further.extend(record.leads_to());
            }
        }
        let before = wanted.len();
        wanted.extend(further);
        if wanted.len() == before {
            break;
        }
    }
    let mut reached: Vec<&Record> = additional.iter().collect();
    reached.retain(|record| is_wanted(record, &wanted));
    reached
}

type WantedNames<'a> = HashSet<&'a Name, foldhash::fast::RandomState>;

fn is_wanted(record: &Record, wanted: &WantedNames<'_>) -> bool {
    match &record.owner {
        Some(owner) => wanted.contains(owner),
        None => false,
    }
}

/// Returns for each record whether it equals no earlier one.
fn are_new(records: &[Record]) -> Vec<bool> {
    let mut seen = HashSet::<&Record, foldhash::fast::RandomState>::default();
    records.iter().map(|record| seen.insert(record)).collect()
}

/// Returns the largest number from `least` to `most` with a size within `room`; `least` if there is
/// none. `most_size` is the size of `most`.
///
/// Sizes grow almost linearly, so the next number to try is interpolated; every third one halves
/// the interval, which bounds their number.
fn largest_within(
    room: usize,
    least: usize,
    (most, most_size): (usize, usize),
    size: impl Fn(usize) -> usize,
) -> usize {
    if most <= least || most_size <= room {
        return most;
    }
    let mut fitting = least;
    let mut fitting_size = size(least);
    let mut too_many = most;
    let mut too_large = most_size;
    for tried in 1.. {
        let between = too_many - fitting;
        if between <= 1 || fitting_size > room {
            break;
        }
        let step = match tried % 3 {
            0 => between / 2,
            // Never a division by zero: what fits is smaller than what does not.
            _ => (room - fitting_size) * between / (too_large - fitting_size),
        };
        // Strictly in between, so that each try narrows the interval: `room` is below `too_large`, so the quotient is
        // below `between`.
        let number = fitting + step.max(1);
        match size(number) {
            found if found <= room => (fitting, fitting_size) = (number, found),
            found => (too_many, too_large) = (number, found),
        }
    }
    fitting
}

/// Returns the records, with placeholders replaced by the chains of their host names.
fn filled_in(records: Vec<Record>, chains: &HashMap<Name, Vec<Record>>) -> Vec<Record> {
    if !records
        .iter()
        .any(|record| matches!(record.data, Data::Follow(..)))
    {
        return records;
    }
    let mut filled = Vec::with_capacity(records.len() + MAX_CHAIN);
    for record in records {
        match &record.data {
            Data::Follow(name, keep) => {
                let chain = chains.get(name).into_iter().flatten().cloned();
                filled.extend(limit_chain(chain.filter_map(|record| keep.apply(record))));
            }
            _ => filled.push(record),
        }
    }
    filled
}

/// Returns the usable answers of a recursor's reply; none if it is malformed.
pub fn chain_of(reply: &[u8]) -> Vec<Record> {
    let Ok(message) = Message::from_vec(reply) else {
        return Vec::new();
    };
    let mut records = Vec::new();
    for record in message.answers {
        let data = match record.data {
            RData::A(address) => Data::A(address.0),
            RData::AAAA(address) => Data::Aaaa(address.0),
            RData::CNAME(target) => match own_name(&target.0) {
                Some(target) => Data::Cname(target),
                None => continue,
            },
            RData::TXT(text) => Data::Txt(text.txt_data.concat().into()),
            _ => continue,
        };
        // A record without a valid name could not be encoded again.
        let Some(owner) = own_name(&record.name) else {
            continue;
        };
        records.push(Record {
            owner: Some(owner),
            ttl: record.ttl,
            data,
        });
    }
    records
}

fn own_name(name: &hickory_proto::rr::Name) -> Option<Name> {
    Name::from_text(&name.to_ascii()).ok()
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, net::Ipv4Addr};

    use dns_core::wire::{Parsed, parse_by};

    use super::*;
    use crate::{config::Config, record::MAX_FINAL};

    #[test]
    fn few_sizes_are_measured() {
        // Records of 48 bytes each, with a step where a pointer no longer reaches.
        let size = |count: usize| 40 + count * 48 + count.saturating_sub(300) * 20;
        for room in [40, 87, 88, 512, 4096, 14_000, 15_000, 65_523, 200_000] {
            for most in [0, 1, 2, 100, 1024, 4096] {
                let measured = Cell::new(0);
                let found = largest_within(room, most.min(1), (most, size(most)), |count| {
                    measured.set(measured.get() + 1);
                    size(count)
                });
                let expected = (0..=most)
                    .rev()
                    .find(|&count| size(count) <= room)
                    .unwrap_or(0);
                assert_eq!(found, expected.max(most.min(1)), "{most} in {room}");
                assert!(
                    measured.get() <= 10,
                    "{} for {most} in {room}",
                    measured.get()
                );
            }
        }
    }

    fn named(name: &str, data: Data) -> Record {
        Record {
            owner: Some(Name::from_text(name).unwrap()),
            ttl: 7,
            data,
        }
    }

    #[test]
    fn additional_records_are_reached_by_chains() {
        let alias = |name: &str, to: &str| named(name, Data::Cname(Name::from_text(to).unwrap()));
        let answers = [alias("q", "a")];
        // Each step is behind the one that it follows from.
        let additional = [
            named("c", Data::Txt("end".as_bytes().into())),
            alias("b", "c"),
            alias("a", "b"),
            named("d", Data::Txt("other".as_bytes().into())),
        ];
        let reached = reachable(&answers, &additional);
        assert_eq!(reached, additional[..3].iter().collect::<Vec<_>>());
        assert!(reachable(&[], &additional).is_empty());
    }

    /// Returns the reply with these answers to a client with this size, or without EDNS.
    fn reply(
        answers: Answers,
        name: &[u8],
        dns: &str,
        transport: Transport,
        size: Option<u16>,
    ) -> Vec<u8> {
        let additional = u8::from(size.is_some());
        let mut message = [0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, additional].to_vec();
        message.extend([name, &[0, 1, 0, 1]].concat());
        if let Some(size) = size {
            let [high, low] = size.to_be_bytes();
            message.extend([0, 0, 41, high, low, 0, 0, 0, 0, 0, 0]);
        }
        let Parsed::Query(query) = parse_by(transport, &message) else {
            panic!("a query")
        };
        let mut pending = PendingAnswer::authoritative(false);
        pending.answers = answers;
        let text = format!(r#"{{"consul": {{"dns_config": {dns}}}}}"#);
        let (config, _) = Config::of_document("test", text.as_bytes())
            .whole()
            .unwrap()
            .unwrap();
        pending.finish(&query, &config.dns, &HashMap::default())
    }

    fn number_of_answers(reply: &[u8]) -> u16 {
        u16::from_be_bytes([reply[6], reply[7]])
    }

    /// Returns the number of answers in a reply to a client with this size, if so many exist.
    fn answers(count: usize, name: &[u8], transport: Transport, size: Option<u16>) -> u16 {
        let all = Answers::V4(7, vec![Ipv4Addr::LOCALHOST; count]);
        number_of_answers(&reply(all, name, "{}", transport, size))
    }

    #[test]
    fn replies_fill_the_room_of_their_transport() {
        let name = b"\x01a\x06consul\0";
        // Header, question, OPT and 40 answers are 677 bytes; some of a datagram stay free.
        let whole = 677;
        for (size, expected) in [(whole + 7, 40), (whole + 6, 39), (whole + 7 - 16, 39)] {
            let found = answers(40, name, Transport::Udp, Some(size));
            assert_eq!(found, expected, "{size}");
        }
        // Header, question and 4,093 answers are 65,519 bytes, four fewer than the limit over TCP.
        let longer = b"\x06abcdef\x06consul\0";
        for (count, expected) in [(4093, 4093), (4094, 4093)] {
            let found = answers(count, longer, Transport::Tcp, None);
            assert_eq!(found, expected, "{count}");
        }
    }

    /// Returns the numbers of answers and whether the reply is truncated, over UDP without EDNS or with this size.
    fn cut(answers: Answers, name: &[u8], dns: &str, size: Option<u16>) -> (u16, bool) {
        let reply = reply(answers, name, dns, Transport::Udp, size);
        assert!(reply.len() <= usize::from(size.unwrap_or(512)));
        (number_of_answers(&reply), reply[2] & 2 != 0)
    }

    #[test]
    fn plain_clients_get_few_answers() {
        const TRUNCATES: &str = r#"{"enable_truncate": true}"#;
        const MANY: &str = r#"{"udp_answer_limit": 9}"#;
        let name = b"\x01a\x06consul\0";
        // Of 60 bytes: with 74 for each answer, 5 are 446 bytes with header and question, 6 are 520.
        let long = [&[51][..], &[b'a'; 51], b"\x06consul\0"].concat();
        let v4 = |count: usize| Answers::V4(7, vec![Ipv4Addr::LOCALHOST; count]);
        let mixed = |count: usize| Answers::Mixed(7, vec![Ipv4Addr::LOCALHOST.into(); count]);
        let behind = |aliases: usize, count: usize| {
            let mut records = Vec::new();
            for number in 0..aliases {
                let target = Name::from_text(&format!("t{}", number + 1)).unwrap();
                records.push(named(&format!("t{number}"), Data::Cname(target)));
            }
            for _ in 0..count {
                let owner = Some(Name::from_text(&format!("t{aliases}")).unwrap());
                records.push(Record::address(owner, 7, Ipv4Addr::LOCALHOST.into()));
            }
            Answers::Records(records)
        };
        for (answers, name, dns, size, expected) in [
            (v4(3), &name[..], TRUNCATES, None, (3, false)),
            (v4(4), name, TRUNCATES, None, (3, true)),
            (v4(4), name, "{}", None, (3, false)),
            (mixed(4), name, TRUNCATES, None, (3, true)),
            (v4(8), name, MANY, None, (8, false)),
            (v4(9), name, MANY, None, (8, false)),
            (v4(9), name, TRUNCATES, Some(512), (3, true)),
            (v4(9), name, TRUNCATES, Some(513), (9, false)),
            (behind(2, 3), name, TRUNCATES, None, (5, false)),
            (behind(2, 4), name, TRUNCATES, None, (5, true)),
            (behind(2, 4), name, TRUNCATES, Some(1000), (6, false)),
            // All of them are measured as they are sent, some of them without compression.
            (v4(8), &long, MANY, None, (8, false)),
            (v4(9), &long, MANY, None, (5, false)),
            (mixed(9), &long, MANY, None, (5, false)),
        ] {
            let shown = format!("{answers:?} {dns} {size:?}");
            assert_eq!(cut(answers, name, dns, size), expected, "{shown}");
        }
        // Aliases without an address make the client ask again.
        let none = r#"{"udp_answer_limit": 0}"#;
        assert_eq!(cut(behind(2, 1), name, none, None), (2, true));
        assert_eq!(cut(behind(2, 0), name, none, None), (2, false));
        assert_eq!(cut(v4(1), name, none, None), (0, false));
        let text = Data::Txt([b'x'; 600].as_slice().into());
        let Answers::Records(mut records) = behind(1, 0) else {
            panic!("records")
        };
        records.push(named("t1", text));
        let useless = Answers::Records(records);
        assert_eq!(cut(useless, name, "{}", None), (0, true));
    }

    #[test]
    fn chains_have_limits() {
        let alias = |number: usize| {
            let target = Name::from_text(&format!("t{number}")).unwrap();
            named("t", Data::Cname(target))
        };
        for (aliases, last, expected) in [
            (0, MAX_FINAL, (0, MAX_FINAL)),
            (0, MAX_FINAL + 1, (0, MAX_FINAL)),
            (MAX_CHAIN, 1, (MAX_CHAIN, 1)),
            (MAX_CHAIN, 9, (MAX_CHAIN, MAX_FINAL)),
            (MAX_CHAIN + 1, 1, (0, 0)),
        ] {
            let last = (0..last).map(|_| named("t", Data::A(Ipv4Addr::LOCALHOST)));
            let kept = limit_chain(last.chain((0..aliases).map(alias)));
            let leading = Answers::Records(kept.clone()).leading_aliases();
            assert_eq!((leading, kept.len() - leading), expected);
        }
    }

    fn name(text: &str) -> Name {
        Name::from_text(text).unwrap()
    }

    fn soa() -> Record {
        named("consul", Data::Soa(name("consul"), [1, 2, 3, 4, 5]))
    }

    fn follow(host: &str) -> Record {
        Record {
            owner: None,
            ttl: 0,
            data: Data::Follow(name(host), crate::record::Keep::WithTtl(9)),
        }
    }

    fn address() -> Record {
        Record::address(None, 7, Ipv4Addr::LOCALHOST.into())
    }

    #[test]
    fn results_fill_the_sections() {
        let found = |answers, soa, for_client| Found {
            answers,
            additional: vec![named("a", Data::Ns(name("b")))],
            soa,
            for_client,
        };
        let one = || Answers::Records(vec![address()]);
        let none = Answers::default;
        for (result, expected) in [
            (
                Ok(found(one(), true, false)),
                (ResponseCode::NoError, 1, 0, 1, true),
            ),
            (
                Ok(found(one(), true, true)),
                (ResponseCode::NoError, 1, 0, 1, false),
            ),
            (
                Ok(found(none(), true, false)),
                (ResponseCode::NoError, 0, 1, 1, true),
            ),
            (
                Ok(found(none(), false, false)),
                (ResponseCode::NoError, 0, 0, 1, true),
            ),
            (
                Err(Failure::NoSuchName),
                (ResponseCode::NXDomain, 0, 1, 0, true),
            ),
            (
                Err(Failure::Server),
                (ResponseCode::ServFail, 0, 0, 0, true),
            ),
        ] {
            let mut answer = PendingAnswer::authoritative(true);
            let shown = format!("{result:?}");
            answer.fill(result, soa);
            let sections = (
                answer.rcode,
                answer.answers.len(),
                answer.authority.len(),
                answer.additional.len(),
                answer.is_for_everyone(),
            );
            assert_eq!(sections, expected, "{shown}");
        }
    }

    #[test]
    fn addresses_alone_are_recognised() {
        let with = |change: &dyn Fn(&mut PendingAnswer)| {
            let mut answer = PendingAnswer::authoritative(false);
            answer.answers = Answers::Records(vec![address(), address()]);
            change(&mut answer);
            answer.is_only_addresses()
        };
        assert!(with(&|_| {}));
        let v6 = Record::address(None, 7, std::net::Ipv6Addr::LOCALHOST.into());
        assert!(with(
            &|answer| answer.answers = Answers::Records(vec![v6.clone()])
        ));
        assert!(with(
            &|answer| answer.answers = Answers::V4(7, vec![Ipv4Addr::LOCALHOST])
        ));
        let any = vec![Ipv4Addr::LOCALHOST.into()];
        assert!(with(
            &|answer| answer.answers = Answers::Mixed(7, any.clone())
        ));
        assert!(!with(&|answer| answer.answers = Answers::default()));
        assert!(!with(&|answer| answer.answers = Answers::V4(7, Vec::new())));
        assert!(!with(&|answer| answer.for_client = true));
        assert!(!with(&|answer| answer.authority.push(soa())));
        assert!(!with(&|answer| answer.additional.push(address())));
        let owned = named("a", Data::A(Ipv4Addr::LOCALHOST));
        assert!(!with(&|answer| {
            answer.answers = Answers::Records(vec![address(), owned.clone()])
        }));
        let text = Record {
            data: Data::Txt(Box::default()),
            ..address()
        };
        assert!(!with(&|answer| {
            answer.answers = Answers::Records(vec![address(), text.clone()])
        }));
    }

    #[test]
    fn host_names_are_filled_in_once() {
        let mut answer = PendingAnswer::authoritative(false);
        assert_eq!(answer.hosts(), []);
        answer.answers = Answers::V4(7, vec![Ipv4Addr::LOCALHOST]);
        assert_eq!(answer.hosts(), []);
        answer.answers = Answers::Records(vec![follow("b"), address(), follow("a"), follow("b")]);
        answer.additional = vec![follow("c"), follow("a")];
        assert_eq!(answer.hosts(), ["b", "a", "c"].map(name));

        let chain = vec![
            named("b", Data::A(Ipv4Addr::LOCALHOST)),
            named("b", Data::Txt(Box::default())),
        ];
        let chains = HashMap::from_iter([(name("b"), chain)]);
        let kept = Record {
            ttl: 9,
            ..named("b", Data::A(Ipv4Addr::LOCALHOST))
        };
        let filled = filled_in(vec![follow("a"), address(), follow("b")], &chains);
        assert_eq!(filled, [address(), kept]);
        assert_eq!(filled_in(vec![address()], &chains), [address()]);
    }

    #[test]
    fn recursors_replies_are_read() {
        use hickory_proto::{
            op::{MessageType, OpCode},
            rr::{
                self,
                rdata::{CNAME, NS, TXT},
            },
        };

        let host = |text: &str| rr::Name::from_ascii(text).unwrap();
        let mut message = Message::new(7, MessageType::Response, OpCode::Query);
        let strings = vec!["ab".to_owned(), "c".to_owned()];
        for (owner, ttl, data) in [
            ("A.example.", 1, RData::CNAME(CNAME(host("b.example.")))),
            ("b.example.", 2, RData::A("10.0.0.1".parse().unwrap())),
            ("b.example.", 3, RData::AAAA("::1".parse().unwrap())),
            ("b.example.", 4, RData::TXT(TXT::new(strings))),
            ("b.example.", 5, RData::NS(NS(host("c.example.")))),
        ] {
            message.add_answer(rr::Record::from_rdata(host(owner), ttl, data));
        }
        let bytes = message.to_vec().unwrap();
        let record = |owner: &str, ttl, data| Record {
            ttl,
            ..named(owner, data)
        };
        let expected = [
            record("a.example", 1, Data::Cname(name("b.example"))),
            record("b.example", 2, Data::A([10, 0, 0, 1].into())),
            record("b.example", 3, Data::Aaaa(std::net::Ipv6Addr::LOCALHOST)),
            record("b.example", 4, Data::Txt(b"abc".as_slice().into())),
        ];
        assert_eq!(chain_of(&bytes), expected);
        assert_eq!(chain_of(&bytes[..bytes.len() - 1]), []);
    }

    /// Returns the flags, the counts of the sections and the options of the reply to an `A` query of `a.consul.`
    /// over UDP with this OPT.
    fn finished(answer: PendingAnswer, dns: &str, opt: &[u8]) -> (u16, [u16; 4], Vec<u8>) {
        let mut message = b"\0\x01\x01\0\0\x01\0\0\0\0\0\0\x01a\x06consul\0\0\x01\0\x01".to_vec();
        message[11] = u8::from(!opt.is_empty());
        message.extend(opt);
        let Parsed::Query(query) = parse_by(Transport::Udp, &message) else {
            panic!("a query")
        };
        let text = format!(r#"{{"consul": {{"dns_config": {dns}}}}}"#);
        let (config, _) = Config::of_document("test", text.as_bytes())
            .whole()
            .unwrap()
            .unwrap();
        let reply = answer.finish(&query, &config.dns, &HashMap::default());
        let number = |at: usize| u16::from_be_bytes([reply[at], reply[at + 1]]);
        (number(2), [4, 6, 8, 10].map(number), reply)
    }

    #[test]
    fn flags_follow_answer_and_query() {
        for (recursion, rcode, flags) in [
            (false, ResponseCode::NoError, 0x8500),
            (true, ResponseCode::NoError, 0x8580),
            (false, ResponseCode::NXDomain, 0x8503),
            (true, ResponseCode::ServFail, 0x8582),
            (true, ResponseCode::NotImp, 0x8584),
        ] {
            let mut answer = PendingAnswer::authoritative(recursion);
            answer.rcode = rcode;
            assert_eq!(finished(answer, "{}", &[]).0, flags, "{rcode}");
        }
    }

    #[test]
    fn subnet_scope_bounds_the_answer() {
        let opt = b"\0\0\x29\x10\0\0\0\0\0\0\x0b\0\x08\0\x07\0\x01\x18\0\x0a\x01\x02";
        for (for_client, scope) in [(false, 0), (true, 24)] {
            let mut answer = PendingAnswer::authoritative(false);
            answer.for_client = for_client;
            let (_, counts, reply) = finished(answer, "{}", opt);
            assert_eq!(counts, [1, 0, 0, 1]);
            let mut option = b"\0\x08\0\x07\0\x01\x18\0\x0a\x01\x02".to_vec();
            option[7] = scope;
            assert!(reply.ends_with(&option), "{reply:?}");
        }
    }

    #[test]
    fn additional_records_follow_once() {
        let srv = |number: u16| Record {
            owner: None,
            ttl: 7,
            data: Data::Srv {
                weight: 1,
                port: 80,
                target: name(&format!("n{number}")),
            },
        };
        let answer = |count: u16| {
            let mut answer = PendingAnswer::authoritative(false);
            answer.answers = Answers::Records((0..count).map(srv).collect());
            for number in 0..count {
                let record = named(&format!("n{number}"), Data::A([10, 0, 0, 1].into()));
                answer.additional.extend([record.clone(), record]);
            }
            answer
                .additional
                .push(named("x", Data::A([10, 0, 0, 1].into())));
            answer
        };
        // If all answers are sent, so are all additional records, each once.
        assert_eq!(finished(answer(2), "{}", &[]).1, [1, 2, 0, 3]);
        // Otherwise only those that the answers lead to.
        let (flags, counts, _) = finished(answer(5), "{}", &[]);
        assert_eq!((flags & 0x0200, counts), (0, [1, 3, 0, 3]));
        let (flags, counts, _) = finished(answer(5), r#"{"enable_truncate": true}"#, &[]);
        assert_eq!((flags & 0x0200, counts), (0x0200, [1, 3, 0, 3]));
    }

    #[test]
    fn oversized_additional_records_are_left_out() {
        let text = |length: usize| Data::Txt(vec![b'x'; length].into());
        let of = |answer: usize, additional: usize| {
            let mut pending = PendingAnswer::authoritative(false);
            let owner = None;
            let data = text(answer);
            let ttl = 7;
            pending.answers = Answers::Records(vec![Record { owner, ttl, data }]);
            pending.additional = vec![named("a.consul", text(additional))];
            pending
        };
        // Header, question and the answer's fixed fields are 38 bytes; 474 bytes remain of 512.
        for (answer, additional, dns, expected) in [
            (100, 100, "{}", (0, [1, 1, 0, 1])),
            (100, 400, "{}", (0, [1, 1, 0, 0])),
            (472, 1, "{}", (0, [1, 1, 0, 0])),
            (473, 1, "{}", (0x0200, [1, 0, 0, 0])),
            (100, 400, r#"{"enable_truncate": true}"#, (0, [1, 1, 0, 0])),
        ] {
            let (flags, counts, reply) = finished(of(answer, additional), dns, &[]);
            assert!(reply.len() <= 512, "{}", reply.len());
            assert_eq!((flags & 0x0200, counts), expected, "{answer} {additional}");
        }
    }

    #[test]
    fn uncompressed_names_take_room() {
        let v4 = |count: usize| Answers::V4(7, vec![Ipv4Addr::LOCALHOST; count]);
        let name = b"\x01a\x06consul\0";
        // Header, question and OPT are 37 bytes, each answer is 24 in full and 16 with a pointer; 7 bytes stay free.
        let full = r#"{"disable_compression": true}"#;
        for (dns, size, expected) in [
            (full, 37 + 24 * 20 + 7, 20),
            (full, 37 + 24 * 20 + 6, 19),
            (full, 37 + 24 * 40 + 7, 40),
            (full, 37 + 24 * 40 + 6, 39),
            ("{}", 37 + 16 * 35 + 7, 35),
            ("{}", 37 + 16 * 35 + 6, 34),
        ] {
            assert_eq!(
                cut(v4(40), name, dns, Some(size)),
                (expected, false),
                "{dns} {size}"
            );
        }
    }

    #[test]
    fn additional_records_leave_with_their_answers() {
        let mut answers = Vec::new();
        let mut pending = PendingAnswer::authoritative(false);
        for number in 10..30 {
            let target = format!("n{number}");
            let data = Data::Srv {
                weight: 1,
                port: 80,
                target: name(&target),
            };
            let (owner, ttl) = (None, 7);
            answers.push(Record { owner, ttl, data });
            let address = named(&target, Data::A(Ipv4Addr::LOCALHOST));
            pending.additional.push(address);
        }
        pending.answers = Answers::Records(answers);
        // Header, question and OPT are 37 bytes; each answer is 23, and its address 16; 7 bytes stay free.
        for (size, expected) in [
            (37 + 39 * 13 + 7, 13),
            (37 + 39 * 13 + 6, 12),
            (37 + 39 * 20 + 7, 20),
        ] {
            let [high, low] = u16::to_be_bytes(size);
            let opt = [0, 0, 41, high, low, 0, 0, 0, 0, 0, 0];
            let (_, counts, reply) = finished(pending.clone(), "{}", &opt);
            assert_eq!(counts, [1, expected, 0, expected + 1], "{size}");
            assert_eq!(reply.len(), usize::from(37 + 39 * expected));
        }
    }
}
