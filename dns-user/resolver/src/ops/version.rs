//! What this binary is.

/// Version of the package.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Commit that it was built from, as `cargo xtask` tells (`BOSH_DNS_XDP_COMMIT`);
/// `unknown` where cargo was called alone.
pub const COMMIT: &str = env!("BOSH_DNS_XDP_COMMIT");

/// Both, as `--version` shows them.
pub const VERSION_AND_COMMIT: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("BOSH_DNS_XDP_COMMIT"), ")");
