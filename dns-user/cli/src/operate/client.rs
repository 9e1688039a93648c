//! API client: one connection per request, over the control socket or mutual TLS.

use std::{
    env,
    ffi::OsString,
    fs::File,
    future::Future,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::{Bytes, BytesMut};
use clap::Args;
use http_body_util::Full;
use hyper::{Method, Request, Response, StatusCode, body::Incoming};
use rustls_pki_types::ServerName;
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{Problem, waiting};
use crate::complain;
use dns_core::config::{CONTROL_SOCKET, Config, ConfigError, Loaded, TlsFiles};
use dns_kit::{
    http_client,
    tls::{RotatingTls, TlsError},
};
use dns_resolver::ops::status::ServerStatus;

/// Maximum size of a response, or of a line of a stream, in bytes: 100,000 instances take 30 MB.
const MAX_BODY: usize = 256 << 20;

/// Name in the certificate of the API (observed).
pub(crate) const SERVER_NAME: &str = "api.bosh-dns";

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
        let client = Self::find(connection).await?;
        if let Some(config) = connection.given_config() {
            client.require_config(config).await?;
        }
        Ok(client)
    }

    async fn find(connection: &Connection) -> Result<Self, Problem> {
        if let Some(socket) = connection.socket()? {
            // The file of a killed server stays: only connecting shows whether one listens. Without
            // waiting, since a hung server accepts nothing (connect(2), EAGAIN).
            match UnixStream::connect(&socket).await {
                Ok(_) => return Ok(Self::Socket(socket)),
                Err(error) if !connection.has_api() => {
                    return Err(Problem::Unreachable(no_connection(&socket, &error)));
                }
                Err(_) => {}
            }
        }
        let Target { address, files } = connection.target()?;
        let tls = RotatingTls::load("cli", SERVER_NAME, &files)
            .map_err(|error| unusable_files(&files, &error))?;
        Ok(Self::Tls { address, tls })
    }

    /// Fails if the server was started with another configuration than `config`: several servers may share
    /// the default socket's path, or an old file may name the socket of another server.
    async fn require_config(&self, config: &Path) -> Result<(), Problem> {
        let ServerStatus {
            config: Some(served),
            ..
        } = self.get("/status").await?.good()?.json()?
        else {
            // An older server.
            return Ok(());
        };
        let same = match (served.canonicalize(), config.canonicalize()) {
            // Resolved, since the file of a BOSH job is reached by links.
            (Ok(served), Ok(config)) => served == config,
            // The server may run in another root folder, where its file has the same path.
            _ => std::path::absolute(config).is_ok_and(|config| config == served),
        };
        if same {
            return Ok(());
        }
        let place = self.place();
        let served = served.display();
        let config = config.display();
        let option = if matches!(self, Self::Socket(_)) {
            "--socket"
        } else {
            "--api"
        };
        Err(Problem::Unreachable(format!(
            "the server at {place} runs with {served}, not with {config}, whose server is not running; to reach \
             the running one, use --config {served}, or {option} {place}"
        )))
    }

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
        Ok(Lines {
            body: response.into_body(),
            rest: BytesMut::new(),
        })
    }

    async fn whole(&self, method: Method, path: &str, body: Bytes) -> Result<Answer, Problem> {
        let response = self.send(method, path, body).await?;
        collect(response).await
    }

    /// Sends a request; returns the response with its body unread.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, Problem> {
        let exchange = async {
            let stream = self
                .connect()
                .await
                .map_err(|error| self.unreachable(&error))?;
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header("host", SERVER_NAME)
                // A command asks once; the server's place is free for others at once.
                .header("connection", "close")
                .header("content-type", "application/json")
                .body(Full::new(body))
                .map_err(|error| Problem::BadAnswer(error.to_string()))?;
            http_client::send(stream, request)
                .await
                .map_err(|error| self.unreachable(&error))
        };
        let socket = match self {
            Self::Socket(path) => Some(path.as_path()),
            Self::Tls { .. } => None,
        };
        waiting::answer(&self.place(), socket, exchange).await
    }

    async fn connect(&self) -> io::Result<Box<dyn Stream>> {
        match self {
            Self::Socket(path) => Ok(Box::new(UnixStream::connect(path).await?)),
            Self::Tls { address, tls } => Ok(Box::new(connect_tls(address, tls).await?)),
        }
    }

    fn place(&self) -> String {
        match self {
            Self::Socket(path) => path.display().to_string(),
            Self::Tls { address, .. } => address.clone(),
        }
    }

    fn unreachable(&self, error: &(dyn std::error::Error + 'static)) -> Problem {
        let place = self.place();
        // Without a listener certificates are not the cause, and the control socket has none.
        let remedy = if matches!(self, Self::Socket(_)) || is_refused(error) {
            "is the server running (systemctl status bosh-dns-xdp)? --config names another one"
        } else {
            "does the server accept the certificates of this configuration (`api`)? On its machine, as root, \
             the control socket needs none"
        };
        Problem::Unreachable(format!(
            "cannot connect to the API at {place}: {error}; {remedy}"
        ))
    }
}

