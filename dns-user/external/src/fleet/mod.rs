//! Fleet names published under external names.
//!
//! Addresses come from [`dns_core::resolve`] on `records.json`, as the server's own answers do.
//! Health comes from the running server; an address is withdrawn only after it has been ill for
//! the hold time, and health never empties a record set.

mod document;
mod files;
mod health;
mod server;

pub use self::{
    document::{FleetName, FleetNames, read, to_json},
    files::{FleetFiles, SourceError},
    health::{HealthBook, Resolved, SavedHealth, resolve},
    server::{ServerClient, ServerError},
};
