//! The wire format compared with hickory-proto, and with arbitrary input.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use hickory_proto::{
    op::{self, Edns as HickoryEdns, Message, MessageType, OpCode, ResponseCode},
    rr::{DNSClass, Name as HickoryName, RData, Record, RecordType, rdata},
};
use proptest::{collection::vec, option, prelude::*};

use super::*;
use crate::resolve::{Checks, Existence, Resolution};

/// Header and question of `q-s0.q-g1.bosh`, type A, class IN, RD set.
const PLAIN: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x04q-s0\x04q-g1\x04bosh\0\0\x01\0\x01";

/// Builds [`PLAIN`] with other counts and additional records.
fn with_records(answers: u8, authorities: u8, additionals: u8, records: &[u8]) -> Vec<u8> {
    let mut message = PLAIN.to_vec();
    (message[7], message[9], message[11]) = (answers, authorities, additionals);
    message.extend_from_slice(records);
    message
}

/// Parses `message` as a query and panics with the actual result otherwise.
fn query(message: &[u8]) -> Query<'_> {
    match parse(message) {
        Parsed::Query(query) => query,
        other => panic!("no query: {other:?}"),
    }
}

/// Parses `message` as a query by this transport.
fn query_by(transport: Transport, message: &[u8]) -> Query<'_> {
    match parse_by(transport, message) {
        Parsed::Query(query) => query,
        other => panic!("no query: {other:?}"),
    }
}

/// Returns id, flags and QDCOUNT of the immediate reply to `message`.
fn instant_reply(message: &[u8]) -> (u16, u16, u16) {
    match parse(message) {
        Parsed::Reply(reply) => (
            u16_at(&reply, 0).unwrap(),
            u16_at(&reply, 2).unwrap(),
            u16_at(&reply, 4).unwrap(),
        ),
        other => panic!("no reply: {other:?}"),
    }
}

/// Builds a positive resolution with these addresses.
fn found(v4: Vec<Ipv4Addr>, v6: Vec<Ipv6Addr>) -> Resolution {
    Resolution {
        existence: Existence::Found,
        v4,
        v6,
        checks: Checks::default(),
    }
}

/// Returns distinct IPv4 addresses.
fn v4_addresses(count: u32) -> Vec<Ipv4Addr> {
    (0..count)
        .map(|number| Ipv4Addr::from_bits(0x0a00_0000 + number))
        .collect()
}

#[test]
fn plain_query_is_parsed() {
    let query = query(PLAIN);
    assert_eq!(
        (query.id, query.question.qtype, query.question.qclass),
        (0x1234, TYPE_A, CLASS_IN)
    );
    assert_eq!(
        query.question.name(),
        Name::from_text("q-s0.q-g1.bosh").unwrap()
    );
    assert_eq!(query.edns, None);
    assert!(query.recursion_desired() && !query.checking_disabled());
}

#[test]
fn responses_and_fragments_are_dropped() {
    let mut reply = PLAIN.to_vec();
    reply[2] |= 0x80;
    assert!(matches!(parse(&reply), Parsed::Drop));
    for length in 0..HEADER_LEN {
        assert!(matches!(parse(&PLAIN[..length]), Parsed::Drop));
    }
}

#[test]
fn other_opcodes_get_notimp() {
    for opcode in 1..16u8 {
        let mut message = PLAIN.to_vec();
        message[2] |= opcode << 3;
        let flags = 0x8104 | u16::from(opcode) << 11;
        assert_eq!(instant_reply(&message), (0x1234, flags, 0));
        assert_eq!(instant_reply(&message[..HEADER_LEN]), (0x1234, flags, 0));
        message[3] |= 0x10;
        assert_eq!(
            instant_reply(&message),
            (0x1234, flags, 0),
            "CD is not copied"
        );
    }
}

#[test]
fn bad_questions_are_not_repeated() {
    let formerr = (0x1234, 0x8101, 0);
    let mut two = PLAIN.to_vec();
    two[5] = 2;
    assert_eq!(instant_reply(&two), formerr);
    let mut none = PLAIN.to_vec();
    none[5] = 0;
    assert_eq!(instant_reply(&none), formerr);
    for length in HEADER_LEN..PLAIN.len() {
        assert_eq!(instant_reply(&PLAIN[..length]), formerr, "cut to {length}");
    }
    for name in [
        &b"\xc0\x0c"[..],
        b"\xc0\0",
        b"\xc0",
        b"\x41aaaa\0",
        b"\x04q-s0\xc0\x12",
    ] {
        let message = [&PLAIN[..HEADER_LEN], name, b"\0\x01\0\x01"].concat();
        assert_eq!(instant_reply(&message), formerr, "{name:?}");
    }
    let long = [
        &PLAIN[..HEADER_LEN],
        &b"\x07aaaaaaa".repeat(32),
        b"\0\0\x01\0\x01",
    ]
    .concat();
    assert_eq!(instant_reply(&long), formerr);
}

#[test]
fn bad_records_get_formerr() {
    let formerr = (0x1234, 0x8101, 1);
    let address = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x01\x02\x03\x04";
    assert_eq!(
        instant_reply(&with_records(0, 0, 1, b"\0\0\x29\x04\xd0")),
        formerr
    );
    assert_eq!(
        instant_reply(&with_records(0, 0, 1, &address[..14])),
        formerr
    );
    // A truncated option.
    assert_eq!(
        instant_reply(&with_records(
            0,
            0,
            1,
            b"\0\0\x29\x04\xd0\0\0\0\0\0\x03\0\x0a\0"
        )),
        formerr
    );
    // Too many records for a query: refused before the question is parsed.
    let two = [&address[..], address].concat();
    assert_eq!(
        instant_reply(&with_records(2, 0, 0, &two)),
        (0x1234, 0x8101, 0)
    );
    assert_eq!(
        instant_reply(&with_records(0, 2, 0, &two)),
        (0x1234, 0x8101, 0)
    );
    assert_eq!(
        instant_reply(&with_records(0, 0, 3, &two)),
        (0x1234, 0x8101, 0)
    );
}

