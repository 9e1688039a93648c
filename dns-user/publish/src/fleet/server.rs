//! Health of the fleet, queried from the running server through its control socket.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use anyhow::bail;
use bytes::Bytes;
use dns_core::name::Name as FleetDomain;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use tokio::net::UdpSocket;

use crate::control::exchange;

/// Timeout of a response.
const PATIENCE: Duration = Duration::from_secs(5);

/// Maximum size of a response in bytes: an explanation of a group of 10,000 instances takes about 2
/// MB.
const LONGEST: usize = 64 << 20;

/// A client of the server's control socket.
#[derive(Debug)]
pub struct ServerClient {
    socket: PathBuf,
    /// DNS address of the server. The server checks the health of instances whose names are
    /// queried, so a query keeps a name's instances checked.
    dns: Option<SocketAddr>,
    queries: Option<UdpSocket>,
}

/// Failure to get the health of a name. The known state stays in use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", socket.display())]
pub struct ServerError {
    socket: PathBuf,
    reason: String,
}

/// The relevant part of the server's response to `/resolve`.
#[derive(Debug, Deserialize)]
struct Explanation {
    targets: Vec<ExplainedTarget>,
}

#[derive(Debug, Deserialize)]
struct ExplainedTarget {
    matches: Vec<ExplainedMatch>,
}

#[derive(Debug, Deserialize)]
struct ExplainedMatch {
    ip: Option<IpAddr>,
    health: String,
}

impl ServerClient {
    /// Creates a client of a control socket, which keeps names checked by queries to `dns`.
    pub fn new(socket: PathBuf, dns: Option<SocketAddr>) -> Self {
        Self { socket, dns, queries: None }
    }

    /// Returns the addresses of a name's unhealthy instances.
    pub async fn ill(&mut self, name: &FleetDomain) -> Result<BTreeSet<IpAddr>, ServerError> {
        self.keep_checked(name).await;
        let failed = |reason: String| ServerError { socket: self.socket.clone(), reason };
        let answer = tokio::time::timeout(PATIENCE, self.explain(name)).await;
        let answer = answer.map_err(|_| failed(format!("no answer within {PATIENCE:?}")))?;
        let answer = answer.map_err(|error| failed(error.to_string()))?;
        let Explanation { targets } = serde_json::from_slice(&answer)
            .map_err(|error| failed(format!("cannot parse the response: {error}")))?;
        let ill = targets.into_iter().flat_map(|target| target.matches).filter_map(|found| {
            // `unchecked` does not mean unhealthy: nothing is known.
            matches!(found.health.as_str(), "failing" | "unknown").then_some(found.ip?)
        });
        Ok(ill.collect())
    }

    async fn explain(&self, name: &FleetDomain) -> anyhow::Result<Bytes> {
        let name: String = url::form_urlencoded::byte_serialize(name.to_string().as_bytes()).collect();
        let path = format!("/resolve?name={name}");
        match exchange(&self.socket, Method::GET, &path, Bytes::new(), LONGEST).await? {
            (StatusCode::OK, body) => Ok(body),
            (status, body) => bail!("{status}: {}", String::from_utf8_lossy(&body).trim_end()),
        }
    }

    /// Sends a DNS query for the name to the server; the answer is ignored.
    async fn keep_checked(&mut self, name: &FleetDomain) {
        let Some(dns) = self.dns else { return };
        if self.queries.is_none() {
            let local = if dns.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            self.queries = UdpSocket::bind(local).await.ok();
        }
        let Some(socket) = &self.queries else { return };
        let mut reply = [0; 512];
        while socket.try_recv(&mut reply).is_ok() {}
        // Header with id, RD and one question (RFC 1035, section 4.1.1); type A, class IN.
        let mut query = vec![0x5a, 0x5a, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        query.extend_from_slice(name.as_wire());
        query.extend_from_slice(&[0, 1, 0, 1]);
        if let Err(error) = socket.send_to(&query, dns).await {
            tracing::debug!(%dns, %error, "query to the server failed; its health checks may lapse");
        }
    }
}
