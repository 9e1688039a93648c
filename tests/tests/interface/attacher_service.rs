//! The attacher as a separate service, and a server that starts without privileges.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dns_common::object;
use dns_kit::metrics::names;
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs,
    confined::confine,
    metrics::{Metrics, wait_for_fast_path},
    namespace::Namespace,
    pair::{Pair, TIMEOUT, addresses, v4},
    process::{Kept, status_line, wait_until},
    requires,
    server::{self, Server},
};

use crate::{
    gated::outlast_stopped_attacher,
    refused::{Fault, spoil},
};

/// A listed name, and one that must be learned.
const NAMES: [&str; 2] = ["q-s0.q-g3.bosh.", "q-a1s0.q-g3.bosh."];

/// Time limit for server and attacher to connect.
const REUNION: Duration = Duration::from_secs(120);

/// Server and attacher on a veth.
struct Parts {
    attacher: Kept,
    server: Server,
    bpffs: Bpffs,
    /// Namespaces of both parts and of their clients.
    pair: Pair,
}

impl Parts {
    /// Starts the server, then the attacher.
    fn start(label: &str) -> Result<Self> {
        let (pair, bpffs, server) = Self::start_server(label)?;
        let attacher = start_attacher(&pair, &server, &server::program()?)?;
        let parts = Self {
            attacher,
            server,
            bpffs,
            pair,
        };
        wait_for_fast_path(&parts.pair.server).with_context(|| parts.server.log())?;
        Ok(parts)
    }

    /// Starts only the server.
    fn start_server(label: &str) -> Result<(Pair, Bpffs, Server)> {
        let (pair, bpffs) = (Pair::new(label)?, Bpffs::new()?);
        let folder = server::folder(&server::records_of_groups(&[3]), None)?;
        fs::set_permissions(
            folder.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o777),
        )?;
        let settings = json!({
            "metrics": {"enabled": true},
            "control": {"socket": folder.path().join("control.sock")},
            "xdp": {
                "bpffs": bpffs.path(), "lease": "60s", "on_stop": "keep", "user": "nobody", "attach_user": "daemon",
                "attach_socket": folder.path().join("attach/attach.sock"),
            },
        });
        // Port 53 otherwise requires a capability.
        pair.server
            .run(|| fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0"))??;
        let server = Server::start_prepared(Some(&pair.server), folder, v4(), &settings, confine)?;
        Ok((pair, bpffs, server))
    }

    /// Queries once from the client's namespace; `None` on timeout.
    fn ask(&self, name: &str) -> Result<Option<Vec<IpAddr>>> {
        addresses(&self.pair.client, v4(), name, TIMEOUT)
    }

    /// Returns the number of replies from the program.
    fn fast_path_replies(&self) -> Result<u64> {
        Ok(Metrics::read(&self.pair.server)?.fast_path_replies())
    }

    /// Returns whether the program gives the next answer to `name`.
    fn is_answered_by_the_interface(&self, name: &str) -> Result<bool> {
        let before = self.fast_path_replies()?;
        ensure!(self.ask(name)? == Some(instances()), "{name}");
        Ok(self.fast_path_replies()? > before)
    }

    /// Runs a control command of the server; returns its output.
    fn operate(&self, arguments: &[&str]) -> Result<String> {
        self.server.cli(&self.pair.server, arguments)
    }

    fn status(&self) -> Result<Value> {
        self.server.status(&self.pair.server)
    }
}

/// Returns the number of sessions in which an attacher handed over maps, from its log.
fn sessions(server: &Server) -> usize {
    let log = fs::read_to_string(server.folder.path().join("attacher.log")).unwrap_or_default();
    log.matches("maps handed to a server").count()
}

/// Starts an attacher for the server.
fn start_attacher(pair: &Pair, server: &Server, program: &Path) -> Result<Kept> {
    let log = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(server.folder.path().join("attacher.log"))?;
    let config: PathBuf = server.folder.path().join("config.json");
    let mut command = pair.server.command(program)?;
    command
        .args(["attach", "--config"])
        .arg(config)
        .stdin(Stdio::null());
    Kept::spawn(command.stdout(log.try_clone()?).stderr(log))
}

/// Returns the counters of all replies, on both paths.
fn combined(server: &Namespace) -> Result<[u64; 3]> {
    let metrics = Metrics::read(server)?;
    let families = [
        names::REQUESTS_INTERNAL_TOTAL,
        names::REPLIES_TOTAL,
        names::COREDNS_RESPONSES_TOTAL,
    ];
    Ok(families.map(|family| metrics.sum(family, "")))
}

fn instances() -> Vec<IpAddr> {
    (0..3)
        .map(|index| IpAddr::from([10, 0, 3, index]))
        .collect()
}

