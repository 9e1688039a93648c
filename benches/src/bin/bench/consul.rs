//! Measures one large Consul service: this server, by interface and in userspace, and other servers
//! with the same records as static data.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use bosh_dns_xdp_benches::{
    dnsperf::{Load, percentile},
    lab::{CLIENT_CPU, Lab, SERVER_ADDRESS, SERVER_CPU, SERVER_INTERFACE},
    peers::{Names, Peer},
    report::{Data, Figure, Sweep, number},
};
use hickory_proto::{op::Message, rr::RecordType};
use serde_json::json;
use whole_system_tests::{
    client,
    cpu::on_cpu,
    metrics::{Metrics, wait_for_fast_path},
    process::wait_until,
    server::{self, Server},
};

use crate::{Plan, queries::Queries, subject::Subject};

/// Sizes of the service in instances: one that a user reported, and a large one.
const SIZES: [usize; 2] = [1_300, 5_000];

const NAME: &str = "web.service.consul.";

const SERVER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(SERVER_ADDRESS), 53);

/// Transport of the queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    /// Datagrams, sent by dnsperf.
    Udp,
    /// Connections, served by threads of this program, because dnsperf reads no replies above 16
    /// KiB.
    Tcp,
}

/// The queries and their transports.
const QUESTIONS: [(&str, RecordType, Transport); 4] = [
    ("A, UDP", RecordType::A, Transport::Udp),
    ("SRV, UDP", RecordType::SRV, Transport::Udp),
    ("A, TCP", RecordType::A, Transport::Tcp),
    ("SRV, TCP", RecordType::SRV, Transport::Tcp),
];

/// Duration of the warm-up.
const WARM_UP: Duration = Duration::from_millis(300);

/// Figures of each subject for each question.
const FIGURES: [(&str, &str, &str); 5] = [
    (
        "answers a second",
        "answers/s",
        "As many as one core of the server answers: over UDP with 200 queries in flight, over TCP with 8 \
         connections of one query each.",
    ),
    ("CPU of an answer", "µs", "CPU time of the server's side, at that rate."),
    ("latency, p50", "µs", "One client with one query at a time."),
    ("latency, p99", "µs", "One client with one query at a time."),
    (
        "records per answer",
        "records",
        "In the answer section: Consul's rules allow 3 over UDP without EDNS, at most 4,096 A or 1,024 SRV \
         over TCP, and no more than 64 KB; if not all fit, other servers set TC, with or without some of \
         them.",
    ),
];

const SUBJECTS: [Subject; 4] =
    [Subject::Ours("tc"), Subject::Userspace, Subject::Peer(Peer::Knot), Subject::Peer(Peer::Unbound)];

/// Connections that send queries concurrently.
const CONNECTIONS: usize = 8;

/// Results of a load.
struct Seen {
    completed: u64,
    rate: f64,
    /// Latencies of the queries.
    latencies: Vec<Duration>,
}

/// A running subject; dropped before its lab.
struct Town {
    /// Processes whose CPU time counts.
    processes: Vec<u32>,
    /// Resources that must live as long as the subject.
    _kept: Box<dyn std::any::Any>,
    lab: Lab,
}

/// Rates, costs, latencies and sizes of answers, by size of the service.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for size in SIZES {
        figures.extend(of_size(plan, size)?);
    }
    Ok(figures)
}

/// Returns the figures for a service of `instances` instances.
fn of_size(plan: &Plan, size: usize) -> Result<Vec<Figure>> {
    let places: Vec<String> = QUESTIONS.iter().map(|(label, ..)| (*label).to_owned()).collect();
    let mut sweeps = FIGURES.map(|_| Sweep::new("question", places.clone(), false));
    for _ in 0..plan.sweep_rounds {
        for subject in &SUBJECTS {
            let town = Town::start(subject, size).with_context(|| subject.label())?;
            for (place, question) in QUESTIONS.iter().enumerate() {
                let values = town.measure(plan, question)?;
                let shown: Vec<String> = values.iter().map(|&value| number(value)).collect();
                println!("{size:>5} {:<22} {:<9} {}", subject.label(), question.0, shown.join("  "));
                for (sweep, value) in sweeps.iter_mut().zip(values) {
                    sweep.push(&subject.label(), subject.is_ours(), place, value);
                }
            }
        }
    }
    let figure = |(sweep, (title, unit, about)): (Sweep, (&str, &str, &str))| {
        let title = format!("Consul's names, {} instances of one service: {title}", number(size as f64));
        Figure::new(title, about, unit, Data::Sweep(sweep))
    };
    Ok(sweeps.into_iter().zip(FIGURES).map(figure).collect())
}

