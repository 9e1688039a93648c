//! Replies from forwarded answers: the same bytes as from the cache in userspace, at every age.

use std::{iter, net::IpAddr, time::Duration};

use dns_common::{
    control::Control,
    counters::{CpuCounters, Outcome, QueryKind},
    forwarded::{AnswerHeader, QueryKey},
    name::hash_name,
};
use dns_core::wire::ForwardedAnswer;
use dns_kit::clock::BootInstant;
use dns_upstream::fuzzing::CachedReplies;
use whole_system_tests::{
    checksum::{checksum, pseudo},
    program::{Hook, Program, TC_ACT_REDIRECT, XDP_TX},
};
use zerocopy::{FromBytes as _, IntoBytes as _};

use crate::{
    fixtures::world,
    install, load, local_replies,
    packet::{A, AAAA, CLIENT, Datagram, Opt, Query, wire},
};

/// The hooks with a program for forwarded answers.
pub(super) const FORWARDING: [Hook; 2] = [Hook::Xdp, Hook::Tc];

pub(super) const GENERATION: u64 = 5;
const SECOND: Duration = Duration::from_secs(1);

/// Flags of a query: RD, AD, CD.
pub(super) const RD: u16 = 0x0100;
pub(super) const AD: u16 = 0x0020;
pub(super) const CD: u16 = 0x0010;
/// DO in an OPT.
pub(super) const DO: u16 = 0x8000;

/// One record of a reply, without its TTL.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) owner: Vec<u8>,
    rtype: u16,
    ttl: u32,
    data: Vec<u8>,
}

/// A pointer to the question's name.
pub(super) const QUESTION: &[u8] = &[0xc0, 12];

pub(super) fn record(rtype: u16, ttl: u32, data: &[u8]) -> Record {
    Record {
        owner: QUESTION.to_vec(),
        rtype,
        ttl,
        data: data.to_vec(),
    }
}

pub(super) fn soa(ttl: u32, minimum: u32) -> Record {
    let numbers: Vec<u8> = [7, 60, 60, 60, minimum]
        .into_iter()
        .flat_map(u32::to_be_bytes)
        .collect();
    record(6, ttl, &[&[1, b'a', 0xc0, 12, 0], &numbers[..]].concat())
}

/// Returns a recursor's reply to `query` with these flags and sections.
pub(super) fn reply(query: &Query, flags: u16, sections: [&[Record]; 3]) -> Vec<u8> {
    let mut out = query.id.to_be_bytes().to_vec();
    out.extend((flags | query.flags & (RD | CD)).to_be_bytes());
    out.extend([0, 1]);
    for section in sections {
        out.extend((section.len() as u16).to_be_bytes());
    }
    out.extend(&query.name);
    out.extend(query.qtype.to_be_bytes());
    out.extend([0, 1]);
    for record in sections.into_iter().flatten() {
        out.extend(&record.owner);
        out.extend(record.rtype.to_be_bytes());
        out.extend([0, 1]);
        out.extend(record.ttl.to_be_bytes());
        out.extend((record.data.len() as u16).to_be_bytes());
        out.extend(&record.data);
    }
    out
}

/// QR and RA; with AD the answer was validated.
pub(super) const ANSWER: u16 = 0x8080;
pub(super) const NXDOMAIN: u16 = 3;

