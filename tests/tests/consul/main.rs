//! The cases of Consul's DNS interface against the running server, by UDP and TCP.

mod clients;
#[allow(
    dead_code,
    reason = "the test of the live source, whose module this is, needs more of it"
)]
#[path = "../../../dns-user/consul-source/tests/support/mod.rs"]
mod doubles;
mod live;
mod non_terminals;
mod other_types;
mod recursors;
mod reload;
mod shown;
#[allow(
    dead_code,
    reason = "the test of the pure crate, whose module this is, needs more of it"
)]
#[path = "../../../dns-user/consul/tests/support/mod.rs"]
mod support;

use std::{
    collections::BTreeSet,
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use dns_kit::metrics::names;
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    metrics::Metrics,
    namespace::Namespace,
    process::{run, wait_until},
    requirements, requires,
    server::{self, Server},
};

use doubles::{
    double::{Double, DoubleRules},
    world::World,
};
use recursors::Recursor;
use support::{Case, Scenario, expect, query_of};

/// Listen address of the server.
const OURS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 53);
/// Reply timeout; in some cases a recursor never answers.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit that is reached only on failure.
const EVENTUALLY: Duration = Duration::from_secs(120);

/// Starts a double of Consul's agent at an address of the namespace.
fn start_double(namespace: &Namespace, at: SocketAddr, world: World) -> Result<Double> {
    let listener = namespace.run(|| TcpListener::bind(at))??;
    Ok(Double::start(
        listener,
        world,
        DoubleRules::default(),
        None,
    )?)
}

#[test]
fn userspace_answers_every_case() -> Result<()> {
    replay("consul-off", &json!({"mode": "off"}), false)
}

#[test]
fn fast_path_answers_every_case() -> Result<()> {
    requires!(bpf);
    replay(
        "consul-tc",
        &json!({"mode": "tc", "interfaces": ["lo"]}),
        true,
    )
}

#[test]
fn definition_file_is_reloaded() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("consul-files")?;
    let folder = server::folder(&server::records_of_groups(&[]), None)?;
    let path = folder.path().join("web.hcl");
    let service =
        |address: &str| format!("service {{\n  name = \"web\"\n  address = \"{address}\"\n}}\n");
    fs::write(&path, service("10.0.0.1"))?;
    let extra = json!({
        "xdp": {"mode": "off"},
        "consul": {"node_name": "here", "advertise_addr": "10.0.0.9", "sources": {"files": [folder.path().join("*.hcl")]}},
    });
    let server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    let ask = || -> Result<Vec<std::net::IpAddr>> {
        let query = client::query("web.service.consul.", RecordType::A, None)?;
        Ok(client::addresses(
            &namespace.run(|| client::ask(OURS, &query))??,
        ))
    };
    ensure!(ask()? == [Ipv4Addr::new(10, 0, 0, 1)], "{:?}", ask()?);
    // At once, so that the server reads no half-written file.
    let replace = |text: &str| {
        let beside = path.with_extension("new");
        fs::write(&beside, text).and_then(|()| fs::rename(beside, &path))
    };
    replace(&service("10.0.0.2"))?;
    let now_there = || ask().is_ok_and(|found| found == [Ipv4Addr::new(10, 0, 0, 2)]);
    wait_until("the changed address", Duration::from_secs(120), now_there)?;
    // An unreadable file changes nothing and is reported.
    replace("service {\n  name = \n}\n")?;
    server.wait_for_log("web.hcl: is not HCL")?;
    ensure!(
        ask()? == [Ipv4Addr::new(10, 0, 0, 2)],
        "the last good catalog stays"
    );
    Ok(())
}

