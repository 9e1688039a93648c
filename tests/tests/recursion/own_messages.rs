//! Messages to recursors and clients are the server's own: nothing that one client or a recursor
//! puts into a message reaches other clients.

use std::{
    net::{Ipv4Addr, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, requires};

use super::{
    lab::{LOCAL_NAME, Lab, OURS, ensure_code, loopback},
    scripted::{Asked, Say, Scripted},
};

/// The recursor's answer.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// A COOKIE option with one byte instead of at least eight (RFC 7873, section 5.2.2).
const MALFORMED_COOKIE: &[u8] = &[0, 10, 0, 1, 7];
/// The recursor's COOKIE option.
const RECURSOR_COOKIE: &[u8] = &[0, 10, 0, 16, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8];

/// Time limit for a reply, reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Adds an option to the OPT at the end of a message, which has none yet.
fn with_option(message: &Message, option: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = message.to_vec()?;
    let length = bytes.len() - 2;
    bytes[length..].copy_from_slice(&u16::try_from(option.len())?.to_be_bytes());
    bytes.extend_from_slice(option);
    Ok(bytes)
}

/// Returns whether the bytes of a message contain an option.
fn contains(message: &[u8], option: &[u8]) -> bool {
    message.windows(option.len()).any(|window| window == option)
}

/// Answers slowly, and with FORMERR to a malformed cookie or a query with TC, as unbound does.
fn strict(asked: &Asked) -> Vec<Say> {
    thread::sleep(Duration::from_millis(3));
    let malformed = contains(&asked.bytes, MALFORMED_COOKIE) || asked.message.metadata.truncation;
    vec![match malformed {
        true => asked.reply(ResponseCode::FormErr).into(),
        false => asked.answer(ADDRESS, 300).into(),
    }]
}

#[test]
fn malformed_options_affect_no_client() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("cookie")?;
    let recursor = Scripted::start(&namespace, loopback(10), strict)?;
    for cache in [false, true] {
        let lab = Lab::start(
            &namespace,
            &[loopback(10)],
            &json!({"cache": {"enabled": cache}}),
        )?;
        lab.namespace.run(|| -> Result<()> {
            let attacker = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
            attacker.connect(OURS)?;
            for number in 0..60 {
                let query = client::query(&format!("n{number}.test."), RecordType::A, Some(1232))?;
                let mut truncated = query.clone();
                truncated.metadata.truncation = true;
                let spoilt = match number % 2 {
                    0 => with_option(&query, MALFORMED_COOKIE)?,
                    _ => truncated.to_vec()?,
                };
                // The victim's query joins the look-up that the attacker's has begun.
                attacker.send(&spoilt)?;
                let reply = client::ask(OURS, &query)?;
                ensure!(
                    client::addresses(&reply) == [ADDRESS],
                    "cache {cache}, {number}: {reply}"
                );
            }
            Ok(())
        })??;
    }
    for asked in recursor.asked() {
        ensure!(
            !contains(&asked.bytes, MALFORMED_COOKIE),
            "the option went to the recursor"
        );
        ensure!(
            !asked.message.metadata.truncation,
            "TC went to the recursor"
        );
    }
    Ok(())
}

