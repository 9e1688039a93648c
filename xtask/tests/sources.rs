//! Sources of the workspace, as read by several tests.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Returns the folder of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Returns the Rust files at or below a path.
pub(crate) fn rust_files(path: &Path) -> Vec<PathBuf> {
    let mut files = files(path);
    files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
    files
}

/// Returns the files at or below a path.
pub(crate) fn files(path: &Path) -> Vec<PathBuf> {
    if !path.is_dir() {
        return vec![path.to_owned()];
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        found.extend(files(&entry.unwrap().path()));
    }
    found
}

/// Returns whether a file holds tests only.
pub(crate) fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("_tests.rs")
}