/// Connects to the API.
pub(crate) async fn connect_tls(
    address: &str,
    tls: &RotatingTls,
) -> io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from(SERVER_NAME).expect("the constant is a DNS name");
    TlsConnector::from(tls.client_config())
        .connect(name, stream)
        .await
}

/// Returns whether nothing listens at the place.
fn is_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(found) = cause {
        // The error of connect(2) lies below those of TLS and HTTP.
        let kind = found.downcast_ref::<io::Error>().map(io::Error::kind);
        if kind == Some(io::ErrorKind::ConnectionRefused) {
            return true;
        }
        cause = found.source();
    }
    false
}

/// Explains files of the client that cannot be used, with the remedy.
fn unusable_files(files: &TlsFiles, error: &TlsError) -> Problem {
    let TlsFiles {
        certificate,
        private_key,
        ca,
    } = files;
    for path in [certificate, private_key, ca] {
        // The error of TLS names neither the file nor the user's rights, which are the usual cause.
        let denied =
            File::open(path).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied);
        if denied {
            return Problem::Unreachable(format!(
                "{}: this user may not read it; use sudo, or --cert, --key and --ca",
                path.display()
            ));
        }
    }
    Problem::Unreachable(error.to_string())
}

/// Explains a failed connection to a control socket, with the remedy.
fn no_connection(socket: &Path, error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; use sudo, or join the group of the socket (control.group)"
        }
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            "; is the server running (systemctl status bosh-dns-xdp)? --socket or --config name another one"
        }
        io::ErrorKind::WouldBlock => {
            "; as many connections as fit wait there: does the server hang (systemctl status bosh-dns-xdp)?"
        }
        _ => "",
    };
    format!(
        "cannot connect to the server at {}: {error}{remedy}",
        socket.display()
    )
}

async fn collect(response: Response<Incoming>) -> Result<Answer, Problem> {
    let status = response.status();
    let mut incoming = response.into_body();
    let mut body = BytesMut::new();
    while let Some(part) = waiting::next_part(&mut incoming).await? {
        add(&mut body, &part)?;
    }
    Ok(Answer {
        status,
        body: body.freeze(),
    })
}

/// Adds a part of a response to what has been received.
fn add(received: &mut BytesMut, part: &Bytes) -> Result<(), Problem> {
    received.extend_from_slice(part);
    if received.len() > MAX_BODY {
        let problem = format!("the response is longer than {MAX_BODY} bytes");
        return Err(Problem::BadAnswer(problem));
    }
    Ok(())
}

