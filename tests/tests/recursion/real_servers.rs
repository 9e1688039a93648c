//! Answers of real servers are forwarded unmodified.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use hickory_proto::{
    op::Message,
    rr::{Record, RecordType},
    serialize::binary::{BinEncodable, BinEncoder},
};
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, requires};

use super::{
    lab::{Lab, loopback},
    servers::{Recursor, SERVERS, Zones},
};

/// Size of the message id, which differs between queries.
const ID: usize = 2;

/// Starts both servers in a namespace.
pub(super) fn servers(label: &str) -> Result<(Recursor, Recursor, Zones, Namespace)> {
    let namespace = Namespace::new(label)?;
    let zones = Zones::new()?;
    let named = zones.named(&namespace, loopback(10))?;
    let unbound = zones.unbound(&namespace, loopback(11), named.address)?;
    Ok((named, unbound, zones, namespace))
}

/// Builds a query with an OPT of `size`, and with DO and CD as given.
pub(super) fn query(
    name: &str,
    record_type: RecordType,
    size: u16,
    dnssec: bool,
    unchecked: bool,
) -> Result<Message> {
    let mut query = client::query(name, record_type, Some(size))?;
    if let Some(edns) = &mut query.edns {
        edns.set_dnssec_ok(dnssec);
    }
    query.metadata.checking_disabled = unchecked;
    Ok(query)
}

/// Sends raw bytes to `server` from inside the namespace.
pub(super) fn ask(
    namespace: &Namespace,
    server: SocketAddr,
    query: &Message,
    by_tcp: bool,
) -> Result<Vec<u8>> {
    let bytes = query.to_vec()?;
    namespace.run(|| {
        if by_tcp {
            client::ask_tcp_raw(server, &bytes)
        } else {
            Ok(client::ask_raw(
                server,
                &bytes,
                std::time::Duration::from_secs(5),
            )?)
        }
    })?
}

/// Returns the records of a reply by section, sorted and without TTLs, because a recursor counts
/// TTLs down and rotates record sets.
pub(super) fn sections(reply: &[u8]) -> Result<Vec<Vec<Vec<u8>>>> {
    let reply = Message::from_vec(reply)?;
    let bytes = |record: &Record| -> Result<Vec<u8>> {
        let mut record = record.clone();
        record.ttl = 0;
        let mut bytes = Vec::new();
        record.emit(&mut BinEncoder::new(&mut bytes))?;
        Ok(bytes)
    };
    [&reply.answers, &reply.authorities, &reply.additionals]
        .into_iter()
        .map(|section| {
            let mut records = section.iter().map(bytes).collect::<Result<Vec<_>>>()?;
            records.sort();
            Ok(records)
        })
        .collect()
}

/// Returns the number of records of a type in the answer section.
pub(super) fn answers(reply: &[u8], record_type: RecordType) -> Result<usize> {
    let reply = Message::from_vec(reply)?;
    Ok(reply
        .answers
        .iter()
        .filter(|record| record.record_type() == record_type)
        .count())
}

#[test]
fn signed_answers_pass_through_unharmed() -> Result<()> {
    requires!(namespaces, programs(SERVERS));
    let (named, unbound, _zones, namespace) = servers("signed")?;
    let questions = [
        ("www.signed.test.", RecordType::A),
        ("alias.signed.test.", RecordType::AAAA),
        ("nowhere.signed.test.", RecordType::A),
        ("www.signed.test.", RecordType::MX),
        ("signed.test.", RecordType::DNSKEY),
        ("signed.test.", RecordType::MX),
        ("_sip._tcp.signed.test.", RecordType::SRV),
        ("odd.signed.test.", RecordType::Unknown(65280)),
    ];
    for recursor in [&named, &unbound] {
        let lab = Lab::start(&namespace, &[recursor.address], &json!({}))?;
        for (name, record_type) in questions {
            for (dnssec, unchecked, by_tcp) in [
                (true, false, false),
                (true, true, true),
                (false, false, false),
                (false, true, true),
            ] {
                let query = query(name, record_type, 4096, dnssec, unchecked)?;
                let what = format!(
                    "{name} {record_type} from {}, DO {dnssec}, TCP {by_tcp}",
                    recursor.address
                );
                // unbound may leave records of its first answer out of later ones.
                ask(&namespace, recursor.address, &query, by_tcp)?;
                let mut direct = ask(&namespace, recursor.address, &query, by_tcp)?;
                // The server always sets RA, whatever its upstream does.
                direct[3] |= 0x80;
                let through = ask(&namespace, lab.server.address, &query, by_tcp)?;
                ensure!(
                    through[..12] == direct[..12],
                    "{what}: {:?}, not {:?}",
                    &through[..12],
                    &direct[..12]
                );
                ensure!(
                    sections(&through)? == sections(&direct)?,
                    "{what}: other records"
                );
                if recursor.address == named.address && record_type != RecordType::DNSKEY {
                    // An authority's TTLs are constant, and these sets have one record each. The
                    // trailing OPT is the server's own.
                    let [through, direct] =
                        [&through, &direct].map(|reply| &reply[..reply.len() - 11]);
                    ensure!(
                        through == direct,
                        "{what}: other bytes:\n{through:02x?}\n{direct:02x?}"
                    );
                }
                let signed = sections(&through)?.concat().len();
                ensure!(!dnssec || signed > 1, "{what}: nothing is signed");
            }
        }
        let query = query("www.signed.test.", RecordType::A, 1232, true, false)?;
        let reply = lab.ask(&query)?;
        ensure!(
            answers(&reply.to_vec()?, RecordType::RRSIG)? == 1,
            "no signature: {reply}"
        );
        ensure!(
            reply.metadata.authentic_data == (recursor.address == unbound.address),
            "AD is the recursor's: {reply}"
        );
    }
    Ok(())
}

