//! Upstreams that lose packets, and paths that lose fragments.

use std::{io::Write as _, net::Ipv4Addr, process::Stdio};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, requires};

use super::{
    lab::{Lab, loopback},
    scripted::{Say, Scripted},
};

/// The recursor's answer.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Adds nftables rules in a namespace.
fn nft(namespace: &Namespace, rules: &str) -> Result<()> {
    let mut child = namespace
        .command("nft")?
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .spawn()?;
    child
        .stdin
        .take()
        .context("a pipe")?
        .write_all(rules.as_bytes())?;
    let status = child.wait()?;
    ensure!(status.success(), "nft: {status}");
    Ok(())
}

#[test]
fn lost_replies_are_asked_again() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("lossy")?;
    // Every third reply of the recursors is lost.
    nft(
        &namespace,
        "table ip loss { chain in { type filter hook input priority 0; \
         ip saddr { 127.0.0.10, 127.0.0.11 } udp sport 53 numgen inc mod 3 == 0 drop\n }\n}\n",
    )?;
    let recursors = [loopback(10), loopback(11)];
    let scripted = recursors.map(|at| Scripted::answering(&namespace, at, ADDRESS));
    let lab = Lab::start(&namespace, &recursors, &json!({"recursor_timeout": "2s"}))?;
    for number in 0..30 {
        let reply = lab.ask_for(&format!("n{number}.test."), RecordType::A)?;
        ensure!(client::addresses(&reply) == [ADDRESS], "{number}: {reply}");
    }
    let asked: usize = scripted.iter().flatten().map(Scripted::count).sum();
    ensure!((40..=50).contains(&asked), "{asked} queries for 30 names");
    Ok(())
}

#[test]
fn large_answers_survive_lost_fragments() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("fragments")?;
    namespace.ip("link set lo mtu 1280")?;
    nft(
        &namespace,
        "table ip loss { chain early { type filter hook prerouting priority -450; \
         ip frag-off & 0x3fff != 0 drop\n }\n}\n",
    )?;
    // As real servers do: within the size that the query announces, otherwise truncated.
    let recursor = Scripted::start(&namespace, loopback(10), |asked| {
        let mut reply = asked.answer(ADDRESS, 300);
        let record = reply.answers.remove(0);
        let room = asked
            .message
            .edns
            .as_ref()
            .map_or(512, |edns| edns.max_payload());
        match asked.by_tcp || room >= 4096 {
            true => reply.answers.extend(vec![record; 200]),
            false => reply.metadata.truncation = true,
        }
        vec![Say::from(reply)]
    })?;
    let lab = Lab::start(&namespace, &[loopback(10)], &json!({}))?;
    // The client's own size must not reach the recursor: a reply of 4096 bytes would be lost.
    let query = client::query("large.test.", RecordType::A, Some(4096))?;
    for reply in [
        lab.ask_tcp(&query)?,
        lab.ask(&client::query("large.test.", RecordType::A, Some(1232))?)?,
    ] {
        ensure!(
            client::addresses(&reply).contains(&ADDRESS.into()),
            "{reply}"
        );
    }
    ensure!(
        recursor.asked().iter().any(|asked| asked.by_tcp),
        "nothing was queried over TCP"
    );
    Ok(())
}
