//! Limits on the bodies of requests: in time, and in bytes of each, of a peer, and of all connections.
//!
//! A handler reads the body only after it has decided by the head; until then at most a buffer of it is held
//! ([`super::ServerLimits::head`]). A body that exceeds a limit ends with an error, and its connection with a response
//! that says why.

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    http::{
        HeaderValue, StatusCode,
        header::{CONNECTION, RETRY_AFTER},
    },
    response::{IntoResponse as _, Response},
};
use hyper::body::{Body as _, Bytes, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

use super::{ServerLimits, held::HeldPlace};

/// Size up to which a body always has room, so that small calls succeed beside any others.
pub(super) const MAX_SMALL: usize = 16 << 10;

/// Reasons for which a body is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CutOff {
    #[error("the body did not arrive within {0:?}; send it at once")]
    Late(Duration),
    #[error("the body is longer than {0} bytes; send less")]
    Long(usize),
    /// The bodies of all requests, or those of its peer, are too long together.
    #[error("too many bodies are being sent; try again in a second")]
    Crowded,
}

impl CutOff {
    /// Returns the response that ends the connection.
    pub(super) fn response(self) -> Response {
        let status = match self {
            Self::Late(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Long(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Crowded => StatusCode::SERVICE_UNAVAILABLE,
        };
        let mut response = (status, format!("{self}\n")).into_response();
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        if self == Self::Crowded {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// A request whose body is held until it is answered.
pub(super) struct HeldRequest {
    place: HeldPlace,
    limits: ServerLimits,
    cut_off: OnceLock<CutOff>,
}

impl HeldRequest {
    pub(super) fn new(place: HeldPlace, limits: ServerLimits) -> Arc<Self> {
        Arc::new(Self {
            place,
            limits,
            cut_off: OnceLock::new(),
        })
    }

    /// Returns why the body was cut off; `None` if it was not.
    pub(super) fn cut_off(&self) -> Option<CutOff> {
        self.cut_off.get().copied()
    }

    fn cut(&self, why: CutOff) -> BodyError {
        // The first reason stands.
        let _ = self.cut_off.set(why);
        BodyError::CutOff(why)
    }
}

/// Errors of a body; the handler's own response is replaced if it was cut off.
#[derive(Debug, thiserror::Error)]
pub(super) enum BodyError {
    #[error("{0}")]
    Broken(#[from] hyper::Error),
    #[error("{0}")]
    CutOff(CutOff),
}

/// The body of a request, within its limits.
pub(super) struct BoundedBody {
    body: Incoming,
    received: usize,
    /// End of the time for the whole body.
    deadline: Pin<Box<Sleep>>,
    request: Arc<HeldRequest>,
}

impl BoundedBody {
    /// Bounds a body whose head has just arrived.
    pub(super) fn new(body: Incoming, request: Arc<HeldRequest>) -> Self {
        let deadline = Box::pin(sleep_until(Instant::now() + request.limits.request));
        if body.is_end_stream() {
            request.place.complete();
        }
        Self {
            body,
            received: 0,
            deadline,
            request,
        }
    }
}

impl hyper::body::Body for BoundedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Self {
            body,
            received,
            deadline,
            request,
        } = &mut *self;
        // First, because a peer may send a byte at any time.
        if deadline.as_mut().poll(context).is_ready() {
            let why = CutOff::Late(request.limits.request);
            return Poll::Ready(Some(Err(request.cut(why))));
        }
        let frame = match ready!(Pin::new(&mut *body).poll_frame(context)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
            None => {
                request.place.complete();
                return Poll::Ready(None);
            }
        };
        let length = frame.data_ref().map_or(0, Bytes::len);
        *received += length;
        if *received > request.limits.body {
            let why = CutOff::Long(request.limits.body);
            return Poll::Ready(Some(Err(request.cut(why))));
        }
        if !request.place.grow(length, MAX_SMALL) {
            return Poll::Ready(Some(Err(request.cut(CutOff::Crowded))));
        }
        // After the last frame the handler need not poll again, and must not count as stalled while
        // it works.
        if body.is_end_stream() {
            request.place.complete();
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn cut_off_clients_learn_the_cause() {
        for (why, status, retry_after, text) in [
            (
                CutOff::Late(Duration::from_secs(20)),
                408,
                None,
                "the body did not arrive within 20s; send it at once\n",
            ),
            (
                CutOff::Long(5),
                413,
                None,
                "the body is longer than 5 bytes; send less\n",
            ),
            (
                CutOff::Crowded,
                503,
                Some("1"),
                "too many bodies are being sent; try again in a second\n",
            ),
        ] {
            let response = why.response();
            assert_eq!(response.status(), status);
            let header = |name| {
                let value = response.headers().get(name)?;
                value.to_str().ok().map(str::to_owned)
            };
            assert_eq!(header(CONNECTION).as_deref(), Some("close"));
            assert_eq!(header(RETRY_AFTER).as_deref(), retry_after);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body, text);
        }
    }
}
