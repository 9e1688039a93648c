//! `bosh-dns-xdp`: a DNS server for every VM of a BOSH-managed fleet.
//!
//! The rooms, from pure to busy; `docs/architecture.md` shows the flows:
//!
//! * [`name`], [`config`], [`catalog`], [`resolve`], [`wire`] are pure: bytes
//!   and values in, values out. They know no socket, no clock, no BPF.
//! * [`fastpath`] fills and watches the BPF maps.
//! * [`server`], [`upstream`], [`health`] do the I/O of DNS.
//! * [`ops`] and [`cli`] are what an operator touches.

pub mod catalog;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod fastpath;
mod file_stamp;
pub mod health;
pub mod name;
pub mod ops;
pub mod resolve;
pub mod server;
pub mod tls;
pub mod upstream;
pub mod wire;
