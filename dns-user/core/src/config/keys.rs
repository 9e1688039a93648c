//! Every key of `config.json` in one table, and the objects `compat` and `dnstap`. The table is the source of
//! unknown-key warnings, of `bosh-dns-xdp config --default` and of the configuration reference.
//!
//! A test compares the table with the keys that the parser reads, so a key cannot be
//! added without a description, default and example.

use std::{fmt, net::SocketAddr, path::PathBuf};

use super::{
    ConfigError,
    reader::{Json, ObjectReader},
};

/// One key of `config.json`.
#[derive(Clone, Copy, Debug)]
pub struct ConfigKey {
    /// Path from the root: `port`, `xdp.mode`, `logging.tags[].name`.
    pub path: &'static str,
    /// Type, unit and limits, for the configuration reference.
    pub form: &'static str,
    /// Value in effect if the key is absent, as JSON; empty if there is none.
    pub default: &'static str,
    /// A valid value, as JSON.
    pub example: &'static str,
    /// Meaning, without a full stop.
    pub about: &'static str,
    /// Whether bosh-dns has the key as well.
    pub origin: Origin,
    /// Value that `config --default` writes, as JSON; empty if it leaves the key out.
    pub starter: &'static str,
}

/// The server that defines a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A key of bosh-dns with the same meaning.
    BoshDns,
    /// A key of this server only.
    Ours,
}

/// Objects whose members are parsed by other crates.
const FOREIGN_OBJECTS: [&str; 1] = ["consul"];

/// Declares keys: path, origin, form, default, example, starter value, description.
macro_rules! keys {
    ($($path:literal $origin:ident $form:literal = $default:literal, $example:literal, $starter:literal: $about:literal;)*) => {
        &[$(ConfigKey {
            path: $path, form: $form, default: $default, example: $example, about: $about,
            origin: Origin::$origin, starter: $starter,
        }),*]
    };
}

