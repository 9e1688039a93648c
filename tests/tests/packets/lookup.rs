//! How entries are found: those that a CPU remembers, from which the program answers
//! only while they live, and all others by the index.

use std::collections::HashMap;

use dns_common::{
    counters::Outcome,
    entry::Location,
    index::{self, BUCKET_SLOTS},
    lookup_cache::CachedLocations,
    name::hash_name,
};
use nix::{
    sched::{CpuSet, sched_getcpu, sched_setaffinity},
    unistd::Pid,
};
use whole_system_tests::program::{ELEMENTS, Hook, Program, Published};

use crate::{
    HOOKS,
    fixtures::world,
    install, load,
    model::World,
    packet::{A, Datagram, Query, wire},
};

/// Keeps this thread, and the runs with it, on one CPU: each has a lookup cache of its own.
fn stay_on_one_cpu() {
    let mut cpus = CpuSet::new();
    cpus.set(sched_getcpu().expect("this thread runs on a CPU")).expect("a set has room for all CPUs");
    sched_setaffinity(Pid::from_raw(0), &cpus).expect("a CPU that is in use may be used");
}

/// A name's entry: the one address that ends in this byte.
fn address(last: u8) -> Published {
    Published { v4: vec![[10, 0, 0, last].into()], ..Published::default() }
}

/// The last bytes of the replies to a query at each hook; none: it went up.
fn answers(program: &mut Program, name: &str) -> [Option<u8>; HOOKS.len()] {
    HOOKS.map(|hook| answer(program, hook, name))
}

/// The last byte of the reply to a query; none: it went up.
fn answer(program: &mut Program, hook: Hook, name: &str) -> Option<u8> {
    let query = Datagram::v4(Query::new(name, A).bytes()).frame();
    match program.run_counted(hook, &query).expect("the program runs") {
        (run, Outcome::Hit) => run.packet.last().copied(),
        (run, outcome) => {
            assert_eq!((run.packet, outcome), (query, Outcome::NotPublished), "{hook:?}");
            None
        }
    }
}

#[test]
fn a_remembered_entry_is_answered_from_only_while_it_lives() {
    let Some(mut program) = load() else { return };
    stay_on_one_cpu();
    install(&mut program, &world());
    let name = wire("changing.bosh");
    for last in 1..=3 {
        program.publish(&name, &address(last)).expect("there is room");
        for _ in 0..2 {
            assert_eq!(answers(&mut program, "changing.bosh"), [Some(last); HOOKS.len()]);
        }
    }
    program.write_tombstone(&name).expect("it is published");
    assert_eq!(
        answers(&mut program, "changing.bosh"),
        [None; HOOKS.len()],
        "neither by the lookup cache nor by the index"
    );
}

#[test]
fn names_that_share_hints_are_all_answered() {
    let Some(mut program) = load() else { return };
    stay_on_one_cpu();
    install(&mut program, &world());
    let seed = program.control().hash_seed;
    let hash = |number: u32| hash_name(seed, &wire(&format!("n{number}.bosh")));

    // Three names for the two locations of one slot, and two that follow each other's.
    let (mut by_place, mut by_slot) = (HashMap::<_, Vec<u32>>::new(), HashMap::new());
    let crowded = (0..).find_map(|number| {
        let sharing = by_place.entry(CachedLocations::slot(hash(number))).or_default();
        sharing.push(number);
        (sharing.len() == 3).then(|| sharing.clone())
    });
    let follow_each_other = (0..).find_map(|number| {
        let nothing: CachedLocations = zerocopy::transmute!(0_u64);
        let slot = (CachedLocations::slot(hash(number)), nothing.with(hash(number), Location(0)));
        by_slot.insert(slot, number).map(|other| vec![other, number])
    });
    for numbers in [crowded, follow_each_other].map(|found| found.expect("there are enough names")) {
        let names: Vec<String> = numbers.iter().map(|number| format!("n{number}.bosh")).collect();
        for (name, last) in names.iter().zip(7..) {
            program.publish(&wire(name), &address(last)).expect("there is room");
        }
        for _ in 0..3 {
            for (name, last) in names.iter().zip(7..) {
                assert_eq!(answers(&mut program, name), [Some(last); HOOKS.len()], "{names:?}");
            }
        }
    }
}

#[test]
fn names_that_had_to_go_to_the_other_bucket_are_found() {
    let Some(mut program) = load() else { return };
    stay_on_one_cpu();
    install(&mut program, &World { published: HashMap::new(), ..world() });
    let seed = program.control().hash_seed;
    // Three more names than the bucket holds that they prefer, the last one not published.
    let mut by_bucket = HashMap::<_, Vec<String>>::new();
    let crowded = (0..).find_map(|number| {
        let name = format!("n{number}.bosh");
        let hash = hash_name(seed, &wire(&name));
        let bucket = (index::element(hash, ELEMENTS / 2), index::preferred_bucket(hash));
        let sharing = by_bucket.entry(bucket).or_default();
        sharing.push(name);
        (sharing.len() == BUCKET_SLOTS + 3).then(|| sharing.clone())
    });
    let mut names = crowded.expect("there are enough names");
    let absent = names.pop().expect("just collected");
    for hook in HOOKS {
        for (name, last) in names.iter().zip(1..) {
            // Anew for each hook, so that no lookup cache leads there.
            program.publish(&wire(name), &address(last)).expect("there is room");
        }
        for (name, last) in names.iter().zip(1..) {
            assert_eq!(answer(&mut program, hook, name), Some(last), "{name} at {hook:?}");
        }
        assert_eq!(answer(&mut program, hook, &absent), None, "{absent} at {hook:?}");
    }
}
