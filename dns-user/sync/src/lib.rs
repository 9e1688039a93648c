//! `bosh-dns-sync`: records reach the fleet, in the language of a BOSH director.
//!
//! Pure, without any I/O of their own (but for reading an inventory's files):
//!
//! * [`inventory`]: what an operator says there is, checked.
//! * [`ids`]: ids that are allocated once.
//! * [`dataset`]: the bytes that become `records.json`.
//! * [`digest`], [`patch`]: how bytes are told apart, and how one version comes out of another.
//! * [`message`]: calls, replies, subjects.
//! * [`dav`]: paths and signatures of blobs.
//! * [`hosts`][]: the file `/etc/hosts`.
//! * [`nats_config`]: the configuration of nats-server.
//!
//! With I/O: [`files`] (always one whole version), [`tls`], [`bus`] (NATS), [`http`], [`store`]
//! (blobs), [`agent`], [`publisher`], [`simulate`], and the command line, [`main`].

pub mod agent;
pub mod bus;
mod cli;
pub mod dataset;
pub mod dav;
pub mod digest;
pub mod files;
pub mod hosts;
pub mod http;
pub mod ids;
pub mod inventory;
pub mod message;
mod metrics_server;
pub mod nats_config;
pub mod patch;
pub mod publisher;
pub mod simulate;
pub mod store;
pub mod tls;

pub use cli::main;

/// Waits until the process is told to end.
pub(crate) async fn ended() {
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
