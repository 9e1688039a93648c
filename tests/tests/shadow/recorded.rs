//! A strict double of bosh-dns replies as recorded; every difference from this server is documented.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::op::ResponseCode;
use parking_lot::Mutex;
use serde_json::json;
use whole_system_tests::{
    client::{ask_raw, ask_tcp_raw},
    conformance::{
        Recorded,
        message::{write_header, write_opt, write_query, write_record},
        scenario::{
            AnswersMode, Case, Expect, Proto, Record, Scenario, read_json, read_json_lines,
        },
        world::World,
    },
    namespace::Namespace,
    requires, server,
};

use crate::double::{Double, Shadow, causes, count, unexplained};

/// Scenarios run at a time; most of their time is waiting.
const AT_ONCE: usize = 4;

/// Rows that the recorded cases must show, by a part of their text.
const ROWS: &[&str] = &[
    "Omits the OPT in some replies",
    "The OPT repeats the client's size",
    "FORMERR for a name below a records domain",
    "Answers every class with records of class IN",
    "Answers EDNS versions above 0",
    "Answers an instance that n targets of an alias match",
];

#[test]
fn recorded_replies_have_no_unexplained_difference() -> Result<()> {
    requires!(namespaces);
    let recorded = Recorded::own();
    let mut scenarios = VecDeque::new();
    for name in recorded.names(&[])? {
        if recorded.scenarios.join(&name).join("cases.jsonl").exists() {
            scenarios.push_back(name);
        }
    }
    ensure!(scenarios.len() > 30, "{scenarios:?}");
    let queue = Mutex::new(scenarios);
    let found = Mutex::new(Findings::default());
    thread::scope(|scope| {
        let work = || -> Result<()> {
            loop {
                let next = queue.lock().pop_front();
                let Some(name) = next else { return Ok(()) };
                let one = observe(&recorded, &name);
                let mut found = found.lock();
                let one = match one {
                    Ok(one) => one,
                    Err(problem) => {
                        found.unexplained.push(format!("{name}: {problem:#}"));
                        continue;
                    }
                };
                found.compared += one.compared;
                found.rows.extend(one.rows);
                found.unexplained.extend(one.unexplained);
            }
        };
        let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })?;
    let found = found.into_inner();
    println!("{} exchanges, rows: {:#?}", found.compared, found.rows);
    ensure!(
        found.unexplained.is_empty(),
        "{} scenarios with unexplained differences:\n{}",
        found.unexplained.len(),
        found.unexplained.join("\n")
    );
    ensure!(
        found.compared > 900,
        "only {} were compared",
        found.compared
    );
    for row in ROWS {
        let is_named = found.rows.iter().any(|found| found.starts_with(row));
        ensure!(is_named, "not named: {row}");
    }
    Ok(())
}

#[derive(Default)]
struct Findings {
    compared: u64,
    rows: BTreeSet<String>,
    unexplained: Vec<String>,
}

/// Plays a scenario to `shadow`.
fn observe(recorded: &Recorded, name: &str) -> Result<Findings> {
    let namespace = Namespace::new("recorded")?;
    namespace.run(|| observe_inside(&namespace, recorded, name))?
}

