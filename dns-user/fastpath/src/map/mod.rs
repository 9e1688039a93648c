//! The memory from which the programs answer, from userspace's view: mapped BPF arrays.
//!
//! * [`answer`]: encodes a forwarded answer as an entry.
//! * [`layout`]: encodes a name and its addresses as an entry.
//! * [`store`]: the entries' memory, and the allocator of its cells.
//! * [`words`]: access to memory that is read and written concurrently.
//! * [`index`]: the hash table from names to entries.
//! * [`control`]: the server's settings for the programs.
//! * [`counters`]: the programs' counters.

pub(super) mod answer;
pub(super) mod control;
pub(super) mod counters;
pub(super) mod index;
pub(super) mod layout;
pub(super) mod store;
pub(super) mod words;

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use memmap2::{MmapOptions, MmapRaw};

pub use self::{
    control::ControlPage,
    counters::CounterPages,
    index::elements,
    words::{half, word},
};

/// The size of a map. Only bpf(2) reports it, so the attacher sends it to an unprivileged server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Shape {
    /// Bytes of a value; 0 for a ring buffer.
    pub value_size: u32,
    /// Elements; bytes of a ring buffer.
    pub elements: u32,
}

/// Maps `length` bytes of an mmap-able BPF array.
pub fn map_shared(map: BorrowedFd<'_>, length: usize) -> io::Result<MmapRaw> {
    MmapOptions::new().len(length).map_raw(map.as_raw_fd())
}