/// Returns queries and replies of every kind that is kept: name, type, flags, DO, reply.
fn cases() -> Vec<(Query, Vec<u8>)> {
    let question = |name: &str, qtype| Query::new(name, qtype);
    let dnssec = |query: Query| {
        query.opt(Opt {
            flags: DO,
            ..Opt::new(1232)
        })
    };
    let mut cases = Vec::new();
    let mut add = |query: Query, flags, sections: [&[Record]; 3]| {
        let bytes = reply(&query, flags, sections);
        cases.push((query, bytes));
    };
    for count in [1, 2, 5, 24] {
        let records: Vec<Record> = (0..count)
            .map(|i| record(1, 300 + u32::from(i), &[10, 0, 0, i]))
            .collect();
        add(question("www.example.com", A), ANSWER, [&records, &[], &[]]);
    }
    add(
        question("v6.example.com", AAAA),
        ANSWER | AD,
        [&[record(28, 3600, &[0xfd; 16])], &[], &[]],
    );
    // Texts of odd lengths move the next TTL to an odd offset.
    let texts: Vec<Record> = (0..6u8)
        .map(|len| {
            record(
                16,
                60,
                &[&[len], &vec![b'x'; usize::from(len)][..]].concat(),
            )
        })
        .collect();
    add(question("txt.example.com", 16), ANSWER, [&texts, &[], &[]]);
    // CNAME to "a" below the question's zone, whose name begins 4 bytes further.
    let alias = record(5, 30, &[1, b'a', 0xc0, 16]);
    let target = 12 + 17 + 4 + 2 + 10;
    let address = Record {
        owner: vec![0xc0, target as u8],
        ..record(1, 86_400, &[192, 0, 2, 1])
    };
    add(
        question("www.example.com", A),
        ANSWER,
        [&[alias, address], &[], &[]],
    );
    add(
        question("gone.example.com", A),
        ANSWER | NXDOMAIN,
        [&[], &[soa(900, 30)], &[]],
    );
    add(
        question("empty.example.com", 65),
        ANSWER,
        [&[], &[soa(30, 900)], &[]],
    );
    add(
        question("net", 2),
        ANSWER,
        [&[record(2, 518_400, &[1, b'a', 0])], &[], &[]],
    );
    let signature = record(46, 300, &[&[0; 18], &[0][..], &[7; 63]].concat());
    let signed = [record(1, 300, &[10, 0, 0, 1]), signature];
    add(
        dnssec(question("signed.example.com", A)),
        ANSWER | AD,
        [&signed, &[], &[]],
    );
    add(
        Query {
            flags: RD | CD,
            ..dnssec(question("signed.example.com", A))
        },
        ANSWER,
        [&signed, &[], &[record(1, 5, &[1, 2, 3, 4])]],
    );
    cases
}

/// Returns queries with the same answer as `query`: other ids, letter case, OPT and AD.
pub(super) fn clients(query: &Query) -> Vec<Query> {
    let dnssec_ok = query.opt.as_ref().is_some_and(|opt| opt.flags & DO != 0);
    let opt = |size| Opt {
        flags: if dnssec_ok { DO } else { 0 },
        ..Opt::new(size)
    };
    let mut opts = vec![Some(opt(512)), Some(opt(1232)), Some(opt(4096))];
    if !dnssec_ok {
        opts.push(None);
    }
    let mut clients = Vec::new();
    for opt in opts {
        for flags in [query.flags, query.flags | AD] {
            let name = if flags & AD == 0 {
                query.name.clone()
            } else {
                query.name.to_ascii_uppercase()
            };
            clients.push(Query {
                id: 0xbeef,
                flags,
                name,
                opt: opt.clone(),
                ..query.clone()
            });
        }
    }
    clients
}

/// Publishes an answer as if it had arrived `age` ago, and returns the time of its arrival; `None` if it is
/// left to userspace.
pub(super) fn publish(
    program: &mut Program,
    answer: &ForwardedAnswer,
    age: Duration,
) -> Option<Arrival> {
    let seed = program.control().hash_seed;
    // Wraps, as the program's subtraction does, if the machine was started after the answer "arrived".
    let since_ns = BootInstant::now()
        .kernel_ns()
        .wrapping_sub(age.as_nanos() as u64);
    let answer = ForwardedAnswer {
        since_ns,
        ..answer.clone()
    };
    let entry = dns_fastpath::forwarded::encode(&answer, seed, GENERATION)?;
    program
        .publish_answer(entry.as_bytes())
        .expect("the test's store has room");
    Some(Arrival(since_ns))
}

/// The time at which an answer arrived, by `CLOCK_BOOTTIME`.
#[derive(Clone, Copy)]
pub(super) struct Arrival(u64);

