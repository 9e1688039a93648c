//! Malformed, incomplete and forged messages.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use proptest::prelude::*;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use super::{
    Failure, MAX_PIPELINED, Rfc2136, Rfc2136Settings, Server, TIMEOUT, TsigKey, UpdateSender,
    WireError, arguments, connect, explain, is_cheaper_than_transfer,
    messages::{
        self, CLASS_IN, Encoded, MessageReader, Records, TYPE_AXFR, Transfer, TransferError,
        append, decode, encode, question,
    },
    obstacles,
    tsig::TsigError,
};
use crate::{
    provider::{
        Batch, Parameters, Provider as _, ProviderSettings as _, Step, Transaction,
        TransactionResult, not_made, settings, unfit,
    },
    record::{Name, Record, RecordType, Target},
};

const NOW: u64 = 1_800_000_000;

fn apex() -> Name {
    Name::parse("example.org").unwrap()
}

fn key() -> TsigKey {
    TsigKey::new("publisher", "hmac-sha256".parse().unwrap(), "c2VjcmV0").unwrap()
}

/// Builds a response with records of the zone; `None` means its SOA.
fn response(id: u16, records: &[Option<(&str, RecordType, &str)>]) -> Vec<u8> {
    let mut section = Records::default();
    for record in records {
        match record {
            Some((name, record_type, target)) => {
                let data =
                    encode(*record_type, &Target::parse(*record_type, target).unwrap()).unwrap();
                section
                    .push(
                        &apex(),
                        &Name::parse(name).unwrap(),
                        *record_type,
                        CLASS_IN,
                        60,
                        &data,
                    )
                    .unwrap();
            }
            None => {
                let soa = [&[0, 0][..], &7_u32.to_be_bytes(), &[0; 16]].concat();
                section
                    .push(&apex(), &apex(), RecordType::SOA, CLASS_IN, 60, &soa)
                    .unwrap();
            }
        }
    }
    let mut message = question(id, 0, &apex(), TYPE_AXFR);
    append(&mut message, 1, &section);
    message[2] |= 0x80;
    message
}

const API: Option<(&str, RecordType, &str)> = Some(("api.example.org", RecordType::A, "192.0.2.1"));

#[test]
fn transfer_must_be_complete() {
    let take = |messages: &[Vec<u8>]| {
        let mut transfer = Transfer::new(&apex(), 9);
        for message in messages {
            transfer.take(message)?;
        }
        transfer.finish().map(|(records, _)| records.len())
    };
    let whole = response(9, &[None, API, None]);
    assert_eq!(take(std::slice::from_ref(&whole)), Ok(1));
    assert_eq!(
        take(&[response(9, &[None, API]), response(9, &[None])]),
        Ok(1)
    );
    assert_eq!(
        take(&[response(9, &[None, API])]),
        Err(TransferError::Incomplete)
    );
    assert_eq!(
        take(&[response(9, &[API, None])]),
        Err(TransferError::NoSoa(apex()))
    );
    assert_eq!(
        take(&[response(8, &[None, API, None])]),
        Err(TransferError::OtherQuestion)
    );
    assert_eq!(
        take(&[whole.clone(), response(9, &[API])]),
        Err(TransferError::Trailing)
    );
    let outside = Some(("api.example.net", RecordType::A, "192.0.2.1"));
    let outside_name = Name::parse("api.example.net").unwrap();
    assert_eq!(
        take(&[response(9, &[None, outside, None])]),
        Err(TransferError::Outside(outside_name))
    );
    let mut refused = whole.clone();
    refused[3] |= 5;
    assert_eq!(take(&[refused]), Err(TransferError::Code(5)));
    let mut changed = whole;
    let serial = changed.len() - 17;
    changed[serial] ^= 1;
    assert_eq!(
        take(&[changed]),
        Err(TransferError::Changed { first: 7, last: 6 })
    );
}

#[test]
fn endless_transfers_are_refused() {
    let mut transfer = Transfer::new(&apex(), 9);
    transfer.take(&response(9, &[None])).unwrap();
    // Signatures are skipped, so that reading them is fast.
    let signature = format!(r"\# 60000 {}", "00".repeat(60_000));
    let message = response(9, &[Some(("t.example.org", RecordType(46), &signature))]);
    let taken = (0..).find_map(|number| transfer.take(&message).err().map(|error| (number, error)));
    let (number, error) = taken.unwrap();
    assert_eq!(error, TransferError::TooLarge);
    assert!(number * message.len() <= 256 << 20, "{number} messages");
}

