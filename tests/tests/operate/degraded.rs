//! Missing or broken surroundings do not affect DNS.

use std::{fs, process::Command};

use anyhow::{Context, Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{client, requires, server};

use crate::running::{METRICS_PORT, Running};

#[test]
fn unusable_health_certificates_spare_dns() -> Result<()> {
    requires!(namespaces);
    let settings = json!({"health": {
        "enabled": true, "port": 2345,
        // Device files instead of regular files.
        "certificate_file": "/dev/null", "private_key_file": "/dev/null", "ca_file": "/dev/null",
    }});
    let running = Running::start("nohealth", &settings)?;
    let query = client::query("q-s0.q-g1.bosh.", RecordType::A, None)?;
    let reply = running
        .namespace
        .run(|| client::ask(running.server.address, &query))??;
    ensure!(client::addresses(&reply).len() == 3, "{reply}");
    let ready = running.curl(&[&format!("http://127.0.0.1:{METRICS_PORT}/readyz")])?;
    ensure!(
        ready.contains("health checks stay off"),
        "it is reported: {ready}"
    );
    running.server.wait_for_log("health checks stay off")?;
    let (code, text, errors) = running.cli(&["check"])?;
    ensure!(
        code == 0,
        "check rejects a configuration that run accepts: {text}{errors}"
    );
    Ok(())
}

/// Returns the packaged systemd unit.
fn unit() -> Result<String> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/systemd/bosh-dns-xdp.service"
    );
    fs::read_to_string(path).context(path)
}

/// Returns all values of a setting in the unit.
fn values<'a>(unit: &'a str, setting: &str) -> Vec<&'a str> {
    unit.lines()
        .filter_map(|line| line.strip_prefix(setting)?.strip_prefix('='))
        .collect()
}

#[test]
fn systemd_unit_commands_work() -> Result<()> {
    requires!(namespaces, programs(&["systemd-analyze"]));
    let program = server::program()?;
    let running = Running::start("unit", &json!({}))?;
    // A missing records.json is no reason to fail.
    fs::remove_file(running.folder().join("records.json"))?;
    let config = running.folder().join("config.json");
    let (program, config) = (program.display().to_string(), config.display().to_string());
    let here = unit()?
        .replace("/usr/bin/bosh-dns-xdp", &program)
        .replace("/etc/bosh-dns-xdp/config.json", &config);
    let file = running.folder().join("bosh-dns-xdp.service");
    fs::write(&file, &here)?;
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(&file)
        .output()?;
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.success() && !complaints.contains("bosh-dns-xdp.service"),
        "{complaints}"
    );

    // Commands before the server must not prevent its start.
    for command in values(&here, "ExecStartPre") {
        let words: Vec<&str> = command.split_whitespace().collect();
        let output = running.output(words[0], &words[1..])?;
        ensure!(
            output.status.success(),
            "{command}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let (code, text, errors) = running.cli(&["check"])?;
    ensure!(
        code == 0,
        "check rejects a configuration that run accepts: {text}{errors}"
    );
    ensure!(
        values(&here, "ExecStart") == [format!("{program} run --config {config}")],
        "{here}"
    );
    let pid = running.server.pid().to_string();
    for command in values(&here, "ExecReload") {
        let command = command.replace("$MAINPID", &pid);
        ensure!(
            running.output("sh", &["-c", &command])?.status.success(),
            "{command}"
        );
    }
    running.server.wait_for_log("SIGHUP: reload finished")?;

    // Restarts are unlimited, for any exit code and any start rate.
    ensure!(
        values(&here, "Restart") == ["always"] && values(&here, "StartLimitIntervalSec") == ["0"]
    );
    // A dedicated user with exactly the capabilities in docs/capabilities.md.
    ensure!(values(&here, "User") == ["bosh-dns-xdp"]);
    let needed = "CAP_NET_BIND_SERVICE";
    for setting in ["CapabilityBoundingSet", "AmbientCapabilities"] {
        ensure!(values(&here, setting) == [needed], "{setting}");
    }
    Ok(())
}
