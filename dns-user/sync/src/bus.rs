//! The connection to NATS: mutual TLS, endless reconnects, and a signal for each new connection.

use std::{sync::Arc, time::Duration};

use async_nats::{Client, ConnectOptions, Event};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{
    clock::{LogLimit, now_ms},
    tls::{AcceptedName, RotatingTls, TlsError, TlsFiles},
};

/// Suffix of the common names of a director's NATS servers.
const SERVERS_BELOW: &str = "nats.bosh-internal";

/// Interval of the check for rotated certificates.
const ROTATION_INTERVAL: Duration = Duration::from_secs(5);

/// Longest pause between two attempts to connect.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Timeout of a connection attempt with a single server. After a restart the whole fleet connects
/// at once; an agent that gives up early has cost the server a handshake and rejoins at the end of
/// the queue. `nats-config` configures the same timeout on the server.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(60);

/// Timeout of a connection attempt if another server can be tried next.
const SHORT_ATTEMPT: Duration = Duration::from_secs(10);

/// Default of `--ping-every`, in seconds; a server that hangs is abandoned after three times as
/// long.
pub const PING_EVERY: u64 = 10;

/// Servers and certificates of the NATS connection.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct BusOptions {
    /// NATS servers, tls://HOST:PORT, separated by commas
    #[arg(long, value_name = "URL", value_delimiter = ',', required = true)]
    pub nats: Vec<String>,
    /// The client's certificates.
    #[command(flatten)]
    pub tls: TlsFiles,
    /// Seconds between pings; after three without a reply the agent changes servers
    #[arg(long, value_name = "SECONDS", default_value_t = PING_EVERY, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub ping_every: u64,
}

/// A NATS connection that follows rotated certificates.
#[derive(Clone, Debug)]
pub struct Bus {
    /// Client of the NATS connection.
    pub client: Client,
    /// Number of connections so far; changes with each new one.
    pub connected: watch::Receiver<u64>,
}

/// Errors that a reconnect cannot repair.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The servers cannot be used with these options.
    #[error("NATS at {servers}: {problem}")]
    Connect {
        /// Addresses of the servers, separated by commas.
        servers: String,
        /// The NATS client's message.
        problem: String,
    },
}

impl Bus {
    /// Starts connecting; reconnects run in the background. `name` is also the prefix of
    /// JetStream's inboxes.
    pub async fn connect(options: &BusOptions, name: &str) -> Result<Self, BusError> {
        let BusOptions { nats, tls: files, ping_every } = options;
        let tls = files.load("nats", AcceptedName::HostBelow(SERVERS_BELOW))?;
        let (said, connected) = watch::channel(0_u64);
        let warnings = Mutex::new(LogLimit::default());
        let events = move |event: Event| {
            match &event {
                Event::Connected => said.send_modify(|count| *count += 1),
                Event::ServerError(_) | Event::ClientError(_) | Event::SlowConsumer(_) => {
                    // Another client can cause these at any rate.
                    if let Some(omitted) = warnings.lock().allow(now_ms()) {
                        tracing::warn!(omitted, "NATS: {event}");
                    }
                }
                other => tracing::info!("NATS: {other}"),
            }
            std::future::ready(())
        };
        let attempt = if nats.len() > 1 { SHORT_ATTEMPT } else { LONGEST_ATTEMPT };
        let client = options_for(tls.polling_client_config())
            .connection_timeout(attempt)
            .ping_interval(Duration::from_secs(*ping_every))
            .name(name)
            .retry_on_initial_connect()
            .custom_inbox_prefix(format!("_INBOX.{name}"))
            .event_callback(events)
            .connect(nats.clone())
            .await
            .map_err(|error| BusError::Connect { servers: nats.join(","), problem: error.to_string() })?;
        tokio::spawn(follow_rotation(client.clone(), tls));
        Ok(Self { client, connected })
    }
}

/// Returns the options that publisher, agents and the benches share.
pub fn options_for(config: rustls::ClientConfig) -> ConnectOptions {
    ConnectOptions::new()
        .require_tls(true)
        .tls_client_config(config)
        .connection_timeout(LONGEST_ATTEMPT)
        .max_reconnects(None)
        .ignore_discovered_servers()
        .reconnect_delay_callback(pause)
}

/// Returns the pause before an attempt: increasing, and randomised to spread out the fleet.
fn pause(attempt: usize) -> Duration {
    let base = Duration::from_millis(100) * 2_u32.pow(attempt.min(6) as u32);
    base.min(LONGEST_PAUSE).mul_f64(0.5 + fastrand::f64())
}

/// Reconnects after a certificate rotation.
async fn follow_rotation(client: Client, tls: Arc<RotatingTls>) {
    let mut used = tls.current().generation;
    let mut ticks = tokio::time::interval(ROTATION_INTERVAL);
    loop {
        ticks.tick().await;
        tls.poll();
        let newest = tls.current().generation;
        if newest != used {
            used = newest;
            tracing::info!("certificates were rotated; reconnecting to NATS");
            if client.force_reconnect().await.is_err() {
                return;
            }
        }
    }
}
