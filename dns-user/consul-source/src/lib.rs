//! The live source of Consul's names: asks Consul's HTTP API, keeps up with what is
//! registered, and hands it over as the registrations of `dns-consul`.
//!
//! From the bottom up:
//!
//! * `token`, `tls`: files that change.
//! * `connections`: TCP and TLS to one agent, HTTP/1.1 and HTTP/2, a bounded number.
//! * `pace`: how often may be asked, and how long to wait after what went wrong.
//! * `agent`: one question to whichever agent answers.
//! * `cursor`: the index of blocking queries, and whether an answer is news.
//! * `freshness`: success and failure of each question, and the age of old answers.
//! * `topic`: what is asked for.
//! * `api`: Consul's JSON as registrations.
//! * `known`: all that was told so far.
//! * [`follow`]: who is asked what when; [`Source`] is the handle.

mod agent;
mod api;
mod connections;
mod cursor;
pub mod follow;
mod freshness;
mod known;
mod pace;
mod tls;
mod token;
mod topic;

pub use follow::{Picture, Settings, Source, Status};
