//! Tests of forwarding: matching, failover, retries and faithful errors.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;

use super::{scripted::*, *};
use crate::{host_names::HostNames, own::OwnAddresses};

const NAME: &[u8] = b"\x02oK\x07eXample\0";

#[tokio::test]
async fn id_and_case_are_restored() {
    let seen: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let log = Arc::clone(&seen);
    let recursor = Scripted::start(move |query| {
        log.lock().push(query.to_vec());
        let mut reply = answer(query, &[[192, 0, 2, 1]]);
        // A recursor that lower-cases names, and a record of an unknown type.
        reply[12..12 + NAME.len()].make_ascii_lowercase();
        assert!(message::push_answer(
            &mut reply,
            &message::QUESTION_NAME,
            65_280,
            1,
            b"\x01\x02"
        ));
        vec![reply]
    })
    .await;
    let forwarder = forwarder(&[recursor.name()], 0, Compat::default());
    for transport in [Transport::Udp, Transport::Tcp] {
        let query = query(NAME, 1);
        let reply = ask(&forwarder, &query, transport).await;
        assert_eq!(&reply[12..12 + NAME.len()], NAME);
        assert!(reply.ends_with(b"\xc0\x0c\xff\0\0\x01\0\0\0\x01\0\x02\x01\x02"));
        let sent = seen.lock().pop().unwrap();
        assert_eq!(
            sent[2..12],
            *b"\x01\x20\0\x01\0\0\0\0\0\x01",
            "AD and an OPT are ours"
        );
        assert_eq!(
            sent[12..query.len()],
            query[12..],
            "the question goes up as it came"
        );
    }
}

#[tokio::test]
async fn ids_and_ports_change() {
    let seen: Arc<Mutex<std::collections::HashSet<u16>>> = Arc::default();
    let log = Arc::clone(&seen);
    let recursor = Scripted::start(move |query| {
        log.lock().insert(message::id(query));
        vec![answer(query, &[])]
    })
    .await;
    let forwarder = forwarder(&[recursor.name()], 0, Compat::default());
    for _ in 0..100 {
        ask(&forwarder, &query(NAME, 1), Transport::Udp).await;
    }
    assert!(seen.lock().len() > 90);
}

#[tokio::test]
async fn forged_replies_are_dropped() {
    let recursor = Scripted::start(|query| {
        let mut wrong_id = answer(query, &[[6, 6, 6, 6]]);
        wrong_id[0] ^= 0x55;
        let mut wrong_name = answer(query, &[[6, 6, 6, 6]]);
        wrong_name[13] = b'x';
        let mut wrong_type = answer(query, &[[6, 6, 6, 6]]);
        wrong_type[12 + NAME.len() + 1] = 28;
        let mut wrong_class = answer(query, &[[6, 6, 6, 6]]);
        wrong_class[12 + NAME.len() + 3] = 3;
        let no_reply = query.to_vec();
        let mut notify = answer(query, &[[6, 6, 6, 6]]);
        notify[2] |= 4 << 3;
        let mut update = answer(query, &[[6, 6, 6, 6]]);
        update[2] |= 5 << 3;
        let other_kinds = [no_reply, notify, update];
        let others = [wrong_id, wrong_name, wrong_type, wrong_class]
            .into_iter()
            .chain(other_kinds);
        others.chain([answer(query, &[[192, 0, 2, 1]])]).collect()
    })
    .await;
    for compat in [Compat::default(), Compat::REFERENCE] {
        let forwarder = forwarder(&[recursor.name()], 0, compat);
        let reply = ask(&forwarder, &query(NAME, 1), Transport::Udp).await;
        assert!(reply.ends_with(&[192, 0, 2, 1]), "{compat:?}");
    }
}

#[tokio::test]
async fn compat_accepts_mismatched_question() {
    let recursor = Scripted::start(|query| {
        let mut reply = answer(query, &[[192, 0, 2, 1]]);
        reply[13] = b'x';
        vec![reply]
    })
    .await;
    let names = [recursor.name()];
    let reply = ask(
        &forwarder(&names, 0, Compat::default()),
        &query(NAME, 1),
        Transport::Udp,
    )
    .await;
    assert_eq!(rcode(&reply), message::SERVFAIL);
    let reply = ask(
        &forwarder(&names, 0, Compat::REFERENCE),
        &query(NAME, 1),
        Transport::Udp,
    )
    .await;
    assert_eq!((rcode(&reply), reply[13]), (message::NOERROR, b'x'));
}

