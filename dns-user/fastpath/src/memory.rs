//! The mapped maps of one loaded object: everything needed to publish names, read counters and
//! sample queries. The holder controls the programs' answers without any bpf(2) call.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::Arc,
};

use dns_common::object;

use super::{
    FastPathError,
    map::{
        Shape,
        control::ControlPage,
        counters::CounterPages,
        index::{IndexMemory, map_index},
        layout::read_name,
        store::{map_entries, map_new_entries},
    },
    observe::Ring,
    protocol::{Limits, SHARED_MAPS},
};
use dns_core::name::Name;

pub(super) struct Memory {
    pub(super) names: Arc<IndexMemory>,
    /// Forwarded answers and local replies.
    pub(super) answers: Arc<IndexMemory>,
    pub(super) control: Arc<ControlPage>,
    pub(super) counters: Arc<CounterPages>,
    pub(super) tap: Ring,
    pub(super) limits: Limits,
}

/// Maps an index and the empty memory of its entries; `what` names both maps.
fn map_empty(
    index: &SizedMap,
    memory: &SizedMap,
    what: [&'static str; 2],
) -> Result<Arc<IndexMemory>, FastPathError> {
    let memory = map_new_entries(memory.fd.as_fd(), memory.shape).map_err(mapping(what[1]))?;
    let index =
        map_index(index.fd.as_fd(), index.shape, Arc::new(memory)).map_err(mapping(what[0]))?;
    Ok(Arc::new(index))
}

/// A map of a known shape.
pub(super) struct SizedMap {
    pub(super) fd: OwnedFd,
    pub(super) shape: Shape,
}

impl Memory {
    /// Maps the server's maps, which are in the protocol's order (`Response::Maps`).
    pub(super) fn of(maps: [SizedMap; SHARED_MAPS], limits: Limits) -> Result<Self, FastPathError> {
        let [
            names,
            entries,
            answer_names,
            answer_entries,
            control,
            counters,
            tap,
        ] = maps;
        Ok(Self {
            names: map_empty(&names, &entries, [object::NAMES, object::ENTRIES])?,
            answers: map_empty(
                &answer_names,
                &answer_entries,
                [object::ANSWER_NAMES, object::ANSWER_ENTRIES],
            )?,
            control: Arc::new(
                ControlPage::map(control.fd.as_fd()).map_err(mapping(object::CONTROL))?,
            ),
            counters: Arc::new(
                CounterPages::map(counters.fd.as_fd(), counters.shape)
                    .map_err(mapping(object::COUNTERS))?,
            ),
            tap: Ring::map(tap.fd, tap.shape.elements).map_err(mapping(object::TAP))?,
            limits,
        })
    }
}

fn mapping(what: &str) -> impl FnOnce(io::Error) -> FastPathError {
    move |error| FastPathError::io(&format!("mapping {what}"), error)
}

/// Returns at most `limit` names from a predecessor's maps.
pub(super) fn names_in(
    (names, names_shape): (BorrowedFd<'_>, Shape),
    (entries, entries_shape): (BorrowedFd<'_>, Shape),
    limit: usize,
) -> io::Result<Vec<Name>> {
    let memory = Arc::new(map_entries(entries, entries_shape)?);
    let index = map_index(names, names_shape, memory.clone())?;
    Ok(index
        .locations()
        // The predecessor may have been configured for more, or its map be damaged.
        .take(limit)
        .filter_map(|location| read_name(&memory, location))
        .collect())
}