#[test]
fn opt_may_follow_other_records() {
    let opt = b"\0\0\x29\x04\xd0\0\0\x80\0\0\0";
    let address = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x01\x02\x03\x04";
    let edns = |query: Query<'_>| {
        query
            .edns
            .map(|edns| (edns.udp_size, edns.dnssec_ok, query.has_options()))
    };
    let expected = Some((1232, true, false));
    assert_eq!(edns(query(&with_records(0, 0, 1, opt))), expected);
    assert_eq!(
        edns(query(&with_records(0, 0, 2, &[&opt[..], address].concat()))),
        expected
    );
    assert_eq!(
        edns(query(&with_records(0, 0, 2, &[&address[..], opt].concat()))),
        expected
    );
    assert_eq!(query(&with_records(1, 0, 0, opt)).edns, None);
    assert_eq!(query(&with_records(0, 0, 0, b"trailing bytes")).edns, None);
}

#[test]
fn opt_owner_must_be_root() {
    let owned = |owner: &[u8]| [owner, &opt_record(1232, 0, false)[1..]].concat();
    let address = b"\0\0\x01\0\x01\0\0\0\0\0\x04\x0a\0\0\x01";
    for owner in [&b"\x01a\0"[..], b"\xc0\x0c"] {
        let opt = owned(owner);
        assert_eq!(
            instant_reply(&with_records(0, 0, 1, &opt)),
            (0x1234, 0x8101, 1),
            "{owner:?}"
        );
        let behind = [&address[..], &opt].concat();
        assert_eq!(
            instant_reply(&with_records(0, 0, 2, &behind)),
            (0x1234, 0x8101, 1),
            "{owner:?}"
        );
    }
}

#[test]
fn two_opts_are_formerr() {
    let opt = &opt_record(1232, 0, false)[..];
    assert_eq!(
        instant_reply(&with_records(0, 0, 2, &opt.repeat(2))),
        (0x1234, 0x8101, 1)
    );
}

#[test]
fn reply_announces_server_size() {
    let message = with_records(0, 0, 1, &opt_record(4096, 0, true));
    let query = query(&message);
    assert_eq!(query.reply_opt(0), Some(opt_record(1232, 0, true)));
    let settings = ReplySettings {
        echo_client_opt: true,
        ..ReplySettings::default()
    };
    let from = RequestInfo {
        client: None,
        transport: Transport::Udp,
    };
    let Parsed::Query(echoing) = parse_from(&message, from, &settings) else {
        panic!("a query")
    };
    assert_eq!(echoing.reply_opt(0), Some(opt_record(4096, 0, false)));
}

#[test]
fn client_subnet_is_found() {
    let subnet = b"\0\x08\0\x07\0\x01\x18\0\xc0\0\x02";
    let opt = [&b"\0\0\x29\x04\xd0\0\0\0\0\0\x11\0\x0a\0\x02ab"[..], subnet].concat();
    let message = with_records(0, 0, 1, &opt);
    assert_eq!(query(&message).client_subnet(), Some(&subnet[..]));
    assert_eq!(query(PLAIN).client_subnet(), None);
}

#[test]
fn unknown_edns_version_gets_badvers() {
    let message = with_records(0, 0, 1, b"\0\0\x29\x04\xd0\0\x07\0\0\0\0");
    let Parsed::Reply(reply) = parse(&message) else {
        panic!("no reply")
    };
    let reply = Message::from_vec(&reply).unwrap();
    // 16 also means BADSIG, in other records.
    assert_eq!(
        u16::from(reply.metadata.response_code),
        u16::from(ResponseCode::BADVERS)
    );
    assert_eq!(reply.queries.len(), 1);
    let edns = reply.edns.unwrap();
    assert_eq!((edns.version(), edns.max_payload()), (0, 1232));
}

#[test]
fn sizes_follow_client_and_transport() {
    let opt = |size: u16| with_records(0, 0, 1, &opt_record(size, 0, false));
    let limit = |size| query(&opt(size)).limit();
    assert_eq!(
        [limit(0), limit(100), limit(1232), limit(65_535)],
        [512, 512, 1232, MAX_UDP_SIZE]
    );
    assert_eq!(query(PLAIN).limit(), 512);
    assert_eq!(query_by(Transport::Tcp, &opt(512)).limit(), MAX_TCP_SIZE);
}

/// A reply over UDP is at most as long as a datagram over IPv4 may be, and one over TCP as its length field tells.
#[test]
fn largest_messages_end_at_transport() {
    let opt = |size: u16| with_records(0, 0, 1, &opt_record(size, 0, false));
    for (size, limit) in [
        (511, 512),
        (512, 512),
        (513, 513),
        (65_506, 65_506),
        (65_507, 65_507),
        (65_508, 65_507),
        (65_535, 65_507),
    ] {
        assert_eq!(query(&opt(size)).limit(), limit, "{size}");
    }
    // 32 bytes of header and question, 16 per address: 4,093 addresses take 65,520 bytes.
    let mut out = Vec::new();
    for (count, given) in [(4092, 4092), (4093, 4093), (4094, 4093_u16)] {
        local_reply(
            &query_by(Transport::Tcp, PLAIN),
            found(v4_addresses(count), vec![]).answer(),
            &mut Shuffle::default(),
            &mut out,
        );
        let reply = Message::from_vec(&out).unwrap();
        assert_eq!(reply.answers.len(), usize::from(given));
        assert_eq!(out.len(), 32 + 16 * usize::from(given));
        assert_eq!(reply.metadata.truncation, count > given.into(), "{count}");
    }
    // Replies of other servers: one record of any length.
    for (transport, size, longest) in [
        (Transport::Udp, 65_535, 65_507),
        (Transport::Udp, 1232, 1232),
        (Transport::Tcp, 512, 65_535),
    ] {
        let message = opt(size);
        let query = query_by(transport, &message);
        for (len, is_whole) in [
            (longest - OPT_LEN, true),
            (longest - OPT_LEN + 1, false),
            (longest, false),
            (longest + 1, false),
        ] {
            for owner in [&b"\xc0\x0c"[..], b"\x01A\xc0\x0c"] {
                let reply = one_record(owner, len);
                let fitted = truncate_to_client(&query, reply.clone());
                let what = format!("{len} bytes by {transport:?}, EDNS {size}");
                assert_eq!(fitted[2] & 0x02 == 0, is_whole, "{what}");
                let records = [fitted[7], fitted[11]];
                assert_eq!(records, [u8::from(is_whole), 1], "{what}");
                assert!(fitted.ends_with(&query.reply_opt(0).unwrap()), "{what}");
                assert!(!is_whole || fitted.len() == len + OPT_LEN, "{what}");
            }
        }
    }
}

