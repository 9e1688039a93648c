//! Waiting queries are limited per client: a flood is refused without affecting other clients.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use serde_json::json;
use whole_system_tests::{
    client,
    namespace::Namespace,
    process::{memory, wait_until},
    requires,
};

use super::{
    lab::{LOCAL_NAME, Lab, OURS, RECORDS, ensure_code, loopback},
    scripted::{Say, Scripted},
};

/// A client's share of the waiting queries.
const SHARE: usize = 4096;
/// Number of queries in the flood, well above the share.
const FLOOD: u16 = 6000;

#[test]
fn flood_is_limited_per_client() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("bound")?;
    let silent = Scripted::silent(&namespace, loopback(10))?;
    let handler = Scripted::start(&namespace, loopback(11), |asked| {
        vec![Say::from(asked.answer(Ipv4Addr::new(192, 0, 2, 1), 300))]
    })?;
    let extra = json!({
        "recursor_timeout": "15s", "request_timeout": "60s",
        "handlers": [{"domain": "healthy.", "source": {"type": "dns", "recursors": [loopback(11)]}}],
    });
    let lab = Lab::start(&namespace, &[loopback(10)], &extra)?;
    let refused_at_once = namespace.run(|| -> Result<usize> {
        let socket = socket2::Socket::from(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?);
        socket.set_recv_buffer_size(4 << 20)?;
        let socket = UdpSocket::from(socket);
        socket.connect(OURS)?;
        for number in 0..FLOOD {
            let mut query = client::query(&format!("n{number}.test."), RecordType::A, None)?;
            query.metadata.id = number;
            socket.send(&query.to_vec()?)?;
            if number % 50 == 0 {
                // Paced so that the server's socket loses no datagram, which would distort the
                // counts below.
                thread::sleep(Duration::from_millis(3));
            }
        }
        // Fleet names, a healthy handler and another client are unaffected.
        for name in [LOCAL_NAME, "www.healthy."] {
            let reply = client::ask(OURS, &client::query(name, RecordType::A, None)?)?;
            ensure_code(&reply, ResponseCode::NoError)?;
        }
        let before = silent.count();
        let other = UdpSocket::bind((IpAddr::from([127, 0, 0, 3]), 0))?;
        for number in 0..100 {
            let query = client::query(&format!("o{number}.test."), RecordType::A, None)?;
            other.send_to(&query.to_vec()?, OURS)?;
        }
        while silent.count() < before + 100 {
            thread::sleep(Duration::from_millis(5));
        }
        socket.set_read_timeout(Some(Duration::from_secs(120)))?;
        let mut buffer = [0; 512];
        let mut refused = 0;
        for count in 0..FLOOD {
            let length = socket
                .recv(&mut buffer)
                .with_context(|| format!("after {count} answers"))?;
            let reply = Message::from_vec(&buffer[..length])?;
            ensure_code(&reply, ResponseCode::ServFail)?;
            // The earliest queries keep waiting; later ones do not displace them.
            refused += usize::from(usize::from(reply.metadata.id) >= SHARE);
        }
        Ok(refused)
    })??;
    ensure!(
        refused_at_once == usize::from(FLOOD) - SHARE,
        "{refused_at_once} of the flood were late"
    );
    let refused = lab.metric("bosh_dns_xdp_refused_queries_total", "handler=\"\"")? as usize;
    ensure!(
        refused == usize::from(FLOOD) - SHARE,
        "{refused} were refused"
    );
    let by_reason = lab.metric(
        "bosh_dns_xdp_overload_queries_total",
        "reason=\"recursors\"",
    )? as usize;
    ensure!(
        by_reason == refused,
        "{by_reason} of {refused} refusals are counted by reason"
    );
    let limited = "bosh_dns_xdp_limited_client_refusals";
    let of_client = lab.metric(limited, "budget=\"recursors\",client=\"127.0.0.1\"")? as usize;
    ensure!(of_client == refused, "{of_client} refusals of the client");
    ensure!(
        lab.metric(limited, "127.0.0.3")? == 0,
        "the other client is not limited"
    );
    let forwarded = silent.count_with_edns();
    ensure!(forwarded == SHARE + 100, "{forwarded} were forwarded");
    ensure!(
        handler.count() == 1 && RECORDS.contains("10.0.0.1"),
        "the handler was queried once"
    );
    Ok(())
}

#[test]
fn silent_recursors_spare_handlers() -> Result<()> {
    /// Datagrams per burst and pause between bursts of the flood.
    const BURST: (usize, Duration) = (24, Duration::from_millis(3));
    requires!(namespaces);
    let namespace = Namespace::new("silent")?;
    let recursors: Vec<SocketAddr> = (10..14).map(loopback).collect();
    let _silent = recursors
        .iter()
        .map(|&at| Scripted::silent(&namespace, at))
        .collect::<Result<Vec<_>>>()?;
    let healthy = loopback(20);
    let handler = Scripted::answering(&namespace, healthy, Ipv4Addr::new(192, 0, 2, 1))?;
    // bosh-dns's default timeout, because the flood must exceed the slots of the whole server.
    let extra = json!({
        "recursor_timeout": "2s",
        "handlers": [{"domain": "healthy.", "source": {"type": "dns", "recursors": [healthy]}}],
    });
    let lab = Lab::start(&namespace, &recursors, &extra)?;
    let ended = AtomicBool::new(false);
    let sent = thread::scope(|scope| -> Result<usize> {
        let flooding = scope.spawn(|| {
            namespace.run(|| -> Result<usize> {
                // Eight clients, each with its own share.
                let sockets = (1..=8)
                    .map(|last| UdpSocket::bind((Ipv4Addr::new(127, 0, 1, last), 0)))
                    .collect::<std::io::Result<Vec<_>>>()?;
                let mut sent = 0;
                while !ended.load(Ordering::Relaxed) {
                    for _ in 0..BURST.0 {
                        let query = client::query(&format!("f{sent}.test."), RecordType::A, None)?;
                        sockets[sent % sockets.len()].send_to(&query.to_vec()?, OURS)?;
                        sent += 1;
                    }
                    thread::sleep(BURST.1);
                }
                Ok(sent)
            })?
        });
        let asking = || -> Result<()> {
            wait_until("refusals", Duration::from_secs(120), || {
                lab.metric("bosh_dns_xdp_refused_queries_total", "handler=\"\"")
                    .is_ok_and(|count| count > 1000)
            })?;
            for number in 0..100 {
                // The socket of a server on a busy machine may overflow; stub resolvers ask again as well.
                let name = format!("n{number}.healthy.");
                let reply = (0..5).find_map(|_| lab.ask_for(&name, RecordType::A).ok());
                let reply = reply.with_context(|| format!("{name}: no reply"))?;
                ensure!(
                    reply.metadata.response_code == ResponseCode::NoError,
                    "{number}: {reply}"
                );
            }
            Ok(())
        };
        let asked = asking();
        ended.store(true, Ordering::Relaxed);
        let sent = flooding.join().expect("no panic");
        asked.and(sent)
    })?;
    ensure!(
        handler.count() >= 100 && sent > 2 * SHARE,
        "{} of 100, {sent} in the flood",
        handler.count()
    );
    let peak = memory(lab.server.pid(), "VmHWM")?;
    ensure!(peak < 128 << 20, "{} MiB under the flood", peak >> 20);
    Ok(())
}
