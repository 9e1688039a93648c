//! Packets on a veth in a network namespace. On `lo`, where all other test runs are, the programs read
//! neither the interface's flags nor its address, and ask no route.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    process::Command,
    thread,
};

use dns_common::{
    counters::Outcome,
    scope::{
        BOUNDED, HeardClient, INTERFACE_TRIES, Interface as Served, NEAR, Probe, Scope, source_hash,
    },
};
use nix::{
    net::if_::if_nametoindex,
    sched::{CloneFlags, unshare},
};
use whole_system_tests::{
    process::run,
    program::{Hook, Program, Published},
};

use crate::{
    HOOKS, check,
    fixtures::{Fixture, table, world},
    forwarded, install, load, local_replies,
    model::{self, Interface, MOST_FAR, SAFE_PACKET, World},
    packet::{A, CLIENT, CLIENT6, Datagram, Opt, Query, SERVER, SERVER6, name_of_length},
};

/// Ethernet address of the interface.
const ADDRESS: [u8; 6] = [0x02, 0, 0, 0, 0x30, 0x02];

/// Ethernet address of the bridge that the interface belongs to.
const BRIDGE: [u8; 6] = [0x02, 0, 0, 0, 0x30, 0x03];

/// Sets up the interface, with routes to the fixtures' clients and room for the longest reply,
/// and a neighbour over IPv4: a route counts with and without one.
const SET_UP: [&str; 8] = [
    "link add srv address 02:00:00:00:30:02 mtu 9000 type veth peer name cli",
    "link set cli mtu 9000 up",
    "link set srv up",
    "addr add 10.1.2.1/24 dev srv",
    "-6 addr add fd00:0:0:0:1234::1/80 dev srv nodad",
    "neigh add 10.1.2.3 lladdr 02:00:00:00:30:09 dev srv",
    "link set lo up",
    "link show srv",
];

