//! Replies from local replies of other types: exactly one of the entry's forms, whatever the client.

use std::collections::BTreeSet;

use dns_common::counters::Outcome;
use dns_core::wire::{Parsed, parse};
use dns_fastpath::{
    AnswerQuestion,
    forwarded::{LocalReply, encode_local},
};
use dns_kit::clock::BootInstant;
use test_support::forwarded::models;
use whole_system_tests::program::{Hook, Program};
use zerocopy::IntoBytes as _;

use crate::{
    forwarded::{
        FORWARDING, GENERATION, RD, Record, of_length, prepared, record, reply, run, run_message,
        soa,
    },
    packet::{Opt, Query},
};

const SRV: u16 = 33;

/// Returns the question of a query.
fn question(name: &str, qtype: u16) -> AnswerQuestion {
    AnswerQuestion {
        name: name.parse().expect("a name"),
        qtype,
        dnssec_ok: false,
        checking_disabled: false,
    }
}

/// Returns SRV records with targets of these lengths, so that records begin at even and odd offsets.
fn targets(lengths: &[usize], turn: usize) -> Vec<Record> {
    let data = |(port, &length): (usize, &usize)| {
        let target = [&[length as u8], &vec![b'a'; length][..], b"\x04bosh\0"].concat();
        [&[0, 1, 0, 1, 0x1f, port as u8], &target[..]].concat()
    };
    let mut records: Vec<Record> = lengths
        .iter()
        .enumerate()
        .map(|record_of| record(SRV, 7, &data(record_of)))
        .collect();
    records.rotate_left(turn);
    records
}

/// Publishes a reply; returns its entry.
fn publish(program: &mut Program, reply: &LocalReply, question: &AnswerQuestion) -> Vec<u64> {
    let seed = program.control().hash_seed;
    let entry = encode_local(reply, question, seed).expect("the programs can give it");
    program
        .publish_answer(entry.as_bytes())
        .expect("the test's store has room");
    entry
}

/// Zone of the replies of a given length.
const ZONE: &str = "service.consul";

/// Publishes a reply of `len` bytes with OPT; returns a query for it.
pub(super) fn publish_of_length(program: &mut Program, len: usize) -> Query {
    let (query, message) = of_length(ZONE, ANSWER, len);
    let local = LocalReply {
        plain: Vec::new(),
        narrow: vec![message.clone()],
        wide: vec![message],
        wide_limits: [513, u16::MAX],
        serial: 0,
        since_ns: 0,
    };
    publish(
        program,
        &local,
        &question(&format!("n{len}.{ZONE}"), query.qtype),
    );
    query
}

/// Compares the programs with the model for a client, and returns the different replies.
fn compare(
    program: &mut Program,
    entry: &[u64],
    client: &Query,
    since_ns: u64,
    times: usize,
) -> BTreeSet<Vec<u8>> {
    let bytes = client.bytes();
    let Parsed::Query(query) = parse(&bytes) else {
        panic!("a query")
    };
    let mut found = BTreeSet::new();
    for hook in FORWARDING {
        for (v6, vlan) in [
            (false, None),
            (true, None),
            (false, Some(5)),
            (true, Some(7)),
        ] {
            for _ in 0..times {
                let at = || models(entry, &query, BootInstant::now().kernel_ns() - since_ns);
                let mut allowed = at();
                let (reply, outcome) = run_message(program, hook, bytes.clone(), v6, vlan);
                // A second may have begun in between.
                allowed.extend(at());
                let path = format!("{outcome:?} at {hook:?}, IPv6 {v6}, VLAN {vlan:?}");
                match reply {
                    Some(reply) => {
                        assert!(allowed.contains(&reply), "{path}: {reply:02x?}");
                        assert_eq!(outcome, Outcome::HitOther);
                        found.insert(reply);
                    }
                    None => assert!(allowed.is_empty(), "{path}: {client:02x?}"),
                }
            }
        }
    }
    found
}

