//! Malformed replies, whose bytes contradict their counts, names or types, are neither forwarded
//! nor cached; the next recursor is queried.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, NS},
    },
};
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, requires};

use super::{
    lab::{LOCAL_NAME, Lab, OURS, ensure_code, loopback},
    scripted::{Asked, Say, Scripted},
};

/// The honest recursor's answer.
const TRUE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Kinds of malformed reply, selected by the first label of the name.
const KINDS: &[&str] = &[
    "opt-among-answers",
    "opt-among-authorities",
    "two-opts",
    "opt-with-owner",
    "opt-options-overrun",
    "more-answers-than-there-are",
    "pointer-to-itself",
    "pointer-pair",
    "pointer-forward",
    "pointer-into-header",
    "pointer-in-data-forward",
    "name-too-long",
    "label-of-an-unknown-kind",
    "short-a",
    "long-aaaa",
    "cname-with-rest",
    "mx-without-name",
    "soa-cut",
    "txt-overrun",
];

fn record(message: &mut Vec<u8>, owner: &[u8], rtype: u16, data: &[u8]) {
    message.extend_from_slice(owner);
    message.extend_from_slice(&rtype.to_be_bytes());
    message.extend_from_slice(&[0, 1, 0, 0, 1, 44]);
    message.extend_from_slice(&(data.len() as u16).to_be_bytes());
    message.extend_from_slice(data);
}

/// Builds the malformed reply selected by the name.
fn lie(asked: &Asked) -> Vec<u8> {
    const NAME: [u8; 2] = [0xc0, 12];
    const OPT: [u8; 11] = [0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0];
    let mut reply = asked.reply(ResponseCode::NoError);
    reply.edns = None;
    let mut bytes = reply.to_vec().expect("a reply without records");
    let start = bytes.len() as u16;
    let pointer = |at: u16| (0xc000 | at).to_be_bytes();
    let mut counts = [1u8, 0, 0];
    let name = asked.name();
    match name.split('.').next().unwrap_or_default() {
        "opt-among-answers" => {
            record(&mut bytes, &NAME, 1, &TRUE.octets());
            bytes.extend_from_slice(&OPT);
            counts = [2, 0, 0];
        }
        "opt-among-authorities" => {
            record(&mut bytes, &NAME, 1, &TRUE.octets());
            bytes.extend_from_slice(&OPT);
            counts = [1, 1, 0];
        }
        "two-opts" => {
            record(&mut bytes, &NAME, 1, &TRUE.octets());
            bytes.extend_from_slice(&OPT);
            bytes.extend_from_slice(&OPT);
            counts = [1, 0, 2];
        }
        "opt-with-owner" => {
            record(&mut bytes, &NAME, 1, &TRUE.octets());
            record(&mut bytes, &NAME, 41, &[]);
            counts = [1, 0, 1];
        }
        "opt-options-overrun" => {
            record(&mut bytes, &NAME, 1, &TRUE.octets());
            bytes.extend_from_slice(&[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 4, 0, 10, 0, 8]);
            counts = [1, 0, 1];
        }
        "more-answers-than-there-are" => {
            record(&mut bytes, &NAME, 1, &TRUE.octets());
            counts = [2, 0, 0];
        }
        "pointer-to-itself" => record(&mut bytes, &pointer(start), 1, &TRUE.octets()),
        "pointer-pair" => {
            record(&mut bytes, &pointer(start + 12), 5, &pointer(start));
        }
        "pointer-forward" => {
            record(&mut bytes, &pointer(start + 12), 5, b"\x01x\0");
        }
        "pointer-into-header" => record(&mut bytes, &pointer(4), 1, &TRUE.octets()),
        "pointer-in-data-forward" => {
            record(&mut bytes, &NAME, 5, &pointer(start + 14));
            record(&mut bytes, b"\x01x\0", 1, &TRUE.octets());
            counts = [2, 0, 0];
        }
        "name-too-long" => {
            let mut owner = Vec::new();
            for _ in 0..4 {
                owner.push(63);
                owner.extend_from_slice(&[b'x'; 63]);
            }
            owner.push(0);
            record(&mut bytes, &owner, 1, &TRUE.octets());
        }
        "label-of-an-unknown-kind" => record(&mut bytes, b"\x41x\0", 1, &TRUE.octets()),
        "short-a" => record(&mut bytes, &NAME, 1, &[192, 0, 2]),
        "long-aaaa" => record(&mut bytes, &NAME, 28, &[0; 17]),
        "cname-with-rest" => record(&mut bytes, &NAME, 5, b"\x01x\0rest"),
        "mx-without-name" => record(&mut bytes, &NAME, 15, &[0, 10]),
        "soa-cut" => record(&mut bytes, &NAME, 6, b"\x01a\0\x01b\0\0\0\0\x07"),
        "txt-overrun" => record(&mut bytes, &NAME, 16, b"\x09text"),
        other => panic!("no lie {other}"),
    }
    for (at, count) in [7, 9, 11].into_iter().zip(counts) {
        bytes[at] = count;
    }
    bytes
}

