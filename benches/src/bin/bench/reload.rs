//! Time from a new records.json to the first new answer, and the slowest query meanwhile.

use std::{
    fs,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    lab::{CLIENT_CPU, Lab, SERVER_ADDRESS},
    peers::{Peer, Running as RunningPeer},
    report::{Bar, Data, Figure, Rounds},
};
use hickory_proto::{op::Message, rr::RecordType};
use whole_system_tests::{client, cpu::on_cpu, process::wait_until};

use crate::{Plan, subject::Subject};

/// Number of reloads per server.
const RELOADS: u8 = 9;

/// Pause before each reload, in which slower work on the previous one ends; a director changes a
/// fleet once in minutes. Longer than the tenth of a second in which the serial of the peers' zones
/// is counted.
const PAUSE: Duration = Duration::from_millis(500);

/// Results of one reload, in milliseconds.
struct Reload {
    /// From the change on disk to the first new answer.
    first: f64,
    /// The slowest of all consecutive replies until then.
    slowest: f64,
}

/// Reload times by size for this server and the authoritative peers.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for size in plan.sizes.iter().copied().filter(|size| (1_000..=10_000).contains(size)) {
        let mut bars: [Vec<Bar>; 2] = Default::default();
        for who in [None, Some(Peer::Knot), Some(Peer::Nsd)] {
            let reloads = match who {
                None => reload_ours(size)?,
                Some(peer) => reload_peer(peer, size)?,
            };
            let label = who.map_or("ours, tc", Peer::label);
            let column = |pick: fn(&Reload) -> f64| Rounds(reloads.iter().map(pick).collect());
            let values = [column(|reload| reload.first), column(|reload| reload.slowest)];
            println!(
                "{size:>7} instances, {label:<12} first new answer {:>7.1} ms, slowest query {:>7.2} ms",
                values[0].median(),
                values[1].median()
            );
            for (bars, value) in bars.iter_mut().zip(values) {
                bars.push(Bar { label: label.to_owned(), value, ours: who.is_none() });
            }
        }
        let [first, slowest] = bars;
        figures.push(Figure::new(
            format!("From new records to the first new answer, {size} instances"),
            "One instance gets another address. This server: records.json is renamed into place and noticed. \
             Peers: the zone files are already in place and SIGHUP is sent; writing and noticing them is not \
             counted.",
            "ms",
            Data::Bars(first),
        ));
        figures.push(Figure::new(
            format!("Slowest query during that reload, {size} instances"),
            "One client queries the changed name continuously.",
            "ms",
            Data::Bars(slowest),
        ));
    }
    Ok(figures)
}

/// Replaces this server's records.json.
fn reload_ours(size: usize) -> Result<Vec<Reload>> {
    let mut foundation = Foundation::generate(size)?;
    let lab = Lab::plain()?;
    let running = Subject::Ours("tc").start(&lab, &foundation)?;
    let server = running.server.as_ref().context("ours is a server")?;
    let file = server.folder.path().join("records.json");
    (1..=RELOADS)
        .map(|turn| {
            let change = foundation.recreate_one(Ipv4Addr::new(10, 255, 255, turn))?;
            let next = file.with_extension("next");
            fs::write(&next, &foundation.records)?;
            thread::sleep(PAUSE);
            watch(&lab, &change.name, change.to, || Ok(fs::rename(&next, &file)?))
        })
        .collect()
}

/// Replaces the zones of a peer.
fn reload_peer(peer: Peer, size: usize) -> Result<Vec<Reload>> {
    let mut foundation = Foundation::generate(size)?;
    let lab = Lab::plain()?;
    let running: RunningPeer = peer.start(&lab, &foundation.entries(usize::MAX))?;
    (1..=RELOADS)
        .map(|turn| {
            let change = foundation.recreate_one(Ipv4Addr::new(10, 255, 255, turn))?;
            running.write_names(&foundation.entries(usize::MAX))?;
            thread::sleep(PAUSE);
            watch(&lab, &change.name, change.to, || running.signal_reload())
        })
        .collect()
}

/// Executes `change` and queries `name` until the answer contains `wanted`.
fn watch(
    lab: &Lab,
    name: &str,
    wanted: Ipv4Addr,
    change: impl FnOnce() -> Result<()> + Send,
) -> Result<Reload> {
    let query = client::query(name, RecordType::A, Some(1232))?.to_vec()?;
    let ask = || -> Result<Reload> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(SocketAddr::from((SERVER_ADDRESS, 53)))?;
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let mut buffer = [0; 4096];
        let mut slowest = Duration::ZERO;
        change()?;
        let started = Instant::now();
        loop {
            let sent = Instant::now();
            socket.send(&query)?;
            let length = receive(&socket, &mut buffer)?;
            slowest = slowest.max(sent.elapsed());
            let reply = Message::from_vec(&buffer[..length])?;
            if client::addresses(&reply).contains(&IpAddr::V4(wanted)) {
                let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
                return Ok(Reload { first: milliseconds(started.elapsed()), slowest: milliseconds(slowest) });
            }
            ensure!(started.elapsed() < Duration::from_secs(20), "{name} did not change within 20 s");
        }
    };
    // On a separate CPU: a client that queries without a pause would take half of the server's.
    lab.client.run(|| on_cpu(CLIENT_CPU, ask))?
}

/// Waits for a reply.
fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> Result<usize> {
    let mut received = Err(ErrorKind::WouldBlock.into());
    wait_until("a reply during the reload", Duration::from_secs(10), || {
        received = socket.recv(buffer);
        !matches!(&received, Err(error) if error.kind() == ErrorKind::WouldBlock)
    })?;
    received.context("no reply during the reload")
}
