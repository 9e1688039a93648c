//! The server with real sockets on loopback.

mod lines;
mod replies;
mod tcp;
mod waiting;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    num::NonZeroUsize,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RData,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    sync::{Notify, oneshot},
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::*;
use crate::state::{ByDomain, Routes, ServerState};
use dns_core::{
    catalog::{AliasFiles, NameRules, Records, Snapshot},
    config::Identity as Setting,
    name::Name,
    resolve::{AllRunning, Health, HealthState},
    wire::{
        CLASS_CH, CLASS_IN, Query, TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_DS, TYPE_PTR, TYPE_TXT,
        error_reply,
    },
};
use dns_fastpath::FastPathHandle;
use dns_health::{HealthStates, InstanceHealth, Limits, Tracker};
use dns_upstream::{Answer, SpecialNames};

/// Longest wait for a reply, far above the usual time, so that exceeding it is a failure.
const TIMEOUT: Duration = Duration::from_secs(60);

//----------- Set-up ---------------------------------------------------------

/// Returns records with `count` instances of group 1, `10.0.<version>.x`.
fn snapshot(version: u8, count: u8) -> Snapshot {
    let rows: Vec<String> = (0..count)
        .map(|number| {
            format!(
                "[\"id-{number}\", \"web\", \"net\", \"dep\", \"10.0.{version}.{number}\", \"bosh\", [\"1\"]]"
            )
        })
        .collect();
    let json = format!(
        "{{\"record_keys\": [\"id\", \"instance_group\", \"network\", \"deployment\", \"ip\", \"domain\", \
         \"group_ids\"], \"record_infos\": [{}], \"version\": {version}}}",
        rows.join(", ")
    );
    let (records, warnings) = Records::parse(json.as_bytes()).unwrap();
    assert!(warnings.is_empty());
    Snapshot::build(records, &AliasFiles::default()).0
}

/// Returns a state with `snapshot` and without health checks.
fn local(snapshot: Snapshot) -> Arc<ServerState> {
    with_health(snapshot, Arc::new(AllRunning))
}

/// Returns a state with `snapshot` and this health of the instances.
fn with_health(snapshot: Snapshot, health: Arc<dyn Health + Send + Sync>) -> Arc<ServerState> {
    Arc::new(ServerState::new(
        snapshot,
        health,
        FastPathHandle::default(),
        None,
        None,
    ))
}

/// Returns routes for `upcheck.bosh-dns.` only.
fn upcheck_only() -> Routes {
    Routes {
        upchecks: [Name::from_text("upcheck.bosh-dns").unwrap()]
            .into_iter()
            .collect(),
        ..Routes::default()
    }
}

/// A server that runs until it is stopped.
struct Running {
    addresses: Vec<SocketAddr>,
    /// The state from which the server answers.
    server_state: Arc<ServerState>,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<()>,
}

impl Running {
    /// Starts on a free port of `127.0.0.1`.
    async fn start(local: Arc<ServerState>, routes: Routes) -> Self {
        Self::start_with(&["127.0.0.1:0"], local, routes, Options::default()).await
    }

    async fn start_with(
        listen: &[&str],
        local: Arc<ServerState>,
        routes: Routes,
        options: Options,
    ) -> Self {
        let listen: Vec<SocketAddr> = listen
            .iter()
            .map(|address| address.parse().unwrap())
            .collect();
        local.set_routes(routes);
        let metrics = ServerMetrics::new("dns://test".into());
        let identity = Arc::new(Identity::of_this_host(Setting::Always));
        let server = Server::bind(&listen, local.clone(), identity, metrics, options)
            .await
            .unwrap();
        let addresses = server.addresses();
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(server.run(async {
            let _ = stopped.await;
        }));
        Self {
            addresses,
            server_state: local,
            stop,
            ended,
        }
    }

    fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// Stops the server and waits for its end.
    async fn stop(self) {
        self.stop.send(()).unwrap();
        timeout(TIMEOUT, self.ended).await.unwrap().unwrap();
    }
}

/// Answers NOERROR once it has been opened.
struct Stalling {
    /// Releases all waiting queries.
    go: Notify,
    /// Whether queries need not wait.
    open: AtomicBool,
    /// Number of queries received.
    asked: AtomicUsize,
}