impl Answer {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).trim_end().to_owned()
    }

    /// Returns the response if its status is 200; otherwise an error with the server's reason.
    pub(super) fn good(self) -> Result<Self, Problem> {
        if self.status == StatusCode::OK {
            Ok(self)
        } else {
            Err(self.refusal())
        }
    }

    /// Returns the server's reason for a status other than 200.
    fn refusal(&self) -> Problem {
        let text = match self.status {
            StatusCode::FORBIDDEN => format!(
                "the server refuses this request: {}; use a certificate listed in api.admins, or the control socket",
                self.text()
            ),
            // The router's own 404 has no body; one of the server's answers has a reason.
            StatusCode::NOT_FOUND if self.body.is_empty() => {
                "the server does not know this request: does it have the same version?".to_owned()
            }
            _ if self.body.is_empty() => {
                "the server failed without a reason: see its log".to_owned()
            }
            _ => self.text(),
        };
        Problem::BadAnswer(text)
    }

    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, Problem> {
        serde_json::from_slice(&self.body).map_err(|error| not_understood(&error))
    }

    pub(super) fn json_lines<T: DeserializeOwned>(&self) -> Result<Vec<T>, Problem> {
        let lines = self
            .body
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty());
        lines
            .map(|line| serde_json::from_slice(line).map_err(|error| not_understood(&error)))
            .collect()
    }
}

/// Builds the error for a response from another version or another program.
pub(super) fn not_understood(error: &serde_json::Error) -> Problem {
    Problem::BadAnswer(format!(
        "cannot parse the response ({error}): does the server have the same version?"
    ))
}

/// A response received line by line.
pub(super) struct Lines {
    body: Incoming,
    /// Received bytes of an incomplete line.
    rest: BytesMut,
}

impl Lines {
    /// Returns the next non-empty line. The end of the stream is an error: scripts must see that they have not
    /// seen everything.
    pub(super) async fn next(&mut self) -> Result<Bytes, Problem> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = self.rest.split_to(end + 1).freeze().slice(..end);
                if line.is_empty() {
                    continue;
                }
                return Ok(line);
            }
            match waiting::next_part(&mut self.body).await? {
                Some(part) => add(&mut self.rest, &part)?,
                None => {
                    let end = "the server ended the stream".to_owned();
                    return Err(Problem::Unreachable(end));
                }
            }
        }
    }
}

/// Requests the status of the server that a configuration leads to, whichever configuration it runs with.
pub(super) async fn status_of(config: &Path) -> Result<ServerStatus, Problem> {
    let connection = Connection::with_config(config);
    Client::find(&connection)
        .await?
        .get("/status")
        .await?
        .good()?
        .json()
}

/// Requests a path of the server's API; a status other than 200 is an error.
pub(super) fn get(connection: &Connection, path: &str) -> Result<Answer, Problem> {
    wait_for(async { Client::new(connection).await?.get(path).await?.good() })
}

/// Sends a body to a path of the server's API; a status other than 200 is an error.
pub(super) fn post(connection: &Connection, path: &str, body: Bytes) -> Result<Answer, Problem> {
    wait_for(async {
        Client::new(connection)
            .await?
            .post(path, body)
            .await?
            .good()
    })
}

pub(super) fn wait_for<T>(work: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
    // A command waits for one exchange at a time: further threads would only cost its start.
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Problem::Unreachable(format!("cannot start: {error}")))?
        .block_on(work)
}

pub(super) fn escaped(value: &str) -> String {
    url::form_urlencoded::byte_serialize(value.as_bytes()).collect()
}

//----------- Connection --------------------------------------------------------

/// Usual locations of config.json: the bosh-dns job on a VM, then the Debian package.
const CONFIGS: [&str; 2] = [
    "/var/vcap/jobs/bosh-dns/config/config.json",
    "/etc/bosh-dns-xdp/config.json",
];

/// Returns the first existing file of [`CONFIGS`], or the first one if there is none.
pub(crate) fn usual_config() -> &'static Path {
    Path::new(
        CONFIGS
            .into_iter()
            .find(|file| Path::new(file).exists())
            .unwrap_or(CONFIGS[0]),
    )
}

/// How to reach the server.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct Connection {
    /// The server's config.json, which names the API and its certificates
    /// [default: the environment variables DNS_API_*, else the file of the bosh-dns job or the Debian package]
    #[arg(long, value_name = "FILE", global = true)]
    pub(super) config: Option<PathBuf>,
    /// The server's control socket [default: as configured]
    #[arg(long, value_name = "FILE")]
    socket: Option<PathBuf>,
    /// Address of the API [environment: DNS_API_ADDRESS]
    #[arg(long, value_name = "[https://]HOST:PORT")]
    api: Option<String>,
    /// CA of the API server's certificate [environment: DNS_API_TLS_CA_CERT_PATH]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Client certificate [environment: DNS_API_TLS_CERTIFICATE_PATH or DNS_API_TLS_CERT_PATH]
    #[arg(long, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Key of the client certificate [environment: DNS_API_TLS_PRIVATE_KEY_PATH or DNS_API_TLS_KEY_PATH]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

