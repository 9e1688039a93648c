//! The operator's interfaces: API, metrics, status.
//!
//! * [`metrics`]: one registry and its exposition.
//! * [`probe`]: liveness and readiness checks.
//! * [`board`]: state of files and sockets, as reported by the daemon.
//! * [`journal`]: reloads and failed reloads.
//! * [`tap`]: live queries of both paths.
//! * [`status`], [`api`]: all of it, for programs and for our command line.

pub mod api;
pub mod board;
pub(crate) mod http;
pub mod journal;
pub mod metrics;
pub mod probe;
pub mod status;
pub mod tap;
pub mod version;