#[test]
fn overlong_data_are_refused() {
    let decoded = |record_type: RecordType, data: &[u8], length: u16| {
        let mut section = Records::default();
        section
            .push(&apex(), &apex(), record_type, CLASS_IN, 60, data)
            .unwrap();
        let mut message = question(9, 0, &apex(), TYPE_AXFR);
        append(&mut message, 1, &section);
        let place = message.len() - data.len() - 2;
        message[place..place + 2].copy_from_slice(&length.to_be_bytes());
        let mut reader = MessageReader::new(&message);
        reader.header().unwrap();
        reader.question().unwrap();
        decode(&message, &reader.record().unwrap())
    };
    let text = b"\x04text";
    assert!(decoded(RecordType::TXT, text, 5).is_ok());
    assert!(
        decoded(RecordType::TXT, text, 4).is_err(),
        "the string is longer than the data"
    );
    let host = b"\0\x0a\x01a\0";
    assert!(decoded(RecordType::MX, host, 5).is_ok());
    assert!(
        decoded(RecordType::MX, host, 4).is_err(),
        "the name is longer than the data"
    );
    assert!(
        decoded(RecordType::CNAME, b"\x01a\0more", 7).is_err(),
        "the name is shorter than the data"
    );
}

#[test]
fn unsigned_messages_are_refused() {
    let key = key();
    let mut request = question(9, 0, &apex(), TYPE_AXFR);
    let mut verifier = key.sign(&mut request, NOW).unwrap();
    let mut plain = response(9, &[None]);
    assert_eq!(verifier.verify(&mut plain, NOW), Err(TsigError::Missing));
    // A request is not a valid response to itself: its signature covers no earlier one.
    assert_eq!(
        verifier.verify(&mut request, NOW),
        Err(TsigError::BadSignature)
    );
}

#[test]
fn names_share_a_message() {
    let transaction = |number: usize| {
        let name = Name::parse(&format!("n{number}.example.org")).unwrap();
        let target = Target::parse(RecordType::A, "192.0.2.1").unwrap();
        let owner = Name::parse(&format!("a-n{number}.example.org")).unwrap();
        let text = Target::text(b"heritage=external-dns,external-dns/owner=me");
        let steps = vec![
            Step::Create(Record::new(name.clone(), RecordType::A, [target])),
            Step::Create(Record::new(owner, RecordType::TXT, [text])),
            Step::RequireAbsent(name.clone(), RecordType::CNAME),
        ];
        Encoded::new(&apex(), &Transaction { name, steps }, &HashMap::new()).unwrap()
    };
    let encoded: Vec<Encoded> = (0..1_000).map(transaction).collect();
    assert_eq!(
        messages::fitting(&encoded[..120]),
        120,
        "120 names go in one message"
    );
    let fitting = messages::fitting(&encoded);
    let message = messages::message(1, &apex(), &encoded[..fitting]);
    assert!(
        (50_000..=64_000).contains(&message.len()),
        "{}",
        message.len()
    );
}

proptest! {
    #[test]
    fn octets_never_panic(octets in prop::collection::vec(any::<u8>(), 0..600)) {
        let key = key();
        let mut request = question(9, 0, &apex(), TYPE_AXFR);
        let mut verifier = key.sign(&mut request, NOW).unwrap();
        let _ = verifier.verify(&mut octets.clone(), NOW);
        let _ = Transfer::new(&apex(), 9).take(&octets);
    }

    #[test]
    fn altered_messages_never_panic(at in 0_usize..200, octet in any::<u8>()) {
        let mut message = response(9, &[None, API, Some(("t.example.org", RecordType::TXT, "text")), None]);
        let place = at % message.len();
        message[place] = octet;
        let _ = Transfer::new(&apex(), 9).take(&message);
    }

    #[test]
    fn data_survive_the_wire(octets in prop::collection::vec(any::<u8>(), 0..700)) {
        let target = Target::text(&octets);
        let data = encode(RecordType::TXT, &target).unwrap();
        let mut section = Records::default();
        section.push(&apex(), &apex(), RecordType::TXT, CLASS_IN, 60, &data).unwrap();
        let mut reader = MessageReader::new(&section.octets);
        // The name points to the question, which this section lacks.
        prop_assert!(reader.name().is_err());
        let mut message = question(1, 0, &apex(), RecordType::TXT.0);
        append(&mut message, 1, &section);
        let mut reader = MessageReader::new(&message);
        reader.header().unwrap();
        reader.question().unwrap();
        let record = reader.record().unwrap();
        prop_assert_eq!(decode(&message, &record).unwrap(), target);
    }
}

