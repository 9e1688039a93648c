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
    report::Rounds,
};
use hickory_proto::rr::RecordType;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::Signal,
};
use serde_json::json;
use socket2::Socket;
use whole_system_tests::{
    bpffs::Bpffs,
    cell::Cell,
    client,
    cpu::machine_time,
    metrics::wait_for_metrics,
    namespace::Namespace,
    process::wait_until,
    server::{self, Server},
};

use crate::{Plan, part::Table, subject::Subject};

const CONTAINERS: usize = 250;
/// Queries per second of each container.
const EACH: usize = 20;
/// Queries of a burst, offered within a second.
const BURST: usize = 50_000;
/// Queries that show the server that an interface is in use.
const FIRST: usize = 6;
const QUERIES: usize = 256;
/// Descriptors of the fast path itself: maps, sockets, and programs, which are loaded when an interface needs them.
const OF_FAST_PATH: usize = 40;
/// Containers created one after the other with or without the server.
const BLOCK: usize = 10;
/// Time between the starts of two creations.
const BETWEEN: Duration = Duration::from_millis(100);

/// The load of all containers, or with mode `auto` and without a server the creation of containers.
pub(crate) fn measure(plan: &Plan, subject: &Subject, table: &mut Table) -> Result<()> {
    if *subject == Subject::Nothing {
        return create(plan, table);
    }
    let foundation = Foundation::generate(1_000)?;
    let names: Vec<String> = foundation.names().map(|name| name.to_string()).collect();
    let queries = (0..QUERIES).map(|number| {
        let name = &names[number * names.len() / QUERIES];
        Ok(client::query(name, RecordType::A, None)?.to_vec()?)
    });
    let queries: Vec<Vec<u8>> = queries.collect::<Result<_>>()?;
    let lab = cell_namespaces()?;
    let cell = Cell::new(&lab.server, &lab.client)?;
    cell.connect(0..CONTAINERS)?;
    cell.permit(0..CONTAINERS)?;
    let _running: Box<dyn std::any::Any> = match subject {
        Subject::Peer(peer) => Box::new(peer.start(&lab, &foundation.entries(usize::MAX))?),
        subject => {
            let mode = subject.mode().context("a server")?;
            let running = start(&lab, &foundation, mode, "WARN")?;
            if mode != "off" {
                wait_until_served(&cell, &running.1, &queries[0])?;
            }
            Box::new(running)
        }
    };
    let sockets = (0..CONTAINERS).map(|number| cell.socket(number, Duration::from_secs(1)));
    let sockets: Vec<Socket> = sockets.collect::<Result<_>>()?;
    let seconds = if plan.quick { 4 } else { 10 };
    // A second that does not count: caches fill, and the names asked for are published.
    cell.inside(|open| ask_by_new_sockets(open, &queries, 1))??;
    let steady = cell.inside(|open| ask_by_new_sockets(open, &queries, seconds))??;
    let tracked: f64 = lab
        .server
        .run(|| fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count"))??
        .trim()
        .parse()?;
    let burst = offer(&sockets, &queries)?;
    let within = |offered: &Offered, share| {
        percentile(&offered.latencies, share)
            .unwrap_or_default()
            .as_secs_f64()
    };
    let values = [
        within(&steady, 0.5) * 1e6,
        within(&steady, 0.99) * 1e6,
        steady.cpu.as_secs_f64() * 1e6 / steady.latencies.len().max(1) as f64,
        tracked,
        100.0 * burst.latencies.len() as f64 / BURST as f64,
        within(&burst, 0.99) * 1e3,
    ];
    ensure!(!steady.latencies.is_empty(), "no answer");
    table.put_each(&subject.label(), 0, &values);
    Ok(())
}

/// Waits until every container is answered at its interface.
fn wait_until_served(cell: &Cell<'_>, bpffs: &Bpffs, query: &[u8]) -> Result<()> {
    let limit = Duration::from_secs(300);
    wait_until("every container to be served", limit, || {
        // Again, because queries that arrive while the programs load show nothing.
        let asked = (0..CONTAINERS).all(|number| {
            cell.ask(number, query, FIRST, Duration::from_secs(1))
                .is_ok()
        });
        thread::sleep(Duration::from_secs(1));
        asked && bpffs.links().len() >= CONTAINERS
    })
}

/// Returns the namespaces of a host and its containers.
pub(crate) fn cell_namespaces() -> Result<Lab> {
    Ok(Lab::of(Namespace::new("cell")?, Namespace::new("apps")?))
}

/// Starts this server on every interface of the host; `logs` is the least severe level that it logs.
pub(crate) fn start(
    lab: &Lab,
    foundation: &Foundation,
    mode: &str,
    logs: &str,
) -> Result<(Server, Bpffs)> {
    let bpffs = Bpffs::new()?;
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let settings = json!({
        "log_level": logs,
        "metrics": {"enabled": true},
        "xdp": {"mode": mode, "interfaces": ["*"], "bpffs": bpffs.path(), "max_names": foundation.max_names},
    });
    let listen: SocketAddr = (SERVER_ADDRESS, 53).into();
    let server = Server::start(Some(&lab.server), folder, listen, &settings)?;
    wait_for_metrics(&lab.server)?;
    Ok((server, bpffs))
}

/// Results of a load.
struct Offered {
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
    let begun = Instant::now();
    let before = machine_time()?;
    let container = &|number: usize| -> Result<Vec<Duration>> {
        let mut latencies = Vec::with_capacity(EACH * seconds);
        // Evenly spread over the interval.
        let first = interval.mul_f64(number as f64 / CONTAINERS as f64);
        for round in 0..EACH * seconds {
            thread::sleep((first + interval * round as u32).saturating_sub(begun.elapsed()));
            let socket = open(number)?;
            let sent = Instant::now();
            socket.send(&queries[(number + round) % queries.len()])?;
            // A timeout counts as a loss.
            if socket.recv(&mut [MaybeUninit::uninit(); 2048]).is_ok() {
                latencies.push(sent.elapsed());
            }
        }
        Ok(latencies)
    };
    let mut latencies = thread::scope(|scope| -> Result<Vec<Duration>> {
        let threads: Vec<_> = (0..CONTAINERS)
            .map(|number| scope.spawn(move || container(number)))
            .collect();
        let mut all = Vec::new();
        for thread in threads {
            all.append(&mut thread.join().expect("no panic")?);
        }
        Ok(all)
    })?;
    let cpu = machine_time()?.saturating_sub(before);
    latencies.sort();
    Ok(Offered { latencies, cpu })
}

/// Offers [`BURST`] queries within a second, from each container in turn.
fn offer(sockets: &[Socket], queries: &[Vec<u8>]) -> Result<Offered> {
    let sent: Vec<AtomicU64> = (0..BURST).map(|_| AtomicU64::new(0)).collect();
    let begun = Instant::now();
    let over = AtomicBool::new(false);
    let before = machine_time()?;
    let (latencies, lost) = thread::scope(|scope| -> Result<_> {
        let receiving = scope.spawn(|| receive(sockets, &sent, begun, &over));
        let mut lost = 0;
        for (number, sent_at) in sent.iter().enumerate() {
            let due = Duration::from_secs_f64(number as f64 / BURST as f64);
            let early = due.saturating_sub(begun.elapsed());
            // A sleep takes some 50 µs more than asked (timer slack), so that one before each query would
            // slow the burst down.
            if early > Duration::from_micros(100) {
                thread::sleep(early);
            }
            let mut query = queries[number % queries.len()].clone();
            // Id and socket together tell whose reply it is: with 200 queries for each socket, no id repeats.
            query[..2].copy_from_slice(&((number / sockets.len()) as u16).to_be_bytes());
            // Before sending, because the reply may be received before `send` returns. 0 stands for
            // a query that was not sent.
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
    // A query that never left says nothing about the server.
    ensure!(lost == 0, "{lost} queries could not be sent");
    Ok(Offered { latencies, cpu })
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
        let mut fds: Vec<PollFd<'_>> = sockets
            .iter()
            .map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN))
            .collect();
        poll(&mut fds, PollTimeout::from(50u8))?;
        for (place, socket) in sockets.iter().enumerate() {
            if !fds[place].any().unwrap_or(false) {
                continue;
            }
            loop {
                // The sockets block, as other loads need them.
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
                let at = sent
                    .get(number)
                    .map_or(0, |sent| sent.swap(0, Ordering::Relaxed));
                if at != 0 {
                    latencies.push(begun.elapsed().saturating_sub(Duration::from_nanos(at - 1)));
                }
            }
        }
    }
    latencies.sort();
    Ok(latencies)
}

/// Returns how many descriptors the server's processes have open.
fn descriptors(server: &Server) -> Result<usize> {
    let mut open = 0;
    for process in server.processes() {
        open += fs::read_dir(format!("/proc/{process}/fd"))?.count();
    }
    Ok(open)
}

/// Measures the creation of containers alternately with this server and without it (stopped by a signal), and
/// checks that nothing remains of them.
fn create(plan: &Plan, table: &mut Table) -> Result<()> {
    let count = if plan.quick { 100 } else { 400 };
    let lab = cell_namespaces()?;
    let cell = Cell::new(&lab.server, &lab.client)?;
    let (server, bpffs) = start(&lab, &Foundation::generate(100)?, "auto", "WARN")?;
    let before = descriptors(&server)?;
    let query = client::query("upcheck.bosh-dns.", RecordType::A, None)?.to_vec()?;
    let mut took = [Rounds::default(), Rounds::default()];
    let mut asked = 0;
    for block in 0..count / BLOCK {
        let with_server = block % 2 == 0;
        server.signal_all(if with_server {
            Signal::SIGCONT
        } else {
            Signal::SIGSTOP
        })?;
        for number in block * BLOCK..(block + 1) * BLOCK {
            let begun = Instant::now();
            cell.create(number)?;
            took[usize::from(with_server)]
                .0
                .push(begun.elapsed().as_secs_f64() * 1e3);
            if with_server {
                // Also from the containers that were created while the server stood still.
                for recent in asked..=number {
                    cell.ask(recent, &query, FIRST, Duration::from_secs(1))?;
                }
                asked = number + 1;
            }
            thread::sleep(BETWEEN.saturating_sub(begun.elapsed()));
        }
    }
    server.signal_all(Signal::SIGCONT)?;
    println!(
        "{} of {count} containers were served meanwhile",
        bpffs.links().len()
    );
    cell.remove(0..count)?;
    wait_until(
        "pins and descriptors to go with the containers",
        Duration::from_secs(60),
        || {
            bpffs.links().is_empty()
                && descriptors(&server).is_ok_and(|open| open <= before + OF_FAST_PATH)
        },
    )?;
    for (label, value) in ["without the server", "ours, with the server"]
        .into_iter()
        .zip(took)
    {
        let mut values = vec![Rounds::default(); 6];
        values.push(value);
        table.put(label, 0, &values);
    }
    Ok(())
}
