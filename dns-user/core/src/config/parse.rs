//! Parser from `config.json` to [`Config`]: keys, defaults and errors; and of addresses files: additional addresses
//! to listen on.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use super::{
    ApiConfig, CacheConfig, Compat, Config, ConfigError, ControlConfig, CookiesConfig,
    HealthConfig, HookMode, Identity, LogLevel, LoggingConfig, MetricsConfig, OnStop, ParsedFiles,
    RecursionConfig, RecursorSelection, SpecialNames, TlsFiles, XdpConfig,
    keys::{self, dnstap},
    reader::{Json, ObjectReader, parse_list},
    values::{self, with_port},
};
use crate::{
    name::Name,
    wire::{MAX_UDP_SIZE, MIN_UDP_SIZE},
};

/// A valid configuration and its warnings.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration with defaults filled in.
    pub config: Config,
    /// Doubtful settings, one line each.
    pub warnings: Vec<String>,
}

impl Config {
    /// Parses the content of a file; `file` is its path for error messages.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Loaded, ConfigError> {
        Self::load(file, &Json::of_file(file, bytes)?)
    }

    /// Reads a parsed document; adds a warning for each unknown key.
    fn load(file: &str, json: &Json) -> Result<Loaded, ConfigError> {
        let mut warnings = Vec::new();
        let config = Self::read(&ObjectReader::document(file, json)?, &mut warnings)?;
        // bosh-dns ignores unknown keys in silence. A warning finds a typing error, and a file with
        // keys of a later version still starts this one.
        for (path, nearest) in keys::unknown(json) {
            warnings.push(match nearest {
                Some(key) => format!("{path} is unknown and ignored (did you mean {key}?)"),
                None => format!("{path} is unknown and ignored"),
            });
        }
        for warning in &mut warnings {
            warning.insert_str(0, &format!("{file}: "));
        }
        Ok(Loaded { config, warnings })
    }

    /// Parses the content of a file and returns every error, not just the first, with the
    /// configuration that remains without the invalid members; `None` if the content is not an
    /// object.
    pub fn check(file: &str, bytes: &[u8]) -> (Vec<ConfigError>, Option<Loaded>) {
        match Json::of_file(file, bytes) {
            Ok(json) => every_error(json, |json| Self::load(file, json)),
            Err(error) => (vec![error], None),
        }
    }

    /// Returns the paths of all keys that parsing `bytes` requests.
    #[cfg(test)]
    pub(super) fn keys_read(bytes: &[u8]) -> BTreeSet<String> {
        let json = Json::parse(bytes).unwrap();
        let root = ObjectReader::document("config.json", &json).unwrap();
        Self::read(&root, &mut Vec::new()).unwrap();
        root.requested_leaves()
    }

    /// Reads every setting; adds doubtful ones to `warnings`.
    fn read(root: &ObjectReader<'_>, warnings: &mut Vec<String>) -> Result<Self, ConfigError> {
        if !root.has("address") {
            // Accepted as in bosh-dns, but seldom meant: every network can query such a resolver.
            warnings.push("address is missing: listening on every address (0.0.0.0)".to_owned());
        }
        Ok(Self {
            listen: listen(root)?,
            timeout: root.positive("timeout")?.unwrap_or(Duration::from_secs(5)),
            request_timeout: root
                .nonzero("request_timeout")?
                .unwrap_or(Duration::from_secs(5)),
            recursion: recursion(root)?,
            records_file: root.path("records_file")?,
            alias_files_glob: pattern(root, "alias_files_glob")?,
            handlers_files_glob: pattern(root, "handlers_files_glob")?,
            addresses_files_glob: pattern(root, "addresses_files_glob")?,
            upcheck_domains: upcheck_domains(root)?,
            internal_upcheck: internal_upcheck(root)?,
            jobs_dir: root.path("jobs_dir")?,
            logging: logging(root)?,
            control: control(&root.object("control")?)?,
            // A configuration of the control socket without `api` does not miss the HTTPS API.
            api: api(
                &root.object("api")?,
                root.has("control") && !root.has("api"),
                warnings,
            )?,
            health: health(&root.object("health")?)?,
            metrics: metrics(&root.object("metrics")?)?,
            cache: cache(&root.object("cache")?)?,
            cookies: cookies(&root.object("cookies")?)?,
            dnstap: dnstap(root)?,
            configure_systemd_resolved: root
                .boolean("configure_systemd_resolved")?
                .unwrap_or(false),
            max_reply: root
                .number("max_reply", MIN_UDP_SIZE as u64, MAX_UDP_SIZE as u64)?
                .map(|most| most as u16),
            identity: root
                .choice(
                    "identity",
                    &[
                        ("edns", Identity::Edns),
                        ("always", Identity::Always),
                        ("off", Identity::Off),
                    ],
                )?
                .unwrap_or(Identity::Edns),
            compat: Compat::read(root)?,
            xdp: xdp(&root.object("xdp")?, warnings)?,
        })
    }
}