#[test]
fn request_without_a_response_is_unfinished() {
    let key = key();
    let mut message = question(9, 0, &apex(), TYPE_AXFR);
    let verifier = key.sign(&mut message, NOW).unwrap();
    assert_eq!(verifier.finish(), Err(TsigError::Missing));
}

#[test]
fn many_questions_are_left_to_a_transfer() {
    for (questions, records, expected) in [
        (1, 0, true),
        (MAX_PIPELINED, 0, true),
        (MAX_PIPELINED + 1, 0, false),
        (1_000, 20_000, true),
        (20_000, 20_000, false),
    ] {
        let is_cheaper = is_cheaper_than_transfer(questions, records);
        assert_eq!(is_cheaper, expected, "{questions} of {records}");
    }
}

#[tokio::test]
async fn filtered_address_is_passed_over() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let full = socket.listen(1).unwrap();
    let first = full.local_addr().unwrap();
    // With two connections that nobody accepts the queue is full, and Linux drops the packets of the next one.
    let _one = TcpStream::connect(first).await.unwrap();
    let _other = TcpStream::connect(first).await.unwrap();
    let good = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let second = good.local_addr().unwrap();
    let connecting = timeout(TIMEOUT, connect([first, second].into_iter())).await;
    let stream = connecting.unwrap().unwrap();
    assert_eq!(stream.peer_addr().unwrap(), second);
    assert!(connect(std::iter::empty()).await.is_err());
}

#[test]
fn port_is_told_from_the_end_of_an_address() {
    for (text, expected) in [
        ("2001:db8::a:53", ["2001:db8::a:53", "53"]),
        ("2001:db8::1", ["2001:db8::1", "53"]),
        ("[2001:db8::a]:54", ["2001:db8::a", "54"]),
        ("ns:54", ["ns", "54"]),
    ] {
        let [host, port] = expected;
        let expected = [
            format!("--rfc2136-host={host}"),
            format!("--rfc2136-port={port}"),
        ];
        assert_eq!(arguments("rfc2136-host", text).unwrap(), expected, "{text}");
    }
}

#[test]
fn hosts_share_port_and_tls() {
    for text in ["tls://a,b:54", "a:853,tls://b:54"] {
        assert_eq!(
            arguments("rfc2136-host", text).unwrap(),
            [
                "--rfc2136-host=a",
                "--rfc2136-host=b",
                "--rfc2136-port=853",
                "--rfc2136-use-tls"
            ],
            "{text}"
        );
    }
}

fn parameters(pairs: &[(&str, &str)]) -> Parameters {
    let mut parameters = Parameters::default();
    for (name, value) in pairs {
        parameters.0.insert((*name).to_owned(), (*value).to_owned());
    }
    parameters
}

const MINIMAL: [(&str, &str); 3] = [
    ("rfc2136-host", "ns.example.org"),
    ("rfc2136-zone", "example.org"),
    ("rfc2136-insecure", "true"),
];

fn settings_of(more: &[(&str, &str)]) -> Result<Rfc2136Settings, String> {
    Rfc2136Settings::from_parameters(&parameters(&[&MINIMAL[..], more].concat()))
        .map_err(|error| error.to_string())
}

