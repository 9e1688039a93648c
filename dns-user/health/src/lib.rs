//! Health of instances: checks them and keeps their states; also the health server that other machines check.
//! * [`HealthStates`]: the known states, read by [`dns_core::resolve::resolve`].
//! * [`Tracker`]: the names queried most recently, and the instances they need.
//! * `watcher`: runs the checks on a separate thread, in the order that `schedule` (no I/O)
//!   decides.
//! * [`server`]: the process that answers `GET /health`.

mod check;
mod metrics;
mod schedule;
pub mod server;
mod service;
mod states;
#[cfg(test)]
mod tests;
mod tracker;
mod watcher;

pub use self::{
    metrics::{HealthMetrics, HealthOutage, NoAnswers},
    service::HealthService,
    states::{HealthStates, InstanceHealth, InstanceSet},
    tracker::{Limits, Tracked, Tracker, WatcherCommand},
};
pub use check::Report;

/// Name in the certificates of both sides (observed).
pub const HEALTH_NAME: &str = "health.bosh-dns";
