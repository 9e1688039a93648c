//! Publishing through external-dns's webhook protocol, to a strict double of a provider.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use dns_publish::{
    engine::{Engine, Report},
    ownership::Registry,
    plan::{Desired, PlanRules},
    provider::{
        OnConflict, Parameters,
        webhook::{Webhook, WebhookSettings},
    },
    record::RecordType,
};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::{
    name_server::{names, quiet, record, wish},
    publisher::Publisher,
};

const MEDIA_TYPE: &str = "application/external.dns.webhook+json;version=1";

/// Lowest TTL that the double accepts.
const MIN_TTL: i64 = 30;

#[derive(Default)]
struct Peer {
    sets: BTreeMap<(String, String), Value>,
    /// Number of changes in each message.
    messages: Vec<usize>,
    listings: usize,
    /// Number of calls to `POST /records`.
    calls: usize,
    /// Responses of the next calls to `POST /records`.
    failures: Vec<StatusCode>,
    /// A message with this name is refused.
    refused: Option<String>,
    /// Changes are acknowledged and dropped.
    forgets: bool,
    /// Domain filter in place of the usual one.
    filter: Option<Value>,
    habits: Habits,
    /// Values of `Authorization` in requests.
    authorizations: BTreeSet<String>,
}

/// Habits of real providers behind the protocol.
#[derive(Clone, Copy, Default)]
struct Habits {
    /// Empty lists are `null`, as Go writes a nil slice, members are in other cases, and the media type has a charset.
    is_go: bool,
    /// Sets are listed without a TTL.
    keeps_no_ttl: bool,
    /// Only the first endpoint is adjusted.
    adjusts_one: bool,
}

type Shared = Arc<Mutex<Peer>>;

struct Double {
    url: String,
    peer: Shared,
}

impl Double {
    async fn start() -> Self {
        let peer = Shared::default();
        let router = Router::new()
            .route("/", get(negotiate))
            .route("/records", get(list).post(change))
            .route("/adjustendpoints", post(adjust))
            .with_state(peer.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, peer }
    }

    fn engine(&self) -> Engine {
        engine(&self.url)
    }

    fn with<T>(&self, look: impl FnOnce(&mut Peer) -> T) -> T {
        look(&mut self.peer.lock().unwrap())
    }
}

fn engine(url: &str) -> Engine {
    let parameters = Parameters([("webhook-provider-url".to_owned(), url.to_owned())].into());
    let provider = Webhook::new(WebhookSettings::from_parameters(&parameters).unwrap()).unwrap();
    Engine::new(Box::new(provider), Registry::default(), PlanRules::of("me"))
}

fn reply(body: &Value) -> Response {
    ([(header::CONTENT_TYPE, MEDIA_TYPE)], body.to_string()).into_response()
}

/// Replies with a list as a provider with these habits does.
fn reply_list(sets: Vec<Value>, habits: Habits) -> Response {
    if !habits.is_go {
        return reply(&json!(sets));
    }
    let body = if sets.is_empty() {
        "null\n".to_owned()
    } else {
        let text = json!(sets).to_string().replace("dnsName", "DNSName");
        format!("{},null]\n", text.trim_end_matches(']'))
    };
    let media_type = format!("{MEDIA_TYPE}; charset=utf-8");
    ([(header::CONTENT_TYPE, media_type)], body).into_response()
}

fn key(endpoint: &Value) -> (String, String) {
    let text = |member: &str| endpoint[member].as_str().unwrap().to_owned();
    (text("dnsName"), text("recordType"))
}

async fn negotiate(State(peer): State<Shared>, headers: HeaderMap) -> Response {
    if headers[header::ACCEPT] != MEDIA_TYPE {
        return StatusCode::NOT_ACCEPTABLE.into_response();
    }
    let usual = || json!({"include": ["example.org", "example.net"]});
    let mut peer = peer.lock().unwrap();
    if let Some(authorization) = headers.get(header::AUTHORIZATION) {
        let text = authorization.to_str().unwrap().to_owned();
        peer.authorizations.insert(text);
    }
    reply(&peer.filter.clone().unwrap_or_else(usual))
}

