//! The progress bar on a terminal, and all metric families.

use std::{
    fs::File,
    io::Read,
    net::SocketAddr,
    process::{Command, ExitStatus, Stdio},
};
use test_support::free_address;

use anyhow::{Context, Result, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use dns_sync::digest;
use nix::{
    pty::{OpenptyResult, Winsize, openpty},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    lab::{Lab, TIMEOUT},
    process::{capture, wait_until},
    speaker::Speaker,
};

/// Exposition of the publisher; `*` matches a number above 0.
const OF_PUBLISHER: &str = include_str!("publisher.prom");

/// Exposition of an agent.
const OF_AGENT: &str = include_str!("agent.prom");

/// Alert rules and the dashboard name only metrics that exist.
#[test]
fn rules_and_dashboard_name_real_metrics() -> Result<()> {
    let deploy = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let exists = |name: &str| {
        [OF_PUBLISHER, OF_AGENT]
            .iter()
            .any(|text| text.contains(&format!("# TYPE {name} ")))
    };
    let mut named = 0;
    for file in ["prometheus/sync-rules.yml", "grafana/bosh-dns-sync.json"] {
        let text = std::fs::read_to_string(deploy.join(file)).context(file)?;
        for start in text.match_indices("bosh_dns_sync_").map(|(start, _)| start) {
            let end = text[start..]
                .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .context("end")?;
            let name = &text[start..start + end];
            ensure!(exists(name), "{file} names {name}");
            named += 1;
        }
    }
    ensure!(named > 20, "{named}");
    Ok(())
}

/// Runs a command with its standard error on a terminal until it exits or `enough` appears, then sends
/// SIGTERM. Returns the exit status and the lines on the terminal.
fn on_terminal(
    mut command: Command,
    enough: impl Fn(&[String]) -> bool,
) -> Result<(ExitStatus, Vec<String>)> {
    const SIZE: Winsize = Winsize {
        ws_row: 50,
        ws_col: 200,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let OpenptyResult { master, slave } = openpty(Some(&SIZE), None)?;
    let mut child = command
        .env("TERM", "xterm")
        .stdout(Stdio::null())
        .stderr(Stdio::from(slave))
        .spawn()?;
    // The command holds the other end; once closed here, reading ends with the child.
    drop(command);
    let mut terminal = File::from(master);
    let mut screen = vt100::Parser::new(SIZE.ws_row.try_into()?, SIZE.ws_col.try_into()?, 0);
    let mut is_shown = false;
    let mut bytes = [0; 4096];
    // An error means that the child has closed its end.
    while let Ok(count @ 1..) = terminal.read(&mut bytes) {
        screen.process(&bytes[..count]);
        if !is_shown && enough(&drawn(&screen)) {
            kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM)?;
            is_shown = true;
        }
    }
    Ok((child.wait()?, drawn(&screen)))
}

/// Returns the lines on a terminal without trailing blanks.
fn drawn(screen: &vt100::Parser) -> Vec<String> {
    screen
        .screen()
        .contents()
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect()
}

/// The bar fills and counts failing and silent agents; log lines stay apart from it.
#[test]
fn terminal_shows_a_bar() -> Result<()> {
    let mut lab = Lab::new(3)?;
    let _agent = lab.agent("a0", &[])?;
    let good = lab.blobstore.clone();
    lab.blobstore = ["--blobstore", "file:///nowhere"]
        .map(str::to_owned)
        .to_vec();
    let failing = lab.agent("a1", &[])?;
    lab.blobstore = good;
    let warned =
        |line: &String| line.contains("WARN") && line.contains("the agent could not install");
    let one_fails = |lines: &[String]| {
        lines.iter().any(warned)
            && lines
                .last()
                .is_some_and(|line| line.ends_with(" 1 failing, 1 silent"))
    };
    let publisher = lab.publisher(&["--timeout", "60"])?;
    let (status, lines) = on_terminal(publisher, one_fails)?;
    assert_eq!(status.code(), Some(1), "{lines:?}");
    let (bars, log): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.contains('█'));
    assert!(
        bars.len() == 1 && bars[0].contains("░ 1/3 agents, "),
        "{lines:?}"
    );
    assert!(log.iter().any(|line| warned(line)), "{lines:?}");
    assert!(
        log.iter()
            .all(|line| !line.contains("agents,") && !line.contains('░')),
        "{lines:?}"
    );

    drop(failing);
    let _others = [lab.agent("a1", &[])?, lab.agent("a2", &[])?];
    let (status, lines) = on_terminal(lab.publisher(&["--timeout", "60"])?, |_| false)?;
    assert!(status.success(), "{lines:?}");
    let full = format!("{} 3/3 agents, ", "█".repeat(40));
    let last = lines.last().context("nothing")?;
    assert!(
        last.starts_with(&full) && last.ends_with(" 0 failing, 0 silent"),
        "{lines:?}"
    );
    Ok(())
}

