//! Everything a person runs: `cargo xtask <command>`.
//!
//! Each command sets up what it needs by itself, says what it installs, and does
//! no set-up work when everything is there.

use anyhow::Result;
use clap::{Parser, Subcommand};

mod fuzz;
mod kernel;
mod packages;
mod process;
mod test;
mod toolchain;

/// Build, demonstrate, test and measure bosh-dns-xdp.
#[derive(Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// The commands.
#[derive(Subcommand)]
enum Command {
    /// Build the BPF programs and the server, installing the BPF toolchain if it is missing.
    Build {
        /// Unoptimised, for development.
        #[arg(long)]
        debug: bool,
    },
    /// Run the real server on a generated foundation between two network namespaces and show what it does.
    Demo {
        /// Further arguments of the demo: `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run every check there is: format, lints, fuzz targets, unit tests, packet fixtures, whole-system tests.
    Test {
        /// Only tests whose name contains one of these; leaves out the checks that are not tests.
        filters: Vec<String>,
    },
    /// Run the fuzz targets from their corpora.
    Fuzz {
        /// Only targets whose name contains one of these.
        filters: Vec<String>,
        /// How long each runs.
        #[arg(long, default_value_t = 60)]
        seconds: u32,
    },
    /// Measure everything side by side and write the report.
    Bench {
        /// Further arguments of the bench: `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Build { debug } => {
            toolchain::ensure()?;
            if debug { process::cargo(["build", "--package", "dns-user"]) } else { release(&[]) }
        }
        Command::Demo { arguments } => {
            packages::ensure(packages::DEMO)?;
            toolchain::ensure()?;
            run_from_benches("demo", &arguments)
        }
        Command::Test { filters } => {
            packages::ensure(packages::TEST)?;
            toolchain::ensure()?;
            kernel::ensure()?;
            test::run(&filters)
        }
        Command::Fuzz { filters, seconds } => {
            toolchain::ensure()?;
            fuzz::run(&filters, seconds)
        }
        Command::Bench { arguments } => {
            packages::ensure(packages::BENCH)?;
            toolchain::ensure()?;
            run_from_benches("bench", &arguments)
        }
    }
}

/// Builds the server and runs a program of the `benches` package.
fn run_from_benches(program: &str, arguments: &[String]) -> Result<()> {
    release(&["--bin", program])?;
    let program = process::root().join("target/release").join(program);
    let mut command = std::process::Command::new(program);
    process::run(name_server(&mut command)?.args(arguments).current_dir(process::root()))
}

/// Tells a command to take the server as operators run it: the debug build, which
/// may be newer, is too slow to be timed.
fn name_server(command: &mut std::process::Command) -> Result<&mut std::process::Command> {
    let server = process::root().canonicalize()?.join("target/release/bosh-dns-xdp");
    Ok(command.env("BOSH_DNS_XDP", server))
}

/// Builds the server as operators run it, and what else is named.
///
/// The packages are the same for every command: which features a dependency is
/// built with depends on them, and other features mean building it again.
fn release(more: &[&str]) -> Result<()> {
    let packages = ["build", "--release", "--package", "dns-user", "--package", "bosh-dns-xdp-benches"];
    let server = ["--bin", "bosh-dns-xdp", "--bin", "bosh-dns-xdp-health"];
    process::cargo(packages.iter().chain(&server).chain(more))
}
