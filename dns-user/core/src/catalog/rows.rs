//! The rows of `records.json`: each cell is read by its column's kind; an invalid row is dropped
//! with a reason.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::instances::{InstanceIndexBuilder, NewRow};

/// The kind of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ColumnKind {
    /// A mandatory string: index in [`REQUIRED`].
    Required(usize),
    /// A string or null: index in [`OPTIONAL`].
    Optional(usize),
    /// `group_ids`: a list of strings.
    Groups,
    /// `instance_index`: a number; strings and null count as 0 (observed).
    Index,
    /// A column that is unknown, or named again further right.
    Ignored,
}

/// `record_keys` as written by directors: all column names, in their order.
pub const RECORD_KEYS: [&str; 13] = [
    "id",
    "num_id",
    "instance_group",
    "group_ids",
    "az",
    "az_id",
    "network",
    "network_id",
    "deployment",
    "ip",
    "domain",
    "agent_id",
    "instance_index",
];

/// Columns without which all rows are dropped (observed).
const REQUIRED: [&str; 6] = [
    "id",
    "instance_group",
    "network",
    "deployment",
    "ip",
    "domain",
];

/// Columns of strings or null that may be missing (observed).
const OPTIONAL: [&str; 5] = ["num_id", "az", "az_id", "network_id", "agent_id"];

const GROUPS: &str = "group_ids";

const INDEX: &str = "instance_index";

/// Maximum number of warnings kept per file; further ones are only counted.
const MAX_WARNINGS: usize = 1000;

/// Meanings of a row's cells from left to right, from `record_keys`.
#[derive(Clone, Debug, Default)]
pub(super) struct Columns {
    kinds: Vec<ColumnKind>,
    /// The first missing required column; if there is one, all rows are dropped.
    missing: Option<&'static str>,
    /// Whether the file has `instance_index`; otherwise no index matches (observed).
    has_index: bool,
}

impl Columns {
    /// Assigns each column its kind.
    pub(super) fn new(keys: &[String]) -> Self {
        let mut kinds = Vec::with_capacity(keys.len());
        for (position, key) in keys.iter().enumerate() {
            // If a name occurs twice, its last column counts (observed).
            kinds.push(if keys[position + 1..].contains(key) {
                ColumnKind::Ignored
            } else {
                ColumnKind::of(key)
            });
        }
        let mut missing = None;
        for (place, name) in REQUIRED.iter().enumerate().rev() {
            if !kinds.contains(&ColumnKind::Required(place)) {
                missing = Some(*name);
            }
        }
        Self {
            missing,
            has_index: kinds.contains(&ColumnKind::Index),
            kinds,
        }
    }
}

