//! Random and mutated packets, and every possible length, compared with the model.

use std::net::IpAddr;

use dns_common::object;
use fastrand::Rng;

use crate::{
    HOOKS, check,
    fixtures::world,
    install, load,
    packet::{A, AAAA, CLIENT, Datagram, Opt, Query, SERVER, SERVER6, name_of_length},
};

/// Default number of random packets per hook; the variable PACKETS overrides it.
const PACKETS: usize = 15_000;

/// Packets between two progress messages of a long run.
const PROGRESS: usize = 1_000_000;

#[test]
fn random_packets_match_model() {
    let Some(mut program) = load() else { return };
    let mut world = world();
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(fastrand::get_seed);
    let packets = std::env::var("PACKETS").map_or(PACKETS, |packets| {
        packets.parse().expect("PACKETS is a number")
    });
    println!("seed: {seed}, {packets} packets per hook (set SEED and PACKETS to repeat)");
    let mut rng = Rng::with_seed(seed);
    let mut names: Vec<_> = world.published.keys().cloned().collect();
    names.sort();
    install(&mut program, &world);
    let mut answered = 0;
    for round in 0..packets {
        if round % PROGRESS == PROGRESS - 1 {
            println!(
                "{} packets per hook, {answered} replies, 0 differences",
                round + 1
            );
        }
        if round % 1000 == 999 {
            // The state changes occasionally as well.
            world.lease = rng.u8(..8) != 0;
            world.max_reply = rng.bool().then(|| rng.usize(100..1500));
            world.echo_opt = rng.bool();
            world.cookies = rng.bool();
            world.is_first = rng.bool();
            let answering = if world.is_first {
                object::TC_FIRST_PROGRAM
            } else {
                object::TC_ANSWER_PROGRAM
            };
            program
                .answer_at_tc_by(answering)
                .expect("the program is loaded");
            program.set_control(|control| {
                control.lease_deadline_ns = if world.lease { u64::MAX } else { 1 };
                control.max_reply = world.max_reply.unwrap_or(0) as u32;
                control.edns = world.edns();
            });
        }
        let frame = random_frame(&mut rng, &names);
        for hook in HOOKS {
            match check(&program, &world, hook, &frame) {
                Ok(hit) => answered += usize::from(hit),
                Err(problem) => panic!(
                    "seed {seed}, round {round}, {hook:?}: {problem}\nlease {}, max_reply {:?}\nframe: {frame:02x?}",
                    world.lease, world.max_reply
                ),
            }
        }
    }
    println!("{answered} of {} answered", HOOKS.len() * packets);
    assert!(
        answered > packets / 10,
        "too few of the packets were answered for a meaningful test"
    );
}

/// Returns a packet that is valid, nearly valid, or invalid.
fn random_frame(rng: &mut Rng, names: &[Vec<u8>]) -> Vec<u8> {
    let mut name = names[rng.usize(..names.len())].clone();
    for byte in &mut name {
        // Length bytes stay intact: they are smaller than letters.
        if rng.u8(..4) == 0 && byte.is_ascii_lowercase() {
            *byte = byte.to_ascii_uppercase();
        }
    }
    let mut query = Query {
        name,
        id: rng.u16(..),
        ..Query::new("", [A, AAAA, A, 33, 255][rng.usize(..5)])
    };
    if rng.bool() {
        let mut opt = Opt::new([100, 512, 513, 1232, 1500, 4096, 65535][rng.usize(..7)]);
        if rng.bool() {
            opt.options = (0..rng.usize(..40)).map(|_| rng.u8(..)).collect();
        }
        query.opt = Some(opt);
    }
    match rng.u8(..12) {
        0 => query.flags = rng.u16(..),
        1 => query.counts[rng.usize(..3)] = rng.u16(..3),
        2 => query.additional = Some(rng.u16(..3)),
        3 => query.qtype = rng.u16(..260),
        4 => query.qclass = rng.u16(..5),
        5 => query.trailing = (0..rng.usize(1..20)).map(|_| rng.u8(..)).collect(),
        6 => {
            let place = rng.usize(..query.name.len());
            query.name[place] = rng.u8(..);
        }
        _ => {}
    }
    let mut datagram = if rng.bool() {
        Datagram::v4(query.bytes())
    } else {
        Datagram::v6(query.bytes())
    };
    if rng.u8(..4) == 0 {
        // Half of the frames belong to a VLAN that is answered.
        let tag = if rng.bool() {
            rng.u16(..)
        } else {
            rng.u16(..8) << 13 | 5
        };
        datagram.tags = vec![(0x8100, tag); rng.usize(1..=2)];
    }
    if rng.u8(..4) == 0 {
        datagram.padding = rng.usize(..70);
    }
    datagram.from.1 = rng.u16(..);
    let mut frame = datagram.frame();
    for _ in 0..[0, 0, 0, 1, 2, 5][rng.usize(..6)] {
        let place = rng.usize(..frame.len());
        frame[place] = match rng.u8(..3) {
            0 => rng.u8(..),
            1 => frame[place] ^ 1 << rng.u8(..8),
            _ => frame[place].wrapping_add(1),
        };
    }
    if rng.u8(..8) == 0 {
        frame.truncate(rng.usize(14..=frame.len()));
    }
    frame
}

