//! The object `"consul"` of `config.json`; members have Consul's names. The section `sources.http`
//! is [`HttpApi`].

use std::{fmt, path::PathBuf, time::Duration};

use dns_core::{
    config::{
        ConfigError, ParsedFiles,
        keys::{ConfigKey, Origin},
        parse::every_error,
        reader::{Json, ObjectReader},
        values,
        values::{parse_duration, with_port},
    },
    name::Name,
};

/// Settings for answering Consul's names, with all defaults applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `domain`: the zone's apex.
    pub domain: Name,
    /// `alt_domain`: a second domain that contains the same names.
    pub alt_domain: Option<Name>,
    /// `datacenter`, in lower case: the local datacenter.
    pub datacenter: String,
    /// Whether `datacenter` is unset, so that a live source may provide it.
    pub datacenter_is_default: bool,
    /// `node_name`: the node that the server runs on, for `near`.
    pub node_name: String,
    /// `advertise_addr`: address of that node, for services without an address.
    pub advertise_addr: Option<String>,
    /// `translate_wan_addrs`: return `wan` addresses for nodes of other datacenters.
    pub translate_wan_addrs: bool,
    /// `recursors` as `host:port`, for host names; if empty, the server's recursors apply.
    pub recursors: Vec<String>,
    /// `dns_config`: settings that affect answers.
    pub dns: DnsConfig,
    /// `token_file`: file with the token for Consul's HTTP API.
    pub token_file: Option<PathBuf>,
    /// `sources.files`: glob patterns of definition files.
    pub files: Vec<String>,
    /// `sources.http`: access to the HTTP API of Consul's agents; `None` if unset.
    pub http: Option<HttpApi>,
    /// `acl`, ours: nodes and services of the definition files to publish, as a token's permissions
    /// would allow; all if unset.
    pub visibility: Visibility,
    /// `empty_non_terminals`, ours: answer empty non-terminals with NOERROR and no data (RFC 8020)
    /// instead of Consul's NXDOMAIN.
    pub empty_non_terminals: bool,
}

/// Settings of the `dns_config` block that affect answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsConfig {
    /// `allow_stale`: whether any Consul server may answer the live source, not only the leader.
    pub allow_stale: bool,
    /// `max_stale`: how long data of an unreachable live source remains valid.
    pub max_stale: Duration,
    /// `node_ttl`: TTL of node records in seconds.
    pub node_ttl: u32,
    /// `service_ttl`: TTLs in seconds by service name, or by prefix if the name ends with `*`.
    pub service_ttl: Vec<(String, u32)>,
    /// `only_passing`: also skip instances with warnings.
    pub only_passing: bool,
    /// `enable_truncate`: set TC if answers were omitted.
    pub enable_truncate: bool,
    /// `udp_answer_limit`: maximum number of answers over UDP without EDNS.
    pub udp_answer_limit: usize,
    /// `a_record_limit`: maximum number of addresses over any transport; 0 for no limit.
    pub a_record_limit: usize,
    /// `enable_additional_node_meta_txt`: add node metadata to the additional section.
    pub node_meta_txt: bool,
    /// `disable_compression`: write all names in full.
    pub disable_compression: bool,
    /// `soa`: timers of the SOA record.
    pub soa: Soa,
    /// `recursor_timeout`: timeout of one attempt.
    pub recursor_timeout: Duration,
    /// `recursor_strategy`: whether recursors are queried in random order.
    pub random_recursors: bool,
}

/// Timers of the SOA record, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Soa {
    /// `refresh` of the SOA, in seconds.
    pub refresh: u32,
    /// `retry` of the SOA, in seconds.
    pub retry: u32,
    /// `expire` of the SOA, in seconds.
    pub expire: u32,
    /// `min_ttl`: also the TTL of the record.
    pub min_ttl: u32,
}

/// Consul's `max_stale`: ten years.
const MAX_STALE: Duration = Duration::from_secs(87_600 * 3600);

/// Largest TTL (RFC 2181, section 8).
const MAX_TTL: u64 = (1 << 31) - 1;

impl Config {
    /// Parses the object `"consul"` of a whole `config.json`, and returns warnings about members
    /// without effect; `None` if it has no such object. With errors, the object that remains without
    /// the invalid members.
    pub fn of_document(file: &str, bytes: &[u8]) -> ParsedFiles<Option<(Self, Vec<String>)>> {
        let json = match Json::parse(bytes) {
            Ok(json) => json,
            Err(error) => {
                let error = ConfigError::of_file(file, format!("is not JSON: {error}"));
                return ParsedFiles {
                    valid: None,
                    errors: vec![error],
                };
            }
        };
        let (errors, valid) = every_error(json, |json| Self::load(file, json));
        ParsedFiles {
            valid: valid.flatten(),
            errors,
        }
    }

    /// Reads a parsed document.
    fn load(file: &str, json: &Json) -> Result<Option<(Self, Vec<String>)>, ConfigError> {
        let root = ObjectReader::document(file, json)?;
        if !root.has("consul") {
            return Ok(None);
        }
        let object = root.object("consul")?;
        let (config, unknown) = Self::read(&object)?;
        let mut warnings = Vec::new();
        for path in unknown {
            warnings.push(format!(
                "{file}: {path} is an unknown setting: it has no effect; remove it, or correct its name"
            ));
        }
        if config.token_file.is_some() && config.http.is_none() {
            warnings.push(format!(
                "{file}: consul.token_file is for Consul's HTTP API, which is not used: it has no effect; \
                 set consul.sources.http.addresses"
            ));
        }
        Ok(Some((config, warnings)))
    }

