//! The mapped maps of one loaded object: everything needed to publish names, read counters and
//! sample queries. The holder controls the programs' answers without any bpf(2) call.

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
        index::{IndexMemory, map_index},
        layout::read_name,
        store::{EntryMemory, map_entries, map_new_entries},
    },
    object::SHARED_MAPS,
    observe::Ring,
    publish::table::Limits,
};
use dns_core::name::Name;

pub(super) struct Memory {
    pub(super) index: Arc<IndexMemory>,
    pub(super) entries: Arc<EntryMemory>,
    pub(super) answers: AnswerMemory,
    pub(super) control: Arc<ControlPage>,
    pub(super) counters: Arc<CounterPages>,
    pub(super) tap: Ring,
    pub(super) limits: Limits,
}

/// The maps of the forwarded answers.
pub(super) struct AnswerMemory {
    pub(super) index: Arc<IndexMemory>,
    pub(super) entries: Arc<EntryMemory>,
}

/// A map of a known shape.
pub(super) struct SizedMap {
    pub(super) fd: OwnedFd,
    pub(super) shape: Shape,
}

impl Memory {
    /// Maps the server's maps, which are in the protocol's order (`Response::Maps`).
    pub(super) fn of(maps: [SizedMap; SHARED_MAPS], limits: Limits) -> Result<Self, FastPathError> {
        let [index, entries, answer_names, answer_entries, control, counters, tap] = maps;
        let mapped =
            |what: &'static str| move |error| FastPathError::Io { what: format!("mapping {what}"), error };
        let store = map_new_entries(entries.fd.as_fd(), entries.shape).map_err(mapped(names::ENTRIES))?;
        let store = Arc::new(store);
        let index = map_index(index.fd.as_fd(), index.shape, store.clone()).map_err(mapped(names::NAMES))?;
        let answers = map_new_entries(answer_entries.fd.as_fd(), answer_entries.shape)
            .map_err(mapped(names::ANSWER_ENTRIES))?;
        let answers = Arc::new(answers);
        let answer_index = map_index(answer_names.fd.as_fd(), answer_names.shape, answers.clone())
            .map_err(mapped(names::ANSWER_NAMES))?;
        Ok(Self {
            index: Arc::new(index),
            entries: store,
            answers: AnswerMemory { index: Arc::new(answer_index), entries: answers },
            control: Arc::new(ControlPage::map(control.fd.as_fd()).map_err(mapped(names::CONTROL))?),
            counters: Arc::new(
                CounterPages::map(counters.fd.as_fd(), counters.shape).map_err(mapped(names::COUNTERS))?,
            ),
            tap: Ring::map(tap.fd, tap.shape.elements).map_err(mapped(names::TAP))?,
            limits,
        })
    }
}

/// Returns at most `limit` names from a predecessor's maps.
pub(super) fn names_in(
    (names, names_shape): (BorrowedFd<'_>, Shape),
    (entries, entries_shape): (BorrowedFd<'_>, Shape),
    limit: usize,
) -> io::Result<Vec<Name>> {
    let memory = Arc::new(map_entries(entries, entries_shape)?);
    let index = map_index(names, names_shape, memory.clone())?;
    Ok(index.locations().take(limit).filter_map(|location| read_name(&memory, location)).collect())
}
