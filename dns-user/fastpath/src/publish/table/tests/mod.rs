//! Tests of the table, with an index and a store in ordinary memory.

mod interleavings;
mod reloads;

use std::{
    net::Ipv4Addr,
    os::fd::{AsFd as _, AsRawFd as _},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use dns_common::{
    entry::{CELL_SIZE, CHUNK_SIZE},
    index::Pair,
};

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::{
    fuzz::machine::{Failing, Fixed, Machine, SEED, name},
    *,
};
use crate::{
    map::{
        Shape,
        index::IndexMemory,
        store::{EntryMemory, WINDOW, map_new_entries},
    },
    publish::lease::GracePeriods,
};
use dns_core::resolve::AllRunning;

impl Machine {
    /// Returns a table with these limits and `chunks` chunks.
    pub(super) fn new(max_names: usize, negative: usize, chunks: usize) -> Self {
        Self::with_health(max_names, negative, chunks, Arc::new(AllRunning))
    }

    /// Returns a table with these limits, this source of health and `chunks` chunks.
    pub(super) fn with_health(
        max_names: usize,
        negative: usize,
        chunks: usize,
        health: Arc<dyn Health + Send + Sync>,
    ) -> Self {
        Self::with(
            max_names,
            negative,
            chunks,
            health,
            GracePeriods::start(|| true).unwrap(),
        )
    }

    fn install(&mut self, answers: &Fixed) {
        self.table.install(Arc::new(answers.clone()), &mut || {});
        // The smallest slices, because slicing must not change the result.
        while self.table.is_installing() {
            self.table.go_on(Instant::now());
        }
        self.check();
    }

    pub(super) fn learn(&mut self, text: &str) {
        self.table.learn(&name(text));
        self.check();
    }
}

/// Returns grace periods that do not end before `is_over` is set.
fn grace_periods_until(is_over: &Arc<AtomicBool>) -> GracePeriods {
    let is_over = is_over.clone();
    let wait = move || {
        while !is_over.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(1));
        }
        true
    };
    GracePeriods::start(wait).unwrap()
}

#[test]
fn unlisted_names_need_a_query() {
    let mut bench = Machine::new(10, 4, 1);
    bench.install(
        &Fixed::default()
            .with("a.bosh", true, &[1, 2])
            .with("b.bosh", false, &[3]),
    );
    assert_eq!(bench.answer("a.bosh"), Some(Ok(vec![1, 2])));
    assert_eq!(bench.answer("b.bosh"), None);
    bench.learn("b.bosh");
    assert_eq!(bench.answer("b.bosh"), Some(Ok(vec![3])));
    bench.learn("elsewhere.org");
    assert_eq!(bench.answer("elsewhere.org"), None, "not ours");
}

#[test]
fn only_differences_are_written() {
    let mut bench = Machine::new(10, 4, 1);
    let answers = Fixed::default()
        .with("a.bosh", true, &[1, 2])
        .with("b.bosh", true, &[3]);
    bench.install(&answers);
    assert_eq!(bench.table.status().written, 2);
    bench.install(&answers);
    assert_eq!(bench.table.status().written, 2);
    bench.use_at("b.bosh", 99);
    bench.install(&answers.with("b.bosh", true, &[4]));
    assert_eq!(bench.table.status().written, 3);
    assert_eq!(bench.answer("b.bosh"), Some(Ok(vec![4])));
    let key = hash_name(SEED, name("b.bosh").as_wire());
    assert_eq!(
        bench
            .memory
            .last_used_ns(bench.table.records.get(key).unwrap().location),
        99,
        "the last use is carried over"
    );
}

#[test]
fn names_used_last_are_the_first_to_change() {
    let names = ["a.bosh", "b.bosh", "c.bosh", "d.bosh", "e.bosh"];
    let all = |address| {
        names.iter().fold(Fixed::default(), |all, name| {
            all.with(name, true, &[address])
        })
    };
    let mut bench = Machine::new(10, 4, 1);
    bench.install(&all(1));
    bench.use_at("d.bosh", 100);
    bench.use_at("b.bosh", 101);
    bench.install(&all(2));
    // Entries are stored in the order of writing.
    let place = |text: &str| {
        bench
            .index
            .get(hash_name(SEED, name(text).as_wire()))
            .unwrap()
            .0
    };
    let mut order = names;
    order.sort_by_key(|text| place(text));
    assert_eq!(order[..2], ["b.bosh", "d.bosh"]);
}

