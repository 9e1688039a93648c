//! Providers of external-dns behind its webhook protocol: a program outside of its tree, or
//! external-dns itself with `--webhook-server`.
//!
//! The protocol has neither zones nor a compare-and-set. The zones are the domains that the peer
//! names; the records are listed again immediately before and after a batch, which narrows the
//! window for foreign changes but does not close it.

use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use dns_kit::{
    foreign::{printable, printable_bytes, redacted_text},
    http_client::Limits,
};
use futures_util::future::BoxFuture;
use hyper::{Request, StatusCode, header, header::HeaderValue};
use serde::de::DeserializeOwned;
use url::Url;

use super::{
    Batch, Definition, GroupSender, Http, Parameters, Progress, Provider, ProviderError,
    ProviderSettings, Results, Step, TlsFiles, Transaction, TransactionResult, Zone, bad_answer,
    definition::shared_root, is_temporary, not_made, send_groups, settings,
};
use crate::{
    go_json,
    record::{DomainFilter, Key, Labels, Name, Record, RecordType},
    webhook::{Changes, Domains, Endpoint, EndpointList, MAX_MESSAGE, MEDIA_TYPE},
};

const MAX_NAMES: usize = 100;

pub(super) const DEFINITION: Definition = Definition {
    settings: &["webhook-provider-timeout", "webhook-provider-url"],
    ..Definition::new("webhook", |parameters| {
        Ok(Box::new(WebhookSettings::from_parameters(parameters)?))
    })
};

/// Returns the definition of a provider that external-dns serves: this crate needs only its address.
pub(super) const fn peer(name: &'static str) -> Definition {
    Definition {
        name,
        is_peer: true,
        ..DEFINITION
    }
}

/// Settings of one peer.
#[derive(Debug, Clone)]
pub struct WebhookSettings {
    /// URL of the peer, without user and password.
    pub url: String,
    /// Value of `Authorization`, from user and password of the URL, as Go's client sends it.
    pub authorization: Option<HeaderValue>,
    /// Domains to publish to if the peer names none.
    pub domains: Vec<Name>,
    /// Certificates and key for `https` addresses.
    pub files: TlsFiles,
    /// Timeout of a response.
    pub timeout: Duration,
}

impl WebhookSettings {
    /// Parses the parameters `webhook-provider-url`, `webhook-provider-timeout`, `domain-filter` and `tls-*`.
    pub fn from_parameters(parameters: &Parameters) -> Result<Self, ProviderError> {
        let text = parameters
            .text("webhook-provider-url")
            .unwrap_or("http://localhost:8888");
        let (url, authorization) = split_url(text).ok_or_else(|| {
            settings(format!(
                "webhook-provider-url is {:?}; write it as http://localhost:8888",
                redacted_text(text)
            ))
        })?;
        Ok(Self {
            url,
            authorization,
            domains: parse_domains(parameters.list("domain-filter")),
            files: TlsFiles::from_parameters(parameters)?,
            timeout: parameters.duration("webhook-provider-timeout", Duration::from_secs(30))?,
        })
    }
}

/// Parses domains; a leading dot is permitted, and what is no domain is left out.
fn parse_domains<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<Name> {
    let mut domains = Vec::new();
    for text in texts {
        domains.extend(Name::parse(text.trim_start_matches('.')).ok());
    }
    domains
}

impl ProviderSettings for WebhookSettings {
    fn open(self: Box<Self>) -> Result<Box<dyn Provider>, ProviderError> {
        Ok(Box::new(Webhook::new(*self)?))
    }

    fn shared_zones(&self, other: &dyn Any) -> Vec<Name> {
        shared_root(self, other, |one, other| one.url == other.url)
    }
}

/// Splits a URL into itself without its user, and the user's authorization (RFC 7617). `None` if it is no URL of HTTP.
fn split_url(text: &str) -> Option<(String, Option<HeaderValue>)> {
    let mut url = Url::parse(text).ok()?;
    if !["http", "https"].contains(&url.scheme()) {
        return None;
    }
    let mut authorization = None;
    // Out of the URL, which appears in messages, and which hyper would not send as a header.
    if !url.username().is_empty() || url.password().is_some() {
        let password = url.password().unwrap_or_default();
        let pair = [decoded(url.username()), decoded(password)].join(":");
        let mut value = HeaderValue::try_from(format!("Basic {}", STANDARD.encode(pair))).ok()?;
        // So that no log shows the password, which base64 does not hide.
        value.set_sensitive(true);
        authorization = Some(value);
        url.set_username("").ok()?;
        url.set_password(None).ok()?;
    }
    Some((url.as_str().trim_end_matches('/').to_owned(), authorization))
}

