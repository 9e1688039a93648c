//! Version of this binary.

/// Version of the package, from Cargo.toml.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Commit from which the binary was built, set by `cargo xtask` (`BOSH_DNS_XDP_COMMIT`); `unknown`
/// in a plain cargo build.
pub const COMMIT: &str = env!("BOSH_DNS_XDP_COMMIT");

/// Version and commit, as shown by `--version`.
pub const VERSION_AND_COMMIT: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("BOSH_DNS_XDP_COMMIT"), ")");