#[test]
fn header_and_opt_are_ours() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("header")?;
    // RA, RD and CD clear, AD set, and an OPT with a cookie.
    let _recursor = Scripted::start(&namespace, loopback(10), |asked| {
        let mut reply = asked.answer(ADDRESS, 300);
        reply.metadata.recursion_available = false;
        reply.metadata.recursion_desired = false;
        reply.metadata.checking_disabled = false;
        reply.metadata.authentic_data = true;
        let bytes = with_option(&reply, RECURSOR_COOKIE).expect("a reply with an OPT");
        vec![Say { bytes, from: None }]
    })?;
    for cache in [false, true] {
        let _lab = Lab::start(
            &namespace,
            &[loopback(10)],
            &json!({"cache": {"enabled": cache}}),
        )?;
        for number in 0..32u8 {
            let flag = |bit: u8| number >> bit & 1 == 1;
            let name = format!("n{}.test.", number / 16);
            let mut query = client::query(&name, RecordType::A, flag(0).then_some(4096))?;
            if let Some(edns) = &mut query.edns {
                edns.set_dnssec_ok(flag(1));
            }
            query.metadata.checking_disabled = flag(2);
            query.metadata.authentic_data = flag(3);
            let bytes = query.to_vec()?;
            let by_udp = namespace.run(|| client::ask_raw(OURS, &bytes, TIMEOUT))??;
            let by_tcp = namespace.run(|| client::ask_tcp_raw(OURS, &bytes))??;
            for (transport, bytes) in [("UDP", by_udp), ("TCP", by_tcp)] {
                let reply = Message::from_vec(&bytes)?;
                let case = format!("cache {cache}, query {number} by {transport}: {reply}");
                let (asked, got) = (&query.metadata, &reply.metadata);
                ensure!(client::addresses(&reply) == [ADDRESS], "{case}");
                ensure!(
                    got.recursion_available && got.recursion_desired,
                    "RA and RD: {case}"
                );
                ensure!(
                    got.checking_disabled == asked.checking_disabled,
                    "CD: {case}"
                );
                let dnssec = query
                    .edns
                    .as_ref()
                    .is_some_and(|edns| edns.flags().dnssec_ok);
                ensure!(
                    got.authentic_data == (asked.authentic_data || dnssec),
                    "AD: {case}"
                );
                let opt = |message: &Message| {
                    message
                        .edns
                        .as_ref()
                        .map(|edns| (edns.max_payload(), edns.flags().dnssec_ok))
                };
                ensure!(
                    opt(&reply) == opt(&query).map(|(_, dnssec)| (1232, dnssec)),
                    "OPT: {case}"
                );
                ensure!(
                    !contains(&bytes, &RECURSOR_COOKIE[..4]),
                    "the recursor's cookie: {case}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn truncated_answer_reaches_udp_client() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("musl")?;
    let _recursor = Scripted::start(&namespace, loopback(10), |asked| {
        let mut reply = asked.answer(ADDRESS, 300);
        let record = reply.answers.remove(0);
        match asked.by_tcp {
            true => reply.answers.extend(vec![record; 100]),
            false => reply.metadata.truncation = true,
        }
        vec![reply.into()]
    })?;
    let lab = Lab::start(&namespace, &[loopback(10)], &json!({}))?;
    // As musl, which never uses TCP.
    for name in ["www.test.", "www.test.", "other.test."] {
        let reply = lab.ask_for(name, RecordType::A)?;
        ensure!(
            reply.metadata.truncation && reply.answers.len() >= 25,
            "{reply}"
        );
    }
    Ok(())
}

#[test]
fn names_below_domain_follow_rfcs() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("below")?;
    let lab = Lab::start(&namespace, &[], &json!({"disable_recursors": true}))?;
    // Includes the queries of musl and c-ares with the search list `bosh`, and of a resolver that minimises
    // query names.
    for (name, rcode) in [
        ("nonsense.bosh.", ResponseCode::NXDomain),
        ("www.bosh.", ResponseCode::NXDomain),
        ("a.b.c.d.e.f.bosh.", ResponseCode::NXDomain),
        ("bosh.", ResponseCode::NoError),
        ("dep.bosh.", ResponseCode::NoError),
        ("net.dep.bosh.", ResponseCode::NoError),
        ("q-g1.bosh.", ResponseCode::NoError),
    ] {
        for record_type in [RecordType::A, RecordType::AAAA, RecordType::NS] {
            let reply = lab.ask_for(name, record_type)?;
            ensure!(
                reply.metadata.response_code == rcode && reply.answers.is_empty(),
                "{reply}"
            );
        }
    }
    let reply = lab.ask_for(LOCAL_NAME, RecordType::A)?;
    ensure!(
        client::addresses(&reply) == [Ipv4Addr::new(10, 0, 0, 1)],
        "{reply}"
    );
    Ok(())
}

#[test]
fn forwarding_loop_ends() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("loop")?;
    let other = loopback(20);
    let subnet: &[u8] = &[0, 8, 0, 7, 0, 1, 24, 0, 192, 0, 2];
    for client_subnet in [false, true] {
        let settings = json!({
            "address": other.ip(), "metrics": {"enabled": false}, "recursor_client_subnet": client_subnet,
            "recursor_timeout": "2s",
        });
        let _other = Lab::start(&namespace, &[OURS], &settings)?;
        let lab = Lab::start(
            &namespace,
            &[other],
            &json!({"recursor_client_subnet": client_subnet, "recursor_timeout": "2s"}),
        )?;
        let query = with_option(
            &client::query("loop.test.", RecordType::A, Some(1232))?,
            subnet,
        )?;
        let reply = namespace.run(|| client::ask_raw(OURS, &query, TIMEOUT))??;
        let reply = Message::from_vec(&reply)?;
        ensure_code(&reply, ResponseCode::ServFail)?;
        let sent = lab.metric("bosh_dns_xdp_recursor_queries_total", "")?;
        ensure!(
            sent <= 8,
            "one query became {sent}, Client Subnet forwarded: {client_subnet}"
        );
    }
    Ok(())
}