/// Returns a reply of `len` bytes to [`PLAIN`] without OPT, with one record of a private type.
fn one_record(owner: &[u8], len: usize) -> Vec<u8> {
    let mut reply = PLAIN.to_vec();
    (reply[2], reply[7]) = (0x81, 1);
    reply.extend_from_slice(owner);
    reply.extend_from_slice(b"\xff\x00\0\x01\0\0\0\x3c");
    let data = len - reply.len() - 2;
    reply.extend_from_slice(&(data as u16).to_be_bytes());
    reply.resize(len, 7);
    reply
}

/// A record that the library refuses: an IPv4 address of five bytes.
const UNREADABLE: &[u8] = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x05\x0a\0\0";

/// Replies that the library cannot read are cut record by record.
#[test]
fn unreadable_records_are_cut_with_tc() {
    let with_opt = with_records(0, 0, 1, &opt_record(1232, 0, false));
    let record = |number: u8| [UNREADABLE, &[number, 0]].concat();
    let reply = |counts: [u8; 3]| {
        let mut reply = PLAIN.to_vec();
        reply[2..4].copy_from_slice(&[0x81, 0x80]);
        (reply[7], reply[9], reply[11]) = (counts[0], counts[1], counts[2]);
        let all: u16 = counts.map(u16::from).iter().sum();
        reply.extend((0..all).flat_map(|number| record(number as u8)));
        reply
    };
    assert!(Message::from_vec(&reply([1, 0, 0])).is_err());
    let counts_of = |reply: &[u8]| [reply[7], reply[9], reply[11]];
    // 32 bytes of header and question, 17 per record: 28 in 512 bytes, 69 in 1,232 with an OPT.
    for (message, counts, kept, is_cut) in [
        (PLAIN, [28, 0, 0], [28, 0, 0], false),
        (PLAIN, [29, 0, 0], [28, 0, 0], true),
        (PLAIN, [200, 0, 0], [28, 0, 0], true),
        // Sections after the first omitted record are empty.
        (PLAIN, [40, 1, 1], [28, 0, 0], true),
        (PLAIN, [20, 20, 1], [20, 8, 0], true),
        (PLAIN, [20, 4, 20], [20, 4, 4], true),
        (PLAIN, [0, 0, 29], [0, 0, 28], true),
        (&with_opt, [69, 0, 0], [69, 0, 1], false),
        (&with_opt, [70, 0, 0], [69, 0, 1], true),
        (&with_opt, [60, 4, 20], [60, 4, 6], true),
    ] {
        let query = query(message);
        let whole = reply(counts);
        let cut = truncate_to_client(&query, whole.clone());
        assert!(cut.len() <= query.limit());
        assert_eq!(counts_of(&cut), kept, "{counts:?}");
        assert_eq!(cut[2] & 0x02 != 0, is_cut, "{counts:?}: TC");
        assert_eq!(cut[3] & 0x0f, 0, "{counts:?}: RCODE");
        let opt = query.reply_opt(0).map_or(vec![], Vec::from);
        let records = cut.len() - opt.len();
        assert_eq!(cut[12..records], whole[12..records], "{counts:?}");
        assert_eq!(cut[records..], opt, "{counts:?}");
    }
    // The OPT of the reply stays, behind what is kept.
    let theirs = opt_record(4096, 0, true);
    let mut whole = reply([80, 0, 1]);
    whole.truncate(whole.len() - 17);
    whole.extend_from_slice(&theirs);
    let cut = truncate_to_client(&query(&with_opt), whole);
    assert_eq!(counts_of(&cut), [69, 0, 1]);
    assert!(cut[2] & 0x02 != 0 && cut.ends_with(&theirs));
}

#[test]
fn answers_fill_the_limit() {
    // 32 bytes of header and question, 16 per address: 30 fit into 512 bytes, 29 with an OPT.
    let with_opt = with_records(0, 0, 1, &opt_record(512, 0, false));
    for (message, fit) in [(PLAIN, 30), (&with_opt[..], 29)] {
        for (count, expected, truncated) in
            [(fit, fit, false), (fit + 1, fit, true), (2000, fit, true)]
        {
            let mut out = Vec::new();
            let query = query(message);
            local_reply(
                &query,
                found(v4_addresses(count), vec![]).answer(),
                &mut Shuffle::default(),
                &mut out,
            );
            let reply = Message::from_vec(&out).unwrap();
            assert_eq!(reply.answers.len(), expected as usize);
            assert_eq!(reply.metadata.truncation, truncated);
            assert_eq!(reply.edns.is_some(), query.edns.is_some());
            assert!(out.len() <= 512);
        }
    }
}

#[test]
fn every_order_is_equally_likely() {
    let mut seen = std::collections::HashMap::<Vec<u8>, u32>::new();
    let mut shuffle = Shuffle::with_seed(7);
    let resolution = found(v4_addresses(4), vec![]);
    let mut out = Vec::new();
    for _ in 0..24_000 {
        local_reply(&query(PLAIN), resolution.answer(), &mut shuffle, &mut out);
        *seen.entry(out.clone()).or_default() += 1;
    }
    assert_eq!(seen.len(), 24);
    // Expected 1,000 each; the seed is fixed, so the result is deterministic.
    assert!(
        seen.values().all(|count| (800..1200).contains(count)),
        "{seen:?}"
    );
}

