//! Columnar storage of the fleet: interned strings, rows as numbers, and for every value the rows
//! that hold it.

use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::Arc;

use foldhash::fast::FixedState;
use hashbrown::{HashMap, HashTable};

/// Number of a row: an instance on one network.
pub(crate) type Row = u32;

/// Number of a string in its column's [`Dictionary`].
pub(crate) type Symbol = u32;

/// [`Symbol`] of a row without a value in this column.
pub(crate) const NO_VALUE: Symbol = Symbol::MAX;

/// Numbered strings in one buffer.
///
/// The strings of one records file always fit: [`super::Records::parse`] rejects files of 4 GiB and more.
#[derive(Clone, Debug, Default)]
struct Strings {
    /// All strings, concatenated in their order.
    text: String,
    /// End of each string; it starts at the end of the previous one.
    ends: Vec<u32>,
}

impl Strings {
    fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len() as u32);
    }

    #[inline]
    fn get(&self, number: u32) -> &str {
        let index = number as usize;
        let start = if index == 0 {
            0
        } else {
            self.ends[index - 1] as usize
        };
        &self.text[start..self.ends[index] as usize]
    }

    fn len(&self) -> usize {
        self.ends.len()
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len() as u32).map(|number| self.get(number))
    }

    /// Releases the memory reserved for further strings.
    fn shrink_to_fit(&mut self) {
        self.text.shrink_to_fit();
        self.ends.shrink_to_fit();
    }
}

/// Interned strings, numbered in the order of their first appearance.
///
/// They are found by hash, which is not seeded: the strings come from the operator's own files.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dictionary {
    /// The string of each symbol.
    strings: Strings,
    /// Symbols by the hash of their string.
    table: HashTable<Symbol>,
}

impl Dictionary {
    /// Returns the symbol of `text`, adding it if it is new.
    pub(crate) fn intern(&mut self, text: &str) -> Symbol {
        let Self { strings, table } = self;
        let hash = hash(text.as_bytes());
        if let Some(&symbol) = table.find(hash, |&symbol| strings.get(symbol) == text) {
            return symbol;
        }
        let symbol = strings.len() as Symbol;
        strings.push(text);
        table.insert_unique(hash, symbol, |&symbol| {
            self::hash(strings.get(symbol).as_bytes())
        });
        symbol
    }

    /// Returns the dictionary of `strings`, and the symbol of each.
    ///
    /// Equal strings are found in one loop over all hashes: then the processor waits for several places of the table at
    /// a time. With a look-up per string while a file is parsed it waits for one after the other, which took a quarter
    /// of the time to read 100,000 rows.
    fn of(mut strings: Strings) -> (Self, Vec<Symbol>) {
        let hashes: Vec<u64> = strings.iter().map(|text| hash(text.as_bytes())).collect();
        let mut table = HashTable::with_capacity(hashes.len());
        let mut symbols = Vec::with_capacity(hashes.len());
        // Number of the first string of each symbol.
        let mut firsts: Vec<u32> = Vec::new();
        for (number, &hash) in (0..).zip(&hashes) {
            let text = strings.get(number);
            let is_same = |&symbol: &Symbol| strings.get(firsts[symbol as usize]) == text;
            let symbol = match table.find(hash, is_same) {
                Some(&symbol) => symbol,
                None => {
                    let symbol = firsts.len() as Symbol;
                    table.insert_unique(hash, symbol, |&other| {
                        hashes[firsts[other as usize] as usize]
                    });
                    firsts.push(number);
                    symbol
                }
            };
            symbols.push(symbol);
        }
        table.shrink_to_fit(|&symbol| hashes[firsts[symbol as usize] as usize]);
        // Ids are all distinct: then the buffer is the dictionary already, without a copy.
        if firsts.len() < hashes.len() {
            let mut distinct = Strings::default();
            for number in firsts {
                distinct.push(strings.get(number));
            }
            strings = distinct;
        }
        strings.shrink_to_fit();
        (Self { strings, table }, symbols)
    }

    /// Releases the memory reserved for further strings.
    pub(crate) fn shrink_to_fit(&mut self) {
        self.strings.shrink_to_fit();
    }

    /// Returns the symbol of the string with exactly these bytes.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<Symbol> {
        self.table
            .find(hash(bytes), |&symbol| self.text(symbol).as_bytes() == bytes)
            .copied()
    }

    /// Returns the string of a symbol; empty for [`NO_VALUE`].
    #[inline]
    pub(crate) fn text(&self, symbol: Symbol) -> &str {
        if symbol == NO_VALUE {
            ""
        } else {
            self.strings.get(symbol)
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.strings.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Symbol, &str)> {
        (0..).zip(self.strings.iter())
    }
}

#[inline]
fn hash(bytes: &[u8]) -> u64 {
    FixedState::default().hash_one(bytes)
}

