//! Hands the commit on to the crate (`src/ops/version.rs`): `cargo xtask` names it.

use std::env;

fn main() {
    const VARIABLE: &str = "BOSH_DNS_XDP_COMMIT";
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let commit = env::var(VARIABLE).unwrap_or_else(|_| "unknown".to_owned());
    println!("cargo::rustc-env={VARIABLE}={commit}");
}
