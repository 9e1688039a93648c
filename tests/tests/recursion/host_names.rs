//! Host names of HTTP servers: asked of the configured recursors, and only while they are in use.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::unix::process::CommandExt as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Result, ensure};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, process::wait_until, requires};

use super::{
    encrypted::{Files, NAME, unbound},
    lab::{Lab, ensure_code, loopback},
    recursor_list::{Etc, show_as_etc},
    scripted::Scripted,
};

/// Address of the HTTP server.
const HTTP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
/// Time limit for look-ups, reached only on failure.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns the response to request number `n`.
type Respond = dyn Fn(usize) -> String + Send + Sync;

/// Serves HTTP until dropped, one request per connection.
struct HttpServer {
    ended: Arc<AtomicBool>,
    requests: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl HttpServer {
    fn start(
        namespace: &Namespace,
        respond: impl Fn(usize) -> String + Send + Sync + 'static,
    ) -> Result<Self> {
        namespace.ip(&format!("addr add {HTTP}/32 dev lo"))?;
        let listener =
            namespace.run(|| TcpListener::bind(SocketAddr::new(HTTP.into(), 8080)))??;
        listener.set_nonblocking(true)?;
        let (ended, requests) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let (until, count) = (Arc::clone(&ended), Arc::clone(&requests));
        let respond: Box<Respond> = Box::new(respond);
        let thread = thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let number = count.fetch_add(1, Ordering::Relaxed);
                // The client may be gone.
                let _ = serve(stream, &respond(number));
            }
        });
        Ok(Self {
            ended,
            requests,
            thread: Some(thread),
        })
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic shows as a missing response in the test.
            let _ = thread.join();
        }
    }
}

fn serve(stream: TcpStream, response: &str) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while stream.read_line(&mut line)? > 2 {
        line.clear();
    }
    stream.get_mut().write_all(response.as_bytes())
}

/// Returns how often names within a domain were asked for.
fn look_ups(recursor: &Scripted, domain: &str) -> usize {
    let names = recursor.asked();
    let names = names.iter().map(|asked| asked.name().to_ascii_lowercase());
    names.filter(|name| name.ends_with(domain)).count()
}

#[test]
fn redirects_leave_no_look_ups() -> Result<()> {
    const QUERIES: usize = 60;
    /// Requests of Go's client for a query.
    const MAX_REQUESTS: usize = 10;
    requires!(namespaces);
    let namespace = Namespace::new("redirect")?;
    // Names are looked up again as soon as they may be.
    let recursor = Scripted::start(&namespace, loopback(10), |asked| {
        vec![asked.answer(HTTP, 1).into()]
    })?;
    let http = HttpServer::start(&namespace, |number| {
        let target = format!("http://h{number}.redirect.test:8080/");
        format!(
            "HTTP/1.1 302 Found\r\nlocation: {target}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
    })?;
    let url = format!("http://{HTTP}:8080/");
    let settings = json!({
        "handlers": [
            {"domain": "http.test", "source": {"type": "http", "url": url}},
            {"domain": "clock.test", "source": {"type": "http", "url": "http://always.used.test:8080/"}},
        ],
    });
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    for number in 0..QUERIES {
        let query = client::query(&format!("n{number}.http.test."), RecordType::A, None)?;
        let reply = lab.ask_tcp(&query)?;
        ensure_code(&reply, ResponseCode::ServFail)?;
    }
    ensure!(
        http.requests() == QUERIES * MAX_REQUESTS,
        "{} requests for {QUERIES} queries",
        http.requests()
    );
    let redirected = look_ups(&recursor, ".redirect.test.");
    ensure!(
        redirected >= QUERIES * (MAX_REQUESTS - 1),
        "{redirected} look-ups of new host names"
    );
    // A name in use tells when another one would have been looked up again, twice.
    let used = look_ups(&recursor, "always.used.test.");
    wait_until("look-ups of a name in use", LIMIT, || {
        look_ups(&recursor, "always.used.test.") >= used + 3
    })?;
    let more = look_ups(&recursor, ".redirect.test.") - redirected;
    ensure!(more == 0, "{more} look-ups without a query");
    Ok(())
}

#[test]
fn encrypted_recursors_get_host_names() -> Result<()> {
    requires!(namespaces, programs(&["unbound"]));
    let namespace = Namespace::new("dothost")?;
    let (files, address) = (Files::new()?, SocketAddr::new(loopback(31).ip(), 853));
    let _unbound = unbound(&namespace, &files, address)?;
    let body = r#"{"Status": 0, "Answer": [{"type": 1, "TTL": 60, "data": "192.0.2.77"}]}"#;
    let http = HttpServer::start(&namespace, move |_| {
        let length = body.len();
        format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}")
    })?;
    // The nameserver of resolv.conf is not this server, and knows the name as well.
    let plain = Scripted::answering(&namespace, loopback(10), HTTP)?;
    let etc = Etc::new(&format!("nameserver {}\n", loopback(10).ip()))?;
    let (ca, folder) = (files.path("ca.crt"), etc.path());
    let settings = json!({
        "recursors": [format!("tls://{address}#{NAME}")],
        "handlers": [{
            "domain": "http.test",
            "source": {"type": "http", "url": "http://www.encrypted.test:8080/"},
        }],
    });
    let lab = Lab::start_prepared(&namespace, &[], &settings, move |command| {
        command.env("SSL_CERT_FILE", ca).env_remove("SSL_CERT_DIR");
        // SAFETY: plain system calls, allowed between fork and exec.
        unsafe { command.pre_exec(move || show_as_etc(&folder)) };
    })?;
    let reply = lab.ask_for("www.http.test.", RecordType::A)?;
    let expected = [Ipv4Addr::new(192, 0, 2, 77)];
    ensure!(client::addresses(&reply) == expected, "{reply}");
    ensure!(http.requests() == 1);
    let asked: Vec<String> = plain.asked().iter().map(|asked| asked.name()).collect();
    ensure!(asked.is_empty(), "asked in plain: {asked:?}");
    Ok(())
}
