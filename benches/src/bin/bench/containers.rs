//! A Diego cell: the load of many containers, each through its own interface, and the server's effect on the
//! time to create containers.

use std::{
    fs,
    io::ErrorKind,
    mem::MaybeUninit,
    net::SocketAddr,
    os::fd::AsFd as _,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use bosh_dns_xdp_benches::{
    dnsperf::percentile,
    foundation::Foundation,
    lab::{Lab, SERVER_ADDRESS},
    peers::Peer,
    report::{Bar, Data, Figure, Rounds, Sweep, number},
};
use hickory_proto::rr::RecordType;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::Signal,
    unistd::{SysconfVar, sysconf},
};
use serde_json::json;
use socket2::Socket;
use whole_system_tests::{
    bpffs::Bpffs,
    cell::Cell,
    client,
    metrics::wait_for_metrics,
    namespace::Namespace,
    process::wait_until,
    server::{self, Server},
};

use crate::{Plan, cell::PERCENTILES, subject::Subject};

/// Title of the figure of latencies.
pub(super) const TITLE: &str = "A cell of containers: latency";

const CONTAINERS: usize = 250;

/// Queries per second of each container.
const EACH: usize = 20;

/// Queries of a burst, offered within a second.
const BURST: usize = 50_000;

/// Queries that show the server that an interface is in use.
const FIRST: usize = 6;

/// Instances of the foundation whose names are queried.
const INSTANCES: usize = 1_000;

const QUERIES: usize = 256;

/// Descriptors of the fast path itself: maps, sockets, and programs, which are loaded when an interface needs them.
const OF_FAST_PATH: usize = 40;

/// Containers created one after the other with or without the server.
const BLOCK: usize = 10;

/// Load of a cell, then creation of its containers.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = load(plan)?;
    figures.push(creation(plan)?);
    Ok(figures)
}

