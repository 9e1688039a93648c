//! Peers that accept or open connections and then do nothing: descriptors, threads and memory return to where they
//! began. `IDENTITY_TARPIT_SECONDS=600` sets the time for each kind.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use test_support::free_address;

use crate::{
    fleet::converged,
    machines::metric,
    program::{Running, until},
};

/// Resources of a process.
#[derive(Clone, Copy, Debug)]
struct Usage {
    descriptors: usize,
    threads: usize,
    kib: u64,
}

impl Usage {
    fn of(process: &Running) -> Self {
        let folder = format!("/proc/{}", process.0.id());
        let count = |name: &str| fs::read_dir(format!("{folder}/{name}")).unwrap().count();
        let status = fs::read_to_string(format!("{folder}/status")).unwrap();
        let resident = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .unwrap();
        Self {
            descriptors: count("fd"),
            threads: count("task"),
            kib: resident.trim().trim_end_matches(" kB").parse().unwrap(),
        }
    }
}

/// Memory that may come and go with the allocator's caches.
const MAX_GROWTH: u64 = 16 << 10;

fn seconds() -> u64 {
    std::env::var("IDENTITY_TARPIT_SECONDS").map_or(5, |text| text.parse().unwrap())
}

/// A server that accepts connections and writes a byte now and then, if there is one to write.
struct Tarpit(Arc<AtomicBool>, Option<thread::JoinHandle<usize>>);

impl Tarpit {
    fn start(address: SocketAddr, byte: Option<u8>) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        let thread = thread::spawn(move || {
            let mut held: Vec<TcpStream> = Vec::new();
            while !end.load(Ordering::Relaxed) {
                if let Ok((stream, _)) = listener.accept() {
                    held.push(stream);
                }
                for stream in &mut held {
                    // The other side may have given up.
                    let _ = byte.map(|byte| stream.write(&[byte]));
                }
                thread::sleep(Duration::from_millis(50));
            }
            held.len()
        });
        Self(ended, Some(thread))
    }

    /// Ends it; returns the number of connections.
    fn end(mut self) -> usize {
        self.0.store(true, Ordering::Relaxed);
        self.1.take().unwrap().join().unwrap()
    }
}

#[test]
fn tarpits_in_place_of_the_issuer_cost_an_agent_nothing() {
    let mut fleet = converged(&["i1"]);
    let metrics = free_address();
    fleet.agents.clear();
    fleet.agent("i1", "", &["--metrics", &metrics.to_string()]);
    let is_reached = || metric(metrics, "bosh_dns_identity_issuer_reached") == Some(1.0);
    until("a report", is_reached);
    let before = Usage::of(&fleet.agents[0]);
    // Silence, and the first byte of a TLS record again and again.
    for byte in [None, Some(0x16)] {
        fleet.issuer.stop();
        let mut tarpit = None;
        until("the issuer's port", || {
            let free = TcpListener::bind(fleet.address).is_ok();
            if free {
                tarpit = Some(Tarpit::start(fleet.address, byte));
            }
            free
        });
        let end = Instant::now() + Duration::from_secs(seconds());
        while Instant::now() < end {
            let now = Usage::of(&fleet.agents[0]);
            assert!(
                now.descriptors <= before.descriptors + 4,
                "{before:?}, then {now:?}"
            );
            thread::sleep(Duration::from_millis(200));
        }
        let connections = tarpit.unwrap().end();
        assert!(connections > 0, "the agent never called");
        fleet.start_issuer(free_address());
        until("the recovery", is_reached);
        until("the resources", || {
            let now = Usage::of(&fleet.agents[0]);
            now.descriptors <= before.descriptors + 1
                && now.threads <= before.threads + 1
                && now.kib <= before.kib + MAX_GROWTH
        });
    }
}

#[test]
fn silent_clients_cost_the_issuer_little() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let mut fleet = converged(&["i1"]);
    let before = Usage::of(&fleet.issuer);
    let end = Instant::now() + Duration::from_secs(seconds());
    while Instant::now() < end {
        // More than it accepts, and more than the usual limit of descriptors.
        let clients: Vec<TcpStream> = (0..1200)
            .map(|_| TcpStream::connect(fleet.address).unwrap())
            .collect();
        let now = Usage::of(&fleet.issuer);
        assert!(
            now.descriptors <= before.descriptors + 1024 + 8,
            "{before:?}, then {now:?}"
        );
        // Machines are served beside them.
        let token = fleet.token("i2");
        fleet.agent("i2", &token, &[]);
        until("the pairs of i2", || fleet.has_pairs("i2"));
        fleet.agents.truncate(1);
        fs::remove_dir_all(fleet.path("i2")).unwrap();
        drop(clients);
    }
    // Whoever completes no handshake is disconnected.
    let mut silent = TcpStream::connect(fleet.address).unwrap();
    silent
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
    until("the resources", || {
        let now = Usage::of(&fleet.issuer);
        now.descriptors <= before.descriptors + 2 && now.kib <= before.kib + 2 * MAX_GROWTH
    });
}
