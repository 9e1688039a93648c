//! Random replies of recursors: the programs and their model give what userspace gives from its cache.

use std::{collections::HashSet, iter, thread, time::Duration};

use dns_common::forwarded::{
    ANY_LIMIT, AnswerHeader, MAX_BODY_LEN, MAX_RECORDS, Variant, ones_sum,
};
use dns_core::wire::{Parsed, parse};
use dns_fastpath::forwarded::encode;
use dns_upstream::fuzzing::CachedReplies;
use fastrand::Rng;
use test_support::forwarded::model;
use zerocopy::{FromBytes as _, IntoBytes as _};

use crate::{
    fixtures::world,
    forwarded::{
        AD, ANSWER, CD, DO, GENERATION, NXDOMAIN, QUESTION, RD, Record, clients, compare, prepared,
        publish, record, reply, soa,
    },
    install,
    packet::{A, AAAA, Opt, Query},
};

/// Returns seed and number of replies from the variables SEED and REPLIES; by default a new seed and
/// `replies`.
fn effort(replies: u64) -> (u64, u64) {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().expect("a number"))
    };
    let seed = number("SEED").unwrap_or_else(fastrand::get_seed);
    let replies = number("REPLIES").unwrap_or(replies);
    println!("seed: {seed}, {replies} replies (set SEED and REPLIES to repeat)");
    (seed, replies)
}

#[test]
fn random_replies_equal_userspace() {
    let Some(mut program) = prepared() else {
        return;
    };
    let (seed, replies) = effort(2_000);
    let mut rng = Rng::with_seed(seed);
    let cache = CachedReplies::new();
    let mut hits = 0;
    let (fleet, mut published) = (world(), HashSet::new());
    for round in 0..replies {
        if round % 500 == 499 {
            published.clear();
            program.reset().expect("the maps can be written to");
            install(&mut program, &world());
            program.set_control(|control| control.answer_generation = GENERATION);
        }
        let (query, reply) = random_case(&mut rng);
        let Some(answer) = cache
            .give(&query.bytes(), reply)
            .and_then(|given| given.copy)
        else {
            continue;
        };
        let age = Duration::from_millis(rng.u64(..u64::from(answer.lifetime) + 1) * 1000 + 500);
        // The publisher replaces entries; this test only adds them. Published names come first.
        let key = (
            answer.name.clone(),
            answer.qtype,
            answer.dnssec_ok,
            answer.checking_disabled,
        );
        let is_new = !fleet.published.contains_key(answer.name.as_wire()) && published.insert(key);
        if !is_new {
            continue;
        }
        let Some(arrival) = publish(&mut program, &answer, age) else {
            continue;
        };
        let what = format!("seed {seed}, round {round}");
        for client in clients(&query) {
            hits += compare(&mut program, &cache, &client, arrival, &what);
        }
    }
    println!("{hits} replies compared");
    assert!(
        hits as u64 > 4 * replies,
        "too few of the replies were published for a meaningful test"
    );
}

/// The comparisons of the model with userspace.
#[derive(Debug, Default)]
struct Tally {
    /// Replies whose answer was written as an entry.
    published: u64,
    /// Queries that the model answered.
    answered: u64,
    /// Queries that the model left to userspace.
    passed: u64,
}

#[test]
fn model_replies_equal_userspace() {
    let (seed, replies) = effort(20_000);
    let threads = thread::available_parallelism().map_or(1, usize::from) as u64;
    let share = replies.div_ceil(threads);
    let found: Vec<Tally> = thread::scope(|scope| {
        let run =
            |thread: u64| scope.spawn(move || compare_model(seed.wrapping_add(thread), share));
        let running: Vec<_> = (0..threads).map(run).collect();
        running
            .into_iter()
            .map(|thread| thread.join().expect("a difference, printed above"))
            .collect()
    });
    let sum = |field: fn(&Tally) -> u64| found.iter().map(field).sum::<u64>();
    let (published, answered, passed) = (
        sum(|tally| tally.published),
        sum(|tally| tally.answered),
        sum(|tally| tally.passed),
    );
    println!(
        "{published} entries; {answered} queries answered as by userspace, {passed} left to it"
    );
    assert!(
        published > replies / 4 && answered > published / 2 && passed > published / 10,
        "{found:?}"
    );
}