#[test]
fn unprivileged_server_answers_at_interface() -> Result<()> {
    requires!(namespaces, bpf);
    let parts = Parts::start("service")?;
    let pid = parts.server.pid();
    // Mode 2: a filter is installed.
    ensure!(status_line(pid, "Seccomp")? == "2" && status_line(pid, "NoNewPrivs")? == "1");
    for set in ["CapEff", "CapPrm", "CapAmb"] {
        ensure!(
            u64::from_str_radix(&status_line(pid, set)?, 16)? == 0,
            "{set}"
        );
    }
    for name in NAMES {
        wait_until("the interface's answers", REUNION, || {
            parts.is_answered_by_the_interface(name).unwrap_or(false)
        })?;
    }
    let status = parts.status()?;
    let detail = &status["fast_path"]["internals"];
    ensure!(
        detail["pinned_at"].is_string() && status["fast_path_off"].is_null(),
        "{status}"
    );
    // The attacher reports its programs to the server.
    wait_until("the programs to be shown as loaded", REUNION, || {
        let Ok(status) = parts.status() else {
            return false;
        };
        let programs = status["fast_path"]["programs"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        [object::TC_PROGRAM, object::TC_ANSWER_PROGRAM]
            .iter()
            .all(|name| {
                programs
                    .iter()
                    .any(|program| program["name"] == *name && program["state"] == "loaded")
            })
    })?;
    // New records reach the interface, and cells of the old ones are reused: the attacher confirms
    // grace periods, which the server cannot wait for itself.
    let records = parts.server.folder.path().join("records.json");
    for round in 0..4 {
        let group = if round % 2 == 0 { 5 } else { 3 };
        fs::write(&records, server::records_of_groups(&[group]))?;
        let name = format!("q-s0.q-g{group}.bosh.");
        wait_until("the new records", REUNION, || {
            parts
                .ask(&name)
                .is_ok_and(|found| found.is_some_and(|found| found.len() == usize::from(group)))
        })?;
    }
    wait_until("the interface's answers", REUNION, || {
        parts
            .is_answered_by_the_interface(NAMES[0])
            .unwrap_or(false)
    })?;
    wait_until("the grace periods to be confirmed", REUNION, || {
        parts.status().is_ok_and(|status| {
            status["fast_path"]["internals"]["table"]["unvouched"] == json!(false)
        })
    })?;
    // The attacher follows new interfaces, and the server shows them.
    parts
        .pair
        .server
        .ip("link add late type veth peer name etal")?;
    wait_until("the late interface to be served", REUNION, || {
        let family = names::FAST_PATH_INTERFACE_INFO;
        Metrics::read(&parts.pair.server)
            .is_ok_and(|metrics| metrics.sum(family, "interface=\"late\"") == 1)
    })?;
    // The attacher keeps only the capabilities for attaching: CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF.
    let attacher = parts.attacher.pid();
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        let held = u64::from_str_radix(&status_line(attacher, set)?, 16)?;
        ensure!(held == 1 << 12 | 1 << 38 | 1 << 39, "{set}: {held:#x}");
    }
    ensure!(
        status_line(attacher, "Seccomp")? == "2" && status_line(attacher, "NoNewPrivs")? == "1"
    );
    let users = status_line(attacher, "Uid")?;
    ensure!(users.split_whitespace().all(|user| user == "1"), "{users}");
    Ok(())
}

#[test]
fn disabled_fast_path_ends_service_answers() -> Result<()> {
    requires!(namespaces, bpf);
    let mut parts = Parts::start("disabled")?;
    wait_until("the interface's answers", REUNION, || {
        parts
            .is_answered_by_the_interface(NAMES[0])
            .unwrap_or(false)
    })?;
    // The attacher runs on: only the server, which may not detach, sees the new configuration first.
    parts.server.process().stop(REUNION)?;
    ensure!(
        parts.ask(NAMES[0])? == Some(instances()),
        "the programs stay"
    );
    parts
        .server
        .change_settings(|settings| settings["xdp"]["enabled"] = json!(false))?;
    fs::write(
        parts.server.folder.path().join("records.json"),
        server::records_of_groups(&[2]),
    )?;
    parts
        .server
        .restart_prepared(Some(&parts.pair.server), confine)?;
    // Programs with the old records would answer until the lease of 60 s ends.
    let found = parts.ask(NAMES[0])?;
    ensure!(
        found.as_ref().is_none_or(Vec::is_empty),
        "an old answer: {found:?}\n{}",
        parts.server.log()
    );
    ensure!(parts.bpffs.links().is_empty(), "{:?}", parts.bpffs.links());
    Ok(())
}

