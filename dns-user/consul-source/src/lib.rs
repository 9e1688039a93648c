//! Live source of Consul's names: queries Consul's HTTP API and keeps a catalog of `dns-consul` up
//! to date.
//!
//! Bottom-up:
//!
//! * `token`, `tls`: files that may change at run time.
//! * `connections`: TCP and TLS to one agent, HTTP/1.1 and HTTP/2, limited in number.
//! * `pace`: the rate of requests, and the pauses after failures.
//! * `agent`: sends a request to the first agent that responds.
//! * `cursor`: the index of blocking queries, and detection of changes.
//! * `topic`: the topics that can be requested.
//! * `api`: parses Consul's JSON to registrations.
//! * `ask`: one-time and repeated requests.
//! * `freshness`: success and failure of each topic, and the age of old responses.
//! * `known`: all data loaded so far.
//! * `state`: demands of the resolver, and catalog snapshots.
//! * `follow`: the schedule of requests.
//! * `source`: [`Source`], the handle.

mod agent;
mod api;
mod ask;
mod connections;
mod cursor;
mod follow;
mod freshness;
mod known;
mod pace;
mod source;
mod state;
mod tls;
mod token;
mod topic;

pub use source::Source;
