//! Name servers that accept updates by RFC 2136, such as BIND and Knot.
//!
//! A zone is listed by AXFR, which must be complete and correctly signed. An update requires the
//! listed sets, so it either finds the planned state or changes nothing.

mod messages;
#[cfg(test)]
mod tests;
mod tsig;

use std::{
    any::Any,
    collections::{BTreeSet, HashMap},
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use futures_util::future::{BoxFuture, select_ok};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader},
    net::{TcpStream, lookup_host},
    time::{sleep, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

pub use self::{
    messages::DEFAULT_TTL,
    tsig::{Algorithm, TsigKey},
};
use self::{
    messages::{
        ChangedSet, Encoded, ListedTexts, MessageReader, TYPE_AXFR, Transfer, TransferError,
        WireError, changed_sets,
    },
    tsig::TsigError,
};
use super::{
    Batch, Definition, GroupSender, Loading, Parameter,
    ParameterKind::{Boolean, List, Secret, Switch, Text},
    Parameters, Progress, Provider, ProviderError, ProviderSettings, Results, TlsFiles,
    Transaction, TransactionResult, Zone, elements, load, not_made, send_groups, settings,
    try_next, unfit,
};
use crate::record::{Name, Record};

/// Timeout of a connection or a message.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time of a transfer, or of the queries that read changes back, in timeouts of a message. A server that sends
/// a little at a time would otherwise hold a round for ever.
const MAX_EXCHANGE: u32 = 60;

/// Maximum number of messages that wait for their responses. The octets of so many queries fit into the buffers of a
/// connection, so neither side waits for the other to read.
const MAX_PIPELINED: usize = 128;

/// Response code of a failure within the server.
const SERVFAIL: u8 = 2;

/// Number of records in a set that BIND 9.18 accepts by default (`max-records-per-type`).
const COMMON_LIMIT: usize = 100;

pub(super) const DEFINITION: Definition = Definition {
    parameters: &[
        Parameter::new("rfc2136-host", Text),
        Parameter::new("rfc2136-zone", List),
        Parameter::new("rfc2136-insecure", Boolean),
        Parameter::new("rfc2136-tsig-keyname", Text),
        Parameter::new("rfc2136-tsig-secret", Secret),
        Parameter::new("rfc2136-tsig-secret-alg", Text),
        Parameter::new("rfc2136-tsig-axfr", Switch).ignored(
            "has no effect here: zones are always listed by AXFR, signed if there is a key",
        ),
    ],
    required: &["rfc2136-host", "rfc2136-zone"],
    settings: &["rfc2136-min-ttl", "rfc2136-port"],
    // Without a listing external-dns never deletes anything.
    switches: &["rfc2136-tsig-axfr"],
    obstacles,
    arguments,
    ..Definition::new("rfc2136", |parameters| {
        Ok(Box::new(Rfc2136Settings::from_parameters(parameters)?))
    })
};

fn obstacles(parameters: &Parameters) -> Vec<String> {
    let mut found = Vec::new();
    let algorithm = parameters.text("rfc2136-tsig-secret-alg");
    let algorithm = algorithm.unwrap_or_default().to_ascii_lowercase();
    if algorithm.trim_end_matches('.') == "gss-tsig" {
        found.push(
            "the provider rfc2136 does not support GSS-TSIG in bosh-dns-publish; use a shared key \
             (hmac-sha256), or run external-dns itself (bosh-dns-publish render)"
                .to_owned(),
        );
        return found;
    }
    // Messages are not signed, so a key that is left in the record may be anything.
    if parameters.text("rfc2136-insecure") == Some("true") {
        return found;
    }
    for name in ["rfc2136-tsig-keyname", "rfc2136-tsig-secret"] {
        if parameters.text(name).is_none() {
            found.push(format!(
                "{name} is missing; add it, or set rfc2136-insecure to true"
            ));
        }
    }
    if let Some(secret) = parameters.text("rfc2136-tsig-secret")
        && STANDARD.decode(secret).is_err()
    {
        // The secret itself must not appear in messages.
        found.push(
            "rfc2136-tsig-secret is not base64; copy it from the server's key file".to_owned(),
        );
    }
    if !algorithm.is_empty()
        && let Err(error) = algorithm.parse::<Algorithm>()
    {
        found.push(error.to_string());
    }
    found
}

/// Formats the hosts, whose port and protocol are separate flags.
fn arguments(name: &str, text: &str) -> Option<Vec<String>> {
    if name != "rfc2136-host" {
        return None;
    }
    let mut arguments = Vec::new();
    let mut common_port = None;
    let mut any_tls = false;
    for text in elements(text) {
        let Server { host, port, tls } = Server::split(text)?;
        arguments.push(format!("--rfc2136-host={host}"));
        common_port = common_port.or(Some(port));
        any_tls |= tls;
    }
    // external-dns has one port for all hosts, by default 0: the first one's.
    if let Some(port) = common_port {
        arguments.push(format!("--rfc2136-port={port}"));
    }
    // A flag for TLS in place of the scheme, for all hosts as well: rather TLS for one that has none than plain text for
    // one that has it.
    if any_tls {
        arguments.push("--rfc2136-use-tls".to_owned());
    }
    Some(arguments)
}

/// Settings of one server.
#[derive(Debug, Clone)]
pub struct Rfc2136Settings {
    /// Servers that accept updates, at least one; the first reachable one is used.
    pub servers: Vec<Server>,
    /// Zones to publish to.
    pub zones: Vec<Name>,
    /// Key for signing messages; `None` to send them unsigned.
    pub key: Option<TsigKey>,
    /// Minimum TTL of published records in seconds.
    pub min_ttl: u32,
    /// Certificates for DNS over TLS.
    pub files: TlsFiles,
    /// Timeout of a connection or a message.
    pub timeout: Duration,
    /// Clock for the time in signatures.
    pub clock: fn() -> SystemTime,
}

impl Rfc2136Settings {
    /// Parses the parameters `rfc2136-*`, and `tls-*` if the host is `tls://`.
    pub fn from_parameters(parameters: &Parameters) -> Result<Self, ProviderError> {
        let mut servers = Vec::new();
        for text in parameters.list("rfc2136-host") {
            let mut server = Server::parse(text)?;
            // The setting wins, as external-dns's flag, whose host has no port.
            let port = parameters.number("rfc2136-port", server.port.into())?;
            server.port =
                u16::try_from(port).map_err(|_| settings("rfc2136-port is above 65535"))?;
            servers.push(server);
        }
        if servers.is_empty() {
            return Err(settings("rfc2136-host is missing; set it"));
        }
        let mut zones = Vec::new();
        for zone in parameters.list("rfc2136-zone") {
            let zone = Name::parse(zone);
            let zone = zone.map_err(|error| settings(format!("rfc2136-zone: {error}")))?;
            // A zone that is listed twice would have two plans, of which only the first one is applied.
            if !zones.contains(&zone) {
                zones.push(zone);
            }
        }
        if zones.is_empty() {
            return Err(settings(
                "rfc2136-zone is missing; name the zones to update",
            ));
        }
        let key = if parameters.flag("rfc2136-gss-tsig")? {
            return Err(settings(
                "rfc2136 does not support GSS-TSIG (rfc2136-gss-tsig); use a TSIG key",
            ));
        } else if parameters.flag("rfc2136-insecure")? {
            None
        } else {
            let algorithm = parameters
                .text("rfc2136-tsig-secret-alg")
                .unwrap_or("hmac-sha256")
                .parse()?;
            let name = parameters.required("rfc2136-tsig-keyname")?;
            Some(TsigKey::new(
                name,
                algorithm,
                parameters.required("rfc2136-tsig-secret")?,
            )?)
        };
        Ok(Self {
            servers,
            zones,
            key,
            min_ttl: parameters.ttl("rfc2136-min-ttl")?,
            files: TlsFiles::from_parameters(parameters)?,
            timeout: TIMEOUT,
            clock: SystemTime::now,
        })
    }

    fn server(&self) -> &Server {
        // `from_parameters` requires a server.
        &self.servers[0]
    }
}

impl ProviderSettings for Rfc2136Settings {
    fn open(self: Box<Self>) -> Result<Box<dyn Provider>, ProviderError> {
        Ok(Box::new(Rfc2136::new(*self)))
    }

    /// Returns the zones that both update at the same server. Host names are compared without case.
    fn shared_zones(&self, other: &dyn Any) -> Vec<Name> {
        let Some(other) = other.downcast_ref::<Self>() else {
            return Vec::new();
        };
        let has_server = self
            .servers
            .iter()
            .any(|one| other.servers.iter().any(|other| one.is_same(other)));
        if !has_server {
            return Vec::new();
        }
        let mut zones = self.zones.clone();
        zones.retain(|zone| other.zones.contains(zone));
        zones
    }
}

/// Provider for one server and its substitutes.
pub struct Rfc2136 {
    settings: Rfc2136Settings,
    /// TXT data of the last transfer of each zone.
    texts: HashMap<Name, ListedTexts>,
    /// Number of record sets in the last transfer of each zone.
    listed: HashMap<Name, usize>,
    loading: Loading<ClientConfig>,
}

impl Rfc2136 {
    /// Creates a provider without sending a request.
    pub fn new(settings: Rfc2136Settings) -> Self {
        Self {
            settings,
            texts: HashMap::new(),
            listed: HashMap::new(),
            loading: Loading::default(),
        }
    }

    /// Connects to the first reachable server, which then comes first in the order.
    async fn connect(&mut self, zone: &Name) -> Result<Connection, ProviderError> {
        let mut result = self.connect_first(zone).await;
        for _ in 1..self.settings.servers.len() {
            if !try_next(&mut self.settings.servers, &result) {
                break;
            }
            result = self.connect_first(zone).await;
        }
        result
    }

    async fn connect_first(&self, zone: &Name) -> Result<Connection, ProviderError> {
        let connected = Connection::open(&self.settings, &self.loading).await;
        connected.map_err(|failure| failure.of(self.settings.server(), zone))
    }

    /// Lists one zone; if a server fails during the transfer, from the next one.
    ///
    /// A serial number is no proof that a listing is still valid: a server may delay its increment
    /// (RFC 2136, section 3.6), and some never increment it.
    async fn list_zone(&mut self, apex: &Name) -> Result<Vec<Record>, ProviderError> {
        // If the transfer fails, the texts of the last one are out of date.
        self.texts.remove(apex);
        let mut result = self.transfer(apex).await;
        for _ in 1..self.settings.servers.len() {
            if !try_next(&mut self.settings.servers, &result) {
                break;
            }
            result = self.transfer(apex).await;
        }
        let (records, texts) = result?;
        self.texts.insert(apex.clone(), texts);
        self.listed.insert(apex.clone(), records.len());
        Ok(records)
    }

    async fn transfer(&self, apex: &Name) -> Result<(Vec<Record>, ListedTexts), ProviderError> {
        let mut connection = self.connect_first(apex).await?;
        let id = fastrand::u16(..);
        let query = messages::question(id, 0, apex, TYPE_AXFR);
        let mut transfer = Transfer::new(apex, id);
        let asked = connection.ask(
            std::iter::once(query),
            self.settings.key.as_ref(),
            |_, message: &[u8]| Ok(transfer.take(message)?),
        );
        let asked = within(self.settings.timeout * MAX_EXCHANGE, asked).await;
        let finished = asked.and_then(|()| Ok(transfer.finish()?));
        finished.map_err(|failure| failure.of(self.settings.server(), apex))
    }

    async fn apply_all(&mut self, batch: &Batch, progress: Progress<'_>) -> Vec<TransactionResult> {
        let Some(zone) = self
            .settings
            .zones
            .iter()
            .find(|zone| zone.as_str() == batch.zone)
            .cloned()
        else {
            let error = settings(format!("no zone {}", batch.zone));
            return vec![TransactionResult::Failed(error); batch.transactions.len()];
        };
        let nothing = ListedTexts::new();
        let listed = self.texts.get(&zone).unwrap_or(&nothing);
        let mut encoded = Vec::with_capacity(batch.transactions.len());
        for transaction in &batch.transactions {
            let made = match Encoded::new(&zone, transaction, listed) {
                // Never divided: the server applies each message on its own.
                Ok(made) if made.fits() => Ok(made),
                Ok(_) => Err(unfit(&transaction.name, "the change exceeds 64,000 octets")),
                Err(error) => Err(unfit(&transaction.name, error.to_string())),
            };
            encoded.push(made.map_err(TransactionResult::Failed));
        }
        let mut sender = UpdateSender {
            provider: self,
            zone,
            connection: None,
        };
        let mut results = send_groups(&mut sender, encoded, batch.on_conflict, progress).await;
        sender.read_back(&batch.transactions, &mut results).await;
        results
    }
}

impl Provider for Rfc2136 {
    fn adjust(&self, desired: &mut Vec<Record>) {
        for record in desired {
            let least = self.settings.min_ttl;
            if record.ttl.is_some() || least > DEFAULT_TTL {
                record.ttl = Some(record.ttl.unwrap_or(0).max(least));
            }
            // The protocol has none, so they would differ from the listed sets in every round.
            record.properties.clear();
        }
    }

    fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>> {
        Box::pin(async {
            let mut zones = Vec::new();
            for apex in self.settings.zones.clone() {
                let content = self.list_zone(&apex).await;
                zones.push(Zone {
                    content,
                    ..Zone::of(apex)
                });
            }
            Ok(zones)
        })
    }

    fn apply<'a>(&'a mut self, batch: &'a Batch, progress: Progress<'a>) -> Results<'a> {
        Box::pin(self.apply_all(batch, progress))
    }
}

