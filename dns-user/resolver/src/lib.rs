//! `bosh-dns-xdp`: a DNS server for every VM of a BOSH-managed fleet.
//!
//! The rooms; what a name means they ask `dns-core`, and `docs/architecture.md`
//! shows the flows:
//!
//! * [`files`] reads what the configuration names.
//! * `consul` joins the names of `dns-consul` to them.
//! * [`fleet`]: the state that answers come from, and who is told of it.
//! * [`fastpath`] fills and watches the BPF maps.
//! * [`server`], [`upstream`], [`health`] do the I/O of DNS.
//! * [`ops`] and [`cli`] are what an operator touches.

pub mod cli;
mod clock;
mod consul;
pub mod daemon;
pub mod fastpath;
pub mod files;
pub mod fleet;
pub mod health;
mod limits;
mod mmsg;
pub mod ops;
mod priority;
pub mod server;
pub mod system;
pub mod tls;
pub mod upstream;
