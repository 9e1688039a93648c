//! A server's and a client's network namespace, joined by a veth pair, and queries between them.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Result, ensure};
use hickory_proto::{op::Message, rr::RecordType};

use crate::{
    client,
    namespace::{End, Namespace, join},
};

/// Timeout if a reply is expected.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Timeout if no reply is expected.
pub const SHORT: Duration = Duration::from_millis(150);

/// A server and a client, joined by veth.
#[derive(Debug)]
pub struct Pair {
    pub server: Namespace,
    pub client: Namespace,
}

impl Pair {
    /// Joins `srv` in the server's namespace, with the addresses of [`v4`] and [`v6`], and `cli` in the
    /// client's, 169.254.0.1 and fd00::1. The server forwards between interfaces, as a container host does.
    pub fn new(label: &str) -> Result<Self> {
        let pair = Self::apart(label)?;
        pair.server.forward()?;
        let server = ["169.254.0.2/24", "fd00::2/64"];
        pair.join(("srv", &server), ("cli", &["169.254.0.1/24", "fd00::1/64"]))
    }

    /// Joins a server's and a client's interface, each given by its name and addresses with prefix length.
    pub fn joined(label: &str, server: (&str, &[&str]), client: (&str, &[&str])) -> Result<Self> {
        Self::apart(label)?.join(server, client)
    }

    fn apart(label: &str) -> Result<Self> {
        let [server, client] = ["s", "c"].map(|part| Namespace::new(&format!("{label}-{part}")));
        Ok(Self {
            server: server?,
            client: client?,
        })
    }

    fn join(self, server: (&str, &[&str]), client: (&str, &[&str])) -> Result<Self> {
        join(
            End::new(&self.server, server.0, server.1),
            End::new(&self.client, client.0, client.1),
        )?;
        Ok(self)
    }
}

/// Returns the server's IPv4 endpoint.
pub fn v4() -> SocketAddr {
    SocketAddr::from(([169, 254, 0, 2], 53))
}

/// Returns the server's IPv6 endpoint.
pub fn v6() -> SocketAddr {
    SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, 2], 53))
}

/// Queries from inside a namespace; `None` on timeout.
pub fn ask(
    from: &Namespace,
    server: SocketAddr,
    name: &str,
    record_type: RecordType,
    edns: Option<u16>,
    patience: Duration,
) -> Result<Option<Message>> {
    let query = client::query(name, record_type, edns)?;
    let bytes = query.to_vec()?;
    let reply = read(from.run(|| client::ask_raw(server, &bytes, patience))?)?;
    if let Some(reply) = &reply {
        ensure!(
            reply.metadata.id == query.metadata.id,
            "a reply to another query"
        );
    }
    Ok(reply)
}

/// Queries A and returns the addresses; `None` on timeout.
pub fn addresses(
    from: &Namespace,
    server: SocketAddr,
    name: &str,
    patience: Duration,
) -> Result<Option<Vec<IpAddr>>> {
    let reply = ask(from, server, name, RecordType::A, Some(1232), patience)?;
    Ok(reply.map(|reply| client::addresses(&reply)))
}

/// Parses a reply; `None` on timeout.
pub fn read(reply: io::Result<Vec<u8>>) -> Result<Option<Message>> {
    match reply {
        Ok(reply) => Ok(Some(Message::from_vec(&reply)?)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionRefused
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}
