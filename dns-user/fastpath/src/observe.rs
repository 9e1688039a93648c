//! Reports of the programs: the tap, which samples queries because tcpdump does not see packets answered at XDP.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use dns_common::tap::TapEvent;
use dns_kit::clock::kernel_monotonic_ns;
use memmap2::{MmapOptions, MmapRaw};
use nix::unistd::{SysconfVar, sysconf};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
};
use zerocopy::FromBytes as _;

use crate::map::{control::ControlPage, words::Words as _};

/// Maximum number of events forwarded per [`WINDOW`]. Further events are counted and dropped.
const MAX_IN_WINDOW: u32 = 500;

/// Together with [`MAX_IN_WINDOW`] this limits the tap to 5,000 events per second.
const WINDOW: Duration = Duration::from_millis(100);

/// An item delivered by the tap.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "events are handed on one by one, never stored in numbers"
)]
pub enum TapItem {
    /// A sampled query, and the time since the program saw it.
    Event(TapEvent, Duration),
    /// Number of sampled queries dropped beyond the limit of one window.
    Lost(u32),
}

/// Reads events from the ring buffer.
pub struct TapReader {
    /// The buffer, registered with tokio.
    ring: AsyncFd<Ring>,
    /// The page that holds the sampling rate.
    control: Arc<ControlPage>,
}

impl TapReader {
    /// Reads from the map `TAP`. Must be called within a tokio runtime.
    pub(crate) fn new(ring: Ring, control: Arc<ControlPage>) -> io::Result<Self> {
        // SAFETY: the ring buffer owns its descriptor, which stays open and unchanged as long as
        // the buffer lives, and the buffer lives inside the `AsyncFd`.
        let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) }
            .map_err(io::Error::other)?;
        Ok(Self { ring, control })
    }

    /// Passes events to `publish` for as long as `wanted` has a sender. `wanted` is the number of
    /// queries per sample: 1 for all of them, 0 for none.
    pub async fn feed(
        mut self,
        mut wanted: watch::Receiver<u32>,
        mut publish: impl FnMut(TapItem),
    ) {
        // Events older than this belong to an earlier session that ended with a full buffer.
        let mut session_start = 0;
        let mut before = 0;
        loop {
            let every = *wanted.borrow_and_update();
            if before == 0 && every > 0 {
                session_start = kernel_monotonic_ns();
            }
            before = every;
            self.control.set_tap_every(every);
            tokio::select! {
                changed = wanted.changed() => if changed.is_err() {
                    break;
                },
                events = self.readable(), if every > 0 => if let Err(error) = events {
                    tracing::warn!(%error, "cannot read the ring buffer TAP: `tap` no longer shows fast-path queries");
                    break;
                } else {
                    self.publish_events(session_start, &mut publish);
                    // During the window events wait in the buffer or are lost if it is full.
                    tokio::time::sleep(WINDOW).await;
                },
            }
        }
        // The reader has ended: programs that go on sampling would fill the buffer for nothing.
        self.control.set_tap_every(0);
    }

    async fn readable(&self) -> io::Result<()> {
        self.ring
            .readable()
            .await
            .map(|mut guard| guard.clear_ready())
    }

    /// Forwards the buffered events not older than `session_start` (ns of the kernel's monotonic
    /// clock), up to the limit; counts the rest.
    fn publish_events(&mut self, session_start: u64, publish: &mut impl FnMut(TapItem)) {
        let begun = Instant::now();
        let mut handed = 0;
        let mut lost = 0;
        let mut record = [0; size_of::<TapEvent>()];
        while let Some(length) = self.ring.get_mut().next(&mut record) {
            match TapEvent::read_from_bytes(&record[..length]) {
                Ok(event) if event.time_ns < session_start => {}
                Ok(event) if handed < MAX_IN_WINDOW => {
                    handed += 1;
                    let age = kernel_monotonic_ns().saturating_sub(event.time_ns);
                    publish(TapItem::Event(event, Duration::from_nanos(age)));
                }
                _ => lost += 1,
            }
            // The program may add events as fast as they are removed, so the time is limited as well.
            if begun.elapsed() >= WINDOW {
                break;
            }
        }
        if lost > 0 {
            publish(TapItem::Lost(lost));
        }
    }
}

/// Bit of a record's header: the record is still being written.
const BUSY: u32 = 1 << 31;

/// Bit of a record's header: the record must be skipped.
const DISCARDED: u32 = 1 << 30;

/// Bytes before each record: its length with the bits, and a number for the kernel's own use.
const HEADER: usize = 8;

/// The reading end of a BPF ring buffer. Reads through its mapping alone, without bpf(2), so that an
/// unprivileged process with the descriptor can read it.
///
/// Layout (Linux, `kernel/bpf/ringbuf.c`, 5.8): a page with the reader's position, a page with the
/// writer's, and the data mapped twice in a row, so that no record is split.
///
/// Every access goes through [`Words`], which is atomic and
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
    page: usize,
    /// Size of the data in bytes, a power of two.
    size: usize,
}

impl Ring {
    /// Maps a ring buffer of `size` bytes.
    pub(crate) fn map(map: OwnedFd, size: u32) -> io::Result<Self> {
        let page = page_size()?;
        let size = size as usize;
        if !size.is_power_of_two() || size < page {
            return Err(io::Error::other(format!(
                "a ring buffer of {size} bytes: not a power of two, or less than a page"
            )));
        }
        let reader = MmapOptions::new().len(page).map_raw(map.as_raw_fd())?;
        let written = MmapOptions::new()
            .offset(page as u64)
            .len(page + 2 * size)
            .map_raw_read_only(map.as_raw_fd())?;
        Ok(Self {
            map,
            reader,
            written,
            page,
            size,
        })
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
            // Records follow in order, so one that is being written holds up those after it, for a
            // moment.
            if header & BUSY != 0 || length > self.size - HEADER {
                return None;
            }
            let taken = length.min(record.len());
            // The record is contiguous after its header, inside the data or its second mapping; the
            // kernel does not write there until the record is released.
            for (index, part) in record[..taken].chunks_mut(8).enumerate() {
                let word = self
                    .written
                    .load(start + HEADER / 8 + index, Ordering::Relaxed);
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
    size.and_then(|size| usize::try_from(size).ok())
        .ok_or_else(|| io::Error::other("no page size"))
}
