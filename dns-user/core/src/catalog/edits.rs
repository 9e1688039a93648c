//! How a list came from an earlier one: runs of elements that were kept, in the same order, and elements that
//! were added.

use std::ops::Range;
use std::sync::Arc;

/// A part of an edited list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// These elements of the older list.
    Kept(Range<usize>),
    /// This element of the list of added ones.
    Added(usize),
}

/// The parts of an edited list in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Edits {
    pieces: Vec<Piece>,
    /// Elements of the older list that are left out, in ascending order.
    removed: Vec<usize>,
    /// Positions of the added elements.
    added: Vec<usize>,
    /// Length of the edited list.
    len: usize,
}

impl Edits {
    /// Appends an element of the older list.
    pub(super) fn keep(&mut self, index: usize) {
        self.len += 1;
        match self.pieces.last_mut() {
            Some(Piece::Kept(run)) if run.end == index => run.end += 1,
            _ => self.pieces.push(Piece::Kept(index..index + 1)),
        }
    }

    /// Appends a new element.
    pub(super) fn add(&mut self) {
        self.pieces.push(Piece::Added(self.added.len()));
        self.added.push(self.len);
        self.len += 1;
    }

    /// Leaves out elements of the older list.
    pub(super) fn remove(&mut self, range: Range<usize>) {
        self.removed.extend(range);
    }

    /// Returns whether the list is the same.
    pub(super) fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty()
    }

    /// Returns the number of elements that were removed or added.
    pub(super) fn count(&self) -> usize {
        self.added.len() + self.removed.len()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Returns the elements of the older list that are left out.
    pub(super) fn removed(&self) -> &[usize] {
        &self.removed
    }

    /// Returns the position of each added element, and its number among them.
    pub(super) fn added(&self) -> impl Iterator<Item = (usize, usize)> {
        self.added.iter().copied().zip(0..)
    }

    /// Returns whether every added element replaces the one at its position, so that all others keep theirs,
    /// and `test` is true for each (its position, its number among the added ones).
    pub(super) fn replace_all(&self, test: impl FnMut((usize, usize)) -> bool) -> bool {
        self.removed == self.added && self.added().all(test)
    }

    /// Returns the new position of each element of the older list that is kept, else `None`; `None` if all
    /// positions stay the same but for replaced elements.
    pub(super) fn positions(&self, older: usize) -> Option<Vec<Option<u32>>> {
        if self.removed == self.added {
            return None;
        }
        let mut positions = vec![None; older];
        let mut next = 0;
        for piece in &self.pieces {
            match piece {
                Piece::Kept(run) => {
                    for index in run.clone() {
                        positions[index] = Some(next);
                        next += 1;
                    }
                }
                Piece::Added(_) => next += 1,
            }
        }
        Some(positions)
    }

    /// Applies the edits to values of the list's elements; shares them if they are the same.
    pub(super) fn apply<T: Copy + PartialEq>(&self, old: &Arc<[T]>, added: &[T]) -> Arc<[T]> {
        if self.replace_all(|(position, number)| old[position] == added[number]) {
            return old.clone();
        }
        let mut values = Vec::with_capacity(self.len);
        for piece in &self.pieces {
            match piece {
                Piece::Kept(run) => values.extend_from_slice(&old[run.clone()]),
                Piece::Added(number) => values.push(added[*number]),
            }
        }
        values.into()
    }
}