#[test]
fn servers_have_host_and_port() {
    for (text, expected, shown) in [
        ("ns", Some(("ns", 53, false)), "ns:53"),
        (" ns:54 ", Some(("ns", 54, false)), "ns:54"),
        ("192.0.2.1", Some(("192.0.2.1", 53, false)), "192.0.2.1:53"),
        (
            "2001:db8::1",
            Some(("2001:db8::1", 53, false)),
            "[2001:db8::1]:53",
        ),
        (
            "[2001:db8::1]",
            Some(("2001:db8::1", 53, false)),
            "[2001:db8::1]:53",
        ),
        (
            "[2001:db8::1]:54",
            Some(("2001:db8::1", 54, false)),
            "[2001:db8::1]:54",
        ),
        ("tls://ns", Some(("ns", 853, true)), "tls://ns:853"),
        ("tls://ns:1", Some(("ns", 1, true)), "tls://ns:1"),
        ("tls://[::1]:1", Some(("::1", 1, true)), "tls://[::1]:1"),
        ("", None, ""),
        (":53", None, ""),
        ("ns:", None, ""),
        ("ns:65536", None, ""),
        ("ns:dns", None, ""),
        ("[::1", None, ""),
        ("http://ns", None, ""),
        ("ns/x", None, ""),
    ] {
        let found = Server::parse(text);
        let expected = expected.map(|(host, port, tls)| Server {
            host: host.to_owned(),
            port,
            tls,
        });
        assert_eq!(found.as_ref().ok(), expected.as_ref(), "{text}");
        match found {
            Ok(server) => assert_eq!(server.to_string(), shown),
            Err(error) => assert_eq!(
                error.to_string(),
                format!(
                    "rfc2136-host is {text:?}; write host, host:port, [address]:port or tls://host:port"
                )
            ),
        }
    }
    let server = |text| Server::parse(text).unwrap();
    for (one, other, expected) in [
        ("ns", "NS:53", true),
        ("ns", "tls://ns:53", true),
        ("ns", "ns:54", false),
        ("ns", "other", false),
    ] {
        assert_eq!(
            server(one).is_same(&server(other)),
            expected,
            "{one} {other}"
        );
    }
}

#[test]
fn settings_are_read_from_parameters() {
    let found = settings_of(&[
        ("rfc2136-host", "a, tls://b:1"),
        ("rfc2136-zone", "Example.org., example.net, EXAMPLE.ORG"),
        ("rfc2136-min-ttl", "2m"),
    ])
    .unwrap();
    let servers: Vec<String> = found.servers.iter().map(ToString::to_string).collect();
    assert_eq!(servers, ["a:53", "tls://b:1"]);
    assert_eq!(found.zones, [apex(), Name::parse("example.net").unwrap()]);
    assert!(found.key.is_none());
    assert_eq!((found.min_ttl, found.timeout.as_secs()), (120, 10));
    let ported = settings_of(&[("rfc2136-host", "a,b:1"), ("rfc2136-port", "5300")]).unwrap();
    assert!(ported.servers.iter().all(|server| server.port == 5300));
    let signed = settings_of(&[
        ("rfc2136-insecure", "false"),
        ("rfc2136-tsig-keyname", "k"),
        ("rfc2136-tsig-secret", "c2VjcmV0"),
    ])
    .unwrap();
    assert_eq!(format!("{:?}", signed.key), "Some(TsigKey(k, hmac-sha256))");
    for (more, expected) in [
        (
            &[("rfc2136-host", "")][..],
            "rfc2136-host is missing; set it",
        ),
        (
            &[("rfc2136-zone", " , ")],
            "rfc2136-zone is missing; name the zones to update",
        ),
        (
            &[("rfc2136-zone", "a..b")],
            "rfc2136-zone: \"a..b\" is not a domain name: it has an empty label; remove the extra dot",
        ),
        (&[("rfc2136-port", "65536")], "rfc2136-port is above 65535"),
        (
            &[("rfc2136-gss-tsig", "true")],
            "rfc2136 does not support GSS-TSIG (rfc2136-gss-tsig); use a TSIG key",
        ),
        (
            &[("rfc2136-insecure", "false")],
            "rfc2136-tsig-keyname is missing; set it",
        ),
        (
            &[("rfc2136-insecure", "false"), ("rfc2136-tsig-keyname", "k")],
            "rfc2136-tsig-secret is missing; set it",
        ),
    ] {
        assert_eq!(settings_of(more).unwrap_err(), expected);
    }
}

