//! Names above the names that the server answers, as a resolver that minimises query names needs them.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Stdio,
};

use anyhow::{Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    namespace::Namespace,
    process::{Kept, wait_until},
    requires,
    server::{self, Server},
};

use crate::{EVENTUALLY, OURS, recursors::Recursor, support::scenario::Rule};

/// A recursor that denies every name, as the outside world does.
const OUTSIDE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 0, 1, 1)), 53);
const UNBOUND: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 0, 2, 1)), 53);

/// Starts a server with an alias and Consul's names.
fn start(namespace: &Namespace, compat: Value) -> Result<Server> {
    let aliases = br#"{"db.service.cf.internal": ["10.0.0.9"]}"#;
    let folder = server::folder(&server::records_of_groups(&[1]), Some(aliases))?;
    let catalog = folder.path().join("catalog.json");
    let definitions = json!({
        "nodes": [{"node": "elm", "address": "10.1.0.11"}],
        "services": [
            {"node": "elm", "name": "web", "port": 80, "tags": ["v1.blue"]},
            {"node": "elm", "name": "own", "port": 81, "address": "10.1.0.12"},
        ],
    });
    fs::write(&catalog, definitions.to_string())?;
    let consul = json!({"empty_non_terminals": true, "sources": {"files": [catalog]}});
    let extra = json!({
        "xdp": {"mode": "off"}, "disable_recursors": false, "recursors": [OUTSIDE], "compat": compat,
        "consul": consul,
    });
    Server::start(Some(namespace), folder, OURS, &extra)
}

fn outside(namespace: &Namespace) -> Result<Recursor> {
    let deny: Rule =
        serde_json::from_value(json!({"q": "*", "type": "*", "rcode": "NXDOMAIN", "ra": true}))?;
    namespace.run(|| Recursor::start(OUTSIDE, vec![deny]))?
}

fn ask(namespace: &Namespace, server: SocketAddr, name: &str, kind: RecordType) -> Result<Message> {
    let query = client::query(name, kind, None)?;
    namespace.run(|| client::ask(server, &query))?
}

#[test]
fn names_above_aliases_exist() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("names-above")?;
    let _outside = outside(&namespace)?;
    let rcode = |name: &str| {
        Ok::<_, anyhow::Error>(
            ask(&namespace, OURS, name, RecordType::A)?
                .metadata
                .response_code,
        )
    };
    let above = ["service.cf.internal.", "cf.internal.", "internal."];
    {
        let _server = start(&namespace, json!({}))?;
        for name in above {
            // Twice: the second reply may be cached.
            for _ in 0..2 {
                let reply = ask(&namespace, OURS, name, RecordType::A)?;
                ensure!(
                    reply.metadata.response_code == ResponseCode::NoError,
                    "{name}: {reply:?}"
                );
                ensure!(
                    reply.answers.is_empty() && reply.metadata.authoritative,
                    "{name}: {reply:?}"
                );
            }
        }
        ensure!(rcode("other.cf.internal.")? == ResponseCode::NXDomain);
        ensure!(rcode("y.db.service.cf.internal.")? == ResponseCode::NXDomain);
    }
    let _server = start(
        &namespace,
        json!({"nxdomain_for_empty_non_terminals": true}),
    )?;
    for name in above {
        ensure!(rcode(name)? == ResponseCode::NXDomain, "{name}");
    }
    Ok(())
}

#[test]
fn strict_minimisation_finds_every_name() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("minimised")?;
    let _outside = outside(&namespace)?;
    let server = start(&namespace, json!({}))?;
    let folder = server.folder.path();
    let stub = |zone: &str| {
        format!(
            "stub-zone:\n  name: \"{zone}\"\n  stub-addr: {}@{}\n  stub-prime: no\n",
            OURS.ip(),
            OURS.port()
        )
    };
    let config = format!(
        "server:\n  interface: {}\n  port: {}\n  username: \"\"\n  chroot: \"\"\n  directory: \"{}\"\n\
         \x20 pidfile: \"\"\n  use-syslog: no\n  do-not-query-localhost: no\n  num-threads: 1\n\
         \x20 module-config: \"iterator\"\n  qname-minimisation: yes\n  qname-minimisation-strict: yes\n\
         \x20 local-zone: \"internal.\" nodefault\n{}{}remote-control:\n  control-enable: no\n",
        UNBOUND.ip(),
        UNBOUND.port(),
        folder.display(),
        stub("internal."),
        stub("consul."),
    );
    fs::write(folder.join("unbound.conf"), config)?;
    let log = fs::File::create(folder.join("unbound.log"))?;
    let mut command = namespace.command("unbound")?;
    command.args(["-d", "-c"]).arg(folder.join("unbound.conf"));
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let _unbound = Kept::spawn(&mut command)?;
    wait_until("unbound", EVENTUALLY, || {
        ask(
            &namespace,
            UNBOUND,
            "db.service.cf.internal.",
            RecordType::A,
        )
        .is_ok()
    })?;
    for (name, kind) in [
        ("db.service.cf.internal.", RecordType::A),
        ("web.service.consul.", RecordType::A),
        ("web.service.dc1.consul.", RecordType::A),
        ("v1.blue.web.service.consul.", RecordType::A),
        ("web.service.dc1.dc.consul.", RecordType::A),
        ("_web._tcp.service.consul.", RecordType::SRV),
        ("own.service.consul.", RecordType::SRV),
        ("elm.node.dc1.consul.", RecordType::A),
        ("0a01000c.addr.dc1.consul.", RecordType::A),
    ] {
        let reply = ask(&namespace, UNBOUND, name, kind)?;
        let log = || fs::read_to_string(folder.join("unbound.log")).unwrap_or_default();
        ensure!(reply.answers.len() == 1, "{name}: {reply:?}\n{}", log());
    }
    Ok(())
}
