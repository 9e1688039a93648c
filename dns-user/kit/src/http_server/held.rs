//! Bytes that a server holds for its peers: of responses that are unread, and of requests that are not answered.
//!
//! All peers together have a limit, and each peer half of it: no peer takes the room of the others. Bytes that
//! exceed a limit close connections whose peer makes no progress; if that is not enough, they are refused, so that
//! peers that go on reading or sending are never cut off. What one peer alone holds is limited by the size of a
//! single request or response.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::connections::Peer;

/// Time without progress after which a peer counts as stalled.
pub(super) const STALLED: Duration = Duration::from_secs(1);

/// The bytes that a server holds, with their limit; clones share them.
#[derive(Clone)]
pub(super) struct HeldBytes {
    max: usize,
    table: Arc<Mutex<HeldTable>>,
}

#[derive(Default)]
struct HeldTable {
    /// Number of the next entry; none is used again, because a closed connection ends later than its entry.
    next: u64,
    entries: Vec<HeldBody>,
}

struct HeldBody {
    number: u64,
    peer: Peer,
    bytes: usize,
    /// Time at which the peer last read or sent something; `None` while it is not the peer's turn.
    progress: Option<Instant>,
    close: Arc<Notify>,
}

impl HeldBytes {
    /// Creates an account of at most `max` bytes.
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            table: Arc::default(),
        }
    }

    /// Adds an entry of `bytes` bytes, whose connection `close` closes; `None` if there is no room. Up to `small`
    /// bytes always have room.
    pub(super) fn admit(
        &self,
        peer: Peer,
        bytes: usize,
        small: usize,
        close: Arc<Notify>,
        now: Instant,
    ) -> Option<HeldPlace> {
        let mut table = self.table.lock();
        if !make_room(&mut table.entries, self.max, peer, bytes, now) && bytes > small {
            return None;
        }
        let number = table.next;
        table.next += 1;
        table.entries.push(HeldBody {
            number,
            peer,
            bytes,
            progress: Some(now),
            close,
        });
        Some(HeldPlace {
            held: self.clone(),
            number,
        })
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.table.lock().entries.len()
    }

    #[cfg(test)]
    pub(super) fn set_progress(&self, index: usize, at: Instant) {
        self.table.lock().entries[index].progress = Some(at);
    }
}

/// Closes stalled connections until `bytes` further bytes of a peer have room; returns whether they have.
fn make_room(
    entries: &mut Vec<HeldBody>,
    max: usize,
    peer: Peer,
    bytes: usize,
    now: Instant,
) -> bool {
    let max_of_peer = max / 2;
    let mut total = 0;
    let mut own = 0;
    for entry in entries.iter() {
        total += entry.bytes;
        if entry.peer == peer {
            own += entry.bytes;
        }
    }
    // The longest stalled connections go first.
    entries.sort_by_key(|entry| entry.progress);
    entries.retain(|entry| {
        let is_own = entry.peer == peer;
        let is_needed = total + bytes > max || is_own && own + bytes > max_of_peer;
        let is_stalled = entry
            .progress
            .is_some_and(|at| now.saturating_duration_since(at) >= STALLED);
        // Closing one that holds nothing would not make room.
        let is_closed = is_needed && entry.bytes > 0 && is_stalled;
        if is_closed {
            total -= entry.bytes;
            own -= if is_own { entry.bytes } else { 0 };
            entry.close.notify_one();
        }
        !is_closed
    });
    // A single body may exceed the limit: otherwise one of its size would never be accepted.
    let is_too_much = total > 0 && total + bytes > max;
    let is_too_much_of_peer = own > 0 && own + bytes > max_of_peer;
    !is_too_much && !is_too_much_of_peer
}

/// An entry in [`HeldBytes`], removed when dropped.
pub(super) struct HeldPlace {
    held: HeldBytes,
    number: u64,
}

impl HeldPlace {
    /// Records that the peer has made progress and `left` bytes are held.
    pub(super) fn progress(&self, left: usize) {
        self.change(|entry| {
            entry.bytes = left;
            entry.progress = Some(Instant::now());
        });
    }

    /// Records that the peer has sent everything, and waits itself.
    pub(super) fn complete(&self) {
        self.change(|entry| entry.progress = None);
    }

    /// Adds bytes that the peer has sent; returns whether they have room. Up to `small` bytes always have.
    pub(super) fn grow(&self, bytes: usize, small: usize) -> bool {
        let now = Instant::now();
        let entries = &mut self.held.table.lock().entries;
        let number = self.number;
        let position = entries.iter().position(|entry| entry.number == number);
        // Taken out, because an entry is no obstacle to its own growth.
        let Some(mut own) = position.map(|position| entries.swap_remove(position)) else {
            // Its connection is being closed for another one.
            return false;
        };
        own.bytes += bytes;
        own.progress = Some(now);
        let has_room = make_room(entries, self.held.max, own.peer, own.bytes, now);
        let is_admitted = has_room || own.bytes <= small;
        entries.push(own);
        is_admitted
    }

