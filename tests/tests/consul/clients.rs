//! Consul's names through common clients: dig, the C library, Java's two resolvers, Go's resolver.

use std::{collections::BTreeSet, fs, net::Ipv4Addr, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use whole_system_tests::{
    namespace::Namespace,
    process::{Kept, capture, wait_until},
    requirements, requires,
    resolv_conf::ResolvConf,
    server::{self, Server},
};

use crate::OURS;

/// A service of three instances, one of them critical.
const DEFINITIONS: &str = r#"{"services": [
    {"name": "web", "id": "web-1", "address": "10.7.0.1", "port": 8080},
    {"name": "web", "id": "web-2", "address": "10.7.0.2", "port": 8080},
    {"name": "web", "id": "web-3", "address": "10.7.0.3", "port": 8080, "check": {"id": "up", "status": "critical"}}
]}"#;

/// Queries the C library's getaddrinfo.
const PYTHON: &str = "import socket, sys
for found in socket.getaddrinfo(sys.argv[1], 80, type=socket.SOCK_STREAM):
    print(found[4][0])";

/// Queries the C library through `InetAddress`, and SRV through the JDK's DNS client.
const JAVA: &str = r#"
import java.net.InetAddress;
import java.util.Hashtable;
import javax.naming.directory.InitialDirContext;

public class Resolve {
    public static void main(String[] names) throws Exception {
        for (InetAddress address : InetAddress.getAllByName(names[0])) {
            System.out.println(address.getHostAddress());
        }
        Hashtable<String, String> settings = new Hashtable<>();
        settings.put("java.naming.factory.initial", "com.sun.jndi.dns.DnsContextFactory");
        settings.put("java.naming.provider.url", "dns:");
        var records = new InitialDirContext(settings).getAttributes(names[0], new String[] {"SRV"}).get("SRV");
        for (int i = 0; i < records.size(); i++) {
            System.out.println(records.get(i));
        }
    }
}
"#;

#[test]
fn common_clients_resolve_consul_names() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("consul-clients")?;
    let folder = server::folder(&server::records_of_groups(&[]), None)?;
    let (definitions, java) = (
        folder.path().join("web.json"),
        folder.path().join("Resolve.java"),
    );
    fs::write(&definitions, DEFINITIONS)?;
    fs::write(&java, JAVA)?;
    let extra = json!({
        "xdp": {"mode": "off"},
        "consul": {"node_name": "here", "advertise_addr": "10.7.0.9", "sources": {"files": [definitions]}},
    });
    let _server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    let _conf = ResolvConf::new(&namespace, OURS.ip())?;
    let name = "web.service.consul";
    let addresses: BTreeSet<String> = [1, 2]
        .map(|last| Ipv4Addr::new(10, 7, 0, last).to_string())
        .into_iter()
        .collect();
    let run = |program: &str, arguments: &[&str]| -> Result<Option<BTreeSet<String>>> {
        if !requirements::programs(&[program]) {
            return Ok(None);
        }
        let mut command = namespace.with_own_sysfs(program);
        let output = capture(command.args(arguments)).with_context(|| program.to_owned())?;
        Ok(Some(output.lines().map(str::to_owned).collect()))
    };
    if let Some(found) = run("dig", &["+short", name, "A"])? {
        ensure!(found == addresses, "dig: {found:?}");
    }
    if let Some(found) = run("dig", &["+short", "+tcp", name, "SRV"])? {
        let expected =
            ["0a070001", "0a070002"].map(|hex| format!("1 1 8080 {hex}.addr.dc1.consul."));
        ensure!(found == expected.into_iter().collect(), "dig: {found:?}");
    }
    if let Some(found) = run("python3", &["-c", PYTHON, name])? {
        ensure!(found == addresses, "getaddrinfo: {found:?}");
    }
    if let Some(found) = run("java", &[java.to_str().context("a path in UTF-8")?, name])? {
        let (records, found): (BTreeSet<String>, BTreeSet<String>) =
            found.into_iter().partition(|line| line.contains("addr"));
        ensure!(found == addresses, "Java: {found:?}");
        ensure!(
            records.len() == 2 && records.iter().all(|record| record.starts_with("1 1 8080 ")),
            "{records:?}"
        );
    }
    if requirements::programs(&["nats-server"]) {
        let log = definitions.with_file_name("nats.log");
        let found = resolved_by_go(&namespace, name, &addresses, &log);
        found.with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
    }
    Ok(())
}

/// Waits until Go's resolver has returned exactly these addresses of a name. nats-server is written
/// in Go: it resolves a route's name before each attempt, picks an address at random and logs it.
fn resolved_by_go(
    namespace: &Namespace,
    name: &str,
    addresses: &BTreeSet<String>,
    log: &Path,
) -> Result<()> {
    let output = fs::File::create(log)?;
    let mut command = namespace.with_own_sysfs("nats-server");
    command.args([
        "-D",
        "-a",
        "127.0.0.1",
        "-p",
        "4222",
        "--cluster",
        "nats://127.0.0.1:6222",
    ]);
    command.args(["--routes", &format!("nats-route://{name}:8080")]);
    // Forces Go's own resolver and logs the choice.
    command
        .env("GODEBUG", "netdns=go+1")
        .stdout(output.try_clone()?)
        .stderr(output);
    let _running = Kept::spawn(&mut command)?;
    let tried = || -> BTreeSet<String> {
        let text = fs::read_to_string(log).unwrap_or_default();
        let attempts = text
            .lines()
            .filter_map(|line| line.split_once("Trying to connect to route on "));
        let address =
            |(_, tried): (&str, &str)| Some(tried.split_once('(')?.1.split_once(':')?.0.to_owned());
        attempts.filter_map(address).collect()
    };
    wait_until("all addresses, by Go", Duration::from_secs(120), || {
        tried() == *addresses
    })?;
    ensure!(
        fs::read_to_string(log)?.contains("forcing use of Go's resolver"),
        "another resolver"
    );
    Ok(())
}