/// Returns name and address of an instance's node.
fn node(number: usize) -> (String, Ipv4Addr) {
    (format!("n{number}"), Ipv4Addr::from(0x0a00_0000 + 257 + number as u32))
}

impl Town {
    /// Starts a subject with a service of `instances` instances.
    fn start(subject: &Subject, size: usize) -> Result<Self> {
        let lab = Lab::split()?;
        let (processes, kept): (Vec<u32>, Box<dyn std::any::Any>) = match subject {
            Subject::Peer(peer) => {
                let host = |name: &str| format!("{name}.node.dc1.consul.");
                let addresses = (0..size).map(|number| node(number).1).collect();
                // The readiness check queries the first name, which has a small answer.
                let nodes = (0..size).map(node).map(|(name, address)| (host(&name), vec![address]));
                let mut entries: Vec<_> = nodes.collect();
                entries.push((NAME.to_owned(), addresses));
                let services = (0..size).map(|number| (8000, host(&node(number).0))).collect();
                let names = Names {
                    zones: &["consul."],
                    entries: &entries,
                    services: &[(NAME.to_owned(), services)],
                };
                let running = peer.start_with(&lab, &names)?;
                (running.processes()?, Box::new(running))
            }
            Subject::Ours(mode) => start_ours(&lab, mode, size)?,
            _ => start_ours(&lab, "off", size)?,
        };
        lab.pin_napi()?;
        Ok(Self { processes, _kept: kept, lab })
    }

    /// Returns the values of [`FIGURES`] for a question.
    fn measure(
        &self,
        plan: &Plan,
        &(_, kind, transport): &(&str, RecordType, Transport),
    ) -> Result<[f64; 5]> {
        let load = |duration, one_at_a_time| self.load(kind, transport, duration, one_at_a_time);
        load(WARM_UP, false)?;
        let meter = self.lab.meter(&self.processes)?;
        let before = meter.cpu()?;
        let many = load(plan.sweep_duration, false)?;
        let cpu = meter.cpu()? - before;
        let single = load(plan.sweep_duration, true)?;
        let within = |share| percentile(&single.latencies, share).unwrap_or_default().as_secs_f64() * 1e6;
        let answers = self.answers(kind, transport)?;
        let cost = cpu.as_secs_f64() * 1e6 / many.completed.max(1) as f64;
        Ok([many.rate, cost, within(0.5), within(0.99), answers as f64])
    }

    /// Sends as many queries as possible, or one after the other.
    fn load(
        &self,
        kind: RecordType,
        transport: Transport,
        duration: Duration,
        one_at_a_time: bool,
    ) -> Result<Seen> {
        if transport == Transport::Tcp {
            return self.load_by_tcp(kind, duration, if one_at_a_time { 1 } else { CONNECTIONS });
        }
        let queries = Queries::write(&[format!("{NAME} {kind}\n")])?;
        let load = Load { percentiles: one_at_a_time, one_at_a_time, ..Load::new(&queries.path, duration) };
        let seen = load.run(&self.lab.client_launcher())?;
        Ok(Seen { completed: seen.completed, rate: seen.rate, latencies: seen.latencies })
    }

