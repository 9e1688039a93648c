//! The generator sends correct queries, and the server answers all of them.

use std::{
    io::Read as _,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    generator::{FIRST_PORT, Generator, Load, PORTS, Queries, headers_len},
    lab::{CLIENT_ADDRESS, Lab, SERVER_ADDRESS, SERVER_INTERFACE},
};
use dns_load::orders::Counts;
use hickory_proto::{
    op::{Message, MessageType, ResponseCode},
    rr::RecordType,
};
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};
use whole_system_tests::{checksum, client, metrics, process::wait_until, requires, server};

/// EtherType of IPv4 in the byte order of `AF_PACKET` sockets.
const ETH_P_IP: u16 = 0x0800u16.to_be();

#[test]
fn queries_match_stub_resolvers() -> Result<()> {
    let lines = lines(&Foundation::generate(50)?);
    let queries = Queries::of_lines(&lines, None)?;
    for (message, line) in queries.0.iter().zip(&lines) {
        let mut expected = client::query(line.trim_end_matches(" A\n"), RecordType::A, None)?;
        let message = Message::from_vec(message)?;
        expected.metadata.id = message.metadata.id;
        assert_eq!(message, expected, "{line}");
    }
    Ok(())
}

/// Requires valid headers around a query of the lab's client, and returns the message without its id.
fn verify(frame: &[u8], [server, client]: [[u8; 6]; 2]) -> Result<&[u8]> {
    ensure!(frame[..14] == [&server[..], &client, &[8, 0]].concat());
    ensure!(checksum::checksum(&[&frame[14..34]]) == 0, "IPv4 header");
    let length = u16::from_be_bytes([frame[16], frame[17]]);
    ensure!(usize::from(length) == frame.len() - 14, "IPv4 length");
    ensure!(frame[26..34] == [CLIENT_ADDRESS.octets(), SERVER_ADDRESS.octets()].concat());
    let udp_len = frame.len() as u16 - 34;
    let pseudo = checksum::pseudo(CLIENT_ADDRESS.into(), SERVER_ADDRESS.into(), udp_len);
    ensure!(checksum::checksum(&[&pseudo, &frame[34..]]) == 0, "UDP");
    let port = u16::from_be_bytes([frame[34], frame[35]]);
    ensure!((FIRST_PORT..FIRST_PORT + PORTS).contains(&port), "{port}");
    ensure!(frame[36..40] == [53u16.to_be_bytes(), udp_len.to_be_bytes()].concat());
    Ok(&frame[headers_len(CLIENT_ADDRESS.into()) + 2..])
}

#[test]
fn queries_keep_order_and_rate() -> Result<()> {
    requires!(namespaces, bpf);
    /// Queries per second: so few that none is lost unless the server's CPU is unavailable for 128
    /// ms, which fills the ring (observed on a busy machine).
    const RATE: u32 = 2_000;
    let lab = Lab::split()?;
    let queries = Queries::of_lines(&lines(&Foundation::generate(50)?), None)?;
    let hardware = lab.hardware_addresses()?;
    let wire = lab.server.run(|| -> Result<Socket> {
        let socket = Socket::new(
            Domain::PACKET,
            Type::RAW,
            Some(Protocol::from(i32::from(ETH_P_IP))),
        )?;
        socket.set_read_timeout(Some(Duration::from_secs(60)))?;
        // Room for the packets that arrive while there is no CPU; each takes more than a page.
        setsockopt(&socket, sockopt::RcvBufForce, &(4 << 20))?;
        Ok(socket)
    })??;
    let mut generator = Generator::new(&lab, &queries)?;
    let meter = lab.meter(&[])?;
    for burst in [1, 16] {
        // Packets left from the previous load.
        while is_waiting(&wire)? {
            let _ = (&wire).read(&mut [0; 2048])?;
        }
        let (before, lost_before) = (generator.counts()?, meter.lost()?);
        let started = Instant::now();
        let (mut last, mut missing) = (None, 0);
        let counts = generator.during(Load::Rate { rate: RATE, burst }, |counter| {
            for _ in 0..2 * queries.0.len() {
                let mut seen = [0; 2048];
                let length = (&wire).read(&mut seen)?;
                let seen = &seen[..length];
                let message = verify(seen, hardware)?;
                let number = queries
                    .0
                    .iter()
                    .position(|query| &query[2..] == message)
                    .context("an unknown query")?;
                if let Some(last) = last.replace(number) {
                    missing += (number + queries.0.len() - last - 1) % queries.0.len();
                }
            }
            let elapsed = started.elapsed();
            ensure!(
                elapsed.as_secs_f64() >= 2.0 * queries.0.len() as f64 / f64::from(RATE),
                "faster than its rate"
            );
            counter.read()
        })?;
        assert!(counts.sent - before.sent >= 2 * queries.0.len() as u64);
        assert_eq!(
            counts,
            Counts {
                sent: counts.sent,
                skipped: counts.skipped,
                stalled: counts.stalled,
                ..Counts::default()
            }
        );
        let lost = meter.lost()? - lost_before;
        assert!(
            missing as u64 <= lost,
            "{missing} queries left out of their order, {lost} without room"
        );
    }
    Ok(())
}

