//! A server all of whose peers hang, for a while: `SOAK_SECONDS=600 cargo nextest run -p whole-system-tests soak::`.
//! Descriptors and threads return to where they were after the first round, memory to where it was after the first load.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::{Arc, atomic::AtomicBool},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    client, fleet,
    health::{Authority, instance, write_files},
    namespace::Namespace,
    process::{memory, status_line, wait_until},
    requires,
    server::Server,
};

use super::{
    lab::OURS,
    tarpits::{Tarpit, Trickling, descriptors},
};

/// Time limit for the return, reached only on failure.
const LIMIT: Duration = Duration::from_secs(120);
/// Instances that are checked, and their port.
const INSTANCES: u32 = 40;
const HEALTH_PORT: u16 = 8853;
/// Memory that may be held after the first load and not before it, in MiB: pages of which a piece is in use. It was
/// at most 3.3 after each of six short rounds, and 10 after two minutes and after ten; then 31.5 of the arenas' 35.2 MB
/// were free (`malloc_info`). One arena or no caches of threads leave 11 and 4. The server returns whole free pages to
/// the system (`dns_kit::memory::Surplus`).
const MAX_FRAGMENTED: u64 = 16;
/// The same after the usual time.
const MAX_FRAGMENTED_SOON: u64 = 8;
/// Memory in MiB by which later load may raise what the first load has left.
const MAX_GROWTH: u64 = 2;
/// Length of the first load of a long run, and of the rest in which the server returns memory, in seconds.
const FIRST_LOAD: u64 = 120;
const REST: Duration = Duration::from_secs(40);
/// The usual time in seconds.
const SECONDS: u64 = 8;
/// Threads that may be more: one was, of eight minutes; the runtime starts and ends those that read files.
const MAX_FILE_THREADS: usize = 4;
/// Connections of checks after which each instance was checked several times.
const MIN_CHECKS: usize = 4 * INSTANCES as usize;
/// Names that make the server wait for each peer.
const DOMAINS: [&str; 5] = [
    "tls.test.",
    "recursed.test.",
    "http.test.",
    "https.test.",
    "service.consul.",
];

/// Resources that a server holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    descriptors: usize,
    threads: usize,
    /// Memory in MiB.
    memory: u64,
}

impl Held {
    fn by(server: &Server) -> Result<Self> {
        let process = server.pid();
        Ok(Self {
            descriptors: descriptors(process)?,
            threads: status_line(process, "Threads")?.trim().parse()?,
            memory: memory(process, "RssAnon")? >> 20,
        })
    }

    /// Returns what a server holds when nobody asks: the most descriptors and threads, because checks and Consul's
    /// watchers go on, and the least memory. `checks` counts them.
    fn at_rest(server: &Server, checks: impl Fn() -> usize) -> Result<Self> {
        let mut held = Self::by(server)?;
        let end = checks() + MIN_CHECKS;
        wait_until("checks of all instances", LIMIT, || {
            if let Ok(now) = Self::by(server) {
                held.descriptors = held.descriptors.max(now.descriptors);
                held.threads = held.threads.max(now.threads);
                held.memory = held.memory.min(now.memory);
            }
            checks() >= end
        })?;
        Ok(held)
    }
}

/// Asks for many names that no peer answers, and reads whatever comes back, for a moment.
fn ask_everything(socket: &UdpSocket, round: usize) -> Result<()> {
    for number in 0..50 {
        for domain in DOMAINS {
            let name = format!("n{round}-{number}.{domain}");
            socket.send(&client::query(&name, RecordType::A, None)?.to_vec()?)?;
        }
        let name = format!("q-s0x{number}.q-g1.bosh.");
        socket.send(&client::query(&name, RecordType::A, None)?.to_vec()?)?;
    }
    let until = Instant::now() + Duration::from_millis(200);
    let mut buffer = [0; 4096];
    while Instant::now() < until {
        // Nothing may come at all.
        let _ = socket.recv(&mut buffer);
    }
    Ok(())
}

/// Queries that no peer answers.
struct Load<'a> {
    server: &'a Server,
    socket: &'a UdpSocket,
    rounds: usize,
}

impl Load<'_> {
    /// Asks for some seconds; returns the most that the server held.
    fn run(&mut self, seconds: u64) -> Result<Held> {
        let end = Instant::now() + Duration::from_secs(seconds);
        let mut most = Held::by(self.server)?;
        while Instant::now() < end {
            ask_everything(self.socket, self.rounds)?;
            self.rounds += 1;
            let now = Held::by(self.server)?;
            most.descriptors = most.descriptors.max(now.descriptors);
            most.memory = most.memory.max(now.memory);
        }
        Ok(most)
    }
}

