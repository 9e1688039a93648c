//! The connection to NATS: mutual TLS, endless reconnects, and a signal for each new connection; and the
//! configuration of nats-server with the permissions that a director grants.

use std::{fmt::Write, path::Path, sync::Arc, time::Duration};

use anyhow::anyhow;
use async_nats::{Client, ClientError, ConnectOptions, Event, Server};
use dns_kit::{backoff, foreign::printable, logs::LineLimit};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{
    http::{AcceptedName, RotatingTls, TlsFiles},
    message::agent_subject,
};

/// Suffix of the common names of a director's NATS servers.
const SERVERS_BELOW: &str = "nats.bosh-internal";

/// Interval of the check for a connection with an earlier certificate.
const ROTATION_INTERVAL: Duration = Duration::from_secs(5);

/// Pause before the first attempt to connect again; doubled after each.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause between two attempts to connect.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Timeout of a connection attempt with a single server. After a restart the whole fleet connects
/// at once; an agent that gives up early has cost the server a handshake and rejoins at the end of
/// the queue. `nats-config` configures the same timeout on the server.
const MAX_ATTEMPT: Duration = Duration::from_secs(60);

/// Timeout of a connection attempt if another server can be tried next.
const SHORT_ATTEMPT: Duration = Duration::from_secs(10);

/// Default of `--ping-every`, in seconds; a server that hangs is abandoned after three times as long.
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

impl Bus {
    /// Starts connecting; reconnects run in the background. `name` is also the prefix of JetStream's inboxes, `without`
    /// the consequence of a missing connection, for the log.
    pub async fn connect(
        options: &BusOptions,
        name: &str,
        without: &'static str,
    ) -> anyhow::Result<Self> {
        let BusOptions {
            nats,
            tls: files,
            ping_every,
        } = options;
        let tls = files.load("nats", AcceptedName::HostBelow(SERVERS_BELOW))?;
        let (said, connected) = watch::channel(0_u64);
        let warnings = LineLimit::new();
        let failures = Arc::new(ConnectFailures::new(nats.join(","), without));
        let noted = failures.clone();
        let attempt = if nats.len() > 1 {
            SHORT_ATTEMPT
        } else {
            MAX_ATTEMPT
        };
        let client = options_for(tls.polling_client_config())
            .reconnect_to_server_callback(move |servers, _| {
                failures.log(&servers);
                // The client chooses the server.
                std::future::ready(None)
            })
            .connection_timeout(attempt)
            .ping_interval(Duration::from_secs(*ping_every))
            .name(name)
            // A machine may start before nats-server, and must not depend on the order.
            .retry_on_initial_connect()
            .custom_inbox_prefix(format!("_INBOX.{name}"))
            .event_callback(move |event| {
                take_event(&event, &said, &noted, &warnings);
                std::future::ready(())
            })
            .connect(nats.clone())
            .await
            .map_err(|error| anyhow!("NATS at {}: {error}", nats.join(",")))?;
        tokio::spawn(tls.clone().watch(|_| {}));
        tokio::spawn(follow_rotation(client.clone(), tls));
        Ok(Self { client, connected })
    }
}

fn take_event(
    event: &Event,
    said: &watch::Sender<u64>,
    failures: &ConnectFailures,
    warnings: &LineLimit,
) {
    match event {
        Event::Connected => said.send_modify(|count| *count += 1),
        // An attempt to connect failed; the next one logs the cause.
        Event::ClientError(ClientError::Other(text)) => {
            *failures.event.lock() = Some(text.clone());
        }
        Event::ServerError(_) | Event::ClientError(_) | Event::SlowConsumer(_) => {
            // Another client can cause these at any rate.
            if let Some(omitted) = warnings.admit_any() {
                tracing::warn!(omitted, "NATS: {event}");
            }
        }
        other => tracing::info!("NATS: {other}"),
    }
}

/// Logs why attempts to connect failed. The client's own event names neither the server nor the cause.
#[derive(Debug)]
struct ConnectFailures {
    configured: String,
    without: &'static str,
    /// The client's event about the last failure.
    event: Mutex<Option<String>>,
    lines: LineLimit,
}

impl ConnectFailures {
    fn new(configured: String, without: &'static str) -> Self {
        Self {
            configured,
            without,
            event: Mutex::new(None),
            lines: LineLimit::new(),
        }
    }

    /// Logs the last failure of each server, before the next attempt.
    fn log(&self, servers: &[Server]) {
        let event = self.event.lock().take();
        let mut is_known = false;
        for server in servers {
            if let Some(cause) = &server.last_error {
                let address = format!("{}:{}", server.addr.host(), server.addr.port());
                self.warn(&address, cause);
                is_known = true;
            }
        }
        // The client keeps no error of a name that it could not resolve.
        if let Some(event) = event
            && !is_known
        {
            self.warn(&self.configured, &event);
        }
    }

    fn warn(&self, servers: &str, cause: &str) {
        let Some(omitted) = self.lines.admit_any() else {
            return;
        };
        let without = self.without;
        tracing::warn!(
            omitted,
            "cannot connect to NATS at {servers}: {}; {without}; {}",
            printable(cause),
            remedy_of(cause)
        );
    }
}

