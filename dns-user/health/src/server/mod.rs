//! The health server: answers `GET /health` over mutual TLS from the state of this VM's agent and
//! jobs. Runs as a separate process.

mod jobs;

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::anyhow;
use axum::{
    Router,
    http::{StatusCode, Uri, header},
    response::{IntoResponse as _, Response},
};
use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    task::JoinSet,
};

use self::jobs::{Jobs, Summary};
use super::{HEALTH_NAME, Report};
use dns_core::config::{
    ConfigError, LoggingConfig, TlsFiles,
    parse::{NoFile, logging, tls_files},
    reader::{Json, ObjectReader},
};
use dns_kit::{
    files::{FileStamp, bounded},
    http_server::{Client, Listener, Server, ServerLimits},
    limits::raise_file_limit,
    logs::{LineLimit, LogFormat, Logs, print_error},
    tls::RotatingTls,
    until_ended,
};

/// Maximum number of open connections, if the limit on open files allows: every VM that resolves
/// this VM's names keeps one.
const MAX_CONNECTIONS: usize = 8192;

/// File descriptors for scripts, certificates and the agent's file.
const OTHER_FILES: u64 = 64;

/// Time for which a connection may stay open without a request: slightly longer than three check
/// intervals of bosh-dns.
const IDLE_LIMIT: Duration = Duration::from_secs(75);

/// A health server bound to its address.
pub struct HealthServer {
    socket: TcpListener,
    tls: Arc<RotatingTls>,
    vm: Arc<Vm>,
}

/// The state of this VM.
#[derive(Debug)]
struct Vm {
    /// State reported by the agent.
    agent: AgentFile,
    /// State reported by the jobs' scripts.
    jobs: Arc<Jobs>,
    /// Time for which a request may wait for the first round of scripts.
    patience: Duration,
}

impl HealthServer {
    /// Loads the certificates and starts listening.
    pub async fn bind(config: &HealthServerConfig) -> anyhow::Result<Self> {
        let tls = RotatingTls::load("health_server", HEALTH_NAME, &config.tls)?;
        if !tls.current().certificate.is_issued_to(HEALTH_NAME) {
            tracing::warn!(
                "the certificate is not issued to {HEALTH_NAME}: clients will not accept it"
            );
        }
        let address = config.listen;
        let socket = TcpListener::bind(address).await.map_err(|error| {
            anyhow!("cannot listen on {address}: {error}; stop the other health server or change the port")
        })?;
        let jobs = Jobs::new(
            config.jobs_dir.clone(),
            config.executable_path.clone(),
            config.executable_interval,
        );
        let agent = AgentFile::new(config.health_file.clone());
        let vm = Arc::new(Vm {
            agent,
            jobs: Arc::new(jobs),
            patience: config.request_timeout,
        });
        Ok(Self { socket, tls, vm })
    }

    /// Returns the listen address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns the certificates and their key, which are reloaded when they change.
    pub fn tls(&self) -> &Arc<RotatingTls> {
        &self.tls
    }

    /// Serves until `stop` is ready, then finishes requests in progress.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let Self { socket, tls, vm } = self;
        let mut background = JoinSet::new();
        background.spawn(vm.jobs.clone().run());
        background.spawn(tls.clone().watch(|_| {}));
        let files =
            usize::try_from(raise_file_limit().saturating_sub(OTHER_FILES)).unwrap_or(usize::MAX);
        let limits = ServerLimits {
            connections: files.clamp(1, MAX_CONNECTIONS),
            handshake: vm.patience,
            idle: IDLE_LIMIT,
            head: 16 << 10,
            ..ServerLimits::default()
        };
        let listener = Listener::Tls(socket, Box::new(move || tls.server_config()));
        Server::new("the health server", listener)
            .with_limits(limits)
            .run(
                move |client: &Client| {
                    let vm = vm.clone();
                    let is_known = is_known(client);
                    Router::new().fallback(move |uri: Uri| async move {
                        answer(uri.path(), is_known, &vm).await
                    })
                },
                stop,
            )
            .await;
        // Running scripts are killed with their groups.
        background.shutdown().await;
    }
}

