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
//! * [`distributor`]'s `plan` and `registry`: its decisions.
//!
//! Modules with I/O: [`tls`], [`bus`] (NATS), [`http`], [`store`]
//! (blobs), [`agent`], [`distributor`], and the command line, [`main`].

pub mod agent;
pub mod bus;
mod cli;
mod clock;
pub mod dataset;
pub mod dav;
pub mod digest;
pub mod distributor;
pub mod hosts;
pub mod http;
pub mod ids;
pub mod inventory;
pub mod message;
pub mod nats_config;
pub mod patch;
pub mod store;
pub mod tls;

pub use cli::main;
