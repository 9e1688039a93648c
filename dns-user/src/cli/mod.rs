//! The command line.

mod operate;

use std::{ffi::OsString, process::ExitCode};

use clap::{CommandFactory, Parser, Subcommand};

/// Exit code for a call that cannot be understood, as clap and the reference have it.
const USAGE: u8 = 2;

/// What is called.
#[derive(Debug, Parser)]
#[command(name = "bosh-dns-xdp", version, about = "DNS server for the VMs of a BOSH-managed fleet")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
enum Command {
    /// Those that talk to a running server, or need none.
    #[command(flatten)]
    Operate(operate::Operate),
}

/// Does what the arguments say; the first of them is the program's own name.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Nothing is left to do when not even this can be printed.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match cli.command {
        Command::Operate(operate) => operate.run(Cli::command()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_sound() {
        Cli::command().debug_assert();
    }
}
