//! Reads a BPF ring buffer by its mapping alone, without bpf(2), so that an unprivileged process
//! with the descriptor can read it.
//!
//! Layout (Linux, `kernel/bpf/ringbuf.c`, 5.8): a page with the reader's position, a page with the
//! writer's, and the data mapped twice in a row, so that no record is split.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use memmap2::{MmapOptions, MmapRaw};

/// Bit of a record's header: the record is still being written.
const BUSY: u32 = 1 << 31;

/// Bit of a record's header: the record must be skipped.
const DISCARDED: u32 = 1 << 30;

/// Bytes before each record: its length with the bits, and a number for the kernel's own use.
const HEADER: usize = 8;

/// The reading end of the ring buffer.
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
        let (page, size) = (page_size(), size as usize);
        if !size.is_power_of_two() {
            return Err(io::Error::other(format!("a ring buffer of {size} bytes: not a power of two")));
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
            let at = self.position().load(Ordering::Relaxed);
            if at == self.end().load(Ordering::Acquire) {
                return None;
            }
            let start = self.page + (at as usize & (self.size - 1));
            // SAFETY: positions are multiples of 8, so a whole header lies inside the mapping, aligned.
            let header = unsafe { AtomicU32::from_ptr(self.written.as_mut_ptr().add(start).cast()) }
                .load(Ordering::Acquire);
            let length = (header & !(BUSY | DISCARDED)) as usize;
            if header & BUSY != 0 || length > self.size {
                return None;
            }
            let taken = length.min(record.len());
            // SAFETY: a record, whose length was just checked, lies in one piece after its header,
            // inside the data or its repetition; the kernel does not write there until it is given
            // back.
            unsafe {
                let from = self.written.as_ptr().add(start + HEADER);
                std::ptr::copy_nonoverlapping(from, record.as_mut_ptr(), taken);
            }
            let next = at + (HEADER + length).next_multiple_of(8) as u64;
            self.position().store(next, Ordering::Release);
            if header & DISCARDED == 0 {
                return Some(taken);
            }
        }
    }

    /// Returns the reader's position.
    fn position(&self) -> &AtomicU64 {
        // SAFETY: the first word of a mapped page, which lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.reader.as_mut_ptr().cast()) }
    }

    /// Returns the writer's position.
    fn end(&self) -> &AtomicU64 {
        // SAFETY: the first word of a mapped page, which lives as long as `self`; only ever loaded.
        unsafe { AtomicU64::from_ptr(self.written.as_mut_ptr().cast()) }
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

fn page_size() -> usize {
    // SAFETY: it takes no pointers.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("every system has pages")
}
