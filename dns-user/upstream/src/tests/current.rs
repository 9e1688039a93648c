//! Tests of the recursors and handlers in force, and of what operators see of them.

use std::sync::Arc;

use super::{misses::ask_source, scripted::*, *};
use crate::{
    CachedSource, CachedState, CurrentUpstreams, Denial, ForwardingExplanation, HandlerConfig,
    HandlerSource, Handlers, InterfaceAnswers, NoInterfaces, RecursorOutage, Selection, Upstream,
    metrics::UpstreamMetrics,
};
use dns_core::{config::Config, name::Name};

const NAME: &[u8] = b"\x02ok\x07example\0";

/// Returns a configuration with a cache and these further members.
fn config(members: &str) -> Config {
    let text = format!(
        r#"{{"address": "127.0.0.1", "port": 53, "recursor_selection": "serial",
            "request_timeout": "1200s", "recursor_timeout": "600s",
            "cache": {{"enabled": true}}, {members}}}"#
    );
    Config::parse("config.json", text.as_bytes())
        .unwrap()
        .config
}

fn interfaces() -> Arc<dyn InterfaceAnswers> {
    NoInterfaces::shared()
}

/// Returns the handler of a domain, with a cache.
fn handler(domain: &str, source: HandlerSource) -> HandlerConfig {
    HandlerConfig {
        domain: name(domain),
        source,
        cache: true,
    }
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn in_force(config: &Config, handlers: Vec<HandlerConfig>) -> Arc<CurrentUpstreams> {
    let upstream = Upstream::new(config, &OwnAddresses::default(), &interfaces());
    let none = Handlers::default();
    let handlers = Handlers::new(
        handlers,
        config,
        &none,
        upstream.host_names(),
        &interfaces(),
    );
    CurrentUpstreams::new(upstream, handlers)
}

/// Returns the source of a handler.
fn source_of(current: &CurrentUpstreams, domain: &str) -> CachedSource {
    let domain = name(domain);
    let sources = current.sources();
    let (_, source) = sources
        .iter()
        .find(|(of, _)| of.as_ref() == Some(&domain))
        .unwrap();
    source.clone()
}

/// Asks for the A records of a name of this label.
async fn ask(source: &CachedSource, label: u8) -> Vec<u8> {
    let query = query(&[1, label, 0], 1);
    ask_source(source, &parsed(&query), &Arc::default()).await
}

/// Returns an address on which nobody listens by UDP.
fn closed() -> String {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap().to_string()
}

#[tokio::test]
async fn recursors_come_before_handlers() {
    let recursor = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
    let corp = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 2]])]).await;
    let excluded = closed();
    let config = config(&format!(
        r#""recursors": ["{excluded}", "{}"], "excluded_recursors": ["{excluded}"]"#,
        recursor.name()
    ));
    let current = in_force(
        &config,
        vec![
            handler("corp.", HandlerSource::Dns(vec![corp.name()])),
            handler("no.", HandlerSource::Deny(Denial::Refused)),
        ],
    );
    let mut domains = Vec::new();
    for (domain, _) in current.sources() {
        domains.push(domain.map(|domain| domain.to_string()));
    }
    assert_eq!(domains[0], None);
    domains.sort();
    let handlers = ["corp.", "no."].map(|domain| Some(domain.to_owned()));
    assert_eq!(domains[1..], handlers);
    let recursors: Vec<String> = current
        .recursors()
        .into_iter()
        .map(|recursor| recursor.address)
        .collect();
    assert_eq!(recursors, [recursor.name(), corp.name()]);
    // A denial waits for nothing.
    let mut limits = Vec::new();
    for (domain, status) in current.admissions() {
        limits.push((domain, status.limit, status.waiting));
    }
    assert_eq!(
        limits,
        [(None, 8192, 0), (Some("corp.".to_owned()), 8192, 0)]
    );
    let corp_source = source_of(&current, "corp.");
    assert!(ask(&corp_source, b'a').await.ends_with(&[192, 0, 2, 2]));
    let denied = ask(&source_of(&current, "no."), b'a').await;
    assert_eq!(rcode(&denied), message::REFUSED);
    let upstream = current.upstream.load();
    let recursors = upstream.recursors().unwrap();
    for label in [b'a', b'b', b'a'] {
        let reply = ask(&recursors, label).await;
        assert!(reply.ends_with(&[192, 0, 2, 1]));
    }
    assert_eq!((recursor.counts(), corp.counts()), ((2, 0), (1, 0)));
    // The same limits and recursors, without the cache.
    let uncached = upstream.uncached().unwrap();
    ask(&uncached, b'a').await;
    assert!(uncached.cache().is_none());
    assert_eq!(recursor.counts(), (3, 0));

    let status = current.cache().unwrap();
    assert_eq!((status.entries, status.denials), (2, 0));
    assert_eq!((status.hits, status.misses), (1, 2));
    let all = Selection::default();
    let listed = current.list(&all, 10);
    let rows: Vec<(Option<&str>, &str)> = listed
        .entries
        .iter()
        .map(|answer| (answer.handler.as_deref(), &*answer.name))
        .collect();
    assert_eq!(rows.len(), 3);
    assert!(rows.contains(&(None, "a.")) && rows.contains(&(None, "b.")));
    assert!(rows.contains(&(Some("corp."), "a.")));
    let first = &current.list(&all, 1);
    assert_eq!((first.entries.len(), first.omitted), (1, 2));
    assert_eq!(
        (current.flush(&all), current.flush(&all)),
        (Some(3), Some(0))
    );
    assert_eq!(
        (current.outage(), current.handler_outages()),
        (None, vec![])
    );
}