/// Returns whether a client's certificate is issued to [`HEALTH_NAME`].
fn is_known(client: &Client) -> bool {
    let name = client.common_name();
    let is_known = name.as_deref() == Some(HEALTH_NAME);
    static LIMIT: LineLimit = LineLimit::new();
    if !is_known
        && let Some(address) = client.address
        && let Some(suppressed) = LIMIT.admit(address.ip())
    {
        tracing::warn!(
            client = %address,
            name = name.as_deref().unwrap_or("-"),
            suppressed,
            "client refused: its certificate has another name"
        );
    }
    is_known
}

/// Answers a request.
async fn answer(path: &str, is_known: bool, vm: &Vm) -> Response {
    // bosh-dns ignores the method and the query string (observed).
    if path != "/health" {
        return (StatusCode::NOT_FOUND, "404 page not found\n").into_response();
    }
    if !is_known {
        return (
            StatusCode::BAD_REQUEST,
            "the client certificate is issued to another name\n",
        )
            .into_response();
    }
    if tokio::time::timeout(vm.patience, vm.jobs.ready())
        .await
        .is_err()
    {
        let problem = "the first round of scripts has not ended yet\n";
        return (StatusCode::SERVICE_UNAVAILABLE, problem).into_response();
    }
    let body = serde_json::to_vec(&vm.report()).expect("texts can always be written as JSON");
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

impl Vm {
    /// Builds the current report.
    fn report(&self) -> Report {
        let Summary {
            all_healthy,
            scripted,
            unscripted,
        } = self.jobs.summary();
        let whole = all_healthy && self.agent.is_running();
        // Groups of jobs with a script follow the script, all others the whole VM (observed); a group with both kinds
        // of jobs fails if either does.
        let mut groups = scripted;
        for group in unscripted {
            *groups.entry(group).or_insert(true) &= whole;
        }
        let mut group_state = BTreeMap::new();
        for (group, healthy) in groups {
            group_state.insert(group, state_text(healthy));
        }
        Report {
            state: state_text(whole),
            group_state,
        }
    }
}

fn state_text(is_healthy: bool) -> &'static str {
    if is_healthy { "running" } else { "failing" }
}

//----------- Agent --------------------------------------------------------
//
// Reads the state that the agent of this VM writes to `health.json`.

/// Maximum number of bytes read from the file.
const MAX_FILE: u64 = 1 << 20;

/// The agent's file, read again when it changes.
#[derive(Debug)]
struct AgentFile {
    path: PathBuf,
    /// Stamp of the file at the last read (`None` if it did not exist), and the state it contained.
    last: Mutex<(Option<FileStamp>, bool)>,
}

impl AgentFile {
    /// Creates a reader of the file at `path`, which need not exist.
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            last: Mutex::new((None, false)),
        }
    }

    /// Returns whether the agent reports `running`.
    fn is_running(&self) -> bool {
        let stamp = FileStamp::of(&self.path);
        // A panic cannot leave the value half changed.
        let mut last = self.last.lock();
        if last.0 != stamp {
            *last = match bounded::read_at_most(&self.path, MAX_FILE) {
                Ok(bytes) => (stamp, says_running(&bytes)),
                // As without the file (observed), but not for good: the reason may pass, such as a lack of
                // descriptors, and the agent seldom writes the file.
                Err(_) => (None, false),
            };
        }
        last.1
    }
}

/// Returns whether the content reports `running`. The member name matches in any letter case, the
/// state only in this one.
fn says_running(bytes: &[u8]) -> bool {
    let Ok(Json::Object(members)) = Json::parse(bytes) else {
        return false;
    };
    let mut running = false;
    for (name, value) in &members {
        if name.eq_ignore_ascii_case("state") {
            match value {
                Json::Text(text) => running = text == "running",
                Json::Null => {}
                _ => return false,
            }
        }
    }
    running
}

//----------- Config -------------------------------------------------------
//
// The health server's configuration file, compatible with bosh-dns's.

