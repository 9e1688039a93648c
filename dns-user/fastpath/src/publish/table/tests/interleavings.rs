//! Explores with loom every order in which a program run may see the publisher's writes: the life
//! of an entry, its moves, the reuse of its cells and the growth of the index.
//!
//! The publisher's side is the store itself over modelled memory. The program's side ([`Program`])
//! reads in the order of `dns-ebpf/src/lookup.rs`. A program run is an RCU read-side section; here
//! it holds a read lock, and a grace period ends once the write lock was acquired.

use loom::{
    model::Builder,
    sync::{
        Arc, RwLock,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
};

use dns_common::{
    entry::{CELL_SIZE, CHUNK_SIZE, EntryHeader, Location},
    index::{self, BUCKET_SLOTS, Bucket, Pair},
};

use super::super::{EntryStore, Placed};
use crate::map::{index::IndexMemory, store::EntryMemory, words::Words};

/// Number of preemptions that loom explores. Faults of such protocols need one or two.
const PREEMPTIONS: usize = 3;

/// Words of a modelled entry: last use, hash, and three for name and answer.
const ENTRY_WORDS: usize = 5;

/// Modelled memory; only the first bytes are ever used.
#[derive(Clone)]
struct Modelled {
    /// The words accessed as a whole.
    words: Arc<Vec<AtomicU64>>,
    /// The words accessed by halves.
    halves: Arc<Vec<AtomicU32>>,
    bytes: usize,
}

impl Modelled {
    /// Returns zeroed memory with an apparent size of `bytes`, of which the first `used` bytes exist.
    fn new(bytes: usize, used: usize) -> Self {
        Self {
            words: Arc::new((0..used / 8).map(|_| AtomicU64::new(0)).collect()),
            halves: Arc::new((0..used / 4).map(|_| AtomicU32::new(0)).collect()),
            bytes,
        }
    }
}

impl Words for Modelled {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.words[index].load(order)
    }

    fn store(&self, index: usize, value: u64, order: Ordering) {
        self.words[index].store(value, order);
    }

    fn load_half(&self, index: usize, order: Ordering) -> u32 {
        self.halves[index].load(order)
    }

    fn store_half(&self, index: usize, value: u32, order: Ordering) {
        self.halves[index].store(value, order);
    }
}

/// A name, identified by its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Name(u64);

struct Publisher {
    store: EntryStore<Modelled>,
    /// Held by program runs.
    rcu: Arc<RwLock<()>>,
}

/// A program on one CPU.
struct Program {
    names: Modelled,
    entries: Modelled,
    /// Held by program runs.
    rcu: Arc<RwLock<()>>,
}

/// Returns a publisher and a program over the same memory: `elements` of the index, `cells` for entries.
fn machine(elements: usize, cells: usize) -> (Publisher, Program) {
    let names = Modelled::new(elements * size_of::<Pair>(), elements * size_of::<Pair>());
    let entries = Modelled::new(CHUNK_SIZE, cells * CELL_SIZE);
    let memory = std::sync::Arc::new(EntryMemory::new(entries.clone()));
    let index = std::sync::Arc::new(IndexMemory::new(names.clone(), memory));
    let rcu = Arc::new(RwLock::new(()));
    let publisher = Publisher {
        store: EntryStore::of(index),
        rcu: rcu.clone(),
    };
    (
        publisher,
        Program {
            names,
            entries,
            rcu,
        },
    )
}

impl Publisher {
    /// Publishes an answer for a name, in place of an older one.
    fn publish(&mut self, Name(key): Name, answer: u64, old: Option<Placed>) -> Placed {
        let size = ENTRY_WORDS * 8;
        let location = self
            .store
            .allocator
            .allocate(size)
            .expect("there are cells enough");
        let new = Placed {
            key,
            location,
            size,
        };
        let words = [0, key, key, answer, answer];
        self.store
            .write(new, &words, old.map(|old| (old.location, size)))
            .expect("the index has room");
        new
    }

    /// Waits until no program can read freed cells.
    fn grace_period(&mut self) {
        assert!(self.store.allocator.begin_grace_period());
        drop(self.rcu.write().unwrap());
        self.store.allocator.end_grace_period();
    }
}

impl Program {
    /// Runs the program once and returns the name's answer if found. Panics on a torn answer and on
    /// an answer for another name.
    fn answer(&self, Name(hash): Name) -> Option<u64> {
        let _run = self.rcu.read().unwrap();
        let start = self.find(hash)?.offset() as usize / 8;
        let [name, first, second] =
            [2, 3, 4].map(|word| self.entries.load(start + word, Ordering::Relaxed));
        assert_eq!(
            (name, first),
            (hash, second),
            "an answer of another name, or of two"
        );
        Some(first)
    }

    /// Returns the location of the entry with this hash.
    fn find(&self, hash: u64) -> Option<Location> {
        // The next read depends on the address read here; Acquire models that ordering.
        let pairs = self.names.load(0, Ordering::Acquire) as u32;
        for turn in 0..2 {
            let bucket =
                2 * index::element(hash, pairs) as usize + (index::preferred_bucket(hash) ^ turn);
            let words = bucket * size_of::<Bucket>() / 8;
            let tags = [words, words + 1].map(|word| self.names.load(word, Ordering::Acquire));
            let mut slots = index::slots_with(tags, index::tag(hash));
            for _ in 0..BUCKET_SLOTS {
                if slots == 0 {
                    break;
                }
                let cells =
                    (bucket * size_of::<Bucket>() + std::mem::offset_of!(Bucket, cells)) / 4;
                let cell = self
                    .names
                    .load_half(cells + index::first_slot(slots), Ordering::Acquire);
                if self.has_hash(Location(cell), hash) {
                    return Some(Location(cell));
                }
                slots &= slots.wrapping_sub(1);
            }
            if index::overflows(tags[1]) == 0 {
                return None;
            }
        }
        None
    }