fn observe_inside(namespace: &Namespace, recorded: &Recorded, name: &str) -> Result<Findings> {
    let folder = recorded.scenarios.join(name);
    let mut scenario: Scenario = read_json(&folder.join("scenario.json"))?;
    server::merge(
        &mut scenario.config,
        &json!({"xdp": {"mode": "off"}, "control": {"socket": ""}}),
    );
    let world = World::new(scenario, &folder, &recorded.certificates)?;
    world.write_config()?;
    let cases: Vec<Case> = read_json_lines(&folder.join("cases.jsonl"))?.unwrap_or_default();
    let port = *world.ports.get("PORT").context("a port")?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));

    let mut exchanges = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        if let Some(exchange) = exchange(case, u16::try_from(number + 1)?, &folder)? {
            exchanges.push(exchange);
        }
    }
    let replies: HashMap<(Vec<u8>, bool), Vec<u8>> = exchanges
        .iter()
        .map(|exchange| {
            let key = (exchange.query.clone(), exchange.is_tcp);
            (key, exchange.reply.clone())
        })
        .collect();
    let replies = move |query: &[u8], is_tcp: bool| replies.get(&(query.to_vec(), is_tcp)).cloned();
    let _double = Double::start(address, Arc::new(replies))?;

    let arguments = ["--for", "10m", "--cpu", "100"];
    let config = world.config_file();
    let mut shadow = Shadow::start(namespace, world.folder.path(), &config, &arguments)?;
    shadow.wait_until_watching()?;
    let mut sent = 0;
    for Exchange { query, is_tcp, .. } in &exchanges {
        let answered = if *is_tcp {
            ask_tcp_raw(address, query).is_ok()
        } else {
            ask_raw(address, query, Duration::from_secs(20)).is_ok()
        };
        ensure!(answered, "the double did not answer");
        sent += 1;
    }
    let (code, report) = shadow.stop()?;
    let compared = count(&report, "/verdicts/compared");
    // Splitting of long TCP replies and replies above a datagram of lo are counted, not compared.
    let split = count(&report, "/seen/split_segments") + count(&report, "/seen/fragments");
    ensure!(
        compared + split >= sent,
        "{compared} of {sent} were compared: {}",
        report["seen"]
    );
    let unexplained = unexplained(&report);
    let is_clean = code == 0 && unexplained == "[]";
    Ok(Findings {
        compared,
        rows: causes(&report, true).into_iter().collect(),
        unexplained: (!is_clean)
            .then(|| format!("{name}: {unexplained}"))
            .into_iter()
            .collect(),
    })
}

struct Exchange {
    query: Vec<u8>,
    is_tcp: bool,
    reply: Vec<u8>,
}

/// Returns a recorded query with its reply; `None` if there was none, or it went to another address.
fn exchange(case: &Case, id: u16, folder: &Path) -> Result<Option<Exchange>> {
    let expect = case
        .expect
        .as_ref()
        .or_else(|| case.expect_any.as_ref().and_then(|any| any.first()));
    let Some(expect) = expect else {
        return Ok(None);
    };
    let is_elsewhere =
        case.q.addr.is_some() || case.q.port.is_some() || case.q.tcp_length.is_some();
    let is_silent = expect.no_response || expect.error.is_some() || expect.unparsable.is_some();
    if is_elsewhere || is_silent {
        return Ok(None);
    }
    let query = write_query(&case.q, id)?;
    let reply = reply(case, &query, expect, folder)?;
    // Larger ones cannot be sent.
    if reply.len() > 65_507 {
        return Ok(None);
    }
    Ok(Some(Exchange {
        query,
        is_tcp: case.q.proto == Some(Proto::Tcp),
        reply,
    }))
}

/// Encodes a recorded reply.
fn reply(case: &Case, query: &[u8], expect: &Expect, folder: &Path) -> Result<Vec<u8>> {
    let question = match &expect.question {
        Some(questions) if questions.is_empty() => Vec::new(),
        _ => question_of(query),
    };
    let answers = answers(case, expect, folder)?;
    let rcode = rcode(expect.rcode.as_deref().unwrap_or("NOERROR"))?;
    let bit = |flag: Option<bool>, bit: u16| if flag.unwrap_or(false) { bit } else { 0 };
    let flags = 0x8000
        | u16::from(expect.opcode) << 11
        | bit(expect.aa, 0x400)
        | bit(expect.tc, 0x200)
        | bit(expect.rd, 0x100)
        | bit(expect.ra, 0x80)
        | bit(Some(expect.z), 0x40)
        | bit(expect.ad, 0x20)
        | bit(expect.cd, 0x10)
        | rcode & 15;
    let opt = expect.opt.clone().flatten();
    let sections = [&answers, &expect.authority, &expect.additional];
    let counts = [
        u16::from(!question.is_empty()),
        u16::try_from(answers.len())?,
        u16::try_from(expect.authority.len())?,
        u16::try_from(expect.additional.len() + usize::from(opt.is_some()))?,
    ];
    let id = u16::from_be_bytes([query[0], query[1]]);
    let mut message = write_header(id, flags, counts);
    message.extend_from_slice(&question);
    let name = case
        .q
        .name
        .as_ref()
        .map(|name| format!("{}.", name.trim_end_matches('.')));
    for record in sections.into_iter().flatten() {
        write_record(&mut message, record, name.as_deref())?;
    }
    if let Some(opt) = opt {
        let at = message.len();
        write_opt(&mut message, &opt)?;
        // The upper bits of the RCODE, behind name, type and size.
        message[at + 5] = u8::try_from(rcode >> 4)?;
    }
    Ok(message)
}