#[test]
fn catalog_changes_reach_interface() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("consul-change")?;
    let folder = server::folder(&server::records_of_groups(&[]), None)?;
    let path = folder.path().join("web.json");
    let service = |address: &str, status: &str| {
        json!({"service": {"name": "web", "address": address, "check": {"id": "up", "status": status}}})
            .to_string()
    };
    fs::write(&path, service("10.0.0.1", "passing"))?;
    let extra = json!({
        "xdp": {"mode": "tc", "interfaces": ["lo"]},
        "metrics": {"enabled": true},
        "consul": {
            "node_name": "here", "advertise_addr": "10.0.0.9", "sources": {"files": [path]},
            "dns_config": {"service_ttl": {"*": "7s"}},
        },
    });
    let _server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    let ask = || -> Result<Message> {
        let query = client::query("web.service.consul.", RecordType::A, None)?;
        namespace.run(|| client::ask(OURS, &query))?
    };
    let fast = || Metrics::read(&namespace).map_or(0, |metrics| metrics.fast_path_replies());
    // The interface must answer with this address; once it is published, userspace is not queried.
    let says = |address: [u8; 4]| -> Result<()> {
        wait_until("the address, by the interface", EVENTUALLY, || {
            let before = fast();
            ask().is_ok_and(|reply| {
                client::addresses(&reply) == [std::net::IpAddr::from(address)]
                    && reply.answers.iter().all(|record| record.ttl == 7)
            }) && fast() > before
        })
    };
    says([10, 0, 0, 1])?;
    fs::write(&path, service("10.0.0.2", "passing"))?;
    says([10, 0, 0, 2])?;
    // A service without a healthy instance does not exist.
    fs::write(&path, service("10.0.0.2", "critical"))?;
    let is_gone =
        || ask().is_ok_and(|reply| reply.metadata.response_code == ResponseCode::NXDomain);
    wait_until("the health", EVENTUALLY, is_gone)?;
    fs::write(&path, service("10.0.0.2", "warning"))?;
    says([10, 0, 0, 2])
}

/// Runs all cases of every scenario. With `fast`, the interface must answer every eligible case, with the same answer;
/// a case that differs does not end the others.
///
/// In userspace, a server is started for each scenario. With `fast`, where a start takes longer than the cases because
/// the kernel verifies the programs, the server is reloaded, unless it would remember recursors of the scenario before.
fn replay(label: &str, xdp: &Value, fast: bool) -> Result<()> {
    if !requirements::namespaces() {
        return Ok(());
    }
    let namespace = Namespace::new(label)?;
    let (mut asked, mut by_interface, mut of_addresses, mut faults) = (0, 0, 0, Vec::new());
    let (mut of_other_types, mut others_by_interface) = (0, 0);
    let mut running: Option<Server> = None;
    for scenario in Scenario::all() {
        let reused = running
            .take()
            .filter(|_| fast && scenario.upstreams.is_empty());
        let recursors = start_recursors(&namespace, &scenario)?;
        let server = match reused {
            Some(server) => reload(server, &scenario)?,
            None => start(&namespace, &scenario, &recursors, xdp, fast)?,
        };
        let clients: BTreeSet<_> = scenario
            .cases
            .iter()
            .filter_map(|case| case.client)
            .collect();
        for client in &clients {
            run(namespace.with_own_sysfs("ip").args([
                "address",
                "add",
                &client.to_string(),
                "dev",
                "lo",
            ]))?;
        }
        for (number, case) in scenario.cases.iter().enumerate() {
            asked += 1;
            of_addresses += usize::from(expects_addresses(case));
            let mut found = namespace.run(|| ask(&scenario, case))??;
            if fast && found.is_empty() && may_be_the_interfaces(&namespace, &scenario, case)? {
                by_interface += 1;
                if let Err(problem) = until_the_interface_answers(&namespace, &scenario, case) {
                    found.push(format!("at the interface: {problem:#}"));
                }
            } else if fast && found.is_empty() && case.transport == "udp" {
                of_other_types += 1;
                match repeated(&namespace, &scenario, case)? {
                    (true, _) => others_by_interface += 1,
                    (false, problems) => found.extend(problems),
                }
            }
            for fault in found {
                let Case {
                    q,
                    kind,
                    transport,
                    why,
                    ..
                } = case;
                faults.push(format!(
                    "{}[{number}] {q} {kind} {transport}: {fault} ({why})",
                    scenario.name
                ));
            }
        }
        for client in &clients {
            let address = format!("{client}/32");
            run(namespace
                .with_own_sysfs("ip")
                .args(["address", "delete", &address, "dev", "lo"]))?;
        }
        running = Some(server);
    }
    println!("{asked} cases replayed, {by_interface} of them answered at the interface");
    println!("{others_by_interface} of {of_other_types} others as well, as other types");
    ensure!(
        !fast || others_by_interface * 2 >= of_other_types,
        "most of the other types should be"
    );
    ensure!(
        faults.is_empty(),
        "{} of {asked} cases differ:\n{}",
        faults.len(),
        faults.join("\n")
    );
    // Limits of sizes and names leave some of them to userspace.
    ensure!(
        !fast || by_interface * 2 >= of_addresses,
        "only {by_interface} cases were sent to the interface, {of_addresses} expect addresses over UDP"
    );
    Ok(())
}

