//! Providers of external-dns behind its webhook protocol: a program outside of its tree, or
//! external-dns itself with `--webhook-server`.
//!
//! The protocol has neither zones nor a compare-and-set. The zones are the domains that the peer
//! names; the records are listed again immediately before and after a batch, which narrows the
//! window for foreign changes but does not close it.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body_util::Full;
use hyper::{Request, StatusCode, header};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    Batch, GroupSender, Outcome, Parameters, Progress, Provider, ProviderError, Step, TlsFiles, Transaction,
    TransactionResult, Visibility, Zone, http::Http, send_groups,
};
use crate::record::{Key, Labels, Name, Record, RecordType, Target};

/// Media type of the protocol.
const MEDIA_TYPE: &str = "application/external.dns.webhook+json;version=1";

/// Maximum size of a response in octets.
const MAX_RESPONSE: usize = 32 << 20;

/// Maximum number of names in one message.
const MAX_NAMES: usize = 100;

/// Settings of one peer.
#[derive(Debug, Clone)]
pub struct Settings {
    /// URL of the peer.
    pub url: String,
    /// Domains to publish to if the peer names none.
    pub domains: Vec<Name>,
    /// Certificates for `https`.
    pub files: TlsFiles,
    /// Timeout of a response.
    pub timeout: Duration,
}

impl Settings {
    /// Parses the parameters `webhook-provider-url`, `webhook-provider-timeout`, `domain-filter`
    /// and `tls-*`.
    pub fn from_parameters(parameters: &Parameters) -> Result<Self, ProviderError> {
        let url = parameters.text("webhook-provider-url").unwrap_or("http://localhost:8888");
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(ProviderError::Settings(format!(
                "webhook-provider-url is {url:?}; write it as http://localhost:8888"
            )));
        }
        let domain = |text: &str| Name::parse(text.trim_start_matches('.')).ok();
        Ok(Self {
            url: url.trim_end_matches('/').to_owned(),
            domains: parameters.list("domain-filter").into_iter().filter_map(domain).collect(),
            files: TlsFiles::from_parameters(parameters)?,
            timeout: parameters.duration("webhook-provider-timeout", Duration::from_secs(30))?,
        })
    }
}

/// Provider behind one peer.
pub struct Webhook {
    settings: Settings,
    http: Http,
    /// Wanted records, and what the peer made of them.
    adjusted: Option<(Vec<Record>, Vec<Record>)>,
}

/// Filter of the peer, in the form of `GET /`.
#[derive(Debug, Default, Deserialize)]
struct DomainFilter {
    #[serde(default, alias = "filters")]
    include: Vec<String>,
}

/// A record set on the wire.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    dns_name: String,
    #[serde(default)]
    targets: Vec<String>,
    #[serde(default)]
    record_type: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    set_identifier: String,
    #[serde(default, rename = "recordTTL", skip_serializing_if = "is_zero")]
    record_ttl: i64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    provider_specific: Vec<Property>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Property {
    name: String,
    #[serde(default)]
    value: String,
}

fn is_zero(number: &i64) -> bool {
    *number == 0
}

/// Body of `POST /records`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Changes {
    create: Vec<Endpoint>,
    update_old: Vec<Endpoint>,
    update_new: Vec<Endpoint>,
    delete: Vec<Endpoint>,
}

impl Endpoint {
    fn of(record: &Record) -> Self {
        let Record { name, record_type, set_identifier, targets, ttl, labels, properties } = record;
        let text = |target: &Target| match *record_type {
            RecordType::TXT => format!("\"{}\"", target.as_str()),
            _ => target.as_str().to_owned(),
        };
        let property =
            |(name, value): (&String, &String)| Property { name: name.clone(), value: value.clone() };
        Self {
            dns_name: name.to_string(),
            targets: targets.iter().map(text).collect(),
            record_type: record_type.to_string(),
            set_identifier: set_identifier.clone(),
            record_ttl: ttl.map_or(0, i64::from),
            labels: labels.0.clone(),
            provider_specific: properties.iter().map(property).collect(),
        }
    }