/// Sends the updates of one batch over one connection.
struct UpdateSender<'a> {
    provider: &'a mut Rfc2136,
    zone: Name,
    connection: Option<Connection>,
}

impl GroupSender for UpdateSender<'_> {
    type Item = Encoded;

    fn fitting(&self, transactions: &[Encoded]) -> usize {
        messages::fitting(transactions)
    }

    const WINDOW: usize = 16;

    async fn send(&mut self, groups: &[&[Encoded]]) -> Vec<TransactionResult> {
        let mut codes = vec![None; groups.len()];
        let failure = self.update(groups, &mut codes).await.err();
        // Later messages of the server on this connection answer requests that were given up.
        if failure.is_some() {
            self.connection = None;
        }
        let mut results = Vec::with_capacity(groups.len());
        for (code, group) in codes.into_iter().zip(groups) {
            results.push(match (code, &failure) {
                (Some(code), _) => self.result(code, group),
                (None, Some(error)) => TransactionResult::Failed(error.clone()),
                // Without an error, every message has a response.
                (None, None) => TransactionResult::Conflict,
            });
        }
        results
    }
}

impl UpdateSender<'_> {
    /// Sends one message for each group, and stores the response codes.
    async fn update(
        &mut self,
        groups: &[&[Encoded]],
        codes: &mut [Option<u8>],
    ) -> Result<(), ProviderError> {
        // Connected with the first message: a batch whose transactions are all unfit needs none.
        let connection = match &mut self.connection {
            Some(connection) => connection,
            empty => empty.insert(self.provider.connect(&self.zone).await?),
        };
        // Messages that wait for a response at the same time must have different ids.
        let first = fastrand::u16(..);
        let zone = &self.zone;
        let messages = groups.iter().zip(0_u16..);
        let messages = messages
            .map(|(group, number)| messages::message(first.wrapping_add(number), zone, group));
        let Rfc2136Settings { key, .. } = &self.provider.settings;
        let asked = connection
            .ask(messages, key.as_ref(), |number: usize, message: &[u8]| {
                let header = MessageReader::new(message).header()?;
                if !header.is_response() {
                    return Err(WireError("no response").into());
                }
                codes[number] = Some(header.rcode());
                Ok(true)
            })
            .await;
        asked.map_err(|failure| failure.of(self.provider.settings.server(), &self.zone))
    }

    /// Reads the changed sets of applied transactions back. Those that the server does not show become unproven.
    async fn read_back(&mut self, transactions: &[Transaction], results: &mut [TransactionResult]) {
        // NOERROR is no proof: a server ignores a CNAME beside other data, among others (RFC 2136,
        // section 3.4.2.2).
        let mut sets = Vec::new();
        let mut unproven = BTreeSet::new();
        for (place, transaction) in transactions.iter().enumerate() {
            if results[place] == TransactionResult::Applied {
                unproven.insert(place);
                sets.extend(changed_sets(place, transaction));
            }
        }
        let listed = self.provider.listed.get(&self.zone).copied();
        let is_asked = is_cheaper_than_transfer(sets.len(), listed.unwrap_or(0));
        if let Some(connection) = &mut self.connection
            && is_asked
        {
            let Rfc2136Settings { key, timeout, .. } = &self.provider.settings;
            let asked = connection.unproven(key.as_ref(), &sets);
            // Without the answers everything stays unproven, and the next listing decides.
            if let Ok(found) = within(*timeout * MAX_EXCHANGE, asked).await {
                unproven = found;
            }
        }
        let server = self.provider.settings.server().to_string();
        for place in unproven {
            let name = &transactions[place].name;
            results[place] = TransactionResult::Unproven(not_made(
                &server,
                name,
                "the server ignores such a change silently; see its log and its policy for the name",
            ));
        }
    }

    fn result(&self, code: u8, group: &[Encoded]) -> TransactionResult {
        match code {
            0 => TransactionResult::Applied,
            // A prerequisite failed: YXDOMAIN, YXRRSET, NXRRSET, or NXDOMAIN.
            3 | 6..=8 => TransactionResult::Conflict,
            _ => {
                let server = self.provider.settings.server().to_string();
                let mut reason = format!("zone {}: {}", self.zone, explain(code));
                if let [one] = group {
                    reason = format!("{}: {reason}", one.name);
                    if code == SERVFAIL && one.largest > COMMON_LIMIT {
                        reason = format!(
                            "{}: SERVFAIL; its set of {} records probably exceeds a limit of the server \
                             (max-records-per-type of BIND, by default {COMMON_LIMIT}); raise the limit, or \
                             use fewer targets",
                            one.name, one.largest
                        );
                    }
                }
                TransactionResult::Failed(ProviderError::Refused { server, reason })
            }
        }
    }
}

