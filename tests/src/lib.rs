//! Support code of the whole-system tests, the demo and the benches: network namespaces, the server
//! as a process, DNS clients, generated foundations, and the replay of recorded cases.

#![allow(
    missing_docs,
    reason = "test support is read beside its callers; a comment must say more than the name"
)]

pub mod bpffs;
pub mod cards;
pub mod cell;
pub mod checksum;
pub mod client;
pub mod confined;
pub mod conformance;
pub mod cpu;
pub mod debian;
pub mod fleet;
pub mod health;
pub mod interrupt;
pub mod mapping;
pub mod metrics;
pub mod names;
pub mod namespace;
pub mod old_kernel;
pub mod pair;
pub mod process;
pub mod program;
pub mod requirements;
pub mod resolv_conf;
pub mod server;
pub mod terminal;
pub mod thread;
pub mod yardstick;