impl ColumnKind {
    fn of(key: &str) -> Self {
        if key == GROUPS {
            return Self::Groups;
        }
        if key == INDEX {
            return Self::Index;
        }
        if let Some(place) = REQUIRED.iter().position(|name| *name == key) {
            return Self::Required(place);
        }
        match OPTIONAL.iter().position(|name| *name == key) {
            Some(place) => Self::Optional(place),
            None => Self::Ignored,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct RowsReader {
    columns: Columns,
    instances: InstanceIndexBuilder,
    warnings: Vec<String>,
    /// Number of warnings that were dropped.
    more: usize,
    seen: usize,
}

impl RowsReader {
    pub(super) fn new(columns: Columns) -> Self {
        Self {
            columns,
            ..Self::default()
        }
    }

    /// Returns the usable rows and the warnings about the others.
    pub(super) fn finish(self) -> (InstanceIndexBuilder, Vec<String>) {
        let Self {
            columns,
            instances,
            mut warnings,
            more,
            seen,
        } = self;
        // Without rows nothing is lost, so there is nothing to report.
        if let (Some(column), true) = (columns.missing, seen > 0) {
            return (
                InstanceIndexBuilder::default(),
                vec![format!(
                    "record_keys lacks the column {column}: all {seen} rows are dropped"
                )],
            );
        }
        if more > 0 {
            warnings.push(format!("and {more} more rows that cannot be used"));
        }
        (instances, warnings)
    }

    /// Stores a warning, or counts it if there are too many.
    fn warn(&mut self, warning: impl FnOnce() -> String) {
        // If all rows of a large file are wrong, a text for each would take more memory than the
        // fleet.
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(warning());
        } else {
            self.more += 1;
        }
    }

    /// Adds a row, or the reason why it is unusable.
    fn take(&mut self, cells: usize, row: &RowCells<'_>) {
        self.seen += 1;
        let number = self.seen;
        let columns = self.columns.kinds.len();
        // `finish` reports all of them in one line.
        if self.columns.missing.is_some() {
            return;
        }
        if cells != columns {
            return self.warn(|| {
                format!("row {number} has {cells} cells for {columns} columns and is dropped")
            });
        }
        if let Some((column, expected)) = row.wrong {
            return self
                .warn(|| format!("row {number}: {column} must be {expected}; the row is dropped"));
        }
        let [id, instance_group, network, deployment, ip, domain] = &row.required;
        let [num_id, az, az_id, network_id, agent_id] = &row.optional;
        // IPv4-mapped addresses are stored as IPv4 addresses (observed).
        let address = ip
            .parse::<IpAddr>()
            .ok()
            .map(|address| address.to_canonical());
        if address.is_none() {
            // The row stays, since its names exist. bosh-dns answers them with an AAAA record
            // without data.
            self.warn(|| {
                format!(
                    "row {number}: ip is {ip:?}, which is not an address; the row's names have no address"
                )
            });
        }
        self.instances.push(&NewRow {
            id,
            instance_group,
            network,
            deployment,
            domain,
            num_id,
            az,
            az_id,
            network_id,
            agent_id,
            address,
            index: self.columns.has_index.then_some(row.index),
            groups: &row.groups,
        });
    }
}

impl<'de> DeserializeSeed<'de> for RowsReader {
    type Value = Self;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for RowsReader {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of rows")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        // Go decodes `null` into an empty list.
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<Self, A::Error> {
        let mut cells = RowCells::default();
        while let Some(count) = list.next_element_seed(RowSeed {
            columns: &self.columns,
            cells: &mut cells,
        })? {
            self.take(count, &cells);
        }
        Ok(self)
    }
}

/// The cells of one row, sorted by kind; reused for every row.
#[derive(Default)]
struct RowCells<'de> {
    required: [Cow<'de, str>; REQUIRED.len()],
    /// Values in the order of [`OPTIONAL`]; empty for null.
    optional: [Cow<'de, str>; OPTIONAL.len()],
    groups: Vec<Cow<'de, str>>,
    index: i64,
    /// The first cell of the wrong type: column name and expected type.
    wrong: Option<(&'static str, &'static str)>,
}

impl<'de> RowCells<'de> {
    #[inline]
    fn put(&mut self, kind: ColumnKind, cell: Cell<'de>) {
        let wrong = match (kind, cell) {
            (ColumnKind::Ignored, _) | (ColumnKind::Groups, Cell::Texts) => return,
            (ColumnKind::Required(place), Cell::Text(text)) => {
                self.required[place] = text;
                return;
            }
            (ColumnKind::Optional(place), Cell::Text(text)) => {
                self.optional[place] = text;
                return;
            }
            // An instance may have no zone, number or agent; an empty text means the same to Go.
            (ColumnKind::Optional(place), Cell::Null) => {
                self.optional[place] = Cow::Borrowed("");
                return;
            }
            (ColumnKind::Index, Cell::Number(number)) => {
                self.index = number;
                return;
            }
            (ColumnKind::Index, _) => {
                self.index = 0;
                return;
            }
            (ColumnKind::Required(place), _) => (REQUIRED[place], "a text"),
            (ColumnKind::Optional(place), _) => (OPTIONAL[place], "a text or null"),
            (ColumnKind::Groups, _) => (GROUPS, "a list of texts"),
        };
        self.wrong.get_or_insert(wrong);
    }
}

/// Deserialises one row and returns the number of its cells.
struct RowSeed<'a, 'de> {
    columns: &'a Columns,
    cells: &'a mut RowCells<'de>,
}

impl<'de> DeserializeSeed<'de> for RowSeed<'_, 'de> {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<usize, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for RowSeed<'_, 'de> {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a row (a list)")
    }

    fn visit_unit<E>(self) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut row: A) -> Result<usize, A::Error> {
        let Self { columns, cells } = self;
        // Every other cell is written again, or the row is dropped.
        cells.wrong = None;
        cells.groups.clear();
        let mut count = 0;
        for &kind in &columns.kinds {
            let cell = match kind {
                ColumnKind::Ignored => row.next_element::<IgnoredAny>()?.map(|_| Cell::Other),
                ColumnKind::Groups => row.next_element_seed(CellSeed(Some(&mut cells.groups)))?,
                _ => row.next_element_seed(CellSeed(None))?,
            };
            let Some(cell) = cell else { return Ok(count) };
            cells.put(kind, cell);
            count += 1;
        }
        // The parser goes on only behind the list, and `take` reports the number of cells.
        while row.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(count)
    }
}

/// A JSON value, reduced to the types that a row can contain.
enum Cell<'de> {
    Text(Cow<'de, str>),
    /// A number, truncated to an integer.
    Number(i64),
    Null,
    /// A list of texts, which the seed has collected.
    Texts,
    Other,
}

/// Deserialises a cell; collects the texts of a list if there is a place for them.
struct CellSeed<'a, 'de>(Option<&'a mut Vec<Cow<'de, str>>>);

impl<'de> DeserializeSeed<'de> for CellSeed<'_, 'de> {
    type Value = Cell<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Cell<'de>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for CellSeed<'_, 'de> {
    type Value = Cell<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Cell<'de>, E> {
        Ok(Cell::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Cell<'de>, E> {
        Ok(Cell::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Cell<'de>, E> {
        Ok(Cell::Number(i64::try_from(number).unwrap_or(i64::MAX)))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Cell<'de>, E> {
        Ok(Cell::Number(number))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Cell<'de>, E> {
        // `as` truncates fractions and saturates.
        Ok(Cell::Number(number as i64))
    }

    fn visit_unit<E>(self) -> Result<Cell<'de>, E> {
        Ok(Cell::Null)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Cell<'de>, E> {
        Ok(Cell::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Cell<'de>, A::Error> {
        let Some(texts) = self.0 else {
            while list.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(Cell::Other);
        };
        let mut has_only_texts = true;
        while let Some(cell) = list.next_element_seed(CellSeed(None))? {
            match cell {
                Cell::Text(text) => texts.push(text),
                _ => has_only_texts = false,
            }
        }
        Ok(if has_only_texts {
            Cell::Texts
        } else {
            Cell::Other
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Cell<'de>, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Cell::Other)
    }
}
