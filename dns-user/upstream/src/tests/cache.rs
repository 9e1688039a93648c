//! Tests of the cache: the answers that it keeps, for how long, and for which clients.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use super::{misses::ask_source, scripted::*, *};
use crate::{
    Answer as _,
    cache::Cache,
    cached::{CachedSource, UncachedSource},
    contents::{Listing, Selection},
    store::Totals,
};
use dns_core::{
    config::CacheConfig,
    wire::{ExtendedError, OPT_LEN},
};

const NAME: &[u8] = b"\x02ok\x07example\0";

const CONFIG: CacheConfig = CacheConfig {
    enabled: true,
    max_entries: 1000,
    max_bytes: 1 << 20,
    serve_stale: None,
};

/// Returns a source with one recursor and a cache.
fn source(recursor: &Scripted, compat: Compat, config: &CacheConfig) -> (CachedSource, Arc<Cache>) {
    let cache = Arc::new(Cache::new(config, form(compat), compat));
    let source = UncachedSource::Dns(Arc::new(forwarder(&[recursor.name()], 0, compat)));
    (
        CachedSource::new(source, Some(Arc::clone(&cache)), form(compat), compat),
        cache,
    )
}

/// Sends a query to a source by UDP.
async fn ask(source: &CachedSource, message: &[u8]) -> Vec<u8> {
    let reply = ask_source(source, &parsed(message), &Arc::default()).await;
    assert_eq!(message::id(&reply), message::id(message));
    reply
}

/// Appends an OPT of 1232 bytes to `query`.
fn with_opt(mut query: Vec<u8>, dnssec_ok: bool) -> Vec<u8> {
    message::append_opt(&mut query, 1232);
    let flags = query.len() - 4;
    query[flags] = if dnssec_ok { 0x80 } else { 0 };
    query
}

/// Returns the TTL of a reply's first record.
fn ttl(reply: &[u8]) -> u32 {
    let index = message::MessageIndex::of(reply).unwrap();
    index.walk(reply).next().map_or(0, |(_, record)| record.ttl)
}

#[tokio::test]
async fn look_up_future_is_small() {
    /// The largest allocation that glibc keeps for the next one of the same thread; larger ones merge and
    /// split free memory.
    const CHEAP: usize = 1032;
    let recursor = with_ttls(&[300]).await;
    let (source, _) = source(&recursor, Compat::default(), &CONFIG);
    let message = query(NAME, 1);
    let query = parsed(&message);
    let size = size_of_val(&*source.answer(&query));
    assert!(size <= CHEAP, "{size} bytes");
}

/// Returns a recursor whose answers have these TTLs.
async fn with_ttls(ttls: &'static [u32]) -> Scripted {
    Scripted::start(move |query| {
        let mut reply = refuse(query, message::NOERROR);
        for &ttl in ttls {
            let added =
                message::push_answer(&mut reply, &message::QUESTION_NAME, 1, ttl, &[192, 0, 2, 1]);
            assert!(added);
        }
        vec![reply]
    })
    .await
}

#[tokio::test]
async fn hit_keeps_client_id_and_case() {
    let recursor = Scripted::start(|query| {
        // An uncompressed owner, and the recursor's OPT.
        let mut reply = refuse(query, message::NOERROR);
        reply[2] |= 0x04;
        let owner = query[12..12 + NAME.len()].to_vec();
        assert!(message::push_answer(
            &mut reply,
            &owner,
            1,
            300,
            &[192, 0, 2, 1]
        ));
        message::append_opt(&mut reply, 1400);
        vec![reply]
    })
    .await;
    let (source, _) = source(&recursor, Compat::default(), &CONFIG);
    let first = ask(&source, &query(NAME, 1)).await;
    assert_eq!(
        message::MessageIndex::of(&first).unwrap().opt,
        None,
        "the recursor's OPT was for us"
    );

    let mixed = with_opt(query(b"\x02oK\x07EXAMple\0", 1), false);
    let hit = ask(&source, &mixed).await;
    let index = message::MessageIndex::of(&hit).unwrap();
    assert_eq!(&hit[12..12 + NAME.len()], b"\x02oK\x07EXAMple\0");
    assert_eq!(
        &hit[28..28 + NAME.len()],
        b"\x02oK\x07EXAMple\0",
        "the owner too"
    );
    assert_eq!(hit[index.opt.unwrap()], *b"\0\0\x29\x04\xd0\0\0\0\0\0\0");
    assert_eq!(hit[2], 0x85, "AA is the upstream's");
    assert_eq!(recursor.counts().0, 1);
}

