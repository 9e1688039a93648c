//! `health`: the health server, which runs as a separate process.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;

use dns_health::server;
use dns_kit::logs::LogFormat;

/// Which configuration, and how to log.
#[derive(Debug, Args)]
pub(super) struct HealthServer {
    /// The health server's own configuration file (health_server_config.json of bosh-dns)
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Format of log lines
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
}

impl HealthServer {
    /// Runs the health server until SIGTERM.
    pub(super) fn run(self) -> ExitCode {
        let Self { config, log_format } = self;
        server::run(&config, log_format)
    }
}
