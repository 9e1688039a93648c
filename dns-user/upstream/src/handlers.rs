//! Handlers: domains whose names are answered by dedicated recursors or by a JSON server over HTTP,
//! or are denied.

use std::{collections::HashMap, sync::Arc};

use url::Url;

use super::{
    InterfaceAnswers,
    cached::{CachedSource, Denial, UncachedSource},
    forwarder,
    host_names::HostNames,
    http::{HttpClients, HttpServer, HttpSource},
    source,
    tcp::Trust,
};
use dns_core::{
    config::{
        Config, ConfigError, ParsedFiles,
        parse::recursors,
        reader::{ObjectReader, parse_list},
    },
    name::Name,
};

/// A handler of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandlerConfig {
    /// Domain of the handler, which answers names at and below it.
    pub domain: Name,
    /// Source of the answers.
    pub source: HandlerSource,
    /// Whether answers are cached.
    pub cache: bool,
}

/// The source of a handler's answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandlerSource {
    /// The domain's recursors, `host:port`, at least one.
    Dns(Vec<String>),
    /// A server that answers in JSON over HTTP or HTTPS.
    Http(HttpServer),
    /// Nothing: every name is denied.
    Deny(Denial),
}

/// The handlers in use.
#[derive(Debug, Default)]
pub struct Handlers {
    by_domain: HashMap<Name, Handler>,
}

/// A handler in use.
#[derive(Clone, Debug)]
struct Handler {
    config: HandlerConfig,
    source: CachedSource,
}

impl Handlers {
    /// Parses handler files in the given order; if a domain has several handlers, the last one
    /// counts (observed).
    pub fn parse<'a>(
        files: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> ParsedFiles<Vec<HandlerConfig>> {
        let mut valid: Vec<HandlerConfig> = Vec::new();
        let mut errors = Vec::new();
        for (file, bytes) in files {
            match parse_file(file, bytes) {
                Ok(handlers) => {
                    for handler in handlers {
                        // As bosh-dns does (observed).
                        valid.retain(|earlier| earlier.domain != handler.domain);
                        valid.push(handler);
                    }
                }
                Err(more) => errors.extend(more),
            }
        }
        ParsedFiles { valid, errors }
    }

    /// Creates handlers. A handler that is unchanged since `previous` keeps its sockets and cache;
    /// `interfaces` mirror the caches. Must be called inside a tokio runtime.
    pub fn new(
        handlers: Vec<HandlerConfig>,
        config: &Config,
        previous: &Handlers,
        hosts: &Arc<HostNames>,
        interfaces: &Arc<dyn InterfaceAnswers>,
    ) -> Self {
        let mut http_clients = HttpClients::default();
        let mut by_domain = HashMap::new();
        for handler in handlers {
            let domain = handler.domain.clone();
            let handler = match previous.by_domain.get(&domain) {
                Some(known) if known.config == handler => known.clone(),
                _ => Handler::new(handler, config, hosts, interfaces, &mut http_clients),
            };
            by_domain.insert(domain, handler);
        }
        Self { by_domain }
    }

    /// Returns the handlers as they were configured.
    pub fn configs(&self) -> Vec<HandlerConfig> {
        self.by_domain
            .values()
            .map(|handler| handler.config.clone())
            .collect()
    }

    /// Returns the domains with the sources of their answers.
    pub fn sources(&self) -> impl Iterator<Item = (&Name, &CachedSource)> {
        self.by_domain
            .iter()
            .map(|(domain, handler)| (domain, &handler.source))
    }
}

impl Handler {
    fn new(
        handler: HandlerConfig,
        config: &Config,
        hosts: &Arc<HostNames>,
        interfaces: &Arc<dyn InterfaceAnswers>,
        http_clients: &mut HttpClients,
    ) -> Self {
        let uncached = match &handler.source {
            HandlerSource::Dns(recursors) => forwarder(recursors, config, hosts),
            HandlerSource::Http(server) => UncachedSource::Http(Arc::new(HttpSource::new(
                server,
                http_clients,
                hosts,
                config.request_timeout,
            ))),
            HandlerSource::Deny(denial) => UncachedSource::Deny(*denial),
        };
        // A denial needs no look-up.
        let has_cache = handler.cache && !matches!(uncached, UncachedSource::Deny(_));
        Self {
            config: handler,
            source: source(uncached, has_cache, config, interfaces),
        }
    }
}

/// Parses one file: a list of handlers. Returns every error, not just the first.
fn parse_file(file: &str, bytes: &[u8]) -> Result<Vec<HandlerConfig>, Vec<ConfigError>> {
    parse_list(file, bytes, "handlers", "a list of handlers", parse_handler)
}

