//! Instance identity: the cases of the reference as data, certificates verified by openssl and
//! rustls, and the rotator under faults.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot set up its world has failed"
)]

mod authorities;
mod ca;
mod cases;
mod cells;
mod certificates;
mod faults;
mod fleet;
mod guards;
mod kills;
mod leftovers;
mod machines;
mod pool;
mod program;
mod recovery;
mod rotator;
mod sessions;
mod soak;
mod tarpits;
mod tools;
mod tutorial;
mod watchers;
