//! SRV, TXT, denials and reverse names by the interface: complete, shuffled, never older than a change.

use std::{
    collections::BTreeSet,
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dns_kit::{
    clock::{kernel_coarse_ns, kernel_monotonic_ns},
    metrics::names,
};
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
    process::{status_line, wait_until},
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
    /// Starts the server with services (see [`services`]).
    fn start(label: &str, services: &str, xdp: &Value) -> Result<Self> {
        let namespace = Namespace::new(label)?;
        let aliases = br#"{"first.cf.internal": ["10.0.3.1"]}"#;
        let folder = server::folder(&server::records_of_groups(&[3]), Some(aliases))?;
        let definitions = folder.path().join("services.json");
        fs::write(&definitions, services)?;
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
        let hits =
            |metrics: Metrics| metrics.sum(names::FAST_PATH_PACKETS_TOTAL, "outcome=\"hit_other\"");
        Metrics::read(&self.namespace).map_or(0, hits)
    }

    /// Returns the number of all replies that interfaces gave.
    fn fast_replies(&self) -> u64 {
        Metrics::read(&self.namespace).map_or(0, |metrics| metrics.fast_path_replies())
    }

    /// Queries until the interface answers.
    fn until_interface_answers(
        &self,
        name: &str,
        kind: RecordType,
        edns: Option<u16>,
    ) -> Result<()> {
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
    let targets: Vec<String> = reply
        .answers
        .iter()
        .filter_map(|record| target(&record.data))
        .collect();
    ensure!(targets.len() == reply.answers.len(), "only SRV: {reply:?}");
    for record in &reply.additionals {
        ensure!(
            targets.contains(&record.name.to_ascii()),
            "{} leads nowhere: {targets:?}",
            record.name
        );
    }
    Ok(targets)
}

#[test]
fn interface_gives_other_types() -> Result<()> {
    requires!(namespaces, bpf);
    let services = services(&[("few", 3), ("some", 20), ("many", 100)], 8080);
    let lab = Lab::start("consul-others", &services, &json!({}))?;
    for (name, count) in [("few", 3), ("some", 20), ("many", 100)] {
        for edns in [None, Some(1232)] {
            let name = format!("_{name}._tcp.service.consul.");
            lab.until_interface_answers(&name, RecordType::SRV, edns)?;
            let before = lab.hits();
            let (mut firsts, mut seen) = (BTreeSet::new(), BTreeSet::new());
            for _ in 0..100 {
                let targets = targets(&lab.ask(&name, RecordType::SRV, edns)?)?;
                ensure!(
                    !targets.is_empty() && (count > 3 || targets.len() == 3),
                    "{name}: {targets:?}"
                );
                firsts.extend(targets.first().cloned());
                seen.extend(targets);
            }
            // Each order of three has a chance of (2/3)^100 to be missing.
            ensure!(
                firsts.len() >= count.min(3),
                "{name}, EDNS {edns:?}: {firsts:?}"
            );
            ensure!(
                seen.len() >= count.min(8),
                "{name}, EDNS {edns:?}: {} of {count}",
                seen.len()
            );
            // Probes and other draws take a few.
            ensure!(
                lab.hits() - before >= 80,
                "{name}, EDNS {edns:?}: {} hits",
                lab.hits() - before
            );
        }
    }
    for (name, kind) in [
        ("here.node.consul.", RecordType::TXT),
        ("few.service.consul.", RecordType::AAAA),
        ("few.service.consul.", RecordType::HTTPS),
        ("gone.service.consul.", RecordType::A),
        ("1.3.0.10.in-addr.arpa.", RecordType::PTR),
        ("9.0.9.10.in-addr.arpa.", RecordType::PTR),
        ("9.0.9.10.in-addr.arpa.", RecordType::A),
        // An instance of `few`.
        ("1.0.7.10.in-addr.arpa.", RecordType::PTR),
    ] {
        // Sizes up to 512 bytes are as none.
        for edns in [None, Some(512), Some(100), Some(1232)] {
            give_same(&lab, name, kind, edns)?;
        }
    }
    let unknown = lab.ask("gone.service.consul.", RecordType::A, None)?;
    ensure!(
        unknown.metadata.response_code == ResponseCode::NXDomain,
        "{unknown:?}"
    );
    Ok(())
}

/// Compares the interface's reply with userspace's.
fn give_same(lab: &Lab, name: &str, kind: RecordType, edns: Option<u16>) -> Result<()> {
    lab.until_interface_answers(name, kind, edns)?;
    let by_interface = lab.ask(name, kind, edns)?;
    let query = client::query(name, kind, edns)?;
    let by_userspace = lab.namespace.run(|| client::ask_tcp(OURS, &query))??;
    ensure!(
        by_interface.metadata.response_code == by_userspace.metadata.response_code,
        "{name} {kind}"
    );
    ensure!(
        by_interface.answers == by_userspace.answers,
        "{name} {kind}: {by_interface:?}"
    );
    ensure!(
        by_interface.additionals == by_userspace.additionals,
        "{name} {kind}: {by_interface:?}"
    );
    let zones = [&by_interface, &by_userspace].map(|reply| reply.authorities.len());
    ensure!(zones[0] == zones[1], "{name} {kind}: {by_interface:?}");
    Ok(())
}

/// Userspace gives the first two answers, and hands the question over with the second.
#[test]
fn third_query_is_answered_by_interface() -> Result<()> {
    requires!(namespaces, bpf);
    let services = services(&[("few", 3), ("some", 20), ("many", 100)], 8080);
    let lab = Lab::start("consul-third", &services, &json!({}))?;
    // The program that gives them is loaded after the one that calls it.
    wait_until("all programs", EVENTUALLY, || {
        let state = |now: &Metrics, label| now.sum(names::FAST_PATH_PROGRAM_INFO, label);
        Metrics::read(&lab.namespace)
            .is_ok_and(|now| state(&now, "dns_tc_answer") == 1 && state(&now, "\"loading\"") == 0)
    })?;
    // Names of the fleet have an entry for every type: from the start, or after the first query.
    let (reply, denial) = (
        (names::FAST_PATH_LOCAL_REPLIES, ""),
        (names::FAST_PATH_ENTRIES, "negative"),
    );
    for (name, kind, edns, grows) in [
        ("few.service.consul.", RecordType::SRV, None, Some(reply)),
        (
            "some.service.consul.",
            RecordType::SRV,
            Some(1232),
            Some(reply),
        ),
        (
            "many.service.consul.",
            RecordType::SRV,
            Some(1232),
            Some(reply),
        ),
        (
            "_some._tcp.service.consul.",
            RecordType::SRV,
            Some(1232),
            Some(reply),
        ),
        ("here.node.consul.", RecordType::TXT, None, Some(reply)),
        (
            "1.3.0.10.in-addr.arpa.",
            RecordType::PTR,
            Some(1232),
            Some(reply),
        ),
        (
            "9.0.9.10.in-addr.arpa.",
            RecordType::PTR,
            Some(512),
            Some(reply),
        ),
        (
            "_grpclb._tcp.q-s0.q-g3.bosh.",
            RecordType::SRV,
            Some(1232),
            Some(denial),
        ),
        ("first.cf.internal.", RecordType::HTTPS, None, None),
    ] {
        let before = Metrics::read(&lab.namespace)?;
        for _ in 0..2 {
            lab.ask(name, kind, edns)?;
        }
        let early = lab.fast_replies() - before.fast_path_replies();
        ensure!(
            early == 0 || grows != Some(reply),
            "{name} {kind}: the interface gave {early} of the first two"
        );
        wait_until("the reply to be published", EVENTUALLY, || {
            let is_larger =
                |now: &Metrics, (family, label)| now.sum(family, label) > before.sum(family, label);
            Metrics::read(&lab.namespace)
                .is_ok_and(|now| grows.is_none_or(|grows| is_larger(&now, grows)))
        })
        .with_context(|| format!("{name} {kind}: {}", lab.server.log()))?;
        // One query a second may be a probe.
        let mut given = 0;
        for _ in 0..20 {
            let before = Metrics::read(&lab.namespace)?;
            lab.ask(name, kind, edns)?;
            let after = Metrics::read(&lab.namespace)?;
            given += after.fast_path_replies() - before.fast_path_replies();
            let probes = after.probes() - before.probes();
            ensure!(
                given + probes > 0,
                "{name} {kind}: {:?}",
                after.outcomes_since(&before)
            );
            if given > 0 {
                break;
            }
        }
        ensure!(given == 1, "{name} {kind}: only probes");
    }
    Ok(())
}

#[test]
fn other_types_are_switched_off() -> Result<()> {
    requires!(namespaces, bpf);
    let services = services(&[("few", 3)], 8080);
    let lab = Lab::start("consul-no-other", &services, &json!({"other_types": false}))?;
    for _ in 0..20 {
        ensure!(targets(&lab.ask("few.service.consul.", RecordType::SRV, None)?)?.len() == 3);
    }
    ensure!(lab.hits() == 0, "{}", lab.hits());
    Ok(())
}

/// Names of a group that comes and goes, each with a type that interfaces answer.
const FLEET: [(&str, RecordType); 3] = [
    ("q-s0.web-4.default.dep.bosh.", RecordType::SRV),
    ("q-s0.q-g4.bosh.", RecordType::ANY),
    ("q-a1s0.q-g4.bosh.", RecordType::PTR),
];

/// Instances of each service.
const INSTANCES: usize = 4;

/// Contents of the server's files.
struct Files {
    port: u16,
    /// Services with failing health checks.
    ailing: BTreeSet<usize>,
    ttl: u32,
    /// Whether an alias has the address 10.0.5.1.
    has_alias: bool,
    /// Whether the fleet has a group of four.
    has_group: bool,
}

impl Files {
    /// Writes the files of which one part differs, and makes the server read them.
    fn write(&self, lab: &Lab, counts: &[(&str, usize)]) -> Result<()> {
        let &Self {
            port,
            ref ailing,
            ttl,
            has_alias,
            has_group,
        } = self;
        let mut services: Value = serde_json::from_str(&services(counts, port))?;
        let all = services["services"].as_array_mut().context("services")?;
        // Every second instance of each service has a check.
        for (index, service) in all.iter_mut().enumerate().step_by(2) {
            let is_ailing = ailing.contains(&(index / INSTANCES));
            service["check"] =
                json!({"id": "up", "status": if is_ailing { "critical" } else { "passing" }});
        }
        let folder = lab.server.folder.path();
        fs::write(folder.join("services.json"), services.to_string())?;
        let ttls = json!({"service_ttl": {"*": format!("{ttl}s")}});
        lab.server
            .change_settings(|settings| settings["consul"]["dns_config"] = ttls)?;
        let address = if has_alias { "10.0.5.1" } else { "10.0.6.1" };
        fs::write(
            folder.join("aliases/aliases.json"),
            json!({"first.cf.internal": [address]}).to_string(),
        )?;
        let groups: &[u16] = if has_group { &[3, 4] } else { &[3] };
        fs::write(
            folder.join("records.json"),
            server::records_of_groups(groups),
        )?;
        Ok(kill(
            Pid::from_raw(i32::try_from(lab.server.pid())?),
            Signal::SIGHUP,
        )?)
    }

    /// Checks that the first replies after the reload are not older.
    fn check(&self, lab: &Lab, names: &[String]) -> Result<()> {
        for (number, name) in names.iter().enumerate() {
            let reply = lab.ask(&format!("{name}.service.consul."), RecordType::SRV, None)?;
            let is_new = reply.answers.iter().all(|record| {
                record.ttl == self.ttl
                    && matches!(&record.data, RData::SRV(srv) if srv.port == self.port)
            });
            // Consul gives three to clients without EDNS.
            let count = if self.ailing.contains(&number) { 2 } else { 3 };
            ensure!(is_new && reply.answers.len() == count, "{reply:?}");
        }
        let pointer = lab.ask("1.5.0.10.in-addr.arpa.", RecordType::PTR, None)?;
        ensure!(pointer.answers.is_empty() != self.has_alias, "{pointer:?}");
        for (name, kind) in FLEET {
            let reply = lab.ask(name, kind, None)?;
            let exists = reply.metadata.response_code == ResponseCode::NoError;
            ensure!(exists == self.has_group, "{reply:?}");
        }
        Ok(())
    }
}

/// Lease of the programs in the test of changes.
const LEASE: Duration = Duration::from_secs(2);

/// Two ticks of the slowest kernel: a CPU may have read the coarse clock just before its last update.
const TICKS: Duration = Duration::from_millis(20);

/// Stops the server's process for longer than a lease: the interface falls silent.
fn lose_publisher(lab: &Lab, name: &str) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(lab.server.pid())?);
    kill(pid, Signal::SIGSTOP)?;
    let is_stopped = || status_line(pid, "State").is_ok_and(|state| state.starts_with('T'));
    wait_until("the stopped server", EVENTUALLY, is_stopped)?;
    // The lease was renewed before. The programs read the coarse clock, which a busy machine updates late.
    let ended = Duration::from_nanos(kernel_monotonic_ns()) + LEASE + TICKS;
    let is_ended = || Duration::from_nanos(kernel_coarse_ns()) >= ended;
    wait_until("the end of the lease", EVENTUALLY, is_ended)?;
    let query = client::query(name, RecordType::SRV, None)?.to_vec()?;
    let late = lab
        .namespace
        .run(|| client::ask_raw(OURS, &query, Duration::from_millis(100)));
    kill(pid, Signal::SIGCONT)?;
    ensure!(late?.is_err(), "a reply after the lease has ended");
    Ok(())
}