/// Loads a document of settings and returns every error, not just the first, with the settings
/// that remain without the invalid members; `None` if nothing usable remains.
pub fn every_error<T>(
    mut json: Json,
    load: impl Fn(&Json) -> Result<T, ConfigError>,
) -> (Vec<ConfigError>, Option<T>) {
    let mut errors = Vec::new();
    let mut removed = RemovedItems::default();
    // Each round removes a member, so the loop ends.
    loop {
        let mut error = match load(&json) {
            Ok(loaded) => return (errors, Some(loaded)),
            Err(error) => error,
        };
        let key = error.key.clone();
        error.key = key.as_deref().map(|key| removed.original(key));
        errors.push(error);
        let Some(key) = key else {
            return (errors, None);
        };
        // Loading ends at the first error: the next one shows only once this member is gone.
        let gone = json.remove(&key);
        match (&mut json, key.as_str()) {
            // The only key without a default.
            (Json::Object(members), "port") => {
                members.push(("port".to_owned(), Json::Number(53.into())))
            }
            (Json::Object(members), key) if !gone && key.contains('.') => {
                // A required member is missing: remove the whole object.
                let object = key.split(['.', '[']).next().unwrap_or_default().to_owned();
                let before = members.len();
                members.retain(|(member, _)| !member.eq_ignore_ascii_case(&object));
                // Nothing was removed, so the same error would come back for ever.
                if members.len() == before {
                    return (errors, None);
                }
            }
            _ if gone => removed.add(&key),
            _ => return (errors, None),
        }
    }
}

/// Items removed from lists, by which the positions of later items have moved.
#[derive(Default)]
struct RemovedItems(BTreeSet<(String, usize)>);

impl RemovedItems {
    fn original(&self, path: &str) -> String {
        let Some((list, index, rest)) = split_item(path) else {
            return path.to_owned();
        };
        format!("{list}[{}]{rest}", self.original_index(list, index))
    }

    /// Adds the list item at or above this path.
    fn add(&mut self, path: &str) {
        if let Some((list, index, _)) = split_item(path) {
            self.0
                .insert((list.to_owned(), self.original_index(list, index)));
        }
    }

    fn original_index(&self, list: &str, index: usize) -> usize {
        let mut original = index;
        // The set is sorted by original position, so each removal that precedes the item has moved
        // it on before the next one is compared.
        for (removed_from, removed) in &self.0 {
            if removed_from == list && *removed <= original {
                original += 1;
            }
        }
        original
    }
}

/// Splits `logging.tags[1].name` into `logging.tags`, 1 and `.name`.
fn split_item(path: &str) -> Option<(&str, usize, &str)> {
    let (list, rest) = path.split_once('[')?;
    let (index, rest) = rest.split_once(']')?;
    Some((list, index.parse().ok()?, rest))
}

/// Reads `address` and `port`. The default address is the wildcard, as in bosh-dns.
fn listen(root: &ObjectReader<'_>) -> Result<SocketAddr, ConfigError> {
    let address = root
        .address("address")?
        .unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let port = root.port("port")?.ok_or_else(|| {
        root.error(
            "port",
            "is missing; expected a whole number from 1 to 65535",
        )
    })?;
    Ok(SocketAddr::new(address, port))
}

fn recursion(root: &ObjectReader<'_>) -> Result<RecursionConfig, ConfigError> {
    Ok(RecursionConfig {
        disabled: root.boolean("disable_recursors")?.unwrap_or(false),
        recursors: recursors(root, "recursors")?,
        excluded: recursors(root, "excluded_recursors")?,
        selection: root
            .choice(
                "recursor_selection",
                &[
                    ("smart", RecursorSelection::Smart),
                    ("serial", RecursorSelection::Serial),
                ],
            )?
            .unwrap_or(RecursorSelection::Smart),
        timeout: root
            .nonzero("recursor_timeout")?
            .unwrap_or(Duration::from_secs(2)),
        max_retries: root.number("recursor_max_retries", 0, 1000)?.unwrap_or(0) as u32,
        client_subnet: root.boolean("recursor_client_subnet")?.unwrap_or(false),
        randomise_case: root.boolean("recursor_0x20")?.unwrap_or(false),
        special_names: root
            .choice(
                "special_names",
                &[
                    ("forward", SpecialNames::Forward),
                    ("local", SpecialNames::Local),
                ],
            )?
            .unwrap_or_default(),
    })
}

/// Reads a list of recursors, each with its port.
pub fn recursors(root: &ObjectReader<'_>, name: &'static str) -> Result<Vec<String>, ConfigError> {
    let mut recursors = Vec::new();
    for text in root.texts(name)?.unwrap_or_default() {
        match with_port(text) {
            Ok(recursor) => recursors.push(recursor),
            Err(problem) => return Err(root.error(name, &problem.to_string())),
        }
    }
    Ok(recursors)
}

