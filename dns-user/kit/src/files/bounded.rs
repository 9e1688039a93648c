//! Reads files without blocking on special files or exhausting memory.
//!
//! A pattern may match anything: opening a FIFO blocks, opening a device may have side effects, and
//! a file may exceed the available memory.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use super::denied;

/// Maximum file size in bytes. records.json has 2.6 MB for a fleet of 10,000 instances.
const MAX_BYTES: u64 = 256 << 20;

/// Reads a regular file of at most [`MAX_BYTES`].
///
/// The call can still block on a mount whose server is unreachable; latency-sensitive callers run
/// it on a separate thread.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_at_most(path, MAX_BYTES)
}

/// Opens a regular file to read parts of at most [`MAX_BYTES`] in sum.
pub fn open(path: &Path) -> io::Result<io::Take<File>> {
    let (file, _) = open_at_most(path, MAX_BYTES)?;
    Ok(file.take(MAX_BYTES))
}

/// Opens a regular file of at most `limit` bytes; also returns its size.
fn open_at_most(path: &Path, limit: u64) -> io::Result<(File, u64)> {
    let found = fs::metadata(path).map_err(|error| denied::explain(error, path, None))?;
    check(&found, limit)?;
    // The path may have been replaced since the check: do not wait for a FIFO's writer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(|error| denied::explain(error, path, Some(&found)))?;
    let data = file.metadata()?;
    check(&data, limit)?;
    Ok((file, data.len()))
}

/// Reads a regular file of at most `limit` bytes as [`read`] does.
pub fn read_at_most(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, size) = open_at_most(path, limit)?;
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
    // The file may have grown since.
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        Err(too_large(limit))
    } else {
        Ok(bytes)
    }
}

/// Returns whether `path` exists but is not a regular file. A missing or inaccessible file is not
/// special; reading it fails.
pub fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|data| !data.is_file())
}

/// Rejects special and oversized files.
fn check(data: &Metadata, limit: u64) -> io::Result<()> {
    match data {
        data if !data.is_file() => Err(io::Error::other("it is not a regular file")),
        data if data.len() > limit => Err(too_large(limit)),
        _ => Ok(()),
    }
}

fn too_large(limit: u64) -> io::Error {
    let size = if limit < 1 << 20 {
        format!("{limit} bytes")
    } else {
        format!("{} MiB", limit >> 20)
    };
    io::Error::new(
        io::ErrorKind::FileTooLarge,
        format!("it is larger than {size}"),
    )
}

//----------- FileStamp ------------------------------------------------------

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        for special in [fifo.as_path(), folder.path(), Path::new("/dev/zero")] {
            assert!(is_special(special));
            assert_eq!(
                read(special).unwrap_err().to_string(),
                "it is not a regular file"
            );
        }
        let file = folder.path().join("file");
        fs::write(&file, "text").unwrap();
        assert_eq!(read(&file).unwrap(), b"text");
        assert!(!is_special(&file) && !is_special(&folder.path().join("missing")));
        assert_eq!(read_at_most(&file, 4).unwrap(), b"text");
        assert!(read_at_most(&file, 3).is_err());
        // Sparse: it occupies no disk blocks.
        File::create(&file).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert_eq!(
            read(&file).unwrap_err().to_string(),
            "it is larger than 256 MiB"
        );
        assert!(open(&file).is_err());
    }

    #[test]
    fn sizes_and_stamps_are_exact() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "12345").unwrap();
        assert_eq!(read_at_most(file.path(), 5).unwrap(), b"12345");
        let error = read_at_most(file.path(), 4).unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string()),
            (
                io::ErrorKind::FileTooLarge,
                "it is larger than 4 bytes".to_owned()
            )
        );
        for (limit, text) in [
            ((1 << 20) - 1, "1048575 bytes"),
            (1 << 20, "1 MiB"),
            (3 << 20, "3 MiB"),
        ] {
            assert_eq!(
                too_large(limit).to_string(),
                format!("it is larger than {text}")
            );
        }
        let mut read = String::new();
        open(file.path())
            .unwrap()
            .read_to_string(&mut read)
            .unwrap();
        assert_eq!(read, "12345");
        assert!(is_special(Path::new("/dev/null")) && is_special(Path::new("/")));
        assert!(!is_special(file.path()) && !is_special(Path::new("/none")));
        let before = FileStamp::of(file.path());
        assert_eq!(
            (FileStamp::of(file.path()), FileStamp::of("/none")),
            (before, None)
        );
        fs::write(file.path(), "123456").unwrap();
        assert_ne!(FileStamp::of(file.path()), before);
    }

    /// Files of /proc have the size 0.
    #[test]
    fn files_without_sizes_are_bounded() {
        let file = Path::new("/proc/sys/kernel/ostype");
        assert_eq!(read_at_most(file, 6).unwrap(), b"Linux\n");
        assert_eq!(
            read_at_most(file, 5).unwrap_err().to_string(),
            "it is larger than 5 bytes"
        );
    }
}