fn parse_handler(handler: &ObjectReader<'_>) -> Result<HandlerConfig, Vec<ConfigError>> {
    let cache = handler
        .object("cache")
        .and_then(|cache| cache.boolean("enabled"));
    // All parts are read even after an error, so that one start reports every mistake.
    match (parse_domain(handler), parse_source(handler), cache) {
        (Ok(domain), Ok(source), Ok(cache)) => Ok(HandlerConfig {
            domain,
            source,
            cache: cache.unwrap_or(false),
        }),
        (domain, source, cache) => Err([domain.err(), source.err(), cache.err()]
            .into_iter()
            .flatten()
            .collect()),
    }
}

fn parse_domain(handler: &ObjectReader<'_>) -> Result<Name, ConfigError> {
    // bosh-dns panics at an empty domain.
    let domain = handler.filled("domain")?.ok_or_else(|| {
        handler.error(
            "domain",
            "is missing; expected a domain such as \"corp.example.\", or \".\" for all",
        )
    })?;
    Name::from_text(domain)
        .map_err(|reason| handler.error("domain", &format!("{domain:?}: {reason}")))
}

fn parse_source(handler: &ObjectReader<'_>) -> Result<HandlerSource, ConfigError> {
    let source = handler.object("source")?;
    match source.choice(
        "type",
        &[
            ("dns", Kind::Dns),
            ("http", Kind::Http),
            ("deny", Kind::Deny),
        ],
    )? {
        None => Err(source.error("type", "is missing; expected \"dns\", \"http\" or \"deny\"")),
        Some(Kind::Dns) => Ok(HandlerSource::Dns(parse_recursors(&source)?)),
        Some(Kind::Http) => Ok(HandlerSource::Http(HttpServer {
            url: parse_url(&source)?,
            trust: parse_trust(&source)?,
        })),
        Some(Kind::Deny) => {
            let choices = [
                // Go's zero value: a missing response.
                ("", Denial::Nxdomain),
                ("NXDOMAIN", Denial::Nxdomain),
                ("REFUSED", Denial::Refused),
            ];
            Ok(HandlerSource::Deny(
                source
                    .choice("response", &choices)?
                    .unwrap_or(Denial::Nxdomain),
            ))
        }
    }
}

/// Type of a handler's source.
#[derive(Clone, Copy)]
enum Kind {
    Dns,
    Http,
    Deny,
}

fn parse_recursors(source: &ObjectReader<'_>) -> Result<Vec<String>, ConfigError> {
    let recursors = recursors(source, "recursors")?;
    if recursors.is_empty() {
        return Err(source.error(
            "recursors",
            "is empty; a handler of type \"dns\" needs at least one",
        ));
    }
    Ok(recursors)
}

fn parse_url(source: &ObjectReader<'_>) -> Result<Url, ConfigError> {
    const ALLOWED: &str =
        "expected a URL such as \"http://10.0.0.1:8081/path\" or \"https://dns.example\"";
    let text = source
        .filled("url")?
        .ok_or_else(|| source.error("url", &format!("is missing; {ALLOWED}")))?;
    let url = Url::parse(text)
        .map_err(|reason| source.error("url", &format!("{text:?}: {reason}; {ALLOWED}")))?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return Err(source.error(
            "url",
            &format!("{text:?} has an unsupported scheme; {ALLOWED}"),
        ));
    }
    Ok(url)
}