    /// Parses the object itself; also returns the paths of unknown members.
    pub fn read(object: &ObjectReader<'_>) -> Result<(Self, Vec<String>), ConfigError> {
        let mut recursors = Vec::new();
        for text in object.texts("recursors")?.unwrap_or_default() {
            match with_port(text) {
                Ok(recursor) => recursors.push(recursor),
                Err(problem) => return Err(object.error("recursors", &problem.to_string())),
            }
        }
        // Consul's default, and its rule for names.
        let datacenter = object
            .text("datacenter")?
            .unwrap_or("dc1")
            .to_ascii_lowercase();
        if datacenter.is_empty()
            || !datacenter
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        {
            return Err(object.error("datacenter", "use letters, digits, - and _"));
        }
        let dns_object = object.object("dns_config")?;
        let (dns, unknown_of_dns) = DnsConfig::read(&dns_object)?;
        let config = Self {
            domain: domain(object, "domain")?.unwrap_or_else(default_domain),
            alt_domain: domain(object, "alt_domain")?,
            datacenter,
            datacenter_is_default: !object.has("datacenter"),
            node_name: object.text("node_name")?.unwrap_or_default().to_owned(),
            advertise_addr: object
                .address("advertise_addr")?
                .map(|address| address.to_string()),
            translate_wan_addrs: object.boolean("translate_wan_addrs")?.unwrap_or(false),
            recursors,
            dns,
            token_file: object.text("token_file")?.map(PathBuf::from),
            files: files(object)?,
            http: HttpApi::read(&object.object("sources")?)?,
            visibility: visibility(object)?,
            empty_non_terminals: object.boolean("empty_non_terminals")?.unwrap_or(false),
        };
        let mut unknown = object.unknown();
        unknown.extend(unknown_of_dns);
        Ok((config, unknown))
    }

    /// Returns whether nodes of this datacenter are returned with their `wan` addresses.
    pub fn translates(&self, datacenter: &str) -> bool {
        self.translate_wan_addrs && !self.datacenter.eq_ignore_ascii_case(datacenter)
    }

    /// Returns our domain that contains a name; of two, the longer one.
    pub fn domain_of(&self, name: &Name) -> Option<&Name> {
        let mut longest: Option<&Name> = None;
        for domain in [Some(&self.domain), self.alt_domain.as_ref()] {
            if let Some(domain) = domain
                && name.is_within(domain)
                // Two domains of one length that both contain the name are equal.
                && longest.is_none_or(|other| other.as_wire().len() <= domain.as_wire().len())
            {
                longest = Some(domain);
            }
        }
        longest
    }
}

impl DnsConfig {
    /// Parses `dns_config` and returns the paths of unknown members.
    fn read(object: &ObjectReader<'_>) -> Result<(Self, Vec<String>), ConfigError> {
        let soa_object = object.object("soa")?;
        let soa = Soa {
            // Consul's defaults.
            refresh: number(&soa_object, "refresh", MAX_TTL, 3600)?,
            retry: number(&soa_object, "retry", MAX_TTL, 600)?,
            expire: number(&soa_object, "expire", MAX_TTL, 86400)?,
            min_ttl: number(&soa_object, "min_ttl", MAX_TTL, 0)?,
        };
        // Without effect: every query is answered from the catalog in memory.
        object.boolean("use_cache")?;
        object.duration("cache_max_age")?;
        let dns = Self {
            allow_stale: object.boolean("allow_stale")?.unwrap_or(true),
            max_stale: object.duration("max_stale")?.unwrap_or(MAX_STALE),
            node_ttl: object.duration("node_ttl")?.map_or(0, seconds),
            service_ttl: service_ttl(object)?,
            only_passing: object.boolean("only_passing")?.unwrap_or(false),
            enable_truncate: object.boolean("enable_truncate")?.unwrap_or(false),
            udp_answer_limit: number(object, "udp_answer_limit", MAX_ANSWERS, 3)? as usize,
            a_record_limit: number(object, "a_record_limit", MAX_ANSWERS, 0)? as usize,
            node_meta_txt: object
                .boolean("enable_additional_node_meta_txt")?
                .unwrap_or(true),
            disable_compression: object.boolean("disable_compression")?.unwrap_or(false),
            soa,
            recursor_timeout: object
                .positive("recursor_timeout")?
                .unwrap_or(Duration::from_secs(2)),
            random_recursors: object
                .choice(
                    "recursor_strategy",
                    &[("sequential", false), ("random", true)],
                )?
                .unwrap_or(false),
        };
        let mut unknown = object.unknown();
        unknown.extend(soa_object.unknown());
        Ok((dns, unknown))
    }

    /// Returns the TTL of a service's records: the entry with exactly this name, else the entry
    /// with the longest matching prefix.
    pub fn ttl_of(&self, service: &str) -> u32 {
        // Keys are case-sensitive and queries are in lower case, so a key with capitals never matches (tests/cases).
        if let Some((_, ttl)) = self.service_ttl.iter().find(|(key, _)| key == service) {
            return *ttl;
        }
        let mut longest = None;
        for (key, ttl) in &self.service_ttl {
            if let Some(prefix) = key.strip_suffix('*')
                && service.starts_with(prefix)
                && longest.is_none_or(|(length, _)| prefix.len() >= length)
            {
                longest = Some((prefix.len(), *ttl));
            }
        }
        longest.map_or(0, |(_, ttl)| ttl)
    }
}

/// Maximum of the numbers of records.
const MAX_ANSWERS: u64 = 1 << 20;

/// Reads a number that fits 32 bits.
fn number(
    object: &ObjectReader<'_>,
    name: &'static str,
    max: u64,
    default: u32,
) -> Result<u32, ConfigError> {
    let number = object.number(name, 0, max)?;
    Ok(number.map_or(default, |number| number as u32))
}

/// Parses `sources.files`: one pattern or several.
fn files(object: &ObjectReader<'_>) -> Result<Vec<String>, ConfigError> {
    let sources = object.object("sources")?;
    let patterns = sources.texts("files")?.unwrap_or_default();
    // Parsed by `HttpApi::read`; marks the member as known.
    sources.has("http");
    if let Some(unknown) = sources.unknown().first() {
        return Err(object.error(
            "sources",
            &format!("{unknown} is not a source; expected \"files\" or \"http\""),
        ));
    }
    let mut checked = Vec::with_capacity(patterns.len());
    for pattern in patterns {
        values::check_pattern(pattern)
            .map_err(|problem| sources.error("files", &format!("{pattern:?}: {problem}")))?;
        checked.push(pattern.to_owned());
    }
    Ok(checked)
}

