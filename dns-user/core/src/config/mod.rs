//! The configuration: bosh-dns' `config.json` and our additional keys, parsed into validated types.
//!
//! Pure: callers read the files and pass their content.

pub mod keys;
pub mod parse;
pub mod reader;
pub mod values;

pub use self::{
    keys::{Compat, DnstapConfig, DnstapMessages, DnstapOutput},
    parse::{CONTROL_SOCKET, Loaded},
};

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

/// The content of `config.json` with defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `address` and `port`: endpoint for UDP and TCP.
    pub listen: SocketAddr,
    /// `timeout`: limit for opening the sockets and the first up-check.
    pub timeout: Duration,
    /// `request_timeout`: limit for answering a client's query.
    pub request_timeout: Duration,
    /// Recursors and their use.
    pub recursion: RecursionConfig,
    /// Path of records.json, if configured.
    pub records_file: Option<PathBuf>,
    /// Go `filepath.Glob` pattern of the alias files; empty: none.
    pub alias_files_glob: String,
    /// Go `filepath.Glob` pattern of the handler files; empty: none.
    pub handlers_files_glob: String,
    /// Go `filepath.Glob` pattern of the files with further listen addresses; empty: none.
    pub addresses_files_glob: String,
    /// Names answered with 127.0.0.1 and ::1.
    pub upcheck_domains: Vec<crate::name::Name>,
    /// `internal_upcheck_domain`: a name that must resolve before the server counts as up.
    pub internal_upcheck: Option<crate::name::Name>,
    /// Folder of the jobs, for `/local-groups`; `None` disables it.
    pub jobs_dir: Option<PathBuf>,
    /// Log levels and format.
    pub logging: LoggingConfig,
    /// The control socket, a key of ours; `None` disables it.
    pub control: Option<ControlConfig>,
    /// The API; `None` if it is not configured.
    pub api: Option<ApiConfig>,
    /// Health checks of instances.
    pub health: HealthConfig,
    /// Endpoint of the Prometheus metrics.
    pub metrics: MetricsConfig,
    /// Cache of forwarded answers.
    pub cache: CacheConfig,
    /// `cookies`, a key of ours: DNS Cookies for clients.
    pub cookies: CookiesConfig,
    /// `dnstap`, a key of ours: log of queries and replies; `None`: off.
    pub dnstap: Option<DnstapConfig>,
    /// `configure_systemd_resolved`: accepted and ignored; this server does not configure the host.
    pub configure_systemd_resolved: bool,
    /// `max_reply`, a key of ours: maximum size in bytes of a UDP reply to a client that is neither
    /// local, nor link-local, nor on a container's interface; `None`: see [`Config::max_reply_at`].
    pub max_reply: Option<u16>,
    /// `identity`, a key of ours: which queries get the server's version and host name.
    pub identity: Identity,
    /// `compat`, a key of ours: bosh-dns behaviour to reproduce.
    pub compat: Compat,
    /// `xdp`, keys of ours: the fast path and process privileges.
    pub xdp: XdpConfig,
}

/// `identity`: which queries for version and host name (class CH, NSID) are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Only queries with EDNS, dig's default; others get the same reply as from bosh-dns.
    Edns,
    /// All queries for version or host name.
    Always,
    /// No queries for version or host name.
    Off,
}

/// Settings for recursors and forwarding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecursionConfig {
    /// `disable_recursors`: no forwarding at all.
    pub disabled: bool,
    /// `recursors` as configured, `host:port`; if empty, /etc/resolv.conf is used.
    pub recursors: Vec<String>,
    /// `excluded_recursors`, `host:port`: never used, even if listed elsewhere.
    pub excluded: Vec<String>,
    /// `recursor_selection`: order of the attempts.
    pub selection: RecursorSelection,
    /// `recursor_timeout`: limit for one attempt.
    pub timeout: Duration,
    /// `recursor_max_retries`: additional attempts at one recursor after network errors.
    pub max_retries: u32,
    /// `recursor_client_subnet`, a key of ours: whether Client Subnet options are forwarded.
    pub client_subnet: bool,
    /// `recursor_0x20`, a key of ours: random letter case in questions, which a reply must repeat;
    /// makes forging harder.
    pub randomise_case: bool,
    /// `special_names`, a key of ours: the answerer of special-use names.
    pub special_names: SpecialNames,
}

