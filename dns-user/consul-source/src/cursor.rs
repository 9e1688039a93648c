//! The index of a blocking query, and whether an answer is news.

use std::hash::{BuildHasher as _, Hasher as _};

use foldhash::quality::FixedState;

/// Where one topic stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// The index to wait behind; 0: the next question does not wait.
    index: u64,
    /// Hash of what was told last.
    told: Option<u64>,
}

/// The effect of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worth {
    /// It says something else than the one before.
    News,
    /// It says the same: the wait was over, or something else has changed.
    Known,
}

impl Cursor {
    /// The index to wait behind; `None`: ask without waiting.
    pub(crate) fn index(&self) -> Option<u64> {
        (self.index > 0).then_some(self.index)
    }

    /// Records an answer and its index; `None` if the index is absent or malformed.
    ///
    /// A smaller index than before belongs to another history (servers restored from a
    /// snapshot), so the next request carries none. Index 0 does not block.
    pub(crate) fn advance(&mut self, index: Option<u64>, body: &[u8]) -> Worth {
        self.index = if self.falls_to(index) { 0 } else { index.unwrap_or(0) };
        let mut hasher = FixedState::default().build_hasher();
        hasher.write(body);
        let told = Some(hasher.finish());
        if told == self.told {
            return Worth::Known;
        }
        self.told = told;
        Worth::News
    }

    /// Whether the index of an answer is smaller than the one before.
    pub(crate) fn falls_to(&self, index: Option<u64>) -> bool {
        index.unwrap_or(0) < self.index
    }

    /// Starts again: the next question does not wait.
    pub(crate) fn reset(&mut self) {
        self.index = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_follows_the_rules() {
        let mut cursor = Cursor::default();
        assert_eq!(cursor.index(), None);
        assert_eq!(cursor.advance(Some(7), b"a"), Worth::News);
        assert_eq!(cursor.index(), Some(7));
        // It returned, but nothing changed.
        assert_eq!(cursor.advance(Some(9), b"a"), Worth::Known);
        assert_eq!(cursor.index(), Some(9));
        // It fell: from the start again, and what came counts.
        assert_eq!(cursor.advance(Some(3), b"b"), Worth::News);
        assert_eq!(cursor.index(), None);
        assert_eq!(cursor.advance(Some(3), b"b"), Worth::Known);
        assert_eq!(cursor.index(), Some(3));
        for none in [None, Some(0)] {
            assert_eq!(cursor.advance(none, b"c").eq(&Worth::News), none.is_none());
            assert_eq!(cursor.index(), None);
        }
    }
}
