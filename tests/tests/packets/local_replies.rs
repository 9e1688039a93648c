//! Replies from local replies of other types: exactly one of the entry's forms, whatever the client.

use std::collections::BTreeSet;

use dns_common::counters::Outcome;
use dns_core::wire::{Parsed, parse};
use dns_fastpath::forwarded::{AnswerQuestion, LocalReply, encode_local, models};
use dns_kit::clock::BootInstant;
use whole_system_tests::program::{Hook, Program};
use zerocopy::IntoBytes as _;

use crate::{
    forwarded::{FORWARDING, GENERATION, RD, Record, prepared, record, reply, run, soa},
    packet::{Opt, Query},
};

const SRV: u16 = 33;

/// Returns the question of a query.
fn question(name: &str, qtype: u16) -> AnswerQuestion {
    AnswerQuestion { name: name.parse().expect("a name"), qtype, dnssec_ok: false, checking_disabled: false }
}

/// Returns SRV records with targets of these lengths, so that records begin at even and odd offsets.
fn targets(lengths: &[usize], turn: usize) -> Vec<Record> {
    let data = |(port, &length): (usize, &usize)| {
        let target = [&[length as u8], &vec![b'a'; length][..], b"\x04bosh\0"].concat();
        [&[0, 1, 0, 1, 0x1f, port as u8], &target[..]].concat()
    };
    let mut records: Vec<Record> =
        lengths.iter().enumerate().map(|record_of| record(SRV, 7, &data(record_of))).collect();
    records.rotate_left(turn);
    records
}

/// Publishes a reply; returns its entry.
fn publish(program: &mut Program, reply: &LocalReply, question: &AnswerQuestion) -> Vec<u64> {
    let seed = program.control().hash_seed;
    let entry = encode_local(reply, question, seed).expect("the programs can give it");
    program.publish_answer(entry.as_bytes()).expect("the test's store has room");
    entry
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
    let Parsed::Query(query) = parse(&bytes) else { panic!("a query") };
    let mut found = BTreeSet::new();
    for hook in FORWARDING {
        for v6 in [false, true] {
            for _ in 0..times {
                let age = BootInstant::now().kernel_ns() - since_ns;
                let allowed = models(entry, &query, age);
                let (reply, outcome) = run(program, hook, client, v6);
                match reply {
                    Some(reply) => {
                        assert!(allowed.contains(&reply), "{outcome:?} at {hook:?}, IPv6 {v6}: {reply:02x?}");
                        assert_eq!(outcome, Outcome::HitOther);
                        found.insert(reply);
                    }
                    None => assert!(allowed.is_empty(), "{outcome:?} at {hook:?}, IPv6 {v6}: {client:02x?}"),
                }
            }
        }
    }
    found
}

#[test]
fn replies_are_forms_of_entry() {
    let Some(mut program) = prepared() else { return };
    for lengths in [&[][..], &[5], &[4, 5], &[1, 2, 3, 4, 5, 6, 7, 8], &[63; 8], &[30; 12]] {
        let question = question("_web._tcp.service.consul", SRV);
        let plainly = Query::new("_web._tcp.service.consul", SRV);
        let orders = lengths.len().clamp(1, 8);
        let messages = |most: usize| -> Vec<Vec<u8>> {
            let message = |turn| {
                reply(&plainly, ANSWER, [&targets(lengths, turn)[..most.min(lengths.len())], &[], &[]])
            };
            (0..orders).map(message).collect()
        };
        let (plain, wide) = (messages(3), messages(usize::MAX));
        let longest = wide.iter().map(Vec::len).max().expect("one") as u16 + 11;
        let wide_limits = [longest.max(513), u16::MAX];
        let local = LocalReply { plain, wide, wide_limits, serial: 0, since_ns: 0 };
        let entry = publish(&mut program, &local, &question);
        let with = |opt: Option<Opt>| Query { opt, ..plainly.clone() };
        for (client, is_answered) in [
            (plainly.clone(), true),
            (with(Some(Opt::new(4096))), true),
            (with(Some(Opt::new(longest.max(513)))), true),
            (with(Some(Opt::new(longest - 1))), false),
            (with(Some(Opt::new(512))), false),
            (Query { name: plainly.name.to_ascii_uppercase(), ..plainly.clone() }, true),
            (Query { flags: 0, ..plainly.clone() }, false),
            (Query { flags: RD | 0x10, ..plainly.clone() }, false),
        ] {
            let found = compare(&mut program, &entry, &client, 0, 40);
            let expected = if is_answered { 1..=orders } else { 0..=0 };
            assert!(expected.contains(&found.len()), "{} replies to {client:02x?}", found.len());
            // Each of 160 draws misses a given one of two orders with probability 2^-160.
            assert!(!is_answered || orders == 1 || found.len() > 1, "always the same order");
        }
    }
}

