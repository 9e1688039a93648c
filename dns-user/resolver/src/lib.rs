//! `bosh-dns-xdp`: a DNS server for every VM of a BOSH-managed fleet.
//!
//! The rooms; what a name means they ask `dns-core`, and `docs/architecture.md`
//! shows the flows:
//!
//! * `consul` joins the names of `dns-consul` to them.
//! * [`fleet`]: the state that answers come from, and who is told of it.
//! * [`server`] does the I/O of DNS; what is not answered here `dns-upstream` asks for.
//! * [`daemon`] starts, reloads and stops all of it, `dns-fastpath` and `dns-health` included.
//! * [`ops`] and [`cli`] are what an operator touches.

pub mod cli;
mod consul;
pub mod daemon;
pub mod fleet;
pub mod ops;
pub mod server;
pub mod system;
