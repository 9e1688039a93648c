//! `bosh-dns-sync`: distributes records to a fleet over a BOSH director's protocol.
//!
//! Modules without I/O (except for reading inventory files):
//!
//! * [`inventory`]: the operator's input, validated.
//! * [`ids`]: numeric ids, allocated once.
//! * [`dataset`]: the bytes that become `records.json`.
//! * [`digest`], [`patch`]: digests, and differences between versions.
//! * [`message`]: calls, replies, subjects.
//! * [`dav`]: paths and signatures of blobs.
//! * [`hosts`][]: the file `/etc/hosts`.
//! * [`nats_config`]: the configuration of nats-server.
//! * [`publisher`]'s `plan` and `book`: its decisions.
//!
//! Modules with I/O: [`files`] (atomic replacement), [`tls`], [`bus`] (NATS), [`http`], [`store`]
//! (blobs), [`agent`], [`publisher`], and the command line, [`main`].

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

/// Waits for SIGTERM or SIGINT.
pub async fn ended() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        // Without handlers, the default action of the signals ends the process.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
