//! Malformed, incomplete and forged messages.

use std::collections::HashMap;

use proptest::prelude::*;

use super::{
    MAX_PIPELINED, TsigKey, arguments, is_cheaper_than_transfer,
    messages::{
        self, CLASS_IN, Encoded, MessageReader, Records, TYPE_AXFR, Transfer, TransferError,
        append, decode, encode, question,
    },
    tsig::TsigError,
};
use crate::{
    provider::{Step, Transaction},
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

#[test]
fn port_is_told_from_the_end_of_an_address() {
    for (text, expected) in [
        ("2001:db8::a:53", &["--rfc2136-host=2001:db8::a:53"][..]),
        ("2001:db8::1", &["--rfc2136-host=2001:db8::1"]),
        (
            "[2001:db8::a]:54",
            &["--rfc2136-host=[2001:db8::a]", "--rfc2136-port=54"],
        ),
        ("ns:54", &["--rfc2136-host=ns", "--rfc2136-port=54"]),
    ] {
        assert_eq!(arguments("rfc2136-host", text).unwrap(), expected, "{text}");
    }
}
