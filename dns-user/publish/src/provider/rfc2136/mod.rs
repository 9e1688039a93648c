//! Name servers that accept updates by RFC 2136, such as BIND and Knot.
//!
//! A zone is listed by AXFR, which must be complete and correctly signed. An update requires the
//! listed sets, so it either finds the planned state or changes nothing.

mod connection;
mod messages;
#[cfg(test)]
mod tests;
mod tsig;
mod wire;

use std::{
    collections::HashMap,
    time::{Duration, SystemTime},
};

use futures_util::future::BoxFuture;

pub use self::{
    connection::Server,
    tsig::{Algorithm, TsigKey},
};
use self::{
    connection::{Connection, ConnectionError},
    messages::{Encoded, ListedTexts, Transfer, TransferError, Transferred},
    tsig::TsigError,
    wire::{Message, MessageReader, TYPE_AXFR, WireError},
};
use super::{
    Batch, GroupSender, Parameters, Progress, Provider, ProviderError, TlsFiles, Transaction,
    TransactionResult, Visibility, Zone, send_groups,
};
use crate::record::{Name, Record};

/// Default TTL of new records in seconds.
pub const DEFAULT_TTL: u32 = messages::DEFAULT_TTL;

/// Timeout of a connection or a message.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Response code of a failure within the server.
const SERVFAIL: u8 = 2;

/// Number of records in a set that BIND 9.18 accepts by default (`max-records-per-type`).
const COMMON_LIMIT: usize = 100;

