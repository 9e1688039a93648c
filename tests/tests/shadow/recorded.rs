//! A strict double of bosh-dns replies as recorded; every difference from this server is documented.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque, btree_map::Entry},
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    thread,
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
            AnswersMode, Case, Expect, Kind, Proto, Query, Record, Scenario, read_json,
            read_json_lines,
        },
        startup::Start,
        steps::Step,
        world::World,
    },
    namespace::Namespace,
    requires, server,
};

use crate::double::{Double, PATIENCE, Shadow, causes, count, unexplained};

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

/// Recorded exchanges in the repository, as docs/migration.md states; the others have no reply, or are kept elsewhere.
const MIN_EXCHANGES: usize = 1_593;

/// A part of a scenario that is played with its own configuration: all queries and steps, or one start.
struct Part {
    scenario: String,
    start: Option<Start>,
}

impl Part {
    /// Returns the parts of all scenarios of a DNS server.
    fn all(recorded: &Recorded) -> Result<VecDeque<Self>> {
        let mut parts = VecDeque::new();
        for scenario in recorded.names(&[])? {
            let folder = recorded.scenarios.join(&scenario);
            let read: Scenario = read_json(&folder.join("scenario.json"))?;
            if read.server != Kind::Dns {
                continue;
            }
            let starts: Option<Vec<Start>> = read_json_lines(&folder.join("startup.jsonl"))?;
            let Some(starts) = starts else {
                parts.push_back(Self {
                    scenario,
                    start: None,
                });
                continue;
            };
            for start in starts {
                if start.exchanges().next().is_some() {
                    let (scenario, start) = (scenario.clone(), Some(start));
                    parts.push_back(Self { scenario, start });
                }
            }
        }
        Ok(parts)
    }

    fn name(&self) -> &str {
        match &self.start {
            Some(start) => &start.id,
            None => &self.scenario,
        }
    }
}

