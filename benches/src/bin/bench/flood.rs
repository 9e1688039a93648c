//! One client floods the server with new names: the service for other clients, compared with unbound.

use std::{
    collections::{HashMap, VecDeque},
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use bosh_dns_xdp_benches::{
    dnsperf::percentile,
    foundation::Foundation,
    lab::{CLIENT_ADDRESS, CLIENT_CPU, CLIENT_INTERFACE, Lab, SERVER_ADDRESS, SERVER_CPU},
    report::Rounds,
    servers::{AUTHORITY, Forwarder},
};
use hickory_proto::rr::RecordType;
use whole_system_tests::{client, cpu::stay_on, process};

use crate::{Plan, part::Table, subject::Subject};

/// Source of the flood; the other client has the usual address.
const FLOODER: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 3);
/// Queries per second of the flood, each for a new name.
const FLOOD_RATE: u32 = 15_000;
/// Queries per second of the other client for new names, and for names of the fleet.
const OTHER_RATE: u32 = 100;
/// Delays of the recursor, in milliseconds.
const DELAYS: [u64; 2] = [50, 300];
/// Time from the start of the flood to the first measured query: longer than any name waits.
const LEAD: Duration = Duration::from_secs(2);
/// How long a client waits for a reply, like the resolvers of C libraries.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn points() -> Vec<String> {
    let mut points = Vec::new();
    for delay in DELAYS {
        for load in ["no flood", "flood"] {
            points.push(format!("recursor at {delay} ms, {load}"));
        }
    }
    points
}

/// Measures both loads before a recursor with each delay.
pub(crate) fn measure(plan: &Plan, subject: &Subject, table: &mut Table) -> Result<()> {
    let Subject::Forwarder(forwarder) = *subject else {
        return Ok(());
    };
    let foundation = Foundation::generate(1_000)?;
    let names: Vec<String> = foundation
        .entries(200)
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    let names = if forwarder == Forwarder::Fleet {
        &names[..]
    } else {
        &[]
    };
    let duration = Duration::from_secs(if plan.quick { 3 } else { 6 });
    for (number, delay) in DELAYS.into_iter().enumerate() {
        let lab = Lab::plain()?;
        lab.client
            .ip(&format!("addr add {FLOODER}/24 dev {CLIENT_INTERFACE}"))?;
        let recursor = SlowRecursor::start(&lab, AUTHORITY, Duration::from_millis(delay))?;
        let running = forwarder.start_before(&lab, recursor, &foundation)?;
        // In this order, because the peak of memory never falls.
        for flooded in [false, true] {
            let (other, fleet) = load(&lab, duration, flooded, names)?;
            ensure!(
                // Percentiles are those of answered queries: lost ones would not show in them.
                fleet.answered == fleet.sent,
                "{} of {} fleet names",
                fleet.answered,
                fleet.sent
            );
            let answered = other.answered as f64 * 100.0 / other.sent.max(1) as f64;
            let peak = process::memory(running.pid, "VmHWM")? as f64 / f64::from(1 << 20);
            let values = [
                Rounds(vec![answered]),
                other.tail(),
                fleet.tail(),
                Rounds(vec![peak]),
            ];
            table.put(
                forwarder.label(),
                2 * number + usize::from(flooded),
                &values,
            );
        }
    }
    Ok(())
}

/// Results of one client.
#[derive(Default)]
struct Seen {
    sent: usize,
    /// Queries answered with an address.
    answered: usize,
    latencies: Vec<Duration>,
}

impl Seen {
    /// Returns the 99th percentile of the latencies in milliseconds.
    fn tail(&self) -> Rounds {
        let mut tail = Rounds::default();
        if let Some(latency) = percentile(&self.latencies, 0.99) {
            tail.0.push(latency.as_secs_f64() * 1e3);
        }
        tail
    }
}

/// Runs the other client, with the flood or without; returns the results of new names and of `names`.
fn load(lab: &Lab, duration: Duration, flooded: bool, names: &[String]) -> Result<(Seen, Seen)> {
    let ended = AtomicBool::new(false);
    // New names also in the second load: the server may have cached those of the first.
    let run = format!("{:08x}", fastrand::u32(..));
    let new = |number: usize| format!("o{number}.{run}.test.");
    let listed = |number: usize| names[number % names.len()].clone();
    let panicked = |_| anyhow::anyhow!("a client has panicked");
    let ask =
        |name: &(dyn Fn(usize) -> String + Sync)| lab.client.run(|| ask_at_rate(duration, name));
    thread::scope(|scope| {
        let flooding = flooded.then(|| scope.spawn(|| lab.client.run(|| flood(&ended))));
        thread::sleep(if flooded { LEAD } else { Duration::ZERO });
        let other = scope.spawn(|| ask(&new));
        let fleet = if names.is_empty() {
            Ok(Ok(Seen::default()))
        } else {
            ask(&listed)
        };
        let other = other.join();
        ended.store(true, Ordering::Relaxed);
        if let Some(flooding) = flooding {
            let rate = flooding.join().map_err(panicked)???;
            ensure!(
                // A slower flood would flatter the server.
                rate >= 0.95 * f64::from(FLOOD_RATE),
                "the generator sent only {rate:.0} queries/s"
            );
        }
        Ok((other.map_err(panicked)???, fleet??))
    })
}

fn socket(from: Ipv4Addr, receive_buffer: usize) -> Result<UdpSocket> {
    stay_on(CLIENT_CPU)?;
    let socket = socket2::Socket::from(UdpSocket::bind((from, 0))?);
    socket.set_recv_buffer_size(receive_buffer)?;
    socket.connect(&SocketAddr::from((SERVER_ADDRESS, 53)).into())?;
    Ok(socket.into())
}