/// Settings of one server.
#[derive(Debug, Clone)]
pub struct Settings {
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

impl Settings {
    /// Parses the parameters `rfc2136-*`, and `tls-*` if the host is `tls://`.
    pub fn from_parameters(parameters: &Parameters) -> Result<Self, ProviderError> {
        parameters.required("rfc2136-host")?;
        let servers = parameters.list("rfc2136-host").into_iter().map(Server::parse);
        let mut servers = servers.collect::<Result<Vec<_>, _>>()?;
        for server in &mut servers {
            server.port = match parameters.number("rfc2136-port", u32::from(server.port))?.try_into() {
                Ok(port) => port,
                Err(_) => return Err(ProviderError::Settings("rfc2136-port is above 65535".to_owned())),
            };
        }
        let zones =
            parameters.list("rfc2136-zone").into_iter().map(Name::parse).collect::<Result<Vec<_>, _>>();
        let zones = zones.map_err(|error| ProviderError::Settings(format!("rfc2136-zone: {error}")))?;
        if zones.is_empty() {
            return Err(ProviderError::Settings(
                "rfc2136-zone is missing; name the zones to update".to_owned(),
            ));
        }
        let key = if parameters.flag("rfc2136-gss-tsig")? {
            let message = "rfc2136 does not support GSS-TSIG (rfc2136-gss-tsig); use a TSIG key";
            return Err(ProviderError::Settings(message.to_owned()));
        } else if parameters.flag("rfc2136-insecure")? {
            None
        } else {
            let algorithm = parameters.text("rfc2136-tsig-secret-alg").unwrap_or("hmac-sha256").parse()?;
            let name = parameters.required("rfc2136-tsig-keyname")?;
            Some(TsigKey::new(name, algorithm, parameters.required("rfc2136-tsig-secret")?)?)
        };
        let min_ttl = parameters.duration("rfc2136-min-ttl", Duration::ZERO)?.as_secs();
        Ok(Self {
            servers,
            zones,
            key,
            min_ttl: u32::try_from(min_ttl).unwrap_or(u32::MAX),
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

/// Provider for one server and its substitutes.
pub struct Rfc2136 {
    settings: Settings,
    /// TXT data of the last transfer of each zone.
    texts: HashMap<Name, ListedTexts>,
}

impl Rfc2136 {
    /// Creates a provider without sending a request.
    pub fn new(settings: Settings) -> Self {
        Self { settings, texts: HashMap::new() }
    }

    /// Connects to the first reachable server, which then comes first in the order.
    async fn connect(&mut self, zone: &Name) -> Result<Connection, ProviderError> {
        let mut result = self.connect_first(zone).await;
        for _ in 1..self.settings.servers.len() {
            if !matches!(result, Err(ProviderError::Unreachable { .. })) {
                break;
            }
            self.settings.servers.rotate_left(1);
            result = self.connect_first(zone).await;
        }
        result
    }

    async fn connect_first(&self, zone: &Name) -> Result<Connection, ProviderError> {
        let connected = Connection::open(&self.settings).await;
        connected.map_err(|error| ListError::from(error).of(self.settings.server(), zone))
    }

    /// Lists one zone; if a server fails during the transfer, from the next one.
    ///
    /// A serial number is no proof that a listing is still valid: a server may delay its increment
    /// (RFC 2136, section 3.6), and some never increment it.
    async fn list_zone(&mut self, apex: &Name) -> Result<Vec<Record>, ProviderError> {
        self.texts.remove(apex);
        let mut result = self.transfer(apex).await;
        for _ in 1..self.settings.servers.len() {
            if !matches!(result, Err(ProviderError::Unreachable { .. })) {
                break;
            }
            self.settings.servers.rotate_left(1);
            result = self.transfer(apex).await;
        }
        let Transferred { records, texts } = result?;
        self.texts.insert(apex.clone(), texts);
        Ok(records)
    }

    async fn transfer(&mut self, apex: &Name) -> Result<Transferred, ProviderError> {
        let mut connection = self.connect(apex).await?;
        let id = fastrand::u16(..);
        let query = Message::new(id, 0, apex, TYPE_AXFR).finish();
        let mut transfer = Transfer::new(apex, id);
        let take = |message: &[u8]| Ok::<_, ListError>(transfer.take(message)?);
        let asked = connection.ask(query, self.settings.key.as_ref(), take).await;
        let finished = asked.and_then(|()| Ok(transfer.finish()?));
        finished.map_err(|error| error.of(self.settings.server(), apex))
    }

    async fn apply_all(&mut self, batch: &Batch, progress: Progress<'_>) -> Vec<TransactionResult> {
        let Some(zone) = self.settings.zones.iter().find(|zone| zone.as_str() == batch.zone).cloned() else {
            let error = ProviderError::Settings(format!("no zone {}", batch.zone));
            return vec![TransactionResult::Failed(error); batch.transactions.len()];
        };
        let listed = self.texts.remove(&zone).unwrap_or_default();
        let encode = |transaction: &Transaction| {
            let unfit = |reason| ProviderError::Unfit { name: transaction.name.clone(), reason };
            match Encoded::new(&zone, transaction, &listed) {
                Ok(encoded) if encoded.fits() => Ok(encoded),
                Ok(_) => Err(unfit("the change exceeds 64,000 octets".to_owned())),
                Err(error) => Err(unfit(error.to_string())),
            }
        };
        let encoded = batch.transactions.iter().map(encode).collect();
        self.texts.insert(zone.clone(), listed);
        let mut sender = Sender { provider: self, zone, connection: None };
        send_groups(&mut sender, encoded, batch.on_conflict, progress).await
    }
}

impl Provider for Rfc2136 {
    fn adjust(&self, desired: &mut Vec<Record>) {
        for record in desired {
            let ttl = record.ttl.or_else(|| (self.settings.min_ttl > DEFAULT_TTL).then_some(0));
            record.ttl = ttl.map(|ttl| ttl.max(self.settings.min_ttl));
            record.properties.clear();
        }
    }

    fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>> {
        Box::pin(async {
            let mut zones = Vec::new();
            for apex in self.settings.zones.clone() {
                let records = self.list_zone(&apex).await;
                zones.push(Zone {
                    id: apex.to_string(),
                    apex,
                    visibility: Visibility::Public,
                    records,
                    warnings: Vec::new(),
                });
            }
            Ok(zones)
        })
    }

    fn apply<'a>(
        &'a mut self,
        batch: &'a Batch,
        progress: Progress<'a>,
    ) -> BoxFuture<'a, Vec<TransactionResult>> {
        Box::pin(self.apply_all(batch, progress))
    }
}

/// Sends the updates of one batch over one connection.
struct Sender<'a> {
    provider: &'a mut Rfc2136,
    zone: Name,
    connection: Option<Connection>,
}

impl GroupSender for Sender<'_> {
    type Item = Encoded;

    fn fitting(&self, transactions: &[Encoded]) -> usize {
        messages::fitting(transactions)
    }

    const WINDOW: usize = 16;

