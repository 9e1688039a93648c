//! Memory of mmap-able BPF arrays.

use std::{
    os::fd::{AsFd as _, AsRawFd as _},
    ptr::NonNull,
};

use anyhow::{Context as _, Result};
use aya::maps::MapData;
use dns_common::entry::{CHUNK_SIZE, EntryHeader, Location};
use zerocopy::FromBytes as _;

/// A BPF array mapped for reading and writing.
pub struct Mapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that no thread owns.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a map.
    pub fn of(map: &MapData, len: usize) -> Result<Self> {
        let fd = map.fd().as_fd().as_raw_fd();
        let len = len.next_multiple_of(4096);
        // SAFETY: a new mapping at an address chosen by the kernel.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error()).context("cannot map a BPF array");
        }
        let address = NonNull::new(address.cast()).context("mapped at address zero")?;
        Ok(Self { address, len })
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` bytes are mapped as long as `self` lives; programs run
        // only inside calls of the tests, which do not hold on to the slice.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, and no slice outlives `self`.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

/// Reads the header of the entry at `location`.
pub fn header_at(entries: &mut Mapping, location: Location) -> EntryHeader {
    let start = offset_in_arena(location);
    EntryHeader::read_from_bytes(&entries.bytes_mut()[start..start + size_of::<EntryHeader>()])
        .expect("sliced to the size of EntryHeader")
}

/// Returns the byte offset of `location` in the store.
pub fn offset_in_arena(location: Location) -> usize {
    location.chunk() as usize * CHUNK_SIZE + location.offset() as usize
}
