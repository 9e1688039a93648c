//! A dead recursor delays no unrelated query.

use std::{
    net::{Ipv4Addr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use serde_json::json;
use whole_system_tests::{client, process::wait_until};

use super::{
    lab::{LOCAL_NAME, Lab, OURS, loopback, namespace},
    scripted::Scripted,
};

const QUESTIONS: usize = 300;
/// Allowed growth of a latency: far more than the load itself causes, far less than waiting for the
/// hanging recursor would.
const FACTOR: u32 = 20;
/// Timeout of queries to the hanging recursor.
const RECURSOR_TIMEOUT: Duration = Duration::from_secs(4);

/// Returns the median reply time; every reply must arrive and be correct.
fn median(name: impl Fn(usize) -> String, address: Ipv4Addr) -> Result<Duration> {
    let mut times = Vec::with_capacity(QUESTIONS);
    for number in 0..QUESTIONS {
        let query = client::query(&name(number), RecordType::A, None)?;
        let start = Instant::now();
        let reply = client::ask(OURS, &query)?;
        times.push(start.elapsed());
        ensure!(client::addresses(&reply) == [address], "{reply}");
        ensure!(
            times[number] < RECURSOR_TIMEOUT * 3 / 4,
            "an answer waited for {:?}",
            times[number]
        );
    }
    times.sort();
    Ok(times[QUESTIONS / 2])
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
    let Some(namespace) = namespace("delay")? else {
        return Ok(());
    };
    let hanging = Scripted::silent(&namespace, loopback(10))?;
    let other = Ipv4Addr::new(192, 0, 2, 9);
    let _living = Scripted::answering(&namespace, loopback(11), other)?;
    let settings = json!({
        "recursor_timeout": "4s",
        "handlers": [{
            "domain": "other.test",
            "source": {"type": "dns", "recursors": [loopback(11)]},
            "cache": {"enabled": false},
        }],
    });
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    let local = || median(|_| LOCAL_NAME.to_owned(), Ipv4Addr::new(10, 0, 0, 1));
    let forwarded = || median(|number| format!("n{number}.other.test."), other);
    namespace.run(|| -> Result<()> {
        let idle = (local()?, forwarded()?);
        let done = AtomicBool::new(false);
        let loaded = thread::scope(|scope| -> Result<_> {
            let flooding = scope.spawn(|| namespace.run(|| flood(&done))?);
            let measured = (|| {
                wait_until("queries that hang", Duration::from_secs(60), || {
                    hanging.count() > 1000
                })?;
                Ok((local()?, forwarded()?))
            })();
            done.store(true, Ordering::Relaxed);
            flooding
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            measured
        })?;
        ensure!(
            loaded.0 < idle.0 * FACTOR,
            "local answers: {:?}, {:?} when idle",
            loaded.0,
            idle.0
        );
        ensure!(
            loaded.1 < idle.1 * FACTOR,
            "forwarded answers: {:?}, {:?} when idle",
            loaded.1,
            idle.1
        );
        Ok(())
    })??;
    // The server really waited for the recursor.
    let reply = lab.ask_for("last.hanging.test.", RecordType::A)?;
    ensure!(
        reply.metadata.response_code == ResponseCode::ServFail,
        "{reply}"
    );
    Ok(())
}
