//! A cell whose containers come and go while rules change: what server and attacher keep of them does not add up. For
//! an hour: `SOAK_SECONDS=3600 cargo nextest run -p whole-system-tests soak::`.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    bpffs::Bpffs,
    cell::{Cell, feed},
    client,
    metrics::wait_for_metrics,
    namespace::Namespace,
    pair::v4,
    process::status_line,
    requires,
    server::{self, Server},
};

use crate::gated::{Gated, NAME, deny_all, hits};

/// Containers at a time.
const CONTAINERS: usize = 60;

/// Containers that are replaced in each round.
const REPLACED: usize = 10;

/// Length of a round, at whose start the rules change.
const ROUND: Duration = Duration::from_secs(10);

/// Length of a test that is no soak.
const SHORT: Duration = Duration::from_secs(20);

/// Accepted growth in KiB.
const MAX_GROWTH: u64 = 1024;

/// Timeout of a query, longer than a busy machine pauses.
const TIMEOUT: Duration = Duration::from_secs(3);

/// A name of another domain: a recursor answers it, so no query for it is evidence.
const OUTSIDE: &str = "www.example.";

/// The recursor.
const RECURSOR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 5301);

struct Ground<'a> {
    cell: Cell<'a>,
    host: &'a Namespace,
    gated: &'a Gated,
    /// Query for a name of the fleet, and for another one.
    queries: [Vec<u8>; 2],
}

impl Ground<'_> {
    fn connect(&self, numbers: Range<usize>) -> Result<()> {
        self.cell.connect(numbers.clone())?;
        numbers
            .into_iter()
            .try_for_each(|number| self.cell.wait_for_link(number))
    }

    /// Each container asks; every second one asks for outside names alone.
    fn ask(&self, numbers: Range<usize>) -> Result<()> {
        for number in numbers {
            let query = &self.queries[number % 2];
            let answered = self.cell.ask(number, query, 6, TIMEOUT)?;
            ensure!(answered > 0, "container {number} gets no reply");
        }
        Ok(())
    }

    /// Replaces the rules: some interfaces are limited, and others accept their own container alone.
    fn change_rules(&self, round: usize, numbers: Range<usize>) -> Result<()> {
        let mut rules = String::from("*filter\n:INPUT ACCEPT [0:0]\n");
        for number in numbers.filter(|number| (number + round).is_multiple_of(3)) {
            let name = Cell::interface(number);
            if number.is_multiple_of(2) {
                rules += &format!(
                    "-A INPUT -i {name} -m limit --limit 1000/sec --limit-burst 1000 -j ACCEPT\n"
                );
            } else {
                rules += &format!("-A INPUT -i {name} -s 10.0.0.0/8 -j ACCEPT\n");
            }
            rules += &format!("-A INPUT -i {name} -j DROP\n");
        }
        rules += "COMMIT\n";
        feed(self.host, &["iptables-legacy-restore", "-w"], &rules)
    }

    /// Returns the memory of each process of the server, in KiB, the server's first.
    fn memory(&self) -> Result<Vec<u64>> {
        let mut memory = Vec::new();
        for process in self.gated.server.processes() {
            let line = status_line(process, "RssAnon")?;
            let number = line.trim().trim_end_matches("kB").trim();
            memory.push(number.parse().with_context(|| line.clone())?);
        }
        Ok(memory)
    }

    /// Creates a window of containers, lets them ask, and removes them.
    fn come_and_go(&self, numbers: Range<usize>, length: Duration) -> Result<Range<usize>> {
        let mut window = numbers;
        self.connect(window.clone())?;
        let end = Instant::now() + length;
        let mut round = 0;
        loop {
            let begun = Instant::now();
            self.change_rules(round, window.clone())?;
            while begun.elapsed() < ROUND.min(length) {
                self.ask(window.clone())?;
            }
            if Instant::now() >= end {
                break;
            }
            self.cell.remove(window.start..window.start + REPLACED)?;
            self.connect(window.end..window.end + REPLACED)?;
            window = window.start + REPLACED..window.end + REPLACED;
            round += 1;
        }
        self.change_rules(0, 0..0)?;
        self.cell.remove(window.clone())?;
        Ok(window)
    }
}

/// Starts a server with a recursor.
fn start(host: &Namespace) -> Result<Gated> {
    let bpffs = Bpffs::new()?;
    let folder = server::folder(&server::records_of_groups(&[3]), None)?;
    let settings = json!({
        "disable_recursors": false,
        "recursors": [RECURSOR.to_string()],
        "metrics": {"enabled": true},
        "xdp": {"mode": "auto", "bpffs": bpffs.path(), "interfaces": ["*"]},
    });
    let server = Server::start(Some(host), folder, v4(), &settings)?;
    wait_for_metrics(host)?;
    Ok(Gated { server, bpffs })
}

#[test]
fn cell_leaves_no_memory_behind() -> Result<()> {
    requires!(namespaces, bpf);
    let seconds = std::env::var("SOAK_SECONDS").ok();
    let length = seconds
        .and_then(|seconds| seconds.parse().ok())
        .map_or(SHORT, Duration::from_secs);
    let (host, containers) = (Namespace::new("soak")?, Namespace::new("soak-c")?);
    let cell = Cell::new(&host, &containers)?;
    let socket = host.run(|| UdpSocket::bind(RECURSOR))??;
    let done = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        let denying = scope.spawn(|| deny_all(&socket, 3, &done));
        let soaked = soak(cell, &host, length);
        done.store(true, Ordering::Relaxed);
        denying.join().expect("no panic")?;
        soaked
    })
}

fn soak(cell: Cell<'_>, host: &Namespace, length: Duration) -> Result<()> {
    let gated = start(host)?;
    let query =
        |name| -> Result<Vec<u8>> { Ok(client::query(name, RecordType::A, None)?.to_vec()?) };
    let ground = Ground {
        cell,
        host,
        gated: &gated,
        queries: [query(NAME)?, query(OUTSIDE)?],
    };
    // The first containers show how much memory a cell takes at all.
    let first = ground.come_and_go(1..1 + CONTAINERS, ROUND)?;
    thread::sleep(ROUND / 2);
    let before = ground.memory()?;
    ensure!(
        hits(host)? > 0,
        "no interface has answered\n{}",
        gated.server.log()
    );
    let last = ground.come_and_go(first.end..first.end + CONTAINERS, length)?;
    thread::sleep(ROUND / 2);
    let after = ground.memory()?;
    println!(
        "{} containers in {length:?}: {before:?} KiB before, {after:?} KiB after",
        last.end - first.end
    );
    ensure!(before.len() == after.len(), "{before:?}, {after:?}");
    for (before, after) in before.iter().zip(&after) {
        ensure!(
            *after <= before + MAX_GROWTH,
            "{before} KiB before, {after} KiB after"
        );
    }
    Ok(())
}
