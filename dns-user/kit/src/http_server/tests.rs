use std::collections::VecDeque;

use futures_util::FutureExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

/// Starts a server whose `/` returns `body`; it ends with the test's runtime.
async fn server(limits: ServerLimits, body: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().route("/", get(|| async { body }));
    let server = Server::new("the test", Listener::Plain(listener)).with_limits(limits);
    tokio::spawn(server.run(move |_| router.clone(), std::future::pending()));
    address
}

/// Sends a request whose response ends the connection.
async fn request(address: SocketAddr) -> TcpStream {
    let mut client = TcpStream::connect(address).await.unwrap();
    client
        .write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    client
}

#[tokio::test]
async fn new_connection_replaces_oldest() {
    let limits = ServerLimits {
        connections: 8,
        ..ServerLimits::default()
    };
    let address = server(limits, b"up 1\n".to_vec()).await;
    let mut idle = Vec::new();
    for _ in 0..3 * limits.connections {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    let mut reply = String::new();
    request(address)
        .await
        .read_to_string(&mut reply)
        .await
        .unwrap();
    assert!(
        reply.starts_with("HTTP/1.1 200") && reply.ends_with("up 1\n"),
        "{reply}"
    );
    // The oldest was closed for a newer one.
    assert_eq!(idle[0].read(&mut [0]).await.unwrap(), 0);
}

/// Returns whether the server's end of a connection is open (`/proc/net/tcp`, state 01).
fn is_established(server: u16, client: u16) -> bool {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    table.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields[1].ends_with(&format!(":{server:04X}"))
            && fields[2].ends_with(&format!(":{client:04X}"))
            && fields[3] == "01"
    })
}

#[tokio::test]
async fn unread_reply_closes_connection() {
    const BODY: usize = 64 << 20;
    let limits = ServerLimits {
        unread: Duration::from_millis(200),
        ..ServerLimits::default()
    };
    let address = server(limits, vec![b'x'; BODY]).await;
    let mut client = request(address).await;
    let port = client.local_addr().unwrap().port();
    while is_established(address.port(), port) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut read = Vec::new();
    // A reset also proves that the connection was closed.
    let _ = client.read_to_end(&mut read).await;
    assert!(read.len() < BODY, "{}", read.len());
}

