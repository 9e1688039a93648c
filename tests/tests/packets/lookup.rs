//! Lookup of entries by the index.

use std::collections::HashMap;

use dns_common::{
    counters::Outcome,
    index::{self, BUCKET_SLOTS},
    name::hash_name,
};
use whole_system_tests::program::{ELEMENTS, Hook, Program, Published};

use crate::{
    HOOKS,
    fixtures::world,
    install, load,
    model::World,
    packet::{A, Datagram, Query, wire},
};

/// Returns an entry with one address that ends in this byte.
fn address(last: u8) -> Published {
    Published {
        v4: vec![[10, 0, 0, last].into()],
        ..Published::default()
    }
}

/// Returns the last byte of the reply to a query; `None` if it was passed up.
fn answer(program: &mut Program, hook: Hook, name: &str) -> Option<u8> {
    let query = Datagram::v4(Query::new(name, A).bytes()).frame();
    match program.run_counted(hook, &query).expect("the program runs") {
        (run, Outcome::Hit) => run.packet.last().copied(),
        (run, outcome) => {
            assert_eq!(
                (run.packet, outcome),
                (query, Outcome::NotPublished),
                "{hook:?}"
            );
            None
        }
    }
}

#[test]
fn replaced_entry_is_not_used() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    let name = wire("changing.bosh");
    for last in 1..=3 {
        program
            .publish(&name, &address(last))
            .expect("there is room");
        for hook in HOOKS {
            assert_eq!(
                answer(&mut program, hook, "changing.bosh"),
                Some(last),
                "{hook:?}"
            );
        }
    }
}

#[test]
fn displaced_names_are_found() {
    let Some(mut program) = load() else { return };
    install(
        &mut program,
        &World {
            published: HashMap::new(),
            ..world()
        },
    );
    let seed = program.control().hash_seed;
    // Three more names than fit into their preferred bucket; the last one is not published.
    let mut by_bucket = HashMap::<_, Vec<String>>::new();
    let crowded = (0..).find_map(|number| {
        let name = format!("n{number}.bosh");
        let hash = hash_name(seed, &wire(&name));
        let bucket = (
            index::element(hash, ELEMENTS / 2),
            index::preferred_bucket(hash),
        );
        let sharing = by_bucket.entry(bucket).or_default();
        sharing.push(name);
        (sharing.len() == BUCKET_SLOTS + 3).then(|| sharing.clone())
    });
    let mut names = crowded.expect("there are enough names");
    let absent = names.pop().expect("just collected");
    for (name, last) in names.iter().zip(1..) {
        program
            .publish(&wire(name), &address(last))
            .expect("there is room");
    }
    for hook in HOOKS {
        for (name, last) in names.iter().zip(1..) {
            assert_eq!(
                answer(&mut program, hook, name),
                Some(last),
                "{name} at {hook:?}"
            );
        }
        assert_eq!(
            answer(&mut program, hook, &absent),
            None,
            "{absent} at {hook:?}"
        );
    }
}