#[test]
fn obstacles_name_missing_settings() {
    let missing =
        |name: &str| format!("{name} is missing; add it, or set rfc2136-insecure to true");
    let keyname = missing("rfc2136-tsig-keyname");
    let secret = missing("rfc2136-tsig-secret");
    let not_base64 =
        "rfc2136-tsig-secret is not base64; copy it from the server's key file".to_owned();
    let unknown =
        "rfc2136-tsig-secret-alg is \"md5\"; use one of hmac-sha1, hmac-sha224, hmac-sha256, \
                   hmac-sha384, hmac-sha512"
            .to_owned();
    let gss = "the provider rfc2136 does not support GSS-TSIG in bosh-dns-publish; use a shared key (hmac-sha256), or \
               run external-dns itself (bosh-dns-publish render)"
        .to_owned();
    let key = ("rfc2136-tsig-keyname", "k");
    let good = ("rfc2136-tsig-secret", "c2VjcmV0");
    let bad = ("rfc2136-tsig-secret", "?");
    for (given, expected) in [
        (vec![], vec![keyname.clone(), secret.clone()]),
        (vec![key], vec![secret]),
        (vec![good], vec![keyname]),
        (vec![key, good], vec![]),
        (vec![key, bad], vec![not_base64.clone()]),
        (
            vec![key, good, ("rfc2136-tsig-secret-alg", "HMAC-SHA512.")],
            vec![],
        ),
        (
            vec![key, bad, ("rfc2136-tsig-secret-alg", "MD5")],
            vec![not_base64, unknown],
        ),
        (vec![bad, ("rfc2136-insecure", "true")], vec![]),
        (
            vec![
                ("rfc2136-tsig-secret-alg", "GSS-TSIG."),
                ("rfc2136-insecure", "true"),
            ],
            vec![gss],
        ),
    ] {
        assert_eq!(obstacles(&parameters(&given)), expected, "{given:?}");
    }
}

#[test]
fn hosts_become_flags_of_external_dns() {
    for (name, text, expected) in [
        (
            "rfc2136-host",
            "tls://ns",
            Some(
                &[
                    "--rfc2136-host=ns",
                    "--rfc2136-port=853",
                    "--rfc2136-use-tls",
                ][..],
            ),
        ),
        (
            "rfc2136-host",
            "a, b:53",
            Some(&["--rfc2136-host=a", "--rfc2136-host=b", "--rfc2136-port=53"]),
        ),
        ("rfc2136-host", "ns:x", None),
        ("rfc2136-zone", "ns:1", None),
    ] {
        let found = arguments(name, text);
        let expected = expected.map(|words| words.iter().map(ToString::to_string).collect());
        assert_eq!(found, expected, "{text}");
    }
}

#[test]
fn wanted_records_get_the_minimum_ttl() {
    for (least, ttl, expected) in [
        ("0s", None, None),
        ("0s", Some(5), Some(5)),
        ("10s", Some(5), Some(10)),
        ("10s", Some(50), Some(50)),
        // Without one, the default applies, unless the minimum is above it.
        ("60s", None, None),
        ("61s", None, Some(61)),
    ] {
        let provider = Rfc2136::new(settings_of(&[("rfc2136-min-ttl", least)]).unwrap());
        let mut record = Record::parse("a.example.org", RecordType::A, ["192.0.2.1"]).unwrap();
        record.ttl = ttl;
        record.set_property("aws/weight", "1");
        let mut desired = vec![record.clone()];
        provider.adjust(&mut desired);
        record.ttl = expected;
        record.properties.clear();
        assert_eq!(desired, [record], "{least} {ttl:?}");
    }
}

