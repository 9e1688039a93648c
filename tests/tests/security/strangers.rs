//! Clients without a certificate, at the API and at the health server.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use dns_core::{
    config::HealthConfig,
    name::Name,
    resolve::{Checks, Existence, Health as _, HealthState, Resolution},
};
use dns_fastpath::FastPathHandle;
use dns_health::HealthService;
use serde_json::json;
use socket2::{Domain, Socket, Type};
use whole_system_tests::{
    namespace::Namespace,
    process::{Kept, wait_until},
    requires,
    server::{self, Server},
};

use crate::{
    limited::Limited,
    pki::{Client, Pki},
};

const API: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 53080);
const HEALTH: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8853);

/// Longer than a process takes to start on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Connections per port, each from another address.
const STRANGERS: u32 = 3000;

#[test]
fn strangers_fill_no_log() {
    requires!(namespaces);
    Namespace::new("strangers").unwrap().run(flood).unwrap();
}

fn flood() {
    let pki = Pki::new(Client::Good);
    let folder = server::folder(&server::records_of_groups(&[1]), None).unwrap();
    let path = folder.path().to_path_buf();
    let tls = json!({
        "certificate_file": pki.server.certificate, "private_key_file": pki.server.private_key,
        "ca_file": pki.server.ca,
    });
    let mut health = json!({
        "address": HEALTH.ip(), "port": HEALTH.port(), "health_file_name": path.join("health.json"),
        "jobs_dir": path.join("jobs"), "request_timeout": "60s",
    });
    server::merge(&mut health, &tls);
    fs::write(path.join("health-config.json"), health.to_string()).unwrap();
    let mut settings = json!({"api": {"port": API.port()}, "xdp": {"mode": "off"}});
    server::merge(&mut settings["api"], &tls);

    let begun = Instant::now();
    let _server = Server::start(None, folder, ([127, 0, 0, 1], 53).into(), &settings).unwrap();
    let log = fs::File::create(path.join("health-log")).unwrap();
    let program = server::companion("bosh-dns-xdp-health").unwrap();
    let mut command = Command::new(program);
    command.arg(path.join("health-config.json")).stdin(Stdio::null()).stdout(log);
    let _health = Kept::spawn(&mut command).unwrap();
    for (port, log, kind) in
        [(API, "log", "API client refused"), (HEALTH, "health-log", "TLS handshake failed")]
    {
        let ready = || TcpStream::connect(port).is_ok();
        wait_until("the port", LIMIT, ready).unwrap();
        (0..STRANGERS).for_each(|stranger| intrude(port, stranger));
        bounded(&path.join(log), kind, port, begun);
    }
}

/// Sends what is not TLS, from an address of the stranger's own, and waits until the server hangs up.
fn intrude(port: SocketAddr, stranger: u32) {
    let own = Ipv4Addr::from_bits(Ipv4Addr::new(127, 77, 0, 1).to_bits() + stranger);
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((own, 0)).into()).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.connect(&port.into()).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // A reset also proves that the connection was closed.
    let _ = stream.read_to_end(&mut Vec::new());
}

/// Requires that the log of the server at `port` counts the refusals in few lines.
fn bounded(log: &Path, kind: &str, port: SocketAddr, begun: Instant) {
    let logged = || Limited::of(&fs::read_to_string(log).unwrap(), kind, "client=");
    // Further strangers until one is logged: its line counts all before it.
    let mut more = STRANGERS..;
    wait_until("a line that counts them", LIMIT, || {
        intrude(port, more.next().unwrap());
        logged().events >= u64::from(STRANGERS)
    })
    .unwrap();
    logged().assert_bounded(begun);
}

/// Silent connections of one client: more than the health server has room for.
const SILENT: usize = 9000;

#[test]
fn silent_clients_delay_no_health_check() {
    requires!(namespaces);
    Namespace::new("silent").unwrap().run(silence).unwrap();
}

fn silence() {
    crate::health::raise_own_limit();
    let pki = Pki::new(Client::Good);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::create_dir(path.join("jobs")).unwrap();
    fs::write(path.join("health.json"), r#"{"state": "running"}"#).unwrap();
    let settings = json!({
        "address": HEALTH.ip(), "port": HEALTH.port(), "health_file_name": path.join("health.json"),
        "jobs_dir": path.join("jobs"), "request_timeout": "600s",
        "certificate_file": pki.server.certificate, "private_key_file": pki.server.private_key,
        "ca_file": pki.server.ca,
    });
    fs::write(path.join("health-config.json"), settings.to_string()).unwrap();
    let program = server::program().unwrap().with_file_name("bosh-dns-xdp-health");
    let mut command = Command::new(program);
    command.arg(path.join("health-config.json")).stdin(Stdio::null()).stdout(Stdio::null());
    let _health = Kept::spawn(&mut command).unwrap();
    wait_until("the port", LIMIT, || TcpStream::connect(HEALTH).is_ok()).unwrap();
    let mut silent = Vec::new();
    while silent.len() < SILENT {
        match TcpStream::connect_timeout(&HEALTH, Duration::from_secs(5)) {
            Ok(stream) => silent.push(stream),
            // The server accepts no more, or this process has too few descriptors.
            Err(_) => break,
        }
    }
    let config = HealthConfig {
        enabled: true,
        port: HEALTH.port(),
        tls: Some(pki.client.clone()),
        check_interval: Duration::from_millis(200),
        max_tracked_queries: 2000,
        synchronous_check_timeout: Duration::from_secs(1),
        tracked_query_ttl: None,
    };
    let service = HealthService::new(&config, Duration::from_secs(5), FastPathHandle::default()).unwrap();
    service.start().unwrap();
    let checks = Checks { instances: vec![HEALTH.ip()], tracked: true, synchronous: false };
    let resolution = Resolution { existence: Existence::Found, v4: Vec::new(), v6: Vec::new(), checks };
    service.tracker().asked(&Name::from_text("one").unwrap(), &resolution);
    let is_running = || service.states().state(HEALTH.ip(), None) == HealthState::Running;
    wait_until("a health check beside silent clients", LIMIT, is_running).unwrap();
    drop(silent);
}
