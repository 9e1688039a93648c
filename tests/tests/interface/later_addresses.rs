//! Addresses that a running server gains: the candidate interfaces follow the addresses.

use std::{fs, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs,
    namespace::{End, Namespace, join},
    pair::{Pair, TIMEOUT, addresses, v4},
    process::{capture, wait_until},
    requires,
    server::{self, Server},
};

/// A name in the records.
const NAME: &str = "q-s0.q-g1.bosh.";

/// Time limit, reached only on failure.
const LIMIT: Duration = Duration::from_secs(90);

const RECORDS: &str = r#"{
    "record_keys": ["id", "num_id", "instance_group", "group_ids", "az", "az_id", "network", "network_id",
        "deployment", "ip", "domain", "agent_id", "instance_index"],
    "record_infos": [["a", "1", "web", ["1"], "z1", "1", "net", "1", "dep", "10.0.0.1", "bosh", "agent-a", 0]],
    "version": 1
}"#;

/// A server that starts with loopback addresses only, which is the default of the package.
struct Loopback {
    server: Server,
    _bpffs: Bpffs,
}

impl Loopback {
    fn start(namespace: &Namespace) -> Result<Self> {
        let bpffs = Bpffs::new()?;
        let folder = server::folder(RECORDS.as_bytes(), None)?;
        let settings = json!({
            "metrics": {"enabled": true},
            // Candidates by default, not by the list that other tests use.
            "xdp": {"mode": "auto", "bpffs": bpffs.path(), "interfaces": null},
            "control": {"socket": folder.path().join("control.sock")},
        });
        let server = Server::start(
            Some(namespace),
            folder,
            ([127, 0, 0, 1], 53).into(),
            &settings,
        )?;
        Ok(Self {
            server,
            _bpffs: bpffs,
        })
    }

    /// Adds a listen address, as an operator does in `addresses.d`.
    fn add(&self, address: SocketAddr) -> Result<()> {
        let file = self.server.folder.path().join("addresses/later.json");
        let text = json!([{"address": address.ip(), "port": address.port()}]).to_string();
        Ok(fs::write(file, text)?)
    }

    fn command(&self, namespace: &Namespace, arguments: &[&str]) -> Result<String> {
        let mut command = namespace.command(server::program()?)?;
        command
            .args(arguments)
            .arg("--socket")
            .arg(self.server.folder.path().join("control.sock"));
        capture(&mut command)
    }

    fn status(&self, namespace: &Namespace) -> Result<Value> {
        Ok(serde_json::from_str(
            &self.command(namespace, &["status", "--json"])?,
        )?)
    }

    /// Queries from `client` until `interface` is served, and its replies are counted.
    fn assert_served(&self, on: &Namespace, client: &Namespace, interface: &str) -> Result<()> {
        let mut last = Value::Null;
        let mut is_served = || -> Result<bool> {
            for _ in 0..10 {
                addresses(client, v4(), NAME, TIMEOUT)?;
            }
            last = self.status(on)?["fast_path"]["interfaces"].clone();
            Ok(last.as_array().into_iter().flatten().any(|one| {
                one["name"] == interface
                    && one["state"] == "served"
                    && one["reply_count"].as_u64() > Some(0)
            }))
        };
        wait_until("the interface to be served", LIMIT, || {
            is_served().unwrap_or(false)
        })
        .with_context(|| format!("{last}\n{}", self.server.log()))
    }
}

#[test]
fn later_address_is_served_by_its_interface() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("later")?;
    let running = Loopback::start(&pair.server)?;
    running.add(v4())?;
    running.server.wait_for_log("listening on 169.254.0.2:53")?;
    running.assert_served(&pair.server, &pair.client, "srv")?;
    let text = running.command(&pair.server, &["resolve", NAME])?;
    ensure!(
        text.lines().any(|line| {
            line.starts_with("answered by: the interface (fast path), for A and AAAA over UDP at ")
                && line.contains("srv")
        }),
        "{text}"
    );
    Ok(())
}

#[test]
fn later_bridge_is_served() -> Result<()> {
    requires!(namespaces, bpf);
    let [server, client] = [Namespace::new("dock-s")?, Namespace::new("dock-c")?];
    let running = Loopback::start(&server)?;
    // The address is configured before Docker creates its bridge.
    running.add(v4())?;
    running
        .server
        .wait_for_log("is not served until it can be bound")?;
    server.ip("link add docker0 type bridge")?;
    server.ip("addr add 169.254.0.2/24 dev docker0")?;
    server.ip("link set docker0 up")?;
    join(
        End::new(&server, "port0", &[]),
        End::new(&client, "eth0", &["169.254.0.1/24"]),
    )?;
    server.ip("link set port0 master docker0")?;
    server.wait_for_link("docker0")?;
    running.server.wait_for_log("listening on 169.254.0.2:53")?;
    running.assert_served(&server, &client, "docker0")
}