#[tokio::test]
async fn only_network_errors_are_retried() {
    let count = Arc::new(AtomicUsize::new(0));
    let silent_twice = {
        let count = Arc::clone(&count);
        Scripted::start(move |query| match count.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => vec![],
            _ => vec![answer(query, &[[192, 0, 2, 1]])],
        })
        .await
    };
    let forwarder2 = forwarder(&[silent_twice.name()], 2, Compat::default());
    let reply = ask(&forwarder2, &query(NAME, 1), Transport::Udp).await;
    assert_eq!(
        (rcode(&reply), silent_twice.counts().0),
        (message::NOERROR, 3)
    );

    for broken in [message::SERVFAIL, message::REFUSED, 9] {
        let failing = Scripted::start(move |query| vec![refuse(query, broken)]).await;
        let working = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 2]])]).await;
        let forwarder = forwarder(&[failing.name(), working.name()], 2, Compat::default());
        for transport in [Transport::Udp, Transport::Tcp] {
            let reply = ask(&forwarder, &query(NAME, 1), transport).await;
            assert_eq!(rcode(&reply), message::NOERROR);
        }
        assert_eq!((failing.counts(), working.counts()), ((1, 1), (1, 1)));
    }

    for junk in [
        &b"\0\0"[..],
        b"\0\0\x81\x80\0\x01\0\0\0\0",
        b"\0\0\x81\x80\0\x01\0\x01\0\0\0\0\x02ok",
    ] {
        let junk = junk.to_vec();
        let broken = Scripted::start(move |query| {
            let mut reply = junk.clone();
            reply[..2].copy_from_slice(&query[..2]);
            vec![reply]
        })
        .await;
        let forwarder = forwarder(&[broken.name()], 2, Compat::default());
        let reply = ask(&forwarder, &query(NAME, 1), Transport::Udp).await;
        assert_eq!((rcode(&reply), broken.counts().0), (message::SERVFAIL, 1));
    }
}