/// The answerer of special-use names (RFC 6761): `localhost`, `invalid`, `onion`, private reverse names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecialNames {
    /// The recursors, as for other names.
    #[default]
    Forward,
    /// This server.
    Local,
}

/// The order in which recursors are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecursorSelection {
    /// Random order, fixed at start; the preferred recursor is kept until 5 of its last 25 attempts
    /// failed.
    Smart,
    /// In configured order, always from the first.
    Serial,
}

/// `log_level` and `logging`: settings of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggingConfig {
    /// `log_level`: level for tags without an entry in `tags`.
    pub level: LogLevel,
    /// `logging.tags`: levels by tag.
    pub tags: Vec<(String, LogLevel)>,
}

/// Log levels of bosh-dns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// `DEBUG`: everything, each request included.
    Debug,
    /// `INFO`: normal events and above.
    Info,
    /// `WARN`: problems with a workaround, and errors.
    Warn,
    /// `ERROR`: failures without a workaround.
    Error,
    /// `NONE`: no output at all.
    None,
}

impl LogLevel {
    /// All levels with their names in config.json, in order of declaration.
    const NAMES: [(&str, Self); 5] = [
        ("DEBUG", Self::Debug),
        ("INFO", Self::Info),
        ("WARN", Self::Warn),
        ("ERROR", Self::Error),
        ("NONE", Self::None),
    ];

    /// Returns the level with a name, in any letter case.
    pub fn named(name: &str) -> Option<Self> {
        // The logger of bosh-utils, which bosh-dns uses, folds the case of a level as well.
        Self::NAMES
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, level)| *level)
    }

    /// Returns the level's name in config.json.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }
}

/// The three files of one side of a mutual TLS connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// `certificate_file`: certificate chain in PEM.
    pub certificate: PathBuf,
    /// `private_key_file`: private key in PEM.
    pub private_key: PathBuf,
    /// `ca_file`: one or more CA certificates in PEM.
    pub ca: PathBuf,
}

/// `api`: the HTTPS API with client certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiConfig {
    /// TCP port on 127.0.0.1.
    pub port: u16,
    /// Server certificate, its key and the CA of the clients.
    pub tls: TlsFiles,
    /// `admins`, a key of ours: common names of the client certificates that may flush, reload,
    /// change levels and watch queries; `None`: every certificate of the CA.
    pub admins: Option<Vec<String>>,
}

/// `control`, a key of ours: the API on a Unix socket, without certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlConfig {
    /// `socket`: path of the Unix socket.
    pub socket: PathBuf,
    /// `user`: owner of the socket; `None`: the user that starts the server.
    pub user: Option<String>,
    /// `group`: group whose members may connect; `None`: no group.
    pub group: Option<String>,
    /// Whether the path is the built-in default.
    pub is_default: bool,
}

/// `health`: checks of the instances' health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthConfig {
    /// `enabled`: whether instances are checked at all.
    pub enabled: bool,
    /// TCP port of the health servers on the instances.
    pub port: u16,
    /// Client certificate, key and CA; `None` only if not enabled.
    pub tls: Option<TlsFiles>,
    /// `check_interval`: time between two checks of an instance.
    pub check_interval: Duration,
    /// `max_tracked_queries`: maximum number of names whose instances are checked.
    pub max_tracked_queries: usize,
    /// `synchronous_check_timeout`: limit for waiting on the first checks of a name.
    pub synchronous_check_timeout: Duration,
    /// `tracked_query_ttl`, a key of ours: names are dropped if not queried for this time; `None`:
    /// never.
    pub tracked_query_ttl: Option<Duration>,
}

/// `metrics`: the Prometheus endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsConfig {
    /// `enabled`: whether the endpoint is served.
    pub enabled: bool,
    /// `address` and `port` of the endpoint.
    pub listen: SocketAddr,
    /// `top_names`, a key of ours: number of names with a separate counter.
    pub top_names: usize,
}

