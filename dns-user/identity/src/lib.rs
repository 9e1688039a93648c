//! `bosh-dns-identity`: certificates that identify instances and renew themselves.
//!
//! Pure, without I/O or clock:
//!
//! * [`profile`]: contents of a certificate, from the description of a container.
//! * [`schedule`]: the renewal window, an instance's moment in it, clock skew and backoff.
//! * `guard`: holds up the removal of many entries at once.
//! * [`keys`], [`certificate`], [`authority`]: keys, DER, and the CA that signs.
//! * [`san`], [`manifest`]: names of link providers.
//!
//! With I/O:
//!
//! * [`folder`]: a folder whose files change in one step.
//! * [`pool`]: keys generated ahead.
//! * [`rotator`]: renews a set of identities; [`run`] gives it a clock, [`descriptions`] or
//!   [`control`] give it identities.
//! * [`fleet`]: issuer, agents, and the rotation of their CA.
//! * [`check`], [`metrics`], and the command line, [`main`].

pub mod authority;
pub mod certificate;
pub mod check;
mod cli;
pub mod control;
pub mod descriptions;
pub mod fleet;
pub mod folder;
pub mod keys;
pub mod manifest;
pub mod metrics;
pub mod pool;
pub mod profile;
pub mod rotator;
pub mod run;
pub mod san;
pub mod schedule;

pub use cli::main;