#[test]
fn truncated_answers_are_random() {
    let mut first = std::collections::HashSet::new();
    let mut shuffle = Shuffle::with_seed(1);
    let mut out = Vec::new();
    for _ in 0..200 {
        local_reply(
            &query(PLAIN),
            found(v4_addresses(100), vec![]).answer(),
            &mut shuffle,
            &mut out,
        );
        let reply = Message::from_vec(&out).unwrap();
        first.insert(reply.answers[0].data.to_string());
    }
    assert!(first.len() > 60, "{}", first.len());
}

#[test]
fn large_replies_are_compressed_first() {
    let with_opt = with_records(0, 0, 1, &opt_record(1232, 0, false));
    let uncompressed = |count: u8| {
        let mut reply = PLAIN.to_vec();
        reply[2..4].copy_from_slice(&[0x81, 0x80]);
        reply[7] = count;
        for number in 0..count {
            reply.extend_from_slice(
                b"\x04q-s0\x04q-g1\x04bosh\0\0\x01\0\x01\0\0\0\x3c\0\x04\x0a\0\0",
            );
            reply.push(number);
        }
        reply
    };
    for (message, count, fit_count) in [
        (PLAIN, 30, 30),
        (PLAIN, 40, 30),
        (&with_opt, 74, 74),
        (&with_opt, 80, 74),
    ] {
        let query = query(message);
        let reply = truncate_to_client(&query, uncompressed(count));
        assert!(reply.len() <= query.limit());
        let reply = Message::from_vec(&reply).unwrap();
        assert_eq!(reply.answers.len(), fit_count);
        assert_eq!(reply.metadata.truncation, usize::from(count) > fit_count);
        assert_eq!(reply.edns.is_some(), query.edns.is_some());
        for (number, answer) in reply.answers.iter().enumerate() {
            assert_eq!(answer.data, RData::A(rdata::A::new(10, 0, 0, number as u8)));
        }
    }
}

#[test]
fn opt_is_added_once() {
    let with_opt = with_records(0, 0, 1, &opt_record(1232, 0, false));
    let mut reply = PLAIN.to_vec();
    reply[2] |= 0x80;
    let fitted = truncate_to_client(&query(&with_opt), reply.clone());
    assert_eq!(
        fitted,
        [&with_counts(&reply, 1), &opt_record(1232, 0, false)[..]].concat()
    );
    assert_eq!(
        truncate_to_client(&query_by(Transport::Tcp, &with_opt), fitted.clone()),
        fitted
    );
    assert_eq!(truncate_to_client(&query(PLAIN), fitted.clone()), fitted);
    assert_eq!(truncate_to_client(&query(PLAIN), reply.clone()), reply);
}

/// Returns `message` with another ARCOUNT.
fn with_counts(message: &[u8], additionals: u8) -> Vec<u8> {
    let mut message = message.to_vec();
    message[11] = additionals;
    message
}

#[test]
fn oversized_unreadable_reply_gets_servfail() {
    let mut broken = with_counts(PLAIN, 9);
    broken[2] |= 0x80;
    assert_eq!(truncate_to_client(&query(PLAIN), broken.clone()), broken);
    broken.resize(600, 0xff);
    let reply = Message::from_vec(&truncate_to_client(&query(PLAIN), broken)).unwrap();
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
}

/// Generates the labels of a valid name from arbitrary bytes.
fn labels() -> impl Strategy<Value = Vec<Vec<u8>>> {
    vec(vec(any::<u8>(), 1..=63), 0..=6).prop_filter("name too long", |labels| {
        labels.iter().map(|label| label.len() + 1).sum::<usize>() < 255
    })
}

/// Generates a query as encoded by hickory, and its EDNS size.
fn hickory_query() -> impl Strategy<Value = (Message, Option<u16>)> {
    (
        labels(),
        any::<[u16; 3]>(),
        any::<[bool; 3]>(),
        option::of(512u16..),
    )
        .prop_map(|(labels, [id, qtype, qclass], [rd, cd, dnssec_ok], size)| {
            let mut message = Message::new(id, MessageType::Query, OpCode::Query);
            message.metadata.recursion_desired = rd;
            message.metadata.checking_disabled = cd;
            let name = HickoryName::from_labels(labels).unwrap();
            let mut query = op::Query::query(name, RecordType::from(qtype));
            query.set_query_class(DNSClass::from(qclass));
            message.add_query(query);
            if let Some(size) = size {
                let mut edns = HickoryEdns::new();
                edns.set_max_payload(size).set_dnssec_ok(dnssec_ok);
                message.set_edns(edns);
            }
            (message, size)
        })
}

