//! Permissions on the bus and in the API, and the precedence of versions.

use std::process::Command;
use test_support::free_address;

use crate::process::{capture, wait_until};
use anyhow::{Result, ensure};

use crate::lab::{Lab, TIMEOUT};

/// Another agent's certificate permits neither to subscribe nor to publish.
#[test]
fn agents_cannot_impersonate() -> Result<()> {
    let lab = Lab::new(2)?;
    let _false_agent = lab.keep(lab.agent_as("a1", "a0", &[])?, "a1.log")?;
    let violations = ["Subscription Violation", "Publish Violation"]
        .map(|kind| (kind, "CN=a0.agent.bosh-internal"));
    wait_until("nats-server to refuse", TIMEOUT, || {
        let log = lab.nats_log();
        violations.iter().all(|(kind, who)| {
            log.lines()
                .any(|line| line.contains(kind) && line.contains(who))
        })
    })?;
    assert!(!lab.publish(&["--timeout", "2"])?.status.success());
    assert!(!lab.records("a1").exists());
    let log = lab.nats_log();
    assert!(log.contains("Subject \"agent.a1\""), "{log}");
    assert!(
        log.contains("Subject \"director.bosh-dns-sync.a1.hello\""),
        "{log}"
    );
    Ok(())
}

/// The same with users by DNS name; the right agents work.
#[test]
fn dns_name_users_cannot_impersonate() -> Result<()> {
    let mut lab = Lab::new(2)?;
    lab.use_dns_names(2)?;
    let _agent = lab.agent("a0", &[])?;
    let false_agent = lab.keep(lab.agent_as("a1", "a0", &[])?, "a1.log")?;
    for kind in ["Subscription Violation", "Publish Violation"] {
        wait_until("nats-server to refuse", TIMEOUT, || {
            let log = lab.nats_log();
            log.lines()
                .any(|line| line.contains(kind) && line.contains("\"a0.agent.bosh-internal\""))
        })?;
    }
    drop(false_agent);
    let _other = lab.agent("a1", &[])?;
    ensure!(lab.publish(&[])?.status.success(), "{}", lab.nats_log());
    // A subject alone no longer identifies a user.
    lab.authority
        .issue(&lab.path(""), "a1", "a1.agent.bosh-internal")?;
    let _nameless = lab.keep(lab.agent_as("a1", "a1", &[])?, "a1-again.log")?;
    wait_until("nats-server to refuse", TIMEOUT, || {
        lab.nats_log().contains("authentication error")
    })
}

/// A certificate from another CA, and a server whose name is not below nats.bosh-internal.
#[test]
fn foreign_certificates_are_refused() -> Result<()> {
    let mut lab = Lab::new(1)?;
    let stranger = tempfile::TempDir::new()?;
    crate::certificates::Authority::new(stranger.path())?.issue(
        stranger.path(),
        "a0",
        "a0.agent.bosh-internal",
    )?;
    let mut command = lab.agent_as("a0", "a0", &[])?;
    for (option, file) in [("--tls-certificate", "a0.crt"), ("--tls-key", "a0.key")] {
        // clap refuses repeated options, so the command is rebuilt.
        let words: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        let mut anew = Command::new(command.get_program());
        let mut take = false;
        for word in words {
            anew.arg(if take {
                stranger.path().join(file).into_os_string()
            } else {
                word.clone()
            });
            take = word == option;
        }
        command = anew;
    }
    let stranger = lab.keep(command, "a0.log")?;
    wait_until("nats-server to refuse", TIMEOUT, || {
        lab.nats_log().contains("unknown authority")
    })?;
    drop(stranger);
    lab.kill_nats()?;
    lab.authority
        .issue(&lab.path(""), "nats", "somebody.else")?;
    lab.start_nats()?;
    let _agent = lab.keep(lab.agent_as("a0", "a0", &[])?, "a0-again.log")?;
    wait_until("the agent to refuse", TIMEOUT, || {
        lab.nats_log().contains("remote error: tls")
    })?;
    assert!(!lab.publish(&["--timeout", "2"])?.status.success());
    Ok(())
}

/// A version far above the agent's is accepted and logged as an error.
#[test]
fn far_version_is_logged() -> Result<()> {
    let lab = Lab::new(1)?;
    let _agent = lab.agent("a0", &[])?;
    ensure!(lab.publish(&["--above", "41"])?.status.success());
    assert_eq!(lab.version("a0")?, 42);
    ensure!(lab.publish(&["--above", "50000000"])?.status.success());
    assert_eq!(lab.version("a0")?, 50_000_001);
    assert!(
        lab.log("a0").contains("far above the installed one"),
        "{}",
        lab.log("a0")
    );
    let wrap = lab.publish(&["--above", &u64::MAX.to_string()])?;
    assert_eq!(
        wrap.status.code(),
        Some(2),
        "{}",
        String::from_utf8_lossy(&wrap.stderr)
    );
    Ok(())
}