/// Address of the API and the certificates to present.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// Host and port, separated by a colon.
    pub(super) address: String,
    pub(super) files: TlsFiles,
}

impl Connection {
    /// Leads to the server of a configuration.
    pub(super) fn with_config(config: &Path) -> Self {
        Self {
            config: Some(config.to_owned()),
            ..Self::default()
        }
    }

    /// Determines the target from, in order: options, a configuration given as option, the
    /// environment, the configuration of the bosh-dns job.
    pub(super) fn target(&self) -> Result<Target, Problem> {
        self.target_with(&|name| env::var_os(name), usual_config())
    }

    /// Returns the control socket: the given one or the one in the configuration. `None` if options
    /// or variables name the API's port.
    pub(super) fn socket(&self) -> Result<Option<PathBuf>, Problem> {
        let Self {
            config,
            socket,
            api,
            ca,
            cert,
            key,
        } = self;
        if socket.is_some() {
            return Ok(socket.clone());
        }
        let by_port = api.is_some() || ca.is_some() || cert.is_some() || key.is_some();
        let by_variable = config.is_none() && env::var_os("DNS_API_ADDRESS").is_some();
        let file = config.as_deref().unwrap_or(usual_config());
        // A variable names the API's port, as for bosh-dns's command line.
        if by_port || by_variable || (config.is_none() && !file.exists()) {
            return Ok(None);
        }
        let config = match read(file) {
            Ok((config, problems)) => {
                for problem in problems {
                    complain(&format_args!(
                        "{problem}; the other settings are used to find the server"
                    ));
                }
                config
            }
            // The server may be running with the last good version. The client requires that it was started
            // with a file given as option.
            Err(error) if Path::new(CONTROL_SOCKET).exists() => {
                complain(&format_args!("{error}; trying the default control socket"));
                return Ok(Some(CONTROL_SOCKET.into()));
            }
            Err(error) => return Err(Problem::Unreachable(error.to_string())),
        };
        // A configuration that only names an API refers to its port.
        let named = config
            .control
            .filter(|control| !control.is_default || config.api.is_none());
        Ok(named.map(|control| control.socket))
    }

    /// Returns the configuration given as option; `None` if another option names the server.
    pub(super) fn given_config(&self) -> Option<&Path> {
        let Self {
            config,
            socket,
            api,
            ca: _,
            cert: _,
            key: _,
        } = self;
        config
            .as_deref()
            .filter(|_| socket.is_none() && api.is_none())
    }

    /// Returns whether the API's port can be used if the control socket is unavailable.
    pub(super) fn has_api(&self) -> bool {
        self.socket.is_none() && self.target().is_ok()
    }

    /// Implements [`Self::target`] with the given environment and job.
    fn target_with(
        &self,
        environment: &dyn Fn(&str) -> Option<OsString>,
        job_config: &Path,
    ) -> Result<Target, Problem> {
        let mut address = self.api.clone();
        let mut ca = self.ca.clone();
        let mut certificate = self.cert.clone();
        let mut private_key = self.key.clone();
        // A configuration on the command line names another server than the variables may.
        if self.config.is_none() {
            if address.is_none()
                && let Some(value) = variable(environment, &["DNS_API_ADDRESS"])
            {
                address = Some(value.to_string_lossy().into_owned());
            }
            for (option, names) in [
                (&mut ca, &["DNS_API_TLS_CA_CERT_PATH"][..]),
                (
                    &mut certificate,
                    &["DNS_API_TLS_CERTIFICATE_PATH", "DNS_API_TLS_CERT_PATH"],
                ),
                (
                    &mut private_key,
                    &["DNS_API_TLS_PRIVATE_KEY_PATH", "DNS_API_TLS_KEY_PATH"],
                ),
            ] {
                if option.is_none() {
                    *option = variable(environment, names).map(PathBuf::from);
                }
            }
        }
        if let (Some(address), Some(ca), Some(certificate), Some(private_key)) =
            (&address, &ca, &certificate, &private_key)
        {
            let files = TlsFiles {
                certificate: certificate.clone(),
                private_key: private_key.clone(),
                ca: ca.clone(),
            };
            return Ok(Target {
                address: host_and_port(address),
                files,
            });
        }
        let configured = self.configured(job_config)?;
        Ok(Target {
            address: address.map_or(configured.address, |address| host_and_port(&address)),
            files: TlsFiles {
                certificate: certificate.unwrap_or(configured.files.certificate),
                private_key: private_key.unwrap_or(configured.files.private_key),
                ca: ca.unwrap_or(configured.files.ca),
            },
        })
    }

