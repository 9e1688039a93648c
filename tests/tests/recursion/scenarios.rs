//! Scenarios of a caching forwarder: the same questions with each way of answering them.

use std::{
    net::{Ipv4Addr, SocketAddr},
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
        rdata::{A, AAAA, CNAME, TXT},
    },
};
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs, client, namespace::Namespace, requirements, requires, server,
};

use super::{
    interface_cache::{self, ask_interface, hits, settle},
    lab::{Lab, loopback},
    real_servers::{answers, ask, query, sections, servers},
    scripted::{Asked, Scripted},
    servers::SERVERS,
};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// The way in which repeated questions are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Every question goes to the recursor.
    CacheOff,
    /// Userspace answers from its cache.
    Userspace,
    /// The interface answers from the kernel's cache whatever it can.
    Interface,
}

impl Mode {
    /// Returns the modes that can run here.
    fn all() -> impl Iterator<Item = Self> {
        [Self::CacheOff, Self::Userspace]
            .into_iter()
            .chain(requirements::bpf().then_some(Self::Interface))
    }

    /// Returns whether repeated questions are answered from a cache.
    fn caches(self) -> bool {
        self != Self::CacheOff
    }

    /// Starts the server; `cache` is merged into its settings for the cache.
    fn start<'a>(
        self,
        namespace: &'a Namespace,
        recursor: SocketAddr,
        cache: &Value,
    ) -> Result<Lab<'a>> {
        let mut settings = json!({"recursor_timeout": "1s", "cache": {"enabled": self.caches()}});
        server::merge(&mut settings["cache"], cache);
        match self {
            Self::Interface => {
                interface_cache::start(namespace, Bpffs::new()?, &[recursor], &settings)
            }
            Self::CacheOff | Self::Userspace => Lab::start(namespace, &[recursor], &settings),
        }
    }
}

/// A question that is sent several times, and the replies.
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

impl Scenario {
    /// Returns whether the answer is cached at all.
    fn is_cached(&self) -> bool {
        self.ttl.1 > 0
    }

    /// Returns a query with room for large replies.
    fn query(&self, spelling: &str) -> Result<Message> {
        client::query(&format!("{spelling}.test."), RecordType::A, Some(1232))
    }
}

/// Time until the questions are repeated: more than the smallest TTL of a cached answer.
const LATER: Duration = Duration::from_millis(5300);

