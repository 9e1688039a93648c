//! SRV, TXT, denials and reverse names by the interface: complete, shuffled, never older than a change.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context, Result, ensure};
use dns_kit::metrics::names;
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{RData, RecordType},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    metrics::Metrics,
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

use crate::{EVENTUALLY, OURS};

/// A server with Consul's names and the interface `lo`.
struct Lab {
    /// Ended before its namespace is removed.
    server: Server,
    namespace: Namespace,
}

impl Lab {
    fn start(label: &str, definitions: &Path, xdp: &Value) -> Result<Self> {
        let namespace = Namespace::new(label)?;
        let aliases = br#"{"first.cf.internal": ["10.0.3.1"]}"#;
        let folder = server::folder(&server::records_of_groups(&[3]), Some(aliases))?;
        let mut interface = json!({"mode": "tc", "interfaces": ["lo"]});
        server::merge(&mut interface, xdp);
        let extra = json!({
            "xdp": interface,
            "metrics": {"enabled": true},
            "consul": {"node_name": "here", "advertise_addr": "10.9.0.9", "sources": {"files": [definitions]}},
        });
        let server = Server::start(Some(&namespace), folder, OURS, &extra)?;
        wait_until("the fast path", EVENTUALLY, || {
            Metrics::read(&namespace).is_ok_and(|metrics| metrics.sum(names::FAST_PATH_UP, "") > 0)
        })?;
        Ok(Self { server, namespace })
    }

    fn ask(&self, name: &str, kind: RecordType, edns: Option<u16>) -> Result<Message> {
        let query = client::query(name, kind, edns)?;
        self.namespace.run(|| client::ask(OURS, &query))?
    }

    /// Returns the number of replies of other types that interfaces gave.
    fn hits(&self) -> u64 {
        let hits = |metrics: Metrics| metrics.sum(names::FAST_PATH_PACKETS_TOTAL, "outcome=\"hit_other\"");
        Metrics::read(&self.namespace).map_or(0, hits)
    }

    /// Queries until the interface answers.
    fn until_interface_answers(&self, name: &str, kind: RecordType, edns: Option<u16>) -> Result<()> {
        wait_until("an answer by the interface", EVENTUALLY, || {
            let before = self.hits();
            self.ask(name, kind, edns).is_ok() && self.hits() > before
        })
        .with_context(|| format!("{name} {kind}, EDNS {edns:?}: {}", self.server.log()))
    }
}

/// Returns the definition of services with this many instances, all on one port.
fn services(counts: &[(&str, usize)], port: u16) -> String {
    let mut last = 0_u32;
    let mut instance = |name: &str, index: usize| {
        last += 1;
        let address = std::net::Ipv4Addr::from_bits(0x0a07_0000 + last).to_string();
        json!({"name": name, "id": format!("{name}-{index}"), "address": address, "port": port})
    };
    let mut services = Vec::new();
    for &(name, count) in counts {
        services.extend((0..count).map(|index| instance(name, index)));
    }
    json!({"services": services}).to_string()
}

/// Returns the targets of a reply's SRV records, in order, after checking that additional records lead
/// from them.
fn targets(reply: &Message) -> Result<Vec<String>> {
    let target = |data: &RData| match data {
        RData::SRV(srv) => Some(srv.target.to_ascii()),
        _ => None,
    };
    let targets: Vec<String> = reply.answers.iter().filter_map(|record| target(&record.data)).collect();
    ensure!(targets.len() == reply.answers.len(), "only SRV: {reply:?}");
    for record in &reply.additionals {
        ensure!(targets.contains(&record.name.to_ascii()), "{} leads nowhere: {targets:?}", record.name);
    }
    Ok(targets)
}

