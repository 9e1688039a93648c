//! What an operator touches: API, metrics, logs, status.
//!
//! * [`logs`]: one line per event, levels by tag, changeable at run time.
//! * [`metrics`]: every name in one place, one registry, one exposition.
//! * [`probe`]: whether the server is well.

pub mod logs;
pub mod metrics;
pub mod probe;
pub mod version;
