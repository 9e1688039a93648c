//! Help for tests of several crates.

mod ports;

pub use ports::free_address;
