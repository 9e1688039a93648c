//! Programs on a pseudo-terminal.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    process::{Command, ExitStatus, Stdio},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Result;
use nix::pty::{OpenptyResult, Winsize, openpty};
use parking_lot::Mutex;

use crate::process::Kept;

/// Default colour of text.
const PLAIN: &str = "#d8dce4";

/// A program on a pseudo-terminal.
pub struct Terminal {
    program: Kept,
    keyboard: File,
    /// Columns and rows.
    size: (usize, usize),
    /// All bytes that the program wrote.
    written: Arc<Mutex<Vec<u8>>>,
    /// Ends once all output has been read.
    reader: JoinHandle<()>,
}

/// A character on the screen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    pub character: char,
    /// As in SVG, such as `#d8dce4`.
    pub colour: &'static str,
    pub bold: bool,
}

impl Terminal {
    /// Starts a command on a terminal with this number of columns and rows.
    pub fn start(mut command: Command, size: (usize, usize)) -> Result<Self> {
        let window = Winsize {
            ws_row: size.1 as u16,
            ws_col: size.0 as u16,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let OpenptyResult { master, slave } = openpty(Some(&window), None)?;
        command
            .stdin(Stdio::from(slave.try_clone()?))
            .stdout(Stdio::from(slave.try_clone()?))
            .stderr(Stdio::from(slave));
        let program = Kept::spawn(&mut command)?;
        // The command holds the slave end; once dropped, reading ends (with EIO) when the program exits.
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
        Ok(Self {
            program,
            keyboard,
            size,
            written,
            reader,
        })
    }

    /// Returns the screen, row by row.
    pub fn screen(&self) -> Vec<Vec<Cell>> {
        screen(&self.written.lock(), self.size)
    }

    /// Returns the text of each row of the screen.
    pub fn lines(&self) -> Vec<String> {
        self.screen()
            .iter()
            .map(|row| row.iter().map(|cell| cell.character).collect())
            .collect()
    }

    /// Returns whether a row of the screen contains `text`.
    pub fn shows(&self, text: &str) -> bool {
        self.lines().iter().any(|line| line.contains(text))
    }

    pub fn press(&mut self, key: char) -> Result<()> {
        Ok(write!(self.keyboard, "{key}")?)
    }

    /// Waits for the end of the program; returns its exit status and its output.
    pub fn finish(mut self, limit: Duration) -> Result<(ExitStatus, String)> {
        let status = self.program.wait(limit)?;
        self.reader
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((status, String::from_utf8(self.written.lock().clone())?))
    }
}

/// Returns the screen after these bytes; interprets cursor positions, bold and the first colours.
fn screen(bytes: &[u8], (columns, rows): (usize, usize)) -> Vec<Vec<Cell>> {
    let blank = Cell {
        character: ' ',
        colour: PLAIN,
        bold: false,
    };
    let mut cells = vec![vec![blank; columns]; rows];
    let (mut row, mut column) = (0, 0);
    let mut style = blank;
    let text = String::from_utf8_lossy(bytes);
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character != '\x1b' {
            if let Some(cell) = cells
                .get_mut(row)
                .and_then(|line: &mut Vec<Cell>| line.get_mut(column))
            {
                *cell = Cell { character, ..style };
            }
            column += 1;
            continue;
        }
        // Only sequences of the form ESC [ digits letter are sent.
        characters.next();
        let mut sequence = String::new();
        for character in characters.by_ref() {
            sequence.push(character);
            if character.is_ascii_alphabetic() {
                break;
            }
        }
        if let Some(place) = sequence.strip_suffix('H') {
            let mut numbers = place
                .split(';')
                .map(|number| number.parse().unwrap_or(1_usize));
            (row, column) = (
                numbers.next().unwrap_or(1) - 1,
                numbers.next().unwrap_or(1) - 1,
            );
        } else if let Some(parameters) = sequence.strip_suffix('m') {
            let parameters = parameters.trim_start_matches("38;5;");
            for parameter in parameters.split(';') {
                match parameter {
                    "" | "0" => style = blank,
                    "1" if sequence != "38;5;1m" => style.bold = true,
                    "22" => style.bold = false,
                    "1" | "31" => style.colour = "#e06c75",
                    "2" | "32" => style.colour = "#98c379",
                    "3" | "33" => style.colour = "#e5c07b",
                    "39" => style.colour = PLAIN,
                    _ => {}
                }
            }
        }
    }
    cells
}