    fn record(&self) -> Result<Record, String> {
        let record_type: RecordType =
            self.record_type.parse().map_err(|error: crate::record::RecordError| error.to_string())?;
        let parsed = Record::parse(&self.dns_name, record_type, &self.targets);
        let mut record = parsed.or_else(|error| {
            // Some providers list an alias as an address set whose target is a name.
            let alias = Record::parse(&self.dns_name, RecordType::CNAME, &self.targets);
            let alias = alias.ok().filter(|_| record_type.is_address());
            alias.map(|alias| Record { record_type, ..alias }).ok_or_else(|| error.to_string())
        })?;
        record.set_identifier.clone_from(&self.set_identifier);
        record.ttl = u32::try_from(self.record_ttl).ok().filter(|ttl| *ttl > 0);
        let properties = self.provider_specific.iter();
        record.properties =
            properties.map(|property| (property.name.clone(), property.value.clone())).collect();
        Ok(record)
    }
}

impl Webhook {
    /// Creates a provider without sending a request.
    pub fn new(settings: Settings) -> Result<Self, ProviderError> {
        let http = Http::new(std::iter::once(settings.url.as_str()), &settings.files, settings.timeout)?;
        Ok(Self { settings, http, adjusted: None })
    }

    /// Sends a request. A response of the class 5xx is temporary, any other failure permanent.
    async fn call(&self, path: &str, body: Option<Vec<u8>>) -> Result<Bytes, ProviderError> {
        let server = format!("{}{path}", self.settings.url);
        let request = match body {
            None => Request::get(&server).header(header::ACCEPT, MEDIA_TYPE).body(Full::default()),
            Some(body) => Request::post(&server)
                .header(header::ACCEPT, MEDIA_TYPE)
                .header(header::CONTENT_TYPE, MEDIA_TYPE)
                .body(Full::new(Bytes::from(body))),
        };
        let request =
            request.map_err(|error| ProviderError::Settings(format!("webhook-provider-url: {error}")))?;
        let response = self.http.send(&self.settings.url, request).await?;
        let (status, body) = (response.status, response.body);
        if body.len() > MAX_RESPONSE {
            let reason = format!("a response above {} MiB", MAX_RESPONSE >> 20);
            return Err(ProviderError::BadAnswer { server, reason });
        }
        if matches!(status, StatusCode::OK | StatusCode::NO_CONTENT) {
            return Ok(body);
        }
        let text = String::from_utf8_lossy(&body);
        let text = text.trim().lines().next().unwrap_or_default();
        let reason = format!("{status}: {text}; see the log of the webhook");
        Err(if status.is_server_error() {
            ProviderError::Unreachable { server, reason }
        } else {
            ProviderError::Refused { server, reason }
        })
    }

    async fn read<T: DeserializeOwned>(&self, path: &str, body: Option<Vec<u8>>) -> Result<T, ProviderError> {
        let answer = self.call(path, body).await?;
        serde_json::from_slice(&answer).map_err(|error| ProviderError::BadAnswer {
            server: format!("{}{path}", self.settings.url),
            reason: error.to_string(),
        })
    }

    async fn list_all(&mut self) -> Result<Vec<Zone>, ProviderError> {
        let filter: DomainFilter = self.read("/", None).await?;
        let named = filter.include.iter().filter_map(|text| Name::parse(text.trim_start_matches('.')).ok());
        let mut apexes: Vec<Name> = named.filter(|apex| !apex.is_root()).collect();
        if apexes.is_empty() {
            apexes.clone_from(&self.settings.domains);
        }
        if apexes.is_empty() {
            apexes.push(Name::root());
        }
        apexes.sort();
        apexes.dedup();
        let (records, warnings) = self.records().await?;
        let mut zones: Vec<Zone> = apexes
            .iter()
            .map(|apex| Zone {
                id: apex.to_string(),
                apex: apex.clone(),
                visibility: Visibility::Public,
                records: Ok(Vec::new()),
                warnings: Vec::new(),
            })
            .collect();
        for record in records {
            let own = zones.iter_mut().filter(|zone| record.name.is_within(&zone.apex));
            let zone = own.max_by_key(|zone| zone.apex.labels().count());
            let is_apex = |zone: &&mut Zone| zone.apex == record.name;
            let is_servers = [RecordType::NS, RecordType::SOA].contains(&record.record_type);
            match zone {
                Some(zone) if is_servers && is_apex(&zone) => {}
                Some(Zone { records: Ok(records), .. }) => records.push(record),
                _ => {}
            }
        }
        if let Some(first) = zones.first_mut() {
            first.warnings = warnings;
        }
        Ok(zones)
    }

