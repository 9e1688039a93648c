//! Reads a BPF ring buffer through its mapping alone, without bpf(2), so that an unprivileged
//! process with the descriptor can read it.
//!
//! Layout (Linux, `kernel/bpf/ringbuf.c`, 5.8): a page with the reader's position, a page with the
//! writer's, and the data mapped twice in a row, so that no record is split.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::atomic::Ordering,
};

use memmap2::{MmapOptions, MmapRaw};
use nix::unistd::{SysconfVar, sysconf};

use crate::map::words::Words as _;

/// Bit of a record's header: the record is still being written.
const BUSY: u32 = 1 << 31;

/// Bit of a record's header: the record must be skipped.
const DISCARDED: u32 = 1 << 30;

/// Bytes before each record: its length with the bits, and a number for the kernel's own use.
const HEADER: usize = 8;

/// The reading end of the ring buffer. Every access goes through [`Words`], which is atomic and
/// checks bounds, so a buffer overwritten by another process can only yield a wrong record.
///
/// [`Words`]: crate::map::words::Words
#[derive(Debug)]
pub(crate) struct Ring {
    /// The map's descriptor, readable while records are pending.
    map: OwnedFd,
    /// The page with the reader's position, written by us.
    reader: MmapRaw,
    /// The writer's position, and the data from `page` on; read-only.
    written: MmapRaw,
    /// Page size in bytes.
    page: usize,
    /// Size of the data in bytes, a power of two.
    size: usize,
}

impl Ring {
    /// Maps a ring buffer of `size` bytes.
    pub(crate) fn map(map: OwnedFd, size: u32) -> io::Result<Self> {
        let (page, size) = (page_size()?, size as usize);
        if !size.is_power_of_two() || size < page {
            return Err(io::Error::other(format!(
                "a ring buffer of {size} bytes: not a power of two, or less than a page"
            )));
        }
        let reader = MmapOptions::new().len(page).map_raw(map.as_raw_fd())?;
        let written =
            MmapOptions::new().offset(page as u64).len(page + 2 * size).map_raw_read_only(map.as_raw_fd())?;
        Ok(Self { map, reader, written, page, size })
    }

    /// Takes the next record, truncated to the length of `record`, and returns the number of bytes
    /// filled. `None` without a record.
    pub(crate) fn next(&mut self, record: &mut [u8]) -> Option<usize> {
        loop {
            let at = self.reader.load(0, Ordering::Relaxed);
            if at == self.written.load(0, Ordering::Acquire) {
                return None;
            }
            // Positions are multiples of 8.
            let start = self.page / 8 + (at as usize & (self.size - 1)) / 8;
            let [a, b, c, d, ..] = self.written.load(start, Ordering::Acquire).to_ne_bytes();
            let header = u32::from_ne_bytes([a, b, c, d]);
            let length = (header & !(BUSY | DISCARDED)) as usize;
            if header & BUSY != 0 || length > self.size - HEADER {
                return None;
            }
            let taken = length.min(record.len());
            // The record is contiguous after its header, inside the data or its second mapping; the
            // kernel does not write there until the record is released.
            for (index, part) in record[..taken].chunks_mut(8).enumerate() {
                let word = self.written.load(start + HEADER / 8 + index, Ordering::Relaxed);
                part.copy_from_slice(&word.to_ne_bytes()[..part.len()]);
            }
            let next = at + (HEADER + length).next_multiple_of(8) as u64;
            self.reader.store(0, next, Ordering::Release);
            if header & DISCARDED == 0 {
                return Some(taken);
            }
        }
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }
}

impl AsRawFd for Ring {
    fn as_raw_fd(&self) -> RawFd {
        self.map.as_raw_fd()
    }
}

fn page_size() -> io::Result<usize> {
    let size = sysconf(SysconfVar::PAGE_SIZE)?;
    size.and_then(|size| usize::try_from(size).ok()).ok_or_else(|| io::Error::other("no page size"))
}