/// Settings of the health server.
#[derive(Clone, Debug)]
pub struct HealthServerConfig {
    /// Listen address (`address`, `port`), TCP.
    pub listen: SocketAddr,
    /// Server certificate, key and the CA of clients.
    pub tls: TlsFiles,
    /// Folder of the jobs (`jobs_dir`); `None` without jobs.
    pub jobs_dir: Option<PathBuf>,
    /// Path of a job's script below the job's folder (`health_executable_path`).
    pub executable_path: PathBuf,
    /// Time between two runs of a script (`health_executable_interval`).
    pub executable_interval: Duration,
    /// The agent's file (`health_file_name`).
    pub health_file: PathBuf,
    /// Time limit of a client's handshake and of a request (`request_timeout`).
    pub request_timeout: Duration,
    /// Log levels and format.
    pub logging: LoggingConfig,
}

impl HealthServerConfig {
    /// Reads and parses a file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let file = path.display().to_string();
        match bounded::read(path) {
            Ok(bytes) => Self::parse(&file, &bytes),
            Err(error) => Err(ConfigError::of_file(
                file,
                format!("cannot be read: {error}"),
            )),
        }
    }

    /// Parses the text of a file; `file` is used in messages.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, ConfigError> {
        let json = Json::of_file(file, bytes)?;
        let root = ObjectReader::document(file, &json)?;
        let address = root
            .address("address")?
            .unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let port = root
            .port("port")?
            .ok_or_else(|| root.error("port", "is missing; the usual port is 8853"))?;
        let tls = tls_files(&root)?
            .map_err(|NoFile(name)| root.error(name, "is missing; set it to a PEM file"))?;
        let executable = root.path("health_executable_path")?;
        Ok(Self {
            listen: SocketAddr::new(address, port),
            tls,
            jobs_dir: root.path("jobs_dir")?,
            executable_path: executable.unwrap_or_else(|| PathBuf::from("bin/dns/healthy")),
            executable_interval: root
                .nonzero("health_executable_interval")?
                .unwrap_or(Duration::from_secs(5)),
            health_file: root.path("health_file_name")?.ok_or_else(|| {
                root.error(
                    "health_file_name",
                    "is missing; name the agent's health.json",
                )
            })?,
            request_timeout: root
                .nonzero("request_timeout")?
                .unwrap_or(Duration::from_secs(5)),
            logging: logging(&root)?,
        })
    }
}

//----------- Process ------------------------------------------------------
//
// The health server as a process.