/// Encodes the reply with hickory, with the answers in the same order as in `ours`.
fn by_hickory(query: &Message, rcode: ResponseCode, ours: &Message, truncated: bool) -> Vec<u8> {
    let mut reply = Message::new(query.metadata.id, MessageType::Response, OpCode::Query);
    reply.metadata.authoritative = true;
    reply.metadata.recursion_available = true;
    reply.metadata.recursion_desired = query.metadata.recursion_desired;
    reply.metadata.checking_disabled = query.metadata.checking_disabled;
    reply.metadata.response_code = rcode;
    reply.metadata.truncation = truncated;
    reply.add_query(query.queries[0].clone());
    let owner = query.queries[0].name().clone();
    for answer in &ours.answers {
        reply.add_answer(Record::from_rdata(owner.clone(), 0, answer.data.clone()));
    }
    if let Some(edns) = &query.edns {
        let mut opt = HickoryEdns::new();
        opt.set_max_payload(UDP_PAYLOAD_SIZE)
            .set_dnssec_ok(edns.flags().dnssec_ok);
        reply.set_edns(opt);
    }
    reply.to_vec().unwrap()
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..200), tcp: bool) {
        let transport = if tcp { Transport::Tcp } else { Transport::Udp };
        if let Parsed::Query(query) = parse(&bytes) {
            let _name = query.question.name();
            let _error = error_reply(&query, ResponseCode::Refused);
        }
        let _fitted = truncate_to_client(&query_by(transport, PLAIN), bytes);
    }

    #[test]
    fn damaged_query_never_panics(
        (message, _) in hickory_query(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in any::<prop::sample::Index>(),
        more in vec(any::<u8>(), 0..40),
        additionals in 0u8..3,
    ) {
        let mut bytes = message.to_vec().unwrap();
        bytes[11] = additionals;
        bytes.extend_from_slice(&more);
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(cut.index(bytes.len() * 2));
        if let Parsed::Query(query) = parse(&bytes) {
            // hickory accepts every message that we accept, except for some OPTs.
            if let Ok(theirs) = Message::from_vec(&bytes) {
                prop_assert_eq!(theirs.queries.len(), 1);
                let mut name = Vec::new();
                for label in theirs.queries[0].name().iter() {
                    name.push(label.len() as u8);
                    name.extend_from_slice(label);
                }
                name.push(0);
                prop_assert_eq!(query.question.raw_name, &name[..]);
                prop_assert_eq!(u16::from(theirs.queries[0].query_type()), query.question.qtype);
                prop_assert_eq!(theirs.edns.is_some(), query.edns.is_some());
            }
        } else if let Ok(theirs) = Message::from_vec(&bytes) {
            let refused = theirs.metadata.message_type == MessageType::Response
                || theirs.metadata.op_code != OpCode::Query
                || theirs.queries.len() != 1
                || theirs.answers.len() > 1
                || theirs.authorities.len() > 1
                || theirs.additionals.len() + usize::from(theirs.edns.is_some()) > 2
                || theirs.edns.is_some()
                // Compression inside the question, which hickory accepts.
                || bytes[HEADER_LEN..].iter().any(|byte| *byte >= 0xc0);
            prop_assert!(refused, "{:?} against {:?}", parse(&bytes), theirs);
        }
    }

    #[test]
    fn hickory_queries_are_understood((message, size) in hickory_query()) {
        let bytes = message.to_vec().unwrap();
        let ours = query(&bytes);
        let theirs = &message.queries[0];
        prop_assert_eq!(ours.id, message.metadata.id);
        prop_assert_eq!(ours.question.qtype, u16::from(theirs.query_type()));
        prop_assert_eq!(ours.question.qclass, u16::from(theirs.query_class()));
        prop_assert_eq!(ours.recursion_desired(), message.metadata.recursion_desired);
        prop_assert_eq!(ours.checking_disabled(), message.metadata.checking_disabled);
        prop_assert_eq!(ours.edns.map(|edns| edns.udp_size), size);
        let dnssec_ok = message.edns.as_ref().map(|edns| edns.flags().dnssec_ok);
        prop_assert_eq!(ours.edns.map(|edns| edns.dnssec_ok), dnssec_ok);
        prop_assert_eq!(ours.question.name().label_count(), theirs.name().iter().count());
    }

    #[test]
    fn local_replies_match_hickory(
        (message, _) in hickory_query(),
        qtype in prop::sample::select(vec![1u16, 28, 255, 15, 64]),
        existence in prop::sample::select(vec![Existence::Found, Existence::NoSuchName, Existence::Malformed]),
        v4 in vec(any::<u32>().prop_map(Ipv4Addr::from_bits), 0..60),
        v6 in vec(any::<u128>().prop_map(Ipv6Addr::from_bits), 0..40),
        tcp: bool,
        seed: u64,
    ) {
        let mut message = message;
        message.queries[0].set_query_type(RecordType::from(qtype));
        let bytes = message.to_vec().unwrap();
        let query = query_by(if tcp { Transport::Tcp } else { Transport::Udp }, &bytes);
        let limit = query.limit();
        let (v4, v6) = if existence == Existence::Found { (v4, v6) } else { (vec![], vec![]) };
        let resolution = Resolution { existence, v4, v6, checks: Checks::default() };
        let mut out = vec![0xff; 7];
        local_reply(&query, resolution.answer(), &mut Shuffle::with_seed(seed), &mut out);
        prop_assert!(out.len() <= limit);

        let ours = Message::from_vec(&out).unwrap();
        let mut expected: Vec<RData> = Vec::new();
        if matches!(qtype, 1 | 255) {
            expected.extend(resolution.v4.iter().map(|a| RData::A(rdata::A(*a))));
        }
        if matches!(qtype, 28 | 255) {
            expected.extend(resolution.v6.iter().map(|a| RData::AAAA(rdata::AAAA(*a))));
        }
        let rcode = match existence {
            Existence::Found => ResponseCode::NoError,
            Existence::NoSuchName => ResponseCode::NXDomain,
            Existence::Malformed if matches!(qtype, 1 | 28 | 255) => ResponseCode::FormErr,
            Existence::Malformed => ResponseCode::NoError,
        };
        let truncated = ours.answers.len() < expected.len();
        prop_assert_eq!(&out, &by_hickory(&message, rcode, &ours, truncated));

        // The answers are a subset of the input, without added repetitions, and as large as the
        // limit permits.
        for answer in &ours.answers {
            let at = expected.iter().position(|data| data == &answer.data);
            prop_assert!(at.is_some());
            expected.swap_remove(at.unwrap());
        }
        if truncated {
            let largest = if qtype == 1 { 16 } else { 28 };
            prop_assert!(out.len() + largest > limit);
        } else {
            prop_assert!(expected.is_empty());
        }
    }

    #[test]
    fn error_replies_match_hickory((message, _) in hickory_query(), code in 0u16..4096) {
        let bytes = message.to_vec().unwrap();
        let rcode = ResponseCode::from((code >> 4) as u8, (code & 15) as u8);
        let mut expected = Message::new(message.metadata.id, MessageType::Response, OpCode::Query);
        expected.metadata.recursion_desired = message.metadata.recursion_desired;
        expected.metadata.checking_disabled = message.metadata.checking_disabled;
        expected.metadata.response_code = rcode;
        expected.add_query(message.queries[0].clone());
        if let Some(edns) = &message.edns {
            let mut opt = HickoryEdns::new();
            opt.set_max_payload(UDP_PAYLOAD_SIZE).set_dnssec_ok(edns.flags().dnssec_ok);
            expected.set_edns(opt);
        }
        prop_assert_eq!(error_reply(&query(&bytes), rcode), expected.to_vec().unwrap());
    }

    #[test]
    fn fitted_replies_are_prefixes(
        (message, _) in hickory_query(),
        names in vec("[a-zA-Z]{1,20}\\.[a-c]{1,3}\\.example\\.", 0..80),
        sections in vec(0u8..3, 80),
        tcp: bool,
    ) {
        let bytes = message.to_vec().unwrap();
        let query = query_by(if tcp { Transport::Tcp } else { Transport::Udp }, &bytes);
        let mut reply = Message::new(message.metadata.id, MessageType::Response, OpCode::Query);
        reply.add_query(message.queries[0].clone());
        for (name, section) in names.iter().zip(sections) {
            let name = HickoryName::from_str(name).unwrap();
            let record = Record::from_rdata(name.clone(), 60, RData::CNAME(rdata::CNAME(name)));
            match section {
                0 => reply.add_answer(record),
                1 => reply.add_authority(record),
                _ => reply.add_additional(record),
            };
        }
        let whole = reply.to_vec().unwrap();
        let fitted = truncate_to_client(&query, whole.clone());
        prop_assert!(fitted.len() <= query.limit());
        let read = Message::from_vec(&fitted).unwrap();
        prop_assert_eq!(read.edns.is_some(), query.edns.is_some());
        let opt_len = if query.edns.is_some() { OPT_LEN } else { 0 };
        let fits = whole.len() + opt_len <= query.limit();
        prop_assert_eq!(read.metadata.truncation, !fits);
        prop_assert!(reply.answers.starts_with(&read.answers));
        if fits {
            prop_assert_eq!(&read.answers, &reply.answers);
            prop_assert_eq!(&read.authorities, &reply.authorities);
            prop_assert_eq!(&read.additionals, &reply.additionals);
        }
        // Sections after the first omitted record are empty.
        prop_assert!(read.answers.len() == reply.answers.len() || read.authorities.is_empty());
        prop_assert!(read.authorities.len() == reply.authorities.len() || read.additionals.is_empty());
    }
}

