//! The commands `completions` and `man`, which need no server.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

use super::Problem;
use crate::cli::manual;

#[derive(Debug, Args)]
pub(in crate::cli) struct Completions {
    /// Shell to print completions for
    shell: Shell,
}

impl Completions {
    /// Prints the completions for the given shell.
    pub(super) fn run(self, mut command: clap::Command) -> Result<(), Problem> {
        let name = command.get_name().to_owned();
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut command, name, &mut text);
        super::print(&String::from_utf8_lossy(&text))
    }
}

#[derive(Debug, Args)]
pub(in crate::cli) struct Man {
    /// Write a page for each command into this folder, instead of the main page to standard output
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

impl Man {
    /// Prints the main page, or writes all pages.
    pub(super) fn run(self, command: clap::Command) -> Result<(), Problem> {
        let page = manual::write(command, self.folder.as_deref()).map_err(|error| {
            let folder = self.folder.as_ref().map(|folder| format!("{}: ", folder.display()));
            Problem::BadAnswer(format!("{}{error}", folder.unwrap_or_default()))
        })?;
        super::print(&String::from_utf8_lossy(&page))
    }
}