#[test]
fn a_published_entry_is_never_changed_in_place() {
    let mut bench = Machine::new(10, 4, 1);
    bench.install(&Fixed::default().with("a.bosh", true, &[1]));
    let before = bench.table.records.iter().next().unwrap().1.location;
    bench.install(&Fixed::default().with("a.bosh", true, &[2]));
    let after = bench.table.records.iter().next().unwrap().1.location;
    assert_ne!(before, after);
    assert!(
        bench.table.status().store.quarantined > 0,
        "the old cells may still be being read"
    );
    bench.table.reclaim_now();
    assert_eq!(bench.table.status().store.quarantined, 0);
}

#[test]
fn outdated_answer_does_not_wait_for_memory() {
    const F_SEAL_FUTURE_WRITE: libc::c_int = 0x10;
    // A file that cannot be mapped any more once it is sealed.
    let file = memfd_create(c"store", MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&file, CHUNK_SIZE as i64).unwrap();
    let shape = Shape {
        value_size: CHUNK_SIZE as u32,
        elements: 1,
    };
    let memory = map_new_entries(file.as_fd(), shape).unwrap();
    let grace = GracePeriods::start(|| true).unwrap();
    let mut bench = Machine::over(memory, 10, 4, Arc::new(AllRunning), grace);
    bench.install(&Fixed::default().with("a.bosh", true, &[1]));
    assert_eq!(bench.answer("a.bosh"), Some(Ok(vec![1])));
    // The next entry lies beyond the memory that is mapped.
    bench.table.store.allocator.allocate(WINDOW).unwrap();
    // SAFETY: fcntl(2) with a number.
    let sealed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, F_SEAL_FUTURE_WRITE) };
    assert_eq!(sealed, 0);
    let newer = Arc::new(Fixed::default().with("a.bosh", true, &[2]));
    bench.table.install(newer, &mut || {});
    assert_eq!(bench.answer("a.bosh"), None, "userspace answers");
    assert_eq!(bench.table.status().unfitting.no_room, 1);
}

#[test]
fn removed_records_disappear() {
    let mut bench = Machine::new(10, 4, 1);
    bench.install(
        &Fixed::default()
            .with("a.bosh", true, &[1])
            .with("b.bosh", true, &[2]),
    );
    bench.learn("c.bosh");
    bench.use_at("b.bosh", 5);
    // `a` is no longer ours; `b` was in use and no longer exists.
    bench.install(&Fixed::default().without("b.bosh"));
    assert_eq!(bench.answer("a.bosh"), None);
    assert_eq!(bench.answer("b.bosh"), Some(Err(3)));
}

#[test]
fn reload_keeps_resolvable_learned_names() {
    let mut bench = Machine::new(10, 4, 1);
    bench.install(
        &Fixed::default()
            .with("a.bosh", false, &[1])
            .with("b.bosh", false, &[2]),
    );
    bench.learn("a.bosh");
    bench.learn("b.bosh");
    bench.install(&Fixed::default().with("a.bosh", false, &[9]));
    assert_eq!(bench.answer("a.bosh"), Some(Ok(vec![9])));
    assert_eq!(bench.answer("b.bosh"), None);
}

#[test]
fn health_change_updates_dependent_names() {
    let health = Arc::new(Failing::default());
    let mut bench = Machine::with_health(10, 4, 1, health.clone());
    bench.install(
        &Fixed::default()
            .with("a.bosh", true, &[1, 2])
            .with("b.bosh", true, &[3]),
    );
    let failing = IpAddr::from([10, 0, 0, 1]);
    health.0.lock().push(failing);
    bench.table.health_changed(&[failing], &mut || {});
    bench.check();
    assert_eq!(bench.answer("a.bosh"), Some(Ok(vec![2])));
    assert_eq!(bench.table.status().written, 3);
    health.0.lock().clear();
    bench.table.health_changed(&[failing], &mut || {});
    assert_eq!(bench.answer("a.bosh"), Some(Ok(vec![1, 2])));
}

