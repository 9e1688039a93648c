//! The object's requirements on the kernel.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    time::Instant,
};

use aya::{maps::RingBuf, util::KernelVersion};
use dns_common::{counters::Outcome, object, tap::TapEvent};
use nix::time::{ClockId, clock_getres};
use whole_system_tests::program::{Hook, Program, Published};
use zerocopy::FromBytes as _;

use crate::{
    HOOKS,
    fixtures::world,
    forwarded, install, load,
    model::World,
    packet::{A, AAAA, CLIENT, CLIENT6, Datagram, Query, wire},
};

/// The last helper of Linux 5.15, `bpf_task_pt_regs` (include/uapi/linux/bpf.h of that version).
const LAST_OF_5_15: i32 = 175;

/// BPF's machine number in ELF headers.
const EM_BPF: u16 = 247;

#[test]
fn helpers_exist_in_linux_5_15() {
    let mut helpers: BTreeMap<i32, usize> = BTreeMap::new();
    for code in code_sections(dns_attacher::OBJECT) {
        for instruction in code.chunks_exact(8) {
            // BPF_JMP | BPF_CALL with source register 0: a call of a helper by number.
            if instruction[0] == 0x85 && instruction[1] >> 4 == 0 {
                let id = i32::from_le_bytes([
                    instruction[4],
                    instruction[5],
                    instruction[6],
                    instruction[7],
                ]);
                *helpers.entry(id).or_default() += 1;
            }
        }
    }
    println!("helpers and their numbers of calls: {helpers:?}");
    assert!(
        helpers.contains_key(&1),
        "bpf_map_lookup_elem must be among them, or the search is wrong"
    );
    for id in helpers.keys() {
        assert!(
            (1..=LAST_OF_5_15).contains(id),
            "helper {id} is not in Linux 5.15"
        );
    }
}

/// Returns the executable sections of an ELF64 file.
fn code_sections(elf: &[u8]) -> Vec<&[u8]> {
    let u16_at = |at: usize| u16::from_le_bytes([elf[at], elf[at + 1]]);
    let u64_at = |at: usize| {
        u64::from_le_bytes(elf[at..at + 8].try_into().expect("eight bytes were sliced"))
    };
    assert_eq!(&elf[..4], b"\x7fELF");
    assert_eq!(u16_at(18), EM_BPF);
    let (table, entry_len, count) = (
        u64_at(40) as usize,
        u16_at(58) as usize,
        u16_at(60) as usize,
    );
    let mut sections = Vec::new();
    for index in 0..count {
        let header = table + index * entry_len;
        // SHF_EXECINSTR
        if u64_at(header + 8) & 4 != 0 {
            let (offset, len) = (u64_at(header + 24) as usize, u64_at(header + 32) as usize);
            sections.push(&elf[offset..offset + len]);
        }
    }
    sections
}

/// A program and the instructions that the verifier processed for it on Linux 6.1, 6.12 and 6.18. A change of the programs
/// shows its price here: these figures follow it deliberately.
const VERIFIED: [(&str, [u32; 3]); 6] = [
    (object::TC_PROGRAM, [7_588, 7_588, 7_585]),
    (object::TC_FIRST_PROGRAM, [12_501, 10_643, 10_677]),
    (object::TC_ANSWER_PROGRAM, [88_416, 76_887, 127_406]),
    (object::XDP_PROGRAM, [91_685, 76_589, 130_896]),
    (object::TC_FORWARDED_PROGRAM, [35_821, 32_277, 32_417]),
    (object::XDP_FORWARDED_PROGRAM, [30_859, 21_503, 21_534]),
];

/// Most instructions on Linux before 6.1, whose verifier prunes less (early 5.15: up to 283,351), far below the kernel's
/// limit of a million.
const MAX_VERIFIED: u32 = 400_000;

/// Returns the most instructions that this kernel's verifier may process for a program: a fiftieth more than on the first
/// kernel of its kind.
fn budget([on_6_1, on_6_12, on_6_18]: [u32; 3]) -> u32 {
    let kernel = KernelVersion::current().expect("the kernel reports its version");
    let measured = if kernel < KernelVersion::new(6, 1, 0) {
        return MAX_VERIFIED;
    } else if kernel < KernelVersion::new(6, 12, 0) {
        on_6_1
    } else if kernel < KernelVersion::new(6, 18, 0) {
        on_6_12
    } else {
        on_6_18
    };
    measured + measured / 50
}

#[test]
fn the_verifier_has_room_left() {
    let Some(mut program) = load() else { return };
    let mut too_large = Vec::new();
    let mut seen = BTreeSet::new();
    for (name, program) in program.ebpf().programs() {
        let info = program.info().expect("a loaded program has information");
        seen.insert(name.to_owned());
        // Reported since Linux 5.16.
        let Some(verified) = info.verified_instruction_count() else {
            continue;
        };
        println!(
            "{name}: {verified} instructions processed by the verifier, {:?} bytes",
            info.size_translated()
        );
        let known = VERIFIED.iter().find(|(known, _)| *known == name);
        let (_, measured) = known.expect("every program is in the table");
        let most = budget(*measured);
        if verified > most {
            too_large.push(format!("{name}: {verified} instructions, at most {most}"));
        }
    }
    assert_eq!(seen.len(), VERIFIED.len(), "{seen:?}");
    assert!(too_large.is_empty(), "{too_large:?}");
}