#[test]
fn data_like_an_opt_is_no_opt() {
    let opt = opt_record(1232, 0, false);
    let with_opt = with_records(0, 0, 1, &opt);
    let mut reply = with_records(1, 0, 0, b"\xc0\x0c\0\x10\0\x01\0\0\0\0\0\x0b");
    reply[2] |= 0x80;
    reply.extend_from_slice(&opt);
    assert_eq!(
        truncate_to_client(&query(&with_opt), reply.clone()),
        [&with_counts(&reply, 1), &opt[..]].concat()
    );
}

#[test]
fn nothing_follows_a_cut_section() {
    let large = |kind: u8| {
        let head = [0, 0, kind, 0, 1, 0, 0, 0, 0, 2, 0x58];
        [&head[..], &[1; 600]].concat()
    };
    let small = b"\0\0\x01\0\x01\0\0\0\0\0\x04\x0a\0\0\x01";
    for (answers, records, kept) in [
        (1, [&large(99), &small[..], small], (0, 0, 0)),
        (1, [&small[..], &large(99), small], (1, 0, 0)),
        (1, [&small[..], small, &large(99)], (1, 1, 0)),
    ] {
        let mut reply = with_records(answers, 1, 1, &records.concat());
        reply[2] |= 0x80;
        let reply = Message::from_vec(&truncate_to_client(&query(PLAIN), reply)).unwrap();
        let found = (
            reply.answers.len(),
            reply.authorities.len(),
            reply.additionals.len(),
        );
        assert!(reply.metadata.truncation);
        assert_eq!(found, kept);
    }
}

/// Builds [`PLAIN`] with these flags and an OPT with these options.
fn with_options(flags: u16, size: u16, dnssec_ok: bool, options: &[u8]) -> Vec<u8> {
    let mut opt = opt_record(size, 0, dnssec_ok).to_vec();
    opt[9..].copy_from_slice(&(options.len() as u16).to_be_bytes());
    opt.extend_from_slice(options);
    let mut message = with_records(0, 0, 1, &opt);
    message[2..4].copy_from_slice(&flags.to_be_bytes());
    message
}

#[test]
fn owned_queries_are_the_same() {
    let long = with_options(
        0x0130,
        1400,
        true,
        &[&b"\0\x0a\0\x08abcdefgh"[..], &[0; 90]].concat()[..12],
    );
    for message in [
        PLAIN,
        &long,
        &with_records(0, 0, 1, &opt_record(4096, 0, false)),
    ] {
        let from = RequestInfo {
            client: Some(Ipv4Addr::LOCALHOST.into()),
            transport: Transport::Udp,
        };
        let settings = ReplySettings {
            max_udp_reply: 1300,
            echo_client_opt: true,
        };
        let Parsed::Query(query) = parse_from(message, from, &settings) else {
            panic!("a query")
        };
        let query = query.with_room_for_options(20);
        let owned = query.to_owned();
        assert_eq!(format!("{:?}", owned.as_query()), format!("{query:?}"));
        assert_eq!(owned.as_query().message, message);
        assert_eq!(
            owned.as_query().question.raw_name,
            b"\x04q-s0\x04q-g1\x04bosh\0"
        );
    }
}

#[test]
fn flags_of_queries_are_read() {
    for (flags, dnssec_ok, expected) in [
        (0x0000, false, [false, false, false, false]),
        (0x0100, false, [true, false, false, false]),
        (0x0010, false, [false, true, false, false]),
        (0x0020, false, [false, false, true, false]),
        (0x0000, true, [false, false, true, true]),
        (0x0130, true, [true, true, true, true]),
        (0x07c0, false, [true, false, false, false]),
    ] {
        let message = with_options(flags, 1232, dnssec_ok, b"");
        let query = query(&message);
        let found = [
            query.recursion_desired(),
            query.checking_disabled(),
            query.wants_authentic_data(),
            query.dnssec_ok(),
        ];
        assert_eq!(found, expected, "{flags:x} {dnssec_ok}");
        assert_eq!(query.question_range(), 12..32);
    }
    let mut plain = PLAIN.to_vec();
    plain[3] = 0x20;
    assert!(query(&plain).wants_authentic_data() && !query(PLAIN).wants_authentic_data());
    assert!(!query(PLAIN).dnssec_ok());
}

