//! Many busy interfaces: how soon all are served, how long each attach holds the RTNL lock, and how often proven
//! admissions are probed.

use std::{
    mem::MaybeUninit,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use bosh_dns_xdp_benches::{foundation::Foundation, report::Rounds};
use hickory_proto::rr::RecordType;
use socket2::Socket;
use whole_system_tests::{
    cell::{Attaches, Cell, wait_for_grace},
    client,
    metrics::Metrics,
    process::wait_until,
};

use crate::{Plan, containers, part::Table, subject::Subject};

const INTERFACES: usize = 500;
const TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for interfaces to be served.
const LIMIT: Duration = Duration::from_secs(60);
/// Time without changes after which admissions are proven and their next probe has passed (`attach/gate.rs`).
const PROVEN: Duration = Duration::from_secs(65);
/// Three times the interval of such probes.
const WATCHED: Duration = Duration::from_secs(30);

pub(crate) fn measure(_: &Plan, subject: &Subject, table: &mut Table) -> Result<()> {
    let foundation = Foundation::generate(100)?;
    let lab = containers::cell_namespaces()?;
    let cell = Cell::new(&lab.server, &lab.client)?;
    // Only from INFO on the log dates each attach.
    let (server, _bpffs) = containers::start(&lab, &foundation, "tc", "INFO")?;
    let name = foundation
        .names()
        .next()
        .context("a foundation has names")?
        .to_string();
    let query = client::query(&name, RecordType::A, None)?.to_vec()?;
    // The programs are loaded when the first interface needs them.
    cell.connect(INTERFACES..INTERFACES + 1)?;
    wait_until("the first interface to be served", LIMIT, || {
        cell.ask(INTERFACES, &query, 6, TIMEOUT).is_ok()
            && server.log().contains("program attached")
    })?;
    cell.connect(0..INTERFACES)?;
    wait_for_grace();
    let start = server.log().lines().count();
    let asked = cell.ask_enough(0..INTERFACES, &query, TIMEOUT)?;
    let attaches = || Attaches::read(&server.log(), start, &asked);
    wait_until("all interfaces to be served", LIMIT, || attaches().is_ok())?;
    let Attaches { delays, took, .. } = attaches()?;
    let mut sockets = Vec::with_capacity(INTERFACES);
    for number in 0..INTERFACES {
        sockets.push(cell.socket(number, TIMEOUT)?);
    }
    query_all(&sockets, &query, PROVEN)?;
    let before = Metrics::read(&lab.server)?.probes();
    let watched = query_all(&sockets, &query, WATCHED)?;
    let probes = Metrics::read(&lab.server)?.probes() - before;
    let each = probes as f64 / watched.as_secs_f64() / INTERFACES as f64;
    let slowest = delays
        .iter()
        .max()
        .map(Duration::as_secs_f64)
        .into_iter()
        .collect();
    let took = took.iter().map(|took| took.as_secs_f64() * 1e3).collect();
    table.put(
        &subject.label(),
        0,
        &[Rounds(slowest), Rounds(took), Rounds(vec![each])],
    );
    Ok(())
}

/// Sends several queries per second from each socket for about this time; returns how long it took.
fn query_all(sockets: &[Socket], query: &[u8], time: Duration) -> Result<Duration> {
    let begun = Instant::now();
    while begun.elapsed() < time {
        for socket in sockets {
            socket.send(query)?;
            // A lost reply counts as little as any other.
            let _ = socket.recv(&mut [MaybeUninit::uninit(); 512]);
        }
        thread::sleep(Duration::from_millis(100));
    }
    Ok(begun.elapsed())
}
