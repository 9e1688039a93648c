//! A dead recursor delays no unrelated query.

use std::{
    net::{Ipv4Addr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, process::wait_until, requires};

use super::{
    lab::{LOCAL_NAME, Lab, OURS, loopback},
    scripted::Scripted,
};

const QUESTIONS: usize = 300;
/// Timeout of queries to the hanging recursor. An answer that waited for it, or for the end of a query that waits
/// for it, would come after all tries of [`ask_all`].
const HANGS: &str = "1h";

/// Asks for names one after the other; every reply must arrive and be correct.
fn ask_all(name: impl Fn(usize) -> String, address: Ipv4Addr) -> Result<()> {
    for number in 0..QUESTIONS {
        let query = client::query(&name(number), RecordType::A, None)?;
        // The socket of a server on a busy machine may overflow; stub resolvers ask again as well.
        let reply = (0..12).find_map(|_| client::ask(OURS, &query).ok());
        let reply = reply.with_context(|| format!("{} waits", name(number)))?;
        ensure!(client::addresses(&reply) == [address], "{reply}");
    }
    Ok(())
}

/// Sends about 5,000 queries per second to the hanging recursor until `done`.
fn flood(done: &AtomicBool) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.connect(OURS)?;
    let mut number = 0;
    while !done.load(Ordering::Relaxed) {
        for _ in 0..10 {
            number += 1;
            let query = client::query(&format!("n{number}.hanging.test."), RecordType::A, None)?;
            socket.send(&query.to_vec()?)?;
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

#[test]
fn hanging_recursor_delays_no_answer() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("delay")?;
    let hanging = Scripted::silent(&namespace, loopback(10))?;
    let other = Ipv4Addr::new(192, 0, 2, 9);
    let _living = Scripted::answering(&namespace, loopback(11), other)?;
    let settings = json!({
        "recursor_timeout": HANGS,
        "request_timeout": HANGS,
        "handlers": [{
            "domain": "other.test",
            "source": {"type": "dns", "recursors": [loopback(11)]},
            "cache": {"enabled": false},
        }],
    });
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    let done = AtomicBool::new(false);
    namespace.run(|| {
        thread::scope(|scope| -> Result<()> {
            let flooding = scope.spawn(|| namespace.run(|| flood(&done))?);
            let asking = || -> Result<()> {
                wait_until("queries that hang", Duration::from_secs(120), || {
                    hanging.count() > 1000
                })?;
                ask_all(|_| LOCAL_NAME.to_owned(), Ipv4Addr::new(10, 0, 0, 1))?;
                ask_all(|number| format!("n{number}.other.test."), other)
            };
            let asked = asking();
            done.store(true, Ordering::Relaxed);
            flooding
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            asked
        })
    })??;
    let waiting = lab.metric("bosh_dns_xdp_requests_in_flight", "")?;
    ensure!(waiting >= 1000, "only {waiting} queries waited meanwhile");
    Ok(())
}