/// Compares the model with userspace for this many random replies, each for one random client at one
/// random age.
fn compare_model(seed: u64, replies: u64) -> Tally {
    let mut rng = Rng::with_seed(seed);
    let cache = CachedReplies::new();
    let mut tally = Tally::default();
    for round in 0..replies {
        let (query, reply) = random_case(&mut rng);
        let Some(answer) = cache
            .give(&query.bytes(), reply)
            .and_then(|given| given.copy)
        else {
            continue;
        };
        let Some(entry) = encode(&answer, seed, GENERATION) else {
            continue;
        };
        let what = || format!("seed {seed}, round {round}");
        check_entry(&entry, &what);
        tally.published += 1;
        let client = random_client(&mut rng, &query);
        let bytes = client.bytes();
        let Parsed::Query(parsed) = parse(&bytes) else {
            panic!("{}: {bytes:02x?}", what())
        };
        // The last milliseconds of a second, and the end of the lifetime, are as likely as others.
        let lifetime = u64::from(answer.lifetime);
        let second = [0, rng.u64(..=lifetime), lifetime - 1, lifetime][rng.usize(..4)];
        let age = Duration::from_millis(second * 1000 + [0, 1, 500, 999][rng.usize(..4)]);
        let same_question = client.name.eq_ignore_ascii_case(&query.name)
            && (client.qtype, client.qclass) == (query.qtype, 1)
            && (client.flags ^ query.flags) & (CD | RD) == 0
            && dnssec_ok(&client) == dnssec_ok(&query);
        let limit = client.opt.as_ref().map_or(512, |opt| opt.size.max(512));
        let expected = cache
            .reply_at(&bytes, age)
            .filter(|reply| same_question && reply.len() <= usize::from(limit));
        let given = model(&entry, &parsed, age.as_nanos() as u64);
        assert_eq!(given, expected, "{} at {age:?}: {client:02x?}", what());
        match given {
            Some(_) => tally.answered += 1,
            None => tally.passed += 1,
        }
    }
    tally
}

/// Checks the parts of an entry that only the programs use, or on which they rely.
fn check_entry(entry: &[u64], what: &dyn Fn() -> String) {
    let bytes = entry.as_bytes();
    let (header, _) = AnswerHeader::read_from_prefix(bytes).expect("an entry has a header");
    let variant_at = AnswerHeader::variants_offset(header.name_len.into());
    let (variant, _) =
        Variant::read_from_prefix(&bytes[variant_at..]).expect("an entry has a variant");
    let body_at = usize::from(variant.body_at);
    assert_eq!(
        (header.variants, header.wide_limits),
        ([[0, 1]; 3], ANY_LIMIT),
        "{}",
        what()
    );
    assert_eq!(body_at, variant_at + size_of::<Variant>(), "{}", what());
    let body = &bytes[body_at..body_at + usize::from(variant.body_len)];
    let end = body_at + body.len().next_multiple_of(8);
    assert!(
        body.len() <= MAX_BODY_LEN && end == bytes.len(),
        "{}: {header:?}",
        what()
    );
    assert!(
        (1..=header.ttl).contains(&header.lifetime),
        "{}: {header:?}",
        what()
    );
    assert_eq!(variant.body_sum, ones_sum(body), "{}", what());
    let count = usize::from(header.ttl_count);
    assert!(count <= MAX_RECORDS, "{}: {count} records", what());
    let ttls = &header.ttls[..count];
    assert!(
        ttls.iter()
            .all(|&at| body[usize::from(at)..][..4] == [0; 4]),
        "{}: TTLs {ttls:?}",
        what()
    );
    let odd = ttls.iter().filter(|&at| at % 2 == 1).count();
    assert_eq!(usize::from(header.odd_ttls), odd, "{}", what());
}

fn dnssec_ok(query: &Query) -> bool {
    query.opt.as_ref().is_some_and(|opt| opt.flags & DO != 0)
}

