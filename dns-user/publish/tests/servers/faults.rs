//! Servers that refuse, disconnect, or disagree: nothing may be written.

use std::{
    net::SocketAddr,
    time::{Duration, SystemTime},
};

use dns_publish::{engine::Report, provider::rfc2136::TsigKey};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

use crate::name_server::{NameServer, Options, Program, engine, names, quiet};

/// Forwards connections, and cuts each after a number of octets from the server.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Proxy {
    pub(crate) async fn start(server: SocketAddr, cut: Option<usize>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, server, cut.unwrap_or(usize::MAX)));
            }
        });
        Self { address, task }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass(client: TcpStream, server: SocketAddr, mut left: usize) {
    let upstream = TcpStream::connect(server).await.unwrap();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = upstream.into_split();
    let requests =
        tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
    let mut octets = [0; 4096];
    while left > 0 {
        let Ok(count @ 1..) = from_server.read(&mut octets).await else {
            break;
        };
        let passed = count.min(left);
        if to_client.write_all(&octets[..passed]).await.is_err() {
            break;
        }
        left -= passed;
    }
    requests.abort();
}

/// Returns the failure of the only zone.
fn failure(report: &Report) -> String {
    assert_eq!(report.applied(), 0, "{report:?}");
    let zone = &report.zones[0];
    zone.failure
        .as_ref()
        .map_or_else(|| format!("{:?}", zone.failures), ToString::to_string)
}

#[tokio::test]
async fn interrupted_transfer_keeps_zone() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let published = server
            .engine()
            .reconcile(&names(2_000), None, &quiet)
            .await
            .unwrap();
        assert!(published.is_complete(), "{published:?}");
        let before = server.transfer("example.org");
        for cut in [0, 1, 100, 30_000, 70_000] {
            let proxy = Proxy::start(server.address, Some(cut)).await;
            let mut settings = server.settings();
            settings.servers[0].host = proxy.address.ip().to_string();
            settings.servers[0].port = proxy.address.port();
            let report = engine(settings)
                .reconcile(&names(2_100), None, &quiet)
                .await
                .unwrap();
            let text = failure(&report);
            assert!(
                text.contains("closed the connection"),
                "{program:?} {cut}: {text}"
            );
        }
        assert_eq!(server.transfer("example.org"), before);
    }
}

#[tokio::test]
async fn wrong_key_is_named() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        for (name, secret, expected) in [
            ("publisher", "d3Jvbmc=", "check rfc2136-tsig-secret"),
            (
                "stranger",
                crate::name_server::SECRET,
                "does not know the key stranger",
            ),
        ] {
            let mut settings = server.settings();
            settings.key =
                Some(TsigKey::new(name, "hmac-sha256".parse().unwrap(), secret).unwrap());
            let report = engine(settings)
                .reconcile(&names(1), None, &quiet)
                .await
                .unwrap();
            let text = failure(&report);
            assert!(text.contains(expected), "{program:?}: {text}");
        }
        let mut settings = server.settings();
        settings.key = None;
        let report = engine(settings)
            .reconcile(&names(1), None, &quiet)
            .await
            .unwrap();
        // Knot answers NOTAUTH, BIND REFUSED.
        let text = failure(&report);
        assert!(
            text.contains("REFUSED") || text.contains("NOTAUTH"),
            "{program:?}: {text}"
        );
    }
}

#[tokio::test]
async fn clock_difference_is_named() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let mut settings = server.settings();
        settings.clock = || SystemTime::now() - Duration::from_mins(10);
        let report = engine(settings)
            .reconcile(&names(1), None, &quiet)
            .await
            .unwrap();
        let text = failure(&report);
        assert!(
            text.contains("clocks of server and publisher differ by 60") || text.contains("by 59"),
            "{program:?}: {text}"
        );
    }
}

#[tokio::test]
async fn refused_zone_affects_only_itself() {
    for program in Program::ALL {
        let options = Options {
            refused: vec!["closed.example"],
            ..Options::default()
        };
        let server = NameServer::with(program, options);
        let mut desired = names(3);
        desired.records.push(crate::name_server::record(
            "x.closed.example",
            dns_publish::record::RecordType::A,
            "192.0.2.1",
        ));
        let report = server
            .engine()
            .reconcile(&desired, None, &quiet)
            .await
            .unwrap();
        assert_eq!(report.applied(), 3);
        assert!(!report.is_complete());
        assert!(report.zones[1].failure.is_some());
        assert!(
            report.notes.is_empty(),
            "the zone is named once, not for each of its names"
        );
    }
}

#[tokio::test]
async fn secondary_is_recognised() {
    for program in Program::ALL {
        let primary = NameServer::start(Program::Bind);
        let options = Options {
            primary: Some(primary.address),
            ..Options::default()
        };
        let secondary = NameServer::with(program, options);
        let report = secondary
            .engine()
            .reconcile(&names(3), None, &quiet)
            .await
            .unwrap();
        let text = failure(&report);
        assert!(
            text.contains("refused") || text.contains("Refused"),
            "{program:?}: {text}"
        );
        assert!(!primary.transfer("example.org").contains("n1.example.org"));
    }
}

#[tokio::test]
async fn absent_server_is_named() {
    let server = NameServer::start(Program::Bind);
    let mut settings = server.settings();
    drop(server);
    settings.timeout = Duration::from_secs(1);
    let report = engine(settings)
        .reconcile(&names(1), None, &quiet)
        .await
        .unwrap();
    assert!(
        failure(&report).contains("zone example.org: "),
        "{report:?}"
    );
}
