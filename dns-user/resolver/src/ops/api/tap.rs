//! `/tap`: live queries as JSON lines, until the client disconnects.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::{Query, State},
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use super::Backend;
use crate::ops::tap::{TapItem, TapLine, TapPath, TapView};

/// Default limit in lines per second.
const DEFAULT_RATE: u32 = 1000;

/// Highest limit that a client can request, in lines per second.
const MAX_RATE: u32 = 50_000;

/// Time without a line for the client after which an empty one is sent, to keep the stream alive and to notice
/// that the client has disconnected.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Time for which a line is held back, so that lines of both paths are sent in the order of their
/// time stamps: the fast path's ring buffer is read every 100 ms.
const REORDER: Duration = Duration::from_millis(200);

/// Maximum number of lines held back; beyond it the oldest lines are sent early.
const MAX_HELD: usize = 20_000;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TapParameters {
    /// Sample one query in this many.
    every: Option<u32>,
    /// Only names containing this text, case-insensitively.
    name: Option<String>,
    /// Only clients whose address starts with this text.
    client: Option<String>,
    #[serde(rename = "type")]
    query_type: Option<String>,
    path: Option<TapPath>,
    /// 1 to include queries that the fast path passed to userspace, which also appear as userspace
    /// queries.
    misses: Option<u8>,
    /// Maximum number of lines per second.
    rate: Option<u32>,
}

impl TapParameters {
    fn admit(&self, line: &TapLine) -> bool {
        let Self {
            every: _,
            name,
            client,
            query_type,
            path,
            misses,
            rate: _,
        } = self;
        // Such a query appears once more with its reply from userspace, and would be counted twice.
        let passed_on = line.path == TapPath::Fast && line.rcode.is_none();
        name.as_ref().is_none_or(|text| {
            line.name
                .to_ascii_lowercase()
                .contains(&text.to_ascii_lowercase())
        }) && client
            .as_ref()
            .is_none_or(|text| line.client.ip().to_string().starts_with(text.as_str()))
            && query_type
                .as_ref()
                .is_none_or(|text| line.query_type.eq_ignore_ascii_case(text))
            && path.is_none_or(|path| line.path == path)
            && (!passed_on || misses.is_some_and(|misses| misses != 0))
    }
}

pub(super) async fn tap(
    State(backend): State<Arc<Backend>>,
    Query(parameters): Query<TapParameters>,
) -> Response {
    // 0 would suppress every line, and silence looks like a server without queries.
    let rate = parameters.rate.unwrap_or(DEFAULT_RATE).clamp(1, MAX_RATE);
    let view = backend.tap.subscribe(parameters.every.unwrap_or(1));
    let state = TapStream::new(view, parameters, rate);
    let lines = stream::unfold(state, |mut state| async move {
        let text = state.next().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(text)), state))
    });
    (
        [(header::CONTENT_TYPE, "application/x-ndjson")],
        Body::from_stream(lines),
    )
        .into_response()
}

/// The stream of one client.
struct TapStream {
    view: TapView,
    parameters: TapParameters,
    rate: u32,
    /// Start of the current second, for the rate limit.
    second: Instant,
    /// Lines sent in the current second.
    written: u32,
    /// Lines suppressed since the last report.
    suppressed: u64,
    /// Lines held back, by time stamp in microseconds and arrival number.
    held: BTreeMap<(u64, u64), (Instant, TapLine)>,
    /// Arrival number of the next line.
    number: u64,
}

/// Nothing has arrived for the client within [`KEEP_ALIVE`].
struct Silence;

impl TapStream {
    fn new(view: TapView, parameters: TapParameters, rate: u32) -> Self {
        Self {
            view,
            parameters,
            rate,
            second: Instant::now(),
            written: 0,
            suppressed: 0,
            held: BTreeMap::new(),
            number: 0,
        }
    }