#[test]
fn options_fill_the_opt() {
    for (options, codes) in [
        (&b""[..], Some(&[][..])),
        (b"\0\x0a\0\0", Some(&[10])),
        (b"\0\x0a\0\x02ab", Some(&[10])),
        (b"\0\x0a\0\x02ab\0\x03\0\0\0\x0a\0\x01c", Some(&[10, 3, 10])),
        (b"\0", None),
        (b"\0\x0a\0", None),
        (b"\0\x0a\0\x02a", None),
        (b"\0\x0a\0\x02abc", None),
        (b"\0\x0a\0\x02ab\0\x03\0\x01", None),
    ] {
        let message = with_options(0x0100, 1232, false, options);
        match parse(&message) {
            Parsed::Query(query) => {
                let found: Vec<u16> = query.options().map(|option| option.code).collect();
                assert_eq!(Some(&found[..]), codes, "{options:?}");
                assert_eq!(query.has_options(), !found.is_empty());
                let edns = query.edns.unwrap();
                assert_eq!(edns.options, (43, 43 + options.len() as u16));
                let first = query.option(10).map(|option| option.whole);
                let expected = match options.len() {
                    0 => None,
                    4 => Some(options),
                    _ => Some(&options[..6]),
                };
                assert_eq!(first, expected, "{options:?}");
            }
            Parsed::Reply(reply) => {
                assert_eq!(codes, None, "{options:?}");
                // The question is repeated, without an OPT.
                assert_eq!(reply, [b"\x12\x34\x81\x01", &PLAIN[4..]].concat());
            }
            Parsed::Drop => panic!("{options:?}"),
        }
    }
    assert_eq!(query(PLAIN).options().count(), 0);
    assert!(!query(PLAIN).has_options() && query(PLAIN).option(10).is_none());
}

#[test]
fn misplaced_opts_are_ignored() {
    let opt = &opt_record(1232, 0, false)[..];
    let owned = [b"\x01a\0", &opt[1..]].concat();
    let address = &b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x01\x02\x03\x04"[..];
    for (counts, records, has_opt) in [
        ([1, 1, 1], [address, address, opt], Some(true)),
        ([1, 1, 1], [opt, opt, opt], Some(true)),
        ([1, 1, 1], [&owned, &owned, opt], Some(true)),
        ([1, 1, 1], [opt, opt, address], Some(false)),
        ([1, 1, 1], [address, address, &owned], None),
        ([0, 1, 2], [address, opt, address], Some(true)),
        ([0, 1, 2], [address, address, opt], Some(true)),
        ([0, 1, 2], [opt, opt, opt], None),
        ([1, 0, 2], [opt, address, opt], Some(true)),
        ([1, 0, 2], [address, opt, &owned], None),
    ] {
        let [answers, authorities, additionals] = counts;
        let message = with_records(answers, authorities, additionals, &records.concat());
        let found = match parse(&message) {
            Parsed::Query(query) => Some(query.edns.is_some()),
            _ => None,
        };
        assert_eq!(found, has_opt, "{counts:?} {records:?}");
        // One byte less cuts off the last record.
        let cut = &message[..message.len() - 1];
        assert!(matches!(parse(cut), Parsed::Reply(_)), "{counts:?}");
    }
}

#[test]
fn limits_keep_room_for_options() {
    let from = |transport| RequestInfo {
        client: None,
        transport,
    };
    for (size, transport, limit, unlimited) in [
        (512, Transport::Udp, 512, 512),
        (1232, Transport::Udp, 600, 1232),
        (65_535, Transport::Udp, 600, 65_507),
        (512, Transport::Tcp, 65_535, 65_535),
    ] {
        let message = with_options(0, size, false, b"");
        let settings = ReplySettings {
            max_udp_reply: 600,
            ..ReplySettings::default()
        };
        let Parsed::Query(query) = parse_from(&message, from(transport), &settings) else {
            panic!("a query")
        };
        assert_eq!((query.limit(), query.limit_with_options()), (limit, limit));
        assert_eq!(query.without_server_limit().limit(), unlimited, "{size}");
        // A header, the longest name, type and class, and an OPT are 282 bytes.
        for (bytes, reserved) in [
            (0, 0),
            (28, 28),
            (limit - 282, limit - 282),
            (limit - 281, limit - 282),
        ] {
            let query = query.with_room_for_options(bytes);
            assert_eq!(query.limit(), limit - reserved, "{bytes}");
            assert_eq!(query.limit_with_options(), limit);
        }
    }
}

#[test]
fn replies_begin_with_question_and_flags() {
    let opt = &opt_record(1232, 0, true)[..];
    let message = with_options(0x0130, 1232, true, b"");
    for (message, opt, additionals) in [(&message[..], opt, 1), (PLAIN, &[], 0)] {
        let query = query(message);
        // RD and CD are copied, AD is not.
        let copied = query.flags & 0x0110;
        for (flags, bits) in [
            (ReplyFlags::LOCAL, 0x8480),
            (ReplyFlags::ERROR, 0x8000),
            (ReplyFlags::RECURSION, 0x8080),
        ] {
            let head = |rcode: u16, additionals: u8| {
                let mut reply = PLAIN.to_vec();
                reply[2..4].copy_from_slice(&(bits | copied | rcode).to_be_bytes());
                reply[11] = additionals;
                reply
            };
            assert_eq!(begin_reply(&query, 3, flags), head(3, 0));
            assert_eq!(begin_reply(&query, 0xf5, flags), head(5, 0));
            assert_eq!(
                empty_reply(&query, ResponseCode::NXDomain, flags),
                [&head(3, additionals), opt].concat()
            );
            let mut reply = begin_reply(&query, 0, flags);
            append_opt(&query, &mut reply);
            assert_eq!(reply, [&head(0, additionals), opt].concat());
        }
    }
    let mut short = vec![0; 11];
    append_opt(&query(&message), &mut short);
    assert_eq!(short, [0; 11]);
}

