//! The configuration file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use dns_core::config::TlsFiles;

use crate::{
    record::RecordType,
    text::{self, Problem, Problems, Reader},
    webhook::Domains,
};

/// Path of the configuration unless `--config` is given.
pub const USUAL: &str = "/etc/bosh-dns-xdp/publish.yml";

/// Address that external-dns expects.
const WEBHOOK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8888);

/// The configuration with all defaults applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Files and folders of documents.
    pub documents: Vec<PathBuf>,
    /// `config.json` of the DNS server, with the paths of records, aliases and control socket.
    pub server: Option<PathBuf>,
    /// Folder of the store.
    pub store: PathBuf,
    /// Path of the control socket.
    pub socket: PathBuf,
    /// Group that may connect to the control socket.
    pub group: Option<String>,
    /// API by mutual TLS.
    pub api: Option<ApiConfig>,
    /// Server of external-dns's webhook protocol for fleet names.
    pub webhook: Option<WebhookConfig>,
    /// Address of metrics and health.
    pub metrics: Option<SocketAddr>,
    /// Record types to manage.
    pub managed: BTreeSet<RecordType>,
    /// File with the AES-256 key of ownership records: 32 octets, or their base64.
    pub txt_encryption_key: Option<PathBuf>,
    /// Settings of providers, by `PROJECT/RECORD`, that are not parameters of document 003.
    pub provider_settings: BTreeMap<String, BTreeMap<String, String>>,
}

/// API by mutual TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiConfig {
    /// Address to listen on.
    pub address: SocketAddr,
    /// Certificate, key and CA of the API.
    pub tls: TlsFiles,
    /// Common names of clients; `None` admits every certificate of the CA.
    pub clients: Option<Vec<String>>,
}

/// Server of external-dns's webhook protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookConfig {
    /// Loopback address to listen on: external-dns does not authenticate itself.
    pub address: SocketAddr,
    /// Names that external-dns may write.
    pub domains: Domains,
    /// Alias file of the DNS server that holds the names.
    pub alias_file: PathBuf,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            documents: vec![PathBuf::from("/etc/bosh-dns-xdp/publish.d")],
            server: None,
            store: PathBuf::from("/var/lib/bosh-dns-publish/store"),
            socket: PathBuf::from("/run/bosh-dns-publish/control.sock"),
            group: None,
            api: None,
            webhook: None,
            metrics: None,
            managed: RecordType::DEFAULT_MANAGED.into(),
            txt_encryption_key: None,
            provider_settings: BTreeMap::new(),
        }
    }
}

impl Config {
    /// Reads a configuration file.
    pub fn load(path: &Path) -> Result<Self, Vec<Problem>> {
        let problems = Problems::of(path.display().to_string());
        match fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, problems),
            Err(error) => {
                problems.add(
                    1,
                    "",
                    format!("cannot be read: {error}"),
                    "correct the path in --config",
                );
                Err(problems.into_vec())
            }
        }
    }

    /// Parses a configuration. Relative paths are resolved against the working directory.
    pub fn parse(text: &str, problems: Problems) -> Result<Self, Vec<Problem>> {
        let mut config = Self::default();
        match text::documents(text)[..] {
            // An empty file means all defaults.
            [] => {}
            [document] => {
                if let Some(node) = text::parse(document, &problems) {
                    config.read(&Reader::root(&node, &problems));
                }
            }
            // Which of the two would apply is not obvious.
            [_, second, ..] => problems.add(
                second.line,
                "",
                "the file contains a second document",
                "keep one configuration",
            ),
        }
        let found = problems.into_vec();
        if found.is_empty() {
            Ok(config)
        } else {
            Err(found)
        }
    }

    fn read(&mut self, root: &Reader<'_>) -> Option<()> {
        let mut fields = root.fields()?;
        if let Some(list) = fields.optional("documents") {
            self.documents = list.texts().into_iter().map(PathBuf::from).collect();
        }
        self.server = fields.optional_as("server", read_path);
        if let Some(store) = fields.optional_as("store", read_path) {
            self.store = store;
        }
        if let Some(mut control) = fields.optional_as("control", Reader::fields) {
            if let Some(socket) = control.optional_as("socket", read_path) {
                self.socket = socket;
            }
            self.group = control.optional_as("group", Reader::owned_text);
            control.finish();
        }
        self.api = fields.optional_as("api", read_api);
        if let Some(webhook) = fields.optional("webhook") {
            self.webhook = read_webhook(&webhook);
            // Without the server's files it is unknown which targets of CNAMEs the fleet has.
            if self.server.is_none() {
                webhook.problem(
                    "fleet names need \"server\"",
                    "set it to the DNS server's config.json",
                );
            }
        }
        if let Some(mut metrics) = fields.optional_as("metrics", Reader::fields) {
            self.metrics = metrics.required_as("address", read_address);
            metrics.finish();
        }
        if let Some(list) = fields.optional("managed_record_types") {
            let items = list.items().into_iter().flatten();
            self.managed = items.filter_map(|item| read_type(&item)).collect();
        }
        self.txt_encryption_key = fields.optional_as("txt_encryption_key_file", read_path);
        if let Some(mut providers) = fields.optional_as("provider_settings", Reader::fields) {
            for (name, settings) in providers.others() {
                let settings = settings.text_map().unwrap_or_default();
                self.provider_settings.insert(name.to_owned(), settings);
            }
        }
        fields.finish();
        Some(())
    }
}