/// Rotated certificates are used without a restart; the old CA is removed from all files.
#[test]
fn certificates_rotate_without_a_restart() -> Result<()> {
    let mut lab = Lab::new(1)?;
    let _agent = lab.agent("a0", &[])?;
    let _publisher = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;
    lab.authority = crate::certificates::Authority::new(&lab.path(""))?;
    for (file, name) in [
        ("nats", "default.nats.bosh-internal"),
        ("director", "default.director.bosh-internal"),
        ("a0", "a0.agent.bosh-internal"),
    ] {
        lab.authority.issue(&lab.path(""), file, name)?;
    }
    lab.kill_nats()?;
    lab.start_nats()?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for("a0", 2)
}

/// The API accepts changes and shows the status, but only to clients with a certificate.
#[test]
fn api_requires_a_certificate() -> Result<()> {
    let lab = Lab::new(1)?;
    let _agent = lab.agent("a0", &[])?;
    let address = free_address().to_string();
    let _publisher = lab.watch(&["--api", &address])?;
    lab.wait_for("a0", 1)?;
    let file = |name: &str| lab.path(name).display().to_string();
    let (ca, certificate, key) = (file("ca.crt"), file("director.crt"), file("director.key"));
    let url = format!("https://{address}");
    let place = [
        "--api",
        &url,
        "--tls-ca",
        &ca,
        "--tls-certificate",
        &certificate,
        "--tls-key",
        &key,
    ];
    lab.run(&[&["instance", "move", "i0", "10.9.9.9"][..], &place].concat())?;
    lab.wait_for("a0", 2)?;
    let unknown = lab.run(&[&["instance", "remove", "x"][..], &place].concat());
    assert!(unknown.is_err());
    // The API shows the state of up to a second ago.
    wait_until("the status", TIMEOUT, || {
        let status = lab.run(&[&["status"][..], &place].concat());
        status.is_ok_and(|text| {
            text.starts_with("version 2, ") && text.contains("1 of 1 agents have it")
        })
    })?;
    let without = Command::new("curl")
        .args(["-s", "--cacert", &ca, &format!("{url}/v1/status")])
        .output()?;
    assert!(
        !without.status.success(),
        "a call without a certificate was answered"
    );
    let with = [
        "-s",
        "-f",
        "--cacert",
        &ca,
        "--cert",
        &certificate,
        "--key",
        &key,
    ];
    let text = capture(
        Command::new("curl")
            .args(with)
            .arg(format!("{url}/v1/status")),
    )?;
    assert!(text.starts_with(r#"{"version":2,"#), "{text}");

    // An agent's certificate from the same CA is refused.
    let (certificate, key) = (file("a0.crt"), file("a0.key"));
    let agent = [
        "-s",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        "--cacert",
        &ca,
        "--cert",
        &certificate,
    ];
    for call in [&["-d", r#"{"change":"remove","id":"i0"}"#][..], &[]] {
        let path = if call.is_empty() { "status" } else { "changes" };
        let mut curl = Command::new("curl");
        curl.args(agent)
            .args(["--key", &key, "-H", "content-type: application/json"])
            .args(call);
        assert_eq!(
            capture(curl.arg(format!("{url}/v1/{path}")))?,
            "403",
            "{path}"
        );
    }
    assert!(
        lab.log("publisher").contains("not listed in --api-clients"),
        "{}",
        lab.log("publisher")
    );
    Ok(())
}

/// An agent reports errors in its own words.
#[test]
fn status_escapes_control_characters() -> Result<()> {
    const HOSTILE: &str = "a\u{1b}[2J\u{9b}2J\u{202e}x\u{7}";
    let state = tempfile::TempDir::new()?;
    let agent = serde_json::json!({"held": {"version": 1, "digest": HOSTILE}, "heard": 1, "asked": 1,
        "failures": 1, "error": HOSTILE});
    let book = serde_json::json!({"version": 2, "agents": {HOSTILE: agent}});
    std::fs::write(state.path().join("agents.json"), book.to_string())?;
    let missing = format!("/nowhere/{HOSTILE}");
    let folder = state.path().to_string_lossy().into_owned();
    for arguments in [
        &["status", "--all", "--state", &folder][..],
        &["status", "--json", "--state", &folder],
        &["status", "--state", &missing],
        &["confirm-removals", "--state", &missing],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_bosh-dns-sync"))
            .args(arguments)
            .output()?;
        ensure!(
            !(output.stdout.is_empty() && output.stderr.is_empty()),
            "{arguments:?} says nothing"
        );
        for bytes in [output.stdout, output.stderr] {
            let text = String::from_utf8(bytes)?;
            let raw = text
                .chars()
                .find(|&c| dns_core::terminal::is_active(c) && c != '\n' && c != '\t');
            ensure!(raw.is_none(), "{arguments:?}: {text:?}");
        }
    }
    Ok(())
}