/// Longest reply of an interface.
const INTERFACE_LIMIT: usize = 1232;

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
            reply.add_answer(Record::from_rdata(
                reply.queries[0].name().clone(),
                *ttl,
                data.clone(),
            ));
        }
        reply
    };
    match name.split('.').next() {
        Some("day") => asked.answer(ADDRESS, 86_400),
        Some("second") => asked.answer(ADDRESS, 1),
        Some("zero") => asked.answer(ADDRESS, 0),
        Some("several") => {
            let records: Vec<_> = (1..=20)
                .map(|last| (300, RData::A(A::new(192, 0, 2, last))))
                .collect();
            several(&records)
        }
        Some("chain") => chain(asked),
        Some("nowhere") => asked.deny(ResponseCode::NXDomain, 900, 60),
        Some("brief") => asked.deny(ResponseCode::NXDomain, 900, 5),
        Some("nodata") => asked.deny(ResponseCode::NoError, 60, 900),
        Some("signed") => {
            let dnssec = asked
                .message
                .edns
                .as_ref()
                .is_some_and(|edns| edns.flags().dnssec_ok);
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
    let name = |text| Name::from_ascii(text).expect("a name built by the test");
    let links = [(300, "one.test."), (60, "two.test.")];
    let mut owner = reply.queries[0].name().clone();
    for (ttl, target) in links {
        reply.add_answer(Record::from_rdata(
            owner,
            ttl,
            RData::CNAME(CNAME(name(target))),
        ));
        owner = name(target);
    }
    reply.add_answer(Record::from_rdata(owner, 120, RData::A(A(ADDRESS))));
    reply
}

/// Returns the TTL of the first record.
fn ttl(reply: &Message) -> u32 {
    reply
        .answers
        .first()
        .or(reply.authorities.first())
        .map_or(0, |record| record.ttl)
}

/// Queries a name with room for large replies and checks everything but the TTL, which is returned.
fn check(lab: &Lab<'_>, scenario: &Scenario, spelling: &str) -> Result<u32> {
    let name = format!("{spelling}.test.");
    let reply = lab.ask(&scenario.query(spelling)?)?;
    let fits = reply.metadata.response_code == scenario.rcode
        && reply.answers.len() == scenario.answers
        && reply.queries[0].name().to_string() == name
        && reply.metadata.recursion_available
        && !reply.metadata.truncation;
    ensure!(fits, "{reply}");
    let owner = reply.answers.first().map(|record| record.name.to_string());
    ensure!(
        owner.is_none_or(|owner| owner.eq_ignore_ascii_case(&name)),
        "{reply}"
    );
    Ok(ttl(&reply))
}

/// Returns the number of queries for a scenario's name that the recursor received.
fn count(recursor: &Scripted, scenario: &Scenario) -> usize {
    let is_it = |asked: &&Asked| {
        asked
            .name()
            .to_ascii_lowercase()
            .starts_with(&format!("{}.", scenario.name))
    };
    recursor.asked().iter().filter(is_it).count()
}

#[test]
fn ttls_bound_cached_answers() -> Result<()> {
    for mode in Mode::all() {
        requires!(namespaces);
        let namespace = Namespace::new("scenarios")?;
        let recursor =
            Scripted::start(&namespace, loopback(10), |asked| vec![script(asked).into()])?;
        let lab = mode.start(&namespace, loopback(10), &json!({}))?;
        let start = Instant::now();
        let by_mode = |(off, on): (u32, u32)| if mode.caches() { on } else { off };
        for scenario in &SCENARIOS {
            let context = || format!("{} with {mode:?}", scenario.name);
            let (asked_first, hits_before) = (Instant::now(), hits(&lab)?);
            let first = check(&lab, scenario, scenario.name).with_context(context)?;
            ensure!(first == by_mode(scenario.ttl), "{}: TTL {first}", context());
            if mode == Mode::Interface && scenario.is_cached() {
                settle(&lab, &scenario.query(scenario.name)?.to_vec()?).with_context(context)?;
            }
            for spelling in [scenario.name.to_owned(), scenario.name.to_ascii_uppercase()] {
                let left = check(&lab, scenario, &spelling).with_context(context)?;
                let passed = u32::try_from(start.elapsed().as_secs())? + 1;
                let bounds: RangeInclusive<u32> = first.saturating_sub(passed)..=first;
                ensure!(
                    bounds.contains(&left),
                    "{}: TTL {left} after {first}",
                    context()
                );
            }
            let by_interface = hits(&lab)? > hits_before;
            ensure!(
                by_interface == (mode == Mode::Interface && scenario.is_cached()),
                "{}: by interface {by_interface}",
                context()
            );
            let asked = if mode.caches() {
                scenario.asked.1
            } else {
                scenario.asked.0
            };
            let renewals = if mode == Mode::Interface {
                asked_first.elapsed().as_secs() / 4
            } else {
                0
            };
            let found = count(&recursor, scenario);
            ensure!(
                (asked..=asked + renewals as usize).contains(&found),
                "{}: {found} queries",
                context()
            );
        }
        thread::sleep(LATER);
        for scenario in &SCENARIOS {
            let context = || format!("{} with {mode:?}, later", scenario.name);
            let before = count(&recursor, scenario);
            let left = check(&lab, scenario, scenario.name).with_context(context)?;
            let is_cached = count(&recursor, scenario) == before;
            // Answers that the interface sent within the TTL were renewed meanwhile.
            if mode != Mode::Interface || scenario.outlives || !scenario.is_cached() {
                ensure!(
                    is_cached == (mode.caches() && scenario.outlives),
                    "{}: cached {is_cached}",
                    context()
                );
                let full = by_mode(scenario.ttl);
                let lived = LATER.as_secs() as u32;
                ensure!(
                    !is_cached || left + lived <= full,
                    "{}: TTL {left} of {full}",
                    context()
                );
            }
        }
    }
    Ok(())
}

#[test]
fn dnssec_clients_get_own_answers() -> Result<()> {
    for mode in Mode::all() {
        requires!(namespaces);
        let namespace = Namespace::new("twodo")?;
        let recursor =
            Scripted::start(&namespace, loopback(10), |asked| vec![script(asked).into()])?;
        let lab = mode.start(&namespace, loopback(10), &json!({}))?;
        for _ in 0..3 {
            for (dnssec, records) in [(false, 1), (true, 2)] {
                let reply = lab.ask(&query("signed.test.", RecordType::A, 1232, dnssec, false)?)?;
                ensure!(
                    reply.answers.len() == records,
                    "{mode:?}, DO {dnssec}: {reply}"
                );
                let own = reply
                    .edns
                    .as_ref()
                    .is_some_and(|edns| edns.flags().dnssec_ok == dnssec);
                ensure!(own, "{mode:?}, DO {dnssec}: {reply}");
            }
        }
        ensure!(
            recursor.count() == if mode.caches() { 2 } else { 6 },
            "{mode:?}: {}",
            recursor.count()
        );
        if mode == Mode::Interface {
            for (dnssec, records) in [(false, 1), (true, 2)] {
                let query = query("signed.test.", RecordType::A, 1232, dnssec, false)?;
                let reply = Message::from_vec(&settle(&lab, &query.to_vec()?)?)?;
                ensure!(
                    reply.answers.len() == records,
                    "DO {dnssec} by the interface: {reply}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn client_size_cuts_cached_answers() -> Result<()> {
    for mode in Mode::all() {
        requires!(namespaces);
        let namespace = Namespace::new("sizes")?;
        let many = |asked: &Asked| {
            let mut reply = asked.reply(ResponseCode::NoError);
            let name = reply.queries[0].name().clone();
            for last in 1..=if asked.name().starts_with("many.") {
                60
            } else {
                24
            } {
                let data = match asked.name().starts_with("many.") {
                    true => RData::A(A::new(192, 0, 2, last)),
                    false => RData::AAAA(AAAA::new(0xfd00, 0, 0, 0, 0, 0, 0, last.into())),
                };
                reply.add_answer(Record::from_rdata(name.clone(), 300, data));
            }
            reply
        };
        let _recursor = Scripted::start(&namespace, loopback(10), move |asked| {
            vec![many(asked).into()]
        })?;
        let lab = mode.start(&namespace, loopback(10), &json!({}))?;
        // The interface keeps at most 24 records.
        for (name, record_type, records, kept) in [
            ("many.test.", RecordType::A, 60, false),
            ("some.test.", RecordType::AAAA, 24, true),
        ] {
            if mode == Mode::Interface && kept {
                settle(
                    &lab,
                    &client::query(name, record_type, Some(1232))?.to_vec()?,
                )?;
            }
            for _ in 0..2 {
                for (size, whole) in [(None, false), (Some(512), false), (Some(1232), true)] {
                    let query = client::query(name, record_type, size)?.to_vec()?;
                    let (reply, by_interface) = ask_interface(&lab, &query)?;
                    let expected = mode == Mode::Interface && kept && whole;
                    ensure!(
                        expected || !by_interface,
                        "{name}, {mode:?}, size {size:?}: by interface"
                    );
                    ensure!(
                        reply.len() <= usize::from(size.unwrap_or(512)),
                        "{mode:?}: {} bytes",
                        reply.len()
                    );
                    let reply = Message::from_vec(&reply)?;
                    ensure!(
                        reply.metadata.truncation != whole,
                        "{mode:?}, size {size:?}: {reply}"
                    );
                    ensure!(
                        !whole || reply.answers.len() == records,
                        "{mode:?}: {reply}"
                    );
                }
                let reply = lab.ask_tcp(&client::query(name, record_type, None)?)?;
                ensure!(
                    reply.answers.len() == records && !reply.metadata.truncation,
                    "{mode:?}: {reply}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn outage_leaves_stale_answers() -> Result<()> {
    for mode in Mode::all() {
        requires!(namespaces);
        let namespace = Namespace::new("outage")?;
        let up = Arc::new(AtomicBool::new(true));
        let answers_now = Arc::clone(&up);
        let _recursor = Scripted::start(&namespace, loopback(10), move |asked| {
            answers_now
                .load(Ordering::Relaxed)
                .then(|| asked.answer(ADDRESS, 5).into())
                .into_iter()
                .collect()
        })?;
        let lab = mode.start(&namespace, loopback(10), &json!({"serve_stale": "1h"}))?;
        ensure!(client::addresses(&lab.ask_for("www.test.", RecordType::A)?) == [ADDRESS]);
        let query = client::query("www.test.", RecordType::A, None)?.to_vec()?;
        if mode == Mode::Interface {
            settle(&lab, &query)?;
        }
        up.store(false, Ordering::Relaxed);
        thread::sleep(LATER);
        for _ in 0..2 {
            let (reply, by_interface) = ask_interface(&lab, &query)?;
            // The interface gives no answer past its TTL.
            ensure!(!by_interface, "{mode:?}: {reply:02x?} by the interface");
            let reply = Message::from_vec(&reply)?;
            let (rcode, stale) = (reply.metadata.response_code, mode.caches());
            ensure!(
                (rcode == ResponseCode::NoError) == stale,
                "{mode:?}: {reply}"
            );
            ensure!(!stale || ttl(&reply) == 30, "{mode:?}: {reply}");
        }
        let reply = lab.ask_for("never-asked.test.", RecordType::A)?;
        ensure!(
            reply.metadata.response_code == ResponseCode::ServFail,
            "{mode:?}: {reply}"
        );
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
    for mode in Mode::all() {
        requires!(namespaces, programs(SERVERS));
        let (named, unbound, _zones, namespace) = servers("realcache")?;
        for recursor in [&named, &unbound] {
            let lab = mode.start(&namespace, recursor.address, &json!({}))?;
            for (name, record_type) in questions {
                for dnssec in [false, true] {
                    let what = format!(
                        "{name} {record_type} from {}, DO {dnssec}, {mode:?}",
                        recursor.address
                    );
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
                    if mode == Mode::Interface && direct.len() <= INTERFACE_LIMIT {
                        let reply = settle(&lab, &query.to_vec()?).context(what.clone())?;
                        ensure!(
                            sections(&reply)? == sections(&direct)?,
                            "{what}: other records by interface"
                        );
                    }
                }
            }
            let asked = 2 * questions.len() as u64;
            let in_userspace = lab
                .metric("coredns_cache_hits_total", "")
                .unwrap_or_default();
            let hits = in_userspace + hits(&lab)?;
            let is_right = match mode {
                Mode::CacheOff => hits == 0,
                Mode::Userspace => hits == 2 * asked,
                Mode::Interface => hits > 2 * asked,
            };
            ensure!(is_right, "{mode:?}: {hits} hits");
        }
    }
    Ok(())
}
