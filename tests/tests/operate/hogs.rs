//! Clients that exhaust resources: TCP connections, connections to the metrics port.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use serde_json::json;
use whole_system_tests::{
    client,
    pair::Pair,
    requires,
    server::{self, Server},
};

use crate::running::{METRICS_PORT, RECORDS};

/// Listen address of the server.
const OURS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)), 53);

/// Longer than the server runs with failing self-checks.
const LONG: Duration = Duration::from_secs(34);

/// The server, and a neighbouring machine with two addresses.
struct Lab {
    server: Server,
    pair: Pair,
}

impl Lab {
    /// Starts the server with a limit on open files.
    fn start(label: &str, descriptors: u64) -> Result<Self> {
        let theirs = ["10.9.0.2/24", "10.9.0.3/24"];
        let pair = Pair::joined(label, ("in0", &["10.9.0.1/24"]), ("out0", &theirs))?;
        let recursor = json!(["10.9.0.2:5300"]);
        let settings = json!({
            "xdp": {"mode": "off"}, "metrics": {"enabled": true}, "disable_recursors": false,
            "recursors": recursor,
        });
        let folder = server::folder(RECORDS.as_bytes(), None)?;
        let server =
            Server::start_prepared(Some(&pair.server), folder, OURS, &settings, |command| {
                use std::os::unix::process::CommandExt;
                // SAFETY: setrlimit is a plain system call, allowed between fork and exec.
                unsafe {
                    command.pre_exec(move || {
                        let limit = nix::sys::resource::Resource::RLIMIT_NOFILE;
                        Ok(nix::sys::resource::setrlimit(
                            limit,
                            descriptors,
                            descriptors,
                        )?)
                    });
                }
            })?;
        Ok(Self { server, pair })
    }

    /// Queries by UDP and TCP from an otherwise unused address; returns the number of replies by
    /// transport.
    fn answered(&self, questions: u32) -> Result<[u32; 2]> {
        let query = client::query("q-s0.q-g1.bosh.", RecordType::A, None)?;
        self.pair.client.run(|| {
            let mut answered = [0; 2];
            for _ in 0..questions {
                let good = |reply: &hickory_proto::op::Message| {
                    reply.metadata.response_code == ResponseCode::NoError
                        && !reply.answers.is_empty()
                };
                answered[0] += u32::from(client::ask(OURS, &query).is_ok_and(|reply| good(&reply)));
                answered[1] +=
                    u32::from(ask_from([10, 9, 0, 3], &query).is_ok_and(|reply| good(&reply)));
            }
            answered
        })
    }
}

/// Queries by TCP from an address.
fn ask_from(
    from: [u8; 4],
    query: &hickory_proto::op::Message,
) -> Result<hickory_proto::op::Message> {
    let mut stream = connect_from(from, OURS, Duration::from_secs(120))?;
    let message = query.to_vec()?;
    stream.write_all(&[&(message.len() as u16).to_be_bytes()[..], &message].concat())?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut reply = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut reply)?;
    Ok(hickory_proto::op::Message::from_vec(&reply)?)
}

/// Connects from an address; `timeout` applies to each operation.
fn connect_from(from: [u8; 4], to: SocketAddr, timeout: Duration) -> Result<TcpStream> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((from, 0)).into())?;
    socket.connect_timeout(&to.into(), timeout)?;
    socket.set_read_timeout(Some(timeout))?;
    socket.set_write_timeout(Some(timeout))?;
    Ok(socket.into())
}

/// Raises the open file limit of this process, which plays 1,200 clients.
fn many_descriptors() -> Result<()> {
    let limit = nix::sys::resource::Resource::RLIMIT_NOFILE;
    let (_, hard) = nix::sys::resource::getrlimit(limit)?;
    Ok(nix::sys::resource::setrlimit(limit, hard, hard)?)
}

/// Keeps 1,200 connections from one address, with a query per second on each; closed connections
/// are reopened.
fn hog(ended: &AtomicBool) -> Result<()> {
    let message = client::query("q-s0.q-g1.bosh.", RecordType::A, None)?.to_vec()?;
    let frame = [&(message.len() as u16).to_be_bytes()[..], &message].concat();
    let mut hogs: Vec<TcpStream> = Vec::new();
    while !ended.load(Ordering::Relaxed) {
        hogs.retain_mut(|stream| {
            let _ = stream.set_nonblocking(true);
            // Replies are discarded; only the end of the connection matters.
            let open = loop {
                match stream.read(&mut [0; 4096]) {
                    Ok(0) => break false,
                    Ok(_) => {}
                    Err(error) => break error.kind() == std::io::ErrorKind::WouldBlock,
                }
            };
            open && stream.write_all(&frame).is_ok()
        });
        let missing = 1200 - hogs.len();
        let connect = || connect_from([10, 9, 0, 2], OURS, Duration::from_secs(2));
        hogs.extend((0..missing).map_while(|_| connect().ok()));
        std::thread::sleep(Duration::from_secs(1));
    }
    Ok(())
}

