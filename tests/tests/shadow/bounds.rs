//! A flood: CPU and memory stay within their bounds, and the share that was sampled is stated rightly.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{client::query, namespace::Namespace, process::memory, requires, server};

use crate::double::{Double, Shadow, count};

/// Duration of the flood, unless `SOAK_SECONDS` is set.
const FLOOD: Duration = Duration::from_secs(20);
/// Queries that the client sends at a time, and interval between: 50,000 per second.
const BURST: u16 = 50;
const PACE: Duration = Duration::from_millis(1);
/// Queries without a reply so far: their datagrams fit the queue of a socket, so that none is lost on a busy machine.
const MAX_WAITING: u16 = 150;
/// Time after which replies count as lost.
const LOST: Duration = Duration::from_secs(1);

/// Limit of the issue; pages of the program that are shared with the page cache count too.
const MAX_MEMORY: u64 = 40 << 20;

#[test]
fn flood_costs_no_more_than_permitted() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("shadowflood")?;
    let folder = server::folder(&server::records_of_groups(&[3]), None)?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 53));
    let mut config = server::config(folder.path(), address);
    server::merge(&mut config, &json!({"xdp": {"mode": "off"}}));
    let path = folder.path().join("config.json");
    std::fs::write(&path, config.to_string())?;
    let replied = Arc::new(AtomicU64::new(0));
    let counter = replied.clone();
    // Replies like this server to the one query that is asked: an empty NOERROR would be different.
    let replies = move |message: &[u8], _: bool| {
        counter.fetch_add(1, Ordering::Relaxed);
        let mut reply = message.to_vec();
        reply[2] = 0x85;
        reply[3] = 0x83;
        Some(reply)
    };
    let _double = namespace.run(|| Double::start(address, Arc::new(replies)))??;
    let mut shadow = Shadow::start(&namespace, folder.path(), &path, &["--for", "10m"])?;
    shadow.wait_until_watching()?;
    let pid = shadow.process.pid();
    let sent = AtomicU64::new(0);
    let seconds = std::env::var("SOAK_SECONDS").ok();
    let time = seconds.map_or(Ok(FLOOD), |text| text.parse().map(Duration::from_secs))?;
    let peak = namespace.run(|| -> Result<u64> {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let client = scope.spawn(|| flood(address, &is_over, &sent));
            thread::sleep(time);
            let peak = memory(pid, "VmHWM");
            is_over.store(true, Ordering::Relaxed);
            client.join().ok().context("the client panicked")??;
            peak
        })
    })??;
    let (code, report) = shadow.stop()?;
    ensure!(code == 0, "{}", report["differences"]);
    let own = report["cpu"]["own_share"].as_f64().context("a share")?;
    // The permitted share, and a step that began within it: the unit tests of `watch` have the exact bound.
    ensure!(own < 0.07, "{own} of a core, 0.05 permitted");
    ensure!(peak < MAX_MEMORY, "{peak} bytes");
    // Sampled, and by what share: the estimate meets what was sent.
    let sent = sent.load(Ordering::Relaxed);
    let replied = replied.load(Ordering::Relaxed);
    let (queries, estimated) = (
        count(&report, "/seen/queries"),
        count(&report, "/seen/estimated_queries"),
    );
    println!(
        "{sent} queries in {time:?}, {replied} replies, {queries} seen, {estimated} estimated, {own:.4} of a core, \
         {peak} bytes"
    );
    ensure!(
        queries < replied,
        "nothing was left out: {queries} of {replied}"
    );
    let ratio = estimated as f64 / sent as f64;
    ensure!(
        (0.7..1.4).contains(&ratio),
        "{estimated} estimated, {sent} sent"
    );
    ensure!(
        count(&report, "/verdicts/unexplained") == 0,
        "{}",
        report["verdicts"]
    );
    ensure!(
        count(&report, "/seen/unanswered") < queries / 20,
        "{}",
        report["seen"]
    );
    Ok(())
}

/// Sends queries for a name that does not exist.
fn flood(server: SocketAddr, is_over: &AtomicBool, sent: &AtomicU64) -> Result<()> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(LOST))?;
    let mut message = query("no-such-id.q-g9.bosh.", RecordType::A, None)?.to_vec()?;
    let mut buffer = [0; 512];
    let mut id = 0_u16;
    let mut waiting = 0;
    let mut due = Instant::now();
    while !is_over.load(Ordering::Relaxed) {
        for _ in 0..BURST {
            id = id.wrapping_add(1);
            message[..2].copy_from_slice(&id.to_be_bytes());
            socket.send(&message)?;
        }
        sent.fetch_add(u64::from(BURST), Ordering::Relaxed);
        waiting += BURST;
        while waiting > MAX_WAITING - BURST {
            match socket.recv(&mut buffer) {
                Ok(_) => waiting -= 1,
                Err(_) => waiting = 0,
            }
        }
        // A delay is not made up for by a burst.
        due = (due + PACE).max(Instant::now());
        thread::sleep(due - Instant::now());
    }
    Ok(())
}
