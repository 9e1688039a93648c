//! `top` and `status` on a pseudo-terminal.

use std::{fs, net::UdpSocket, time::Duration};

use anyhow::{Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use whole_system_tests::{process::wait_until, requires, server, terminal::Terminal};

use super::running::Running;

/// Columns and rows of a large terminal.
const LARGE: (usize, usize) = (140, 40);

/// Columns and rows of the smallest terminal that is supported.
const SMALL: (usize, usize) = (80, 24);

/// Time limit, reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Starts a command beside the server on a terminal, with these environment variables.
fn start(
    running: &Running,
    size: (usize, usize),
    arguments: &[&str],
    environment: &[(&str, &str)],
) -> Result<Terminal> {
    let mut command = running.namespace.command(server::program()?)?;
    command
        .args(arguments)
        .args(["--config", "config.json"])
        .env_remove("NO_COLOR")
        .env("TERM", "xterm-256color")
        .envs(environment.iter().copied())
        .current_dir(running.folder());
    Terminal::start(command, size)
}

#[test]
fn top_draws_hot_names() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("top", &json!({}))?;
    let mut top = start(&running, LARGE, &["top", "--seconds", "1"], &[])?;
    let begun = wait_until("the screen", TIMEOUT, || top.shows("hottest names"));
    ensure!(begun.is_ok(), "{}", top.lines().join("\n"));
    wait_until("a hot name", TIMEOUT, || {
        running.ask("q-s0.q-g1.bosh.", 5).is_ok() && top.shows("q-s0.q-g1.bosh.")
    })?;
    for text in [
        "replies a second",
        "busiest clients",
        "passed on by reason",
        "127.0.0.1",
        "records version 7",
    ] {
        wait_until(text, TIMEOUT, || top.shows(text))?;
    }
    top.press('q')?;
    let (status, output) = top.finish(TIMEOUT)?;
    ensure!(status.success(), "{status}");
    // The terminal is restored: back from the alternate screen.
    ensure!(output.contains("\x1b[?1049l"), "{output:?}");
    Ok(())
}

#[test]
fn top_ends_while_server_hangs() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("top-hung", &json!({}))?;
    let mut top = start(&running, LARGE, &["top", "--seconds", "1"], &[])?;
    wait_until("the screen", TIMEOUT, || top.shows("hottest names"))?;
    let pid = Pid::from_raw(running.server.pid().cast_signed());
    kill(pid, Signal::SIGSTOP)?;
    // Its next request waits by then; if not, the key ends it as well.
    std::thread::sleep(Duration::from_secs(3));
    top.press('q')?;
    let ended = top.finish(TIMEOUT);
    kill(pid, Signal::SIGCONT)?;
    let (status, output) = ended?;
    ensure!(status.success(), "{status}: {output}");
    Ok(())
}

#[test]
fn top_columns_fit_small_terminal() -> Result<()> {
    requires!(namespaces, bpf);
    let running = Running::start(
        "small",
        &json!({
            "xdp": {"mode": "tc", "interfaces": ["lo"]},
            "disable_recursors": false, "recursors": ["127.0.0.10:53"], "recursor_timeout": "100ms",
        }),
    )?;
    let namespace = &running.namespace;
    let silent = namespace.run(|| UdpSocket::bind("127.0.0.10:53"))??;
    let mut top = start(&running, SMALL, &["top", "--seconds", "1"], &[])?;
    running.ask("www.example.org.", 1)?;
    drop(silent);
    let names = [
        "q-s0.q-g1.bosh.",
        "q-s0.q-g2.bosh.",
        "web.alias.",
        "q-s4.q-g1.bosh.",
        "q-s4.q-g2.bosh.",
    ];
    let lines = [
        names[1],
        names[2],
        names[3],
        names[4],
        // The last column of each table, complete.
        "q-s0.q-g1.bosh.",
        " 127.0.0.1 ",
        " 127.0.0.10:53 ",
        "/S      FAST  TYPE  NAME",
        "/S      CLIENT",
        "LATENCY   FAILED",
        "passed on by reason",
        "lo ",
        "4 instances, 1 aliases",
        ", lease ",
        "q: quit",
    ];
    let waited = wait_until("every column", TIMEOUT, || {
        names.iter().all(|name| running.ask(name, 5).is_ok())
            && lines.iter().all(|line| top.shows(line))
    });
    let missing: Vec<&str> = lines.into_iter().filter(|line| !top.shows(line)).collect();
    ensure!(waited.is_ok(), "{missing:?} in\n{}", top.lines().join("\n"));
    top.press('q')?;
    ensure!(top.finish(TIMEOUT)?.0.success());
    Ok(())
}

#[test]
fn status_is_coloured_on_terminals() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("colour", &json!({}))?;
    let status = |environment: &[(&str, &str)]| -> Result<(Option<i32>, String)> {
        let (status, output) = start(&running, LARGE, &["status"], environment)?.finish(TIMEOUT)?;
        Ok((status.code(), output))
    };
    let (code, text) = status(&[])?;
    ensure!(
        code == Some(0) && text.starts_with("\x1b[32mbosh-dns-xdp "),
        "{code:?}: {text:?}"
    );
    ensure!(!text.contains("\x1b[31m"), "{text:?}");

    fs::write(running.folder().join("aliases/wrong.json"), "{")?;
    ensure!(running.cli(&["reload"])?.0 == 1);
    let (code, text) = status(&[])?;
    ensure!(
        code == Some(1) && text.starts_with("\x1b[31mbosh-dns-xdp "),
        "{code:?}: {text:?}"
    );
    let failed = text
        .lines()
        .filter(|line| line.starts_with("\x1b[31m  FAIL  aliases"));
    ensure!(failed.count() == 1, "{text:?}");

    for plain in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let (code, text) = status(&[plain])?;
        ensure!(
            code == Some(1) && text.contains("  FAIL  aliases"),
            "{plain:?}: {text:?}"
        );
        ensure!(!text.contains('\x1b'), "{plain:?}: {text:?}");
    }
    // An empty NO_COLOR counts as unset (no-color.org), and a pipe is no terminal.
    ensure!(status(&[("NO_COLOR", "")])?.1.contains("\x1b[31m"));
    ensure!(!running.cli(&["status"])?.1.contains('\x1b'));
    Ok(())
}
