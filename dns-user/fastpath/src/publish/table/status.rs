//! The table's status: names, sizes, and names that did not fit.

use crate::map::store::StoreFill;

/// Number of names and memory in use, for status and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TableStatus {
    /// Listed names in the map.
    pub published: usize,
    /// Learned names in the map.
    pub learned: usize,
    /// Names in the fast-path map that do not exist or are malformed.
    pub negative: usize,
    /// Listed names that are not in the map, by reason; userspace answers them.
    #[serde(rename = "unfitting_by_reason")]
    pub unfitting: UnfittingStatus,
    /// Limit of published and learned names.
    pub max_names: usize,
    /// Limit of negative names.
    pub max_negative: usize,
    /// Memory of the entries.
    pub store: StoreFill,
    /// Names evicted since the start.
    pub evicted: u64,
    /// Entries written since the start.
    pub written: u64,
    /// Whether the kernel refuses membarrier, which would confirm that no program still reads the
    /// cells of a replaced entry; the publisher then waits for a fixed time instead.
    #[serde(rename = "unvouched")]
    pub grace_unconfirmed: bool,
}

/// Number of listed names that are not in the map, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct UnfittingStatus {
    /// A label holds a NUL byte.
    pub nul_byte: usize,
    /// More addresses than an entry holds.
    pub too_many_addresses: usize,
    /// Another name has the same hash.
    pub collision: usize,
    /// `max_names` or the store is exhausted; the interface answers such a name once it has been queried.
    pub no_room: usize,
}

impl UnfittingStatus {
    /// Returns the total number of listed names that are not in the map.
    pub fn total(&self) -> usize {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }

    /// Returns each number with its label in metrics.
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
