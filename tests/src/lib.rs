//! What the whole-system tests, the demo and the benches share: network
//! namespaces, the server as a process, DNS clients, and where the recorded
//! cases are.

pub mod bpffs;
pub mod checksum;
pub mod client;
pub mod health;
pub mod interrupt;
pub mod mapping;
pub mod metrics;
pub mod names;
pub mod namespace;
pub mod process;
pub mod program;
pub mod requirements;
pub mod server;
pub mod shared;
