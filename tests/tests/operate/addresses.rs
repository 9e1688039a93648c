//! Listen addresses that are unavailable at the start, lost or added while the server runs.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    os::unix::process::CommandExt as _,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::rr::RecordType;
use nix::sys::resource::{Resource, setrlimit};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use whole_system_tests::{
    bpffs::Bpffs,
    client,
    metrics::Metrics,
    namespace::Namespace,
    process::{capture, wait_until},
    requires,
    server::{self, Server},
};

use crate::running::RECORDS;

/// An address that remains available.
const STAYS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)), 53);
/// An address that is removed and restored.
const GOES: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 9, 1, 1)), 53);

#[test]
fn lost_address_stops_no_server() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("lost")?;
    for address in ["10.9.0.1/32", "10.9.1.1/32"] {
        namespace.ip(&format!("addr add {address} dev lo"))?;
    }
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    std::fs::write(
        folder.path().join("addresses/more.json"),
        r#"[{"address": "10.9.1.1", "port": 53}]"#,
    )?;
    let settings = json!({"xdp": {"mode": "off"}, "metrics": {"enabled": true}});
    let mut server = Server::start(Some(&namespace), folder, STAYS, &settings)?;
    let query = client::query("q-s0.q-g1.bosh.", RecordType::A, None)?.to_vec()?;
    let answers = |address| {
        let asked = || client::ask_raw(address, &query, Duration::from_secs(5)).is_ok();
        namespace.run(asked).unwrap_or(false)
    };
    // The addresses are listened on one after the other.
    wait_until("both addresses", Duration::from_secs(120), || {
        answers(STAYS) && answers(GOES)
    })?;

    // Lost while the server runs.
    namespace.ip("addr del 10.9.1.1/32 dev lo")?;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(36) {
        ensure!(
            server.process().ended()?.is_none(),
            "the server ended:\n{}",
            server.log()
        );
        ensure!(answers(STAYS), "{}", server.log());
        std::thread::sleep(Duration::from_millis(500));
    }
    server.wait_for_log("10.9.1.1:53")?;

    // Missing at the start, available later.
    server.process().stop(Duration::from_secs(120))?;
    server.restart(Some(&namespace))?;
    ensure!(answers(STAYS) && !answers(GOES), "{}", server.log());
    namespace.ip("addr add 10.9.1.1/32 dev lo")?;
    wait_until(
        "the address that came back",
        Duration::from_secs(120),
        || answers(GOES),
    )?;

    // Without any listen address the server cannot start.
    server.process().stop(Duration::from_secs(120))?;
    for address in ["10.9.0.1/32", "10.9.1.1/32"] {
        namespace.ip(&format!("addr del {address} dev lo"))?;
    }
    ensure!(
        server.restart(Some(&namespace)).is_err(),
        "it starts without any usable listen address"
    );
    Ok(())
}

//----------- Decisions that follow the addresses ---------------------------------

/// A server on one address, whose addresses files change.
struct Following {
    server: Server,
    namespace: Namespace,
}

impl Following {
    fn start(label: &str, address: &str, more: &Value) -> Result<Self> {
        let namespace = Namespace::new(label)?;
        let folder = server::folder(RECORDS.as_bytes(), None)?;
        let mut settings = json!({
            "xdp": {"mode": "off"}, "metrics": {"enabled": true},
            "control": {"socket": folder.path().join("control.sock")},
        });
        server::merge(&mut settings, more);
        let address = address.parse()?;
        let few_files = |command: &mut Command| {
            // SAFETY: setrlimit is a plain system call, allowed between fork and exec.
            unsafe {
                command.pre_exec(|| Ok(setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES)?));
            }
        };
        let server =
            Server::start_prepared(Some(&namespace), folder, address, &settings, few_files)?;
        Ok(Self { server, namespace })
    }

    /// Writes the only addresses file.
    fn set(&self, addresses: &[&str]) -> Result<()> {
        let mut list = Vec::new();
        for address in addresses {
            list.push(json!({"address": address, "port": 53}));
        }
        let file = self.server.folder.path().join("addresses/more.json");
        Ok(std::fs::write(file, Value::Array(list).to_string())?)
    }

    fn answers(&self, address: &str) -> bool {
        let query = client::query("q-s0.q-g1.bosh.", RecordType::A, None);
        let asked = || -> Result<()> {
            let query = query?.to_vec()?;
            client::ask_raw(address.parse()?, &query, Duration::from_millis(500))?;
            Ok(())
        };
        self.namespace.run(asked).is_ok_and(|answer| answer.is_ok())
    }

    fn status(&self) -> Result<Value> {
        let mut command = self.namespace.command(server::program()?)?;
        let socket = self.server.folder.path().join("control.sock");
        let text = capture(command.args(["status", "--json", "--socket"]).arg(socket))?;
        Ok(serde_json::from_str(&text)?)
    }
}

