//! The pure core of `bosh-dns-xdp`: resolution of local names and the DNS wire format.
//!
//! Bytes and values in, values out. No sockets, clock, BPF or runtime; the dependencies in
//! `Cargo.toml` prove it. Modules from the bottom up, each using only those above it in this list:
//!
//! * [`name`]: domain names in the form used for comparison and hashing; the addresses of reverse names.
//! * [`config`]: `config.json` and related files, parsed into validated types.
//! * [`query`]: the query language in the labels of a name.
//! * [`link_address`]: construction of such names, and canonical labels of groups, networks and deployments.
//! * [`catalog`]: records and aliases as one immutable snapshot with indexes.
//! * [`resolve`]: resolution of a name, given a snapshot and the current health.
//! * [`listing`]: names to publish before the first query.
//! * [`changes`]: differences between two snapshots.
//! * [`terminal`]: escaping of foreign text for terminals and logs.
//! * [`wire`]: DNS messages, EDNS, truncation.

pub mod catalog;
pub mod changes;
pub mod config;
pub mod link_address;
pub mod listing;
pub mod name;
pub(crate) mod query;
pub mod resolve;
pub mod terminal;
pub mod wire;
