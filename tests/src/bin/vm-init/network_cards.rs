//! Serves DNS behind the machine's network cards, in each mode. The host sends queries, then fetches a report
//! over TCP (`tests/tests/packets/network_cards.rs`).

use std::{
    fs,
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dns_kit::metrics::names;
use serde_json::{Map, Value, json};
use whole_system_tests::{
    cards::{CARDS, GROUPS, MODES, NEXT_MODE},
    metrics::Metrics,
    process::{capture, run, wait_until},
    server::{self, Server},
};

use crate::modes::status;

/// Time limit for every step; the machine is emulated.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Counters of the kernel for packets lost at an interface.
const LOSSES: [&str; 6] = [
    "rx_dropped",
    "tx_dropped",
    "rx_errors",
    "tx_errors",
    "rx_missed_errors",
    "rx_nohandler",
];

pub(crate) fn try_all() -> Result<()> {
    let interfaces = set_up()?;
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, NEXT_MODE))?;
    for mode in MODES {
        try_mode(mode, &interfaces, &listener).with_context(|| format!("mode {mode}"))?;
    }
    Ok(())
}

/// Configures the cards; returns their interfaces in the order of [`CARDS`].
fn set_up() -> Result<Vec<String>> {
    let mut found = vec![String::new(); CARDS.len()];
    for entry in fs::read_dir("/sys/class/net")? {
        let path = entry?.path();
        let mac = fs::read_to_string(path.join("address"))?;
        let Some(number) = mac.trim().strip_prefix("52:54:00:00:00:") else {
            continue;
        };
        let number = usize::from_str_radix(number, 16)?;
        found[number] = path
            .file_name()
            .context("a name")?
            .to_string_lossy()
            .into_owned();
    }
    for (number, (card, interface)) in CARDS.iter().zip(&found).enumerate() {
        ensure!(!interface.is_empty(), "no interface for {}", card.device);
        let ip = |arguments: &[&str]| run(Command::new("ip").args(arguments));
        ip(&["link", "set", interface, "up"])?;
        ip(&[
            "address",
            "add",
            &format!("{}/24", card.v4(number)),
            "dev",
            interface,
        ])?;
        ip(&[
            "address",
            "add",
            &format!("{}/64", card.v6(number)),
            "dev",
            interface,
            "nodad",
        ])?;
    }
    Ok(found)
}

/// Serves in a mode until the host has fetched the report.
fn try_mode(mode: &str, interfaces: &[String], listener: &TcpListener) -> Result<()> {
    let folder = server::folder(&server::records_of_groups(&GROUPS), None)?;
    let settings = json!({
        "metrics": {"enabled": true},
        "control": {"socket": folder.path().join("control.sock")},
        "xdp": {"mode": mode, "lease": "1h", "interfaces": interfaces},
    });
    let listens = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 53);
    let mut server = Server::start(None, folder, listens, &settings)?;
    let tried = || -> Result<()> {
        wait_until("the interfaces to be served", TIMEOUT, || {
            std::thread::sleep(Duration::from_millis(200));
            let served = |status: &Value| {
                interfaces
                    .iter()
                    .all(|name| hook(status, name).is_some_and(|hook| hook != "none"))
            };
            status(&server).is_ok_and(|status| served(&status))
        })?;
        wait_until("the fast path", TIMEOUT, || {
            Metrics::here().is_ok_and(|metrics| metrics.is_fast_path_up())
        })?;
        let before: Vec<_> = interfaces
            .iter()
            .map(|name| losses(name))
            .collect::<Result<_>>()?;
        println!("vm-init: cards: {mode}: ready");
        let (mut host, _) = listener.accept()?;
        let (status, metrics) = (status(&server)?, Metrics::here()?);
        let reports = interfaces.iter().zip(before).map(|(name, before)| {
            let label = format!("interface=\"{name}\"");
            let lost = losses(name)?.into_iter().zip(before);
            let lost: Map<String, Value> = lost
                .map(|((counter, after), (_, before))| (counter, json!(after - before)))
                .collect();
            Ok(json!({
                "hook": hook(&status, name),
                "fast_path_replies": metrics.sum(names::FAST_PATH_INTERFACE_REPLIES_TOTAL, &label),
                "lost": lost,
            }))
        });
        let reports = reports.collect::<Result<Vec<Value>>>()?;
        let passed = status["fast_path"]["outcomes"].clone();
        println!("vm-init: cards: {mode}: passed to userspace by reason: {passed}");
        host.write_all(&serde_json::to_vec(&reports)?)?;
        Ok(())
    };
    let outcome = tried();
    let outcome = outcome.with_context(|| format!("the server's log:\n{}", server.log()));
    server.process().stop(TIMEOUT)?;
    outcome
}

/// Returns the hook of an interface in the status.
fn hook<'s>(status: &'s Value, name: &str) -> Option<&'s str> {
    let interfaces = status["fast_path"]["interfaces"].as_array()?;
    interfaces
        .iter()
        .find(|interface| interface["name"] == name)?["hook"]
        .as_str()
}

/// Reads the counters of lost packets: the kernel's, and those of the driver with "drop" in their
/// names.
fn losses(interface: &str) -> Result<Vec<(String, u64)>> {
    let read = |counter: &&str| {
        let path = format!("/sys/class/net/{interface}/statistics/{counter}");
        Ok((
            counter.to_string(),
            fs::read_to_string(&path)
                .with_context(|| path.clone())?
                .trim()
                .parse()?,
        ))
    };
    let mut losses = LOSSES.iter().map(read).collect::<Result<Vec<_>>>()?;
    let of_driver = capture(Command::new("ethtool").args(["-S", interface]))?;
    let counters = of_driver
        .lines()
        .filter_map(|line| line.trim().split_once(": "));
    for (name, count) in counters.filter(|(name, _)| name.contains("drop")) {
        losses.push((name.to_owned(), count.trim().parse()?));
    }
    Ok(losses)
}