#[test]
fn replies_are_forms_of_entry() {
    let Some(mut program) = prepared() else {
        return;
    };
    for lengths in [
        &[][..],
        &[5],
        &[4, 5],
        &[1, 2, 3, 4, 5, 6, 7, 8],
        &[63; 8],
        &[30; 12],
    ] {
        let question = question("_web._tcp.service.consul", SRV);
        let plainly = Query::new("_web._tcp.service.consul", SRV);
        let orders = lengths.len().clamp(1, 8);
        let messages = |most: usize| -> Vec<Vec<u8>> {
            let message = |turn| {
                reply(
                    &plainly,
                    ANSWER,
                    [&targets(lengths, turn)[..most.min(lengths.len())], &[], &[]],
                )
            };
            (0..orders).map(message).collect()
        };
        let (plain, wide) = (messages(3), messages(usize::MAX));
        let longest = wide.iter().map(Vec::len).max().expect("one") as u16 + 11;
        let wide_limits = [longest.max(513), u16::MAX];
        let local = LocalReply {
            narrow: plain.clone(),
            plain,
            wide,
            wide_limits,
            serial: 0,
            since_ns: 0,
        };
        let entry = publish(&mut program, &local, &question);
        let with = |opt: Option<Opt>| Query {
            opt,
            ..plainly.clone()
        };
        for (client, is_answered) in [
            (plainly.clone(), true),
            (with(Some(Opt::new(4096))), true),
            (with(Some(Opt::new(longest.max(513)))), true),
            (with(Some(Opt::new(longest - 1))), longest <= 513),
            (with(Some(Opt::new(512))), true),
            (with(Some(Opt::new(0))), true),
            (
                with(Some(Opt {
                    flags: 0x8000,
                    ..Opt::new(4096)
                })),
                false,
            ),
            (
                Query {
                    name: plainly.name.to_ascii_uppercase(),
                    ..plainly.clone()
                },
                true,
            ),
            (
                Query {
                    flags: 0,
                    ..plainly.clone()
                },
                false,
            ),
            (
                Query {
                    flags: RD | 0x10,
                    ..plainly.clone()
                },
                false,
            ),
        ] {
            let found = compare(&mut program, &entry, &client, 0, 40);
            let expected = if is_answered { 1..=orders } else { 0..=0 };
            assert!(
                expected.contains(&found.len()),
                "{} replies to {client:02x?}",
                found.len()
            );
            // Each of 160 draws misses a given one of two orders with probability 2^-160.
            assert!(
                !is_answered || orders == 1 || found.len() > 1,
                "always the same order"
            );
        }
    }
}

#[test]
fn variants_end_at_their_limits() {
    let Some(mut program) = prepared() else {
        return;
    };
    let query = Query::new("_web._tcp.service.consul", SRV);
    let message = reply(&query, ANSWER, [&targets(&[5], 0), &[], &[]]);
    let question = question("_web._tcp.service.consul", SRV);
    for (limits, plain, sizes) in [
        (
            [600, 700],
            true,
            &[(599, false), (600, true), (700, true), (701, false)][..],
        ),
        ([513, 513], true, &[(512, false), (513, true), (514, false)]),
        (
            [513, u16::MAX],
            false,
            &[(0, false), (513, true), (u16::MAX, true)],
        ),
    ] {
        let local = LocalReply {
            plain: plain.then(|| message.clone()).into_iter().collect(),
            narrow: Vec::new(),
            wide: vec![message.clone()],
            wide_limits: limits,
            serial: 0,
            since_ns: 0,
        };
        let entry = publish(&mut program, &local, &question);
        let found = compare(&mut program, &entry, &query, 0, 1);
        assert_eq!(found.len(), usize::from(plain), "without EDNS");
        for &(size, is_answered) in sizes {
            let client = query.clone().opt(Opt::new(size));
            let found = compare(&mut program, &entry, &client, 0, 1);
            assert_eq!(found.len(), usize::from(is_answered), "{limits:?}: {size}");
        }
    }
}

/// Default number of random queries; the variable PACKETS overrides it.
const QUERIES: usize = 5_000;

/// Entries whose replies random queries get.
const ENTRIES: usize = 24;

