//! The interface gate with the real server: an interface answers only while the kernel delivers its
//! queries.

use std::{
    collections::BTreeMap,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    metrics::{Metrics, wait_for_metrics},
    namespace::{End, Namespace, join},
    process::{capture, run, wait_until},
    requires,
    server::{self, Server},
};

use crate::lab::{Bpffs, Pair, addresses, v4};

/// A name in the records.
const NAME: &str = "q-s0.q-g3.bosh.";

/// Timeout of a single query.
const PATIENCE: Duration = Duration::from_millis(500);

/// A server that serves every interface once queries arrive through it.
struct Gated {
    server: Server,
    /// Dropped before the namespaces.
    bpffs: Bpffs,
}

impl Gated {
    /// Starts the server in a namespace.
    fn start(namespace: &Namespace) -> Result<Self> {
        let bpffs = Bpffs::new()?;
        let folder = server::folder(&server::records_of_groups(&[3]), None)?;
        let settings = json!({
            "metrics": {"enabled": true},
            "control": {"socket": folder.path().join("control.sock")},
            "xdp": {"mode": "auto", "bpffs": bpffs.path(), "interfaces": ["*"]},
        });
        let server = Server::start(Some(namespace), folder, v4(), &settings)?;
        wait_for_metrics(namespace)?;
        Ok(Self { server, bpffs })
    }

    /// Returns the state of each interface by name.
    fn states(&self, namespace: &Namespace) -> Result<BTreeMap<String, (String, String)>> {
        let mut command = namespace.command(server::program()?)?;
        let config = self.server.folder.path().join("config.json");
        let said = capture(command.args(["status", "--json", "--config"]).arg(config))?;
        let status: Value = serde_json::from_str(&said)?;
        let interfaces = status["fast_path"]["interfaces"].as_array().context("interfaces")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(interfaces
            .iter()
            .map(|one| (text(&one["name"]), (text(&one["state"]), text(&one["why"]))))
            .collect())
    }
}

/// Sends `times` queries, ten per second; returns the number of replies.
fn ask(client: &Namespace, times: usize) -> Result<usize> {
    let mut answered = 0;
    for _ in 0..times {
        let begun = Instant::now();
        answered +=
            usize::from(addresses(client, v4(), NAME, PATIENCE)?.is_some_and(|found| found.len() == 3));
        thread::sleep(Duration::from_millis(100).saturating_sub(begun.elapsed()));
    }
    Ok(answered)
}

/// Returns the number of replies given by interfaces.
fn hits(namespace: &Namespace) -> Result<u64> {
    Ok(Metrics::read(namespace)?.fast_path_replies())
}

/// Queries until interfaces answer.
fn wait_for_hits(host: &Namespace, client: &Namespace, limit: Duration) -> Result<()> {
    let before = hits(host)?;
    wait_until("the interface to answer", limit, || {
        ask(client, 3).is_ok_and(|answered| answered == 3) && hits(host).is_ok_and(|now| now > before)
    })
}

fn iptables(host: &Namespace, program: &str, arguments: &[&str]) -> Result<()> {
    let mut command: Command = host.command(program)?;
    run(command.args(["-w"]).args(arguments))
}

