//! Manual pages and completions, generated from the definition of a command line; standard output
//! and errors.

use std::{
    ffi::OsString,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context as _;
use clap_complete::Shell;
use dns_core::terminal;

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

/// Parses the arguments of this process. Prints help and errors, and exits after that.
pub fn parse<C: clap::Parser>() -> C {
    C::try_parse().unwrap_or_else(|error| {
        print_parse_error(&error, std::env::args_os());
        std::process::exit(error.exit_code())
    })
}

/// Prints help, or what is wrong with these arguments. The error may repeat one of them, so control
/// characters are escaped.
pub fn print_parse_error(error: &clap::Error, arguments: impl IntoIterator<Item = OsString>) {
    let is_active = |argument: OsString| argument.to_string_lossy().contains(terminal::is_active);
    if error.use_stderr() && arguments.into_iter().any(is_active) {
        eprint!("{}", terminal::lines(&error.render().to_string()));
    } else {
        // If this cannot be printed, nothing else can be done.
        let _ = error.print();
    }
}

/// Prints the error that ends a program, and returns its exit code. Other machines may have written
/// parts of the text, so control characters are escaped.
pub fn failed(program: &str, error: &anyhow::Error) -> ExitCode {
    eprintln!("{program}: {}", terminal::lines(&format!("{error:#}")));
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