/// Reads `upcheck_domains`, with or without the final dot.
fn upcheck_domains(root: &ObjectReader<'_>) -> Result<Vec<Name>, ConfigError> {
    let mut names = Vec::new();
    for text in root.texts("upcheck_domains")?.unwrap_or_default() {
        let name = Name::from_text(text).map_err(|reason| {
            root.error(
                "upcheck_domains",
                &format!("{text:?} is not a domain name: {reason}"),
            )
        })?;
        // A list may have a name both with and without the final dot.
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Ok(names)
}

/// Reads `internal_upcheck_domain`.
fn internal_upcheck(root: &ObjectReader<'_>) -> Result<Option<Name>, ConfigError> {
    let object = root.object("internal_upcheck_domain")?;
    let text = object.text("dns_query")?.unwrap_or_default();
    let upchecks = root.texts("upcheck_domains")?.unwrap_or_default();
    // It is only queried if there are other up-checks (observed).
    if !object.boolean("enabled")?.unwrap_or(false) || upchecks.is_empty() {
        return Ok(None);
    }
    // Without it, the name never resolves in bosh-dns.
    if !text.ends_with('.') {
        return Err(object.error(
            "dns_query",
            &format!("is {text:?}; expected a full name, with the final dot"),
        ));
    }
    let name = Name::from_text(text).map_err(|reason| {
        object.error(
            "dns_query",
            &format!("{text:?} is not a domain name: {reason}"),
        )
    })?;
    Ok(Some(name))
}

/// Reads `log_level` and `logging`, the settings of the log.
pub fn logging(root: &ObjectReader<'_>) -> Result<LoggingConfig, ConfigError> {
    let object = root.object("logging")?;
    let mut tags = Vec::new();
    for tag in object.objects("tags")? {
        let name = tag
            .text("name")?
            .ok_or_else(|| tag.error("name", "is missing"))?;
        let level = log_level(&tag)?.ok_or_else(|| tag.error("log_level", "is missing"))?;
        tags.push((name.to_owned(), level));
    }
    // Without an effect: times are written as RFC 3339 demands in any case.
    let _format = object.object("format")?.text("timestamp")?;
    Ok(LoggingConfig {
        level: log_level(root)?.unwrap_or(LogLevel::Info),
        tags,
    })
}

/// Reads a log level in any letter case.
fn log_level(reader: &ObjectReader<'_>) -> Result<Option<LogLevel>, ConfigError> {
    let Some(text) = reader.text("log_level")? else {
        return Ok(None);
    };
    match LogLevel::named(text) {
        None => Err(reader.error(
            "log_level",
            &format!("{text:?} is unknown; expected DEBUG, INFO, WARN, ERROR or NONE"),
        )),
        level => Ok(level),
    }
}

/// Default path of the control socket.
pub const CONTROL_SOCKET: &str = "/run/bosh-dns-xdp/control.sock";

fn control(object: &ObjectReader<'_>) -> Result<Option<ControlConfig>, ConfigError> {
    let user = object.filled("user")?.map(str::to_owned);
    let group = object.filled("group")?.map(str::to_owned);
    // An empty text switches the socket off, and must differ from a missing key.
    let is_default = !object.has("socket");
    let socket = if is_default {
        Some(PathBuf::from(CONTROL_SOCKET))
    } else {
        object.path("socket")?
    };
    let Some(socket) = socket else {
        return Ok(None);
    };
    // Commands that connect to it run in other folders than the server.
    if !socket.is_absolute() {
        return Err(object.error("socket", "is not an absolute path"));
    }
    Ok(Some(ControlConfig {
        socket,
        user,
        group,
        is_default,
    }))
}

/// Reads `api`. If a part is missing, the API stays off and DNS works; the warning is omitted if
/// the API is `unwanted`.
fn api(
    object: &ObjectReader<'_>,
    unwanted: bool,
    warnings: &mut Vec<String>,
) -> Result<Option<ApiConfig>, ConfigError> {
    let port = object.port("port")?;
    let tls = tls_files(object)?;
    let admins = object
        .texts("admins")?
        .map(|names| names.into_iter().map(str::to_owned).collect());
    let missing = match (port, tls) {
        (Some(port), Ok(tls)) => return Ok(Some(ApiConfig { port, tls, admins })),
        (None, _) => "port",
        (_, Err(NoFile(missing))) => missing,
    };
    if !unwanted {
        warnings.push(format!("api.{missing} is missing: the API stays off"));
    }
    Ok(None)
}

/// Reads `health`. If enabled, the port and all three files are required.
fn health(object: &ObjectReader<'_>) -> Result<HealthConfig, ConfigError> {
    let enabled = object.boolean("enabled")?.unwrap_or(false);
    // bosh-dns never looks at the port of disabled checks: a value that is no port must not end the
    // start.
    let port = if enabled {
        object.port("port")?
    } else {
        object.port("port").unwrap_or(None)
    };
    let tls = tls_files(object)?;
    if enabled && port.is_none() {
        return Err(object.error("port", "is missing, but health is enabled"));
    }
    if let (true, Err(NoFile(missing))) = (enabled, &tls) {
        return Err(object.error(missing, "is missing, but health is enabled"));
    }
    Ok(HealthConfig {
        enabled,
        port: port.unwrap_or(0),
        tls: tls.ok(),
        check_interval: object
            .positive("check_interval")?
            .unwrap_or(Duration::from_secs(20)),
        max_tracked_queries: object
            .number("max_tracked_queries", 0, 10_000_000)?
            .unwrap_or(2000) as usize,
        synchronous_check_timeout: object
            .duration("synchronous_check_timeout")?
            .unwrap_or(Duration::from_secs(1)),
        // Zero means no limit, like absence: no name could stay tracked otherwise.
        tracked_query_ttl: object.nonzero("tracked_query_ttl")?,
    })
}

/// Name of the first missing setting among the three files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoFile(pub &'static str);

/// Reads the paths of a certificate's three files, or returns the missing one.
pub fn tls_files(object: &ObjectReader<'_>) -> Result<Result<TlsFiles, NoFile>, ConfigError> {
    let certificate = object.path("certificate_file")?;
    let private_key = object.path("private_key_file")?;
    let ca = object.path("ca_file")?;
    Ok(match (certificate, private_key, ca) {
        (Some(certificate), Some(private_key), Some(ca)) => Ok(TlsFiles {
            certificate,
            private_key,
            ca,
        }),
        (None, _, _) => Err(NoFile("certificate_file")),
        (_, None, _) => Err(NoFile("private_key_file")),
        (_, _, None) => Err(NoFile("ca_file")),
    })
}

fn metrics(object: &ObjectReader<'_>) -> Result<MetricsConfig, ConfigError> {
    let enabled = object.boolean("enabled")?.unwrap_or(false);
    let default = SocketAddr::from((Ipv4Addr::LOCALHOST, 53088));
    if !enabled {
        // The members of a disabled section have no effect, so errors in them have none either.
        return Ok(MetricsConfig {
            enabled,
            listen: default,
            top_names: 0,
        });
    }
    let address = match object.text("address")? {
        // bosh-dns hands the text to Go's listener, which looks names up. This one needs no server.
        Some("localhost") => IpAddr::V4(Ipv4Addr::LOCALHOST),
        _ => object.address("address")?.unwrap_or(default.ip()),
    };
    let port = object.port("port")?.unwrap_or(default.port());
    let top_names = object.number("top_names", 0, 100)?.unwrap_or(0) as usize;
    Ok(MetricsConfig {
        enabled,
        listen: SocketAddr::new(address, port),
        top_names,
    })
}

fn cache(object: &ObjectReader<'_>) -> Result<CacheConfig, ConfigError> {
    Ok(CacheConfig {
        enabled: object.boolean("enabled")?.unwrap_or(false),
        max_entries: object
            .number("max_entries", 1, 100_000_000)?
            .unwrap_or(10_000),
        max_bytes: object.number("max_bytes", 1, 1 << 40)?.unwrap_or(64 << 20),
        serve_stale: object.nonzero("serve_stale")?,
    })
}

fn cookies(object: &ObjectReader<'_>) -> Result<CookiesConfig, ConfigError> {
    let mut secrets = Vec::new();
    for text in object.texts("secrets")?.unwrap_or_default() {
        // Messages reach the log, so they must not repeat a secret.
        let problem = "contains a text other than 32 hexadecimal digits";
        secrets.push(secret(text).ok_or_else(|| object.error("secrets", problem))?);
    }
    Ok(CookiesConfig {
        enabled: object.boolean("enabled")?.unwrap_or(false),
        secrets,
    })
}

fn secret(text: &str) -> Option<[u8; 16]> {
    // `from_str_radix` permits a sign.
    let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_hex || text.len() != 32 {
        return None;
    }
    let secret = u128::from_str_radix(text, 16).ok()?;
    Some(secret.to_be_bytes())
}

/// Reads `xdp`, the settings of the fast path.
fn xdp(object: &ObjectReader<'_>, warnings: &mut Vec<String>) -> Result<XdpConfig, ConfigError> {
    let interfaces = object.texts("interfaces")?;
    let respect_filters = object.texts("respect_filters")?.unwrap_or_default();
    check_patterns(
        object,
        interfaces.as_deref().unwrap_or_default(),
        &respect_filters,
    )?;
    let config = XdpConfig {
        vlans: object
            .numbers("vlans", 0, 4095)?
            .into_iter()
            .map(|vlan| vlan as u16)
            .collect(),
        respect_filters: respect_filters.into_iter().map(str::to_owned).collect(),
        shed: object.boolean("shed")?.unwrap_or(true),
        enabled: object.boolean("enabled")?.unwrap_or(true),
        interfaces: interfaces.map(|names| names.into_iter().map(str::to_owned).collect()),
        mode: hook_mode(object, warnings)?,
        max_names: object.number("max_names", 1, 1 << 24)?.unwrap_or(65_536) as u32,
        cache_entries: object.number("cache_entries", 0, 1 << 20)?.unwrap_or(8192) as u32,
        cache_bytes: object
            .number("cache_bytes", 1 << 20, 1 << 28)?
            .unwrap_or(4 << 20),
        other_types: object.boolean("other_types")?.unwrap_or(true),
        lease: object.positive("lease")?.unwrap_or(Duration::from_secs(10)),
        bpffs: object
            .path("bpffs")?
            .unwrap_or_else(|| PathBuf::from("/run/bosh-dns-xdp-pins")),
        on_stop: object
            .choice(
                "on_stop",
                &[("detach", OnStop::Detach), ("keep", OnStop::Keep)],
            )?
            .unwrap_or(OnStop::Detach),
        user: object.filled("user")?.map(str::to_owned),
        attach_socket: object.path("attach_socket")?,
        attach_user: object.filled("attach_user")?.map(str::to_owned),
    };
    if config
        .attach_socket
        .as_ref()
        .is_some_and(|socket| !socket.is_absolute())
    {
        return Err(object.error("attach_socket", "is not an absolute path"));
    }
    if config.lease < Duration::from_secs(1) {
        return Err(object.error("lease", "is shorter than a second; expected \"1s\" or more"));
    }
    Ok(config)
}

fn check_patterns(
    object: &ObjectReader<'_>,
    interfaces: &[&str],
    respect_filters: &[&str],
) -> Result<(), ConfigError> {
    // It would match no interface: most likely the variable of a template was empty.
    if interfaces.contains(&"") {
        return Err(object.error(
            "interfaces",
            "contains an empty text; expected names and patterns such as \"veth*\"",
        ));
    }
    for (key, patterns) in [
        ("interfaces", interfaces),
        ("respect_filters", respect_filters),
    ] {
        for pattern in patterns {
            values::check_pattern(pattern)
                .map_err(|reason| object.error(key, &format!("{pattern:?} {reason}")))?;
        }
    }
    Ok(())
}

/// Reads `xdp.mode`. The word of a mode that earlier versions had stands for tc, which serves the
/// same interfaces.
fn hook_mode(
    object: &ObjectReader<'_>,
    warnings: &mut Vec<String>,
) -> Result<HookMode, ConfigError> {
    const REMOVED: &str = "generic";
    if object.text("mode")? == Some(REMOVED) {
        warnings.push(
            "xdp.mode \"generic\" no longer exists: using \"tc\", which serves the same interfaces and does not slow other traffic"
                .to_owned(),
        );
        return Ok(HookMode::Tc);
    }
    Ok(object
        .choice("mode", &HookMode::WORDS)?
        .unwrap_or(HookMode::Auto))
}

/// Reads and validates a file pattern.
fn pattern(object: &ObjectReader<'_>, name: &'static str) -> Result<String, ConfigError> {
    let text = object.text(name)?.unwrap_or_default();
    values::check_pattern(text)
        .map_err(|reason| object.error(name, &format!("{text:?} {reason}")))?;
    Ok(text.to_owned())
}

/// Parses addresses files given by name and content; returns each address of the valid ones once.
pub fn parse_addresses<'a>(
    files: impl IntoIterator<Item = (&'a str, &'a [u8])>,
) -> ParsedFiles<Vec<SocketAddr>> {
    let mut valid = Vec::new();
    let mut errors = Vec::new();
    for (file, bytes) in files {
        match parse_file(file, bytes) {
            Ok(addresses) => {
                for address in addresses {
                    // Jobs write their files independently of one another, so two may name the same
                    // address.
                    if !valid.contains(&address) {
                        valid.push(address);
                    }
                }
            }
            Err(more) => errors.extend(more),
        }
    }
    ParsedFiles { valid, errors }
}