async fn list(State(peer): State<Shared>, headers: HeaderMap) -> Response {
    if headers[header::ACCEPT] != MEDIA_TYPE {
        return StatusCode::NOT_ACCEPTABLE.into_response();
    }
    let mut peer = peer.lock().unwrap();
    peer.listings += 1;
    let mut sets: Vec<Value> = peer.sets.values().cloned().collect();
    if peer.habits.keeps_no_ttl {
        for set in &mut sets {
            set.as_object_mut().unwrap().remove("recordTTL");
        }
    }
    reply_list(sets, peer.habits)
}

async fn adjust(State(peer): State<Shared>, headers: HeaderMap, body: String) -> Response {
    if headers[header::CONTENT_TYPE] != MEDIA_TYPE {
        return StatusCode::UNSUPPORTED_MEDIA_TYPE.into_response();
    }
    let mut endpoints: Vec<Value> = serde_json::from_str(&body).unwrap();
    for endpoint in &mut endpoints {
        let ttl = endpoint["recordTTL"].as_i64().unwrap_or(0);
        endpoint["recordTTL"] = ttl.max(MIN_TTL).into();
    }
    let habits = peer.lock().unwrap().habits;
    if habits.adjusts_one {
        endpoints.truncate(1);
    }
    reply_list(endpoints, habits)
}