#[test]
fn queries_are_answered_and_counted() -> Result<()> {
    requires!(namespaces, bpf);
    /// Queries per second: the ring's 256 slots bridge 50 ms without CPU.
    const RATE: u32 = 5_000;
    let foundation = Foundation::generate(200)?;
    // The second load of each mode is by IPv6 and with EDNS. At XDP, long replies do not fit behind frames of sockets.
    let loads = [
        ("tc", None, Lab::split as fn() -> Result<Lab>),
        ("tc", Some(1232), || Lab::split()?.over_ipv6()),
        ("tc", None, || Ok(Lab::split()?.with_small_tailroom())),
        ("native", None, Lab::split),
        ("native", Some(1232), || Lab::split()?.over_ipv6()),
        ("off", None, Lab::split),
        ("off", Some(1232), || Lab::split()?.over_ipv6()),
    ];
    for (mode, edns, new_lab) in loads {
        let lab = new_lab()?;
        let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
        let extra = json!({
            "xdp": {"mode": mode, "interfaces": [SERVER_INTERFACE]},
            "metrics": {"enabled": true},
        });
        let address = lab.endpoint();
        let _server = server::Server::start(Some(&lab.server), folder, address, &extra)?;
        if mode != "off" {
            metrics::wait_for_fast_path(&lab.server)?;
        }
        let queries = Queries::of_lines(&lines(&foundation), edns)?;
        let mut generator = Generator::new(&lab, &queries)?;
        // The generator's program on the client's end passes replies to other sockets.
        lab.client
            .run(|| answered_right(&foundation, &queries, address))??;
        let meter = lab.meter(&[])?;
        let [before, lost_before, lost_replies_before] =
            [meter.replies()?, meter.lost()?, meter.lost_replies()?];
        let metrics_before = metrics::Metrics::read(&lab.server)?;
        let loaded = generator.during(
            Load::Rate {
                rate: RATE,
                burst: 16,
            },
            |counter| {
                wait_until("every query", Duration::from_secs(60), || {
                    counter
                        .read()
                        .is_ok_and(|counts| counts.no_error() > 3 * queries.0.len() as u64)
                })
            },
        );
        loaded.with_context(|| mode.to_owned())?;
        // Replies pending at the end of the load; none may be missing except for lack of room.
        let lost = || -> Result<[u64; 2]> {
            Ok([
                meter.lost()? - lost_before,
                meter.lost_replies()? - lost_replies_before,
            ])
        };
        let all = || {
            let (Ok(counts), Ok(lost)) = (generator.counts(), lost()) else {
                return false;
            };
            // Other packets, such as neighbour discovery, are lost as well.
            counts.no_error() + lost.iter().sum::<u64>() >= counts.sent
        };
        wait_until("the last replies", Duration::from_secs(5), all)
            .with_context(|| format!("{mode}: {:?}, lost: {:?}", generator.counts(), lost()))?;
        let counts = generator.counts()?;
        assert_eq!(counts.received(), counts.no_error(), "{mode}");
        let answered = counts.no_error() + lost()?[1];
        assert!(
            meter.replies()? - before >= answered,
            "{mode}: others than replies are few"
        );
        let metrics = metrics::Metrics::read(&lab.server)?;
        let by_interface = metrics.fast_path_replies() - metrics_before.fast_path_replies();
        // Userspace answers one query per second, as a probe, and replies without room at XDP.
        let expected = if mode == "off" {
            0..=0
        } else {
            answered * 98 / 100..=answered
        };
        assert!(
            expected.contains(&by_interface),
            "{mode}: {by_interface} of {answered}"
        );
    }
    Ok(())
}

#[test]
fn error_replies_are_counted_separately() -> Result<()> {
    requires!(namespaces, bpf);
    let foundation = Foundation::generate(10)?;
    let lab = Lab::split()?;
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let address = SocketAddr::from((SERVER_ADDRESS, 53));
    let extra = json!({"xdp": {"mode": "off"}});
    let _server = server::Server::start(Some(&lab.server), folder, address, &extra)?;
    let queries = Queries::of_lines(&["no-such-instance.bosh. A\n".to_owned()], None)?;
    let mut generator = Generator::new(&lab, &queries)?;
    generator.during(
        Load::Rate {
            rate: 100,
            burst: 1,
        },
        |counter| {
            wait_until("a reply", Duration::from_secs(5), || {
                counter.read().is_ok_and(|counts| counts.received() > 0)
            })
        },
    )?;
    assert_eq!(generator.counts()?.no_error(), 0);
    Ok(())
}

/// Returns queries of type A for every name with IPv4 addresses.
fn lines(foundation: &Foundation) -> Vec<String> {
    foundation
        .entries(usize::MAX)
        .iter()
        .map(|(name, _)| format!("{name} A\n"))
        .collect()
}

/// Sends each query from a socket and compares the answer with the foundation.
fn answered_right(foundation: &Foundation, queries: &Queries, server: SocketAddr) -> Result<()> {
    for (query, (name, expected)) in queries.0.iter().zip(foundation.entries(usize::MAX)) {
        let reply = client::ask_raw(server, query, Duration::from_secs(5))?;
        let reply = Message::from_vec(&reply)?;
        ensure!(
            reply.metadata.message_type == MessageType::Response,
            "{name}"
        );
        ensure!(
            reply.metadata.response_code == ResponseCode::NoError,
            "{name}"
        );
        let mut expected: Vec<std::net::IpAddr> = expected.into_iter().map(Into::into).collect();
        expected.sort();
        let found = client::addresses(&reply);
        if reply.metadata.truncation {
            ensure!(
                !found.is_empty() && found.iter().all(|one| expected.contains(one)),
                "{name}"
            );
        } else {
            ensure!(found == expected, "{name}: {found:?}, not {expected:?}");
        }
    }
    Ok(())
}

/// Returns whether the socket has data to read, after a pause for packets on their way.
fn is_waiting(socket: &Socket) -> Result<bool> {
    thread::sleep(Duration::from_millis(1));
    socket.set_nonblocking(true)?;
    let peeked = socket.peek(&mut [std::mem::MaybeUninit::uninit(); 1]);
    socket.set_nonblocking(false)?;
    match peeked {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error.into()),
    }
}