/// All keys, grouped by object, in the order of `config --default`.
pub const KEYS: &[ConfigKey] = keys! {
    "address" BoshDns "IP address" = "\"0.0.0.0\"", "\"169.254.0.2\"", "\"127.0.0.2\"":
        "Address to listen on; BOSH uses 169.254.0.2";
    "port" BoshDns "port, 1 to 65535; required" = "", "53", "53":
        "Port to listen on, UDP and TCP";
    "log_level" BoshDns "DEBUG, INFO, WARN, ERROR or NONE" = "\"INFO\"", "\"WARN\"", "\"INFO\"":
        "Minimum level of logged messages";
    "records_file" BoshDns "path; empty: no records" = "\"\"", "\"/var/vcap/instance/dns/records.json\"",
        "\"/var/lib/bosh-dns-xdp/records.json\"":
        "Records of the fleet, as the BOSH director writes them; reloaded on every change";
    "alias_files_glob" BoshDns "path with * ? [a-z]" = "\"\"", "\"/var/vcap/jobs/*/dns/aliases.json\"",
        "\"/etc/bosh-dns-xdp/aliases.d/*.json\"":
        "Files with aliases: names that stand for other names or addresses";
    "handlers_files_glob" BoshDns "path with * ? [a-z]" = "\"\"", "\"/var/vcap/jobs/*/dns/handlers.json\"",
        "\"/etc/bosh-dns-xdp/handlers.d/*.json\"":
        "Files with handlers: domains that other servers answer";
    "addresses_files_glob" BoshDns "path with * ? [a-z]" = "\"\"", "\"/var/vcap/jobs/*/dns/addresses.json\"",
        "\"/etc/bosh-dns-xdp/addresses.d/*.json\"":
        "Files with additional listen addresses";
    "upcheck_domains" BoshDns "list of names" = "[]", "[\"upcheck.bosh-dns.\"]", "[\"upcheck.bosh-dns.\"]":
        "Names answered with 127.0.0.1 and ::1, to check that the server is up";
    "disable_recursors" BoshDns "boolean" = "false", "true", "false":
        "Answer only names of the fleet and of handlers; refuse all others";
    "recursors" BoshDns "list of IP, IP:port, [IPv6]:port, host:port or tls://IP:port#name" = "[]", "[\"10.0.0.2:53\"]", "[]":
        "Servers to forward other names to; empty: the nameservers of /etc/resolv.conf, reloaded on every change";
    "excluded_recursors" BoshDns "list of IP or IP:port" = "[]", "[\"169.254.169.254\"]", "[]":
        "Servers that are never used as recursors";
    "recursor_selection" BoshDns "smart or serial" = "\"smart\"", "\"serial\"", "\"smart\"":
        "smart keeps the recursor that answers; serial always begins with the first";
    "recursor_timeout" BoshDns "duration" = "\"2s\"", "\"500ms\"", "\"2s\"":
        "Time limit for one attempt at one recursor";
    "recursor_max_retries" BoshDns "number, 0 to 1000" = "0", "2", "0":
        "Retries with the same recursor after network errors";
    "recursor_errors" Ours "truthful or nxdomain" = "\"truthful\"", "\"nxdomain\"", "":
        "Older key; nxdomain enables every compat key that is not set explicitly";
    "recursor_client_subnet" Ours "boolean" = "false", "true", "false":
        "Forward the Client Subnet option (RFC 7871); such answers are not cached";
    "recursor_0x20" Ours "boolean" = "false", "true", "false":
        "Randomise the letter case of forwarded questions, which makes replies harder to forge";
    "special_names" Ours "forward or local" = "\"forward\"", "\"local\"", "\"forward\"":
        "local answers localhost, invalid, onion and reverse names of private addresses here, as unbound does";
    "request_timeout" BoshDns "duration" = "\"5s\"", "\"3s\"", "\"5s\"":
        "Time limit for one client query, including all attempts";
    "timeout" BoshDns "duration above 0" = "\"5s\"", "\"10s\"", "\"5s\"":
        "Time limit for binding the sockets and the first up-check";
    "max_reply" Ours "bytes, 512 to 65507, or null" = "null", "1232", "null":
        "Longest UDP reply to clients of other networks; null: 1232, unless the address is loopback or link-local";
    "identity" Ours "edns, always or off" = "\"edns\"", "\"off\"", "\"edns\"":
        "Which queries may read version and host name (class CH, NSID): with EDNS, all, or none";
    "jobs_dir" BoshDns "path; empty: off" = "\"\"", "\"/var/vcap/jobs\"", "":
        "Folder of the jobs, for the API's /local-groups";
    "configure_systemd_resolved" BoshDns "boolean" = "false", "true", "":
        "Accepted for compatibility; use the command `resolver --systemd-resolved` instead";
    "internal_upcheck_domain.enabled" BoshDns "boolean" = "false", "true", "":
        "Require an additional name to resolve before the server counts as up";
    "internal_upcheck_domain.dns_query" BoshDns "name with a final dot" = "\"\"", "\"q-s0.q-g1.bosh.\"", "":
        "The name that must resolve";
    "logging.format.timestamp" BoshDns "text" = "\"deprecated\"", "\"rfc3339\"", "":
        "Accepted for compatibility; times in the log have the format of RFC 3339 in any case";
    "logging.tags[].name" BoshDns "text; required" = "", "\"handlers\"", "":
        "Log tag with a separate level";
    "logging.tags[].log_level" BoshDns "DEBUG, INFO, WARN, ERROR or NONE; required" = "", "\"DEBUG\"", "":
        "Level of this tag";
    "api.port" BoshDns "port" = "", "53080", "":
        "Port of the API on 127.0.0.1; without it the API is off";
    "api.certificate_file" BoshDns "path" = "", "\"/var/vcap/jobs/bosh-dns/config/certs/api/server.crt\"", "":
        "Certificate of the API server, PEM";
    "api.private_key_file" BoshDns "path" = "", "\"/var/vcap/jobs/bosh-dns/config/certs/api/server.key\"", "":
        "Key of that certificate, PEM";
    "api.ca_file" BoshDns "path" = "", "\"/var/vcap/jobs/bosh-dns/config/certs/api/client_ca.crt\"", "":
        "CAs of client certificates, PEM";
    "api.admins" Ours "list of common names, or null" = "null", "[\"ops.example.org\"]", "":
        "Client certificates that may list and flush caches, reload, change log levels and watch queries; null: any of the CA";
    "health.enabled" BoshDns "boolean" = "false", "true", "":
        "Check the health of instances and filter answers by it";
    "health.port" BoshDns "port; required if enabled" = "", "8853", "":
        "Port of the health servers on the instances";
    "health.certificate_file" BoshDns "path; required if enabled" = "",
        "\"/var/vcap/jobs/bosh-dns/config/certs/health/client.crt\"", "":
        "Client certificate of health checks, PEM";
    "health.private_key_file" BoshDns "path; required if enabled" = "",
        "\"/var/vcap/jobs/bosh-dns/config/certs/health/client.key\"", "":
        "Key of that certificate, PEM";
    "health.ca_file" BoshDns "path; required if enabled" = "",
        "\"/var/vcap/jobs/bosh-dns/config/certs/health/client_ca.crt\"", "":
        "CAs of the health servers, PEM";
    "health.check_interval" BoshDns "duration above 0" = "\"20s\"", "\"10s\"", "":
        "Time between two checks of one instance";
    "health.max_tracked_queries" BoshDns "number, 0 to 10000000" = "2000", "5000", "":
        "Maximum number of names whose instances are checked; the least recently queried are dropped";
    "health.synchronous_check_timeout" BoshDns "duration" = "\"1s\"", "\"500ms\"", "":
        "How long a query with y1 waits for the first checks";
    "health.tracked_query_ttl" Ours "duration; 0s: never" = "\"0s\"", "\"1h\"", "":
        "Time after which a name without queries is no longer checked";
    "cache.enabled" BoshDns "boolean" = "false", "true", "false":
        "Cache forwarded answers for their TTL";
    "cache.max_entries" Ours "number, 1 to 100000000" = "10000", "50000", "10000":
        "Maximum number of cached answers";
    "cache.max_bytes" Ours "bytes, 1 to 1 TiB" = "67108864", "16777216", "67108864":
        "Maximum memory of the cache";
    "cache.serve_stale" Ours "duration; 0s: never" = "\"0s\"", "\"1h\"", "\"0s\"":
        "How long after its TTL an answer is served while recursors fail (RFC 8767)";
    "compat.nxdomain_for_failures" Ours "boolean" = "false", "true", "":
        "NXDOMAIN without records whenever no recursor answered with NOERROR";
    "compat.forget_failures" Ours "boolean" = "false", "true", "":
        "Query recursors again immediately for a name that has just failed";
    "compat.wait_for_silent_recursors" Ours "boolean" = "false", "true", "":
        "Wait for unresponsive recursors even if another returned NXDOMAIN or an error";
    "compat.accept_other_questions" Ours "boolean" = "false", "true", "":
        "Accept a reply to a different question if no better one arrives in time";
    "compat.nxdomain_is_failure" Ours "boolean" = "false", "true", "":
        "Count NXDOMAIN against the preferred recursor";
    "compat.transparent_forwarding" Ours "boolean" = "false", "true", "":
        "Add no OPT to forwarded queries; return RD, RA, TC and OPT as the recursor sent them";
    "compat.cache_as_authority" Ours "boolean" = "false", "true", "":
        "Set AA in cached answers and ignore the class";
    "compat.cache_zero_ttl" Ours "boolean" = "false", "true", "":
        "Cache an answer with TTL 0 for five seconds";
    "compat.retired_handlers" Ours "boolean" = "false", "true", "":
        "Never route to a handler again once the records have contained its domain";
    "compat.require_health_certificates" Ours "boolean" = "false", "true", "":
        "Do not start without usable health certificates";
    "compat.require_alias_files" Ours "boolean" = "false", "true", "":
        "Do not start with an invalid alias file";
    "compat.formerr_for_malformed_names" Ours "boolean" = "false", "true", "":
        "FORMERR for names in a records domain that are not valid queries";
    "compat.nxdomain_for_empty_non_terminals" Ours "boolean" = "false", "true", "":
        "NXDOMAIN for empty non-terminals";
    "compat.any_class" Ours "boolean" = "false", "true", "":
        "Ignore the class of a question";
    "compat.echo_opt" Ours "boolean" = "false", "true", "":
        "Echo the client's UDP size in the reply's OPT, with DO clear";
    "control.socket" Ours "absolute path; empty: none" = "\"/run/bosh-dns-xdp/control.sock\"", "\"/run/bosh-dns-xdp/control.sock\"",
        "\"/run/bosh-dns-xdp/control.sock\"":
        "Unix socket for status, top, tap and the other commands";
    "control.user" Ours "user name; empty: the server's" = "\"\"", "\"root\"", "\"\"":
        "Owner of the socket";
    "control.group" Ours "group name; empty: none" = "\"\"", "\"adm\"", "\"\"":
        "Group whose members may also connect";
    "metrics.enabled" BoshDns "boolean" = "false", "true", "false":
        "Serve Prometheus metrics, /healthz and /readyz";
    "metrics.address" BoshDns "IP address" = "\"127.0.0.1\"", "\"10.0.16.5\"", "\"127.0.0.1\"":
        "Address of the metrics endpoint";
    "metrics.port" BoshDns "port" = "53088", "9153", "53088":
        "Port of the metrics endpoint";
    "metrics.top_names" Ours "number, 0 to 100; 0: none" = "0", "20", "":
        "Count the queries that interfaces answer for the names asked most, from one in 200 of them";
    "cookies.enabled" Ours "boolean" = "false", "true", "":
        "Give clients DNS Cookies (RFC 7873); queries with a cookie are then answered in userspace only";
    "cookies.secrets" Ours "list of texts of 32 hexadecimal digits; empty: a random one" = "[]",
        "[\"e5e973e5a6b2a43f48e7dc849e37bfcf\"]", "":
        "Keys of server cookies, as in BIND and unbound (RFC 9018): the first creates cookies, each is accepted";
    "dnstap.socket" Ours "absolute path; empty: none" = "\"\"", "\"/run/dnstap.sock\"", "":
        "Unix socket of a reader of dnstap, such as fstrm_capture or dnscollector; at most one of socket, file and tcp";
    "dnstap.file" Ours "absolute path; empty: none" = "\"\"", "\"/var/log/bosh-dns-xdp/queries.tap\"", "":
        "File for dnstap; begun at every start and after it was moved, the former one is kept as FILE.old";
    "dnstap.tcp" Ours "IP:port or [IPv6]:port; empty: none" = "\"\"", "\"10.0.0.5:6000\"", "":
        "Address of a reader of dnstap";
    "dnstap.identity" Ours "text; empty: the host name" = "\"\"", "\"cell-7\"", "":
        "Name of this server in dnstap";
    "dnstap.version" Ours "text; empty: name and version of the server" = "\"\"", "\"1.0\"", "":
        "Version of this server in dnstap";
    "dnstap.messages" Ours "list of client_query, client_response, forwarder_query, forwarder_response; null: all" = "null",
        "[\"client_response\"]", "":
        "Types of messages in dnstap";
    "dnstap.sample" Ours "number, 1 to 1000000" = "1", "10", "":
        "Log one query of userspace in this many";
    "dnstap.interface_sample" Ours "number, 0 to 1000000; 0: none" = "100", "1000", "":
        "Log one query answered at an interface in this many, at most 5,000 a second";
    "xdp.enabled" Ours "boolean" = "true", "false", "true":
        "Answer hot names at the interface";
    "xdp.mode" Ours "auto, native, tc or off" = "\"auto\"", "\"tc\"", "\"auto\"":
        "Hook for the programs; auto chooses one for each interface";
    "xdp.interfaces" Ours "list of names and patterns, or null" = "null", "[\"lo\", \"s-*\"]", "null":
        "Interfaces to serve; null: all that queries can arrive on";
    "xdp.respect_filters" Ours "list of names and patterns" = "[]", "[\"eth0\"]", "[]":
        "Interfaces left to userspace, so that every packet passes the packet filter";
    "xdp.vlans" Ours "list of VLAN ids, 0 to 4095" = "[]", "[20]", "[]":
        "VLANs whose tagged frames are answered at the interface";
    "xdp.shed" Ours "boolean" = "true", "false", "true":
        "Drop queries beyond userspace's capacity at the interface";
    "xdp.max_names" Ours "number, 1 to 16777216" = "65536", "262144", "65536":
        "Maximum number of names in the fast path";
    "xdp.cache_entries" Ours "number, 0 to 1048576; 0: none" = "8192", "32768", "8192":
        "Maximum number of forwarded answers in the fast path while `cache.enabled` is set";
    "xdp.cache_bytes" Ours "bytes, 1 MiB to 256 MiB" = "4194304", "16777216", "4194304":
        "Memory for forwarded answers in the fast path";
    "xdp.other_types" Ours "boolean" = "true", "false", "true":
        "Answer repeated queries for SRV, TXT, PTR and other types of local names in the fast path";
    "xdp.lease" Ours "duration, at least 1s" = "\"10s\"", "\"5s\"", "\"10s\"":
        "How long the interface answers without renewal by userspace; ten seconds at most without a sign of life of the attacher";
    "xdp.bpffs" Ours "path" = "\"/run/bosh-dns-xdp-pins\"",
        "\"/sys/fs/bpf/dns\"", "\"/run/bosh-dns-xdp-pins\"":
        "Folder of the pinned programs and maps; a BPF file system is mounted there if needed";
    "xdp.on_stop" Ours "detach or keep" = "\"detach\"", "\"keep\"", "\"detach\"":
        "On a clean stop, detach the programs, or let them answer until a new server takes over or the lease expires";
    "xdp.attach_socket" Ours "absolute path; empty: none" = "\"\"", "\"/run/bosh-dns-xdp/attach.sock\"", "\"\"":
        "Socket of a `bosh-dns-xdp attach` service, which loads and attaches the programs; empty: the server starts one itself";
    "xdp.attach_user" Ours "user name; empty: none" = "\"\"", "\"bosh-dns-xdp-attach\"", "\"\"":
        "User that the attacher switches to, keeping only CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON";
    "xdp.user" Ours "user name; empty: none" = "\"\"", "\"vcap\"", "\"\"":
        "User that the server switches to at startup, keeping only CAP_NET_BIND_SERVICE";
};

