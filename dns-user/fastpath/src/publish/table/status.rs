//! What is told of the table: names, sizes, and names that did not get in.

use crate::map::store::StoreFill;

/// Names and sizes, for status and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TableStatus {
    /// Names of the snapshot that are in the map.
    pub published: usize,
    /// Names that were asked for, in the map.
    pub learned: usize,
    /// Names that do not exist or are malformed, in the map.
    pub negative: usize,
    /// Names of the snapshot that are not in the map, by reason; they are answered from userspace.
    pub unfitting: UnfittingStatus,
    /// Names that may be in the map, negative ones not counted.
    pub max_names: usize,
    /// Negative names that may be in the map.
    pub max_negative: usize,
    /// Memory of the entries.
    pub store: StoreFill,
    /// Names evicted since the start.
    pub evicted: u64,
    /// Entries written since the start.
    pub written: u64,
    /// The kernel does not tell when programs have finished with the cells of a
    /// replaced entry (membarrier is refused): a fixed time is waited instead.
    pub unvouched: bool,
}

/// Names of the snapshot that are not in the map, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct UnfittingStatus {
    /// A label holds a NUL byte.
    pub nul_byte: usize,
    /// More addresses than an entry holds.
    pub too_many_addresses: usize,
    /// Another name has the same hash.
    pub collision: usize,
    /// `max_names` or the store is exhausted: they are answered by the interface once asked for.
    pub no_room: usize,
}

impl UnfittingStatus {
    /// All of them.
    pub fn total(&self) -> usize {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }

    /// Each with its label in metrics.
    pub fn by_reason(&self) -> [(&'static str, usize); 4] {
        let &Self { nul_byte, too_many_addresses, collision, no_room } = self;
        [
            ("nul_byte", nul_byte),
            ("too_many_addresses", too_many_addresses),
            ("collision", collision),
            ("no_room", no_room),
        ]
    }
}
