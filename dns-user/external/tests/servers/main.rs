//! Providers against real servers: BIND and Knot, each on a loopback address and in a
//! folder that the test made.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its server has failed")]

mod faults;
mod name_server;
mod process;
mod rfc2136;
mod scale;
