//! Flags, sizes and options of queries and replies.

use std::net::{IpAddr, Ipv4Addr};

use dns_core::{
    resolve::{Existence, LocalAnswer},
    wire::{
        FLAG_CD, FLAG_RD, HEADER_LEN, Parsed, Query, ReplyFlags, ReplySettings, RequestInfo,
        Shuffle, TYPE_A, TYPE_AAAA, Transport, UDP_PAYLOAD_SIZE, begin_reply, empty_reply,
        error_reply, local_reply, opt_record, opt_without_question, parse, parse_from,
        query_message,
    },
};
use hickory_proto::op::ResponseCode;

use super::name;

const AD: u16 = 0x20;

fn message(flags: u16, qtype: u16) -> Vec<u8> {
    query_message(0x1234, flags, name("a.bosh").as_wire(), qtype)
}

/// Returns the message with an OPT.
fn with_opt(mut message: Vec<u8>, opt: [u8; 11], options: &[u8]) -> Vec<u8> {
    message[11] = 1;
    message.extend_from_slice(&opt[..9]);
    message.extend_from_slice(&(options.len() as u16).to_be_bytes());
    message.extend_from_slice(options);
    message
}

fn query(message: &[u8]) -> Query<'_> {
    match parse(message) {
        Parsed::Query(query) => query,
        other => panic!("no query: {other:?}"),
    }
}

#[test]
fn flags_are_read() {
    for (flags, dnssec_ok, expected) in [
        (0, false, [false; 3]),
        (FLAG_RD, false, [true, false, false]),
        (FLAG_CD, false, [false, true, false]),
        (AD, false, [false, false, true]),
        (0, true, [false, false, true]),
        (FLAG_RD | FLAG_CD | AD, true, [true; 3]),
    ] {
        let message = with_opt(message(flags, TYPE_A), opt_record(1232, 0, dnssec_ok), b"");
        let query = query(&message);
        let found = [
            query.recursion_desired(),
            query.checking_disabled(),
            query.wants_authentic_data(),
        ];
        assert_eq!(found, expected, "{flags:x} {dnssec_ok}");
        assert_eq!(query.dnssec_ok(), dnssec_ok);
        assert_eq!(
            (query.question_range(), query.has_options()),
            (12..24, false)
        );
        let owned = query.to_owned();
        let again = owned.as_query();
        assert_eq!((again.message, again.flags), (&message[..], flags));
        assert_eq!(again.question.raw_name, name("a.bosh").as_wire());
    }
    let plain = message(0, TYPE_A);
    assert!(!query(&plain).wants_authentic_data() && !query(&plain).has_options());
}

#[test]
fn options_are_found() {
    let options = b"\0\x0a\0\x02ab\0\x08\0\x01x\0\x0a\0\0";
    let message = with_opt(message(0, TYPE_A), opt_record(512, 0, false), options);
    let query = query(&message);
    assert!(query.has_options());
    assert_eq!(query.option(10).map(|option| option.data), Some(&b"ab"[..]));
    assert_eq!(query.client_subnet(), Some(&b"\0\x08\0\x01x"[..]));
    assert_eq!(query.option(3), None);
    assert_eq!(query.options().count(), 3);
}

