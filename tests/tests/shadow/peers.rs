//! dnsmasq and unbound as the observed server: names outside the fleet are no difference.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    process::Stdio,
    time::Duration,
};

use anyhow::{Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    client::{ask_raw, ask_tcp_raw, query},
    namespace::Namespace,
    process::{Kept, wait_until},
    requires, server,
};

use crate::double::{PATIENCE, Shadow, count, unexplained};

const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

/// Watches a peer that is asked for names of its own, names that do not exist, and names that it refuses.
fn watch(namespace: &Namespace, command: &mut std::process::Command) -> Result<()> {
    let _peer = Kept::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
    let folder = server::folder(&server::records_of_groups(&[3]), None)?;
    let mut config = server::config(folder.path(), ADDRESS);
    server::merge(
        &mut config,
        &json!({"disable_recursors": false, "recursors": ["192.0.2.53:53"]}),
    );
    let path = folder.path().join("config.json");
    fs::write(&path, config.to_string())?;
    let own = query("www.example.org.", RecordType::A, None)?.to_vec()?;
    wait_until("the peer", PATIENCE, || {
        let asked = || ask_raw(ADDRESS, &own, Duration::from_millis(200)).is_ok();
        namespace.run(asked).unwrap_or(false)
    })?;
    let mut shadow = Shadow::start(namespace, folder.path(), &path, &[])?;
    shadow.wait_until_watching()?;
    namespace.run(|| -> Result<()> {
        for name in [
            "www.example.org.",
            "none.example.org.",
            "other.invalid.",
            "example.org.",
        ] {
            for rtype in [
                RecordType::A,
                RecordType::AAAA,
                RecordType::TXT,
                RecordType::MX,
            ] {
                for edns in [None, Some(1232)] {
                    let message = query(name, rtype, edns)?.to_vec()?;
                    ask_raw(ADDRESS, &message, PATIENCE)?;
                    ask_tcp_raw(ADDRESS, &message)?;
                }
            }
        }
        Ok(())
    })??;
    let (code, report) = shadow.stop()?;
    ensure!(code == 0, "{}", unexplained(&report));
    let compared = count(&report, "/verdicts/compared");
    let split = count(&report, "/seen/split_segments");
    ensure!(
        compared + split >= 64,
        "{} {}",
        report["verdicts"],
        report["seen"]
    );
    ensure!(compared >= 32, "{}", report["verdicts"]);
    ensure!(
        count(&report, "/verdicts/same_route") == compared,
        "{}",
        report["verdicts"]
    );
    Ok(())
}

#[test]
fn dnsmasq_has_no_false_difference() -> Result<()> {
    requires!(namespaces, programs(&["dnsmasq"]));
    let namespace = Namespace::new("shadowdnsmasq")?;
    let mut command = namespace.command("dnsmasq")?;
    command.args([
        "--keep-in-foreground",
        "--no-resolv",
        "--no-hosts",
        "--conf-file=/dev/null",
        "--pid-file=",
        "--address=/example.org/192.0.2.80",
        "--listen-address=127.0.0.1",
        "--bind-interfaces",
    ]);
    watch(&namespace, &mut command)
}

#[test]
fn unbound_has_no_false_difference() -> Result<()> {
    requires!(namespaces, programs(&["unbound"]));
    let namespace = Namespace::new("shadowunbound")?;
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("unbound.conf");
    fs::write(
        &config,
        "server:\n  interface: 127.0.0.1\n  do-daemonize: no\n  username: \"\"\n  chroot: \"\"\n  pidfile: \"\"\n  \
         use-syslog: no\n  module-config: \"iterator\"\n  local-zone: \"example.org.\" static\n  \
         local-data: \"www.example.org. 300 IN A 192.0.2.80\"\n  local-zone: \"invalid.\" refuse\n",
    )?;
    let mut command = namespace.command("unbound")?;
    command.arg("-d").arg("-c").arg(&config);
    watch(&namespace, &mut command)
}
