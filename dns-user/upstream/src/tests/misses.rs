//! Tests of misses that are answered without a task.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use futures_util::future::BoxFuture;
use tokio::{net::TcpSocket, runtime::Handle, sync::oneshot};

use super::{scripted::*, *};
use crate::{
    Answer, HttpServer, Trust, WaitingQuery,
    cache::Cache,
    cached::{CachedSource, UncachedSource},
    http::{HttpClients, HttpSource},
};
use dns_core::{config::CacheConfig, wire::OwnedQuery};
use dns_kit::eager::poll_then_spawn;

const NAME: &[u8] = b"\x02oK\x07example\0";

/// Asks as a server does; counts the queries for which a task waited.
pub(super) async fn ask_source(
    source: &CachedSource,
    query: &Query<'_>,
    tasks: &Arc<AtomicUsize>,
) -> Vec<u8> {
    let mut reply = Vec::new();
    if source.answer_at_once(query, &mut reply) {
        return reply;
    }
    let (client, reply) = Client::new(source, query, tasks);
    source.begin(client);
    reply.await.expect("every query gets a reply")
}

/// A client that waits for its reply.
struct Client {
    query: OwnedQuery,
    source: CachedSource,
    sender: oneshot::Sender<Vec<u8>>,
    tasks: Arc<AtomicUsize>,
    time_limit: Duration,
    runtime: Handle,
}

impl Client {
    fn new(
        source: &CachedSource,
        query: &Query<'_>,
        tasks: &Arc<AtomicUsize>,
    ) -> (Box<Self>, oneshot::Receiver<Vec<u8>>) {
        let (sender, receiver) = oneshot::channel();
        let client = Self {
            query: query.to_owned(),
            source: source.clone(),
            sender,
            tasks: Arc::clone(tasks),
            time_limit: Duration::MAX,
            runtime: Handle::current(),
        };
        (Box::new(client), receiver)
    }
}

impl WaitingQuery for Client {
    fn query(&self) -> Query<'_> {
        self.query.as_query()
    }

    fn time_limit(&self) -> Duration {
        self.time_limit
    }

    fn reply(self: Box<Self>, reply: &mut Vec<u8>) {
        assert_ne!(message::id(reply), PANICS, "as a defect would");
        let _gone = self.sender.send(reply.clone());
    }

    fn wait(self: Box<Self>, begun: Option<BoxFuture<'static, Vec<u8>>>) {
        self.tasks.fetch_add(1, Ordering::Relaxed);
        let runtime = self.runtime.clone();
        poll_then_spawn(&runtime, async move {
            let reply = match begun {
                Some(reply) => reply.await,
                None => self.source.answer(&self.query.as_query()).await,
            };
            let _gone = self.sender.send(reply);
        });
    }
}

/// Id of a query whose client panics.
const PANICS: u16 = 0xdead;

/// Returns a source without a cache.
fn uncached(names: &[String], retries: u32) -> CachedSource {
    let compat = Compat {
        forget_failures: true,
        ..Compat::default()
    };
    let source = UncachedSource::Dns(Arc::new(forwarder(names, retries, compat)));
    CachedSource::new(source, None, form(compat), compat)
}

/// Asks for a name of its own; returns the reply's RCODE and the number of tasks.
async fn outcome(source: &CachedSource, name: &[u8]) -> (u8, usize) {
    let tasks = Arc::default();
    let reply = ask_source(source, &parsed(&query(name, 1)), &tasks).await;
    (rcode(&reply), tasks.load(Ordering::Relaxed))
}

