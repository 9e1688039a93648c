//! Success and failure of each topic: the age of a response that is still used because no newer one
//! arrives. No I/O.

use std::{collections::HashMap, fmt::Display, hash::Hash, time::Duration};

use tokio::time::Instant;

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
        *self = Self { answered: Some(now), failing: None };
    }

    /// Returns whether there ever was a response.
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
    /// Summarises the topics. `is_catalog` selects those that the whole catalog depends on.
    pub(crate) fn of<Q: Display + Eq + Hash>(
        questions: &HashMap<Q, Freshness>,
        limit: Duration,
        now: Instant,
        is_catalog: impl Fn(&Q) -> bool,
    ) -> Self {
        let mut summary = Self::default();
        for (question, Freshness { answered, failing }) in questions {
            let Some((since, reason)) = failing else { continue };
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
            if summary.oldest.as_ref().is_none_or(|(oldest, _)| age > *oldest) {
                let age_text = age.as_secs();
                summary.oldest = Some((age, format!("{question}, last answered {age_text} s ago: {reason}")));
            }
        }
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        questions.entry("queries").or_default().failed(at(0), "403".to_owned());
        // A long wait is not a failure.
        assert_eq!(summary(&questions, 300), Summary::default());
        questions.entry("nodes").or_default().failed(at(300), "403".to_owned());
        let young = summary(&questions, 359);
        assert_eq!((young.stale, young.catalog_age), (0, Some(Duration::from_secs(359))));
        assert_eq!(young.catalog_failing, Some(Duration::from_secs(59)));
        questions.entry("nodes").or_default().failed(at(359), "403 again".to_owned());
        let oldest = (Duration::from_secs(360), "nodes, last answered 360 s ago: 403 again".to_owned());
        let old = summary(&questions, 360);
        assert_eq!((old.stale, old.oldest), (1, Some(oldest)));
        questions.entry("nodes").or_default().succeeded(at(361));
        assert_eq!(summary(&questions, 500), Summary::default());
    }
}