/// After a reload has finished no reply is older, however busy the name is and whichever file has changed;
/// and none is given once the publisher is lost. Goes on for `SOAK_SECONDS`, if set.
#[test]
fn finished_reload_leaves_no_older_reply() -> Result<()> {
    requires!(namespaces, bpf);
    let names: Vec<String> = (0..20).map(|number| format!("web{number}")).collect();
    let counts: Vec<(&str, usize)> = names
        .iter()
        .map(|name| (name.as_str(), INSTANCES))
        .collect();
    let services = services(&counts, 1000);
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(fastrand::get_seed);
    let soak = std::env::var("SOAK_SECONDS")
        .ok()
        .map_or(Ok(0), |text| text.parse())?;
    println!("seed {seed}");
    let (random, end) = (
        &mut fastrand::Rng::with_seed(seed),
        Instant::now() + Duration::from_secs(soak),
    );
    let lab = Lab::start(
        "consul-older",
        &services,
        &json!({"lease": format!("{}s", LEASE.as_secs())}),
    )?;
    for name in &names {
        lab.until_interface_answers(&format!("{name}.service.consul."), RecordType::SRV, None)?;
    }
    let is_over = AtomicBool::new(false);
    let before = lab.hits();
    thread::scope(|scope| -> Result<()> {
        // Clients that make every name be learned again at once.
        let busy = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                for name in &names {
                    drop(lab.ask(&format!("{name}.service.consul."), RecordType::SRV, None));
                }
                drop(lab.ask("1.5.0.10.in-addr.arpa.", RecordType::PTR, None));
                for (name, kind) in FLEET {
                    drop(lab.ask(name, kind, None));
                }
            }
        });
        let mut files = Files {
            port: 1000,
            ailing: BTreeSet::new(),
            ttl: 0,
            has_alias: false,
            has_group: false,
        };
        let turns = (0..).take_while(|&turn| turn < 12 || Instant::now() < end);
        let mut turns = turns.map(|turn| (turn, if turn < 5 { turn } else { random.usize(..5) }));
        let changed = turns.try_for_each(|(turn, kind)| -> Result<()> {
            if turn % 10 == 5 {
                lose_publisher(&lab, "web0.service.consul.")?;
            }
            match kind {
                0 => files.port += 1,
                1 => {
                    let changed = turn % names.len();
                    if !files.ailing.remove(&changed) {
                        files.ailing.insert(changed);
                    }
                }
                2 => files.ttl += 1,
                3 => files.has_alias = !files.has_alias,
                _ => files.has_group = !files.has_group,
            }
            let logged = lab.server.log_length()?;
            files.write(&lab, &counts)?;
            let finished = || lab.server.log_after(logged).contains("reload finished");
            wait_until("the reload", EVENTUALLY, finished)?;
            if turn % 100 == 99 {
                println!(
                    "{} changes, {} replies by the interface",
                    turn + 1,
                    lab.hits() - before
                );
            }
            files
                .check(&lab, &names)
                .with_context(|| format!("seed {seed}, after reload {turn}"))
        });
        is_over.store(true, Ordering::Relaxed);
        busy.join().expect("clients do not panic");
        changed
    })?;
    ensure!(lab.hits() > before, "the interface took part");
    Ok(())
}