#[tokio::test]
async fn nxdomain_skips_silent_recursor() {
    let answers = Arc::new(AtomicUsize::new(0));
    let other = {
        let answers = Arc::clone(&answers);
        Scripted::start(move |query| match answers.load(Ordering::Relaxed) {
            0 => vec![],
            _ => vec![answer(query, &[[192, 0, 2, 1]])],
        })
        .await
    };
    let denying = Scripted::start(|query| vec![nxdomain(query)]).await;
    let names = [denying.name(), other.name()];
    let truthful = forwarder(&names, 0, Compat::default());
    let question = query(NAME, 1);
    for _ in 0..5 {
        assert_eq!(
            rcode(&ask(&truthful, &question, Transport::Udp).await),
            message::NXDOMAIN
        );
    }
    assert_eq!(other.counts().0, 5, "it may be worth waiting for");
    for _ in 0..20 {
        assert_eq!(
            rcode(&ask(&truthful, &question, Transport::Udp).await),
            message::NXDOMAIN
        );
    }
    // A query that waits for the silent recursor has asked it; probes in the background are few.
    let asked = other.counts().0 - 5;
    assert!(asked < 20, "the silent recursor was asked {asked} times");
    // Without any answer yet, the silent recursor is queried.
    let alone = forwarder(&names[1..], 0, Compat::default());
    for _ in 0..6 {
        assert_eq!(
            rcode(&ask(&alone, &question, Transport::Udp).await),
            message::SERVFAIL
        );
    }
    // Background probes detect that it answers again.
    answers.store(1, Ordering::Relaxed);
    while rcode(&ask(&truthful, &question, Transport::Udp).await) != message::NOERROR {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    // bosh-dns waits.
    answers.store(0, Ordering::Relaxed);
    let (before, reference) = (other.counts().0, forwarder(&names, 0, Compat::REFERENCE));
    for _ in 0..7 {
        ask(&reference, &question, Transport::Udp).await;
    }
    assert_eq!(other.counts().0, before + 7);
}

#[tokio::test]
async fn closed_connection_is_not_retried() {
    let closing = Scripted::start(|_| vec![]).await;
    let forwarder = forwarder(&[closing.name()], 3, Compat::default());
    let reply = ask(&forwarder, &query(NAME, 1), Transport::Tcp).await;
    assert_eq!((rcode(&reply), closing.counts().1), (message::SERVFAIL, 1));
}

#[tokio::test]
async fn tcp_connections_are_used_again() {
    let recursor = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
    let forwarder = forwarder(&[recursor.name()], 0, Compat::default());
    for _ in 0..5 {
        ask(&forwarder, &query(NAME, 1), Transport::Tcp).await;
    }
    assert_eq!(
        (
            recursor.counts().1,
            recursor.connections.load(Ordering::Relaxed)
        ),
        (5, 1)
    );
}

/// Behaviour of a recursor for every query.
type End = fn(&[u8]) -> Vec<Vec<u8>>;

/// Returns the client's reply when the recursors behave as in `ends`.
async fn verdict(compat: Compat, ends: &[End]) -> Vec<u8> {
    let mut recursors = Vec::new();
    for &end in ends {
        recursors.push(Scripted::start(end).await);
    }
    let names: Vec<String> = recursors.iter().map(Scripted::name).collect();
    ask(
        &forwarder(&names, 0, compat),
        &query(NAME, 1),
        Transport::Udp,
    )
    .await
}

#[tokio::test]
async fn errors_are_truthful() {
    let silent: End = |_| vec![];
    let servfail: End = |query| vec![refuse(query, message::SERVFAIL)];
    let refused: End = |query| vec![refuse(query, message::REFUSED)];
    let bare: End = |query| vec![refuse(query, message::NXDOMAIN)];
    let with_soa: End = |query| vec![nxdomain(query)];
    let headless: End = |query| {
        let mut reply = query[..12].to_vec();
        reply[2..].copy_from_slice(&[0x81, 0x80 | message::REFUSED, 0, 0, 0, 0, 0, 0, 0, 0]);
        vec![reply]
    };
    for (ends, expected) in [
        (vec![silent], message::SERVFAIL),
        (vec![servfail], message::SERVFAIL),
        (vec![refused], message::REFUSED),
        (vec![headless], message::REFUSED),
        (vec![bare], message::NXDOMAIN),
        (vec![servfail, refused], message::REFUSED),
        (vec![refused, servfail], message::SERVFAIL),
        (vec![refused, silent], message::REFUSED),
        (vec![with_soa, servfail, silent], message::NXDOMAIN),
        (vec![with_soa, bare], message::NXDOMAIN),
    ] {
        let reply = verdict(Compat::default(), &ends).await;
        assert_eq!(rcode(&reply), expected);
        assert_eq!(&reply[12..12 + NAME.len()], NAME);
        let has_soa = reply[9] == 1;
        assert_eq!(
            has_soa,
            ends.iter().any(|&end| std::ptr::fn_addr_eq(end, with_soa)),
            "the SOA comes along"
        );
        let reply = verdict(Compat::REFERENCE, &ends).await;
        assert_eq!(
            reply[2..12],
            [0x81, message::NXDOMAIN, 0, 1, 0, 0, 0, 0, 0, 0],
            "bare NXDOMAIN"
        );
    }
}

#[tokio::test]
async fn closed_port_fails_immediately() {
    let closed = std::net::UdpSocket::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    let working = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
    let compat = Compat::default();
    // A try that waited for its timeout would outlast the test.
    let patient = RecursorOptions {
        timeout: 3600 * TIMEOUT,
        ..options(1, compat)
    };
    let names = [closed, working.name()];
    let forwarder = Forwarder::new(
        &names,
        patient,
        RecursorSelection::Serial,
        compat,
        &Arc::default(),
    );
    for transport in [Transport::Udp, Transport::Tcp] {
        let reply = ask(&forwarder, &query(NAME, 1), transport).await;
        assert_eq!(rcode(&reply), message::NOERROR);
    }
}

#[tokio::test]
async fn ipv6_and_host_names_work() {
    if test_support::requirements::ipv6() {
        let recursor =
            Scripted::start_on("[::1]:0", |query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
        let forwarder = forwarder(&[recursor.name()], 0, Compat::default());
        let reply = ask(&forwarder, &query(NAME, 1), Transport::Udp).await;
        assert_eq!(rcode(&reply), message::NOERROR);
    }

    let recursor = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
    let by_name = format!("localhost:{}", recursor.address.port());
    let forwarder = forwarder(&[by_name], 3, Compat::default());
    let reply = ask(&forwarder, &query(NAME, 1), Transport::Udp).await;
    assert_eq!(rcode(&reply), message::NOERROR);
}

#[tokio::test]
async fn recursor_hosts_resolve_in_background() {
    let target = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
    let resolver = Scripted::start(|query| match parsed(query).question.qtype {
        1 => vec![answer(query, &[[127, 0, 0, 1]])],
        _ => vec![refuse(query, message::NOERROR)],
    })
    .await;
    let hosts = HostNames::new(
        &[resolver.name(), "ns.other:53".to_owned()],
        OwnAddresses::default(),
    );
    let by_name = format!("ns.test:{}", target.address.port());
    let compat = Compat::default();
    let forwarder = Forwarder::new(
        &[by_name],
        options(0, compat),
        RecursorSelection::Serial,
        compat,
        &hosts,
    );
    for _ in 0..200 {
        assert_eq!(
            rcode(&ask(&forwarder, &query(NAME, 1), Transport::Udp).await),
            message::NOERROR
        );
    }
    assert_eq!((target.counts().0, resolver.counts().0), (200, 1));

    // An unknown name costs one look-up at a time, however many queries wait.
    let silent = Scripted::start(|_| vec![]).await;
    let hosts = HostNames::new(&[silent.name()], OwnAddresses::default());
    let forwarder = Forwarder::new(
        &["ns.test:53".to_owned()],
        options(0, compat),
        RecursorSelection::Serial,
        compat,
        &hosts,
    );
    for _ in 0..3 {
        assert_eq!(
            rcode(&ask(&forwarder, &query(NAME, 1), Transport::Udp).await),
            message::SERVFAIL
        );
    }
    assert!(silent.counts().0 <= 2, "{} look-ups", silent.counts().0);
}

#[tokio::test]
async fn large_replies_are_read_whole() {
    let addresses: Vec<[u8; 4]> = (0..4000u16)
        .map(|n| [10, 0, (n >> 8) as u8, n as u8])
        .collect();
    let recursor = Scripted::start(move |query| vec![answer(query, &addresses)]).await;
    let forwarder = forwarder(&[recursor.name()], 0, Compat::default());
    for transport in [Transport::Udp, Transport::Tcp] {
        let reply = ask(&forwarder, &query(NAME, 1), transport).await;
        assert_eq!(message::u16_at(&reply, 6), Some(4000));
        assert!(message::MessageIndex::of(&reply).is_some());
    }
}

#[tokio::test]
async fn edns_refusal_retries_without_edns() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let old = {
        let seen = Arc::clone(&seen);
        Scripted::start(move |query| {
            seen.lock().push(parsed(query).edns.is_some());
            let rcode = if parsed(query).edns.is_some() {
                message::FORMERR
            } else {
                message::NOERROR
            };
            vec![refuse(query, rcode)]
        })
        .await
    };
    let forwarder = forwarder(&[old.name()], 0, Compat::default());
    for transport in [Transport::Udp, Transport::Tcp] {
        assert_eq!(
            rcode(&ask(&forwarder, &query(NAME, 1), transport).await),
            message::NOERROR
        );
    }
    assert_eq!(*seen.lock(), [true, false, true, false]);
}

#[tokio::test]
async fn many_queries_share_few_connections() {
    let recursor = Scripted::start(|query| vec![answer(query, &[[192, 0, 2, 1]])]).await;
    let forwarder = Arc::new(forwarder(&[recursor.name()], 0, Compat::default()));
    for _ in 0..5 {
        let mut queries = tokio::task::JoinSet::new();
        for number in 0..100u8 {
            let forwarder = Arc::clone(&forwarder);
            queries.spawn(async move {
                let name = [b"\x01", &[number][..], b"\0"].concat();
                rcode(&ask(&forwarder, &query(&name, 1), Transport::Tcp).await)
            });
        }
        while let Some(rcode) = queries.join_next().await {
            assert_eq!(rcode.unwrap(), message::NOERROR);
        }
    }
    assert_eq!(recursor.counts().1, 500);
    assert!(recursor.connections.load(Ordering::Relaxed) <= 4);
}

/// Starts a server that closes each TCP connection after a number of replies, like a FIN that
/// crosses the next query. Returns its address and the number of connections.
async fn closing_after(replies: usize) -> (String, Arc<AtomicUsize>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let name = listener.local_addr().unwrap().to_string();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&connections);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(async move {
                for left in (0..=replies).rev() {
                    let Ok(length) = stream.read_u16().await else {
                        return;
                    };
                    let mut query = vec![0; usize::from(length)];
                    let read = stream.read_exact(&mut query).await;
                    if read.is_err() || left == 0 {
                        return;
                    }
                    let reply = answer(&query, &[[192, 0, 2, 1]]);
                    let frame = [&(reply.len() as u16).to_be_bytes()[..], &reply].concat();
                    let _ = stream.write_all(&frame).await;
                }
            });
        }
    });
    (name, connections)
}

