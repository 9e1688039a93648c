//! The server's settings for the programs: the single element of the map `CONTROL`.

use std::{io, mem::offset_of, os::fd::BorrowedFd, sync::atomic::Ordering};

use dns_common::control::{CLIENT_BUCKETS, Control};
use memmap2::MmapRaw;

use super::{map_shared, words::Words as _};

/// The mapped `CONTROL` map. All accesses are atomic; the programs only read.
#[derive(Debug)]
pub struct ControlPage {
    map: MmapRaw,
}

impl ControlPage {
    /// Maps `CONTROL`.
    pub fn map(map: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self {
            map: map_shared(map, size_of::<Control>())?,
        })
    }

    /// Stores an 8-byte field.
    fn store(&self, offset: usize, value: u64, order: Ordering) {
        self.map.store(offset / 8, value, order);
    }

    /// Stores a 4-byte field.
    fn store_half(&self, offset: usize, value: u32) {
        self.map.store_half(offset / 4, value, Ordering::Relaxed);
    }

    /// Sets the hash seed; must be called before any program is attached.
    pub(crate) fn set_hash_seed(&self, seed: u64) {
        self.store(offset_of!(Control, hash_seed), seed, Ordering::Relaxed);
    }

    /// Sets the end of the lease, in ns of CLOCK_MONOTONIC; 0: no lease.
    pub(crate) fn set_lease(&self, deadline_ns: u64) {
        // With release: not before what was published under this lease.
        self.store(
            offset_of!(Control, lease_deadline_ns),
            deadline_ns,
            Ordering::Release,
        );
    }

    pub(crate) fn lease(&self) -> u64 {
        self.map.load(
            offset_of!(Control, lease_deadline_ns) / 8,
            Ordering::Relaxed,
        )
    }

    /// Permits probes until this time of CLOCK_MONOTONIC, in ns; 0 ends them.
    pub(crate) fn probe_until(&self, until_ns: u64) {
        // Relaxed: a run that sees it late passes one probe more or less.
        self.store(
            offset_of!(Control, probe_until_ns),
            until_ns,
            Ordering::Relaxed,
        );
    }

    /// Sets the number of queries per sample of the tap; 0: off.
    pub(crate) fn set_tap_every(&self, every: u32) {
        self.store_half(offset_of!(Control, tap_every), every);
    }

    pub(crate) fn set_exact_last_used(&self, exact: bool) {
        self.store_half(offset_of!(Control, exact_last_used), u32::from(exact));
    }

    /// Sets the shares that pass to userspace until `until_ns` (CLOCK_MONOTONIC), see
    /// [`Control::pass_shares`].
    pub(crate) fn set_shedding(&self, shares: &[u32; CLIENT_BUCKETS], until_ns: u64) {
        for (bucket, &share) in shares.iter().enumerate() {
            self.store_half(
                offset_of!(Control, pass_shares) + bucket * size_of::<u32>(),
                share,
            );
        }
        // The time last: until then no program looks at the shares.
        self.store(
            offset_of!(Control, shed_until_ns),
            until_ns,
            Ordering::Release,
        );
    }

    /// Ends shedding: all queries pass to userspace.
    pub(crate) fn end_shedding(&self) {
        self.store(offset_of!(Control, shed_until_ns), 0, Ordering::Relaxed);
    }

    /// Sets the generation of the forwarded answers in use; 0: none.
    pub fn set_answer_generation(&self, generation: u64) {
        // With release: what the caller changed before is visible wherever the new generation is.
        self.store(
            offset_of!(Control, answer_generation),
            generation,
            Ordering::Release,
        );
    }

    /// Sets a generation of the forwarded answers unless one is in use, so that the programs look for
    /// answers at all.
    pub(crate) fn begin_answers(&self) {
        if self.map.load(
            offset_of!(Control, answer_generation) / 8,
            Ordering::Relaxed,
        ) == 0
        {
            self.set_answer_generation(1);
        }
    }

    /// Sets the longest reply of the programs, in bytes of DNS message; 0: no limit.
    pub(crate) fn set_max_reply(&self, bytes: u32) {
        self.store_half(offset_of!(Control, max_reply), bytes);
    }

    /// Sets the bits for the OPT of queries and replies, see [`Control::edns`].
    pub(crate) fn set_edns(&self, bits: u32) {
        self.store_half(offset_of!(Control, edns), bits);
    }
}
