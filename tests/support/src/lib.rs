//! Help for tests of several crates.

pub mod allocations;
#[cfg(feature = "pages")]
pub mod command_page;
pub mod forwarded;
pub mod own_process;
mod ports;
pub mod precedence;
pub mod requirements;

pub use ports::free_address;
