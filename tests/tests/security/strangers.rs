//! Clients without a certificate, at the API and at the health server.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
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
const LIMIT: Duration = Duration::from_secs(120);

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
    let mut settings = json!({"api": {"port": API.port()}, "xdp": {"mode": "off"}});
    server::merge(&mut settings["api"], &files(&pki));

    let begun = Instant::now();
    let _server = Server::start(None, folder, ([127, 0, 0, 1], 53).into(), &settings).unwrap();
    let _health = health_server(&path, &pki);
    for (port, log, kind) in [
        (API, "log", "TLS handshake failed"),
        (HEALTH, "health-log", "TLS handshake failed"),
    ] {
        let ready = || TcpStream::connect(port).is_ok();
        wait_until("the port", LIMIT, ready).unwrap();
        (0..STRANGERS).for_each(|stranger| intrude(port, stranger));
        bounded(&path.join(log), kind, port, begun);
    }
}

/// Returns the members of a configuration that name the server's certificate.
fn files(pki: &Pki) -> Value {
    json!({
        "certificate_file": pki.server.certificate, "private_key_file": pki.server.private_key,
        "ca_file": pki.server.ca,
    })
}

/// Starts a health server that gives a handshake a minute; its log is `health-log` in `folder`.
fn health_server(folder: &Path, pki: &Pki) -> Kept {
    let mut config = json!({
        "address": HEALTH.ip(), "port": HEALTH.port(), "health_file_name": folder.join("health.json"),
        "jobs_dir": folder.join("jobs"), "request_timeout": "60s",
    });
    server::merge(&mut config, &files(pki));
    fs::write(folder.join("health-config.json"), config.to_string()).unwrap();
    let log = fs::File::create(folder.join("health-log")).unwrap();
    let program = server::companion("bosh-dns-xdp-health").unwrap();
    let mut command = Command::new(program);
    command
        .arg(folder.join("health-config.json"))
        .stdin(Stdio::null())
        .stdout(log);
    Kept::spawn(&mut command).unwrap()
}

#[test]
fn silent_clients_delay_no_check() {
    requires!(namespaces);
    Namespace::new("silent").unwrap().run(silence).unwrap();
}

fn silence() {
    // The health server inherits the limit, and keeps 64 descriptors for files.
    const FILES: u64 = 2200;
    const CONNECTIONS: u64 = FILES - 64 + 10;
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, FILES, FILES)
        .unwrap();
    let pki = Pki::new(Client::Good);
    let folder = tempfile::tempdir().unwrap();
    let _health = health_server(folder.path(), &pki);
    wait_until("the port", LIMIT, || TcpStream::connect(HEALTH).is_ok()).unwrap();
    // More connections than the server has room for; none begins its handshake.
    let connect = |_| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.connect_timeout(&HEALTH.into(), LIMIT).unwrap();
        socket
    };
    let silent: Vec<Socket> = (0..CONNECTIONS).map(connect).collect();
    // Half the time after which the server gives up a handshake.
    let mut curl = Command::new("curl");
    curl.args(["-sSk", "--max-time", "30", "--cert"])
        .arg(&pki.client.certificate);
    curl.arg("--key")
        .arg(&pki.client.private_key)
        .arg(format!("https://{HEALTH}/health"));
    let output = curl.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("\"state\""), "{output:?}");
    drop(silent);
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
