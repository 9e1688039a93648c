//! The maps of one loaded object, as mapped memory: all that publishing, counting and
//! watching need. Whoever has it answers for what the programs say, without a call of bpf(2).

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::Arc,
};

use dns_common::object as names;

use super::{
    FastPathError,
    map::{
        Shape,
        control::ControlPage,
        counters::CounterPages,
        index::{IndexMemory, map_index_of},
        layout::read_name,
        store::{EntryMemory, map_entries_of},
    },
    observe::ring::Ring,
    publish::table::Limits,
};
use dns_core::name::Name;

/// The memory.
pub(super) struct Memory {
    /// `NAMES`.
    pub(super) index: Arc<IndexMemory>,
    /// `ENTRIES`.
    pub(super) entries: Arc<EntryMemory>,
    /// `CONTROL`.
    pub(super) control: Arc<ControlPage>,
    /// `COUNTERS`.
    pub(super) counters: Arc<CounterPages>,
    /// `TAP`; `None`: the object has none.
    pub(super) tap: Option<Ring>,
    /// How many names fit.
    pub(super) limits: Limits,
}

/// A map whose shape is known.
pub(super) struct SizedMap {
    /// The map.
    pub(super) fd: OwnedFd,
    /// Its shape.
    pub(super) shape: Shape,
}

/// The maps that make up a [`Memory`].
pub(super) struct Maps {
    /// `NAMES`.
    pub(super) names: SizedMap,
    /// `ENTRIES`.
    pub(super) entries: SizedMap,
    /// `CONTROL`.
    pub(super) control: SizedMap,
    /// `COUNTERS`.
    pub(super) counters: SizedMap,
    /// `TAP`.
    pub(super) tap: Option<SizedMap>,
}

impl Memory {
    /// Maps them all.
    pub(super) fn of(maps: Maps, limits: Limits) -> Result<Self, FastPathError> {
        let Maps { names: index, entries, control, counters, tap } = maps;
        let mapped =
            |what: &'static str| move |error| FastPathError::Io { what: format!("mapping {what}"), error };
        let store = map_entries_of(entries.fd.as_fd(), entries.shape).map_err(mapped(names::ENTRIES))?;
        let store = Arc::new(store);
        let index =
            map_index_of(index.fd.as_fd(), index.shape, store.clone()).map_err(mapped(names::NAMES))?;
        Ok(Self {
            index: Arc::new(index),
            entries: store,
            control: Arc::new(ControlPage::map(control.fd.as_fd()).map_err(mapped(names::CONTROL))?),
            counters: Arc::new(
                CounterPages::map_of(counters.fd.as_fd(), counters.shape).map_err(mapped(names::COUNTERS))?,
            ),
            tap: tap
                .map(|tap| Ring::map(tap.fd, tap.shape.elements))
                .transpose()
                .map_err(mapped(names::TAP))?,
            limits,
        })
    }
}

/// Names that a predecessor's maps hold, at most `limit`.
pub(super) fn names_in(
    (names, names_shape): (BorrowedFd<'_>, Shape),
    (entries, entries_shape): (BorrowedFd<'_>, Shape),
    limit: usize,
) -> io::Result<Vec<Name>> {
    let memory = Arc::new(map_entries_of(entries, entries_shape)?);
    let index = map_index_of(names, names_shape, memory.clone())?;
    Ok(index.locations().take(limit).filter_map(|location| read_name(&memory, location)).collect())
}
