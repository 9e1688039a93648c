//! `top` on a pseudo-terminal.

use std::{
    fs::File,
    io::{Read, Write},
    process::Stdio,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::Result;
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

#[test]
fn top_draws_hot_names() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("top", &json!({}))?;
    let size = Winsize { ws_row: ROWS as u16, ws_col: COLUMNS as u16, ws_xpixel: 0, ws_ypixel: 0 };
    let OpenptyResult { master, slave } = openpty(Some(&size), None)?;
    let mut command = running.namespace.command(server::program()?)?;
    command
        .args(["top", "--seconds", "1", "--config", "config.json"])
        .env("TERM", "xterm-256color")
        .current_dir(running.folder())
        .stdin(Stdio::from(slave.try_clone()?))
        .stdout(Stdio::from(slave.try_clone()?))
        .stderr(Stdio::from(slave));
    let mut top = Kept::spawn(&mut command)?;
    // The command holds the slave end; once dropped, reading ends when `top` exits.
    drop(command);
    let mut keyboard = File::from(master.try_clone()?);
    let screen = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&screen);
    thread::spawn(move || {
        let mut terminal = File::from(master);
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = terminal.read(&mut bytes) {
            seen.lock().extend_from_slice(&bytes[..count]);
        }
    });
    let shows = |text: &str| drawn(&screen.lock()).iter().any(|line| line.contains(text));
    let begun = wait_until("the screen", Duration::from_secs(60), || shows("hottest names"));
    assert!(begun.is_ok(), "{}", drawn(&screen.lock()).join("\n"));
    wait_until("a hot name", Duration::from_secs(30), || {
        running.ask("q-s0.q-g1.bosh.", 5).is_ok() && shows("q-s0.q-g1.bosh.")
    })?;
    for text in
        ["replies a second", "busiest clients", "passed on by reason", "127.0.0.1", "records version 7"]
    {
        assert!(shows(text), "{text}");
    }
    keyboard.write_all(b"q")?;
    let status = top.wait(Duration::from_secs(10))?;
    assert!(status.success(), "{status}");
    // The terminal is restored: back from the alternate screen.
    wait_until("the old screen", Duration::from_secs(5), || {
        let screen = screen.lock();
        screen.windows(8).any(|window| window == b"\x1b[?1049l")
    })
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