#[tokio::test]
async fn ttls_are_clamped_and_equalised() {
    for (ttls, expected) in [
        (&[1u32][..], 5),
        (&[6], 6),
        (&[100_000], 3600),
        (&[300, 60, 900], 60),
    ] {
        let recursor = with_ttls(ttls).await;
        let (source, _) = source(&recursor, Compat::default(), &CONFIG);
        for _ in 0..2 {
            let reply = ask(&source, &query(NAME, 1)).await;
            let index = message::MessageIndex::of(&reply).unwrap();
            assert!(
                index.walk(&reply).all(|(_, record)| record.ttl == expected),
                "{ttls:?}"
            );
        }
        assert_eq!(recursor.counts().0, 1);
    }
}

#[tokio::test]
async fn ttl_zero_is_not_kept() {
    for ttls in [&[0][..], &[u32::MAX], &[300, 0]] {
        let recursor = with_ttls(ttls).await;
        let (modern, _) = source(&recursor, Compat::default(), &CONFIG);
        for expected in [1, 2] {
            assert_eq!(ttl(&ask(&modern, &query(NAME, 1)).await), ttls[0]);
            assert_eq!(recursor.counts().0, expected);
        }
        let (reference, _) = source(
            &recursor,
            Compat {
                cache_zero_ttl: true,
                ..Compat::default()
            },
            &CONFIG,
        );
        for _ in 0..2 {
            assert_eq!(ttl(&ask(&reference, &query(NAME, 1)).await), 5);
            assert_eq!(recursor.counts().0, 3);
        }
    }
}

#[tokio::test]
async fn unsigned_answer_beats_failure() {
    let recursor = Scripted::start(|query| match parsed(query).dnssec_ok() {
        false => vec![answer(query, &[[192, 0, 2, 1]])],
        true => vec![refuse(query, message::SERVFAIL)],
    })
    .await;
    let (source, _) = source(&recursor, Compat::default(), &CONFIG);
    ask(&source, &query(NAME, 1)).await;
    let reply = ask(&source, &with_opt(query(NAME, 1), true)).await;
    assert_eq!((rcode(&reply), reply[7]), (message::NOERROR, 1));
}

#[tokio::test]
async fn failures_are_cached_briefly() {
    for failure in [Some(message::SERVFAIL), Some(message::REFUSED), None] {
        let failing = Scripted::start(move |query| {
            failure
                .map(|rcode| refuse(query, rcode))
                .into_iter()
                .collect()
        })
        .await;
        let uncached = |compat| {
            let source = UncachedSource::Dns(Arc::new(forwarder(&[failing.name()], 0, compat)));
            CachedSource::new(source, None, form(compat), compat)
        };
        let modern = uncached(Compat::default());
        for _ in 0..20 {
            assert_eq!(
                rcode(&ask(&modern, &query(NAME, 1)).await),
                failure.unwrap_or(message::SERVFAIL)
            );
        }
        assert_eq!((failing.counts().0, modern.failure_hits()), (1, 19));
        tokio::time::sleep(Duration::from_millis(1050)).await;
        ask(&modern, &query(NAME, 1)).await;
        // The second query that times out is repeated without EDNS.
        let plain = usize::from(failure.is_none());
        assert_eq!(failing.counts().0, 2 + plain);
        let forgetful = uncached(Compat {
            forget_failures: true,
            ..Compat::default()
        });
        for expected in [3 + plain, 4 + 2 * plain] {
            ask(&forgetful, &query(NAME, 1)).await;
            assert_eq!(failing.counts().0, expected);
        }
    }
}

