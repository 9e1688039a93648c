//! `top` and `status` on a pseudo-terminal.

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::UdpSocket,
    process::Stdio,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Result, ensure};
use nix::pty::{OpenptyResult, Winsize, openpty};
use parking_lot::Mutex;
use serde_json::json;
use whole_system_tests::{
    process::{Kept, wait_until},
    requires, server,
};

use super::running::Running;

/// Columns and rows of a large terminal.
const LARGE: (usize, usize) = (140, 40);

/// Columns and rows of the smallest terminal that is supported.
const SMALL: (usize, usize) = (80, 24);

/// Time limit, reached only on failure.
const PATIENCE: Duration = Duration::from_secs(60);

/// A command of ours on a pseudo-terminal.
struct Terminal {
    command: Kept,
    keyboard: File,
    /// Columns and rows.
    size: (usize, usize),
    /// All bytes that the command wrote.
    written: Arc<Mutex<Vec<u8>>>,
    /// Ends once all output has been read.
    reader: JoinHandle<()>,
}

impl Terminal {
    /// Starts a command beside the server, with these environment variables.
    fn start(
        running: &Running,
        size: (usize, usize),
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Self> {
        let (columns, rows) = size;
        let window = Winsize { ws_row: rows as u16, ws_col: columns as u16, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } = openpty(Some(&window), None)?;
        let mut command = running.namespace.command(server::program()?)?;
        command
            .args(arguments)
            .args(["--config", "config.json"])
            .env_remove("NO_COLOR")
            .env("TERM", "xterm-256color")
            .envs(environment.iter().copied())
            .current_dir(running.folder())
            .stdin(Stdio::from(slave.try_clone()?))
            .stdout(Stdio::from(slave.try_clone()?))
            .stderr(Stdio::from(slave));
        let child = Kept::spawn(&mut command)?;
        // The command holds the slave end; once dropped, reading ends when the program exits.
        drop(command);
        let keyboard = File::from(master.try_clone()?);
        let written = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&written);
        let reader = thread::spawn(move || {
            let mut terminal = File::from(master);
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = terminal.read(&mut bytes) {
                seen.lock().extend_from_slice(&bytes[..count]);
            }
        });
        Ok(Self { command: child, keyboard, size, written, reader })
    }

    /// Returns the screen.
    fn drawn(&self) -> Vec<String> {
        drawn(&self.written.lock(), self.size)
    }

    /// Returns whether a line of the screen contains `text`.
    fn shows(&self, text: &str) -> bool {
        self.drawn().iter().any(|line| line.contains(text))
    }

    /// Waits for the end of the command; returns its exit code and its output.
    fn finish(mut self) -> Result<(Option<i32>, String)> {
        let status = self.command.wait(PATIENCE)?;
        self.reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((status.code(), String::from_utf8(self.written.lock().clone())?))
    }
}

#[test]
fn top_draws_hot_names() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("top", &json!({}))?;
    let mut top = Terminal::start(&running, LARGE, &["top", "--seconds", "1"], &[])?;
    let begun = wait_until("the screen", PATIENCE, || top.shows("hottest names"));
    ensure!(begun.is_ok(), "{}", top.drawn().join("\n"));
    wait_until("a hot name", PATIENCE, || {
        running.ask("q-s0.q-g1.bosh.", 5).is_ok() && top.shows("q-s0.q-g1.bosh.")
    })?;
    for text in
        ["replies a second", "busiest clients", "passed on by reason", "127.0.0.1", "records version 7"]
    {
        ensure!(top.shows(text), "{text}");
    }
    top.keyboard.write_all(b"q")?;
    let (code, output) = top.finish()?;
    ensure!(code == Some(0), "{code:?}");
    // The terminal is restored: back from the alternate screen.
    ensure!(output.contains("\x1b[?1049l"), "{output:?}");
    Ok(())
}

