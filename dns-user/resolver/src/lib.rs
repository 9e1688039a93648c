//! The daemon of `bosh-dns-xdp`, a DNS server for every VM of a BOSH-managed fleet. `dns-cli` is its command line.
//!
//! Names are resolved by `dns-core`; `docs/architecture.md` shows the flows. Modules:
//!
//! * `consul` adds the Consul names of `dns-consul`.
//! * [`state`] holds the state from which answers are built and notifies its subscribers.
//! * [`server`] does the DNS I/O; non-local names are forwarded through `dns-upstream`.
//! * [`daemon`] starts, reloads and stops everything, including `dns-fastpath` and `dns-health`.
//! * [`ops`] are the operator's interfaces: API, metrics, status, live queries.

mod consul;
pub mod daemon;
pub mod ops;
pub mod server;
pub mod state;
