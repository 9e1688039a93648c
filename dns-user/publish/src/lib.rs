//! Publishes fleet names to external DNS servers.
//!
//! The core is pure: records, ownership, plan and guard compute on values without I/O. Providers
//! list and change zones; the engine connects the two: `list -> plan -> guard -> apply -> status`.

mod api;
mod cli;
pub mod config;
pub mod control;
mod deletions;
mod documents;
mod endpoint;
pub mod engine;
mod fleet;
mod go_json;
pub mod ownership;
pub mod plan;
pub mod provider;
mod publication;
pub mod record;
mod render;
pub mod runner;
mod status;
mod store;
mod text;
mod update_record;
mod webhook;

pub use cli::main;
