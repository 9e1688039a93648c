//! Compares replies with the cases' expectations. Replies are parsed by hickory-proto, which shares no code
//! with the encoder.

use std::{collections::BTreeSet, net::IpAddr};

use hickory_proto::{
    op::Message,
    rr::{
        RData, Record,
        rdata::opt::{EdnsCode, EdnsOption},
    },
};
use serde_json::Value;

use super::{Case, Scenario};

/// Compares a reply with the expectation; returns the differences.
pub(crate) fn faults(scenario: &Scenario, case: &Case, bytes: &[u8]) -> Vec<String> {
    let message = match Message::from_vec(bytes) {
        Ok(message) => message,
        Err(error) => return vec![format!("unreadable: {error}")],
    };
    let expect = &case.expect;
    let mut faults = Vec::new();
    let mut compare = |what: &str, found: String, wanted: String| {
        if found != wanted {
            faults.push(format!("{what} is {found}, not {wanted}"));
        }
    };
    compare(
        "RCODE",
        rcode(&message),
        expect["rcode"].as_str().unwrap_or_default().to_owned(),
    );
    for (flag, found) in [
        ("aa", message.metadata.authoritative),
        ("ra", message.metadata.recursion_available),
        ("tc", message.metadata.truncation),
    ] {
        compare(flag, found.to_string(), expect[flag].to_string());
    }
    if let Some(wanted) = expect["compressed"].as_bool() {
        compare(
            "compressed",
            has_pointer(bytes).to_string(),
            wanted.to_string(),
        );
    }
    if let Some(most) = expect["max_bytes"].as_u64()
        && bytes.len() as u64 > most
    {
        faults.push(format!("{} bytes, more than {most}", bytes.len()));
    }
    let answers = lines(&message.answers);
    for (part, found) in [
        ("answers", &answers),
        ("authority", &lines(&message.authorities)),
        ("additional", &lines(&message.additionals)),
    ] {
        if let Some(wanted) = expect.get(part)
            && let Err(fault) = section(scenario, case, wanted, found, &answers)
        {
            faults.push(format!(
                "{part}: {fault}; found {:?}",
                found.iter().take(12).collect::<Vec<_>>()
            ));
        }
    }
    if let Some(wanted) = expect.get("edns") {
        faults.extend(edns_fault(wanted, &message, bytes));
    }
    faults
}

/// Returns the records of the answer section in order, to count distinct answers.
pub(crate) fn answers_of(bytes: &[u8]) -> Vec<String> {
    Message::from_vec(bytes)
        .map(|message| lines(&message.answers))
        .unwrap_or_default()
}