#[test]
fn queries_open_gate_rules_close() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("gate")?;
    let gated = Gated::start(&pair.server)?;
    ensure!(hits(&pair.server)? == 0, "no query has arrived yet");
    wait_for_hits(&pair.server, &pair.client, Duration::from_secs(10)).with_context(|| gated.server.log())?;
    // Probes arrive, so the interface stays served.
    ensure!(ask(&pair.client, 40)? == 40);
    ensure!(gated.states(&pair.server)?["srv"].0 == "served");

    for (program, rule) in [
        ("iptables-legacy", &["INPUT", "-p", "udp", "--dport", "53", "-j", "DROP"][..]),
        ("iptables-nft", &["INPUT", "-s", "169.254.0.1", "-j", "REJECT"]),
        (
            "iptables-legacy",
            &["INPUT", "-p", "udp", "--dport", "53", "-m", "limit", "--limit", "1/hour", "-j", "DROP"],
        ),
        ("iptables-nft", &["OUTPUT", "-p", "udp", "--sport", "53", "-j", "DROP"]),
    ] {
        iptables(&pair.server, program, &[&["-A"], rule].concat())?;
        let begun = Instant::now();
        wait_until("the gate to close", Duration::from_secs(4), || {
            let before = hits(&pair.server);
            // Whether queries are answered meanwhile depends on the rule.
            let asked = ask(&pair.client, 2);
            matches!((before, asked, hits(&pair.server)), (Ok(before), Ok(_), Ok(after)) if before == after)
        })
        .with_context(|| format!("{rule:?}: {:?}", gated.states(&pair.server)))?;
        println!("{program} {rule:?}: closed after {:?}", begun.elapsed());
        iptables(&pair.server, program, &[&["-D"], rule].concat())?;
        wait_for_hits(&pair.server, &pair.client, Duration::from_secs(10)).with_context(|| {
            format!("after {rule:?}: {:?}\n{}", gated.states(&pair.server), gated.server.log())
        })?;
    }
    Ok(())
}

#[test]
fn diverted_local_queries_are_answered() -> Result<()> {
    requires!(namespaces, bpf);
    let host = Namespace::new("diverted")?;
    host.ip(&["addr", "add", "169.254.0.2/32", "dev", "lo"])?;
    host.ip(&["route", "add", "default", "dev", "lo"])?;
    let gated = Gated::start(&host)?;
    wait_for_hits(&host, &host, Duration::from_secs(10)).with_context(|| gated.server.log())?;
    iptables(
        &host,
        "iptables-legacy",
        &[
            "-t",
            "nat",
            "-A",
            "OUTPUT",
            "-d",
            "8.8.8.8",
            "-p",
            "udp",
            "--dport",
            "53",
            "-j",
            "DNAT",
            "--to",
            "169.254.0.2:53",
        ],
    )?;
    wait_until("lo to be left to userspace", Duration::from_secs(4), || {
        gated.states(&host).is_ok_and(|states| states.get("lo").is_some_and(|(state, _)| state == "refused"))
    })?;
    let other = "8.8.8.8:53".parse()?;
    for _ in 0..5 {
        let found = addresses(&host, other, NAME, PATIENCE)?;
        ensure!(found.is_some_and(|found| found.len() == 3), "{:?}", gated.states(&host)?);
    }
    Ok(())
}

#[test]
fn removed_address_is_not_answered() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("moved")?;
    let gated = Gated::start(&pair.server)?;
    wait_for_hits(&pair.server, &pair.client, Duration::from_secs(10)).with_context(|| gated.server.log())?;
    let before = hits(&pair.server)?;
    pair.server.ip(&["addr", "del", "169.254.0.2/24", "dev", "srv"])?;
    // The client's neighbour entry stays cached, so frames still arrive.
    thread::sleep(Duration::from_secs(1));
    let at_once = hits(&pair.server)?;
    for _ in 0..3 {
        ensure!(addresses(&pair.client, v4(), NAME, Duration::from_millis(100))?.is_none());
    }
    ensure!(hits(&pair.server)? == at_once, "{before}, {at_once}");
    Ok(())
}

#[test]
fn path_mtu_limits_replies() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("path")?;
    pair.server.ip(&["route", "add", "169.254.0.1/32", "dev", "srv", "mtu", "600"])?;
    let bpffs = Bpffs::new()?;
    let folder = server::folder(&server::records_of_groups(&[3, 60]), None)?;
    let settings = json!({"metrics": {"enabled": true}, "xdp": {"bpffs": bpffs.path()}});
    let server = Server::start(Some(&pair.server), folder, v4(), &settings)?;
    whole_system_tests::metrics::wait_for_fast_path(&pair.server).with_context(|| server.log())?;
    for _ in 0..8 {
        let query = client::query("q-s0.q-g60.bosh.", hickory_proto::rr::RecordType::A, Some(1232))?;
        let reply = pair.client.run(|| client::ask(v4(), &query))??;
        ensure!(client::addresses(&reply).len() == 60);
    }
    let large = Metrics::read(&pair.server)?
        .sum(dns_platform::metrics::names::FAST_PATH_PACKETS_TOTAL, "outcome=\"large_reply\"");
    ensure!(large >= 7, "{large} of 8 left to userspace");
    Ok(())
}

