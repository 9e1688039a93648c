//! A write timeout for streams.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep},
};

/// Time for which an HTTP client may leave a reply unread.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(20);

/// Number of bytes that a peer must read to restart its time limit, so that reading a byte now and
/// then does not hold resources.
const PROGRESS: usize = 16 << 10;

/// A stream that fails with [`io::ErrorKind::TimedOut`] if the peer leaves written data unread for
/// too long.
pub struct StallLimit<T> {
    inner: T,
    limit: Duration,
    /// Runs while written data is pending.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Bytes written since the deadline was set.
    written: usize,
}

impl<T> StallLimit<T> {
    /// Wraps `inner`, whose peer may leave written data unread for `limit`.
    pub fn new(inner: T, limit: Duration) -> Self {
        Self { inner, limit, deadline: None, written: 0 }
    }

    /// Passes through the result of a write or flush unless the deadline has passed.
    fn bounded<R>(&mut self, context: &mut Context<'_>, outcome: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if outcome.is_ready() {
            return outcome;
        }
        let limit = self.limit;
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        if self.written >= PROGRESS {
            self.written = 0;
            deadline.as_mut().reset(Instant::now() + limit);
        }
        ready!(deadline.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not read")))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for StallLimit<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write(context, bytes);
        if let Poll::Ready(Ok(written)) = outcome {
            self.written += written;
        }
        self.bounded(context, outcome)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_flush(context);
        if outcome.is_ready() {
            // Nothing is pending.
            (self.deadline, self.written) = (None, 0);
        }
        self.bounded(context, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_shutdown(context);
        self.bounded(context, outcome)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for StallLimit<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}