/// Returns the question of a query as sent; empty if it cannot be read.
fn question_of(query: &[u8]) -> Vec<u8> {
    let mut end = 12;
    while let Some(&length) = query.get(end) {
        end += usize::from(length) + 1;
        if length == 0 {
            return query.get(12..end + 4).unwrap_or_default().to_vec();
        }
    }
    Vec::new()
}

/// Returns the recorded answers; of those of which a part was returned, as many.
fn answers(case: &Case, expect: &Expect, folder: &Path) -> Result<Vec<Record>> {
    let mut answers = expect.answers.clone();
    if let Some(file) = &expect.answers_ref {
        answers = read_json(&folder.join(file))?;
        let name = case.q.name.clone().unwrap_or_default();
        for record in &mut answers {
            if record.0 == "@" {
                record.0 = format!("{}.", name.trim_end_matches('.'));
            }
        }
    }
    if expect.answers_mode == AnswersMode::SubsetOf {
        let most = expect
            .count
            .map_or(answers.len(), |count| count.max as usize);
        answers.truncate(most);
    }
    Ok(answers)
}

fn rcode(name: &str) -> Result<u16> {
    let known = BTreeMap::from([
        ("NOERROR", ResponseCode::NoError),
        ("FORMERR", ResponseCode::FormErr),
        ("SERVFAIL", ResponseCode::ServFail),
        ("NXDOMAIN", ResponseCode::NXDomain),
        ("NOTIMP", ResponseCode::NotImp),
        ("REFUSED", ResponseCode::Refused),
        ("BADVERS", ResponseCode::BADVERS),
    ]);
    match known.get(name) {
        Some(code) => Ok(u16::from(*code)),
        None => name
            .trim_start_matches("RCODE")
            .parse()
            .with_context(|| name.to_owned()),
    }
}

/// The double is strict only if it says what was recorded.
#[test]
fn double_replies_as_recorded() -> Result<()> {
    use whole_system_tests::conformance::message::Seen;
    let recorded = Recorded::own();
    let folder = recorded.scenarios.join("01_basic_fleet");
    let cases: Vec<Case> = read_json_lines(&folder.join("cases.jsonl"))?.context("cases")?;
    let mut checked = 0;
    for case in &cases {
        let Some(exchange) = exchange(case, 7, &folder)? else {
            continue;
        };
        let seen = Seen::parse(&exchange.reply)?;
        let expect = case.expect.as_ref().context("an expectation")?;
        let rcode = expect.rcode.clone().unwrap_or_default();
        ensure!(seen.rcode == rcode, "{}: {} {rcode}", case.id, seen.rcode);
        let mut wanted = expect.answers.clone();
        let mut got = seen.answers.clone();
        wanted.sort();
        got.sort();
        ensure!(
            wanted == got || expect.answers_ref.is_some(),
            "{}: {got:?}",
            case.id
        );
        checked += 1;
    }
    ensure!(checked > 200, "{checked}");
    Ok(())
}