#[test]
fn common_server_shares_zones() {
    let settings = |host: &str, zones: &str| {
        settings_of(&[("rfc2136-host", host), ("rfc2136-zone", zones)]).unwrap()
    };
    let one = settings("a,b", "x.org,y.org");
    let shared = |other: Rfc2136Settings| {
        let zones = one.shared_zones(&other);
        zones.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(shared(settings("B:53", "y.org,z.org")), ["y.org"]);
    assert_eq!(shared(settings("c", "y.org")), [] as [&str; 0]);
    assert_eq!(shared(settings("a", "z.org")), [] as [&str; 0]);
    assert_eq!(one.shared_zones(&"another provider"), []);
}

#[test]
fn response_codes_have_a_remedy() {
    for (code, expected) in [
        (1, "FORMERR; the server does not understand the message"),
        (
            2,
            "SERVFAIL; see the server's log; its journal may not be writable",
        ),
        (
            4,
            "NOTIMP; the server accepts no updates; set rfc2136-host to the primary",
        ),
        (
            5,
            "REFUSED; allow the key to transfer and to update the zone, set rfc2136-host to the primary, or correct a \
             name that the server's check-names rejects",
        ),
        (
            9,
            "NOTAUTH; the server does not serve the zone; check rfc2136-zone and rfc2136-host",
        ),
        (
            10,
            "NOTZONE; a name is outside the zone; check rfc2136-zone",
        ),
        (11, "response code 11; see the server's log"),
    ] {
        assert_eq!(explain(code), expected);
    }
}

/// Returns the result of a response code for names of one set each, with this number of targets.
fn result_of(code: u8, names: usize, targets: usize) -> TransactionResult {
    let mut provider = Rfc2136::new(settings_of(&[]).unwrap());
    let sender = UpdateSender {
        provider: &mut provider,
        zone: apex(),
        connection: None,
    };
    let mut group = Vec::new();
    for number in 0..names {
        let targets: Vec<String> = (0..targets).map(|host| format!("10.0.0.{host}")).collect();
        let name = format!("n{number}.example.org");
        let record = Record::parse(&name, RecordType::A, targets).unwrap();
        let transaction = Transaction {
            name: record.name.clone(),
            steps: vec![Step::Create(record)],
        };
        group.push(Encoded::new(&apex(), &transaction, &HashMap::new()).unwrap());
    }
    sender.result(code, &group)
}

#[test]
fn results_follow_the_response_code() {
    assert_eq!(result_of(0, 1, 1), TransactionResult::Applied);
    // A prerequisite does not hold: another writer was here.
    for code in [3, 6, 7, 8] {
        assert_eq!(result_of(code, 1, 1), TransactionResult::Conflict, "{code}");
    }
    let failed = |code, names, targets| match result_of(code, names, targets) {
        TransactionResult::Failed(error) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let refused = "ns.example.org:53 refused: ";
    let servfail =
        "zone example.org: SERVFAIL; see the server's log; its journal may not be writable";
    assert_eq!(failed(2, 2, 1), format!("{refused}{servfail}"));
    assert_eq!(
        failed(2, 1, 1),
        format!("{refused}n0.example.org: {servfail}")
    );
    assert_eq!(
        failed(2, 1, 100),
        format!("{refused}n0.example.org: {servfail}")
    );
    assert_eq!(
        failed(2, 1, 101),
        format!(
            "{refused}n0.example.org: SERVFAIL; its set of 101 records probably exceeds a limit of the server \
             (max-records-per-type of BIND, by default 100); raise the limit, or use fewer targets"
        )
    );
    for code in [1, 4, 5, 9, 10, 15] {
        let expected = format!(
            "{refused}n0.example.org: zone example.org: {}",
            explain(code)
        );
        assert_eq!(failed(code, 1, 101), expected);
    }
}

#[test]
fn failures_name_server_and_zone() {
    let server = Server::parse("ns").unwrap();
    let shown = |failure: Failure| failure.of(&server, &apex()).to_string();
    let unknown_key = TsigError::UnknownKey(Name::parse("k").unwrap());
    for (failure, expected) in [
        (Failure::from(settings("x")), "x"),
        (
            Failure::from(std::io::Error::other("broken")),
            "ns:53: zone example.org: broken",
        ),
        (
            Failure::from(WireError("x")),
            "ns:53: invalid response: zone example.org: x",
        ),
        (
            Failure::from(TransferError::Code(10)),
            "ns:53 refused: zone example.org: NOTZONE; a name is outside the zone; check rfc2136-zone",
        ),
        (
            Failure::from(TransferError::Trailing),
            "ns:53: invalid response: zone example.org: records follow the last SOA",
        ),
        (
            Failure::from(unknown_key),
            "ns:53 refused: zone example.org: the server does not know the key k; check rfc2136-tsig-keyname and \
             rfc2136-tsig-secret-alg",
        ),
        (
            Failure::from(TsigError::Rejected),
            "ns:53 refused: zone example.org: the server rejects the signature; check rfc2136-tsig-secret",
        ),
        (
            Failure::from(TsigError::Clock(400)),
            "ns:53 refused: zone example.org: the clocks of server and publisher differ by 400 s; synchronise them by \
             NTP",
        ),
        (
            Failure::from(TsigError::Other(22)),
            "ns:53 refused: zone example.org: the server reports TSIG error 22",
        ),
        (
            Failure::from(TsigError::Missing),
            "ns:53: invalid response: zone example.org: the response is not signed",
        ),
        (
            Failure::from(TsigError::BadSignature),
            "ns:53: invalid response: zone example.org: the signature is wrong",
        ),
    ] {
        assert_eq!(shown(failure), expected);
    }
}

/// A name server on loopback with one zone. It accepts updates with a response code, and shows the address 192.0.2.7 at
/// every name but n1.
struct NameServer {
    port: u16,
    /// Queries and updates in the order of their arrival.
    asked: Arc<Mutex<Vec<String>>>,
}

impl NameServer {
    async fn new(code: u8) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked: Arc<Mutex<Vec<String>>> = Default::default();
        let noted = asked.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer_all(stream, code, noted.clone()));
            }
        });
        Self { port, asked }
    }

    fn provider(&self, host: &str) -> Rfc2136 {
        let host = host.replace("PORT", &self.port.to_string());
        Rfc2136::new(settings_of(&[("rfc2136-host", &host)]).unwrap())
    }
}