    async fn send(&mut self, groups: &[&[Encoded]]) -> Vec<TransactionResult> {
        let mut codes = vec![None; groups.len()];
        let failure = self.update(groups, &mut codes).await.err();
        if failure.is_some() {
            self.connection = None;
        }
        let result = |(code, group): (Option<u8>, &&[Encoded])| match (code, &failure) {
            (Some(code), _) => self.result(code, group),
            (None, Some(error)) => TransactionResult::Failed(error.clone()),
            // Without an error, every message has a response.
            (None, None) => TransactionResult::Conflict,
        };
        codes.into_iter().zip(groups).map(result).collect()
    }
}

impl Sender<'_> {
    /// Sends one message for each group, and stores the response codes.
    async fn update(&mut self, groups: &[&[Encoded]], codes: &mut [Option<u8>]) -> Result<(), ProviderError> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            empty => empty.insert(self.provider.connect(&self.zone).await?),
        };
        let first = fastrand::u16(..);
        let zone = &self.zone;
        let messages = groups.iter().zip(0_u16..);
        let messages =
            messages.map(|(group, number)| messages::message(first.wrapping_add(number), zone, group));
        let take = |number: usize, message: &[u8]| {
            let header = MessageReader::new(message).header()?;
            if !header.is_response() {
                return Err(ConnectionError::Wire(WireError("no response")));
            }
            codes[number] = Some(header.rcode());
            Ok(())
        };
        let Settings { key, .. } = &self.provider.settings;
        let asked = connection.ask_all(messages, key.as_ref(), take).await;
        asked.map_err(|error| ListError::from(error).of(self.provider.settings.server(), &self.zone))
    }

    fn result(&self, code: u8, group: &[Encoded]) -> TransactionResult {
        match code {
            0 => TransactionResult::Applied,
            // A prerequisite failed: YXDOMAIN, YXRRSET, NXRRSET, or NXDOMAIN.
            3 | 6..=8 => TransactionResult::Conflict,
            _ => {
                let error = ListError::Transfer(TransferError::Code(code));
                let failed = error.of(self.provider.settings.server(), &self.zone);
                match (failed, group) {
                    (ProviderError::Refused { server, reason }, [one]) => {
                        let mut reason = format!("{}: {reason}", one.name);
                        if code == SERVFAIL && one.largest > COMMON_LIMIT {
                            reason = format!(
                                "{}: SERVFAIL; its set of {} records probably exceeds a limit of the server \
                                 (max-records-per-type of BIND, by default {COMMON_LIMIT}); raise the limit, or \
                                 use fewer targets",
                                one.name, one.largest
                            );
                        }
                        TransactionResult::Failed(ProviderError::Refused { server, reason })
                    }
                    (failed, _) => TransactionResult::Failed(failed),
                }
            }
        }
    }
}

/// Error of a listing.
#[derive(Debug, thiserror::Error)]
enum ListError {
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

impl From<WireError> for ListError {
    fn from(error: WireError) -> Self {
        Self::Transfer(error.into())
    }
}

impl ListError {
    /// Adds server, zone and remedy to the error.
    fn of(self, server: &Server, zone: &Name) -> ProviderError {
        let server = server.to_string();
        let about = |reason: String| format!("zone {zone}: {reason}");
        match self {
            Self::Connection(ConnectionError::Settings(error)) => error,
            Self::Connection(ConnectionError::Wire(error)) => {
                ProviderError::BadAnswer { server, reason: about(error.to_string()) }
            }
            Self::Connection(ConnectionError::Tsig(error)) => match error {
                TsigError::UnknownKey(_)
                | TsigError::Rejected
                | TsigError::Clock(_)
                | TsigError::Other(_) => ProviderError::Refused { server, reason: about(error.to_string()) },
                _ => ProviderError::BadAnswer { server, reason: about(error.to_string()) },
            },
            Self::Connection(error) => {
                ProviderError::Unreachable { server, reason: about(error.to_string()) }
            }
            Self::Transfer(TransferError::Code(code)) => {
                let (name, remedy) = explain(code);
                ProviderError::Refused { server, reason: about(format!("{name}; {remedy}")) }
            }
            Self::Transfer(error) => ProviderError::BadAnswer { server, reason: about(error.to_string()) },
        }
    }
}

/// Returns the name of a response code, and a remedy.
fn explain(code: u8) -> (String, &'static str) {
    match code {
        1 => ("FORMERR".to_owned(), "the server does not understand the message"),
        SERVFAIL => ("SERVFAIL".to_owned(), "see the server's log; its journal may not be writable"),
        4 => ("NOTIMP".to_owned(), "the server accepts no updates; set rfc2136-host to the primary"),
        5 => (
            "REFUSED".to_owned(),
            "allow the key to transfer and to update the zone, set rfc2136-host to the primary, or correct a name \
             that the server's check-names rejects",
        ),
        9 => {
            ("NOTAUTH".to_owned(), "the server does not serve the zone; check rfc2136-zone and rfc2136-host")
        }
        10 => ("NOTZONE".to_owned(), "a name is outside the zone; check rfc2136-zone"),
        other => (format!("response code {other}"), "see the server's log"),
    }
}