impl Arrival {
    fn age(self) -> Duration {
        Duration::from_nanos(BootInstant::now().kernel_ns().wrapping_sub(self.0))
    }
}

/// Returns the replies from userspace's cache for every second from one age to another, which fit the
/// client. Any number of seconds may pass while a program runs on a busy machine.
fn expected(
    cache: &CachedReplies,
    client: &Query,
    from: Duration,
    to: Duration,
) -> Vec<Option<Vec<u8>>> {
    let limit = client.opt.as_ref().map_or(512, |opt| opt.size.max(512));
    let message = client.bytes();
    let seconds = from.as_secs()..=to.as_secs();
    let replies = seconds.map(|second| cache.reply_at(&message, Duration::from_secs(second)));
    replies
        .map(|reply| reply.filter(|reply| reply.len() <= usize::from(limit)))
        .collect()
}

/// Returns a query for type TXT whose reply has `len` bytes with OPT, and that reply without it.
pub(super) fn of_length(zone: &str, flags: u16, len: usize) -> (Query, Vec<u8>) {
    const OPT_LEN: usize = 11;
    // The letters tell names of different lengths apart.
    let query = Query::new(&format!("n{len}.{zone}"), 16).opt(Opt::new(4096));
    let empty = reply(&query, flags, [&[record(16, 300, &[])], &[], &[]]);
    let mut left = len - empty.len() - OPT_LEN;
    let mut text = Vec::new();
    while left > 0 {
        // A string has at least its length, so a single byte must never be left over.
        let taken = if left == 257 { 128 } else { left.min(256) };
        text.push((taken - 1) as u8);
        text.extend(iter::repeat_n(b'x', taken - 1));
        left -= taken;
    }
    let message = reply(&query, flags, [&[record(16, 300, &text)], &[], &[]]);
    assert_eq!(message.len() + OPT_LEN, len);
    (query, message)
}

/// Publishes a forwarded answer of `len` bytes with OPT; returns a query for it.
pub(super) fn publish_of_length(program: &mut Program, len: usize) -> Query {
    let (query, message) = of_length("example.com", ANSWER, len);
    let given = CachedReplies::new().give(&query.bytes(), message);
    let answer = given.expect("a sound reply").copy.expect("cached");
    publish(program, &answer, Duration::ZERO).expect("the programs can give it");
    query
}

/// Prepares the program; `None` where BPF is not available.
pub(super) fn prepared() -> Option<parking_lot::MutexGuard<'static, Program>> {
    let mut program = load()?;
    install(&mut program, &world());
    program.set_control(|control| control.answer_generation = GENERATION);
    Some(program)
}

/// Runs the program on a query; returns the DNS message of its reply, `None` if the query was passed
/// unchanged, with the outcome.
pub(super) fn run(
    program: &mut Program,
    hook: Hook,
    query: &Query,
    v6: bool,
) -> (Option<Vec<u8>>, Outcome) {
    run_message(program, hook, query.bytes(), v6, None)
}