/// Number of record sets that a transfer brings in about the time of one query.
const RECORDS_PER_QUERY: usize = 4;

/// Returns whether queries cost less than another transfer of a zone with this many records.
fn is_cheaper_than_transfer(queries: usize, records: usize) -> bool {
    queries <= MAX_PIPELINED.max(records / RECORDS_PER_QUERY)
}

/// Failure of an exchange with the server.
enum Failure {
    Settings(ProviderError),
    Unreachable(String),
    BadAnswer(String),
    Refused(String),
}

impl From<ProviderError> for Failure {
    fn from(error: ProviderError) -> Self {
        Self::Settings(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Unreachable(error.to_string())
    }
}

impl From<WireError> for Failure {
    fn from(error: WireError) -> Self {
        Self::BadAnswer(error.to_string())
    }
}

impl From<TsigError> for Failure {
    fn from(error: TsigError) -> Self {
        use TsigError::{Clock, Other, Rejected, UnknownKey};
        match error {
            // The server has answered, and the operator has to mend the key or a clock.
            UnknownKey(_) | Rejected | Clock(_) | Other(_) => Self::Refused(error.to_string()),
            _ => Self::BadAnswer(error.to_string()),
        }
    }
}

impl From<TransferError> for Failure {
    fn from(error: TransferError) -> Self {
        match error {
            TransferError::Code(code) => Self::Refused(explain(code)),
            _ => Self::BadAnswer(error.to_string()),
        }
    }
}

impl Failure {
    /// Adds server and zone to the failure.
    fn of(self, server: &Server, zone: &Name) -> ProviderError {
        let server = server.to_string();
        let zone = format!("zone {zone}");
        match self {
            Self::Settings(error) => error,
            Self::Unreachable(reason) => ProviderError::Unreachable {
                server,
                reason: format!("{zone}: {reason}"),
            },
            Self::BadAnswer(reason) => ProviderError::BadAnswer {
                server,
                reason: format!("{zone}: {reason}"),
            },
            Self::Refused(reason) => ProviderError::Refused {
                server,
                reason: format!("{zone}: {reason}"),
            },
        }
    }
}

/// Returns the name of a response code, and a remedy.
fn explain(code: u8) -> String {
    let text = match code {
        1 => "FORMERR; the server does not understand the message",
        SERVFAIL => "SERVFAIL; see the server's log; its journal may not be writable",
        4 => "NOTIMP; the server accepts no updates; set rfc2136-host to the primary",
        5 => {
            "REFUSED; allow the key to transfer and to update the zone, set rfc2136-host to the primary, or correct a \
             name that the server's check-names rejects"
        }
        9 => "NOTAUTH; the server does not serve the zone; check rfc2136-zone and rfc2136-host",
        10 => "NOTZONE; a name is outside the zone; check rfc2136-zone",
        other => return format!("response code {other}; see the server's log"),
    };
    text.to_owned()
}

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Host name or IP address.
    pub host: String,
    /// TCP port of the server.
    pub port: u16,
    /// Whether messages go over TLS (RFC 9103).
    pub tls: bool,
}

