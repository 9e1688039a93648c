//! An asciicast, version 2: a line of JSON about the terminal, then a line for each piece of output.

use std::{
    fs,
    path::Path,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Lines of the terminal.
pub(super) const ROWS: u16 = 34;

/// Columns of the terminal.
pub(super) const COLUMNS: u16 = 110;

pub(super) struct Recording {
    header: Value,
    /// Seconds since the start, kind (`o`: output, `m`: a mark), text.
    events: Vec<(f64, String, String)>,
    /// When it was begun.
    begun: Instant,
    /// Bytes of a character that is not whole yet.
    rest: Vec<u8>,
}

impl Recording {
    pub(super) fn begin(title: &str) -> Self {
        // A clock before 1970 is told as 1970.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let header = json!({
            "version": 2, "width": COLUMNS, "height": ROWS, "timestamp": now, "title": title,
            "idle_time_limit": 2, "env": {"TERM": "xterm-256color", "SHELL": "/bin/bash"},
        });
        Self { header, events: Vec::new(), begun: Instant::now(), rest: Vec::new() }
    }

    /// Adds output; half a character waits for its other half.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
        let whole = match std::str::from_utf8(&self.rest) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        let text = String::from_utf8_lossy(&self.rest[..whole]).into_owned();
        self.rest.drain(..whole);
        if !text.is_empty() {
            self.event("o", text);
        }
    }

    pub(super) fn mark(&mut self, name: &str) {
        self.event("m", name.to_owned());
    }

    /// Adds something that happens now.
    fn event(&mut self, kind: &str, text: String) {
        // Milliseconds are enough, and short.
        let seconds = (self.begun.elapsed().as_secs_f64() * 1000.0).round() / 1000.0;
        self.events.push((seconds, kind.to_owned(), text));
    }

    /// Writes it to a file.
    pub(super) fn write(&self, file: &Path) -> Result<()> {
        let lines = self.events.iter().map(|event| Ok(serde_json::to_string(event)? + "\n"));
        let text = lines.collect::<Result<String>>()?;
        fs::write(file, format!("{}\n{text}", self.header)).with_context(|| file.display().to_string())
    }

    pub(super) fn read(file: &Path) -> Result<Self> {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let mut lines = text.lines();
        let header: Value = serde_json::from_str(lines.next().context("an empty recording")?)?;
        ensure!(header["version"] == 2, "{}: no asciicast of version 2", file.display());
        let events: Vec<(f64, String, String)> =
            lines.map(|line| Ok(serde_json::from_str(line)?)).collect::<Result<_>>()?;
        ensure!(events.is_sorted_by(|one, next| one.0 <= next.0), "{}: time runs back", file.display());
        Ok(Self { header, events, begun: Instant::now(), rest: Vec::new() })
    }

    /// The terminal as it looks at a mark.
    pub(super) fn screen_at(&self, mark: &str) -> Result<vt100::Parser> {
        let mut screen = vt100::Parser::new(ROWS.try_into()?, COLUMNS.try_into()?, 0);
        for (_, kind, text) in &self.events {
            match kind.as_str() {
                "o" => screen.process(text.as_bytes()),
                "m" if text == mark => return Ok(screen),
                _ => {}
            }
        }
        anyhow::bail!("the recording has no mark {mark:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_characters_are_joined() {
        let mut recording = Recording::begin("a test");
        for bytes in [&b"a\xe2\x96"[..], &b"\x88b"[..]] {
            recording.add(bytes);
        }
        recording.mark("end");
        let texts: Vec<&str> = recording.events.iter().map(|(_, _, text)| text.as_str()).collect();
        assert_eq!(texts, ["a", "█b", "end"]);
        assert_eq!(recording.screen_at("end").unwrap().screen().contents().trim_end(), "a█b");
        assert!(recording.screen_at("another").is_err());
    }
}
