//! Health checks by a whole server: state changes under load with the fast path attached, and
//! thousands of silent instances.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use dns_core::config::TlsFiles;
use dns_kit::metrics::names::HEALTH_CHECKS_IN_FLIGHT;
use hickory_proto::{op::Message, rr::RecordType};
use parking_lot::Mutex;
use serde_json::{Value, json};
use whole_system_tests::{
    client, fleet,
    health::{Fleet, Says, instance},
    metrics::Metrics,
    namespace::Namespace,
    process::wait_until,
    requires, server,
    thread::HeldThread,
};

use crate::{LIMIT, Pki};

/// Listen address of the server in its private namespace.
const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 53);

/// Returns records.json with groups of these sizes; addresses are numbered consecutively.
fn records(groups: &[u32]) -> Vec<u8> {
    let group_of_each = (1..)
        .zip(groups)
        .flat_map(|(group, &size)| (0..size).map(move |_| group));
    fleet::records(1, group_of_each.zip((0..).map(instance)))
}

/// Returns the settings merged into the server's configuration.
fn settings(fleet: &Fleet, tls: &TlsFiles, interval: &str, fast_path: bool) -> Value {
    json!({
        "health": {
            "enabled": true,
            "port": fleet.port,
            "certificate_file": tls.certificate,
            "private_key_file": tls.private_key,
            "ca_file": tls.ca,
            "check_interval": interval,
        },
        "metrics": {"enabled": true},
        "xdp": {"enabled": fast_path, "interfaces": ["lo"]},
    })
}

fn query(name: &str) -> Message {
    client::query(name, RecordType::A, Some(1232)).unwrap()
}

/// Returns the addresses of a name by TCP, which the fast path never answers.
fn ask_userspace(name: &str) -> BTreeSet<IpAddr> {
    client::addresses(&client::ask_tcp(ADDRESS, &query(name)).unwrap())
        .into_iter()
        .collect()
}

/// A reply under load.
struct Reply {
    /// Time at which the query was sent.
    sent: Instant,
    received: Instant,
    addresses: BTreeSet<IpAddr>,
}

/// Queries by UDP, one query after the other, until `stop` is set.
fn load(name: &str, stop: &AtomicBool, replies: &Mutex<Vec<Reply>>) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.connect(ADDRESS).unwrap();
    let message = query(name).to_vec().unwrap();
    let mut buffer = [0; 4096];
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        socket.send(&message).unwrap();
        let length = socket.recv(&mut buffer).unwrap();
        let received = Instant::now();
        let reply = Message::from_vec(&buffer[..length]).unwrap();
        let addresses = client::addresses(&reply).into_iter().collect();
        replies.lock().push(Reply {
            sent,
            received,
            addresses,
        });
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A change of an instance's health.
struct Flip {
    /// Time before the instance changed.
    begun: Instant,
    ip: IpAddr,
    healthy: bool,
}

/// Replies under load that must show a change before the next one is made.
const REPLIES_PER_FLIP: usize = 200;

