//! Sources of the workspace, as read by several tests.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Returns the Rust files at or below a path.
pub(crate) fn rust_files(path: &Path) -> Vec<PathBuf> {
    if path.is_dir() {
        return fs::read_dir(path)
            .unwrap()
            .flat_map(|entry| rust_files(&entry.unwrap().path()))
            .collect();
    }
    let is_rust = path.extension().is_some_and(|extension| extension == "rs");
    is_rust.then(|| path.to_owned()).into_iter().collect()
}

/// Returns whether a file holds tests only.
pub(crate) fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("_tests.rs")
}