async fn answer_all(mut stream: TcpStream, code: u8, noted: Arc<Mutex<Vec<String>>>) {
    while let Ok(length) = stream.read_u16().await {
        let mut message = vec![0; usize::from(length)];
        stream.read_exact(&mut message).await.unwrap();
        let (line, reply) = answer(&message, code);
        noted.lock().push(line);
        let length = u16::try_from(reply.len()).unwrap().to_be_bytes();
        stream
            .write_all(&[&length[..], &reply].concat())
            .await
            .unwrap();
    }
}

/// Returns a line about a message, and the response.
fn answer(message: &[u8], code: u8) -> (String, Vec<u8>) {
    let mut reader = MessageReader::new(message);
    let header = reader.header().unwrap();
    let (name, record_type) = reader.question().unwrap();
    if header.flags >> 11 == 5 {
        let head = [&message[..2], &[0xa8, code], &[0; 8]].concat();
        return (format!("update of {} records", header.counts[2]), head);
    }
    if record_type == TYPE_AXFR {
        return (
            "transfer".to_owned(),
            response(header.id, &[None, API, None]),
        );
    }
    let mut section = Records::default();
    if name.as_str() != "n1.example.org" {
        let data = [192, 0, 2, 7];
        section
            .push(&name, &name, RecordType(record_type), CLASS_IN, 60, &data)
            .unwrap();
    }
    let mut reply = message.to_vec();
    reply[2] |= 0x80;
    append(&mut reply, 1, &section);
    (format!("query {name}"), reply)
}

/// Returns a batch that creates names with an address.
fn batch(names: &[&str]) -> Batch {
    let mut batch = Batch {
        zone: "example.org".to_owned(),
        ..Batch::default()
    };
    for name in names {
        let name = format!("{name}.example.org");
        let record = Record::parse(&name, RecordType::A, ["192.0.2.7"]).unwrap();
        batch.transactions.push(Transaction {
            name: record.name.clone(),
            steps: vec![Step::Create(record)],
        });
    }
    batch
}