/// Collects the values of a [`Column`].
#[derive(Debug, Default)]
pub(crate) struct ColumnBuilder {
    /// The string of each row that has another one than the row before: neighbours often share a value.
    strings: Strings,
    /// Number of each row's string, or [`NO_VALUE`].
    values: Vec<u32>,
}

impl ColumnBuilder {
    /// Appends the next row's value. An empty string counts as no value, because no label can be
    /// empty.
    #[inline]
    pub(crate) fn push(&mut self, text: &str) {
        if text.is_empty() {
            self.values.push(NO_VALUE);
            return;
        }
        let next = self.strings.len() as u32;
        if next > 0 && self.strings.get(next - 1) == text {
            self.values.push(next - 1);
            return;
        }
        self.strings.push(text);
        self.values.push(next);
    }

    /// Indexes the column once all rows have been pushed.
    pub(crate) fn index(self) -> Column {
        let (dictionary, symbols) = Dictionary::of(self.strings);
        let mut values = self.values;
        for value in &mut values {
            if *value != NO_VALUE {
                *value = symbols[*value as usize];
            }
        }
        Column::new(dictionary, values)
    }
}

/// One column: its dictionary, the value of each row, and the rows of each value.
#[derive(Debug)]
pub(crate) struct Column {
    pub(crate) dictionary: Dictionary,
    /// Value of each row, or [`NO_VALUE`].
    pub(crate) values: Vec<Symbol>,
    /// Rows by value.
    postings: Postings,
}

impl Column {
    fn new(dictionary: Dictionary, mut values: Vec<Symbol>) -> Self {
        // A snapshot lives until the file changes, and spare room would live as long.
        values.shrink_to_fit();
        let pairs = value_rows(&values).filter(|&(symbol, _)| symbol != NO_VALUE);
        Self {
            postings: Postings::new(dictionary.len(), pairs),
            dictionary,
            values,
        }
    }

    /// Returns the column after edits that add rows of `added`, as if all rows had been pushed.
    pub(super) fn edited(&self, edits: &Edits, added: &Self) -> Self {
        let mut symbols = Renumbering::new(&self.dictionary);
        let mut values = Vec::with_capacity(edits.len());
        for piece in edits.pieces() {
            match piece {
                Piece::Kept(rows) => {
                    for &symbol in &self.values[rows.clone()] {
                        values.push(symbols.keep(symbol));
                    }
                }
                Piece::Added(row) => values.push(match added.text(*row as Row) {
                    "" => NO_VALUE,
                    text => symbols.add(text),
                }),
            }
        }
        Self::new(symbols.finish(), values)
    }

    /// Returns the string of a row; empty if it has none.
    pub(crate) fn text(&self, row: Row) -> &str {
        self.dictionary.text(self.values[row as usize])
    }

    /// Returns the rows that hold a value.
    pub(crate) fn rows(&self, symbol: Symbol) -> &[Row] {
        self.postings.rows(symbol)
    }

    /// Returns the rows that hold this string; none if it does not occur.
    pub(crate) fn rows_with(&self, text: &[u8]) -> &[Row] {
        self.dictionary
            .find(text)
            .map_or(&[], |symbol| self.rows(symbol))
    }
}

/// Numbers the strings of an edited list in the order of their first appearance, like a [`Dictionary`] that is
/// filled from the start, but without hashing the ones that the older dictionary has.
pub(crate) struct Renumbering<'d> {
    old: &'d Dictionary,
    /// New symbol of each old one that has appeared, else [`NO_VALUE`].
    numbers: Vec<Symbol>,
    /// Symbols of strings that the older dictionary lacks.
    fresh: HashMap<&'d str, Symbol, FixedState>,
    /// All strings by their new symbols.
    texts: Vec<&'d str>,
    /// Number of leading symbols that are the same as before.
    same: Symbol,
}

impl<'d> Renumbering<'d> {
    pub(crate) fn new(old: &'d Dictionary) -> Self {
        let numbers = vec![NO_VALUE; old.len()];
        let texts = Vec::with_capacity(old.len());
        Self {
            old,
            numbers,
            fresh: HashMap::default(),
            texts,
            same: 0,
        }
    }

    /// Returns the new symbol of an old one; [`NO_VALUE`] stays.
    #[inline]
    pub(crate) fn keep(&mut self, symbol: Symbol) -> Symbol {
        // `NO_VALUE` is beyond every list.
        let Some(number) = self.numbers.get_mut(symbol as usize) else {
            return NO_VALUE;
        };
        if *number == NO_VALUE {
            *number = self.texts.len() as Symbol;
            // Counts only while no symbol so far has got another number.
            self.same += Symbol::from(*number == symbol && self.same == symbol);
            self.texts.push(self.old.text(symbol));
        }
        *number
    }