fn visibility(object: &ObjectReader<'_>) -> Result<Visibility, ConfigError> {
    if !object.has("acl") {
        return Ok(Visibility::all());
    }
    let acl = object.object("acl")?;
    Ok(Visibility {
        nodes: texts(&acl, "nodes")?,
        services: texts(&acl, "services")?,
    })
}

/// Parses a list of texts; empty if missing.
pub(crate) fn texts(
    object: &ObjectReader<'_>,
    name: &'static str,
) -> Result<Vec<String>, ConfigError> {
    let texts = object.texts(name)?.unwrap_or_default();
    Ok(texts.into_iter().map(str::to_owned).collect())
}

fn default_domain() -> Name {
    // Never the root, because the text is a valid name.
    Name::from_text("consul").unwrap_or_else(|_| Name::root())
}

/// Parses a domain in any letter case, with or without the final dot; `None` if empty.
fn domain(object: &ObjectReader<'_>, member: &'static str) -> Result<Option<Name>, ConfigError> {
    let Some(text) = object.filled(member)? else {
        return Ok(None);
    };
    let name = Name::from_text(text).map_err(|reason| {
        object.error(member, &format!("{text:?} is not a domain name: {reason}"))
    })?;
    if name.label_count() == 0 {
        return Err(object.error(
            member,
            "the root cannot be Consul's domain; use at least one label",
        ));
    }
    Ok(Some(name))
}

/// Parses `service_ttl`: durations by name.
fn service_ttl(object: &ObjectReader<'_>) -> Result<Vec<(String, u32)>, ConfigError> {
    let object = object.object("service_ttl")?;
    let mut ttls = Vec::new();
    for (key, value) in object.entries() {
        let Json::Text(text) = value else {
            return Err(object.error(key, "is not text; expected a duration such as \"5s\""));
        };
        match parse_duration(text) {
            Ok(duration) => ttls.push((key.to_owned(), seconds(duration))),
            Err(reason) => return Err(object.error(key, &format!("{text:?} {reason}"))),
        }
    }
    Ok(ttls)
}

/// Parses a TTL in Consul's notation, such as `10s`; `None` if empty or invalid.
pub fn ttl_from_text(text: &str) -> Option<u32> {
    parse_duration(text).ok().map(seconds)
}

/// Converts a duration to a TTL: whole seconds, at most the largest TTL.
pub(crate) fn seconds(duration: Duration) -> u32 {
    duration.as_secs().min(MAX_TTL) as u32
}

//----------- Read permissions -----------------------------------------------

/// Read permissions of the token in use; unreadable entries are treated as unregistered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visibility {
    /// Names of readable nodes; `*` for all.
    pub nodes: Vec<String>,
    /// Names of readable services; `*` for all.
    pub services: Vec<String>,
}

impl Visibility {
    /// Returns permissions for everything.
    pub fn all() -> Self {
        Self {
            nodes: vec!["*".to_owned()],
            services: vec!["*".to_owned()],
        }
    }

    pub(crate) fn node(&self, name: &str) -> bool {
        contains(&self.nodes, name)
    }

    /// Returns whether the service with this name is readable.
    pub fn service(&self, name: &str) -> bool {
        contains(&self.services, name)
    }
}

/// Returns whether the list contains `name` or `*`.
fn contains(list: &[String], name: &str) -> bool {
    list.iter()
        .any(|listed| listed == "*" || listed.eq_ignore_ascii_case(name))
}

//----------- HTTP API -------------------------------------------------------

/// Consul's agents and connection settings, with all defaults applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpApi {
    /// `addresses`: tried in order until one responds; never empty.
    pub addresses: Vec<ApiAddress>,
    /// `ca_file`: CA certificates to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// `cert_file` and `key_file`: client certificate and key, PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// `tls_server_name`: expected name in the agent's certificate; if unset, the host of the address.
    pub tls_server_name: Option<String>,
    /// `wait`: maximum duration of a blocking query.
    pub wait: Duration,
    /// `rate`: maximum number of requests per second.
    pub rate: u32,
    /// `stale_after`: duration of failures after which a part of the catalog is reported as stale.
    pub stale_after: Duration,
    /// `expire_after`: duration of failures after which the catalog counts as unknown; `None`: never.
    pub expire_after: Option<Duration>,
    /// `max_connections`: maximum number of TCP connections to one agent.
    pub max_connections: usize,
}

/// An agent's address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ApiAddress {
    /// Whether to connect with TLS.
    pub tls: bool,
    /// IP address or host name.
    pub host: String,
    /// TCP port of the HTTP API.
    pub port: u16,
}

/// Port of Consul's HTTP API without TLS.
const DEFAULT_PORT: u16 = 8500;
/// Minimum number of connections: for the permanent watches, and a few for fetches.
const MIN_CONNECTIONS: u64 = 8;
/// Maximum duration of a blocking query that Consul accepts.
const MAX_WAIT: Duration = Duration::from_secs(600);

impl Default for HttpApi {
    /// Returns the settings of an empty object: the agent of this machine.
    fn default() -> Self {
        let agent = ApiAddress {
            tls: false,
            host: "127.0.0.1".to_owned(),
            port: DEFAULT_PORT,
        };
        Self {
            addresses: vec![agent],
            ca_file: None,
            identity: None,
            tls_server_name: None,
            wait: Duration::from_secs(300),
            rate: 500,
            stale_after: Duration::from_secs(60),
            expire_after: None,
            // Consul's agents accept 200 connections from one address; others of this machine need some.
            max_connections: 150,
        }
    }
}

