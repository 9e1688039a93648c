//! `attach`: loads and attaches programs for a server that has no privileges.

use std::process::ExitCode;

use clap::Args;

use super::ConfigFile;
use crate::daemon::{self, RunOptions};
use dns_kit::logs::LogFormat;

#[derive(Debug, Args)]
pub(super) struct Attach {
    /// The server's configuration, whose `xdp.attach_socket` names the socket.
    #[command(flatten)]
    config: ConfigFile,
    /// Format of log lines
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
    /// Serve the server that started this process, at standard input
    #[arg(long, hide = true)]
    parent: bool,
}

impl Attach {
    /// Runs the attacher until it is killed.
    pub(super) fn run(self) -> ExitCode {
        let Self { config: ConfigFile { config }, log_format, parent } = self;
        daemon::attach(&config, RunOptions { log_format, ..RunOptions::default() }, parent)
    }
}
