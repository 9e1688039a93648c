//! The migration tool `consul-aliases`: prints an alias file for a Consul catalog.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;

use super::{Problem, address::HealthFilter, exit_code, print_json};
use crate::daemon::aliases_of_consul;

/// Print an alias file that leads from Consul's names to instances of the records
#[derive(Debug, Parser)]
#[command(name = "consul-aliases", version = crate::ops::version::VERSION_AND_COMMIT)]
struct ConsulAliases {
    /// config.json: its object "consul" says where the catalog is, its records_file where the records are
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Instances to include, by health
    #[arg(long, value_enum, default_value_t = HealthFilter::Smart)]
    status: HealthFilter,
    /// Time limit for loading the catalog of a live Consul
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    seconds: u64,
}

impl ConsulAliases {
    /// Prints the alias file to standard output, remarks for the operator to standard error.
    fn run(self) -> Result<(), Problem> {
        let Self { config, status, seconds } = self;
        let made = aliases_of_consul(&config, status.into(), Duration::from_secs(seconds))
            .map_err(|problem| Problem::BadAnswer(problem.to_string()))?;
        for note in &made.notes {
            crate::cli::complain(&note);
        }
        // Serialization cannot fail: the value is a map of strings.
        print_json(&(serde_json::to_string_pretty(&made.targets).unwrap_or_default() + "\n"))
    }
}

/// Runs the tool with the arguments of the process.
pub(in crate::cli) fn main() -> ExitCode {
    exit_code(dns_kit::command_line::parse::<ConsulAliases>().run())
}
