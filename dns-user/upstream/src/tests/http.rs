//! Tests of HTTP handlers against a server on loopback.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpListener,
};

use super::*;
use crate::{
    Answer as _,
    cached::{CachedSource, UncachedSource},
    http::{HttpClients, HttpServer, HttpSource},
    tcp::Trust,
};

/// Requests and connections seen by the server.
#[derive(Default)]
struct Seen {
    /// First lines of requests.
    requests: Mutex<Vec<String>>,
    connections: AtomicUsize,
}

/// Starts a server that answers every request with this status and body, or never for an empty
/// status. Returns its address.
async fn server(status: &'static str, body: &'static str) -> (String, Arc<Seen>) {
    serve(move |_| match status {
        "" => Vec::new(),
        _ => format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into(),
    })
    .await
}

/// Starts a server with these responses to the first lines of requests.
async fn serve(respond: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> (String, Arc<Seen>) {
    let respond = Arc::new(respond);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let seen = Arc::new(Seen::default());
    let log = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            log.connections.fetch_add(1, Ordering::Relaxed);
            let (log, respond) = (Arc::clone(&log), Arc::clone(&respond));
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                loop {
                    let mut request = String::new();
                    while !request.ends_with("\r\n\r\n") {
                        if stream.read_line(&mut request).await.unwrap_or(0) == 0 {
                            return;
                        }
                    }
                    let line = request.lines().next().unwrap().to_owned();
                    let response = respond(&line);
                    log.requests.lock().push(line);
                    stream.write_all(&response).await.unwrap();
                }
            });
        }
    });
    (address, seen)
}

/// Returns a source that uses the server at this address.
fn source(url: &str) -> CachedSource {
    let server = HttpServer {
        url: url.parse().unwrap(),
        trust: Trust::System,
    };
    let (mut clients, hosts) = (HttpClients::default(), Arc::default());
    let source = HttpSource::new(&server, &mut clients, &hosts, Duration::from_millis(600));
    let compat = Compat {
        forget_failures: true,
        ..Compat::default()
    };
    CachedSource::new(
        UncachedSource::Http(Arc::new(source)),
        None,
        form(compat),
        compat,
    )
}

/// Queries `a b.eXample. AAAA`.
async fn ask(source: &CachedSource) -> Vec<u8> {
    let query = query(b"\x03a b\x07eXample\0", 28);
    source.answer(&parsed(&query)).await
}

#[tokio::test]
async fn requests_reuse_connection() {
    let body = r#"{"Status": 0, "Answer": [{"type": 28, "TTL": 7, "data": "2001:db8::1"}]}"#;
    let (address, seen) = server("200 OK", body).await;
    let source = source(&format!("http://{address}/some/path"));
    for _ in 0..3 {
        let reply = ask(&source).await;
        assert_eq!(reply[2..8], [0x85, 0x80, 0, 1, 0, 1]);
        assert!(reply.ends_with(
            b"\xc0\x0c\0\x1c\0\x01\0\0\0\x07\0\x10\x20\x01\x0d\xb8\0\0\0\0\0\0\0\0\0\0\0\x01"
        ));
    }
    assert_eq!(seen.connections.load(Ordering::Relaxed), 1);
    let requests = seen.requests.lock();
    assert_eq!(
        requests[0],
        "GET /some/path/?type=28&name=a%5C+b.eXample. HTTP/1.1"
    );
}

#[tokio::test]
async fn whatever_goes_wrong_is_servfail() {
    for (status, body) in [
        ("404 Not Found", "no"),
        (
            "500 Oops",
            r#"{"Answer": [{"type": 1, "data": "192.0.2.1"}]}"#,
        ),
        ("201 Created", "{}"),
        ("302 Found", "{}"),
        ("200 OK", ""),
        ("200 OK", "{nope"),
        ("", ""),
    ] {
        let (address, _) = server(status, body).await;
        let reply = ask(&source(&format!("http://{address}"))).await;
        assert_eq!(
            reply[2..8],
            [0x85, 0x80 | message::SERVFAIL, 0, 1, 0, 0],
            "{status} {body}"
        );
    }
    let closed = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    assert_eq!(
        rcode(&ask(&source(&format!("http://{closed}"))).await),
        message::SERVFAIL
    );
    assert_eq!(
        rcode(&ask(&source(&format!("https://{closed}"))).await),
        message::SERVFAIL
    );
}

/// Returns a response with a body and one more header.
fn response(status: &str, header: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status}\r\n{header}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

#[tokio::test]
async fn redirects_are_followed() {
    for status in [
        "301 Moved",
        "302 Found",
        "303 See Other",
        "307 Temporary",
        "308 Permanent",
    ] {
        let (address, seen) = serve(move |line| match line {
            _ if line.starts_with("GET /first/") => {
                response(status, "location: /second?type=28", b"")
            }
            _ if line.starts_with("GET /second?") => response(status, "location: ../third", b""),
            "GET /third HTTP/1.1" => {
                let body = br#"{"Answer": [{"type": 28, "TTL": 7, "data": "2001:db8::1"}]}"#;
                response("200 OK", "x: y", body)
            }
            _ => response("404 Not Found", "x: y", b""),
        })
        .await;
        let reply = ask(&source(&format!("http://{address}/first"))).await;
        assert_eq!(reply[2..8], [0x85, 0x80, 0, 1, 0, 1], "{status}");
        assert_eq!(seen.requests.lock().len(), 3);
    }
    let (address, seen) = serve(|_| response("302 Found", "location: /again", b"")).await;
    assert_eq!(
        rcode(&ask(&source(&format!("http://{address}"))).await),
        message::SERVFAIL
    );
    assert_eq!(seen.requests.lock().len(), 10);
    let (address, _) = serve(|_| response("302 Found", "location: file:///etc/passwd", b"")).await;
    assert_eq!(
        rcode(&ask(&source(&format!("http://{address}"))).await),
        message::SERVFAIL
    );
}

#[tokio::test]
async fn gzip_is_decoded() {
    use std::io::Write as _;
    let gzip = |text: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    };
    let answer = br#"{"Answer": [{"type": 28, "TTL": 7, "data": "2001:db8::1"}]}"#;
    let bomb = vec![b' '; 5 << 20];
    for (body, expected) in [
        (gzip(answer), message::NOERROR),
        (gzip(&[&bomb[..], answer].concat()), message::SERVFAIL),
        (gzip(answer)[..20].to_vec(), message::SERVFAIL),
        (answer.to_vec(), message::SERVFAIL),
    ] {
        let (address, _) =
            serve(move |_| response("200 OK", "Content-Encoding: GZIP", &body)).await;
        assert_eq!(
            rcode(&ask(&source(&format!("http://{address}"))).await),
            expected
        );
    }
}

#[tokio::test]
async fn repeated_failures_are_an_outage() {
    let (address, _) = server("500 Oops", "").await;
    let source = source(&format!("http://{address}/"));
    for failures in 0..4 {
        assert_eq!(source.outage().is_some(), failures >= 3, "{failures}");
        ask(&source).await;
    }
    assert!(!source.outage().unwrap().is_empty());
}