/// Like [`run`], for any message, in a frame of a VLAN if one is given.
pub(super) fn run_message(
    program: &mut Program,
    hook: Hook,
    message: Vec<u8>,
    v6: bool,
    vlan: Option<u16>,
) -> (Option<Vec<u8>>, Outcome) {
    let mut datagram = if v6 {
        Datagram::v6(message)
    } else {
        Datagram::v4(message)
    };
    datagram.tags = vlan.map(|vlan| (0x8100, vlan)).into_iter().collect();
    let frame = datagram.frame();
    let (run, outcome) = program.run_counted(hook, &frame).expect("the program runs");
    if run.verdict
        != if hook.is_xdp() {
            XDP_TX
        } else {
            TC_ACT_REDIRECT
        }
    {
        assert_eq!(
            run.packet, frame,
            "{outcome:?} at {hook:?}: passed, but changed"
        );
        return (None, outcome);
    }
    let ip_at = 14 + 4 * datagram.tags.len();
    assert_eq!(run.packet[12..ip_at], frame[12..ip_at], "in the same VLAN");
    let ip = &run.packet[ip_at..];
    let (header, udp) = ip.split_at(if v6 { 40 } else { 20 });
    assert_eq!(run.packet[..6], frame[6..12], "sent back");
    assert_eq!(u16::from_be_bytes([udp[4], udp[5]]) as usize, udp.len());
    if v6 {
        let address =
            |at: usize| IpAddr::from(<[u8; 16]>::try_from(&header[at..at + 16]).expect("16 bytes"));
        let head = pseudo(address(8), address(24), udp.len() as u16);
        assert_eq!(checksum(&[&head, udp]), 0, "checksum of {udp:02x?}");
    } else {
        assert_eq!(checksum(&[header]), 0);
        assert_eq!(
            u16::from_be_bytes([header[2], header[3]]) as usize,
            ip.len()
        );
        assert_eq!(
            (
                IpAddr::from([header[16], header[17], header[18], header[19]]),
                udp[6..8].to_vec()
            ),
            (CLIENT, vec![0, 0])
        );
    }
    (Some(udp[8..].to_vec()), outcome)
}

/// Compares the program with the cache in userspace for one client. Returns the number of replies.
pub(super) fn compare(
    program: &mut Program,
    cache: &CachedReplies,
    client: &Query,
    arrival: Arrival,
    what: &str,
) -> usize {
    let mut hits = 0;
    for hook in FORWARDING {
        for v6 in [false, true] {
            let before = arrival.age();
            let (found, outcome) = run(program, hook, client, v6);
            let expected = expected(cache, client, before, arrival.age());
            assert!(
                expected.contains(&found),
                "{what}, {outcome:?} at {hook:?}, IPv6 {v6}, {before:?}: {client:02x?}\n{found:02x?} is none of \
                 {expected:02x?}"
            );
            assert_eq!(
                found.is_some(),
                outcome == Outcome::HitForwarded,
                "{what}: {outcome:?}"
            );
            hits += usize::from(found.is_some());
        }
    }
    hits
}

#[test]
fn replies_equal_userspace() {
    let Some(mut program) = prepared() else {
        return;
    };
    for (number, (query, reply)) in cases().into_iter().enumerate() {
        let cache = CachedReplies::new();
        let given = cache.give(&query.bytes(), reply).expect("a sound reply");
        let answer = given
            .copy
            .unwrap_or_else(|| panic!("case {number} is cached"));
        let lifetime = Duration::from_secs(answer.lifetime.into());
        let half = SECOND / 2;
        for age in [
            half,
            SECOND + half,
            lifetime / 2 + half,
            lifetime - half,
            lifetime + half,
        ] {
            let arrival = publish(&mut program, &answer, age);
            let arrival = arrival.unwrap_or_else(|| panic!("case {number} is published"));
            let what = format!("case {number}");
            let hits: usize = clients(&query)
                .iter()
                .map(|client| compare(&mut program, &cache, client, arrival, &what))
                .sum();
            // The clock continues to run.
            if arrival.age() < lifetime || age >= lifetime {
                assert_eq!(hits > 0, age < lifetime, "case {number} at {age:?}");
            }
        }
    }
}

#[test]
fn ttl_counts_down_for_an_hour() {
    let Some(mut program) = prepared() else {
        return;
    };
    let query = Query::new("www.example.com", A);
    let cache = CachedReplies::new();
    let bytes = reply(
        &query,
        ANSWER,
        [&[record(1, 3600, &[10, 0, 0, 1])], &[], &[]],
    );
    let answer = cache
        .give(&query.bytes(), bytes)
        .expect("a sound reply")
        .copy
        .expect("cached");
    for second in 0..=3600 {
        let age = SECOND * second + SECOND / 2;
        let arrival = publish(&mut program, &answer, age).expect("the programs can give it");
        let (found, outcome) = run(&mut program, Hook::Tc, &query, false);
        let expected = expected(&cache, &query, age, arrival.age());
        assert!(
            expected.contains(&found),
            "after {second} s: {outcome:?}, {found:02x?} is none of {expected:02x?}"
        );
        assert_eq!(outcome == Outcome::AnswerExpired, found.is_none());
        assert!(second < 3600 || found.is_none(), "expired");
    }
}