/// Returns a query of another client for the same question, or sometimes for a similar one.
fn random_client(rng: &mut Rng, query: &Query) -> Query {
    let mut client = Query {
        id: rng.u16(..),
        ..query.clone()
    };
    client.flags ^= [0, AD][rng.usize(..2)];
    for byte in &mut client.name {
        if byte.is_ascii_alphabetic() && rng.bool() {
            *byte ^= 0x20;
        }
    }
    if dnssec_ok(query) || rng.bool() {
        let size = [512, 1232, 4096, rng.u16(..)][rng.usize(..4)];
        client.opt = Some(Opt {
            flags: if dnssec_ok(query) { DO } else { 0 },
            ..Opt::new(size)
        });
    } else {
        client.opt = None;
    }
    match rng.u8(..48) {
        0 => client.flags ^= CD,
        1 => client.flags ^= RD,
        2 => client.qtype ^= 1 << rng.u8(..4),
        3 => client.qclass = 3,
        4 => {
            client.opt = Some(Opt {
                flags: DO,
                ..Opt::new(1232)
            })
        }
        5 => {
            let place = 1 + rng.usize(..usize::from(client.name[0]));
            client.name[place] = rng.lowercase() as u8;
        }
        _ => {}
    }
    client
}

/// Returns a query and a reply that is mostly sound.
fn random_case(rng: &mut Rng) -> (Query, Vec<u8>) {
    let mut name = Vec::new();
    for _ in 0..rng.usize(1..5) {
        let length = rng.u8(1..20);
        name.push(length);
        name.extend(iter::repeat_with(|| rng.lowercase() as u8).take(length.into()));
    }
    name.push(0);
    let mut query = Query {
        name,
        ..Query::new("", [A, AAAA, 16, 65, 257, 5, 15][rng.usize(..7)])
    };
    query.flags |= [0, CD][rng.usize(..2)];
    if rng.bool() {
        query.opt = Some(Opt {
            flags: [0, DO][rng.usize(..2)],
            ..Opt::new(1232)
        });
    }
    let parent = 13 + query.name[0];
    let ttl = [rng.u32(5..120), rng.u32(..), 0][[0, 0, 0, 0, 1, 2][rng.usize(..6)]];
    let mut some = |most: usize| -> Vec<Record> {
        (0..rng.usize(..most))
            .map(|_| {
                let mut record = match rng.u8(..7) {
                    0 => record(1, ttl, &[10, 0, 0, rng.u8(..)]),
                    1 => record(28, ttl, &[rng.u8(..); 16]),
                    2 => {
                        let text = vec![b'x'; rng.usize(..60)];
                        record(16, ttl, &[&[text.len() as u8], &text[..]].concat())
                    }
                    // An alias, a mail server and a service: names in data, compressed or not.
                    3 => record(5, ttl, &[1, b'a', 0xc0, 12]),
                    4 => record(15, ttl, &[0, 10, 0xc0, parent]),
                    5 => record(33, ttl, &[0, 1, 0, 2, 0, 53, 1, b'b', 0]),
                    // A type without names in its data.
                    _ => record(65_280, ttl, &vec![rng.u8(..); rng.usize(..40)]),
                };
                match rng.u8(..16) {
                    0 => record.owner = vec![0],
                    1 => record.owner = vec![1, b'c', 0xc0, parent],
                    2 => record.owner = vec![0xc0, parent],
                    _ => debug_assert_eq!(record.owner, QUESTION),
                }
                record
            })
            .collect()
    };
    let (answers, additional) = (some(20), some(3));
    let authority = if answers.is_empty() {
        vec![soa(ttl, 60)]
    } else {
        some(3)
    };
    let flags = ANSWER | [0, 0, AD, AD, NXDOMAIN, 0x0400, 2][rng.usize(..7)];
    let mut bytes = reply(&query, flags, [&answers, &authority, &additional]);
    if rng.u8(..5) == 0 {
        for _ in 0..rng.u8(1..4) {
            let place = rng.usize(..bytes.len());
            bytes[place] = rng.u8(..);
        }
    }
    match rng.u8(..64) {
        0 => bytes.truncate(rng.usize(..bytes.len())),
        1 => bytes.extend([0; 3]),
        _ => {}
    }
    (query, bytes)
}
