//! Limits on responses that clients leave unread: in time, and in bytes of all connections of a server.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    http::{StatusCode, header::RETRY_AFTER},
    response::{IntoResponse as _, Response},
};
use hyper::body::{Body as _, Bytes, Frame, SizeHint};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
    time::{self, Sleep},
};

use super::held::{HeldBytes, HeldPlace};
use crate::connections::Peer;

/// Maximum bytes of unread responses per server. A single larger response is still sent.
const MAX_WAITING: usize = 16 << 20;

/// Size up to which a response is always sent.
const MAX_SMALL: usize = 64 << 10;

/// Size of the parts in which a body is handed to the connection.
const PART: usize = 16 << 10;

//----------- Responses ------------------------------------------------------

/// The responses that wait for their clients.
#[derive(Clone)]
pub(super) struct Responses(HeldBytes);

impl Default for Responses {
    fn default() -> Self {
        Self(HeldBytes::new(MAX_WAITING))
    }
}

impl Responses {
    /// Counts the body of a response until its client has taken it.
    pub(super) fn count(&self, response: Response, peer: Peer, close: Arc<Notify>) -> Response {
        // A body that is written as it is read counts as empty, because little of it exists at a
        // time.
        let bytes = response.body().size_hint().lower() as usize;
        match self.0.admit(peer, bytes, MAX_SMALL, close, Instant::now()) {
            Some(place) => response.map(|body| {
                Body::new(CountedBody {
                    body,
                    rest: Bytes::new(),
                    place,
                })
            }),
            None => {
                let text = "too much is left unread; try again in a second\n";
                (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")], text).into_response()
            }
        }
    }
}

/// A body that is handed on in parts, so that the bytes taken by the client can be counted.
struct CountedBody {
    body: Body,
    /// Bytes received from `body` and not handed on yet.
    rest: Bytes,
    place: HeldPlace,
}

impl hyper::body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                ended => return Poll::Ready(ended),
            }
        }
        let length = self.rest.len().min(PART);
        let part = self.rest.split_to(length);
        // The connection asks for a part when its buffer has room, so the peer has read.
        self.place.progress(self.rest.len());
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.rest.len() as u64;
        let mut hint = self.body.size_hint();
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + rest);
        }
        hint.set_lower(hint.lower() + rest);
        hint
    }
}

//----------- StallLimit -----------------------------------------------------

/// Number of bytes that a peer must read to restart its time limit, so that reading a byte now and
/// then does not hold resources.
const PROGRESS: usize = 16 << 10;

/// A stream that fails with [`io::ErrorKind::TimedOut`] if the peer leaves written data unread for too long.
pub(super) struct StallLimit<T> {
    inner: T,
    limit: Duration,
    /// Runs while written data is pending.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Bytes written since the deadline was set.
    written: usize,
}

impl<T> StallLimit<T> {
    /// Wraps `inner`, whose peer may leave written data unread for `limit`.
    pub(super) fn new(inner: T, limit: Duration) -> Self {
        Self {
            inner,
            limit,
            deadline: None,
            written: 0,
        }
    }

    /// Passes through the result of a write or flush unless the deadline has passed.
    fn bounded<R>(
        &mut self,
        context: &mut Context<'_>,
        outcome: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if outcome.is_ready() {
            return outcome;
        }
        let limit = self.limit;
        let deadline = self
            .deadline
            .get_or_insert_with(|| Box::pin(time::sleep(limit)));
        if self.written >= PROGRESS {
            self.written = 0;
            deadline.as_mut().reset(time::Instant::now() + limit);
        }
        // This also registers the task with the timer: a peer that does nothing would never wake
        // it.
        ready!(deadline.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the peer does not read",
        )))
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
