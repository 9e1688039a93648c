//! Scenarios of a caching forwarder: the same questions with each way of answering them.

use std::{
    net::Ipv4Addr,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, CNAME, TXT},
    },
};
use serde_json::{Value, json};
use whole_system_tests::{client, namespace::Namespace};

use super::{
    lab::{Lab, loopback, namespace},
    real_servers::{answers, ask, query, sections, servers},
    scripted::{Asked, Scripted},
};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// The way in which repeated questions are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Every question goes to the recursor.
    CacheOff,
    /// Userspace answers from its cache.
    Userspace,
}

impl Mode {
    const ALL: [Self; 2] = [Self::CacheOff, Self::Userspace];

    /// Returns whether repeated questions are answered from a cache.
    fn caches(self) -> bool {
        self != Self::CacheOff
    }

    /// Starts the server; `cache` is merged into its settings for the cache.
    fn start<'a>(self, namespace: &'a Namespace, cache: &Value) -> Result<Lab<'a>> {
        let mut settings = json!({"recursor_timeout": "300ms", "cache": {"enabled": self.caches()}});
        whole_system_tests::server::merge(&mut settings["cache"], cache);
        Lab::start(namespace, &[loopback(10)], &settings)
    }
}

/// A question that is asked several times, and the replies.
struct Scenario {
    /// First label of the name, which selects the reply of [`script`].
    name: &'static str,
    rcode: ResponseCode,
    /// Records in the answer section.
    answers: usize,
    /// TTL of the first reply from the recursor, by mode.
    ttl: (u32, u32),
    /// Number of questions to the recursor for three questions at once, by mode.
    asked: (usize, usize),
    /// Whether the answer is still cached after [`LATER`].
    outlives: bool,
}

/// Time until the questions are repeated: more than the smallest TTL of a cached answer.
const LATER: Duration = Duration::from_millis(5300);

const SCENARIOS: [Scenario; 9] = [
    Scenario {
        name: "day",
        rcode: ResponseCode::NoError,
        answers: 1,
        ttl: (86_400, 3600),
        asked: (3, 1),
        outlives: true,
    },
    Scenario {
        name: "second",
        rcode: ResponseCode::NoError,
        answers: 1,
        ttl: (1, 5),
        asked: (3, 1),
        outlives: false,
    },
    Scenario {
        name: "zero",
        rcode: ResponseCode::NoError,
        answers: 1,
        ttl: (0, 0),
        asked: (3, 3),
        outlives: false,
    },
    Scenario {
        name: "several",
        rcode: ResponseCode::NoError,
        answers: 20,
        ttl: (300, 300),
        asked: (3, 1),
        outlives: true,
    },
    // The TTL of a chain is its smallest.
    Scenario {
        name: "chain",
        rcode: ResponseCode::NoError,
        answers: 3,
        ttl: (300, 60),
        asked: (3, 1),
        outlives: true,
    },
    Scenario {
        name: "nowhere",
        rcode: ResponseCode::NXDomain,
        answers: 0,
        ttl: (900, 60),
        asked: (3, 1),
        outlives: true,
    },
    Scenario {
        name: "brief",
        rcode: ResponseCode::NXDomain,
        answers: 0,
        ttl: (900, 5),
        asked: (3, 1),
        outlives: false,
    },
    Scenario {
        name: "nodata",
        rcode: ResponseCode::NoError,
        answers: 0,
        ttl: (60, 60),
        asked: (3, 1),
        outlives: true,
    },
    // Without an SOA, a denial has no TTL.
    Scenario {
        name: "bare",
        rcode: ResponseCode::NXDomain,
        answers: 0,
        ttl: (0, 0),
        asked: (3, 3),
        outlives: false,
    },
];

/// The recursor's reply to a question.
fn script(asked: &Asked) -> Message {
    let name = asked.name().to_ascii_lowercase();
    let several = |records: &[(u32, RData)]| {
        let mut reply = asked.reply(ResponseCode::NoError);
        for (ttl, data) in records {
            reply.add_answer(Record::from_rdata(reply.queries[0].name().clone(), *ttl, data.clone()));
        }
        reply
    };
    match name.split('.').next() {
        Some("day") => asked.answer(ADDRESS, 86_400),
        Some("second") => asked.answer(ADDRESS, 1),
        Some("zero") => asked.answer(ADDRESS, 0),
        Some("several") => {
            let records: Vec<_> = (1..=20).map(|last| (300, RData::A(A::new(192, 0, 2, last)))).collect();
            several(&records)
        }
        Some("chain") => chain(asked),
        Some("nowhere") => asked.deny(ResponseCode::NXDomain, 900, 60),
        Some("brief") => asked.deny(ResponseCode::NXDomain, 900, 5),
        Some("nodata") => asked.deny(ResponseCode::NoError, 60, 900),
        Some("signed") => {
            let dnssec = asked.message.edns.as_ref().is_some_and(|edns| edns.flags().dnssec_ok);
            let proof = RData::TXT(TXT::new(vec!["stands for a signature".to_owned()]));
            let records = [(300, RData::A(A(ADDRESS))), (300, proof)];
            several(if dnssec { &records } else { &records[..1] })
        }
        _ => asked.reply(ResponseCode::NXDomain),
    }
}

