//! Self-checks. At startup the server must answer them within `timeout` or exits with an error;
//! afterwards they run periodically.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, anyhow, ensure};
use futures_util::future::join_all;
use hickory_proto::{
    op::{Message, MessageType, Metadata, ResponseCode},
    rr::RData,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, UdpSocket},
    time,
};

use crate::server::OwnConnections;
use dns_core::{
    name::Name,
    wire::{TYPE_A, query_message},
};

/// Time limit of one query.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum length of a reply by UDP in bytes.
const MAX_REPLY: usize = 4096;

/// The queries of a self-check and their targets.
#[derive(Clone, Debug)]
pub(super) struct Upcheck {
    /// Registry of the server's own connections, which bypass client limits.
    own: OwnConnections,
    /// Listen addresses, with wildcards replaced by loopback.
    targets: Vec<SocketAddr>,
    /// Names that must resolve to 127.0.0.1.
    upchecks: Vec<Name>,
    /// Name that must resolve to any address.
    internal: Option<Name>,
}

/// Failure of a self-check.
#[derive(Debug, thiserror::Error)]
#[error("{name} query to {target} by {transport}: {problem}")]
pub(super) struct UpcheckError {
    name: Name,
    target: SocketAddr,
    transport: &'static str,
    problem: anyhow::Error,
}

/// The address that a reply must contain.
#[derive(Clone, Copy)]
enum Expected {
    /// 127.0.0.1, as for up-check names.
    Loopback,
    Any,
}

impl Upcheck {
    /// Creates the checks for a server listening on `listen`; `own` lets the server recognise them.
    pub(super) fn new(
        listen: &[SocketAddr],
        upchecks: &[Name],
        internal: Option<&Name>,
        own: OwnConnections,
    ) -> Self {
        Self {
            own,
            targets: listen.iter().map(|&address| reachable(address)).collect(),
            upchecks: upchecks.to_vec(),
            internal: internal.cloned(),
        }
    }

    /// Sends every query to every target over UDP and TCP. A failing target does not affect the
    /// others.
    pub(super) async fn once(&self) -> Findings {
        // Together: the main loop waits, and one silent target after the other would take so long
        // that the lease of the interfaces runs out.
        let each = join_all(self.targets.iter().map(|&target| self.ask_target(target))).await;
        let mut findings = Findings::default();
        for Findings { answered, problems } in each {
            findings.answered += answered;
            findings.problems.extend(problems);
        }
        findings
    }

    async fn ask_target(&self, target: SocketAddr) -> Findings {
        let mut findings = Findings::default();
        for transport in ["UDP", "TCP"] {
            let upchecks = self.upchecks.iter().map(|name| (name, Expected::Loopback));
            let internal = self.internal.iter().filter(|_| transport == "UDP");
            for (name, expected) in upchecks.chain(internal.map(|name| (name, Expected::Any))) {
                match self.ask(target, name, transport, expected).await {
                    Ok(()) => findings.answered += 1,
                    Err(problem) => {
                        findings.problems.push(problem);
                        // Further queries to this target would each run into the time limit.
                        break;
                    }
                }
            }
        }
        findings
    }

