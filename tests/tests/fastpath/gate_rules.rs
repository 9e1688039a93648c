//! Objections of the packet filter, for the rule sets of `tests/gate-rules`: loaded into a
//! namespace by iptables (legacy and nft) and nft, and read back from the kernel.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::{Result, ensure};
use serde::Deserialize;
use whole_system_tests::{cell::feed, namespace::Namespace, requires};

use crate::lab::v4;

/// Environment variable with another folder of rule sets.
const FOLDER_VARIABLE: &str = "BOSH_DNS_GATE_RULES";

/// Expected objections to a rule set.
#[derive(Debug, Deserialize)]
struct Expected {
    /// `keep` or `off`, by interface.
    expect: BTreeMap<String, String>,
    /// Input of `ipset restore`.
    #[serde(default)]
    sets: String,
}

fn folder() -> PathBuf {
    match std::env::var_os(FOLDER_VARIABLE) {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("gate-rules"),
    }
}

/// Creates a host with the interfaces of the rule sets.
fn host() -> Result<Namespace> {
    let host = Namespace::new("rules")?;
    for (number, name) in ["s-010255010002", "s-010255010003", "eth0"].into_iter().enumerate() {
        host.ip(&["link", "add", name, "type", "veth", "peer", "name", &format!("far{number}")])?;
        host.ip(&["link", "set", name, "up"])?;
    }
    host.ip(&["addr", "add", "169.254.0.2/32", "dev", "lo"])?;
    host.ip(&["addr", "add", "10.0.16.5/24", "dev", "eth0"])?;
    Ok(host)
}

/// Returns the address of a client behind an interface.
fn client(interface: &str) -> IpAddr {
    match interface {
        "s-010255010002" => [10, 255, 10, 2].into(),
        "s-010255010003" => [10, 255, 10, 3].into(),
        "lo" => v4().ip(),
        _ => [10, 0, 16, 77].into(),
    }
}

#[test]
fn rule_sets_raise_expected_objections() -> Result<()> {
    requires!(namespaces);
    let folder = folder();
    let expected: BTreeMap<String, Expected> =
        serde_json::from_str(&fs::read_to_string(folder.join("expected.json"))?)?;
    ensure!(expected.len() >= 10, "{} rule sets in {}", expected.len(), folder.display());
    let mut failures = Vec::new();
    for (file, Expected { expect, sets }) in &expected {
        let rules = fs::read_to_string(folder.join(file))?;
        let loaders: &[&[&str]] = if file.ends_with(".nft") {
            &[&["nft", "-f", "-"]]
        } else {
            &[&["iptables-legacy-restore", "--noflush"], &["iptables-nft-restore", "--noflush"]]
        };
        for loader in loaders {
            let host = host()?;
            if !sets.is_empty() {
                feed(&host, &["ipset", "restore"], sets)?;
            }
            feed(&host, loader, &rules)?;
            for (interface, decision) in expect {
                let found =
                    host.run(|| dns_fastpath::filter_objection(interface, client(interface), v4()))??;
                // The contents of an ipset are not inspected: missing queries decide.
                let by_arrival = rules.contains("--match-set") && decision == "off";
                if found.is_some() != (decision == "off") && !by_arrival {
                    failures.push(format!(
                        "{file} by {}, {interface}: {found:?}, expected: {decision}",
                        loader[0]
                    ));
                }
            }
        }
    }
    ensure!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

#[test]
fn inspection_creates_no_legacy_tables() -> Result<()> {
    requires!(namespaces);
    let host = Namespace::new("untouched")?;
    let names = || host.run(|| fs::read_to_string("/proc/thread-self/net/ip_tables_names"));
    let before = names()??;
    let endpoint: SocketAddr = v4();
    let found = host.run(|| dns_fastpath::filter_objection("lo", endpoint.ip(), endpoint))??;
    ensure!(found.is_none() && names()?? == before, "{found:?}, {before:?}");
    Ok(())
}
