//! This server behind a relay that makes one mistake at a time: each is found and named.

use std::{
    collections::VecDeque,
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use hickory_proto::{
    op::{Edns, Message, OpCode, ResponseCode},
    rr::{DNSClass, Name, RData, Record, RecordType, rdata},
};
use parking_lot::Mutex;
use serde_json::json;
use whole_system_tests::{
    client::{ask_raw, ask_tcp_raw},
    namespace::Namespace,
    requires,
    server::{self, Server},
};

use crate::double::{Double, Shadow, causes, count, unexplained};

/// Faults tried at a time; most of their time is waiting.
const AT_ONCE: usize = 5;

/// Time limit of the server behind the relay.
const PATIENCE: Duration = Duration::from_secs(20);

/// A mistake in a reply; returns whether it was made.
type Mistake = fn(&mut Message) -> bool;

/// Mistakes with the cause that names each.
const FAULTS: &[(&str, Mistake, &str)] = &[
    (
        "an instance missing",
        |reply| has_addresses(reply, 2) && reply.answers.pop().is_some(),
        "addresses missing",
    ),
    (
        "an instance too many",
        |reply| add_address(reply, [10, 9, 9, 9]),
        "further addresses",
    ),
    (
        "old records",
        |reply| replace_address(reply, [10, 9, 9, 8]),
        "addresses missing; further addresses",
    ),
    (
        "an address twice",
        |reply| repeat_first(reply),
        "addresses repeated",
    ),
    (
        "order fixed",
        |reply| sort(reply),
        "answers always in the same order",
    ),
    (
        "TTL 5",
        |reply| each_answer(reply, |record| record.ttl = 5),
        "answered by another source; another TTL",
    ),
    ("TC missing", |reply| clear_truncation(reply), "TC missing"),
    (
        "TC set",
        |reply| set_truncation(reply),
        "TC although the answer fits",
    ),
    (
        "truncated to one record",
        |reply| keep_one(reply),
        "truncated to fewer records than fit",
    ),
    (
        "NXDOMAIN for a name",
        |reply| has_addresses(reply, 1) && set_rcode(reply, ResponseCode::NXDomain),
        "another RCODE",
    ),
    (
        "SERVFAIL",
        |reply| set_rcode(reply, ResponseCode::ServFail),
        "another RCODE",
    ),
    (
        "REFUSED",
        |reply| set_rcode(reply, ResponseCode::Refused),
        "another RCODE",
    ),
    (
        "NOERROR for no name",
        |reply| was_rcode(reply, ResponseCode::NXDomain) && set_rcode(reply, ResponseCode::NoError),
        "another RCODE",
    ),
    (
        "question in lower case",
        |reply| lower_case(reply),
        "another question, or in another letter case",
    ),
    (
        "no question",
        |reply| {
            reply.queries.clear();
            true
        },
        "another question, or in another letter case",
    ),
    (
        "AA clear",
        |reply| std::mem::take(&mut reply.metadata.authoritative),
        "answered by another source; another flag",
    ),
    (
        "RA clear",
        |reply| std::mem::take(&mut reply.metadata.recursion_available),
        "another flag",
    ),
    (
        "RD clear",
        |reply| std::mem::take(&mut reply.metadata.recursion_desired),
        "another flag",
    ),
    (
        "AD set",
        |reply| {
            reply.metadata.authentic_data = true;
            true
        },
        "another flag",
    ),
    (
        "CD set",
        |reply| {
            reply.metadata.checking_disabled = true;
            true
        },
        "another flag",
    ),
    (
        "another opcode",
        |reply| {
            reply.metadata.op_code = OpCode::Status;
            true
        },
        "another flag",
    ),
    (
        "an OPT unasked",
        |reply| add_opt(reply),
        "OPT to a query without one",
    ),
    (
        "another size in the OPT",
        |reply| {
            change_opt(reply, |opt| {
                opt.set_max_payload(4097);
            })
        },
        "another size in the OPT",
    ),
    (
        "DO set",
        |reply| {
            change_opt(reply, |opt| {
                opt.set_dnssec_ok(true);
            })
        },
        "another DO in the OPT",
    ),
    (
        "version 1 in the OPT",
        |reply| {
            change_opt(reply, |opt| {
                opt.set_version(1);
            })
        },
        "another version in the OPT",
    ),
    (
        "records of class CH",
        |reply| each_answer(reply, |record| record.dns_class = DNSClass::CH),
        "addresses missing; further addresses",
    ),
    (
        "an SOA added",
        |reply| add_authority(reply),
        "answered by another source; other authority or additional records",
    ),
    (
        "an additional record",
        |reply| add_additional(reply),
        "other authority or additional records",
    ),
    (
        "a recursor instead of the fleet",
        |reply| like_recursor(reply),
        "answered by another source",
    ),
    (
        "a TXT record among the answers",
        |reply| add_text(reply),
        "other records",
    ),
    (
        "AAAA instead of A",
        |reply| like_ipv6(reply),
        "addresses missing; further addresses",
    ),
    (
        "up-check to another address",
        |reply| change_upcheck(reply),
        "addresses missing; further addresses",
    ),
    (
        "alias unknown",
        |reply| is_about(reply, "alias.") && set_rcode(reply, ResponseCode::NXDomain),
        "another RCODE",
    ),
    (
        "another reverse name",
        |reply| change_pointer(reply),
        "other records",
    ),
];

fn is_about(reply: &Message, begin: &str) -> bool {
    let question = reply.queries.first();
    question.is_some_and(|question| question.name().to_ascii().to_lowercase().starts_with(begin))
}

fn has_addresses(reply: &Message, least: usize) -> bool {
    reply.answers.len() >= least
        && !reply.metadata.truncation
        && reply.answers[0].record_type() == RecordType::A
        && !is_about(reply, "upcheck.")
}

fn each_answer(reply: &mut Message, change: fn(&mut Record)) -> bool {
    if !has_addresses(reply, 1) {
        return false;
    }
    reply.answers.iter_mut().for_each(change);
    true
}

fn address(octets: [u8; 4]) -> RData {
    RData::A(rdata::A(Ipv4Addr::from(octets)))
}

fn add_address(reply: &mut Message, octets: [u8; 4]) -> bool {
    if !has_addresses(reply, 1) {
        return false;
    }
    let mut record = reply.answers[0].clone();
    record.data = address(octets);
    reply.answers.push(record);
    true
}

fn replace_address(reply: &mut Message, octets: [u8; 4]) -> bool {
    if !has_addresses(reply, 1) {
        return false;
    }
    reply.answers[0].data = address(octets);
    true
}

fn repeat_first(reply: &mut Message) -> bool {
    if !has_addresses(reply, 2) {
        return false;
    }
    reply.answers.push(reply.answers[0].clone());
    true
}

fn sort(reply: &mut Message) -> bool {
    reply.answers.sort_by_key(|record| record.data.to_string());
    has_addresses(reply, 2)
}

fn clear_truncation(reply: &mut Message) -> bool {
    std::mem::take(&mut reply.metadata.truncation)
}

fn set_truncation(reply: &mut Message) -> bool {
    !std::mem::replace(&mut reply.metadata.truncation, true)
}

fn keep_one(reply: &mut Message) -> bool {
    reply.answers.truncate(1);
    reply.metadata.truncation
}

fn was_rcode(reply: &Message, code: ResponseCode) -> bool {
    reply.metadata.response_code == code
}

fn set_rcode(reply: &mut Message, code: ResponseCode) -> bool {
    let is_changed = reply.metadata.response_code != code;
    reply.metadata.response_code = code;
    if code != ResponseCode::NoError {
        reply.answers.clear();
    }
    is_changed
}

fn lower_case(reply: &mut Message) -> bool {
    for question in &mut reply.queries {
        let name = question.name().to_lowercase();
        question.set_name(name);
    }
    true
}

fn add_opt(reply: &mut Message) -> bool {
    if reply.edns.is_some() {
        return false;
    }
    let mut opt = Edns::new();
    opt.set_max_payload(1232);
    reply.set_edns(opt);
    true
}

fn change_opt(reply: &mut Message, change: fn(&mut Edns)) -> bool {
    reply.edns.as_mut().map(change).is_some()
}

fn add_authority(reply: &mut Message) -> bool {
    let name = Name::from_ascii("bosh.").expect("a name");
    let soa = rdata::SOA::new(name.clone(), name.clone(), 1, 2, 3, 4, 5);
    reply
        .authorities
        .push(Record::from_rdata(name, 5, RData::SOA(soa)));
    has_addresses(reply, 1)
}

fn add_additional(reply: &mut Message) -> bool {
    let name = Name::from_ascii("ns.bosh.").expect("a name");
    reply
        .additionals
        .push(Record::from_rdata(name, 0, address([10, 0, 0, 1])));
    true
}

fn like_recursor(reply: &mut Message) -> bool {
    reply.metadata.authoritative = false;
    each_answer(reply, |record| {
        record.ttl = 60;
        record.data = address([192, 0, 2, 1]);
    })
}

fn add_text(reply: &mut Message) -> bool {
    if !has_addresses(reply, 1) {
        return false;
    }
    let mut record = reply.answers[0].clone();
    record.data = RData::TXT(rdata::TXT::new(vec!["text".to_owned()]));
    reply.answers.push(record);
    true
}

fn like_ipv6(reply: &mut Message) -> bool {
    each_answer(reply, |record| {
        record.data = RData::AAAA(rdata::AAAA("fd00::1".parse().expect("an address")));
    })
}

fn change_upcheck(reply: &mut Message) -> bool {
    let is_upcheck = is_about(reply, "upcheck.") && !reply.answers.is_empty();
    if is_upcheck && reply.answers[0].record_type() == RecordType::A {
        reply.answers[0].data = address([127, 0, 0, 2]);
        return true;
    }
    false
}

fn change_pointer(reply: &mut Message) -> bool {
    let Some(record) = reply.answers.first_mut() else {
        return false;
    };
    if record.record_type() != RecordType::PTR {
        return false;
    }
    let name = Name::from_ascii("other.bosh.").expect("a name");
    record.data = RData::PTR(rdata::PTR(name));
    true
}

/// Returns records with groups of 3 and of 40 instances, which no reply of 512 bytes holds, reverse names and an alias.
fn records() -> Vec<u8> {
    let mut rows = Vec::new();
    for (group, count) in [(1, 3), (2, 40), (3, 1)] {
        for number in 0..count {
            rows.push(json!([
                format!("id-{group}-{number}"),
                format!("web{group}"),
                "net",
                "dep",
                format!("10.0.{group}.{}", number + 1),
                "bosh",
                [group.to_string()],
                format!("{}", group * 100 + number),
                "1",
                number,
            ]));
        }
    }
    let keys = [
        "id",
        "instance_group",
        "network",
        "deployment",
        "ip",
        "domain",
        "group_ids",
        "num_id",
        "az_id",
        "instance_index",
    ];
    json!({
        "record_keys": keys, "record_infos": rows, "version": 1,
        "records": [["10.0.1.1", "id-1-0.web1.net.dep.bosh"]],
        "aliases": {"alias.internal": [{"group_id": "1", "root_domain": "bosh"}]},
    })
    .to_string()
    .into_bytes()
}

/// Relays to the server at `server`, with a mistake in every reply for which it can be made.
fn relay(
    at: SocketAddr,
    server: SocketAddr,
    mistake: Option<Mistake>,
    made: Arc<Mutex<u64>>,
) -> Result<Double> {
    let replies = move |query: &[u8], is_tcp: bool| {
        let reply = if is_tcp {
            ask_tcp_raw(server, query).ok()?
        } else {
            ask_raw(server, query, PATIENCE).ok()?
        };
        let Some(mistake) = mistake else {
            return Some(reply);
        };
        let mut message = Message::from_vec(&reply).ok()?;
        if !mistake(&mut message) {
            return Some(reply);
        }
        *made.lock() += 1;
        message.to_vec().ok()
    };
    Double::start(at, Arc::new(replies))
}

struct Setting {
    namespace: Namespace,
    server: Server,
}

impl Setting {
    fn new() -> Result<Self> {
        let namespace = Namespace::new("faults")?;
        let folder = server::folder(&records(), None)?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 5353));
        let server = Server::start(
            Some(&namespace),
            folder,
            address,
            &json!({"xdp": {"mode": "off"}}),
        )?;
        Ok(Self { namespace, server })
    }

    /// Asks through a relay; returns exit code, report, and how many mistakes were made.
    fn ask(&self, port: u16, mistake: Option<Mistake>) -> Result<(i32, serde_json::Value, u64)> {
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let made = Arc::new(Mutex::new(0));
        let server = self.server.address;
        let counter = made.clone();
        let _relay = self
            .namespace
            .run(move || relay(at, server, mistake, counter))??;
        let folder = self.server.folder.path();
        let config = folder.join("config.json");
        let asked = at.to_string();
        let arguments = ["--ask", &asked, "--rate", "1000", "--cpu", "100"];
        let mut shadow = Shadow::start(&self.namespace, folder, &config, &arguments)?;
        let (code, report) = shadow.finish()?;
        let made = *made.lock();
        Ok((code, report, made))
    }
}