#[test]
fn unusual_queries_go_up() {
    let Some(mut program) = prepared() else {
        return;
    };
    let query = Query::new("www.example.com", A);
    let cache = CachedReplies::new();
    let bytes = reply(
        &query,
        ANSWER,
        [&[record(1, 300, &[10, 0, 0, 1])], &[], &[]],
    );
    let answer = cache
        .give(&query.bytes(), bytes)
        .expect("a sound reply")
        .copy
        .expect("cached");
    publish(&mut program, &answer, SECOND).expect("the programs can give it");
    let cookie = Opt::with_options(1232, &[0, 10, 0, 2, 1, 2]);
    let others = [
        (
            "another type",
            Query {
                qtype: AAAA,
                ..query.clone()
            },
        ),
        (
            "no RD",
            Query {
                flags: 0,
                ..query.clone()
            },
        ),
        (
            "CD",
            Query {
                flags: RD | CD,
                ..query.clone()
            },
        ),
        (
            "DO",
            query.clone().opt(Opt {
                flags: DO,
                ..Opt::new(1232)
            }),
        ),
        ("an EDNS option", query.clone().opt(cookie)),
        (
            "another name",
            Query {
                name: wire("wwx.example.com"),
                ..query.clone()
            },
        ),
        (
            "another class",
            Query {
                qclass: 3,
                ..query.clone()
            },
        ),
    ];
    for hook in FORWARDING {
        assert!(run(&mut program, hook, &query, false).0.is_some());
        for (what, other) in &others {
            assert_eq!(
                run(&mut program, hook, other, false).0,
                None,
                "{what} at {hook:?}"
            );
        }
    }
    type Change = fn(&mut Control);
    let changes: [(&str, Change); 3] = [
        ("another generation", |control| {
            control.answer_generation = GENERATION + 1
        }),
        ("no generation", |control| control.answer_generation = 0),
        ("a lost lease", |control| {
            (control.answer_generation, control.lease_deadline_ns) = (GENERATION, 1);
        }),
    ];
    for (what, change) in changes {
        program.set_control(change);
        for hook in FORWARDING {
            assert_eq!(
                run(&mut program, hook, &query, false).0,
                None,
                "{what} at {hook:?}"
            );
        }
    }
}

/// An answer whose hash is another question's is not given.
#[test]
fn hash_collisions_of_answers_go_up() {
    let Some(mut program) = prepared() else {
        return;
    };
    let seed = program.control().hash_seed;
    let stored = Query::new("www.example.com", A);
    let bytes = reply(
        &stored,
        ANSWER,
        [&[record(1, 300, &[10, 0, 0, 1])], &[], &[]],
    );
    let given = CachedReplies::new().give(&stored.bytes(), bytes);
    let answer = ForwardedAnswer {
        since_ns: BootInstant::now().kernel_ns(),
        ..given.expect("a sound reply").copy.expect("cached")
    };
    let dnssec = Opt {
        flags: DO,
        ..Opt::new(1232)
    };
    let asked = [
        Query {
            qtype: AAAA,
            ..stored.clone()
        },
        Query {
            flags: RD | CD,
            ..stored.clone()
        },
        stored.clone().opt(dnssec),
        Query {
            name: wire("wwx.example.com"),
            ..stored.clone()
        },
        Query {
            name: wire("www.example.org"),
            ..stored.clone()
        },
        // One that begins with the other.
        Query {
            name: wire("www.example.comm"),
            ..stored.clone()
        },
    ];
    for asked in asked {
        let mut entry = dns_fastpath::forwarded::encode(&answer, seed, GENERATION)
            .expect("the programs can give it");
        let (header, _) =
            AnswerHeader::mut_from_prefix(entry.as_mut_bytes()).expect("an entry has a header");
        let dnssec_ok = asked.opt.is_some();
        let key = QueryKey::new(asked.qtype, dnssec_ok, asked.flags & CD != 0);
        header.hash = key.hash(hash_name(seed, &asked.name));
        program
            .publish_answer(entry.as_bytes())
            .expect("the test's store has room");
        for hook in FORWARDING {
            let (reply, outcome) = run(&mut program, hook, &asked, false);
            assert_eq!(
                (reply, outcome),
                (None, Outcome::Collision),
                "{asked:02x?} at {hook:?}"
            );
        }
    }
}