#[test]
fn recorded_replies_have_no_unexplained_difference() -> Result<()> {
    requires!(namespaces);
    let recorded = Recorded::own();
    let parts = Part::all(&recorded)?;
    ensure!(parts.len() > 80, "{} parts", parts.len());
    let queue = Mutex::new(parts);
    let found = Mutex::new(Findings::default());
    thread::scope(|scope| {
        let work = || -> Result<()> {
            loop {
                let next = queue.lock().pop_front();
                let Some(part) = next else { return Ok(()) };
                let one = observe(&recorded, &part);
                let mut found = found.lock();
                match one {
                    Ok(one) => found.add(one),
                    Err(problem) => {
                        let line = format!("{}: {problem:#}", part.name());
                        found.unexplained.push(line);
                    }
                }
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
    println!(
        "{} exchanges sent, {} compared, {} of them in transition; left out: {:#?}; rows: {:#?}",
        found.sent, found.compared, found.in_transition, found.left_out, found.rows
    );
    ensure!(
        found.unexplained.is_empty(),
        "{} parts with unexplained differences:\n{}",
        found.unexplained.len(),
        found.unexplained.join("\n")
    );
    ensure!(found.sent >= MIN_EXCHANGES, "only {} were sent", found.sent);
    // While files change, the comparison says nothing about a reply.
    ensure!(
        found.in_transition < found.compared / 20,
        "{} in transition",
        found.in_transition
    );
    for row in ROWS {
        let is_named = found.rows.iter().any(|found| found.starts_with(row));
        ensure!(is_named, "not named: {row}");
    }
    Ok(())
}

#[derive(Default)]
struct Findings {
    sent: usize,
    compared: u64,
    in_transition: u64,
    rows: BTreeSet<String>,
    unexplained: Vec<String>,
    /// Recorded queries that were not sent, by reason.
    left_out: BTreeMap<&'static str, usize>,
}

impl Findings {
    fn add(&mut self, other: Self) {
        self.sent += other.sent;
        self.compared += other.compared;
        self.in_transition += other.in_transition;
        self.rows.extend(other.rows);
        self.unexplained.extend(other.unexplained);
        for (reason, count) in other.left_out {
            *self.left_out.entry(reason).or_default() += count;
        }
    }
}

/// Plays a part to `shadow`.
fn observe(recorded: &Recorded, part: &Part) -> Result<Findings> {
    let namespace = Namespace::new("recorded")?;
    namespace.run(|| observe_inside(&namespace, recorded, part))?
}

fn observe_inside(namespace: &Namespace, recorded: &Recorded, part: &Part) -> Result<Findings> {
    let folder = recorded.scenarios.join(&part.scenario);
    let mut scenario: Scenario = read_json(&folder.join("scenario.json"))?;
    server::merge(
        &mut scenario.config,
        &json!({"xdp": {"mode": "off"}, "control": {"socket": ""}}),
    );
    let mut world = match &part.start {
        Some(start) => start.world(scenario, &folder, &recorded.certificates)?,
        None => {
            let world = World::new(scenario, &folder, &recorded.certificates)?;
            world.write_config()?;
            world
        }
    };
    let arguments = ["--for", "10m", "--cpu", "100", "--health", "none"];
    let config = world.config_file();
    let mut shadow = Shadow::start(namespace, world.folder.path(), &config, &arguments)?;
    shadow.wait_until_watching()?;
    let mut play = Play::default();
    if shadow.process.ended()?.is_some() {
        // Whether to start with such a configuration is ours to decide.
        let start = part.start.as_ref().context("shadow ended")?;
        ensure!(start.quirk.is_some(), "{:?}", shadow.finish());
        play.leave_out(
            "a configuration that this server refuses",
            start.exchanges().count(),
        );
        return Ok(play.found);
    }
    match &part.start {
        Some(start) => {
            for (query, expect) in start.exchanges() {
                play.ask(query, expect, &world)?;
            }
        }
        None => play.all(&mut world)?,
    }
    let (code, report) = shadow.stop()?;
    let mut found = play.found;
    found.compared = count(&report, "/verdicts/compared");
    found.in_transition = count(&report, "/verdicts/in_transition");
    found.rows = causes(&report, true).into_iter().collect();
    // Splitting of long TCP replies and replies above a datagram of lo are counted, not compared.
    let split = count(&report, "/seen/split_segments") + count(&report, "/seen/fragments");
    ensure!(
        found.compared + split >= found.sent as u64,
        "{} of {} were compared: {}",
        found.compared,
        found.sent,
        report["seen"]
    );
    let unexplained = unexplained(&report);
    // A part without a query by DNS proves nothing.
    let expected = if found.compared == 0 { 3 } else { 0 };
    if code != expected || unexplained != "[]" {
        found
            .unexplained
            .push(format!("{}: {unexplained}", part.name()));
    }
    Ok(found)
}

/// The replies of the double by query and whether it came by TCP.
type RecordedReplies = Arc<Mutex<HashMap<(Vec<u8>, bool), Vec<u8>>>>;

/// The clients and the server of a part.
#[derive(Default)]
struct Play {
    replies: RecordedReplies,
    doubles: BTreeMap<SocketAddr, Double>,
    found: Findings,
}

impl Play {
    /// Plays all queries and steps of a scenario.
    fn all(&mut self, world: &mut World<'_>) -> Result<()> {
        let cases: Vec<Case> =
            read_json_lines(&world.source.join("cases.jsonl"))?.unwrap_or_default();
        for case in &cases {
            self.ask_case(case, world)?;
        }
        let steps: Vec<Step> =
            read_json_lines(&world.source.join("steps.jsonl"))?.unwrap_or_default();
        for step in &steps {
            match step {
                Step::Query(case) => self.ask_case(case, world)?,
                Step::TcpSession(session) => {
                    for (query, expect) in session.exchanges() {
                        self.ask(query, expect, world)?;
                    }
                }
                Step::Sleep(_)
                | Step::WriteFile(_)
                | Step::DeleteFile(_)
                | Step::SetHealth(_)
                | Step::SetRecursor(_) => drop(step.carry_out(world)?),
                // Requests to the server itself, which does not run, or to its surroundings.
                Step::ApiGet(_)
                | Step::HealthHits(_)
                | Step::HealthHitsDuring(_)
                | Step::UpstreamCounts(_)
                | Step::Metrics(_)
                | Step::Signal(_)
                | Step::AwaitExit(_) => {}
            }
        }
        Ok(())
    }

    /// Sends a recorded query, for each of its recorded replies.
    fn ask_case(&mut self, case: &Case, world: &World<'_>) -> Result<()> {
        let expected = case.expect.iter().chain(case.expect_any.iter().flatten());
        let mut count = 0;
        for expect in expected {
            self.ask(&case.q, expect, world)?;
            count += 1;
        }
        if count == 0 {
            self.leave_out("the reply is kept elsewhere", 1);
        }
        Ok(())
    }

    fn leave_out(&mut self, reason: &'static str, count: usize) {
        *self.found.left_out.entry(reason).or_default() += count;
    }

    /// Sends a query that is answered as recorded.
    fn ask(&mut self, query: &Query, expect: &Expect, world: &World<'_>) -> Result<()> {
        if expect.no_response || expect.error.is_some() {
            self.leave_out("no reply", 1);
            return Ok(());
        }
        if expect.unparsable.is_some() || query.tcp_length.is_some() {
            self.leave_out("no DNS message", 1);
            return Ok(());
        }
        let id = u16::try_from(self.found.sent + 1)?;
        let message = write_query(query, id)?;
        let reply = reply(query, &message, expect, world.source)?;
        if reply.len() > MAX_DATAGRAM {
            self.leave_out("a reply that no datagram can hold", 1);
            return Ok(());
        }
        let port = query.port.as_deref().unwrap_or("PORT");
        let port = *world.ports.get(port).with_context(|| port.to_owned())?;
        let address = query.addr.unwrap_or(Ipv4Addr::LOCALHOST.into());
        let server = SocketAddr::new(address, port);
        let is_tcp = query.proto == Some(Proto::Tcp);
        let key = (message.clone(), is_tcp);
        self.replies.lock().insert(key, reply);
        if let Entry::Vacant(entry) = self.doubles.entry(server) {
            let replies = self.replies.clone();
            let answer =
                move |query: &[u8], is_tcp| replies.lock().get(&(query.to_vec(), is_tcp)).cloned();
            entry.insert(Double::start(server, Arc::new(answer))?);
        }
        if is_tcp {
            ask_tcp_raw(server, &message)?;
        } else {
            ask_raw(server, &message, PATIENCE)?;
        }
        self.found.sent += 1;
        Ok(())
    }
}

/// Maximum size of a datagram's data over IPv4.
const MAX_DATAGRAM: usize = 65_507;

/// Encodes a recorded reply.
fn reply(asked: &Query, query: &[u8], expect: &Expect, folder: &Path) -> Result<Vec<u8>> {
    let question = match &expect.question {
        Some(questions) if questions.is_empty() => Vec::new(),
        _ => question_of(query),
    };
    let answers = answers(asked, expect, folder)?;
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
    let name = asked
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
fn answers(asked: &Query, expect: &Expect, folder: &Path) -> Result<Vec<Record>> {
    let mut answers = expect.answers.clone();
    if let Some(file) = &expect.answers_ref {
        answers = read_json(&folder.join(file))?;
        let name = asked.name.clone().unwrap_or_default();
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
        let expect = case.expect.as_ref().context("an expectation")?;
        let query = write_query(&case.q, 7)?;
        let seen = Seen::parse(&reply(&case.q, &query, expect, &folder)?)?;
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
