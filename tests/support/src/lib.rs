//! Help for tests of several crates.

pub mod command_page;
mod ports;

pub use ports::free_address;