#[tokio::test]
async fn query_survives_shared_connection_close() {
    for replies in [1, 3] {
        let (name, connections) = closing_after(replies).await;
        let forwarder = forwarder(&[name], 0, Compat::default());
        for number in 0..20u8 {
            let name = [b"\x01", &[number][..], b"\0"].concat();
            let reply = ask(&forwarder, &query(&name, 1), Transport::Tcp).await;
            assert_eq!(
                rcode(&reply),
                message::NOERROR,
                "query {number}, {replies} replies a connection"
            );
        }
        assert!(connections.load(Ordering::Relaxed) >= 20 / (replies + 1));
    }
}

#[tokio::test]
async fn random_case_is_checked_and_undone() {
    let seen: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let log = Arc::clone(&seen);
    let recursor = Scripted::start(move |query| {
        log.lock().push(query[12..12 + NAME.len()].to_vec());
        vec![answer(query, &[[192, 0, 2, 1]])]
    })
    .await;
    let options = RecursorOptions {
        randomise_case: true,
        ..options(0, Compat::default())
    };
    let forwarder = Forwarder::new(
        &[recursor.name()],
        options,
        RecursorSelection::Serial,
        Compat::default(),
        &Arc::default(),
    );
    for _ in 0..20 {
        let reply = ask(&forwarder, &query(NAME, 1), Transport::Udp).await;
        assert_eq!(&reply[12..12 + NAME.len()], NAME);
    }
    let mut names = seen.lock().clone();
    assert!(names.iter().all(|name| name.eq_ignore_ascii_case(NAME)));
    names.sort();
    names.dedup();
    assert!(names.len() > 5, "nine letters, twenty queries");

    // A reply in other letters counts at no try: a forger may cause the first one to fail.
    let long = b"\x1eabcdefghijklmnopqrstuvwxyzabcd\0";
    let tries: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let log = Arc::clone(&tries);
    let lowering = Scripted::start(move |query| {
        log.lock().push(query[12..12 + long.len()].to_vec());
        let mut reply = answer(query, &[[192, 0, 2, 1]]);
        reply[12..12 + long.len()].make_ascii_lowercase();
        vec![reply]
    })
    .await;
    let options = RecursorOptions {
        max_retries: 3,
        ..options
    };
    let forwarder = Forwarder::new(
        &[lowering.name()],
        options,
        RecursorSelection::Serial,
        Compat::default(),
        &Arc::default(),
    );
    let reply = ask(&forwarder, &query(long, 1), Transport::Udp).await;
    assert_eq!(rcode(&reply), message::SERVFAIL);
    let mut tries = tries.lock().clone();
    // The last one is without EDNS.
    assert_eq!(tries.len(), 5);
    tries.sort();
    tries.dedup();
    assert_eq!(tries.len(), 5, "new letters for every try");
}

