//! Fleet names published under external names.
//!
//! Addresses come from [`dns_core::resolve`] on `records.json`, as in the server's own answers.
//! Health comes from the running server; an address is withdrawn only after it has been unhealthy
//! for the hold time, and health never empties a record set.
//!
//! In the other direction, an external-dns writes names of the fleet: [`AliasWriter`].

mod document;
mod health;
mod server;
mod writer;

pub(crate) use self::writer::{AliasWriter, WriteError};
pub use self::{
    document::{FleetName, FleetNames, read},
    health::{HealthBook, Resolved, SavedHealth, resolve},
    server::{FleetFiles, ServerClient, ServerError, SourceError},
};
