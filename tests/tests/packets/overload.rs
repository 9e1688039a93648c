//! Load shedding while userspace has more queries than it can answer.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dns_common::{
    control::{CLIENT_BUCKETS, client_bucket},
    counters::Outcome,
};
use whole_system_tests::program::{Hook, Program, TC_ACT_SHOT, TC_ACT_UNSPEC, XDP_DROP, XDP_PASS};

use crate::{
    HOOKS,
    fixtures::world,
    install, load,
    packet::{A, Datagram, Query},
};

const NONE: [u32; CLIENT_BUCKETS] = [0; CLIENT_BUCKETS];

/// Returns a query from this client for an unpublished name.
fn miss(client: IpAddr) -> Datagram {
    let message = Query::new("unknown.bosh", A).bytes();
    let plain = if client.is_ipv4() {
        Datagram::v4(message)
    } else {
        Datagram::v6(message)
    };
    Datagram {
        from: (client, 4000),
        ..plain
    }
}

/// Sets the share of queries that are passed up, by client bucket.
fn shed(program: &mut Program, pass_shares: [u32; CLIENT_BUCKETS]) {
    program.set_control(|control| {
        (control.shed_until_ns, control.pass_shares) = (u64::MAX, pass_shares)
    });
}

/// Returns whether a packet is dropped instead of passed; it must not be modified in either case.
fn is_dropped(program: &mut Program, hook: Hook, frame: &[u8], otherwise: Outcome) -> bool {
    let (run, outcome) = program.run_counted(hook, frame).expect("the program runs");
    assert!(run.packet == frame, "{hook:?}: changed");
    let (dropped, passed) = if hook.is_xdp() {
        (XDP_DROP, XDP_PASS)
    } else {
        (TC_ACT_SHOT, TC_ACT_UNSPEC)
    };
    match outcome {
        Outcome::Shed => assert_eq!(run.verdict, dropped, "{hook:?}"),
        _ => assert_eq!((run.verdict, outcome), (passed, otherwise), "{hook:?}"),
    }
    outcome == Outcome::Shed
}

#[test]
fn hot_names_are_not_shed() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    shed(&mut program, NONE);
    let client = Ipv4Addr::new(10, 0, 0, 77).into();
    let for_others = Datagram {
        to: (Ipv4Addr::new(10, 9, 9, 9).into(), 53),
        ..miss(client)
    }
    .frame();
    for hook in HOOKS {
        let hit = Datagram::v4(Query::new("v4-3.bosh", A).bytes()).frame();
        assert_eq!(
            program.run_counted(hook, &hit).expect("the program runs").1,
            Outcome::Hit,
            "{hook:?}"
        );
        assert!(!is_dropped(
            &mut program,
            hook,
            &for_others,
            Outcome::NotOurs
        ));
        assert!(is_dropped(
            &mut program,
            hook,
            &miss(client).frame(),
            Outcome::NotPublished
        ));
        let transfer = Datagram::v4(Query::new("v4-3.bosh", 252).bytes()).frame();
        assert!(is_dropped(&mut program, hook, &transfer, Outcome::BadType));
    }
}

#[test]
fn shedding_ends_with_lease() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    let frame = miss(Ipv4Addr::new(10, 0, 0, 77).into()).frame();
    for hook in HOOKS {
        shed(&mut program, NONE);
        program.set_control(|control| control.shed_until_ns = 1);
        assert!(!is_dropped(
            &mut program,
            hook,
            &frame,
            Outcome::NotPublished
        ));
        shed(&mut program, NONE);
        program.set_control(|control| control.lease_deadline_ns = 1);
        assert!(!is_dropped(
            &mut program,
            hook,
            &frame,
            Outcome::LeaseExpired
        ));
        program.set_control(|control| control.lease_deadline_ns = u64::MAX);
    }
}

#[test]
fn clients_hash_by_address_suffix() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    let clients = (1..=20).flat_map(|last| {
        let v6 = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0x0a00, last);
        [IpAddr::from([10, 0, 0, last as u8]), v6.into()]
    });
    for client in clients {
        let last_four = match client {
            IpAddr::V4(client) => client.octets(),
            IpAddr::V6(client) => (client.to_bits() as u32).to_be_bytes(),
        };
        let mut alone = [u32::MAX; CLIENT_BUCKETS];
        alone[client_bucket(last_four)] = 0;
        let tagged = Datagram {
            tags: vec![(0x8100, 5)],
            ..miss(client)
        };
        program.set_scope(|scope| scope.vlans[0] = 1 << 5);
        for frame in [miss(client).frame(), tagged.frame()] {
            for hook in HOOKS {
                shed(&mut program, alone);
                assert!(
                    is_dropped(&mut program, hook, &frame, Outcome::NotPublished),
                    "{client}"
                );
                shed(&mut program, alone.map(|share| !share));
                assert!(
                    !is_dropped(&mut program, hook, &frame, Outcome::NotPublished),
                    "{client}"
                );
            }
        }
    }
}

#[test]
fn shed_share_matches_order() {
    /// Number of queries, a quarter of which is passed up.
    const QUERIES: u32 = 4000;
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    shed(&mut program, [u32::MAX / 4; CLIENT_BUCKETS]);
    let frame = miss(Ipv4Addr::new(10, 0, 0, 77).into()).frame();
    for hook in HOOKS {
        let up = (0..QUERIES)
            .filter(|_| !is_dropped(&mut program, hook, &frame, Outcome::NotPublished))
            .count();
        // Seven standard deviations of a binomial distribution.
        assert!((810..=1190).contains(&up), "{up} of {QUERIES} at {hook:?}");
    }
}