fn read_api(reader: &Reader<'_>) -> Option<ApiConfig> {
    let mut fields = reader.fields()?;
    let address = fields.required_as("address", read_address);
    let certificate = fields.required_as("certificate_file", read_path);
    let private_key = fields.required_as("private_key_file", read_path);
    let ca = fields.required_as("ca_file", read_path);
    // Absent and empty differ: without the member every certificate of the CA is admitted, with an
    // empty list none.
    let clients = fields.optional("clients").map(|clients| clients.texts());
    fields.finish();
    // After `finish`, so that all problems are reported at once, not one in each attempt.
    let tls = TlsFiles {
        certificate: certificate?,
        private_key: private_key?,
        ca: ca?,
    };
    Some(ApiConfig {
        address: address?,
        tls,
        clients,
    })
}

fn read_webhook(reader: &Reader<'_>) -> Option<WebhookConfig> {
    let mut fields = reader.fields()?;
    let address = match fields.optional("address") {
        Some(address) => read_loopback(&address),
        None => Some(WEBHOOK),
    };
    let domains = Domains {
        include: read_names(fields.optional("domains")),
        exclude: read_names(fields.optional("exclude_domains")),
        regex_include: fields
            .optional_as("regex_domain_filter", Reader::owned_text)
            .unwrap_or_default(),
        regex_exclude: fields
            .optional_as("regex_domain_exclusion", Reader::owned_text)
            .unwrap_or_default(),
    };
    if let Err(error) = domains.filter() {
        reader.problem(
            error.to_string(),
            "correct it; external-dns would refuse the filter",
        );
    } else if domains.include.is_empty() && domains.regex_include.is_empty() {
        // Without a filter, a cluster could write any name that the fleet resolves.
        reader.problem(
            "no domain is named",
            "name the domains that external-dns may write to in \"domains\"",
        );
    }
    let alias_file = fields.required_as("alias_file", read_path);
    fields.finish();
    Some(WebhookConfig {
        address: address?,
        domains,
        alias_file: alias_file?,
    })
}

fn read_loopback(reader: &Reader<'_>) -> Option<SocketAddr> {
    let address = read_address(reader)?;
    if !address.ip().is_loopback() {
        reader.problem(
            "external-dns does not authenticate itself, so only this machine may connect",
            "use 127.0.0.1, and an authenticated tunnel from other machines",
        );
    }
    Some(address)
}

fn read_names(list: Option<Reader<'_>>) -> Vec<String> {
    let mut names = Vec::new();
    for item in list.and_then(|list| list.items()).into_iter().flatten() {
        if let Some(name) = crate::endpoint::read_name(&item) {
            names.push(name.to_string());
        }
    }
    names
}

fn read_path(reader: &Reader<'_>) -> Option<PathBuf> {
    reader.filled_text().map(PathBuf::from)
}

fn read_address(reader: &Reader<'_>) -> Option<SocketAddr> {
    let text = reader.filled_text()?;
    // external-dns writes `:7979` for every address.
    let full = if text.starts_with(':') {
        format!("[::]{text}")
    } else {
        text.to_owned()
    };
    let address = full
        .parse()
        .map_err(|_| format!("{text:?} is not an address with a port"));
    reader.accept(address, "write it as 127.0.0.1:7979")
}

