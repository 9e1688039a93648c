//! Replies to clients when recursors fail: SERVFAIL by default, bosh-dns's NXDOMAIN if configured.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, requires};

use super::{
    lab::{Lab, ensure_code, loopback},
    scripted::{Asked, Say, Scripted},
};

/// Behaviour of the two recursors, as labels of a name, and the correct RCODE.
const TRUTHS: &[(&str, &str, ResponseCode)] = &[
    // The second recursor answers.
    ("servfail", "noerror", ResponseCode::NoError),
    ("silence", "noerror", ResponseCode::NoError),
    ("nxdomain", "noerror", ResponseCode::NoError),
    ("garbage", "noerror", ResponseCode::NoError),
    // Neither recursor answers.
    ("silence", "silence", ResponseCode::ServFail),
    ("garbage", "silence", ResponseCode::ServFail),
    ("stub", "stub", ResponseCode::ServFail),
    ("wrongid", "wrongid", ResponseCode::ServFail),
    // The last RCODE is returned.
    ("servfail", "servfail", ResponseCode::ServFail),
    ("refused", "servfail", ResponseCode::ServFail),
    ("servfail", "refused", ResponseCode::Refused),
    ("refused", "silence", ResponseCode::Refused),
    ("silence", "refused", ResponseCode::Refused),
    ("notimp", "notimp", ResponseCode::NotImp),
    ("formerr", "formerr", ResponseCode::FormErr),
    ("bare", "bare", ResponseCode::Refused),
    // NXDOMAIN is more specific than a failure.
    ("nxdomain", "servfail", ResponseCode::NXDomain),
    ("refused", "nxdomain", ResponseCode::NXDomain),
    ("nxdomain", "silence", ResponseCode::NXDomain),
    ("nxdomain", "nxdomain", ResponseCode::NXDomain),
];

/// Behaves as the label at `position` of the name says.
fn obey(asked: &Asked, position: usize) -> Vec<Say> {
    let name = asked.name();
    let rcode = match name.split('.').nth(position) {
        Some("noerror") => return vec![asked.answer(Ipv4Addr::new(192, 0, 2, 1), 300).into()],
        Some("nxdomain") => return vec![asked.deny(ResponseCode::NXDomain, 900, 120).into()],
        Some("silence") => return Vec::new(),
        // A count of records that do not exist.
        Some("garbage") => {
            let mut say = Say::from(asked.reply(ResponseCode::NoError));
            say.bytes[7] = 9;
            return vec![say];
        }
        // Shorter than a header.
        Some("stub") => {
            return vec![Say {
                bytes: asked.bytes[..5].to_vec(),
                from: None,
            }];
        }
        Some("wrongid") => {
            let mut reply = asked.answer(Ipv4Addr::new(192, 0, 2, 66), 300);
            reply.metadata.id ^= 1;
            return vec![reply.into()];
        }
        // Without its question.
        Some("bare") => {
            let mut reply = asked.reply(ResponseCode::Refused);
            reply.queries.clear();
            return vec![reply.into()];
        }
        Some("refused") => ResponseCode::Refused,
        Some("notimp") => ResponseCode::NotImp,
        Some("formerr") => ResponseCode::FormErr,
        _ => ResponseCode::ServFail,
    };
    vec![asked.reply(rcode).into()]
}

/// Starts two scripted recursors and a server that queries them in order.
fn start<'a>(namespace: &'a Namespace, errors: &str) -> Result<(Lab<'a>, [Scripted; 2])> {
    let recursors = [
        Scripted::start(namespace, loopback(10), |asked| obey(asked, 0))?,
        Scripted::start(namespace, loopback(11), |asked| obey(asked, 1))?,
    ];
    let settings = json!({"recursor_timeout": "2s", "recursor_errors": errors});
    let lab = Lab::start(namespace, &[loopback(10), loopback(11)], &settings)?;
    Ok((lab, recursors))
}

