//! Manual page and completions, generated from the command line's definition.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context;
use clap_complete::Shell;

/// `man`.
#[derive(Debug, clap::Args)]
pub(super) struct Man {
    /// Folder for a page per command; without it, the main page goes to standard output
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

/// `completions`.
#[derive(Debug, clap::Args)]
pub(super) struct Completions {
    /// The shell
    shell: Shell,
}

impl Man {
    pub(super) fn run(self, command: clap::Command) -> anyhow::Result<ExitCode> {
        match self.folder {
            Some(folder) => {
                clap_mangen::generate_to(command, &folder).with_context(|| folder.display().to_string())?;
            }
            None => {
                let mut page = Vec::new();
                clap_mangen::Man::new(command).render(&mut page)?;
                io::stdout().write_all(&page)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Completions {
    #[expect(clippy::unnecessary_wraps, reason = "the same shape as the other commands")]
    pub(super) fn run(self, mut command: clap::Command) -> anyhow::Result<ExitCode> {
        clap_complete::generate(self.shell, &mut command, "bosh-dns-identity", &mut io::stdout());
        Ok(ExitCode::SUCCESS)
    }
}