async fn change(
    State(peer): State<Shared>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Response {
    if headers[header::CONTENT_TYPE] != MEDIA_TYPE {
        return StatusCode::UNSUPPORTED_MEDIA_TYPE.into_response();
    }
    let mut peer = peer.lock().unwrap();
    peer.calls += 1;
    if let Some(failure) = peer.failures.pop() {
        return (failure, "as the test wants").into_response();
    }
    let list = |member: &str| body[member].as_array().cloned().unwrap_or_default();
    let [create, old, new, delete] = ["create", "updateOld", "updateNew", "delete"].map(list);
    let all = || create.iter().chain(&old).chain(&new).chain(&delete);
    if let Some(refused) = &peer.refused
        && all().any(|endpoint| key(endpoint).0 == *refused)
    {
        return (StatusCode::BAD_REQUEST, "the name is not allowed").into_response();
    }
    assert_eq!(old.len(), new.len());
    peer.messages.push(all().count());
    if peer.forgets {
        return StatusCode::NO_CONTENT.into_response();
    }
    for endpoint in delete.iter().chain(&old) {
        let removed = peer.sets.remove(&key(endpoint));
        let removed = removed.unwrap_or_else(|| panic!("{endpoint} is not there"));
        assert_eq!(removed["targets"], endpoint["targets"]);
    }
    for endpoint in create.iter().chain(&new) {
        assert!(
            key(endpoint).1 == "TXT" || endpoint["recordTTL"].as_i64().unwrap_or(0) >= MIN_TTL,
            "{endpoint}"
        );
        let before = peer.sets.insert(key(endpoint), endpoint.clone());
        assert_eq!(before, None, "{endpoint} exists");
    }
    StatusCode::NO_CONTENT.into_response()
}

async fn publish(engine: &mut Engine, desired: &Desired) -> Report {
    let report = engine
        .reconcile(desired, Some(1_000), &quiet)
        .await
        .unwrap();
    assert!(report.is_complete(), "{report:?}");
    report
}

#[tokio::test]
async fn changes_follow_the_protocol() {
    let double = Double::start().await;
    let mut engine = double.engine();
    let mut desired = names(250);
    // Its TTL is below the provider's minimum; the plan must agree with the adjusted one.
    desired
        .records
        .push(record("low.example.net", RecordType::A, "192.0.2.1"));
    assert_eq!(publish(&mut engine, &desired).await.applied(), 251);
    assert_eq!(double.with(|peer| peer.sets.len()), 502);
    assert!(
        double.with(|peer| peer.messages.iter().all(|count| *count <= 200)),
        "messages are small"
    );
    assert_eq!(publish(&mut engine, &desired).await.applied(), 0);
    desired.records[3] = record("n3.example.org", RecordType::CNAME, "x.example.net");
    desired.records[4].targets = record("x", RecordType::A, "203.0.113.9").targets;
    desired.records.remove(5);
    assert_eq!(publish(&mut engine, &desired).await.applied(), 3);
    assert_eq!(double.with(|peer| peer.sets.len()), 500);
    desired
        .records
        .push(record("x.example.com", RecordType::A, "192.0.2.1"));
    let report = publish(&mut engine, &desired).await;
    assert_eq!(
        report.notes.len(),
        1,
        "the peer does not serve the domain: {:?}",
        report.notes
    );
    assert_eq!(publish(&mut engine, &wish([])).await.applied(), 250);
    assert_eq!(double.with(|peer| peer.sets.len()), 0);
}

#[tokio::test]
async fn failures_are_temporary_or_isolated() {
    let double = Double::start().await;
    let mut engine = double.engine();
    double.with(|peer| peer.failures = vec![StatusCode::SERVICE_UNAVAILABLE]);
    let report = engine.reconcile(&names(10), None, &quiet).await.unwrap();
    assert_eq!(
        (
            report.applied(),
            report
                .zones
                .iter()
                .map(|zone| zone.failures.len())
                .sum::<usize>()
        ),
        (0, 10)
    );
    double.with(|peer| peer.refused = Some("n7.example.org".to_owned()));
    let report = engine.reconcile(&names(10), None, &quiet).await.unwrap();
    assert_eq!(report.applied(), 9, "{report:?}");
    double.with(|peer| (peer.refused, peer.forgets) = (None, true));
    let report = engine.reconcile(&names(10), None, &quiet).await.unwrap();
    let failures: Vec<String> = report
        .zones
        .iter()
        .flat_map(|zone| &zone.failures)
        .map(|(_, error)| error.to_string())
        .collect();
    assert!(
        report.applied() == 0 && failures[0].contains("not as requested"),
        "{failures:?}"
    );
    // A change by somebody else after the listing is a conflict.
    double.with(|peer| peer.forgets = false);
    let listing = engine.list().await.unwrap();
    let mut wanted = names(10);
    wanted.records[2].targets = record("x", RecordType::A, "203.0.113.9").targets;
    engine.prepare(&wanted).await.unwrap();
    let planned = engine.plan(&listing, &wanted);
    double.with(|peer| {
        let key = ("n2.example.org".to_owned(), "A".to_owned());
        peer.sets.get_mut(&key).unwrap()["targets"] = json!(["192.0.2.66"]);
    });
    let report = engine
        .apply(&listing, &planned, None, OnConflict::ListAgain, &quiet)
        .await;
    assert_eq!(
        report
            .zones
            .iter()
            .map(|zone| zone.conflicts)
            .sum::<usize>(),
        1,
        "{report:?}"
    );
}

#[tokio::test]
async fn nil_slices_of_go_are_empty_lists() {
    let double = Double::start().await;
    double.with(|peer| peer.habits.is_go = true);
    let mut engine = double.engine();
    for filter in [Value::Null, json!({"INCLUDE": null, "regexInclude": null})] {
        double.with(|peer| peer.filter = Some(filter));
        // The zone is empty at first.
        assert_eq!(publish(&mut engine, &names(3)).await.applied(), 3);
        assert_eq!(publish(&mut engine, &names(3)).await.applied(), 0);
        // Nothing is wanted, so nothing is adjusted, and nothing is left in the end.
        assert_eq!(publish(&mut engine, &wish([])).await.applied(), 3);
        assert_eq!(publish(&mut engine, &wish([])).await.applied(), 0);
        assert_eq!(double.with(|peer| peer.sets.len()), 0);
    }
}

#[tokio::test]
async fn peer_without_ttls_is_changed_once() {
    let double = Double::start().await;
    double.with(|peer| peer.habits.keeps_no_ttl = true);
    let mut engine = double.engine();
    publish(&mut engine, &names(3)).await;
    publish(&mut engine, &names(3)).await;
    let messages = double.with(|peer| peer.messages.len());
    for _ in 0..3 {
        let report = publish(&mut engine, &names(3)).await;
        assert_eq!(report.applied(), 0);
        let notes = report.zones.iter().flat_map(|zone| &zone.notes);
        let notes: Vec<String> = notes.map(ToString::to_string).collect();
        assert_eq!(notes.len(), 3, "{notes:?}");
        assert!(
            notes[0].contains("keeps the TTL 0 in place of 60"),
            "{notes:?}"
        );
    }
    assert_eq!(double.with(|peer| peer.messages.len()), messages);
    // Another wish is another attempt.
    let mut other = names(3);
    other.records[1].ttl = Some(120);
    assert_eq!(publish(&mut engine, &other).await.applied(), 1);
}

#[tokio::test]
async fn partial_adjustment_withdraws_nothing() {
    let double = Double::start().await;
    let mut engine = double.engine();
    publish(&mut engine, &names(3)).await;
    double.with(|peer| peer.habits.adjusts_one = true);
    let report = publish(&mut engine, &names(3)).await;
    assert_eq!(report.applied(), 0);
    let notes = report.zones.iter().flat_map(|zone| &zone.notes).count();
    assert_eq!(notes, 2, "{report:?}");
    assert_eq!(double.with(|peer| peer.sets.len()), 6);
}

#[tokio::test]
async fn answers_about_settings_blame_no_name() {
    let double = Double::start().await;
    for (code, messages, applied) in [
        (StatusCode::FOUND, 1, 0),
        (StatusCode::UNAUTHORIZED, 1, 0),
        (StatusCode::FORBIDDEN, 1, 0),
        (StatusCode::NOT_FOUND, 1, 0),
        (StatusCode::TOO_MANY_REQUESTS, 1, 0),
        (StatusCode::INTERNAL_SERVER_ERROR, 1, 0),
        // It may mean a name.
        (StatusCode::UNPROCESSABLE_ENTITY, 3, 64),
    ] {
        let mut engine = double.engine();
        double.with(|peer| {
            peer.sets.clear();
            // Taken from the end; the attempts after it succeed.
            peer.failures = vec![code];
            peer.calls = 0;
        });
        let report = engine.reconcile(&names(64), None, &quiet).await.unwrap();
        assert_eq!(report.applied(), applied, "{code}: {report:?}");
        assert_eq!(double.with(|peer| peer.calls), messages, "{code}");
        let mut failures = report.zones.iter().flat_map(|zone| &zone.failures);
        let shown = failures
            .next()
            .map(|(_, error)| error.contains(code.as_str()));
        assert_eq!(shown, (applied == 0).then_some(true), "{code}: {report:?}");
    }
}

/// Runs a peer that answers every request with these bytes; returns its address.
fn blurting(answer: Vec<u8>) -> std::net::SocketAddr {
    use std::io::{Read as _, Write as _};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            // Of a request without a body, one read is enough.
            let _ = client.read(&mut [0; 4096]);
            // The publisher ends the connection when it has read too much.
            let _ = client.write_all(&answer);
        }
    });
    address
}

