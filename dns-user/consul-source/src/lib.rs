//! Live source of Consul's names: queries Consul's HTTP API and keeps a catalog of `dns-consul` up
//! to date.
//!
//! Bottom-up:
//!
//! * `token`, `tls`: files that may change at run time.
//! * `connections`: TCP and TLS to one agent, HTTP/1.1 and HTTP/2, limited in number.
//! * `pace`: the rate of requests, and the pauses after failures.
//! * `agent`: sends a request to the first agent that responds.
//! * `progress`: the index of blocking queries, and the age of old responses.
//! * `api`: parses Consul's JSON to registrations.
//! * `ask`: the topics, and one-time and repeated requests.
//! * `known`: all data loaded so far, demands of the resolver, and catalog snapshots.
//! * `follow`: the schedule of requests.
//! * `source`: [`Source`], the handle.

mod agent;
mod api;
mod ask;
mod connections;
mod follow;
mod known;
mod pace;
mod progress;
mod source;
mod tls;

pub use source::Source;
