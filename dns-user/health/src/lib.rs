//! Health of instances: who is checked, how, and what is known; and the health
//! server that other machines ask.
//!
//! * [`HealthStates`]: what is known, for [`dns_core::resolve::resolve`].
//! * [`Tracker`]: which names were asked last, and which instances they need.
//! * `watcher`: carries the checks out on a thread of its own, in the order
//!   that `schedule` (pure) decides.
//! * [`server`]: the process that answers `GET /health`.

mod check;
mod metered;
mod metrics;
mod pulse;
mod report;
mod schedule;
pub mod server;
mod service;
mod sight;
mod states;
mod tracker;
mod watcher;

pub use self::{
    metrics::HealthMetrics,
    report::Report,
    service::{HealthError, HealthService},
    states::{HealthStates, InstanceHealth},
    tracker::{Limits, Order, Tracker},
};

/// The name that certificates of both ends are issued to (observed).
pub const HEALTH_NAME: &str = "health.bosh-dns";