#[test]
fn hostile_peer_is_bounded_escaped_and_its_password_hidden() {
    let publisher = Publisher::new();
    let configure = |url: String| {
        let config = json!({
            "documents": ["documents"],
            "store": "state/store",
            "control": {"socket": "control.sock"},
            "provider_settings": {"default/cloud": {"webhook-provider-url": url}},
        });
        publisher.write("publish.yml", &config.to_string());
    };
    publisher.write(
        "documents/cloud.yml",
        "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: cloud}\n\
         spec: {provider: webhook, selector: dnsprovider=bind, external-dns-parameters: {interval: 1s}}\n",
    );
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    let text = "\x1b[2J\x07oops ".repeat(10_000);
    let refusal = format!(
        "HTTP/1.1 403 Forbidden\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    );
    let peer = blurting(refusal.into_bytes());
    configure(format!("http://user:topsecret@{peer}"));
    let said = publisher.expect(1, "plan").out;
    assert!(said.contains("403 Forbidden"), "{said}");
    let is_clean = |text: &str| {
        !text.contains('\x1b') && !text.contains('\x07') && !text.contains("topsecret")
    };
    assert!(is_clean(&said) && said.len() < 2_000, "{said}");
    let running = publisher.start();
    running.wait_until("the failure", || {
        running
            .get("/status")
            .1
            .to_string()
            .contains("403 Forbidden")
    });
    let status = publisher.expect(1, "status").out;
    assert!(is_clean(&status), "{status}");
    running.stop();
    for file in [
        "log",
        "documents/web.json.status",
        "documents/cloud.yml.status",
    ] {
        let text = std::fs::read_to_string(publisher.path(file)).unwrap();
        assert!(is_clean(&text), "{file}: {text}");
        assert!(text.lines().all(|line| line.len() < 4_000), "{file}");
    }
    // The limit applies while reading: the peer claims more than it has.
    let head = "HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n";
    let peer = blurting([head.as_bytes(), &vec![b' '; 40 << 20]].concat());
    configure(format!("http://{peer}"));
    let said = publisher.expect(1, "plan").out;
    assert!(said.contains("longer than 33554432 bytes"), "{said}");
}

#[tokio::test]
async fn user_of_the_url_is_sent_as_go_sends_it() {
    let double = Double::start().await;
    let url = double.url.replace("http://", "http://us%65r:p%40ss+word@");
    publish(&mut engine(&url), &names(1)).await;
    let sent = double.with(|peer| peer.authorizations.clone());
    // user:p@ss+word
    assert_eq!(
        sent,
        BTreeSet::from(["Basic dXNlcjpwQHNzK3dvcmQ=".to_owned()])
    );
}

#[tokio::test]
async fn peer_filter_limits_names() {
    let names = [
        "a.example.org",
        "b.example.org",
        "x.b.example.org",
        "c.example.net",
    ];
    for (filter, served) in [
        (json!({}), &names[..]),
        (
            json!({"include": ["example.org"], "exclude": ["b.example.org"]}),
            &names[..1],
        ),
        (
            json!({"include": ["example.org"], "exclude": [".b.example.org"]}),
            &names[..2],
        ),
        (json!({"exclude": ["example.org"]}), &names[3..]),
        (json!({"regexInclude": "^[ab][.]example"}), &names[..2]),
        (
            json!({"regexInclude": "[.]example[.]org$", "regexExclude": "^(x|b)[.]"}),
            &names[..1],
        ),
        (json!({"regexExclude": "[.]net$"}), &names[..3]),
    ] {
        let double = Double::start().await;
        let mut engine = double.engine();
        let wanted = || wish(names.map(|name| record(name, RecordType::A, "192.0.2.1")));
        double.with(|peer| peer.filter = Some(filter.clone()));
        let report = publish(&mut engine, &wanted()).await;
        let written = || {
            let of_type = |(name, kind): &(String, String)| (kind == "A").then(|| name.clone());
            double.with(|peer| peer.sets.keys().filter_map(of_type).collect::<Vec<_>>())
        };
        let sorted = |is_wanted: &dyn Fn(&&str) -> bool| {
            let chosen = names
                .iter()
                .filter(|name| is_wanted(name))
                .map(ToString::to_string);
            chosen
                .collect::<BTreeSet<String>>()
                .into_iter()
                .collect::<Vec<_>>()
        };
        let expected = sorted(&|name| served.contains(name));
        assert_eq!(
            (report.applied(), written()),
            (served.len(), expected),
            "{filter}"
        );
        let mut noted: Vec<String> = report
            .notes
            .iter()
            .map(|note| note.name.to_string())
            .collect();
        noted.sort();
        assert_eq!(noted, sorted(&|name| !served.contains(name)), "{filter}");
        // Names that the peer serves no longer are left alone, even if nothing wants them.
        double.with(|peer| peer.filter = Some(json!({"exclude": names})));
        assert_eq!(
            publish(&mut engine, &wish([])).await.applied(),
            0,
            "{filter}"
        );
        assert_eq!(written().len(), served.len(), "{filter}");
    }
    // A filter that cannot be understood allows nothing.
    let double = Double::start().await;
    for filter in [
        json!({"include": ["example.org"], "regexInclude": "a"}),
        json!({"regexExclude": "("}),
        json!({"include": ["a..b"]}),
    ] {
        double.with(|peer| peer.filter = Some(filter));
        let error = double.engine().list().await.err().unwrap().to_string();
        assert!(error.contains("the domain filter has"), "{error}");
    }
}

/// Provider values of document 003 that external-dns serves, their parameters, and the part of the
/// advised command that configures the peer.
const SERVED_BY_PEER: [(&str, &str, &str); 4] = [
    (
        "aws-sd",
        "{txt-owner-id: me, domain-filter: example.org}",
        "--domain-filter=example.org",
    ),
    (
        "azure",
        "{azure-config-file: f, txt-owner-id: me}",
        "--azure-config-file=f",
    ),
    (
        "azure-dns",
        "{azure-config-file: f, azure-resource-group: g, txt-owner-id: me}",
        "--azure-config-file=f --azure-resource-group=g",
    ),
    (
        "azure-private-dns",
        "{azure-resource-group: g, azure-subscription-id: s, txt-owner-id: me}",
        "--azure-resource-group=g --azure-subscription-id=s",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn external_dns_serves_other_providers() {
    for (provider, parameters, arguments) in SERVED_BY_PEER {
        let double = Double::start().await;
        let publisher = Publisher::new();
        let configure = |settings: Value| {
            let config = json!({
                "documents": ["documents"],
                "store": "state/store",
                "control": {"socket": "control.sock"},
                "provider_settings": {"default/cloud": settings},
            });
            publisher.write("publish.yml", &config.to_string());
        };
        configure(json!({}));
        publisher.write(
            "documents/cloud.yml",
            &format!(
                "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {{name: cloud}}\n\
                 spec: {{provider: {provider}, selector: dnsprovider=bind, external-dns-parameters: {parameters}}}\n"
            ),
        );
        publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
        tokio::task::block_in_place(|| {
            let advice = publisher.expect(1, "check").errors;
            let command = format!("external-dns --webhook-server --provider={provider} ");
            for part in [
                command.as_str(),
                arguments,
                "set webhook-provider-url in provider_settings.default/cloud",
            ] {
                assert!(advice.contains(part), "{part}: {advice}");
            }
            assert!(
                !advice.contains("--txt-owner-id"),
                "the publisher keeps the ownership: {advice}"
            );
            publisher.expect(1, "apply");
            configure(json!({"webhook-provider-url": double.url}));
            publisher.expect(0, "check");
            assert!(
                publisher
                    .expect(2, "plan")
                    .out
                    .contains("+ a.example.org 60 A 192.0.2.1")
            );
            let before = double.with(|peer| peer.listings);
            assert_eq!(
                publisher.expect(0, "apply").out,
                "default/cloud: 1 names changed\n"
            );
            let listings = double.with(|peer| peer.listings) - before;
            assert_eq!(listings, 3, "for the plan, before and after the changes");
            assert!(publisher.expect(0, "plan").out.contains("nothing to do"));
            publisher.endpoints("web", &[("a.example.org", "192.0.2.2")]);
            publisher.expect(0, "apply");
            let targets = double
                .with(|peer| peer.sets[&("a.example.org".into(), "A".into())]["targets"].clone());
            assert_eq!(targets, json!(["192.0.2.2"]), "{provider}");
            publisher.expect(0, "retire --confirm-deletions 1");
        });
        assert_eq!(double.with(|peer| peer.sets.len()), 0);
    }
}

/// Returns a publisher whose webhook writes names of example.org to an alias file, and its URL.
fn fleet_writer() -> (Publisher, String) {
    let publisher = Publisher::new();
    std::fs::create_dir(publisher.path("aliases")).unwrap();
    let aliases = publisher.path("aliases/*.json");
    let control = json!({"socket": publisher.path("server.sock")});
    let server = json!({"port": 53, "alias_files_glob": aliases, "control": control});
    publisher.write("config.json", &server.to_string());
    let address = test_support::free_address();
    let alias_file = publisher.path("aliases/external-dns.json");
    let settings = json!({
        "documents": ["documents"],
        "store": "state/store",
        "control": {"socket": "control.sock"},
        "server": "config.json",
        "webhook": {
            "address": address,
            "domains": ["example.org"],
            "exclude_domains": ["closed.example.org"],
            "alias_file": alias_file,
        },
    });
    publisher.write("publish.yml", &settings.to_string());
    (publisher, format!("http://{address}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_names_are_written_by_the_protocol() {
    let (publisher, url) = fleet_writer();
    let aliases = || crate::publisher::read(&publisher.path("aliases/external-dns.json"));
    tokio::task::block_in_place(|| publisher.expect(0, "check"));
    let running = tokio::task::block_in_place(|| publisher.start());
    let mut writer = engine(&url);
    let mut desired = names(250);
    assert_eq!(publish(&mut writer, &desired).await.applied(), 250);
    assert_eq!(
        aliases().as_object().unwrap().len(),
        250,
        "owner records are no aliases"
    );
    tokio::task::block_in_place(|| running.kill());
    let running = tokio::task::block_in_place(|| publisher.start());
    assert_eq!(
        publish(&mut writer, &desired).await.applied(),
        0,
        "acknowledged records survive"
    );
    desired.records[3] = record("n3.example.org", RecordType::CNAME, "n4.example.org");
    desired.records[5].targets = record("x", RecordType::A, "203.0.113.9").targets;
    desired.records.remove(7);
    // The domain filter that the writer receives excludes it.
    desired
        .records
        .push(record("a.closed.example.org", RecordType::A, "192.0.2.1"));
    assert_eq!(
        publish(&mut writer, &desired).await.applied(),
        3,
        "the last one is left out"
    );
    assert_eq!(
        (
            &aliases()["n3.example.org"],
            &aliases()["n5.example.org"],
            aliases().get("n7.example.org")
        ),
        (&json!(["n4.example.org"]), &json!(["203.0.113.9"]), None)
    );
    assert_eq!(publish(&mut writer, &wish([])).await.applied(), 249);
    assert_eq!(aliases(), json!({}));
    // Only the running server knows other targets.
    let foreign = wish([record(
        "elsewhere.example.org",
        RecordType::CNAME,
        "lb.example.net",
    )]);
    let refused = writer.prepare(&foreign).await.unwrap_err().to_string();
    assert!(
        refused.contains("503") && refused.contains("server.sock"),
        "{refused}"
    );
    // An unwritable alias file is an error until it can be repaired.
    std::fs::remove_dir_all(publisher.path("aliases")).unwrap();
    assert!(
        writer
            .list()
            .await
            .err()
            .unwrap()
            .to_string()
            .contains("500")
    );
    std::fs::create_dir(publisher.path("aliases")).unwrap();
    publish(&mut writer, &names(1)).await;
    assert_eq!(aliases().as_object().unwrap().len(), 1);
    tokio::task::block_in_place(|| running.stop());
}

#[test]
fn broken_health_is_reported() {
    let (publisher, _) = fleet_writer();
    std::fs::create_dir_all(publisher.path("state")).unwrap();
    publisher.write("state/health.json", "{");
    publisher.start().stop();
    let log = std::fs::read_to_string(publisher.path("log")).unwrap();
    assert!(
        log.contains("health.json") && log.contains("the saved health is unknown"),
        "{log}"
    );
}

#[test]
fn webhook_refuses_other_messages() {
    let (publisher, url) = fleet_writer();
    let running = publisher.start();
    let call = |more: &[&str], path: &str| {
        let mut curl = std::process::Command::new("curl");
        curl.args(["--silent", "--include"])
            .args(more)
            .arg(format!("{url}{path}"));
        crate::process::run(&mut curl, "")
    };
    let typed = format!("Content-Type: {MEDIA_TYPE}");
    let filter = call(&["--header", &format!("Accept: {MEDIA_TYPE}")], "/");
    let filter = filter.to_lowercase();
    assert!(
        filter.contains("vary: content-type")
            && filter.contains(r#"{"include":["example.org"],"exclude":["closed.example.org"]}"#),
        "{filter}"
    );
    assert!(filter.contains(&typed.to_lowercase()), "{filter}");
    let set = |name: &str| {
        format!("{{\"dnsName\": \"{name}\", \"targets\": [\"192.0.2.1\"], \"recordType\": \"A\"}}")
    };
    let create = |name: &str| format!("{{\"create\": [{}]}}", set(name));
    let closed = create("a.closed.example.org");
    let with_charset = format!("{typed}; charset=utf-8");
    let upper = create("b.example.org")
        .replace("create", "Create")
        .replace("dnsName", "DNSNAME");
    let nothing = r#"{"create": null, "updateOld": null, "UpdateNew": null, "delete": null}"#;
    let (foreign, absent) = (
        create("a.example.net"),
        format!("{{\"delete\": [{}]}}", set("a.example.org")),
    );
    for (arguments, path, expected) in [
        (&["--header", "Accept: text/html"][..], "/", "406"),
        (&["--data", "[]"], "/adjustendpoints", "415"),
        (&["--header", &typed, "--data", "{"], "/records", "400"),
        (&["--header", &typed, "--data", &foreign], "/records", "400"),
        (&["--header", &typed, "--data", &closed], "/records", "400"),
        (&["--header", &typed, "--data", &absent], "/records", "503"),
        (
            &["--header", &typed, "--data", &create("a.example.org")],
            "/records",
            "204",
        ),
        (
            &["--header", &with_charset, "--data", "null"],
            "/records",
            "204",
        ),
        (
            &["--header", &with_charset, "--data", nothing],
            "/records",
            "204",
        ),
        (
            &["--header", &with_charset, "--data", &upper],
            "/records",
            "204",
        ),
        (
            &["--header", &typed, "--data", "null"],
            "/adjustendpoints",
            "200",
        ),
        (
            &["--header", &typed, "--data", "[null]"],
            "/adjustendpoints",
            "200",
        ),
        (&[], "/healthz", "200"),
        (&["--request", "DELETE"], "/records", "405"),
    ] {
        let said = call(arguments, path);
        assert!(
            said.starts_with(&format!("HTTP/1.1 {expected}")),
            "{arguments:?} {path}: {said}"
        );
    }
    running.stop();
    publisher.write(
        "config.json",
        "{\"port\": 53, \"alias_files_glob\": \"/other/*.json\"}",
    );
    assert!(
        publisher
            .expect(1, "check")
            .errors
            .contains("does not match alias_files_glob")
    );
}
