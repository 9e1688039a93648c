//! API client: one connection per request, over the control socket or mutual TLS.

use std::{
    future::Future,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, Response, StatusCode, body::Incoming};
use rustls_pki_types::ServerName;
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
};
use tokio_rustls::TlsConnector;

use super::{Problem, connection::Connection, connection::Target};
use crate::ops::status::Status;
use dns_kit::{http_client, tls::RotatingTls};

/// Name in the certificate of the API (observed).
const SERVER_NAME: &str = "api.bosh-dns";

/// Time limit for the start of a response; reloading a large foundation takes a second.
const PATIENCE: Duration = Duration::from_secs(30);

/// A client of the API.
#[derive(Clone)]
pub(super) enum Client {
    /// Over the control socket, where the kernel identifies the user.
    Socket(PathBuf),
    Tls {
        address: String,
        tls: Arc<RotatingTls>,
    },
}

/// A connection of either transport.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
}

impl Client {
    /// Creates a client for the server described by `connection`: over its control socket if
    /// accessible, otherwise over its port. Fails if a server of another configuration answers there.
    pub(super) async fn new(connection: &Connection) -> Result<Self, Problem> {
        let client = Self::find(connection)?;
        if let Some(config) = connection.given_config() {
            client.require_config(config).await?;
        }
        Ok(client)
    }

    fn find(connection: &Connection) -> Result<Self, Problem> {
        if let Some(socket) = connection.socket()? {
            match std::os::unix::net::UnixStream::connect(&socket) {
                Ok(_) => return Ok(Self::Socket(socket)),
                Err(error) if !connection.has_api() => {
                    return Err(Problem::Unreachable(no_connection(&socket, &error)));
                }
                Err(_) => {}
            }
        }
        let Target { address, files } = connection.target()?;
        let tls = RotatingTls::load("cli", SERVER_NAME, &files)
            .map_err(|error| Problem::Unreachable(error.to_string()))?;
        Ok(Self::Tls { address, tls })
    }

    /// Fails if the server was started with another configuration than `config`: several servers may share
    /// the default socket's path, or an old file may name the socket of another server.
    async fn require_config(&self, config: &Path) -> Result<(), Problem> {
        let Status { config: Some(served), .. } = self.get("/status").await?.good()?.json()? else {
            // An older server.
            return Ok(());
        };
        let same = match (served.canonicalize(), config.canonicalize()) {
            (Ok(served), Ok(config)) => served == config,
            // The server may run in another root folder, where its file has the same path.
            _ => std::path::absolute(config).is_ok_and(|config| config == served),
        };
        if same {
            return Ok(());
        }
        let (place, served, config) = (self.place(), served.display(), config.display());
        let option = if matches!(self, Self::Socket(_)) { "--socket" } else { "--api" };
        Err(Problem::Unreachable(format!(
            "the server at {place} runs with {served}, not with {config}, whose server is not running; to reach \
             the running one, use --config {served}, or {option} {place}"
        )))
    }

    /// Sends a GET request and reads the complete response.
    pub(super) async fn get(&self, path: &str) -> Result<Answer, Problem> {
        self.whole(Method::GET, path, Bytes::new()).await
    }

    /// Sends a POST request with a JSON body and reads the complete response.
    pub(super) async fn post(&self, path: &str, body: Bytes) -> Result<Answer, Problem> {
        self.whole(Method::POST, path, body).await
    }

    /// Sends a GET request whose response is a stream of lines.
    pub(super) async fn lines(&self, path: &str) -> Result<Lines, Problem> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        if response.status() != StatusCode::OK {
            return Err(collect(response).await?.refusal());
        }
        Ok(Lines { body: response.into_body(), rest: BytesMut::new() })
    }

    /// Sends a request and reads the complete response.
    async fn whole(&self, method: Method, path: &str, body: Bytes) -> Result<Answer, Problem> {
        let response = self.send(method, path, body).await?;
        collect(response).await
    }

    /// Sends a request; returns the response with its body unread.
    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, Problem> {
        let exchange = async {
            let stream = self.connect().await.map_err(|error| self.unreachable(&error))?;
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header("host", SERVER_NAME)
                .header("connection", "close")
                .header("content-type", "application/json")
                .body(Full::new(body))
                .map_err(|error| Problem::BadAnswer(error.to_string()))?;
            http_client::send(stream, request).await.map_err(|error| self.unreachable(&error))
        };
        tokio::time::timeout(PATIENCE, exchange).await.unwrap_or_else(|_| {
            Err(Problem::Unreachable(format!("no answer from {} within {PATIENCE:?}", self.place())))
        })
    }

    async fn connect(&self) -> io::Result<Box<dyn Stream>> {
        match self {
            Self::Socket(path) => Ok(Box::new(UnixStream::connect(path).await?)),
            Self::Tls { address, tls } => {
                let stream = TcpStream::connect(address).await?;
                let name = ServerName::try_from(SERVER_NAME).expect("the constant is a DNS name");
                Ok(Box::new(TlsConnector::from(tls.client_config()).connect(name, stream).await?))
            }
        }
    }

    /// Describes the server's location.
    fn place(&self) -> String {
        match self {
            Self::Socket(path) => path.display().to_string(),
            Self::Tls { address, .. } => address.clone(),
        }
    }

    /// Builds the error for an unreachable server.
    fn unreachable(&self, error: &dyn std::error::Error) -> Problem {
        let place = self.place();
        Problem::Unreachable(format!(
            "cannot connect to the API at {place}: {error}; is the server running, and does it accept the \
             certificates of this configuration (`api`)? On its machine, as root, the control socket needs none"
        ))
    }
}

