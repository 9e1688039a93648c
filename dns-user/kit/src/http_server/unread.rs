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
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
    time::{self, Sleep},
};

use crate::connections::Peer;

/// Maximum bytes of unread responses per server. A further response closes connections that have
/// stalled; if that is not enough, it is refused with status 503, so that clients that read are never
/// cut off. A single larger response is still sent.
const MAX_WAITING: usize = 16 << 20;

/// Maximum bytes of unread responses per peer, in the same way: no peer takes the room of the others.
const MAX_OF_PEER: usize = MAX_WAITING / 2;

/// Time without progress after which a response counts as stalled.
const STALLED: Duration = Duration::from_secs(1);

/// Size up to which a response is always sent.
const SMALL: usize = 64 << 10;

/// Size of the parts in which a body is handed to the connection.
const PART: usize = 16 << 10;

//----------- Responses ------------------------------------------------------

/// The responses that wait for their clients.
#[derive(Clone, Default)]
pub(super) struct Responses(Arc<Mutex<Vec<Waiting>>>);

struct Waiting {
    number: u64,
    peer: Peer,
    bytes: usize,
    /// Time at which the client last took a part.
    progress: Instant,
    close: Arc<Notify>,
}

impl Responses {
    /// Counts the body of a response until its client has taken it.
    pub(super) fn count(&self, response: Response, peer: Peer, close: Arc<Notify>) -> Response {
        let bytes = response.body().size_hint().lower() as usize;
        match self.admit(peer, bytes, close, Instant::now()) {
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

    /// Admits a response of `bytes` bytes; `None` if it must be refused.
    fn admit(&self, peer: Peer, bytes: usize, close: Arc<Notify>, now: Instant) -> Option<Place> {
        let mut waiting = self.0.lock();
        let (mut total, mut own) = (0, 0);
        for waiting in waiting.iter() {
            total += waiting.bytes;
            own += if waiting.peer == peer {
                waiting.bytes
            } else {
                0
            };
        }
        waiting.sort_by_key(|waiting| waiting.progress);
        waiting.retain(|waiting| {
            let is_own = waiting.peer == peer;
            let is_needed = total + bytes > MAX_WAITING || is_own && own + bytes > MAX_OF_PEER;
            let is_stalled = now.saturating_duration_since(waiting.progress) >= STALLED;
            let is_closed = is_needed && waiting.bytes > 0 && is_stalled;
            if is_closed {
                total -= waiting.bytes;
                own -= if is_own { waiting.bytes } else { 0 };
                waiting.close.notify_one();
            }
            !is_closed
        });
        let is_too_much =
            total > 0 && total + bytes > MAX_WAITING || own > 0 && own + bytes > MAX_OF_PEER;
        if is_too_much && bytes > SMALL {
            return None;
        }
        let number = waiting
            .iter()
            .map(|waiting| waiting.number + 1)
            .max()
            .unwrap_or(0);
        waiting.push(Waiting {
            number,
            peer,
            bytes,
            progress: now,
            close,
        });
        Some(Place {
            responses: self.clone(),
            number,
        })
    }
}

/// A response's entry in [`Responses`], removed when dropped.
struct Place {
    responses: Responses,
    number: u64,
}

impl Place {
    /// Records that the client has taken a part and `left` bytes remain.
    fn progress(&self, left: usize) {
        let mut waiting = self.responses.0.lock();
        if let Some(waiting) = waiting
            .iter_mut()
            .find(|waiting| waiting.number == self.number)
        {
            (waiting.bytes, waiting.progress) = (left, Instant::now());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.responses
            .0
            .lock()
            .retain(|waiting| waiting.number != self.number);
    }
}

/// A body that is handed on in parts, so that the bytes taken by the client can be counted.
struct CountedBody {
    body: Body,
    /// Bytes received from `body` and not handed on yet.
    rest: Bytes,
    place: Place,
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
        self.place.progress(self.rest.len());
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, mut hint) = (self.rest.len() as u64, self.body.size_hint());
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

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn stalled_responses_are_closed() {
        let (responses, begin) = (Responses::default(), Instant::now());
        let closes: Vec<_> = (0..5).map(|_| Arc::new(Notify::new())).collect();
        let closed = |index: usize| closes[index].notified().now_or_never().is_some();
        let admit = |index: usize, bytes, now| {
            responses.admit(Peer::User(index as u32), bytes, closes[index].clone(), now)
        };
        let places: Vec<_> = (0..4)
            .map(|index| admit(index, MAX_WAITING / 4, begin).unwrap())
            .collect();
        assert!(
            admit(4, MAX_WAITING / 2, begin).is_none(),
            "all of them may still read"
        );
        assert!(admit(4, SMALL, begin).is_some());
        assert!((0..4).all(|index| !closed(index)));

        let later = begin + STALLED;
        responses.0.lock()[0].progress = later;
        assert!(admit(4, MAX_WAITING / 2, later).is_some());
        assert_eq!([0, 1, 2, 3].map(closed), [false, true, true, false]);
        drop(places);
        assert_eq!(responses.0.lock().len(), 0);
    }

    #[test]
    fn peer_leaves_room_for_others() {
        let (responses, begin) = (Responses::default(), Instant::now());
        let closes: Vec<_> = (0..4).map(|_| Arc::new(Notify::new())).collect();
        let closed = |index: usize| closes[index].notified().now_or_never().is_some();
        let admit = |peer, index: usize, bytes, now| {
            responses.admit(Peer::User(peer), bytes, closes[index].clone(), now)
        };
        let first = admit(1, 0, MAX_OF_PEER, begin);
        assert!(
            first.is_some() && admit(1, 1, SMALL + 1, begin).is_none(),
            "one peer has half of the room"
        );
        let other = admit(2, 2, MAX_OF_PEER, begin);
        assert!(other.is_some(), "the other half is for others");
        // Only its own stalled responses are closed for its next one.
        drop(other);
        let later = begin + STALLED;
        assert!(admit(3, 3, SMALL + 1, later).is_some() && !closed(0));
        assert!(admit(1, 1, MAX_OF_PEER, later).is_some() && closed(0) && !closed(3));
    }
}