#[tokio::test]
async fn first_reachable_server_transfers_zones() {
    let server = NameServer::new(0).await;
    for host in ["127.0.0.1:PORT", "127.0.0.1:1,127.0.0.1:PORT"] {
        let zones = server.provider(host).list().await.unwrap();
        assert_eq!((zones.len(), zones[0].id.as_str()), (1, "example.org"));
        let records = zones[0].content.as_ref().unwrap();
        let lines: Vec<String> = records.iter().map(ToString::to_string).collect();
        assert_eq!(lines, ["api.example.org 60 A 192.0.2.1"]);
    }
    assert_eq!(*server.asked.lock(), ["transfer", "transfer"]);
    // A server that ends the connection is named.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closing = NameServer {
        port: listener.local_addr().unwrap().port(),
        asked: Default::default(),
    };
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        // All that was sent is read, or the end would be a reset.
        let length = stream.read_u16().await.unwrap();
        stream
            .read_exact(&mut vec![0; usize::from(length)])
            .await
            .unwrap();
    });
    let zones = closing.provider("127.0.0.1:PORT").list().await.unwrap();
    assert_eq!(
        zones[0].content.as_ref().unwrap_err().to_string(),
        format!(
            "127.0.0.1:{}: zone example.org: the server closed the connection prematurely",
            closing.port
        )
    );
}

#[tokio::test]
async fn endless_trickle_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let mut settings = settings_of(&[("rfc2136-host", &host)]).unwrap();
    // A pause of the machine may exceed it as well, which has the same result.
    settings.timeout = std::time::Duration::from_millis(50);
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let length = stream.read_u16().await.unwrap();
        let mut query = vec![0; usize::from(length)];
        stream.read_exact(&mut query).await.unwrap();
        let id = u16::from_be_bytes([query[0], query[1]]);
        let mut message = response(id, &[None]);
        loop {
            let length = u16::try_from(message.len()).unwrap().to_be_bytes();
            let framed = [&length[..], &message].concat();
            if stream.write_all(&framed).await.is_err() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            // Without a record, so that the limit of octets is far away.
            message = response(id, &[]);
        }
    });
    let zones = Rfc2136::new(settings).list().await.unwrap();
    let error = zones[0].content.as_ref().unwrap_err();
    assert!(error.to_string().contains("no answer within"), "{error}");
}

#[tokio::test]
async fn applied_changes_are_read_back() {
    let server = NameServer::new(0).await;
    let mut provider = server.provider("127.0.0.1:PORT");
    let results = provider.apply(&batch(&["n0", "n1", "n2"]), &|_| {}).await;
    let name = Name::parse("n1.example.org").unwrap();
    let unproven = TransactionResult::Unproven(not_made(
        &format!("127.0.0.1:{}", server.port),
        &name,
        "the server ignores such a change silently; see its log and its policy for the name",
    ));
    let applied = TransactionResult::Applied;
    assert_eq!(results, [applied.clone(), unproven, applied]);
    let asked = [
        "update of 3 records",
        "query n0.example.org",
        "query n1.example.org",
        "query n2.example.org",
    ];
    assert_eq!(*server.asked.lock(), asked);
    // A refused change is not read back.
    let server = NameServer::new(8).await;
    let mut provider = server.provider("127.0.0.1:PORT");
    let results = provider.apply(&batch(&["n0", "n2"]), &|_| {}).await;
    assert_eq!(
        results,
        [TransactionResult::Conflict, TransactionResult::Conflict]
    );
    assert_eq!(*server.asked.lock(), ["update of 2 records"]);
}

#[tokio::test]
async fn unfit_changes_need_no_connection() {
    let server = NameServer::new(0).await;
    let mut provider = server.provider("127.0.0.1:PORT");
    let mut large = batch(&["n0"]);
    // 15 octets each in the update, with a pointer to the zone.
    let targets: Vec<String> = (0..5_000)
        .map(|n| format!("10.1.{}.{}", n / 250, n % 250))
        .collect();
    let record = Record::parse("n0.example.org", RecordType::A, targets).unwrap();
    large.transactions[0].steps = vec![Step::Create(record)];
    let results = provider.apply(&large, &|_| {}).await;
    let unfit = unfit(
        &large.transactions[0].name,
        "the change exceeds 64,000 octets",
    );
    assert_eq!(results, [TransactionResult::Failed(unfit)]);
    let mut elsewhere = batch(&["n0", "n2"]);
    elsewhere.zone = "example.net".to_owned();
    let results = provider.apply(&elsewhere, &|_| {}).await;
    let no_zone = TransactionResult::Failed(settings("no zone example.net"));
    assert_eq!(results, [no_zone.clone(), no_zone]);
    assert!(server.asked.lock().is_empty());
}
