//! The operator's interfaces: API, metrics, status.
//!
//! * [`metrics`]: one registry and its exposition.
//! * [`readiness`]: liveness and readiness checks.
//! * [`service_status`]: state of files and sockets, reloads and failed reloads, as reported by the
//!   daemon.
//! * [`overload`]: dropped and refused queries, and the affected clients.
//! * [`tap`]: live queries of both paths.
//! * `top_names`: the names that interfaces answer most.
//! * [`status`], [`api`]: all of this, for other programs and for our command line.

pub mod api;
pub mod metrics;
pub mod overload;
pub mod readiness;
pub mod service_status;
pub mod status;
pub mod tap;
mod top_names;
pub mod version;
