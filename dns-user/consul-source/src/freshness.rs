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

    /// Notes a failure.
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
        is_catalog: impl Fn(&Q) -> bool,
    ) -> Self {
        let mut summary = Self::default();
        for (question, Freshness { answered, failing }) in questions {
            let Some((since, reason)) = failing else { continue };
            let age = answered.unwrap_or(*since).elapsed();
            if is_catalog(question) && answered.is_some() {
                summary.catalog_age = summary.catalog_age.max(Some(age));
            }
            if since.elapsed() < limit {
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

    #[tokio::test(start_paused = true)]
    async fn failures_make_answers_stale() {
        const LIMIT: Duration = Duration::from_secs(60);
        let mut questions: HashMap<&str, Freshness> = HashMap::new();
        let summary =
            |questions: &HashMap<&str, Freshness>| Summary::of(questions, LIMIT, |name| *name == "nodes");
        questions.entry("nodes").or_default().succeeded(Instant::now());
        // A long wait is no failure.
        tokio::time::advance(Duration::from_secs(300)).await;
        assert_eq!(summary(&questions), Summary::default());
        questions.entry("nodes").or_default().failed(Instant::now(), "403".to_owned());
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(
            (summary(&questions).stale, summary(&questions).catalog_age),
            (0, Some(Duration::from_secs(359)))
        );
        questions.entry("nodes").or_default().failed(Instant::now(), "403 again".to_owned());
        tokio::time::advance(Duration::from_secs(1)).await;
        let oldest = (Duration::from_secs(360), "nodes, last answered 360 s ago: 403 again".to_owned());
        assert_eq!((summary(&questions).stale, summary(&questions).oldest), (1, Some(oldest)));
        questions.entry("nodes").or_default().succeeded(Instant::now());
        assert_eq!(summary(&questions), Summary::default());
    }
}
