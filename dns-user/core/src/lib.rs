//! The pure core of `bosh-dns-xdp`: what a name means, and the bytes that say so.
//!
//! Bytes and values in, values out. No socket, no clock, no BPF, no runtime: the
//! dependencies in `Cargo.toml` prove it. From the bottom up; a module uses only
//! those above it in this list:
//!
//! * [`canonical`]: labels of instance groups, networks and deployments.
//! * [`name`]: domain names in the form that everything compares and hashes.
//! * [`config`]: `config.json` and its kin, parsed into types that cannot be wrong.
//! * [`query`]: what the labels of a name ask for.
//! * [`link_address`]: the same names, written.
//! * [`catalog`]: records and aliases as one immutable snapshot with indexes.
//! * [`resolve`]: what a name means, given a snapshot and the health of the moment.
//! * [`listing`]: the names worth publishing before anybody asks.
//! * [`terminal`]: text that came from elsewhere, escaped.
//! * [`wire`]: messages in and out, EDNS, truncation.

pub mod canonical;
pub mod catalog;
pub mod config;
pub mod link_address;
pub mod listing;
pub mod name;
pub(crate) mod query;
pub mod resolve;
pub mod terminal;
pub mod wire;