    fn configured(&self, job_config: &Path) -> Result<Target, Problem> {
        let file = self.config.as_deref().unwrap_or(job_config);
        if self.config.is_none() && !file.exists() {
            return Err(Problem::Unreachable(format!(
                "no API is configured: use --config FILE, or set DNS_API_ADDRESS, DNS_API_TLS_CA_CERT_PATH, \
                 DNS_API_TLS_CERTIFICATE_PATH and DNS_API_TLS_PRIVATE_KEY_PATH ({} does not exist)",
                file.display()
            )));
        }
        let (config, _) = read(file).map_err(|error| Problem::Unreachable(error.to_string()))?;
        let api = config.api.ok_or_else(|| {
            Problem::Unreachable(format!(
                "{}: neither \"control\" nor \"api\" is configured: the server is not reachable",
                file.display()
            ))
        })?;
        Ok(Target {
            // bosh-dns's API listens there only, whatever `address` says.
            address: format!("127.0.0.1:{}", api.port),
            files: client_files(&api.tls),
        })
    }
}

/// Returns the value of the first of these variables that is set to something.
fn variable(environment: &dyn Fn(&str) -> Option<OsString>, names: &[&str]) -> Option<OsString> {
    for name in names {
        if let Some(value) = environment(name)
            // Scripts often empty a variable instead of unsetting it.
            && !value.is_empty()
        {
            return Some(value);
        }
    }
    None
}

/// Reads the valid part of a configuration, and its errors: the server runs with the last good
/// version, whose socket and port are probably the same. Fails if nothing can be read.
fn read(file: &Path) -> Result<(Config, Vec<ConfigError>), ConfigError> {
    let (mut errors, loaded) = dns_kit::files::check_config(file);
    match loaded {
        Some(Loaded { config, .. }) => Ok((config, errors)),
        None => Err(errors.swap_remove(0)),
    }
}

/// Returns the client's files next to the server's: the same names with `client` in place of
/// `server` (the reverse for the CA), as in the bosh-dns job. Falls back to the server's own files
/// if they do not exist.
pub(crate) fn client_files(server: &TlsFiles) -> TlsFiles {
    let mut files = server.clone();
    // A certificate of one side does not match the other side's key.
    if let Some(certificate) = sibling(&server.certificate, "server", "client")
        && let Some(private_key) = sibling(&server.private_key, "server", "client")
    {
        files.certificate = certificate;
        files.private_key = private_key;
    }
    if let Some(ca) = sibling(&server.ca, "client", "server") {
        files.ca = ca;
    }
    files
}

/// Returns the file next to `path` with `old` replaced by `new` in its name, if it exists.
fn sibling(path: &Path, old: &str, new: &str) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let other = path.with_file_name(name.replace(old, new));
    (name.contains(old) && other.exists()).then_some(other)
}

