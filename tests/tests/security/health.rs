//! Malicious instances that answer health checks with as much data as possible.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, UdpSocket},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use dns_core::{
    name::Name,
    resolve::{Checks, Existence, Resolution},
};
use dns_fastpath::FastPathHandle;
use dns_health::HealthService;
use dns_kit::metrics::names;
use hickory_proto::{op::ResponseCode, rr::RecordType};
use serde_json::{Value, json};
use whole_system_tests::{
    client, fleet,
    health::{Fleet, Says, config, instance},
    metrics::Metrics,
    namespace::Namespace,
    process::{memory, wait_until},
    requires,
    server::{self, Server},
};

use crate::{
    limited::Limited,
    pki::{Client, Pki},
};

/// Ends a test whose server makes no progress; no result depends on its value.
const HANG: Duration = Duration::from_secs(800);

/// Timeout of a check. The test ends first, so the size limits must end each check.
const NEVER: Duration = Duration::from_secs(900);

/// Checks `count` instances with the same response; returns the memory growth of this process.
fn growth(count: u32, says: &Says) -> u64 {
    let pki = Pki::new(Client::Good);
    let fleet = Fleet::start(&pki.server).unwrap();
    (0..count).for_each(|n| fleet.says(instance(n), says.clone()));
    let interval = Duration::from_millis(200);
    let service = HealthService::new(
        &config(fleet.port, pki.client.clone(), interval),
        NEVER,
        FastPathHandle::default(),
    )
    .unwrap();
    let before = memory("self", "VmRSS").unwrap();
    service.start().unwrap();
    let checks = Checks {
        instances: (0..count).map(instance).collect(),
        tracked: true,
        synchronous: false,
    };
    let resolution = Resolution {
        existence: Existence::Found,
        v4: Vec::new(),
        v6: Vec::new(),
        checks,
    };
    service
        .tracker()
        .track(&Name::from_text("all").unwrap(), &resolution);
    let all_unknown = || service.states().counts() == [0, 0, count as usize, 0];
    wait_until(
        "the first check of every instance to end",
        HANG,
        all_unknown,
    )
    .unwrap();
    memory("self", "VmRSS").unwrap().saturating_sub(before)
}

#[test]
fn tiny_chunks_take_bounded_memory() {
    let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    let grown = growth(
        60,
        &Says::Flood {
            head,
            again: b"1\r\nx\r\n".to_vec(),
        },
    );
    assert!(grown < 96 << 20, "{grown} bytes");
}

#[test]
fn endless_informational_responses_fail_check() {
    growth(
        4,
        &Says::Flood {
            head: Vec::new(),
            again: b"HTTP/1.1 100 Continue\r\n\r\n".to_vec(),
        },
    );
}

#[test]
fn endless_headers_fail_check() {
    growth(
        4,
        &Says::Flood {
            head: b"HTTP/1.1 200 OK\r\n".to_vec(),
            again: b"X: y\r\n".to_vec(),
        },
    );
}

#[test]
fn oversized_group_reports_are_refused() {
    let groups: Vec<String> = (0..48_000)
        .map(|group| format!("\"{group}\":\"failing\""))
        .collect();
    let report = format!(
        "{{\"state\":\"running\",\"group_state\":{{{}}}}}",
        groups.join(",")
    );
    let grown = growth(60, &Says::Body(report));
    assert!(
        grown < 160 << 20,
        "{grown} bytes, including the servers of this test"
    );
}

/// Listen address of the server in its private namespace.
const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 53);

/// Number of instances in a large fleet.
const MANY: u32 = 3000;

/// Number of instances for 1,024 descriptors. On a busy machine, checks by an unoptimised server exceed their patience,
/// and with so few descriptors only 25 per second are tried again.
const MORE_THAN_DESCRIPTORS: u32 = 1500;

#[test]
fn many_instances_share_few_descriptors() {
    requires!(namespaces);
    let namespace = Namespace::new("few").unwrap();
    namespace.run(few_descriptors).unwrap();
}

