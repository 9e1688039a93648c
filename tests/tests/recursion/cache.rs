//! The cache between clients and recursors.

use std::{
    net::{Ipv4Addr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, process::wait_until, requires};

use super::{
    lab::{Lab, OURS, ensure_code, loopback},
    scripted::Scripted,
};

/// The recursor's answer.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Returns the TTL of the first record in a reply.
fn ttl(reply: &Message) -> Option<u32> {
    reply
        .answers
        .first()
        .or(reply.authorities.first())
        .map(|record| record.ttl)
}

/// Delays a recursor's reply until the gate is open.
fn wait_for(gate: &AtomicBool) {
    while !gate.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Sends the queries from separate sockets without waiting for replies.
fn ask_all(
    namespace: &Namespace,
    clients: u16,
    query: impl Fn(u16) -> Result<Message> + Send + Sync,
) -> Result<Vec<(UdpSocket, Message)>> {
    namespace.run(|| {
        (0..clients)
            .map(|number| {
                let query = query(number)?;
                let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
                socket.connect(OURS)?;
                socket.set_read_timeout(Some(Duration::from_secs(120)))?;
                socket.send(&query.to_vec()?)?;
                Ok((socket, query))
            })
            .collect()
    })?
}

#[test]
fn clients_share_upstream_query() -> Result<()> {
    const CLIENTS: u16 = 50;
    requires!(namespaces);
    let namespace = Namespace::new("share")?;
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    let recursor = Scripted::start(&namespace, loopback(10), move |asked| {
        wait_for(&gate);
        vec![asked.answer(ADDRESS, 300).into()]
    })?;
    let settings = json!({"recursor_timeout": "60s", "cache": {"enabled": true}});
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    let clients = ask_all(&namespace, CLIENTS, |number| {
        // Alternate the letter case.
        let name = if number % 2 == 0 {
            "Shared.test."
        } else {
            "shared.TEST."
        };
        client::query(name, RecordType::A, None)
    })?;
    // All queries have missed the cache and are waiting.
    wait_until("all clients to wait", Duration::from_secs(120), || {
        lab.metric("coredns_cache_misses_total", "")
            .is_ok_and(|misses| misses == u64::from(CLIENTS))
    })?;
    open.store(true, Ordering::Relaxed);
    for (socket, query) in clients {
        let mut buffer = [0; 512];
        let length = socket.recv(&mut buffer)?;
        let reply = Message::from_vec(&buffer[..length])?;
        ensure!(client::addresses(&reply) == [ADDRESS], "{reply}");
        ensure!(reply.metadata.id == query.metadata.id, "{reply}");
        ensure!(
            reply.queries[0].name().to_string() == query.queries[0].name().to_string(),
            "{reply}"
        );
    }
    ensure!(
        recursor.count() == 1,
        "{} queries for {CLIENTS} clients",
        recursor.count()
    );
    Ok(())
}

#[test]
fn ttls_count_down() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("ttl")?;
    let recursor = Scripted::start(&namespace, loopback(10), |asked| {
        let name = asked.name();
        vec![match name.split('.').next() {
            Some("answer") => asked.answer(ADDRESS, 300).into(),
            // The smaller of TTL and minimum counts (RFC 2308, section 5).
            Some("nowhere") => asked.deny(ResponseCode::NXDomain, 900, 60).into(),
            Some("brief") => asked.deny(ResponseCode::NXDomain, 900, 15).into(),
            Some("nodata") => asked.deny(ResponseCode::NoError, 60, 900).into(),
            _ => asked.reply(ResponseCode::NXDomain).into(),
        }]
    })?;
    let lab = Lab::start(
        &namespace,
        &[loopback(10)],
        &json!({"cache": {"enabled": true}}),
    )?;
    let start = Instant::now();
    let kept = [
        ("answer.test.", ResponseCode::NoError, 300),
        ("nowhere.test.", ResponseCode::NXDomain, 60),
        ("brief.test.", ResponseCode::NXDomain, 15),
        ("nodata.test.", ResponseCode::NoError, 60),
    ];
    for (name, rcode, full) in kept {
        let reply = lab.ask_for(name, RecordType::A)?;
        ensure!(
            reply.metadata.response_code == rcode && ttl(&reply) == Some(full),
            "{reply}"
        );
    }
    // On a busy machine, the last one is cached long after the first.
    let all_cached = Instant::now();
    // Without an SOA, a negative answer has no TTL and is not cached.
    for _ in 0..2 {
        ensure!(
            lab.ask_for("bare.test.", RecordType::A)?
                .metadata
                .response_code
                == ResponseCode::NXDomain
        );
    }
    ensure!(
        recursor.count() == kept.len() + 2,
        "{} queries",
        recursor.count()
    );

    thread::sleep(Duration::from_millis(2100).saturating_sub(all_cached.elapsed()));
    for (name, rcode, full) in kept {
        let reply = lab.ask_for(name, RecordType::A)?;
        let passed = u32::try_from(start.elapsed().as_secs())?;
        let left = ttl(&reply).unwrap_or_default();
        ensure_code(&reply, rcode)?;
        ensure!(
            (full.saturating_sub(passed)..full - 1).contains(&left),
            "{left} s left after {passed}: {reply}"
        );
    }
    ensure!(
        recursor.count() == kept.len() + 2,
        "{} queries",
        recursor.count()
    );

    thread::sleep(Duration::from_millis(15_500).saturating_sub(all_cached.elapsed()));
    lab.ask_for("brief.test.", RecordType::A)?;
    ensure!(
        recursor.count() == kept.len() + 3,
        "a denial outlived its SOA's minimum"
    );
    Ok(())
}

#[test]
fn cache_key_includes_flags() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("apart")?;
    let recursor = Scripted::answering(&namespace, loopback(10), ADDRESS)?;
    let lab = Lab::start(
        &namespace,
        &[loopback(10)],
        &json!({"cache": {"enabled": true}}),
    )?;
    let plain = client::query("apart.test.", RecordType::A, Some(1232))?;
    let mut dnssec = plain.clone();
    if let Some(edns) = &mut dnssec.edns {
        edns.set_dnssec_ok(true);
    }
    let mut unchecked = plain.clone();
    unchecked.metadata.checking_disabled = true;
    let mut other_type = plain.clone();
    other_type.queries[0].set_query_type(RecordType::AAAA);
    let mut other_class = plain.clone();
    other_class.queries[0].set_query_class(hickory_proto::rr::DNSClass::HS);
    let queries = [plain, dnssec, unchecked, other_type, other_class];
    for round in 0..3 {
        for query in &queries {
            let reply = lab.ask(query)?;
            ensure!(reply.queries == query.queries, "round {round}: {reply}");
            ensure!(
                reply.metadata.checking_disabled == query.metadata.checking_disabled,
                "{reply}"
            );
        }
    }
    ensure!(
        recursor.count() == queries.len(),
        "{} queries",
        recursor.count()
    );
    // Queries without RD bypass the cache.
    let mut iterative = queries[0].clone();
    iterative.metadata.recursion_desired = false;
    lab.ask(&iterative)?;
    ensure!(
        recursor.count() == queries.len() + 1,
        "RD clear was answered from the cache"
    );
    Ok(())
}