    /// Repeats the checks until one target answers every query; returns a failure after `timeout`.
    pub(super) async fn until_up(&self, timeout: Duration) -> Result<(), UpcheckError> {
        let end = time::Instant::now() + timeout;
        loop {
            let mut findings = self.once().await;
            if !self.targets.iter().all(|target| {
                findings
                    .problems
                    .iter()
                    .any(|UpcheckError { target: at, .. }| at == target)
            }) {
                return Ok(());
            }
            match findings.problems.pop() {
                // At least one round is made, however short the limit.
                Some(problem) if time::Instant::now() >= end => return Err(problem),
                _ => time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    async fn ask(
        &self,
        target: SocketAddr,
        name: &Name,
        transport: &'static str,
        expected: Expected,
    ) -> Result<(), UpcheckError> {
        let id = fastrand::u16(..);
        let question = query_message(id, 0, name.as_wire(), TYPE_A);
        let exchange = async {
            match transport {
                "TCP" => self.by_tcp(target, &question).await,
                _ => by_udp(target, &question).await,
            }
        };
        within(TIMEOUT, exchange)
            .await
            .and_then(|reply| check_reply(id, &reply, expected))
            .map_err(|problem| UpcheckError {
                name: name.clone(),
                target,
                transport,
                problem,
            })
    }

    /// Queries over TCP from a connection exempt from client limits.
    async fn by_tcp(&self, target: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
        let socket = if target.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }?;
        let mut local = target;
        local.set_port(0);
        // The target is one of our addresses, so it also serves as the source address.
        let ours = match socket.bind(local) {
            Ok(()) => Some(self.own.enter(socket.local_addr()?)),
            // A connection that the server cannot recognise counts as a client's, which costs
            // nothing but a slot.
            Err(_) => None,
        };
        let mut stream = socket.connect(target).await?;
        // A query with one name is far shorter than 64 KiB.
        let mut framed = (question.len() as u16).to_be_bytes().to_vec();
        framed.extend_from_slice(question);
        stream.write_all(&framed).await?;
        let length = stream.read_u16().await?;
        let mut reply = vec![0; length.into()];
        stream.read_exact(&mut reply).await?;
        // Until here: the server looks the connection up when it accepts it, and may do so late.
        drop(ours);
        Ok(reply)
    }
}

/// Results of one round of self-checks.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) answered: usize,
    /// First failure of each target and transport.
    pub(super) problems: Vec<UpcheckError>,
}

/// Queries a server once over UDP for an address of `name`; the error is the reason why there is
/// none.
pub async fn resolves(target: SocketAddr, name: &Name) -> anyhow::Result<()> {
    let id = fastrand::u16(..);
    let question = query_message(id, 0, name.as_wire(), TYPE_A);
    check_reply(
        id,
        &within(TIMEOUT, by_udp(target, &question)).await?,
        Expected::Any,
    )
}

/// Waits for a reply for at most `limit`.
pub async fn within<T>(
    limit: Duration,
    exchange: impl Future<Output = io::Result<T>>,
) -> anyhow::Result<T> {
    Ok(time::timeout(limit, exchange)
        .await
        .with_context(|| format!("no reply within {limit:?}"))??)
}

/// The reply lacks the expected address.
pub const NO_ADDRESS: &str = "a reply without the address of the up-check";

/// Returns the address at which the server reaches itself.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let address = match listen.ip() {
        // A wildcard is no destination, and each of them covers loopback.
        IpAddr::V4(address) if address.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(address) if address.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        address => address,
    };
    SocketAddr::new(address, listen.port())
}

/// Checks the id and RCODE of a reply and that it contains the address.
fn check_reply(id: u16, reply: &[u8], expected: Expected) -> anyhow::Result<()> {
    let reply = Message::from_vec(reply).map_err(|error| anyhow!("malformed reply: {error}"))?;
    let Metadata {
        id: of,
        message_type,
        response_code,
        ..
    } = reply.metadata;
    ensure!(
        of == id && message_type == MessageType::Response,
        "a reply to another query"
    );
    ensure!(response_code == ResponseCode::NoError, "{response_code}");
    let mut addresses = reply
        .answers
        .iter()
        .filter_map(|record| match &record.data {
            RData::A(address) => Some(address.0),
            _ => None,
        });
    let found = match expected {
        Expected::Loopback => addresses.any(|address| address == Ipv4Addr::LOCALHOST),
        Expected::Any => addresses.next().is_some(),
    };
    ensure!(found, NO_ADDRESS);
    Ok(())
}

async fn by_udp(target: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr = if target.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    // Connected, so that a closed port is an error at once (udp(7), ECONNREFUSED) and the kernel
    // drops datagrams of others.
    socket.connect(target).await?;
    socket.send(question).await?;
    let mut reply = vec![0; MAX_REPLY];
    let length = socket.recv(&mut reply).await?;
    reply.truncate(length);
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// The main loop waits for a round, however many addresses are silent.
    #[tokio::test]
    async fn silent_targets_are_asked_together() {
        let first = test_support::free_address();
        let listener = TcpListener::bind(first).await.unwrap();
        let _silent = UdpSocket::bind(first).await.unwrap();
        let second = UdpSocket::bind("127.0.0.2:0").await.unwrap();
        let upcheck = Upcheck::new(
            &[first, second.local_addr().unwrap()],
            &[Name::from_text("upcheck.bosh-dns").unwrap()],
            None,
            OwnConnections::default(),
        );
        // The first target is asked by TCP when its time by UDP is over.
        let asked_second = async {
            listener.accept().await.unwrap();
            second.try_recv(&mut [0; MAX_REPLY]).is_ok()
        };
        let (findings, is_asked) = tokio::join!(upcheck.once(), asked_second);
        assert!(is_asked, "the second target waits for the first");
        assert_eq!((findings.answered, findings.problems.len()), (0, 4));
    }
}