#[test]
fn busy_client_starves_no_client() -> Result<()> {
    requires!(namespaces);
    many_descriptors()?;
    let mut lab = Lab::start("hogs", 4096)?;
    let ended = AtomicBool::new(false);
    let begun = Instant::now();
    let (mut asked, mut answered) = (0, [0; 2]);
    std::thread::scope(|scope| -> Result<()> {
        let theirs = &lab.pair.client;
        let hogging = scope.spawn(|| theirs.run(|| hog(&ended)));
        let mut asking = || -> Result<()> {
            while begun.elapsed() < LONG {
                let [udp, tcp] = lab.answered(1)?;
                asked += 1;
                answered = [answered[0] + udp, answered[1] + tcp];
                std::thread::sleep(Duration::from_millis(200));
            }
            Ok(())
        };
        let result = asking();
        ended.store(true, Ordering::Relaxed);
        let hogged = hogging.join();
        ensure!(
            hogged.is_ok_and(|hogged| matches!(hogged, Ok(Ok(())))),
            "the hogs ended early"
        );
        result
    })?;
    ensure!(
        lab.server.process().ended()?.is_none(),
        "the server ended:\n{}",
        lab.server.log()
    );
    ensure!(
        answered == [asked; 2],
        "of {asked} by UDP and TCP {answered:?} were answered"
    );
    let metrics = whole_system_tests::metrics::Metrics::read(&lab.pair.server)?;
    ensure!(
        metrics.sum("bosh_dns_xdp_tcp_closed_for_others_total", "") > 0,
        "nothing was closed"
    );
    // A busy machine may be late for one round of up-checks.
    ensure!(
        lab.server.log().matches("up-checks fail").count() <= 1,
        "{}",
        lab.server.log()
    );
    Ok(())
}

#[test]
fn idle_metrics_connections_spare_dns() -> Result<()> {
    requires!(namespaces);
    many_descriptors()?;
    let mut lab = Lab::start("idle", 1024)?;
    // Names outside the fleet are answered by a recursor.
    let recursor = lab
        .pair
        .client
        .run(|| std::net::UdpSocket::bind("10.9.0.2:5300"))??;
    recursor.set_read_timeout(Some(Duration::from_millis(100)))?;
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        scope.spawn(|| {
            let mut buffer = [0; 4096];
            while !ended.load(Ordering::Relaxed) {
                let Ok((length, client)) = recursor.recv_from(&mut buffer) else {
                    continue;
                };
                // NOERROR without data, RA set.
                buffer[2] |= 0x80;
                buffer[3] = 0x80;
                let _ = recursor.send_to(&buffer[..length], client);
            }
        });
        let result = hold_metrics_port(&mut lab);
        ended.store(true, Ordering::Relaxed);
        result
    })
}

/// Holds 1,100 idle connections to the metrics port and queries the server meanwhile.
fn hold_metrics_port(lab: &mut Lab) -> Result<()> {
    let port = SocketAddr::from(([127, 0, 0, 1], METRICS_PORT));
    let forwarded = client::query("outside.test.", RecordType::A, None)?;
    let begun = Instant::now();
    let mut idle = Vec::new();
    let (mut asked, mut local, mut upstream) = (0, [0; 2], 0);
    while begun.elapsed() < LONG {
        lab.pair.server.run(|| {
            idle.retain(|stream: &TcpStream| {
                let _ = stream.set_nonblocking(true);
                stream
                    .peek(&mut [0])
                    .is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
            });
            let missing = 1100 - idle.len();
            let wait = Duration::from_millis(200);
            idle.extend((0..missing).map_while(|_| TcpStream::connect_timeout(&port, wait).ok()));
        })?;
        let [udp, tcp] = lab.answered(1)?;
        let reply = lab.pair.client.run(|| client::ask(OURS, &forwarded))?;
        upstream += u32::from(
            reply.is_ok_and(|reply| reply.metadata.response_code == ResponseCode::NoError),
        );
        asked += 1;
        local = [local[0] + udp, local[1] + tcp];
        ensure!(
            lab.server.process().ended()?.is_none(),
            "the server ended:\n{}",
            lab.server.log()
        );
        std::thread::sleep(Duration::from_millis(500));
    }
    ensure!(
        (local, upstream) == ([asked; 2], asked),
        "of {asked}: UDP and TCP {local:?}, forwarded {upstream}:\n{}",
        lab.server.log()
    );
    // Prometheus can also connect.
    drop(idle);
    whole_system_tests::metrics::wait_for_metrics(&lab.pair.server)
}