/// Two aliases with different TTLs, then an address.
fn chain(asked: &Asked) -> Message {
    let mut reply = asked.reply(ResponseCode::NoError);
    let name = |text| Name::from_ascii(text).expect("a name of our own making");
    let links = [(300, "one.test."), (60, "two.test.")];
    let mut owner = reply.queries[0].name().clone();
    for (ttl, target) in links {
        reply.add_answer(Record::from_rdata(owner, ttl, RData::CNAME(CNAME(name(target)))));
        owner = name(target);
    }
    reply.add_answer(Record::from_rdata(owner, 120, RData::A(A(ADDRESS))));
    reply
}

/// Returns the TTL of the first record.
fn ttl(reply: &Message) -> u32 {
    reply.answers.first().or(reply.authorities.first()).map_or(0, |record| record.ttl)
}

/// Asks for a name with room for large replies and checks all but the TTL, which is returned.
fn check(lab: &Lab<'_>, scenario: &Scenario, spelling: &str) -> Result<u32> {
    let name = format!("{spelling}.test.");
    let reply = lab.ask(&client::query(&name, RecordType::A, Some(1232))?)?;
    let fits = reply.metadata.response_code == scenario.rcode
        && reply.answers.len() == scenario.answers
        && reply.queries[0].name().to_string() == name
        && reply.metadata.recursion_available
        && !reply.metadata.truncation;
    ensure!(fits, "{reply}");
    let owner = reply.answers.first().map(|record| record.name.to_string());
    ensure!(owner.is_none_or(|owner| owner.eq_ignore_ascii_case(&name)), "{reply}");
    Ok(ttl(&reply))
}

/// Returns how often the recursor was asked for a scenario's name.
fn count(recursor: &Scripted, scenario: &Scenario) -> usize {
    let is_it =
        |asked: &&Asked| asked.name().to_ascii_lowercase().starts_with(&format!("{}.", scenario.name));
    recursor.asked().iter().filter(is_it).count()
}

#[test]
fn ttls_bound_cached_answers() -> Result<()> {
    for mode in Mode::ALL {
        let Some(namespace) = namespace("scenarios")? else { return Ok(()) };
        let recursor = Scripted::start(&namespace, loopback(10), |asked| vec![script(asked).into()])?;
        let lab = mode.start(&namespace, &json!({}))?;
        let start = Instant::now();
        let by_mode = |(off, on): (u32, u32)| if mode.caches() { on } else { off };
        for scenario in &SCENARIOS {
            let context = || format!("{} with {mode:?}", scenario.name);
            let first = check(&lab, scenario, scenario.name).with_context(context)?;
            ensure!(first == by_mode(scenario.ttl), "{}: TTL {first}", context());
            for spelling in [scenario.name.to_owned(), scenario.name.to_ascii_uppercase()] {
                let left = check(&lab, scenario, &spelling).with_context(context)?;
                let passed = u32::try_from(start.elapsed().as_secs())? + 1;
                let bounds: RangeInclusive<u32> = first.saturating_sub(passed)..=first;
                ensure!(bounds.contains(&left), "{}: TTL {left} after {first}", context());
            }
            let asked = if mode.caches() { scenario.asked.1 } else { scenario.asked.0 };
            ensure!(
                count(&recursor, scenario) == asked,
                "{}: {} queries",
                context(),
                count(&recursor, scenario)
            );
        }
        thread::sleep(LATER);
        for scenario in &SCENARIOS {
            let context = || format!("{} with {mode:?}, later", scenario.name);
            let before = count(&recursor, scenario);
            let left = check(&lab, scenario, scenario.name).with_context(context)?;
            let is_cached = count(&recursor, scenario) == before;
            ensure!(is_cached == (mode.caches() && scenario.outlives), "{}: cached {is_cached}", context());
            let full = by_mode(scenario.ttl);
            let lived = LATER.as_secs() as u32;
            ensure!(!is_cached || left + lived <= full, "{}: TTL {left} of {full}", context());
        }
    }
    Ok(())
}

#[test]
fn dnssec_clients_get_own_answers() -> Result<()> {
    for mode in Mode::ALL {
        let Some(namespace) = namespace("twodo")? else { return Ok(()) };
        let recursor = Scripted::start(&namespace, loopback(10), |asked| vec![script(asked).into()])?;
        let lab = mode.start(&namespace, &json!({}))?;
        for _ in 0..3 {
            for (dnssec, records) in [(false, 1), (true, 2)] {
                let reply = lab.ask(&query("signed.test.", RecordType::A, 1232, dnssec, false)?)?;
                ensure!(reply.answers.len() == records, "{mode:?}, DO {dnssec}: {reply}");
                let own = reply.edns.as_ref().is_some_and(|edns| edns.flags().dnssec_ok == dnssec);
                ensure!(own, "{mode:?}, DO {dnssec}: {reply}");
            }
        }
        ensure!(recursor.count() == if mode.caches() { 2 } else { 6 }, "{mode:?}: {}", recursor.count());
    }
    Ok(())
}

