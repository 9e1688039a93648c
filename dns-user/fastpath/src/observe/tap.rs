//! The tap: queries sampled by the programs, because tcpdump does not see packets answered at XDP.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use dns_common::tap::TapEvent;
use dns_kit::clock::kernel_monotonic_ns;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
};
use zerocopy::FromBytes as _;

use super::ring::Ring;
use crate::map::control::ControlPage;

/// Maximum number of events forwarded per [`WINDOW`]. Further events are counted and dropped.
const MOST_IN_WINDOW: u32 = 500;

/// Together with [`MOST_IN_WINDOW`] this limits the tap to 5,000 events per second.
const WINDOW: Duration = Duration::from_millis(100);

/// An item delivered by the tap.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "events are handed on one by one, never stored in numbers")]
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
        let ring =
            unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) }.map_err(io::Error::other)?;
        Ok(Self { ring, control })
    }

    /// Passes events to `publish` for as long as `wanted` has a sender. `wanted` is the number of
    /// queries per sample: 1 for all of them, 0 for none.
    pub async fn feed(mut self, mut wanted: watch::Receiver<u32>, mut publish: impl FnMut(TapItem)) {
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
                    self.hand_on(session_start, &mut publish);
                    // During the window events wait in the buffer or are lost if it is full.
                    tokio::time::sleep(WINDOW).await;
                },
            }
        }
        self.control.set_tap_every(0);
    }

    async fn readable(&self) -> io::Result<()> {
        self.ring.readable().await.map(|mut guard| guard.clear_ready())
    }

    /// Forwards the buffered events not older than `session_start` (ns of the kernel's monotonic
    /// clock), up to the limit; counts the rest.
    fn hand_on(&mut self, session_start: u64, publish: &mut impl FnMut(TapItem)) {
        let begun = Instant::now();
        let (mut handed, mut lost) = (0, 0);
        let mut record = [0; size_of::<TapEvent>()];
        while let Some(length) = self.ring.get_mut().next(&mut record) {
            match TapEvent::read_from_bytes(&record[..length]) {
                Ok(event) if event.time_ns < session_start => {}
                Ok(event) if handed < MOST_IN_WINDOW => {
                    handed += 1;
                    let age = kernel_monotonic_ns().saturating_sub(event.time_ns);
                    publish(TapItem::Event(event, Duration::from_nanos(age)));
                }
                _ => lost += 1,
            }
            // The program may add events as fast as they are removed, so the time is limited as
            // well.
            if begun.elapsed() >= WINDOW {
                break;
            }
        }
        if lost > 0 {
            publish(TapItem::Lost(lost));
        }
    }
}