impl Stalling {
    /// Blocks every query until opened.
    fn new() -> Arc<Self> {
        Arc::new(Self {
            go: Notify::new(),
            open: AtomicBool::new(false),
            asked: AtomicUsize::new(0),
        })
    }

    fn release(&self) {
        self.open.store(true, Ordering::SeqCst);
        self.go.notify_waiters();
    }

    /// Waits until `count` queries have been received.
    async fn wait_for(&self, count: usize) {
        while self.asked.load(Ordering::SeqCst) < count {
            sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Answer for Stalling {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            let going = self.go.notified();
            self.asked.fetch_add(1, Ordering::SeqCst);
            if !self.open.load(Ordering::SeqCst) {
                going.await;
            }
            error_reply(query, ResponseCode::NoError)
        })
    }
}

/// Builds a query as a client sends it.
fn query(id: u16, name: &str, qtype: u16, qclass: u16) -> Vec<u8> {
    let mut message = vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    message[..2].copy_from_slice(&id.to_be_bytes());
    for label in name.split('.') {
        message.push(label.len() as u8);
        message.extend_from_slice(label.as_bytes());
    }
    message.push(0);
    message.extend_from_slice(&qtype.to_be_bytes());
    message.extend_from_slice(&qclass.to_be_bytes());
    message
}

/// Queries by UDP; the reply must come from the queried address.
async fn ask_udp(server: SocketAddr, message: &[u8]) -> Message {
    let any = if server.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let socket = UdpSocket::bind(any).await.unwrap();
    socket.connect(server).await.unwrap();
    socket.send(message).await.unwrap();
    let mut reply = vec![0; 65_535];
    let length = timeout(TIMEOUT, socket.recv(&mut reply))
        .await
        .unwrap()
        .unwrap();
    Message::from_vec(&reply[..length]).unwrap()
}

/// Reads the next reply on a connection; `None` if it was closed.
async fn read_reply(stream: &mut TcpStream) -> Option<Message> {
    let length = timeout(TIMEOUT, stream.read_u16()).await.unwrap().ok()?;
    let mut reply = vec![0; length.into()];
    timeout(TIMEOUT, stream.read_exact(&mut reply))
        .await
        .unwrap()
        .unwrap();
    Some(Message::from_vec(&reply).unwrap())
}

/// Returns a query after its length.
fn framed(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u16).to_be_bytes()[..], message].concat()
}

async fn ask_tcp(server: SocketAddr, message: &[u8]) -> Message {
    let mut stream = TcpStream::connect(server).await.unwrap();
    stream.write_all(&framed(message)).await.unwrap();
    read_reply(&mut stream).await.unwrap()
}

/// Returns the addresses in a reply, in order.
fn addresses(reply: &Message) -> Vec<IpAddr> {
    let mut addresses: Vec<IpAddr> = reply
        .answers
        .iter()
        .map(|record| match &record.data {
            RData::A(address) => IpAddr::V4(address.0),
            RData::AAAA(address) => IpAddr::V6(address.0),
            other => panic!("no address: {other}"),
        })
        .collect();
    addresses.sort_unstable();
    addresses
}

//----------- Routing --------------------------------------------------------

#[tokio::test]
async fn udp_and_tcp_answer_local_names() {
    let server = Running::start(local(snapshot(1, 3)), upcheck_only()).await;
    let expected: Vec<IpAddr> = (0..3)
        .map(|number| IpAddr::from([10, 0, 1, number]))
        .collect();
    let web = query(7, "q-s0.Q-G1.bosh", TYPE_A, CLASS_IN);
    for _ in 0..3 {
        let reply = ask_udp(server.address(), &web).await;
        assert_eq!(
            (reply.metadata.id, addresses(&reply)),
            (7, expected.clone())
        );
        assert!(reply.metadata.authoritative && reply.metadata.recursion_available);
        assert_eq!(reply.queries[0].name().to_string(), "q-s0.Q-G1.bosh.");
    }
    assert_eq!(addresses(&ask_tcp(server.address(), &web).await), expected);

    let upcheck = query(8, "x.upcheck.bosh-dns", TYPE_ANY, CLASS_IN);
    let loopback = vec![IpAddr::V4(Ipv4Addr::LOCALHOST), "::1".parse().unwrap()];
    assert_eq!(
        addresses(&ask_udp(server.address(), &upcheck).await),
        loopback
    );
    assert_eq!(
        addresses(&ask_tcp(server.address(), &upcheck).await),
        loopback
    );

    let rcode = |reply: Message| reply.metadata.response_code;
    let outside = query(9, "example.com", TYPE_A, CLASS_IN);
    assert_eq!(
        rcode(ask_udp(server.address(), &outside).await),
        ResponseCode::Refused
    );
    let unknown = query(9, "q-s0.q-g9.bosh", TYPE_AAAA, CLASS_IN);
    assert_eq!(
        rcode(ask_udp(server.address(), &unknown).await),
        ResponseCode::NXDomain
    );
    let malformed = query(9, "q-x.q-g1.bosh", TYPE_A, CLASS_IN);
    assert_eq!(
        rcode(ask_udp(server.address(), &malformed).await),
        ResponseCode::FormErr
    );
    assert_eq!(
        rcode(ask_udp(server.address(), &[9; 12]).await),
        ResponseCode::NotImp
    );
    server.stop().await;
}