/// Returns what an operator can do about a failed attempt to connect, by the texts of the kernel, of rustls and of
/// nats-server: the client keeps no typed errors.
fn remedy_of(cause: &str) -> &'static str {
    const REMEDIES: [(&str, &str); 5] = [
        (
            "received fatal alert",
            "the server refuses the certificate of --tls-certificate: it must be valid and signed by the CA of the server",
        ),
        (
            "invalid peer certificate",
            "the server's certificate must be valid, signed by a CA of --tls-ca, and have its name",
        ),
        (
            "authorization violation",
            "no user of the server has the certificate's name: print the configuration with `bosh-dns-sync nats-config`",
        ),
        (
            "Connection refused",
            "start nats-server, or correct the port in --nats",
        ),
        (
            "DNS error",
            "check the names in --nats and this machine's DNS servers",
        ),
    ];
    for (text, remedy) in REMEDIES {
        if cause.contains(text) {
            return remedy;
        }
    }
    "check that the server runs and that no packet filter is in the way"
}

/// Returns the options that publisher, agents and the benches share.
pub fn options_for(config: rustls::ClientConfig) -> ConnectOptions {
    ConnectOptions::new()
        .require_tls(true)
        .tls_client_config(config)
        .connection_timeout(MAX_ATTEMPT)
        // An agent without a connection is of no use, and nothing would restart it.
        .max_reconnects(None)
        // Names that a cluster announces may lead nowhere from this network.
        .ignore_discovered_servers()
        .reconnect_delay_callback(pause)
}

/// Returns the pause before an attempt: increasing, and randomised to spread out the fleet.
fn pause(attempt: usize) -> Duration {
    let failures = u32::try_from(attempt).unwrap_or(u32::MAX).saturating_add(1);
    backoff::spread(backoff::pause(FIRST_PAUSE, MAX_PAUSE, failures))
}

/// Reconnects after a certificate rotation.
async fn follow_rotation(client: Client, tls: Arc<RotatingTls>) {
    let mut used = tls.current().generation;
    let mut ticks = tokio::time::interval(ROTATION_INTERVAL);
    loop {
        ticks.tick().await;
        let newest = tls.current().generation;
        // A connection keeps the certificate with which it was made.
        if newest != used {
            used = newest;
            tracing::info!("certificates were rotated; reconnecting to NATS");
            // The client has ended, and the process with it.
            if client.force_reconnect().await.is_err() {
                return;
            }
        }
    }
}

/// Prefix of the subject of every certificate, in the form that nats-server uses for user names.
const SUBJECT: &str = "C=USA, O=Cloud Foundry, CN=";

/// Common name of the director's certificate, which the publisher uses.
pub const PUBLISHER: &str = "default.director.bosh-internal";

/// Returns the common name of an agent's certificate.
pub fn agent_name(agent: &str) -> String {
    format!("{agent}.agent.bosh-internal")
}

/// Part of a certificate that identifies a client to nats-server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum UsersBy {
    /// The subject, as in a director's certificates. nats-server (2.9 to 2.11) compares it with one
    /// user after the other, under one lock: 10,000 agents take minutes to connect.
    #[default]
    Subject,
    /// A DNS name among the alternative names; the lookup takes constant time.
    DnsName,
}

impl UsersBy {
    fn user(self, common_name: &str) -> String {
        match self {
            Self::Subject => format!("{SUBJECT}{common_name}"),
            Self::DnsName => common_name.to_owned(),
        }
    }
}

/// Returns the configuration for a fleet. `jetstream` is the folder of JetStream's store and the
/// bucket of the blobs; a director's configuration has no JetStream.
pub fn nats_server_config<'a>(
    listen: &str,
    files: &TlsFiles,
    jetstream: Option<(&Path, &str)>,
    users_by: UsersBy,
    agents: impl Iterator<Item = &'a str>,
) -> String {
    let TlsFiles {
        ca,
        certificate,
        key,
    } = files;
    let [ca, certificate, key] = [ca, certificate, key].map(|path| path.display().to_string());
    let mut text = format!(
        "# Written by bosh-dns-sync nats-config. After a change: nats-server --signal reload\n\
         listen: {listen:?}\n\
         tls {{\n  ca_file: {ca:?}\n  cert_file: {certificate:?}\n  key_file: {key:?}\n  \
         verify_and_map: true\n  timeout: 60\n}}\n"
    );
    if let Some((folder, _)) = jetstream {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "jetstream {{ store_dir: {:?} }}",
            folder.display().to_string()
        );
    }
    // With users, nats-server refuses everybody else.
    text.push_str("authorization {\n  users: [\n");
    let mut publish = vec![agent_subject("*")];
    let mut subscribe = vec!["director.>".to_owned()];
    if jetstream.is_some() {
        // It creates the bucket, and writes and deletes objects.
        publish.extend(["$JS.API.>", "$O.>"].map(str::to_owned));
        subscribe.push("_INBOX.bosh-dns-sync-publisher.>".to_owned());
    }
    user(&mut text, &users_by.user(PUBLISHER), &publish, &subscribe);
    for agent in agents {
        // The director's permissions: no agent can speak for another.
        let mut publish = vec![format!("director.*.{agent}.*")];
        let mut subscribe = vec![agent_subject(agent)];
        if let Some((_, bucket)) = jetstream {
            // Direct reads only. With a consumer, nats-server would deliver to any subject, and
            // agents could create consumers without limit.
            publish.push(format!("$JS.API.DIRECT.GET.OBJ_{bucket}"));
            publish.push(format!("$JS.API.DIRECT.GET.OBJ_{bucket}.>"));
            subscribe.push(format!("_INBOX.{agent}.>"));
        }
        user(
            &mut text,
            &users_by.user(&agent_name(agent)),
            &publish,
            &subscribe,
        );
    }
    text.push_str("  ]\n}\n");
    text
}