#[tokio::test]
async fn replies_need_no_task() {
    let recursor = Scripted::start(|query| {
        let mut reply = answer(query, &[[192, 0, 2, 1]]);
        reply[12..12 + NAME.len()].make_ascii_lowercase();
        vec![reply]
    })
    .await;
    let source = uncached(&[recursor.name()], 0);
    let tasks = Arc::default();
    for _ in 0..100 {
        let query = query(NAME, 1);
        let reply = ask_source(&source, &parsed(&query), &tasks).await;
        assert_eq!(message::id(&reply), message::id(&query));
        assert_eq!(
            reply[12..12 + NAME.len()],
            *NAME,
            "the client's letter case"
        );
        assert!(reply.ends_with(&[192, 0, 2, 1]));
    }
    assert_eq!(tasks.load(Ordering::Relaxed), 0);
    assert_eq!(recursor.counts(), (100, 0));
}

#[tokio::test]
async fn tasks_take_over_after_the_first_try() {
    // Truncated: the rest is asked for by TCP.
    let cut = Scripted::start(|query| {
        let mut reply = answer(query, &[[192, 0, 2, 1]]);
        message::set_truncated(&mut reply, true);
        vec![reply]
    })
    .await;
    let source = uncached(&[cut.name()], 0);
    assert_eq!(outcome(&source, NAME).await, (message::NOERROR, 1));
    assert_eq!(cut.counts(), (1, 1));

    // Denied: the other recursor may know the name.
    let denying = Scripted::start(|query| vec![nxdomain(query)]).await;
    let knowing = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
    let source = uncached(&[denying.name(), knowing.name()], 0);
    assert_eq!(outcome(&source, NAME).await, (message::NOERROR, 1));
    assert_eq!((denying.counts(), knowing.counts()), ((1, 0), (1, 0)));

    // Lost: the try counts as the first of two.
    let lossy = {
        let count = AtomicUsize::new(0);
        Scripted::start(move |query| match count.fetch_add(1, Ordering::Relaxed) {
            0 => vec![],
            _ => vec![answer(query, &[[192, 0, 2, 1]])],
        })
        .await
    };
    let source = uncached(&[lossy.name(), knowing.name()], 1);
    assert_eq!(outcome(&source, NAME).await, (message::NOERROR, 1));
    assert_eq!((lossy.counts(), knowing.counts()), ((2, 0), (1, 0)));

    // Closed: the error ends the try at once.
    let closed = format!("127.0.0.1:{}", closed_port());
    let source = uncached(&[closed, knowing.name()], 0);
    assert_eq!(outcome(&source, NAME).await, (message::NOERROR, 1));
    assert_eq!(knowing.counts(), (2, 0));
}

/// Returns a port on which nobody listens by UDP.
fn closed_port() -> u16 {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("loopback has free ports");
    socket.local_addr().expect("it is bound").port()
}

#[tokio::test]
async fn panic_loses_one_reply() {
    let recursor = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
    let source = uncached(&[recursor.name()], 0);
    let mut doomed = query(b"\x01x\0", 1);
    doomed[..2].copy_from_slice(&PANICS.to_be_bytes());
    for _ in 0..20 {
        let (client, reply) = Client::new(&source, &parsed(&doomed), &Arc::default());
        source.begin(client);
        assert!(reply.await.is_err());
        assert_eq!(outcome(&source, NAME).await, (message::NOERROR, 0));
    }
    assert_eq!(source.admission().waiting, 0);
}

#[tokio::test]
async fn short_time_limits_take_a_task() {
    let recursor = Scripted::start(|query| vec![answer(query, &[])]).await;
    let source = uncached(&[recursor.name()], 0);
    let tasks = Arc::default();
    let (mut client, reply) = Client::new(&source, &parsed(&query(NAME, 1)), &tasks);
    client.time_limit = TIMEOUT / 2;
    source.begin(client);
    assert_eq!(rcode(&reply.await.unwrap()), message::NOERROR);
    assert_eq!(
        tasks.load(Ordering::Relaxed),
        1,
        "the recursor's time is longer"
    );
}