#[tokio::test]
async fn longest_domain_wins() {
    let recursors = Stalling::new();
    recursors.release();
    let denied: Arc<dyn Answer> = Arc::new(Denied);
    let handlers = ["sub.bosh", "bosh", "corp", "arpa", "."]
        .map(|domain| (Name::from_text(domain).unwrap(), denied.clone()));
    let with_recursors = Routes {
        handlers: handlers.clone().into_iter().collect(),
        reverse: Some(recursors.clone()),
        recursors: Some(recursors.clone()),
        ..upcheck_only()
    };
    let server = Running::start(local(snapshot(1, 1)), with_recursors).await;
    let rcode = async |name: &str, qtype| {
        ask_udp(server.address(), &query(1, name, qtype, CLASS_IN))
            .await
            .metadata
            .response_code
    };
    // The handler's denial; no other route gives YXDOMAIN.
    assert_eq!(rcode("q-s0.q-g1.bosh", TYPE_A).await, ResponseCode::NoError);
    assert_eq!(rcode("x.sub.bosh", TYPE_A).await, ResponseCode::YXDomain);
    assert_eq!(rcode("sub.bosh", TYPE_A).await, ResponseCode::YXDomain);
    assert_eq!(rcode("xcorp", TYPE_A).await, ResponseCode::NoError);
    assert_eq!(rcode("x.corp", TYPE_A).await, ResponseCode::YXDomain);
    assert_eq!(rcode("1.in-addr.arpa", TYPE_A).await, ResponseCode::NoError);
    let before = recursors.asked.load(Ordering::SeqCst);
    assert_eq!(rcode("x.corp", TYPE_DS).await, ResponseCode::NoError);
    assert_eq!(
        rcode("q-s0.q-g1.bosh", TYPE_DS).await,
        ResponseCode::NoError
    );
    assert_eq!(recursors.asked.load(Ordering::SeqCst), before + 2);

    // Without recursors the handler for the root is used, also for DS.
    server.server_state.set_routes(Routes {
        handlers: handlers.clone().into_iter().collect(),
        ..upcheck_only()
    });
    assert_eq!(rcode("xcorp", TYPE_A).await, ResponseCode::YXDomain);
    assert_eq!(
        rcode("q-s0.q-g1.bosh", TYPE_DS).await,
        ResponseCode::YXDomain
    );
    assert_eq!(
        rcode("1.in-addr.arpa", TYPE_A).await,
        ResponseCode::YXDomain
    );

    // Without that handler, DS is routed to the shortest domain.
    let mut few: ByDomain = handlers.into_iter().collect();
    few.remove(&Name::root());
    server.server_state.set_routes(Routes {
        handlers: few,
        ..upcheck_only()
    });
    assert_eq!(rcode("xcorp", TYPE_A).await, ResponseCode::Refused);
    // Local although a handler has the longer domain; the instance does not exist.
    assert_eq!(rcode("x.sub.bosh", TYPE_DS).await, ResponseCode::NXDomain);
    assert_eq!(rcode("x.corp", TYPE_DS).await, ResponseCode::YXDomain);

    // A handler is used again once the records lose its domain, even for cached names.
    assert_eq!(rcode("q-s0.q-g1.bosh", TYPE_A).await, ResponseCode::NoError);
    let empty = Some(Arc::new(Snapshot::empty()));
    server.server_state.change(empty, None);
    assert_eq!(
        rcode("q-s0.q-g1.bosh", TYPE_A).await,
        ResponseCode::YXDomain
    );

    // With this option it is not used again, as in bosh-dns.
    let few = ByDomain::from_iter([(Name::from_text("bosh").unwrap(), denied)]);
    server.server_state.set_routes(Routes {
        handlers: few,
        retires_handlers: true,
        ..upcheck_only()
    });
    assert_eq!(rcode("q-s0.q-g1.bosh", TYPE_A).await, ResponseCode::Refused);
    server.stop().await;
}