#[test]
fn interface_gives_other_types() -> Result<()> {
    requires!(namespaces, bpf);
    let folder = tempfile::TempDir::with_prefix("bdx-")?;
    let definitions = folder.path().join("services.json");
    fs::write(&definitions, services(&[("few", 3), ("some", 20), ("many", 100)], 8080))?;
    let lab = Lab::start("consul-others", &definitions, &json!({}))?;
    for (name, count) in [("few", 3), ("some", 20), ("many", 100)] {
        for edns in [None, Some(1232)] {
            let name = format!("_{name}._tcp.service.consul.");
            lab.until_interface_answers(&name, RecordType::SRV, edns)?;
            let before = lab.hits();
            let (mut firsts, mut seen) = (BTreeSet::new(), BTreeSet::new());
            for _ in 0..100 {
                let targets = targets(&lab.ask(&name, RecordType::SRV, edns)?)?;
                ensure!(!targets.is_empty() && (count > 3 || targets.len() == 3), "{name}: {targets:?}");
                firsts.extend(targets.first().cloned());
                seen.extend(targets);
            }
            // Each order of three has a chance of (2/3)^100 to be missing.
            ensure!(firsts.len() >= count.min(3), "{name}, EDNS {edns:?}: {firsts:?}");
            ensure!(seen.len() >= count.min(8), "{name}, EDNS {edns:?}: {} of {count}", seen.len());
            // Probes and other draws take a few.
            ensure!(lab.hits() - before >= 80, "{name}, EDNS {edns:?}: {} hits", lab.hits() - before);
        }
    }
    for (name, kind) in [
        ("here.node.consul.", RecordType::TXT),
        ("few.service.consul.", RecordType::AAAA),
        ("few.service.consul.", RecordType::HTTPS),
        ("gone.service.consul.", RecordType::A),
        ("1.3.0.10.in-addr.arpa.", RecordType::PTR),
    ] {
        lab.until_interface_answers(name, kind, None)?;
        let by_interface = lab.ask(name, kind, None)?;
        let query = client::query(name, kind, None)?;
        let by_userspace = lab.namespace.run(|| client::ask_tcp(OURS, &query))??;
        ensure!(by_interface.metadata.response_code == by_userspace.metadata.response_code, "{name} {kind}");
        ensure!(by_interface.answers == by_userspace.answers, "{name} {kind}: {by_interface:?}");
        ensure!(by_interface.additionals == by_userspace.additionals, "{name} {kind}: {by_interface:?}");
        let zones = [&by_interface, &by_userspace].map(|reply| reply.authorities.len());
        ensure!(zones[0] == zones[1], "{name} {kind}: {by_interface:?}");
    }
    let unknown = lab.ask("gone.service.consul.", RecordType::A, None)?;
    ensure!(unknown.metadata.response_code == ResponseCode::NXDomain, "{unknown:?}");
    Ok(())
}

#[test]
fn other_types_are_switched_off() -> Result<()> {
    requires!(namespaces, bpf);
    let folder = tempfile::TempDir::with_prefix("bdx-")?;
    let definitions = folder.path().join("services.json");
    fs::write(&definitions, services(&[("few", 3)], 8080))?;
    let lab = Lab::start("consul-no-other", &definitions, &json!({"other_types": false}))?;
    for _ in 0..20 {
        ensure!(targets(&lab.ask("few.service.consul.", RecordType::SRV, None)?)?.len() == 3);
    }
    ensure!(lab.hits() == 0, "{}", lab.hits());
    Ok(())
}

/// After a reload has finished no reply is older, however busy the name is.
#[test]
fn finished_reload_leaves_no_older_reply() -> Result<()> {
    requires!(namespaces, bpf);
    let folder = tempfile::TempDir::with_prefix("bdx-")?;
    let definitions = folder.path().join("services.json");
    let names: Vec<String> = (0..20).map(|number| format!("web{number}")).collect();
    let counts: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 4)).collect();
    fs::write(&definitions, services(&counts, 1000))?;
    let lab = Lab::start("consul-older", &definitions, &json!({}))?;
    let name = |number: usize| format!("web{number}.service.consul.");
    for number in 0..names.len() {
        lab.until_interface_answers(&name(number), RecordType::SRV, None)?;
    }
    let pid = Pid::from_raw(i32::try_from(lab.server.pid())?);
    let is_over = AtomicBool::new(false);
    let before = lab.hits();
    thread::scope(|scope| -> Result<()> {
        // Clients that make every name be learned again at once.
        let busy = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                (0..names.len()).for_each(|number| drop(lab.ask(&name(number), RecordType::SRV, None)));
            }
        });
        let changed = (1..=8_u16).try_for_each(|turn| -> Result<()> {
            let port = 1000 + turn;
            fs::write(&definitions, services(&counts, port))?;
            kill(pid, Signal::SIGHUP)?;
            let finished = || lab.server.log().matches("reload finished").count() == usize::from(turn);
            wait_until("the reload", EVENTUALLY, finished)?;
            for number in 0..names.len() {
                let reply = lab.ask(&name(number), RecordType::SRV, None)?;
                let is_new = |data: &RData| matches!(data, RData::SRV(srv) if srv.port == port);
                let is_new = reply.answers.iter().all(|record| is_new(&record.data));
                ensure!(is_new && !reply.answers.is_empty(), "after reload {turn}: {reply:?}");
            }
            Ok(())
        });
        is_over.store(true, Ordering::Relaxed);
        busy.join().expect("clients do not panic");
        changed
    })?;
    ensure!(lab.hits() > before, "the interface took part");
    Ok(())
}
