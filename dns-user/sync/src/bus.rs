//! The connection to NATS: mutual TLS, reconnects for ever, and says when it is there again.

use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event};
use tokio::sync::watch;

use crate::tls::{self, TlsFiles};

/// What the common name of every NATS server of a director is below.
const SERVERS_BELOW: &str = "nats.bosh-internal";

/// How often it is looked whether certificates were rotated.
const ROTATION_INTERVAL: Duration = Duration::from_secs(5);

/// Longest pause between two attempts to connect.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Longest time for one attempt. A server that is back has a whole fleet at its door: who gives
/// up early has made it work for nothing, and begins anew at the end of the queue. It is the
/// time that `nats-config` gives the server for a handshake.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(60);

/// Where NATS is and who we are.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct BusOptions {
    /// NATS servers, tls://HOST:PORT; several with commas
    #[arg(long, value_name = "URL", value_delimiter = ',', required = true)]
    pub nats: Vec<String>,
    /// Our certificates.
    #[command(flatten)]
    pub tls: TlsFiles,
}

/// A connection.
#[derive(Clone, Debug)]
pub struct Bus {
    /// The client.
    pub client: Client,
    /// Counts connections: changes whenever there is one again.
    pub connected: watch::Receiver<u64>,
}

/// Why there is no connection at all.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    /// The options make no sense.
    #[error("NATS at {servers}: {problem}")]
    Connect {
        /// The servers.
        servers: String,
        /// What is wrong.
        problem: String,
    },
}

impl Bus {
    /// Connects; a server that is not there yet is waited for in the background.
    /// `inboxes` is the prefix for the replies of JetStream, which only its blobstore needs.
    pub async fn connect(options: &BusOptions, name: &str) -> Result<Self, BusError> {
        let BusOptions { nats, tls: files } = options;
        let config = tls::client(files, Some(SERVERS_BELOW))?;
        let (said, connected) = watch::channel(0_u64);
        let events = move |event: Event| {
            match &event {
                Event::Connected => said.send_modify(|count| *count += 1),
                Event::ServerError(_) | Event::ClientError(_) | Event::SlowConsumer(_) => {
                    tracing::warn!("NATS: {event}");
                }
                other => tracing::info!("NATS: {other}"),
            }
            std::future::ready(())
        };
        let client = options_for(config)
            .name(name)
            .retry_on_initial_connect()
            .custom_inbox_prefix(format!("_INBOX.{name}"))
            .event_callback(events)
            .connect(nats.clone())
            .await
            .map_err(|error| BusError::Connect { servers: nats.join(","), problem: error.to_string() })?;
        tokio::spawn(follow_rotation(client.clone(), files.clone()));
        Ok(Self { client, connected })
    }
}

/// How everybody connects.
pub(crate) fn options_for(config: rustls::ClientConfig) -> ConnectOptions {
    ConnectOptions::new()
        .require_tls(true)
        .tls_client_config(config)
        .connection_timeout(LONGEST_ATTEMPT)
        .max_reconnects(None)
        .ignore_discovered_servers()
        .reconnect_delay_callback(pause)
}

/// The pause before an attempt: grows, and is never the same for all of a fleet.
fn pause(attempt: usize) -> Duration {
    let base = Duration::from_millis(100) * 2_u32.pow(attempt.min(6) as u32);
    base.min(LONGEST_PAUSE).mul_f64(0.5 + fastrand::f64())
}

/// Connects anew when the certificates were rotated.
async fn follow_rotation(client: Client, files: TlsFiles) {
    let mut seen = tls::stamp(&files);
    let mut ticks = tokio::time::interval(ROTATION_INTERVAL);
    loop {
        ticks.tick().await;
        let now = tls::stamp(&files);
        // Only a set that can be used is worth a new connection.
        if now != seen && tls::client(&files, None).is_ok() {
            seen = now;
            tracing::info!("certificates were rotated: reconnecting to NATS");
            if client.force_reconnect().await.is_err() {
                return;
            }
        }
    }
}
