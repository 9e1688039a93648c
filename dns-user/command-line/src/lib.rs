//! The common parts of all programs' command lines: manual pages and completions, generated from their definitions;
//! standard output; tables; errors. Libraries do without it, and without clap.

pub mod table;

use std::{
    ffi::OsString,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use clap_complete::Shell;

use dns_core::terminal;
use dns_kit::logs::print_error;

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
    /// Returns the folder for the pages, if one is given.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Prints the main page, or writes a page for each command.
    pub fn run(self, command: clap::Command) -> anyhow::Result<()> {
        let command = without_commit(command);
        match self.folder {
            Some(folder) => clap_mangen::generate_to(command, &folder)
                .with_context(|| folder.display().to_string()),
            None => {
                let mut page = Vec::new();
                clap_mangen::Man::new(command).render(&mut page)?;
                Ok(print(&page)?)
            }
        }
    }
}

/// Shortens the version to its number: the footer of a manual page has no room for a commit of 40
/// digits.
pub fn without_commit(command: clap::Command) -> clap::Command {
    let version = command
        .get_version()
        .and_then(|version| version.split_whitespace().next())
        .map(str::to_owned);
    match version {
        // clap takes texts that live for ever; a command line is built once.
        Some(version) => command.version(&*version.leak()),
        None => command,
    }
}

impl Completions {
    /// Prints the completions of a command line.
    pub fn run(self, command: clap::Command) -> anyhow::Result<()> {
        Ok(print(self.text(command).as_bytes())?)
    }

    /// Returns the completions of a command line.
    pub fn text(self, mut command: clap::Command) -> String {
        let name = command.get_name().to_owned();
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut command, &name, &mut text);
        let text = String::from_utf8_lossy(&text).into_owned();
        match self.shell {
            // clap_complete 4.6 spells a program's name with hyphens in two ways, so no state after the first
            // word has any completions.
            Shell::Bash => {
                let wrong = format!("{}__subcmd__", name.replace('-', "__subcmd__"));
                let right = format!("{}__subcmd__", name.replace('-', "__"));
                text.replace(&wrong, &right)
            }
            _ => text,
        }
    }
}

/// Writes to standard output; a closed pipe is not an error.
pub fn print(bytes: &[u8]) -> io::Result<()> {
    match io::stdout()
        .write_all(bytes)
        .and_then(|()| io::stdout().flush())
    {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Prints as [`print()`] does; returns the exit code of a failure with its message on standard error.
pub fn print_or_fail(program: &str, text: &str) -> Result<(), ExitCode> {
    let context = "cannot write to standard output";
    print(text.as_bytes())
        .map_err(|error| failed(program, &anyhow::Error::new(error).context(context)))
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
    if error.use_stderr()
        && arguments
            .into_iter()
            .any(|argument: OsString| argument.to_string_lossy().contains(terminal::is_active))
    {
        eprint!("{}", terminal::lines(&error.render().to_string()));
    } else {
        // If this cannot be printed, nothing else can be done.
        let _ = error.print();
    }
}

/// Prints the error that ends a program ([`print_error`]), and returns its exit code.
pub fn failed(program: &str, error: &anyhow::Error) -> ExitCode {
    print_error(program, &format!("{error:#}"));
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bash_completes_every_word() -> anyhow::Result<()> {
        let look = clap::Command::new("look-up").arg(clap::arg!(--"all-names" "List all"));
        let command =
            clap::Command::new("a-b-tool").subcommand(look.subcommand(clap::Command::new("deep")));
        let script = Completions { shell: Shell::Bash }.text(command);
        for (words, expected) in [
            (&["a-b-tool", "lo"][..], "look-up"),
            (&["a-b-tool", "look-up", "--al"], "--all-names"),
            (&["a-b-tool", "look-up", "de"], "deep"),
            (&["a-b-tool", "look-up", "deep", "--he"], "--help"),
        ] {
            let [.., before, last] = words else {
                anyhow::bail!("two words are needed")
            };
            let call = format!(
                "{script}\nCOMP_WORDS=({}); COMP_CWORD={}; _a__b__tool a-b-tool '{last}' '{before}'\n\
                 echo \"${{COMPREPLY[@]}}\"",
                words.join(" "),
                words.len() - 1
            );
            let output = std::process::Command::new("bash")
                .args(["-c", &call])
                .output()?;
            assert_eq!(
                String::from_utf8(output.stdout)?.trim(),
                expected,
                "{words:?}"
            );
        }
        Ok(())
    }

    #[test]
    fn pages_cover_all_commands() -> anyhow::Result<()> {
        let command =
            || clap::Command::new("tool").subcommand(clap::Command::new("look").about("Look"));
        let folder = tempfile::tempdir()?;
        Man {
            folder: Some(folder.path().to_owned()),
        }
        .run(command())?;
        for page in ["tool.1", "tool-look.1"] {
            assert!(folder.path().join(page).exists(), "{page}");
        }
        let missing = folder.path().join("missing");
        let error = Man {
            folder: Some(missing.clone()),
        }
        .run(command())
        .expect_err("no such folder");
        assert!(
            format!("{error:#}").starts_with(&missing.display().to_string()),
            "{error:#}"
        );
        Ok(())
    }
}
