//! `bosh-dns-sync`: distributes records to a fleet over a BOSH director's protocol.
//!
//! Modules without I/O (except for reading inventory files):
//!
//! * [`inventory`]: the operator's input, validated.
//! * [`dataset`]: the bytes that become `records.json`, with numeric ids that are allocated once.
//! * [`digest`]: digests of blobs, and patches between versions.
//! * [`message`]: calls, replies, subjects.
//! * [`distributor`]'s `plan` and `registry`: its decisions.
//!
//! Modules with I/O: [`bus`] (NATS, and the configuration of nats-server), [`http`] (with TLS and signed WebDAV
//! paths), [`store`] (blobs), [`agent`] (with `/etc/hosts`), [`distributor`], and the command line, [`main`].

mod agent;
pub mod bus;
mod cli;
mod dataset;
pub mod digest;
mod distributor;
pub mod http;
mod inventory;
mod message;
pub mod store;

use std::{
    sync::OnceLock,
    time::{Duration, Instant, SystemTime},
};

pub use cli::main;

/// Returns milliseconds since 1970: the wall clock at the start of the process, monotonic since, so
/// that setting the clock delays nothing.
pub(crate) fn now_ms() -> u64 {
    static BEGUN: OnceLock<(Instant, Duration)> = OnceLock::new();
    let (begun, clock) =
        BEGUN.get_or_init(|| (Instant::now(), SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()));
    (*clock + begun.elapsed()).as_millis() as u64
}

/// Number of consecutive lines that are logged.
const BURST: u64 = 10;

/// Time after which one more line is logged, in milliseconds.
const INTERVAL_MS: u64 = 1000;

/// Allows a burst of lines, then one per second, and counts the omitted ones.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LogLimit {
    /// Time at which a full burst is allowed again, in milliseconds.
    full_at: u64,
    omitted: u64,
}

impl LogLimit {
    /// Returns the number of lines omitted since the last one if a line may be logged at `now`, else `None`.
    pub(crate) fn allow(&mut self, now: u64) -> Option<u64> {
        let base = self.full_at.max(now);
        if base - now >= BURST * INTERVAL_MS {
            self.omitted += 1;
            return None;
        }
        self.full_at = base + INTERVAL_MS;
        Some(std::mem::take(&mut self.omitted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floods_log_once_per_second() {
        let mut limit = LogLimit::default();
        let logged: Vec<u64> = (0..5000).filter_map(|now| limit.allow(now)).collect();
        assert_eq!(logged.len() as u64, BURST + 5);
        assert!(logged.iter().sum::<u64>() > 4900 - 1000, "{logged:?}");
    }
}
