//! One faulty or hostile client: logs stay small and printable, and other clients are served.

use std::{
    fs,
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};
use test_support::free_address;

use anyhow::{Context, Result, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use dns_sync::digest::sha256;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::{
    lab::{Lab, TIMEOUT},
    process::{Kept, capture, wait_until},
    speaker::Speaker,
};

#[test]
fn flooding_agent_fills_no_log() -> Result<()> {
    let lab = Lab::new(2)?;
    let mut hostile = Speaker::new(&lab, "a0", "agent.a0")?;
    let _agent = lab.agent("a1", &[])?;
    let _publisher = lab.watch(&[])?;
    let call = hostile.hear_call()?;
    let reply_to = call["reply_to"].as_str().context("reply_to")?.to_owned();
    let long = "x".repeat(10_000);
    let begun = Instant::now();
    let mut count = 0;
    while begun.elapsed() < Duration::from_secs(3) {
        for subject in [&reply_to, "director.bosh-dns-sync.a0.hello"] {
            let text = format!(r#"{{"exception":{{"message":"{count} \u001b[2J\u0007{long}"}}}}"#);
            hostile.say(subject, &text)?;
            count += 1;
        }
    }
    lab.instance(&["move", "i1", "10.9.9.9"])?;
    lab.wait_for("a1", 2)?;
    let log = lab.log("publisher");
    println!("{count} messages in 3 s made {} bytes of log", log.len());
    ensure!(
        log.len() < 100_000,
        "{count} messages made {} bytes of log",
        log.len()
    );
    ensure!(
        log.contains(r"\u{1b}[2J\u{7}x") && !log.contains(['\x1b', '\x07']),
        "{log}"
    );
    let state = lab.path("state").display().to_string();
    let status = lab.command(&["status", "--state", &state])?.output()?;
    let shown = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(
        shown.contains(r"\u{1b}[2J") && !shown.contains('\x1b'),
        "{shown}"
    );
    Ok(())
}

#[test]
fn idle_connections_are_evicted() -> Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(2048.min(hard)), hard)?;
    let lab = Lab::new(1)?;
    let [metrics, api] = [free_address(), free_address()].map(|address| address.to_string());
    let _agent = lab.agent("a0", &[])?;
    let _publisher = lab.watch(&["--metrics", &metrics, "--api", &api])?;
    lab.wait_for("a0", 1)?;
    let idle: Result<Vec<_>, _> = (0..1100)
        .map(|number| TcpStream::connect(if number < 70 { &api } else { &metrics }))
        .collect();
    let idle = idle?;
    let curl = |words: &[&str]| {
        capture(
            Command::new("curl")
                .args(["-sS", "-f", "--max-time", "30"])
                .args(words),
        )
    };
    let text = curl(&[&format!("http://{metrics}/metrics")])?;
    assert!(text.contains("bosh_dns_sync_version 1"), "{text}");
    let file = |name: &str| lab.path(name).display().to_string();
    let (ca, certificate, key) = (file("ca.crt"), file("director.crt"), file("director.key"));
    let status = format!("https://{api}/v1/status");
    // The API shows the state of up to a second ago.
    wait_until("version 1 in the API", TIMEOUT, || {
        let text = curl(&[
            "--cacert",
            &ca,
            "--cert",
            &certificate,
            "--key",
            &key,
            &status,
        ]);
        text.is_ok_and(|text| text.starts_with(r#"{"version":1,"#))
    })?;
    drop(idle);
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for("a0", 2)
}

/// Returns a number from a file in `/proc/PID`, in bytes.
fn of_process(process: &Kept, file: &str, name: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{}/{file}", process.pid()))?;
    let line = text
        .lines()
        .find(|line| line.starts_with(name))
        .context("no such line")?;
    let number = line
        .split_whitespace()
        .nth(1)
        .context("no number")?
        .parse::<u64>()?;
    Ok(if line.ends_with(" kB") {
        number << 10
    } else {
        number
    })
}

#[test]
fn rapid_changes_share_versions() -> Result<()> {
    const INSTANCES: usize = 10_000;
    /// The defect wrote 36 GiB an hour. Each version writes dataset, blob and ids.
    const MOST_PER_HOUR: f64 = 20e9;
    let lab = Lab::new(1)?;
    const FIRST: &str = "10.200.0.0";
    lab.write_inventory(INSTANCES, |agent| match agent {
        0 => FIRST.to_owned(),
        agent => format!(
            "10.{}.{}.{}",
            agent / 62_500,
            agent / 250 % 250,
            agent % 250
        ),
    })?;
    let inventory = fs::read_to_string(lab.path("inventory.json"))?;
    let moved = |changes: usize| format!("10.200.{}.{}", changes / 250, changes % 250);
    let write = |changes: usize| {
        fs::write(
            lab.path("inventory.new"),
            inventory.replacen(FIRST, &moved(changes), 1),
        )?;
        fs::rename(lab.path("inventory.new"), lab.path("inventory.json"))
    };
    let _agent = lab.agent("a0", &[])?;
    let publisher = lab.watch(&[])?;
    // A debug build takes milliseconds for each of the other, nonexistent agents.
    wait_until("the first version", 5 * TIMEOUT, || {
        lab.version("a0").is_ok_and(|found| found == 1)
    })?;
    // The burst comes first.
    let (mut changes, mut measured) = (0, None);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(30) {
        changes += 1;
        write(changes)?;
        std::thread::sleep(Duration::from_millis(250));
        if measured.is_none() && begun.elapsed() > Duration::from_secs(10) {
            measured = Some((Instant::now(), of_process(&publisher, "io", "write_bytes")?));
        }
    }
    let (since, before) = measured.context("too slow")?;
    let written = of_process(&publisher, "io", "write_bytes")? - before;
    let per_hour = written as f64 / since.elapsed().as_secs_f64() * 3600.0;
    println!(
        "{changes} changes in {:?}: {:.2} GB an hour",
        begun.elapsed(),
        per_hour / 1e9
    );
    ensure!(per_hour < MOST_PER_HOUR, "{per_hour:.0} bytes an hour");
    // The last change arrives.
    let last = moved(changes);
    wait_until("the last change", TIMEOUT, || {
        fs::read_to_string(lab.records("a0")).is_ok_and(|text| text.contains(&last))
    })
}

#[test]
fn bomb_needs_little_memory() -> Result<()> {
    /// Growth of memory; the defect took 396 MiB.
    const MOST: u64 = 100 << 20;
    let lab = Lab::new(1)?;
    let agent = lab.agent("a0", &[])?;
    ensure!(lab.publish(&[])?.status.success());
    let mut director = Speaker::new(&lab, "director", "director.>")?;
    let before = of_process(&agent, "status", "VmHWM:")?;
    // A GiB of zeros as a patch, and as an announced blob.
    let bomb = zstd::bulk::compress(&vec![0; 1 << 30], 19)?;
    let patch = json!({"from": 1, "zstd": STANDARD.encode(&bomb)});
    for (version, extra) in [
        (2, json!({"patch": patch, "size": 1_u64 << 40})),
        (3, json!({"patch": patch})),
    ] {
        let call = json!({
            "protocol": 3, "method": "sync_dns", "reply_to": "director.bosh-dns-sync-x.a0.y",
            "arguments": ["none", sha256(b""), version, extra],
        });
        director.say("agent.a0", &call.to_string())?;
        let reply: Value = serde_json::from_slice(&director.hear_reply()?.payload)?;
        ensure!(reply["exception"].is_object(), "{reply}");
    }
    let peak = of_process(&agent, "status", "VmHWM:")?;
    println!("peak {} MiB, {} MiB before", peak >> 20, before >> 20);
    ensure!(peak < before + MOST, "{} MiB", peak >> 20);
    Ok(())
}

#[test]
fn jetstream_lets_agents_only_read() -> Result<()> {
    let mut lab = Lab::new(2)?;
    lab.use_jetstream()?;
    let _other = lab.agent("a1", &[])?;
    let hostile = Speaker::new(&lab, "a0", "agent.a0")?;
    lab.publish(&["--timeout", "6"])?;
    let before = lab.nats_log();
    ensure!(!before.contains("Violation"), "{before}");
    let consumer = r#"{"stream_name":"OBJ_dns","config":{"deliver_subject":"director.x.a1.y","ack_policy":"none"}}"#;
    for subject in [
        "$JS.API.CONSUMER.CREATE.OBJ_dns",
        "$JS.API.CONSUMER.CREATE.OBJ_dns.name",
        "$JS.API.CONSUMER.DURABLE.CREATE.OBJ_dns.name",
        "$JS.API.STREAM.DELETE.OBJ_dns",
    ] {
        hostile.say(subject, consumer)?;
        wait_until("nats-server to refuse", TIMEOUT, || {
            lab.nats_log()
                .contains(&format!("Publish Violation - Subject \"{subject}\""))
                || lab
                    .nats_log()
                    .lines()
                    .any(|line| line.contains("Publish Violation") && line.contains(subject))
        })?;
    }
    assert_eq!(fs::read(lab.records("a1"))?, lab.dataset(1)?);
    Ok(())
}