#[test]
fn whole_answers_are_counted() {
    let Some(mut program) = prepared() else {
        return;
    };
    const LEN: usize = 300;
    let forwarded = publish_of_length(&mut program, LEN);
    let local = local_replies::publish_of_length(&mut program, LEN);
    for query in [forwarded, local] {
        for hook in FORWARDING {
            let before = program.counters();
            run(&mut program, hook, &query, false);
            let after = program.counters();
            let more = |counter: fn(&CpuCounters) -> u64| counter(&after) - counter(&before);
            let query_len = query.bytes().len() as u64;
            assert_eq!(more(|counters| counters.query_bytes), query_len, "{hook:?}");
            assert_eq!(
                more(|counters| counters.reply_bytes),
                LEN as u64,
                "{hook:?}"
            );
            let hits = more(|counters| counters.interface_hits.iter().sum());
            let replies = more(|counters| counters.replies[QueryKind::Other as usize][0]);
            assert_eq!((hits, replies), (1, 1), "{hook:?}");
        }
    }
}

#[test]
fn long_answers_go_up() {
    let Some(mut program) = prepared() else {
        return;
    };
    // The longest body follows the shortest name; with longer ones, messages end at its length.
    for len in [100, 549, 1232, 1233] {
        let forwarded = publish_of_length(&mut program, len);
        let local = local_replies::publish_of_length(&mut program, len);
        for (query, hit) in [
            (forwarded, Outcome::HitForwarded),
            (local, Outcome::HitOther),
        ] {
            for (most, outcome) in [
                (0, hit),
                (len, hit),
                (len - 1, Outcome::NoRoom),
                (4096, hit),
            ] {
                program.set_control(|control| control.max_reply = most as u32);
                for hook in FORWARDING {
                    for v6 in [false, true] {
                        let (reply, found) = run(&mut program, hook, &query, v6);
                        let what = format!("{len} bytes, at most {most}, at {hook:?}, IPv6 {v6}");
                        assert_eq!(found, outcome, "{what}");
                        let is_whole = reply.is_none_or(|reply| reply.len() == len);
                        assert!(is_whole, "{what}");
                    }
                }
            }
            program.set_control(|control| control.max_reply = 0);
            for (size, is_answered) in [(len, true), (len - 1, false)] {
                // Less than 512 bytes count as 512.
                let is_answered = is_answered || len <= 512;
                let client = query.clone().opt(Opt::new(size as u16));
                for hook in FORWARDING {
                    let (reply, found) = run(&mut program, hook, &client, false);
                    let what = format!("{len} bytes for {size} at {hook:?}: {found:?}");
                    assert_eq!(reply.is_some(), is_answered, "{what}");
                }
            }
        }
    }
}

#[test]
fn published_names_come_first() {
    let Some(mut program) = prepared() else {
        return;
    };
    let query = Query::new("v4-1.bosh", A);
    let cache = CachedReplies::new();
    let bytes = reply(
        &query,
        ANSWER,
        [&[record(1, 300, &[192, 0, 2, 1])], &[], &[]],
    );
    let answer = cache
        .give(&query.bytes(), bytes)
        .expect("a sound reply")
        .copy
        .expect("cached");
    publish(&mut program, &answer, SECOND).expect("the programs can give it");
    for hook in FORWARDING {
        assert_eq!(run(&mut program, hook, &query, false).1, Outcome::Hit);
    }
}