#[test]
fn health_change_reaches_interface() {
    const NAME: &str = "q-s3.q-g1.bosh.";
    requires!(namespaces, bpf);
    let namespace = Namespace::new("flip").unwrap();
    let Pki { files, .. } = &Pki::new();
    namespace
        .run(|| {
            let fleet = Fleet::start(&files[0]).unwrap();
            let folder = server::folder(&records(&[10, 10]), None).unwrap();
            let extra = settings(&fleet, &files[1], "300ms", true);
            let _server = server::Server::start(None, folder, ADDRESS, &extra).unwrap();
            let all: BTreeSet<_> = (0..10).map(instance).collect();
            ask_userspace(NAME);
            wait_until("first checks", LIMIT, || ask_userspace(NAME) == all).unwrap();
            wait_until("the fast path", LIMIT, || {
                client::ask(ADDRESS, &query(NAME)).unwrap();
                // The metrics may become available after the first answer.
                Metrics::here().is_ok_and(|metrics| metrics.fast_path_replies() > 0)
            })
            .unwrap();

            let (stop, replies) = (AtomicBool::new(false), Mutex::new(Vec::new()));
            let before = Metrics::here().unwrap();
            let mut flips = Vec::new();
            std::thread::scope(|scope| {
                scope.spawn(|| load(NAME, &stop, &replies));
                scope.spawn(|| load(NAME, &stop, &replies));
                for flip in 0..10 {
                    let (ip, healthy) = (instance(flip / 2), flip % 2 == 1);
                    let begun = Instant::now();
                    fleet.says(ip, Says::state(if healthy { "running" } else { "failing" }));
                    wait_until("the flip", LIMIT, || {
                        ask_userspace(NAME).contains(&ip) == healthy
                    })
                    .unwrap();
                    let known = replies.lock().len();
                    wait_until("the load to see the flip", LIMIT, || {
                        let later = &replies.lock()[known..];
                        let is_new = |reply: &&Reply| reply.addresses.contains(&ip) == healthy;
                        later.iter().filter(is_new).count() >= REPLIES_PER_FLIP
                    })
                    .unwrap();
                    flips.push(Flip { begun, ip, healthy });
                }
                stop.store(true, Ordering::Relaxed);
            });
            let replies = replies.into_inner();
            let after = Metrics::here().unwrap();
            let fast = after.fast_path_replies() - before.fast_path_replies();
            // One a second, and a busy machine gives few replies in a second.
            let probes = after.probes() - before.probes();
            println!(
                "{} replies, {fast} of them by the fast path, {} flips",
                replies.len(),
                flips.len()
            );
            assert!(
                (fast + probes) * 10 >= replies.len() as u64 * 8,
                "the fast path did not answer"
            );

            // Once a reply shows a change, none of those sent later is older: the interface does not wait for
            // anything that userspace has not waited for.
            for (index, flip) in flips.iter().enumerate() {
                let until = flips.get(index + 1).map(|next| next.begun);
                let of_flip: Vec<&Reply> = replies
                    .iter()
                    .filter(|reply| reply.sent >= flip.begun)
                    .filter(|reply| until.is_none_or(|until| reply.received < until))
                    .collect();
                let is_new = |reply: &&&Reply| reply.addresses.contains(&flip.ip) == flip.healthy;
                let first = of_flip
                    .iter()
                    .filter(is_new)
                    .map(|reply| reply.received)
                    .min();
                let first = first.expect("the load has seen the flip");
                let old = of_flip
                    .iter()
                    .filter(|reply| reply.sent > first && !is_new(reply));
                assert_eq!(old.count(), 0, "old replies after flip {index}");
            }
        })
        .unwrap();
}

#[test]
fn hanging_checks_end_lease() {
    const NAME: &str = "q-s3.q-g1.bosh.";
    requires!(namespaces, bpf);
    let namespace = Namespace::new("hung").unwrap();
    let Pki { files, .. } = &Pki::new();
    namespace
        .run(|| {
            let fleet = Fleet::start(&files[0]).unwrap();
            let folder = server::folder(&records(&[10]), None).unwrap();
            let mut extra = settings(&fleet, &files[1], "300ms", true);
            server::merge(&mut extra, &json!({"xdp": {"lease": "2s"}}));
            let server = server::Server::start(None, folder, ADDRESS, &extra).unwrap();
            let all: BTreeSet<_> = (0..10).map(instance).collect();
            let by_interface = || {
                let before = Metrics::here().ok()?.fast_path_replies();
                let reply = client::ask(ADDRESS, &query(NAME)).ok()?;
                assert_eq!(BTreeSet::from_iter(client::addresses(&reply)), all);
                Some(Metrics::here().ok()?.fast_path_replies() > before)
            };
            ask_userspace(NAME);
            wait_until("first checks", LIMIT, || ask_userspace(NAME) == all).unwrap();
            wait_until("the interface", LIMIT, || by_interface() == Some(true)).unwrap();
            let held = HeldThread::of(server.pid(), "health").unwrap();
            // Meanwhile no answer is wrong and none is missing.
            // Single queries may be passed up as probes, at most one per second.
            let withheld = || {
                (0..50).all(|_| {
                    std::thread::sleep(Duration::from_millis(20));
                    by_interface() == Some(false)
                })
            };
            wait_until("the lease to end, and no renewal", LIMIT, withheld).unwrap();
            server.wait_for_log("health checks stalled").unwrap();
            drop(held);
            wait_until("the interface again", LIMIT, || {
                by_interface() == Some(true)
            })
            .unwrap();
        })
        .unwrap();
}