#[test]
fn opt_without_a_question_stands_alone() {
    let alone = |flags: u16, counts: [u8; 8], opt: &[u8]| {
        [&b"\x12\x34"[..], &flags.to_be_bytes(), &counts, opt].concat()
    };
    let one = [0, 0, 0, 0, 0, 0, 0, 1];
    let mut opt = opt_record(1400, 0, true).to_vec();
    opt[10] = 6;
    opt.extend_from_slice(b"\0\x0a\0\x02ab");
    let message = alone(0x0170, one, &opt);
    let (edns, mut options) = opt_without_question(&message).unwrap();
    let expected = Edns {
        udp_size: 1400,
        dnssec_ok: true,
        options: (23, 29),
    };
    assert_eq!(edns, expected);
    assert_eq!(options.next().map(|option| option.data), Some(&b"ab"[..]));
    let changed = |at: usize, value: u8| {
        let mut opt = opt.clone();
        opt[at] = value;
        alone(0, one, &opt)
    };
    for (what, message) in [
        ("a response", alone(0x8000, one, &opt)),
        ("another opcode", alone(0x0800, one, &opt)),
        ("the last opcode", alone(0x4000, one, &opt)),
        ("a question", alone(0, [0, 1, 0, 0, 0, 0, 0, 1], &opt)),
        ("an answer", alone(0, [0, 0, 0, 1, 0, 0, 0, 1], &opt)),
        ("two records", alone(0, [0, 0, 0, 0, 0, 0, 0, 2], &opt)),
        ("no record", alone(0, [0; 8], &opt)),
        ("an owner", changed(0, 1)),
        ("another type", changed(2, 1)),
        ("another version", changed(6, 1)),
        ("a short option", changed(10, 5)),
        ("a long option", changed(10, 7)),
        ("no counts", b"\x12\x34\0\0\0\0\0\0\0\0\0".to_vec()),
    ] {
        assert!(opt_without_question(&message).is_none(), "{what}");
    }
}

#[test]
fn layouts_end_with_the_last_record() {
    let address = &b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x01\x02\x03\x04"[..];
    let named = b"\x01a\xc0\x0c\0\x05\0\x01\0\0\0\x3c\0\x02\xc0\x0c";
    let opt = opt_record(1232, 0, false);
    let message = with_records(1, 1, 2, &[address, named, &opt, address].concat());
    let layout = Layout::read(&message).unwrap();
    assert_eq!(layout.records, [(32, 48), (48, 64), (64, 75), (75, 91)]);
    assert_eq!(
        (layout.counts, layout.start, layout.end),
        ([1, 1, 2], 32, 91)
    );
    assert_eq!(layout.opt, Some((64, 75)));
    for length in 0..message.len() {
        assert!(Layout::read(&message[..length]).is_none(), "{length}");
    }
    let longer = [&message[..], b"more"].concat();
    assert_eq!(Layout::read(&longer).unwrap().end, 91);
    // An OPT is one only in the additional section.
    let elsewhere = with_records(1, 0, 0, &opt);
    assert_eq!(Layout::read(&elsewhere).unwrap().opt, None);
    // Any number of questions precedes the records.
    let mut two = [PLAIN, b"\x01a\0\0\x01\0\x01", address].concat();
    (two[5], two[7]) = (2, 1);
    let layout = Layout::read(&two).unwrap();
    assert_eq!((layout.start, layout.records), (39, vec![(39, 55)]));
}

#[test]
fn mixed_addresses_fill_the_limit() {
    // 32 bytes of header and question, 16 per IPv4 and 28 per IPv6 address.
    let v6 = |count: u128| -> Vec<Ipv6Addr> {
        (0..count)
            .map(|number| Ipv6Addr::from_bits(0xfd << 120 | number))
            .collect()
    };
    let mut message = PLAIN.to_vec();
    for (qtype, v4_count, v6_count, answers, is_cut) in [
        (28, 0, 17, 17, false),
        (28, 9, 18, 17, true),
        (1, 30, 9, 30, false),
        (255, 30, 0, 30, false),
        (255, 0, 17, 17, false),
        (255, 2, 16, 18, false),
        (255, 4, 0, 4, false),
        (16, 4, 4, 0, false),
    ] {
        message[29] = qtype;
        let mut out = Vec::new();
        let resolution = found(v4_addresses(v4_count), v6(v6_count));
        local_reply(
            &query(&message),
            resolution.answer(),
            &mut Shuffle::with_seed(1),
            &mut out,
        );
        let reply = Message::from_vec(&out).unwrap();
        assert_eq!(
            reply.answers.len(),
            answers,
            "{qtype} {v4_count} {v6_count}"
        );
        assert_eq!(
            reply.metadata.truncation, is_cut,
            "{qtype} {v4_count} {v6_count}"
        );
        assert!(out.len() <= 512);
    }
}

#[test]
fn opt_like_owner_is_a_name() {
    let address = b"\0\x01\0\x01\0\0\0\x3c\0\x04\x01\x02\x03\x04";
    for owner in [
        &b"\x02\0\x29\0"[..],
        b"\x0a\0\x29\x04\xd0\0\0\0\0\0\0\0",
        b"\0",
    ] {
        let message = with_records(0, 0, 1, &[owner, address].concat());
        assert_eq!(query(&message).edns, None, "{owner:?}");
    }
}

#[test]
fn order_of_answers_follows_the_seed() {
    let resolution = found(v4_addresses(20), vec![]);
    let reply = |seed: u64| {
        let mut out = Vec::new();
        let mut shuffle = Shuffle::with_seed(seed);
        local_reply(&query(PLAIN), resolution.answer(), &mut shuffle, &mut out);
        out
    };
    assert_eq!(reply(1), reply(1));
    assert_ne!(reply(1), reply(2));
}
