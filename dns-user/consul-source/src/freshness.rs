//! Success and failure of each question: the age of an answer that is served because no newer one comes. Pure.

use std::{collections::HashMap, fmt::Display, hash::Hash, time::Duration};

use tokio::time::Instant;

/// The outcomes of one question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Freshness {
    answered: Option<Instant>,
    /// The first failure after the last answer, and the reason of the newest one.
    failing: Option<(Instant, String)>,
}

impl Freshness {
    /// Notes an answer, changed or not.
    pub(crate) fn succeeded(&mut self, now: Instant) {
        *self = Self { answered: Some(now), failing: None };
    }

    /// Whether it was ever answered.
    pub(crate) fn was_answered(&self) -> bool {
        self.answered.is_some()
    }

    pub(crate) fn failed(&mut self, now: Instant, reason: String) {
        let since = self.failing.as_ref().map_or(now, |(since, _)| *since);
        self.failing = Some((since, reason));
    }
}

/// The failing questions in short.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// Questions that have failed for longer than the limit.
    pub(crate) stale: usize,
    /// Age of the oldest of their answers, with the question and the reason.
    pub(crate) oldest: Option<(Duration, String)>,
    /// Age of the oldest answer that the whole catalog depends on, if its question fails.
    pub(crate) catalog_age: Option<Duration>,
}

impl Summary {
    /// Sums up. `is_catalog` selects the questions that the whole catalog depends on.
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
            if is_catalog(question) && answered.is_some() {
                summary.catalog_age = summary.catalog_age.max(Some(age));
            }
            // A question that was never answered serves nothing: the token may not ask it.
            if answered.is_none() || now.saturating_duration_since(*since) < limit {
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
        // A long wait is no failure.
        assert_eq!(summary(&questions, 300), Summary::default());
        questions.entry("nodes").or_default().failed(at(300), "403".to_owned());
        let young = summary(&questions, 359);
        assert_eq!((young.stale, young.catalog_age), (0, Some(Duration::from_secs(359))));
        questions.entry("nodes").or_default().failed(at(359), "403 again".to_owned());
        let oldest = (Duration::from_secs(360), "nodes, last answered 360 s ago: 403 again".to_owned());
        let old = summary(&questions, 360);
        assert_eq!((old.stale, old.oldest), (1, Some(oldest)));
        questions.entry("nodes").or_default().succeeded(at(361));
        assert_eq!(summary(&questions, 500), Summary::default());
    }
}
