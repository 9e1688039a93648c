//! One client floods the server with new names: measures the service for other clients, compared with
//! unbound.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use bosh_dns_xdp_benches::{
    dnsperf::percentile,
    forwarders::{AUTHORITY, Forwarder, Running},
    foundation::Foundation,
    lab::{CLIENT_ADDRESS, CLIENT_CPU, CLIENT_INTERFACE, Lab, SERVER_ADDRESS},
    report::{Data, Figure, Sweep},
    slow_recursor::SlowRecursor,
};
use hickory_proto::rr::RecordType;
use whole_system_tests::{client, cpu::stay_on, metrics::wait_for_fast_path, process};

use crate::Plan;

/// Source of the flood; the other client has the usual address.
const FLOODER: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 3);

/// Queries per second of the flood, each for a new name.
const FLOOD_RATE: u32 = 15_000;

/// Delays of the recursor.
const DELAYS: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(300)];

/// Queries per second of the other client for new names, and for names of the fleet.
const OTHER_RATE: u32 = 100;

/// Time from the start of the flood to the first measured query: longer than any name waits.
const LEAD: Duration = Duration::from_secs(2);

/// How long a client waits for a reply, like the resolvers of C libraries.
const PATIENCE: Duration = Duration::from_secs(5);

/// Delay of the recursor when one client exceeds its share of waiting queries.
const GOODPUT_DELAY: Duration = Duration::from_secs(1);

/// Queries per second of that client: below its share of the waiting queries, and above.
const GOODPUT_RATES: [u32; 3] = [3_500, 4_500, 6_000];

/// Instances of the foundation.
const INSTANCES: usize = 1_000;

const SUBJECTS: [Forwarder; 2] = [Forwarder::Fleet, Forwarder::Unbound];

/// Results of one client.
#[derive(Default)]
struct Seen {
    sent: usize,
    /// Queries answered with an address.
    answered: usize,
    latencies: Vec<Duration>,
}

impl Seen {
    fn answered_percent(&self) -> f64 {
        self.answered as f64 * 100.0 / self.sent.max(1) as f64
    }

    /// Returns the 99th percentile of the latencies in milliseconds.
    fn tail(&self) -> f64 {
        percentile(&self.latencies, 0.99).map_or(f64::NAN, |tail| tail.as_secs_f64() * 1e3)
    }
}

/// Measures the flood, and the goodput of a client that exceeds its share of waiting queries.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(INSTANCES)?;
    let names: Vec<String> = foundation.entries(200).into_iter().map(|(name, _)| name).collect();
    let duration = if plan.quick { Duration::from_secs(3) } else { Duration::from_secs(6) };
    let places = DELAYS.iter().flat_map(|delay| {
        let delay = delay.as_millis();
        [format!("recursor at {delay} ms, no flood"), format!("recursor at {delay} ms, flood")]
    });
    let places: Vec<String> = places.collect();
    let new = || Sweep::new("load", places.clone(), false);
    let (mut answered, mut tails, mut fleet, mut memory) = (new(), new(), new(), new());
    for _ in 0..plan.rounds {
        for subject in SUBJECTS {
            let (label, ours) = (subject.label(), subject == Forwarder::Fleet);
            for (number, &delay) in DELAYS.iter().enumerate() {
                let (lab, running) = start(subject, &foundation, delay)?;
                for flooded in [false, true] {
                    let place = 2 * number + usize::from(flooded);
                    let (other, local) = load(&lab, duration, flooded, &names, ours)?;
                    answered.push(label, ours, place, other.answered_percent());
                    tails.push(label, ours, place, other.tail());
                    let peak = process::memory(running.pid, "VmHWM")? as f64 / f64::from(1 << 20);
                    memory.push(label, ours, place, peak);
                    let mut line = format!(
                        "{label:<10} {:<34} {:>5.1} % answered, p99 {:>7.1} ms, {peak:>6.1} MiB",
                        places[place],
                        other.answered_percent(),
                        other.tail(),
                    );
                    if ours {
                        ensure!(
                            local.answered == local.sent,
                            "{} of {} names of the fleet",
                            local.answered,
                            local.sent
                        );
                        fleet.push(label, ours, place, local.tail());
                        line.push_str(&format!(", fleet p99 {:.3} ms", local.tail()));
                    }
                    println!("{line}");
                }
            }
        }
    }
    let about = format!(
        "One client queries {FLOOD_RATE} new names per second; another client queries {OTHER_RATE} new names \
         and {OTHER_RATE} names of a fleet of {INSTANCES} instances per second. Both servers have one core \
         and their default limits; the recursor shares that core, and the clients share the other one."
    );
    let figure = |title: &str, unit: &str, sweep| Figure::new(title, about.clone(), unit, Data::Sweep(sweep));
    Ok(vec![
        figure("Flood: forwarded names of another client, answered", "%", answered),
        figure("Flood: forwarded names of another client, p99", "ms", tails),
        figure("Flood: names of the fleet, p99", "ms", fleet),
        figure("Flood: peak of resident memory", "MiB", memory),
        goodput(plan, &foundation, duration)?,
    ])
}