/// Returns the members of a document that no part of the server reads, as paths, each with the most
/// similar known key, if any. Names that start with `#` are comments.
pub(super) fn unknown(document: &Json) -> Vec<(String, Option<&'static str>)> {
    let mut found = Vec::new();
    collect_unknown(document, "", "", &mut found);
    found
}

/// Adds the unknown members of `value`. `shape` is its path with `[]` for list items, as in
/// [`KEYS`]; `place` the path with indexes, for messages.
fn collect_unknown(
    value: &Json,
    shape: &str,
    place: &str,
    found: &mut Vec<(String, Option<&'static str>)>,
) {
    match value {
        Json::Object(members) => {
            for (name, value) in members.iter().filter(|(name, _)| !name.starts_with('#')) {
                // Keys have any letter case, as for Go's decoder.
                let lower = name.to_ascii_lowercase();
                let shape = joined(shape, &lower);
                let place = joined(place, name);
                if FOREIGN_OBJECTS.contains(&shape.as_str())
                    || KEYS.iter().any(|key| key.path == shape)
                {
                    continue;
                }
                let is_above = KEYS.iter().any(|key: &ConfigKey| {
                    let rest = key.path.strip_prefix(&shape);
                    rest.is_some_and(|rest| rest.starts_with(['.', '[']))
                });
                // An object with known keys: its unknown members are reported one by one.
                if is_above {
                    collect_unknown(value, &shape, &place, found);
                } else {
                    found.push((place, nearest(&shape)));
                }
            }
        }
        Json::List(items) => {
            for (index, item) in items.iter().enumerate() {
                collect_unknown(
                    item,
                    &format!("{shape}[]"),
                    &format!("{place}[{index}]"),
                    found,
                );
            }
        }
        _ => {}
    }
}

fn joined(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

/// Returns the key most similar to `path` if at most a quarter of its letters, and no more than four, differ.
fn nearest(path: &str) -> Option<&'static str> {
    let best = KEYS
        .iter()
        .map(|key| key.path)
        .min_by_key(|known| strsim::levenshtein(path, known))?;
    // A hint that is far off would mislead more than none.
    if strsim::levenshtein(path, best) > best.len().div_ceil(4).min(4) {
        return None;
    }
    Some(best)
}

//----------- Compat -------------------------------------------------------
//
// `compat`: behaviour of bosh-dns that is off by default.

macro_rules! compat {
    ($($option:ident,)+) => {
        /// Behaviour of bosh-dns that violates RFCs or confuses clients. All options are off by
        /// default; docs/differences.md describes each.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Compat {
            $(
                #[doc = concat!("`compat.", stringify!($option), "`, see [`KEYS`].")]
                pub $option: bool,
            )+
        }

        impl Compat {
            /// All options on: the behaviour of bosh-dns.
            pub const REFERENCE: Self = Self { $($option: true),+ };

            /// Returns the options by name.
            fn members(&mut self) -> impl Iterator<Item = (&'static str, &mut bool)> {
                [$((stringify!($option), &mut self.$option)),+].into_iter()
            }
        }
    };
}

