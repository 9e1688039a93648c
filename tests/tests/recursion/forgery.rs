//! Forged replies are dropped.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, UdpSocket},
    time::Duration,
};

use anyhow::{Result, ensure};
use hickory_proto::{
    op::{MessageType, ResponseCode},
    rr::{DNSClass, Name, RecordType},
};
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, requires};

use super::{
    lab::{Lab, OURS, ensure_code, loopback},
    scripted::{Asked, Say, Scripted},
};

/// The recursor's answer.
const TRUE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The answer in forged replies.
const FORGED: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 66);

/// Forgeries that reach the server's socket, selected by the first label of the name.
const KINDS: &[&str] = &["id", "name", "type", "class", "query", "case"];

/// Builds the forgery selected by the name, plus one that the kernel drops because of its source.
fn forge(asked: &Asked) -> Vec<Say> {
    let right = asked.answer(FORGED, 3600);
    let mut forged = right.clone();
    let name = asked.name();
    match name
        .split('.')
        .next()
        .map(str::to_ascii_lowercase)
        .as_deref()
    {
        Some("id") => forged.metadata.id ^= 1,
        Some("name") => {
            forged.queries[0].set_name(Name::from_ascii("other.forged.test.").expect("a name"));
        }
        Some("type") => drop(forged.queries[0].set_query_type(RecordType::TXT)),
        Some("class") => drop(forged.queries[0].set_query_class(DNSClass::CH)),
        Some("query") => forged.metadata.message_type = MessageType::Query,
        _ => {
            // Inverts the case of every letter.
            let other: String = name.chars().map(flip).collect();
            forged.queries[0].set_name(Name::from_ascii(other).expect("a name"));
        }
    }
    let elsewhere = [loopback(66), ([127, 0, 0, 10], 5353).into()];
    let mut says: Vec<Say> = elsewhere
        .into_iter()
        .map(|from| Say {
            from: Some(from),
            ..right.clone().into()
        })
        .collect();
    says.push(forged.into());
    says.push(asked.answer(TRUE, 300).into());
    says
}

/// Inverts the case of a letter.
fn flip(letter: char) -> char {
    if letter.is_ascii_lowercase() {
        letter.to_ascii_uppercase()
    } else {
        letter.to_ascii_lowercase()
    }
}

#[test]
fn forged_replies_are_dropped() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("forged")?;
    let recursor = Scripted::start(&namespace, loopback(10), forge)?;
    let settings =
        json!({"recursor_timeout": "2s", "recursor_0x20": true, "cache": {"enabled": true}});
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    let mut asked = 0;
    for kind in KINDS {
        for number in 0..5 {
            let query = client::query(
                &format!("{kind}.n{number}.forged.test."),
                RecordType::A,
                None,
            )?;
            // The second query would be answered from the cache, which must not contain the
            // forgery.
            for _ in 0..2 {
                let reply = lab.ask(&query)?;
                ensure!(client::addresses(&reply) == [TRUE], "{kind}: {reply}");
                ensure!(reply.metadata.id == query.metadata.id && reply.queries == query.queries);
            }
            asked += 1;
        }
    }
    ensure!(
        recursor.count() == asked,
        "{} queries for {asked} names",
        recursor.count()
    );
    let mismatched = lab.metric("bosh_dns_xdp_recursor_strays_total", "")?;
    ensure!(
        mismatched == asked as u64,
        "{mismatched} mismatched, {asked} forged replies from the right address"
    );
    Ok(())
}

#[test]
fn query_ids_are_random() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("guess")?;
    let recursor = Scripted::answering(&namespace, loopback(10), TRUE)?;
    let lab = Lab::start(&namespace, &[loopback(10)], &json!({"recursor_0x20": true}))?;
    const QUERIES: usize = 64;
    for _ in 0..QUERIES {
        let mut query = client::query("What-Will-It-Be.Test.", RecordType::A, None)?;
        query.metadata.id = 7;
        let reply = lab.ask(&query)?;
        ensure!(
            reply.metadata.id == 7 && client::addresses(&reply) == [TRUE],
            "{reply}"
        );
        ensure!(
            reply.queries[0].name().to_string() == "What-Will-It-Be.Test.",
            "{reply}"
        );
    }
    let asked = recursor.asked();
    let distinct =
        |what: &dyn Fn(&Asked) -> String| asked.iter().map(what).collect::<BTreeSet<_>>().len();
    // By chance, two of 64 ids are equal in one run of 30, and three pairs practically never.
    ensure!(
        distinct(&|asked| asked.message.metadata.id.to_string()) > QUERIES - 4,
        "ids repeat"
    );
    ensure!(
        distinct(&|asked| asked.from.port().to_string()) > 3,
        "the port stays"
    );
    ensure!(
        distinct(&Asked::name) > QUERIES - 10,
        "the letter case stays"
    );
    Ok(())
}

#[test]
fn subnet_queries_are_limited() -> Result<()> {
    const CLIENTS: u16 = 100;
    /// Sockets of the server per recursor; two threads may choose the same port.
    const MOST: usize = 8 + 2;
    requires!(namespaces);
    let namespace = Namespace::new("subnet")?;
    let recursor = Scripted::silent(&namespace, loopback(10))?;
    for goes_up in [true, false] {
        let settings = json!({"recursor_timeout": "2s", "recursor_client_subnet": goes_up});
        let _lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
        let before = recursor.count();
        let sockets = namespace.run(|| -> Result<Vec<UdpSocket>> {
            (0..CLIENTS)
                .map(|number| {
                    let mut query =
                        client::query("subnet.test.", RecordType::A, Some(1232))?.to_vec()?;
                    // EDNS Client Subnet (RFC 7871), different in each query.
                    let low = number as u8;
                    query.extend_from_slice(&[0, 8, 0, 7, 0, 1, 24, 0, 10, 0, low]);
                    let end = query.len() - 11;
                    query[end - 2..end].copy_from_slice(&11u16.to_be_bytes());
                    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
                    socket.connect(OURS)?;
                    socket.set_read_timeout(Some(Duration::from_secs(10)))?;
                    socket.send(&query)?;
                    Ok(socket)
                })
                .collect()
        })??;
        for socket in sockets {
            let length = socket.recv(&mut [0; 512])?;
            ensure!(length > 0);
        }
        let asked = recursor.count() - before;
        let expected = if goes_up { 1..=MOST } else { 1..=1 };
        ensure!(
            expected.contains(&asked),
            "goes up: {goes_up}, {asked} queries"
        );
    }
    Ok(())
}

#[test]
fn other_letters_count_at_no_try() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("lower")?;
    let recursor = Scripted::start(&namespace, loopback(10), |asked| {
        let mut reply = asked.answer(FORGED, 300);
        let lower = reply.queries[0].name().to_lowercase();
        reply.queries[0].set_name(lower);
        vec![reply.into()]
    })?;
    let settings =
        json!({"recursor_0x20": true, "recursor_max_retries": 3, "recursor_timeout": "2s"});
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    let query = client::query("Letters.Of.A.Longer.Name.Test.", RecordType::A, None)?;
    let reply = lab.ask(&query)?;
    ensure_code(&reply, ResponseCode::ServFail)?;
    let names: BTreeSet<String> = recursor.asked().iter().map(Asked::name).collect();
    // Four tries, and one without EDNS.
    ensure!(names.len() == 5, "new letters for every try: {names:?}");
    ensure!(recursor.count() == 5, "{} tries", recursor.count());
    lab.server
        .wait_for_log("repeats the question in other letters")?;
    Ok(())
}
