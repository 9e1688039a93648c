//! The entry of a name.

use dns_common::{
    counters::Outcome,
    entry::{EntryHeader, Location, MAX_ENTRY_OFFSET},
    name::MAX_NAME_WORDS,
};

use crate::{
    bytes::{load, opaque},
    maps::{ARENA, NAMES},
    question::Words,
};

/// A published entry whose name is the question's.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Address of its [`EntryHeader`].
    pub address: usize,
    /// Copy of its header.
    pub header: EntryHeader,
}

/// Finds the entry by the name's hash and compares the whole name.
#[inline(always)]
pub fn lookup(hash: u64, name_len: usize, words: &Words) -> Result<Entry, Outcome> {
    let location = NAMES.get_ptr(hash).ok_or(Outcome::NotPublished)?;
    // SAFETY: map values are readable; eight bytes are read at once.
    let location = Location(unsafe { *location });
    let chunk = ARENA.get_ptr(location.chunk()).ok_or(Outcome::NotPublished)? as usize;
    let offset = opaque(location.offset() as usize);
    if offset > MAX_ENTRY_OFFSET {
        return Err(Outcome::NotPublished);
    }
    let address = chunk + offset;
    // SAFETY: an entry of the largest size fits behind `MAX_ENTRY_OFFSET`.
    let header = unsafe { load::<EntryHeader>(address) };
    if header.name_len as usize != name_len {
        return Err(Outcome::Collision);
    }
    let count = name_len.div_ceil(8);
    let name = address + size_of::<EntryHeader>();
    let mut index = 0;
    while index < MAX_NAME_WORDS {
        if index == count {
            break;
        }
        // SAFETY: inside the entry, see above.
        if unsafe { load::<u64>(name + index * 8) } != words[index & (MAX_NAME_WORDS - 1)] {
            return Err(Outcome::Collision);
        }
        index = opaque(index + 1);
    }
    Ok(Entry { address, header })
}