    pub(crate) fn add(&mut self, text: &'d str) -> Symbol {
        if let Some(symbol) = self.old.find(text.as_bytes()) {
            return self.keep(symbol);
        }
        let next = self.texts.len() as Symbol;
        let symbol = *self.fresh.entry(text).or_insert(next);
        if symbol == next {
            self.texts.push(text);
        }
        symbol
    }

    /// Returns the dictionary of the strings that have appeared.
    pub(crate) fn finish(self) -> Dictionary {
        let Self {
            old, texts, same, ..
        } = self;
        // Mostly nothing is left out: then the strings that are new follow the old ones.
        let all_are_same = same as usize == old.len();
        let (mut dictionary, known) = if all_are_same {
            (old.clone(), old.len())
        } else {
            (Dictionary::default(), 0)
        };
        for text in &texts[known..] {
            dictionary.intern(text);
        }
        dictionary.shrink_to_fit();
        dictionary
    }
}

/// Returns each row with its value.
pub(crate) fn value_rows(values: &[u32]) -> impl Iterator<Item = (u32, Row)> + Clone {
    values
        .iter()
        .enumerate()
        .map(|(row, &value)| (value, row as Row))
}

/// Index of a column: for every symbol the rows that hold it, in ascending order.
#[derive(Debug, Default)]
pub(crate) struct Postings {
    /// Start of each symbol's rows in `rows`, followed by the total length.
    starts: Vec<u32>,
    /// Rows of symbol 0, then of symbol 1, and so on.
    rows: Vec<Row>,
}

impl Postings {
    /// Groups (symbol, row) pairs, given in ascending order of rows, by symbol.
    pub(crate) fn new(symbols: usize, pairs: impl Iterator<Item = (Symbol, Row)> + Clone) -> Self {
        // Counting first, then placing, takes two allocations instead of a list for each symbol.
        let mut starts = vec![0u32; symbols + 1];
        for (symbol, _) in pairs.clone() {
            starts[symbol as usize + 1] += 1;
        }
        for index in 1..starts.len() {
            starts[index] += starts[index - 1];
        }
        let mut next = starts.clone();
        let mut rows = vec![0; starts.last().copied().unwrap_or(0) as usize];
        for (symbol, row) in pairs {
            let place = &mut next[symbol as usize];
            rows[*place as usize] = row;
            *place += 1;
        }
        Self { starts, rows }
    }

    /// Returns the rows that hold `symbol`.
    pub(crate) fn rows(&self, symbol: Symbol) -> &[Row] {
        let index = symbol as usize;
        &self.rows[self.starts[index] as usize..self.starts[index + 1] as usize]
    }
}

//----------- Edits ----------------------------------------------------------

// How a list came from an earlier one: runs of elements that were kept, in the same order, and elements that were
// added.

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
            // One edited row among 100,000 leaves three pieces.
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
        // Most columns keep their values when a row changes. Snapshots then share the column.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_texts_share_a_symbol() {
        let mut dictionary = Dictionary::default();
        let symbols: Vec<Symbol> = ["a", "bb", "a", "", "ccc"]
            .map(|text| dictionary.intern(text))
            .into();
        assert_eq!(symbols, [0, 1, 0, 2, 3]);
        assert_eq!(dictionary.find(b"ccc"), Some(3));
        assert_eq!(dictionary.find(b"b"), None);
        assert_eq!(
            dictionary.iter().map(|(_, text)| text).collect::<Vec<_>>(),
            ["a", "bb", "", "ccc"]
        );
    }

    #[test]
    fn postings_group_rows_by_value() {
        let mut column = ColumnBuilder::default();
        for text in ["x", "y", "", "x", "x"] {
            column.push(text);
        }
        let column = column.index();
        assert_eq!(column.rows(0), [0, 3, 4]);
        assert_eq!(column.rows_with(b"y"), [1]);
        assert_eq!(column.text(2), "");
    }

    #[test]
    fn column_numbers_strings_as_interning_does() {
        let random = &mut fastrand::Rng::with_seed(1);
        for _ in 0..200 {
            let rows = random.usize(..300);
            // From a few values, or mostly different ones, with runs of the same one.
            let most = random.u32(1..500);
            let mut column = ColumnBuilder::default();
            let mut expected = Dictionary::default();
            let mut values = Vec::new();
            while values.len() < rows {
                let text = match random.u32(..most) {
                    0 => String::new(),
                    value => format!("value-{value}"),
                };
                for _ in 0..random.usize(1..4) {
                    column.push(&text);
                    values.push(if text.is_empty() {
                        NO_VALUE
                    } else {
                        expected.intern(&text)
                    });
                }
            }
            let column = column.index();
            assert_eq!(column.values, values);
            assert_eq!(column.dictionary.len(), expected.len());
            for (symbol, text) in expected.iter() {
                assert_eq!(column.dictionary.text(symbol), text);
                assert_eq!(column.dictionary.find(text.as_bytes()), Some(symbol));
            }
            assert_eq!(column.dictionary.find(b"value-0"), None);
        }
    }
}