impl HttpApi {
    /// Parses the member `http` of `sources`; `None` if it is missing.
    fn read(sources: &ObjectReader<'_>) -> Result<Option<Self>, ConfigError> {
        if !sources.has("http") {
            return Ok(None);
        }
        let object = sources.object("http")?;
        let default = Self::default();
        let identity = match (object.path("cert_file")?, object.path("key_file")?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(object.error("cert_file", "requires key_file; set both or neither")),
        };
        let wait = object.positive("wait")?.unwrap_or(default.wait);
        if wait > MAX_WAIT {
            return Err(object.error(
                "wait",
                "is longer than Consul accepts; the maximum is \"10m\"",
            ));
        }
        let settings = Self {
            addresses: api_addresses(&object)?.unwrap_or(default.addresses),
            stale_after: object
                .positive("stale_after")?
                .unwrap_or(default.stale_after),
            expire_after: object.positive("expire_after")?,
            ca_file: object.path("ca_file")?,
            identity,
            tls_server_name: object.text("tls_server_name")?.map(str::to_owned),
            wait,
            rate: object
                .number("rate", 1, 100_000)?
                .map_or(default.rate, |rate| rate as u32),
            max_connections: object
                .number("max_connections", MIN_CONNECTIONS, 10_000)?
                .map_or(default.max_connections, |count| count as usize),
        };
        // An error, not a warning as elsewhere: with a misspelt `ca_file` the system's CAs would be
        // trusted.
        match object.unknown().first() {
            Some(unknown) => Err(object.error(
                "addresses",
                &format!(
                    "is next to the unknown key {unknown}; known keys are addresses, ca_file, cert_file, \
                     key_file, tls_server_name, wait, rate, stale_after, expire_after and max_connections"
                ),
            )),
            None => Ok(Some(settings)),
        }
    }
}

fn api_addresses(object: &ObjectReader<'_>) -> Result<Option<Vec<ApiAddress>>, ConfigError> {
    let Some(texts) = object.texts("addresses")? else {
        return Ok(None);
    };
    let mut addresses = Vec::new();
    for text in texts {
        let Some(address) = ApiAddress::from_text(text) else {
            let problem = format!("{text:?} is not an {ADDRESS_FORM}");
            return Err(object.error("addresses", &problem));
        };
        addresses.push(address);
    }
    if addresses.is_empty() {
        let problem = format!("is empty; give at least one {ADDRESS_FORM}");
        return Err(object.error("addresses", &problem));
    }
    Ok(Some(addresses))
}

/// Expected form of an address, for error messages.
const ADDRESS_FORM: &str =
    "address such as \"http://127.0.0.1:8500\" or \"https://consul.example:8501\"";

impl ApiAddress {
    /// Parses `http://host:port`, `https://host:port` or `host:port`; the default ports are 8500 and 8501.
    pub fn from_text(text: &str) -> Option<Self> {
        let (tls, rest) = match text.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some(_) => return None,
            None => (false, text),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let default = if tls { 8501 } else { DEFAULT_PORT };
        let (host, port) = match rest.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']')?;
                host.parse::<std::net::Ipv6Addr>().ok()?;
                if port.is_empty() {
                    (host, None)
                } else {
                    (host, Some(port.strip_prefix(':')?))
                }
            }
            None => match rest.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (rest, None),
            },
        };
        let port = match port {
            Some(port) => port.parse().ok().filter(|port| *port != 0)?,
            None => default,
        };
        let mut octets = host.bytes();
        // Refuses what would otherwise be ignored silently: a path, a query, a user's name.
        if host.is_empty()
            || !octets.all(|octet| octet.is_ascii_alphanumeric() || b"-_.:".contains(&octet))
        {
            return None;
        }
        let host = host.to_owned();
        Some(Self { tls, host, port })
    }

    /// Returns `host:port`, for the Host header and for connecting.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for ApiAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}://{}",
            if self.tls { "https" } else { "http" },
            self.authority()
        )
    }
}

//----------- Keys ---------------------------------------------------------
//
// Table of all keys of the object `"consul"`, from which the reference is generated. A test
// compares the table with the keys that the parser reads.

/// Declares keys: path within the object, origin, form, default, example, meaning.
macro_rules! keys {
    ($($path:literal $origin:ident $form:literal = $default:literal, $example:literal: $about:literal;)*) => {
        &[$(ConfigKey {
            path: concat!("consul.", $path), form: $form, default: $default, example: $example, about: $about,
            origin: Origin::$origin, starter: "",
        }),*]
    };
}