#[test]
fn attacher_lost_while_loading_degrades() -> Result<()> {
    /// Attempts to end the attacher while the kernel verifies a program, which takes about a second.
    const ATTEMPTS: usize = 10;
    /// Longest wait for that verification.
    const ATTEMPT: Duration = Duration::from_secs(5);
    requires!(namespaces, bpf);
    let (pair, _bpffs, server) = Parts::start_server("lost")?;
    let program = server.folder.path().join("bosh-dns-xdp");
    spoil(
        &server::program()?,
        &program,
        object::TC_ANSWER_PROGRAM,
        Fault::TooLong.instructions(),
    )?;
    let status = || server.status(&pair.server);
    for _ in 0..ATTEMPTS {
        let before = sessions(&server);
        let mut attacher = start_attacher(&pair, &server, &program)?;
        wait_until("maps", REUNION, || sessions(&server) > before)?;
        // On a busy machine, the attacher asks the kernel some time after it has handed over the maps.
        let is_loading = || {
            let state = status().unwrap_or_default();
            let programs = state["fast_path"]["programs"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            programs.iter().any(|program| program["state"] == "loading")
        };
        let was_loading = wait_until("a program to be loaded", ATTEMPT, is_loading).is_ok();
        attacher.kill(TIMEOUT)?;
        if !(was_loading && is_loading()) {
            continue;
        }
        return wait_until("the loss to be reported", REUNION, || {
            status().is_ok_and(|status| {
                let checks = status["checks"].as_array().cloned().unwrap_or_default();
                let check = checks.iter().find(|check| check["name"] == "fast path");
                check.is_some_and(|check| {
                    check["detail"]
                        .as_str()
                        .is_some_and(|text| text.contains("attacher"))
                })
            })
        })
        .with_context(|| format!("{:?}", status()));
    }
    anyhow::bail!("no attempt met a program that was being loaded")
}

#[test]
fn stopped_service_ends_answers() -> Result<()> {
    requires!(namespaces, bpf);
    let parts = Parts::start("frozen")?;
    outlast_stopped_attacher(&parts.pair, &parts.server, parts.attacher.pid())
}

#[test]
fn unprivileged_tap_shows_queries() -> Result<()> {
    requires!(namespaces, bpf);
    let parts = Parts::start("tap")?;
    let done = AtomicBool::new(false);
    let shown = thread::scope(|scope| {
        let load = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                parts.ask(NAMES[0])?;
            }
            Ok(())
        });
        let shown = parts.operate(&["tap", "--count", "5", "--json"]);
        done.store(true, Ordering::Relaxed);
        load.join().expect("the client does not panic")?;
        shown
    })?;
    ensure!(
        shown.contains("\"fast\"") && shown.contains("q-s0.q-g3.bosh"),
        "{shown}"
    );
    Ok(())
}

#[test]
fn part_restarts_lose_no_query() -> Result<()> {
    requires!(namespaces, bpf);
    let mut parts = Parts::start("reunion")?;
    let Parts {
        attacher,
        server,
        bpffs,
        pair,
    } = &mut parts;
    let (done, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    let (kills, lost) = (AtomicU64::new(0), AtomicU64::new(0));
    let more = |what: &str| {
        let before = answered.load(Ordering::Relaxed);
        wait_until(what, Duration::from_secs(120), || {
            answered.load(Ordering::Relaxed) > before + 100
        })
    };
    thread::scope(|scope| {
        let load = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                let found = addresses(&pair.client, v4(), NAMES[0], TIMEOUT)?;
                let asked = answered.fetch_add(1, Ordering::Relaxed);
                match found {
                    Some(found) => ensure!(found == instances(), "query {asked}: {found:?}"),
                    // A probe in the socket of a killed server is lost with it.
                    None => ensure!(
                        lost.fetch_add(1, Ordering::Relaxed) < kills.load(Ordering::Relaxed)
                    ),
                }
            }
            Ok(())
        });
        let mut rounds = || -> Result<()> {
            more("answers with both parts")?;
            for _ in 0..2 {
                let before = sessions(server);
                let counted = combined(&pair.server)?;
                attacher.kill(TIMEOUT)?;
                more("answers without an attacher")?;
                *attacher = start_attacher(pair, server, &server::program()?)?;
                wait_until("the server to be given maps", REUNION, || {
                    sessions(server) > before
                })?;
                wait_for_fast_path(&pair.server)?;
                more("answers with a new attacher")?;
                let counts = combined(&pair.server)?;
                let fell = counted
                    .iter()
                    .zip(counts)
                    .any(|(before, after)| after < before + 100);
                ensure!(
                    !fell,
                    "counters fell or stalled with the attacher: {counted:?}, {counts:?}"
                );
                kills.fetch_add(1, Ordering::Relaxed);
                server.process().kill(TIMEOUT)?;
                more("answers without a server")?;
                server.restart_prepared(Some(&pair.server), confine)?;
                wait_for_fast_path(&pair.server)?;
                more("answers from a new server")?;
            }
            Ok(())
        };
        let outcome = rounds();
        done.store(true, Ordering::Relaxed);
        load.join().expect("the client does not panic")?;
        outcome.with_context(|| server.log())
    })?;
    println!("{answered:?} queries, {lost:?} lost");
    // Links of lo and srv, and the maps of a single server.
    ensure!(
        bpffs.links().len() == 2 && bpffs.pinned().len() == 2 + 10,
        "{:?}",
        bpffs.pinned()
    );
    Ok(())
}
