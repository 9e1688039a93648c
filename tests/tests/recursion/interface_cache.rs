//! Cached answers that the interface gives: the same bytes as userspace, gone after a flush, renewed
//! before they expire.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use dns_kit::metrics::names;
use hickory_proto::{op::Message, rr::RecordType};
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs, client, metrics::wait_for_fast_path, namespace::Namespace, process::wait_until,
    requires, server,
};

use super::{
    lab::{Lab, OURS, loopback},
    scripted::Scripted,
    servers::{SERVERS, Zones},
};

/// Time limit for an answer to reach the interface, many times what a busy machine needs.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Starts the server with a cache in userspace and at the interface `lo`; `extra` is merged into its
/// configuration.
pub(super) fn start<'a>(
    namespace: &'a Namespace,
    bpffs: Bpffs,
    recursors: &[SocketAddr],
    extra: &Value,
) -> Result<Lab<'a>> {
    let mut config = json!({
        "cache": {"enabled": true},
        "control": {"socket": bpffs.path().with_extension("sock")},
        "xdp": {"mode": "tc", "interfaces": ["lo"], "bpffs": bpffs.path()},
    });
    server::merge(&mut config, extra);
    let mut lab = Lab::start(namespace, recursors, &config)?;
    lab.bpffs = Some(bpffs);
    wait_for_fast_path(namespace).with_context(|| lab.server.log())?;
    Ok(lab)
}

/// Returns the number of forwarded answers that interfaces gave.
pub(super) fn hits(lab: &Lab<'_>) -> Result<u64> {
    lab.metric(names::FAST_PATH_PACKETS_TOTAL, "outcome=\"hit_forwarded\"")
}

/// Queries over UDP, or over TCP, which only userspace answers.
fn ask(lab: &Lab<'_>, query: &[u8], by_tcp: bool) -> Result<Vec<u8>> {
    lab.namespace.run(|| match by_tcp {
        true => client::ask_tcp_raw(OURS, query),
        false => Ok(client::ask_raw(OURS, query, Duration::from_secs(5))?),
    })?
}

/// Queries over UDP; returns the reply and whether it came from the interface.
pub(super) fn ask_interface(lab: &Lab<'_>, query: &[u8]) -> Result<(Vec<u8>, bool)> {
    let before = hits(lab)?;
    let reply = ask(lab, query, false)?;
    Ok((reply, hits(lab)? > before))
}

/// Queries until the interface replies; returns that reply.
pub(super) fn settle(lab: &Lab<'_>, query: &[u8]) -> Result<Vec<u8>> {
    let mut found = None;
    wait_until("an answer from the interface", TIMEOUT, || {
        found = ask_interface(lab, query)
            .ok()
            .filter(|(_, by_interface)| *by_interface);
        found.is_some()
    })
    .with_context(|| lab.server.log())?;
    Ok(found.context("just found")?.0)
}

