//! `wait`: waits until a name resolves.

use std::{
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use dns_core::{config::values::parse_duration, name::Name};
use tokio::time::{self, Instant};

use super::complain;
use crate::daemon::upcheck::{self, NoAnswer};

/// Interval between two attempts.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time limit of one attempt through the machine's resolver, which may retry by itself.
const SYSTEM_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(super) struct Wait {
    /// Query the server at this address; by default, use this machine's resolver
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// The server's port
    #[arg(long, default_value_t = 53)]
    port: u16,
    /// Name that must resolve
    #[arg(long, alias = "checkDomain", value_name = "NAME", default_value = "upcheck.bosh-dns.")]
    check_domain: Name,
    /// How long to wait, such as 30s or 5m
    #[arg(long, value_parser = parse_duration, default_value = "1m")]
    timeout: Duration,
    /// Taken for the reference's sake
    #[arg(long, alias = "logFormat", hide = true)]
    log_format: Option<String>,
}

impl Wait {
    /// Waits until the name resolves; exits with 1 after the time limit.
    pub(super) fn run(self) -> ExitCode {
        let Self { address, port, check_domain, timeout, log_format: _ } = self;
        let whom = match address {
            Some(address) => format!("the server at {}", SocketAddr::new(address, port)),
            None => "this machine's resolver".to_owned(),
        };
        match until_resolved(address, port, &check_domain, timeout, INTERVAL) {
            Ok(()) => ExitCode::SUCCESS,
            Err(problem) => {
                complain(&format_args!(
                    "{check_domain} did not resolve within {timeout:?} ({whom}): {problem}"
                ));
                ExitCode::FAILURE
            }
        }
    }
}

/// Queries until the name resolves; returns the last problem after the time limit.
pub(super) fn until_resolved(
    address: Option<IpAddr>,
    port: u16,
    name: &Name,
    timeout: Duration,
    interval: Duration,
) -> Result<(), NoAnswer> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let end = Instant::now() + timeout;
        loop {
            let tried = match address {
                Some(address) => upcheck::resolves(SocketAddr::new(address, port), name).await,
                None => by_the_machine(name).await,
            };
            match tried {
                Ok(()) => return Ok(()),
                Err(problem) if Instant::now() >= end => return Err(problem),
                Err(_) => time::sleep(interval.min(end.saturating_duration_since(Instant::now()))).await,
            }
        }
    });
    // A lookup through the machine's resolver may still block.
    runtime.shutdown_background();
    result
}

/// Resolves the name through the C library, as other programs on this machine do.
async fn by_the_machine(name: &Name) -> Result<(), NoAnswer> {
    let looked_up = tokio::net::lookup_host((name.to_string(), 0));
    match time::timeout(SYSTEM_PATIENCE, looked_up).await {
        Ok(Ok(mut addresses)) => addresses.next().map(drop).ok_or(NoAnswer::NoAddress),
        Ok(Err(problem)) => Err(problem.into()),
        Err(_) => Err(NoAnswer::Silence(SYSTEM_PATIENCE)),
    }
}
