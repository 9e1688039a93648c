//! The server's settings for the programs: the single element of the map `CONTROL`.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use dns_common::control::{CLIENT_BUCKETS, Control};
use memmap2::MmapRaw;

use super::map_shared;

/// The mapped `CONTROL` map, with the server's settings for the programs.
#[derive(Debug)]
pub(crate) struct ControlPage {
    /// The mapping of the one element.
    map: MmapRaw,
}

impl ControlPage {
    pub(crate) fn map(map: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self { map: map_shared(map, size_of::<Control>())? })
    }

    /// Returns a pointer to a field at `offset` bytes.
    fn field<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= size_of::<Control>(), "a field of Control");
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.map.as_mut_ptr().add(offset) }.cast()
    }

    /// Returns the word at `offset`, for atomic access.
    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the offsets come from `offset_of!` of 8-byte fields of a
        // mapping that is page-aligned and lives as long as `self`; the program
        // only reads it.
        unsafe { AtomicU64::from_ptr(self.field(offset)) }
    }

    /// Returns the half word at `offset`, for atomic access.
    fn half(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as in `word`, for 4-byte fields.
        unsafe { AtomicU32::from_ptr(self.field(offset)) }
    }

    /// Sets the hash seed; must be called before any program is attached.
    pub(crate) fn set_hash_seed(&self, seed: u64) {
        self.word(std::mem::offset_of!(Control, hash_seed)).store(seed, Ordering::Relaxed);
    }

    /// Sets the end of the lease, in ns of CLOCK_MONOTONIC; 0: no lease.
    pub(crate) fn set_lease(&self, deadline_ns: u64) {
        self.word(std::mem::offset_of!(Control, lease_deadline_ns)).store(deadline_ns, Ordering::Release);
    }

    /// Returns the end of the lease.
    pub(crate) fn lease(&self) -> u64 {
        self.word(std::mem::offset_of!(Control, lease_deadline_ns)).load(Ordering::Relaxed)
    }

    /// Sets the number of queries per sample of the tap; 0: off.
    pub(crate) fn set_tap_every(&self, every: u32) {
        self.half(std::mem::offset_of!(Control, tap_every)).store(every, Ordering::Relaxed);
    }

    /// Sets whether last-used times are exact.
    pub(crate) fn set_exact_last_used(&self, exact: bool) {
        self.half(std::mem::offset_of!(Control, exact_last_used)).store(u32::from(exact), Ordering::Relaxed);
    }

    /// Sets the shares that pass to userspace until `until_ns` (CLOCK_MONOTONIC), see
    /// [`Control::pass_shares`].
    pub(crate) fn set_shedding(&self, shares: &[u32; CLIENT_BUCKETS], until_ns: u64) {
        for (bucket, &share) in shares.iter().enumerate() {
            let offset = std::mem::offset_of!(Control, pass_shares) + bucket * size_of::<u32>();
            self.half(offset).store(share, Ordering::Relaxed);
        }
        self.word(std::mem::offset_of!(Control, shed_until_ns)).store(until_ns, Ordering::Release);
    }

    /// Ends shedding: all queries pass to userspace.
    pub(crate) fn end_shedding(&self) {
        self.word(std::mem::offset_of!(Control, shed_until_ns)).store(0, Ordering::Relaxed);
    }

    /// Sets the longest reply of the programs, in bytes of DNS message; 0: no limit.
    pub(crate) fn set_max_reply(&self, bytes: u32) {
        self.half(std::mem::offset_of!(Control, max_reply)).store(bytes, Ordering::Relaxed);
    }

    /// Sets whether the OPT of a reply repeats the client's, see [`Control::echo_opt`].
    pub(crate) fn set_echo_opt(&self, echo: bool) {
        self.half(std::mem::offset_of!(Control, echo_opt)).store(u32::from(echo), Ordering::Relaxed);
    }
}