#[test]
fn cache_separates_signed_answers() -> Result<()> {
    requires!(namespaces, programs(SERVERS));
    let (_named, unbound, _zones, namespace) = servers("signedcache")?;
    let lab = Lab::start(
        &namespace,
        &[unbound.address],
        &json!({"cache": {"enabled": true}}),
    )?;
    let signed = query("www.signed.test.", RecordType::A, 1232, true, false)?;
    let plain = query("www.signed.test.", RecordType::A, 1232, false, false)?;
    let first = ask(&namespace, lab.server.address, &signed, false)?;
    for (query, signatures) in [(&plain, 0), (&signed, 1), (&plain, 0), (&signed, 1)] {
        let reply = ask(&namespace, lab.server.address, query, false)?;
        ensure!(
            answers(&reply, RecordType::RRSIG)? == signatures,
            "{}",
            Message::from_vec(&reply)?
        );
        ensure!(
            answers(&reply, RecordType::A)? == 1,
            "{}",
            Message::from_vec(&reply)?
        );
        if signatures == 1 {
            ensure!(
                sections(&reply)? == sections(&first)?,
                "a hit differs from the first answer"
            );
            ensure!(
                Message::from_vec(&reply)?.metadata.authentic_data,
                "AD is lost in the cache"
            );
        }
    }
    ensure!(lab.metric("coredns_cache_hits_total", "type=\"success\"")? == 3);
    ensure!(lab.metric("coredns_cache_misses_total", "")? == 2);
    Ok(())
}

#[test]
fn large_answers_are_marked_truncated() -> Result<()> {
    requires!(namespaces, programs(SERVERS));
    let (named, unbound, _zones, namespace) = servers("large")?;
    for recursor in [&named, &unbound] {
        let lab = Lab::start(&namespace, &[recursor.address], &json!({}))?;
        let ask = |query: &Message, by_tcp| ask(&namespace, lab.server.address, query, by_tcp);
        for dnssec in [false, true] {
            let huge = query("huge.signed.test.", RecordType::TXT, 1232, dnssec, false)?;
            let whole = ask(&huge, true)?;
            ensure!(
                answers(&whole, RecordType::TXT)? == 60 && whole.len() > 14_000,
                "{} bytes",
                whole.len()
            );
            let large = query("large.signed.test.", RecordType::TXT, 4096, dnssec, false)?;
            let whole = ask(&large, false)?;
            ensure!(
                answers(&whole, RecordType::TXT)? == 10 && whole.len() > 2_400,
                "{} bytes",
                whole.len()
            );
            ensure!(whole[ID] & 2 == 0, "TC on a complete answer");
            for size in [512, 1232] {
                let large = query("large.signed.test.", RecordType::TXT, size, dnssec, false)?;
                let cut = ask(&large, false)?;
                ensure!(
                    cut.len() <= usize::from(size),
                    "{} bytes for {size}",
                    cut.len()
                );
                ensure!(cut[ID] & 2 != 0, "no TC on a truncated answer");
                Message::from_vec(&cut).context("a truncated answer cannot be parsed")?;
                ensure!(
                    answers(&ask(&large, true)?, RecordType::TXT)? == 10,
                    "over TCP it is complete"
                );
            }
        }
        let plain = client::query("large.signed.test.", RecordType::TXT, None)?;
        let cut = ask(&plain, false)?;
        ensure!(
            cut.len() <= 512 && cut[ID] & 2 != 0,
            "{} bytes without EDNS",
            cut.len()
        );
    }
    Ok(())
}