/// Every form of question about the fleet is answered by the interface as by userspace.
#[test]
fn fleet_names_have_other_types() -> Result<()> {
    requires!(namespaces, bpf);
    let services = services(&[("few", 3)], 8080);
    let lab = Lab::start("fleet-others", &services, &json!({}))?;
    let mut differences = Vec::new();
    for (name, kind) in [
        ("_grpclb._tcp.q-s0.q-g3.bosh.", RecordType::SRV),
        ("q-s0.q-g3.bosh.", RecordType::SRV),
        ("q-s0.q-g3.bosh.", RecordType::TXT),
        ("q-s0.q-g3.bosh.", RecordType::AAAA),
        ("q-s0.q-g3.bosh.", RecordType::ANY),
        ("nobody.bosh.", RecordType::TXT),
        ("nobody.bosh.", RecordType::ANY),
        ("bosh.", RecordType::NS),
        ("first.cf.internal.", RecordType::HTTPS),
        ("first.cf.internal.", RecordType::ANY),
        ("1.3.0.10.in-addr.arpa.", RecordType::PTR),
        ("1.3.0.10.in-addr.arpa.", RecordType::ANY),
        ("1.3.0.10.in-addr.arpa.", RecordType::TXT),
        ("few.service.consul.", RecordType::ANY),
        ("here.node.consul.", RecordType::ANY),
    ] {
        for (edns, dnssec_ok) in [(None, false), (Some(1232), false), (Some(4096), true)] {
            let mut query = client::query(name, kind, edns)?;
            if let Some(edns) = &mut query.edns {
                edns.set_dnssec_ok(dnssec_ok);
            }
            let mut by_interface = None;
            let answered = wait_until("an answer by the interface", EVENTUALLY, || {
                let before = lab.fast_replies();
                by_interface = lab
                    .namespace
                    .run(|| client::ask(OURS, &query))
                    .ok()
                    .and_then(Result::ok);
                by_interface.is_some() && lab.fast_replies() > before
            });
            answered
                .with_context(|| format!("{name} {kind}, EDNS {edns:?}: {}", lab.server.log()))?;
            let by_userspace = lab.namespace.run(|| client::ask_tcp(OURS, &query))??;
            let [ours, theirs] =
                [by_interface.context("a reply")?, by_userspace].map(|mut reply| {
                    reply.metadata.id = 0;
                    reply.answers.sort_by_key(ToString::to_string);
                    reply.additionals.sort_by_key(ToString::to_string);
                    // The serial of an SOA is the time.
                    (
                        reply.metadata,
                        reply.answers,
                        reply.authorities.len(),
                        reply.additionals,
                        reply.edns,
                    )
                });
            if ours != theirs {
                differences.push(format!(
                    "{name} {kind}, EDNS {edns:?}:\n{ours:?}\n{theirs:?}"
                ));
            }
        }
    }
    ensure!(differences.is_empty(), "{}", differences.join("\n"));
    Ok(())
}