/// Decodes `%` in a part of a URL.
fn decoded(part: &str) -> String {
    // Unlike in a form, a plus stands for itself.
    let form = part.replace('+', "%2B");
    url::form_urlencoded::parse(form.as_bytes())
        .map(|(text, _)| text.into_owned())
        .collect()
}

/// Provider behind one peer.
pub struct Webhook {
    settings: WebhookSettings,
    http: Http,
    /// Names that the peer serves, from its last listing.
    served: DomainFilter,
    /// Wanted records, and what the peer made of them.
    adjusted: Option<(Vec<Record>, Vec<Record>)>,
}

impl Webhook {
    /// Creates a provider without sending a request.
    pub fn new(settings: WebhookSettings) -> Result<Self, ProviderError> {
        let http = Http::new(
            std::iter::once(settings.url.as_str()),
            &settings.files,
            Limits {
                time: settings.timeout,
                body: MAX_MESSAGE,
            },
        )?;
        Ok(Self {
            settings,
            http,
            served: DomainFilter::default(),
            adjusted: None,
        })
    }

    /// Sends a request. A response of the class 5xx is temporary; others are about a name, or about the settings.
    async fn call(&self, path: &str, body: Option<Vec<u8>>) -> Result<Bytes, ProviderError> {
        let server = format!("{}{path}", self.settings.url);
        let mut request = match body {
            None => Request::get(&server),
            Some(_) => Request::post(&server).header(header::CONTENT_TYPE, MEDIA_TYPE),
        };
        request = request.header(header::ACCEPT, MEDIA_TYPE);
        if let Some(authorization) = &self.settings.authorization {
            request = request.header(header::AUTHORIZATION, authorization.clone());
        }
        let url = &self.settings.url;
        let sent = self.http.send(url, request, body.unwrap_or_default());
        let response = sent.await?;
        let status = response.status();
        if matches!(status, StatusCode::OK | StatusCode::NO_CONTENT) {
            return Ok(response.into_body());
        }
        // A peer's text may be long and hold control characters.
        let text = printable_bytes(response.body());
        let reason = format!("{status}: {text}; see the log of the webhook");
        Err(match status {
            // External-dns's server answers every error by 500, so it may mean the whole service.
            _ if is_temporary(status) => ProviderError::Unreachable { server, reason },
            // The peer may mean one of the names.
            StatusCode::BAD_REQUEST
            | StatusCode::CONFLICT
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNPROCESSABLE_ENTITY => ProviderError::Refused { server, reason },
            _ => settings(format!(
                "{server}: {status}: {text}; correct webhook-provider-url, or what the peer requires of its clients"
            )),
        })
    }

