//! Looks up published names and forwarded answers by an index ([`dns_common::index`]).
//!
//! An entry found by a program run stays unchanged until the run ends: its cells are reused only
//! after an RCU grace period.

use dns_common::{
    counters::Outcome,
    entry::{CELL_SIZE, CHUNK_CELLS, CHUNK_SIZE, EntryHeader, Location, padded},
    forwarded::{AnswerHeader, QueryKey},
    index::{self, BUCKET_SLOTS, Bucket, Pair, Root},
};

use aya_ebpf::maps::Array;

use crate::{
    IS_SKELETON,
    bytes::{Zero, barrier, barrier_and, load},
    hook::Hook,
    maps::{ANSWER_ENTRIES, ANSWER_NAMES, ENTRIES, NAMES, pass_to_stack},
    question::Words,
};

/// A published entry whose name is the question's.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Address of its [`EntryHeader`].
    pub address: usize,
}

impl Entry {
    /// Returns the header, of which only `last_used_ns` changes. Opaque to the compiler, which
    /// would otherwise keep early loads on the stack (measured).
    #[inline(always)]
    pub fn header(&self) -> &EntryHeader {
        // SAFETY: an entry of the largest size fits at the address found by `find`.
        unsafe { &*(barrier(self.address) as *const EntryHeader) }
    }
}

/// Finds the entry by the name's hash, then compares the whole name.
#[inline(always)]
pub fn lookup<H: Hook>(
    zero: Zero,
    hash: u64,
    name_len: usize,
    words: &Words,
) -> Result<Entry, Outcome> {
    let Some(address) = find::<H>(zero, &NAMES, &ENTRIES, hash) else {
        return pass_to_stack(Outcome::NotPublished);
    };
    let entry = Entry { address };
    if entry.header().name_len as usize != name_len {
        return pass_to_stack(Outcome::Collision);
    }
    if !IS_SKELETON {
        compare(address + size_of::<EntryHeader>(), name_len, words)?;
    }
    Ok(entry)
}

/// A forwarded answer to the question.
#[derive(Clone, Copy)]
pub struct Answer {
    /// Address of its [`AnswerHeader`].
    pub address: usize,
}

impl Answer {
    /// Returns the header, of which only `last_used_ns` changes.
    #[inline(always)]
    pub fn header(&self) -> &AnswerHeader {
        // SAFETY: an entry of the largest size fits at the address found by `find`.
        unsafe { &*(barrier(self.address) as *const AnswerHeader) }
    }
}

/// Finds the forwarded answer by the hash of its name, then compares the whole name and the key.
#[inline(always)]
pub fn forwarded<H: Hook>(
    zero: Zero,
    name_hash: u64,
    key: QueryKey,
    name_len: usize,
    words: &Words,
) -> Result<Answer, Outcome> {
    let found = find::<H>(zero, &ANSWER_NAMES, &ANSWER_ENTRIES, key.hash(name_hash));
    let Some(address) = found else {
        return pass_to_stack(Outcome::NotPublished);
    };
    let answer = Answer { address };
    let header = answer.header();
    if header.name_len as usize != name_len || header.key != key {
        return pass_to_stack(Outcome::Collision);
    }
    compare(address + size_of::<AnswerHeader>(), name_len, words)?;
    Ok(answer)
}

/// Compares the entry's name at `name` with the question's; both have `name_len` bytes.
#[inline(always)]
fn compare(name: usize, name_len: usize, words: &Words) -> Result<(), Outcome> {
    let (words, len) = (&raw const *words as usize, padded(name_len));
    // In bytes, which spares a shift for each word and place (measured).
    let mut offset = 0;
    while offset < size_of::<Words>() {
        if offset == len {
            break;
        }
        // SAFETY (both): inside the entry, and inside the words.
        if unsafe { load::<u64>(name + offset) != load::<u64>(words + offset) } {
            return pass_to_stack(Outcome::Collision);
        }
        offset = barrier(offset + 8);
    }
    Ok(())
}

/// The chunks of a store.
type Chunks = Array<[u64; CHUNK_SIZE / 8]>;

/// Returns the address of the entry with this hash.
#[inline(always)]
fn find<H: Hook>(zero: Zero, names: &Array<Pair>, entries: &Chunks, hash: u64) -> Option<usize> {
    let root = names.get_ptr(0)? as *const Root;
    // SAFETY: map elements are readable, and the root is as long as any of them.
    let pairs = unsafe { (&raw const (*root).pairs).read_volatile() } as u32;
    let pair = names.get_ptr(index::element(hash, pairs))? as usize;
    let tag = index::tag(hash);
    let preferred = index::preferred_bucket(hash);
    let mut turn = 0;
    while turn < 2 {
        let bucket = pair
            + barrier_and(
                (preferred ^ turn) * size_of::<Bucket>(),
                size_of::<Bucket>(),
            );
        // SAFETY: the masked offset stays inside the pair.
        let tags = unsafe { load::<[u64; 2]>(bucket) };
        let mut slots = index::slots_with(tags, tag);
        let mut tries = 0;
        while slots != 0 && tries < H::MAX_TRIES {
            let mut slot = barrier(index::first_slot(slots));
            if H::IS_FIRST {
                slot = zero.value_barrier(slot, 0xf);
            }
            if slot >= BUCKET_SLOTS {
                return None;
            }
            // SAFETY: as above; userspace may write concurrently, each cell in a single store.
            let cell = unsafe { load::<u32>(bucket + CELLS + slot * 4) };
            if let Some(address) = entry_at(entries, Location(cell), hash) {
                return Some(address);
            }
            slots &= slots.wrapping_sub(1);
            tries = barrier(tries + 1);
        }
        if index::overflows(tags[1]) == 0 {
            return None;
        }
        turn = barrier(turn + 1);
    }
    None
}

const CELLS: usize = core::mem::offset_of!(Bucket, cells);

/// Returns the address of the entry at `location` if it has this hash. Every read of the
/// entry depends on `location`, so no CPU can return contents older than the index entry that led
/// there.
#[inline(always)]
fn entry_at(entries: &Chunks, location: Location, hash: u64) -> Option<usize> {
    let chunk = entries.get_ptr(location.chunk())? as usize;
    let address = chunk + barrier_and(location.offset() as usize, MAX_OFFSET);
    // SAFETY: an entry of the largest size fits at every offset.
    let found = unsafe { load::<u64>(address + core::mem::offset_of!(EntryHeader, hash)) };
    (found == hash).then_some(address)
}

/// Largest offset in a chunk, also a mask for all offsets.
const MAX_OFFSET: usize = (CHUNK_CELLS as usize - 1) * CELL_SIZE;