#[tokio::test]
async fn without_recursion_handlers_still_answer() {
    let config = config(r#""disable_recursors": true, "recursors": ["192.0.2.1"]"#);
    let denying = handler("no.", HandlerSource::Deny(Denial::Nxdomain));
    let current = in_force(&config, vec![denying]);
    let upstream = current.upstream.load();
    assert!(upstream.recursors().is_none() && upstream.uncached().is_none());
    assert!(current.recursors().is_empty() && current.admissions().is_empty());
    assert!(current.cache().is_none() && current.outage().is_none());
    assert!(current.explain(None, &name("ok.example.")).is_none());
    assert_eq!(current.flush(&Selection::default()), None);
    assert_eq!(current.list(&Selection::default(), 9).entries, []);
    assert_eq!(current.sources().len(), 1);
}

#[tokio::test]
async fn outages_name_servers_and_reasons() {
    let failing = Scripted::start(|query| vec![refuse(query, message::SERVFAIL)]).await;
    let silent = closed();
    let refusing = refusing();
    let url = refusing.local_addr().unwrap().to_string();
    let config = config(&format!(r#""recursors": ["{}"]"#, failing.name()));
    let server = crate::HttpServer {
        url: format!("http://user:secret@{url}/x").parse().unwrap(),
        trust: crate::Trust::System,
    };
    let current = in_force(
        &config,
        vec![
            handler("h.", HandlerSource::Http(server)),
            handler("s.", HandlerSource::Dns(vec![silent.clone()])),
        ],
    );
    let recursors = current.upstream.load().recursors().unwrap();
    let http = source_of(&current, "h.");
    let dns = source_of(&current, "s.");
    for label in 0..4 {
        assert_eq!(current.outage(), None);
        ask(&recursors, label).await;
        if label < 2 {
            ask(&http, label).await;
            ask(&dns, label).await;
            assert_eq!(current.handler_outages(), []);
        }
    }
    ask(&recursors, 4).await;
    let failures = format!("{}: servfail 5", failing.name());
    assert_eq!(
        current.outage(),
        Some(RecursorOutage::Failing(failures.clone()))
    );
    assert_eq!(recursors.outage(), Some(failures));
    ask(&http, 9).await;
    ask(&dns, 9).await;
    let mut outages = current.handler_outages();
    outages.sort();
    let [(h, why), (s, no_reply)] = &outages[..] else {
        panic!("{outages:?}");
    };
    assert_eq!((&**h, &**s), ("h.", "s."));
    assert!(why.starts_with("http://") && why.contains(&url), "{why}");
    assert!(why.len() > "http://127.0.0.1:65535/x/: ".len(), "{why}");
    assert!(!why.contains("secret"), "{why}");
    assert_eq!(*no_reply, format!("{silent}: no reply"));
    let none = forwarder(&[], 0, Compat::default());
    let none = crate::cached::UncachedSource::Dns(Arc::new(none));
    let none = CachedSource::new(none, None, Form::default(), Compat::default());
    assert_eq!(none.outage().as_deref(), Some("it has no recursor"));
}

/// Type, state, whether 200 to 300 seconds are left, denial and sender.
type Finding = (
    &'static str,
    CachedState,
    bool,
    Option<bool>,
    Option<String>,
);

/// Returns what an explanation says about the cache.
fn findings(explanation: &ForwardingExplanation) -> Vec<Finding> {
    let mut all = Vec::new();
    for finding in explanation.cached.as_ref().unwrap() {
        let is_long = (200..=300).contains(&finding.ttl_seconds);
        all.push((
            finding.query_type,
            finding.state,
            is_long,
            finding.denial,
            finding.recursor.clone(),
        ));
    }
    all
}

#[tokio::test]
async fn explanation_matches_query_results() {
    let recursor = Scripted::start(|query| {
        let addresses: &[[u8; 4]] = match parsed(query).question.qtype {
            1 => &[[192, 0, 2, 1]],
            _ => &[],
        };
        vec![answer(query, addresses)]
    })
    .await;
    let config = config(&format!(r#""recursors": ["{}"]"#, recursor.name()));
    let server = crate::HttpServer {
        url: "https://user:secret@dns.example/x".parse().unwrap(),
        trust: crate::Trust::System,
    };
    let current = in_force(
        &config,
        vec![
            handler("h.", HandlerSource::Http(server)),
            handler("no.", HandlerSource::Deny(Denial::Nxdomain)),
        ],
    );
    let asked = name("ok.example.");
    let before = current.explain(None, &asked).unwrap();
    let missing = |query_type| (query_type, CachedState::Missing, false, None, None);
    assert_eq!(findings(&before), [missing("A"), missing("AAAA")]);
    assert_eq!(before.recursors[0].latency_ms, None);
    let address = recursor.name();
    assert_eq!(
        before.to_string(),
        format!(
            "recursor {address}: asked first, no reply yet, 0 of at most 25 recent tries failed\n\
             cache: no A\ncache: no AAAA\n"
        )
    );
    let recursors = current.upstream.load().recursors().unwrap();
    for qtype in [1, 28] {
        let query = query(NAME, qtype);
        ask_source(&recursors, &parsed(&query), &Arc::default()).await;
    }
    let after = current.explain(None, &asked).unwrap();
    let from = Some(address.clone());
    assert_eq!(
        findings(&after),
        [
            ("A", CachedState::Fresh, true, Some(false), from.clone()),
            ("AAAA", CachedState::Fresh, false, Some(true), from)
        ]
    );
    let [status] = &after.recursors[..] else {
        panic!("{after:?}");
    };
    assert_eq!(status.address, address);
    assert_eq!(status.resolved, Some(recursor.address));
    assert!(status.preferred && !status.is_own && !status.drops_edns);
    assert_eq!((status.tries, status.failures.len()), (2, 0));
    assert!(status.latency_ms.is_some_and(|latency| latency > 0.0));
    assert_eq!(current.cache().unwrap().misses, 2, "it was no query");

    let of_server = current.explain(Some(&name("h.")), &asked).unwrap();
    assert_eq!(of_server.recursors.len(), 0);
    let url = of_server.url.clone().unwrap();
    assert!(
        url.contains("dns.example/x") && !url.contains("secret"),
        "{url}"
    );
    assert_eq!(
        of_server.to_string(),
        format!("server {url}\ncache: no A\ncache: no AAAA\n")
    );
    let denied = current.explain(Some(&name("no.")), &asked).unwrap();
    assert_eq!(denied.to_string(), "cache: off\n");
    assert!(denied.url.is_none() && denied.cached.is_none());
    assert!(current.explain(Some(&name("other.")), &asked).is_none());
}

#[tokio::test]
async fn metrics_name_sources_and_recursors() {
    let failing = Scripted::start(|query| vec![refuse(query, message::REFUSED)]).await;
    let recursor = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
    let config = config(&format!(
        r#""recursors": ["{}", "{}"]"#,
        failing.name(),
        recursor.name()
    ));
    let current = in_force(
        &config,
        vec![
            handler("s.", HandlerSource::Dns(vec![failing.name()])),
            handler("no.", HandlerSource::Deny(Denial::Nxdomain)),
        ],
    );
    let recursors = current.upstream.load().recursors().unwrap();
    for label in 0..3 {
        ask(&recursors, label).await;
    }
    ask(&recursors, 0).await;
    let handled = source_of(&current, "s.");
    ask(&handled, 0).await;
    let registry = prometheus::Registry::new();
    let metrics = UpstreamMetrics {
        in_force: current,
        server: "dns://:53".to_owned(),
    };
    metrics.register(&registry).unwrap();
    let text = prometheus::TextEncoder::new()
        .encode_to_string(&registry.gather())
        .unwrap();
    let (failing, recursor) = (failing.name(), recursor.name());
    for line in [
        r#"bosh_dns_xdp_limit{resource="recursor_tcp_connections"} 64"#.to_owned(),
        r#"bosh_dns_xdp_limit{resource="recursor_tcp_connection_queries"} 64"#.to_owned(),
        r#"bosh_dns_xdp_limit{resource="http_handler_connections"} 64"#.to_owned(),
        r#"bosh_dns_xdp_limit{resource="recursor_socket_queries"} 16384"#.to_owned(),
        r#"bosh_dns_xdp_limit{resource="remembered_failures"} 4096"#.to_owned(),
        format!(r#"recursor_queries_total{{handler="",recursor="{failing}"}} 3"#),
        format!(r#"recursor_queries_total{{handler="",recursor="{recursor}"}} 3"#),
        format!(r#"recursor_queries_total{{handler="s.",recursor="{failing}"}} 1"#),
        format!(r#"recursor_failures_total{{handler="",reason="refused",recursor="{failing}"}} 3"#),
        format!(
            r#"recursor_failures_total{{handler="",reason="refused",recursor="{recursor}"}} 0"#
        ),
        format!(r#"recursor_preferred{{handler="",recursor="{failing}"}} 1"#),
        format!(r#"recursor_preferred{{handler="",recursor="{recursor}"}} 0"#),
        format!(r#"recursor_strays_total{{handler="",recursor="{failing}"}} 0"#),
        format!(r#"duration_seconds_count{{handler="",recursor="{recursor}"}} 3"#),
        r#"waiting_queries{handler="s."} 0"#.to_owned(),
        r#"waiting_queries_limit{handler=""} 8192"#.to_owned(),
        r#"refused_queries_total{handler=""} 0"#.to_owned(),
        r#"failure_cache_hits_total{handler="s."} 0"#.to_owned(),
        r#"failure_cache_hits_total{handler=""} 0"#.to_owned(),
        r#"zones=".""#.to_owned(),
        r#"zones="s.""#.to_owned(),
    ] {
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }
    assert!(!text.contains(r#""no.""#), "a denial has no figures");
}

/// Returns the RCODE and the number of answers.
async fn verdict(source: &CachedSource, label: u8) -> (u8, u8) {
    let reply = ask(source, label).await;
    (rcode(&reply), reply[7])
}

#[tokio::test]
async fn replaced_recursors_empty_the_cache() {
    let old = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
    let new = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]; 2])]).await;
    let config = config(&format!(r#""recursors": ["{}"]"#, old.name()));
    let current = in_force(&config, vec![]);
    let source = current.upstream.load().recursors().unwrap();
    assert_eq!(verdict(&source, b'a').await, (message::NOERROR, 1));
    let kept = source.forwarder().unwrap().set().recursors[0].clone();
    source.replace_recursors(&[new.name(), old.name()]);
    assert_eq!(verdict(&source, b'a').await, (message::NOERROR, 2));
    assert_eq!((old.counts(), new.counts()), ((1, 0), (1, 0)));
    // One that stays keeps its counters.
    let set = source.forwarder().unwrap().set();
    assert!(Arc::ptr_eq(&set.recursors[1], &kept));
    assert_eq!(current.recursors()[1].tries, 1);
    source.replace_recursors(&[]);
    assert_eq!(current.outage(), Some(RecursorOutage::Unknown));
    assert_eq!(verdict(&source, b'a').await, (message::SERVFAIL, 0));
    let weak = source.downgrade();
    assert!(weak.upgrade().is_some());
    drop((source, set, current));
    // The thread that replied drops its client a moment later.
    until(|| weak.upgrade().is_none()).await;
}

#[tokio::test]
async fn refreshed_answers_replace_cached_ones() {
    use crate::Answer as _;

    let count = std::sync::atomic::AtomicU8::new(0);
    let recursor = Scripted::start(move |query| match count.fetch_add(1, Ordering::Relaxed) {
        2 => vec![refuse(query, message::SERVFAIL)],
        number => vec![answer(query, &[[192, 0, 2, number]])],
    })
    .await;
    let config = config(&format!(r#""recursors": ["{}"]"#, recursor.name()));
    let current = in_force(&config, vec![]);
    let source = current.upstream.load().recursors().unwrap();
    let message = query(NAME, 1);
    let query = parsed(&message);
    let last = async || {
        let reply = ask_source(&source, &query, &Arc::default()).await;
        reply.last().copied()
    };
    assert_eq!(last().await, Some(0));
    let cached = source.cached(&query).unwrap();
    assert!(cached.message.ends_with(&[192, 0, 2, 0]));
    source.refresh(&query).await;
    assert_eq!(last().await, Some(1));
    // A failure leaves the old one.
    source.refresh(&query).await;
    assert_eq!(last().await, Some(1));
    assert_eq!(recursor.counts().0, 3);
    // Without a cache there is nothing to refresh.
    let uncached = source.without_cache();
    uncached.refresh(&query).await;
    assert_eq!((recursor.counts().0, uncached.cached(&query)), (3, None));
}