fn of_client(client: [u8; 4], mut query: Query<'_>) -> Query<'_> {
    query.client = Some(client.into());
    query
}

#[tokio::test]
async fn flooding_client_leaves_room() {
    let silent = Scripted::start(|_| vec![]).await;
    let compat = Compat {
        forget_failures: true,
        ..Compat::default()
    };
    // Queries wait until the whole flood has arrived.
    let options = RecursorOptions {
        timeout: Duration::from_secs(600),
        ..options(0, compat)
    };
    let selection = RecursorSelection::Serial;
    let forwarder = Forwarder::new(
        &[silent.name()],
        options,
        selection,
        compat,
        &Arc::default(),
    );
    let source = CachedSource::new(
        UncachedSource::Dns(Arc::new(forwarder)),
        None,
        form(compat),
        compat,
    );
    let flood: Vec<_> = (0..6000u32)
        .map(|number| {
            let source = source.clone();
            tokio::spawn(async move {
                let name = [&b"\x06"[..], format!("{number:06}").as_bytes(), b"\0"].concat();
                let message = query(&name, 1);
                let flooding = of_client([192, 0, 2, 1], parsed(&message));
                source.answer(&flooding).await;
            })
        })
        .collect();
    while source.admission().refused == 0 {
        tokio::task::yield_now().await;
    }
    let mut reply = Vec::new();
    let message = query(NAME, 1);
    let flooding = of_client([192, 0, 2, 1], parsed(&message));
    assert!(
        source.answer_at_once(&flooding, &mut reply),
        "refused without a task"
    );
    assert_eq!(rcode(&reply), message::SERVFAIL);
    let other = of_client([192, 0, 2, 2], parsed(&message));
    assert!(
        !source.answer_at_once(&other, &mut reply),
        "another client may wait"
    );
    flood.iter().for_each(|query| query.abort());
    for query in flood {
        assert!(query.await.err().is_none_or(|error| error.is_cancelled()));
    }
    assert_eq!(source.admission().waiting, 0);
}

#[tokio::test]
async fn ttls_count_down() {
    let recursor = with_ttls(&[300]).await;
    let (source, _) = source(&recursor, Compat::default(), &CONFIG);
    ask(&source, &query(NAME, 1)).await;
    tokio::time::sleep(Duration::from_millis(2100)).await;
    assert!((290..=298).contains(&ttl(&ask(&source, &query(NAME, 1)).await)));
}

#[tokio::test]
async fn key_contains_type_class_do_cd() {
    let recursor = with_ttls(&[300]).await;
    let (source, _) = source(&recursor, Compat::default(), &CONFIG);
    let plain = query(NAME, 1);
    let mut chaos = plain.clone();
    *chaos.last_mut().unwrap() = 3;
    let mut checking_disabled = plain.clone();
    checking_disabled[3] |= 0x10;
    let all = [
        plain.clone(),
        query(NAME, 28),
        chaos,
        checking_disabled,
        with_opt(plain.clone(), true),
    ];
    for expected in [5, 5] {
        for query in &all {
            let reply = ask(&source, query).await;
            assert_eq!(reply[3] & 0x10, query[3] & 0x10, "CD is copied");
        }
        assert_eq!(recursor.counts().0, expected);
    }
    ask(&source, &with_opt(plain.clone(), false)).await;
    assert_eq!(recursor.counts().0, 5, "EDNS alone makes no difference");
    let mut not_recursive = plain;
    not_recursive[2] &= !1;
    for expected in [6, 7] {
        ask(&source, &not_recursive).await;
        assert_eq!(recursor.counts().0, expected);
    }
}

#[tokio::test]
async fn forwarded_client_subnet_bypasses_cache() {
    let recursor = with_ttls(&[300]).await;
    let (plain, _) = source(&recursor, Compat::default(), &CONFIG);
    let form = Form {
        client_subnet: true,
        ..Form::default()
    };
    let options = RecursorOptions {
        form,
        ..options(0, Compat::default())
    };
    let forwarder = Forwarder::new(
        &[recursor.name()],
        options,
        RecursorSelection::Serial,
        Compat::default(),
        &Arc::default(),
    );
    let cache = Arc::new(Cache::new(&CONFIG, form, Compat::default()));
    let source = CachedSource::new(
        UncachedSource::Dns(Arc::new(forwarder)),
        Some(cache),
        form,
        Compat::default(),
    );
    let mut personal = with_opt(query(NAME, 1), false);
    let end = personal.len();
    personal[end - 1] = 8;
    personal.extend_from_slice(b"\0\x08\0\x04\0\x01\0\0");
    for expected in [1, 2] {
        ask(&source, &personal).await;
        assert_eq!(recursor.counts().0, expected);
    }
    for _ in 0..2 {
        ask(&plain, &personal).await;
        assert_eq!(recursor.counts().0, 3, "the option stays behind");
    }
}

#[tokio::test]
async fn soa_limits_nxdomain_lifetime() {
    let denying = Scripted::start(|query| vec![nxdomain(query)]).await;
    let (to_denying, _) = source(&denying, Compat::default(), &CONFIG);
    for _ in 0..2 {
        let reply = ask(&to_denying, &query(NAME, 1)).await;
        assert_eq!((rcode(&reply), ttl(&reply)), (message::NXDOMAIN, 120));
    }
    assert_eq!(denying.counts().0, 1);
    let (reference, _) = source(&denying, Compat::REFERENCE, &CONFIG);
    for expected in [2, 3] {
        ask(&reference, &query(NAME, 1)).await;
        assert_eq!(
            denying.counts().0,
            expected,
            "the reference keeps no NXDOMAIN"
        );
    }

    let bare = Scripted::start(|query| vec![refuse(query, message::NXDOMAIN)]).await;
    let (source, _) = source(&bare, Compat::default(), &CONFIG);
    for expected in [1, 2] {
        assert_eq!(
            rcode(&ask(&source, &query(NAME, 1)).await),
            message::NXDOMAIN
        );
        assert_eq!(bare.counts().0, expected);
    }
}

#[tokio::test]
async fn cut_replies_are_not_kept() {
    let cutting = Scripted::start(|query| {
        let mut reply = answer(query, &[[192, 0, 2, 1]]);
        message::set_truncated(&mut reply, true);
        vec![reply]
    })
    .await;
    let (cut, _) = source(&cutting, Compat::default(), &CONFIG);
    for expected in [1, 2] {
        ask(&cut, &query(NAME, 1)).await;
        assert_eq!(cutting.counts(), (expected, expected), "TCP says no more");
    }
    let large = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]; 60])]).await;
    for (compat, expected) in [(Compat::default(), [1, 1]), (Compat::REFERENCE, [2, 3])] {
        let (source, _) = source(&large, compat, &CONFIG);
        for expected in expected {
            ask(&source, &query(NAME, 1)).await;
            assert_eq!(
                large.counts().0,
                expected,
                "kept whole, whatever the client takes"
            );
        }
    }
}