/// Compares one section; the error describes the difference.
fn section(
    scenario: &Scenario,
    case: &Case,
    wanted: &Value,
    found: &[String],
    answers: &[String],
) -> Result<(), String> {
    let sorted = |mut lines: Vec<String>| {
        lines.sort();
        lines
    };
    if let Some(list) = wanted.as_array() {
        let wanted = sorted(records(list));
        return same(sorted(found.to_vec()), wanted);
    }
    if let Some(list) = wanted["ordered"].as_array() {
        return same(found.to_vec(), records(list));
    }
    if let Some(list) = wanted["set"].as_array() {
        let unique = |lines: Vec<String>| lines.into_iter().collect::<BTreeSet<_>>();
        let (found, wanted) = (unique(found.to_vec()), unique(records(list)));
        return if found == wanted {
            Ok(())
        } else {
            Err(format!("wanted the set {wanted:?}"))
        };
    }
    if let Some(options) = wanted["one_of"].as_array() {
        let fits = |option: &Value| section(scenario, case, option, found, answers).is_ok();
        return if options.iter().any(fits) {
            Ok(())
        } else {
            Err("wanted one of several sections".to_owned())
        };
    }
    let unique: BTreeSet<&String> = found.iter().collect();
    if let Some(list) = wanted["any_of"].as_array() {
        let allowed = records(list);
        if let Some(stranger) = found.iter().find(|line| !allowed.contains(line)) {
            return Err(format!("{stranger} is not among those allowed"));
        }
        if wanted["repeats"] != true && unique.len() < found.len() {
            return Err("a record comes twice".to_owned());
        }
        return count_fits(&wanted["count"], found.len());
    }
    if let Some(service) = wanted["generated"].as_str() {
        let allowed: BTreeSet<String> = generated(scenario, case, service)
            .into_iter()
            .map(|(line, _)| line)
            .collect();
        if let Some(stranger) = found.iter().find(|line| !allowed.contains(*line)) {
            return Err(format!("{stranger} is not among those generated"));
        }
        if unique.len() < found.len() {
            return Err("a record comes twice".to_owned());
        }
        return count_fits(&wanted["count"], found.len());
    }
    let targets: BTreeSet<&str> = answers
        .iter()
        .filter_map(|line| line.rsplit(' ').next())
        .collect();
    let mut led_to: Vec<String> = match &wanted["targets_of_answers"] {
        Value::Array(list) => records(list),
        _ => scenario
            .catalog
            .generate
            .iter()
            .flat_map(|generate| generate.nodes())
            .map(|(node, address)| {
                address_line(
                    &format!(
                        "{node}.node.{}.{}",
                        scenario.datacenter(),
                        scenario.domain()
                    ),
                    address,
                )
            })
            .collect(),
    };
    led_to.retain(|line| {
        line.split(' ')
            .next()
            .is_some_and(|owner| targets.contains(owner))
    });
    same(sorted(found.to_vec()), sorted(led_to))
}

/// Records of the case's type for generated instances, with their targets.
fn generated(scenario: &Scenario, case: &Case, service: &str) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    let owner = case.q.to_ascii_lowercase();
    for generate in scenario
        .catalog
        .generate
        .iter()
        .filter(|generate| generate.service == service)
    {
        for (node, address) in generate.nodes() {
            let target = format!(
                "{node}.node.{}.{}",
                scenario.datacenter(),
                scenario.domain()
            );
            let line = match case.kind.as_str() {
                "SRV" => format!("{owner} 0 SRV 1 1 {} {target}", generate.port),
                _ => address_line(&owner, address),
            };
            lines.push((line, target));
        }
    }
    lines
}

/// A or AAAA with TTL 0.
fn address_line(owner: &str, address: IpAddr) -> String {
    let kind = if address.is_ipv4() { "A" } else { "AAAA" };
    format!("{owner} 0 {kind} {address}")
}

fn same(found: Vec<String>, wanted: Vec<String>) -> Result<(), String> {
    if found == wanted {
        Ok(())
    } else {
        Err(format!("wanted {wanted:?}"))
    }
}

fn count_fits(wanted: &Value, found: usize) -> Result<(), String> {
    let number = |value: &Value| value.as_u64().map(|number| number as usize);
    let fits = match number(wanted) {
        Some(exact) => found == exact,
        None => (number(&wanted["min"]).unwrap_or(0)
            ..=number(&wanted["max"]).unwrap_or(usize::MAX))
            .contains(&found),
    };
    if fits {
        Ok(())
    } else {
        Err(format!("{found} records, wanted {wanted}"))
    }
}

/// Records of a case, one line each, names in lower case.
fn records(list: &[Value]) -> Vec<String> {
    let line = |record: &Value| {
        let data = match &record["data"] {
            Value::Array(strings) => format!("{strings:?}"),
            data => {
                let text = data.as_str().unwrap_or_default().to_ascii_lowercase();
                text.parse::<IpAddr>()
                    .map_or(text, |address| address.to_string())
            }
        };
        let owner = record["name"]
            .as_str()
            .unwrap_or_default()
            .to_ascii_lowercase();
        format!(
            "{owner} {} {} {data}",
            record["ttl"],
            record["type"].as_str().unwrap_or_default()
        )
    };
    list.iter().map(line).collect()
}

