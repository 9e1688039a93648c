//! Latency while the load runs: single queries through a socket, as a client experiences them.

use std::{
    net::UdpSocket,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::queries::Query;

/// Time limit of a probe.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

/// Results of the probes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Latencies {
    /// Response times, in ascending order.
    pub(crate) answered: Vec<Duration>,
    /// Number of probes without a reply.
    pub(crate) lost: u64,
}

/// Sends probes until `over` is set.
pub(crate) fn measure(
    socket: &UdpSocket,
    queries: &[Query],
    edns: Option<u16>,
    over: &AtomicBool,
) -> Latencies {
    let mut found = Latencies::default();
    for (number, query) in queries.iter().cycle().enumerate() {
        if over.load(Ordering::Relaxed) {
            break;
        }
        match ask(socket, &query.message(number as u16, edns)) {
            Some(took) => found.answered.push(took),
            None => found.lost += 1,
        }
        thread::sleep(PAUSE);
    }
    found.answered.sort_unstable();
    found
}

/// Sends a query and returns the time until its reply.
pub(crate) fn ask(socket: &UdpSocket, message: &[u8]) -> Option<Duration> {
    let begun = Instant::now();
    socket.send(message).ok()?;
    let mut reply = [0; 4096];
    while begun.elapsed() < TIMEOUT {
        let length = socket.recv(&mut reply).ok()?;
        // A late reply to an earlier probe has another id.
        if length >= 2 && reply[..2] == message[..2] {
            return Some(begun.elapsed());
        }
    }
    None
}
