//! Limits outgoing TCP connections, for each peer and in the whole process. A connection counts until its
//! descriptor is closed, whether or not a query still waits for it.

use std::sync::{Arc, LazyLock};

use dns_kit::limits::raise_file_limit;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Minimum of the limit of the process, for one with few descriptors.
const MIN_CONNECTIONS_OF_ALL: usize = 16;
/// Maximum of the limit of the process.
const MAX_CONNECTIONS_OF_ALL: usize = 4096;

/// Connections to all recursors and HTTP servers together.
static OF_ALL: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(max_of_all())));

/// Returns the limit of the process. A quarter of the descriptors, like the TCP clients: peers that hang must leave
/// some to clients, health checks and files.
pub(crate) fn max_of_all() -> usize {
    let share = usize::try_from(raise_file_limit() / 4).unwrap_or(MAX_CONNECTIONS_OF_ALL);
    share.clamp(MIN_CONNECTIONS_OF_ALL, MAX_CONNECTIONS_OF_ALL)
}

/// The limit of the connections to one peer, and with them of the process.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionLimit {
    of_peer: Arc<Semaphore>,
}

/// One connection, counted until dropped.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    _of_peer: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl ConnectionLimit {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            of_peer: Arc::new(Semaphore::new(most)),
        }
    }

    /// Returns a slot for a connection; `None` if there are too many.
    pub(crate) fn try_enter(&self) -> Option<ConnectionSlot> {
        Some(ConnectionSlot {
            _of_peer: Arc::clone(&self.of_peer).try_acquire_owned().ok()?,
            _of_all: Arc::clone(&OF_ALL).try_acquire_owned().ok()?,
        })
    }

    /// Waits for a slot. The caller limits the time.
    pub(crate) async fn enter(&self) -> Option<ConnectionSlot> {
        // The peer's first: a connection that waits for a hanging peer holds nothing that others need.
        Some(ConnectionSlot {
            _of_peer: Arc::clone(&self.of_peer).acquire_owned().await.ok()?,
            _of_all: Arc::clone(&OF_ALL).acquire_owned().await.ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn closed_connections_free_slots() {
        let limit = ConnectionLimit::new(2);
        let one = limit.try_enter().unwrap();
        let two = limit.enter().await.unwrap();
        assert!(limit.try_enter().is_none() && limit.clone().try_enter().is_none());
        assert!(
            ConnectionLimit::new(1).try_enter().is_some(),
            "of another peer"
        );
        drop(one);
        let three = limit.try_enter().unwrap();
        assert!(limit.try_enter().is_none());
        drop((two, three));
        assert_eq!(limit.of_peer.available_permits(), 2);
    }

    #[test]
    fn process_leaves_spare_descriptors() {
        let files = raise_file_limit();
        let most = max_of_all() as u64;
        assert!((16..=4096).contains(&most));
        // A quarter, between the bounds.
        assert!(most <= 16.max(files / 4), "{most} of {files}");
        assert!(most == 4096 || most * 4 + 4 > files, "{most} of {files}");
    }
}