/// Returns host and port of an address that may be a URL.
fn host_and_port(address: &str) -> String {
    address
        .trim_start_matches("https://")
        .trim_end_matches('/')
        .to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use nix::sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
    };

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
            let answer = Answer {
                status,
                body: Bytes::from_static(body.as_bytes()),
            };
            let text = answer.good().unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
            assert!(!text.contains(status.as_str()), "{text}");
        }
        assert!(
            Answer {
                status: StatusCode::OK,
                body: Bytes::new()
            }
            .good()
            .is_ok()
        );
    }

    /// Returns environment variables from a list.
    fn environment<'a>(list: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        move |name| {
            list.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| OsString::from(value))
        }
    }

    #[test]
    fn bosh_dns_variables_suffice() {
        let variables = [
            ("DNS_API_ADDRESS", "https://127.0.0.1:53080/"),
            ("DNS_API_TLS_CA_CERT_PATH", "/ca"),
            ("DNS_API_TLS_CERTIFICATE_PATH", "/cert"),
            ("DNS_API_TLS_PRIVATE_KEY_PATH", "/key"),
        ];
        let target = Connection::default()
            .target_with(&environment(&variables), Path::new("/nowhere"))
            .unwrap();
        assert_eq!(target.address, "127.0.0.1:53080");
        assert_eq!(target.files.ca, Path::new("/ca"));
        assert_eq!(target.files.certificate, Path::new("/cert"));
        assert_eq!(target.files.private_key, Path::new("/key"));
    }

    #[test]
    fn options_win_over_variables() {
        let variables = [
            ("DNS_API_ADDRESS", "127.0.0.1:1"),
            ("DNS_API_TLS_CA_CERT_PATH", "/ca"),
            ("DNS_API_TLS_CERT_PATH", "/cert"),
            ("DNS_API_TLS_KEY_PATH", "/key"),
        ];
        let connection = Connection {
            api: Some("127.0.0.1:2".into()),
            ..Connection::default()
        };
        let target = connection
            .target_with(&environment(&variables), Path::new("/nowhere"))
            .unwrap();
        assert_eq!(target.address, "127.0.0.1:2");
    }

    #[test]
    fn configuration_overrides_variables() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        for name in [
            "server.crt",
            "server.key",
            "client.crt",
            "client.key",
            "client_ca.crt",
        ] {
            std::fs::write(file(name), "").unwrap();
        }
        let config = serde_json::json!({
            "address": "127.0.0.1", "port": 53,
            "api": {
                "port": 53080, "certificate_file": file("server.crt"),
                "private_key_file": file("server.key"), "ca_file": file("client_ca.crt"),
            },
        });
        std::fs::write(file("config.json"), config.to_string()).unwrap();
        let connection = Connection {
            config: Some(file("config.json")),
            ..Connection::default()
        };
        let variables = [("DNS_API_ADDRESS", "127.0.0.1:1")];
        let target = connection
            .target_with(&environment(&variables), Path::new("/nowhere"))
            .unwrap();
        assert_eq!(target.address, "127.0.0.1:53080");
        assert_eq!(target.files.certificate, file("client.crt"));
        assert_eq!(target.files.private_key, file("client.key"));
        // Without a server_ca.crt both sides use the same CA.
        assert_eq!(target.files.ca, file("client_ca.crt"));
    }

    #[tokio::test]
    async fn killed_server_is_no_question_of_certificates() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let client = Client::Socket(path);
        // Accepts the connection and ends, as a server that is killed.
        let (answer, _) = tokio::join!(client.get("/status"), async {
            drop(listener.accept().await.unwrap());
        });
        let Err(problem) = answer else {
            panic!("an answer of a killed server");
        };
        let text = problem.to_string();
        assert!(
            text.contains("is the server running") && !text.contains("certificates"),
            "{text}"
        );
    }

    #[tokio::test]
    async fn hung_server_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let flags = SockFlag::empty();
        let listener = socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        // Commands of a day, say: none of them is accepted.
        let mut queue = Vec::new();
        while let Ok(stream) = UnixStream::connect(&path).await {
            queue.push(stream);
        }
        let connection = Connection {
            socket: Some(path),
            ..Connection::default()
        };
        let problem = Client::find(&connection).await.err().unwrap().to_string();
        assert!(problem.contains("does the server hang"), "{problem}");
    }

    #[test]
    fn missing_target_error_lists_options() {
        let problem = Connection::default()
            .target_with(&environment(&[]), Path::new("/nowhere"))
            .unwrap_err();
        assert!(problem.to_string().contains("DNS_API_ADDRESS"), "{problem}");
    }
}
