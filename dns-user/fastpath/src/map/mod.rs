//! The memory that the programs answer from, as userspace sees it: mapped BPF arrays.
//!
//! * [`layout`]: a name and its addresses as the bytes of an entry.
//! * [`store`]: where entries lie: the memory, and which cells of it are free.
//! * [`words`]: reading and writing while others do.
//! * [`index`]: the hash table from names to entries.
//! * [`control`]: what the server tells the programs.
//! * [`scope`]: what the attaching process tells them.
//! * [`counters`]: what the programs have counted.

pub(super) mod control;
pub(super) mod counters;
pub(super) mod index;
pub(super) mod layout;
pub(super) mod scope;
pub(super) mod store;
pub(super) mod words;

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use memmap2::{MmapOptions, MmapRaw};

/// The size of a map, which only bpf(2) tells: whoever may not call that is told by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Shape {
    /// Bytes of a value; 0 for a ring buffer.
    pub(super) value_size: u32,
    /// Elements; bytes of a ring buffer.
    pub(super) elements: u32,
}

/// Maps `length` bytes of an mmap-able BPF array.
fn map_shared(map: BorrowedFd<'_>, length: usize) -> io::Result<MmapRaw> {
    MmapOptions::new().len(length).map_raw(map.as_raw_fd())
}