    /// Returns whether the entry at `location` has this hash.
    fn has_hash(&self, location: Location, hash: u64) -> bool {
        let word = location.offset() as usize / 8 + std::mem::offset_of!(EntryHeader, hash) / 8;
        self.entries.load(word, Ordering::Relaxed) == hash
    }
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.max_branches = 100_000;
    builder.check(model);
}

/// Runs a publisher and a program concurrently; returns the program.
///
/// Each gets its own thread: with bounded preemptions, loom does not interrupt its first thread
/// everywhere (loom 0.7 missed a fault in the growth of the index).
fn side_by_side(
    (mut publisher, program): (Publisher, Program),
    publish: impl FnOnce(&mut Publisher) + 'static,
    run: impl FnOnce(&Program) + 'static,
) -> Program {
    let publishing = thread::spawn(move || publish(&mut publisher));
    let running = thread::spawn(move || {
        run(&program);
        program
    });
    publishing.join().unwrap();
    running.join().unwrap()
}

/// Returns names with the same bucket and tag, which the index cannot distinguish.
fn twins() -> [Name; 2] {
    [Name(0x100), Name(0x200)]
}

#[test]
fn replaced_answer_is_whole_and_current() {
    explore(|| {
        let (mut publisher, program) = machine(2, 3);
        let [name, _] = twins();
        let first = publisher.publish(name, 1, None);
        let complete = Arc::new(AtomicU64::new(1));
        let completed = complete.clone();
        let publish = move |publisher: &mut Publisher| {
            let second = publisher.publish(name, 2, Some(first));
            completed.store(2, Ordering::Release);
            publisher.grace_period();
            let third = publisher.publish(name, 3, Some(second));
            completed.store(3, Ordering::Release);
            assert_eq!(third.location, first.location, "the cells are used again");
        };
        let run = move |program: &Program| {
            for _ in 0..2 {
                let least = complete.load(Ordering::Acquire);
                let answer = program
                    .answer(name)
                    .expect("the name is published all the while");
                assert!(answer >= least, "{answer} after {least} was published");
            }
        };
        let program = side_by_side((publisher, program), publish, run);
        assert_eq!(program.answer(name), Some(3));
    });
}

#[test]
fn removed_name_stays_unanswered_after_reuse() {
    explore(|| {
        let (mut publisher, program) = machine(2, 3);
        let [gone, come] = twins();
        let old = publisher.publish(gone, 1, None);
        let removed = Arc::new(AtomicU64::new(0));
        let is_removed = removed.clone();
        let publish = move |publisher: &mut Publisher| {
            publisher.store.remove(old);
            is_removed.store(1, Ordering::Release);
            publisher.grace_period();
            assert_eq!(publisher.publish(come, 2, None).location, old.location);
        };
        let run = move |program: &Program| {
            let is_removed = removed.load(Ordering::Acquire) == 1;
            assert!(program.answer(gone).is_none() || !is_removed);
            assert!(matches!(program.answer(come), None | Some(2)));
        };
        let program = side_by_side((publisher, program), publish, run);
        assert_eq!(
            (program.answer(gone), program.answer(come)),
            (None, Some(2))
        );
    });
}

#[test]
fn growing_index_loses_no_name() {
    explore(|| {
        let names = 2 * BUCKET_SLOTS as u64;
        let (mut publisher, program) = machine(4, names as usize + 1);
        // Half of the names go to each pair of the larger table.
        let name = |number: u64| Name((number + 1) << 8 | number & 1);
        for number in 0..names {
            publisher.publish(name(number), number, None);
        }
        let publish = move |publisher: &mut Publisher| {
            publisher.publish(name(names), names, None);
        };
        let run = move |program: &Program| {
            assert_eq!(program.answer(name(names - 1)), Some(names - 1));
            assert!(
                program
                    .answer(name(names))
                    .is_none_or(|answer| answer == names)
            );
        };
        let program = side_by_side((publisher, program), publish, run);
        assert_eq!(program.answer(name(names)), Some(names));
        assert_eq!(program.answer(name(0)), Some(0));
    });
}

#[test]
fn overflowed_name_is_found_during_changes() {
    explore(|| {
        let full = BUCKET_SLOTS as u64;
        let (mut publisher, program) = machine(2, BUCKET_SLOTS + 3);
        let name = |number: u64| Name((number + 1) << 8);
        for number in 0..full {
            publisher.publish(name(number), number, None);
        }
        let leaves = publisher.publish(name(full), full, None);
        publisher.publish(name(full + 1), full + 1, None);
        let publish = move |publisher: &mut Publisher| {
            publisher.store.remove(leaves);
            publisher.publish(name(full + 2), full + 2, None);
        };
        let run = move |program: &Program| {
            assert_eq!(program.answer(name(full + 1)), Some(full + 1));
        };
        let program = side_by_side((publisher, program), publish, run);
        assert_eq!(program.answer(name(full + 2)), Some(full + 2));
    });
}