/// Counts the queries that wait for first checks.
#[derive(Default)]
struct Waiting {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Waiting {
    /// Returns the number of the query that waits now, if one does.
    fn current(&self) -> Option<u64> {
        let ended = self.ended.load(Ordering::SeqCst);
        let begun = self.begun.load(Ordering::SeqCst);
        (begun > ended).then_some(begun)
    }
}

/// Sends UDP queries one after the other; returns how many were answered while one and the same query waited.
fn answered_meanwhile(name: &str, count: usize, waiting: &Waiting) -> usize {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.connect(ADDRESS).unwrap();
    let message = query(name).to_vec().unwrap();
    let mut buffer = [0; 4096];
    let mut answered = 0;
    for _ in 0..count {
        let before = waiting.current();
        socket.send(&message).unwrap();
        socket.recv(&mut buffer).unwrap();
        answered += usize::from(before.is_some() && waiting.current() == before);
    }
    answered
}

#[test]
fn silent_fleet_delays_no_query() {
    const LIVE: &str = "q-s0.q-g1.bosh.";
    const SILENT: u32 = 3000;
    const QUERIES: usize = 3000;
    requires!(namespaces);
    let namespace = Namespace::new("silent").unwrap();
    let Pki { files, .. } = &Pki::new();
    namespace
        .run(|| {
            let fleet = Fleet::start(&files[0]).unwrap();
            (10..10 + SILENT).for_each(|n| fleet.says(instance(n), Says::Nothing));
            let folder = server::folder(&records(&[10, SILENT]), None).unwrap();
            // In userspace, where queries could be delayed by the checker.
            let extra = settings(&fleet, &files[1], "2s", false);
            let _server = server::Server::start(None, folder, ADDRESS, &extra).unwrap();
            let live: BTreeSet<_> = (0..10).map(instance).collect();
            ask_userspace("q-s3.q-g1.bosh.");
            wait_until("first checks", LIMIT, || {
                ask_userspace("q-s3.q-g1.bosh.") == live
            })
            .unwrap();

            ask_userspace("q-s4.q-g2.bosh.");
            let stop = AtomicBool::new(false);
            let waiting = Waiting::default();
            let answered = std::thread::scope(|scope| {
                // y1 waits for the silent instances up to its limit; no query waits for y1.
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        waiting.begun.fetch_add(1, Ordering::SeqCst);
                        ask_userspace("q-s0y1.q-g2.bosh.");
                        waiting.ended.fetch_add(1, Ordering::SeqCst);
                    }
                });
                let answered = answered_meanwhile(LIVE, QUERIES, &waiting);
                stop.store(true, Ordering::Relaxed);
                answered
            });
            assert!(
                Metrics::here().unwrap().sum(HEALTH_CHECKS_IN_FLIGHT, "") > 100,
                "nothing hangs"
            );
            let waits = waiting.begun.load(Ordering::SeqCst);
            println!("{answered} of {QUERIES} queries answered while one of {waits} waited");
            // A query that waits for the silent instances is answered after the one of y1.
            assert!(answered > QUERIES / 2, "{answered} of {QUERIES}");
            assert_eq!(ask_userspace("q-s3.q-g1.bosh."), live);
        })
        .unwrap();
}
