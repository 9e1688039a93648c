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

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use futures_util::FutureExt as _;
    use http_body_util::BodyExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufWriter, DuplexStream, duplex};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn counted(responses: &Responses, user: u32, bytes: usize) -> Response {
        let response = Response::new(Body::from(vec![0; bytes]));
        responses.count(response, Peer::User(user), Arc::default())
    }

    #[tokio::test]
    async fn unread_responses_have_a_limit_together() {
        const HALF: usize = 8 << 20;
        let responses = Responses::default();
        // Half of the room is that of one peer.
        let first = counted(&responses, 1, HALF);
        let second = counted(&responses, 2, HALF);
        assert_eq!([first.status(), second.status()], [StatusCode::OK; 2]);
        // However slow this machine is, neither has stalled.
        for index in 0..2 {
            responses.0.set_progress(index, Instant::now() + HOUR);
        }
        for (bytes, status) in [
            (64 << 10, StatusCode::OK),
            ((64 << 10) + 1, StatusCode::SERVICE_UNAVAILABLE),
        ] {
            assert_eq!(counted(&responses, 3, bytes).status(), status, "{bytes}");
        }
        let refused = counted(&responses, 3, HALF);
        assert_eq!(refused.headers()[RETRY_AFTER], "1");
        let text = refused.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(text, "too much is left unread; try again in a second\n");
        drop(first);
        assert_eq!(counted(&responses, 3, HALF).status(), StatusCode::OK);
    }

    #[tokio::test]
    async fn bodies_are_handed_on_in_parts() {
        let responses = Responses::default();
        let mut body = counted(&responses, 1, 40 << 10).into_body();
        let mut left = 40 << 10;
        for part in [16 << 10, 16 << 10, 8 << 10] {
            assert!(!body.is_end_stream());
            assert_eq!(body.size_hint().exact(), Some(left));
            let frame = body.frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap().len() as u64, part);
            left -= part;
        }
        assert!(body.is_end_stream());
        assert_eq!(body.size_hint().exact(), Some(0));
        assert!(body.frame().await.is_none());
    }

    fn write(stream: &mut StallLimit<DuplexStream>) -> Poll<Option<usize>> {
        let mut context = Context::from_waker(Waker::noop());
        Pin::new(stream)
            .poll_write(&mut context, &[0; 2 * PROGRESS])
            .map(Result::ok)
    }

    fn deadline(stream: &StallLimit<DuplexStream>) -> Option<time::Instant> {
        stream.deadline.as_ref().map(|sleep| sleep.deadline())
    }

    #[tokio::test]
    async fn progress_extends_reading_time() {
        let (ours, mut theirs) = duplex(PROGRESS);
        let mut stream = StallLimit::new(ours, HOUR);
        assert_eq!(write(&mut stream), Poll::Ready(Some(16 << 10)));
        assert_eq!(deadline(&stream), None, "nothing is unread for long");
        assert!(write(&mut stream).is_pending());
        let first = deadline(&stream).unwrap();
        // A byte now and then is none.
        for _ in 0..3 {
            theirs.read_exact(&mut [0]).await.unwrap();
            assert_eq!(write(&mut stream), Poll::Ready(Some(1)));
            assert!(write(&mut stream).is_pending());
            assert_eq!(deadline(&stream), Some(first));
        }
        theirs.read_exact(&mut [0; PROGRESS]).await.unwrap();
        assert_eq!(write(&mut stream), Poll::Ready(Some(PROGRESS)));
        assert!(write(&mut stream).is_pending());
        assert!(deadline(&stream) > Some(first));
        // All is written.
        stream.flush().await.unwrap();
        assert_eq!(deadline(&stream), None);
    }

    #[tokio::test]
    async fn unreading_peers_are_given_up() {
        let (ours, _theirs) = duplex(PROGRESS);
        let mut stream = StallLimit::new(ours, Duration::from_millis(1));
        let error = stream.write_all(&[0; 2 * PROGRESS]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(error.to_string(), "the peer does not read");
    }

    /// As a TLS stream, which keeps what it encrypts.
    #[tokio::test]
    async fn buffers_below_are_flushed_and_closed() {
        let (ours, mut theirs) = duplex(PROGRESS);
        let mut stream = StallLimit::new(BufWriter::new(ours), HOUR);
        let mut read = [0; 8];
        stream.write_all(b"text").await.unwrap();
        assert!(theirs.read(&mut read).now_or_never().is_none());
        stream.flush().await.unwrap();
        let length = theirs.read(&mut read).now_or_never();
        assert!(matches!(length, Some(Ok(4))), "{length:?}");
        theirs.write_all(b"reply").await.unwrap();
        assert_eq!(stream.read(&mut read).await.unwrap(), 5);
        stream.shutdown().await.unwrap();
        let length = theirs.read(&mut read).now_or_never();
        assert!(matches!(length, Some(Ok(0))), "{length:?}");
    }
}
