//! A strict double of Consul's HTTP API, and catalogs for it.

pub(crate) mod double;
pub(crate) mod world;