#[test]
fn second_chance_evicts_the_unused_and_spares_listed_names() {
    let mut bench = Machine::new(3, 4, 1);
    let answers = Fixed::default()
        .with("pinned.bosh", true, &[1])
        .with("a.bosh", false, &[2])
        .with("b.bosh", false, &[3])
        .with("c.bosh", false, &[4])
        .with("d.bosh", false, &[5]);
    bench.install(&answers);
    bench.learn("a.bosh");
    bench.learn("b.bosh");
    bench.use_at("a.bosh", 100);
    bench.learn("c.bosh");
    assert_eq!(bench.answer("b.bosh"), None, "not used since it came");
    assert!(bench.answer("a.bosh").is_some() && bench.answer("c.bosh").is_some());
    bench.use_at("c.bosh", 101);
    bench.learn("d.bosh");
    assert_eq!(
        bench.answer("a.bosh"),
        None,
        "its chance was used up, and nobody asked since"
    );
    assert!(bench.answer("pinned.bosh").is_some());
    assert_eq!(bench.table.status().evicted, 2);
}

/// A change of a name that is in the map takes no other name's place.
#[test]
fn change_at_limit_evicts_nothing() {
    let names = ["a.bosh", "b.bosh", "gone.bosh", "none.bosh"];
    for is_listed in [true, false] {
        let all = |last| {
            Fixed::default()
                .with("a.bosh", is_listed, &[last])
                .with("b.bosh", is_listed, &[last])
                .without("gone.bosh")
                .without("none.bosh")
        };
        let mut bench = Machine::new(2, 2, 1);
        bench.install(&all(1));
        for name in names {
            bench.learn(name);
        }
        for last in [2, 3, 4] {
            bench.install(&all(last));
            let found = names.map(|name| bench.answer(name));
            let address = Some(Ok(vec![last]));
            let denial = Some(Err(3));
            assert_eq!(
                found,
                [address.clone(), address, denial.clone(), denial],
                "listed: {is_listed}"
            );
        }
        assert_eq!(bench.table.status().evicted, 0, "listed: {is_listed}");
    }
}

/// An entry for which the index has no place leaves its cells free.
#[test]
fn full_index_frees_cells() {
    let anonymous =
        |length: usize| -> memmap2::MmapRaw { memmap2::MmapMut::map_anon(length).unwrap().into() };
    let memory = Arc::new(EntryMemory::new(anonymous(CHUNK_SIZE)));
    // A root and one pair of buckets.
    let index = IndexMemory::new(anonymous(2 * size_of::<Pair>()), memory);
    let mut store = EntryStore::of(Arc::new(index));
    let words = [0; CELL_SIZE / 8];
    let mut refused = 0;
    let mut held = 0;
    for number in 0..100 {
        let key = hash_name(SEED, name(&format!("n{number}.bosh")).as_wire());
        let location = store.allocator.allocate(CELL_SIZE).unwrap();
        let placed = Placed {
            key,
            location,
            size: CELL_SIZE,
        };
        match store.write(placed, &words, None) {
            Ok(()) => held += 1,
            Err(_full) => refused += 1,
        }
        let fill = store.allocator.fill();
        assert_eq!(fill.used, held * CELL_SIZE, "{refused} refused");
        assert_eq!(fill.quarantined, refused * CELL_SIZE, "{refused} refused");
    }
    assert!(held > 0 && refused > 0, "{held} held, {refused} refused");
}