compat! {
    nxdomain_for_failures,
    forget_failures,
    wait_for_silent_recursors,
    accept_other_questions,
    nxdomain_is_failure,
    transparent_forwarding,
    cache_as_authority,
    cache_zero_ttl,
    retired_handlers,
    require_health_certificates,
    require_alias_files,
    formerr_for_malformed_names,
    nxdomain_for_empty_non_terminals,
    any_class,
    echo_opt,
}

impl Compat {
    /// Reads `compat`. Its predecessor `recursor_errors: nxdomain` means [`Self::REFERENCE`];
    /// members of `compat` override it.
    pub(super) fn read(root: &ObjectReader<'_>) -> Result<Self, ConfigError> {
        let choices = [("truthful", Self::default()), ("nxdomain", Self::REFERENCE)];
        let mut compat = root
            .choice("recursor_errors", &choices)?
            .unwrap_or_default();
        let object = root.object("compat")?;
        for (name, member) in compat.members() {
            if let Some(value) = object.boolean(name)? {
                *member = value;
            }
        }
        Ok(compat)
    }
}

/// `dnstap`: the output and its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnstapConfig {
    /// `socket`, `tcp` or `file`.
    pub output: DnstapOutput,
    /// `identity`: name of this server; `None`: the machine's host name.
    pub identity: Option<String>,
    /// `version`: version of this server; `None`: its name and version.
    pub version: Option<String>,
    /// `messages`: types of messages.
    pub messages: DnstapMessages,
    /// `sample`: one query in this many.
    pub sample: u32,
    /// `interface_sample`: one query answered at an interface in this many; 0: none.
    pub interface_sample: u32,
}