/// Serves DNS with 1,024 descriptors while 1,500 instances are checked by TLS.
fn few_descriptors() {
    raise_own_limit();
    let pki = Pki::new(Client::Good);
    let fleet = Fleet::start(&pki.server).unwrap();
    let recursor = Recursor::start();
    let folder = server::folder(&records(MORE_THAN_DESCRIPTORS), None).unwrap();
    let mut settings = settings(&pki, &fleet, "20s");
    let recursors = [recursor.address.to_string()];
    let forwarding =
        json!({"disable_recursors": false, "recursors": recursors, "request_timeout": "15s"});
    server::merge(&mut settings, &forwarding);
    let mut server = Server::start_prepared(None, folder, ADDRESS, &settings, |command| {
        use std::os::unix::process::CommandExt;
        // SAFETY: setrlimit is a plain system call, allowed between fork and exec.
        unsafe {
            command.pre_exec(|| {
                let limit = nix::sys::resource::Resource::RLIMIT_NOFILE;
                Ok(nix::sys::resource::setrlimit(limit, 1024, 1024)?)
            });
        }
    })
    .unwrap();
    let query = |name: &str| client::query(name, RecordType::A, Some(1232)).unwrap();
    client::ask(ADDRESS, &query("q-s3.q-g1.bosh.")).unwrap();
    let mut most = 0;
    let mut answered = [0; 2];
    let mut asked = 0;
    let mut ask = || {
        let by_tcp = client::ask_tcp(ADDRESS, &query("q-s0.q-g2.bosh."));
        answered[0] += u32::from(by_tcp.is_ok_and(|reply| !reply.answers.is_empty()));
        let forwarded = client::ask(ADDRESS, &query(&format!("n{asked}.outside.test.")));
        let is_good = |code| code == ResponseCode::NoError;
        answered[1] +=
            u32::from(forwarded.is_ok_and(|reply| is_good(reply.metadata.response_code)));
        asked += 1;
        most = most.max(memory(server.pid(), "VmRSS").unwrap());
        std::thread::sleep(Duration::from_millis(200));
    };
    // After the second round every connection eligible for reuse is kept.
    for round in ["a check of each instance", "another check of each instance"] {
        let before = fleet.hits().len();
        let mut reached = BTreeSet::new();
        wait_until(round, HANG, || {
            ask();
            reached.extend(fleet.hits().iter().skip(before).map(|hit| hit.ip));
            reached.len() == MORE_THAN_DESCRIPTORS as usize
        })
        .unwrap();
    }
    let checks = |result| {
        Metrics::here()
            .unwrap()
            .sum(names::HEALTH_CHECKS_TOTAL, result)
    };
    // On a busy machine some checks time out and come again in the next round.
    wait_until("two good checks for each instance", HANG, || {
        ask();
        checks("result=\"running\"") >= 2 * u64::from(MORE_THAN_DESCRIPTORS)
    })
    .unwrap();
    assert_eq!(
        checks("result=\"unreachable\""),
        0,
        "checks without a descriptor"
    );
    println!(
        "{asked} questions by TCP and {asked} forwarded; at most {} MiB",
        most >> 20
    );
    assert_eq!(
        answered,
        [asked; 2],
        "of {asked}, by TCP and forwarded:\n{}",
        server.log()
    );
    assert!(
        server.process().ended().unwrap().is_none(),
        "{}",
        server.log()
    );
    assert!(most < 128 << 20, "{} MiB", most >> 20);
}

#[test]
fn foreign_ca_fills_no_log() {
    requires!(namespaces);
    let namespace = Namespace::new("flood").unwrap();
    namespace.run(foreign_ca).unwrap();
}

/// Checks 3,000 instances twice that another CA certified.
fn foreign_ca() {
    raise_own_limit();
    let pki = Pki::new(Client::OtherCa);
    let fleet = Fleet::start(&pki.server).unwrap();
    let folder = server::folder(&records(MANY), None).unwrap();
    let mut settings = settings(&pki, &fleet, "1s");
    server::merge(
        &mut settings,
        &json!({"control": {"socket": folder.path().join("control.sock")}}),
    );
    let begun = Instant::now();
    let server = Server::start(None, folder, ADDRESS, &settings).unwrap();
    client::ask(
        ADDRESS,
        &client::query("q-s3.q-g1.bosh.", RecordType::A, Some(1232)).unwrap(),
    )
    .unwrap();
    let refused = || {
        let metrics = Metrics::here();
        metrics.map_or(0, |metrics| {
            metrics.sum(names::HEALTH_CHECKS_TOTAL, "result=\"tls\"")
        })
    };
    wait_until("two checks of each instance", HANG, || {
        refused() >= 2 * u64::from(MANY)
    })
    .unwrap();
    let failed = refused();
    let logged = || Limited::of(&server.log(), "health check failed: TLS", "ip=");
    wait_until("a line that counts them", HANG, || {
        logged().events >= failed
    })
    .unwrap();
    let limited = logged();
    limited.assert_bounded(begun);
    wait_until("the checks that were logged", HANG, || {
        limited.events <= refused()
    })
    .unwrap();
    let mut status = Command::new(server::program().unwrap());
    status
        .args(["status", "--config"])
        .arg(server.folder.path().join("config.json"));
    let mut said = String::new();
    let summary = format!("no checked instance can be reached ({MANY} of {MANY} because of TLS");
    // Some instances are checked a third time before others are checked once.
    wait_until("every instance to be checked", HANG, || {
        said = status
            .output()
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .unwrap_or_default();
        said.contains(&summary)
    })
    .unwrap_or_else(|error| panic!("{error}: {said}"));
    assert!(said.contains("because of TLS"), "{said}");
}

/// Returns the settings of a server that checks the fleet.
fn settings(pki: &Pki, fleet: &Fleet, interval: &str) -> Value {
    json!({
        "health": {
            "enabled": true, "port": fleet.port, "check_interval": interval,
            "certificate_file": pki.client.certificate, "private_key_file": pki.client.private_key,
            "ca_file": pki.client.ca,
        },
        "metrics": {"enabled": true}, "xdp": {"mode": "off"},
    })
}

/// Raises the open file limit of this process, which plays all instances.
fn raise_own_limit() {
    let limit = nix::sys::resource::Resource::RLIMIT_NOFILE;
    let (_, hard) = nix::sys::resource::getrlimit(limit).unwrap();
    nix::sys::resource::setrlimit(limit, hard, hard).unwrap();
}

/// Returns records.json of a group with `count` instances, and one with another instance.
fn records(count: u32) -> Vec<u8> {
    fleet::records(
        1,
        (0..=count).map(|n| (if n < count { 1 } else { 2 }, instance(n))),
    )
}

/// Answers every query with NOERROR and no data.
struct Recursor {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Recursor {
    fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        let address = socket.local_addr().unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let ends = ended.clone();
        let thread = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while !ends.load(Ordering::Relaxed) {
                let Ok((length, client)) = socket.recv_from(&mut buffer) else {
                    continue;
                };
                // A reply with RA set.
                (buffer[2], buffer[3]) = (buffer[2] | 0x80, 0x80);
                let _ = socket.send_to(&buffer[..length], client);
            }
        });
        Self {
            address,
            ended,
            thread: Some(thread),
        }
    }
}

impl Drop for Recursor {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}
