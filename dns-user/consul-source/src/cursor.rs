//! The index of a blocking query, and detection of changes.

use std::hash::{BuildHasher as _, Hasher as _};

use foldhash::quality::FixedState;

/// Position in the history of a topic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// Index for the next blocking query; 0 if the next request does not block.
    index: u64,
    /// Hash of the last response.
    told: Option<u64>,
}

/// Effect of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worth {
    /// The content differs from the previous response.
    News,
    /// The content is the same: the wait ended, or something unrelated changed.
    Known,
}

impl Cursor {
    /// Returns the index for the next blocking query; `None` if the next request does not block.
    pub(crate) fn index(&self) -> Option<u64> {
        (self.index > 0).then_some(self.index)
    }

    /// Records a response and its index; `None` if the index is absent or malformed.
    ///
    /// A smaller index than before belongs to another history (servers restored from a snapshot),
    /// so the next request carries none. Index 0 does not block.
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

    /// Returns whether the index of a response is smaller than the previous one.
    pub(crate) fn falls_to(&self, index: Option<u64>) -> bool {
        index.unwrap_or(0) < self.index
    }

    /// Starts over: the next request does not block.
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
        // Returned without a change.
        assert_eq!(cursor.advance(Some(9), b"a"), Worth::Known);
        assert_eq!(cursor.index(), Some(9));
        // A smaller index starts over; its content counts as new.
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