#[test]
fn random_queries_get_forms_or_pass() {
    let Some(mut program) = prepared() else {
        return;
    };
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    let (seed, queries) = (
        number("SEED").unwrap_or_else(fastrand::get_seed),
        number("PACKETS"),
    );
    let queries = queries.unwrap_or(QUERIES as u64);
    println!("seed {seed}, {queries} queries (set SEED and PACKETS to repeat)");
    let rng = &mut fastrand::Rng::with_seed(seed);
    let entries: Vec<(Query, Vec<u64>)> = (0..ENTRIES)
        .map(|_| random_entry(&mut program, rng))
        .collect();
    let mut answered = 0;
    for round in 0..queries {
        let (query, entry) = &entries[rng.usize(..ENTRIES)];
        let mut client = Query {
            id: rng.u16(..),
            ..query.clone()
        };
        if rng.bool() {
            client.name.make_ascii_uppercase();
        }
        // DO is a part of the key.
        if let Some(opt) = &mut client.opt {
            opt.size = [0, 512, 513, 600, 1232, 4096, u16::MAX][rng.usize(..7)];
        } else if rng.bool() {
            client.opt = Some(Opt::new(rng.u16(..)));
        }
        // Userspace accepts some of these; the programs leave them to it.
        let change = rng.u8(..10);
        match change {
            0 => client.flags ^= 1 << rng.u8(..16),
            1 => client.qtype = rng.u16(..260),
            2 => {
                client.opt = client.opt.map(|opt| Opt {
                    flags: rng.u16(..),
                    ..opt
                })
            }
            3 => client.trailing = vec![0; rng.usize(1..20)],
            _ => {}
        }
        let mut is_odd = matches!(change, 0 | 3);
        let mut message = client.bytes();
        if rng.u8(..4) == 0 {
            is_odd = true;
            let at = rng.usize(2..message.len());
            message[at] ^= 1 << rng.u8(..8);
        }
        // Only the serial of an SOA depends on the age.
        let allowed = match parse(&message) {
            Parsed::Query(query) => models(entry, &query, 0),
            _ => Vec::new(),
        };
        let hook = FORWARDING[rng.usize(..2)];
        let vlan = rng.bool().then_some(5);
        let (reply, outcome) = run_message(&mut program, hook, message.clone(), rng.bool(), vlan);
        let what =
            || format!("seed {seed}, round {round}, {outcome:?} at {hook:?}: {message:02x?}");
        // A changed name or type may be another entry's, or a published name's.
        let is_other = outcome.is_hit() && outcome != Outcome::HitOther;
        match reply {
            Some(_) if is_other => {}
            Some(reply) => {
                answered += 1;
                let of_any = || {
                    let Parsed::Query(query) = parse(&message) else {
                        return false;
                    };
                    entries
                        .iter()
                        .any(|(_, entry)| models(entry, &query, 0).contains(&reply))
                };
                assert!(
                    allowed.contains(&reply) || of_any(),
                    "{}: {reply:02x?}",
                    what()
                );
            }
            None => assert!(allowed.is_empty() || is_odd, "{}", what()),
        }
    }
    println!("{answered} replies");
    assert!(
        answered > queries / 4,
        "{answered} of {queries}: too few for a meaningful test"
    );
}

/// Publishes a random reply; returns a query for it, and its entry.
fn random_entry(program: &mut Program, rng: &mut fastrand::Rng) -> (Query, Vec<u64>) {
    let name = format!(
        "n{}{}.service.consul",
        rng.u32(..),
        "x".repeat(rng.usize(..40))
    );
    let qtype = [SRV, 16, 65, 255, 12][rng.usize(..5)];
    let flags = if rng.bool() { 0x8000 } else { 0 };
    let opt = (flags != 0 || rng.bool()).then(|| Opt {
        flags,
        ..Opt::new(1232)
    });
    let query = Query {
        opt,
        ..Query::new(&name, qtype)
    };
    let lengths: Vec<usize> = (0..rng.usize(..12)).map(|_| rng.usize(1..60)).collect();
    let orders = lengths.len().clamp(1, 8);
    let messages = |most: usize| -> Vec<Vec<u8>> {
        let records = |turn| targets(&lengths, turn)[..most.min(lengths.len())].to_vec();
        (0..orders)
            .map(|turn| reply(&query, ANSWER, [&records(turn)[..], &[], &[]]))
            .collect()
    };
    let (plain, wide) = (messages(3), messages(usize::MAX));
    let longest = wide.iter().map(Vec::len).max().expect("one") as u16 + 11;
    let plain = if flags == 0 { plain } else { Vec::new() };
    let wide_limits = [longest.max(513), u16::MAX];
    let local = LocalReply {
        narrow: messages(2),
        plain,
        wide,
        wide_limits,
        serial: 0,
        since_ns: 0,
    };
    let question = AnswerQuestion {
        dnssec_ok: flags != 0,
        ..question(&name, qtype)
    };
    let entry = publish(program, &local, &question);
    (query, entry)
}