    async fn read<T: DeserializeOwned>(
        &self,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<T, ProviderError> {
        let answer = self.call(path, body).await?;
        go_json::from_slice(&answer)
            .map_err(|error| bad_answer(&format!("{}{path}", self.settings.url), error))
    }

    async fn list_all(&mut self) -> Result<Vec<Zone>, ProviderError> {
        let filter: Domains = self.read("/", None).await?;
        self.served = filter
            .filter()
            .map_err(|error| bad_answer(&self.settings.url, error))?;
        let mut apexes = parse_domains(filter.include.iter().map(String::as_str));
        if apexes.is_empty() {
            apexes.clone_from(&self.settings.domains);
        }
        if apexes.is_empty() {
            apexes.push(Name::root());
        }
        apexes.sort();
        // Two zones of one apex would each get a part of its records.
        apexes.dedup();
        let (records, warnings) = self.records().await?;
        let mut zones: Vec<Zone> = apexes.into_iter().map(Zone::of).collect();
        for record in records.into_values() {
            let own = zones
                .iter_mut()
                .filter(|zone| record.name.is_within(&zone.apex));
            // The innermost domain, as for zones of a server.
            let zone = own.max_by_key(|zone| zone.apex.labels().count());
            let is_apex = zone.as_ref().is_some_and(|zone| zone.apex == record.name);
            let is_servers = [RecordType::NS, RecordType::SOA].contains(&record.record_type);
            // The peer's servers manage SOA and NS of the apex.
            if is_apex && is_servers {
                continue;
            }
            if let Some(zone) = zone
                && let Ok(records) = &mut zone.content
            {
                records.push(record);
            }
        }
        if let Some(first) = zones.first_mut() {
            // The protocol has no zones, so warnings belong to none; one of them has to show them.
            first.warnings = warnings;
        }
        Ok(zones)
    }

    /// Lists all record sets, and describes what cannot be represented.
    async fn records(&self) -> Result<(BTreeMap<Key, Record>, Vec<String>), ProviderError> {
        let EndpointList(endpoints) = self.read("/records", None).await?;
        let mut sets: BTreeMap<Key, Record> = BTreeMap::new();
        let mut warnings = Vec::new();
        for endpoint in endpoints {
            match endpoint.record() {
                // Some providers list every record of a set on its own.
                Ok(record) => {
                    let set = sets.entry(record.key()).or_insert_with(|| record.clone());
                    set.targets.extend(record.targets);
                }
                Err(reason) => {
                    let warning = format!("{} left unchanged: {reason}", endpoint.dns_name);
                    warnings.push(printable(&warning));
                }
            }
        }
        Ok((sets, warnings))
    }

    async fn adjust_remotely(&mut self, desired: &[Record]) -> Result<(), ProviderError> {
        let mut endpoints = Vec::new();
        let mut records = Vec::new();
        let mut labels: BTreeMap<Key, &Labels> = BTreeMap::new();
        for record in desired {
            labels.insert(record.key(), &record.labels);
            if record.targets.is_empty() {
                // It keeps the existing set here, and has no meaning in the protocol.
                records.push(record.clone());
            } else {
                endpoints.push(Endpoint::of(record));
            }
        }
        let body = serde_json::to_vec(&endpoints).unwrap_or_default();
        let EndpointList(adjusted) = self.read("/adjustendpoints", Some(body)).await?;
        let kept: BTreeSet<&str> = adjusted
            .iter()
            .map(|endpoint| endpoint.dns_name.as_str())
            .collect();
        // Some peers leave out what they do not serve, or everything after an error of their own. That withdraws
        // nothing: without targets, the existing records of the name stay, and a note tells so.
        for record in desired {
            if !record.targets.is_empty() && !kept.contains(record.name.as_str()) {
                records.push(Record {
                    targets: BTreeSet::new(),
                    ..record.clone()
                });
            }
        }
        for endpoint in &adjusted {
            let record = endpoint.record().map_err(|reason| {
                let server = format!("{}/adjustendpoints", self.settings.url);
                bad_answer(&server, format!("{}: {reason}", endpoint.dns_name))
            })?;
            // Not from the peer, which may drop labels: owner records need them, each of the document that wants the
            // record, by which an unreadable document holds it. The peer may have changed the type.
            let mut of_name = labels.range(Key::before(&record.name)..);
            let first = of_name.next().filter(|(key, _)| key.name == record.name);
            let own = labels.get_key_value(&record.key()).or(first);
            let labels = own.map(|(_, labels)| (*labels).clone());
            records.push(Record {
                labels: labels.unwrap_or_default(),
                ..record
            });
        }
        self.adjusted = Some((desired.to_vec(), records));
        Ok(())
    }

    /// Applies transactions that agree with the records before. A message has no result for a single name, so what
    /// the peer accepted is unproven.
    async fn apply_compared(
        &mut self,
        batch: &Batch,
        progress: Progress<'_>,
    ) -> Result<Vec<TransactionResult>, ProviderError> {
        // Listed immediately before, because the peer compares nothing itself.
        let (before, _) = self.records().await?;
        let mut items = Vec::new();
        for transaction in &batch.transactions {
            let holds = transaction.steps.iter().all(|step| step.holds(&before));
            items.push(if holds {
                Ok(transaction.clone())
            } else {
                Err(TransactionResult::Conflict)
            });
        }
        let mut results = send_groups(self, items, batch.on_conflict, progress).await;
        let url = &self.settings.url;
        for (transaction, result) in batch.transactions.iter().zip(&mut results) {
            if *result == TransactionResult::Applied {
                let error = not_made(url, &transaction.name, "see the log of the webhook");
                *result = TransactionResult::Unproven(error);
            }
        }
        Ok(results)
    }
}

impl Provider for Webhook {
    fn prepare<'a>(
        &'a mut self,
        desired: &'a [Record],
    ) -> BoxFuture<'a, Result<(), ProviderError>> {
        Box::pin(self.adjust_remotely(desired))
    }

    fn adjust(&self, desired: &mut Vec<Record>) {
        if let Some((before, adjusted)) = &self.adjusted
            // The answer applies to exactly the records that were sent.
            && before == desired
        {
            desired.clone_from(adjusted);
        }
    }

    fn serves(&self, name: &Name) -> bool {
        self.served.matches(name)
    }

    fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>> {
        Box::pin(self.list_all())
    }

    fn apply<'a>(&'a mut self, batch: &'a Batch, progress: Progress<'a>) -> Results<'a> {
        Box::pin(async move {
            let results = self.apply_compared(batch, progress).await;
            results.unwrap_or_else(|error| {
                vec![TransactionResult::Failed(error); batch.transactions.len()]
            })
        })
    }
}