#[test]
fn every_name_length_is_answered() {
    let Some(mut program) = load() else { return };
    let world = world();
    install(&mut program, &world);
    for len in (1..=255).filter(|&len| len != 2) {
        let query = Query {
            name: name_of_length(len).to_ascii_uppercase(),
            ..Query::new("", A)
        };
        for opt in [
            None,
            Some(Opt::new(1232)),
            Some(Opt::with_options(4096, &[0, 12, 0, 2, 0, 0])),
        ] {
            let query = Query {
                opt,
                ..query.clone()
            };
            for datagram in [Datagram::v4(query.bytes()), Datagram::v6(query.bytes())] {
                for hook in HOOKS {
                    match check(&program, &world, hook, &datagram.frame()) {
                        Ok(true) => {}
                        Ok(false) => panic!("name of {len} bytes at {hook:?}: not answered"),
                        Err(problem) => panic!("name of {len} bytes at {hook:?}: {problem}"),
                    }
                }
            }
        }
    }
}

#[test]
fn truncated_frames_are_passed() {
    let Some(mut program) = load() else { return };
    let world = world();
    install(&mut program, &world);
    let query = Query::new("v4-3.bosh", A).opt(Opt::with_options(1232, &[0, 10, 0, 2, 1, 2]));
    let mut shorter = query.clone();
    shorter.opt = None;
    for query in [query, shorter] {
        for datagram in [Datagram::v4(query.bytes()), Datagram::v6(query.bytes())] {
            let whole = datagram.frame();
            for hook in HOOKS {
                assert_eq!(
                    check(&program, &world, hook, &whole),
                    Ok(true),
                    "the whole frame at {hook:?}"
                );
                for len in 14..whole.len() {
                    let cut = &whole[..len];
                    assert_eq!(
                        check(&program, &world, hook, cut),
                        Ok(false),
                        "{len} bytes at {hook:?}"
                    );
                }
            }
        }
        // Cut inside the message, with consistent lengths.
        let message = query.bytes();
        for len in 0..message.len() {
            for frame in [
                Datagram::v4(message[..len].to_vec()).frame(),
                Datagram::v6(message[..len].to_vec()).frame(),
            ] {
                for hook in HOOKS {
                    if let Err(problem) = check(&program, &world, hook, &frame) {
                        panic!("message of {len} bytes at {hook:?}: {problem}");
                    }
                }
            }
        }
    }
}

#[test]
fn own_reply_is_passed() {
    let Some(mut program) = load() else { return };
    let mut world = world();
    // On `lo` the client's address and port may equal the server's.
    world.endpoints.push((CLIENT, 40_000));
    install(&mut program, &world);
    for hook in HOOKS {
        let query = Datagram::v4(Query::new("v4-3.bosh", A).bytes()).frame();
        let reply = program.run(hook, &query).expect("the program runs").packet;
        assert_ne!(reply, query);
        let again = program.run(hook, &reply).expect("the program runs");
        assert_eq!(again.packet, reply, "{hook:?}");
    }
}

#[test]
fn sixteen_endpoints_are_served() {
    let Some(mut program) = load() else { return };
    let mut world = world();
    world.endpoints = (0..16u16)
        .map(|i| (if i % 2 == 0 { SERVER } else { SERVER6 }, 5000 + i))
        .collect::<Vec<(IpAddr, u16)>>();
    install(&mut program, &world);
    for i in 0..17 {
        for base in [Datagram::v4 as fn(_) -> _, Datagram::v6] {
            let mut datagram = base(Query::new("v4-3.bosh", A).bytes());
            datagram.to.1 = 5000 + i;
            let listening = world.endpoints.contains(&datagram.to);
            for hook in HOOKS {
                assert_eq!(
                    check(&program, &world, hook, &datagram.frame()),
                    Ok(listening),
                    "{i} at {hook:?}"
                );
            }
        }
    }
}