/// Without a terminal there is no bar: log lines on standard error, the count on standard
/// output.
#[test]
fn pipe_shows_no_bar() -> Result<()> {
    let lab = Lab::new(1)?;
    let _agent = lab.agent("a0", &[])?;
    let published = lab.publish(&[])?;
    let (said, log) = (
        String::from_utf8(published.stdout)?,
        String::from_utf8(published.stderr)?,
    );
    assert_eq!(
        said,
        "1 of 1 agents have this version, 0 failing, 0 silent\n"
    );
    assert!(
        !log.is_empty() && log.lines().all(|line| line.contains(" INFO ")),
        "{log}"
    );
    assert!(!log.contains(['\x1b', '\r', '█', '░']), "{log}");
    Ok(())
}

/// Returns the exposition; empty before the server listens.
fn exposition(address: SocketAddr) -> String {
    capture(Command::new("curl").args(["-sS", &format!("http://{address}/metrics")]))
        .unwrap_or_default()
}

/// Waits until the exposition equals this text: families, help, types, series and values.
fn wait_for_exposition(address: SocketAddr, golden: &str) -> Result<()> {
    let mut last = String::new();
    let waited = wait_until("these metrics", TIMEOUT, || {
        last = exposition(address);
        is_served(golden, &last)
    });
    waited.with_context(|| format!("golden:\n{golden}\nserved:\n{last}"))
}

/// Returns whether an exposition matches the golden one.
fn is_served(golden: &str, served: &str) -> bool {
    golden.lines().count() == served.lines().count()
        && golden.lines().zip(served.lines()).all(|(golden, served)| {
            match golden.strip_suffix('*') {
                None => golden == served,
                Some(series) => {
                    let number = served
                        .strip_prefix(series)
                        .and_then(|number| number.parse::<u64>().ok());
                    number.is_some_and(|number| number > 0)
                }
            }
        })
}

/// One agent has the version, one reports an error, one is missing.
#[test]
fn publisher_metrics_are_golden() -> Result<()> {
    let mut lab = Lab::new(3)?;
    let address = free_address();
    let _publisher = lab.watch(&["--metrics", &address.to_string()])?;
    let _good = lab.agent("a0", &[])?;
    lab.blobstore = ["--blobstore", "file:///nowhere"]
        .map(str::to_owned)
        .to_vec();
    let _failing = lab.agent("a1", &[])?;
    lab.wait_for("a0", 1)?;
    let golden = OF_PUBLISHER.replace("BLOB", &lab.dataset(1)?.len().to_string());
    wait_for_exposition(address, &golden)?;

    // An invalid inventory is reported.
    std::fs::write(lab.path("inventory.json"), "{")?;
    let bad = golden.replace(
        "\nbosh_dns_sync_inventory_good 1",
        "\nbosh_dns_sync_inventory_good 0",
    );
    wait_for_exposition(address, &bad)
}

/// Versions by blob and by patch, an inapplicable patch, a lower version, a rejected version: the test calls
/// an agent like a director.
#[test]
fn agent_metrics_are_golden() -> Result<()> {
    let lab = Lab::new(1)?;
    let mut director = Speaker::new(&lab, "director", "director.>")?;
    let address = free_address();
    let _agent = lab.agent("a0", &["--metrics", &address.to_string()])?;
    // The agent subscribes before it reports its start.
    director.hear()?;
    let version = |number: u64| {
        let keys = r#""record_keys":["id"],"record_infos":[],"aliases":{}"#;
        format!(r#"{{"records":[],"version":{number},{keys}}}"#)
    };
    let fits = STANDARD.encode(digest::make_patch(
        version(2).as_bytes(),
        version(3).as_bytes(),
    )?);
    let mut call = |number: u64, blob: &str, extra: Value| -> Result<String> {
        std::fs::write(lab.path("blobs").join("blob"), blob)?;
        let digest = digest::sha256(version(number).as_bytes());
        let call = json!({"protocol": 3, "method": "sync_dns",
            "arguments": ["blob", digest, number, extra], "reply_to": "director.by-hand.a0.r"});
        director.say("agent.a0", &call.to_string())?;
        Ok(String::from_utf8(director.hear_reply()?.payload.to_vec())?)
    };
    let synced = r#"{"value":"synced"}"#;
    let patched = |from: u64, zstd: &str| json!({"patch": {"from": from, "zstd": zstd}});
    assert_eq!(call(1, &version(1), json!({}))?, synced);
    assert_eq!(call(2, &version(2), patched(1, "AAAA"))?, synced);
    assert_eq!(call(3, "", patched(2, &fits))?, synced);
    assert_eq!(call(2, "", json!({}))?, synced);
    let refused = call(4, "another", json!({}))?;
    ensure!(
        refused.contains("checking the blob: the digest"),
        "{refused}"
    );
    wait_for_exposition(address, OF_AGENT)
}