    fn change(&self, change: impl FnOnce(&mut HeldBody)) {
        let entries = &mut self.held.table.lock().entries;
        if let Some(entry) = entries.iter_mut().find(|entry| entry.number == self.number) {
            change(entry);
        }
    }
}

impl Drop for HeldPlace {
    fn drop(&mut self) {
        let entries = &mut self.held.table.lock().entries;
        entries.retain(|entry| entry.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const MAX: usize = 16 << 20;

    const MAX_SMALL: usize = 64 << 10;

    #[test]
    fn stalled_responses_are_closed() {
        let responses = HeldBytes::new(MAX);
        let begin = Instant::now();
        let closes: Vec<_> = (0..5).map(|_| Arc::new(Notify::new())).collect();
        let closed = |index: usize| closes[index].notified().now_or_never().is_some();
        let admit = |index: usize, bytes, now| {
            responses.admit(
                Peer::User(index as u32),
                bytes,
                MAX_SMALL,
                closes[index].clone(),
                now,
            )
        };
        let places: Vec<_> = (0..4)
            .map(|index| admit(index, MAX / 4, begin).unwrap())
            .collect();
        assert!(
            admit(4, MAX / 2, begin).is_none(),
            "all of them may still read"
        );
        assert!(admit(4, MAX_SMALL, begin).is_some());
        assert!((0..4).all(|index| !closed(index)));

        let later = begin + STALLED;
        responses.set_progress(0, later);
        assert!(admit(4, MAX / 2, later).is_some());
        assert_eq!([0, 1, 2, 3].map(closed), [false, true, true, false]);
        drop(places);
        assert_eq!(responses.len(), 0);
    }

    #[test]
    fn peer_leaves_room_for_others() {
        let responses = HeldBytes::new(MAX);
        let begin = Instant::now();
        let closes: Vec<_> = (0..4).map(|_| Arc::new(Notify::new())).collect();
        let closed = |index: usize| closes[index].notified().now_or_never().is_some();
        let admit = |peer, index: usize, bytes, now| {
            responses.admit(
                Peer::User(peer),
                bytes,
                MAX_SMALL,
                closes[index].clone(),
                now,
            )
        };
        let first = admit(1, 0, MAX / 2, begin);
        assert!(
            first.is_some() && admit(1, 1, MAX_SMALL + 1, begin).is_none(),
            "one peer has half of the room"
        );
        let other = admit(2, 2, MAX / 2, begin);
        assert!(other.is_some(), "the other half is for others");
        // Only its own stalled responses are closed for its next one.
        drop(other);
        let later = begin + STALLED;
        assert!(admit(3, 3, MAX_SMALL + 1, later).is_some() && !closed(0));
        assert!(admit(1, 1, MAX / 2, later).is_some() && closed(0) && !closed(3));
    }

    #[test]
    fn requests_grow_while_there_is_room() {
        let held = HeldBytes::new(MAX);
        let close = || Arc::new(Notify::new());
        let admit = |peer, close| held.admit(Peer::User(peer), 0, 0, close, Instant::now());
        let first = admit(1, close()).unwrap();
        // Alone, a request may have more than the limit.
        assert!(first.grow(MAX + 1, 0));
        let second = admit(2, close()).unwrap();
        assert!(!second.grow(MAX_SMALL + 1, MAX_SMALL), "no room");
        drop((first, second));
        let slow_close = close();
        let whole_close = close();
        let slow = admit(1, slow_close.clone()).unwrap();
        let whole = admit(1, whole_close.clone()).unwrap();
        assert!(slow.grow(MAX / 4, 0) && whole.grow(MAX / 4, 0));
        whole.complete();
        let third = admit(1, close()).unwrap();
        assert!(!third.grow(MAX_SMALL + 1, MAX_SMALL), "a peer has half");
        drop(third);
        // One that sends nothing gives way to the next, one that waits for its answer does not.
        let stalled = Instant::now() - STALLED;
        for index in 0..2 {
            if held.table.lock().entries[index].progress.is_some() {
                held.set_progress(index, stalled);
            }
        }
        let third = admit(1, close()).unwrap();
        assert!(third.grow(MAX_SMALL + 1, 0));
        assert!(slow_close.notified().now_or_never().is_some());
        assert!(whole_close.notified().now_or_never().is_none());
        assert!(!slow.grow(1, MAX_SMALL), "closed");
    }

    #[test]
    fn room_ends_exactly_at_its_limits() {
        let now = Instant::now();
        let [one, other] = [Peer::User(1), Peer::User(2)];
        let entry = |number, peer, bytes, progress| HeldBody {
            number,
            peer,
            bytes,
            progress,
            close: Arc::default(),
        };
        for (own, others, bytes, has_room) in [
            (20, 20, 30, true),
            (20, 20, 31, false),
            (0, 70, 30, true),
            (0, 70, 31, false),
            // Nothing else is held: the limit is that of a single one.
            (0, 0, 1000, true),
            (1, 0, 49, true),
            (1, 0, 50, false),
        ] {
            let mut entries = vec![
                entry(1, one, own, Some(now)),
                entry(2, other, others, Some(now)),
            ];
            assert_eq!(
                make_room(&mut entries, 100, one, bytes, now),
                has_room,
                "{own} {others} {bytes}"
            );
            assert_eq!(entries.len(), 2, "none has stalled");
        }
        let millisecond = Duration::from_millis(1);
        for (progress, bytes, is_closed) in [
            (Some(now - STALLED), 90, true),
            (Some(now - STALLED + millisecond), 90, false),
            (None, 90, false),
            (Some(now - STALLED), 0, false),
        ] {
            let mut entries = vec![entry(1, other, bytes, progress)];
            let has_room = make_room(&mut entries, 100, one, 20, now);
            assert_eq!(
                (entries.is_empty(), has_room),
                (is_closed, is_closed || bytes == 0),
                "{progress:?}"
            );
        }
        // As many as needed, those first that have stalled longest.
        let stalled =
            |number, seconds: u32| entry(number, other, 30, Some(now - seconds * STALLED));
        let mut entries = vec![stalled(1, 2), stalled(2, 4), stalled(3, 3)];
        assert!(make_room(&mut entries, 100, one, 50, now));
        let left: Vec<u64> = entries.iter().map(|entry| entry.number).collect();
        assert_eq!(left, [1]);
    }

    #[test]
    fn closing_stops_with_enough_room() {
        let now = Instant::now();
        let [one, other] = [Peer::User(1), Peer::User(2)];
        let stalled = Some(now - STALLED);
        let active = Some(now);
        // Bodies held, bytes that the first peer wants, indices of the bodies that stay, and whether there is room.
        for (held, bytes, left, has_room) in [
            (vec![(other, 80, stalled)], 20, vec![0], true),
            (vec![(other, 80, stalled)], 21, vec![], true),
            (vec![(one, 30, stalled)], 20, vec![0], true),
            (vec![(one, 30, stalled)], 21, vec![], true),
            (vec![(one, 10, stalled)], 10, vec![0], true),
            // A peer's own limit is no reason to close the connections of another.
            (
                vec![(other, 40, stalled), (one, 40, active)],
                20,
                vec![0, 1],
                false,
            ),
            (
                vec![(one, 2, stalled), (one, 45, active)],
                10,
                vec![1],
                false,
            ),
            // Those that hold nothing make no room.
            (
                vec![(other, 0, stalled), (other, 90, active)],
                20,
                vec![0, 1],
                false,
            ),
        ] {
            let mut entries = Vec::new();
            for (number, &(peer, bytes, progress)) in (0..).zip(&held) {
                entries.push(HeldBody {
                    number,
                    peer,
                    bytes,
                    progress,
                    close: Arc::default(),
                });
            }
            let found = make_room(&mut entries, 100, one, bytes, now);
            let mut numbers: Vec<u64> = entries.iter().map(|entry| entry.number).collect();
            numbers.sort_unstable();
            assert_eq!((numbers, found), (left, has_room), "{held:?} {bytes}");
        }
    }

    #[test]
    fn taken_bytes_are_free() {
        let held = HeldBytes::new(100);
        let begin = Instant::now();
        let close = Arc::new(Notify::new());
        let admit = |peer, bytes| held.admit(Peer::User(peer), bytes, 0, Arc::default(), begin);
        let first = held
            .admit(Peer::User(1), 50, 0, close.clone(), begin)
            .unwrap();
        assert!(admit(1, 1).is_none());
        first.progress(20);
        assert!(admit(1, 30).is_some() && admit(1, 31).is_none());
        // It goes on reading.
        held.set_progress(0, begin - STALLED);
        first.progress(20);
        assert!(admit(2, 90).is_none());
        assert!(close.notified().now_or_never().is_none());
        held.set_progress(0, begin - STALLED);
        assert!(admit(2, 90).is_some());
        assert!(close.notified().now_or_never().is_some());
    }

    #[test]
    fn small_requests_grow_without_room() {
        let held = HeldBytes::new(MAX);
        let now = Instant::now();
        let admit = |peer| {
            held.admit(Peer::User(peer), 0, 0, Arc::default(), now)
                .unwrap()
        };
        let first = admit(1);
        assert!(first.grow(MAX, 0));
        held.set_progress(0, now + Duration::from_secs(3600));
        let second = admit(2);
        assert!(second.grow(MAX_SMALL, MAX_SMALL));
        assert!(!second.grow(1, MAX_SMALL));
        drop(first);
        assert!(second.grow(1, MAX_SMALL));
    }
}
