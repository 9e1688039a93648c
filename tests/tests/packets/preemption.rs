//! Runs that interrupt another run on the same CPU, as they may with PREEMPT_RT.

use dns_common::counters::Outcome;
use whole_system_tests::program::{Program, TC_ACT_UNSPEC, XDP_PASS};

use crate::{
    HOOKS,
    fixtures::world,
    install, load,
    packet::{A, Datagram, Query},
};

#[test]
fn interrupting_run_passes_query_up() {
    // The programs shared with other tests are for kernels without PREEMPT_RT. Their lock is held,
    // because counters are read.
    let Some(_shared) = load() else { return };
    let mut program = Program::load_for(true).expect("the object loads where BPF is available");
    install(&mut program, &world());
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
