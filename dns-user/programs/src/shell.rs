//! Manual pages and completions, generated from the definition of a command line; standard output
//! and errors.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context as _;
use clap_complete::Shell;

/// Arguments of the subcommand `man`.
#[derive(Debug, clap::Args)]
pub struct Man {
    /// Write a page for each command into this folder, instead of the main page to standard output
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

/// Arguments of the subcommand `completions`.
#[derive(Debug, clap::Args)]
pub struct Completions {
    /// Shell to print completions for
    shell: Shell,
}

impl Man {
    /// Prints the main page, or writes a page for each command.
    pub fn run(self, command: clap::Command) -> anyhow::Result<()> {
        match self.folder {
            Some(folder) => {
                clap_mangen::generate_to(command, &folder).with_context(|| folder.display().to_string())
            }
            None => {
                let mut page = Vec::new();
                clap_mangen::Man::new(command).render(&mut page)?;
                Ok(print(&page)?)
            }
        }
    }
}

impl Completions {
    /// Prints the completions of a command line.
    pub fn run(self, mut command: clap::Command) -> anyhow::Result<()> {
        let name = command.get_name().to_owned();
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut command, name, &mut text);
        Ok(print(&text)?)
    }
}

/// Writes to standard output; a closed pipe is not an error.
pub fn print(bytes: &[u8]) -> io::Result<()> {
    match io::stdout().write_all(bytes).and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Prints the error that ends a program, and returns its exit code. Other machines may have written
/// parts of the text, so control characters are escaped.
pub fn failed(program: &str, error: &anyhow::Error) -> ExitCode {
    eprintln!("{program}: {}", dns_core::terminal::lines(&format!("{error:#}")));
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_cover_all_commands() -> anyhow::Result<()> {
        let command = || clap::Command::new("tool").subcommand(clap::Command::new("look").about("Look"));
        let folder = tempfile::tempdir()?;
        Man { folder: Some(folder.path().to_owned()) }.run(command())?;
        for page in ["tool.1", "tool-look.1"] {
            assert!(folder.path().join(page).exists(), "{page}");
        }
        let missing = folder.path().join("missing");
        let error = Man { folder: Some(missing.clone()) }.run(command()).expect_err("no such folder");
        assert!(format!("{error:#}").starts_with(&missing.display().to_string()), "{error:#}");
        Ok(())
    }
}
