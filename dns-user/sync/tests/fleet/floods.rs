//! One faulty or hostile client: logs stay small and printable, and other clients are served.

use std::{
    fs,
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::{
    lab::{Lab, PATIENCE, free_port},
    process::{capture, wait_until},
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
    ensure!(log.len() < 100_000, "{count} messages made {} bytes of log", log.len());
    ensure!(log.contains(r"\u{1b}[2J\u{7}x") && !log.contains(['\x1b', '\x07']), "{log}");
    let state = lab.path("state").display().to_string();
    let status = lab.command(&["status", "--state", &state])?.output()?;
    let shown = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(shown.contains(r"\u{1b}[2J") && !shown.contains('\x1b'), "{shown}");
    Ok(())
}

#[test]
fn idle_connections_are_evicted() -> Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(2048.min(hard)), hard)?;
    let lab = Lab::new(1)?;
    let [metrics, api] = [free_port()?, free_port()?].map(|port| format!("127.0.0.1:{port}"));
    let _agent = lab.agent("a0", &[])?;
    let _publisher = lab.watch(&["--metrics", &metrics, "--api", &api])?;
    lab.wait_for("a0", 1)?;
    let idle: Result<Vec<_>, _> =
        (0..1100).map(|number| TcpStream::connect(if number < 70 { &api } else { &metrics })).collect();
    let idle = idle?;
    let curl =
        |words: &[&str]| capture(Command::new("curl").args(["-sS", "-f", "--max-time", "5"]).args(words));
    let text = curl(&[&format!("http://{metrics}/metrics")])?;
    assert!(text.contains("bosh_dns_sync_version 1"), "{text}");
    let file = |name: &str| lab.path(name).display().to_string();
    let (ca, certificate, key) = (file("ca.crt"), file("director.crt"), file("director.key"));
    let status = format!("https://{api}/v1/status");
    let text = curl(&["--cacert", &ca, "--cert", &certificate, "--key", &key, &status])?;
    assert!(text.starts_with(r#"{"version":1,"#), "{text}");
    drop(idle);
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for("a0", 2)
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
    let consumer =
        r#"{"stream_name":"OBJ_dns","config":{"deliver_subject":"director.x.a1.y","ack_policy":"none"}}"#;
    for subject in [
        "$JS.API.CONSUMER.CREATE.OBJ_dns",
        "$JS.API.CONSUMER.CREATE.OBJ_dns.name",
        "$JS.API.CONSUMER.DURABLE.CREATE.OBJ_dns.name",
        "$JS.API.STREAM.DELETE.OBJ_dns",
    ] {
        hostile.say(subject, consumer)?;
        wait_until("nats-server to refuse", PATIENCE, || {
            lab.nats_log().contains(&format!("Publish Violation - Subject \"{subject}\""))
                || lab
                    .nats_log()
                    .lines()
                    .any(|line| line.contains("Publish Violation") && line.contains(subject))
        })?;
    }
    assert_eq!(fs::read(lab.records("a1"))?, lab.dataset(1)?);
    Ok(())
}
