//! Limits of TCP connections, and the replies that all of them hold.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

/// Maximum number of queries of one connection that wait for recursors, handlers or checks at a
/// time; at the limit no more are read.
pub(super) const MAX_WAITING: usize = 64;
/// How long a client may take to accept replies before its connection is closed.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of replies that a connection may hold. At the limit it reads no further query; the
/// reply that exceeds the limit has at most 64 KiB.
pub(super) const MAX_HELD: usize = 128 << 10;
/// Maximum bytes of replies that all connections together may hold. A connection with held replies
/// reads further queries only while it holds less than the remainder.
const MAX_HELD_BY_ALL: usize = 16 << 20;
/// The limits above, by resource.
pub(super) const LIMITS: [(&str, usize); 4] = [
    ("tcp_connection_waiting_queries", MAX_WAITING),
    ("tcp_connection_reply_bytes", MAX_HELD),
    ("tcp_reply_bytes", MAX_HELD_BY_ALL),
    ("tcp_unread_seconds", WRITE_TIMEOUT.as_secs() as usize),
];

/// Bytes of replies that all connections hold.
static HELD_BY_ALL: AtomicUsize = AtomicUsize::new(0);

pub(super) fn held_by_all() -> usize {
    // A limit of memory need not be exact: connections on other CPUs may exceed it by a reply each.
    HELD_BY_ALL.load(Ordering::Relaxed)
}

/// Bytes of replies that one connection holds, as part of the total.
pub(super) struct HeldBytes(usize);

impl HeldBytes {
    pub(super) const fn new() -> Self {
        Self(0)
    }

    pub(super) fn set(&mut self, bytes: usize) {
        let Self(before) = self;
        if bytes >= *before {
            HELD_BY_ALL.fetch_add(bytes - *before, Ordering::Relaxed);
        } else {
            HELD_BY_ALL.fetch_sub(*before - bytes, Ordering::Relaxed);
        }
        *before = bytes;
    }

    /// Returns whether one more reply may be added; always true for a connection that holds none.
    pub(super) fn has_room(&self) -> bool {
        let left = MAX_HELD_BY_ALL.saturating_sub(held_by_all());
        // A few clients that do not read could otherwise use up the total, and no other connection
        // would answer anything. One that holds nothing adds 64 KiB at most.
        self.0 == 0 || self.0 < MAX_HELD.min(left)
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.set(0);
    }
}