#[tokio::test]
async fn reader_survives_silent_clients() {
    const BODY: usize = 4 << 20;
    let address = server(ServerLimits::default(), vec![b'x'; BODY]).await;
    // Twelve at a time, renewed for as long as the reader reads.
    let silent = async {
        let mut silent = VecDeque::new();
        loop {
            silent.push_back(request(address).await);
            if silent.len() > 12 {
                silent.pop_front();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let reader = async {
        loop {
            let (mut client, mut part, mut read) =
                (request(address).await, vec![0; 16 << 10], Vec::new());
            loop {
                let count = client.read(&mut part).await.unwrap();
                if count == 0 {
                    break;
                }
                read.extend_from_slice(&part[..count]);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if read.starts_with(b"HTTP/1.1 200") {
                return read.len();
            }
            assert!(read.starts_with(b"HTTP/1.1 503"), "{}", read.len());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let read = tokio::select! {
        () = silent => unreachable!("it never ends"),
        read = reader => read,
    };
    assert!(read > BODY, "cut off after {read} bytes");
}

/// Starts a server that answers with the length of the body it has read.
async fn echo_server(limits: ServerLimits) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let read = |body: axum::body::Bytes| async move { body.len().to_string() };
    let router = Router::new()
        .route("/read", axum::routing::post(read))
        .layer(axum::extract::DefaultBodyLimit::disable())
        .route(
            "/refused",
            axum::routing::post(|| async { StatusCode::FORBIDDEN }),
        );
    let server = Server::new("the test", Listener::Plain(listener)).with_limits(limits);
    tokio::spawn(server.run(move |_| router.clone(), std::future::pending()));
    address
}

/// Sends the head of a request and a part of its body; the rest never follows.
async fn unfinished(address: SocketAddr, path: &str, head: &str, part: &[u8]) -> TcpStream {
    let mut client = TcpStream::connect(address).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    // A server that has refused the head reads no more.
    let _ = client.write_all(part).await;
    client
}

async fn reply(client: &mut TcpStream) -> String {
    let mut read = Vec::new();
    // A reset may follow the response, because the rest of the body is unread.
    let _ = client.read_to_end(&mut read).await;
    String::from_utf8_lossy(&read).into_owned()
}

#[tokio::test]
async fn endless_bodies_are_cut_off() {
    let limits = ServerLimits {
        request: Duration::from_millis(300),
        body: 100_000,
        ..ServerLimits::default()
    };
    let address = echo_server(limits).await;
    let slow = "Content-Length: 1000";
    let mut client = unfinished(address, "/read", slow, b"x").await;
    let text = reply(&mut client).await;
    assert!(text.starts_with("HTTP/1.1 408"), "{text}");
    // A byte now and then does not help.
    let mut client = unfinished(address, "/read", slow, b"x").await;
    let trickle = async {
        while client.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    trickle.await;
    let declared = "Content-Length: 100001";
    let mut client = unfinished(address, "/read", declared, b"").await;
    let text = reply(&mut client).await;
    assert!(text.starts_with("HTTP/1.1 413"), "{text}");
    let chunked = "Transfer-Encoding: chunked";
    let chunk = format!("186a1\r\n{}\r\n", "x".repeat(100_001));
    let mut client = unfinished(address, "/read", chunked, chunk.as_bytes()).await;
    let text = reply(&mut client).await;
    assert!(text.starts_with("HTTP/1.1 413"), "{text}");
    // The head decides first; the body is never waited for.
    let mut client = unfinished(address, "/refused", slow, b"x").await;
    let text = reply(&mut client).await;
    assert!(text.starts_with("HTTP/1.1 403"), "{text}");
    let whole = "Content-Length: 5\r\nConnection: close";
    let mut client = unfinished(address, "/read", whole, b"hello").await;
    let text = reply(&mut client).await;
    assert!(
        text.starts_with("HTTP/1.1 200") && text.ends_with('5'),
        "{text}"
    );
}

#[tokio::test]
async fn bodies_have_a_limit_together() {
    const PART: usize = 1 << 20;
    let limits = ServerLimits {
        bodies: 8 * PART,
        ..ServerLimits::default()
    };
    let address = echo_server(limits).await;
    let head = format!("Content-Length: {}", 2 * PART);
    let part = vec![b'x'; PART];
    // All are one peer's, which has half of the room: some are refused, or have stalled and gave way.
    let mut open = Vec::new();
    for _ in 0..12 {
        open.push(unfinished(address, "/read", &head, &part).await);
    }
    while open.len() > 4 {
        let mut still_open = Vec::new();
        for mut client in open {
            let waited = tokio::time::timeout(Duration::from_millis(10), reply(&mut client)).await;
            match waited {
                Ok(text) => assert!(
                    text.is_empty() || text.starts_with("HTTP/1.1 503"),
                    "{text}"
                ),
                Err(_) => still_open.push(client),
            }
        }
        open = still_open;
    }
    // Small calls succeed meanwhile.
    let whole = "Content-Length: 5\r\nConnection: close";
    let mut client = unfinished(address, "/read", whole, b"hello").await;
    let text = reply(&mut client).await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    // Those that have sent nothing for a while give way to the next.
    tokio::time::sleep(held::STALLED).await;
    let head = format!("Content-Length: {PART}\r\nConnection: close");
    let mut client = unfinished(address, "/read", &head, &part).await;
    let text = reply(&mut client).await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

#[tokio::test]
async fn replaced_connections_can_be_counted() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = Server::new("the test", Listener::Plain(listener));
    let counter = IntCounter::new("replaced", "Connections.").unwrap();
    let server = server.count_replaced(counter.clone());
    server.replaced.unwrap().inc();
    assert_eq!(counter.get(), 1);
}

#[tokio::test]
async fn bodies_end_at_the_limit() {
    let limits = ServerLimits {
        body: 5,
        ..ServerLimits::default()
    };
    let address = echo_server(limits).await;
    let chunked = "Transfer-Encoding: chunked\r\nConnection: close";
    for (head, part, expected) in [
        ("Content-Length: 5\r\nConnection: close", "hello", "200"),
        ("Content-Length: 6\r\nConnection: close", "hello!", "413"),
        (chunked, "5\r\nhello\r\n0\r\n\r\n", "200"),
        (chunked, "6\r\nhello!\r\n0\r\n\r\n", "413"),
        (chunked, "3\r\nhel\r\n3\r\nlo!\r\n0\r\n\r\n", "413"),
    ] {
        let mut client = unfinished(address, "/read", head, part.as_bytes()).await;
        let text = reply(&mut client).await;
        assert!(
            text.starts_with(&format!("HTTP/1.1 {expected}")),
            "{head} {part}: {text}"
        );
    }
}

/// Handlers may ask for the length of a body before they read it.
#[tokio::test]
async fn bounded_bodies_have_their_lengths() {
    use http_body_util::BodyExt as _;

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let describe = |request: axum::extract::Request| async {
        let mut body = request.into_body();
        let before = (body.size_hint().exact(), body.is_end_stream());
        while let Some(Ok(_)) = body.frame().await
            && !body.is_end_stream()
        {}
        format!("{before:?} {}", body.is_end_stream())
    };
    let router = Router::new().route("/", axum::routing::post(describe));
    let server = Server::new("the test", Listener::Plain(listener));
    assert_eq!(server.local_addr().unwrap(), address);
    tokio::spawn(server.run(move |_| router.clone(), std::future::pending()));
    let head = "Content-Length: 5\r\nConnection: close";
    let mut client = unfinished(address, "/", head, b"hello").await;
    let text = reply(&mut client).await;
    assert!(text.ends_with("(Some(5), false) true"), "{text}");
}

fn client(certificate: Option<CertificateDer<'static>>, ends: Option<SystemTime>) -> Client {
    Client {
        peer: Peer::User(1),
        address: None,
        certificate,
        certificate_ends: ends,
    }
}

/// Returns a certificate with this common name.
fn certificate(common_name: &str) -> CertificateDer<'static> {
    let mut params = rcgen::CertificateParams::default();
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, common_name);
    let key = rcgen::KeyPair::generate().unwrap();
    params.self_signed(&key).unwrap().der().clone()
}

#[tokio::test]
async fn certificates_have_names_and_ends() {
    let now = SystemTime::now();
    let hour = Duration::from_secs(3600);
    assert_eq!(client(None, None).common_name(), None);
    let named = client(Some(certificate("a.example")), Some(now + hour));
    assert_eq!(named.common_name().as_deref(), Some("a.example"));
    assert!(named.verified().now_or_never().is_none());
    let ended = client(named.certificate.clone(), Some(now - hour));
    ended.verified().await;
    // Without a certificate there is no second verification.
    let none = client(None, Some(now - hour));
    assert!(none.verified().now_or_never().is_none());
    assert!(until(None).now_or_never().is_none());
    assert!(until(Some(now + hour)).now_or_never().is_none());
    until(Some(now - hour)).await;
}

/// Returns the reply to a client whose certificate ends at this time.
async fn reply_to(ends: Option<SystemTime>) -> String {
    let (mut ours, theirs) = tokio::io::duplex(4096);
    let router = Router::new().route("/", get(|| async { "up" }));
    let limits = ServerLimits::default();
    let context = Context {
        name: "the test",
        limits,
        routes: Box::new(move |_| router.clone()),
        responses: Responses::default(),
        bodies: HeldBytes::new(limits.bodies),
    };
    let (_stopping, stopped) = watch::channel(false);
    ours.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let serving = context.requests(theirs, client(None, ends), Arc::default(), stopped);
    let mut text = String::new();
    let ((), read) = tokio::join!(serving, ours.read_to_string(&mut text));
    read.unwrap();
    text
}

/// A clock that jumps does not end the wait for the end of a certificate.
#[tokio::test]
async fn expired_certificates_refuse_requests() {
    let now = SystemTime::now();
    let day = Duration::from_secs(24 * 3600);
    for ends in [None, Some(now + day)] {
        let text = reply_to(ends).await;
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("up"));
    }
    let text = reply_to(Some(now - day)).await;
    assert!(text.starts_with("HTTP/1.1 401"), "{text}");
    assert!(text.contains("connection: close\r\n"), "{text}");
    let reason = "the client's certificate has expired; connect with a new one\n";
    assert!(text.ends_with(reason), "{text}");
}

#[tokio::test]
async fn metrics_need_a_free_address() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap();
    let problem = spawn_metrics(address, Vec::new).await.unwrap_err();
    assert_eq!(
        problem.to_string(),
        format!("cannot serve metrics at {address}; choose a free address")
    );
}