/// A resolver that minimises query names asks for none below a denied one (RFC 8020, RFC 9156).
#[tokio::test]
async fn reverse_names_above_handlers_exist() {
    let recursors = Stalling::new();
    let handler = Name::from_text("5.4.10.in-addr.arpa").unwrap();
    let handlers = ByDomain::from_iter([(handler, Arc::new(Denied) as Arc<dyn Answer>)]);
    let refuses = Routes::reverse_fallback(None, &handlers);
    let private: Arc<dyn Answer> = Arc::new(SpecialNames::new(recursors));
    for (reverse, denial) in [
        (private, ResponseCode::NXDomain),
        (refuses, ResponseCode::Refused),
    ] {
        let routes = Routes {
            handlers: handlers.clone(),
            reverse: Some(reverse),
            ..upcheck_only()
        };
        let rules = NameRules {
            nxdomain_for_empty_non_terminals: false,
            ..NameRules::default()
        };
        let server = Running::start(local(snapshot(1, 1).with_rules(rules)), routes).await;
        for (name, rcode) in [
            ("4.10.in-addr.arpa", ResponseCode::NoError),
            ("3.10.in-addr.arpa", denial),
            ("1.5.4.10.in-addr.arpa", ResponseCode::YXDomain),
        ] {
            let message = query(1, name, TYPE_A, CLASS_IN);
            let by_udp = ask_udp(server.address(), &message).await;
            let by_tcp = ask_tcp(server.address(), &message).await;
            assert_eq!(by_udp.metadata.response_code, rcode, "{name}");
            assert_eq!(by_tcp.metadata.response_code, rcode, "{name}");
        }
        server.stop().await;
    }
}

/// Answers YXDOMAIN to every query.
struct Denied;

impl Answer for Denied {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(async move { error_reply(query, ResponseCode::YXDomain) })
    }
}