#[test]
fn stale_answers_bridge_outages() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("stale")?;
    let brief = Scripted::start(&namespace, loopback(10), |asked| {
        vec![asked.answer(ADDRESS, 5).into()]
    })?;
    let settings =
        json!({"cache": {"enabled": true, "serve_stale": "1h"}, "recursor_timeout": "1s"});
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    ensure!(client::addresses(&lab.ask_for("www.test.", RecordType::A)?) == [ADDRESS]);
    let asked_at = Instant::now();
    drop(brief);
    // The recursor hangs from now on.
    let silent = Scripted::silent(&namespace, loopback(10))?;
    thread::sleep(Duration::from_millis(5200).saturating_sub(asked_at.elapsed()));
    for _ in 0..3 {
        let reply = lab.ask_for("www.test.", RecordType::A)?;
        ensure!(
            client::addresses(&reply) == [ADDRESS] && ttl(&reply) == Some(30),
            "{reply}"
        );
    }
    ensure!(
        silent.count() == 1,
        "after a failed try there is a pause, not {} tries",
        silent.count()
    );
    // A name that was never cached has no stale answer.
    let reply = lab.ask_for("other.test.", RecordType::A)?;
    ensure_code(&reply, ResponseCode::ServFail)?;
    ensure!(lab.metric("coredns_cache_served_stale_total", "")? == 3);
    Ok(())
}

#[test]
fn identical_questions_are_coalesced() -> Result<()> {
    const CLIENTS: u16 = 200;
    requires!(namespaces);
    let namespace = Namespace::new("once")?;
    for cache in [true, false] {
        let open = Arc::new(AtomicBool::new(false));
        let gate = Arc::clone(&open);
        // Exceeds 512 bytes, so that clients without EDNS get a truncated reply.
        let recursor = Scripted::start(&namespace, loopback(10), move |asked| {
            wait_for(&gate);
            let mut reply = asked.answer(ADDRESS, 300);
            let record = reply.answers[0].clone();
            let room = asked
                .message
                .edns
                .as_ref()
                .map_or(512, |edns| edns.max_payload());
            reply
                .answers
                .extend(vec![record; if room >= 1000 { 40 } else { 20 }]);
            vec![reply.into()]
        })?;
        let settings = json!({"recursor_timeout": "60s", "cache": {"enabled": cache}});
        let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
        let clients = ask_all(&namespace, CLIENTS, |number| {
            // Every size, AD set and clear, with and without EDNS.
            let edns = (number % 10 != 9).then_some(512 + 10 * number);
            let mut query = client::query("Once.test.", RecordType::A, edns)?;
            query.metadata.authentic_data = number % 2 == 0;
            Ok(query)
        })?;
        wait_until("all clients to wait", Duration::from_secs(120), || {
            lab.metric("bosh_dns_xdp_requests_in_flight", "")
                .is_ok_and(|waiting| waiting == u64::from(CLIENTS))
        })?;
        open.store(true, Ordering::Relaxed);
        for (socket, query) in clients {
            let mut buffer = [0; 4096];
            let length = socket.recv(&mut buffer)?;
            let reply = Message::from_vec(&buffer[..length])?;
            ensure_code(&reply, ResponseCode::NoError)?;
            ensure!(
                client::addresses(&reply).contains(&ADDRESS.into()),
                "{reply}"
            );
            ensure!(reply.metadata.id == query.metadata.id, "{reply}");
            let asked_size = query.edns.as_ref().map(|edns| edns.max_payload());
            let reply_size = reply.edns.as_ref().map(|edns| edns.max_payload());
            ensure!(
                asked_size.is_some() == reply_size.is_some(),
                "EDNS {asked_size:?}: {reply}"
            );
            ensure!(
                length <= usize::from(asked_size.unwrap_or(512)),
                "{length} bytes for {asked_size:?}"
            );
        }
        ensure!(
            recursor.count() == 1,
            "cache {cache}: {} queries for {CLIENTS} clients",
            recursor.count()
        );
    }
    Ok(())
}