#[tokio::test]
async fn unsendable_queries_take_a_task() {
    // The kernel lets nobody connect to a broadcast address (SO_BROADCAST, socket(7)).
    let source = uncached(&["255.255.255.255:53".to_owned()], 0);
    assert_eq!(outcome(&source, NAME).await, (message::SERVFAIL, 1));
    assert_eq!(source.admission().waiting, 0);
}

#[tokio::test]
async fn equal_time_limits_need_no_task() {
    let recursor = Scripted::start(|query| vec![answer(query, &[])]).await;
    let source = uncached(&[recursor.name()], 0);
    let tasks = Arc::default();
    let (mut client, reply) = Client::new(&source, &parsed(&query(NAME, 1)), &tasks);
    client.time_limit = TIMEOUT;
    source.begin(client);
    assert_eq!(rcode(&reply.await.unwrap()), message::NOERROR);
    assert_eq!(tasks.load(Ordering::Relaxed), 0);
}

/// Returns a source of answers from a server at this socket's address.
fn http_at(socket: &TcpSocket) -> HttpSource {
    let url = format!("http://{}", socket.local_addr().unwrap());
    let server = HttpServer {
        url: url.parse().unwrap(),
        trust: Trust::Anyone,
    };
    HttpSource::new(
        &server,
        &mut HttpClients::default(),
        &Arc::default(),
        Duration::from_secs(600),
    )
}

/// Returns a source with a cache, whose expired answers would be served for an hour.
fn with_cache(source: UncachedSource, compat: Compat) -> (CachedSource, Arc<Cache>) {
    let config = CacheConfig {
        enabled: true,
        max_entries: 100,
        max_bytes: 1 << 20,
        serve_stale: Some(Duration::from_secs(3600)),
    };
    let cache = Arc::new(Cache::new(&config, form(compat), compat));
    let source = CachedSource::new(source, Some(Arc::clone(&cache)), form(compat), compat);
    (source, cache)
}

#[tokio::test]
async fn own_keys_take_a_task() {
    for (cache_as_authority, tasks) in [(false, 0), (true, 1)] {
        let compat = Compat {
            cache_as_authority,
            ..Compat::default()
        };
        let recursor = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
        let forwarder = forwarder(&[recursor.name()], 0, compat);
        let (source, _) = with_cache(UncachedSource::Dns(Arc::new(forwarder)), compat);
        assert_eq!(outcome(&source, NAME).await, (message::NOERROR, tasks));
        // From the cache.
        assert_eq!(outcome(&source, NAME).await, (message::NOERROR, 0));
        assert_eq!(recursor.counts(), (1, 0));
    }
}

#[tokio::test]
async fn only_http_failures_are_answers() {
    let compat = Compat {
        forget_failures: true,
        ..Compat::default()
    };
    let recursor = Scripted::start(|query| vec![refuse(query, message::SERVFAIL)]).await;
    let forwarder = forwarder(&[recursor.name()], 0, compat);
    let (dns, of_dns) = with_cache(UncachedSource::Dns(Arc::new(forwarder)), compat);
    let closed = refusing();
    let http = http_at(&closed);
    let (http, of_http) = with_cache(UncachedSource::Http(Arc::new(http)), compat);
    for (source, cache, is_kept) in [(dns, of_dns, false), (http, of_http, true)] {
        assert_eq!(outcome(&source, NAME).await.0, message::SERVFAIL);
        let question = query(NAME, 1);
        let key = cache.key(&parsed(&question)).unwrap();
        assert_eq!(cache.peek(&key).is_some(), is_kept);
    }
}

#[tokio::test]
async fn refreshed_failures_are_no_answers() {
    let closed = refusing();
    let http = http_at(&closed);
    let (source, cache) = with_cache(UncachedSource::Http(Arc::new(http)), Compat::default());
    let question = query(NAME, 1);
    source.refresh(&parsed(&question)).await;
    let key = cache.key(&parsed(&question)).unwrap();
    assert!(cache.peek(&key).is_none());
}
