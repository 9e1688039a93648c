//! The demo's output, as a newcomer sees it.

use std::{
    fs::File,
    io::Read as _,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::pty::{OpenptyResult, openpty};
use whole_system_tests::{process::Kept, requires};

/// Runs the demo briefly on a pseudo-terminal; returns its output.
fn demo() -> Result<String> {
    let OpenptyResult { master, slave } = openpty(None, None)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
    command
        .args(["--instances", "50", "--seconds", "1"])
        .env_remove("NO_COLOR")
        .stdin(Stdio::null())
        .stdout(slave.try_clone()?)
        .stderr(slave);
    let mut demo = Kept::spawn(&mut command)?;
    // The last slave end in this process, without which reading ends with the demo.
    drop(command);
    let (mut terminal, mut written, mut bytes) = (File::from(master), Vec::new(), [0; 4096]);
    // A terminal without processes fails with EIO.
    while let Ok(count @ 1..) = terminal.read(&mut bytes) {
        written.extend_from_slice(&bytes[..count]);
    }
    let text = String::from_utf8(written)?.replace("\r\n", "\n");
    let status = demo.wait(Duration::from_secs(60))?;
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
    ensure!(text.contains("answered by userspace\n"), "a name outside BOSH");
    ensure!(text.contains("first new answer after "));
    // One figure stands out, and counts are integers.
    let mut leading = text.lines().filter_map(|line| line.strip_prefix("\x1b[1;32m"));
    let figure = leading.next().context("a figure")?;
    ensure!(leading.next().is_none());
    let rate = figure.strip_prefix("One core answers ").and_then(|rest| rest.split(' ').next());
    let rate = rate.context("a rate")?;
    ensure!(rate.bytes().all(|byte| byte.is_ascii_digit() || byte == b','), "{rate}");
    ensure!(figure.contains(" times as many as in userspace."), "{figure}");
    let (_, next) = text.split_once("\x1b[1m== Next\x1b[0m\n").context("the next step")?;
    ensure!(next.contains("target/release/bosh-dns-xdp try --records records.json"), "{next}");
    Ok(())
}
