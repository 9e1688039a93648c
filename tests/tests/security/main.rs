//! Attacks from inside, one party after the other as listed in docs/security.md, and their effects.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot set up its world has failed"
)]

mod attacher;
mod blindness;
mod bodies;
mod clients;
mod health;
mod limited;
mod pki;
mod process;
mod strangers;
mod terminal;