#[tokio::test]
async fn class_ch_reveals_only_identity() {
    let routes = Routes {
        reverse: Some(Routes::reverse_fallback(None, &ByDomain::default())),
        ..upcheck_only()
    };
    let records = br#"{"record_keys": ["id", "instance_group", "network", "deployment", "ip", "domain", "group_ids"],
        "record_infos": [["id", "web", "net", "dep", "10.0.1.0", "bosh", ["1"]]],
        "records": [["10.0.1.0", "id.web.net.dep.bosh"]]}"#;
    let (records, _) = Records::parse(records).unwrap();
    let (fleet, _) = Snapshot::build(records, &AliasFiles::default());
    let server = Running::start(local(fleet), routes).await;
    let reply = ask_udp(
        server.address(),
        &query(1, "VERSION.bind", TYPE_TXT, CLASS_CH),
    )
    .await;
    assert!(
        reply.answers[0]
            .data
            .to_string()
            .starts_with("bosh-dns-xdp ")
    );
    assert_eq!(u16::from(reply.answers[0].dns_class), CLASS_CH);
    let reply = ask_udp(
        server.address(),
        &query(1, "other.bind", TYPE_TXT, CLASS_CH),
    )
    .await;
    assert_eq!(reply.metadata.response_code, ResponseCode::Refused);
    for class in [CLASS_CH, 4] {
        // Queried in class IN first, so that the answer is cached.
        for (name, qtype) in [
            ("upcheck.bosh-dns", TYPE_A),
            ("q-s0.q-g1.bosh", TYPE_A),
            ("0.1.0.10.in-addr.arpa", TYPE_PTR),
        ] {
            let known = ask_udp(server.address(), &query(1, name, qtype, CLASS_IN)).await;
            assert!(!known.answers.is_empty(), "{name}");
            let reply = ask_udp(server.address(), &query(1, name, qtype, class)).await;
            assert_eq!(
                reply.metadata.response_code,
                ResponseCode::Refused,
                "{name} in class {class}"
            );
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn any_class_gets_local_answers_on_request() {
    let options = Options {
        compat: Compat {
            any_class: true,
            ..Compat::default()
        },
        ..Options::default()
    };
    let server = Running::start_with(
        &["127.0.0.1:0"],
        local(snapshot(1, 1)),
        upcheck_only(),
        options,
    )
    .await;
    let reply = ask_udp(
        server.address(),
        &query(1, "upcheck.bosh-dns", TYPE_A, CLASS_CH),
    )
    .await;
    assert_eq!(addresses(&reply), [IpAddr::V4(Ipv4Addr::LOCALHOST)]);
    server.stop().await;
}

/// Panics on every query.
struct Defective;

impl Answer for Defective {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(async move { error_reply(query, ResponseCode::ServFail) })
    }

    fn answer_at_once(&self, _query: &Query<'_>, _out: &mut Vec<u8>) -> bool {
        panic!("as a defect would");
    }
}

#[tokio::test]
async fn a_panic_spares_the_batch() {
    let routes = Routes {
        recursors: Some(Arc::new(Defective)),
        ..upcheck_only()
    };
    let options = Options {
        workers: NonZeroUsize::new(1),
        ..Options::default()
    };
    let server =
        Running::start_with(&["127.0.0.1:0"], local(snapshot(1, 1)), routes, options).await;
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(server.address()).await.unwrap();
    // Concurrent queries, so that the server takes them in batches.
    let defective = query(9999, "example.com", TYPE_A, CLASS_IN);
    for id in 0..200u16 {
        socket
            .send(&query(id, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN))
            .await
            .unwrap();
        if id % 10 == 5 {
            socket.send(&defective).await.unwrap();
        }
    }
    let mut answered = std::collections::HashSet::new();
    while answered.len() < 200 {
        let mut buffer = [0; 512];
        let length = timeout(TIMEOUT, socket.recv(&mut buffer))
            .await
            .unwrap()
            .unwrap();
        let reply = Message::from_vec(&buffer[..length]).unwrap();
        assert_eq!(addresses(&reply).len(), 1);
        answered.insert(reply.metadata.id);
    }
    server.stop().await;
}

#[tokio::test]
async fn new_records_apply_immediately() {
    let server = Running::start(local(snapshot(1, 1)), upcheck_only()).await;
    let web = query(1, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN);
    for version in 2..40u8 {
        server
            .server_state
            .change(Some(Arc::new(snapshot(version, 1))), None);
        let reply = ask_udp(server.address(), &web).await;
        assert_eq!(addresses(&reply), [IpAddr::from([10, 0, version, 0])]);
    }
    server
        .server_state
        .change(Some(Arc::new(snapshot(99, 200))), None);
    let reply = ask_udp(server.address(), &web).await;
    assert!(reply.metadata.truncation);
    assert_eq!(reply.answers.len(), 30);
    let reply = ask_tcp(server.address(), &web).await;
    assert!(!reply.metadata.truncation);
    assert_eq!(reply.answers.len(), 200);
    server.stop().await;
}

//----------- Addresses ------------------------------------------------------

#[tokio::test]
async fn wildcard_replies_keep_queried_address() {
    let recursors = Stalling::new();
    recursors.release();
    let routes = Routes {
        recursors: Some(recursors),
        ..upcheck_only()
    };
    let server = Running::start_with(
        &["0.0.0.0:0"],
        local(snapshot(1, 1)),
        routes.clone(),
        Options::default(),
    )
    .await;
    let port = server.address().port();
    let web = query(1, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN);
    let outside = query(1, "example.com", TYPE_A, CLASS_IN);
    for last in 1..=5 {
        let address = SocketAddr::from(([127, 0, 0, last], port));
        // Connected sockets accept replies only from the queried address.
        assert_eq!(addresses(&ask_udp(address, &web).await).len(), 1);
        assert_eq!(
            ask_udp(address, &outside).await.metadata.response_code,
            ResponseCode::NoError
        );
        assert_eq!(addresses(&ask_tcp(address, &web).await).len(), 1);
    }
    server.stop().await;

    let server = Running::start_with(
        &["[::]:0"],
        local(snapshot(1, 1)),
        routes,
        Options::default(),
    )
    .await;
    let port = server.address().port();
    for address in ["127.0.0.1", "127.0.0.6", "::1"] {
        let address = SocketAddr::new(address.parse().unwrap(), port);
        assert_eq!(addresses(&ask_udp(address, &web).await).len(), 1);
        assert_eq!(
            ask_udp(address, &outside).await.metadata.response_code,
            ResponseCode::NoError
        );
        assert_eq!(addresses(&ask_tcp(address, &web).await).len(), 1);
    }
    server.stop().await;
}

#[tokio::test]
async fn occupied_port_is_an_error() {
    let server = Running::start(local(snapshot(1, 1)), upcheck_only()).await;
    let again = async |address| {
        let metrics = ServerMetrics::new(String::new());
        let identity = Arc::new(Identity::of_this_host(Setting::Off));
        Server::bind(
            &[address],
            local(snapshot(1, 1)),
            identity,
            metrics,
            Options::default(),
        )
        .await
        .err()
        .unwrap()
        .to_string()
    };
    let error = again(server.address()).await;
    assert!(
        error.contains("TCP") && error.contains("another process listens"),
        "{error}"
    );
    server.stop().await;

    // A port in use for UDP only.
    let taken = UdpSocket::bind(test_support::free_address()).await.unwrap();
    let error = again(taken.local_addr().unwrap()).await;
    assert!(
        error.contains("UDP") && error.contains("another process listens"),
        "{error}"
    );
    let error = again("192.0.2.1:0".parse().unwrap()).await;
    assert!(error.contains("no interface has this address"), "{error}");
}

/// Adds an OPT with these options to a query.
fn with_options(mut message: Vec<u8>, options: &[u8]) -> Vec<u8> {
    message[11] = 1;
    message.extend_from_slice(b"\0\0\x29\x04\xd0\0\0\0\0");
    message.extend_from_slice(&(options.len() as u16).to_be_bytes());
    message.extend_from_slice(options);
    message
}

/// Returns the INFO-CODE of the Extended DNS Error in a reply.
fn info_code(reply: &Message) -> Option<u16> {
    use hickory_proto::rr::rdata::opt::{EdnsCode, EdnsOption};
    match reply.edns.as_ref()?.option(EdnsCode::Unknown(15))? {
        EdnsOption::Unknown(15, data) => Some(u16::from_be_bytes([data[0], data[1]])),
        _ => None,
    }
}

#[tokio::test]
async fn refusals_carry_their_reason() {
    let stalled = Stalling::new();
    let handlers =
        ByDomain::from_iter([(Name::from_text("slow").unwrap(), stalled as Arc<dyn Answer>)]);
    let options = Options {
        request_timeout: Duration::from_millis(300),
        ..Options::default()
    };
    let routes = Routes {
        handlers,
        ..upcheck_only()
    };
    let server =
        Running::start_with(&["127.0.0.1:0"], local(snapshot(1, 1)), routes, options).await;
    let ask = async |name: &str, class: u16, options: &[u8]| {
        let reply = ask_udp(
            server.address(),
            &with_options(query(1, name, TYPE_A, class), options),
        )
        .await;
        (reply.metadata.response_code, info_code(&reply))
    };
    assert_eq!(
        ask("example.com", CLASS_IN, b"").await,
        (ResponseCode::Refused, Some(20))
    );
    assert_eq!(
        ask("q-s0.q-g1.bosh", CLASS_CH, b"").await,
        (ResponseCode::Refused, Some(21))
    );
    assert_eq!(
        ask("x.slow", CLASS_IN, b"").await,
        (ResponseCode::ServFail, Some(22))
    );
    // Interfaces deny the name with the same bytes, except to a query for the server's name.
    for nsid in [false, true, false] {
        let options = if nsid { &b"\0\x03\0\0"[..] } else { b"" };
        let expected = (ResponseCode::NXDomain, nsid.then_some(0));
        assert_eq!(ask("q-s0.q-g9.bosh", CLASS_IN, options).await, expected);
    }
    server.stop().await;
}