#[test]
fn serial_follows_clock() {
    let Some(mut program) = prepared() else { return };
    for name in ["gone.consul", "gones.consul"] {
        let denied = Query::new(name, 28);
        let since_ns = BootInstant::now().kernel_ns() - 5_500_000_000;
        let message = reply(&denied, ANSWER | 3, [&[], &[soa(0, 5)], &[]]);
        let local = LocalReply {
            plain: vec![message.clone()],
            wide: vec![message],
            wide_limits: [513, u16::MAX],
            serial: 7,
            since_ns,
        };
        let entry = publish(&mut program, &local, &question(name, 28));
        for opt in [None, Some(Opt::new(1232))] {
            let client = Query { opt, ..denied.clone() };
            assert_eq!(compare(&mut program, &entry, &client, since_ns, 1).len(), 1, "{name}");
        }
    }
}

#[test]
fn local_replies_outlive_flush() {
    let Some(mut program) = prepared() else { return };
    let query = Query::new("_web._tcp.service.consul", SRV);
    let message = reply(&query, ANSWER, [&targets(&[5], 0), &[], &[]]);
    let local = LocalReply {
        plain: vec![message.clone()],
        wide: vec![message],
        wide_limits: [513, u16::MAX],
        serial: 0,
        since_ns: 0,
    };
    publish(&mut program, &local, &question("_web._tcp.service.consul", SRV));
    program.set_control(|control| control.answer_generation = GENERATION + 1);
    assert_eq!(run(&mut program, Hook::Tc, &query, false).1, Outcome::HitOther);
    program.set_control(|control| control.answer_generation = 0);
    assert_eq!(run(&mut program, Hook::Tc, &query, false).0, None, "no whole answers at all");
    program.set_control(|control| (control.answer_generation, control.lease_deadline_ns) = (GENERATION, 1));
    assert_eq!(run(&mut program, Hook::Tc, &query, false).0, None, "a lost lease");
}

/// Flags of a reply: QR, AA, RA.
const ANSWER: u16 = 0x8480;

/// A published name with a policy is looked up again by its type: its question reaches the next program.
#[test]
fn names_with_addresses_have_other_types() {
    use dns_common::entry::AnswerPolicy;
    use whole_system_tests::program::Published;

    let Some(mut program) = prepared() else { return };
    let (name, stale) = ("web.service.consul", "unknown.service.consul");
    let published = Published {
        v4: vec![[10, 0, 0, 1].into()],
        policy: Some(AnswerPolicy::new(0, 0, [3, 3], true, true)),
        ..Published::default()
    };
    program.publish(&crate::packet::wire(name), &published).expect("there is room");
    let query = Query::new(name, SRV);
    let message = reply(&query, ANSWER, [&targets(&[5, 9], 0), &[], &[]]);
    let local = LocalReply {
        plain: vec![message.clone()],
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
        let client = Query { opt, ..query.clone() };
        assert_eq!(compare(&mut program, &entry, &client, 0, 1).len(), 1);
    }
    assert_eq!(run(&mut program, Hook::Tc, &Query::new(name, 1), false).1, Outcome::Hit);
}