#[test]
fn answer_stamps_entry() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    let name = wire("v4-3.bosh");
    let stamp = |program: &mut Program| program.entry(&name).expect("published").last_used_ns;
    assert_eq!(stamp(&mut program), 0);
    let query = Datagram::v4(Query::new("v4-3.bosh", A).bytes()).frame();
    for hook in HOOKS {
        let before = stamp(&mut program);
        std::thread::sleep(std::time::Duration::from_millis(20));
        program.run(hook, &query).expect("the program runs");
        assert!(stamp(&mut program) > before, "{hook:?}");
    }
    // Queried but not answered: not stamped.
    let other = program
        .entry(&wire("v4-10.bosh"))
        .expect("published")
        .last_used_ns;
    assert_eq!(other, 0);
}

#[test]
fn entry_is_stamped_once_per_tick() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    let name = wire("v4-3.bosh");
    let query = Datagram::v4(Query::new("v4-3.bosh", A).bytes()).frame();
    let tick = std::time::Duration::from(
        clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).expect("Linux has it"),
    );
    let (begun, mut stamps) = (Instant::now(), BTreeSet::new());
    for number in 0..2000 {
        program
            .run(HOOKS[number % HOOKS.len()], &query)
            .expect("the program runs");
        stamps.insert(program.entry(&name).expect("published").last_used_ns);
    }
    // Each write of the stamp changes it; CPUs that answer the same name would otherwise contend for its line.
    let ticks = begun.elapsed().as_nanos() / tick.as_nanos() + 2;
    assert!(
        stamps.len() as u128 <= ticks,
        "{} writes in {ticks} ticks",
        stamps.len()
    );
}

/// CPUs read the clock at different times: a reply does not replace the later time of another one.
#[test]
fn later_stamp_stays() {
    const LATER: [u8; 8] = u64::MAX.to_ne_bytes();
    let Some(mut program) = load() else { return };
    // The only entry of its store, like the forwarded answer.
    let world = World {
        published: HashMap::from([(wire("empty.bosh"), Published::default())]),
        ..world()
    };
    install(&mut program, &world);
    program.set_control(|control| control.answer_generation = forwarded::GENERATION);
    let forwarded = forwarded::publish_of_length(&mut program, 200);
    for (store, query, hit) in [
        (0, Query::new("empty.bosh", A), Outcome::Hit),
        (1, forwarded, Outcome::HitForwarded),
    ] {
        let frame = Datagram::v4(query.bytes()).frame();
        for hook in HOOKS {
            program.stores()[store][..8].copy_from_slice(&LATER);
            let (_, counted) = program.run_counted(hook, &frame).expect("the program runs");
            assert_eq!(counted, hit, "at {hook:?}");
            assert_eq!(program.stores()[store][..8], LATER, "{hit:?} at {hook:?}");
        }
    }
}

#[test]
fn replies_are_counted_by_type() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    let before = program.counters();
    for (name, qtype) in [
        ("v4-3.bosh", 1),
        ("v4-3.bosh", 28),
        ("v4-3.bosh", 33),
        ("missing.bosh", 1),
    ] {
        let query = Datagram::v4(Query::new(name, qtype).bytes()).frame();
        program.run(Hook::Xdp, &query).expect("the program runs");
    }
    let after = program.counters();
    let more = |kind: usize, rcode: usize| after.replies[kind][rcode] - before.replies[kind][rcode];
    assert_eq!(
        (more(0, 0), more(1, 0), more(2, 0), more(0, 3)),
        (1, 1, 1, 1)
    );
    // Headers, questions, and three A records.
    let questions = 3 * (12 + 11 + 4) + (12 + 14 + 4);
    assert_eq!(after.query_bytes - before.query_bytes, questions);
    assert_eq!(after.reply_bytes - before.reply_bytes, questions + 3 * 16);
    assert_eq!(
        after.interface_hits.iter().sum::<u64>() - before.interface_hits.iter().sum::<u64>(),
        4
    );
}

#[test]
fn hash_collision_is_not_answered() {
    let Some(mut program) = load() else { return };
    let world = world();
    install(&mut program, &world);
    let seed = program.control().hash_seed;
    let query = Datagram::v4(Query::new("other.bosh", A).bytes()).frame();
    let hash = dns_common::name::hash_name(seed, &wire("other.bosh"));
    for stored in ["v4-10.bosh", "athar.bosh", "other.bosi"] {
        program
            .publish_as(hash, &wire(stored), &world.published[&wire("v4-3.bosh")])
            .expect("there is room");
        for hook in HOOKS {
            let (run, counted) = program.run_counted(hook, &query).expect("the program runs");
            assert_eq!(run.packet, query);
            assert_eq!(counted, Outcome::Collision, "{stored} at {hook:?}");
        }
    }
}