    /// Lists all record sets, and describes those that cannot be represented.
    async fn records(&self) -> Result<(Vec<Record>, Vec<String>), ProviderError> {
        let endpoints: Vec<Endpoint> = self.read("/records", None).await?;
        let mut sets: BTreeMap<Key, Record> = BTreeMap::new();
        let mut warnings = Vec::new();
        for endpoint in endpoints {
            match endpoint.record() {
                // Some providers list every record of a set on its own.
                Ok(record) => {
                    let set = sets.entry(record.key()).or_insert_with(|| record.clone());
                    set.targets.extend(record.targets);
                }
                Err(reason) => warnings.push(format!("{} left unchanged: {reason}", endpoint.dns_name)),
            }
        }
        Ok((sets.into_values().collect(), warnings))
    }

    async fn adjust_remotely(&mut self, desired: &[Record]) -> Result<(), ProviderError> {
        let usable = |record: &&Record| !record.targets.is_empty();
        let endpoints: Vec<Endpoint> = desired.iter().filter(usable).map(Endpoint::of).collect();
        let body = serde_json::to_vec(&endpoints).unwrap_or_default();
        let adjusted: Vec<Endpoint> = self.read("/adjustendpoints", Some(body)).await?;
        let resources: BTreeMap<&Name, &Labels> =
            desired.iter().map(|record| (&record.name, &record.labels)).collect();
        let mut records: Vec<Record> =
            desired.iter().filter(|record| record.targets.is_empty()).cloned().collect();
        for endpoint in adjusted {
            let record = endpoint.record().map_err(|reason| ProviderError::BadAnswer {
                server: format!("{}/adjustendpoints", self.settings.url),
                reason: format!("{}: {reason}", endpoint.dns_name),
            })?;
            let labels = resources.get(&record.name).map(|labels| (*labels).clone()).unwrap_or_default();
            records.push(Record { labels, ..record });
        }
        self.adjusted = Some((desired.to_vec(), records));
        Ok(())
    }

    async fn apply_all(&mut self, batch: &Batch, progress: Progress<'_>) -> Outcome {
        let before = match self.records().await {
            Ok((records, _)) => by_key(records),
            Err(error) => {
                let failed = TransactionResult::Failed(error);
                return Outcome { results: vec![failed; batch.transactions.len()] };
            }
        };
        let mut results = vec![TransactionResult::Conflict; batch.transactions.len()];
        let mut places = Vec::new();
        let mut current = Vec::new();
        for (place, transaction) in batch.transactions.iter().enumerate() {
            if transaction.steps.iter().all(|step| holds(step, &before)) {
                places.push(place);
                current.push(transaction.clone());
            }
        }
        let mut sender = Sender { webhook: self };
        let sent = send_groups(&mut sender, &current, batch.isolate, progress).await;
        let after = match self.records().await {
            Ok((records, _)) => by_key(records),
            Err(error) => {
                let failed = TransactionResult::Failed(error);
                return Outcome { results: vec![failed; batch.transactions.len()] };
            }
        };
        for ((place, result), transaction) in places.into_iter().zip(sent).zip(&current) {
            let is_there = result != TransactionResult::Applied
                || transaction.steps.iter().all(|step| is_done(step, &after));
            results[place] = match is_there {
                true => result,
                false => TransactionResult::Failed(ProviderError::BadAnswer {
                    server: self.settings.url.clone(),
                    reason: format!(
                        "{}: accepted, but the records are not as requested; see the log of the webhook",
                        transaction.name
                    ),
                }),
            };
        }
        Outcome { results }
    }
}

fn by_key(records: Vec<Record>) -> BTreeMap<Key, Record> {
    records.into_iter().map(|record| (record.key(), record)).collect()
}

fn is_same(found: Option<&Record>, wanted: &Record) -> bool {
    found.is_some_and(|found| found.targets == wanted.targets)
}

