//! What this binary is.

/// Version of the package.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Commit that it was built from, where the builder told (`BOSH_DNS_XDP_COMMIT`).
pub const COMMIT: &str = match option_env!("BOSH_DNS_XDP_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
