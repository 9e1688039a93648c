//! `resolver`: makes the server the machine's resolver and maintains that configuration.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use tokio::time::{self, Instant};

use super::{
    complain,
    system::{ResolvConf, Resolved},
};
use dns_core::{config::values::parse_duration, name::Name};
use dns_kit::until_ended;
use dns_resolver::daemon::{
    domains::RoutedDomains,
    upcheck::{self, NO_ADDRESS},
};

/// Interval of checks that the server is still the first resolver, as in bosh-dns.
const INTERVAL: Duration = Duration::from_secs(3);

#[derive(Debug, Args)]
pub(super) struct Resolver {
    /// The server's address [default: from --config]
    #[arg(
        long,
        alias = "bindAddress",
        value_name = "IP",
        required_unless_present = "config"
    )]
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
    pub(super) fn run(self) -> ExitCode {
        match self.keep_up() {
            Ok(()) => ExitCode::SUCCESS,
            Err(problem) => {
                complain(&problem);
                ExitCode::FAILURE
            }
        }
    }

    fn keep_up(self) -> anyhow::Result<()> {
        let Self {
            address,
            config,
            systemd_resolved,
            once,
            keep,
            log_format: _,
        } = self;
        let address = match (address, &config) {
            (Some(address), _) => address,
            (None, Some(file)) => dns_kit::files::load_config(file)?.config.listen.ip(),
            // clap requires one of them.
            (None, None) => IpAddr::from([169, 254, 0, 2]),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let mut setup = match (systemd_resolved, config) {
                (true, Some(config)) => ResolverSetup::Resolved(
                    Resolved::new(address),
                    Box::new(RoutedDomains::of(&config)?),
                ),
                _ => ResolverSetup::ResolvConf(ResolvConf::new(address)),
            };
            if once {
                setup.apply().await?;
            } else {
                tokio::select! {
                    // Handles signals before the first change, which they must not leave behind.
                    () = until_ended() => {}
                    () = setup.keep() => {}
                }
            }
            if keep { Ok(()) } else { setup.put_back().await }
        })
    }
}

/// Method of directing the machine's queries to the server.
enum ResolverSetup {
    /// Through /etc/resolv.conf.
    ResolvConf(ResolvConf),
    /// Through systemd-resolved, for the domains that the server answers itself.
    Resolved(Resolved, Box<RoutedDomains>),
}

impl ResolverSetup {
    /// Checks the configuration and repairs it if necessary.
    async fn apply(&mut self) -> anyhow::Result<()> {
        match self {
            Self::ResolvConf(resolv_conf) => resolv_conf.apply().await,
            Self::Resolved(resolved, domains) => resolved.apply(&domains.all()).await,
        }
    }

    /// Repairs the configuration for ever.
    async fn keep(&mut self) {
        loop {
            // A problem may be temporary (such as the installation of a resolver), and exiting
            // would not help, so it is logged and retried.
            if let Err(problem) = self.apply().await {
                complain(&problem);
            }
            self.next().await;
        }
    }

    /// Waits for the next check: an interval, or a change of the domains.
    async fn next(&mut self) {
        match self {
            Self::ResolvConf(_) => time::sleep(INTERVAL).await,
            Self::Resolved(_, domains) => {
                let before = domains.all();
                let end = Instant::now() + INTERVAL;
                // Must not be cancelled halfway, because files that were read already are not read
                // again.
                while domains.all() == before && Instant::now() < end {
                    domains.follow().await;
                }
            }
        }
    }

    async fn put_back(&mut self) -> anyhow::Result<()> {
        match self {
            Self::ResolvConf(resolv_conf) => resolv_conf.put_back().await,
            Self::Resolved(resolved, _) => resolved.put_back().await,
        }
    }
}

//----------- Wait --------------------------------------------------------------

/// Interval between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Time limit of one attempt through the machine's resolver, which may retry by itself.
const SYSTEM_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(super) struct Wait {
    /// Query the server at this address; by default, use this machine's resolver
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// The server's port
    #[arg(long, default_value_t = 53)]
    port: u16,
    /// Name that must resolve
    #[arg(
        long,
        alias = "checkDomain",
        value_name = "NAME",
        default_value = "upcheck.bosh-dns."
    )]
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
        let Self {
            address,
            port,
            check_domain,
            timeout,
            log_format: _,
        } = self;
        let whom = match address {
            Some(address) => format!("the server at {}", SocketAddr::new(address, port)),
            None => "this machine's resolver".to_owned(),
        };
        match until_resolved(address, port, &check_domain, timeout, RETRY_INTERVAL) {
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
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(async {
        let end = Instant::now() + timeout;
        loop {
            let tried = match address {
                Some(address) => upcheck::resolves(SocketAddr::new(address, port), name).await,
                None => by_system_resolver(name).await,
            };
            match tried {
                Ok(()) => return Ok(()),
                Err(problem) if Instant::now() >= end => return Err(problem),
                Err(_) => {
                    // Ends at the limit with a last attempt.
                    time::sleep(interval.min(end.saturating_duration_since(Instant::now()))).await
                }
            }
        }
    });
    // A lookup through the machine's resolver may still block.
    runtime.shutdown_background();
    result
}

/// Resolves the name through the C library, as other programs on this machine do.
async fn by_system_resolver(name: &Name) -> anyhow::Result<()> {
    let looked_up = tokio::net::lookup_host((name.to_string(), 0));
    upcheck::within(SYSTEM_TIMEOUT, looked_up)
        .await?
        .next()
        .map(drop)
        .context(NO_ADDRESS)
}
