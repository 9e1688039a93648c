//! What an operator touches: API, metrics, status.
//!
//! * [`metrics`]: one registry, one exposition.
//! * [`probe`]: whether the server is well.
//! * [`board`]: files and sockets, as the daemon tells of them.
//! * [`journal`]: what was read anew, what could not be used.
//! * [`tap`]: live queries of both paths.
//! * [`status`], [`api`]: all of it for programs and for our own command line.

pub mod api;
pub mod board;
pub(crate) mod http;
pub mod journal;
pub mod metrics;
pub mod probe;
pub mod status;
pub mod tap;
pub mod version;
