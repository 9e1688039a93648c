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
mod file_options;
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
    let (begun, clock) = BEGUN.get_or_init(|| {
        (
            Instant::now(),
            SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default(),
        )
    });
    (*clock + begun.elapsed()).as_millis() as u64
}

#[cfg(test)]
mod tests;