#[test]
fn top_columns_fit_small_terminal() -> Result<()> {
    requires!(namespaces, bpf);
    let running = Running::start(
        "small",
        &json!({
            "xdp": {"mode": "generic", "interfaces": ["lo"]},
            "disable_recursors": false, "recursors": ["127.0.0.10:53"], "recursor_timeout": "100ms",
        }),
    )?;
    let namespace = &running.namespace;
    let silent = namespace.run(|| UdpSocket::bind("127.0.0.10:53"))??;
    let mut top = Terminal::start(&running, SMALL, &["top", "--seconds", "1"], &[])?;
    running.ask("www.example.org.", 1)?;
    drop(silent);
    let lines = [
        // The last column of each table, complete.
        "q-s0.q-g1.bosh.",
        " 127.0.0.1 ",
        " 127.0.0.10:53 ",
        "/25 ",
        "/S             FAST    TYPE  NAME",
        "/S              CLIENT",
        "LATENCY   FAILED",
        "passed on by reason",
        "lo ",
        "4 instances, 1 aliases",
        ", lease ",
        "q: quit",
    ];
    let waited = wait_until("every column", PATIENCE, || {
        running.ask("q-s0.q-g1.bosh.", 5).is_ok() && lines.iter().all(|line| top.shows(line))
    });
    let missing: Vec<&str> = lines.into_iter().filter(|line| !top.shows(line)).collect();
    ensure!(waited.is_ok(), "{missing:?} in\n{}", top.drawn().join("\n"));
    top.keyboard.write_all(b"q")?;
    ensure!(top.finish()?.0 == Some(0));
    Ok(())
}

#[test]
fn status_is_coloured_on_terminals() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("colour", &json!({}))?;
    let status =
        |environment: &[(&str, &str)]| Terminal::start(&running, LARGE, &["status"], environment)?.finish();
    let (code, text) = status(&[])?;
    ensure!(code == Some(0) && text.starts_with("\x1b[32mbosh-dns-xdp "), "{code:?}: {text:?}");
    ensure!(!text.contains("\x1b[31m"), "{text:?}");

    fs::write(running.folder().join("aliases/wrong.json"), "{")?;
    ensure!(running.cli(&["reload"])?.0 == 1);
    let (code, text) = status(&[])?;
    ensure!(code == Some(1) && text.starts_with("\x1b[31mbosh-dns-xdp "), "{code:?}: {text:?}");
    let failed = text.lines().filter(|line| line.starts_with("\x1b[31m  FAIL  aliases"));
    ensure!(failed.count() == 1, "{text:?}");

    for plain in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let (code, text) = status(&[plain])?;
        ensure!(code == Some(1) && text.contains("  FAIL  aliases"), "{plain:?}: {text:?}");
        ensure!(!text.contains('\x1b'), "{plain:?}: {text:?}");
    }
    // An empty NO_COLOR counts as unset (no-color.org), and a pipe is no terminal.
    ensure!(status(&[("NO_COLOR", "")])?.1.contains("\x1b[31m"));
    ensure!(!running.cli(&["status"])?.1.contains('\x1b'));
    Ok(())
}

/// Renders the screen from cursor movements; colours are ignored.
fn drawn(bytes: &[u8], (columns, rows): (usize, usize)) -> Vec<String> {
    let mut screen = vec![vec![' '; columns]; rows];
    let (mut row, mut column) = (0, 0);
    let text = String::from_utf8_lossy(bytes);
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character != '\x1b' {
            if let Some(cell) = screen.get_mut(row).and_then(|line| line.get_mut(column)) {
                *cell = character;
            }
            column += 1;
            continue;
        }
        // Only sequences of the form ESC [ digits letter are sent.
        let mut sequence = String::new();
        characters.next();
        for character in characters.by_ref() {
            sequence.push(character);
            if character.is_ascii_alphabetic() {
                break;
            }
        }
        if let Some(place) = sequence.strip_suffix('H') {
            let mut numbers = place.split(';').map(|number| number.parse().unwrap_or(1_usize));
            (row, column) = (numbers.next().unwrap_or(1) - 1, numbers.next().unwrap_or(1) - 1);
        }
    }
    screen.into_iter().map(|line| line.into_iter().collect()).collect()
}
