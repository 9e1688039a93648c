//! Client of etcd's JSON gateway (`/v3/kv/...`). Keys and values are base64, 64-bit numbers are
//! text. Records are keys and values in the format of SkyDNS.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use dns_kit::http_client::Limits;
use hyper::{Request, StatusCode, header};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use super::CoreDnsSettings;
use crate::{
    go_json,
    provider::{Http, MAX_BODY, Pages, ProviderError, bad_answer, is_temporary, try_next},
    record::{Name, RecordType, Target},
};

pub(super) type EtcdKey = Vec<u8>;

/// Maximum number of keys in one response of a listing.
const PAGE: usize = 4_000;

/// Maximum number of restarts of a listing because etcd compacted its revision.
const MAX_COMPACTIONS: usize = 5;

pub(super) struct Etcd {
    urls: Vec<String>,
    user: Option<(String, String)>,
    token: Option<String>,
    http: Http,
}

pub(super) struct Pair {
    pub(super) key: EtcdKey,
    pub(super) value: Vec<u8>,
    pub(super) mod_revision: i64,
}

#[derive(Debug, Default)]
pub(super) struct Txn {
    pub(super) compare: Vec<Value>,
    pub(super) operations: Vec<Value>,
}

impl Txn {
    /// Requires a key at its listed revision.
    pub(super) fn compare_revision(&mut self, key: &[u8], revision: i64) {
        let key = STANDARD.encode(key);
        let revision = revision.to_string();
        self.compare.push(
            json!({"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}),
        );
    }

    /// Writes a value, or deletes the key without one.
    pub(super) fn write(&mut self, key: &[u8], value: Option<&[u8]>) {
        let key = STANDARD.encode(key);
        self.operations.push(match value {
            Some(value) => json!({"request_put": {"key": key, "value": STANDARD.encode(value)}}),
            // Without an end, this key only. External-dns deletes by prefix, which neighbours may share.
            None => json!({"request_delete_range": {"key": key}}),
        });
    }

    /// Requires that a key, and all keys below it, were not written after a revision.
    pub(super) fn compare_unchanged(&mut self, key: &[u8], revision: i64) {
        let next = (revision + 1).to_string();
        // A new record has a key below the name's; without the slash, longer names would count.
        let below = [key, b"/"].concat();
        // `0` follows `/` in ASCII.
        let end = [key, b"0"].concat();
        let key = STANDARD.encode(key);
        let below = STANDARD.encode(below);
        let end = STANDARD.encode(end);
        self.compare
            .push(json!({"key": key, "target": "MOD", "result": "LESS", "mod_revision": next}));
        self.compare.push(json!({
            "key": below, "range_end": end, "target": "MOD", "result": "LESS", "mod_revision": next
        }));
    }
}

#[derive(Deserialize)]
struct RangeResponse {
    header: EtcdHeader,
    #[serde(default)]
    kvs: Vec<PairResponse>,
    #[serde(default)]
    more: bool,
}

#[derive(Deserialize)]
struct EtcdHeader {
    revision: String,
}

#[derive(Deserialize)]
struct PairResponse {
    key: String,
    #[serde(default)]
    value: String,
    mod_revision: String,
}

/// End of the error that stands for a missing or expired token.
const NO_TOKEN: &str = "; set etcd-username and etcd-password";

impl Etcd {
    pub(super) fn new(settings: &CoreDnsSettings) -> Result<Self, ProviderError> {
        let urls = settings.urls.iter().map(String::as_str);
        let limits = Limits {
            time: settings.timeout,
            body: MAX_BODY,
        };
        let http = Http::new(urls, &settings.files, limits)?;
        Ok(Self {
            urls: settings.urls.clone(),
            user: settings.user.clone(),
            token: None,
            http,
        })
    }

    /// Returns all keys that start with `prefix`, which ends with a slash, at one revision of the
    /// store, and this revision.
    pub(super) async fn range(&mut self, prefix: &str) -> Result<(i64, Vec<Pair>), ProviderError> {
        // All pages have one revision, which etcd may forget before the last of them.
        for _ in 0..MAX_COMPACTIONS {
            match self.range_once(prefix).await {
                Err(ProviderError::Refused { reason, .. }) if reason.contains("compacted") => {}
                result => return result,
            }
        }
        Err(bad_answer(
            &self.server(),
            "its history is compacted faster than keys can be listed",
        ))
    }

    async fn range_once(&mut self, prefix: &str) -> Result<(i64, Vec<Pair>), ProviderError> {
        let mut end = prefix.as_bytes().to_vec();
        // `0` follows `/` in ASCII.
        end.pop();
        end.push(b'0');
        let mut from = prefix.as_bytes().to_vec();
        let mut revision: Option<i64> = None;
        let mut pairs = Vec::new();
        let mut received = Pages::default();
        loop {
            let start = STANDARD.encode(&from);
            let stop = STANDARD.encode(&end);
            let mut body = json!({"key": start, "range_end": stop, "limit": PAGE.to_string()});
            // All pages at one revision, or a record that moves between two pages would be missing.
            if let Some(revision) = revision {
                body["revision"] = revision.to_string().into();
            }
            let page = self.call("/v3/kv/range", &body).await?;
            let server = self.server();
            let response: RangeResponse = read(&server, &page)?;
            revision.get_or_insert(number(&server, &response.header.revision)?);
            for pair in response.kvs {
                pairs.push(Pair {
                    key: decode(&server, &pair.key)?,
                    value: decode(&server, &pair.value)?,
                    mod_revision: number(&server, &pair.mod_revision)?,
                });
            }
            match pairs.last() {
                // The smallest key above the last one.
                Some(last) if response.more => from = [&last.key[..], b"\0"].concat(),
                _ => return Ok((revision.unwrap_or(0), pairs)),
            }
            received.add(&server, &page)?;
        }
    }

    /// Applies transactions as one. Returns false if a comparison failed.
    pub(super) async fn txn(&mut self, transactions: &[Txn]) -> Result<bool, ProviderError> {
        let mut compare = Vec::new();
        let mut success = Vec::new();
        for txn in transactions {
            compare.extend(&txn.compare);
            success.extend(&txn.operations);
        }
        let body = json!({"compare": compare, "success": success});
        let body = self.call("/v3/kv/txn", &body).await?;
        let response: Value = read(&self.server(), &body)?;
        Ok(response["succeeded"] == true)
    }

    /// Calls the gateway, and renews the token if it has expired.
    async fn call(&mut self, path: &str, body: &Value) -> Result<Bytes, ProviderError> {
        if self.token.is_none() && self.user.is_some() {
            self.authenticate().await?;
        }
        match self.try_members(path, body).await {
            // By default a token expires after 300 s (`--auth-token-ttl`), and a member forgets it when it restarts.
            Err(ProviderError::Refused { reason, .. })
                if self.user.is_some() && reason.ends_with(NO_TOKEN) =>
            {
                self.authenticate().await?;
                self.try_members(path, body).await
            }
            result => result,
        }
    }

    async fn authenticate(&mut self) -> Result<(), ProviderError> {
        // The request for a token needs none.
        self.token = None;
        let Some((name, password)) = &self.user else {
            return Ok(());
        };
        let body = json!({"name": name, "password": password});
        let body = self.try_members("/v3/auth/authenticate", &body).await?;
        let response: Value = read(&self.server(), &body)?;
        let Some(token) = response["token"].as_str() else {
            return Err(bad_answer(&self.server(), "it has no token"));
        };
        self.token = Some(token.to_owned());
        Ok(())
    }

    /// Calls the first reachable member, which then comes first in the order.
    ///
    /// A transaction is sent only once: after a broken connection its outcome is unknown, and the
    /// next listing decides.
    async fn try_members(&mut self, path: &str, body: &Value) -> Result<Bytes, ProviderError> {
        // One attempt more than members, because an idle connection may have been closed.
        let attempts = if path == "/v3/kv/txn" {
            1
        } else {
            self.urls.len() + 1
        };
        let mut result = self.post(path, body).await;
        for _ in 1..attempts {
            if !try_next(&mut self.urls, &result) {
                break;
            }
            result = self.post(path, body).await;
        }
        result
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Bytes, ProviderError> {
        let server = self.server();
        let mut request = Request::post(format!("{server}{path}"))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let sent = self.http.send(&server, request, body.to_string());
        let response = sent.await?;
        if response.status() == StatusCode::OK {
            return Ok(response.into_body());
        }
        let answer: Value = serde_json::from_slice(response.body()).unwrap_or_default();
        let text = answer["error"]
            .as_str()
            .or(answer["message"].as_str())
            .unwrap_or("no reason given")
            .to_owned();
        // Not every version of etcd answers 401, so the text decides as well.
        let is_token = text.contains("invalid auth token") || text.contains("user name is empty");
        if response.status() == StatusCode::UNAUTHORIZED || is_token {
            return Err(ProviderError::Refused {
                server,
                reason: text + NO_TOKEN,
            });
        }
        let reason = format!("{} ({text})", response.status());
        // Such as a member without a leader or with too many requests; another one may answer.
        Err(if is_temporary(response.status()) {
            ProviderError::Unreachable { server, reason }
        } else {
            ProviderError::Refused { server, reason }
        })
    }

    fn server(&self) -> String {
        // The settings contain at least one URL.
        self.urls.first().cloned().unwrap_or_default()
    }
}

fn read<T: DeserializeOwned>(server: &str, body: &[u8]) -> Result<T, ProviderError> {
    go_json::from_slice(body).map_err(|error| bad_answer(server, error))
}

fn number(server: &str, text: &str) -> Result<i64, ProviderError> {
    text.parse()
        .map_err(|_| bad_answer(server, "a revision is not a number"))
}

fn decode(server: &str, text: &str) -> Result<Vec<u8>, ProviderError> {
    STANDARD
        .decode(text)
        .map_err(|_| bad_answer(server, "a key or value is not base64"))
}

/// Value of a key. Empty members are omitted; unknown ones are kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Service {
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub(super) host: String,
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub(super) text: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) ttl: Option<u32>,
    /// Number of labels in the key that do not belong to the name.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub(super) targetstrip: u32,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) owner: Option<String>,
    #[serde(flatten)]
    pub(super) others: BTreeMap<String, Value>,
}

/// Members of a value that are read.
const MEMBERS: [&str; 6] = ["host", "text", "ttl", "targetstrip", "group", "owner"];

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Service {
    /// Reads a value as CoreDNS and external-dns do.
    pub(super) fn read(value: &[u8]) -> Result<Self, serde_json::Error> {
        let members: Map<String, Value> = go_json::from_slice(value)?;
        let mut members = go_json::fold_names(members, &MEMBERS);
        members.retain(|name, value| !value.is_null() || !MEMBERS.contains(&name.as_str()));
        serde_json::from_value(members.into())
    }

    pub(super) fn of(record_type: RecordType, target: &Target) -> Self {
        if record_type != RecordType::TXT {
            return Self {
                host: target.as_str().to_owned(),
                ..Self::default()
            };
        }
        let octets = target.text_octets();
        let text = String::from_utf8(octets).unwrap_or_else(|_| target.as_str().to_owned());
        // external-dns writes owner texts with their quotes.
        let text = if text.starts_with("heritage=") {
            format!("\"{text}\"")
        } else {
            text
        };
        Self {
            text,
            ..Self::default()
        }
    }

    /// Returns the records of the value: one for the host, and one for the text.
    pub(super) fn records(&self, name: &Name) -> Vec<(RecordType, Target)> {
        let mut records = Vec::new();
        if !self.host.is_empty() {
            let record_type = host_type(&self.host, name);
            // CoreDNS cannot answer an invalid host name either.
            if let Ok(target) = Target::parse(record_type, &self.host) {
                records.push((record_type, target));
            }
        }
        if !self.text.is_empty()
            && let Ok(target) = Target::parse(RecordType::TXT, &self.text)
        {
            records.push((RecordType::TXT, target));
        }
        records
    }

    /// Returns whether this value has the target of `wanted`.
    pub(super) fn has_target_of(&self, wanted: &Self, record_type: RecordType) -> bool {
        self.target(record_type) == wanted.target(record_type)
    }

    fn target(&self, record_type: RecordType) -> Option<Target> {
        let text = if record_type == RecordType::TXT {
            &self.text
        } else {
            &self.host
        };
        Target::parse(record_type, text).ok()
    }

    pub(super) fn without(mut self, record_type: RecordType) -> Self {
        if record_type == RecordType::TXT {
            self.text.clear()
        } else {
            self.host.clear()
        }
        self
    }

    pub(super) fn is_empty(&self) -> bool {
        self.host.is_empty() && self.text.is_empty()
    }
}

fn host_type(host: &str, name: &Name) -> RecordType {
    let is_reverse = [".in-addr.arpa", ".ip6.arpa"]
        .iter()
        .any(|suffix| name.as_str().ends_with(suffix));
    // The format has no types: a name below a reverse zone is a pointer, elsewhere an alias.
    match RecordType::of_host(host) {
        RecordType::CNAME if is_reverse => RecordType::PTR,
        other => other,
    }
}

/// Returns the key of a name, with its labels in reverse order.
pub(super) fn key_of(prefix: &str, name: &Name) -> Vec<u8> {
    let mut labels: Vec<&str> = name.labels().collect();
    labels.reverse();
    format!("{prefix}{}", labels.join("/")).into_bytes()
}

/// Returns the name of a key without its first `strip` labels.
pub(super) fn name_of(prefix: &str, key: &[u8], strip: u32) -> Option<Name> {
    let path = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?;
    let labels: Vec<&str> = path
        .split('/')
        .rev()
        .skip(usize::try_from(strip).ok()?)
        .collect();
    if labels.is_empty() {
        return None;
    }
    Name::parse(&labels.join(".")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::{GroupSender as _, MAX_PAGES, tests::Scripted};

    #[test]
    fn values_are_read_as_coredns_reads_them() {
        let value = br#"{"Host": "192.0.2.1", "TTL": 60, "text": null, "Group": null, "priority": 10, "x": null}"#;
        let service = Service::read(value).unwrap();
        assert_eq!(
            (service.host.as_str(), service.ttl),
            ("192.0.2.1", Some(60))
        );
        assert_eq!((service.text.as_str(), service.group), ("", None));
        // All other fields of the value are kept when it is written.
        assert_eq!(service.others.keys().collect::<Vec<_>>(), ["priority", "x"]);
        assert!(Service::read(b"null").unwrap().is_empty());
        assert!(Service::read(b"not json").is_err());
    }

    #[test]
    fn values_hold_a_host_and_a_text() {
        let name = Name::parse("a.example.org").unwrap();
        for (value, expected) in [
            (r#"{"host": "192.0.2.1"}"#, "A 192.0.2.1"),
            (r#"{"host": "2001:db8::1"}"#, "AAAA 2001:db8::1"),
            (r#"{"host": "b.example.org"}"#, "CNAME b.example.org"),
            (r#"{"text": "x"}"#, "TXT x"),
            (r#"{"host": "192.0.2.1", "text": "x"}"#, "A 192.0.2.1,TXT x"),
            (r#"{"host": "b..org", "text": "x"}"#, "TXT x"),
            (r#"{"ttl": 60}"#, ""),
        ] {
            let records = Service::read(value.as_bytes()).unwrap().records(&name);
            let shown: Vec<String> = records
                .iter()
                .map(|(record_type, target)| format!("{record_type} {}", target.as_str()))
                .collect();
            assert_eq!(shown.join(","), expected, "{value}");
        }
    }

    #[test]
    fn comparisons_have_gateway_form() {
        let mut txn = Txn::default();
        txn.compare_revision(b"/a", 7);
        txn.compare_unchanged(b"/a", 9);
        txn.write(b"/a", Some(b"v"));
        txn.write(b"/a", None);
        assert_eq!(
            Value::from(txn.compare),
            json!([
                {"key": "L2E=", "target": "MOD", "result": "EQUAL", "mod_revision": "7"},
                {"key": "L2E=", "target": "MOD", "result": "LESS", "mod_revision": "10"},
                // From `/a/` to `/a0`.
                {"key": "L2Ev", "range_end": "L2Ew", "target": "MOD", "result": "LESS", "mod_revision": "10"},
            ])
        );
        assert_eq!(
            Value::from(txn.operations),
            json!([
                {"request_put": {"key": "L2E=", "value": "dg=="}},
                {"request_delete_range": {"key": "L2E="}},
            ])
        );
    }

    #[test]
    fn keys_reverse_the_labels() {
        let name = |text: &str| Name::parse(text).unwrap();
        let key = key_of("/skydns/", &name("a.example.org"));
        assert_eq!(key, b"/skydns/org/example/a");
        for (key, strip, expected) in [
            ("/skydns/org/example/a", 0, Some("a.example.org")),
            ("/skydns/org/example/a/x1", 1, Some("a.example.org")),
            ("/skydns/org/example/a/y/x1", 2, Some("a.example.org")),
            ("/skydns/org/example", 2, None),
            ("/skydns/org/example", 3, None),
            ("/other/org", 0, None),
            ("/skydns/org//a", 0, None),
        ] {
            let found = name_of("/skydns/", key.as_bytes(), strip);
            assert_eq!(found, expected.map(name), "{key} {strip}");
        }
        assert_eq!(name_of("/skydns/", b"/skydns/\xff", 0), None);
    }

    #[test]
    fn values_match_external_dns() {
        let service = |record_type, text: &str| {
            let target = Target::parse(record_type, text).unwrap();
            serde_json::to_value(Service::of(record_type, &target)).unwrap()
        };
        assert_eq!(
            service(RecordType::A, "192.0.2.1"),
            json!({"host": "192.0.2.1"})
        );
        assert_eq!(
            service(RecordType::TXT, "a note"),
            json!({"text": "a note"})
        );
        assert_eq!(service(RecordType::TXT, "a\\b"), json!({"text": "a\\b"}));
        assert_eq!(
            service(RecordType::TXT, "heritage=external-dns"),
            json!({"text": "\"heritage=external-dns\""})
        );
        let whole = Service {
            host: "h".to_owned(),
            text: "t".to_owned(),
            ttl: Some(0),
            targetstrip: 1,
            group: Some("g".to_owned()),
            owner: Some("o".to_owned()),
            others: BTreeMap::from([("priority".to_owned(), json!(5))]),
        };
        assert_eq!(
            serde_json::to_value(&whole).unwrap(),
            json!({"host": "h", "text": "t", "ttl": 0, "targetstrip": 1, "group": "g", "owner": "o", "priority": 5})
        );
        assert_eq!(
            Service::read(&serde_json::to_vec(&whole).unwrap()).unwrap(),
            whole
        );
        let without = |record_type| whole.clone().without(record_type);
        assert_eq!(
            (&*without(RecordType::A).host, &*without(RecordType::A).text),
            ("", "t")
        );
        assert_eq!(
            (
                &*without(RecordType::TXT).host,
                &*without(RecordType::TXT).text
            ),
            ("h", "")
        );
        assert!(!without(RecordType::A).is_empty() && !without(RecordType::TXT).is_empty());
        assert!(without(RecordType::A).without(RecordType::TXT).is_empty());
    }

    #[test]
    fn targets_are_compared_by_their_type() {
        let value = |host: &str, text: &str| Service {
            host: host.to_owned(),
            text: text.to_owned(),
            ..Service::default()
        };
        let one = value("2001:DB8::1", "t");
        for (other, record_type, expected) in [
            (value("2001:db8::1", "x"), RecordType::AAAA, true),
            (value("2001:db8::2", "t"), RecordType::AAAA, false),
            (value("", "t"), RecordType::TXT, true),
            (value("2001:db8::1", "x"), RecordType::TXT, false),
        ] {
            assert_eq!(
                one.has_target_of(&other, record_type),
                expected,
                "{other:?}"
            );
        }
    }

    #[test]
    fn reverse_names_have_pointers() {
        for (host, name, expected) in [
            ("a.b", "1.2.0.192.in-addr.arpa", RecordType::PTR),
            ("a.b", "1.ip6.arpa", RecordType::PTR),
            ("a.b", "x.example.org", RecordType::CNAME),
            ("a.b", "in-addr.arpa.example.org", RecordType::CNAME),
            ("192.0.2.1", "1.2.0.192.in-addr.arpa", RecordType::A),
            ("::1", "x.example.org", RecordType::AAAA),
        ] {
            assert_eq!(
                host_type(host, &Name::parse(name).unwrap()),
                expected,
                "{host} {name}"
            );
        }
    }

    #[test]
    fn malformed_responses_name_the_server() {
        assert_eq!(number("http://e", "12").unwrap(), 12);
        assert_eq!(
            number("http://e", "x").unwrap_err().to_string(),
            "http://e: invalid response: a revision is not a number"
        );
        assert_eq!(decode("http://e", "dg==").unwrap(), b"v");
        assert_eq!(
            decode("http://e", "?").unwrap_err().to_string(),
            "http://e: invalid response: a key or value is not base64"
        );
    }

    async fn member(responses: &[(u16, &str)], user: bool) -> (Etcd, Scripted) {
        let server = Scripted::new(responses).await;
        let settings = CoreDnsSettings {
            urls: vec![server.url.clone()],
            prefix: "/skydns/".to_owned(),
            user: user.then(|| ("u".to_owned(), "p".to_owned())),
            strict_owner: None,
            files: Default::default(),
            timeout: std::time::Duration::from_secs(60),
        };
        (Etcd::new(&settings).unwrap(), server)
    }

    fn page(revision: u8, keys: &[&str], more: bool) -> String {
        let mut pairs = Vec::new();
        for key in keys {
            pairs.push(json!({"key": STANDARD.encode(key), "value": "dg==", "mod_revision": "7"}));
        }
        json!({"header": {"revision": revision.to_string()}, "kvs": pairs, "more": more})
            .to_string()
    }

    #[tokio::test]
    async fn pages_share_a_revision() {
        let first = page(9, &["/s/a", "/s/b"], true);
        let second = page(12, &["/s/c"], false);
        let (mut etcd, server) = member(&[(200, &first), (200, &second)], false).await;
        let (revision, pairs) = etcd.range("/s/").await.unwrap();
        let keys: Vec<String> = pairs
            .iter()
            .map(|pair| String::from_utf8_lossy(&pair.key).into_owned())
            .collect();
        assert_eq!((revision, keys.join(" ").as_str()), (9, "/s/a /s/b /s/c"));
        assert!(
            pairs
                .iter()
                .all(|pair| pair.value == b"v" && pair.mod_revision == 7)
        );
        let end = STANDARD.encode("/s0");
        let begin = json!({"key": STANDARD.encode("/s/"), "range_end": end, "limit": "4000"});
        let next = json!({"key": STANDARD.encode("/s/b\0"), "range_end": end, "limit": "4000", "revision": "9"});
        assert_eq!(
            server.asked(),
            [
                format!("POST /v3/kv/range {begin}"),
                format!("POST /v3/kv/range {next}")
            ]
        );
        let (mut etcd, _server) = member(&[(200, &page(3, &[], false))], false).await;
        let (revision, pairs) = etcd.range("/s/").await.unwrap();
        assert_eq!((revision, pairs.len()), (3, 0));
    }

    #[tokio::test]
    async fn overloaded_member_is_no_fault_of_a_name() {
        for (code, is_temporary) in [
            (400, false),
            (403, false),
            (408, true),
            (429, true),
            (500, true),
            (504, true),
        ] {
            let (mut etcd, _server) = member(&[(code, "{\"message\": \"why\"}")], false).await;
            let mut txn = Txn::default();
            txn.write(b"/a", None);
            let result = etcd.send(&[&[txn]]).await.remove(0);
            assert_eq!(result.is_of_service(), is_temporary, "{code}: {result:?}");
        }
    }

    #[tokio::test]
    async fn endless_listing_is_given_up() {
        let again = page(9, &["/s/a"], true);
        let responses = vec![(200, again.as_str()); MAX_PAGES + 1];
        let (mut etcd, server) = member(&responses, false).await;
        let error = etcd.range("/s/").await.err().unwrap().to_string();
        assert_eq!(
            error,
            format!(
                "{}: invalid response: its listing does not end after 1000 pages",
                server.url
            )
        );
        assert_eq!(server.asked().len(), MAX_PAGES);
    }

    #[tokio::test]
    async fn compacted_listing_starts_over() {
        let compacted = (
            400,
            "{\"error\": \"mvcc: required revision has been compacted\"}",
        );
        let last = page(9, &["/s/a"], false);
        let (mut etcd, _server) = member(&[compacted, compacted, (200, &last)], false).await;
        assert_eq!(etcd.range("/s/").await.unwrap().1.len(), 1);
        let (mut etcd, server) = member(&[compacted; 6], false).await;
        let error = etcd.range("/s/").await.err().unwrap().to_string();
        assert_eq!(
            error,
            format!(
                "{}: invalid response: its history is compacted faster than keys can be listed",
                server.url
            )
        );
        assert_eq!(server.asked().len(), 5);
    }

    #[tokio::test]
    async fn transactions_require_every_comparison() {
        for (body, expected) in [
            ("{\"succeeded\": true}", true),
            ("{\"succeeded\": false}", false),
            ("{}", false),
        ] {
            let (mut etcd, server) = member(&[(200, body)], false).await;
            let mut txn = Txn::default();
            txn.compare_revision(b"/a", 7);
            txn.write(b"/a", None);
            assert_eq!(etcd.txn(&[txn]).await.unwrap(), expected);
            let asked = server.asked();
            let sent = asked[0].strip_prefix("POST /v3/kv/txn ").unwrap();
            let sent: Value = serde_json::from_str(sent).unwrap();
            assert_eq!(sent["compare"].as_array().unwrap().len(), 1);
            assert_eq!(sent["success"].as_array().unwrap().len(), 1);
        }
        // Its outcome may be unknown, so it is sent only once; anything else is tried again.
        let (mut etcd, server) = member(&[(503, ""), (200, "{\"succeeded\": true}")], false).await;
        assert!(etcd.txn(&[]).await.is_err());
        assert_eq!(server.asked().len(), 1);
        let (mut etcd, server) = member(&[(503, ""), (200, &page(1, &[], false))], false).await;
        assert!(etcd.range("/s/").await.is_ok());
        assert_eq!(server.asked().len(), 2);
    }

    #[tokio::test]
    async fn tokens_are_fetched_and_renewed() {
        let expired = (401, "{\"error\": \"etcdserver: invalid auth token\"}");
        let token = (200, "{\"token\": \"t\"}");
        let keys = page(1, &[], false);
        let (mut etcd, server) =
            member(&[token, (200, &keys), expired, token, (200, &keys)], true).await;
        etcd.range("/s/").await.unwrap();
        etcd.range("/s/").await.unwrap();
        let paths: Vec<String> = server
            .asked()
            .iter()
            .map(|line| line.split(' ').nth(1).unwrap().to_owned())
            .collect();
        let (login, range) = ("/v3/auth/authenticate", "/v3/kv/range");
        assert_eq!(paths, [login, range, range, login, range]);
        assert_eq!(
            server.asked()[0],
            format!("POST {login} {{\"name\":\"u\",\"password\":\"p\"}}")
        );
        let (mut etcd, server) = member(&[(200, "{}")], true).await;
        assert_eq!(
            etcd.range("/s/").await.err().unwrap().to_string(),
            format!("{}: invalid response: it has no token", server.url)
        );
        // Without a user, none is fetched.
        let (mut etcd, server) = member(&[expired], false).await;
        assert_eq!(
            etcd.range("/s/").await.err().unwrap().to_string(),
            format!(
                "{} refused: etcdserver: invalid auth token; set etcd-username and etcd-password",
                server.url
            )
        );
        assert_eq!(server.asked().len(), 1);
    }

    #[tokio::test]
    async fn etcd_errors_keep_the_text() {
        let no_token = "; set etcd-username and etcd-password";
        for (code, body, expected) in [
            (
                400,
                "{\"error\": \"bad\"}",
                " refused: 400 Bad Request (bad)".to_owned(),
            ),
            (
                400,
                "{\"message\": \"worse\"}",
                " refused: 400 Bad Request (worse)".to_owned(),
            ),
            (
                500,
                "x",
                ": 500 Internal Server Error (no reason given)".to_owned(),
            ),
            (401, "{}", format!(" refused: no reason given{no_token}")),
            (
                400,
                "{\"error\": \"etcdserver: user name is empty\"}",
                format!(" refused: etcdserver: user name is empty{no_token}"),
            ),
            (
                503,
                "{}",
                ": 503 Service Unavailable (no reason given)".to_owned(),
            ),
        ] {
            let (etcd, server) = member(&[(code, body)], false).await;
            let error = etcd.post("/x", &json!({})).await.unwrap_err();
            assert_eq!(error.to_string(), format!("{}{expected}", server.url));
        }
        let (mut etcd, server) = member(&[(200, "x")], false).await;
        let error = etcd.txn(&[]).await.unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{}: invalid response: ", server.url)),
            "{error}"
        );
    }
}