/// A server of the comparison.
#[derive(Clone, Copy)]
enum Compared {
    Ours(&'static str),
    Peer(Peer),
}

impl Compared {
    fn label(self) -> String {
        match self {
            Self::Ours("off") => "ours, userspace only".to_owned(),
            Self::Ours(mode) => format!("ours, {mode}"),
            Self::Peer(peer) => peer.label().to_owned(),
        }
    }
}

/// Measures each server under the load of all containers.
fn load(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(INSTANCES)?;
    let names: Vec<String> = foundation.names().map(|name| name.to_string()).collect();
    let queries = (0..QUERIES).map(|number| {
        let name = &names[number * names.len() / QUERIES];
        Ok(client::query(name, RecordType::A, None)?.to_vec()?)
    });
    let queries: Vec<Vec<u8>> = queries.collect::<Result<_>>()?;
    let seconds = if plan.quick { 4 } else { 10 };
    let mut latency = Sweep::new("percentile", PERCENTILES.map(|(name, _)| name.to_owned()).into(), false);
    let (mut cpu, mut conntrack, mut burst, mut burst_latency) = (vec![], vec![], vec![], vec![]);
    for compared in [
        Compared::Ours("off"),
        Compared::Ours("auto"),
        Compared::Peer(Peer::Unbound),
        Compared::Peer(Peer::Dnsmasq),
    ] {
        let lab = cell_namespaces()?;
        let cell = Cell::new(&lab.server, &lab.client)?;
        cell.connect(0..CONTAINERS)?;
        cell.permit(0..CONTAINERS)?;
        let ours = matches!(compared, Compared::Ours(_));
        let _running: Box<dyn std::any::Any> = match compared {
            Compared::Ours(mode) => Box::new(start(&lab, &cell, &foundation, mode, &queries[0])?),
            Compared::Peer(peer) => Box::new(Subject::Peer(peer).begin(&lab, &foundation)?),
        };
        let sockets: Vec<Socket> = (0..CONTAINERS)
            .map(|number| cell.socket(number, Duration::from_secs(1)))
            .collect::<Result<_>>()?;
        let label = compared.label();
        cell.inside(|open| ask_by_new_sockets(open, &queries, 1))??;
        let steady = cell.inside(|open| ask_by_new_sockets(open, &queries, seconds))??;
        for (place, (_, share)) in PERCENTILES.into_iter().enumerate() {
            let value = percentile(&steady.latencies, share).unwrap_or_default();
            latency.push(&label, ours, place, value.as_secs_f64() * 1e6);
        }
        let answered = steady.latencies.len();
        let entries = connections(&lab.server)?;
        let offered = offer(&sockets, &queries, BURST, BURST)?;
        let burst_p99 = percentile(&offered.latencies, 0.99).unwrap_or_default().as_secs_f64() * 1e3;
        println!(
            "{label:<22} {answered} of {} answered, {} µs CPU each, {entries} connections tracked; burst: {} of {BURST}, p99 {} ms",
            steady.sent,
            number(steady.cpu.as_secs_f64() * 1e6 / answered as f64),
            offered.latencies.len(),
            number(burst_p99),
        );
        let bar = |value: f64| Bar { label: label.clone(), value: Rounds(vec![value]), ours };
        cpu.push(bar(steady.cpu.as_secs_f64() * 1e6 / answered as f64));
        conntrack.push(bar(entries as f64));
        burst.push(bar(100.0 * offered.latencies.len() as f64 / BURST as f64));
        burst_latency.push(bar(burst_p99));
    }
    let about = format!(
        "{CONTAINERS} containers with silk's interfaces and rules send {EACH} queries per second each, \
         through their own interfaces and from a new port each. One process offers the load; CPU time is the whole \
         machine's, including that process."
    );
    let figure = |title: &str, unit: &str, data| Figure::new(title, about.clone(), unit, data);
    Ok(vec![
        figure(TITLE, "µs", Data::Sweep(latency)),
        figure("A cell of containers: CPU time per query", "µs", Data::Bars(cpu)),
        figure("A cell of containers: connections tracked", "entries", Data::Bars(conntrack)),
        figure(
            "A cell of containers: answers to a burst of 50,000 queries in a second",
            "%",
            Data::Bars(burst),
        ),
        figure("A cell of containers: p99 of that burst", "ms", Data::Bars(burst_latency)),
    ])
}

/// Returns the namespaces of a host and its containers.
fn cell_namespaces() -> Result<Lab> {
    Ok(Lab { server: Namespace::new("cell")?, client: Namespace::new("apps")?, split: false })
}

/// Starts this server; in mode `auto`, waits until every container's interface is served.
fn start(
    lab: &Lab,
    cell: &Cell<'_>,
    foundation: &Foundation,
    mode: &str,
    query: &[u8],
) -> Result<(Server, Bpffs)> {
    let bpffs = Bpffs::new()?;
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let settings = json!({
        "log_level": "WARN",
        "metrics": {"enabled": true},
        "xdp": {"mode": mode, "interfaces": ["*"], "bpffs": bpffs.path(), "max_names": foundation.max_names},
    });
    let listen: SocketAddr = (SERVER_ADDRESS, 53).into();
    let server = Server::start(Some(&lab.server), folder, listen, &settings)?;
    wait_for_metrics(&lab.server)?;
    if mode != "off" {
        for number in 0..CONTAINERS {
            cell.ask(number, query, FIRST, Duration::from_secs(1))?;
        }
        wait_until("every container to be served", Duration::from_secs(300), || {
            thread::sleep(Duration::from_millis(200));
            bpffs.links().len() >= CONTAINERS
        })?;
    }
    Ok((server, bpffs))
}

/// Results of a load.
struct Offered {
    sent: usize,
    /// Latencies of the answered queries, sorted.
    latencies: Vec<Duration>,
    /// CPU time of the whole machine.
    cpu: Duration,
}

/// Sends [`EACH`] queries per second from each container, each by a new socket as resolvers do: it has its own source
/// port, and with it an entry in the table of tracked connections. `open` opens a socket of a container.
fn ask_by_new_sockets(
    open: &(dyn Fn(usize) -> Result<Socket> + Sync),
    queries: &[Vec<u8>],
    seconds: usize,
) -> Result<Offered> {
    let interval = Duration::from_secs(1) / EACH as u32;
    let (begun, before) = (Instant::now(), machine_time()?);
    let container = &|number: usize| -> Result<Vec<Duration>> {
        let mut latencies = Vec::with_capacity(EACH * seconds);
        // Evenly spread over the interval.
        let first = interval.mul_f64(number as f64 / CONTAINERS as f64);
        for round in 0..EACH * seconds {
            thread::sleep((first + interval * round as u32).saturating_sub(begun.elapsed()));
            let (socket, sent) = (open(number)?, Instant::now());
            socket.send(&queries[(number + round) % queries.len()])?;
            // A timeout counts as a loss.
            if socket.recv(&mut [MaybeUninit::uninit(); 2048]).is_ok() {
                latencies.push(sent.elapsed());
            }
        }
        Ok(latencies)
    };
    let mut latencies = thread::scope(|scope| -> Result<Vec<Duration>> {
        let threads: Vec<_> = (0..CONTAINERS).map(|number| scope.spawn(move || container(number))).collect();
        let mut all = Vec::new();
        for thread in threads {
            all.append(&mut thread.join().expect("no panic")?);
        }
        Ok(all)
    })?;
    let cpu = machine_time()?.saturating_sub(before);
    latencies.sort();
    Ok(Offered { sent: CONTAINERS * EACH * seconds, latencies, cpu })
}

/// Offers `count` queries at this rate, from each container in turn.
fn offer(sockets: &[Socket], queries: &[Vec<u8>], rate: usize, count: usize) -> Result<Offered> {
    let sent: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
    let begun = Instant::now();
    let over = AtomicBool::new(false);
    let before = machine_time()?;
    let (latencies, lost) = thread::scope(|scope| -> Result<_> {
        let receiving = scope.spawn(|| receive(sockets, &sent, begun, &over));
        let mut lost = 0;
        for (number, sent_at) in sent.iter().enumerate() {
            let due = Duration::from_secs_f64(number as f64 / rate as f64);
            let early = due.saturating_sub(begun.elapsed());
            if early > Duration::from_micros(100) {
                thread::sleep(early);
            }
            let mut query = queries[number % queries.len()].clone();
            query[..2].copy_from_slice(&((number / sockets.len()) as u16).to_be_bytes());
            sent_at.store(begun.elapsed().as_nanos() as u64 + 1, Ordering::Relaxed);
            if sockets[number % sockets.len()].send(&query).is_err() {
                lost += 1;
            }
        }
        // Replies that take longer count as lost.
        thread::sleep(Duration::from_secs(1));
        over.store(true, Ordering::Relaxed);
        Ok((receiving.join().expect("no panic")?, lost))
    })?;
    let cpu = machine_time()?.saturating_sub(before);
    ensure!(lost == 0, "{lost} queries could not be sent");
    Ok(Offered { sent: count, latencies, cpu })
}

/// Receives replies until the load ends; returns the latencies, sorted.
fn receive(
    sockets: &[Socket],
    sent: &[AtomicU64],
    begun: Instant,
    over: &AtomicBool,
) -> Result<Vec<Duration>> {
    let mut latencies = Vec::with_capacity(sent.len());
    let mut buffer = [MaybeUninit::uninit(); 2048];
    while !over.load(Ordering::Relaxed) {
        let mut fds: Vec<PollFd<'_>> =
            sockets.iter().map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)).collect();
        poll(&mut fds, PollTimeout::from(50u8))?;
        for (place, socket) in sockets.iter().enumerate() {
            if !fds[place].any().unwrap_or(false) {
                continue;
            }
            loop {
                let length = match socket.recv_with_flags(&mut buffer, libc::MSG_DONTWAIT) {
                    Ok(length) => length,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error.into()),
                };
                ensure!(length >= 12, "a reply without a header");
                // SAFETY: the kernel has written these bytes.
                let id = unsafe { [buffer[0].assume_init(), buffer[1].assume_init()] };
                let number = usize::from(u16::from_be_bytes(id)) * sockets.len() + place;
                // Replies to an earlier load are ignored.
                let at = sent.get(number).map_or(0, |sent| sent.swap(0, Ordering::Relaxed));
                if at != 0 {
                    latencies.push(begun.elapsed().saturating_sub(Duration::from_nanos(at - 1)));
                }
            }
        }
    }
    latencies.sort();
    Ok(latencies)
}