    /// Returns the next line in time order; `None` once the server ends.
    async fn next_line(&mut self) -> Result<Option<TapLine>, Silence> {
        let silent_until = Instant::now() + KEEP_ALIVE;
        loop {
            let now = Instant::now();
            let oldest = self.held.first_key_value();
            let due = oldest.map(|(_, (arrived, _))| *arrived + REORDER);
            if self.held.len() > MAX_HELD || due.is_some_and(|due| due <= now) {
                return Ok(self.held.pop_first().map(|(_, (_, line))| line));
            }
            // On a busy server lines that the client has not asked for arrive all the time.
            if now >= silent_until {
                return Err(Silence);
            }
            match timeout_at(due.unwrap_or(silent_until), self.view.next()).await {
                // The viewer is told of both kinds of loss alike: its counts are too low.
                Ok(Some(TapItem::Lost(lost))) => self.suppressed += lost,
                Ok(Some(TapItem::Line(line))) if self.parameters.admit(&line) => {
                    // Microseconds preserve the order; a negative time counts as 0.
                    let key = ((line.time * 1e6) as u64, self.number);
                    self.number += 1;
                    self.held.insert(key, (Instant::now(), line));
                }
                Ok(Some(TapItem::Line(_))) => {}
                Ok(None) => return Ok(self.held.pop_first().map(|(_, (_, line))| line)),
                // The oldest line may be sent now, or an empty one.
                Err(_) => {}
            }
        }
    }

    async fn next(&mut self) -> Option<String> {
        loop {
            let line = match self.next_line().await {
                Ok(line) => line?,
                Err(Silence) => return Some(self.report().unwrap_or_else(|| "\n".to_owned())),
            };
            let mut text = String::new();
            if self.second.elapsed() >= Duration::from_secs(1) {
                self.second = Instant::now();
                self.written = 0;
                // Once a second at most, or reports would themselves be a flood.
                text = self.report().unwrap_or_default();
            }
            if self.written >= self.rate {
                self.suppressed += 1;
                continue;
            }
            self.written += 1;
            // Serialization cannot fail: a line consists of strings and numbers.
            text.push_str(&serde_json::to_string(&line).unwrap_or_default());
            text.push('\n');
            return Some(text);
        }
    }

    fn report(&mut self) -> Option<String> {
        let suppressed = std::mem::take(&mut self.suppressed);
        (suppressed > 0).then(|| json!({ "suppressed": suppressed }).to_string() + "\n")
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::ops::tap::Tap;

    fn line(path: TapPath, time: f64) -> TapLine {
        TapLine {
            time,
            path,
            interface: None,
            client: "10.0.0.1:5353".parse().unwrap(),
            transport: "udp".into(),
            name: "a.bosh.".into(),
            query_type: "A".into(),
            outcome: "hit".into(),
            rcode: Some("NOERROR".into()),
            answers: 1,
            micros: None,
            weight: 1,
        }
    }

    #[tokio::test]
    async fn paths_are_ordered_by_time() {
        let tap = Tap::default();
        let mut stream = TapStream::new(tap.subscribe(1), TapParameters::default(), 100);
        // Userspace reports immediately, the interface in batches.
        for (path, time) in [
            (TapPath::Userspace, 10.0),
            (TapPath::Userspace, 10.2),
            (TapPath::Fast, 10.1),
            (TapPath::Fast, 9.9),
        ] {
            tap.publish(line(path, time), Duration::ZERO);
        }
        let mut times = Vec::new();
        for _ in 0..4 {
            let text = timeout(Duration::from_secs(30), stream.next())
                .await
                .unwrap()
                .unwrap();
            times.push(serde_json::from_str::<TapLine>(&text).unwrap().time);
        }
        assert_eq!(times, [9.9, 10.0, 10.1, 10.2]);
    }

    #[tokio::test(start_paused = true)]
    async fn unwanted_lines_do_not_silence_the_stream() {
        let tap = Tap::default();
        let parameters = TapParameters {
            name: Some("other".to_owned()),
            ..TapParameters::default()
        };
        let mut stream = TapStream::new(tap.subscribe(1), parameters, 100);
        tokio::spawn(async move {
            loop {
                tap.publish(line(TapPath::Fast, 1.0), Duration::ZERO);
                sleep(KEEP_ALIVE / 5).await;
            }
        });
        for _ in 0..3 {
            let text = timeout(2 * KEEP_ALIVE, stream.next()).await;
            assert_eq!(text.unwrap().as_deref(), Some("\n"));
        }
    }
}