/// Measures how many queries of a single client are answered around its share of waiting queries.
fn goodput(plan: &Plan, foundation: &Foundation, duration: Duration) -> Result<Figure> {
    let places = GOODPUT_RATES.map(|rate| rate.to_string()).to_vec();
    let mut sweep = Sweep::new("queries a second", places, true);
    for _ in 0..plan.rounds {
        for subject in SUBJECTS {
            for (place, rate) in GOODPUT_RATES.into_iter().enumerate() {
                let (lab, _running) = start(subject, foundation, GOODPUT_DELAY)?;
                let names = |number| format!("g{number}.goodput.test.");
                let seen = lab.client.run(|| ask_at_rate(CLIENT_ADDRESS, rate, duration, names))??;
                sweep.push(subject.label(), subject == Forwarder::Fleet, place, seen.answered_percent());
                println!(
                    "{:<10} recursor at 1 s, {rate} queries/s of one client: {:.1} % answered",
                    subject.label(),
                    seen.answered_percent()
                );
            }
        }
    }
    Ok(Figure::new(
        "One client alone, recursor at 1 s: answered",
        "A client that exceeds its share of waiting queries gets answers for its share, and immediate \
         SERVFAIL for the rest.",
        "%",
        Data::Sweep(sweep),
    ))
}

/// Starts a server before a recursor with this delay.
fn start(subject: Forwarder, foundation: &Foundation, delay: Duration) -> Result<(Lab, Running)> {
    let lab = Lab::plain()?;
    lab.client.ip(&["addr", "add", &format!("{FLOODER}/24"), "dev", CLIENT_INTERFACE])?;
    let recursor = SlowRecursor::start(&lab, AUTHORITY, delay)?;
    let running = subject.start_before(&lab, recursor, foundation)?;
    if subject == Forwarder::Fleet {
        wait_for_fast_path(&lab.server)?;
    }
    Ok((lab, running))
}

/// Runs the other client, with the flood or without; returns the results of new names and of names
/// of the fleet.
fn load(
    lab: &Lab,
    duration: Duration,
    flooded: bool,
    names: &[String],
    with_fleet: bool,
) -> Result<(Seen, Seen)> {
    let ended = AtomicBool::new(false);
    let run = format!("{:08x}", fastrand::u32(..));
    let new = |number: usize| format!("o{number}.{run}.test.");
    let listed = |number: usize| names[number % names.len()].clone();
    let panicked = |_| anyhow::anyhow!("a client has panicked");
    let ask = |name: &(dyn Fn(usize) -> String + Sync)| {
        lab.client.run(|| ask_at_rate(CLIENT_ADDRESS, OTHER_RATE, duration, name))
    };
    thread::scope(|scope| {
        let flooding = flooded.then(|| scope.spawn(|| lab.client.run(|| flood(&ended))));
        thread::sleep(if flooded { LEAD } else { Duration::ZERO });
        let other = scope.spawn(|| ask(&new));
        let local = if with_fleet { ask(&listed) } else { Ok(Ok(Seen::default())) };
        let other = other.join();
        ended.store(true, Ordering::Relaxed);
        if let Some(flooding) = flooding {
            let rate = flooding.join().map_err(panicked)???;
            ensure!(rate >= 0.95 * f64::from(FLOOD_RATE), "the generator sent only {rate:.0} queries/s");
        }
        Ok((other.map_err(panicked)???, local??))
    })
}