/// `cache`: the cache of forwarded answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// `enabled`: whether forwarded answers are cached.
    pub enabled: bool,
    /// `max_entries`, a key of ours: maximum number of cached answers.
    pub max_entries: u64,
    /// `max_bytes`, a key of ours: maximum memory of the cache in bytes.
    pub max_bytes: u64,
    /// `serve_stale`, a key of ours: how long an expired answer may be served while recursors are
    /// down (RFC 8767); `None`: never.
    pub serve_stale: Option<Duration>,
}

/// `cookies`: DNS Cookies for clients (RFC 7873).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CookiesConfig {
    /// `enabled`: whether queries with a cookie get one, which interfaces leave to userspace.
    pub enabled: bool,
    /// `secrets`: keys of server cookies (RFC 9018); the first one creates cookies, each is accepted.
    /// Empty: a random one.
    pub secrets: Vec<[u8; 16]>,
}

/// `xdp`: settings of the fast path and of process privileges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpConfig {
    /// `enabled`: whether the fast path is used.
    pub enabled: bool,
    /// `vlans`: VLANs whose frames are answered at the interface, 0 to 4095.
    pub vlans: Vec<u16>,
    /// `respect_filters`: names and globs of interfaces whose queries are left to userspace,
    /// because replies of the programs bypass the packet filter.
    pub respect_filters: Vec<String>,
    /// `shed`: whether the programs drop a share of the queries for userspace while the server is
    /// overloaded.
    pub shed: bool,
    /// `interfaces`: names and globs; `None`: all interfaces on which queries for our addresses can
    /// arrive, including `lo`.
    pub interfaces: Option<Vec<String>>,
    /// `mode`: the hook to attach to.
    pub mode: HookMode,
    /// `max_names`: maximum number of names in the map.
    pub max_names: u32,
    /// `cache_entries`: maximum number of forwarded answers in the map; 0: none. Has no effect
    /// without [`CacheConfig::enabled`].
    pub cache_entries: u32,
    /// `cache_bytes`: memory for forwarded answers in the map, in bytes.
    pub cache_bytes: u64,
    /// `other_types`: whether interfaces answer local names of types other than A and AAAA, too, whose
    /// replies have records: SRV, TXT, PTR.
    pub other_types: bool,
    /// `lease`: how long the programs keep answering without a renewal by the server.
    pub lease: Duration,
    /// `bpffs`: mount point or folder in which programs, links and maps are pinned.
    pub bpffs: PathBuf,
    /// `on_stop`: fate of the fast path when the server stops.
    pub on_stop: OnStop,
    /// `user`: user to which the server switches at start; `None`: no switch.
    pub user: Option<String>,
    /// `attach_socket`: socket of a service that loads and attaches (`bosh-dns-xdp attach`); `None`:
    /// the server starts that process itself.
    pub attach_socket: Option<PathBuf>,
    /// `attach_user`: user to which the attacher switches; `None`: no switch.
    pub attach_user: Option<String>,
}

impl XdpConfig {
    /// Returns whether interfaces are to answer.
    pub fn is_on(&self) -> bool {
        self.enabled && self.mode != HookMode::Off
    }
}

/// The hook to which the program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookMode {
    /// The best available hook for each interface.
    Auto,
    /// XDP in the driver.
    Native,
    /// tcx, or clsact on kernels before 6.6.
    Tc,
    /// No fast path; userspace answers everything.
    Off,
}

impl HookMode {
    /// All modes with their words in config.json, in order of declaration.
    const WORDS: [(&str, Self); 4] = [
        ("auto", Self::Auto),
        ("native", Self::Native),
        ("tc", Self::Tc),
        ("off", Self::Off),
    ];

    /// Returns the mode's word in config.json.
    pub const fn word(self) -> &'static str {
        Self::WORDS[self as usize].0
    }
}

/// Fate of the fast path on an orderly stop of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStop {
    /// Programs are detached and everything is unpinned.
    Detach,
    /// Programs stay attached and answer until the lease expires or a new server takes over.
    Keep,
}

impl Config {
    /// Returns the settings of the fast path: without a cache in userspace, interfaces keep no
    /// forwarded answers either.
    pub fn fast_path(&self) -> XdpConfig {
        // Interfaces mirror the cache of userspace, which renews and removes their answers.
        let cache_entries = if self.cache.enabled {
            self.xdp.cache_entries
        } else {
            0
        };
        XdpConfig {
            cache_entries,
            ..self.xdp.clone()
        }
    }

