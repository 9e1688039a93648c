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
        webhook::{Settings, Webhook},
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
    /// Responses of the next calls to `POST /records`.
    failures: Vec<StatusCode>,
    /// A message with this name is refused.
    refused: Option<String>,
    /// Changes are acknowledged and dropped.
    forgets: bool,
    /// Domain filter in place of the usual one.
    filter: Option<Value>,
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
    let provider = Webhook::new(Settings::from_parameters(&parameters).unwrap()).unwrap();
    Engine::new(Box::new(provider), Registry::default(), PlanRules::of("me"))
}

fn reply(body: &Value) -> Response {
    ([(header::CONTENT_TYPE, MEDIA_TYPE)], body.to_string()).into_response()
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
    reply(&peer.lock().unwrap().filter.clone().unwrap_or_else(usual))
}

async fn list(State(peer): State<Shared>, headers: HeaderMap) -> Response {
    if headers[header::ACCEPT] != MEDIA_TYPE {
        return StatusCode::NOT_ACCEPTABLE.into_response();
    }
    let mut peer = peer.lock().unwrap();
    peer.listings += 1;
    let sets: Vec<Value> = peer.sets.values().cloned().collect();
    reply(&json!(sets))
}

async fn adjust(headers: HeaderMap, body: String) -> Response {
    if headers[header::CONTENT_TYPE] != MEDIA_TYPE {
        return StatusCode::UNSUPPORTED_MEDIA_TYPE.into_response();
    }
    let mut endpoints: Vec<Value> = serde_json::from_str(&body).unwrap();
    for endpoint in &mut endpoints {
        let ttl = endpoint["recordTTL"].as_i64().unwrap_or(0);
        endpoint["recordTTL"] = ttl.max(MIN_TTL).into();
    }
    reply(&json!(endpoints))
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