/// A reply that fills the client's limit with our OPT is complete, and kept; one more byte is not.
#[tokio::test]
async fn own_opt_counts_for_the_limit() {
    for (query, limit) in [
        (query(NAME, 65_280), 512),
        (with_opt(query(NAME, 65_280), false), 1232),
    ] {
        let opt = if limit == 512 { 0 } else { OPT_LEN };
        for (len, asked) in [(limit - opt, 1), (limit - opt + 1, 2)] {
            let recursor = Scripted::start(move |query| {
                let mut reply = refuse(query, message::NOERROR);
                let data = vec![7; len - reply.len() - 12];
                let owner = &message::QUESTION_NAME;
                assert!(message::push_answer(&mut reply, owner, 65_280, 300, &data));
                assert_eq!(reply.len(), len);
                vec![reply]
            })
            .await;
            let (source, _) = source(&recursor, Compat::REFERENCE, &CONFIG);
            for _ in 0..2 {
                ask(&source, &query).await;
            }
            assert_eq!(recursor.counts().0, asked, "{len} of {limit} bytes");
        }
    }
}

#[tokio::test]
async fn truncated_reply_retries_by_tcp() {
    let count = Arc::new(AtomicUsize::new(0));
    let recursor = {
        let count = Arc::clone(&count);
        Scripted::start(move |query| match count.fetch_add(1, Ordering::Relaxed) {
            0 => {
                let mut reply = refuse(query, message::NOERROR);
                message::set_truncated(&mut reply, true);
                vec![reply]
            }
            _ => vec![answer(query, &[[192, 0, 2, 1]; 200])],
        })
        .await
    };
    let (source, _) = source(&recursor, Compat::default(), &CONFIG);
    let reply = ask(&source, &query(NAME, 1)).await;
    assert_eq!(message::u16_at(&reply, 6), Some(200));
    assert_eq!(recursor.counts(), (1, 1));
}

#[tokio::test]
async fn ad_is_returned_on_request() {
    let recursor = Scripted::start(|query| {
        let mut reply = answer(query, &[[192, 0, 2, 1]]);
        message::set_authentic(&mut reply, true);
        vec![reply]
    })
    .await;
    let (source, _) = source(&recursor, Compat::default(), &CONFIG);
    let mut asking = query(NAME, 1);
    asking[3] |= 0x20;
    for _ in 0..2 {
        assert_eq!(ask(&source, &query(NAME, 1)).await[3] & 0x20, 0);
        assert_eq!(ask(&source, &asking).await[3] & 0x20, 0x20);
        assert_eq!(
            ask(&source, &with_opt(query(NAME, 1), true)).await[3] & 0x20,
            0x20
        );
    }
    assert_eq!(recursor.counts().0, 2, "once without and once with DO");
}

/// Combinations of RD and CD; queries that differ in them share nothing.
const FLIGHTS: usize = 4;

