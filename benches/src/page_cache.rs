//! The programs in the page cache, on which the memory of their processes depends.

use std::{fs::File, io::Read as _, path::Path};

use anyhow::{Context, Result};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

/// Reads a program into the page cache page by page, as page faults do after a machine's start.
///
/// A program that was just linked or copied is cached in large folios, and Linux 6.18 maps all of a folio around a page
/// fault. So PSS of one and the same server differed by 2 MiB (performance.md).
pub fn read_by_pages(program: &Path) -> Result<()> {
    let mut file = File::open(program).with_context(|| program.display().to_string())?;
    // Pages that are not on the disk yet cannot be dropped.
    file.sync_all()?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM)?;
    let mut page = [0; 4096];
    while file.read(&mut page)? > 0 {}
    Ok(())
}
