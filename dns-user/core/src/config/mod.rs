//! The configuration: the reference's `config.json`, parsed into types that
//! cannot be wrong, plus our own object `"xdp"`.
//!
//! Pure: whoever reads the files hands their bytes over.

pub mod addresses;
mod compat;
pub mod duration;
pub mod file_pattern;
pub mod json;
pub mod keys;
pub mod parse;
pub mod reader;
pub mod recursor;

pub use self::{compat::Compat, parse::Loaded};

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

/// All of `config.json`, with every default filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where to listen (`address`, `port`), UDP and TCP.
    pub listen: SocketAddr,
    /// How long to wait for the sockets and the first up-check (`timeout`).
    pub timeout: Duration,
    /// How long a client's query may take (`request_timeout`).
    pub request_timeout: Duration,
    /// Recursors and how they are used.
    pub recursion: RecursionConfig,
    /// records.json; `None`: there is none.
    pub records_file: Option<PathBuf>,
    /// Go `filepath.Glob` pattern of the alias files; empty: none.
    pub alias_files_glob: String,
    /// Go `filepath.Glob` pattern of the handler files; empty: none.
    pub handlers_files_glob: String,
    /// Go `filepath.Glob` pattern of the files with further listen addresses; empty: none.
    pub addresses_files_glob: String,
    /// Names answered with 127.0.0.1 and ::1.
    pub upcheck_domains: Vec<crate::name::Name>,
    /// `internal_upcheck_domain`: a name that has to resolve before the server counts as up.
    pub internal_upcheck: Option<crate::name::Name>,
    /// Folder of the jobs, for `/local-groups`; `None`: that part is off.
    pub jobs_dir: Option<PathBuf>,
    /// Log levels and format.
    pub logging: LoggingConfig,
    /// The control socket, ours; `None`: switched off.
    pub control: Option<ControlConfig>,
    /// The API; `None`: not configured.
    pub api: Option<ApiConfig>,
    /// Health checks of instances.
    pub health: HealthConfig,
    /// The Prometheus endpoint.
    pub metrics: MetricsConfig,
    /// Whether forwarded answers are cached (`cache.enabled`).
    pub cache: CacheConfig,
    /// `configure_systemd_resolved`: accepted; the set-up of the host is not ours.
    pub configure_systemd_resolved: bool,
    /// `max_reply`, ours: most bytes of a UDP reply to a client that is neither on this
    /// machine, nor link-local, nor on a container's interface; `None`: no bound.
    pub max_reply: Option<u16>,
    /// `identity`, ours: whom the server tells its version and the host's name.
    pub identity: Identity,
    /// `compat`, ours: effects of the reference that are kept.
    pub compat: Compat,
    /// Our own settings.
    pub xdp: XdpConfig,
}

/// `identity`: who is told version and host name (class CH, NSID).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Queries with EDNS, as dig sends them; plain ones get what the reference gives.
    Edns,
    /// All who ask.
    Always,
    /// Nobody.
    Off,
}

/// Everything about recursors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecursionConfig {
    /// `disable_recursors`.
    pub disabled: bool,
    /// `recursors` as configured, `host:port`; empty: those of /etc/resolv.conf.
    pub recursors: Vec<String>,
    /// `excluded_recursors`, `host:port`.
    pub excluded: Vec<String>,
    /// `recursor_selection`.
    pub selection: RecursorSelection,
    /// `recursor_timeout`: for one try.
    pub timeout: Duration,
    /// `recursor_max_retries`: further tries of one recursor after network errors.
    pub max_retries: u32,
    /// `recursor_client_subnet`, ours: whether the Client Subnet option of a query goes up.
    pub client_subnet: bool,
    /// `recursor_0x20`, ours: random letter case in questions, which replies have
    /// to repeat: forging them becomes harder still.
    pub randomise_case: bool,
}

/// In which order recursors are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecursorSelection {
    /// Shuffled once; the preferred one is kept until 5 of its last 25 tries failed.
    Smart,
    /// Always from the first.
    Serial,
}

/// `log_level` and `logging`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggingConfig {
    /// `log_level`.
    pub level: LogLevel,
    /// `logging.format.timestamp`: `rfc3339` or the reference's old format.
    pub rfc3339: bool,
    /// `logging.tags`: levels of single tags.
    pub tags: Vec<(String, LogLevel)>,
}

/// The reference's log levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// `DEBUG`.
    Debug,
    /// `INFO`.
    Info,
    /// `WARN`.
    Warn,
    /// `ERROR`.
    Error,
    /// `NONE`.
    None,
}

/// The three files of one end of mutual TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// `certificate_file`, PEM.
    pub certificate: PathBuf,
    /// `private_key_file`, PEM.
    pub private_key: PathBuf,
    /// `ca_file`, PEM, one or several CAs.
    pub ca: PathBuf,
}

