//! The progress of each topic and service: the index of blocking queries with the detection of changes, and the age of
//! a response that is still used because no newer one arrives. No I/O.

use std::{
    fmt::Display,
    hash::{BuildHasher as _, Hasher as _},
    time::Duration,
};

use foldhash::quality::FixedState;
use tokio::{task::AbortHandle, time::Instant};

/// Position in the history of a topic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// Index for the next blocking query; 0 if the next request does not block.
    index: u64,
    /// Hash of the last response.
    hash: Option<u64>,
}

impl Cursor {
    /// Returns the index for the next blocking query; `None` if the next request does not block.
    pub(crate) fn index(&self) -> Option<u64> {
        (self.index > 0).then_some(self.index)
    }

    /// Records a response and its index, `None` if absent or malformed. Returns whether the content changed; it
    /// is the same if the wait ended, or something unrelated changed.
    ///
    /// A smaller index than before belongs to another history (servers restored from a snapshot),
    /// so the next request carries none. Index 0 does not block.
    pub(crate) fn advance(&mut self, index: Option<u64>, body: &[u8]) -> bool {
        self.index = if self.falls_to(index) {
            0
        } else {
            index.unwrap_or(0)
        };
        let mut hasher = FixedState::default().build_hasher();
        hasher.write(body);
        // The hash instead of the response, because thousands of services are watched.
        let hash = hasher.finish();
        self.hash.replace(hash) != Some(hash)
    }

    /// Returns whether the index of a response is smaller than the previous one.
    pub(crate) fn falls_to(&self, index: Option<u64>) -> bool {
        index.unwrap_or(0) < self.index
    }

    /// Starts over: the next request does not block.
    pub(crate) fn reset(&mut self) {
        self.index = 0;
    }
}

//----------- Freshness ------------------------------------------------------

/// Outcomes of the requests for one topic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Freshness {
    answered: Option<Instant>,
    /// Time of the first failure since the last response, and the latest error.
    failing: Option<(Instant, String)>,
}

impl Freshness {
    /// Records a response, changed or not.
    pub(crate) fn succeeded(&mut self, now: Instant) {
        *self = Self {
            answered: Some(now),
            failing: None,
        };
    }

    pub(crate) fn was_answered(&self) -> bool {
        self.answered.is_some()
    }

    /// Returns whether the latest request was successful.
    pub(crate) fn is_fresh(&self) -> bool {
        self.answered.is_some() && self.failing.is_none()
    }

    pub(crate) fn failed(&mut self, now: Instant, reason: String) {
        let since = self.failing.as_ref().map_or(now, |(since, _)| *since);
        self.failing = Some((since, reason));
    }
}

/// Summary of the failing topics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// Number of topics that have failed for longer than the limit.
    pub(crate) stale: usize,
    /// Age of the oldest of their responses, with topic and error.
    pub(crate) oldest: Option<(Duration, String)>,
    /// Age of the oldest response that the whole catalog depends on, if its topic is failing.
    pub(crate) catalog_age: Option<Duration>,
    /// How long a topic that the whole catalog depends on has been failing.
    pub(crate) catalog_failing: Option<Duration>,
}

impl Summary {
    /// Summarises the topics. `is_catalog` selects the topics on which the whole catalog depends.
    pub(crate) fn of<'a, Q: Display + 'a>(
        questions: impl IntoIterator<Item = (&'a Q, &'a Freshness)>,
        limit: Duration,
        now: Instant,
        is_catalog: impl Fn(&Q) -> bool,
    ) -> Self {
        let mut summary = Self::default();
        for (question, Freshness { answered, failing }) in questions {
            let Some((since, reason)) = failing else {
                continue;
            };
            let age = now.saturating_duration_since(answered.unwrap_or(*since));
            let failing_for = now.saturating_duration_since(*since);
            if is_catalog(question) {
                summary.catalog_failing = summary.catalog_failing.max(Some(failing_for));
                if answered.is_some() {
                    summary.catalog_age = summary.catalog_age.max(Some(age));
                }
            }
            // Without an earlier response nothing stale is served; the token may lack permission.
            if answered.is_none() || failing_for < limit {
                continue;
            }
            summary.stale += 1;
            if summary
                .oldest
                .as_ref()
                .is_none_or(|(oldest, _)| age > *oldest)
            {
                let age_text = age.as_secs();
                summary.oldest = Some((
                    age,
                    format!("{question}, last answered {age_text} s ago: {reason}"),
                ));
            }
        }
        summary
    }
}