#[test]
fn hanging_peers_take_nothing_for_good() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("hangsoak")?;
    let at = |last, port| SocketAddr::new(Ipv4Addr::new(127, 0, 0, last).into(), port);
    // By UDP nothing, by TCP single bytes, by TLS no handshake.
    let trickles = Arc::new(AtomicBool::new(true));
    let trickling = Trickling::start(&namespace, at(11, 53), &trickles)?;
    let silent = namespace.run(|| UdpSocket::bind(at(10, 53)))??;
    let mut tarpits = vec![trickling.tarpit()];
    let mut held = Vec::new();
    for address in [
        at(31, 853),
        at(41, 8080),
        at(42, 8443),
        at(51, 8500),
        SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), HEALTH_PORT),
    ] {
        held.push(Tarpit::silent(&namespace, address)?);
    }
    tarpits.extend(&held);
    let authority = Authority::new("ca")?;
    let folder = tempfile::tempdir()?;
    let identity = authority.issue(dns_health::HEALTH_NAME)?;
    let tls = write_files(folder.path(), &identity, &authority.certificate)?;
    let instances = (0..INSTANCES).map(|number| (1, instance(number)));
    let files = whole_system_tests::server::folder(&fleet::records(1, instances), None)?;
    let handlers = json!([
        {"domain": "tls.test", "source": {"type": "dns", "recursors": ["tls://127.0.0.31"]}},
        {"domain": "http.test", "source": {"type": "http", "url": "http://127.0.0.41:8080"}},
        {"domain": "https.test", "source": {"type": "http", "url": "https://127.0.0.42:8443"}},
    ]);
    fs::write(
        files.path().join("handlers/handlers.json"),
        handlers.to_string(),
    )?;
    let settings = json!({
        "xdp": {"mode": "off"},
        "disable_recursors": false,
        "recursors": ["127.0.0.10", "127.0.0.11"],
        "recursor_timeout": "300ms",
        "request_timeout": "2s",
        "consul": {"sources": {"http": {"addresses": [format!("http://{}", at(51, 8500))]}}},
        "health": {
            "enabled": true,
            "port": HEALTH_PORT,
            "certificate_file": tls.certificate,
            "private_key_file": tls.private_key,
            "ca_file": tls.ca,
            "check_interval": "500ms",
        },
    });
    let server = Server::start(Some(&namespace), files, OURS, &settings)?;
    let socket = namespace.run(|| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)))??;
    socket.connect(OURS)?;
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    // Threads, buffers and sockets of every kind exist from here on.
    ask_everything(&socket, 0)?;
    wait_until("a connection to every peer", LIMIT, || {
        tarpits.iter().all(|tarpit| tarpit.accepted() > 0)
    })
    .with_context(|| {
        let accepted: Vec<usize> = tarpits.iter().map(|tarpit| tarpit.accepted()).collect();
        format!("{accepted:?}\n{}", server.log())
    })?;
    // Those to recursors and HTTP servers are closed when no query needs them; checks go on.
    let [asked @ .., _consul, instances] = tarpits.as_slice() else {
        bail!("too few tarpits");
    };
    wait_until("the end of connections", LIMIT, || {
        asked.iter().all(|tarpit| tarpit.open() == 0)
    })?;
    let start = Held::at_rest(&server, || instances.accepted())?;
    let seconds = std::env::var("SOAK_SECONDS").ok();
    let long = seconds.and_then(|text| text.parse().ok());
    let mut load = Load {
        server: &server,
        socket: &socket,
        rounds: 1,
    };
    if long.is_some() {
        load.run(FIRST_LOAD)?;
        thread::sleep(REST);
    }
    let before = Held {
        memory: Held::by(&server)?.memory.max(start.memory),
        ..start
    };
    let most = load.run(long.unwrap_or(SECONDS))?;
    let rounds = load.rounds;
    let connections: usize = tarpits.iter().map(|tarpit| tarpit.accepted()).sum();
    println!(
        "{rounds} rounds, {connections} connections; at the start {start:?}, before {before:?}, at most {most:?}"
    );
    let max_memory = match long {
        Some(_) => (before.memory + MAX_GROWTH).min(start.memory + MAX_FRAGMENTED),
        None => start.memory + MAX_FRAGMENTED_SOON,
    };
    wait_until("the return", LIMIT, || {
        Held::by(&server).is_ok_and(|now| {
            now.descriptors <= before.descriptors
                && now.threads <= before.threads + MAX_FILE_THREADS
                && now.memory <= max_memory
        })
    })
    .with_context(|| {
        let now = Held::by(&server);
        format!(
            "now {now:?}, before {before:?}, at most {most:?}\n{}",
            server.log()
        )
    })?;
    println!("afterwards {:?}", Held::by(&server)?);
    drop(silent);
    ensure!(rounds > 1);
    Ok(())
}
