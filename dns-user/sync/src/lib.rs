//! `bosh-dns-sync`: distributes records to a fleet with a BOSH director's protocol.
//!
//! Pure modules, without I/O (but for reading an inventory's files):
//!
//! * [`inventory`]: the operator's input, validated.
//! * [`ids`]: ids that are allocated once.
//! * [`dataset`]: the bytes that become `records.json`.
//! * [`digest`], [`patch`]: digests, and differences between versions.
//! * [`message`]: calls, replies, subjects.
//! * [`dav`]: paths and signatures of blobs.
//! * [`hosts`][]: the file `/etc/hosts`.
//! * [`nats_config`]: the configuration of nats-server.
//! * [`publisher`]'s `plan` and `book`: its decisions.
//!
//! Modules with I/O: [`files`] (atomic replacement), [`tls`], [`bus`] (NATS), [`http`], [`store`] (blobs),
//! [`agent`], [`publisher`], and the command line, [`main`].

pub mod agent;
pub mod bus;
mod cli;
mod clock;
pub mod dataset;
pub mod dav;
pub mod digest;
pub mod files;
pub mod hosts;
pub mod http;
pub mod ids;
pub mod inventory;
mod limit;
pub mod message;
mod metrics_server;
pub mod nats_config;
pub mod patch;
pub mod publisher;
mod server;
pub mod store;
pub mod tls;

pub use cli::main;

/// Waits until the process is told to end (SIGTERM, SIGINT).
pub async fn ended() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        // Without handlers the signals end the process by themselves.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