/// Returns whether a case expects a reply by UDP that consists of the question's addresses.
fn expects_addresses(case: &Case) -> bool {
    let is_empty = |section: &str| case.expect[section].as_array().is_none_or(Vec::is_empty);
    let is_address = |record: &Value| {
        record["type"] == case.kind.as_str()
            && record["name"]
                .as_str()
                .is_some_and(|name| name.eq_ignore_ascii_case(&case.q))
    };
    case.transport == "udp"
        && matches!(case.kind.as_str(), "A" | "AAAA")
        && case.expect["aa"] == true
        && is_empty("authority")
        && is_empty("additional")
        && case.expect["answers"]
            .as_array()
            .is_some_and(|list| !list.is_empty() && list.iter().all(is_address))
}

/// Returns whether an interface may answer a case: a plain UDP query for addresses whose answer
/// contains only addresses.
fn may_be_the_interfaces(namespace: &Namespace, scenario: &Scenario, case: &Case) -> Result<bool> {
    let config = &scenario.config["dns_config"];
    // A limit of 0 answers truncates every reply; the interface always writes compression pointers.
    if case.transport != "udp"
        || !matches!(case.kind.as_str(), "A" | "AAAA")
        || case.ecs.is_some()
        || case.q.to_ascii_lowercase().contains(".query.")
        || config["disable_compression"] == true
        || config["udp_answer_limit"] == 0
    {
        return Ok(false);
    }
    let query = query_of(case, fastrand::u16(..));
    let reply = namespace.run(|| client::ask_raw(OURS, &query, TIMEOUT))??;
    // Maximum reply size at the interface.
    if reply.len() > 4096 || case.edns.is_some_and(|size| size > 4096) && reply.len() > 4089 {
        return Ok(false);
    }
    let reply = Message::from_vec(&reply)?;
    let is_address = |record: &hickory_proto::rr::Record| {
        matches!(record.record_type(), RecordType::A | RecordType::AAAA)
            && record.name.to_ascii().eq_ignore_ascii_case(&case.q)
    };
    // Replies of recursors do not have AA set.
    Ok(reply.metadata.authoritative
        && reply.metadata.response_code == ResponseCode::NoError
        && !reply.answers.is_empty()
        && reply.answers.iter().all(is_address)
        && reply.authorities.is_empty()
        && reply.additionals.is_empty())
}

/// Repeats the query until the interface answers; every reply must match the case.
fn until_the_interface_answers(
    namespace: &Namespace,
    scenario: &Scenario,
    case: &Case,
) -> Result<()> {
    let mut problem = None;
    let mut before = Metrics::read(namespace)?.fast_path_replies();
    wait_until("an answer by the interface", TIMEOUT, || {
        let asked = namespace.run(|| ask(scenario, case));
        match asked {
            Ok(Ok(faults)) if faults.is_empty() => {}
            Ok(Ok(faults)) => problem = Some(faults.join("; ")),
            Ok(Err(error)) | Err(error) => problem = Some(error.to_string()),
        }
        let now = Metrics::read(namespace).map_or(before, |metrics| metrics.fast_path_replies());
        problem.is_some() || std::mem::replace(&mut before, now) < now
    })?;
    match problem {
        Some(problem) => bail!("{problem}"),
        None => Ok(()),
    }
}

/// Repeats a query until an interface answers it as one of another type, or, because only userspace can
/// answer some of them, a few times; every reply must match the case. Returns whether one did.
fn repeated(
    namespace: &Namespace,
    scenario: &Scenario,
    case: &Case,
) -> Result<(bool, Vec<String>)> {
    let hits = || {
        Metrics::read(namespace)
            .map(|read| read.sum(names::FAST_PATH_PACKETS_TOTAL, "outcome=\"hit_other\""))
    };
    let before = hits()?;
    for _ in 0..20 {
        let problems = namespace.run(|| ask(scenario, case))??;
        if !problems.is_empty() {
            return Ok((
                false,
                problems
                    .into_iter()
                    .map(|problem| format!("repeated: {problem}"))
                    .collect(),
            ));
        }
        if hits()? > before {
            return Ok((true, Vec::new()));
        }
    }
    Ok((false, Vec::new()))
}