/// Parses one file and returns every error, not just the first.
fn parse_file(file: &str, bytes: &[u8]) -> Result<Vec<SocketAddr>, Vec<ConfigError>> {
    let expected = "a list of {\"address\": IP, \"port\": number}";
    parse_list(file, bytes, "addresses", expected, |entry| {
        let address = entry
            .address("address")
            .and_then(|found| found.ok_or_else(|| entry.error("address", "is missing")));
        let port = entry
            .port("port")
            .and_then(|found| found.ok_or_else(|| entry.error("port", "is missing")));
        match (address, port) {
            (Ok(address), Ok(port)) => Ok(SocketAddr::new(address, port)),
            (address, port) => Err([address.err(), port.err()].into_iter().flatten().collect()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a valid configuration.
    fn good(text: &str) -> Loaded {
        Config::parse("config.json", text.as_bytes()).unwrap()
    }

    /// Parses an invalid configuration and returns the error.
    fn bad(text: &str) -> String {
        Config::parse("config.json", text.as_bytes())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn defaults_match_bosh_dns() {
        let Loaded { config, .. } = good(r#"{"address": "169.254.0.2", "port": 53}"#);
        assert_eq!(config.listen, "169.254.0.2:53".parse().unwrap());
        assert_eq!(config.timeout, Duration::from_secs(5));
        assert_eq!(config.request_timeout, Duration::from_secs(5));
        assert_eq!(config.recursion.timeout, Duration::from_secs(2));
        assert_eq!(config.recursion.selection, RecursorSelection::Smart);
        assert_eq!(config.compat, Compat::default());
        assert_eq!(config.health.check_interval, Duration::from_secs(20));
        assert_eq!(config.health.max_tracked_queries, 2000);
        assert_eq!(
            config.health.synchronous_check_timeout,
            Duration::from_secs(1)
        );
        assert_eq!(config.metrics.listen, "127.0.0.1:53088".parse().unwrap());
        assert!(config.api.is_none() && !config.health.enabled && !config.cache.enabled);
        assert!(config.xdp.enabled && config.xdp.interfaces.is_none());
        assert_eq!(
            (config.xdp.max_names, config.xdp.lease),
            (65_536, Duration::from_secs(10))
        );
    }

    #[test]
    fn members_follow_go_rules() {
        let Loaded { config, .. } = good(
            r#"{"PORT": 53, "Port": 54, "address": "10.0.0.1", "address": null, "future": [1],
                "health": {"max_tracked_queries": 7}, "HEALTH": {"check_interval": "1m"}, "cache": null}"#,
        );
        assert_eq!(config.listen, "10.0.0.1:54".parse().unwrap());
        assert_eq!(config.health.max_tracked_queries, 7);
        assert_eq!(config.health.check_interval, Duration::from_secs(60));
    }

    #[test]
    fn errors_name_file_and_key() {
        for (text, message) in [
            (
                "",
                "config.json: is not JSON: EOF while parsing a value at line 1 column 0",
            ),
            ("[]", "config.json: is a list, not an object of settings"),
            (
                "{}",
                "config.json: port: is missing; expected a whole number from 1 to 65535",
            ),
            (
                r#"{"port": -1}"#,
                "config.json: port: is -1; expected a whole number from 1 to 65535",
            ),
            (
                r#"{"port": "53"}"#,
                "config.json: port: is \"53\"; expected a whole number from 1 to 65535",
            ),
            (
                r#"{"port": 53, "address": "x"}"#,
                "config.json: address: \"x\" is not an IP address",
            ),
            (
                r#"{"port": 53, "recursor_timeout": null}"#,
                "config.json: recursor_timeout: is null; expected a duration such as \"400ms\", \"5s\" or \
                 \"1h2m3.5s\"",
            ),
            (
                r#"{"port": 53, "recursor_selection": "SERIAL"}"#,
                "config.json: recursor_selection: \"SERIAL\" is unknown; expected one of \"smart\", \
                 \"serial\"",
            ),
            (
                r#"{"port": 53, "log_level": ""}"#,
                "config.json: log_level: \"\" is unknown; expected DEBUG, INFO, WARN, ERROR or NONE",
            ),
            (
                r#"{"port": 53, "health": {"enabled": true, "port": 8853}}"#,
                "config.json: health.certificate_file: is missing, but health is enabled",
            ),
            (
                r#"{"port": 53, "logging": {"tags": [{"name": "x", "log_level": "loud"}]}}"#,
                "config.json: logging.tags[0].log_level: \"loud\" is unknown; expected DEBUG, INFO, WARN, \
                 ERROR or NONE",
            ),
            (
                r#"{"port": 53, "alias_files_glob": "/x/["}"#,
                "config.json: alias_files_glob: \"/x/[\" is not a file pattern (an unclosed [ or a backslash at the end)",
            ),
            (
                r#"{"port": 53, "timeout": "0s"}"#,
                "config.json: timeout: must be longer than 0",
            ),
        ] {
            assert_eq!(bad(text), message);
        }
    }

    #[test]
    fn enabled_upcheck_needs_final_dot() {
        let text = |upchecks: &str, query: &str| {
            format!(
                r#"{{"port": 53, "upcheck_domains": [{upchecks}],
                    "internal_upcheck_domain": {{"enabled": true, "dns_query": "{query}"}}}}"#
            )
        };
        assert!(bad(&text("\"up.\"", "q-s0.q-g1.bosh")).contains("with the final dot"));
        assert!(
            good(&text("", "q-s0.q-g1.bosh"))
                .config
                .internal_upcheck
                .is_none()
        );
        assert!(
            good(&text("\"up.\"", "q-s0.q-g1.bosh."))
                .config
                .internal_upcheck
                .is_some()
        );
    }

    #[test]
    fn check_reports_every_error() {
        let text = r#"{"address": "x", "recursor_timeout": 5, "xdp": {"mode": "fast", "interfaces": ["eth[0"]},
            "logging": {"tags": [{"name": "main", "log_level": "loud"}, {"name": "main", "log_level": "INFO"},
                {"name": "main", "log_level": "quiet"}, 7]},
            "health": {"enabled": true}}"#;
        let (errors, loaded) = Config::check("config.json", text.as_bytes());
        let problems: Vec<String> = errors.iter().map(ToString::to_string).collect();
        for start in [
            "address: \"x\" is not an IP address",
            "port: is missing",
            "recursor_timeout: is 5",
            "logging.tags[0].log_level: \"loud\" is unknown",
            "logging.tags[2].log_level: \"quiet\" is unknown",
            "logging.tags[3]: is 7; expected an object",
            "health.port: is missing",
            "xdp.interfaces: \"eth[0\" is not a file pattern",
            "xdp.mode: \"fast\" is unknown",
        ] {
            assert!(
                problems
                    .iter()
                    .any(|problem| problem.starts_with(&format!("config.json: {start}"))),
                "{start}: {problems:#?}"
            );
        }
        assert!(loaded.is_some());
        assert!(Config::check("config.json", b"[]").1.is_none());
        assert!(Config::check("config.json", b"{").1.is_none());
    }

    #[test]
    fn absent_settings_are_not_empty_ones() {
        let config =
            |members: &str| good(&format!(r#"{{"port": 53, "address": "::1"{members}}}"#)).config;
        let plain = config("");
        assert_eq!(
            (plain.cache.max_bytes, plain.xdp.cache_bytes),
            (67_108_864, 4_194_304)
        );
        assert_eq!(
            (plain.cache.max_entries, plain.xdp.cache_entries),
            (10_000, 8192)
        );
        let socket = |members: &str| {
            let control = config(members).control?;
            Some((control.socket, control.is_default))
        };
        assert_eq!(socket(""), Some((CONTROL_SOCKET.into(), true)));
        assert_eq!(
            socket(r#", "control": {"user": "root"}"#),
            Some((CONTROL_SOCKET.into(), true))
        );
        assert_eq!(
            socket(r#", "control": {"socket": "/s"}"#),
            Some(("/s".into(), false))
        );
        assert_eq!(socket(r#", "control": {"socket": ""}"#), None);
        let secrets = config(
            r#", "cookies": {"secrets": ["000102030405060708090a0b0c0d0eFF", "ffffffffffffffffffffffffffffffff"]}"#,
        );
        assert_eq!(
            secrets.cookies.secrets,
            [
                [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255],
                [255; 16]
            ]
        );
        for wrong in [
            "0",
            "+00102030405060708090a0b0c0d0e0f",
            "000102030405060708090a0b0c0d0e0f0",
        ] {
            assert_eq!(secret(wrong), None, "{wrong}");
        }
        let lease = |text: &str| format!(r#"{{"port": 53, "xdp": {{"lease": "{text}"}}}}"#);
        assert_eq!(good(&lease("1s")).config.xdp.lease, Duration::from_secs(1));
        assert_eq!(
            bad(&lease("999ms")),
            "config.json: xdp.lease: is shorter than a second; expected \"1s\" or more"
        );
        for (max_bytes, is_sound) in [
            (0, false),
            (1, true),
            (1 << 40, true),
            ((1_u64 << 40) + 1, false),
        ] {
            let text = format!(r#"{{"port": 53, "cache": {{"max_bytes": {max_bytes}}}}}"#);
            assert_eq!(
                Config::parse("c", text.as_bytes()).is_ok(),
                is_sound,
                "{max_bytes}"
            );
        }
        for (bytes, is_sound) in [
            (1_048_575, false),
            (1_048_576, true),
            (268_435_456, true),
            (268_435_457, false),
        ] {
            let text = format!(r#"{{"port": 53, "xdp": {{"cache_bytes": {bytes}}}}}"#);
            assert_eq!(
                Config::parse("c", text.as_bytes()).is_ok(),
                is_sound,
                "{bytes}"
            );
        }
        for (key, most) in [("max_names", 16_777_216), ("cache_entries", 1_048_576)] {
            for (number, is_sound) in [(most, true), (most + 1, false)] {
                let text = format!(r#"{{"port": 53, "xdp": {{"{key}": {number}}}}}"#);
                assert_eq!(
                    Config::parse("c", text.as_bytes()).is_ok(),
                    is_sound,
                    "{key} {number}"
                );
            }
        }
    }

    /// Returns the errors of a document whose loading fails at this member as long as `is_wrong`.
    fn errors_of(
        document: &str,
        key: Option<&str>,
        is_wrong: impl Fn(&Json) -> bool,
    ) -> (Vec<String>, Option<Json>) {
        let json = Json::parse(document.as_bytes()).unwrap();
        let (errors, rest) = every_error(json, |json| {
            if !is_wrong(json) {
                return Ok(json.clone());
            }
            Err(ConfigError {
                key: key.map(str::to_owned),
                ..ConfigError::of_file("f", "is wrong")
            })
        });
        let errors = errors.iter().map(ToString::to_string).collect();
        (errors, rest)
    }

    #[test]
    fn irremovable_members_end_the_check() {
        for (document, key, error) in [
            // The whole file is wrong.
            (r#"{"a": 1}"#, None, "f: is wrong"),
            // There is nothing that could be removed.
            (r#"{"b": 1}"#, Some("a"), "f: a: is wrong"),
            (r#"{"b": 1}"#, Some("a.b"), "f: a.b: is wrong"),
            ("[1]", Some("a"), "f: a: is wrong"),
        ] {
            assert_eq!(
                errors_of(document, key, |_| true),
                (vec![error.to_owned()], None),
                "{document}"
            );
        }
    }

    #[test]
    fn wrong_members_lose_every_spelling() {
        let members = |json: &Json| match json {
            Json::Object(members) => members.len(),
            other => panic!("{other}"),
        };
        for (document, key, rest) in [
            // An earlier spelling must not take effect in place of the last one.
            (r#"{"a": 1, "b": 2, "A": 3}"#, "a", r#"{"b": 2}"#),
            (
                r#"{"a": {"x": 1, "y": 2}, "A": {"X": 3}, "b": 4}"#,
                "a.x",
                r#"{"a": {"y": 2}, "A": {}, "b": 4}"#,
            ),
            // A required member is missing.
            (r#"{"A": {"y": 2}, "b": 4, "a": {}}"#, "a.x", r#"{"b": 4}"#),
            (
                r#"{"a": [{"x": 1}, {"x": 2}], "b": 4}"#,
                "a[1].x",
                r#"{"a": [{"x": 1}], "b": 4}"#,
            ),
            (r#"{"a": [], "b": 4}"#, "a[0].x", r#"{"b": 4}"#),
            (r#"{"b": 4}"#, "port", r#"{"b": 4, "port": 53}"#),
        ] {
            let rest = Json::parse(rest.as_bytes()).unwrap();
            let (errors, found) = errors_of(document, Some(key), |json| *json != rest);
            assert_eq!(errors, [format!("f: {key}: is wrong")], "{document}");
            assert_eq!(found.as_ref().map(members), Some(members(&rest)));
            assert_eq!(found, Some(rest), "{document}");
        }
    }

    #[test]
    fn removed_items_keep_positions() {
        let mut removed = RemovedItems::default();
        for (added, expected) in [
            ("x", ["a[0].y", "a[1].y", "a[2]", "b[1]", "a.c"]),
            ("a[1].y", ["a[0].y", "a[2].y", "a[3]", "b[1]", "a.c"]),
            ("a[1]", ["a[0].y", "a[3].y", "a[4]", "b[1]", "a.c"]),
            ("b[0].z", ["a[0].y", "a[3].y", "a[4]", "b[2]", "a.c"]),
            ("a[0]", ["a[3].y", "a[4].y", "a[5]", "b[2]", "a.c"]),
        ] {
            removed.add(added);
            let found =
                ["a[0].y", "a[1].y", "a[2]", "b[1]", "a.c"].map(|path| removed.original(path));
            assert_eq!(found, expected, "after {added}");
        }
        for (path, expected) in [
            ("logging.tags[1].name", Some(("logging.tags", 1, ".name"))),
            ("tags[12]", Some(("tags", 12, ""))),
            ("tags", None),
            ("tags[1", None),
            ("tags[x]", None),
        ] {
            assert_eq!(split_item(path), expected, "{path}");
        }
    }

    #[test]
    fn list_errors_have_positions() {
        let tag = |level: &str| format!(r#"{{"name": "x", "log_level": "{level}"}}"#);
        let tags = ["a", "INFO", "b", "c", "WARN", "d"].map(tag).join(", ");
        let text = format!(
            r#"{{"address": "::1", "port": 53, "logging": {{"tags": [{tags}]}}, "health": {{"enabled": true}}}}"#
        );
        let (errors, loaded) = Config::check("config.json", text.as_bytes());
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        let level = |number: usize, level: &str| {
            format!(
                "config.json: logging.tags[{number}].log_level: {level:?} is unknown; expected DEBUG, INFO, WARN, \
                 ERROR or NONE"
            )
        };
        let expected = [
            level(0, "a"),
            level(2, "b"),
            level(3, "c"),
            level(5, "d"),
            "config.json: health.port: is missing, but health is enabled".to_owned(),
        ];
        assert_eq!(errors, expected);
        let logging = loaded.unwrap().config.logging;
        let levels: Vec<LogLevel> = logging.tags.iter().map(|(_, level)| *level).collect();
        assert_eq!(levels, [LogLevel::Info, LogLevel::Warn]);
    }

    #[test]
    fn generic_mode_becomes_tc() {
        let loaded = good(r#"{"address": "127.0.0.1", "port": 53, "xdp": {"mode": "generic"}}"#);
        assert_eq!(loaded.config.xdp.mode, HookMode::Tc);
        assert!(
            loaded.warnings.iter().any(|warning: &String| {
                warning.contains("xdp.mode \"generic\"") && warning.contains("\"tc\"")
            }),
            "{:?}",
            loaded.warnings
        );
    }

    #[test]
    fn unknown_keys_are_reported() {
        let loaded =
            good(r#"{"address": "127.0.0.1", "port": 53, "xdp": {"mod": "off", "mode": "tc"}}"#);
        assert_eq!(loaded.config.xdp.mode, HookMode::Tc);
        assert!(loaded.warnings.contains(
            &"config.json: xdp.mod is unknown and ignored (did you mean xdp.mode?)".to_owned()
        ));
    }

    fn parse(text: &str) -> Result<Vec<SocketAddr>, String> {
        parse_addresses([("a.json", text.as_bytes())])
            .whole()
            .map_err(|errors| errors.to_string())
    }

    #[test]
    fn addresses_are_read() {
        let text = r#"[{"address": "127.0.0.2", "port": 53}, {"Address": "::1", "PORT": 54}]"#;
        assert_eq!(
            parse(text),
            Ok(vec![
                "127.0.0.2:53".parse().unwrap(),
                "[::1]:54".parse().unwrap()
            ])
        );
        assert_eq!(parse("[]"), Ok(vec![]));
        assert_eq!(parse("null"), Ok(vec![]));
        for (text, expected) in [
            (
                r#"[{"address": "127.0.0.1"}]"#,
                "addresses[0].port: is missing",
            ),
            (
                r#"[{"address": "127.0.0.1", "port": 0}]"#,
                "addresses[0].port: is 0",
            ),
            (
                r#"[{"address": "::1", "port": 53}, {"address": "x", "port": 53}]"#,
                "addresses[1].address: \"x\" is not an IP address",
            ),
            (r#"[{"port": 53}]"#, "addresses[0].address: is missing"),
            ("[53]", "addresses[0]: is 53; expected an object"),
            (r#"{"address": "127.0.0.1", "port": 53}"#, "is an object"),
            ("", "is not JSON"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(
                error.starts_with(&format!("a.json: {expected}")),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn every_wrong_entry_is_reported() {
        let files = [
            (
                "a.json",
                &br#"[{"address": "x"}, {"address": "::1", "port": 53}, 7]"#[..],
            ),
            (
                "b.json",
                br#"[{"address": "::1", "port": 53}, {"address": "::1", "port": 53}]"#,
            ),
            ("c.json", b"{"),
        ];
        let ParsedFiles { valid, errors } = parse_addresses(files);
        assert_eq!(valid, ["[::1]:53".parse().unwrap()]);
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        let expected = [
            "a.json: addresses[0].address: \"x\" is not an IP address",
            "a.json: addresses[0].port: is missing",
            "a.json: addresses[2]: is 7; expected an object",
            "c.json: is not JSON: ",
        ];
        assert_eq!(errors.len(), expected.len(), "{errors:?}");
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
