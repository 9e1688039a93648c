//! What the running server knows: its own files `records.json` and aliases, and the health of the
//! fleet, queried through its control socket.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::bail;
use bytes::Bytes;
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    config::Config as ServerConfig,
    name::Name as FleetDomain,
};
use dns_kit::files::{FileStamp, bounded, glob::glob, load_config};
use hyper::{Method, StatusCode};
use serde::Deserialize;
use tokio::net::UdpSocket;

use crate::control::exchange;

/// Timeout of a response.
const TIMEOUT: Duration = Duration::from_secs(5);

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
        let answer = tokio::time::timeout(TIMEOUT, self.explain(name)).await;
        let answer = answer.map_err(|_| failed(format!("no answer within {TIMEOUT:?}")))?;
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

/// Follows the files; the last valid state of each stays in use.
#[derive(Debug)]
pub struct FleetFiles {
    records: PathBuf,
    /// Glob pattern of the alias files; empty for none.
    aliases: String,
    /// Stamps of the files at the last refresh.
    stamps: Vec<(PathBuf, Option<FileStamp>)>,
    good_records: Option<Vec<u8>>,
    good_aliases: AliasFiles,
    snapshot: Option<Arc<Snapshot>>,
    problem: Option<SourceError>,
}

/// Failure to read the fleet's files. The last valid state stays in use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", file.display())]
pub struct SourceError {
    file: PathBuf,
    reason: String,
}

impl FleetFiles {
    /// Follows the files in a server's `config.json`; also returns that configuration.
    pub fn of_server(path: &Path) -> Result<(Self, ServerConfig), String> {
        let config = load_config(path).map_err(|error| error.to_string())?.config;
        let records = config.records_file.clone().ok_or_else(|| {
            format!("{}: \"records_file\" is missing; fleet names need the server's records", path.display())
        })?;
        Ok((Self::new(records, config.alias_files_glob.clone()), config))
    }

    /// Follows `records.json` and the alias files that match a glob pattern.
    pub fn new(records: PathBuf, aliases: String) -> Self {
        Self {
            records,
            aliases,
            stamps: Vec::new(),
            good_records: None,
            good_aliases: AliasFiles::default(),
            snapshot: None,
            problem: None,
        }
    }

    /// Reads changed files. Returns the latest valid state, if any, and the problem of the current
    /// files.
    pub fn refresh(&mut self) -> (Option<Arc<Snapshot>>, Option<SourceError>) {
        let files = self.files();
        let stamps: Vec<_> = files.iter().map(|path| (path.clone(), FileStamp::of(path))).collect();
        if stamps != self.stamps || self.problem.is_some() {
            self.stamps = stamps;
            self.problem = self.read(&files[1..]).err();
        }
        (self.snapshot.clone(), self.problem.clone())
    }

    /// Returns `records.json`, followed by the alias files in order of precedence.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut files = vec![self.records.clone()];
        // A malformed pattern matches no file; the server reports it.
        files.extend(glob(&self.aliases).unwrap_or_default());
        files
    }

    fn read(&mut self, alias_files: &[PathBuf]) -> Result<(), SourceError> {
        let records = read(&self.records);
        let mut contents = Vec::new();
        let mut problem = None;
        for path in alias_files {
            match read(path) {
                Ok(bytes) => contents.push((path.display().to_string(), bytes)),
                Err(error) => problem = Some(error),
            }
        }
        if problem.is_none() {
            let files = contents.iter().map(|(file, bytes)| (file.as_str(), bytes.as_slice()));
            match AliasFiles::parse(files) {
                Ok((aliases, _)) => self.good_aliases = aliases,
                Err(error) => {
                    problem =
                        Some(SourceError { file: PathBuf::from(&self.aliases), reason: error.to_string() });
                }
            }
        }
        let refused = |reason: String| SourceError { file: self.records.clone(), reason };
        match records.and_then(|bytes| match Records::parse(&bytes) {
            Ok(parsed) => Ok((bytes, parsed)),
            Err(error) => Err(refused(error.to_string())),
        }) {
            Ok((bytes, (records, _))) => {
                self.good_records = Some(bytes);
                self.snapshot = Some(Arc::new(Snapshot::build(records, &self.good_aliases).0));
            }
            Err(error) => {
                problem = Some(error);
                // New aliases apply to the last valid records, which were parsed successfully
                // before.
                let good = self.good_records.as_deref().and_then(|bytes| Records::parse(bytes).ok());
                if let Some((records, _)) = good {
                    self.snapshot = Some(Arc::new(Snapshot::build(records, &self.good_aliases).0));
                }
            }
        }
        problem.map_or(Ok(()), Err)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, SourceError> {
    bounded::read(path)
        .map_err(|error| SourceError { file: path.to_owned(), reason: format!("cannot be read: {error}") })
}