#[tokio::test]
async fn clients_share_upstream_query() {
    let all_joined = Arc::new(tokio::sync::Notify::new());
    let count = Arc::new(AtomicUsize::new(0));
    let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let names = [socket.local_addr().unwrap().to_string()];
    let server = tokio::spawn({
        let (all_joined, count) = (Arc::clone(&all_joined), Arc::clone(&count));
        async move {
            let mut replies = Vec::new();
            let mut buffer = [0; 512];
            while replies.len() < FLIGHTS {
                let (length, client) = socket.recv_from(&mut buffer).await.unwrap();
                let mut reply = answer(&buffer[..length], &[[192, 0, 2, 1]]);
                // RD and CD are wrong, and the answer is validated.
                reply[2] ^= 0x01;
                reply[3] = reply[3] ^ 0x10 | 0x20;
                replies.push((reply, client));
                count.fetch_add(1, Ordering::Relaxed);
            }
            all_joined.notified().await;
            for (reply, client) in replies {
                socket.send_to(&reply, client).await.unwrap();
            }
            loop {
                socket.recv_from(&mut buffer).await.unwrap();
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let compat = Compat::default();
    let cache = Arc::new(Cache::new(&CONFIG, form(compat), compat));
    let options = RecursorOptions {
        timeout: Duration::from_secs(20),
        ..options(0, compat)
    };
    let forwarder = Arc::new(Forwarder::new(
        &names,
        options,
        RecursorSelection::Serial,
        compat,
        &Arc::default(),
    ));
    let source = CachedSource::new(
        UncachedSource::Dns(forwarder),
        Some(cache),
        form(compat),
        compat,
    );
    let clients: Vec<_> = (0..200u16)
        .map(|id| {
            let source = source.clone();
            tokio::spawn(async move {
                let mut query = query(
                    if id % 2 == 0 {
                        NAME
                    } else {
                        b"\x02OK\x07example\0"
                    },
                    1,
                );
                message::set_id(&mut query, id);
                let [rd, cd, ad] = [1, 2, 4].map(|bit| u8::from((id / 2) & bit != 0));
                query[2] = rd;
                query[3] = cd << 4 | ad << 5;
                let reply = ask(&source, &query).await;
                assert_eq!(reply[12..12 + NAME.len()], query[12..12 + NAME.len()]);
                assert!(reply.ends_with(&[192, 0, 2, 1]));
                let flags = [reply[2] & 0x01, reply[3] & 0x30];
                assert_eq!(flags, [query[2], query[3]], "RD, and AD and CD");
            })
        })
        .collect();
    // No client can have received an answer before this.
    while count.load(Ordering::Relaxed) < FLIGHTS {
        tokio::task::yield_now().await;
    }
    all_joined.notify_one();
    for client in clients {
        client.await.unwrap();
    }
    assert_eq!(count.load(Ordering::Relaxed), FLIGHTS);
    server.abort();
}

#[tokio::test]
async fn cancelled_client_keeps_shared_lookup() {
    let count = Arc::new(AtomicUsize::new(0));
    let recursor = {
        let count = Arc::clone(&count);
        // The first query is lost.
        Scripted::start(move |query| match count.fetch_add(1, Ordering::Relaxed) {
            0 => vec![],
            _ => vec![answer(query, &[[192, 0, 2, 1]])],
        })
        .await
    };
    let (source, _) = source(&recursor, Compat::default(), &CONFIG);
    let first = tokio::spawn({
        let source = source.clone();
        // As for a client by TCP, which can go away.
        async move { source.answer(&parsed(&query(NAME, 1))).await }
    });
    while count.load(Ordering::Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
    let second = tokio::spawn({
        let source = source.clone();
        async move { source.answer(&parsed(&query(NAME, 1))).await }
    });
    tokio::task::yield_now().await;
    first.abort();
    assert_eq!(rcode(&second.await.unwrap()), message::NOERROR);
}

#[tokio::test]
async fn cache_is_bounded_and_flushable() {
    let recursor = with_ttls(&[300]).await;
    let config = CacheConfig {
        max_entries: 100,
        ..CONFIG
    };
    let (source, cache) = source(&recursor, Compat::default(), &config);
    for number in 0..1000u16 {
        let name = [b"\x05", format!("{number:05}").as_bytes(), b"\0"].concat();
        ask(&source, &query(&name, 1)).await;
    }
    let Totals {
        entries,
        bytes,
        evictions,
        ..
    } = cache.totals();
    assert_eq!((entries, evictions), (100, 900));
    assert!(bytes <= config.max_bytes);

    // This also applies to an entry in frequent use.
    for _ in 0..40 {
        ask(&source, &query(NAME, 1)).await;
    }
    let before = recursor.counts().0;
    assert_eq!(cache.flush(|_| true), 100);
    ask(&source, &query(NAME, 1)).await;
    assert_eq!(recursor.counts().0, before + 1);
}

#[tokio::test]
async fn flush_selects_by_name_type_and_zone() {
    let recursor = with_ttls(&[300]).await;
    let (source, cache) = source(&recursor, Compat::default(), &CONFIG);
    for (name, qtype) in [
        (NAME, 1),
        (NAME, 28),
        (b"\x04more\x02ok\x07example\0", 1),
        (b"\x07example\0", 1),
    ] {
        ask(&source, &query(name, qtype)).await;
    }
    ask(&source, &with_opt(query(NAME, 1), true)).await;
    let listed = |selection: &Selection, limit| {
        let Listing { entries, omitted } =
            Listing::of([(None, &*cache)].into_iter(), selection, limit);
        let row = |answer: &crate::CachedAnswer| {
            format!("{} {} {}", answer.name, answer.query_type, answer.dnssec_ok)
        };
        (entries.iter().map(row).collect::<Vec<_>>(), omitted)
    };
    let all = [
        "example. A false",
        "ok.example. A false",
        "ok.example. A true",
        "ok.example. AAAA false",
        "more.ok.example. A false",
    ];
    assert_eq!(
        listed(&Selection::default(), 10),
        (all.map(str::to_owned).to_vec(), 0)
    );
    assert_eq!(
        listed(&Selection::default(), 2),
        (all[..2].iter().map(ToString::to_string).collect(), 3)
    );
    let name = |text: &str| Some(text.parse().unwrap());
    let named = Selection {
        name: name("OK.example"),
        ..Selection::default()
    };
    let Listing { entries, .. } = Listing::of([(None, &*cache)].into_iter(), &named, 10);
    assert_eq!(entries.len(), 3);
    assert!(
        entries
            .iter()
            .all(|answer| answer.records.as_ref().unwrap()[0].contains("192.0.2.1"))
    );
    let flush = |selection: &Selection| cache.flush(|fields| selection.admits(fields));
    assert_eq!(
        flush(&Selection {
            query_type: Some(28),
            ..named.clone()
        }),
        1
    );
    assert_eq!(
        flush(&Selection {
            query_type: Some(28),
            ..Selection::default()
        }),
        0
    );
    assert_eq!(flush(&named), 2);
    assert_eq!(
        flush(&Selection {
            zone: name("ok.example"),
            ..Selection::default()
        }),
        1
    );
    assert_eq!(listed(&Selection::default(), 10).0, all[..1]);
}

#[tokio::test]
async fn flush_outruns_queries_in_flight() {
    let release = Arc::new(tokio::sync::Semaphore::new(0));
    let count = Arc::new(AtomicUsize::new(0));
    let socket = Arc::new(tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let name = socket.local_addr().unwrap().to_string();
    let server = tokio::spawn({
        let (release, count) = (Arc::clone(&release), Arc::clone(&count));
        async move {
            let mut buffer = [0; 512];
            loop {
                let (length, client) = socket.recv_from(&mut buffer).await.unwrap();
                let number = count.fetch_add(1, Ordering::Relaxed) as u8 + 1;
                let reply = answer(&buffer[..length], &[[192, 0, 2, number]]);
                let (socket, release) = (Arc::clone(&socket), Arc::clone(&release));
                tokio::spawn(async move {
                    let _permit = release.acquire().await.unwrap();
                    socket.send_to(&reply, client).await.unwrap();
                });
            }
        }
    });
    let compat = Compat::default();
    let cache = Arc::new(Cache::new(&CONFIG, form(compat), compat));
    let forwarder = forwarder(&[name], 0, compat);
    let source = CachedSource::new(
        UncachedSource::Dns(Arc::new(forwarder)),
        Some(cache.clone()),
        form(compat),
        compat,
    );
    let ask_later = || {
        let source = source.clone();
        tokio::spawn(async move { ask(&source, &query(NAME, 1)).await })
    };
    let reached = async |expected: usize| {
        while count.load(Ordering::Relaxed) < expected {
            tokio::task::yield_now().await;
        }
    };
    let before = ask_later();
    reached(1).await;
    assert_eq!(cache.flush(|_| true), 0);
    let after = ask_later();
    reached(2).await;
    release.add_permits(100);
    assert!(before.await.unwrap().ends_with(&[192, 0, 2, 1]));
    assert!(after.await.unwrap().ends_with(&[192, 0, 2, 2]));
    assert!(
        ask(&source, &query(NAME, 1))
            .await
            .ends_with(&[192, 0, 2, 2]),
        "only the newer answer is cached"
    );
    assert_eq!(count.load(Ordering::Relaxed), 2);
    server.abort();
}

#[tokio::test]
async fn hot_answers_expire_with_cache_entry() {
    let recursors = [with_ttls(&[5]).await, with_ttls(&[5]).await];
    let [(one, _), (other, _)] = recursors
        .each_ref()
        .map(|recursor| source(recursor, Compat::default(), &CONFIG));
    for _ in 0..40 {
        ask(&one, &query(NAME, 1)).await;
        ask(&other, &query(NAME, 1)).await;
    }
    assert_eq!(
        recursors.each_ref().map(|recursor| recursor.counts().0),
        [1, 1]
    );
    tokio::time::sleep(Duration::from_millis(5100)).await;
    ask(&one, &query(NAME, 1)).await;
    assert_eq!(
        recursors.each_ref().map(|recursor| recursor.counts().0),
        [2, 1]
    );
}

#[tokio::test]
async fn stale_answers_bridge_outages() {
    let count = Arc::new(AtomicUsize::new(0));
    let recursor = {
        let count = Arc::clone(&count);
        Scripted::start(move |query| match count.fetch_add(1, Ordering::Relaxed) {
            0 => {
                let mut reply = refuse(query, message::NOERROR);
                assert!(message::push_answer(
                    &mut reply,
                    &message::QUESTION_NAME,
                    1,
                    1,
                    &[192, 0, 2, 1]
                ));
                vec![reply]
            }
            _ => vec![refuse(query, message::SERVFAIL)],
        })
        .await
    };
    let config = CacheConfig {
        serve_stale: Some(Duration::from_secs(60)),
        ..CONFIG
    };
    let (source, cache) = source(&recursor, Compat::default(), &config);
    let question = query(NAME, 1);
    let question = parsed(&question);
    let key = cache.key(&question).unwrap();
    assert_eq!(ttl(&ask(&source, &query(NAME, 1)).await), 5);
    assert!(cache.copy(&question).is_some());
    assert!(matches!(cache.peek(&key), Some((_, Some(_)))));
    tokio::time::sleep(Duration::from_millis(5200)).await;
    // Interfaces get fresh answers only.
    assert!(cache.copy(&question).is_none());
    assert!(matches!(cache.peek(&key), Some((_, None))));
    for _ in 0..3 {
        let reply = ask(&source, &query(NAME, 1)).await;
        assert_eq!((rcode(&reply), ttl(&reply)), (message::NOERROR, 30));
    }
    assert_eq!(
        recursor.counts().0,
        2,
        "after a vain renewal there is a pause"
    );
    assert_eq!(cache.counters.stale_hits.load(Ordering::Relaxed), 3);
    // Answers that are still served are also listed.
    let listed = Listing::of([(None, &*cache)].into_iter(), &Selection::default(), 9);
    assert_eq!(listed.entries.len(), 1);
    assert_eq!(listed.entries[0].fresh_seconds, 0);
}

/// Returns a recursor that answers with an alias of TTL 300 alone, and with an SOA of TTL 900 and this
/// minimum.
async fn with_alias_only(minimum: Option<u32>) -> Scripted {
    Scripted::start(move |query| {
        let mut reply = refuse(query, message::NOERROR);
        assert!(message::push_answer(
            &mut reply,
            &message::QUESTION_NAME,
            5,
            300,
            b"\x01a\x07example\0"
        ));
        if let Some(minimum) = minimum {
            reply[9] = 1;
            reply.extend_from_slice(b"\0\0\x06\0\x01\0\0\x03\x84\0\x16\0\0");
            for number in [7u32, 3600, 600, 86_400, minimum] {
                reply.extend_from_slice(&number.to_be_bytes());
            }
        }
        vec![reply]
    })
    .await
}

#[tokio::test]
async fn alias_without_data_is_denial() {
    for (minimum, expected) in [
        (Some(60), 60),
        (Some(1), 5),
        (Some(100_000), 300),
        (None, 5),
    ] {
        let recursor = with_alias_only(minimum).await;
        let (source, cache) = source(&recursor, Compat::default(), &CONFIG);
        for _ in 0..2 {
            assert_eq!(
                ttl(&ask(&source, &query(NAME, 1)).await),
                expected,
                "minimum {minimum:?}"
            );
        }
        let key = cache.key(&parsed(&query(NAME, 1))).unwrap();
        let (entry, left) = cache.peek(&key).unwrap();
        assert!(entry.denial && left.unwrap().as_secs() <= expected.into());
        assert_eq!(recursor.counts().0, 1);
    }
    // Not to be cached at all.
    let recursor = with_alias_only(Some(0)).await;
    let (to_zero, _) = source(&recursor, Compat::default(), &CONFIG);
    for expected in [1, 2] {
        ask(&to_zero, &query(NAME, 1)).await;
        assert_eq!(recursor.counts().0, expected);
    }
    // An alias is the data of a query for it.
    let recursor = with_alias_only(None).await;
    let (source, _) = source(&recursor, Compat::default(), &CONFIG);
    for qtype in [5, 255] {
        assert_eq!(ttl(&ask(&source, &query(NAME, qtype)).await), 300);
    }
}

/// Returns the INFO-CODEs and texts of the Extended DNS Errors in a reply.
fn errors(reply: &[u8]) -> Vec<(u16, String)> {
    let index = message::MessageIndex::of(reply).unwrap();
    let opt = index.opt.expect("the query has an OPT");
    let text = |error: ExtendedError| {
        (
            error.code,
            String::from_utf8_lossy(&error.text).into_owned(),
        )
    };
    ExtendedError::read_all(&reply[opt.start + OPT_LEN..opt.end])
        .into_iter()
        .map(text)
        .collect()
}

#[tokio::test]
async fn failures_carry_their_reason() {
    let silent = Scripted::start(|_| vec![]).await;
    let (to_silent, _) = source(&silent, Compat::default(), &CONFIG);
    let asked = with_opt(query(NAME, 1), false);
    let first = errors(&ask(&to_silent, &asked).await);
    assert_eq!(
        first,
        [(22, "no recursor answered: no reply in time".to_owned())]
    );
    let again = errors(&ask(&to_silent, &asked).await);
    assert_eq!(again, [first[0].clone(), (13, String::new())]);
    // No task is needed for a failure that is known.
    let mut at_once = Vec::new();
    assert!(to_silent.answer_at_once(&parsed(&asked), &mut at_once));
    assert_eq!(errors(&at_once), again);
    // Without EDNS there is no place for them.
    let plain = ask(&to_silent, &query(NAME, 28)).await;
    assert_eq!(message::MessageIndex::of(&plain).unwrap().opt, None);

    let denied = UncachedSource::Deny(crate::Denial::Nxdomain);
    let denied = CachedSource::new(denied, None, form(Compat::default()), Compat::default());
    let mut reply = Vec::new();
    assert!(denied.answer_at_once(&parsed(&asked), &mut reply));
    for reply in [reply, ask(&denied, &asked).await] {
        assert_eq!(
            (rcode(&reply), errors(&reply)[0].0),
            (message::NXDOMAIN, 15)
        );
    }
}

#[tokio::test]
async fn recursors_reasons_are_passed_on() {
    // SERVFAIL with "DNSSEC Bogus" and padding, then NXDOMAIN with "Filtered".
    for (failure, code, text) in [(message::SERVFAIL, 6, "bad"), (message::NXDOMAIN, 17, "")] {
        let recursor = Scripted::start(move |query| {
            let mut reply = refuse(query, failure);
            let options = [
                &b"\0\x0c\0\x02\0\0\0\x0f"[..],
                &(2 + text.len() as u16).to_be_bytes(),
                &[0, code],
                text.as_bytes(),
            ]
            .concat();
            reply.extend_from_slice(b"\0\0\x29\x04\xd0\0\0\0\0");
            reply.extend_from_slice(&(options.len() as u16).to_be_bytes());
            reply.extend_from_slice(&options);
            reply[11] = 1;
            vec![reply]
        })
        .await;
        let (source, _) = source(&recursor, Compat::default(), &CONFIG);
        let reply = ask(&source, &with_opt(query(NAME, 1), false)).await;
        assert_eq!(
            (rcode(&reply), errors(&reply)),
            (failure, vec![(code.into(), text.to_owned())])
        );
        let reply = ask(&source, &query(NAME, 28)).await;
        assert_eq!(message::MessageIndex::of(&reply).unwrap().opt, None);
    }
}

#[test]
fn keys_have_the_form_of_the_settings() {
    for (transparent_forwarding, cache_as_authority) in
        [(false, false), (true, false), (false, true), (true, true)]
    {
        let compat = Compat {
            transparent_forwarding,
            cache_as_authority,
            ..Compat::default()
        };
        let cache = Cache::new(&CONFIG, form(compat), compat);
        let expected = !transparent_forwarding && !cache_as_authority;
        assert_eq!(cache.has_keys_of_form(), expected, "{compat:?}");
    }
}