fn user(text: &mut String, name: &str, publish: &[String], subscribe: &[String]) {
    let _ = write!(
        text,
        "    {{\n      user: {name:?}\n      permissions: {{\n        publish: {publish:?}\n        \
         subscribe: {subscribe:?}\n      }}\n    }}\n"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_match_a_director() {
        let files = TlsFiles {
            ca: "/ca".into(),
            certificate: "/crt".into(),
            key: "/key".into(),
        };
        let text = nats_server_config(
            "0.0.0.0:4222",
            &files,
            None,
            UsersBy::Subject,
            ["a1"].into_iter(),
        );
        assert_eq!(
            text,
            r#"# Written by bosh-dns-sync nats-config. After a change: nats-server --signal reload
listen: "0.0.0.0:4222"
tls {
  ca_file: "/ca"
  cert_file: "/crt"
  key_file: "/key"
  verify_and_map: true
  timeout: 60
}
authorization {
  users: [
    {
      user: "C=USA, O=Cloud Foundry, CN=default.director.bosh-internal"
      permissions: {
        publish: ["agent.*"]
        subscribe: ["director.>"]
      }
    }
    {
      user: "C=USA, O=Cloud Foundry, CN=a1.agent.bosh-internal"
      permissions: {
        publish: ["director.*.a1.*"]
        subscribe: ["agent.a1"]
      }
    }
  ]
}
"#
        );
        let by_name = nats_server_config(
            "0.0.0.0:4222",
            &files,
            None,
            UsersBy::DnsName,
            ["a1"].into_iter(),
        );
        assert_eq!(by_name, text.replace("C=USA, O=Cloud Foundry, CN=", ""));
        let jetstream = Some((Path::new("/js"), "dns"));
        let with_blobs = nats_server_config(
            "0.0.0.0:4222",
            &files,
            jetstream,
            UsersBy::Subject,
            ["a1"].into_iter(),
        );
        assert!(
            with_blobs.contains(r#"subscribe: ["agent.a1", "_INBOX.a1.>"]"#),
            "{with_blobs}"
        );
        assert!(!with_blobs.contains("CONSUMER"), "{with_blobs}");
    }

    #[test]
    fn failures_have_remedies() {
        for (cause, remedy) in [
            ("received fatal alert: UnknownCA", "refuses the certificate"),
            (
                "invalid peer certificate: Expired",
                "signed by a CA of --tls-ca",
            ),
            ("authorization violation: x", "nats-config"),
            ("Connection refused (os error 111)", "start nats-server"),
            ("DNS error: x", "check the names in --nats"),
            ("timed out", "no packet filter"),
        ] {
            assert!(remedy_of(cause).contains(remedy), "{cause}");
        }
    }

    #[test]
    fn pauses_grow_to_their_limit() {
        for (attempt, base) in [
            (0, 100),
            (1, 200),
            (5, 3200),
            (6, 5000),
            (7, 5000),
            (99, 5000),
        ] {
            let (least, most) = (base / 2, base * 3 / 2);
            for _ in 0..20 {
                let found = pause(attempt).as_millis();
                assert!((least..=most).contains(&found), "{attempt}: {found}");
            }
        }
    }

    #[test]
    fn connections_are_counted_and_causes_kept() {
        let (said, connected) = watch::channel(0);
        let failures = ConnectFailures::new("tls://n".to_owned(), "x");
        let warnings = LineLimit::new();
        let cause = "DNS error: x".to_owned();
        for event in [
            Event::Connected,
            Event::Disconnected,
            Event::SlowConsumer(1),
            Event::ClientError(ClientError::MaxReconnects),
            Event::Connected,
        ] {
            take_event(&event, &said, &failures, &warnings);
            assert_eq!(*failures.event.lock(), None);
        }
        assert_eq!(*connected.borrow(), 2);
        let event = Event::ClientError(ClientError::Other(cause.clone()));
        take_event(&event, &said, &failures, &warnings);
        assert_eq!(*connected.borrow(), 2);
        assert_eq!(*failures.event.lock(), Some(cause));
        // Before the next attempt, the cause is logged once.
        failures.log(&[]);
        assert_eq!(*failures.event.lock(), None);
    }
}
