//! Support code of the whole-system tests and the benches beyond `test-lab`: programs and maps, peers,
//! requirements of tests, and the replay of recorded cases.

#![allow(
    missing_docs,
    reason = "test support is read beside its callers; a comment must say more than the name"
)]

pub mod bpffs;
pub mod cards;
pub mod cell;
pub mod confined;
pub mod conformance;
pub mod debian;
pub mod health;
pub mod mapping;
pub mod names;
pub mod old_kernel;
pub mod pki;
pub mod program;
pub mod requirements;
pub mod resolv_conf;
pub mod terminal;
pub mod thread;
#[cfg(target_arch = "x86_64")]
pub mod visited;
pub mod yardstick;

pub use test_lab::{
    checksum, client, cpu, fleet, interrupt, metrics, namespace, pair, process, server,
};
