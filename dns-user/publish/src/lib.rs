//! Publishes fleet names to external DNS servers.
//!
//! The core is pure: records, ownership, plan and guard compute on values without I/O. Providers
//! list and change zones; the engine connects the two: `list -> plan -> guard -> apply -> status`.

pub mod api;
mod cli;
pub mod config;
pub mod control;
pub mod documents;
pub mod endpoint;
pub mod engine;
pub mod fleet;
pub mod guard;
pub mod metrics;
pub mod ownership;
pub mod plan;
pub mod provider;
pub mod publication;
pub mod record;
pub mod render;
pub mod runner;
pub mod store;
pub mod text;
pub mod update_record;
mod webhook;

pub use cli::main;
