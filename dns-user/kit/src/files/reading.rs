//! Reads of files that are not waited for when their mount hangs.

use std::{io, time::Duration};

use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};

/// Maximum time for which a caller waits.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

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
        // One call has waited for it already: of many connections that are opened together, each would wait for the
        // ones before it.
        let limit = if self.0.is_some() {
            Duration::ZERO
        } else {
            READ_TIMEOUT
        };
        // A call that hangs cannot be cancelled. It is looked at again, so that it takes one thread.
        let reading = self.0.get_or_insert_with(|| spawn_blocking(read));
        let Ok(read) = timeout(limit, reading).await else {
            return Err(io::Error::other(format!(
                "not finished within {READ_TIMEOUT:?}, its folder does not respond; if it is mounted, check its server"
            )));
        };
        self.0 = None;
        read.map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
