//! The live source of Consul's names: asks Consul's HTTP API and keeps a catalog in the form of `dns-consul`
//! up to date.
//!
//! From the bottom up:
//!
//! * `token`, `tls`: files that change.
//! * `connections`: TCP and TLS to one agent, HTTP/1.1 and HTTP/2, a bounded number.
//! * `pace`: the rate of requests, and the pauses after failures.
//! * `agent`: one question to the first agent that answers.
//! * `cursor`: the index of blocking queries, and whether an answer has changed.
//! * `topic`: the questions.
//! * `api`: Consul's JSON as registrations.
//! * `ask`: questions asked once or repeatedly.
//! * `freshness`: success and failure of each question, and the age of old answers.
//! * `known`: all answers so far.
//! * `state`: configuration, pictures, and the state for operators.
//! * `follow`: the schedule of questions.
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
pub use state::{Picture, Settings, Status};