fn has(records: &BTreeMap<Key, Record>, name: &Name, record_type: RecordType) -> bool {
    let from = Key { name: name.clone(), set_identifier: String::new(), record_type: RecordType(0) };
    let mut sets = records.range(from..).take_while(|(key, _)| key.name == *name);
    sets.any(|(key, _)| key.record_type == record_type)
}

/// Returns whether the requirement of a step holds.
fn holds(step: &Step, records: &BTreeMap<Key, Record>) -> bool {
    match step {
        Step::Create(record) => !records.contains_key(&record.key()),
        Step::Replace { before: record, .. } | Step::Delete(record) | Step::Require(record) => {
            is_same(records.get(&record.key()), record)
        }
        Step::RequireAbsent(name, record_type) => !has(records, name, *record_type),
    }
}

/// Returns whether the change of a step was made.
fn is_done(step: &Step, records: &BTreeMap<Key, Record>) -> bool {
    match step {
        Step::Create(record) | Step::Replace { after: record, .. } => {
            is_same(records.get(&record.key()), record)
        }
        Step::Delete(record) => !is_same(records.get(&record.key()), record),
        Step::Require(_) | Step::RequireAbsent(..) => true,
    }
}

impl Provider for Webhook {
    fn prepare<'a>(&'a mut self, desired: &'a [Record]) -> BoxFuture<'a, Result<(), ProviderError>> {
        Box::pin(self.adjust_remotely(desired))
    }

    fn adjust(&self, desired: &mut Vec<Record>) {
        if let Some((_, adjusted)) = self.adjusted.as_ref().filter(|(before, _)| before == desired) {
            desired.clone_from(adjusted);
        }
    }

    fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>> {
        Box::pin(self.list_all())
    }

    fn apply<'a>(&'a mut self, batch: &'a Batch, progress: Progress<'a>) -> BoxFuture<'a, Outcome> {
        Box::pin(self.apply_all(batch, progress))
    }
}

/// Sends changes in small messages.
struct Sender<'a> {
    webhook: &'a Webhook,
}

impl GroupSender for Sender<'_> {
    type Item = Transaction;

    fn fitting(&self, transactions: &[Transaction]) -> usize {
        transactions.len().min(MAX_NAMES)
    }

    async fn send(&mut self, group: &[Transaction]) -> TransactionResult {
        let mut changes = Changes::default();
        for step in group.iter().flat_map(|transaction| &transaction.steps) {
            match step {
                Step::Create(record) => changes.create.push(Endpoint::of(record)),
                Step::Delete(record) => changes.delete.push(Endpoint::of(record)),
                Step::Replace { before, after } => {
                    changes.update_old.push(Endpoint::of(before));
                    changes.update_new.push(Endpoint::of(after));
                }
                Step::Require(_) | Step::RequireAbsent(..) => {}
            }
        }
        let body = serde_json::to_vec(&changes).unwrap_or_default();
        match self.webhook.call("/records", Some(body)).await {
            Ok(_) => TransactionResult::Applied,
            Err(error) => TransactionResult::Failed(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_keep_their_members() {
        let text = r#"{"dnsName": "A.example.org", "targets": ["192.0.2.1"], "recordType": "A", "recordTTL": 60,
            "setIdentifier": "blue", "labels": {"owner": "x"}, "providerSpecific": [{"name": "alias", "value": "true"}]}"#;
        let endpoint: Endpoint = serde_json::from_str(text).unwrap();
        let record = endpoint.record().unwrap();
        assert_eq!(record.to_string(), "a.example.org 60 A 192.0.2.1 set=blue");
        assert_eq!(record.properties["alias"], "true");
        assert!(record.labels.0.is_empty(), "labels come from the owner record");
        let again = serde_json::to_value(Endpoint::of(&record)).unwrap();
        assert_eq!(again["recordTTL"], 60);
        let alias = r#"{"dnsName": "a.example.org", "targets": ["lb.example.net"], "recordType": "A"}"#;
        let alias: Endpoint = serde_json::from_str(alias).unwrap();
        assert_eq!(alias.record().unwrap().to_string(), "a.example.org 0 A lb.example.net");
        let owner = Record::parse("t.example.org", RecordType::TXT, ["\"heritage=external-dns\""]).unwrap();
        assert_eq!(Endpoint::of(&owner).targets, ["\"heritage=external-dns\""]);
    }
}
