//! Attacks from inside, party by party as docs/security.md lists them, and what comes of each.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its world has failed")]

mod attacher;
mod blindness;
mod health;
mod pki;
mod process;
mod terminal;