#[test]
fn negative_names_evict_negative_names() {
    let mut bench = Machine::new(2, 2, 1);
    let mut answers = Fixed::default()
        .with("a.bosh", true, &[1])
        .with("b.bosh", false, &[2]);
    for n in 0..20 {
        answers = answers.without(&format!("none{n}.bosh"));
    }
    bench.install(&answers);
    bench.learn("b.bosh");
    for n in 0..20 {
        bench.learn(&format!("none{n}.bosh"));
        assert_eq!(bench.answer(&format!("none{n}.bosh")), Some(Err(3)));
    }
    assert_eq!(bench.table.status().negative, 2);
    assert!(bench.answer("a.bosh").is_some() && bench.answer("b.bosh").is_some());
}

#[test]
fn created_name_leaves_negative_share() {
    let mut bench = Machine::new(2, 2, 1);
    bench.install(&Fixed::default().without("a.bosh"));
    bench.learn("a.bosh");
    assert_eq!(bench.answer("a.bosh"), Some(Err(3)));
    bench.install(&Fixed::default().with("a.bosh", false, &[1]));
    assert_eq!(bench.answer("a.bosh"), Some(Ok(vec![1])));
    let status = bench.table.status();
    assert_eq!((status.learned, status.negative), (1, 0));
}

#[test]
fn more_listed_names_than_fit_are_counted() {
    let mut bench = Machine::new(3, 2, 1);
    let mut answers = Fixed::default();
    for n in 0..5 {
        answers = answers.with(&format!("n{n}.bosh"), true, &[n]);
    }
    bench.install(&answers);
    let status = bench.table.status();
    assert_eq!((status.published, status.unfitting.no_room), (3, 2));
}

#[test]
fn long_list_leaves_room_to_learn() {
    let mut bench = Machine::new(4, 2, 1);
    bench.table.limits.max_precomputed = 3;
    let mut answers = Fixed::default();
    for n in 0..6 {
        answers = answers.with(&format!("n{n}.bosh"), true, &[n]);
    }
    bench.install(&answers);
    let status = bench.table.status();
    assert_eq!((status.published, status.unfitting.no_room), (3, 3));
    for n in 3..6 {
        bench.learn(&format!("n{n}.bosh"));
        assert_eq!(bench.answer(&format!("n{n}.bosh")), Some(Ok(vec![n])));
    }
    let status = bench.table.status();
    assert_eq!(
        (status.published, status.learned, status.evicted),
        (3, 1, 2)
    );
}

#[test]
fn listed_names_evict_learned_names() {
    let mut bench = Machine::new(2, 2, 1);
    let answers = Fixed::default()
        .with("a.bosh", false, &[1])
        .with("b.bosh", false, &[2]);
    bench.install(&answers);
    bench.learn("a.bosh");
    bench.learn("b.bosh");
    bench.install(
        &answers
            .with("c.bosh", true, &[3])
            .with("d.bosh", true, &[4]),
    );
    let status = bench.table.status();
    assert_eq!(
        (status.published, status.learned, status.unfitting.total()),
        (2, 0, 0)
    );
}

/// Returns `count` names whose entries take 17 cells each: 16 + 16 + 1024 bytes.
fn large_names(count: usize) -> (Fixed, Vec<String>) {
    let many: Vec<u8> = (0..=255).collect();
    let texts: Vec<String> = (0..count)
        .map(|number| format!("n{number:05}.bosh"))
        .collect();
    let answers = texts.iter().fold(Fixed::default(), |answers, text| {
        answers.with(text, false, &many)
    });
    (answers, texts)
}

#[test]
fn full_store_evicts_without_waiting() {
    let is_over = Arc::new(AtomicBool::new(false));
    let grace = grace_periods_until(&is_over);
    let mut bench = Machine::with(1_000_000, 64, 1, Arc::new(AllRunning), grace);
    let (answers, texts) = large_names(CHUNK_SIZE / CELL_SIZE / 17 + 10);
    bench.install(&answers);
    texts.iter().for_each(|text| bench.table.learn(&name(text)));
    bench.check();
    let last = texts.last().unwrap();
    assert_eq!(
        bench.answer(last),
        None,
        "the reserve is not for names that are merely asked for"
    );
    assert!(
        bench.table.status().evicted > 0,
        "room for it is on its way"
    );
    is_over.store(true, Ordering::Release);
    bench.table.reclaim_now();
    bench.learn(last);
    assert!(bench.answer(last).is_some());
}