fn parse_trust(source: &ObjectReader<'_>) -> Result<Trust, ConfigError> {
    let file = source.path("ca_file")?;
    match (source.boolean("insecure_skip_verify")?, file) {
        (Some(true), Some(_)) => Err(source.error(
            "insecure_skip_verify",
            "contradicts `ca_file`; remove one of them",
        )),
        // As bosh-dns, which accepts any certificate.
        (Some(true), None) => Ok(Trust::Anyone),
        (_, Some(file)) => Ok(Trust::File(file)),
        (_, None) => Ok(Trust::System),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<HandlerConfig>, String> {
        Handlers::parse([("h.json", text.as_bytes())])
            .whole()
            .map_err(|errors| errors.to_string())
    }

    #[test]
    fn handler_kinds_are_parsed() {
        let handlers = parse(
            r#"[{"domain": "Corp.example", "Cache": {"enabled": true},
                 "source": {"type": "dns", "recursors": ["10.0.0.1", "::1", "host:5353"]}},
                {"domain": "h.example.", "source": {"type": "http", "url": "https://dns.example/x"}, "more": 1},
                {"domain": ".", "source": {"type": "deny"}, "cache": null},
                {"domain": "r.", "source": {"type": "deny", "response": "REFUSED"}}]"#,
        )
        .unwrap();
        let recursors = ["10.0.0.1:53", "[::1]:53", "host:5353"]
            .map(str::to_owned)
            .to_vec();
        assert_eq!(
            handlers[0],
            HandlerConfig {
                domain: "corp.example.".parse().unwrap(),
                source: HandlerSource::Dns(recursors),
                cache: true
            }
        );
        let server = |text: &str, trust| {
            HandlerSource::Http(HttpServer {
                url: text.parse().unwrap(),
                trust,
            })
        };
        assert_eq!(
            handlers[1].source,
            server("https://dns.example/x", Trust::System)
        );
        for (settings, trust) in [
            (
                r#""ca_file": "/etc/ca.pem""#,
                Trust::File("/etc/ca.pem".into()),
            ),
            (
                r#""ca_file": "", "insecure_skip_verify": true"#,
                Trust::Anyone,
            ),
            (r#""insecure_skip_verify": false"#, Trust::System),
        ] {
            let text = format!(
                r#"[{{"domain": "x.", "source": {{"type": "http", "url": "https://dns.example", {settings}}}}}]"#
            );
            assert_eq!(
                parse(&text).unwrap()[0].source,
                server("https://dns.example", trust),
                "{settings}"
            );
        }
        assert_eq!(handlers[2].source, HandlerSource::Deny(Denial::Nxdomain));
        assert_eq!(
            (&handlers[2].domain, handlers[2].cache),
            (&Name::root(), false)
        );
        assert_eq!(handlers[3].source, HandlerSource::Deny(Denial::Refused));
        assert_eq!(parse("[]"), Ok(vec![]));
        assert_eq!(parse("null"), Ok(vec![]));
    }

    #[test]
    fn the_last_of_several_counts() {
        let deny = br#"[{"domain": "a.", "source": {"type": "deny", "response": "REFUSED"}}]"#;
        let dns = br#"[{"domain": "A", "source": {"type": "dns", "recursors": ["1.2.3.4"]}}]"#;
        let handlers = Handlers::parse([("1.json", &deny[..]), ("2.json", dns)])
            .whole()
            .unwrap();
        assert_eq!(handlers.len(), 1);
        assert_eq!(
            handlers[0].source,
            HandlerSource::Dns(vec!["1.2.3.4:53".to_owned()])
        );
    }

    #[test]
    fn every_wrong_handler_is_reported() {
        let files = [
            (
                "1.json",
                &br#"[{"source": {"type": "file"}}, {"domain": "a.", "source": {"type": "deny"}}, 7]"#[..],
            ),
            ("2.json", br#"[{"domain": "b.", "source": {"type": "deny"}}]"#),
            ("3.json", br#"[{"domain": "c.", "source": {"type": "deny"}, "cache": 1}]"#),
        ];
        let ParsedFiles { valid, errors } = Handlers::parse(files);
        let domains: Vec<String> = valid
            .iter()
            .map(|handler| handler.domain.to_string())
            .collect();
        assert_eq!(domains, ["b."]);
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        let expected = [
            "1.json: handlers[0].domain: is missing",
            "1.json: handlers[0].source.type: \"file\"",
            "1.json: handlers[2]: is 7",
            "3.json: handlers[0].cache: is 1",
        ];
        assert_eq!(errors.len(), expected.len(), "{errors:?}");
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn errors_name_file_and_place() {
        for (text, expected) in [
            ("", "h.json: is not JSON"),
            ("[}", "h.json: is not JSON"),
            (
                r#"{"domain": "x."}"#,
                "h.json: is an object; expected a list of handlers",
            ),
            ("[1]", "h.json: handlers[0]: is 1; expected an object"),
            (
                r#"[{"source": {"type": "deny"}}]"#,
                "h.json: handlers[0].domain: is missing",
            ),
            (
                r#"[{"domain": "a..b", "source": {"type": "deny"}}]"#,
                "h.json: handlers[0].domain: \"a..b\"",
            ),
            (
                r#"[{"domain": "x.", "source": {}}]"#,
                "h.json: handlers[0].source.type: is missing",
            ),
            (
                r#"[{"domain": "x."}]"#,
                "h.json: handlers[0].source.type: is missing",
            ),
            (
                r#"[{"domain": "x.", "source": {"type": "file"}}]"#,
                "h.json: handlers[0].source.type: \"file\"",
            ),
            (
                r#"[{"domain": "x.", "source": {"type": "dns"}}]"#,
                "h.json: handlers[0].source.recursors: is empty",
            ),
            (
                r#"[{"domain": "x.", "source": {"type": "dns", "recursors": ["[::1]"]}}]"#,
                "h.json: handlers[0].source.recursors: \"[::1]\"",
            ),
            (
                r#"[{"domain": "x.", "source": {"type": "http"}}]"#,
                "h.json: handlers[0].source.url: is missing",
            ),
            (
                r#"[{"domain": "x.", "source": {"type": "http", "url": "ftp://x"}}]"#,
                "h.json: handlers[0].source.url: \"ftp://x\"",
            ),
            (
                r#"[{"domain": "x.", "source": {"type": "http", "url": "https://x", "ca_file": "/ca.pem", "insecure_skip_verify": true}}]"#,
                "h.json: handlers[0].source.insecure_skip_verify: contradicts",
            ),
            (
                r#"[{"domain": "x.", "source": {"type": "deny", "response": "SERVFAIL"}}]"#,
                "h.json: handlers[0].source.response: \"SERVFAIL\"",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }

    #[tokio::test]
    async fn unchanged_handlers_keep_their_source() {
        let text = r#"{"address": "127.0.0.1", "port": 53}"#;
        let config = Config::parse("config.json", text.as_bytes())
            .unwrap()
            .config;
        let handler = |domain: &str, recursor: &str, cache| HandlerConfig {
            domain: domain.parse().unwrap(),
            source: HandlerSource::Dns(vec![recursor.to_owned()]),
            cache,
        };
        let denying = HandlerConfig {
            source: HandlerSource::Deny(Denial::Refused),
            ..handler("no.", "", true)
        };
        let first = vec![
            handler("a.", "192.0.2.1:53", true),
            handler("b.", "192.0.2.1:53", false),
            denying,
        ];
        let second = vec![
            handler("a.", "192.0.2.1:53", true),
            handler("b.", "192.0.2.2:53", false),
        ];
        let interfaces = crate::NoInterfaces::shared();
        let hosts = Arc::default();
        let none = Handlers::default();
        let before = Handlers::new(first.clone(), &config, &none, &hosts, &interfaces);
        let after = Handlers::new(second.clone(), &config, &before, &hosts, &interfaces);
        for (handlers, expected) in [(&before, first), (&after, second)] {
            let mut found = handlers.configs();
            found.sort_by_key(|handler| handler.domain.to_string());
            assert_eq!(found, expected);
        }
        let source = |handlers: &Handlers, domain: &str| {
            let domain: Name = domain.parse().unwrap();
            handlers.by_domain[&domain].source.clone()
        };
        for (domain, is_kept, has_cache) in [("a.", true, true), ("b.", false, false)] {
            let [before, after] = [&before, &after].map(|handlers| source(handlers, domain));
            let same = std::ptr::eq(before.forwarder().unwrap(), after.forwarder().unwrap());
            assert_eq!(same, is_kept, "{domain}");
            assert_eq!(after.cache().is_some(), has_cache, "{domain}");
        }
        assert!(
            source(&before, "no.").cache().is_none(),
            "nothing to look up"
        );
        assert_eq!((before.sources().count(), after.sources().count()), (3, 2));
    }

    #[test]
    fn errors_name_the_remedy() {
        for (source, expected) in [
            (
                r#"{"type": "http", "url": ""}"#,
                "source.url: is missing; expected a URL such as \"http://10.0.0.1:8081/path\" or \"https://dns.example\"",
            ),
            (
                r#"{"type": "http", "url": "ftp://x"}"#,
                "source.url: \"ftp://x\" has an unsupported scheme; expected a URL such as \
                 \"http://10.0.0.1:8081/path\" or \"https://dns.example\"",
            ),
            (
                r#"{"type": "dns", "recursors": []}"#,
                "source.recursors: is empty; a handler of type \"dns\" needs at least one",
            ),
            (
                r#"{"type": "http", "url": "http://x", "ca_file": "a", "insecure_skip_verify": true}"#,
                "source.insecure_skip_verify: contradicts `ca_file`; remove one of them",
            ),
            (
                "{}",
                "source.type: is missing; expected \"dns\", \"http\" or \"deny\"",
            ),
        ] {
            let text = format!(r#"[{{"domain": "x.", "source": {source}}}]"#);
            let expected = format!("h.json: handlers[0].{expected}");
            assert_eq!(parse(&text).unwrap_err(), expected, "{source}");
        }
        let unnamed = parse(r#"[{"domain": "", "source": {"type": "deny"}}]"#).unwrap_err();
        assert_eq!(
            unnamed,
            "h.json: handlers[0].domain: is missing; expected a domain such as \"corp.example.\", or \".\" for all"
        );
    }
}