/// Sends new names until `ended`; the kernel drops the replies. Returns the queries per second.
fn flood(ended: &AtomicBool) -> Result<f64> {
    let socket = socket(FLOODER, 0)?;
    let template = client::query("0000000000000000.flood.test.", RecordType::A, None)?.to_vec()?;
    let started = Instant::now();
    let mut sent: u32 = 0;
    while !ended.load(Ordering::Relaxed) {
        let due = (started.elapsed().as_secs_f64() * f64::from(FLOOD_RATE)) as u32;
        while sent < due {
            let mut query = template.clone();
            // At random, so that no name of an earlier run or load is queried again.
            query[..2].copy_from_slice(&fastrand::u16(..).to_be_bytes());
            query[13..29].copy_from_slice(format!("{:016x}", fastrand::u64(..)).as_bytes());
            // A full queue along the path is part of a flood.
            let _ = socket.send(&query);
            sent += 1;
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(f64::from(sent) / started.elapsed().as_secs_f64())
}

/// Sends queries at [`OTHER_RATE`], whatever has been answered, and waits for the replies.
fn ask_at_rate(duration: Duration, name: impl Fn(usize) -> String) -> Result<Seen> {
    // A reply that the client itself drops would count against the server.
    let socket = socket(CLIENT_ADDRESS, 8 << 20)?;
    let total = (duration.as_secs_f64() * f64::from(OTHER_RATE)) as usize;
    let mut seen = Seen::default();
    let mut waiting: HashMap<u16, Instant> = HashMap::new();
    let mut buffer = [0; 4096];
    let started = Instant::now();
    while seen.sent < total || !waiting.is_empty() && started.elapsed() < duration + TIMEOUT {
        let next = started + Duration::from_secs_f64(seen.sent as f64 / f64::from(OTHER_RATE));
        let now = Instant::now();
        if seen.sent < total && now >= next {
            let mut query = client::query(&name(seen.sent), RecordType::A, None)?;
            // Ids are in use for at most TIMEOUT, and 65,536 last longer at this rate.
            query.metadata.id = seen.sent as u16;
            socket.send(&query.to_vec()?).context("cannot send")?;
            waiting.insert(seen.sent as u16, Instant::now());
            seen.sent += 1;
            continue;
        }
        let pause = if seen.sent < total {
            next - now
        } else {
            Duration::from_millis(50)
        };
        socket.set_read_timeout(Some(pause.max(Duration::from_micros(1))))?;
        // Without a whole header it is no reply. After a timeout the next query is due.
        let Ok(12..) = socket.recv(&mut buffer) else {
            continue;
        };
        let arrived = Instant::now();
        let [id_high, id_low, _, flags, _, _, high, low, ..] = buffer;
        let Some(sent) = waiting.remove(&u16::from_be_bytes([id_high, id_low])) else {
            continue;
        };
        // A server under load answers SERVFAIL or REFUSED, which is no help to the client.
        if flags & 15 == 0 && [high, low] != [0, 0] {
            seen.answered += 1;
            seen.latencies.push(arrived - sent);
        }
    }
    Ok(seen)
}

//----------- Recursor -------------------------------------------------------

/// A recursor on the server's CPU that answers every query with the same address after a delay, as a
/// distant one does; stopped when dropped.
#[derive(Debug)]
struct SlowRecursor {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl SlowRecursor {
    fn start(lab: &Lab, address: SocketAddr, delay: Duration) -> Result<Self> {
        let ended = Arc::new(AtomicBool::new(false));
        let observed = Arc::clone(&ended);
        let thread = lab.server.run(|| -> Result<JoinHandle<()>> {
            let socket =
                socket2::Socket::from(UdpSocket::bind(address).context("the slow recursor")?);
            socket.set_recv_buffer_size(8 << 20)?;
            socket.set_nonblocking(true)?;
            Ok(thread::spawn(move || {
                // On a machine with one CPU there is no choice.
                let _ = stay_on(SERVER_CPU);
                serve(&socket.into(), delay, &observed);
            }))
        })??;
        Ok(Self {
            ended,
            thread: Some(thread),
        })
    }
}

impl Drop for SlowRecursor {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic shows as missing replies.
            let _ = thread.join();
        }
    }
}

/// Answers queries until `ended`; the pause between two polls is the error of the delay.
fn serve(socket: &UdpSocket, delay: Duration, ended: &AtomicBool) {
    let mut waiting: VecDeque<(Instant, SocketAddr, Vec<u8>)> = VecDeque::new();
    let mut buffer = [0; 1500];
    while !ended.load(Ordering::Relaxed) {
        while let Ok((length, client)) = socket.recv_from(&mut buffer) {
            if let Some(reply) = reply(&buffer[..length]) {
                waiting.push_back((Instant::now() + delay, client, reply));
            }
        }
        // All have the same delay, so the first in the queue is the first that is due.
        while let Some((_, client, reply)) =
            waiting.pop_front_if(|(due, ..)| *due <= Instant::now())
        {
            let _ = socket.send_to(&reply, client);
        }
        thread::sleep(Duration::from_micros(500));
    }
}

/// Builds the reply to a query: its question, and the address 192.0.2.1 with a TTL of a minute.
fn reply(query: &[u8]) -> Option<Vec<u8>> {
    let mut end = 12;
    while *query.get(end)? != 0 {
        end += 1 + usize::from(query[end]);
    }
    let question = query.get(12..end + 5)?;
    // QR, RD and RA; one question, one answer.
    let header = [&query[..2], &[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]].concat();
    let answer = [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 1];
    Some([&header, question, &answer].concat())
}