//----------- Services -------------------------------------------------------

/// Aborts a task when it is dropped.
#[derive(Debug)]
pub(crate) struct Running(pub(crate) AbortHandle);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Debug, Default)]
pub(crate) struct Tracked {
    /// Position for the next request.
    pub(crate) cursor: Cursor,
    pub(crate) phase: Phase,
    /// Time of the last response about its instances.
    pub(crate) loaded_at: Option<Instant>,
    /// Time of the last query for it.
    pub(crate) queried_at: Option<Instant>,
}

/// State of one service.
#[derive(Debug, Default)]
pub(crate) enum Phase {
    /// Waits in `idle` for the next fetch, or for a watch.
    #[default]
    Idle,
    /// Waits in `queue` for a fetch.
    Queued,
    Fetching {
        /// Whether the service changed during the fetch and must be fetched again.
        again: bool,
    },
    /// Watched by a task.
    Watched(#[expect(dead_code, reason = "dropping it ends the task")] Running),
}

impl Tracked {
    pub(crate) fn is_watched(&self) -> bool {
        matches!(self.phase, Phase::Watched(_))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn the_index_follows_the_rules() {
        let mut cursor = Cursor::default();
        assert_eq!(cursor.index(), None);
        assert!(cursor.advance(Some(7), b"a"));
        assert_eq!(cursor.index(), Some(7));
        // Returned without a change.
        assert!(!cursor.advance(Some(9), b"a"));
        assert_eq!(cursor.index(), Some(9));
        // A smaller index starts over; its content counts as new.
        assert!(cursor.advance(Some(3), b"b"));
        assert_eq!(cursor.index(), None);
        assert!(!cursor.advance(Some(3), b"b"));
        assert_eq!(cursor.index(), Some(3));
        for none in [None, Some(0)] {
            assert_eq!(cursor.advance(none, b"c"), none.is_none());
            assert_eq!(cursor.index(), None);
        }
    }

    #[test]
    fn failures_make_answers_stale() {
        const LIMIT: Duration = Duration::from_secs(60);
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut questions: HashMap<&str, Freshness> = HashMap::new();
        let summary = |questions: &HashMap<&str, Freshness>, seconds| {
            Summary::of(questions, LIMIT, at(seconds), |name| *name == "nodes")
        };
        questions.entry("nodes").or_default().succeeded(at(0));
        questions
            .entry("queries")
            .or_default()
            .failed(at(0), "403".to_owned());
        // A long wait is not a failure.
        assert_eq!(summary(&questions, 300), Summary::default());
        questions
            .entry("nodes")
            .or_default()
            .failed(at(300), "403".to_owned());
        let young = summary(&questions, 359);
        assert_eq!(
            (young.stale, young.catalog_age),
            (0, Some(Duration::from_secs(359)))
        );
        assert_eq!(young.catalog_failing, Some(Duration::from_secs(59)));
        questions
            .entry("nodes")
            .or_default()
            .failed(at(359), "403 again".to_owned());
        let oldest = (
            Duration::from_secs(360),
            "nodes, last answered 360 s ago: 403 again".to_owned(),
        );
        let old = summary(&questions, 360);
        assert_eq!((old.stale, old.oldest), (1, Some(oldest)));
        questions.entry("nodes").or_default().succeeded(at(361));
        assert_eq!(summary(&questions, 500), Summary::default());
    }

    #[test]
    fn smaller_indices_start_over() {
        for (before, index, falls) in [
            (None, None, false),
            (None, Some(0), false),
            (Some(7), Some(7), false),
            (Some(7), Some(8), false),
            (Some(7), Some(6), true),
            (Some(7), Some(0), true),
            (Some(7), None, true),
        ] {
            let mut cursor = Cursor::default();
            cursor.advance(before, b"");
            assert_eq!(cursor.falls_to(index), falls, "{before:?} {index:?}");
        }
        let mut cursor = Cursor::default();
        assert!(cursor.advance(Some(7), b"a"));
        cursor.reset();
        assert_eq!(cursor.index(), None);
        assert!(!cursor.falls_to(None));
        assert!(!cursor.advance(Some(7), b"a"), "the content is still known");
        assert_eq!(cursor.index(), Some(7));
        assert!(cursor.advance(Some(7), b""), "empty is another content");
    }

    #[test]
    fn first_failure_since_a_response_counts() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut freshness = Freshness::default();
        assert!(!freshness.is_fresh() && !freshness.was_answered());
        freshness.failed(at(1), "a".to_owned());
        assert!(!freshness.is_fresh() && !freshness.was_answered());
        freshness.failed(at(2), "b".to_owned());
        assert_eq!(freshness.failing, Some((at(1), "b".to_owned())));
        freshness.succeeded(at(3));
        assert!(freshness.is_fresh() && freshness.was_answered());
        freshness.failed(at(4), "c".to_owned());
        assert!(!freshness.is_fresh() && freshness.was_answered());
        let expected = Freshness {
            answered: Some(at(3)),
            failing: Some((at(4), "c".to_owned())),
        };
        assert_eq!(freshness, expected);
    }