fn read_type(reader: &Reader<'_>) -> Option<RecordType> {
    let parsed = reader.filled_text()?.parse::<RecordType>();
    reader.accept(parsed, "use record types such as A, AAAA and CNAME")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, Vec<String>> {
        Config::parse(text, Problems::of("publish.yml"))
            .map_err(|problems| problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn empty_file_means_defaults() {
        assert_eq!(parse("# nothing\n"), Ok(Config::default()));
    }

    #[test]
    fn every_member_is_read() {
        let config = parse(
            "documents: [a.yml, d]\nserver: config.json\nstore: s\ncontrol: {socket: c, group: g}\n\
             api: {address: '127.0.0.1:1', certificate_file: a, private_key_file: b, ca_file: c, clients: [x]}\n\
             webhook: {address: '127.0.0.1:2', domains: [Apps.internal.], exclude_domains: [x.apps.internal], \
             alias_file: f}\n\
             metrics: {address: ':7979'}\nmanaged_record_types: [A, TXT]\ntxt_encryption_key_file: k\n\
             provider_settings: {shop/bind: {rfc2136-port: '5300'}, shop/etcd: {}}\n",
        );
        let port = ("rfc2136-port".to_owned(), "5300".to_owned());
        let expected = Config {
            documents: vec![PathBuf::from("a.yml"), PathBuf::from("d")],
            server: Some(PathBuf::from("config.json")),
            store: PathBuf::from("s"),
            socket: PathBuf::from("c"),
            group: Some("g".to_owned()),
            api: Some(ApiConfig {
                address: "127.0.0.1:1".parse().unwrap(),
                tls: TlsFiles {
                    certificate: PathBuf::from("a"),
                    private_key: PathBuf::from("b"),
                    ca: PathBuf::from("c"),
                },
                clients: Some(vec!["x".to_owned()]),
            }),
            webhook: Some(WebhookConfig {
                address: "127.0.0.1:2".parse().unwrap(),
                domains: Domains {
                    include: vec!["apps.internal".to_owned()],
                    exclude: vec!["x.apps.internal".to_owned()],
                    ..Domains::default()
                },
                alias_file: PathBuf::from("f"),
            }),
            metrics: Some("[::]:7979".parse().unwrap()),
            managed: BTreeSet::from([RecordType::A, RecordType::TXT]),
            txt_encryption_key: Some(PathBuf::from("k")),
            provider_settings: BTreeMap::from([
                ("shop/bind".to_owned(), BTreeMap::from([port])),
                ("shop/etcd".to_owned(), BTreeMap::new()),
            ]),
        };
        assert_eq!(config, Ok(expected));
    }

    #[test]
    fn absent_members_have_defaults() {
        let config =
            parse("server: c\ncontrol: {}\nwebhook: {regex_domain_filter: a, alias_file: f}\n")
                .unwrap();
        let webhook = WebhookConfig {
            address: "127.0.0.1:8888".parse().unwrap(),
            domains: Domains {
                regex_include: "a".to_owned(),
                ..Domains::default()
            },
            alias_file: PathBuf::from("f"),
        };
        let expected = Config {
            server: Some(PathBuf::from("c")),
            webhook: Some(webhook),
            ..Config::default()
        };
        assert_eq!(config, expected);
        let api =
            "api: {address: '127.0.0.1:1', certificate_file: a, private_key_file: b, ca_file: c";
        for (clients, expected) in [("", None), (", clients: []", Some(Vec::new()))] {
            let config = parse(&format!("{api}{clients}}}\n")).unwrap();
            assert_eq!(config.api.unwrap().clients, expected);
        }
        let usual = Config::default();
        assert_eq!(
            usual.documents,
            [PathBuf::from("/etc/bosh-dns-xdp/publish.d")]
        );
        assert_eq!(
            usual.store,
            PathBuf::from("/var/lib/bosh-dns-publish/store")
        );
        assert_eq!(
            usual.socket,
            PathBuf::from("/run/bosh-dns-publish/control.sock")
        );
    }

    #[test]
    fn every_mistake_is_described() {
        for (text, expected) in [
            (
                "metrics: {address: 127.0.0.1}\n",
                &[
                    "f:1: metrics.address: \"127.0.0.1\" is not an address with a port; write it as 127.0.0.1:7979",
                ][..],
            ),
            (
                "metrics: {}\n",
                &["f:1: metrics: member \"address\" is missing; add \"address\""],
            ),
            (
                "metrics: {address: ':1', port: 1}\n",
                &[
                    "f:1: metrics.port: unknown member \"port\"; remove it; known members are address",
                ],
            ),
            (
                "control: {sockets: x}\n",
                &[
                    "f:1: control.sockets: unknown member \"sockets\"; did you mean \"socket\"? If not, remove it",
                ],
            ),
            (
                "managed_record_types: [A, X]\n",
                &[
                    "f:1: managed_record_types[1]: unknown record type \"X\"; use A, AAAA, CNAME, DNAME, TXT, SRV, NS, PTR, \
                   MX, NAPTR or TYPE<number>; use record types such as A, AAAA and CNAME",
                ],
            ),
            (
                "provider_settings: {a: {b: 1}}\n",
                &["f:1: provider_settings.a.b: 1 instead of text; put it in quotes: \"1\""],
            ),
            (
                "server: c\nwebhook: {alias_file: f}\n",
                &[
                    "f:2: webhook: no domain is named; name the domains that external-dns may write to in \"domains\"",
                ],
            ),
            (
                "server: c\nwebhook: {domains: [a], regex_domain_exclusion: b, alias_file: f}\n",
                &[
                    "f:2: webhook: the domain filter has suffixes and regular expressions; use either; correct it; \
                   external-dns would refuse the filter",
                ],
            ),
            (
                "server: c\nwebhook: {domains: [a], address: '10.0.0.1:1', alias_file: f}\n",
                &[
                    "f:2: webhook.address: external-dns does not authenticate itself, so only this machine may connect; \
                   use 127.0.0.1, and an authenticated tunnel from other machines",
                ],
            ),
            (
                "webhook: {domains: [a], alias_file: f}\n",
                &[
                    "f:1: webhook: fleet names need \"server\"; set it to the DNS server's config.json",
                ],
            ),
            (
                "api: {address: '127.0.0.1:1', clients: x, more: y}\n",
                &[
                    "f:1: api: member \"certificate_file\" is missing; add \"certificate_file\"",
                    "f:1: api: member \"private_key_file\" is missing; add \"private_key_file\"",
                    "f:1: api: member \"ca_file\" is missing; add \"ca_file\"",
                    "f:1: api.clients: the text \"x\" instead of a list; give a list",
                    "f:1: api.more: unknown member \"more\"; remove it; known members are address, certificate_file, \
                     private_key_file, ca_file, clients",
                ],
            ),
        ] {
            let problems = Config::parse(text, Problems::of("f")).unwrap_err();
            let found: Vec<String> = problems.iter().map(Problem::to_string).collect();
            assert_eq!(found, expected, "{text}");
        }
        let missing = Config::load(Path::new("/nowhere/publish.yml")).unwrap_err();
        assert_eq!(
            missing[0].to_string(),
            "/nowhere/publish.yml:1: cannot be read: No such file or directory (os error 2); correct the path in --config"
        );
        assert_eq!(missing.len(), 1);
    }

    #[test]
    fn mistakes_have_line_and_remedy() {
        let problems = parse(
            "document: [a]\nmetrics: {address: 7979}\napi: {address: x}\n\
             webhook: {address: '0.0.0.0:8888', domains: [], alias_file: f}\n",
        )
        .unwrap_err();
        for expected in [
            "publish.yml:4: webhook: fleet names need",
            "webhook.address: external-dns does not",
            "no domain",
        ] {
            assert!(
                problems.iter().any(|problem| problem.contains(expected)),
                "{expected}: {problems:#?}"
            );
        }
        assert!(
            problems
                .iter()
                .any(|problem| problem.starts_with("publish.yml:1: document: ")
                    && problem.contains("did you mean \"documents\"?")),
            "{problems:#?}"
        );
        assert!(
            problems
                .iter()
                .any(|problem| problem.starts_with("publish.yml:2: metrics.address: "))
        );
        assert!(
            problems
                .iter()
                .any(|problem| problem.contains("\"ca_file\" is missing"))
        );
    }

    #[test]
    fn addresses_may_lack_a_host() {
        let metrics = |address: &str| {
            let text = format!("metrics: {{address: {address}}}");
            Config::parse(&text, Problems::of("f")).map(|config| config.metrics)
        };
        for (text, expected) in [
            ("':7979'", "[::]:7979"),
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("'[::1]:2'", "[::1]:2"),
        ] {
            assert_eq!(
                metrics(text).unwrap(),
                Some(expected.parse().unwrap()),
                "{text}"
            );
        }
        for text in ["localhost:1", "127.0.0.1", "''"] {
            assert!(metrics(text).is_err(), "{text}");
        }
        let two = Config::parse("---\nstore: /a\n---\nstore: /b\n", Problems::of("f"));
        assert_eq!(
            two.unwrap_err()[0].to_string(),
            "f:3: the file contains a second document; keep one configuration"
        );
    }
}
