//! Recursors that stop and start again under load.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, process::wait_until, requires};

use super::{
    lab::{Lab, loopback},
    servers::{Recursor, SERVERS, Zones, kill},
};

/// Number of continuously querying clients.
const CLIENTS: usize = 3;
/// Time limit for changes of preference, reached only on failure.
const LIMIT: Duration = Duration::from_secs(120);

/// Replies seen by the clients.
#[derive(Default)]
struct Seen {
    right: AtomicU64,
    failed: AtomicU64,
    /// Other replies, and timeouts.
    wrong: Mutex<Vec<String>>,
    done: AtomicBool,
}

impl Seen {
    /// Queries one name after the other, without retries, until stopped.
    fn ask(&self, lab: &Lab<'_>, client: usize) -> Result<()> {
        for number in 0.. {
            if self.done.load(Ordering::Relaxed) {
                break;
            }
            let name = format!("n{number}.c{client}.wild.test.");
            let query = client::query(&name, RecordType::A, None)?;
            match client::ask(lab.server.address, &query) {
                Ok(reply) if is_right(&query, &reply) => self.right.fetch_add(1, Ordering::Relaxed),
                Ok(reply) if reply.metadata.response_code == ResponseCode::ServFail => {
                    self.failed.fetch_add(1, Ordering::Relaxed)
                }
                Ok(reply) => return self.note(format!("{name}: {reply}")),
                Err(error) => return self.note(format!("{name}: {error:#}")),
            };
        }
        Ok(())
    }

    /// Returns the number of SERVFAIL replies.
    fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Records a wrong reply.
    fn note(&self, wrong: String) -> Result<()> {
        self.wrong.lock().push(wrong);
        Ok(())
    }

    /// Fails if any reply was wrong so far.
    fn check(&self) -> Result<()> {
        let wrong = self.wrong.lock();
        ensure!(wrong.is_empty(), "wrong answers: {wrong:?}");
        Ok(())
    }

    /// Waits for `count` further correct replies.
    fn wait_for(&self, what: &str, count: u64) -> Result<()> {
        let wanted = self.right.load(Ordering::Relaxed) + count;
        wait_until(what, LIMIT, || {
            self.right.load(Ordering::Relaxed) >= wanted || self.check().is_err()
        })?;
        self.check()
    }
}

/// Returns whether a reply is correct.
fn is_right(query: &Message, reply: &Message) -> bool {
    reply.metadata.response_code == ResponseCode::NoError
        && reply.queries == query.queries
        && client::addresses(reply)
            == ["192.0.2.8".parse::<std::net::IpAddr>().expect("an address")]
}

/// Runs `phases` while clients query continuously; fails if any reply is wrong.
fn under_load(lab: &Lab<'_>, phases: impl FnOnce(&Seen) -> Result<()>) -> Result<()> {
    let seen = Seen::default();
    thread::scope(|scope| {
        let ask = |client| lab.namespace.run(|| seen.ask(lab, client))?;
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| scope.spawn(move || ask(client)))
            .collect();
        let result = phases(&seen);
        seen.done.store(true, Ordering::Relaxed);
        for client in clients {
            client
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        seen.check().and(result)
    })
}

#[test]
fn hanging_recursors_regain_preference() -> Result<()> {
    requires!(namespaces, programs(SERVERS));
    let namespace = Namespace::new("hang")?;
    let zones = Zones::new()?;
    let named = zones.named(&namespace, loopback(10))?;
    let unbound = zones.unbound(&namespace, loopback(11), named.address)?;
    let recursors = [named.address, unbound.address];
    let settings = json!({"recursor_selection": "smart", "recursor_timeout": "3s"});
    let lab = Lab::start(&namespace, &recursors, &settings)?;
    let is_preferred = |recursor: &Recursor| {
        let label = format!("recursor=\"{}\"", recursor.address);
        lab.metric("bosh_dns_xdp_recursor_preferred", &label)
            .is_ok_and(|preferred| preferred == 1)
    };
    under_load(&lab, |seen| {
        seen.wait_for("answers from healthy recursors", 200)?;
        let (first, second) = if is_preferred(&named) {
            (&named, &unbound)
        } else {
            (&unbound, &named)
        };
        for (hung, other) in [(first, second), (second, first)] {
            ensure!(is_preferred(hung), "without failures the preference stays");
            hung.process.signal(Signal::SIGSTOP)?;
            wait_until("the other recursor to be preferred", LIMIT, || {
                is_preferred(other)
            })?;
            seen.wait_for("answers from the other recursor", 200)?;
            hung.process.signal(Signal::SIGCONT)?;
        }
        ensure!(
            seen.failed() == 0,
            "SERVFAIL although one recursor remained"
        );
        Ok(())
    })
}

#[test]
fn restarted_recursors_are_used_again() -> Result<()> {
    requires!(namespaces, programs(SERVERS));
    let namespace = Namespace::new("kill")?;
    let zones = Zones::new()?;
    let named = zones.named(&namespace, loopback(10))?;
    let unbound = zones.unbound(&namespace, loopback(11), named.address)?;
    let address = named.address;
    // Long enough for a busy machine; a closed port is detected without the timeout.
    let settings = json!({"recursor_selection": "serial", "recursor_timeout": "1s"});
    let lab = Lab::start(&namespace, &[address, unbound.address], &settings)?;
    let tries = || {
        lab.metric(
            "bosh_dns_xdp_recursor_queries_total",
            &format!("recursor=\"{address}\""),
        )
    };
    under_load(&lab, |seen| {
        seen.wait_for("answers from healthy recursors", 200)?;
        kill(named)?;
        seen.wait_for("answers from the remaining recursor", 200)?;
        ensure!(
            seen.failed() == 0,
            "SERVFAIL although one recursor remained"
        );
        kill(unbound)?;
        wait_until("SERVFAIL without a recursor", LIMIT, || seen.failed() > 50)?;
        let _named = zones.named(&namespace, address)?;
        seen.wait_for("answers from the restored recursor", 200)?;
        // After recovery there are no further failures.
        let failed = seen.failed();
        let before = tries()?;
        seen.wait_for("answers from the restored recursor", 200)?;
        ensure!(
            seen.failed() == failed,
            "SERVFAIL although the recursor is restored"
        );
        ensure!(tries()? >= before + 200, "the answers came from elsewhere");
        Ok(())
    })
}