impl Server {
    /// Parses `host`, `host:port`, `[address]:port` or `tls://host:port`.
    pub fn parse(text: &str) -> Result<Self, ProviderError> {
        Self::split(text.trim()).ok_or_else(|| {
            settings(format!(
                "rfc2136-host is {text:?}; write host, host:port, [address]:port or tls://host:port"
            ))
        })
    }

    fn split(text: &str) -> Option<Self> {
        let rest = text.strip_prefix("tls://");
        let tls = rest.is_some();
        let rest = rest.unwrap_or(text);
        let (host, port) = if let Some(rest) = rest.strip_prefix('[') {
            let (host, behind) = rest.split_once(']')?;
            (host, behind.strip_prefix(':'))
        } else if rest.matches(':').count() == 1 {
            let (host, port) = rest.split_once(':')?;
            (host, Some(port))
        } else {
            (rest, None)
        };
        // A URL of another scheme is a mistake, not a host.
        if host.is_empty() || host.contains('/') {
            return None;
        }
        let port = match port {
            Some(port) => port.parse().ok()?,
            // RFC 7858, section 3.1: DNS over TLS has a separate port.
            None if tls => 853,
            None => 53,
        };
        let host = host.to_owned();
        Some(Self { host, port, tls })
    }

    /// Returns whether both name one server, possibly with and without TLS. Host names have no letter case.
    fn is_same(&self, other: &Self) -> bool {
        self.port == other.port && self.host.eq_ignore_ascii_case(&other.host)
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host, port, tls } = self;
        let scheme = if *tls { "tls://" } else { "" };
        if host.contains(':') {
            write!(f, "{scheme}[{host}]:{port}")
        } else {
            write!(f, "{scheme}{host}:{port}")
        }
    }
}

