//! The operator's interfaces: API, metrics, status.
//!
//! * [`metrics`]: one registry and its exposition.
//! * `conditions`: what an operator must know; [`readiness`]: liveness and readiness checks.
//! * [`service_status`]: state of files and sockets, reloads and failed reloads, as reported by the
//!   daemon.
//! * [`tap`]: live queries of both paths, and the names that interfaces answer most.
//! * [`status`], [`api`]: all of this, for other programs and for our command line.

pub mod api;
pub(crate) mod conditions;
pub mod metrics;
pub mod readiness;
pub mod service_status;
pub mod status;
pub mod tap;

/// Version of this binary.
pub mod version {
    /// Version of the package, from Cargo.toml.
    pub const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// Commit from which the binary was built, set by `cargo xtask` (`BOSH_DNS_XDP_COMMIT`); `unknown`
    /// in a plain cargo build.
    pub const COMMIT: &str = env!("BOSH_DNS_XDP_COMMIT");

    /// Version and commit, as shown by `--version`.
    pub const VERSION_AND_COMMIT: &str = concat!(
        env!("CARGO_PKG_VERSION"),
        " (commit ",
        env!("BOSH_DNS_XDP_COMMIT"),
        ")"
    );
}