/// Sends new names until `ended` without reading the replies; returns the queries per second.
fn flood(ended: &AtomicBool) -> Result<f64> {
    stay_on(CLIENT_CPU)?;
    let socket = socket2::Socket::from(UdpSocket::bind((FLOODER, 0))?);
    // The kernel drops the replies.
    socket.set_recv_buffer_size(0)?;
    socket.connect(&SocketAddr::from((SERVER_ADDRESS, 53)).into())?;
    let socket = UdpSocket::from(socket);
    let template = client::query("0000000000000000.flood.test.", RecordType::A, None)?.to_vec()?;
    let started = Instant::now();
    let mut sent: u32 = 0;
    while !ended.load(Ordering::Relaxed) {
        let due = (started.elapsed().as_secs_f64() * f64::from(FLOOD_RATE)) as u32;
        while sent < due {
            let mut query = template.clone();
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

/// Sends queries at a fixed rate, whatever has been answered, and waits for the replies.
fn ask_at_rate(
    from: Ipv4Addr,
    rate: u32,
    duration: Duration,
    name: impl Fn(usize) -> String,
) -> Result<Seen> {
    stay_on(CLIENT_CPU)?;
    let socket = socket2::Socket::from(UdpSocket::bind((from, 0))?);
    socket.set_recv_buffer_size(8 << 20)?;
    socket.connect(&SocketAddr::from((SERVER_ADDRESS, 53)).into())?;
    let socket = UdpSocket::from(socket);
    let total = (duration.as_secs_f64() * f64::from(rate)) as usize;
    let mut seen = Seen::default();
    let mut waiting: HashMap<u16, Instant> = HashMap::new();
    let mut buffer = [0; 4096];
    let started = Instant::now();
    while seen.sent < total || !waiting.is_empty() && started.elapsed() < duration + PATIENCE {
        let next = started + Duration::from_secs_f64(seen.sent as f64 / f64::from(rate));
        let now = Instant::now();
        if seen.sent < total && now >= next {
            let mut query = client::query(&name(seen.sent), RecordType::A, None)?;
            // Ids are in use for at most PATIENCE, and 65,536 last longer at these rates.
            query.metadata.id = seen.sent as u16;
            let query = query.to_vec()?;
            socket.send(&query).context("cannot send")?;
            waiting.insert(seen.sent as u16, Instant::now());
            seen.sent += 1;
            continue;
        }
        let pause = if seen.sent < total { next - now } else { Duration::from_millis(50) };
        socket.set_read_timeout(Some(pause.max(Duration::from_micros(1))))?;
        let Ok(length) = socket.recv(&mut buffer) else { continue };
        let arrived = Instant::now();
        let (Some(&id), Some(&[_, flags, _, _, high, low])) =
            (buffer[..length].first_chunk::<2>(), buffer[2..length.max(8)].first_chunk::<6>())
        else {
            continue;
        };
        let Some(sent) = waiting.remove(&u16::from_be_bytes(id)) else { continue };
        if flags & 15 == 0 && [high, low] != [0, 0] {
            seen.answered += 1;
            seen.latencies.push(arrived - sent);
        }
    }
    Ok(seen)
}