/// A bidirectional byte stream.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {
    fn socket(&self) -> &TcpStream;
}

impl Stream for TcpStream {
    fn socket(&self) -> &TcpStream {
        self
    }
}

impl Stream for TlsStream<TcpStream> {
    fn socket(&self) -> &TcpStream {
        self.get_ref().0
    }
}

/// An open connection. Messages are prefixed with their length (RFC 1035, section 4.2.2).
struct Connection {
    stream: BufReader<Box<dyn Stream>>,
    /// Timeout of a message.
    limit: Duration,
    clock: fn() -> SystemTime,
}

impl Connection {
    async fn open(
        settings: &Rfc2136Settings,
        loading: &Loading<ClientConfig>,
    ) -> Result<Self, Failure> {
        let Rfc2136Settings {
            files,
            timeout: limit,
            clock,
            ..
        } = settings;
        let server = settings.server();
        let limit = *limit;
        let clock = *clock;
        let open = async {
            let tcp = connect(lookup_host((server.host.as_str(), server.port)).await?).await?;
            // Nagle's algorithm would hold a message back until the server acknowledges the one before.
            tcp.set_nodelay(true)?;
            if !server.tls {
                return Ok(Box::new(tcp) as Box<dyn Stream>);
            }
            let name = ServerName::try_from(server.host.clone())
                .map_err(|error| Failure::Unreachable(format!("TLS name: {error}")))?;
            let files = files.clone();
            let mut config = load(loading, "TLS files", move || files.config()).await?;
            // RFC 9103, section 7.1.
            config.alpn_protocols = vec![b"dot".to_vec()];
            let connector = TlsConnector::from(Arc::new(config));
            Ok(Box::new(connector.connect(name, tcp).await?) as Box<dyn Stream>)
        };
        let stream = within(limit, open).await?;
        Ok(Self {
            // Length and message are two reads, which the buffer makes one system call.
            stream: BufReader::new(stream),
            limit,
            clock,
        })
    }

