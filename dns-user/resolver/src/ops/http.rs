//! HTTP server for operators, with limits on connections, time per request head, time per response
//! and bytes of unread responses. A connection that exceeds a limit is closed.

use std::{
    collections::VecDeque,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    http::{StatusCode, header::RETRY_AFTER},
    response::{IntoResponse as _, Response},
    serve::Listener,
};
use bytes::Bytes;
use hyper::{
    body::{Body as _, Frame, SizeHint},
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use parking_lot::Mutex;
use tokio::{sync::Notify, task::AbortHandle};

use dns_kit::stall::{StallLimit, WRITE_TIMEOUT};

/// Maximum number of connections per port; a new one closes the oldest.
const MAX_CONNECTIONS: usize = 64;

/// Time limit for the head of the next request, including idle time: longer than the usual scrape
/// interval of Prometheus.
const HEADER_TIMEOUT: Duration = Duration::from_secs(65);

/// Maximum bytes of unread responses per port. A further response closes connections that have
/// stalled; if that is not enough, it is refused with status 503, so that clients that read are never
/// cut off. A single larger response is still sent.
const MAX_WAITING: usize = 16 << 20;

/// Time without progress after which a response counts as stalled.
const STALLED: Duration = Duration::from_secs(1);

/// Size up to which a response is always sent.
const SMALL: usize = 64 << 10;

/// Size of the parts in which a body is handed to the connection.
const PART: usize = 16 << 10;

/// Serves connections until `shutdown` completes, then closes all of them. `routes` returns the
/// router for a connection.
pub(crate) async fn serve<L: Listener>(
    listener: L,
    routes: impl Fn(&L::Io) -> Router,
    shutdown: impl Future<Output = ()>,
) {
    serve_within(listener, routes, shutdown, WRITE_TIMEOUT).await;
}

async fn serve_within<L: Listener>(
    mut listener: L,
    routes: impl Fn(&L::Io) -> Router,
    shutdown: impl Future<Output = ()>,
    write_timeout: Duration,
) {
    let mut open: VecDeque<Connection> = VecDeque::new();
    let responses = Responses::default();
    tokio::pin!(shutdown);
    loop {
        let (stream, _client) = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => return,
        };
        open.retain(|Connection(task)| !task.is_finished());
        if open.len() >= MAX_CONNECTIONS {
            open.pop_front();
        }
        let router = TowerToHyperService::new(routes(&stream));
        let (responses, close) = (responses.clone(), Arc::new(Notify::new()));
        let closed = close.clone();
        let service = service_fn(move |request| {
            let (responses, close) = (responses.clone(), close.clone());
            let response = router.call(request);
            async move { response.await.map(|response| responses.count(response, close)) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .max_buf_size(64 << 10)
            .serve_connection(TokioIo::new(StallLimit::new(stream, write_timeout)), service);
        let task = tokio::spawn(async move {
            tokio::select! {
                ended = connection => drop(ended),
                () = closed.notified() => {}
            }
        });
        open.push_back(Connection(task.abort_handle()));
    }
}

/// An open connection; closed when dropped.
struct Connection(AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The responses that wait for their clients.
#[derive(Clone, Default)]
struct Responses(Arc<Mutex<Vec<Waiting>>>);

struct Waiting {
    number: u64,
    bytes: usize,
    /// Time at which the client last took a part.
    progress: Instant,
    close: Arc<Notify>,
}

impl Responses {
    /// Counts the body of a response until its client has taken it.
    fn count(&self, response: Response, close: Arc<Notify>) -> Response {
        let bytes = response.body().size_hint().lower() as usize;
        match self.admit(bytes, close, Instant::now()) {
            Some(place) => response.map(|body| Body::new(CountedBody { body, rest: Bytes::new(), place })),
            None => {
                let text = "other clients leave too much unread; try again in a second\n";
                (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")], text).into_response()
            }
        }
    }

    /// Admits a response of `bytes` bytes; `None` if it must be refused.
    fn admit(&self, bytes: usize, close: Arc<Notify>, now: Instant) -> Option<Place> {
        let mut waiting = self.0.lock();
        let mut total: usize = waiting.iter().map(|waiting| waiting.bytes).sum();
        waiting.sort_by_key(|waiting| waiting.progress);
        waiting.retain(|waiting| {
            let is_stalled = now.saturating_duration_since(waiting.progress) >= STALLED;
            let is_closed = total + bytes > MAX_WAITING && waiting.bytes > 0 && is_stalled;
            if is_closed {
                total -= waiting.bytes;
                waiting.close.notify_one();
            }
            !is_closed
        });
        if total > 0 && total + bytes > MAX_WAITING && bytes > SMALL {
            return None;
        }
        let number = waiting.iter().map(|waiting| waiting.number + 1).max().unwrap_or(0);
        waiting.push(Waiting { number, bytes, progress: now, close });
        Some(Place { responses: self.clone(), number })
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
        if let Some(waiting) = waiting.iter_mut().find(|waiting| waiting.number == self.number) {
            (waiting.bytes, waiting.progress) = (left, Instant::now());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.responses.0.lock().retain(|waiting| waiting.number != self.number);
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

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use futures_util::FutureExt as _;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[tokio::test]
    async fn unread_reply_closes_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { vec![b'x'; 64 << 20] }));
        let served = serve_within(
            listener,
            |_: &TcpStream| router.clone(),
            std::future::pending(),
            Duration::from_millis(200),
        );
        let client = async {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
            // Long enough for the server to time out even on a busy machine.
            tokio::time::sleep(Duration::from_secs(2)).await;
            let mut read = Vec::new();
            // A reset also proves that the connection was closed.
            let _ = client.read_to_end(&mut read).await;
            read.len()
        };
        let read = tokio::select! { () = served => unreachable!("it never ends"), read = client => read };
        assert!(read < 64 << 20, "{read}");
    }

    #[test]
    fn stalled_responses_are_closed() {
        let (responses, begin) = (Responses::default(), Instant::now());
        let closes: Vec<_> = (0..5).map(|_| Arc::new(Notify::new())).collect();
        let closed = |index: usize| closes[index].notified().now_or_never().is_some();
        let admit = |index: usize, bytes, now| responses.admit(bytes, closes[index].clone(), now);
        let places: Vec<_> = (0..4).map(|index| admit(index, MAX_WAITING / 4, begin).unwrap()).collect();
        assert!(admit(4, MAX_WAITING / 2, begin).is_none(), "all of them may still read");
        assert!(admit(4, SMALL, begin).is_some());
        assert!((0..4).all(|index| !closed(index)));

        let later = begin + STALLED;
        responses.0.lock()[0].progress = later;
        assert!(admit(4, MAX_WAITING / 2, later).is_some());
        assert_eq!([0, 1, 2, 3].map(closed), [false, true, true, false]);
        drop(places);
        assert_eq!(responses.0.lock().len(), 0);
    }

    #[tokio::test]
    async fn reader_survives_silent_clients() {
        const BODY: usize = 4 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { vec![b'x'; BODY] }));
        let served =
            serve_within(listener, |_: &TcpStream| router.clone(), std::future::pending(), WRITE_TIMEOUT);
        let request = async || {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
            client
        };
        // Twelve at a time, renewed for as long as the reader reads.
        let silent = async {
            let mut silent = VecDeque::new();
            loop {
                silent.push_back(request().await);
                if silent.len() > 12 {
                    silent.pop_front();
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let reader = async {
            loop {
                let (mut client, mut part, mut read) = (request().await, vec![0; PART], Vec::new());
                loop {
                    let count = client.read(&mut part).await.unwrap();
                    if count == 0 {
                        break;
                    }
                    read.extend_from_slice(&part[..count]);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                if read.starts_with(b"HTTP/1.1 200") {
                    return read.len();
                }
                assert!(read.starts_with(b"HTTP/1.1 503"), "{}", read.len());
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let read = tokio::select! {
            () = served => unreachable!("it never ends"),
            () = silent => unreachable!("it never ends"),
            read = reader => read,
        };
        assert!(read > BODY, "cut off after {read} bytes");
    }
}