/// Open files of a server: its TCP clients may have a quarter.
const FILES: u64 = 256;

#[test]
fn tcp_clients_of_all_addresses_share_descriptors() -> Result<()> {
    requires!(namespaces);
    let following = Following::start("shared", "127.0.0.1:53", &json!({}))?;
    let added: Vec<String> = (1..=9).map(|last| format!("127.0.1.{last}")).collect();
    let addresses: Vec<&str> = added.iter().map(String::as_str).collect();
    following.set(&addresses)?;
    following.server.wait_for_log("listening on 127.0.1.9:53")?;
    let query = client::query("q-s0.q-g1.bosh.", RecordType::A, None)?.to_vec()?;
    let framed = [&(query.len() as u16).to_be_bytes()[..], &query].concat();
    let connect = |number: u8| -> Result<Vec<TcpStream>> {
        let mut open = Vec::new();
        for address in &added {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            // Few of each client, whose share is not what is tested.
            let client = SocketAddr::from(([127, 0, 2, number], 0));
            socket.bind(&client.into())?;
            socket.connect(&SocketAddr::new(address.parse()?, 53).into())?;
            let mut stream = TcpStream::from(socket);
            stream.write_all(&framed)?;
            stream.read_exact(&mut [0; 2])?;
            open.push(stream);
        }
        Ok(open)
    };
    let mut open = Vec::new();
    for number in 1..=20 {
        open.extend(following.namespace.run(|| connect(number))??);
    }
    ensure!(open.len() == 180);
    let is_enforced = || -> Result<bool> {
        let metrics = Metrics::read(&following.namespace)?;
        let limit = metrics.sum("bosh_dns_xdp_limit", "resource=\"tcp_connections\"");
        let closed = metrics.sum("bosh_dns_xdp_tcp_closed_for_others_total", "");
        Ok(limit == FILES / 4 && closed > 0)
    };
    wait_until("closed connections", Duration::from_secs(120), || {
        is_enforced().unwrap_or(false)
    })
}

#[test]
fn ipv6_wildcard_follows_ipv4_addresses() -> Result<()> {
    requires!(namespaces);
    let following = Following::start("dual", "[::]:53", &json!({}))?;
    let wait = |what: &str, is: &dyn Fn() -> bool| {
        wait_until(what, Duration::from_secs(120), is).with_context(|| following.server.log())
    };
    ensure!(following.answers("127.0.0.3:53") && following.answers("[::1]:53"));
    // From now on IPv4 is served only at this address.
    following.set(&["127.0.0.2"])?;
    following.server.wait_for_log("listening on 127.0.0.2:53")?;
    wait("the address of IPv4", &|| following.answers("127.0.0.2:53"))?;
    wait("IPv6", &|| following.answers("[::1]:53"))?;
    ensure!(!following.answers("127.0.0.3:53"));
    following.set(&[])?;
    wait("all addresses", &|| following.answers("127.0.0.3:53"))?;
    ensure!(following.answers("[::1]:53"));
    Ok(())
}

#[test]
fn address_below_wildcard_is_served() -> Result<()> {
    requires!(namespaces);
    let following = Following::start("covered", "0.0.0.0:53", &json!({}))?;
    following.set(&["127.0.0.9", "::1"])?;
    following.server.wait_for_log("listening on [::1]:53")?;
    ensure!(following.answers("127.0.0.9:53") && following.answers("[::1]:53"));
    let log = following.server.log();
    ensure!(!log.contains("cannot listen"), "{log}");
    let status = following.status()?;
    ensure!(
        status["ready"] == true && status["listen"] == json!(["0.0.0.0:53", "[::1]:53"]),
        "{status}"
    );
    Ok(())
}

#[test]
fn local_queries_to_routed_address_are_served_at_loopback() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("routed")?;
    namespace.ip("link add routed type veth peer name far")?;
    namespace.ip("addr add 10.9.0.1/24 dev routed")?;
    namespace.ip("link set routed up")?;
    let bpffs = Bpffs::new()?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let settings = json!({
        "control": {"socket": folder.path().join("control.sock")},
        // Candidates by default, not by the list that other tests use.
        "xdp": {"mode": "auto", "bpffs": bpffs.path(), "interfaces": null},
    });
    let server = Server::start(Some(&namespace), folder, STAYS, &settings)?;
    let following = Following { server, namespace };
    let mut last = Value::Null;
    wait_until(
        "the loopback to be served",
        Duration::from_secs(120),
        || {
            for _ in 0..10 {
                following.answers("10.9.0.1:53");
            }
            last = following.status().unwrap_or_default()["fast_path"]["interfaces"].clone();
            last.as_array().into_iter().flatten().any(|one| {
                one["name"] == "lo"
                    && one["state"] == "served"
                    && one["reply_count"].as_u64() > Some(0)
            })
        },
    )
    .with_context(|| format!("{last}"))
}
