//! A connection with a limit on received bytes.

use std::{
    cell::Cell,
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Number of bytes that a [`Metered`] stream may still receive; clones share the limit.
#[derive(Clone, Debug)]
pub(super) struct Allowance(Rc<Cell<usize>>);

impl Allowance {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Rc::new(Cell::new(bytes)))
    }

    /// Sets the number of bytes permitted from now on.
    pub(super) fn renew(&self, bytes: usize) {
        self.0.set(bytes);
    }
}

/// A stream whose reads fail once the allowance is used up; the last read may exceed it by one
/// buffer.
pub(super) struct Metered<T> {
    inner: T,
    allowance: Allowance,
}

impl<T> Metered<T> {
    pub(super) fn new(inner: T, allowance: Allowance) -> Self {
        Self { inner, allowance }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Metered<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.allowance.0.get() == 0 {
            let excess =
                io::Error::new(io::ErrorKind::InvalidData, "sent a longer reply than a health server needs");
            return Poll::Ready(Err(excess));
        }
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.inner).poll_read(context, buffer);
        let left = self.allowance.0.get().saturating_sub(buffer.filled().len() - before);
        self.allowance.renew(left);
        outcome
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Metered<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}
