//! `resolver`: makes the server the machine's resolver and maintains that configuration.

use std::{net::IpAddr, path::PathBuf, process::ExitCode, time::Duration};

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::complain;
use crate::{
    daemon::domains::RoutedDomains,
    system::{ResolvConf, Resolved, SystemError},
};

/// Interval of checks that the server is still the first resolver, as in bosh-dns.
const INTERVAL: Duration = Duration::from_secs(3);

#[derive(Debug, Args)]
pub(super) struct Resolver {
    /// The server's address [default: from --config]
    #[arg(long, alias = "bindAddress", value_name = "IP", required_unless_present = "config")]
    address: Option<IpAddr>,
    /// The server's config.json
    #[arg(long, value_name = "FILE", required_if_eq("systemd_resolved", "true"))]
    config: Option<PathBuf>,
    /// Configure systemd-resolved to send the fleet's domains to the server, and keep them current, instead
    /// of putting the server first in /etc/resolv.conf
    #[arg(long)]
    systemd_resolved: bool,
    /// Exit once configured, instead of restoring the configuration whenever it changes
    #[arg(long)]
    once: bool,
    /// Leave the changes in place on exit
    #[arg(long)]
    keep: bool,
    /// Ignored; accepted for compatibility with bosh-dns
    #[arg(long, alias = "logFormat", hide = true)]
    log_format: Option<String>,
}

impl Resolver {
    /// Runs until SIGTERM or SIGINT.
    pub(super) fn run(self) -> ExitCode {
        match self.keep_up() {
            Ok(()) => ExitCode::SUCCESS,
            Err(problem) => {
                complain(&problem);
                ExitCode::FAILURE
            }
        }
    }

    /// Implements [`Self::run`]; returns the error that ended it.
    fn keep_up(self) -> Result<(), SystemError> {
        let Self { address, config, systemd_resolved, once, keep, log_format: _ } = self;
        let address = match (address, &config) {
            (Some(address), _) => address,
            (None, Some(file)) => dns_kit::files::load_config(file)?.config.listen.ip(),
            // clap requires one of them.
            (None, None) => IpAddr::from([169, 254, 0, 2]),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // The watch of the files needs the runtime's clock.
        let inside = runtime.enter();
        let mut way = match (systemd_resolved, config) {
            (true, Some(config)) => {
                Way::Resolved(Resolved::new(address), Box::new(RoutedDomains::of(&config)?))
            }
            _ => Way::ResolvConf(ResolvConf::new(address)),
        };
        if once {
            way.apply()?;
            return if keep { Ok(()) } else { way.put_back() };
        }
        drop(inside);
        runtime.block_on(async {
            let mut terminate = signal(SignalKind::terminate())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            loop {
                // A problem may be temporary (such as the installation of a resolver), and exiting
                // would not help, so it is logged and retried.
                if let Err(problem) = way.apply() {
                    complain(&problem);
                }
                tokio::select! {
                    _ = terminate.recv() => break,
                    _ = interrupt.recv() => break,
                    () = way.next() => {}
                }
            }
            if keep { Ok(()) } else { way.put_back() }
        })
    }
}

/// Method of directing the machine's queries to the server.
enum Way {
    /// Through /etc/resolv.conf.
    ResolvConf(ResolvConf),
    /// Through systemd-resolved, for the domains of the server's records and handlers.
    Resolved(Resolved, Box<RoutedDomains>),
}

impl Way {
    /// Checks the configuration and repairs it if necessary.
    fn apply(&mut self) -> Result<(), SystemError> {
        match self {
            Self::ResolvConf(resolv_conf) => resolv_conf.apply(),
            Self::Resolved(resolved, domains) => resolved.apply(&domains.all()),
        }
    }

    /// Waits for the next check: an interval, or a change of the domains.
    async fn next(&mut self) {
        match self {
            Self::ResolvConf(_) => tokio::time::sleep(INTERVAL).await,
            Self::Resolved(_, domains) => {
                let (before, end) = (domains.all(), tokio::time::Instant::now() + INTERVAL);
                // Must not be cancelled halfway, because files that were read already are not read
                // again.
                while domains.all() == before && tokio::time::Instant::now() < end {
                    domains.follow().await;
                }
            }
        }
    }

    /// Restores the original state.
    fn put_back(&mut self) -> Result<(), SystemError> {
        match self {
            Self::ResolvConf(resolv_conf) => resolv_conf.put_back(),
            Self::Resolved(resolved, _) => resolved.put_back(),
        }
    }
}
