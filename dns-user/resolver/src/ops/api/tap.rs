//! `/tap`: live queries as JSON lines, until the client goes away.

use std::sync::Arc;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes},
    extract::{Query, State},
    http::header,
    response::{IntoResponse, Response},
};
use futures::stream;
use serde::Deserialize;
use serde_json::json;

use super::Backend;
use crate::ops::tap::{TapItem, TapLine, TapPath, TapView};

/// Lines a second, unless the client asks for another bound.
const DEFAULT_RATE: u32 = 1000;

/// Most lines a second that a client can ask for.
const MAX_RATE: u32 = 50_000;

/// How long a stream stays silent before an empty line shows that it lives,
/// and a client that went away is noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// How long a line is held back so that both paths come out in the order of their time stamps:
/// the reader of the fast path empties its buffer every 100 ms.
const REORDER: Duration = Duration::from_millis(200);

/// Most lines that are held back; beyond it the oldest leave early.
const MOST_HELD: usize = 20_000;

/// Parameters of `/tap`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TapParameters {
    /// One query in this many.
    every: Option<u32>,
    /// Only names that hold this text, in any letter case.
    name: Option<String>,
    /// Only clients whose address begins with this text.
    client: Option<String>,
    /// Only this type.
    #[serde(rename = "type")]
    query_type: Option<String>,
    /// Only this path.
    path: Option<TapPath>,
    /// 1: also the queries that the fast path passed on; userspace shows them again.
    misses: Option<u8>,
    /// Lines a second, at most.
    rate: Option<u32>,
}

impl TapParameters {
    /// Whether a line is wanted.
    fn admit(&self, line: &TapLine) -> bool {
        let Self { every: _, name, client, query_type, path, misses, rate: _ } = self;
        let passed_on = line.path == TapPath::Fast && line.rcode.is_none();
        name.as_ref().is_none_or(|text| line.name.to_ascii_lowercase().contains(&text.to_ascii_lowercase()))
            && client.as_ref().is_none_or(|text| line.client.ip().to_string().starts_with(text.as_str()))
            && query_type.as_ref().is_none_or(|text| line.query_type.eq_ignore_ascii_case(text))
            && path.is_none_or(|path| line.path == path)
            && (!passed_on || misses.is_some_and(|misses| misses != 0))
    }
}

/// Starts the stream.
pub(super) async fn tap(
    State(backend): State<Arc<Backend>>,
    Query(parameters): Query<TapParameters>,
) -> Response {
    let rate = parameters.rate.unwrap_or(DEFAULT_RATE).clamp(1, MAX_RATE);
    let view = backend.tap.look(parameters.every.unwrap_or(1));
    let state = Stream {
        view,
        parameters,
        rate,
        second: Instant::now(),
        written: 0,
        suppressed: 0,
        held: BTreeMap::new(),
        number: 0,
    };
    let lines = stream::unfold(state, |mut state| async move {
        let text = state.next().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(text)), state))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

/// One client's stream.
struct Stream {
    /// Where the lines come from.
    view: TapView,
    /// Which are wanted.
    parameters: TapParameters,
    /// Lines a second.
    rate: u32,
    /// Start of the second that is counted.
    second: Instant,
    /// Lines in it so far.
    written: u32,
    /// Lines left out since the last report.
    suppressed: u64,
    /// Lines held back, by time stamp in microseconds and order of arrival.
    held: BTreeMap<(u64, u64), (Instant, TapLine)>,
    /// Number of the next line.
    number: u64,
}

impl Stream {
    /// Returns the next line in order of time; `None` once the server ends. An error means that
    /// nothing happened for [`KEEP_ALIVE`].
    async fn next_line(&mut self) -> Result<Option<TapLine>, tokio::time::error::Elapsed> {
        loop {
            let due = self.held.first_key_value().map(|(_, (arrived, _))| *arrived + REORDER);
            if self.held.len() > MOST_HELD || due.is_some_and(|due| due <= Instant::now()) {
                return Ok(self.held.pop_first().map(|(_, (_, line))| line));
            }
            let patience = due.map_or(KEEP_ALIVE, |due| due.saturating_duration_since(Instant::now()));
            match tokio::time::timeout(patience, self.view.next()).await {
                Ok(Some(TapItem::Lost(lost))) => self.suppressed += lost,
                Ok(Some(TapItem::Line(line))) if self.parameters.admit(&line) => {
                    // Microseconds keep the order, and a negative time counts as 0.
                    let key = ((line.time * 1e6) as u64, self.number);
                    self.number += 1;
                    self.held.insert(key, (Instant::now(), line));
                }
                Ok(Some(TapItem::Line(_))) => {}
                Ok(None) => return Ok(self.held.pop_first().map(|(_, (_, line))| line)),
                Err(_) if due.is_some() => {}
                Err(elapsed) => return Err(elapsed),
            }
        }
    }

    /// Returns the next text to send; `None` once the server ends.
    async fn next(&mut self) -> Option<String> {
        loop {
            let line = match self.next_line().await {
                Ok(line) => line?,
                Err(_) => return Some(self.report().unwrap_or_else(|| "\n".to_owned())),
            };
            let mut text = String::new();
            if self.second.elapsed() >= Duration::from_secs(1) {
                self.second = Instant::now();
                self.written = 0;
                text = self.report().unwrap_or_default();
            }
            if self.written >= self.rate {
                self.suppressed += 1;
                continue;
            }
            self.written += 1;
            // A line is made of texts and numbers: it can always be written down.
            text.push_str(&serde_json::to_string(&line).unwrap_or_default());
            text.push('\n');
            return Some(text);
        }
    }

    /// Says how many lines were left out, if any were.
    fn report(&mut self) -> Option<String> {
        let suppressed = std::mem::take(&mut self.suppressed);
        (suppressed > 0).then(|| json!({ "suppressed": suppressed }).to_string() + "\n")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ops::tap::Tap;

    /// A line of the given path and time.
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
        let tap = Tap::new();
        let mut stream = Stream {
            view: tap.look(1),
            parameters: TapParameters::default(),
            rate: 100,
            second: Instant::now(),
            written: 0,
            suppressed: 0,
            held: BTreeMap::new(),
            number: 0,
        };
        // Userspace reports at once, the interface in batches.
        for (path, time) in [
            (TapPath::Userspace, 10.0),
            (TapPath::Userspace, 10.2),
            (TapPath::Fast, 10.1),
            (TapPath::Fast, 9.9),
        ] {
            tap.publish(line(path, time));
        }
        let mut times = Vec::new();
        for _ in 0..4 {
            let text = tokio::time::timeout(Duration::from_secs(30), stream.next()).await.unwrap().unwrap();
            times.push(serde_json::from_str::<TapLine>(&text).unwrap().time);
        }
        assert_eq!(times, [9.9, 10.0, 10.1, 10.2]);
    }
}
