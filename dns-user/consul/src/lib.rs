//! Consul's DNS interface, pure: catalog and question in, answer out.
//!
//! No socket, no clock, no runtime. From the bottom up:
//!
//! * [`config`]: the object `"consul"` of `config.json`.
//! * [`http_api`]: its part that says where a live Consul is asked.
//! * [`visibility`]: what a token may read.
//! * [`catalog`]: what is registered, with indexes; immutable.
//! * [`definition`]: definition files, HCL or JSON.
//! * [`question`]: what the labels of a name ask for.
//! * `prepared`: prepared queries, evaluated here.
//! * `found`: what a search brings.
//! * [`record`]: resource records and the names that Consul makes up.
//! * [`Zone`]: configuration and catalog of the moment; answers questions.
//! * [`aliases`]: the catalog as aliases of bosh-dns.
//! * [`Draft`]: an answer that may still need what a recursor says about host names.
//!
//! What Consul does is taken from its documentation and from the cases in
//! `tests/cases`, which the tests replay. Where neither speaks (limits of a chain of
//! host names, spare bytes of a UDP answer, what `near` puts first) the code does what
//! is generally known of Consul; no running Consul was asked.

pub mod aliases;
mod answer;
pub mod catalog;
pub mod config;
pub mod definition;
mod draft;
mod edns;
mod encode;
mod found;
pub mod http_api;
mod prepared;
pub mod question;
pub mod record;
pub mod visibility;

pub use answer::{Asker, Explanation, Lack, Publishable, Zone};
pub use draft::{Draft, chain_of};