/// `api`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiConfig {
    /// Port on 127.0.0.1.
    pub port: u16,
    /// Server certificate, key and the CA of clients.
    pub tls: TlsFiles,
    /// `admins`, ours: common names of the client certificates that may flush, reload,
    /// change levels and watch queries; `None`: every certificate of the CA.
    pub admins: Option<Vec<String>>,
}

/// `control`, ours: the API on a unix socket, without certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlConfig {
    /// `socket`: its path.
    pub socket: PathBuf,
    /// `user`: its owner; `None`: whoever starts the server.
    pub user: Option<String>,
    /// `group`: whose members may ask as well; `None`: nobody.
    pub group: Option<String>,
    /// Whether the configuration does not name the socket.
    pub is_default: bool,
}

/// `health`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthConfig {
    /// `enabled`.
    pub enabled: bool,
    /// Port of the health servers on the instances.
    pub port: u16,
    /// Client certificate, key and CA; `None` only while not enabled.
    pub tls: Option<TlsFiles>,
    /// `check_interval`.
    pub check_interval: Duration,
    /// `max_tracked_queries`.
    pub max_tracked_queries: usize,
    /// `synchronous_check_timeout`.
    pub synchronous_check_timeout: Duration,
    /// `tracked_query_ttl`, ours: forget names not asked for so long; `None`: never.
    pub tracked_query_ttl: Option<Duration>,
}

/// `metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsConfig {
    /// `enabled`.
    pub enabled: bool,
    /// `address`, `port`.
    pub listen: SocketAddr,
}

/// `cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// `enabled`.
    pub enabled: bool,
    /// `max_entries`, ours.
    pub max_entries: u64,
    /// `max_bytes`, ours.
    pub max_bytes: u64,
    /// `serve_stale`, ours: how long past its end an answer may still be given
    /// while recursors are down (RFC 8767); `None`: never.
    pub serve_stale: Option<Duration>,
}

/// `xdp`: our own settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpConfig {
    /// `enabled`: whether there is a fast path at all.
    pub enabled: bool,
    /// `vlans`: VLANs whose frames are answered at the interface, 0 to 4095.
    pub vlans: Vec<u16>,
    /// `respect_filters`: names and globs of interfaces that are left to userspace,
    /// whose replies pass by the packet filter.
    pub respect_filters: Vec<String>,
    /// `shed`: whether interfaces drop a part of what would go up while that is more than
    /// the server can answer.
    pub shed: bool,
    /// `interfaces`: names and globs; `None`: those on which queries for our
    /// addresses can arrive, `lo` among them.
    pub interfaces: Option<Vec<String>>,
    /// `mode`.
    pub mode: HookMode,
    /// `max_names`: most names in the map.
    pub max_names: u32,
    /// `lease`: how long the fast path goes on without userspace.
    pub lease: Duration,
    /// `bpffs`: where programs, links and maps are pinned.
    pub bpffs: PathBuf,
    /// `on_stop`.
    pub on_stop: OnStop,
    /// `user`: whom to become after loading; `None`: stay.
    pub user: Option<String>,
    /// `attach_socket`: of the process that loads and attaches in the server's place
    /// (`bosh-dns-xdp attach`); `None`: the server does so itself.
    pub attach_socket: Option<PathBuf>,
    /// `attach_user`: user that this process becomes; `None`: the one that starts it.
    pub attach_user: Option<String>,
}

/// Which hook the program is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookMode {
    /// The best for each interface.
    Auto,
    /// XDP in the driver.
    Native,
    /// XDP after the skb was made.
    Generic,
    /// tcx, or clsact on kernels before 6.6.
    Tc,
    /// Userspace only.
    Off,
}

/// What becomes of the fast path when the server stops in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStop {
    /// Everything is detached and unpinned.
    Detach,
    /// Programs stay and answer until the lease runs out or a new server takes over.
    Keep,
}

impl Config {
    /// A warning where anybody may get large replies by UDP with a forged sender: a routed
    /// address among these is listened on, and `max_reply` does not bound them.
    pub fn unbounded_replies(&self, listen: &[SocketAddr]) -> Option<String> {
        let routed = |address: &&SocketAddr| match address.ip() {
            IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
            IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
        };
        let address = listen.iter().find(routed).filter(|_| self.max_reply.is_none())?;
        Some(format!(
            "{address} can be asked from other networks, and max_reply is not set: by UDP a forged \
             sender gets replies many times as long as its queries"
        ))
    }
}

/// A configuration that cannot be used: file, place and remedy in one line.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {problem}")]
pub struct ConfigError {
    /// The file, as it was named.
    pub file: String,
    /// What is wrong where, and what is allowed.
    pub problem: String,
}