    /// Queries on several connections, one query after the other on each.
    fn load_by_tcp(&self, kind: RecordType, duration: Duration, connections: usize) -> Result<Seen> {
        let query = client::query(NAME, kind, None)?.to_vec()?;
        let frame = [&u16::try_from(query.len())?.to_be_bytes()[..], &query].concat();
        let connect = || -> Result<TcpStream> {
            let stream = TcpStream::connect(SERVER)?;
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        let exchange = |stream: &mut TcpStream, reply: &mut Vec<u8>| -> std::io::Result<()> {
            stream.write_all(&frame)?;
            let mut length = [0; 2];
            stream.read_exact(&mut length)?;
            reply.resize(usize::from(u16::from_be_bytes(length)), 0);
            stream.read_exact(reply)
        };
        let ask = || -> Result<Vec<Duration>> {
            let (mut stream, mut latencies, mut reply) = (connect()?, Vec::new(), Vec::new());
            let begun = Instant::now();
            while begun.elapsed() < duration {
                let sent = Instant::now();
                match exchange(&mut stream, &mut reply) {
                    Ok(()) => latencies.push(sent.elapsed()),
                    // A server may close a connection after some replies: reconnect.
                    Err(_) => stream = connect()?,
                }
            }
            Ok(latencies)
        };
        let ask_all = || {
            thread::scope(|scope| {
                let asking: Vec<_> = (0..connections).map(|_| scope.spawn(ask)).collect();
                let joined = asking.into_iter().map(|thread| thread.join());
                joined.map(|seen| seen.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
            })
        };
        let begun = Instant::now();
        let all: Vec<Vec<Duration>> = self.lab.client.run(|| on_cpu(CLIENT_CPU, ask_all))??;
        let rate = all.iter().map(Vec::len).sum::<usize>() as f64 / begun.elapsed().as_secs_f64();
        let latencies = all.concat();
        Ok(Seen { completed: latencies.len() as u64, rate, latencies })
    }

    /// Number of records per answer.
    fn answers(&self, kind: RecordType, transport: Transport) -> Result<usize> {
        let query = client::query(NAME, kind, None)?.to_vec()?;
        let reply = self.lab.client.run(|| match transport {
            Transport::Udp => client::ask_raw(SERVER, &query, Duration::from_secs(2)).map_err(Into::into),
            Transport::Tcp => client::ask_tcp_raw(SERVER, &query),
        })??;
        Ok(Message::from_vec(&reply)?.answers.len())
    }
}

/// This server in a mode of the fast path, with its processes and the resources it needs.
fn start_ours(lab: &Lab, mode: &str, size: usize) -> Result<(Vec<u32>, Box<dyn std::any::Any>)> {
    let folder = server::folder(&server::records_of_groups(&[1]), None)?;
    let catalog = folder.path().join("catalog.json");
    let nodes = (0..size).map(node).map(|(name, address)| json!({"node": name, "address": address}));
    let services = (0..size).map(node).map(|(name, _)| json!({"node": name, "service": "web", "port": 8000}));
    let definitions = json!({"nodes": nodes.collect::<Vec<_>>(), "services": services.collect::<Vec<_>>()});
    fs::write(&catalog, definitions.to_string())?;
    let extra = json!({
        "log_level": "WARN",
        "metrics": {"enabled": true},
        "xdp": {"mode": mode, "interfaces": [SERVER_INTERFACE]},
        "consul": {"sources": {"files": [catalog]}},
    });
    // One worker for one CPU, as configured for the peers.
    let server = on_cpu(SERVER_CPU, || Server::start(Some(&lab.server), folder, SERVER, &extra))?;
    if mode != "off" {
        wait_for_fast_path(&lab.server)?;
        // Learned at the first query.
        let query = client::query(NAME, RecordType::A, None)?.to_vec()?;
        let ask = || client::ask_raw(SERVER, &query, Duration::from_secs(2)).is_ok();
        wait_until("an answer by the interface", Duration::from_secs(20), || {
            lab.client.run(ask).unwrap_or(false)
                && Metrics::read(&lab.server).is_ok_and(|metrics| metrics.fast_path_replies() > 0)
        })?;
    }
    Ok((vec![server.pid()], Box::new(server)))
}