/// All keys. [`Origin::BoshDns`] marks Consul's own keys, [`Origin::Ours`] extensions.
pub const KEYS: &[ConfigKey] = keys! {
    "domain" BoshDns "domain name" = "\"consul.\"", "\"consul.example.\"": "Domain of the names";
    "alt_domain" BoshDns "domain name; empty: none" = "\"\"", "\"cf.internal.\"": "Second domain with the same names";
    "datacenter" BoshDns "letters, digits, - and _" = "\"dc1\"", "\"z1\"":
        "Local datacenter; default with sources.http: the agent's";
    "node_name" BoshDns "text" = "\"\"", "\"vm-1\"": "Node that this server runs on, for services without a node and for near";
    "advertise_addr" BoshDns "IP address" = "", "\"10.0.0.1\"": "Address of that node";
    "translate_wan_addrs" BoshDns "boolean" = "false", "true": "Return WAN addresses for nodes of other datacenters";
    "recursors" BoshDns "list of IP or IP:port" = "[]", "[\"10.0.0.2\"]":
        "Servers that resolve host names registered as addresses; empty: the server's recursors";
    "token_file" BoshDns "path; empty: none" = "", "\"/etc/consul.d/dns-token\"": "File with the token for Consul's HTTP API";
    "empty_non_terminals" Ours "boolean" = "false", "true":
        "NOERROR without data, instead of NXDOMAIN, for empty non-terminals (RFC 8020)";
    "acl.nodes" Ours "list of names" = "", "[\"*\"]": "Nodes that may be looked up; none if acl is present without this list";
    "acl.services" Ours "list of names" = "", "[\"web\"]":
        "Services that may be looked up; none if acl is present without this list";
    "dns_config.allow_stale" BoshDns "boolean" = "true", "false": "Let any of Consul's servers answer the live source";
    "dns_config.max_stale" BoshDns "duration" = "\"87600h\"", "\"10m\"": "How long the last data of an unavailable live source is served";
    "dns_config.use_cache" BoshDns "boolean" = "", "true": "Accepted, without effect";
    "dns_config.cache_max_age" BoshDns "duration" = "", "\"10s\"": "Accepted, without effect";
    "dns_config.node_ttl" BoshDns "duration" = "\"0s\"", "\"5s\"": "TTL of node records";
    "dns_config.service_ttl" BoshDns "object of durations by service name, or prefix with *" = "{}", "{\"*\": \"5s\"}":
        "TTL of service records";
    "dns_config.only_passing" BoshDns "boolean" = "false", "true": "Also exclude instances in state warning";
    "dns_config.enable_truncate" BoshDns "boolean" = "false", "true": "Set TC if answers were omitted";
    "dns_config.udp_answer_limit" BoshDns "number, 0 to 1048576" = "3", "8": "Maximum number of records in UDP replies to clients without EDNS";
    "dns_config.a_record_limit" BoshDns "number, 0 to 1048576; 0: none" = "0", "4": "Maximum number of addresses in an answer";
    "dns_config.enable_additional_node_meta_txt" BoshDns "boolean" = "true", "false":
        "Metadata of nodes as TXT records in the additional section";
    "dns_config.disable_compression" BoshDns "boolean" = "false", "true": "Do not compress names";
    "dns_config.recursor_timeout" BoshDns "duration above 0" = "\"2s\"", "\"500ms\"": "Time limit of one query to a recursor";
    "dns_config.recursor_strategy" BoshDns "sequential or random" = "\"sequential\"", "\"random\"": "Order of the recursors";
    "dns_config.soa.refresh" BoshDns "seconds" = "3600", "7200": "Refresh of the SOA record";
    "dns_config.soa.retry" BoshDns "seconds" = "600", "300": "Retry of the SOA record";
    "dns_config.soa.expire" BoshDns "seconds" = "86400", "43200": "Expire of the SOA record";
    "dns_config.soa.min_ttl" BoshDns "seconds" = "0", "10": "Minimum and TTL of the SOA record";
    "sources.files" Ours "list of paths with * ? [a-z]" = "[]", "[\"/etc/consul.d/*.hcl\"]": "Definition files, reloaded when they change";
    "sources.http.addresses" Ours "list of http://host:port or https://host:port" = "[\"http://127.0.0.1:8500\"]",
        "[\"https://consul.example:8501\"]": "Consul agents, tried in order until one answers";
    "sources.http.ca_file" Ours "path" = "", "\"/etc/consul.d/ca.pem\"": "CAs to trust instead of the system's";
    "sources.http.cert_file" Ours "path" = "", "\"/etc/consul.d/client.pem\"": "Client certificate; needs key_file";
    "sources.http.key_file" Ours "path" = "", "\"/etc/consul.d/client.key\"": "Key of cert_file";
    "sources.http.tls_server_name" Ours "host name" = "", "\"server.dc1.consul\"":
        "Name that the agent's certificate must contain; default: the host of its address";
    "sources.http.wait" Ours "duration up to 10m" = "\"5m\"", "\"1m\"": "Maximum duration of a blocking query";
    "sources.http.rate" Ours "requests per second, 1 to 100000" = "500", "50": "Maximum request rate to Consul";
    "sources.http.stale_after" Ours "duration above 0" = "\"1m\"", "\"5m\"":
        "How long requests must fail before a part of the catalog is reported as stale";
    "sources.http.expire_after" Ours "duration above 0" = "", "\"1h\"":
        "How long requests for nodes or services must fail before names get SERVFAIL; default: never";
    "sources.http.max_connections" Ours "number, 8 to 10000" = "150", "20": "Maximum number of TCP connections to one agent";
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_members_are_reported() {
        let text =
            br#"{"consul": {"domian": "a", "dns_config": {"node_tll": "5s", "soa": {"ttl": 3}}}}"#;
        let (_, warnings) = Config::of_document("config.json", text)
            .whole()
            .expect("read")
            .expect("an object");
        for path in [
            "consul.domian",
            "consul.dns_config.node_tll",
            "consul.dns_config.soa.ttl",
        ] {
            let warning = format!("config.json: {path} is an unknown setting");
            assert!(
                warnings.iter().any(|found| found.starts_with(&warning)),
                "{path}: {warnings:?}"
            );
        }
        assert_eq!(warnings.len(), 3, "{warnings:?}");
    }

    #[test]
    fn addresses_are_read() {
        let read = |text: &str| ApiAddress::from_text(text).map(|address| address.to_string());
        assert_eq!(
            read("10.0.0.1:8500").as_deref(),
            Some("http://10.0.0.1:8500")
        );
        assert_eq!(
            read("https://consul.example").as_deref(),
            Some("https://consul.example:8501")
        );
        assert_eq!(read("http://[::1]:80/").as_deref(), Some("http://[::1]:80"));
        for wrong in [
            "",
            "ftp://a",
            "http://a:0",
            "http://a:b",
            "http://[::1",
            "http://a/b?c",
            "http://[a]:1",
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn mistakes_have_a_place() {
        let read = |text: &str| {
            let json = Json::parse(text.as_bytes()).expect("JSON");
            HttpApi::read(&ObjectReader::document("config.json", &json).expect("an object"))
        };
        let error = |text| read(text).expect_err("an error").to_string();
        let defaults = read(r#"{"http": {}}"#).expect("defaults").expect("present");
        let HttpApi {
            wait,
            rate,
            stale_after,
            expire_after,
            max_connections,
            ..
        } = defaults;
        assert_eq!(
            (wait, stale_after),
            (Duration::from_secs(300), Duration::from_secs(60))
        );
        assert_eq!((expire_after, rate, max_connections), (None, 500, 150));
        for (wait, is_valid) in [("10m", true), ("601s", false), ("0s", false)] {
            let text = format!(r#"{{"http": {{"wait": "{wait}"}}}}"#);
            assert_eq!(read(&text).is_ok(), is_valid, "{wait}");
        }
        for (connections, is_valid) in [(7, false), (8, true), (10_000, true), (10_001, false)] {
            let text = format!(r#"{{"http": {{"max_connections": {connections}}}}}"#);
            assert_eq!(read(&text).is_ok(), is_valid, "{connections}");
        }
        assert!(
            error(r#"{"http": {"addresses": ["x:y"]}}"#)
                .contains("http.addresses: \"x:y\" is not an address")
        );
        assert!(
            error(r#"{"http": {"cert_file": "a"}}"#).contains("http.cert_file: requires key_file")
        );
        assert!(error(r#"{"http": {"wait": "1h"}}"#).contains("the maximum is \"10m\""));
        assert!(error(r#"{"http": {"token": "a"}}"#).contains("the unknown key http.token"));
    }

    fn whole(text: &str) -> (Config, Vec<String>) {
        let read = Config::of_document("config.json", text.as_bytes()).whole();
        read.unwrap_or_else(|error| panic!("{text}: {error}"))
            .expect("an object")
    }

    fn config(consul: &str) -> Config {
        whole(&format!(r#"{{"consul": {consul}}}"#)).0
    }

    fn mistakes(consul: &str) -> String {
        let text = format!(r#"{{"consul": {consul}}}"#);
        let errors = Config::of_document("config.json", text.as_bytes()).errors;
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        errors.join("\n")
    }

    fn domain_name(text: &str) -> Name {
        Name::from_text(text).unwrap()
    }

    #[test]
    fn defaults_are_consuls() {
        let expected = Config {
            domain: domain_name("consul"),
            alt_domain: None,
            datacenter: "dc1".to_owned(),
            datacenter_is_default: true,
            node_name: String::new(),
            advertise_addr: None,
            translate_wan_addrs: false,
            recursors: Vec::new(),
            dns: DnsConfig {
                allow_stale: true,
                max_stale: Duration::from_secs(315_360_000),
                node_ttl: 0,
                service_ttl: Vec::new(),
                only_passing: false,
                enable_truncate: false,
                udp_answer_limit: 3,
                a_record_limit: 0,
                node_meta_txt: true,
                disable_compression: false,
                soa: Soa {
                    refresh: 3600,
                    retry: 600,
                    expire: 86400,
                    min_ttl: 0,
                },
                recursor_timeout: Duration::from_secs(2),
                random_recursors: false,
            },
            token_file: None,
            files: Vec::new(),
            http: None,
            visibility: Visibility::all(),
            empty_non_terminals: false,
        };
        assert_eq!(config("{}"), expected);
        let everything = ["*".to_owned()];
        assert_eq!(expected.visibility.nodes, everything);
        assert_eq!(expected.visibility.services, everything);
        for text in [r#"{}"#, r#"{"consul": null}"#] {
            let none = Config::of_document("config.json", text.as_bytes());
            assert_eq!(none.whole().unwrap(), None, "{text}");
        }
    }

    #[test]
    fn every_setting_is_read() {
        let found = config(
            r#"{"domain": "Example.ORG.", "alt_domain": "alt.", "datacenter": "DC_2-x", "node_name": "n",
            "advertise_addr": "10.0.0.1", "translate_wan_addrs": true, "recursors": ["10.0.0.2", "[::1]:5353"],
            "token_file": "/token", "empty_non_terminals": true, "acl": {"nodes": ["a"], "services": ["b", "c"]},
            "dns_config": {"allow_stale": false, "max_stale": "10m", "use_cache": true, "cache_max_age": "1s",
                "node_ttl": "5s", "service_ttl": {"web": "1m", "w*": "2s"}, "only_passing": true,
                "enable_truncate": true, "udp_answer_limit": 1048576, "a_record_limit": 4,
                "enable_additional_node_meta_txt": false, "disable_compression": true,
                "recursor_timeout": "500ms", "recursor_strategy": "random",
                "soa": {"refresh": 1, "retry": 2, "expire": 3, "min_ttl": 2147483647}},
            "sources": {"files": ["/a/*.hcl", "/b"], "http": {"addresses": ["https://c"], "ca_file": "/ca",
                "cert_file": "/cert", "key_file": "/key", "tls_server_name": "s", "wait": "1m", "rate": 100000,
                "stale_after": "2m", "expire_after": "1h", "max_connections": 8}}}"#,
        );
        let expected = Config {
            domain: domain_name("example.org"),
            alt_domain: Some(domain_name("alt")),
            datacenter: "dc_2-x".to_owned(),
            datacenter_is_default: false,
            node_name: "n".to_owned(),
            advertise_addr: Some("10.0.0.1".to_owned()),
            translate_wan_addrs: true,
            recursors: vec!["10.0.0.2:53".to_owned(), "[::1]:5353".to_owned()],
            dns: DnsConfig {
                allow_stale: false,
                max_stale: Duration::from_secs(600),
                node_ttl: 5,
                service_ttl: vec![("web".to_owned(), 60), ("w*".to_owned(), 2)],
                only_passing: true,
                enable_truncate: true,
                udp_answer_limit: 1_048_576,
                a_record_limit: 4,
                node_meta_txt: false,
                disable_compression: true,
                soa: Soa {
                    refresh: 1,
                    retry: 2,
                    expire: 3,
                    min_ttl: 2_147_483_647,
                },
                recursor_timeout: Duration::from_millis(500),
                random_recursors: true,
            },
            token_file: Some("/token".into()),
            files: vec!["/a/*.hcl".to_owned(), "/b".to_owned()],
            http: Some(HttpApi {
                addresses: vec![ApiAddress {
                    tls: true,
                    host: "c".to_owned(),
                    port: 8501,
                }],
                ca_file: Some("/ca".into()),
                identity: Some(("/cert".into(), "/key".into())),
                tls_server_name: Some("s".to_owned()),
                wait: Duration::from_secs(60),
                rate: 100_000,
                stale_after: Duration::from_secs(120),
                expire_after: Some(Duration::from_secs(3600)),
                max_connections: 8,
            }),
            visibility: Visibility {
                nodes: vec!["a".to_owned()],
                services: vec!["b".to_owned(), "c".to_owned()],
            },
            empty_non_terminals: true,
        };
        assert_eq!(found, expected);
        // The settings of the live source are those of the object.
        let settings = crate::source::LiveSettings::of(&found);
        let expected = crate::source::LiveSettings {
            api: found.http.clone().unwrap(),
            token_file: Some("/token".into()),
            datacenter: Some("dc_2-x".to_owned()),
            allow_stale: false,
            max_stale: Duration::from_secs(600),
        };
        assert_eq!(settings, Some(expected));
        assert_eq!(crate::source::LiveSettings::of(&config("{}")), None);
        let agent = config(r#"{"sources": {"http": {}}}"#);
        let settings = crate::source::LiveSettings::of(&agent).unwrap();
        assert_eq!(settings.datacenter, None, "the agent tells it");
        assert_eq!(
            settings.api.addresses,
            [ApiAddress::from_text("127.0.0.1:8500").unwrap()]
        );
    }

    #[test]
    fn every_mistake_is_explained() {
        for (consul, expected) in [
            (
                r#"{"domain": "."}"#,
                "consul.domain: the root cannot be Consul's domain; use at least one label",
            ),
            (
                r#"{"datacenter": ""}"#,
                "consul.datacenter: use letters, digits, - and _",
            ),
            (
                r#"{"datacenter": "a.b"}"#,
                "consul.datacenter: use letters, digits, - and _",
            ),
            (
                r#"{"advertise_addr": "a"}"#,
                "consul.advertise_addr: \"a\" is not an IP address",
            ),
            (
                r#"{"dns_config": {"service_ttl": {"a": 5}}}"#,
                "consul.dns_config.service_ttl.a: is not text; expected a duration such as \"5s\"",
            ),
            (
                r#"{"dns_config": {"service_ttl": {"a": "5"}}}"#,
                "consul.dns_config.service_ttl.a: \"5\" lacks a unit",
            ),
            (
                r#"{"dns_config": {"udp_answer_limit": 1048577}}"#,
                "consul.dns_config.udp_answer_limit: is 1048577; expected a whole number from 0 to 1048576",
            ),
            (
                r#"{"dns_config": {"soa": {"min_ttl": 2147483648}}}"#,
                "consul.dns_config.soa.min_ttl: is 2147483648; expected a whole number from 0 to 2147483647",
            ),
            (
                r#"{"dns_config": {"recursor_timeout": "0s"}}"#,
                "consul.dns_config.recursor_timeout: must be longer than 0",
            ),
            (
                r#"{"sources": {"file": []}}"#,
                "consul.sources: consul.sources.file is not a source; expected \"files\" or \"http\"",
            ),
            (
                r#"{"sources": {"files": ["/a", "/["]}}"#,
                "consul.sources.files: \"/[\": is not a file pattern (an unclosed [ or a backslash at the end)",
            ),
            (
                r#"{"sources": {"http": {"addresses": []}}}"#,
                "consul.sources.http.addresses: is empty; give at least one address such as \
                 \"http://127.0.0.1:8500\" or \"https://consul.example:8501\"",
            ),
            (
                r#"{"sources": {"http": {"addresses": ["a", "b/c"]}}}"#,
                "consul.sources.http.addresses: \"b/c\" is not an address such as \
                 \"http://127.0.0.1:8500\" or \"https://consul.example:8501\"",
            ),
            (
                r#"{"sources": {"http": {"key_file": "/a"}}}"#,
                "consul.sources.http.cert_file: requires key_file; set both or neither",
            ),
            (
                r#"{"sources": {"http": {"wait": "10m1ms"}}}"#,
                "consul.sources.http.wait: is longer than Consul accepts; the maximum is \"10m\"",
            ),
            (
                r#"{"sources": {"http": {"rate": 0}}}"#,
                "consul.sources.http.rate: is 0; expected a whole number from 1 to 100000",
            ),
        ] {
            assert_eq!(
                mistakes(consul),
                format!("config.json: {expected}"),
                "{consul}"
            );
        }
        for consul in [r#"{"domain": "a..b"}"#, r#"{"alt_domain": "a..b"}"#] {
            let found = mistakes(consul);
            assert!(
                found.contains("domain: \"a..b\" is not a domain name: "),
                "{found}"
            );
        }
        let recursor = mistakes(r#"{"recursors": ["10.0.0.1", "a b"]}"#);
        assert!(
            recursor.starts_with("config.json: consul.recursors: "),
            "{recursor}"
        );
        let ParsedFiles { valid, errors } = Config::of_document("config.json", b"{");
        assert_eq!(valid, None);
        assert_eq!(
            errors[0].to_string(),
            "config.json: is not JSON: EOF while parsing an object at line 1 column 1"
        );
        // Members without an error are used.
        let text = br#"{"consul": {"node_name": "n", "datacenter": "."}}"#;
        let (config, warnings) = Config::of_document("config.json", text).valid.unwrap();
        assert_eq!((&*config.node_name, &*config.datacenter), ("n", "dc1"));
        assert_eq!(warnings, [""; 0]);
    }

    #[test]
    fn token_without_api_warns() {
        let unused = "config.json: consul.token_file is for Consul's HTTP API, which is not used: it has no \
                      effect; set consul.sources.http.addresses";
        for (consul, expected) in [
            (r#"{}"#, &[][..]),
            (r#"{"token_file": "/a"}"#, &[unused]),
            (r#"{"sources": {"http": {}}}"#, &[]),
            (r#"{"token_file": "/a", "sources": {"http": {}}}"#, &[]),
        ] {
            let (_, warnings) = whole(&format!(r#"{{"consul": {consul}}}"#));
            assert_eq!(warnings, expected, "{consul}");
        }
        let (_, warnings) = whole(r#"{"consul": {"odd": 1, "dns_config": {"soa": {"odd": 1}}}}"#);
        assert_eq!(
            warnings,
            ["consul.odd", "consul.dns_config.soa.odd"].map(|path| format!(
                "config.json: {path} is an unknown setting: it has no effect; remove it, or correct its name"
            ))
        );
    }

    #[test]
    fn longest_domain_contains_a_name() {
        for (domain, alt_domain) in [("consul", "dc1.consul"), ("dc1.consul", "consul")] {
            let config = config(&format!(
                r#"{{"domain": "{domain}", "alt_domain": "{alt_domain}"}}"#
            ));
            for (name, expected) in [
                ("a.consul", Some("consul")),
                ("consul", Some("consul")),
                ("dc1.consul", Some("dc1.consul")),
                ("a.dc1.consul", Some("dc1.consul")),
                ("a.xconsul", None),
                ("org", None),
            ] {
                let name = domain_name(name);
                let found = config.domain_of(&name).cloned();
                assert_eq!(found, expected.map(domain_name), "{name}");
            }
        }
    }

    #[test]
    fn name_or_longest_prefix_sets_ttl() {
        let dns = config(
            r#"{"dns_config": {"service_ttl": {"w*": "1s", "web*": "2s", "we*": "3s", "web": "4s", "Db": "5s",
                "x": "6s", "old*": "7s", "old*": "8s"}}}"#,
        )
        .dns;
        for (service, ttl) in [
            ("web", 4),
            ("web1", 2),
            ("wea", 3),
            ("w", 1),
            ("db", 0),
            ("x", 6),
            ("xy", 0),
            ("old", 8),
        ] {
            assert_eq!(dns.ttl_of(service), ttl, "{service}");
        }
        let dns = config(r#"{"dns_config": {"service_ttl": {"*": "1s", "a": "0s"}}}"#).dns;
        assert_eq!((dns.ttl_of("a"), dns.ttl_of("b")), (0, 1));
        for (text, ttl) in [
            ("10s", Some(10)),
            ("1m", Some(60)),
            ("1999ms", Some(1)),
            ("596523h14m7s", Some(2_147_483_647)),
            ("596523h14m8s", Some(2_147_483_647)),
            ("1000000h", Some(2_147_483_647)),
            ("", None),
            ("10", None),
        ] {
            assert_eq!(ttl_from_text(text), ttl, "{text}");
        }
    }

    #[test]
    fn remote_datacenters_get_wan_addresses() {
        for (translate, datacenter, expected) in [
            (true, "dc1", false),
            (true, "DC1", false),
            (true, "dc2", true),
            (false, "dc1", false),
            (false, "dc2", false),
        ] {
            let config = config(&format!(r#"{{"translate_wan_addrs": {translate}}}"#));
            assert_eq!(
                config.translates(datacenter),
                expected,
                "{translate} {datacenter}"
            );
        }
    }

    #[test]
    fn permissions_name_readable_objects() {
        let readable = |acl: &str| {
            let visibility = config(&format!(r#"{{"acl": {acl}}}"#)).visibility;
            let of = |name: &str| (visibility.node(name), visibility.service(name));
            [of("a"), of("B"), of("c")]
        };
        assert_eq!(readable("null"), [(true, true); 3]);
        assert_eq!(readable("{}"), [(false, false); 3]);
        assert_eq!(
            readable(r#"{"nodes": ["A", "b"], "services": ["b"]}"#),
            [(true, false), (true, true), (false, false)]
        );
        assert_eq!(readable(r#"{"services": ["x", "*"]}"#), [(false, true); 3]);
    }

    #[test]
    fn addresses_have_a_single_form() {
        for (text, tls, host, port, authority) in [
            ("a", false, "a", 8500, "a:8500"),
            ("http://a-b_c.d1", false, "a-b_c.d1", 8500, "a-b_c.d1:8500"),
            (
                "https://10.0.0.1:65535/",
                true,
                "10.0.0.1",
                65535,
                "10.0.0.1:65535",
            ),
            ("[::1]", false, "::1", 8500, "[::1]:8500"),
            (
                "https://[2001:db8::1]:1",
                true,
                "2001:db8::1",
                1,
                "[2001:db8::1]:1",
            ),
        ] {
            let found = ApiAddress::from_text(text).unwrap();
            let host = host.to_owned();
            assert_eq!(found, ApiAddress { tls, host, port }, "{text}");
            assert_eq!(found.authority(), authority);
            let scheme = if tls { "https" } else { "http" };
            assert_eq!(found.to_string(), format!("{scheme}://{authority}"));
        }
        for wrong in [
            "http://",
            "http:///",
            ":8500",
            "a:",
            "a:65536",
            "a//",
            "a/b",
            "user@a",
            "a b",
            "::1",
            "[::1]a",
            "[::1]8500",
            "[::1]/path",
            "[::1]:",
            "[10.0.0.1]",
            "[]",
        ] {
            assert_eq!(ApiAddress::from_text(wrong), None, "{wrong}");
        }
    }
}

#[cfg(test)]
mod keys_tests {
    use std::collections::BTreeSet;

    use dns_core::config::reader::{Json, ObjectReader};

    use super::{Config, *};

    #[test]
    fn table_equals_parsed_keys() {
        let text = br#"{"consul": {"acl": {}, "sources": {"http": {}}}}"#;
        let json = Json::parse(text).expect("JSON");
        let root = ObjectReader::document("config.json", &json).expect("an object");
        Config::read(&root.object("consul").expect("an object")).expect("a configuration");
        let asked: BTreeSet<String> = root.requested_leaves();
        let listed: BTreeSet<String> = KEYS.iter().map(|key| key.path.to_owned()).collect();
        assert_eq!(asked, listed);
    }

    #[test]
    fn examples_are_accepted() {
        for key in KEYS.iter().filter(|key| !key.path.ends_with("_file")) {
            let mut text = key.example.to_owned();
            for member in key.path.rsplit('.') {
                text = format!("{{{member:?}: {text}}}");
            }
            let read = Config::of_document("config.json", text.as_bytes());
            let (_, warnings) = read
                .whole()
                .unwrap_or_else(|error| panic!("{error}"))
                .expect("an object");
            assert!(warnings.is_empty(), "{}: {warnings:?}", key.path);
        }
    }
}
