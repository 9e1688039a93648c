//! Tests of single answers: which are kept, for how long, and what clients get at each age.

use parking_lot::Mutex;

use super::*;
use crate::tests::{form, parsed, query};
use dns_core::name::{Name, NameRef};

const NAME: &[u8] = b"\x02ok\x07example\0";
const A: u16 = 1;
const CNAME: u16 = 5;
const SOA: u16 = 6;
const TXT: u16 = 16;

/// One record: section, owner, type, TTL and data.
type Record<'a> = (usize, &'a [u8], u16, u32, &'a [u8]);

/// A pointer to the question's name.
const SAME: &[u8] = &message::QUESTION_NAME;
const ADDRESS: Record<'_> = (0, SAME, A, 300, &[192, 0, 2, 1]);
const ALIAS: Record<'_> = (0, SAME, CNAME, 300, b"\x01a\0");

/// Returns a record of the address with this TTL.
fn address(ttl: u32) -> Record<'static> {
    (0, SAME, A, ttl, &[192, 0, 2, 1])
}

/// Returns the data of an SOA with this minimum.
fn soa(minimum: u32) -> Vec<u8> {
    let mut data = b"\0\0".to_vec();
    for number in [7, 3600, 600, 86_400, minimum] {
        data.extend_from_slice(&number.to_be_bytes());
    }
    data
}