#[test]
fn new_records_find_room_whatever_was_learned() {
    let mut bench = Machine::new(1_000_000, 64, 1);
    let (mut answers, texts) = large_names(CHUNK_SIZE / CELL_SIZE / 17 + 10);
    bench.install(&answers);
    texts.iter().for_each(|text| bench.table.learn(&name(text)));
    // Twice as many as fit into the reserve.
    let listed = texts.len() / 4;
    answers
        .names
        .values_mut()
        .rev()
        .take(listed)
        .for_each(|(is_listed, _)| *is_listed = true);
    bench.install(&answers);
    assert_eq!(bench.table.status().unfitting.total(), 0);
    assert!(bench.table.status().published >= listed);
    answers
        .names
        .values_mut()
        .for_each(|(is_listed, _)| *is_listed = true);
    bench.install(&answers);
    assert!(
        bench.table.status().unfitting.no_room > 0,
        "what does not fit is counted"
    );
}

#[test]
fn flood_spares_names_in_use() {
    let mut bench = Machine::new(400, 4, 1);
    let text = |number: usize| format!("n{number}.bosh");
    let answers = (0..6_000).fold(Fixed::default(), |answers, number| {
        answers.with(&text(number), false, &[1])
    });
    bench.install(&answers);
    (0..200).for_each(|number| bench.table.learn(&name(&text(number))));
    for number in 200..6_000 {
        if number % 100 == 0 {
            (0..200).for_each(|steady| bench.use_at(&text(steady), number as u64));
        }
        bench.table.learn(&name(&text(number)));
    }
    bench.check();
    assert!((0..200).all(|steady| bench.answer(&text(steady)).is_some()));
    assert!(
        bench.table.status().evicted < 2_000,
        "{}",
        bench.table.status().evicted
    );
}

#[test]
fn spellings_share_dependents() {
    let mut bench = Machine::new(20_000, 4, 4);
    let (answers, texts) = large_names(1_000);
    bench.install(&answers);
    bench.learn(&texts[0]);
    let one = bench.table.dependents.weight_with(&[]);
    texts.iter().for_each(|text| bench.table.learn(&name(text)));
    assert_eq!(bench.table.status().learned, 1_000);
    assert_eq!(bench.table.dependents.weight_with(&[]), one);
}

#[test]
fn unfitting_names_are_counted() {
    let mut bench = Machine::new(10, 2, 1);
    bench.install(
        &Fixed::default()
            .with("a\\000b.bosh", true, &[1])
            .with("ok.bosh", true, &[2]),
    );
    let status = bench.table.status();
    assert_eq!((status.published, status.unfitting.nul_byte), (1, 1));
}

#[test]
fn forgotten_names_come_back_when_asked_again() {
    let mut bench = Machine::new(10, 2, 1);
    bench.install(&Fixed::default().with("a.bosh", true, &[1]));
    bench
        .table
        .withdraw(&[name("a.bosh"), name("never-there.bosh")]);
    bench.check();
    assert_eq!(bench.answer("a.bosh"), None);
    bench.learn("a.bosh");
    assert_eq!(bench.answer("a.bosh"), Some(Ok(vec![1])));
    assert_eq!(
        bench.table.status().published,
        1,
        "it is listed all the same"
    );
}

#[test]
fn hash_collision_keeps_first_name() {
    let (one, other) = colliding_names(7);
    assert_eq!(
        hash_name(SEED, one.as_wire()),
        hash_name(SEED, other.as_wire())
    );
    let mut bench = Machine::new(10, 2, 1);
    let mut answers = Fixed::default();
    for name in [&one, &other] {
        answers
            .names
            .insert(name.clone(), (true, Some(vec![Ipv4Addr::LOCALHOST])));
    }
    bench.install(&answers);
    let status = bench.table.status();
    assert_eq!((status.published, status.unfitting.collision), (1, 1));
    bench.learn(&other.to_string());
    bench.table.withdraw(std::slice::from_ref(&other));
    bench.learn(&one.to_string());
    assert_eq!(bench.table.status().published, 1);
}