/// Returns a reply over UDP that is cut short at `length`, with TC, and a complete one over TCP.
async fn cut_at(length: usize) -> Scripted {
    let answered = Arc::new(AtomicUsize::new(0));
    Scripted::start(move |query| {
        let mut reply = answer(query, &[[192, 0, 2, 1]; 40]);
        if answered.fetch_add(1, Ordering::Relaxed) == 0 {
            message::set_truncated(&mut reply, true);
            reply.truncate(length);
        }
        vec![reply]
    })
    .await
}

#[tokio::test]
async fn tc_ignores_cut_content() {
    let question_end = 12 + NAME.len() + 4;
    // Behind the header, inside and behind the question, inside and behind a record.
    for length in [
        12,
        15,
        question_end - 1,
        question_end,
        question_end + 5,
        question_end + 16,
    ] {
        for randomise_case in [false, true] {
            let recursor = cut_at(length).await;
            let compat = Compat::default();
            let options = RecursorOptions {
                randomise_case,
                ..options(0, compat)
            };
            let forwarder = Forwarder::new(
                &[recursor.name()],
                options,
                RecursorSelection::Serial,
                compat,
                &Arc::default(),
            );
            let reply = ask(&forwarder, &query(NAME, 1), Transport::Udp).await;
            assert_eq!(
                (rcode(&reply), message::u16_at(&reply, 6)),
                (message::NOERROR, Some(40)),
                "{length}"
            );
            assert_eq!(recursor.counts(), (1, 1), "cut at {length}");
        }
    }
}