    /// Sends messages with different ids, signed if there is a key, of which at most [`MAX_PIPELINED`] wait for their
    /// responses. Passes every response to `take` with the number of its message, until it returns true for each.
    /// Signatures are verified and removed first. A server may respond in any order (RFC 7766, section 7).
    async fn ask(
        &mut self,
        messages: impl Iterator<Item = Vec<u8>>,
        key: Option<&TsigKey>,
        mut take: impl FnMut(usize, &[u8]) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let mut messages = messages.enumerate();
        let mut waiting = HashMap::new();
        loop {
            while waiting.len() < MAX_PIPELINED
                && let Some((number, mut message)) = messages.next()
            {
                // Read back from the message, so that callers cannot pass another one.
                let id = MessageReader::new(&message).header()?.id;
                let verifier = match key {
                    Some(key) => Some(key.sign(&mut message, self.now())?),
                    None => None,
                };
                self.send(&message).await?;
                waiting.insert(id, (number, verifier));
            }
            if waiting.is_empty() {
                return Ok(());
            }
            let mut response = self.receive().await?;
            let id = MessageReader::new(&response).header()?.id;
            // A stray or forged response: what follows it cannot be assigned either.
            let Some((number, verifier)) = waiting.get_mut(&id) else {
                return Err(WireError("a response to a different message").into());
            };
            if let Some(verifier) = verifier {
                verifier.verify(&mut response, self.now())?;
            }
            // A transfer has several messages under one id, so its entry stays until the last one.
            if take(*number, &response)? {
                if let Some(verifier) = verifier {
                    verifier.finish()?;
                }
                waiting.remove(&id);
            }
        }
    }