#[test]
fn every_fault_is_found_and_named() -> Result<()> {
    requires!(namespaces);
    ensure!(FAULTS.len() >= 30, "{}", FAULTS.len());
    let setting = Setting::new()?;
    let queue: Mutex<VecDeque<usize>> = Mutex::new((0..FAULTS.len()).collect());
    let problems = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let work = || -> Result<()> {
            loop {
                let next = queue.lock().pop_front();
                let Some(number) = next else { return Ok(()) };
                let (name, mistake, cause) = FAULTS[number];
                let port = 10_000 + u16::try_from(number)?;
                let (code, report, made) = setting.ask(port, Some(mistake)).context(name)?;
                let causes = causes(&report, false);
                let is_named = causes.iter().any(|found| found.contains(cause));
                if made == 0 || code != 3 || !is_named {
                    problems.lock().push(format!(
                        "{name}: {made} made, exit code {code}, {causes:?}, not {cause:?}"
                    ));
                }
            }
        };
        let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().map_err(|_| anyhow!("a thread panicked"))?)
    })?;
    let problems = problems.into_inner();
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

/// The same relay without a mistake, and the server itself: nothing is called different.
#[test]
fn server_equals_itself() -> Result<()> {
    requires!(namespaces);
    let setting = Setting::new()?;
    let (code, report, _) = setting.ask(10_000, None)?;
    ensure!(code == 0, "{}", unexplained(&report));
    let compared = count(&report, "/verdicts/compared");
    ensure!(compared > 500, "{}", report["verdicts"]);
    ensure!(
        count(&report, "/verdicts/equal") == compared,
        "{}",
        report["verdicts"]
    );
    ensure!(
        count(&report, "/interface/answered") < compared,
        "{}",
        report["interface"]
    );
    Ok(())
}

/// A server that is gone, or replies to nothing, ends the asking early and is called different.
#[test]
fn silent_server_costs_bounded_time() -> Result<()> {
    requires!(namespaces);
    let setting = Setting::new()?;
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 10_000));
    let _silent = setting
        .namespace
        .run(|| Double::start(at, Arc::new(|_, _| None)))??;
    let folder = setting.server.folder.path();
    let asked = at.to_string();
    let mut shadow = Shadow::start(
        &setting.namespace,
        folder,
        &folder.join("config.json"),
        &["--ask", &asked, "--rate", "1000"],
    )?;
    let (code, report) = shadow.finish()?;
    ensure!(code == 3, "{code}");
    ensure!(
        causes(&report, false) == ["no reply"],
        "{}",
        report["differences"]
    );
    let failure = report["failure"].to_string();
    ensure!(failure.contains("stopped answering"), "{failure}");
    ensure!(count(&report, "/seen/queries") < 300, "{}", report["seen"]);
    Ok(())
}

/// Names of files that a test may write while others read the folder.
pub(crate) fn write_atomically(path: &Path, text: &[u8]) -> Result<()> {
    let beside = path.with_extension("new");
    fs::write(&beside, text)?;
    Ok(fs::rename(beside, path)?)
}
