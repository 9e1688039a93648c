//! `top` and `status` on a pseudo-terminal.

use std::{
    fs::{self, File},
    io::{Read, Write},
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

/// Height of the terminal.
const ROWS: usize = 40;

/// Width of the terminal.
const COLUMNS: usize = 140;

/// Time limit, reached only on failure.
const PATIENCE: Duration = Duration::from_secs(60);

/// A command of ours on a pseudo-terminal.
struct Terminal {
    command: Kept,
    keyboard: File,
    /// All bytes that the command wrote.
    written: Arc<Mutex<Vec<u8>>>,
    /// Ends once all output has been read.
    reader: JoinHandle<()>,
}

impl Terminal {
    /// Starts a command beside the server, with these environment variables.
    fn start(running: &Running, arguments: &[&str], environment: &[(&str, &str)]) -> Result<Self> {
        let size = Winsize { ws_row: ROWS as u16, ws_col: COLUMNS as u16, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } = openpty(Some(&size), None)?;
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
        Ok(Self { command: child, keyboard, written, reader })
    }

    /// Returns whether a line of the screen contains `text`.
    fn shows(&self, text: &str) -> bool {
        drawn(&self.written.lock()).iter().any(|line| line.contains(text))
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
    let mut top = Terminal::start(&running, &["top", "--seconds", "1"], &[])?;
    let begun = wait_until("the screen", PATIENCE, || top.shows("hottest names"));
    ensure!(begun.is_ok(), "{}", drawn(&top.written.lock()).join("\n"));
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
fn status_is_coloured_on_terminals() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("colour", &json!({}))?;
    let status = |environment: &[(&str, &str)]| Terminal::start(&running, &["status"], environment)?.finish();
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
fn drawn(bytes: &[u8]) -> Vec<String> {
    let mut screen = vec![vec![' '; COLUMNS]; ROWS];
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
