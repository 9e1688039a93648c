//! Runs the real server in each mode: queries it over `lo` and over a veth, kills it, and lets the
//! server of the next mode take over. Together the modes cover all hooks of a kernel.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use aya::{Ebpf, util::KernelVersion};
use dns_kit::metrics::names;
use hickory_proto::{op::Message, rr::RecordType};
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    metrics::Metrics,
    pair::Pair,
    process::{capture, wait_until},
    server::{self, Server},
    yardstick::{Hook, Yardstick},
};

/// Time limit for every step. Both the emulated machine and its host may be busy, so only a step
/// that never finishes fails.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(600);

/// Queries per name and interface.
const QUERIES: u64 = 5;

/// Group sizes whose replies fit at every hook.
const GROUPS: [u16; 2] = [1, 10];

/// Listen address of the server.
const LISTENS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 53);

/// The served interfaces and their addresses.
const INTERFACES: [(&str, [u8; 4]); 2] = [("lo", [127, 0, 0, 1]), ("srv", [169, 254, 0, 2])];

/// Runs all modes even after a failure and prints one line per mode.
pub(crate) fn try_all() -> Result<()> {
    let lab = Lab::new().context("namespaces and a veth")?;
    // tcx requires Linux 6.6.
    let tc = if KernelVersion::current()? < KernelVersion::new(6, 6, 0) {
        "clsact"
    } else {
        "tcx"
    };
    let auto = ("auto", [tc, tc]);
    let mut failed = Vec::new();
    // `lo` has no driver and so no native XDP.
    for (mode, hooks) in [auto, ("native", [tc, "native"]), auto] {
        let mut said = Vec::new();
        if let Err(problem) = try_mode(&lab, mode, hooks, &mut said) {
            said.push(format!("FAILED: {problem:#}"));
            failed.push(mode);
        }
        println!("vm-init: {mode}: {}", said.join("; "));
    }
    ensure!(
        failed.is_empty(),
        "modes that failed: {}",
        failed.join(", ")
    );
    Ok(())
}

/// Tests a mode in which `hooks` should serve [`INTERFACES`] and leaves the programs attached for
/// the next mode. Appends observations to `said`.
fn try_mode(lab: &Lab, mode: &str, hooks: [&str; 2], said: &mut Vec<String>) -> Result<()> {
    let folder = server::folder(&server::records_of_groups(&GROUPS), None)?;
    let settings = json!({
        "metrics": {"enabled": true},
        "control": {"socket": folder.path().join("control.sock")},
        "xdp": {"mode": mode, "lease": "1h"},
    });
    let mut server = Server::start(Some(&lab.pair.server), folder, LISTENS, &settings)?;
    let mut tried = || -> Result<()> {
        let status = settled(&server)?;
        said.push(programs(&status)?);
        let serving = serving(&status)?;
        said.push(
            serving
                .iter()
                .map(Serving::to_string)
                .collect::<Vec<_>>()
                .join(", "),
        );
        for (hook, serving) in hooks.iter().zip(&serving) {
            ensure!(
                serving.hook == *hook,
                "{} should be served by {hook}: {}",
                serving.interface,
                serving.why
            );
        }
        answers_by_the_interfaces(lab, &serving)?;
        // Programs of the previous server were still attached; their replies are not counted here.
        said.push("answered by the interfaces".into());

        server.process().kill(TIMEOUT)?;
        for (interface, address) in INTERFACES {
            for instances in GROUPS {
                lab.ask(interface, address, instances)
                    .context("when the server was killed")?;
            }
        }
        said.push("after kill -9, too".into());
        Ok(())
    };
    let outcome = tried();
    outcome.with_context(|| format!("the server's log:\n{}", server.log()))
}

//----------- Lab -------------------------------------------------------------

/// The namespaces of server and client, joined by a veth.
struct Lab {
    pair: Pair,
    /// A program on the client's end: without one, the kernel drops frames that native XDP on the
    /// server's end sends.
    _pass: Ebpf,
}

impl Lab {
    fn new() -> Result<Self> {
        let pair = Pair::joined(
            "m",
            ("srv", &["169.254.0.2/24"]),
            ("cli", &["169.254.0.1/24"]),
        )?;
        let pass = Yardstick::Pass.attach(Hook::Native, &pair.client, "cli")?;
        Ok(Self { pair, _pass: pass })
    }

    /// Queries a group over an interface of the server and checks that all addresses arrive.
    fn ask(&self, interface: &str, address: [u8; 4], instances: u16) -> Result<()> {
        let query = client::query(
            &format!("q-s0.q-g{instances}.bosh."),
            RecordType::A,
            Some(4096),
        )?;
        let from = if interface == "lo" {
            &self.pair.server
        } else {
            &self.pair.client
        };
        let to = SocketAddr::from((address, LISTENS.port()));
        let query = query.to_vec()?;
        let reply = from.run(|| client::ask_raw(to, &query, TIMEOUT))?;
        let reply = reply.with_context(|| format!("no reply over {interface}"))?;
        let found = client::addresses(&Message::from_vec(&reply)?).len();
        ensure!(
            found == usize::from(instances),
            "{found} addresses over {interface}, not {instances}"
        );
        Ok(())
    }
}