#[test]
fn limits_of_client_and_server_meet() {
    let from = |transport| RequestInfo {
        client: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        transport,
    };
    for (size, max_udp_reply, transport, limit, unlimited) in [
        (None, 1232, Transport::Udp, 512, 512),
        (Some(100), 1232, Transport::Udp, 512, 512),
        (Some(1232), 1232, Transport::Udp, 1232, 1232),
        (Some(4096), 1232, Transport::Udp, 1232, 4096),
        (Some(4096), 600, Transport::Udp, 600, 4096),
        (Some(65_535), 65_507, Transport::Udp, 65_507, 65_507),
        (Some(512), 512, Transport::Tcp, 65_535, 65_535),
    ] {
        let plain = message(0, TYPE_A);
        let message = match size {
            Some(size) => with_opt(plain, opt_record(size, 0, false), b""),
            None => plain,
        };
        let settings = ReplySettings {
            max_udp_reply,
            echo_client_opt: false,
        };
        let Parsed::Query(query) = parse_from(&message, from(transport), &settings) else {
            panic!("no query");
        };
        assert_eq!(query.client, Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        assert_eq!(
            (query.limit(), query.limit_with_options()),
            (limit, limit),
            "{size:?}"
        );
        assert_eq!(query.without_server_limit().limit(), unlimited, "{size:?}");
        // Room for options leaves what the longest question needs.
        let reserved = query.with_room_for_options(28);
        assert_eq!(
            (reserved.limit(), reserved.limit_with_options()),
            (limit - 28, limit)
        );
        let least = HEADER_LEN + 255 + 4 + 11;
        assert_eq!(
            query.with_room_for_options(usize::MAX).limit(),
            least,
            "{size:?}"
        );
    }
}

#[test]
fn opt_follows_the_client() {
    let message = with_opt(message(0, TYPE_A), opt_record(4000, 0, true), b"");
    let from = RequestInfo {
        client: None,
        transport: Transport::Udp,
    };
    for (echo_client_opt, expected) in [
        (false, opt_record(UDP_PAYLOAD_SIZE, 0, true)),
        (true, opt_record(4000, 0, false)),
    ] {
        let settings = ReplySettings {
            echo_client_opt,
            ..ReplySettings::default()
        };
        let Parsed::Query(query) = parse_from(&message, from, &settings) else {
            panic!("no query");
        };
        assert_eq!(query.reply_opt(0), Some(expected));
        let reply = error_reply(&query, ResponseCode::Refused);
        assert_eq!(reply[reply.len() - 11..], expected);
    }
    assert_eq!(
        opt_record(0x1234, 7, true),
        [0, 0, 41, 0x12, 0x34, 7, 0, 0x80, 0, 0, 0]
    );
}

#[test]
fn empty_replies_repeat_the_question() {
    let message = message(FLAG_RD | FLAG_CD, TYPE_A);
    let query = query(&message);
    for (flags, bits) in [
        (ReplyFlags::LOCAL, 0x8590),
        (ReplyFlags::ERROR, 0x8110),
        (ReplyFlags::RECURSION, 0x8190),
    ] {
        let reply = empty_reply(&query, ResponseCode::NXDomain, flags);
        let expected = [
            &b"\x12\x34"[..],
            &(bits | 3u16).to_be_bytes(),
            &message[4..],
        ]
        .concat();
        assert_eq!(reply, expected, "{flags:?}");
        assert_eq!(begin_reply(&query, 3, flags), expected);
    }
}

#[test]
fn existence_decides_the_rcode() {
    for (existence, qtype, rcode) in [
        (Existence::Found, TYPE_A, 0),
        (Existence::Found, 16, 0),
        (Existence::NoSuchName, TYPE_A, 3),
        (Existence::NoSuchName, 16, 3),
        (Existence::Malformed, TYPE_A, 1),
        (Existence::Malformed, TYPE_AAAA, 1),
        (Existence::Malformed, 255, 1),
        (Existence::Malformed, 16, 0),
    ] {
        let message = message(0, qtype);
        let mut out = b"something else".to_vec();
        let v4 = if existence == Existence::Found {
            &[Ipv4Addr::LOCALHOST][..]
        } else {
            &[]
        };
        let answer = LocalAnswer {
            existence,
            v4,
            v6: &[],
        };
        local_reply(&query(&message), answer, &mut Shuffle::default(), &mut out);
        assert_eq!(out[3] & 0x0f, rcode, "{existence:?} {qtype}");
        assert_eq!(out[2] & 0x86, 0x84, "QR and AA, not TC");
        let answers = u8::from(existence == Existence::Found && qtype == TYPE_A);
        assert_eq!(out[6..12], [0, answers, 0, 0, 0, 0]);
    }
}

#[test]
fn opt_alone_is_read() {
    let opt = opt_record(1232, 0, false);
    let alone = |counts: [u8; 8], flags: u8, opt: &[u8]| {
        [&[0x12, 0x34, flags, 0][..], &counts, opt].concat()
    };
    let one = [0, 0, 0, 0, 0, 0, 0, 1];
    let found = alone(one, 0, &opt);
    let (edns, options) = opt_without_question(&found).unwrap();
    assert_eq!((edns.udp_size, options.count()), (1232, 0));
    let mut version = opt;
    version[6] = 1;
    let mut record = opt;
    record[2] = 1;
    for other in [
        alone([0, 1, 0, 0, 0, 0, 0, 1], 0, &opt),
        alone([0, 0, 0, 0, 0, 0, 0, 2], 0, &opt),
        alone([0; 8], 0, &opt),
        alone(one, 0x80, &opt),
        alone(one, 0x08, &opt),
        alone(one, 0, &version),
        alone(one, 0, &record),
        alone(one, 0, &opt[..10]),
    ] {
        assert!(opt_without_question(&other).is_none(), "{other:?}");
    }
}