/// Explains a failed connection to a control socket, with the remedy.
fn no_connection(socket: &Path, error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::PermissionDenied => "; use sudo, or join the group of the socket (control.group)",
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            "; is the server running (systemctl status bosh-dns-xdp)? --socket or --config name another one"
        }
        _ => "",
    };
    format!("cannot connect to the server at {}: {error}{remedy}", socket.display())
}

/// Reads a complete response.
async fn collect(response: Response<Incoming>) -> Result<Answer, Problem> {
    let status = response.status();
    let body = response.into_body().collect().await;
    let body = body.map_err(|error| {
        Problem::Unreachable(format!("the connection closed during the response: {error}"))
    })?;
    Ok(Answer { status, body: body.to_bytes() })
}

impl Answer {
    /// Returns the body as text.
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).trim_end().to_owned()
    }

    /// Returns the response if its status is 200; otherwise an error with the server's reason.
    pub(super) fn good(self) -> Result<Self, Problem> {
        if self.status == StatusCode::OK { Ok(self) } else { Err(self.refusal()) }
    }

    /// Returns the server's reason for a status other than 200.
    fn refusal(&self) -> Problem {
        let text = match self.status {
            StatusCode::FORBIDDEN => format!(
                "the server refuses this request: {}; use a certificate listed in api.admins, or the control socket",
                self.text()
            ),
            StatusCode::NOT_FOUND if self.body.is_empty() => {
                "the server does not know this request: does it have the same version?".to_owned()
            }
            _ if self.body.is_empty() => "the server failed without a reason: see its log".to_owned(),
            _ => self.text(),
        };
        Problem::BadAnswer(text)
    }

    /// Parses the body as JSON.
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, Problem> {
        serde_json::from_slice(&self.body).map_err(|error| not_understood(&error))
    }

    /// Parses the body as JSON lines.
    pub(super) fn json_lines<T: DeserializeOwned>(&self) -> Result<Vec<T>, Problem> {
        let lines = self.body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).map_err(|error| not_understood(&error))).collect()
    }
}

/// Builds the error for a response from another version or another program.
fn not_understood(error: &serde_json::Error) -> Problem {
    Problem::BadAnswer(format!("cannot parse the response ({error}): does the server have the same version?"))
}

/// A response received line by line.
pub(super) struct Lines {
    body: Incoming,
    /// Received bytes of an incomplete line.
    rest: BytesMut,
}

impl Lines {
    /// Returns the next non-empty line; `None` when the server ends the response.
    pub(super) async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = self.rest.split_to(end + 1).freeze().slice(..end);
                if line.is_empty() {
                    continue;
                }
                return Some(line);
            }
            let frame = self.body.frame().await?.ok()?;
            if let Ok(data) = frame.into_data() {
                self.rest.extend_from_slice(&data);
            }
        }
    }
}

/// Requests the status of the server that a configuration leads to, whichever configuration it runs with.
pub(super) async fn status_of(config: &Path) -> Result<Status, Problem> {
    let connection = Connection::with_config(config);
    Client::find(&connection)?.get("/status").await?.good()?.json()
}

/// Requests a path of the server's API; a status other than 200 is an error.
pub(super) fn get(connection: &Connection, path: &str) -> Result<Answer, Problem> {
    wait_for(async { Client::new(connection).await?.get(path).await?.good() })
}

/// Sends a body to a path of the server's API; a status other than 200 is an error.
pub(super) fn post(connection: &Connection, path: &str, body: Bytes) -> Result<Answer, Problem> {
    wait_for(async { Client::new(connection).await?.post(path, body).await?.good() })
}

/// Runs a future to completion.
pub(super) fn wait_for<T>(work: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Problem::Unreachable(format!("cannot start: {error}")))?
        .block_on(work)
}

/// Escapes a value for a query string.
pub(super) fn escaped(value: &str) -> String {
    url::form_urlencoded::byte_serialize(value.as_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_hide_status_codes() {
        for (status, body, part) in [
            (
                StatusCode::FORBIDDEN,
                "not an administrator",
                "refuses this request: not an administrator; use",
            ),
            (StatusCode::NOT_FOUND, "", "does it have the same version?"),
            (StatusCode::NOT_FOUND, "no such tag", "no such tag"),
            (StatusCode::INTERNAL_SERVER_ERROR, "", "see its log"),
        ] {
            let answer = Answer { status, body: Bytes::from_static(body.as_bytes()) };
            let text = answer.good().unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
            assert!(!text.contains(status.as_str()), "{text}");
        }
        assert!(Answer { status: StatusCode::OK, body: Bytes::new() }.good().is_ok());
    }
}
