//! File stamps, which distinguish versions of a file.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

/// The metadata of a file that changes with its content: replacing it by rename changes the inode,
/// writing in place changes both times, and setting the modification time changes the inode's.
///
/// The kernel's time stamps have tick resolution (1 to 10 ms): two writes within a tick may be
/// indistinguishable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    /// Device and inode number of the file.
    file: (u64, u64),
    size: u64,
    /// Time of the last write: seconds, nanoseconds.
    modified: (i64, i64),
    /// Time of the last inode change: seconds, nanoseconds.
    pub changed: (i64, i64),
}

impl FileStamp {
    /// Returns the stamp of the file at `path`; `None` if there is none.
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