// ----------- Server status ------------------------------------------------------

/// State of one interface.
struct Serving {
    interface: &'static str,
    state: String,
    /// The hook, or `none`.
    hook: String,
    why: String,
}

impl fmt::Display for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            interface, hook, ..
        } = self;
        write!(f, "{interface} by {hook}")
    }
}

/// Returns the status of the fast path once [`INTERFACES`] are settled.
fn settled(server: &Server) -> Result<Value> {
    let mut last = Value::Null;
    wait_until("the interfaces to be dealt with", TIMEOUT, || {
        // Polling also costs CPU time.
        thread::sleep(Duration::from_millis(200));
        let Ok(status) = status(server) else {
            return false;
        };
        last = status["fast_path"].clone();
        // Large replies need the complete program, which the kernel verifies while a short one answers.
        let is_loading = |program: &Value| program["state"] == "loading";
        let programs = last["programs"].as_array();
        let are_loaded = programs.is_some_and(|programs| !programs.iter().any(is_loading));
        let is_served = serving(&last)
            .is_ok_and(|serving| serving.iter().all(|interface| interface.state != "waiting"));
        are_loaded && is_served
    })?;
    Ok(last)
}

/// Returns the output of `bosh-dns-xdp status --json`.
pub(crate) fn status(server: &Server) -> Result<Value> {
    let config = server.folder.path().join("config.json");
    let said = capture(
        Command::new(server::program()?)
            .args(["status", "--json", "--config"])
            .arg(config),
    )?;
    Ok(serde_json::from_str(&said)?)
}

/// Describes the status of the programs that the mode needed.
fn programs(status: &Value) -> Result<String> {
    let programs = status["programs"]
        .as_array()
        .context("the status lists programs")?;
    let costs = programs.iter().map(|program| {
        let (name, state) = (&program["name"], &program["state"]);
        let looked_at = match program["instructions"].as_u64() {
            Some(instructions) => format!("{instructions} instructions processed"),
            None => "instructions unknown".to_owned(),
        };
        let took = program["load_ms"].as_f64().unwrap_or_default();
        let why = program["why"]
            .as_str()
            .map(|why| format!(": {why}"))
            .unwrap_or_default();
        let (name, state) = (name.as_str().unwrap_or("?"), state.as_str().unwrap_or("?"));
        format!("{name} {state} ({looked_at}, {took:.0} ms){why}")
    });
    Ok(costs.collect::<Vec<_>>().join(", "))
}

/// Returns the status of each of [`INTERFACES`].
fn serving(status: &Value) -> Result<Vec<Serving>> {
    let interfaces = status["interfaces"]
        .as_array()
        .context("the status lists interfaces")?;
    let of = |name| {
        let found = interfaces
            .iter()
            .find(|interface| interface["name"] == name);
        let found = found.with_context(|| format!("the status does not list {name}"))?;
        let text = |key: &str| {
            found[key]
                .as_str()
                .map(str::to_owned)
                .context("state, hook and why")
        };
        Ok(Serving {
            interface: name,
            state: text("state")?,
            hook: text("hook")?,
            why: text("why")?,
        })
    };
    INTERFACES.iter().map(|&(name, _)| of(name)).collect()
}

/// Queries over each interface and checks that the interface gave all replies.
fn answers_by_the_interfaces(lab: &Lab, serving: &[Serving]) -> Result<()> {
    let metrics = || Metrics::read(&lab.pair.server);
    wait_until("the fast path", TIMEOUT, || {
        metrics().is_ok_and(|metrics| metrics.is_fast_path_up())
    })?;
    for ((interface, address), serving) in INTERFACES.into_iter().zip(serving) {
        let label = format!("interface=\"{interface}\"");
        let replies =
            |metrics: &Metrics| metrics.sum(names::FAST_PATH_INTERFACE_REPLIES_TOTAL, &label);
        for instances in GROUPS {
            // Listed names are published in the background.
            wait_until("a name to be published", TIMEOUT, || {
                let before = metrics().map(|metrics| replies(&metrics));
                let asked = lab.ask(interface, address, instances);
                let after = metrics().map(|metrics| replies(&metrics));
                asked.is_ok()
                    && matches!((before, after), (Ok(before), Ok(after)) if after > before)
            })
            .with_context(|| format!("{serving} does not answer"))?;
            let before = metrics()?;
            for _ in 0..QUERIES {
                lab.ask(interface, address, instances)?;
            }
            let after = metrics()?;
            let given = replies(&after) - replies(&before);
            // Some queries are passed up as probes.
            let probed = after.probes() - before.probes();
            ensure!(
                given + probed == QUERIES,
                "{given} replies from {interface} itself, not {QUERIES}"
            );
        }
    }
    Ok(())
}
