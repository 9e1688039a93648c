//! The kernel's maps as userspace sees them: mapped memory, all of them.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
};

use dns_common::{
    control::{Control, Endpoint, MAX_ENDPOINTS},
    counters::{CpuCounters, INTERFACE_SLOTS},
    entry::CHUNK_SIZE,
    index::Pair,
};
use memmap2::{MmapOptions, MmapRaw};

use super::{arena::ArenaMemory, index::IndexMemory, sys};

/// Maps `length` bytes of an mmap-able BPF array.
fn map_shared(map: BorrowedFd<'_>, length: usize) -> io::Result<MmapRaw> {
    use std::os::fd::AsRawFd as _;
    MmapOptions::new().len(length).map_raw(map.as_raw_fd())
}

/// Maps the arena: as many chunks as the map has elements.
pub(super) fn map_arena(map: BorrowedFd<'_>) -> io::Result<ArenaMemory> {
    let (value_size, chunks) = sys::map_shape(map)?;
    if value_size as usize != CHUNK_SIZE {
        return Err(io::Error::other(format!(
            "the arena's chunks have {value_size} bytes, not {CHUNK_SIZE}"
        )));
    }
    Ok(ArenaMemory::new(map_shared(map, chunks as usize * CHUNK_SIZE)?))
}

/// Maps the index of these entries: all elements of `NAMES`.
pub(super) fn map_index(map: BorrowedFd<'_>, entries: Arc<ArenaMemory>) -> io::Result<IndexMemory> {
    let (value_size, elements) = sys::map_shape(map)?;
    if value_size as usize != size_of::<Pair>() {
        return Err(io::Error::other(format!(
            "an index with elements of {value_size} bytes: another layout"
        )));
    }
    Ok(IndexMemory::new(map_shared(map, elements as usize * size_of::<Pair>())?, entries))
}

/// The `CONTROL` map, mapped: what userspace tells the program.
#[derive(Debug)]
pub(super) struct ControlPage {
    /// The mapping of the one element.
    map: MmapRaw,
}

impl ControlPage {
    /// Maps the element.
    pub(super) fn map(map: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self { map: map_shared(map, size_of::<Control>())? })
    }

    /// Pointer to a field at `offset` bytes.
    fn field<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= size_of::<Control>(), "a field of Control");
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.map.as_mut_ptr().add(offset) }.cast()
    }

    /// The word at `offset`, to be read and written in one piece.
    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the offsets come from `offset_of!` of 8-byte fields of a
        // mapping that is page-aligned and lives as long as `self`; the program
        // only reads it.
        unsafe { AtomicU64::from_ptr(self.field(offset)) }
    }

    /// The half word at `offset`.
    fn half(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as in `word`, for 4-byte fields.
        unsafe { AtomicU32::from_ptr(self.field(offset)) }
    }

    /// Sets the seed; before any program is attached.
    pub(super) fn set_hash_seed(&self, seed: u64) {
        self.word(std::mem::offset_of!(Control, hash_seed)).store(seed, Ordering::Relaxed);
    }

    /// Sets the end of the lease, ns of CLOCK_MONOTONIC; 0: off.
    pub(super) fn set_lease(&self, deadline_ns: u64) {
        self.word(std::mem::offset_of!(Control, lease_deadline_ns)).store(deadline_ns, Ordering::Release);
    }

    /// The end of the lease.
    pub(super) fn lease(&self) -> u64 {
        self.word(std::mem::offset_of!(Control, lease_deadline_ns)).load(Ordering::Relaxed)
    }

    /// Sets how many queries there are to one sample of the tap; 0: off.
    pub(super) fn set_tap_every(&self, every: u32) {
        self.half(std::mem::offset_of!(Control, tap_every)).store(every, Ordering::Relaxed);
    }

    /// Sets whether marks of use are exact.
    pub(super) fn set_exact_marks(&self, exact: bool) {
        self.half(std::mem::offset_of!(Control, exact_marks)).store(u32::from(exact), Ordering::Relaxed);
    }

    /// Sets where the server listens; of more than [`MAX_ENDPOINTS`] the first
    /// ones count. Slots that stay the same are not touched.
    pub(super) fn set_endpoints(&self, endpoints: &[Endpoint]) {
        let endpoints = &endpoints[..endpoints.len().min(MAX_ENDPOINTS)];
        let count = self.half(std::mem::offset_of!(Control, endpoint_count));
        let slot = |index: usize| {
            self.field::<Endpoint>(std::mem::offset_of!(Control, endpoints) + index * size_of::<Endpoint>())
        };
        // SAFETY: the slot lies inside the mapping (checked by `field`), and
        // any bytes are an Endpoint.
        let same = |index: usize| unsafe { slot(index).read_volatile() } == endpoints[index];
        let in_use = (count.load(Ordering::Relaxed) as usize).min(MAX_ENDPOINTS);
        let unchanged = (0..in_use.min(endpoints.len())).take_while(|&index| same(index)).count();
        if unchanged == in_use && in_use == endpoints.len() {
            return;
        }
        // The program must not meet a half-written slot: shrink, write, grow.
        count.store(u32::try_from(unchanged).expect("at most MAX_ENDPOINTS"), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        for (index, endpoint) in endpoints.iter().enumerate().skip(unchanged) {
            // SAFETY: the slot lies inside the mapping (checked by `field`).
            unsafe { slot(index).write_volatile(*endpoint) };
        }
        fence(Ordering::SeqCst);
        count.store(u32::try_from(endpoints.len()).expect("at most MAX_ENDPOINTS"), Ordering::Release);
    }

    /// Sets where XDP may hand packets on, see [`Control::second_stages`].
    pub(super) fn set_second_stages(&self, slots: [u64; INTERFACE_SLOTS / 64]) {
        for (index, slots) in slots.into_iter().enumerate() {
            let offset = std::mem::offset_of!(Control, second_stages) + index * size_of::<u64>();
            self.word(offset).store(slots, Ordering::Relaxed);
        }
    }
}

/// The `COUNTERS` map, mapped: one element per possible CPU.
#[derive(Debug)]
pub(super) struct CounterPages {
    /// The mapping.
    map: MmapRaw,
    /// Elements in it.
    cpus: usize,
}

impl CounterPages {
    /// Maps all elements.
    pub(super) fn map(map: BorrowedFd<'_>) -> io::Result<Self> {
        let (value_size, cpus) = sys::map_shape(map)?;
        if value_size as usize != size_of::<CpuCounters>() {
            return Err(io::Error::other(format!("counters of {value_size} bytes: another layout")));
        }
        let cpus = cpus as usize;
        Ok(Self { map: map_shared(map, cpus * size_of::<CpuCounters>())?, cpus })
    }

    /// What each CPU has counted since load.
    pub(super) fn read(&self) -> Vec<CpuCounters> {
        (0..self.cpus)
            .map(|cpu| {
                // SAFETY: element `cpu` lies inside the mapping, and any bytes
                // are a CpuCounters. Each counter is one aligned word, which
                // only its own CPU writes, so none of them is torn.
                unsafe { self.map.as_ptr().cast::<CpuCounters>().add(cpu).read_volatile() }
            })
            .collect()
    }
}