/// Returns the name that selects a kind.
fn name_of(kind: &str) -> String {
    format!("{kind}.lies.test.")
}

/// Queries by UDP and TCP, with and without EDNS, twice each; returns queries and replies.
fn ask_in_all_ways(
    lab: &Lab<'_>,
    name: &str,
    server: std::net::SocketAddr,
) -> Result<Vec<(String, Vec<u8>)>> {
    let mut replies = Vec::new();
    for edns in [None, Some(1232)] {
        let query = client::query(name, RecordType::A, edns)?.to_vec()?;
        for round in 1..=2 {
            let patience = std::time::Duration::from_secs(5);
            let udp = lab
                .namespace
                .run(|| client::ask_raw(server, &query, patience))?;
            replies.push((format!("{name} UDP, EDNS {edns:?}, round {round}"), udp?));
            let tcp = lab.namespace.run(|| client::ask_tcp_raw(server, &query))?;
            replies.push((format!("{name} TCP, EDNS {edns:?}, round {round}"), tcp?));
        }
    }
    Ok(replies)
}

#[test]
fn malformed_replies_are_not_cached() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("lies")?;
    let liar = Scripted::start(&namespace, loopback(10), |asked| {
        vec![Say {
            bytes: lie(asked),
            from: None,
        }]
    })?;
    for cache in [true, false] {
        let lab = Lab::start(
            &namespace,
            &[loopback(10)],
            &json!({"cache": {"enabled": cache}}),
        )?;
        let mut lies = Vec::new();
        for kind in KINDS {
            for (how, reply) in ask_in_all_ways(&lab, &name_of(kind), OURS)? {
                let truthful = Message::from_vec(&reply)
                    .is_ok_and(|reply| reply.metadata.response_code == ResponseCode::ServFail);
                if !truthful {
                    lies.push(format!("{how}: {reply:02x?}"));
                }
            }
        }
        ensure!(
            lies.is_empty(),
            "cache {cache}: {} malformed replies:\n{}",
            lies.len(),
            lies.join("\n")
        );
        // The server still works.
        let reply = lab.ask_for(LOCAL_NAME, RecordType::A)?;
        ensure_code(&reply, ResponseCode::NoError)?;
        let failures = lab.metric(
            "bosh_dns_xdp_recursor_failures_total",
            "reason=\"malformed\"",
        )?;
        ensure!(failures > 0, "malformed replies are counted as unusable");
    }
    ensure!(liar.count() > 0);
    Ok(())
}

#[test]
fn next_recursor_replaces_liar() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("liar")?;
    let _liar = Scripted::start(&namespace, loopback(10), |asked| {
        vec![Say {
            bytes: lie(asked),
            from: None,
        }]
    })?;
    let _honest = Scripted::answering(&namespace, loopback(11), TRUE)?;
    let settings = json!({"cache": {"enabled": true}});
    let lab = Lab::start(&namespace, &[loopback(10), loopback(11)], &settings)?;
    for kind in KINDS {
        for (how, reply) in ask_in_all_ways(&lab, &name_of(kind), OURS)? {
            let reply = Message::from_vec(&reply).with_context(|| how.clone())?;
            ensure!(client::addresses(&reply) == [TRUE], "{how}: {reply}");
        }
    }
    Ok(())
}

#[test]
fn stray_records_poison_nothing() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("stray")?;
    // A true answer, repeated, with records of another name in every section.
    let recursor = Scripted::start(&namespace, loopback(10), |asked| {
        let mut reply = asked.answer(TRUE, 300);
        if asked.name().starts_with("asked.") {
            let stray = |data| Record::from_rdata(name("victim.test."), 300, data);
            let lie = RData::A(A(Ipv4Addr::new(6, 6, 6, 6)));
            reply.add_answer(reply.answers[0].clone());
            reply.add_answer(stray(lie.clone()));
            reply.add_authority(stray(RData::NS(NS(name("ns.evil.test.")))));
            reply.add_additional(stray(lie));
        }
        vec![reply.into()]
    })?;
    let lab = Lab::start(
        &namespace,
        &[loopback(10)],
        &json!({"cache": {"enabled": true}}),
    )?;
    for _ in 0..3 {
        let reply = lab.ask_for("asked.test.", RecordType::A)?;
        let of_asked = reply
            .answers
            .iter()
            .filter(|record| record.name == name("asked.test."));
        ensure!(of_asked.count() == 2, "the recursor's bytes: {reply}");
        let victim = lab.ask_for("victim.test.", RecordType::A)?;
        ensure!(client::addresses(&victim) == [TRUE], "{victim}");
        ensure!(
            victim.authorities.is_empty() && victim.additionals.is_empty(),
            "{victim}"
        );
    }
    // Each name was asked once, then came from the cache.
    ensure!(recursor.count() == 2, "{} queries", recursor.count());
    Ok(())
}

fn name(text: &str) -> Name {
    Name::from_ascii(text).expect("a name built by the test")
}
