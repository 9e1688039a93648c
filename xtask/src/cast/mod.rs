//! `cargo xtask cast`: a recorded terminal session, for the README.
//!
//! A shell on a pseudo-terminal, in namespaces of its own, is typed into as a person would:
//! `try`, `dig`, load by dnsperf, `top`. What comes out is kept as an asciicast (version 2:
//! `asciinema play docs/terminal/session.cast`), and two of its screens as pictures.

mod picture;
mod recording;
mod session;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use self::recording::Recording;
use crate::process::root;

/// What `cargo xtask cast` is told.
#[derive(Debug, clap::Args)]
pub(crate) struct Cast {
    /// Show this binary instead of building one.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Draw the pictures of the recording that is there.
    #[arg(long, conflicts_with = "binary")]
    pictures: bool,
}

/// The pictures, and the marks in the recording at which they are taken.
const PICTURES: [(&str, &str); 2] = [("dig.svg", MARK_DIG), ("top.svg", MARK_TOP)];

/// The mark in the recording after the answer to `dig`.
const MARK_DIG: &str = "dig";

/// The mark in the recording while `top` shows load.
const MARK_TOP: &str = "top";

impl Cast {
    /// Records, and draws.
    pub(crate) fn run(self) -> Result<()> {
        let Self { binary, pictures } = self;
        let folder = root().join("docs/terminal");
        let file = folder.join("session.cast");
        if !pictures {
            ensure!(nix::unistd::geteuid().is_root(), "namespaces and BPF programs need root");
            let program = match binary {
                Some(given) => given,
                None => {
                    crate::release(&[])?;
                    root().join("target/release/bosh-dns-xdp")
                }
            };
            let program = program.canonicalize().with_context(|| program.display().to_string())?;
            std::fs::create_dir_all(&folder)?;
            session::record(&program)?.write(&file)?;
        }
        let recording = Recording::read(&file)?;
        for (name, mark) in PICTURES {
            std::fs::write(folder.join(name), picture::draw(&recording.screen_at(mark)?))?;
            println!("{}", folder.join(name).display());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pictures_in_docs_are_of_the_recording() {
        let folder = root().join("docs/terminal");
        let recording = Recording::read(&folder.join("session.cast")).unwrap();
        for (name, mark) in PICTURES {
            let there = std::fs::read_to_string(folder.join(name)).unwrap();
            let drawn = picture::draw(&recording.screen_at(mark).unwrap());
            assert!(there == drawn, "{name} is another one: `cargo xtask cast --pictures`");
        }
    }
}