#[test]
fn tap_reports_own_queries_only() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    program.set_control(|control| control.tap_every = 1);
    let hit = Datagram::v4(Query::new("V4-3.bosh", A).bytes()).frame();
    let miss = Datagram::v6(Query::new("Nobody.bosh", 33).bytes()).frame();
    // The client of a reply is its receiver, over both families.
    let hit6 = Datagram::v6(Query::new("V4-3.bosh", A).bytes()).frame();
    let miss4 = Datagram::v4(Query::new("Nobody.bosh", 33).bytes()).frame();
    // Queries for other servers are none of the tap's business.
    let query = Query::new("V4-3.bosh", A).bytes();
    let foreign = [
        (std::net::Ipv4Addr::new(8, 8, 8, 8).into(), 53),
        (crate::packet::SERVER, 54),
    ]
    .map(|to| {
        Datagram {
            to,
            ..Datagram::v4(query.clone())
        }
        .frame()
    });
    for hook in HOOKS {
        program.run(hook, &hit).expect("the program runs");
        for frame in &foreign {
            program.run(hook, frame).expect("the program runs");
        }
        program.run(hook, &miss).expect("the program runs");
        program.run(hook, &hit6).expect("the program runs");
        program.run(hook, &miss4).expect("the program runs");
    }
    let events = tapped(&mut program);
    assert_eq!(events.len(), 4 * HOOKS.len());
    for of_hook in events.chunks(4) {
        let [hit, miss, hit6, miss4] = of_hook else {
            panic!("four events of each hook")
        };
        let addresses =
            [hit, miss, hit6, miss4].map(|event| IpAddr::from(event.client).to_canonical());
        assert_eq!(addresses, [CLIENT, CLIENT6, CLIENT6, CLIENT]);
        assert!(of_hook.iter().all(|event| event.client_port == 40_000));
        assert_eq!(
            (hit.outcome, hit.rcode, hit.answers),
            (Outcome::Hit as u8, 0, 3)
        );
        assert_eq!(&hit.client, b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x01\x02\x03");
        assert_eq!((hit.client_port, hit.query_type), (40_000, 1));
        assert_eq!(&hit.name[..hit.name_len as usize], wire("V4-3.bosh"));
        assert!(hit.time_ns > 0 && hit.ifindex > 0, "{hit:?}");
        assert_eq!(
            (miss.outcome, miss.answers),
            (Outcome::NotPublished as u8, 0)
        );
        assert_eq!((miss.client_port, miss.query_type), (40_000, 33));
        assert_eq!(&miss.name[..miss.name_len as usize], wire("Nobody.bosh"));
    }
}

/// Returns the events that have been sent to the tap.
fn tapped(program: &mut Program) -> Vec<TapEvent> {
    let map = program.ebpf().map_mut(object::TAP).expect("in the object");
    let mut ring = RingBuf::try_from(map).expect("a ring buffer");
    let mut events = Vec::new();
    while let Some(item) = ring.next() {
        events.push(TapEvent::read_from_bytes(&item).expect("an event"));
    }
    events
}

#[test]
fn tap_reports_names_that_end_with_their_type() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    program.set_control(|control| control.tap_every = 1);
    let (query, name) = (Query::new("V4-3.bosh", AAAA).bytes(), wire("V4-3.bosh"));
    let name_end = query.len() - 4;
    for (message, name, query_type) in [
        (&*Query::new("", AAAA).bytes(), &*wire(""), AAAA),
        // The frame ends after the type, within it, and within the name.
        (&query[..name_end + 2], &*name, AAAA),
        (&query[..name_end + 1], &[], 0),
        (&query[..name_end - 1], &[], 0),
    ] {
        for datagram in [Datagram::v4, Datagram::v6] {
            let frame = datagram(message.to_vec()).frame();
            for hook in HOOKS {
                program.run(hook, &frame).expect("the program runs");
                let events = tapped(&mut program);
                let [event] = &*events else {
                    panic!("{} events of {message:02x?} at {hook:?}", events.len())
                };
                let found = (&event.name[..event.name_len.into()], event.query_type);
                assert_eq!(found, (name, query_type), "{message:02x?} at {hook:?}");
            }
        }
    }
}

#[test]
fn tap_samples_queries_evenly() {
    const RUNS: usize = 2000;
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    program.set_control(|control| control.tap_every = 10);
    let [a, aaaa] =
        [A, AAAA].map(|kind| Datagram::v4(Query::new("V4-3.bosh", kind).bytes()).frame());
    for _ in 0..RUNS {
        program.run(Hook::Xdp, &a).expect("the program runs");
        program.run(Hook::Xdp, &aaaa).expect("the program runs");
    }
    let mut counts = [0usize; 2];
    for event in tapped(&mut program) {
        counts[usize::from(event.query_type == AAAA)] += 1;
    }
    // Binomial with p = 0.1: the expected 200 has a standard deviation of 13.4; ten of them are
    // allowed.
    assert!(
        counts.iter().all(|count| (66..=334).contains(count)),
        "{counts:?}"
    );
}