/// Number of containers on the cell.
const CONTAINERS: usize = 100;

#[test]
fn container_queries_are_counted_separately() -> Result<()> {
    requires!(namespaces, bpf);
    let (host, containers) = (Namespace::new("cell")?, Namespace::new("apps")?);
    host.forward()?;
    host.ip(&["addr", "add", "169.254.0.2/32", "dev", "lo"])?;
    let gated = Gated::start(&host)?;
    let name = |number: usize| format!("s-{number}");
    for number in 0..CONTAINERS {
        let (near, far) = (name(number), format!("c{number}"));
        let (host_address, address) = (format!("10.255.{number}.1/30"), format!("10.255.{number}.2/30"));
        join(
            End { namespace: &host, interface: &near, addresses: &[&host_address] },
            End { namespace: &containers, interface: &far, addresses: &[&address] },
        )?;
    }
    // Each container queries through its own interface.
    let ask_from = |number: usize, times: usize| -> Result<usize> {
        let (device, query) =
            (format!("c{number}"), client::query(NAME, hickory_proto::rr::RecordType::A, None)?);
        let bytes = query.to_vec()?;
        containers.run(|| -> Result<usize> {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None)?;
            socket.bind_device(Some(device.as_bytes()))?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.connect(&v4().into())?;
            let mut answered = 0;
            let mut buffer = [std::mem::MaybeUninit::uninit(); 512];
            for _ in 0..times {
                socket.send(&bytes)?;
                answered += usize::from(socket.recv(&mut buffer).is_ok());
            }
            Ok(answered)
        })?
    };
    for number in 0..CONTAINERS {
        let (far, metric) = (format!("c{number}"), (number + 1).to_string());
        containers.ip(&["route", "add", "169.254.0.2/32", "dev", &far, "metric", &metric])?;
        containers.ip(&[
            "neigh",
            "replace",
            "169.254.0.2",
            "lladdr",
            &mac(&host, &name(number))?,
            "dev",
            &far,
        ])?;
    }
    let begun = Instant::now();
    wait_until("every container to be served", Duration::from_secs(150), || {
        (0..CONTAINERS).all(|number| ask_from(number, 3).is_ok_and(|answered| answered == 3))
            && gated.states(&host).is_ok_and(|states| {
                (0..CONTAINERS)
                    .all(|number| states.get(&name(number)).is_some_and(|(state, _)| state == "served"))
            })
    })
    .with_context(|| format!("{:?}", gated.states(&host)))?;
    println!("all served after {:?}", begun.elapsed());
    // Replies are counted per interface.
    let replies = |metrics: &Metrics, number: usize| {
        let label = format!("interface=\"{}\"", name(number));
        metrics.sum(dns_platform::metrics::names::FAST_PATH_INTERFACE_REPLIES_TOTAL, &label)
    };
    for number in [0, 1, 50, CONTAINERS - 1] {
        let before = Metrics::read(&host)?;
        ensure!(ask_from(number, 20)? == 20);
        let after = Metrics::read(&host)?;
        for other in 0..CONTAINERS {
            let more = replies(&after, other) - replies(&before, other);
            ensure!(
                if other == number { more >= 18 } else { more == 0 },
                "{other} while {number} asks: {more}"
            );
        }
    }
    for number in 0..CONTAINERS {
        host.ip(&["link", "del", &name(number)])?;
    }
    wait_until("the pins to go with their interfaces", Duration::from_secs(15), || {
        gated.bpffs.links().iter().all(|pin| pin.ends_with("1-tcx"))
    })
}

/// Returns the Ethernet address of an interface.
fn mac(namespace: &Namespace, interface: &str) -> Result<String> {
    let mut command = Command::new("ip");
    let shown = capture(command.args(["-n", namespace.name(), "-o", "link", "show", interface]))?;
    let address = shown.split("link/ether ").nth(1).and_then(|rest| rest.split(' ').next());
    address.map(str::to_owned).context("ip shows the address")
}