/// The output of dnstap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnstapOutput {
    /// Unix socket of a reader.
    Socket(PathBuf),
    /// Address of a reader.
    Tcp(SocketAddr),
    /// File, begun at each start.
    File(PathBuf),
}

impl fmt::Display for DnstapOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) | Self::File(path) => path.display().fmt(f),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

/// Types of dnstap messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DnstapMessages {
    /// Log queries as clients sent them.
    pub client_query: bool,
    /// Log replies as clients receive them.
    pub client_response: bool,
    /// Log queries as recursors receive them.
    pub forwarder_query: bool,
    /// Log replies as recursors sent them.
    pub forwarder_response: bool,
}

/// Reads `dnstap`; `None` if it is absent.
pub(super) fn dnstap(root: &ObjectReader<'_>) -> Result<Option<DnstapConfig>, ConfigError> {
    let object = root.object("dnstap")?;
    let socket = object.filled("socket")?;
    let file = object.filled("file")?;
    let tcp = object.filled("tcp")?;
    let identity = object.filled("identity")?.map(str::to_owned);
    let version = object.filled("version")?.map(str::to_owned);
    let messages = messages(&object)?;
    let sample = object.number("sample", 1, 1_000_000)?.unwrap_or(1) as u32;
    let interface_sample = object
        .number("interface_sample", 0, 1_000_000)?
        .unwrap_or(100) as u32;
    let output = match (socket, file, tcp) {
        // Other members without an output are a mistake, not the absence of dnstap.
        (None, None, None) if object.entries().next().is_none() => return Ok(None),
        (Some(path), None, None) => DnstapOutput::Socket(absolute(&object, "socket", path)?),
        (None, Some(path), None) => DnstapOutput::File(absolute(&object, "file", path)?),
        (None, None, Some(address)) => DnstapOutput::Tcp(address.parse().map_err(|_| {
            object.error(
                "tcp",
                &format!("{address:?} is not an address with a port, such as \"10.0.0.5:6000\""),
            )
        })?),
        (None, None, None) => {
            return Err(object.error(
                "socket",
                "is missing; dnstap needs one of socket, file and tcp",
            ));
        }
        _ => {
            return Err(object.error(
                "socket",
                "more than one of socket, file and tcp is set; choose one",
            ));
        }
    };
    Ok(Some(DnstapConfig {
        output,
        identity,
        version,
        messages,
        sample,
        interface_sample,
    }))
}