impl GroupSender for Webhook {
    type Item = Transaction;

    fn fitting(&self, transactions: &[Transaction]) -> usize {
        transactions.len().min(MAX_NAMES)
    }

    async fn send(&mut self, groups: &[&[Transaction]]) -> Vec<TransactionResult> {
        let mut changes = Changes::default();
        for step in groups[0].iter().flat_map(|transaction| &transaction.steps) {
            match step {
                Step::Create(record) => changes.create.push(Endpoint::of(record)),
                Step::Delete(record) => changes.delete.push(Endpoint::of(record)),
                Step::Replace { before, after } => {
                    changes.update_old.push(Endpoint::of(before));
                    changes.update_new.push(Endpoint::of(after));
                }
                // The protocol cannot express them; `apply_compared` has compared.
                Step::Require(_) | Step::RequireAbsent(..) => {}
            }
        }
        let body = serde_json::to_vec(&changes).unwrap_or_default();
        let sent = self.call("/records", Some(body)).await;
        vec![sent.map_or_else(TransactionResult::Failed, |_| TransactionResult::Applied)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::tests::Scripted;

    #[test]
    fn url_users_become_a_header() {
        for (text, url, user) in [
            ("http://localhost:8888", "http://localhost:8888", None),
            ("https://peer/path//", "https://peer/path", None),
            ("http://u:p@peer/", "http://peer", Some("u:p")),
            ("http://u@peer", "http://peer", Some("u:")),
            ("http://:p@peer", "http://peer", Some(":p")),
            ("http://a%40b:c+d%2F@peer", "http://peer", Some("a@b:c+d/")),
        ] {
            let (found, authorization) = split_url(text).unwrap();
            assert_eq!(found, url, "{text}");
            let expected = user.map(|user| format!("Basic {}", STANDARD.encode(user)));
            let header = authorization
                .as_ref()
                .map(|header| header.to_str().unwrap().to_owned());
            assert_eq!(header, expected, "{text}");
            assert!(authorization.is_none_or(|header| header.is_sensitive()));
        }
        for text in ["peer", "ftp://peer", "", "http://"] {
            assert_eq!(split_url(text), None, "{text}");
        }
    }

    fn settings_of(pairs: &[(&str, &str)]) -> Result<WebhookSettings, String> {
        let mut parameters = Parameters::default();
        for (name, value) in pairs {
            parameters.0.insert((*name).to_owned(), (*value).to_owned());
        }
        WebhookSettings::from_parameters(&parameters).map_err(|error| error.to_string())
    }

    #[test]
    fn settings_are_read_from_parameters() {
        let usual = settings_of(&[]).unwrap();
        assert_eq!(usual.url, "http://localhost:8888");
        assert_eq!(
            (usual.timeout, usual.domains.len()),
            (Duration::from_secs(30), 0)
        );
        let given = settings_of(&[
            ("webhook-provider-url", "http://peer/"),
            ("webhook-provider-timeout", "2s"),
            ("domain-filter", ".Example.org,a..b,example.net"),
        ])
        .unwrap();
        assert_eq!(
            (given.url.as_str(), given.timeout),
            ("http://peer", Duration::from_secs(2))
        );
        let names: Vec<&str> = given.domains.iter().map(Name::as_str).collect();
        assert_eq!(names, ["example.org", "example.net"]);
        let secret = settings_of(&[("webhook-provider-url", "ftp://u:secret@peer")]).unwrap_err();
        assert!(
            secret.starts_with("webhook-provider-url is \"ftp://")
                && secret.ends_with("\"; write it as http://localhost:8888")
                && !secret.contains("secret"),
            "{secret}"
        );
        let other = settings_of(&[("webhook-provider-url", "http://other")]).unwrap();
        assert_eq!(given.shared_zones(&given.clone()), [Name::root()]);
        assert_eq!(given.shared_zones(&other), []);
        assert_eq!(given.shared_zones(&"another provider"), []);
    }

    #[test]
    fn adjustments_apply_to_sent_sets() {
        let record =
            |target: &str| Record::parse("a.example.org", RecordType::A, [target]).unwrap();
        let mut provider = Webhook::new(settings_of(&[]).unwrap()).unwrap();
        provider.adjusted = Some((vec![record("192.0.2.1")], vec![record("192.0.2.2")]));
        for (sent, expected) in [("192.0.2.1", "192.0.2.2"), ("192.0.2.3", "192.0.2.3")] {
            let mut desired = vec![record(sent)];
            provider.adjust(&mut desired);
            assert_eq!(desired, [record(expected)]);
        }
        provider.served = DomainFilter::new(["example.org"], []).unwrap();
        let serves = |name: &str| provider.serves(&Name::parse(name).unwrap());
        assert!(serves("a.example.org") && !serves("a.example.net"));
        let transaction = Transaction {
            name: record("192.0.2.1").name,
            steps: Vec::new(),
        };
        for (count, fitting) in [(1, 1), (100, 100), (101, 100)] {
            assert_eq!(provider.fitting(&vec![transaction.clone(); count]), fitting);
        }
    }

    async fn peer(responses: &[(u16, &str)]) -> (Webhook, Scripted) {
        let server = Scripted::new(responses).await;
        let settings = settings_of(&[("webhook-provider-url", &server.url)]).unwrap();
        (Webhook::new(settings).unwrap(), server)
    }

    #[tokio::test]
    async fn status_codes_tell_the_culprit() {
        for (code, expected) in [
            (200, None),
            (204, None),
            (400, Some("refused")),
            (409, Some("refused")),
            (413, Some("refused")),
            (422, Some("refused")),
            (408, Some("unreachable")),
            (429, Some("unreachable")),
            (500, Some("unreachable")),
            (503, Some("unreachable")),
            (302, Some("settings")),
            (401, Some("settings")),
            (404, Some("settings")),
        ] {
            let (provider, server) = peer(&[(code, "why\n")]).await;
            let found = provider.call("/records", Some(b"[]".to_vec())).await;
            let found = found.err().map(|error| match error {
                ProviderError::Refused { .. } => "refused",
                ProviderError::Unreachable { .. } => "unreachable",
                ProviderError::Settings(_) => "settings",
                other => panic!("{other}"),
            });
            assert_eq!(found, expected, "{code}");
            assert_eq!(server.asked(), ["POST /records []"]);
        }
        let shown = async |code| {
            let (provider, server) = peer(&[(code, "why\n")]).await;
            let error = provider.call("/x", None).await.unwrap_err().to_string();
            assert_eq!(server.asked(), ["GET /x"]);
            error.replace(&server.url, "URL")
        };
        assert_eq!(
            shown(400).await,
            "URL/x refused: 400 Bad Request: why; see the log of the webhook"
        );
        assert_eq!(
            shown(404).await,
            "URL/x: 404 Not Found: why; correct webhook-provider-url, or what the peer requires of its clients"
        );
        let (provider, server) = peer(&[(200, "x")]).await;
        let error = provider
            .read::<Domains>("/", None)
            .await
            .unwrap_err()
            .to_string();
        let expected = format!("{}/: invalid response: ", server.url);
        assert!(error.starts_with(&expected), "{error}");
    }

    #[tokio::test]
    async fn domains_of_a_peer_are_zones() {
        let records = r#"[
            {"dnsName": "a.example.org", "recordType": "A", "targets": ["192.0.2.1"]},
            {"dnsName": "a.example.org", "recordType": "A", "targets": ["192.0.2.2"]},
            {"dnsName": "b.sub.example.org", "recordType": "A", "targets": ["192.0.2.3"]},
            {"dnsName": "example.org", "recordType": "NS", "targets": ["ns.example.net"]},
            {"dnsName": "example.org", "recordType": "SOA", "targets": ["\\# 0"]},
            {"dnsName": "example.org", "recordType": "MX", "targets": ["1 m.example.net"]},
            {"dnsName": "c.example.org", "recordType": "NS", "targets": ["ns.example.net"]},
            {"dnsName": "elsewhere.example.net", "recordType": "A", "targets": ["192.0.2.4"]},
            {"dnsName": "x.example.org", "recordType": "NEW", "targets": ["\u0007"]}
        ]"#;
        let domains = r#"{"include": [".sub.example.org", "example.org", "Example.org."], "exclude": ["z.example.org"]}"#;
        let (mut provider, server) = peer(&[(200, domains), (200, records)]).await;
        let zones = provider.list().await.unwrap();
        let mut shown = Vec::new();
        for zone in &zones {
            for record in zone.content.as_ref().unwrap() {
                shown.push(format!("{}: {record}", zone.id));
            }
        }
        assert_eq!(
            shown,
            [
                "example.org: a.example.org 0 A 192.0.2.1,192.0.2.2",
                "example.org: c.example.org 0 NS ns.example.net",
                "example.org: example.org 0 MX 1 m.example.net",
                "sub.example.org: b.sub.example.org 0 A 192.0.2.3",
            ]
        );
        assert_eq!(zones.len(), 2);
        assert_eq!(zones[0].warnings.len(), 1);
        assert!(
            zones[0].warnings[0]
                .starts_with("x.example.org left unchanged: unknown record type \"NEW\""),
            "{:?}",
            zones[0].warnings
        );
        assert_eq!(zones[1].warnings, [] as [&str; 0]);
        let serves = |name: &str| provider.serves(&Name::parse(name).unwrap());
        assert!(serves("a.example.org") && !serves("z.example.org") && !serves("example.net"));
        assert_eq!(server.asked(), ["GET /", "GET /records"]);
        // A peer that names no domain has the domains of the parameters, or all.
        for (parameters, expected) in [
            (vec![], "."),
            (vec![("domain-filter", "example.net")], "example.net"),
        ] {
            let server = Scripted::new(&[(200, "{}"), (200, "null")]).await;
            let all = [
                &parameters[..],
                &[("webhook-provider-url", server.url.as_str())],
            ]
            .concat();
            let mut provider = Webhook::new(settings_of(&all).unwrap()).unwrap();
            let zones = provider.list().await.unwrap();
            let ids: Vec<&str> = zones.iter().map(|zone| zone.id.as_str()).collect();
            assert_eq!(ids, [expected]);
        }
    }

    fn set(line: &str) -> Record {
        let (name, targets) = line.split_once(' ').unwrap();
        let targets = targets.split(',').filter(|target| !target.is_empty());
        Record::parse(&format!("{name}.example.org"), RecordType::A, targets).unwrap()
    }

    #[tokio::test]
    async fn a_peer_adjusts_wanted_records() {
        let answer = r#"[{"dnsName": "a.example.org", "recordType": "A", "targets": ["192.0.2.1"], "recordTTL": 300}]"#;
        let (mut provider, server) = peer(&[(200, answer)]).await;
        let mut first = set("a 192.0.2.1");
        first.labels = Labels::of("", "crd/shop/one");
        let desired = vec![first.clone(), set("kept "), set("dropped 192.0.2.2")];
        provider.prepare(&desired).await.unwrap();
        let sent = "POST /adjustendpoints [{\"dnsName\":\"a.example.org\",\"targets\":[\"192.0.2.1\"],\"recordType\":\
                    \"A\",\"labels\":{\"resource\":\"crd/shop/one\"}},{\"dnsName\":\"dropped.example.org\",\"targets\":\
                    [\"192.0.2.2\"],\"recordType\":\"A\"}]";
        assert_eq!(server.asked(), [sent]);
        let mut adjusted = desired;
        provider.adjust(&mut adjusted);
        first.ttl = Some(300);
        // A set that the peer left out keeps its records.
        assert_eq!(adjusted, [set("kept "), set("dropped "), first]);
        let broken = r#"[{"dnsName": "a.example.org", "recordType": "A", "targets": ["x y"]}]"#;
        let (mut provider, server) = peer(&[(200, broken)]).await;
        let error = provider
            .prepare(&[set("a 192.0.2.1")])
            .await
            .unwrap_err()
            .to_string();
        let expected = format!(
            "{}/adjustendpoints: invalid response: a.example.org: ",
            server.url
        );
        assert!(error.starts_with(&expected), "{error}");
    }

    #[tokio::test]
    async fn adjusted_records_keep_their_documents() {
        let of = |mut record: Record, document: &str| {
            record.labels = Labels::of("", document);
            record
        };
        let six = Record::parse("a.example.org", RecordType::AAAA, ["2001:db8::1"]).unwrap();
        let alias = Record::parse("b.example.org", RecordType::CNAME, ["x.example.net"]).unwrap();
        let desired = [
            of(set("a 192.0.2.1"), "one"),
            of(six, "two"),
            of(alias, "three"),
        ];
        // The peer returns them in another order and form, without labels, and adds a name.
        let answer = r#"[
            {"dnsName": "a.example.org", "recordType": "AAAA", "targets": ["2001:db8::1"]},
            {"dnsName": "a.example.org", "recordType": "A", "targets": ["192.0.2.1"]},
            {"dnsName": "b.example.org", "recordType": "A", "targets": ["192.0.2.7"]},
            {"dnsName": "c.example.org", "recordType": "A", "targets": ["192.0.2.8"]}
        ]"#;
        let (mut provider, _server) = peer(&[(200, answer)]).await;
        provider.prepare(&desired).await.unwrap();
        let mut adjusted = desired.to_vec();
        provider.adjust(&mut adjusted);
        let documents: Vec<&str> = adjusted
            .iter()
            .map(|record| record.labels.resource())
            .collect();
        assert_eq!(documents, ["two", "one", "three", ""]);
    }