    /// Returns a warning if the server can be abused for amplification: it listens on a routed
    /// address, and `max_reply` permits longer UDP replies than usual.
    pub fn long_replies(&self, listen: &[SocketAddr]) -> Option<String> {
        let most = self.max_reply.filter(|&most| most > USUAL_MAX_REPLY)?;
        // A forged sender is of use only where replies leave this network.
        let address = listen.iter().find(|address| is_routed(address))?;
        Some(format!(
            "{address} is reachable from other networks, and max_reply is {most}: UDP queries with forged senders \
             can be amplified; remove max_reply, or set at most {USUAL_MAX_REPLY}"
        ))
    }

    /// Returns the maximum size in bytes of a UDP reply of the server at an address; `None` for no limit, as in
    /// bosh-dns. Replies to near clients are never limited.
    pub fn max_reply_at(configured: Option<u16>, listen: SocketAddr) -> Option<u16> {
        configured.or_else(|| is_routed(&listen).then_some(USUAL_MAX_REPLY))
    }
}

/// Maximum size of a UDP reply by default, as in other DNS servers (RFC 9715, appendix A): forged senders gain little, and
/// no network with IPv6 fragments it.
pub const USUAL_MAX_REPLY: u16 = dns_common::UDP_PAYLOAD_SIZE;

/// Returns the configured address followed by the additional ones, without duplicates and without those that a
/// wildcard of the same family covers: the kernel refuses to bind both.
pub fn all_addresses(configured: SocketAddr, further: &[SocketAddr]) -> Vec<SocketAddr> {
    let mut all = vec![configured];
    for &address in further {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    let wildcards = all.clone();
    all.retain(|address| {
        !wildcards.iter().any(|other: &SocketAddr| {
            // Only of one family: the wildcard of IPv6 leaves IPv4 to sockets of its own.
            other.ip().is_unspecified()
                && !address.ip().is_unspecified()
                && other.is_ipv4() == address.is_ipv4()
                && other.port() == address.port()
        })
    });
    all
}

/// Returns whether IPv4 has sockets of its own among `all`, so that the IPv6 wildcard `address` must not accept
/// it as well.
pub fn has_ipv4_apart(address: SocketAddr, all: &[SocketAddr]) -> bool {
    let is_wildcard = address.is_ipv6() && address.ip().is_unspecified();
    let has_other = all
        .iter()
        .any(|other| other.is_ipv4() && other.port() == address.port());
    is_wildcard && has_other
}

/// Returns whether `socket` is a wildcard that receives what is sent to `ip`, beside the sockets of `all`.
pub fn wildcard_receives(socket: SocketAddr, ip: IpAddr, all: &[SocketAddr]) -> bool {
    if !socket.ip().is_unspecified() {
        return false;
    }
    match ip {
        // A socket of IPv6 receives IPv4 as well, unless IPV6_V6ONLY is set (ipv6(7)).
        IpAddr::V4(_) => socket.is_ipv4() || !has_ipv4_apart(socket, all),
        IpAddr::V6(_) => socket.is_ipv6(),
    }
}

/// Returns whether packets to an address come from other networks.
fn is_routed(address: &SocketAddr) -> bool {
    match address.ip() {
        // BOSH's own address, 169.254.0.2, is link-local: routers forward neither such packets (RFC
        // 3927, section 7) nor those of IPv6 (RFC 4291, section 2.5.6).
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    }
}

/// An unusable configuration: file, position and remedy in one line.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {}{problem}", key.as_ref().map(|key| format!("{key}: ")).unwrap_or_default())]
pub struct ConfigError {
    /// Path of the file as given.
    pub file: String,
    /// Path of the member in error, such as `logging.tags[0].name`; `None` for the whole file.
    pub key: Option<String>,
    /// Cause and allowed values.
    pub problem: String,
}

impl ConfigError {
    /// Creates an error about a file as a whole.
    pub fn of_file(file: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            file: file.into(),
            key: None,
            problem: problem.into(),
        }
    }
}

/// Every error of one or several files; shown in one line, with at most [`SHOWN_ERRORS`].
#[derive(Debug)]
pub struct ConfigErrors(pub Vec<ConfigError>);