    /// Queries changed sets; returns the places of transactions that the answers do not prove.
    async fn unproven(
        &mut self,
        key: Option<&TsigKey>,
        sets: &[ChangedSet<'_>],
    ) -> Result<BTreeSet<usize>, Failure> {
        let mut unproven = BTreeSet::new();
        for part in sets.chunks(MAX_PIPELINED) {
            let first = fastrand::u16(..);
            let queries = part.iter().zip(0_u16..).map(|(set, number)| {
                let id = first.wrapping_add(number);
                messages::question(id, 0, set.name, set.record_type.0)
            });
            let asked = self.ask(queries, key, |number: usize, message: &[u8]| {
                let set = &part[number];
                // An answer that cannot be read proves nothing either.
                if !set.is_proven(message).unwrap_or(false) {
                    unproven.insert(set.place);
                }
                Ok(true)
            });
            asked.await?;
        }
        Ok(unproven)
    }

    /// Returns the time in seconds since 1970.
    fn now(&self) -> u64 {
        let since = (self.clock)().duration_since(SystemTime::UNIX_EPOCH);
        since.unwrap_or_default().as_secs()
    }

    async fn send(&mut self, message: &[u8]) -> Result<(), Failure> {
        let length =
            u16::try_from(message.len()).map_err(|_| WireError("a message above 65,535 octets"))?;
        // In one write: the length alone would be a segment of its own without Nagle's algorithm.
        let framed = [&length.to_be_bytes(), message].concat();
        within(self.limit, async {
            self.stream.write_all(&framed).await?;
            Ok(self.stream.flush().await?)
        })
        .await
    }

    async fn receive(&mut self) -> Result<Vec<u8>, Failure> {
        if self.stream.buffer().is_empty() {
            // BIND does not disable Nagle's algorithm: it holds responses back until the last one is acknowledged, which
            // takes up to 40 ms by default. Linux forgets the option, so it is set before each wait; without it
            // everything arrives as well.
            let _ = self.stream.get_ref().socket().set_quickack(true);
        }
        let read = async {
            let mut message = vec![0; usize::from(self.stream.read_u16().await?)];
            self.stream.read_exact(&mut message).await?;
            Ok(message)
        };
        // For each message, not for a whole transfer, whose length depends on the zone.
        within(self.limit, async {
            read.await.map_err(|error: io::Error| match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    Failure::Unreachable("the server closed the connection prematurely".to_owned())
                }
                _ => error.into(),
            })
        })
        .await
    }
}

/// Time after which the next address of a host is tried as well (RFC 8305, section 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Connects to one of a host's addresses, by preference to the first one.
async fn connect(addresses: impl Iterator<Item = SocketAddr>) -> io::Result<TcpStream> {
    let mut attempts = Vec::new();
    for (address, number) in addresses.zip(0_u32..) {
        attempts.push(Box::pin(async move {
            sleep(ATTEMPT_DELAY * number).await;
            TcpStream::connect(address).await
        }));
    }
    if attempts.is_empty() {
        return Err(io::Error::other("the host has no address"));
    }
    // A firewall may drop what goes to one of them, such as all of IPv6; its attempt would take the whole time limit.
    let (stream, _) = select_ok(attempts).await?;
    Ok(stream)
}

async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let Ok(result) = timeout(limit, work).await else {
        let reason = format!("no answer within {} s", limit.as_secs());
        return Err(Failure::Unreachable(reason));
    };
    result
}