    #[tokio::test]
    async fn changes_are_compared_and_sent_together() {
        let before = r#"[{"dnsName": "a.example.org", "recordType": "A", "targets": ["192.0.2.1"]},
                         {"dnsName": "b.example.org", "recordType": "A", "targets": ["192.0.2.9"]}]"#;
        let transaction = |steps: Vec<Step>| Transaction {
            name: Name::parse("a.example.org").unwrap(),
            steps,
        };
        let batch = Batch {
            transactions: vec![
                transaction(vec![
                    Step::Replace {
                        before: set("a 192.0.2.1"),
                        after: set("a 192.0.2.2"),
                    },
                    Step::Create(set("c 192.0.2.3")),
                    Step::RequireAbsent(Name::parse("d.example.org").unwrap(), RecordType::A),
                ]),
                // Another writer was here.
                transaction(vec![Step::Delete(set("b 192.0.2.1"))]),
                transaction(vec![Step::Delete(set("b 192.0.2.9"))]),
            ],
            ..Batch::default()
        };
        let (mut provider, server) = peer(&[(200, before), (204, "")]).await;
        let results = provider.apply(&batch, &|_| {}).await;
        let url = &server.url;
        let unproven = TransactionResult::Unproven(not_made(
            url,
            &Name::parse("a.example.org").unwrap(),
            "see the log of the webhook",
        ));
        assert_eq!(
            results,
            [unproven.clone(), TransactionResult::Conflict, unproven]
        );
        let entry = |name: &str, target: &str| {
            format!(
                "{{\"dnsName\":\"{name}.example.org\",\"targets\":[\"{target}\"],\"recordType\":\"A\"}}"
            )
        };
        let sent = format!(
            "POST /records {{\"create\":[{}],\"updateOld\":[{}],\"updateNew\":[{}],\"delete\":[{}]}}",
            entry("c", "192.0.2.3"),
            entry("a", "192.0.2.1"),
            entry("a", "192.0.2.2"),
            entry("b", "192.0.2.9")
        );
        assert_eq!(server.asked(), ["GET /records", &sent]);
        let (mut provider, _server) = peer(&[(500, "")]).await;
        let results = provider.apply(&batch, &|_| {}).await;
        assert!(
            results
                .iter()
                .all(|result| matches!(result, TransactionResult::Failed(_)))
        );
        assert_eq!(results.len(), 3);
        let (mut provider, _server) = peer(&[(200, before), (503, "")]).await;
        let results = provider.apply(&batch, &|_| {}).await;
        assert_eq!(results[1], TransactionResult::Conflict);
        assert!(matches!(
            results[0],
            TransactionResult::Failed(ProviderError::Unreachable { .. })
        ));
    }
}
