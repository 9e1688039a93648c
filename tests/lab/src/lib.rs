//! A laboratory for tests, the demo and the benches: network namespaces, the server as a process, DNS
//! clients, generated foundations, load and its figures.

#![allow(
    missing_docs,
    reason = "test support is read beside its callers; a comment must say more than the name"
)]

pub mod checksum;
pub mod client;
pub mod cpu;
pub mod dnsperf;
pub mod figures;
pub mod fleet;
pub mod foundation;
pub mod generator;
pub mod interrupt;
pub mod lab;
pub mod load;
pub mod metrics;
pub mod namespace;
pub mod noise;
pub mod pair;
pub mod process;
pub mod server;