#[test]
fn client_size_cuts_cached_answers() -> Result<()> {
    for mode in Mode::ALL {
        let Some(namespace) = namespace("sizes")? else { return Ok(()) };
        let many = |asked: &Asked| {
            let mut reply = asked.reply(ResponseCode::NoError);
            for last in 1..=60 {
                let data = RData::A(A::new(192, 0, 2, last));
                reply.add_answer(Record::from_rdata(reply.queries[0].name().clone(), 300, data));
            }
            reply
        };
        let _recursor = Scripted::start(&namespace, loopback(10), move |asked| vec![many(asked).into()])?;
        let lab = mode.start(&namespace, &json!({}))?;
        for _ in 0..2 {
            for (size, whole) in [(None, false), (Some(512), false), (Some(1232), true)] {
                let reply = lab.ask(&client::query("many.test.", RecordType::A, size)?)?;
                let length = reply.to_vec()?.len();
                ensure!(reply.metadata.truncation != whole, "{mode:?}, size {size:?}: {reply}");
                ensure!(length <= usize::from(size.unwrap_or(512)), "{mode:?}: {length} bytes");
                ensure!(!whole || reply.answers.len() == 60, "{mode:?}: {reply}");
            }
            let reply = lab.ask_tcp(&client::query("many.test.", RecordType::A, None)?)?;
            ensure!(reply.answers.len() == 60 && !reply.metadata.truncation, "{mode:?}: {reply}");
        }
    }
    Ok(())
}

#[test]
fn outage_leaves_stale_answers() -> Result<()> {
    for mode in Mode::ALL {
        let Some(namespace) = namespace("outage")? else { return Ok(()) };
        let up = Arc::new(AtomicBool::new(true));
        let answers_now = Arc::clone(&up);
        let _recursor = Scripted::start(&namespace, loopback(10), move |asked| {
            answers_now.load(Ordering::Relaxed).then(|| asked.answer(ADDRESS, 5).into()).into_iter().collect()
        })?;
        let lab = mode.start(&namespace, &json!({"serve_stale": "1h"}))?;
        ensure!(client::addresses(&lab.ask_for("www.test.", RecordType::A)?) == [ADDRESS]);
        up.store(false, Ordering::Relaxed);
        thread::sleep(LATER);
        for _ in 0..2 {
            let reply = lab.ask_for("www.test.", RecordType::A)?;
            let (rcode, stale) = (reply.metadata.response_code, mode.caches());
            ensure!((rcode == ResponseCode::NoError) == stale, "{mode:?}: {reply}");
            ensure!(!stale || ttl(&reply) == 30, "{mode:?}: {reply}");
        }
        let reply = lab.ask_for("never-asked.test.", RecordType::A)?;
        ensure!(reply.metadata.response_code == ResponseCode::ServFail, "{mode:?}: {reply}");
    }
    Ok(())
}

#[test]
fn repeated_answers_equal_recursor() -> Result<()> {
    let questions = [
        ("www.signed.test.", RecordType::A),
        ("alias.signed.test.", RecordType::AAAA),
        ("nowhere.signed.test.", RecordType::A),
        ("www.signed.test.", RecordType::MX),
        ("signed.test.", RecordType::DNSKEY),
        ("_sip._tcp.signed.test.", RecordType::SRV),
        ("odd.signed.test.", RecordType::Unknown(65280)),
    ];
    for mode in Mode::ALL {
        let Some((named, unbound, _zones, namespace)) = servers("realcache")? else { return Ok(()) };
        for recursor in [&named, &unbound] {
            let settings = json!({"cache": {"enabled": mode.caches()}});
            let lab = Lab::start(&namespace, &[recursor.address], &settings)?;
            for (name, record_type) in questions {
                for dnssec in [false, true] {
                    let what =
                        format!("{name} {record_type} from {}, DO {dnssec}, {mode:?}", recursor.address);
                    let query = query(name, record_type, 4096, dnssec, false)?;
                    // unbound may leave records of its first answer out of later ones.
                    ask(&namespace, recursor.address, &query, false)?;
                    let direct = ask(&namespace, recursor.address, &query, false)?;
                    for repetition in 0..3 {
                        let reply = ask(&namespace, lab.server.address, &query, false)?;
                        let same = sections(&reply)? == sections(&direct)?;
                        ensure!(same, "{what}, repetition {repetition}: other records");
                        let signatures = answers(&reply, RecordType::RRSIG)?;
                        ensure!(
                            signatures == answers(&direct, RecordType::RRSIG)?,
                            "{what}: {signatures} signatures"
                        );
                    }
                }
            }
            let asked = 2 * questions.len() as u64;
            let hits = lab.metric("coredns_cache_hits_total", "").unwrap_or_default();
            ensure!(hits == if mode.caches() { 2 * asked } else { 0 }, "{mode:?}: {hits} hits");
        }
    }
    Ok(())
}