/// Maximum number of errors in a line; the rest is counted.
const SHOWN_ERRORS: usize = 10;

/// Joins errors to one line.
pub fn one_line(errors: &[impl ToString]) -> String {
    let mut shown: Vec<String> = errors
        .iter()
        .take(SHOWN_ERRORS)
        .map(ToString::to_string)
        .collect();
    // A template that went wrong makes hundreds of errors, and this is one line of the log.
    if let Some(more) = errors.len().checked_sub(SHOWN_ERRORS + 1) {
        shown.push(format!(
            "and {} more errors, which bosh-dns-xdp check lists",
            more + 1
        ));
    }
    shown.join("; ")
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&one_line(&self.0))
    }
}

impl std::error::Error for ConfigErrors {}

impl From<ConfigError> for ConfigErrors {
    fn from(error: ConfigError) -> Self {
        Self(vec![error])
    }
}

/// Result of parsing the files of one kind.
#[derive(Debug, Default)]
pub struct ParsedFiles<T> {
    /// Contents of the valid files.
    pub valid: T,
    /// Every error of the other files.
    pub errors: Vec<ConfigError>,
}

impl<T> ParsedFiles<T> {
    /// Returns the contents if every file is valid.
    pub fn whole(self) -> Result<T, ConfigErrors> {
        if self.errors.is_empty() {
            Ok(self.valid)
        } else {
            Err(ConfigErrors(self.errors))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn wildcards_replace_family_addresses() {
        for (configured, further, expected) in [
            ("10.0.0.1:53", &[][..], &["10.0.0.1:53"][..]),
            (
                "10.0.0.1:53",
                &["10.0.0.1:53", "10.0.0.2:53", "10.0.0.2:53"],
                &["10.0.0.1:53", "10.0.0.2:53"],
            ),
            (
                "0.0.0.0:53",
                &["10.0.0.1:53", "10.0.0.1:54", "[::1]:53", "127.0.0.1:53"],
                &["0.0.0.0:53", "10.0.0.1:54", "[::1]:53"],
            ),
            ("10.0.0.1:53", &["0.0.0.0:53"], &["0.0.0.0:53"]),
            (
                "[::1]:53",
                &["[::]:53", "10.0.0.1:53", "0.0.0.0:54"],
                &["[::]:53", "10.0.0.1:53", "0.0.0.0:54"],
            ),
            (
                "0.0.0.0:53",
                &["[::]:53", "0.0.0.0:53"],
                &["0.0.0.0:53", "[::]:53"],
            ),
        ] {
            let further: Vec<SocketAddr> = further.iter().map(|text| address(text)).collect();
            let all = all_addresses(address(configured), &further);
            let all: Vec<String> = all.iter().map(ToString::to_string).collect();
            assert_eq!(all, expected, "{configured} {further:?}");
        }
    }

    #[test]
    fn ipv6_wildcard_leaves_ipv4_sockets() {
        for (socket, other, expected) in [
            ("[::]:53", "0.0.0.0:53", true),
            ("[::]:53", "10.0.0.1:53", true),
            ("[::]:53", "0.0.0.0:54", false),
            ("[::]:53", "[::1]:53", false),
            ("[::1]:53", "0.0.0.0:53", false),
            ("0.0.0.0:53", "10.0.0.1:53", false),
            ("10.0.0.1:53", "0.0.0.0:53", false),
        ] {
            let all = [address(socket), address(other)];
            assert_eq!(
                has_ipv4_apart(all[0], &all),
                expected,
                "{socket} beside {other}"
            );
        }
    }

    #[test]
    fn wildcards_receive_family_traffic() {
        for (socket, ip, all, expected) in [
            ("0.0.0.0:53", "10.0.0.1", &["0.0.0.0:53"][..], true),
            ("0.0.0.0:53", "::1", &["0.0.0.0:53"], false),
            ("[::]:53", "::1", &["[::]:53"], true),
            ("[::]:53", "10.0.0.1", &["[::]:53"], true),
            ("[::]:53", "10.0.0.1", &["[::]:53", "10.0.0.2:53"], false),
            ("[::]:53", "10.0.0.1", &["[::]:53", "10.0.0.2:54"], true),
            ("[::]:53", "::1", &["[::]:53", "10.0.0.2:53"], true),
            ("0.0.0.0:53", "10.0.0.1", &["[::]:53", "0.0.0.0:53"], true),
            ("10.0.0.1:53", "10.0.0.1", &["10.0.0.1:53"], false),
            ("[::1]:53", "::1", &["[::1]:53"], false),
        ] {
            let all: Vec<SocketAddr> = all.iter().map(|text| address(text)).collect();
            let ip: IpAddr = ip.parse().unwrap();
            assert_eq!(
                wildcard_receives(address(socket), ip, &all),
                expected,
                "{socket} for {ip} beside {all:?}"
            );
        }
    }

    #[test]
    fn replies_are_limited_at_routed_addresses() {
        for (listen, most) in [
            ("127.0.0.1:53", None),
            ("127.9.9.9:53", None),
            ("169.254.0.2:53", None),
            ("10.0.0.1:53", Some(1232)),
            ("0.0.0.0:53", Some(1232)),
            ("[::1]:53", None),
            ("[fe80::1]:53", None),
            ("[fd00::1]:53", Some(1232)),
            ("[::]:53", Some(1232)),
        ] {
            let listen = address(listen);
            assert_eq!(Config::max_reply_at(None, listen), most, "{listen}");
            assert_eq!(
                Config::max_reply_at(Some(4096), listen),
                Some(4096),
                "{listen}"
            );
        }
        let text = |max_reply: u16| format!(r#"{{"port": 53, "max_reply": {max_reply}}}"#);
        let warning = |max_reply: u16, listen: &[&str]| {
            let listen: Vec<SocketAddr> = listen.iter().map(|text| address(text)).collect();
            let loaded = Config::parse("config.json", text(max_reply).as_bytes()).unwrap();
            loaded.config.long_replies(&listen)
        };
        assert_eq!(
            warning(1233, &["127.0.0.1:53", "10.0.0.1:53", "10.0.0.2:53"]).as_deref(),
            Some(
                "10.0.0.1:53 is reachable from other networks, and max_reply is 1233: UDP queries with forged \
                 senders can be amplified; remove max_reply, or set at most 1232"
            )
        );
        assert_eq!(warning(1232, &["10.0.0.1:53"]), None);
        assert_eq!(warning(600, &["10.0.0.1:53"]), None);
        assert_eq!(warning(1233, &["127.0.0.1:53", "[fe80::1]:53"]), None);
    }

    #[test]
    fn errors_name_files_and_members() {
        let whole = ConfigError::of_file("a.json", "is odd");
        assert_eq!(whole.to_string(), "a.json: is odd");
        let member = ConfigError {
            key: Some("x.y".to_owned()),
            ..ConfigError::of_file("a.json", "is odd")
        };
        assert_eq!(member.to_string(), "a.json: x.y: is odd");
        assert_eq!(ConfigErrors::from(whole).to_string(), "a.json: is odd");
        let parsed = |count: usize| ParsedFiles {
            valid: 7,
            errors: (0..count)
                .map(|number| ConfigError::of_file(format!("{number}"), "is odd"))
                .collect(),
        };
        assert_eq!(parsed(0).whole().unwrap(), 7);
        assert_eq!(
            parsed(2).whole().unwrap_err().to_string(),
            "0: is odd; 1: is odd"
        );
        let ParsedFiles { valid, errors } = parsed(12);
        assert_eq!((valid, errors.len()), (7, 12));
        let shown = "0: is odd; 1: is odd; 2: is odd; 3: is odd; 4: is odd; 5: is odd; 6: is odd; 7: is odd; \
                     8: is odd; 9: is odd";
        assert_eq!(one_line(&errors[..10]), shown);
        for (count, more) in [(11, 1), (12, 2)] {
            assert_eq!(
                one_line(&errors[..count]),
                format!("{shown}; and {more} more errors, which bosh-dns-xdp check lists")
            );
        }
    }

    #[test]
    fn words_follow_declaration() {
        assert!(
            HookMode::WORDS
                .iter()
                .all(|(word, mode)| mode.word() == *word)
        );
        assert!(
            LogLevel::NAMES
                .iter()
                .all(|(name, level)| level.name() == *name)
        );
    }
}
