//! What an operator touches: API, metrics, logs, status.
//!
//! * [`logs`]: one line per event, levels by tag, changeable at run time.
//! * [`metrics`]: every name in one place, one registry, one exposition.
//! * [`probe`]: whether the server is well.
//! * [`journal`]: what was read anew, what could not be used.
//! * [`tap`]: live queries of both paths; [`request`]: what is told of one.
//! * [`status`], [`api`]: all of it for programs and for our own command line.

pub mod api;
pub(crate) mod http;
pub mod journal;
pub mod logs;
pub mod metrics;
pub mod probe;
pub mod request;
pub mod status;
pub mod tap;
pub mod version;
