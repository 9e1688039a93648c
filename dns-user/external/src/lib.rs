//! Publishes names of the fleet to DNS servers outside of it.
//!
//! The core is pure: records, ownership, plan and guard compute on values, and perform no
//! I/O. Providers list and change zones; the engine connects the two:
//! `list -> plan -> guard -> apply -> status`.

pub mod domain;
pub mod engine;
pub mod guard;
pub mod ownership;
pub mod plan;
pub mod provider;
pub mod record;
