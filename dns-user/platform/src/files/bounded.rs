//! Reading a file without being held up by what lies in its place.
//!
//! A pattern may match anything: a FIFO blocks whoever opens it, a device may do
//! something when it is opened, and a file may be larger than the memory.

use std::{
    fs::{self, Metadata, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

/// Most bytes of one file. records.json of a fleet of 10,000 instances has 2.6 MB.
const MOST_BYTES: u64 = 256 << 20;

/// Reads a regular file of at most [`MOST_BYTES`].
///
/// A mount whose server is gone can still block this call, as any other: who must
/// not be blocked calls it on a thread of its own.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    check(&fs::metadata(path)?)?;
    // Something else may lie there by now: a FIFO without a writer is not waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let data = file.metadata()?;
    check(&data)?;
    let mut bytes = Vec::with_capacity(usize::try_from(data.len()).unwrap_or(0));
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES { Err(too_large()) } else { Ok(bytes) }
}

/// Whether something other than a regular file lies at `path`; what is missing or
/// cannot be looked at counts as a file that cannot be read.
pub fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|data| !data.is_file())
}

/// Refuses what is not to be read.
fn check(data: &Metadata) -> io::Result<()> {
    match data {
        data if !data.is_file() => Err(io::Error::other("it is not a regular file")),
        data if data.len() > MOST_BYTES => Err(too_large()),
        _ => Ok(()),
    }
}

/// The file has too many bytes.
fn too_large() -> io::Error {
    io::Error::other(format!("it is larger than {} MiB", MOST_BYTES >> 20))
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
            assert_eq!(read(special).unwrap_err().to_string(), "it is not a regular file");
        }
        let file = folder.path().join("file");
        fs::write(&file, "text").unwrap();
        assert_eq!(read(&file).unwrap(), b"text");
        assert!(!is_special(&file) && !is_special(&folder.path().join("missing")));
        // Sparse: no byte of it is on the disk.
        fs::File::create(&file).unwrap().set_len(MOST_BYTES + 1).unwrap();
        assert_eq!(read(&file).unwrap_err().to_string(), "it is larger than 256 MiB");
    }
}