/// Returns two names of sixteen bytes with the same hash under this seed: the second word
/// compensates the difference in the first.
fn colliding_names(seed: u64) -> (Name, Name) {
    let after_first = |word: u64| {
        let mut hasher = dns_common::name::NameHasher::new(seed);
        hasher.write(word);
        hasher.finish()
    };
    // One label of 14 bytes, then the root: words are length + 7, then 7 + root.
    let one = *b"\x0eabcdefghijklmn\0";
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let (first, second) = (word(&one[..8]), word(&one[8..]));
    let mut random = 1_u64;
    loop {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let mut other = [0; 16];
        other[..8].copy_from_slice(&random.to_le_bytes());
        other[0] = 14;
        let bent = second ^ after_first(first) ^ after_first(word(&other[..8]));
        other[8..].copy_from_slice(&bent.to_le_bytes());
        let label = &other[1..15];
        if other[15] == 0
            && !label.contains(&0)
            && label.iter().all(|byte| !byte.is_ascii_uppercase())
        {
            return (
                Name::from_wire(&one).unwrap().0,
                Name::from_wire(&other).unwrap().0,
            );
        }
    }
}

/// A long list, which counts the names that were asked of it.
struct LongList {
    listed: AtomicUsize,
}

impl LongList {
    const LEN: usize = 3 * HOTTEST;
}

impl NameSource for LongList {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        Box::new((0..Self::LEN).map(|number| {
            self.listed.fetch_add(1, Ordering::Relaxed);
            name(&format!("n{number}.bosh"))
        }))
    }

    fn resolve(&self, health: &dyn Health, asked: &Name) -> Option<Resolution> {
        Fixed::default()
            .with(&asked.to_string(), true, &[1])
            .resolve(health, asked)
    }
}

#[test]
fn first_names_do_not_wait_for_the_list() {
    let mut bench = Machine::new(2 * LongList::LEN, 4, 2);
    let source = Arc::new(LongList {
        listed: AtomicUsize::new(0),
    });
    let hour = Duration::from_secs(3600);
    bench.table.install(source.clone(), &mut || {});
    assert!(!bench.table.go_on(Instant::now() + hour));
    // The caller attaches programs now.
    assert_eq!(source.listed.load(Ordering::Relaxed), HOTTEST);
    assert_eq!(bench.table.status().published, HOTTEST);
    // A query meanwhile for a name that comes later.
    bench.learn(&format!("n{}.bosh", LongList::LEN - 1));
    assert!(bench.table.go_on(Instant::now() + hour));
    bench.check();
    let status = bench.table.status();
    assert_eq!((status.published, status.learned), (LongList::LEN, 0));
    // Later lists are made at once.
    bench.table.renew(source.clone(), &mut || {});
    assert!(bench.table.go_on(Instant::now() + hour));
    assert_eq!(
        source.listed.load(Ordering::Relaxed),
        HOTTEST + 2 * LongList::LEN
    );
}

#[test]
fn frequent_installs_let_passes_end() {
    let mut bench = Machine::new(1000, 4, 2);
    let texts: Vec<String> = (0..500)
        .map(|number| format!("n{number:03}.bosh"))
        .collect();
    let all = |last: u8| {
        let incomparable = Fixed {
            is_incomparable: true,
            ..Fixed::default()
        };
        texts
            .iter()
            .fold(incomparable, |fixed, text| fixed.with(text, true, &[last]))
    };
    bench.install(&all(1));
    // Newer answers arrive before each slice of 64 names; no name is hot, so none is updated first.
    let mut ended = 0;
    for last in 2..=40 {
        bench.table.install(Arc::new(all(last)), &mut || {});
        ended += usize::from(bench.table.go_on(Instant::now()));
    }
    assert!(ended >= 2, "a pass over 500 names takes some 16 slices");
    while bench.table.is_installing() {
        bench.table.go_on(Instant::now());
    }
    bench.check();
    assert!(
        texts
            .iter()
            .all(|text| bench.answer(text) == Some(Ok(vec![40])))
    );
}
