//! `bosh-dns-identity`: certificates that identify instances and renew themselves.
//!
//! Pure, without I/O or clock:
//!
//! * [`profile`]: contents of a certificate, from the description of a container.
//! * [`schedule`]: the renewal window, an instance's moment in it, clock skew and backoff.
//! * [`keys`], [`certificate`], [`authority`]: keys, also generated ahead by a thread; DER; the CA that signs.
//! * [`san`]: names of link providers, and the links of a manifest.
//!
//! With I/O:
//!
//! * [`folder`]: a folder whose files change in one step.
//! * [`rotator`]: renews a set of identities; [`run`] gives it a clock; [`descriptions`] or
//!   the control socket give it identities.
//! * [`fleet`]: issuer, agents, and the rotation of their CA.
//! * [`check`], [`metrics`], and the command line, [`main`].

pub mod authority;
pub mod certificate;
pub mod check;
mod cli;
pub mod descriptions;
pub mod fleet;
pub mod folder;
pub mod keys;
mod metrics;
pub mod profile;
pub mod rotator;
pub mod run;
pub mod san;
pub mod schedule;

pub use cli::main;

#[cfg(test)]
mod tests;