/// Runs the health server with the configuration in `file` until SIGTERM or SIGINT. A startup error
/// is written to standard error as one line.
pub fn run(file: &Path, format: LogFormat) -> ExitCode {
    match start(file, format) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error("bosh-dns-xdp health", &error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// Implements [`run`]; returns `Ok` after a signal.
fn start(file: &Path, format: LogFormat) -> anyhow::Result<()> {
    let config = HealthServerConfig::load(file)?;
    let logs = Logs::init(&config.logging, format)?;
    // One thread: the load is a few handshakes a minute and small answers.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(2)
        .build()?;
    let result = runtime.block_on(async {
        // Ignored: everything that can change is checked continuously.
        let _hangup = signal(SignalKind::hangup())?;
        let server = HealthServer::bind(&config).await?;
        tracing::info!(address = %config.listen, "health server listening");
        server.run(until_ended()).await;
        tracing::info!("health server stopping");
        Ok(())
    });
    logs.flush();
    result
}

#[cfg(test)]
mod tests {
    use std::fs;

    use axum::body::to_bytes;

    use super::*;

    /// Returns a VM without jobs, whose agent's file has this content, or does not exist.
    fn vm(folder: &Path, content: Option<&str>) -> Vm {
        let path = folder.join("health.json");
        if let Some(content) = content {
            fs::write(&path, content).unwrap();
        }
        let interval = Duration::from_secs(60);
        Vm {
            agent: AgentFile::new(path),
            jobs: Arc::new(Jobs::new(None, PathBuf::from("bin/dns/healthy"), interval)),
            patience: Duration::from_millis(20),
        }
    }

    #[tokio::test]
    async fn requests_are_answered_like_bosh_dns() {
        let folder = tempfile::tempdir().unwrap();
        let vm = vm(folder.path(), Some(r#"{"state":"running"}"#));
        for (path, is_known, status) in [
            ("/", true, StatusCode::NOT_FOUND),
            ("/health/", false, StatusCode::NOT_FOUND),
            ("/health", false, StatusCode::BAD_REQUEST),
            // No round of scripts has ended.
            ("/health", true, StatusCode::SERVICE_UNAVAILABLE),
        ] {
            assert_eq!(answer(path, is_known, &vm).await.status(), status, "{path}");
        }
        let work = tokio::spawn(vm.jobs.clone().run());
        vm.jobs.ready().await;
        let response = answer("/health", true, &vm).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
        let body = to_bytes(response.into_body(), 4096).await.unwrap();
        assert_eq!(&body[..], br#"{"state":"running"}"#);
        work.abort();
    }

    /// Reports of a VM whose agent says this, once the scripts of its jobs have ended.
    async fn report(folder: &Path, content: Option<&str>, jobs: Option<PathBuf>) -> Report {
        let mut vm = vm(folder, content);
        let interval = Duration::from_secs(60);
        vm.jobs = Arc::new(Jobs::new(jobs, PathBuf::from("bin/dns/healthy"), interval));
        let work = tokio::spawn(vm.jobs.clone().run());
        vm.jobs.ready().await;
        work.abort();
        vm.report()
    }

    #[tokio::test]
    async fn agent_and_scripts_must_agree() {
        use std::os::unix::fs::PermissionsExt as _;

        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let jobs = folder.join("jobs");
        for (job, links) in [("plain", "1"), ("scripted", "2"), ("both", "1")] {
            let bosh = jobs.join(job).join(".bosh");
            fs::create_dir_all(&bosh).unwrap();
            let text = format!(r#"[{{"group":"{links}"}}]"#);
            fs::write(bosh.join("links.json"), text).unwrap();
        }
        let running = Some(r#"{"state":"running"}"#);
        assert_eq!(report(folder, None, None).await.state, "failing");
        assert_eq!(report(folder, running, None).await.state, "running");
        let healthy = report(folder, running, Some(jobs.clone())).await;
        assert_eq!(
            (healthy.state, healthy.group_state["1"]),
            ("running", "running")
        );
        let failing = report(folder, Some("{}"), Some(jobs.clone())).await;
        assert_eq!(
            (failing.state, failing.group_state["2"]),
            ("failing", "failing")
        );
        // A script decides about the VM and its own groups, and about others by the VM.
        let script = jobs.join("scripted/bin/dns/healthy");
        fs::create_dir_all(script.parent().unwrap()).unwrap();
        fs::write(&script, "#!/bin/sh\nexit 1\n").unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        let scripted = report(folder, running, Some(jobs.clone())).await;
        assert_eq!(
            (scripted.state, scripted.group_state["1"]),
            ("failing", "failing")
        );
        assert_eq!(scripted.group_state["2"], "failing");
        fs::write(&script, "#!/bin/sh\n").unwrap();
        let scripted = report(folder, Some("{}"), Some(jobs)).await;
        assert_eq!(
            (scripted.state, scripted.group_state["1"]),
            ("failing", "failing")
        );
        assert_eq!(scripted.group_state["2"], "running");
    }
}

#[cfg(test)]
mod agent_tests {
    use std::fs;

    use test_support::own_process;

    use super::*;

    #[test]
    fn only_running_is_running() {
        assert!(says_running(br#"{"state":"running"}"#));
        assert!(says_running(br#"{"STATE":"running","vm":{"x":1}}"#));
        // A later null changes nothing, as in Go; a later text does.
        assert!(says_running(br#"{"state":"running","state":null}"#));
        assert!(says_running(br#"{"state":"failing","State":"running"}"#));
        assert!(!says_running(br#"{"state":"running","State":"failing"}"#));
        assert!(!says_running(br#"{"state":null}"#));
        let odd: [&[u8]; 8] = [
            b"",
            b"{",
            b"{}",
            b"[]",
            br#"{"state":1}"#,
            br#"{"state":"Running"}"#,
            br#"{"state":"failing"}"#,
            br#"{"state":"running"} x"#,
        ];
        assert!(odd.iter().all(|bytes| !says_running(bytes)));
    }

    #[test]
    fn failed_read_is_repeated() {
        // The limit on open files belongs to the whole process.
        if !own_process::is_here() {
            let mut test = own_process::command(module_path!(), "failed_read_is_repeated");
            return own_process::run(&mut test);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health.json");
        fs::write(&path, r#"{"state":"running"}"#).unwrap();
        let file = AgentFile::new(path);
        assert!(!own_process::without_descriptors(|| file.is_running()));
        assert!(file.is_running());
    }

    #[test]
    fn changes_are_seen_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health.json");
        let file = AgentFile::new(path.clone());
        assert!(!file.is_running());
        fs::write(&path, r#"{"state":"running"}"#).unwrap();
        assert!(file.is_running() && file.is_running());
        fs::write(&path, r#"{"state":"failing!"}"#).unwrap();
        assert!(!file.is_running());
        fs::write(&path, r#"{"state":"running"}"#).unwrap();
        assert!(file.is_running());
        fs::remove_file(&path).unwrap();
        assert!(!file.is_running());
    }
}

#[cfg(test)]
mod config_tests {
    use std::fs;

    use super::*;

    #[test]
    fn bosh_dns_config_is_read() {
        let text = r#"{"address": "127.0.0.1", "port": 8853, "ca_file": "/c/ca", "certificate_file": "/c/crt",
            "private_key_file": "/c/key", "health_executable_interval": "500ms",
            "health_executable_path": "bin/dns/healthy", "health_file_name": "/i/health.json",
            "jobs_dir": "/jobs", "request_timeout": "3s", "log_level": "ERROR", "more": 1}"#;
        let config = HealthServerConfig::parse("health.json", text.as_bytes()).unwrap();
        assert_eq!(config.listen, "127.0.0.1:8853".parse().unwrap());
        assert_eq!(config.executable_interval, Duration::from_millis(500));
        assert_eq!(config.request_timeout, Duration::from_secs(3));
        assert_eq!(config.jobs_dir.as_deref(), Some(Path::new("/jobs")));
    }

    #[test]
    fn missing_keys_are_named() {
        let error =
            HealthServerConfig::parse("h.json", br#"{"port": 1, "ca_file": "a"}"#).unwrap_err();
        assert!(
            error.to_string().contains("h.json") && error.to_string().contains("certificate_file"),
            "{error}"
        );
        assert!(HealthServerConfig::parse("h.json", b"{").is_err());
    }

    #[test]
    fn omitted_settings_have_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("health.json");
        let needed = r#""port": 8853, "ca_file": "/c/ca", "certificate_file": "/c/crt",
            "private_key_file": "/c/key", "health_file_name": "/i/health.json""#;
        let unset = r#""health_executable_interval": "0s", "request_timeout": "0s", "jobs_dir": "",
            "health_executable_path": """#;
        for text in [format!("{{{needed}}}"), format!("{{{needed}, {unset}}}")] {
            fs::write(&file, &text).unwrap();
            let config = HealthServerConfig::load(&file).unwrap();
            assert_eq!(config.listen, "0.0.0.0:8853".parse().unwrap());
            assert_eq!(config.executable_interval, Duration::from_secs(5));
            assert_eq!(config.request_timeout, Duration::from_secs(5));
            assert_eq!(config.executable_path, Path::new("bin/dns/healthy"));
            assert_eq!(
                (config.jobs_dir, config.health_file),
                (None, "/i/health.json".into())
            );
        }
        let missing = HealthServerConfig::load(&folder.path().join("none")).unwrap_err();
        assert!(missing.to_string().contains("cannot be read"), "{missing}");
    }

    #[test]
    fn mistakes_end_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("health.json");
        let path = file.display();
        let error = |text: &str| {
            fs::write(&file, text).unwrap();
            start(&file, LogFormat::default()).unwrap_err().to_string()
        };
        for (text, expected) in [
            ("[]", "is a list"),
            ("{", "is not JSON"),
            ("{}", "port: is missing; the usual port is 8853"),
            (
                r#"{"port": 1, "ca_file": "a", "certificate_file": "b"}"#,
                "private_key_file: is missing; set it to a PEM file",
            ),
            (
                r#"{"port": 1, "ca_file": "a", "certificate_file": "b", "private_key_file": "c"}"#,
                "health_file_name: is missing; name the agent's health.json",
            ),
        ] {
            let error = error(text);
            let expected = format!("{path}: {expected}");
            assert!(error.starts_with(&expected), "{text}: {error}");
        }
        let code = run(&folder.path().join("none"), LogFormat::default());
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::FAILURE));
    }
}