#[tokio::test]
async fn cut_reply_stays_truncated_without_tcp() {
    // Even the RCODE of a reply that is cut short counts for nothing.
    let recursor = Scripted::start(|query| {
        let mut reply = refuse(query, message::NXDOMAIN);
        message::set_truncated(&mut reply, true);
        reply.truncate(12);
        vec![reply]
    })
    .await;
    let forwarder = forwarder(&[recursor.name()], 0, Compat::default());
    let reply = ask(&forwarder, &query(NAME, 1), Transport::Udp).await;
    assert_eq!(
        (rcode(&reply), message::Flags::of(&reply).truncated()),
        (message::NOERROR, true)
    );
    assert_eq!(&reply[12..12 + NAME.len()], NAME);
}

#[tokio::test]
async fn questionless_nxdomain_is_ignored() {
    for randomise_case in [false, true] {
        let recursor = Scripted::start(|query| {
            let mut denial = query[..12].to_vec();
            denial[2..].copy_from_slice(&[0x81, 0x80 | message::NXDOMAIN, 0, 0, 0, 0, 0, 0, 0, 0]);
            vec![denial, answer(query, &[[192, 0, 2, 1]])]
        })
        .await;
        let alone = Scripted::start(|query| {
            let mut denial = query[..12].to_vec();
            denial[2..].copy_from_slice(&[0x81, 0x80 | message::NXDOMAIN, 0, 0, 0, 0, 0, 0, 0, 0]);
            vec![denial]
        })
        .await;
        let compat = Compat::default();
        let options = RecursorOptions {
            randomise_case,
            ..options(0, compat)
        };
        let to = |name: String| {
            Forwarder::new(
                &[name],
                options,
                RecursorSelection::Serial,
                compat,
                &Arc::default(),
            )
        };
        for transport in [Transport::Udp, Transport::Tcp] {
            let reply = ask(&to(alone.name()), &query(NAME, 1), transport).await;
            assert_eq!(rcode(&reply), message::SERVFAIL, "{transport:?}");
        }
        let reply = ask(&to(recursor.name()), &query(NAME, 1), Transport::Udp).await;
        assert!(reply.ends_with(&[192, 0, 2, 1]));
    }
}

