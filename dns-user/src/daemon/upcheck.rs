//! The server asks itself: at the start, so that it either answers within
//! `timeout` or ends with an error, and on while it runs.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use hickory_proto::{
    op::{Message, MessageType, OpCode, Query, ResponseCode},
    rr::{Name as MessageName, RData, RecordType},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time,
};

use crate::name::Name;

/// How long one question may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// What to ask, and where.
#[derive(Clone, Debug)]
pub(super) struct Upcheck {
    /// The listen addresses, wildcards as loopback.
    targets: Vec<SocketAddr>,
    /// Names that have to give 127.0.0.1.
    upchecks: Vec<Name>,
    /// A name that has to give any address.
    internal: Option<Name>,
}

/// Why the server does not count as up.
#[derive(Debug, thiserror::Error)]
pub(super) enum UpcheckError {
    /// No usable reply.
    #[error("{name} asked at {target} by {transport}: {problem}")]
    Failed {
        /// What was asked.
        name: Name,
        /// Whom.
        target: SocketAddr,
        /// `UDP` or `TCP`.
        transport: &'static str,
        /// What came of it.
        problem: String,
    },
}

impl Upcheck {
    /// Checks for a server that listens on `listen`.
    pub(super) fn new(listen: &[SocketAddr], upchecks: &[Name], internal: Option<&Name>) -> Self {
        Self {
            targets: listen.iter().map(|&address| reachable(address)).collect(),
            upchecks: upchecks.to_vec(),
            internal: internal.cloned(),
        }
    }

    /// Asks everything once, everywhere, by UDP and TCP.
    pub(super) async fn once(&self) -> Result<(), UpcheckError> {
        for &target in &self.targets {
            for name in &self.upchecks {
                for transport in ["UDP", "TCP"] {
                    self.ask(target, name, transport, true).await?;
                }
            }
            if let Some(name) = &self.internal {
                self.ask(target, name, "UDP", false).await?;
            }
        }
        Ok(())
    }

    /// Asks until all is well; the last problem if it is not within `timeout`.
    pub(super) async fn until_up(&self, timeout: Duration) -> Result<(), UpcheckError> {
        let end = time::Instant::now() + timeout;
        loop {
            match self.once().await {
                Ok(()) => return Ok(()),
                Err(problem) if time::Instant::now() >= end => return Err(problem),
                Err(_) => time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// One question; `upcheck`: the reply has to hold 127.0.0.1.
    async fn ask(
        &self,
        target: SocketAddr,
        name: &Name,
        transport: &'static str,
        upcheck: bool,
    ) -> Result<(), UpcheckError> {
        let failed =
            |problem: String| UpcheckError::Failed { name: name.clone(), target, transport, problem };
        let id = fastrand::u16(..);
        let question = question(id, name).map_err(&failed)?;
        let exchange = async {
            match transport {
                "TCP" => by_tcp(target, &question).await,
                _ => by_udp(target, &question).await,
            }
        };
        let reply = match time::timeout(PATIENCE, exchange).await {
            Ok(reply) => reply.map_err(|error| failed(error.to_string()))?,
            Err(_) => return Err(failed(format!("no reply within {PATIENCE:?}"))),
        };
        judge(id, &reply, upcheck).map_err(failed)
    }
}

/// The address at which we reach ourselves.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let address = match listen.ip() {
        IpAddr::V4(address) if address.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(address) if address.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        address => address,
    };
    SocketAddr::new(address, listen.port())
}

/// A query of type A.
fn question(id: u16, name: &Name) -> Result<Vec<u8>, String> {
    let mut labels = Vec::new();
    labels.extend(name.labels());
    let mut name = MessageName::from_labels(labels).map_err(|error| error.to_string())?;
    name.set_fqdn(true);
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.add_query(Query::query(name, RecordType::A));
    message.to_vec().map_err(|error| error.to_string())
}

/// Whether a reply says that all is well.
fn judge(id: u16, reply: &[u8], upcheck: bool) -> Result<(), String> {
    let reply = Message::from_vec(reply).map_err(|error| format!("unreadable reply: {error}"))?;
    if reply.metadata.id != id || reply.metadata.message_type != MessageType::Response {
        return Err("a reply to something else".to_owned());
    }
    if reply.metadata.response_code != ResponseCode::NoError {
        return Err(format!("{}", reply.metadata.response_code));
    }
    let mut addresses = reply.answers.iter().filter_map(|record| match &record.data {
        RData::A(address) => Some(address.0),
        _ => None,
    });
    let found = if upcheck {
        addresses.any(|address| address == Ipv4Addr::LOCALHOST)
    } else {
        addresses.next().is_some()
    };
    if found { Ok(()) } else { Err("a reply without the address".to_owned()) }
}

/// Asks by UDP.
async fn by_udp(target: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr =
        if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(target).await?;
    socket.send(question).await?;
    let mut reply = vec![0; 4096];
    let length = socket.recv(&mut reply).await?;
    reply.truncate(length);
    Ok(reply)
}

/// Asks by TCP.
async fn by_tcp(target: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(target).await?;
    // A question of one name is far below 64 KiB.
    let mut framed = (question.len() as u16).to_be_bytes().to_vec();
    framed.extend_from_slice(question);
    stream.write_all(&framed).await?;
    let length = stream.read_u16().await?;
    let mut reply = vec![0; length.into()];
    stream.read_exact(&mut reply).await?;
    Ok(reply)
}