/// Records of a reply in the same form.
fn lines(list: &[Record]) -> Vec<String> {
    let line = |record: &Record| {
        let lower = |name: &hickory_proto::rr::Name| name.to_ascii().to_ascii_lowercase();
        let data = match &record.data {
            RData::A(address) => address.to_string(),
            RData::AAAA(address) => address.to_string(),
            RData::CNAME(name) => lower(&name.0),
            RData::NS(name) => lower(&name.0),
            RData::PTR(name) => lower(&name.0),
            RData::SRV(srv) => format!(
                "{} {} {} {}",
                srv.priority,
                srv.weight,
                srv.port,
                lower(&srv.target)
            ),
            RData::SOA(soa) => format!(
                "{} {} * {} {} {} {}",
                lower(&soa.mname),
                lower(&soa.rname),
                soa.refresh,
                soa.retry,
                soa.expire,
                soa.minimum
            ),
            RData::TXT(text) => {
                let strings = text
                    .txt_data
                    .iter()
                    .map(|string| Value::from(String::from_utf8_lossy(string)));
                format!("{:?}", strings.collect::<Vec<_>>())
            }
            other => other.to_string(),
        };
        format!(
            "{} {} {} {data}",
            lower(&record.name),
            record.ttl,
            record.record_type()
        )
    };
    list.iter().map(line).collect()
}

fn rcode(message: &Message) -> String {
    use hickory_proto::op::ResponseCode::{FormErr, NXDomain, NoError, NotImp, Refused, ServFail};
    match message.metadata.response_code {
        NoError => "NOERROR".to_owned(),
        NXDomain => "NXDOMAIN".to_owned(),
        ServFail => "SERVFAIL".to_owned(),
        Refused => "REFUSED".to_owned(),
        NotImp => "NOTIMP".to_owned(),
        FormErr => "FORMERR".to_owned(),
        other => format!("{other:?}"),
    }
}

/// Compares the OPT with the expectation. Hickory raises small sizes, so the size is read from the bytes.
fn edns_fault(wanted: &Value, message: &Message, bytes: &[u8]) -> Option<String> {
    let Some(edns) = &message.edns else {
        return (!wanted.is_null()).then(|| "the OPT is missing".to_owned());
    };
    if wanted.is_null() {
        return Some("an OPT although none was sent".to_owned());
    }
    let at = bytes.windows(3).rposition(|window| window == [0, 0, 41])? + 3;
    let size = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    if wanted["udp_size"] != size {
        return Some(format!(
            "size in the OPT is {size}, not {}",
            wanted["udp_size"]
        ));
    }
    let scope = match edns.option(EdnsCode::Subnet) {
        Some(EdnsOption::Subnet(subnet)) => Some(u64::from(subnet.scope_prefix())),
        _ => None,
    };
    // Absent means not asserted.
    (wanted
        .get("ecs_scope")
        .is_some_and(|wanted| wanted.as_u64() != scope))
    .then(|| format!("scope is {scope:?}, not {}", wanted["ecs_scope"]))
}

/// Returns whether an owner name after the question is compressed.
fn has_pointer(bytes: &[u8]) -> bool {
    let skip = |mut at: usize| loop {
        match bytes.get(at).copied() {
            Some(0) => return Some((at + 1, false)),
            Some(length @ 1..=63) => at += usize::from(length) + 1,
            Some(192..) => return Some((at + 2, true)),
            _ => return None,
        }
    };
    let count = |at: usize| usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]));
    let Some((mut at, _)) = skip(12) else {
        return false;
    };
    at += 4;
    for _ in 0..count(6) + count(8) + count(10) {
        let Some((fields, pointer)) = skip(at) else {
            return false;
        };
        if pointer {
            return true;
        }
        at = fields + 10 + count(fields + 8);
    }
    false
}