#[tokio::test]
async fn dropped_edns_is_left_out() {
    let drops = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let recursor = {
        let drops = Arc::clone(&drops);
        Scripted::start(move |query| {
            if parsed(query).edns.is_some() && drops.load(Ordering::Relaxed) {
                return vec![];
            }
            vec![answer(query, &[[192, 0, 2, 1]])]
        })
        .await
    };
    let forwarder = forwarder(&[recursor.name()], 0, Compat::default());
    assert_eq!(
        rcode(&ask(&forwarder, &query(NAME, 1), Transport::Udp).await),
        message::SERVFAIL
    );
    for _ in 0..20 {
        assert_eq!(
            rcode(&ask(&forwarder, &query(NAME, 1), Transport::Udp).await),
            message::NOERROR
        );
    }
    let drops_edns = || crate::status::recursor_statuses(&forwarder)[0].drops_edns;
    assert!(drops_edns());
    // Two queries with EDNS, 20 without, and one that checks whether EDNS is still dropped.
    assert_eq!(recursor.counts(), (23, 0));

    // A recursor that was merely silent is queried with EDNS again.
    let recovers = Arc::new(AtomicUsize::new(0));
    let recovering = {
        let recovers = Arc::clone(&recovers);
        Scripted::start(
            move |query| match recovers.fetch_add(1, Ordering::Relaxed) {
                0 | 1 => vec![],
                _ => vec![answer(query, &[[192, 0, 2, 1]])],
            },
        )
        .await
    };
    let forwarder = super::forwarder(&[recovering.name()], 0, Compat::default());
    assert_eq!(
        rcode(&ask(&forwarder, &query(NAME, 1), Transport::Udp).await),
        message::SERVFAIL
    );
    assert_eq!(
        rcode(&ask(&forwarder, &query(NAME, 1), Transport::Udp).await),
        message::NOERROR
    );
    while crate::status::recursor_statuses(&forwarder)[0].drops_edns {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn false_denials_reveal_failures() {
    for (denies, failed) in [(true, false), (false, true)] {
        let recursor = Scripted::start(move |query| {
            vec![if denies {
                nxdomain(query)
            } else {
                refuse(query, message::SERVFAIL)
            }]
        })
        .await;
        let reference = forwarder(&[recursor.name()], 0, Compat::REFERENCE);
        let question = query(NAME, 1);
        let forwarded = reference.forward(&parsed(&question)).await;
        assert_eq!(rcode(&forwarded.reply), message::NXDOMAIN);
        assert_eq!((forwarded.failed, forwarded.keep), (failed, false));
    }
}

/// Returns a query for [`NAME`] with Client Subnet 192.0.`third`.0/24.
fn with_subnet(third: u8) -> Vec<u8> {
    let mut query = query(NAME, 1);
    query[11] = 1;
    query.extend_from_slice(b"\0\0\x29\x04\xd0\0\0\0\0\0\x0b\0\x08\0\x07\0\x01\x18\0\xc0\0");
    query.push(third);
    query
}

#[tokio::test]
async fn overload_fails_no_name() {
    let silent = Scripted::start(|_| vec![]).await;
    let compat = Compat::default();
    let options = RecursorOptions {
        timeout: Duration::from_secs(3600),
        form: Form {
            client_subnet: true,
            ..Form::default()
        },
        ..options(0, compat)
    };
    let forwarder = Arc::new(Forwarder::new(
        &[silent.name()],
        options,
        RecursorSelection::Serial,
        compat,
        &Arc::default(),
    ));
    let mut waiting = Vec::new();
    for third in 0..8 {
        let forwarder = Arc::clone(&forwarder);
        waiting.push(tokio::spawn(async move {
            let query = with_subnet(third);
            forwarder.forward(&parsed(&query)).await.failed
        }));
    }
    while silent.counts().0 < 8 {
        tokio::task::yield_now().await;
    }
    // Each socket has a query for this name in flight, as many as a forger may guess at.
    let ninth = with_subnet(8);
    let refused = forwarder.forward(&parsed(&ninth)).await;
    assert!(refused.failed && refused.busy);
    assert_eq!(
        &*refused.errors[0].text,
        b"no recursor answered: too many queries in flight"
    );
    let status = &crate::status::recursor_statuses(&forwarder)[0];
    assert_eq!((status.recent_failures, status.unanswered_tries), (0, 0));
    assert_eq!(status.failures.get("given_up"), Some(&1));
    assert_eq!(silent.counts(), (8, 0));
    waiting.iter().for_each(|query| query.abort());
}
