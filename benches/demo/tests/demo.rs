//! The demo's output, as a newcomer sees it.

use std::{process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use whole_system_tests::{requires, terminal::Terminal};

/// Runs the demo briefly on a pseudo-terminal; returns its output.
fn demo() -> Result<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
    command
        .args(["--instances", "50", "--seconds", "1"])
        .env_remove("NO_COLOR");
    let (status, text) = Terminal::start(command, (120, 40))?.finish(Duration::from_secs(300))?;
    let text = text.replace("\r\n", "\n");
    ensure!(status.success(), "{status}\n{text}");
    Ok(text)
}

#[test]
fn demo_highlights_single_figure() -> Result<()> {
    requires!(namespaces, bpf);
    let text = demo()?;
    println!("{text}");
    ensure!(text.contains("\x1b[1m== Look-ups with dig: which path answers?\x1b[0m\n"));
    ensure!(text.contains("answered by \x1b[32mthe interface (BPF)\x1b[0m\n"));
    ensure!(
        text.contains("answered by userspace\n"),
        "a name outside BOSH"
    );
    ensure!(text.contains("first new answer after "));
    // Latency of one path at a time would compare two moments of the machine.
    ensure!(text.contains("medians of 5 rounds on both paths in turn"));
    // One figure stands out, and counts are integers.
    let mut leading = text
        .lines()
        .filter_map(|line| line.strip_prefix("\x1b[1;32m"));
    let figure = leading.next().context("a figure")?;
    ensure!(leading.next().is_none());
    let rate = figure
        .strip_prefix("One core answers ")
        .and_then(|rest| rest.split(' ').next());
    let rate = rate.context("a rate")?;
    ensure!(
        rate.bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b','),
        "{rate}"
    );
    ensure!(
        figure.contains(" times as many as in userspace."),
        "{figure}"
    );
    let (_, next) = text
        .split_once("\x1b[1m== Next\x1b[0m\n")
        .context("the next step")?;
    ensure!(
        next.contains("target/release/bosh-dns-xdp try --records records.json"),
        "{next}"
    );
    Ok(())
}
