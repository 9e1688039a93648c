//! The fleet's own certificates: an issuer that knows the fleet, an agent on every machine, and
//! rotation of the CA across all of them.
//!
//! Pure: [`policy`] (the names that belong to an instance) and [`trust`] (the steps of a rotation).
//! With I/O: [`state`] (files of the issuer), [`issuer`], [`agent`], [`rotate`].

pub mod agent;
pub mod issuer;
pub mod policy;
pub mod protocol;
pub mod rotate;
pub mod state;
pub mod trust;
