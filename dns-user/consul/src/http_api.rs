//! Access to Consul's HTTP API: the object `sources.http`.

use std::{fmt, path::PathBuf, time::Duration};

use dns_core::config::{ConfigError, reader::Reader};

/// Consul's agents and connection settings, with all defaults applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpApi {
    /// `addresses`: tried in order until one responds; never empty.
    pub addresses: Vec<ApiAddress>,
    /// `ca_file`: CA certificates to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// `cert_file` and `key_file`: client certificate and key, PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// `tls_server_name`: expected name in the agent's certificate; if unset, the host of the
    /// address.
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

/// Consul's default limit of connections per client.
const CONSULS_LIMIT: u64 = 200;
/// Minimum number of connections: for the permanent watches, and a few for fetches.
const FEWEST: u64 = 8;
/// Maximum duration of a blocking query that Consul accepts.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

impl HttpApi {
    /// Parses the member `http` of `sources`; `None` if it is missing.
    pub(crate) fn read(sources: &Reader<'_>) -> Result<Option<Self>, ConfigError> {
        if !sources.has("http") {
            return Ok(None);
        }
        let object = sources.object("http")?;
        let address = |text: &str| {
            ApiAddress::from_text(text)
                .ok_or_else(|| object.error("addresses", &format!("{text:?} is not an {ADDRESS_FORM}")))
        };
        let texts = object.texts("addresses")?.unwrap_or_else(|| vec!["http://127.0.0.1:8500"]);
        let addresses: Vec<ApiAddress> = texts.into_iter().map(address).collect::<Result<_, _>>()?;
        if addresses.is_empty() {
            return Err(object.error("addresses", &format!("is empty; give at least one {ADDRESS_FORM}")));
        }
        let path = |name| -> Result<Option<PathBuf>, ConfigError> {
            Ok(object.text(name)?.filter(|path| !path.is_empty()).map(PathBuf::from))
        };
        let identity = match (path("cert_file")?, path("key_file")?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(object.error("cert_file", "requires key_file; set both or neither")),
        };
        let wait = object.positive("wait")?.unwrap_or(Duration::from_secs(300));
        if wait > LONGEST_WAIT {
            return Err(object.error("wait", "is longer than Consul accepts; the maximum is \"10m\""));
        }
        let stale_after = object.positive("stale_after")?.unwrap_or(Duration::from_secs(60));
        let settings = Self {
            addresses,
            stale_after,
            expire_after: object.positive("expire_after")?,
            ca_file: path("ca_file")?,
            identity,
            tls_server_name: object.text("tls_server_name")?.map(str::to_owned),
            wait,
            rate: object.number("rate", 1, 100_000)?.unwrap_or(500) as u32,
            max_connections: object
                .number("max_connections", FEWEST, 10_000)?
                .unwrap_or(CONSULS_LIMIT * 3 / 4) as usize,
        };
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

/// Expected form of an address, for error messages.
const ADDRESS_FORM: &str = "address such as \"http://127.0.0.1:8500\" or \"https://consul.example:8501\"";

impl ApiAddress {
    /// Parses `http://host:port`, `https://host:port` or `host:port`; the default ports are 8500
    /// and 8501.
    pub fn from_text(text: &str) -> Option<Self> {
        let (tls, rest) = match text.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some(_) => return None,
            None => (false, text),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let default = if tls { 8501 } else { 8500 };
        let (host, port) = match rest.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']')?;
                host.parse::<std::net::Ipv6Addr>().ok()?;
                (host, port.strip_prefix(':'))
            }
            None => rest.split_once(':').map_or((rest, None), |(host, port)| (host, Some(port))),
        };
        let port = port.map_or(Some(default), |port| port.parse().ok().filter(|port| *port != 0))?;
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
        (!host.is_empty() && host.bytes().all(fits)).then(|| Self { tls, host: host.to_owned(), port })
    }

    /// Returns `host:port`, for the Host header and for connecting.
    pub fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for ApiAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.tls { "https" } else { "http" }, self.authority())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::config::json::Json;

    #[test]
    fn addresses_are_read() {
        let read = |text: &str| ApiAddress::from_text(text).map(|address| address.to_string());
        assert_eq!(read("10.0.0.1:8500").as_deref(), Some("http://10.0.0.1:8500"));
        assert_eq!(read("https://consul.example").as_deref(), Some("https://consul.example:8501"));
        assert_eq!(read("http://[::1]:80/").as_deref(), Some("http://[::1]:80"));
        for wrong in
            ["", "ftp://a", "http://a:0", "http://a:b", "http://[::1", "http://a/b?c", "http://[a]:1"]
        {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn mistakes_have_a_place() {
        let read = |text: &str| {
            let json = Json::parse(text.as_bytes()).expect("JSON");
            HttpApi::read(&Reader::document("config.json", &json).expect("an object"))
        };
        let error = |text| read(text).expect_err("an error").to_string();
        assert!(read(r#"{"http": {}}"#).expect("defaults").is_some());
        assert!(
            error(r#"{"http": {"addresses": ["x:y"]}}"#)
                .contains("http.addresses: \"x:y\" is not an address")
        );
        assert!(error(r#"{"http": {"cert_file": "a"}}"#).contains("http.cert_file: requires key_file"));
        assert!(error(r#"{"http": {"wait": "1h"}}"#).contains("the maximum is \"10m\""));
        assert!(error(r#"{"http": {"token": "a"}}"#).contains("the unknown key http.token"));
    }
}