/// Returns the total CPU time that the machine has spent since it was started: all but idle time, which the kernel
/// measures (`/proc/uptime`). The other times of `/proc/stat` are sampled by a tick that wakes the same threads.
fn machine_time() -> Result<Duration> {
    let text = fs::read_to_string("/proc/uptime")?;
    let (up, idle) = text.trim().split_once(' ').context("two numbers")?;
    // Those online, because this thread may be confined to some of them.
    let cpus = sysconf(SysconfVar::_NPROCESSORS_ONLN)?.context("no number of CPUs")? as f64;
    Ok(Duration::from_secs_f64((up.parse::<f64>()? * cpus - idle.parse::<f64>()?).max(0.0)))
}

/// Returns the number of tracked connections in a namespace.
fn connections(namespace: &Namespace) -> Result<u64> {
    let read = || fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
    Ok(namespace.run(read)??.trim().parse()?)
}

/// Measures the creation of containers alternately with this server and without it (stopped by a signal), and
/// checks that nothing remains of them.
fn creation(plan: &Plan) -> Result<Figure> {
    let count = if plan.quick { 100 } else { 1_000 };
    let lab = cell_namespaces()?;
    let cell = Cell::new(&lab.server, &lab.client)?;
    let bpffs = Bpffs::new()?;
    let folder = server::folder(&server::records_of_groups(&[3]), None)?;
    let settings = json!({
        "log_level": "WARN",
        "metrics": {"enabled": true},
        "xdp": {"mode": "auto", "interfaces": ["*"], "bpffs": bpffs.path()},
    });
    let server = Server::start(Some(&lab.server), folder, (SERVER_ADDRESS, 53).into(), &settings)?;
    let descriptors = || -> Result<usize> {
        let of = |process| Ok(fs::read_dir(format!("/proc/{process}/fd"))?.count());
        server.processes()?.into_iter().map(of).sum()
    };
    let before = descriptors()?;
    let query = client::query("q-s0.q-g3.bosh.", RecordType::A, None)?.to_vec()?;
    let mut took = [Rounds::default(), Rounds::default()];
    let mut asked = 0;
    for block in 0..count / BLOCK {
        let with_server = block % 2 == 0;
        server.signal_all(if with_server { Signal::SIGCONT } else { Signal::SIGSTOP })?;
        for number in block * BLOCK..(block + 1) * BLOCK {
            let begun = Instant::now();
            cell.create(number)?;
            took[usize::from(with_server)].0.push(begun.elapsed().as_secs_f64() * 1e3);
            if with_server {
                for recent in asked..=number {
                    cell.ask(recent, &query, FIRST, Duration::from_secs(1))?;
                }
                asked = number + 1;
            }
        }
    }
    server.signal_all(Signal::SIGCONT)?;
    let [without, with] = &took;
    println!(
        "creation: {} ms without the server, {} ms with it; {} of {count} served meanwhile",
        number(without.median()),
        number(with.median()),
        bpffs.links().len()
    );
    cell.remove(0..count)?;
    wait_until("pins and descriptors to go with the containers", Duration::from_secs(60), || {
        bpffs.links().is_empty()
            && descriptors().is_ok_and(|descriptors| descriptors <= before + OF_FAST_PATH)
    })?;
    let labels = ["without the server", "with the server"];
    let bars = labels.iter().zip(took).map(|(label, value)| Bar {
        label: (*label).to_owned(),
        value,
        ours: *label == labels[1],
    });
    Ok(Figure::new(
        format!("Creation of {} containers", number(count as f64)),
        "Interface, silk's rules and the bandwidth plugin's qdiscs, in alternating blocks of ten \
         containers with and without the server; containers send queries as soon as they exist. No \
         pin, link or descriptor remains afterwards.",
        "ms",
        Data::Bars(bars.collect()),
    ))
}