#[test]
fn serial_follows_clock() {
    let Some(mut program) = prepared() else {
        return;
    };
    for name in ["gone.consul", "gones.consul"] {
        let denied = Query::new(name, 28);
        let since_ns = BootInstant::now().kernel_ns() - 5_500_000_000;
        let message = reply(&denied, ANSWER | 3, [&[], &[soa(0, 5)], &[]]);
        let local = LocalReply {
            plain: vec![message.clone()],
            narrow: vec![message.clone()],
            wide: vec![message],
            wide_limits: [513, u16::MAX],
            serial: 7,
            since_ns,
        };
        let entry = publish(&mut program, &local, &question(name, 28));
        for opt in [None, Some(Opt::new(1232))] {
            let client = Query {
                opt,
                ..denied.clone()
            };
            let found = compare(&mut program, &entry, &client, since_ns, 1);
            assert!((1..=2).contains(&found.len()), "{name}: {found:02x?}");
        }
    }
}

#[test]
fn local_replies_outlive_flush() {
    let Some(mut program) = prepared() else {
        return;
    };
    let query = Query::new("_web._tcp.service.consul", SRV);
    let message = reply(&query, ANSWER, [&targets(&[5], 0), &[], &[]]);
    let local = LocalReply {
        plain: vec![message.clone()],
        narrow: vec![message.clone()],
        wide: vec![message],
        wide_limits: [513, u16::MAX],
        serial: 0,
        since_ns: 0,
    };
    publish(
        &mut program,
        &local,
        &question("_web._tcp.service.consul", SRV),
    );
    program.set_control(|control| control.answer_generation = GENERATION + 1);
    assert_eq!(
        run(&mut program, Hook::Tc, &query, false).1,
        Outcome::HitOther
    );
    program.set_control(|control| control.answer_generation = 0);
    assert_eq!(
        run(&mut program, Hook::Tc, &query, false).0,
        None,
        "no whole answers at all"
    );
    program.set_control(|control| {
        (control.answer_generation, control.lease_deadline_ns) = (GENERATION, 1)
    });
    assert_eq!(
        run(&mut program, Hook::Tc, &query, false).0,
        None,
        "a lost lease"
    );
}

/// Flags of a reply: QR, AA, RA.
const ANSWER: u16 = 0x8480;

/// A published name with a policy is looked up again by its type: its question reaches the next program.
#[test]
fn names_with_addresses_have_other_types() {
    use dns_common::entry::AnswerPolicy;
    use whole_system_tests::program::Published;

    let Some(mut program) = prepared() else {
        return;
    };
    let (name, stale) = ("web.service.consul", "unknown.service.consul");
    let published = Published {
        v4: vec![[10, 0, 0, 1].into()],
        policy: Some(AnswerPolicy::new(0, 0, [3, 3], true, true)),
        ..Published::default()
    };
    program
        .publish(&crate::packet::wire(name), &published)
        .expect("there is room");
    let query = Query::new(name, SRV);
    let message = reply(&query, ANSWER, [&targets(&[5, 9], 0), &[], &[]]);
    let local = LocalReply {
        plain: vec![message.clone()],
        narrow: vec![message.clone()],
        wide: vec![message],
        wide_limits: [513, u16::MAX],
        serial: 0,
        since_ns: 0,
    };
    let entry = publish(&mut program, &local, &question(name, SRV));
    for opt in [None, Some(Opt::new(1232))] {
        // Another name in between, so that nothing of this one is left from an earlier query.
        run(&mut program, Hook::Tc, &Query::new(stale, SRV), false);
        run(&mut program, Hook::Xdp, &Query::new(stale, SRV), false);
        let client = Query {
            opt,
            ..query.clone()
        };
        assert_eq!(compare(&mut program, &entry, &client, 0, 1).len(), 1);
    }
    assert_eq!(
        run(&mut program, Hook::Tc, &Query::new(name, 1), false).1,
        Outcome::Hit
    );
}