/// Reads the types of messages; absent: all.
fn messages(object: &ObjectReader<'_>) -> Result<DnstapMessages, ConfigError> {
    const NAMES: [&str; 4] = [
        "client_query",
        "client_response",
        "forwarder_query",
        "forwarder_response",
    ];
    let listed = object.texts("messages")?;
    if let Some(name) = listed.iter().flatten().find(|name| !NAMES.contains(name)) {
        let problem = format!(
            "{name:?} is unknown; expected client_query, client_response, forwarder_query or \
             forwarder_response"
        );
        return Err(object.error("messages", &problem));
    }
    let [
        client_query,
        client_response,
        forwarder_query,
        forwarder_response,
    ] = NAMES.map(|name| listed.as_ref().is_none_or(|listed| listed.contains(&name)));
    Ok(DnstapMessages {
        client_query,
        client_response,
        forwarder_query,
        forwarder_response,
    })
}

fn absolute(object: &ObjectReader<'_>, name: &str, path: &str) -> Result<PathBuf, ConfigError> {
    let path = PathBuf::from(path);
    if path.is_absolute() {
        Ok(path)
    } else {
        Err(object.error(name, "is not an absolute path"))
    }
}

#[cfg(test)]
mod compat_tests {
    use super::*;
    use crate::config::reader::Json;

