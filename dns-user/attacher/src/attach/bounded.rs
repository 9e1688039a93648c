//! A list that is bounded where it is kept.

use std::collections::VecDeque;

/// At most `MAX` values, oldest first; a further one displaces the oldest.
#[derive(Clone, Debug)]
pub(super) struct Bounded<T, const MAX: usize>(VecDeque<T>);

impl<T, const MAX: usize> Default for Bounded<T, MAX> {
    fn default() -> Self {
        // No memory in advance: there may be 32,768 admissions with five lists each, most of them
        // empty.
        Self(VecDeque::new())
    }
}

impl<T, const MAX: usize> Bounded<T, MAX> {
    pub(super) fn push(&mut self, value: T) {
        if self.0.len() >= MAX {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut()
    }

    /// Returns the value that was appended last.
    pub(super) fn last(&self) -> Option<&T> {
        self.0.back()
    }

    pub(super) fn retain(&mut self, keep: impl FnMut(&T) -> bool) {
        self.0.retain(keep);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_value_displaces_the_oldest() {
        let mut kept = Bounded::<_, 2>::default();
        (1..=3).for_each(|value| kept.push(value));
        assert!(kept.iter().eq(&[2, 3]));
        assert_eq!(kept.last(), Some(&3));
    }
}
