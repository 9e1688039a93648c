//! What tells one version of a file from the next, for whoever follows files.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

/// The outside of a file, which changes with its content: a rename puts another
/// inode there; rewriting it in place moves both times, and a modification time
/// set by hand moves the other one.
///
/// The kernel stamps files by its tick (1 to 10 ms): two writes within one may look alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    /// Device and inode.
    file: (u64, u64),
    /// Bytes.
    size: u64,
    /// Time of the last write: seconds, nanoseconds.
    modified: (i64, i64),
    /// Time of the last change of the inode.
    pub changed: (i64, i64),
}

impl FileStamp {
    /// That of the file behind `path` now; `None`: there is none.
    pub fn of(path: impl AsRef<Path>) -> Option<Self> {
        let data = fs::metadata(path).ok()?;
        Some(Self {
            file: (data.dev(), data.ino()),
            size: data.size(),
            modified: (data.mtime(), data.mtime_nsec()),
            changed: (data.ctime(), data.ctime_nsec()),
        })
    }
}