#[test]
fn interface_gives_userspace_bytes() -> Result<()> {
    requires!(namespaces, bpf, programs(SERVERS));
    let namespace = Namespace::new("icache")?;
    let zones = Zones::new()?;
    let named = zones.named(&namespace, loopback(10))?;
    let unbound = zones.unbound(&namespace, loopback(11), named.address)?;
    let lab = start(&namespace, Bpffs::new()?, &[unbound.address], &json!({}))?;
    let questions = [
        ("www.signed.test.", RecordType::A),
        ("WWW.Signed.test.", RecordType::A),
        ("alias.signed.test.", RecordType::AAAA),
        ("nowhere.signed.test.", RecordType::A),
        ("www.signed.test.", RecordType::MX),
        ("signed.test.", RecordType::DNSKEY),
        ("_sip._tcp.signed.test.", RecordType::SRV),
        ("odd.signed.test.", RecordType::Unknown(65280)),
        ("answers.wild.test.", RecordType::A),
    ];
    for (name, record_type) in questions {
        for (edns, dnssec_ok, checking_disabled) in [
            (None, false, false),
            (Some(1232), false, true),
            (Some(1232), true, false),
            (Some(1232), true, true),
        ] {
            let what = format!(
                "{name} {record_type}, EDNS {edns:?}, DO {dnssec_ok}, CD {checking_disabled}"
            );
            let mut query = client::query(name, record_type, edns)?;
            if let Some(edns) = &mut query.edns {
                edns.set_dnssec_ok(dnssec_ok);
            }
            query.metadata.checking_disabled = checking_disabled;
            let query = query.to_vec()?;
            // A reply that is cut for this client always comes from userspace.
            let limit = usize::from(edns.unwrap_or(512));
            if ask(&lab, &query, true)?.len() > limit {
                continue;
            }
            settle(&lab, &query).context(what.clone())?;
            let begun = Instant::now();
            loop {
                let before = ask(&lab, &query, true)?;
                let (reply, by_interface) = ask_interface(&lab, &query)?;
                let after = ask(&lab, &query, true)?;
                // A second may begin in between, and one query a second is a probe.
                if by_interface && before == after {
                    ensure!(
                        reply == before,
                        "{what}: {reply:02x?} instead of {before:02x?}"
                    );
                    break;
                }
                ensure!(
                    begun.elapsed() < TIMEOUT,
                    "{what}: no reply from the interface"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn answers_in_use_are_renewed() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("irenew")?;
    let recursor = Scripted::start(&namespace, loopback(10), |asked| {
        vec![asked.answer(Ipv4Addr::new(192, 0, 2, 1), 10).into()]
    })?;
    let lab = start(&namespace, Bpffs::new()?, &[loopback(10)], &json!({}))?;
    let used = client::query("used.example.com.", RecordType::A, None)?.to_vec()?;
    let reply = Message::from_vec(&settle(&lab, &used)?)?;
    ensure!(
        reply.answers.first().is_some_and(|record| record.ttl <= 10),
        "{reply}"
    );
    // The only queries are renewals, while clients are answered by the interface alone.
    let deadline = Instant::now() + Duration::from_secs(25);
    let mut passed = 0;
    while Instant::now() < deadline {
        let (reply, by_interface) = ask_interface(&lab, &used)?;
        let reply = Message::from_vec(&reply)?;
        ensure!(
            reply
                .answers
                .first()
                .is_some_and(|record| (1..=10).contains(&record.ttl)),
            "{reply}"
        );
        passed += usize::from(!by_interface);
        thread::sleep(Duration::from_millis(100));
    }
    let fetched = recursor.count();
    ensure!(
        (2..=4).contains(&fetched),
        "{fetched} queries to the recursor"
    );
    // One query a second is a probe.
    ensure!(passed <= 27, "{passed} queries passed to userspace");
    Ok(())
}

#[test]
fn flush_ends_answers_at_once() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("iflush")?;
    let recursor = Scripted::answering(&namespace, loopback(10), [192, 0, 2, 1].into())?;
    let lab = start(&namespace, Bpffs::new()?, &[loopback(10)], &json!({}))?;
    let query = client::query("www.example.com.", RecordType::A, Some(1232))?.to_vec()?;
    for round in 0..3 {
        settle(&lab, &query)?;
        let asked = recursor.count();
        let (code, _, problem) = lab.cli(&["cache", "flush", "www.example.com"])?;
        ensure!(code == 0, "{problem}");
        let (_, by_interface) = ask_interface(&lab, &query)?;
        ensure!(
            !by_interface,
            "round {round}: an answer from before the flush"
        );
        ensure!(
            recursor.count() == asked + 1,
            "round {round}: not fetched again"
        );
    }
    Ok(())
}

#[test]
fn flush_ends_answers_of_killed_server() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("iheir")?;
    let recursor = Scripted::answering(&namespace, loopback(10), [192, 0, 2, 1].into())?;
    let mut lab = start(&namespace, Bpffs::new()?, &[loopback(10)], &json!({}))?;
    let query = client::query("www.example.com.", RecordType::A, None)?.to_vec()?;
    for round in 0..3 {
        settle(&lab, &query)?;
        lab.server.process().kill(TIMEOUT)?;
        lab.server.restart(Some(&namespace))?;
        let asked = recursor.count();
        // The control socket is ready shortly after DNS.
        wait_until("a flush", TIMEOUT, || {
            lab.cli(&["cache", "flush", "all"])
                .is_ok_and(|(code, ..)| code == 0)
        })?;
        ask(&lab, &query, false)?;
        ensure!(
            recursor.count() > asked,
            "round {round}: an answer from before the flush"
        );
    }
    Ok(())
}

/// Address in the first answer of [`changing`].
const FIRST: u32 = 0x0a00_0000;

/// Returns a recursor whose answers for a name have a new address every time.
fn changing(namespace: &Namespace, ttl: u32) -> Result<Scripted> {
    let count = std::sync::atomic::AtomicU32::new(0);
    Scripted::start(namespace, loopback(10), move |asked| {
        let number = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        vec![asked.answer(Ipv4Addr::from(FIRST + number), ttl).into()]
    })
}

#[test]
fn eviction_keeps_paths_consistent() -> Result<()> {
    const HOT: usize = 10;
    requires!(namespaces, bpf);
    let namespace = Namespace::new("ievict")?;
    let _recursor = changing(&namespace, 300)?;
    let few = json!({"cache": {"enabled": true, "max_entries": 400}});
    let lab = start(&namespace, Bpffs::new()?, &[loopback(10)], &few)?;
    let name = |number: usize| format!("hot{number}.example.com.");
    let hot: Vec<Vec<u8>> = (0..HOT)
        .map(|number| Ok(client::query(&name(number), RecordType::A, None)?.to_vec()?))
        .collect::<Result<_>>()?;
    let mut first = Vec::new();
    for query in &hot {
        first.push(client::addresses(&Message::from_vec(&settle(
            &lab, query,
        )?)?));
    }
    // A flood of other names, while clients use the hot ones at the interface.
    for number in 0..1200 {
        lab.ask_for(&format!("flood{number}.example.com."), RecordType::A)?;
        if number % 10 == 0 {
            for query in &hot {
                ask(&lab, query, false)?;
            }
        }
    }
    for (number, query) in hot.iter().enumerate() {
        let (code, text, problem) = lab.cli(&["cache", "lookup", &name(number)])?;
        ensure!(
            code == 0 && text.contains(&first[number][0].to_string()),
            "{number}: {text}{problem}"
        );
        // Userspace gives the same answer.
        let by_userspace = client::addresses(&Message::from_vec(&ask(&lab, query, true)?)?);
        ensure!(
            by_userspace == first[number],
            "{number}: {by_userspace:?} and {:?}",
            first[number]
        );
    }
    Ok(())
}

#[test]
fn evicted_answer_leaves_interface() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("ileave")?;
    let _recursor = changing(&namespace, 300)?;
    let few = json!({"cache": {"enabled": true, "max_entries": 20}});
    let lab = start(&namespace, Bpffs::new()?, &[loopback(10)], &few)?;
    let query = client::query("cold.example.com.", RecordType::A, None)?.to_vec()?;
    settle(&lab, &query)?;
    // Eviction spares a used answer in its first round over the entries, and needs a second one.
    for number in 0..300 {
        lab.ask_for(&format!("flood{number}.example.com."), RecordType::A)?;
    }
    let (_, text, _) = lab.cli(&["cache", "lookup", "cold.example.com."])?;
    ensure!(!text.contains("10.0.0."), "evicted from the cache: {text}");
    // The interface does not answer from what the cache has forgotten, so both paths agree.
    wait_until("the same answer on both paths", TIMEOUT, || {
        let reply = |by_tcp| Message::from_vec(&ask(&lab, &query, by_tcp).ok()?).ok();
        reply(true)
            .zip(reply(false))
            .is_some_and(|(one, other)| client::addresses(&one) == client::addresses(&other))
    })
    .with_context(|| lab.server.log())
}

/// Returns when the answer of [`changing`] with this address was asked for.
fn fetches(recursor: &Scripted, address: IpAddr) -> Result<Instant> {
    let IpAddr::V4(address) = address else {
        bail!("{address} is not an answer of the recursor");
    };
    let number = u32::from(address) - FIRST;
    let asked = recursor.asked();
    let asked = asked.get(number as usize);
    Ok(asked.context("an answer that nobody asked for")?.at)
}

/// Compares the TTLs of both paths with a clock: for some seconds, or for the time in `SOAK_SECONDS`, such as the
/// hour that a release waits.
#[test]
fn both_paths_count_down() -> Result<()> {
    /// TTLs are whole seconds, and the programs' clock ticks.
    const ROUNDING: f64 = 1.1;
    requires!(namespaces, bpf);
    let namespace = Namespace::new("icount")?;
    let ttl = std::env::var("SOAK_SECONDS")
        .ok()
        .map_or(Ok(8), |text| text.parse::<u32>())?;
    let recursor = changing(&namespace, ttl)?;
    let lab = start(&namespace, Bpffs::new()?, &[loopback(10)], &json!({}))?;
    let query = client::query("counted.example.com.", RecordType::A, None)?.to_vec()?;
    // The latest answer, and when it was seen first; each has an address of its own.
    let mut seen: Option<(IpAddr, Instant)> = None;
    let begun = Instant::now();
    let (mut by_interface, mut by_userspace, mut renewed) = (0, 0, 0);
    let pause = Duration::from_millis(200).max(Duration::from_secs(ttl.into()) / 2000);
    while begun.elapsed().as_secs_f64() < f64::from(ttl) + 2.0 {
        for by_tcp in [false, true] {
            let asked = Instant::now();
            let hits_before = hits(&lab)?;
            let reply = Message::from_vec(&ask(&lab, &query, by_tcp)?)?;
            match hits(&lab)? > hits_before {
                true => by_interface += 1,
                false => by_userspace += 1,
            }
            let record = reply
                .answers
                .first()
                .with_context(|| format!("no answer: {reply}"))?;
            let replied = Instant::now();
            let address = client::addresses(&reply)[0];
            let first_seen = match seen {
                Some((known, first_seen)) if known == address => first_seen,
                _ => {
                    renewed += usize::from(seen.is_some());
                    seen = Some((address, replied));
                    replied
                }
            };
            // It was fetched after the recursor was asked and before it was seen, and the reply was written after the
            // query was sent and before the reply was read, however long any of them took.
            let asked_recursor = fetches(&recursor, address)?;
            let oldest = replied.duration_since(asked_recursor).as_secs_f64() + ROUNDING;
            let youngest = asked.saturating_duration_since(first_seen).as_secs_f64() - ROUNDING;
            let age = f64::from(ttl) - f64::from(record.ttl);
            ensure!(
                (youngest..=oldest).contains(&age),
                "{} of {ttl} s left, at an age of {youngest} to {oldest} s",
                record.ttl
            );
        }
        thread::sleep(pause);
    }
    println!(
        "{by_interface} replies by the interface, {by_userspace} by userspace, {renewed} renewals"
    );
    ensure!(by_interface > 0 && by_userspace > 0);
    ensure!(
        renewed > 0,
        "{ttl} s have passed, with {} queries to the recursor",
        recursor.count()
    );
    Ok(())
}
