//! Replays the cases against the pure crate. The scenario supplies the recursors' replies;
//! the server's tests replay names outside our domains.

#[allow(
    dead_code,
    reason = "the other test that uses these modules needs more of them"
)]
mod support;

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
};

use dns_consul::{Asker, Zone, catalog::Catalog, chain_of, config::Config};
use dns_core::{
    config::reader::{Json, ObjectReader},
    wire::{Parsed, ReplySettings, RequestInfo, Transport, parse_from},
};
use hickory_proto::{
    op::{Message, MessageType, OpCode},
    rr::{Name, RData, Record},
};
use support::{Case, Scenario, expect, query_of};

#[test]
fn every_case_is_answered_as_expected() {
    let mut random = fastrand::Rng::with_seed(20);
    let (mut replayed, mut elsewhere) = (0, 0);
    let mut faults = Vec::new();
    for scenario in Scenario::all() {
        let zone = zone_of(&scenario);
        for (number, case) in scenario.cases.iter().enumerate() {
            let times = case.repeat.as_ref().map_or(1, |repeat| repeat.times);
            let mut different = BTreeSet::new();
            let mut asked_here = true;
            for _ in 0..times {
                let Some(reply) = reply_to(&scenario, &zone, case, &mut random) else {
                    asked_here = false;
                    break;
                };
                different.insert(expect::answers_of(&reply));
                let found = expect::faults(&scenario, case, &reply);
                if !found.is_empty() {
                    faults.push(format!(
                        "{}[{number}] {} {} {}: {} ({})",
                        scenario.name,
                        case.q,
                        case.kind,
                        case.transport,
                        found.join("; "),
                        case.why
                    ));
                    break;
                }
            }
            if !asked_here {
                elsewhere += 1;
                continue;
            }
            replayed += 1;
            if let Some(repeat) = &case.repeat
                && different.len() < repeat.distinct_min
            {
                faults.push(format!(
                    "{}[{number}]: {} different answers",
                    scenario.name,
                    different.len()
                ));
            }
        }
    }
    println!("{replayed} cases replayed, {elsewhere} are the server's");
    assert!(
        faults.is_empty(),
        "{} of {replayed} cases differ:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

/// Configuration and catalog of a scenario.
fn zone_of(scenario: &Scenario) -> Zone {
    let mut object = scenario.config.clone();
    // In the cases these are names of entries in `upstreams`.
    object
        .as_object_mut()
        .expect("an object")
        .remove("recursors");
    let json = Json::parse(object.to_string().as_bytes()).expect("JSON");
    let object = ObjectReader::document(&scenario.name, &json).expect("an object");
    let (config, _) = Config::read(&object).expect("a configuration");
    let catalog = Catalog::build(scenario.registrations(), &config, scenario.visibility());
    Zone { config, catalog }
}

/// Returns the reply to a case; `None` if the name is outside Consul's domains and answered by the server.
fn reply_to(
    scenario: &Scenario,
    zone: &Zone,
    case: &Case,
    random: &mut fastrand::Rng,
) -> Option<Vec<u8>> {
    let bytes = query_of(case, 4711);
    let transport = if case.transport == "tcp" {
        Transport::Tcp
    } else {
        Transport::Udp
    };
    // The cases hold Consul's replies.
    let settings = ReplySettings {
        echo_client_opt: true,
        ..ReplySettings::default()
    };
    let Parsed::Query(query) = parse_from(
        &bytes,
        RequestInfo {
            client: None,
            transport,
        },
        &settings,
    ) else {
        panic!("a query")
    };
    let asker = Asker {
        client: case.client.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        recursion: !scenario.upstreams.is_empty(),
        serial: 1,
    };
    let name = query.question.name();
    let draft = match zone.answer(&query, &asker, random) {
        Some(draft) => draft,
        None if name.to_string().ends_with("arpa.") => match zone.reverse(&query, &asker) {
            Some(draft) => draft,
            None if asker.recursion => return None,
            None => zone.no_such_address(&asker),
        },
        None => return None,
    };
    let chains = draft.hosts().into_iter().map(|host| {
        let chain = chain_of(&recursors_reply(scenario, &host.to_string()));
        (host, chain)
    });
    Some(draft.finish(&query, &zone.config.dns, &chains.collect()))
}

/// Encodes the first recursor's reply for the A records of a name.
fn recursors_reply(scenario: &Scenario, host: &str) -> Vec<u8> {
    let rules = scenario.upstreams.values().next().expect("a recursor");
    let fits = |rule: &&support::scenario::Rule| {
        (rule.q == "*" || rule.q.eq_ignore_ascii_case(host))
            && (rule.kind == "*" || rule.kind == "A")
    };
    let mut message = Message::new(1, MessageType::Response, OpCode::Query);
    for record in rules
        .iter()
        .find(fits)
        .into_iter()
        .flat_map(|rule| &rule.answers)
    {
        let text = |member: &str| record[member].as_str().unwrap_or_default();
        let name = |text: &str| Name::from_ascii(text).expect("a name");
        let data = match text("type") {
            "A" => RData::A(text("data").parse().expect("an address")),
            "AAAA" => RData::AAAA(text("data").parse().expect("an address")),
            "CNAME" => RData::CNAME(hickory_proto::rr::rdata::CNAME(name(text("data")))),
            "TXT" => {
                let strings = record["data"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(|string| string.as_str());
                RData::TXT(hickory_proto::rr::rdata::TXT::new(
                    strings.map(str::to_owned).collect(),
                ))
            }
            other => panic!("{other}: add this type"),
        };
        let ttl = record["ttl"].as_u64().expect("a TTL") as u32;
        message.add_answer(Record::from_rdata(name(text("name")), ttl, data));
    }
    message.to_vec().expect("an encodable reply")
}
