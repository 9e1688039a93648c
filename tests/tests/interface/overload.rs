//! More queries than userspace can answer: the interface sheds some of them, and names answered at
//! the interface are unaffected.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use dns_kit::metrics::names::FAST_PATH_PACKETS_TOTAL;
use hickory_proto::{
    op::Message,
    rr::{DNSClass, RecordType},
};
use serde_json::json;
use whole_system_tests::{
    bpffs::Bpffs,
    client,
    cpu::on_cpu,
    fleet,
    metrics::{Metrics, wait_for_fast_path},
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

/// Listen address of the server.
const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

/// A name answered at the interface.
const HOT: &str = "q-s0.q-g1.bosh.";

/// CPU of the server's only UDP thread.
const CPU: usize = 0;

/// Maximum datagrams sent by one client of the flood.
const MOST_SENT: u32 = 20_000_000;

/// Generous time limit for a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns records.json of one group with eight instances.
fn records() -> Vec<u8> {
    fleet::records(1, (1..=8).map(|last| (1, [10, 0, 0, last])))
}

/// Returns the number of packets shed so far.
fn shed() -> Result<u64> {
    Ok(Metrics::here()?.sum(FAST_PATH_PACKETS_TOTAL, "outcome=\"shed\""))
}

/// Returns a query that only userspace answers.
fn passed_up() -> Result<Message> {
    let mut query = client::query(HOT, RecordType::A, None)?;
    query.queries[0].set_query_class(DNSClass::ANY);
    Ok(query)
}

/// Sends queries that are always passed up, from a separate address, without reading replies.
fn flood(done: &AtomicBool) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::new(127, 0, 0, 66), 0))?;
    socket.connect(ADDRESS)?;
    let query = passed_up()?.to_vec()?;
    let mut sent = 0;
    while !done.load(Ordering::Relaxed) && sent < MOST_SENT {
        // A full receive queue, since no reply is read, is not an error of the sender.
        let _ = socket.send(&query);
        sent += 1;
    }
    Ok(())
}

/// Sends consecutive queries for a name answered at the interface; returns how many, and how many of them
/// got no reply.
fn ask_for_hot_name(done: &AtomicBool) -> Result<[u64; 2]> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.connect(ADDRESS)?;
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    let (mut buffer, mut asked, mut lost) = ([0; 4096], 0, 0);
    while !done.load(Ordering::Relaxed) {
        let query = client::query(HOT, RecordType::A, None)?;
        socket.send(&query.to_vec()?)?;
        asked += 1;
        // The reply to an earlier query may be late.
        let id = query.metadata.id;
        let reply = std::iter::from_fn(|| {
            socket
                .recv(&mut buffer)
                .ok()
                .map(|len| Message::from_vec(&buffer[..len]))
        })
        .find(|reply| reply.as_ref().map_or(true, |reply| reply.metadata.id == id));
        match reply.transpose()? {
            Some(reply) => ensure!(client::addresses(&reply).len() == 8, "{reply}"),
            None => lost += 1,
        }
    }
    Ok([asked, lost])
}

#[test]
fn overload_spares_hot_names() -> Result<()> {
    requires!(namespaces, bpf);
    let (namespace, bpffs) = (Namespace::new("overload")?, Bpffs::new()?);
    let settings = json!({
        "metrics": {"enabled": true},
        "xdp": {"interfaces": ["lo"], "bpffs": bpffs.path()},
    });
    let start = || {
        Server::start(
            Some(&namespace),
            server::folder(&records(), None)?,
            ADDRESS,
            &settings,
        )
    };
    // The server starts one thread per usable CPU: a single one, which two clients more than
    // saturate.
    let server = on_cpu(CPU, start)?;
    wait_for_fast_path(&namespace)?;
    let done = AtomicBool::new(false);
    namespace.run(|| {
        ensure!(shed()? == 0, "nothing is shed before the flood");
        thread::scope(|scope| -> Result<()> {
            let floods: Vec<_> = (0..2)
                .map(|_| scope.spawn(|| namespace.run(|| flood(&done))))
                .collect();
            let asker = scope.spawn(|| namespace.run(|| ask_for_hot_name(&done)));
            let waited = wait_until("something to be shed", LIMIT, || {
                shed().is_ok_and(|shed| shed > 1_000)
            });
            done.store(true, Ordering::Relaxed);
            for flood in floods {
                flood
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))??;
            }
            let [asked, lost] = asker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))??;
            waited?;
            // Until queries are shed, a full socket may drop a probe.
            let probes = Metrics::here()?.probes();
            ensure!(
                asked > lost && lost <= probes,
                "{lost} of {asked} lost, with {probes} probes"
            );
            Ok(())
        })?;
        // Shedding ends after the flood once the queue is empty: from then on, every passed query
        // is answered.
        let is_answered = || -> Result<bool> {
            let reply = client::ask(ADDRESS, &passed_up()?)?;
            Ok(!reply.answers.is_empty())
        };
        wait_until("an end of shedding", LIMIT, || {
            let before = shed().ok();
            (0..100).all(|_| is_answered().unwrap_or(false))
                && before.is_some()
                && shed().ok() == before
        })
    })??;
    drop(server);
    Ok(())
}
