//! Runs that interrupt another run on the same CPU, as they may with PREEMPT_RT.

use dns_common::{counters::Outcome, entry::AnswerPolicy};
use whole_system_tests::program::{Hook, Program, Published, TC_ACT_UNSPEC, XDP_PASS};

use crate::{
    HOOKS,
    fixtures::world,
    forwarded, install, load,
    packet::{A, Datagram, Query, wire},
};

/// Loads the programs for kernels with PREEMPT_RT, with the fixtures' names.
fn preemptible() -> Program {
    let mut program = Program::load_for(true).expect("the object loads where BPF is available");
    install(&mut program, &world());
    program
}

#[test]
fn interrupting_run_passes_query_up() {
    // The programs shared with other tests are for kernels without PREEMPT_RT. Their lock is held,
    // because counters are read.
    let Some(_shared) = load() else { return };
    let mut program = preemptible();
    let frame = Datagram::v4(Query::new("v4-3.bosh", A).bytes()).frame();
    for hook in HOOKS {
        program.set_busy(true).expect("the map can be written to");
        let (run, outcome) = program.run_counted(hook, &frame).expect("the program runs");
        let passed = if hook.is_xdp() {
            XDP_PASS
        } else {
            TC_ACT_UNSPEC
        };
        assert_eq!((outcome, run.verdict), (Outcome::Busy, passed), "{hook:?}");
        assert!(run.packet == frame, "{hook:?}: changed");
        program.set_busy(false).expect("the map can be written to");
        let (_, outcome) = program.run_counted(hook, &frame).expect("the program runs");
        assert_eq!(outcome, Outcome::Hit, "{hook:?}");
    }
}

/// After any decision of a run, the next one on its CPU gets the scratch space.
#[test]
fn every_run_releases_scratch_space() {
    let Some(_shared) = load() else { return };
    let mut program = preemptible();
    let forwarded = forwarded::publish_of_length(&mut program, 200);
    let with_policy = Published {
        v4: vec![[10, 0, 0, 1].into()],
        policy: Some(AnswerPolicy::new(0, 0, [3, 3], true, true)),
        ..Published::default()
    };
    let name = "web.service.consul";
    program
        .publish(&wire(name), &with_policy)
        .expect("there is room");
    let hit = Query::new("v4-3.bosh", A);
    let not_plain = Query {
        counts: [2, 0, 0],
        ..hit.clone()
    };
    let generations = [0, forwarded::GENERATION, forwarded::GENERATION + 1];
    for generation in generations {
        program.set_control(|control| control.answer_generation = generation);
        let of_generation = if generation == forwarded::GENERATION {
            Outcome::HitForwarded
        } else {
            Outcome::NotPublished
        };
        let cases = [
            (&hit, Outcome::Hit),
            (&Query::new("v4-60.bosh", A), Outcome::HitTruncated),
            (&Query::new("nobody.bosh", A), Outcome::NotPublished),
            (&Query::new(name, 33), Outcome::NotPublished),
            (&forwarded, of_generation),
            (&not_plain, Outcome::NotPlain),
        ];
        for hook in HOOKS {
            for (query, outcome) in cases {
                // Twice, because the second one finds what the first one leaves.
                for turn in 0..2 {
                    expect(&mut program, hook, query, outcome, turn);
                }
            }
        }
    }
    // Decisions that depend on the state of the server.
    program.set_control(|control| control.lease_deadline_ns = 1);
    for hook in HOOKS {
        for turn in 0..2 {
            expect(&mut program, hook, &hit, Outcome::LeaseExpired, turn);
        }
    }
    program.set_control(|control| {
        control.lease_deadline_ns = u64::MAX;
        control.shed_until_ns = u64::MAX;
    });
    let missed = Query::new("nobody.bosh", A);
    for hook in HOOKS {
        for turn in 0..2 {
            expect(&mut program, hook, &missed, Outcome::Shed, turn);
            expect(&mut program, hook, &hit, Outcome::Hit, turn);
        }
    }
}

fn expect(program: &mut Program, hook: Hook, query: &Query, outcome: Outcome, turn: u32) {
    for datagram in [Datagram::v4(query.bytes()), Datagram::v6(query.bytes())] {
        let frame = datagram.frame();
        let (_, counted) = program.run_counted(hook, &frame).expect("the program runs");
        assert_eq!(counted, outcome, "turn {turn} at {hook:?}: {query:02x?}");
    }
}