/// Calls `inside` in a new network namespace, with the index of its interface.
fn with_interface<T: Send>(inside: impl FnOnce(u32) -> T + Send) -> T {
    let entered = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("root may create namespaces");
        for command in SET_UP {
            run(Command::new("ip").args(command.split(' '))).expect("the kernel has veth");
        }
        // The kernel looks up routes only of interfaces that forward.
        for family in ["ipv4", "ipv6"] {
            let file = format!("/proc/sys/net/{family}/conf/all/forwarding");
            fs::write(file, "1").expect("the namespace is ours");
        }
        inside(if_nametoindex("srv").expect("just created"))
    };
    thread::scope(|scope| match scope.spawn(entered).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// The flags that the attacher gives to interfaces.
const KINDS: [u32; 4] = [NEAR, 0, BOUNDED, NEAR | BOUNDED];

/// Serves the interface with these flags, and lets packets arrive there.
fn serve(program: &mut Program, ifindex: u32, flags: u32) {
    serve_in(program, ifindex, flags, 0);
}

/// Like [`serve`]; the interface is found after `tries` other slots.
fn serve_in(program: &mut Program, ifindex: u32, flags: u32, tries: usize) {
    let address = [&ADDRESS[..], &[0, 0]].concat();
    let master = [&BRIDGE[..], &[0, 0]].concat();
    let served = Served {
        ifindex,
        flags,
        endpoints: u64::MAX,
        heard_only: 0,
        address: address.try_into().expect("eight bytes"),
        master: master.try_into().expect("eight bytes"),
        probes: [Probe {
            due_ns: 0,
            count: 0,
            client: [0; 16],
        }; _],
    };
    program.set_scope(|scope| {
        let slots = scope.interfaces.len();
        let first = Scope::first_slot(ifindex);
        for slot in &mut scope.interfaces {
            if slot.ifindex == ifindex {
                slot.ifindex = 0;
            }
        }
        scope.interfaces[(first + tries) % slots] = served;
    });
    program.receive_on(ifindex);
}

/// Returns the model's world behind an interface with these flags.
fn world_behind(flags: u32) -> World {
    World {
        interface: Interface {
            address: ADDRESS,
            is_far: flags & NEAR == 0,
            is_bounded: flags & BOUNDED != 0,
            is_lo: false,
        },
        ..world()
    }
}

/// Addresses a frame of the fixtures, which is for `lo`, to another interface.
fn readdress(frame: &[u8], address: [u8; 6]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    if frame[..6] == [0; 6] {
        frame[..6].copy_from_slice(&address);
    }
    frame
}

#[test]
fn fixtures_hold_on_other_interfaces() {
    let Some(mut program) = load() else { return };
    let program = &mut *program;
    with_interface(|ifindex| {
        for flags in KINDS {
            let world = world_behind(flags);
            install(program, &world);
            serve(program, ifindex, flags);
            for Fixture {
                name,
                frame,
                outcome,
            } in table()
            {
                let frame = readdress(&frame, ADDRESS);
                for hook in HOOKS {
                    let what = format!("{name} at {hook:?}, flags {flags}");
                    let expected = expected(name, outcome, &world, hook, &frame);
                    let (_, counted) = program.run_counted(hook, &frame).expect(&what);
                    assert_eq!(counted, expected, "{what}");
                    check(program, &world, hook, &frame)
                        .unwrap_or_else(|problem| panic!("{what}: {problem}"));
                }
            }
        }
    });
}

/// Returns the outcome of a fixture that has `outcome` on `lo`.
fn expected(name: &str, outcome: Outcome, world: &World, hook: Hook, frame: &[u8]) -> Outcome {
    if name == "a loopback address, by lo" {
        return Outcome::NotOurs;
    }
    let is_near = World {
        interface: Interface {
            is_far: false,
            is_bounded: false,
            ..world.interface
        },
        ..world.clone()
    };
    let is_long =
        model::reply(&is_near, hook, frame).is_some() && model::reply(world, hook, frame).is_none();
    // The path is asked before the room in the packet.
    let is_too_long = name == "300 addresses, 65535 bytes" && world.interface != is_near.interface;
    if is_long || is_too_long {
        Outcome::LargeReply
    } else {
        outcome
    }
}

/// Returns the length of a name, and the number of addresses, of a reply of `len` bytes with OPT.
fn shape(len: usize) -> (usize, usize) {
    const FIXED: usize = 12 + 4 + 11;
    let name_len = 3 + (len - FIXED - 3) % 16;
    (name_len, (len - FIXED - name_len) / 16)
}

/// Limits of a message over IPv4 and IPv6, by the interface's flags; `None`: none of these.
fn limits(flags: u32) -> [Option<usize>; 2] {
    if flags & BOUNDED != 0 {
        return [Some(SAFE_PACKET - 28), Some(SAFE_PACKET - 48)];
    }
    let far = (flags & NEAR == 0).then_some(MOST_FAR);
    [far, far]
}

/// Lengths of messages at every limit.
fn lengths() -> impl Iterator<Item = usize> {
    let limits = [SAFE_PACKET - 48, SAFE_PACKET - 28, MOST_FAR];
    limits.into_iter().flat_map(|limit| [limit, limit + 1])
}

#[test]
fn address_lists_end_at_bound_of_interface() {
    let Some(mut program) = load() else { return };
    let program = &mut *program;
    with_interface(|ifindex| {
        for flags in KINDS {
            let mut world = world_behind(flags);
            for len in lengths() {
                let (name_len, count) = shape(len);
                let v4 = (0..count as u32).map(|i| (0x0a00_0001 + i).into());
                let list = Published {
                    v4: v4.collect(),
                    ..Published::default()
                };
                world.published.insert(name_of_length(name_len), list);
                install(program, &world);
                serve(program, ifindex, flags);
                let query = Query {
                    name: name_of_length(name_len),
                    ..Query::new("", A)
                }
                .opt(Opt::new(4096));
                let families = [Datagram::v4(query.bytes()), Datagram::v6(query.bytes())];
                for (datagram, limit) in families.into_iter().zip(limits(flags)) {
                    let frame = readdress(&datagram.frame(), ADDRESS);
                    let is_sent = limit.is_none_or(|limit| len <= limit);
                    for hook in HOOKS {
                        let (run, counted) = program.run_counted(hook, &frame).expect("it runs");
                        let what = format!("{len} bytes at {hook:?}, flags {flags}");
                        let outcome = if is_sent {
                            Outcome::Hit
                        } else {
                            Outcome::LargeReply
                        };
                        assert_eq!(counted, outcome, "{what}");
                        let headers = frame.len() - query.bytes().len();
                        assert!(!is_sent || run.packet.len() == headers + len, "{what}");
                    }
                }
            }
        }
    });
}

#[test]
fn whole_answers_end_at_bound_of_interface() {
    let Some(mut program) = forwarded::prepared() else {
        return;
    };
    let program = &mut *program;
    with_interface(|ifindex| {
        for flags in KINDS {
            for len in lengths() {
                let forwarded = forwarded::publish_of_length(program, len);
                let local = local_replies::publish_of_length(program, len);
                serve(program, ifindex, flags);
                for (client, hit) in [
                    (forwarded, Outcome::HitForwarded),
                    (local, Outcome::HitOther),
                ] {
                    for (v6, limit) in [false, true].into_iter().zip(limits(flags)) {
                        let is_sent = limit.is_none_or(|limit| len <= limit);
                        for hook in HOOKS {
                            let outcome = outcome_at(program, hook, &client, v6);
                            let expected = if is_sent { hit } else { Outcome::LargeReply };
                            let what = format!("{len} bytes at {hook:?}, IPv6 {v6}, flags {flags}");
                            assert_eq!(outcome, expected, "{what}");
                        }
                    }
                }
            }
        }
    });
}

/// Runs the program on a query to the interface; returns the outcome.
fn outcome_at(program: &mut Program, hook: Hook, query: &Query, v6: bool) -> Outcome {
    let datagram = if v6 {
        Datagram::v6(query.bytes())
    } else {
        Datagram::v4(query.bytes())
    };
    let frame = readdress(&datagram.frame(), ADDRESS);
    program.run_counted(hook, &frame).expect("it runs").1
}

#[test]
fn frames_to_bridge_of_interface_are_answered() {
    let Some(mut program) = load() else { return };
    let program = &mut *program;
    with_interface(|ifindex| {
        let mut world = world_behind(NEAR);
        install(program, &world);
        serve(program, ifindex, NEAR);
        let mut others = vec![[0; 6], [0xff; 6]];
        for (place, flipped) in (0..12).flat_map(|place| [(place, 0x01), (place, 0x80)]) {
            let mut other = if place < 6 { ADDRESS } else { BRIDGE };
            other[place % 6] ^= flipped;
            if other != ADDRESS && other != BRIDGE {
                others.push(other);
            }
        }
        for query in [Query::new("v4-3.bosh", A), Query::new("missing.bosh", A)] {
            for datagram in [Datagram::v4(query.bytes()), Datagram::v6(query.bytes())] {
                for hook in HOOKS {
                    for address in [ADDRESS, BRIDGE] {
                        world.interface.address = address;
                        let frame = readdress(&datagram.frame(), address);
                        let (_, counted) = program.run_counted(hook, &frame).expect("it runs");
                        assert_eq!(counted, Outcome::Hit, "to {address:02x?} at {hook:?}");
                        assert_eq!(check(program, &world, hook, &frame), Ok(true));
                    }
                    for &address in &others {
                        let mut frame = datagram.frame();
                        frame[..6].copy_from_slice(&address);
                        let (run, counted) = program.run_counted(hook, &frame).expect("it runs");
                        assert_eq!(counted, Outcome::NotOurs, "to {address:02x?} at {hook:?}");
                        assert_eq!(run.packet, frame);
                    }
                }
            }
        }
    });
}

#[test]
fn only_lo_serves_loopback_addresses() {
    let Some(mut program) = load() else { return };
    let program = &mut *program;
    with_interface(|ifindex| {
        let mut world = world_behind(NEAR);
        let (v4, v6) = (Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into());
        world.endpoints = vec![(v4, 53), (v6, 53)];
        install(program, &world);
        let query = Query::new("v4-3.bosh", A).bytes();
        let datagrams = [
            Datagram {
                to: (v4, 53),
                ..Datagram::v4(query.clone())
            },
            Datagram {
                to: (v6, 53),
                ..Datagram::v6(query)
            },
        ];
        let frames = datagrams.map(|datagram| datagram.frame());
        let outcomes = |program: &mut Program, frame: &[u8]| {
            HOOKS.map(|hook| program.run_counted(hook, frame).expect("it runs").1)
        };
        for frame in &frames {
            assert_eq!(outcomes(program, frame), [Outcome::Hit; 2]);
        }
        serve(program, ifindex, NEAR);
        for frame in &frames {
            let frame = readdress(frame, ADDRESS);
            assert_eq!(outcomes(program, &frame), [Outcome::NotOurs; 2]);
        }
    });
}

#[test]
fn senders_of_this_machine_are_refused() {
    let Some(mut program) = load() else { return };
    let program = &mut *program;
    with_interface(|ifindex| {
        install(program, &world_behind(NEAR));
        let listed: [IpAddr; 2] =
            ["10.1.2.77", "fd00::1234:0:0:77"].map(|ip| ip.parse().expect("ok"));
        serve(program, ifindex, NEAR);
        program.set_scope(|scope| {
            for address in listed {
                let words = match address {
                    IpAddr::V4(ip) => [0, 0, 0, u32::from_ne_bytes(ip.octets())],
                    IpAddr::V6(ip) => zerocopy::transmute!(ip.octets()),
                };
                let (word, bits) = Scope::refused_source(source_hash(words));
                scope.refused_sources[word] |= bits;
            }
        });
        let query = Query::new("v4-3.bosh", A).bytes();
        for (sender, outcome) in [
            ("10.1.2.77", Outcome::BadSender),
            ("10.1.2.78", Outcome::Hit),
            ("127.0.0.1", Outcome::BadSender),
            ("fd00::1234:0:0:77", Outcome::BadSender),
            ("fd00::1234:0:0:78", Outcome::Hit),
            ("::1", Outcome::BadSender),
        ] {
            let sender: IpAddr = sender.parse().expect("written well");
            let datagram = match sender {
                IpAddr::V4(_) => Datagram::v4(query.clone()),
                IpAddr::V6(_) => Datagram::v6(query.clone()),
            };
            let from = (sender, 40_000);
            let frame = readdress(&Datagram { from, ..datagram }.frame(), ADDRESS);
            for hook in HOOKS {
                let (_, counted) = program.run_counted(hook, &frame).expect("it runs");
                assert_eq!(counted, outcome, "from {sender} at {hook:?}");
            }
        }
    });
}

/// The slot of the endpoint at which only heard clients are answered: the third one of the fixtures.
const HEARD_ONLY: usize = 2;

/// Where the kernel's verdict depends on the client, a client is answered whose own queries have arrived there.
#[test]
fn only_heard_clients_are_answered() {
    let Some(mut program) = load() else { return };
    let program = &mut *program;
    with_interface(|ifindex| {
        let mut world = world_behind(NEAR);
        world.endpoints[HEARD_ONLY] = (SERVER, 5353);
        world.endpoints.push((SERVER6, 5353));
        install(program, &world);
        let forwarded = forwarded::publish_of_length(program, 200);
        program.set_control(|control| control.answer_generation = forwarded::GENERATION);
        serve(program, ifindex, NEAR);
        let slots = [HEARD_ONLY, world.endpoints.len() - 1];
        program.set_scope(|scope| {
            let served = &mut scope.interfaces[Scope::first_slot(ifindex)];
            served.heard_only = slots.iter().fold(0, |bits, slot| bits | 1 << slot);
        });
        let ask = |program: &mut Program, query: &Query, client: (IpAddr, u16), port| {
            let (datagram, server) = match client.0 {
                IpAddr::V4(_) => (Datagram::v4(query.bytes()), SERVER),
                IpAddr::V6(_) => (Datagram::v6(query.bytes()), SERVER6),
            };
            let datagram = Datagram {
                from: client,
                to: (server, port),
                ..datagram
            };
            let frame = readdress(&datagram.frame(), ADDRESS);
            HOOKS.map(|hook| program.run_counted(hook, &frame).expect("it runs").1)
        };
        let hit = Query::new("v4-3.bosh", A);
        for (client, slot) in [(CLIENT, slots[0]), (CLIENT6, slots[1])] {
            let mapped = match client {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            let heard = HeardClient {
                ifindex,
                endpoint: slot as u32,
                address: mapped.octets(),
            };
            let unheard = [Outcome::UnheardClient; 2];
            // Another endpoint of the interface does not ask.
            assert_eq!(ask(program, &hit, (client, 4000), 53), [Outcome::Hit; 2]);
            for other in [
                HeardClient {
                    ifindex: ifindex + 1,
                    ..heard
                },
                HeardClient {
                    endpoint: 0,
                    ..heard
                },
                HeardClient {
                    address: [7; 16],
                    ..heard
                },
            ] {
                program.hear(other, u64::MAX).expect("there is room");
                assert_eq!(ask(program, &hit, (client, 4000), 5353), unheard);
            }
            program.hear(heard, 1).expect("there is room");
            assert_eq!(
                ask(program, &hit, (client, 4000), 5353),
                unheard,
                "long ago"
            );
            assert_eq!(ask(program, &forwarded, (client, 4000), 5353), unheard);
            program.hear(heard, u64::MAX).expect("there is room");
            assert_eq!(ask(program, &hit, (client, 4000), 5353), [Outcome::Hit; 2]);
            let forwarded = ask(program, &forwarded, (client, 4000), 5353);
            assert_eq!(forwarded, [Outcome::HitForwarded; 2]);
            // Rules tell privileged ports from others.
            assert_eq!(ask(program, &hit, (client, 1023), 5353), unheard);
            assert_eq!(ask(program, &hit, (client, 1024), 5353), [Outcome::Hit; 2]);
            // A name that is not published passes for that reason.
            let missed = ask(program, &Query::new("nobody.bosh", A), (client, 1023), 5353);
            assert_eq!(missed, [Outcome::NotPublished; 2]);
        }
    });
}

#[test]
fn interfaces_share_slots() {
    let Some(mut program) = load() else { return };
    let program = &mut *program;
    with_interface(|ifindex| {
        install(program, &world_behind(NEAR));
        let query = Query::new("v4-3.bosh", A).bytes();
        let frame = readdress(&Datagram::v4(query).frame(), ADDRESS);
        for (tries, outcome) in [
            (0, Outcome::Hit),
            (1, Outcome::Hit),
            (INTERFACE_TRIES - 1, Outcome::Hit),
            (INTERFACE_TRIES, Outcome::NotServed),
        ] {
            serve_in(program, ifindex, NEAR, tries);
            for hook in HOOKS {
                let (_, counted) = program.run_counted(hook, &frame).expect("it runs");
                assert_eq!(counted, outcome, "after {tries} slots at {hook:?}");
            }
        }
        let unserved = Datagram {
            to: (SERVER, 54),
            ..Datagram::v4(Vec::new())
        };
        let frame = readdress(&unserved.frame(), ADDRESS);
        let (_, counted) = program.run_counted(Hook::Tc, &frame).expect("it runs");
        assert_eq!(counted, Outcome::NotOurs);
    });
}