/// Returns whether a reply matches the query.
fn belongs(query: &Message, reply: &Message) -> bool {
    reply.metadata.id == query.metadata.id && reply.queries == query.queries
}

#[test]
fn failures_give_servfail_by_default() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("truth")?;
    let (lab, recursors) = start(&namespace, "truthful")?;
    for &(first, second, truth) in TRUTHS {
        let before = recursors.each_ref().map(Scripted::count_with_edns);
        let query = client::query(&format!("{first}.{second}.test."), RecordType::A, None)?;
        let reply = lab.ask(&query)?;
        ensure!(belongs(&query, &reply), "{first}, {second}: {reply}");
        ensure!(
            reply.metadata.response_code == truth,
            "{first}, {second}, not {truth}: {reply}"
        );
        let answered = !client::addresses(&reply).is_empty();
        ensure!(
            answered == (truth == ResponseCode::NoError),
            "{first}, {second}: {reply}"
        );
        let has_soa = reply
            .authorities
            .iter()
            .any(|record| record.record_type() == RecordType::SOA);
        ensure!(
            has_soa == (truth == ResponseCode::NXDomain),
            "{first}, {second}: {reply}"
        );
        for (number, recursor) in recursors.iter().enumerate() {
            ensure!(
                recursor.count_with_edns() == before[number] + 1,
                "{first}, {second}: each is queried once"
            );
        }
    }
    Ok(())
}

#[test]
fn configured_nxdomain_replaces_failures() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("nxdomain")?;
    let (lab, _recursors) = start(&namespace, "nxdomain")?;
    for &(first, second, truth) in TRUTHS {
        let reply = lab.ask_for(&format!("{first}.{second}.test."), RecordType::A)?;
        let expected = if truth == ResponseCode::NoError {
            truth
        } else {
            ResponseCode::NXDomain
        };
        ensure!(
            reply.metadata.response_code == expected,
            "{first}, {second}, not {expected}: {reply}"
        );
        ensure!(
            expected == ResponseCode::NoError || reply.authorities.is_empty(),
            "an SOA: {reply}"
        );
    }
    Ok(())
}

#[test]
fn closed_ports_fail_fast() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("closed")?;
    // If ICMP errors were ignored, the client would time out first.
    let settings = json!({"recursor_timeout": "1m", "request_timeout": "2m"});
    let lab = Lab::start(&namespace, &[loopback(10), loopback(11)], &settings)?;
    for message in [
        client::query("closed.test.", RecordType::A, None)?,
        client::query("closed.test.", RecordType::A, Some(1232))?,
    ] {
        for reply in [lab.ask(&message)?, lab.ask_tcp(&message)?] {
            ensure_code(&reply, ResponseCode::ServFail)?;
            ensure!(reply.edns.is_some() == message.edns.is_some(), "{reply}");
        }
    }
    Ok(())
}

#[test]
fn without_recursors_queries_are_refused() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("none")?;
    let lab = Lab::start(&namespace, &[], &json!({"disable_recursors": true}))?;
    let reply = lab.ask_for("www.test.", RecordType::A)?;
    ensure_code(&reply, ResponseCode::Refused)?;
    Ok(())
}

#[test]
fn tcp_failures_match_udp() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("tcptruth")?;
    let (lab, _recursors) = start(&namespace, "truthful")?;
    for (first, second, truth) in [
        ("servfail", "noerror", ResponseCode::NoError),
        ("silence", "noerror", ResponseCode::NoError),
        ("silence", "silence", ResponseCode::ServFail),
        ("wrongid", "refused", ResponseCode::Refused),
        ("nxdomain", "servfail", ResponseCode::NXDomain),
    ] {
        let query = client::query(&format!("{first}.{second}.test."), RecordType::A, None)?;
        let reply = lab.ask_tcp(&query)?;
        ensure!(belongs(&query, &reply), "{first}, {second}: {reply}");
        ensure!(
            reply.metadata.response_code == truth,
            "{first}, {second}, not {truth}: {reply}"
        );
    }
    Ok(())
}