    fn read(text: &str) -> Compat {
        let json = Json::parse(text.as_bytes()).unwrap();
        Compat::read(&ObjectReader::document("config.json", &json).unwrap()).unwrap()
    }

    #[test]
    fn members_override_the_old_key() {
        assert_eq!(read("{}"), Compat::default());
        assert_eq!(
            read(r#"{"recursor_errors": "nxdomain"}"#),
            Compat::REFERENCE
        );
        assert_eq!(
            read(r#"{"recursor_errors": "nxdomain", "compat": {"any_class": false}}"#),
            Compat {
                any_class: false,
                ..Compat::REFERENCE
            }
        );
        assert_eq!(
            read(r#"{"compat": {"echo_opt": true}}"#),
            Compat {
                echo_opt: true,
                ..Compat::default()
            }
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::Config;

    #[test]
    fn table_lists_every_parsed_key() {
        // Every feature is switched on, so that the parser reads each key.
        let text = r#"{"port": 53, "address": "127.0.0.1", "upcheck_domains": ["up."],
            "internal_upcheck_domain": {"enabled": true, "dns_query": "a.bosh."},
            "logging": {"tags": [{"name": "a", "log_level": "INFO"}]}, "metrics": {"enabled": true},
            "health": {"enabled": true, "port": 8853, "certificate_file": "/c", "private_key_file": "/k",
                "ca_file": "/a"}}"#;
        let read: BTreeSet<String> = Config::keys_read(text.as_bytes())
            .into_iter()
            .map(|path| path.replace("[0]", "[]"))
            .collect();
        let listed: BTreeSet<String> = KEYS.iter().map(|key| key.path.to_owned()).collect();
        assert_eq!(listed.len(), KEYS.len(), "no key is listed twice");
        assert_eq!(read, listed);
    }

    #[test]
    fn examples_and_defaults_parse() {
        for key in KEYS {
            for value in [key.example, key.default, key.starter]
                .into_iter()
                .filter(|value| !value.is_empty())
            {
                Json::parse(value.as_bytes())
                    .unwrap_or_else(|error| panic!("{}: {value}: {error}", key.path));
            }
            assert!(
                !key.about.ends_with('.') && key.about.len() > 10,
                "{}",
                key.path
            );
            // A document with this key and the required ones is accepted or fails for another key.
            let (objects, last) = key.path.rsplit_once('.').unwrap_or(("", key.path));
            if objects.contains("[]") || key.path == "port" {
                continue;
            }
            let member = format!("{:?}: {}", last, key.example);
            let nested = objects
                .split('.')
                .rev()
                .filter(|object| !object.is_empty())
                .fold(member, |inner, object| format!("{object:?}: {{{inner}}}"));
            let document = format!("{{\"port\": 53, {nested}}}");
            match Config::parse("config.json", document.as_bytes()) {
                Ok(loaded) => assert!(
                    !loaded
                        .warnings
                        .iter()
                        .any(|warning| warning.contains("unknown")),
                    "{document}: {:?}",
                    loaded.warnings
                ),
                Err(error) => assert!(
                    error.key.as_deref() != Some(key.path) || error.problem.contains("is missing"),
                    "{document}: {error}"
                ),
            }
        }
    }

    #[test]
    fn few_letters_of_a_hint_differ() {
        for (path, expected) in [
            // A quarter of the letters may differ: one of four, two of seven, and four at most.
            ("prt", Some("port")),
            ("pr", None),
            ("tmeut", Some("timeout")),
            ("tmeu", None),
            ("recursor_client_su", Some("recursor_client_subnet")),
            ("recursor_client_s", None),
        ] {
            assert_eq!(nearest(path), expected, "{path}");
        }
    }

    #[test]
    fn typos_get_a_suggestion() {
        let text = br##"{"recursor_timout": "2s", "cache": {"enbled": true}, "metrics": {"prot": 1},
            "logging": {"tags": [{"nme": "x"}]}, "Port": 53, "consul": {"anything": 1}, "# port": "",
            "future": {"x": 1}}"##;
        let found = unknown(&Json::parse(text).unwrap());
        let found: Vec<_> = found
            .iter()
            .map(|(path, near)| (path.as_str(), *near))
            .collect();
        assert_eq!(
            found,
            [
                ("recursor_timout", Some("recursor_timeout")),
                ("cache.enbled", Some("cache.enabled")),
                ("metrics.prot", Some("metrics.port")),
                ("logging.tags[0].nme", Some("logging.tags[].name")),
                ("future", None),
            ]
        );
    }

    fn read(object: &str) -> Result<Option<DnstapConfig>, String> {
        let text = format!(r#"{{"port": 53, "address": "127.0.0.1", "dnstap": {object}}}"#);
        let loaded =
            Config::parse("config.json", text.as_bytes()).map_err(|error| error.to_string())?;
        Ok(loaded.config.dnstap)
    }

    #[test]
    fn outputs_exclude_each_other() {
        assert_eq!(read("{}"), Ok(None));
        let socket = read(r#"{"socket": "/run/tap.sock"}"#).unwrap().unwrap();
        assert_eq!(socket.output, DnstapOutput::Socket("/run/tap.sock".into()));
        assert_eq!((socket.sample, socket.interface_sample), (1, 100));
        assert!(socket.messages.client_query && socket.messages.forwarder_response);
        let tcp = read(r#"{"tcp": "[::1]:6000", "messages": ["client_response"]}"#)
            .unwrap()
            .unwrap();
        assert_eq!(tcp.output, DnstapOutput::Tcp("[::1]:6000".parse().unwrap()));
        assert!(tcp.messages.client_response && !tcp.messages.client_query);
        for (object, expected) in [
            (r#"{"sample": 5}"#, "dnstap.socket: is missing"),
            (
                r#"{"socket": "/a", "file": "/b"}"#,
                "dnstap.socket: more than one",
            ),
            (r#"{"file": "b"}"#, "dnstap.file: is not an absolute path"),
            (
                r#"{"tcp": "host:6000"}"#,
                "dnstap.tcp: \"host:6000\" is not an address",
            ),
            (
                r#"{"tcp": "1.2.3.4:5", "messages": ["auth_query"]}"#,
                "dnstap.messages: \"auth_query\" is unknown",
            ),
            (
                r#"{"tcp": "1.2.3.4:5", "sample": 0}"#,
                "dnstap.sample: is 0",
            ),
        ] {
            let error = read(object).unwrap_err();
            assert!(
                error.starts_with(&format!("config.json: {expected}")),
                "{object}: {error}"
            );
        }
    }
}