    #[test]
    fn oldest_answers_are_summarised() {
        let begun = Instant::now();
        let seconds = Duration::from_secs;
        let failing = |answered: Option<u64>, since: u64| Freshness {
            answered: answered.map(|at| begun + seconds(at)),
            failing: Some((begun + seconds(since), format!("since {since}"))),
        };
        let questions = HashMap::from([
            ("nodes a", failing(Some(10), 50)),
            ("nodes b", failing(Some(20), 30)),
            ("nodes c", failing(None, 5)),
            ("x", failing(Some(0), 40)),
            ("y", failing(Some(0), 41)),
            ("z", failing(None, 0)),
        ]);
        let summary = |limit: u64, now: u64| {
            let is_catalog = |name: &&str| name.starts_with("nodes");
            Summary::of(&questions, seconds(limit), begun + seconds(now), is_catalog)
        };
        let stale = Summary {
            stale: 2,
            oldest: Some((
                seconds(100),
                "x, last answered 100 s ago: since 40".to_owned(),
            )),
            catalog_age: Some(seconds(90)),
            // Also of a topic that was never answered.
            catalog_failing: Some(seconds(95)),
        };
        assert_eq!(summary(60, 100), stale);
        let none = Summary {
            stale: 0,
            oldest: None,
            ..stale.clone()
        };
        assert_eq!(summary(71, 100), none);
        assert_eq!(summary(50, 100).stale, 4);
        // Times before the first response are no age.
        assert_eq!(summary(0, 0).catalog_age, Some(Duration::ZERO));
    }

    #[tokio::test]
    async fn watches_end_with_their_phase() {
        let mut tracked = Tracked::default();
        assert!(!tracked.is_watched());
        let task = tokio::spawn(std::future::pending::<()>());
        tracked.phase = Phase::Watched(Running(task.abort_handle()));
        assert!(tracked.is_watched());
        tracked.phase = Phase::Queued;
        assert!(!tracked.is_watched());
        assert!(task.await.unwrap_err().is_cancelled());
    }

    #[test]
    fn oldest_of_many_answers_is_shown() {
        let now = Instant::now() + Duration::from_secs(1000);
        let mut questions = HashMap::new();
        for number in 0..50 {
            let age = Duration::from_secs(100 + number);
            let failing = Some((now - Duration::from_secs(90), "403".to_owned()));
            let answered = Some(now - age);
            questions.insert(number, Freshness { answered, failing });
        }
        let summary = Summary::of(&questions, Duration::from_secs(60), now, |_: &u64| true);
        let oldest = "49, last answered 149 s ago: 403".to_owned();
        let expected = Summary {
            stale: 50,
            oldest: Some((Duration::from_secs(149), oldest)),
            catalog_age: Some(Duration::from_secs(149)),
            catalog_failing: Some(Duration::from_secs(90)),
        };
        assert_eq!(summary, expected);
    }
}