/// Random names of one client neither evict those in use nor take the room of other clients' denials.
#[test]
fn random_names_evict_none_in_use() -> Result<()> {
    const NAMES: u32 = 1_500;
    requires!(namespaces, bpf);
    let services = services(&[("few", 3)], 8080);
    let lab = Lab::start("fleet-random", &services, &json!({}))?;
    let known = [
        ("few.service.consul.", RecordType::SRV),
        ("gone.service.consul.", RecordType::A),
        ("gone.bosh.", RecordType::A),
        ("q-s0.q-g3.bosh.", RecordType::A),
    ];
    for (name, kind) in known {
        wait_until("an answer by the interface", EVENTUALLY, || {
            let before = lab.fast_replies();
            lab.ask(name, kind, None).is_ok() && lab.fast_replies() > before
        })?;
    }
    let begun = Instant::now();
    let flooder = std::net::IpAddr::from([127, 0, 0, 9]);
    for number in 0..NAMES {
        // In use: on a slow machine there is time to replace all that is not.
        if number % 50 == 0 {
            for (name, kind) in known {
                is_held(&lab, name, kind, 1)?;
            }
        }
        for name in [
            format!("r{number}.bosh."),
            format!("r{number}.service.consul."),
        ] {
            let query = client::query(&name, RecordType::A, None)?.to_vec()?;
            for _ in 0..2 {
                lab.namespace
                    .run(|| client::ask_raw_as(Some(flooder), OURS, &query, EVENTUALLY))??;
            }
        }
    }
    let seconds = begun.elapsed().as_secs() + 2;
    let metrics = Metrics::read(&lab.namespace)?;
    let denied = metrics.sum(names::FAST_PATH_ENTRIES, "negative")
        + metrics.sum(names::FAST_PATH_LOCAL_REPLIES, "");
    ensure!(
        denied <= 32 * seconds + 10,
        "{denied} of {} random names in {seconds} s",
        2 * NAMES
    );
    for (name, kind) in known {
        is_held(&lab, name, kind, 10)?;
    }
    Ok(())
}

/// Checks that the interface answers a name, each time unless the query becomes a probe.
fn is_held(lab: &Lab, name: &str, kind: RecordType, times: u64) -> Result<()> {
    let before = Metrics::read(&lab.namespace)?;
    for _ in 0..times {
        lab.ask(name, kind, None)?;
    }
    let after = Metrics::read(&lab.namespace)?;
    let seen = after.fast_path_replies() + after.probes();
    ensure!(
        seen >= before.fast_path_replies() + before.probes() + times,
        "{name} {kind} was evicted"
    );
    Ok(())
}
