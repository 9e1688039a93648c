//! What an insider can try, and what comes of it: the tests that docs/security.md names.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its world has failed")]

mod attacher;
mod blindness;
mod health;
mod pki;
mod process;
mod terminal;
