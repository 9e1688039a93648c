//! Data beside the project: recorded behaviour of the reference server and a
//! real foundation's records.

use std::path::{Path, PathBuf};

/// Names another folder than `../shared`.
const VARIABLE: &str = "BOSH_DNS_XDP_SHARED";

/// A folder or file below the shared data; `None`, and a line that says so, if it is not there.
pub fn path(below: &str) -> Option<PathBuf> {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared");
    let path = std::env::var_os(VARIABLE).map_or(default, PathBuf::from).join(below);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} is not there ({VARIABLE} names another folder)", path.display());
    None
}

/// The recorded scenarios and their replay tool.
pub fn conformance() -> Option<PathBuf> {
    path("conformance")
}

/// A real foundation: `records.json` and `aliases.json`.
pub fn prodlike() -> Option<PathBuf> {
    path("data/prodlike")
}