/// Returns a reply to `question` with these records, in the order of their sections.
fn reply(question: &[u8], rcode: u8, records: &[Record<'_>]) -> Vec<u8> {
    let mut reply = question.to_vec();
    reply[2..4].copy_from_slice(&[0x81, 0x80 | rcode]);
    for (section, owner, rtype, ttl, data) in records {
        reply.extend_from_slice(owner);
        reply.extend_from_slice(&rtype.to_be_bytes());
        reply.extend_from_slice(&[0, 1]);
        reply.extend_from_slice(&ttl.to_be_bytes());
        reply.extend_from_slice(&(data.len() as u16).to_be_bytes());
        reply.extend_from_slice(data);
        reply[7 + 2 * section] += 1;
    }
    reply
}

/// Returns a query with an OPT of 1232 bytes.
fn with_opt(mut query: Vec<u8>, dnssec_ok: bool) -> Vec<u8> {
    message::append_opt(&mut query, 1232);
    let flags = query.len() - 4;
    query[flags] = if dnssec_ok { 0x80 } else { 0 };
    query
}

const CONFIG: CacheConfig = CacheConfig {
    enabled: true,
    max_entries: 1000,
    max_bytes: 1 << 20,
    serve_stale: None,
};

fn cache(compat: Compat) -> Cache {
    Cache::new(&CONFIG, form(compat), compat)
}

/// Gives a cache the reply to a query; returns the reply for the client.
fn admit(cache: &Cache, query: &[u8], reply: &[u8]) -> Vec<u8> {
    let query = parsed(query);
    let mut reply = reply.to_vec();
    let mut index = MessageIndex::of(&reply).unwrap();
    let key = cache.key(&query).unwrap();
    let recursor = Some("192.0.2.53:53".into());
    let parts = (&mut reply, &mut index);
    cache.admit(&key, &query, parts, recursor, cache.generation());
    reply
}

/// Returns an entry for the reply, fresh for `lifetime` and stale for an hour after that.
fn entry(reply: Vec<u8>, lifetime: Duration) -> Entry {
    let index = MessageIndex::of(&reply).unwrap();
    let places = WrittenPlaces::of(&reply, &index, NAME).unwrap();
    Entry {
        message: reply.into(),
        ttls: places.ttls,
        owners: places.owners,
        ttl: 300,
        since: BootInstant::now(),
        lifetime,
        stale: Duration::from_secs(3600),
        denial: false,
        recursor: None,
        no_recheck_before_ms: AtomicU64::new(0),
    }
}

/// Stores an entry under the key of a query, and waits until it has an age.
fn store(cache: &Cache, query: &Query<'_>, entry: Entry) {
    let now = entry.since;
    let terms = store::EntryTerms {
        weight: 1000,
        until: now + entry.lifetime + entry.stale,
        denial: entry.denial,
    };
    let key = cache.key(query).unwrap();
    let mirror = Mirrored(cache.interfaces());
    let generation = cache.generation();
    cache
        .store
        .insert(&key, entry, terms, now, generation, &mirror);
    while now.elapsed().is_zero() {}
}

/// Returns TTL, lifetime and denial of a cached answer; `None` if it is not cached.
fn terms(
    qtype: u16,
    rcode: u8,
    records: &[Record<'_>],
    compat: Compat,
) -> Option<(u32, u32, bool)> {
    let question = query(NAME, qtype);
    let reply = reply(&question, rcode, records);
    let index = MessageIndex::of(&reply).unwrap();
    let terms = Terms::of(&parsed(&question), &reply, &index, compat)?;
    Some((terms.ttl, terms.lifetime, terms.denial))
}

#[test]
fn lifetimes_of_data_have_bounds() {
    for (ttl, expected) in [
        (1, Some(5)),
        (4, Some(5)),
        (5, Some(5)),
        (6, Some(6)),
        (3599, Some(3599)),
        (3600, Some(3600)),
        (3601, Some(3600)),
        (0x7fff_ffff, Some(3600)),
        // The highest bit makes it 0 (RFC 2181, section 8).
        (0x8000_0000, None),
        (0, None),
    ] {
        let expected = expected.map(|ttl| (ttl, ttl, false));
        let found = terms(A, message::NOERROR, &[address(ttl)], Compat::default());
        assert_eq!(found, expected, "{ttl}");
    }
    let zero = Compat {
        cache_zero_ttl: true,
        ..Compat::default()
    };
    for ttl in [0, 0x8000_0000] {
        let found = terms(A, message::NOERROR, &[address(ttl)], zero);
        assert_eq!(found, Some((5, 5, false)), "{ttl}");
    }
}

#[test]
fn every_record_limits_the_ttl() {
    let ns: Record<'_> = (1, SAME, 2, 60, b"\0");
    let glue: Record<'_> = (2, b"\0", A, 40, &[192, 0, 2, 2]);
    let opt: Record<'_> = (2, b"\0", message::TYPE_OPT, 0, b"");
    let text: Record<'_> = (0, SAME, TXT, 50, b"\0");
    for (qtype, records, expected) in [
        (A, &[ADDRESS, ns][..], Some((60, 60, false))),
        (A, &[ADDRESS, address(70), ns, glue], Some((40, 40, false))),
        // The TTL field of an OPT is none.
        (A, &[ADDRESS, opt], Some((300, 300, false))),
        (255, &[text], Some((50, 50, false))),
        (TXT, &[text], Some((50, 50, false))),
        // Other types, and other sections, are no data.
        (A, &[text], Some((5, 5, true))),
        (A, &[glue], Some((5, 5, true))),
        (255, &[glue], Some((5, 5, true))),
    ] {
        let found = terms(qtype, message::NOERROR, records, Compat::default());
        assert_eq!(found, expected, "{qtype} {records:?}");
    }
}

#[test]
fn denials_follow_the_soa() {
    let zero = Compat {
        cache_zero_ttl: true,
        ..Compat::default()
    };
    let default = Compat::default();
    for (ttl, minimum, nodata, nxdomain) in [
        (900, 120, Some((900, 120, true)), Some((120, 120, true))),
        (60, 300, Some((60, 60, true)), Some((60, 60, true))),
        (900, 1, Some((900, 5, true)), Some((5, 5, true))),
        (900, 6, Some((900, 6, true)), Some((6, 6, true))),
        (1, 900, Some((5, 5, true)), Some((5, 5, true))),
        (
            1799,
            9000,
            Some((1799, 1799, true)),
            Some((1799, 1799, true)),
        ),
        (
            1801,
            9000,
            Some((1800, 1800, true)),
            Some((1800, 1800, true)),
        ),
        (
            9000,
            1801,
            Some((1800, 1800, true)),
            Some((1800, 1800, true)),
        ),
        (900, 0, None, None),
        (0, 900, None, None),
    ] {
        let data = soa(minimum);
        let denial: Record<'_> = (1, b"\0", SOA, ttl, &data);
        let found = terms(A, message::NOERROR, &[denial], default);
        assert_eq!(found, nodata, "NODATA {ttl} {minimum}");
        let found = terms(A, message::NXDOMAIN, &[denial], default);
        assert_eq!(found, nxdomain, "NXDOMAIN {ttl} {minimum}");
        // Behind an alias, both limit the TTL.
        let behind_alias = nxdomain.map(|(ttl, _, _)| (ttl.min(300), ttl.min(300), true));
        for rcode in [message::NOERROR, message::NXDOMAIN] {
            let found = terms(A, rcode, &[ALIAS, denial], default);
            assert_eq!(found, behind_alias, "alias {rcode} {ttl} {minimum}");
        }
    }
    let data = soa(0);
    let denial: Record<'_> = (1, b"\0", SOA, 900, &data);
    let found = terms(A, message::NOERROR, &[denial], zero);
    assert_eq!(found, Some((900, 5, true)));
    let found = terms(A, message::NXDOMAIN, &[denial], zero);
    assert_eq!(found, Some((5, 5, true)));
    // Beside data, the minimum says nothing.
    let found = terms(A, message::NOERROR, &[ADDRESS, denial], default);
    assert_eq!(found, Some((300, 300, false)));
    // An SOA among the answers is data or nothing, and no denial's.
    let answer: Record<'_> = (0, SAME, SOA, 900, &data);
    let found = terms(SOA, message::NOERROR, &[answer], default);
    assert_eq!(found, Some((900, 900, false)));
    let found = terms(A, message::NOERROR, &[answer], default);
    assert_eq!(found, Some((5, 5, true)));
    let found = terms(A, message::NXDOMAIN, &[answer], default);
    assert_eq!(found, None);
}

#[test]
fn failures_are_not_answers() {
    for (rcode, expected) in [
        (message::NOERROR, Some((5, 5, true))),
        (message::FORMERR, None),
        // Of an HTTP handler.
        (message::SERVFAIL, Some((5, 5, true))),
        (message::NXDOMAIN, None),
        (message::NOTIMP, None),
        (message::REFUSED, None),
        (6, None),
    ] {
        assert_eq!(terms(A, rcode, &[], Compat::default()), expected, "{rcode}");
    }
}

#[test]
fn unusable_replies_are_not_kept() {
    let asked = query(NAME, A);
    let good = reply(&asked, message::NOERROR, &[ADDRESS]);
    let mut other_name = good.clone();
    other_name[13] = b'x';
    let mut other_type = good.clone();
    other_type[12 + NAME.len() + 1] = 2;
    let mut other_case = good.clone();
    other_case[13] = b'O';
    let mut truncated = good.clone();
    truncated[2] |= 0x02;
    let mut notify = good.clone();
    notify[2] |= 4 << 3;
    let mut questionless = good[..12].to_vec();
    questionless[5] = 0;
    questionless[7] = 0;
    for (reply, is_kept) in [
        (good, true),
        (other_case, true),
        (other_name, false),
        (other_type, false),
        (truncated, false),
        (notify, false),
        (questionless, false),
    ] {
        let index = MessageIndex::of(&reply).unwrap();
        let terms = Terms::of(&parsed(&asked), &reply, &index, Compat::default());
        assert_eq!(terms.is_some(), is_kept, "{reply:02x?}");
    }
}

#[test]
fn places_are_found_in_the_message() {
    let asked = query(NAME, A);
    let records: &[Record<'_>] = &[
        ADDRESS,
        (0, b"\x02OK\x07examplE\0", A, 300, &[192, 0, 2, 2]),
        (1, b"\x02no\x07example\0", 2, 300, b"\0"),
        (2, b"\0", A, 300, &[192, 0, 2, 3]),
    ];
    let reply = reply(&asked, message::NOERROR, records);
    let index = MessageIndex::of(&reply).unwrap();
    let places = WrittenPlaces::of(&reply, &index, NAME).unwrap();
    // The question ends at 28, a pointer has 2 bytes, the name 12, the root 1, the fields of a record 10.
    assert_eq!(places.ttls[..], [34, 60, 86, 98]);
    assert_eq!(places.owners[..], [44]);
}

#[test]
fn key_covers_the_query() {
    let default = cache(Compat::default());
    let transparent = cache(Compat {
        transparent_forwarding: true,
        ..Compat::default()
    });
    let authority = cache(Compat {
        cache_as_authority: true,
        ..Compat::default()
    });
    let mut disabled = query(b"\x02OK\x07example\0", TXT);
    disabled[3] |= 0x10;
    let mut chaos = query(NAME, A);
    *chaos.last_mut().unwrap() = 3;
    for (query, flags, qtype, class) in [
        (query(NAME, A), 4, 1, 1),
        (disabled, 6, 16, 1),
        (with_opt(query(NAME, A), false), 4, 1, 1),
        (with_opt(query(NAME, A), true), 5, 1, 1),
        (chaos, 4, 1, 3),
    ] {
        let expected = [&[flags, 0, qtype, 0, class][..], NAME].concat();
        let query = parsed(&query);
        assert_eq!(default.key(&query).as_deref(), Some(&expected[..]));
        assert_eq!(transparent.key(&query).as_deref(), Some(&expected[..]));
        let without_class = [&[flags, 0, qtype, 0, 0][..], NAME].concat();
        assert_eq!(authority.key(&query).as_deref(), Some(&without_class[..]));
    }
}

#[test]
fn some_queries_have_no_key() {
    let cache = cache(Compat::default());
    for (qtype, is_kept) in [
        (A, true),
        (250, true),
        (251, false),
        (252, false),
        (253, false),
        (254, false),
        (255, true),
    ] {
        let asked = query(NAME, qtype);
        assert_eq!(cache.keeps(&parsed(&asked)), is_kept, "{qtype}");
        assert_eq!(cache.key(&parsed(&asked)).is_some(), is_kept, "{qtype}");
        let mut iterative = asked;
        iterative[2] &= !1;
        assert!(!cache.keeps(&parsed(&iterative)) && cache.key(&parsed(&iterative)).is_none());
    }
}

#[test]
fn ttl_counts_down_with_lifetime() {
    let cache = cache(Compat::default());
    let asked = query(NAME, A);
    admit(&cache, &asked, &reply(&asked, message::NOERROR, &[ADDRESS]));
    let data = soa(120);
    let denied = query(NAME, TXT);
    let denial: Record<'_> = (1, b"\0", SOA, 900, &data);
    admit(
        &cache,
        &denied,
        &reply(&denied, message::NOERROR, &[denial]),
    );
    for (query, age_ms, ttl) in [
        (&asked, 0, Some(300)),
        (&asked, 999, Some(300)),
        (&asked, 1000, Some(299)),
        (&asked, 299_999, Some(1)),
        (&asked, 300_000, None),
        (&denied, 0, Some(900)),
        (&denied, 119_999, Some(781)),
        (&denied, 120_000, None),
    ] {
        let reply = cache.reply_at(&parsed(query), Duration::from_millis(age_ms));
        let found = reply.map(|reply| {
            let index = MessageIndex::of(&reply).unwrap();
            index.walk(&reply).next().unwrap().1.ttl
        });
        assert_eq!(found, ttl, "{age_ms} ms");
    }
    let unknown = query(b"\0", A);
    assert_eq!(cache.reply_at(&parsed(&unknown), Duration::ZERO), None);
}

#[test]
fn entry_age_decides_the_ttl() {
    let asked = query(NAME, A);
    let entry = entry(
        reply(&asked, message::NOERROR, &[ADDRESS]),
        Duration::from_millis(120_900),
    );
    assert_eq!(entry.lifetime_secs(), 120);
    for (seconds, fresh, ttl) in [
        (0, Some(300), 300),
        (119, Some(181), 181),
        (120, None, 30),
        (u64::MAX, None, 30),
    ] {
        let age = Duration::from_secs(seconds);
        assert_eq!((entry.fresh_ttl_at(age), entry.ttl_at(age)), (fresh, ttl));
    }
}

#[test]
fn entries_weigh_their_bytes_at_least() {
    let asked = query(NAME, A);
    let entry = entry(reply(&asked, message::NOERROR, &[]), Duration::ZERO);
    let bytes = 5 + 28 + ENTRY_OVERHEAD;
    assert_eq!(entry.message.len(), 28);
    let weight = |least| entry.weight(b"12345", least) as usize;
    assert_eq!(weight(0), bytes);
    assert_eq!(weight(bytes as u64), bytes);
    assert_eq!(weight(bytes as u64 + 1), bytes + 1);
    assert_eq!(weight(1 << 40), u32::MAX as usize);
    // Its fields, its part of the table, its key and the allocator's headers are of this order.
    let overhead = weight(0) - 5 - 28;
    assert!((360..480).contains(&overhead), "{overhead}");
    // So are the offsets of many records.
    let many = [ADDRESS; 100];
    let entry = self::entry(reply(&asked, message::NOERROR, &many), Duration::ZERO);
    let beyond_message = entry.weight(b"12345", 0) as usize - 5 - entry.message.len();
    assert!(beyond_message >= ENTRY_OVERHEAD + 200, "{beyond_message}");
}

#[test]
fn limit_of_entries_becomes_a_weight() {
    for (max_bytes, max_entries, expected) in [(1000, 10, 100), (1000, 0, 1000), (1005, 10, 100)] {
        let config = CacheConfig {
            max_bytes,
            max_entries,
            ..CONFIG
        };
        let cache = Cache::new(&config, Form::default(), Compat::default());
        assert_eq!(cache.least_weight, expected, "{max_bytes} {max_entries}");
    }
}

/// Returns the numbers of hits with data, hits without, misses and stale answers.
fn counts(cache: &Cache) -> [u64; 4] {
    let CacheCounters {
        hits,
        denial_hits,
        misses,
        stale_hits,
    } = &cache.counters;
    [hits, denial_hits, misses, stale_hits].map(|count| count.load(Ordering::Relaxed))
}

#[test]
fn look_ups_are_counted_by_result() {
    let cache = cache(Compat::default());
    let asked = query(NAME, A);
    let denied = query(NAME, TXT);
    admit(&cache, &asked, &reply(&asked, message::NOERROR, &[ADDRESS]));
    let data = soa(120);
    let denial: Record<'_> = (1, b"\0", SOA, 900, &data);
    admit(
        &cache,
        &denied,
        &reply(&denied, message::NOERROR, &[denial]),
    );
    let look_up = |message: &[u8]| {
        let query = parsed(message);
        cache.get(&cache.key(&query).unwrap(), &query)
    };
    let Lookup::Fresh(found) = look_up(&asked) else {
        panic!("it is fresh");
    };
    assert!(found.ends_with(&[192, 0, 2, 1]));
    assert_eq!(counts(&cache), [1, 0, 0, 0]);
    assert!(matches!(look_up(&denied), Lookup::Fresh(_)));
    assert_eq!(counts(&cache), [1, 1, 0, 0]);
    let unknown = query(b"\0", A);
    assert!(matches!(look_up(&unknown), Lookup::Miss));
    assert_eq!(counts(&cache), [1, 1, 1, 0]);
    let query = parsed(&unknown);
    let mut out = Vec::new();
    assert!(!cache.write_fresh(&cache.key(&query).unwrap(), &query, &mut out));
    assert!(out.is_empty());
    let query = parsed(&asked);
    assert!(cache.write_fresh(&cache.key(&query).unwrap(), &query, &mut out));
    assert_eq!(out, found);
    assert_eq!(counts(&cache), [2, 1, 1, 0]);
    let Totals {
        entries, denials, ..
    } = cache.totals();
    assert_eq!((entries, denials), (1, 1));
}

#[test]
fn expired_answer_is_stale_then_gone() {
    let cache = cache(Compat::default());
    let asked = query(NAME, A);
    let query = parsed(&asked);
    let key = cache.key(&query).unwrap();
    let made = || entry(reply(&asked, message::NOERROR, &[ADDRESS]), Duration::ZERO);
    assert!(cache.peek(&key).is_none());
    store(&cache, &query, made());
    let Lookup::Stale(stale) = cache.get(&key, &query) else {
        panic!("it is stale");
    };
    assert_eq!(counts(&cache), [0, 0, 1, 0]);
    assert!(matches!(cache.peek(&key), Some((_, None))));
    assert!(cache.copy(&query).is_none(), "interfaces get fresh answers");
    // For half a minute after a failed renewal, the stale answer is served at once.
    stale.renewal_failed();
    let until = stale.no_recheck_before_ms.load(Ordering::Relaxed);
    assert!((30_000..30_000 + 3_600_000).contains(&until), "{until}");
    let Lookup::Fresh(reply) = cache.get(&key, &query) else {
        panic!("it is served");
    };
    let index = MessageIndex::of(&reply).unwrap();
    assert_eq!(index.walk(&reply).next().unwrap().1.ttl, 30);
    assert_eq!(counts(&cache), [0, 0, 2, 1]);

    let over = Entry {
        stale: Duration::ZERO,
        ..made()
    };
    store(&cache, &query, over);
    assert!(cache.peek(&key).is_none());
    assert!(matches!(cache.get(&key, &query), Lookup::Miss));
    assert_eq!(counts(&cache), [0, 0, 3, 1]);
    // Nobody gets it any more, so operators do not see it.
    assert_eq!(cache.totals().entries, 1);
    assert_eq!(cache.swept_totals().entries, 0);
    assert_eq!(cache.totals(), Totals::default());
    let fresh = Entry {
        lifetime: Duration::from_secs(3600),
        ..made()
    };
    store(&cache, &query, fresh);
    assert!(cache.peek(&key).is_some_and(|(_, left)| left.is_some()));
    assert_eq!(cache.swept_totals().entries, 1);
}

#[test]
fn stale_serving_caches_keep_stale_answers() {
    let asked = query(NAME, A);
    let answer = reply(&asked, message::NOERROR, &[ADDRESS]);
    for (serve_stale, expected) in [(None, false), (Some(Duration::from_secs(60)), true)] {
        let config = CacheConfig {
            serve_stale,
            ..CONFIG
        };
        let cache = Cache::new(&config, Form::default(), Compat::default());
        let key = cache.key(&parsed(&asked)).unwrap();
        assert!(!cache.may_be_stale(&key));
        admit(&cache, &asked, &answer);
        assert_eq!(cache.may_be_stale(&key), expected);
        let (entry, _) = cache.peek(&key).unwrap();
        assert_eq!(entry.stale, serve_stale.unwrap_or_default());
        assert_eq!(entry.lifetime, Duration::from_secs(300));
        assert_eq!(entry.recursor.as_deref(), Some("192.0.2.53:53"));
    }
}

#[test]
fn stale_reply_says_so() {
    let cache = cache(Compat::default());
    let asked = with_opt(query(NAME, A), false);
    let plain = query(NAME, A);
    for (rcode, code) in [
        (message::NOERROR, 3),
        (message::SERVFAIL, 3),
        // Stale NXDOMAIN Answer (RFC 8914, section 4.20).
        (message::NXDOMAIN, 19),
    ] {
        let entry = entry(reply(&plain, rcode, &[ADDRESS]), Duration::ZERO);
        let stale = cache.stale_reply(&entry, &parsed(&asked));
        let index = MessageIndex::of(&stale).unwrap();
        assert_eq!(index.walk(&stale).next().unwrap().1.ttl, 30);
        let opt = index.opt.unwrap();
        assert_eq!(stale[opt.start + 9..opt.end], [0, 6, 0, 15, 0, 2, 0, code]);
    }
}

#[test]
fn plain_answers_serve_do_queries() {
    let cache = cache(Compat::default());
    let plain = query(NAME, A);
    let signed = with_opt(plain.clone(), true);
    assert_eq!(cache.without_dnssec(&parsed(&signed)), None);
    admit(&cache, &plain, &reply(&plain, message::NOERROR, &[ADDRESS]));
    let found = cache.without_dnssec(&parsed(&signed)).unwrap();
    let index = MessageIndex::of(&found).unwrap();
    assert_eq!((index.records, found[3]), ([1, 0, 1], 0x80));
    // It would be the answer that was missed.
    for other in [plain.clone(), with_opt(plain, false)] {
        assert_eq!(cache.without_dnssec(&parsed(&other)), None);
    }
}

#[test]
fn admitted_replies_look_cached() {
    let opt: Record<'_> = (2, b"\0", message::TYPE_OPT, 0, b"");
    let asked = query(NAME, A);
    let from_recursor = reply(&asked, message::NOERROR, &[address(100_000), opt]);
    let cached = reply(&asked, message::NOERROR, &[address(3600)]);
    let cache = cache(Compat::default());
    assert_eq!(admit(&cache, &asked, &from_recursor), cached);
    let at_once = cache.reply_at(&parsed(&asked), Duration::ZERO);
    assert_eq!(at_once, Some(cached));
    // A reply that is not cached stays as it is.
    let failure = reply(&asked, message::REFUSED, &[opt]);
    assert_eq!(admit(&cache, &asked, &failure), failure);
}

#[test]
fn authority_and_ad_depend_on_settings() {
    let asked = query(NAME, A);
    let mut asking = asked.clone();
    asking[3] |= 0x20;
    let mut answer = reply(&asked, message::NOERROR, &[ADDRESS]);
    answer[3] |= 0x20;
    // RD off and CD on, as only a recursor's own flags could be.
    answer[2] &= !1;
    answer[3] |= 0x10;
    for (transparent_forwarding, cache_as_authority, plain, for_asking) in [
        (false, false, [0x81, 0x80], [0x81, 0xa0]),
        (false, true, [0x85, 0x80], [0x85, 0xa0]),
        (true, false, [0x80, 0x90], [0x80, 0xb0]),
        (true, true, [0x84, 0x90], [0x84, 0xb0]),
    ] {
        let compat = Compat {
            transparent_forwarding,
            cache_as_authority,
            ..Compat::default()
        };
        let cache = cache(compat);
        let first = admit(&cache, &asked, &answer);
        assert_eq!(
            first[3] & 0x20,
            if transparent_forwarding { 0 } else { 0x20 }
        );
        for (query, flags) in [(&asked, plain), (&asking, for_asking)] {
            let reply = cache.reply_at(&parsed(query), Duration::ZERO).unwrap();
            assert_eq!(reply[2..4], flags, "{compat:?}");
        }
    }
}

/// Interfaces that hold some questions, and record what they are told.
#[derive(Debug, Default)]
struct Recorded {
    held: Mutex<Vec<(Name, u16)>>,
    used_ns: AtomicU64,
    replaced: Mutex<Vec<(ForwardedAnswer, u64)>>,
    removed: Mutex<Vec<(Name, u16, bool, bool)>>,
}

impl InterfaceAnswers for Recorded {
    fn generation(&self) -> u64 {
        7
    }

    fn holds(&self, question: &CachedQuestion<'_>) -> bool {
        let wanted = (question.name.to_name(), question.qtype);
        self.held.lock().contains(&wanted)
    }

    fn last_used_ns(&self, question: &CachedQuestion<'_>) -> Option<u64> {
        self.holds(question)
            .then(|| self.used_ns.load(Ordering::Relaxed))
    }

    fn replace(&self, answer: ForwardedAnswer, generation: u64) {
        self.replaced.lock().push((answer, generation));
    }

    fn remove(&self, question: &CachedQuestion<'_>) {
        self.removed.lock().push((
            question.name.to_name(),
            question.qtype,
            question.dnssec_ok,
            question.checking_disabled,
        ));
    }

    fn clear(&self) {}
}

/// Returns a cache that interfaces mirror, with room for few entries.
fn mirrored(max_entries: u64) -> (Cache, Arc<Recorded>) {
    let recorded = Arc::<Recorded>::default();
    let interfaces: Arc<dyn InterfaceAnswers> = recorded.clone();
    let config = CacheConfig {
        max_entries,
        ..CONFIG
    };
    let cache = Cache::new(&config, Form::default(), Compat::default());
    (cache.mirrored_by(&interfaces), recorded)
}

#[test]
fn answering_interfaces_get_new_answers() {
    let (cache, interfaces) = mirrored(100);
    assert_eq!(cache.interfaces().generation(), 7);
    let asked = query(NAME, A);
    let query = parsed(&asked);
    let key = cache.key(&query).unwrap();
    admit(&cache, &asked, &reply(&asked, message::NOERROR, &[ADDRESS]));
    cache.update_interfaces(&key, &query, 3);
    assert_eq!(interfaces.replaced.lock().len(), 0, "they do not answer it");
    let name: Name = "ok.example.".parse().unwrap();
    interfaces.held.lock().push((name.clone(), A));
    cache.update_interfaces(&key, &query, 3);
    let copy = cache.copy(&query).unwrap();
    assert_eq!(*interfaces.replaced.lock(), [(copy, 3)]);
    assert_eq!(*interfaces.removed.lock(), []);
    // An uncompressed owner would need each client's letters.
    let written_out: Record<'_> = (0, NAME, A, 300, &[192, 0, 2, 1]);
    admit(
        &cache,
        &asked,
        &reply(&asked, message::NOERROR, &[written_out]),
    );
    cache.update_interfaces(&key, &query, 4);
    assert_eq!(interfaces.replaced.lock().len(), 1);
    assert_eq!(*interfaces.removed.lock(), [(name, A, false, false)]);
    cache.update_interfaces(b"", &query, 4);
    assert_eq!(interfaces.removed.lock().len(), 1, "no key, no question");
}

#[test]
fn copy_suffices_for_a_reply() {
    let cache = cache(Compat::default());
    let mut asked = with_opt(query(b"\x02oK\x07example\0", TXT), true);
    asked[3] |= 0x10;
    let data = soa(120);
    let denial: Record<'_> = (1, b"\0", SOA, 900, &data);
    let mut from_recursor = reply(&asked[..28], message::NOERROR, &[denial]);
    from_recursor[3] |= 0x20;
    from_recursor[11] = 0;
    assert!(cache.copy(&parsed(&asked)).is_none());
    admit(&cache, &asked, &from_recursor);
    let query = parsed(&asked);
    let (entry, _) = cache.peek(&cache.key(&query).unwrap()).unwrap();
    // AD for those who understand it, RD, RA and CD as in every reply.
    from_recursor[2..4].copy_from_slice(&[0x81, 0xb0]);
    let expected = ForwardedAnswer {
        name: "ok.example.".parse().unwrap(),
        qtype: TXT,
        dnssec_ok: true,
        checking_disabled: true,
        message: from_recursor.into(),
        ttls: [33].into(),
        ttl: 900,
        lifetime: 120,
        since_ns: entry.since.kernel_ns(),
    };
    assert_eq!(cache.copy(&query), Some(expected));
    let mut chaos = self::query(NAME, A);
    *chaos.last_mut().unwrap() = 3;
    admit(&cache, &chaos, &reply(&chaos, message::NOERROR, &[]));
    assert!(cache.copy(&parsed(&chaos)).is_none(), "another class");
}

#[test]
fn evicted_entries_leave_the_interfaces() {
    let (cache, interfaces) = mirrored(1);
    let name: Name = "ok.example.".parse().unwrap();
    let asked = query(NAME, A);
    let other = query(b"\x05other\0", A);
    let replies = [&asked, &other].map(|query| reply(query, message::NOERROR, &[ADDRESS]));
    let take_turns = || {
        admit(&cache, &asked, &replies[0]);
        admit(&cache, &other, &replies[1]);
    };
    take_turns();
    assert_eq!(*interfaces.removed.lock(), [], "they have no copy");
    interfaces.held.lock().push((name.clone(), A));
    take_turns();
    assert_eq!(*interfaces.removed.lock(), [(name, A, false, false)]);
    assert_eq!((cache.totals().entries, cache.totals().evictions), (1, 3));
}

#[test]
fn interface_uses_count_by_key() {
    use crate::store::Mirror as _;

    let (cache, interfaces) = mirrored(100);
    interfaces
        .held
        .lock()
        .push(("ok.example.".parse().unwrap(), A));
    interfaces.used_ns.store(9, Ordering::Relaxed);
    let mirror = Mirrored(cache.interfaces());
    let key = cache.key(&parsed(&query(NAME, A))).unwrap();
    assert_eq!(mirror.last_used_ns(&key), Some(9));
    let fields = KeyFields::of(&key).unwrap();
    let question = CachedQuestion {
        name: NameRef::of_wire(NAME),
        qtype: A,
        dnssec_ok: false,
        checking_disabled: false,
    };
    assert_eq!(cache.question_on_interface(fields), Some(question));
    let other = cache.key(&parsed(&query(NAME, TXT))).unwrap();
    assert_eq!(mirror.last_used_ns(&other), None);
    assert_eq!(mirror.last_used_ns(b"x"), None);
    let fields = KeyFields::of(&other).unwrap();
    assert_eq!(cache.question_on_interface(fields), None);
}

#[test]
fn interfaces_know_a_single_class() {
    let fields = KeyFields {
        dnssec_ok: true,
        checking_disabled: false,
        qtype: TXT,
        qclass: 1,
        name: NAME,
    };
    let question = CachedQuestion {
        name: NameRef::of_wire(NAME),
        qtype: TXT,
        dnssec_ok: true,
        checking_disabled: false,
    };
    for (qclass, expected) in [
        (0, Some(question)),
        (1, Some(question)),
        (3, None),
        (255, None),
    ] {
        let fields = KeyFields { qclass, ..fields };
        assert_eq!(CachedQuestion::of(fields), expected, "{qclass}");
    }
    let none = NoInterfaces;
    assert_eq!(none.generation(), 0);
    assert_eq!(
        (none.holds(&question), none.last_used_ns(&question)),
        (false, None)
    );
}

#[test]
fn fields_select_listed_entries() {
    let cache = cache(Compat::default());
    for qtype in [A, TXT] {
        let asked = query(NAME, qtype);
        admit(&cache, &asked, &reply(&asked, message::NOERROR, &[ADDRESS]));
    }
    let mut types = Vec::new();
    cache.for_each(|fields, entry, age| {
        assert_eq!(fields.name, NAME);
        assert!(age < Duration::from_secs(3600) && !entry.message.is_empty());
        types.push(fields.qtype);
    });
    types.sort_unstable();
    assert_eq!(types, [A, TXT]);
    let before = cache.generation();
    assert_eq!(cache.flush(|fields| fields.qtype == TXT), 1);
    assert_ne!(cache.generation(), before);
    assert_eq!((cache.totals().entries, cache.totals().denials), (1, 0));
    assert_eq!(cache.flush(|_| true), 1);
}