/// Runs a case as many times as it specifies; returns the differences.
fn ask(scenario: &Scenario, case: &Case) -> Result<Vec<String>> {
    let times = case.repeat.as_ref().map_or(1, |repeat| repeat.times);
    let mut different = BTreeSet::new();
    for _ in 0..times {
        let query = query_of(case, fastrand::u16(..));
        let reply = match case.transport.as_str() {
            "tcp" => client::ask_tcp_raw_from(case.client, OURS, &query),
            _ => client::ask_raw_as(case.client, OURS, &query, TIMEOUT).map_err(Into::into),
        };
        let reply =
            reply.with_context(|| format!("{}: {} {}", scenario.name, case.q, case.kind))?;
        different.insert(expect::answers_of(&reply));
        let faults = expect::faults(scenario, case, &reply);
        if !faults.is_empty() {
            return Ok(faults);
        }
    }
    let least = case.repeat.as_ref().map_or(1, |repeat| repeat.distinct_min);
    Ok(if different.len() < least {
        vec![format!("{} different answers", different.len())]
    } else {
        Vec::new()
    })
}

/// Starts the recursors of a scenario in order.
fn start_recursors(namespace: &Namespace, scenario: &Scenario) -> Result<Vec<Recursor>> {
    let names = scenario.config["recursors"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str);
    let recursor = |(number, name): (usize, &str)| {
        let address = (Ipv4Addr::new(127, 0, 1, 1 + number as u8), 53).into();
        let rules = scenario
            .upstreams
            .get(name)
            .context("a recursor without rules")?
            .clone();
        namespace.run(|| Recursor::start(address, rules))?
    };
    names.enumerate().map(recursor).collect()
}

/// Starts a server with the configuration of a scenario; with `fast`, waits until it attached the programs.
fn start(
    namespace: &Namespace,
    scenario: &Scenario,
    recursors: &[Recursor],
    xdp: &Value,
    fast: bool,
) -> Result<Server> {
    let folder = server::folder(&server::records_of_groups(&[]), None)?;
    let consul = consul_of(folder.path(), scenario, recursors)?;
    // Consul's replies repeat the client's EDNS size.
    let compat = json!({"echo_opt": true});
    let extra =
        json!({"xdp": xdp, "consul": consul, "compat": compat, "metrics": {"enabled": true}});
    let server = Server::start(Some(namespace), folder, OURS, &extra)
        .with_context(|| scenario.name.clone())?;
    if fast {
        // The fast path loads in the background; no name is published yet.
        let is_up = || {
            Metrics::read(namespace).is_ok_and(|metrics| metrics.sum(names::FAST_PATH_UP, "") > 0)
        };
        wait_until("the fast path", EVENTUALLY, is_up)
            .with_context(|| format!("{}: {}", scenario.name, server.log()))?;
    }
    Ok(server)
}

/// Gives a running server the configuration of a scenario without recursors.
fn reload(mut server: Server, scenario: &Scenario) -> Result<Server> {
    let consul = consul_of(server.folder.path(), scenario, &[])?;
    let before = server.log_length()?;
    reload::reload(&mut server, &consul).with_context(|| scenario.name.clone())?;
    let log = server.log_after(before);
    ensure!(!log.contains("stays in use"), "{}: {log}", scenario.name);
    Ok(server)
}

/// Returns the object `"consul"` of a scenario, whose catalog becomes a definition file in `folder`.
fn consul_of(folder: &Path, scenario: &Scenario, recursors: &[Recursor]) -> Result<Value> {
    // The server reads no file of another scenario again.
    let definitions = folder.join(format!("catalog-{}.json", scenario.name));
    fs::write(&definitions, scenario.definitions().to_string())?;
    let mut consul = scenario.config.clone();
    let object = consul.as_object_mut().context("no object")?;
    object.insert("sources".to_owned(), json!({"files": [definitions]}));
    // Where every recursor answers, a late answer of a busy machine counts.
    let is_silent = scenario
        .upstreams
        .values()
        .flatten()
        .any(|rule| rule.silent);
    let dns_config = object.entry("dns_config").or_insert_with(|| json!({}));
    if let (false, Some(settings)) = (is_silent, dns_config.as_object_mut()) {
        settings
            .entry("recursor_timeout")
            .or_insert_with(|| json!("50s"));
    }
    let addresses: Vec<SocketAddr> = recursors.iter().map(|recursor| recursor.address).collect();
    object.insert("recursors".to_owned(), json!(addresses));
    Ok(consul)
}
