//! Reads of files that are not waited for when their mount hangs.

use std::{io, sync::Arc, time::Duration};

use parking_lot::{Condvar, Mutex};
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};

use crate::threads::{self, OnPanic};

/// Maximum time for which a caller waits.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum time for which a caller of a [`ReadingThread`] waits, once while it hangs. Longer than a busy machine takes:
/// without CAs, a handshake fails.
const THREAD_TIMEOUT: Duration = Duration::from_secs(3);

/// A read of files, which may be on a mount that hangs.
#[derive(Debug)]
pub struct Reading<T>(Option<JoinHandle<T>>);

impl<T> Default for Reading<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: Send + 'static> Reading<T> {
    /// Returns the result of `read`, or an error if that takes too long.
    pub async fn result(&mut self, read: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        self.result_within(READ_TIMEOUT, read).await
    }

    /// Returns the result of `read`, or an error if that takes longer than `limit`.
    pub async fn result_within(
        &mut self,
        limit: Duration,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        // One call has waited for it already: of many connections that are opened together, each would wait for the
        // ones before it.
        let pause = if self.0.is_some() {
            Duration::ZERO
        } else {
            limit
        };
        // A call that hangs cannot be cancelled. It is looked at again, so that it takes one thread.
        let reading = self.0.get_or_insert_with(|| spawn_blocking(read));
        let Ok(read) = timeout(pause, reading).await else {
            return Err(io::Error::other(format!(
                "not finished within {limit:?}, its folder does not respond; if it is mounted, check its server"
            )));
        };
        self.0 = None;
        read.map_err(io::Error::other)
    }
}

/// The same for callers that cannot await, such as a TLS handshake: each read has a thread, at most one at a time.
#[derive(Debug, Default)]
pub struct ReadingThread {
    state: Mutex<ThreadState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct ThreadState {
    is_running: bool,
    /// Whether a call has waited for the running one for the whole time.
    is_late: bool,
}

impl ReadingThread {
    /// Runs `read`, unless an earlier one is still running, and waits for the end.
    pub fn run(self: &Arc<Self>, read: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock();
        if !state.is_running {
            let of_thread = Arc::clone(self);
            let thread = threads::spawn("files", OnPanic::Continue, move || {
                let _panicked = threads::catch(read);
                *of_thread.state.lock() = ThreadState::default();
                of_thread.ended.notify_all();
            });
            // Without a thread, callers go on with what they have, as after a read that hangs.
            state.is_running = thread.is_ok();
        }
        if !state.is_late {
            self.ended
                .wait_while_for(&mut state, |state| state.is_running, THREAD_TIMEOUT);
            state.is_late = state.is_running;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn hanging_thread_is_waited_for_once() {
        let reading = Arc::<ReadingThread>::default();
        let (release, hang) = mpsc::channel::<()>();
        let (count, counted) = mpsc::channel();
        let first = count.clone();
        reading.run(move || {
            first.send(1).unwrap();
            let _ = hang.recv();
        });
        assert!(reading.state.lock().is_late);
        assert_eq!(counted.recv(), Ok(1));
        // It is neither waited for again nor joined by another one.
        for _ in 0..100 {
            let further = count.clone();
            reading.run(move || further.send(2).unwrap());
        }
        assert!(counted.try_recv().is_err());
        release.send(()).unwrap();
        // A panic ends only its own read.
        for read in [3, 4] {
            let further = count.clone();
            while reading.state.lock().is_running {
                std::thread::yield_now();
            }
            reading.run(move || {
                further.send(read).unwrap();
                panic!("as a defect would");
            });
            assert_eq!(counted.recv(), Ok(read));
        }
    }

    /// Returns a read that never ends.
    fn hanging<T: Send + 'static>() -> Reading<T> {
        Reading(Some(tokio::spawn(std::future::pending())))
    }

    #[tokio::test]
    async fn hanging_read_takes_one_thread() {
        let mut reading: Reading<u8> = hanging();
        let id = reading.0.as_ref().map(JoinHandle::id);
        for _ in 0..2 {
            let error = reading.result(|| 7).await.unwrap_err().to_string();
            assert!(
                error.starts_with("not finished within 1s, its folder"),
                "{error}"
            );
            assert_eq!(reading.0.as_ref().map(JoinHandle::id), id);
        }
        assert_eq!(Reading::default().result(|| 7).await.unwrap(), 7);
    }
}
