//! From the inventory to the interface: publisher, nats-server and agent on a namespace's loopback,
//! the server with the agent's file, and a client behind a veth.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use whole_system_tests::{
    bpffs::Bpffs,
    metrics::{Metrics, wait_for_fast_path},
    namespace::Namespace,
    pair::{self, Pair},
    pki::write_director_files,
    process::{Kept, capture, wait_until},
    requires,
    server::{self, Server},
};

/// Generous time limit for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Address queried by the client.
const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(169, 254, 0, 2)), 53);

/// Name of the instance that moves.
const NAME: &str = "i1.web-server.default.dep.bosh.";

/// Address of the bus in its private namespace, where the port is free.
const NATS: &str = "127.0.0.1:4222";

/// A fleet of one agent.
struct Fleet<'a> {
    /// The namespace of all processes.
    namespace: &'a Namespace,
    /// Folder of all files; `records.json` is the agent's.
    folder: &'a Path,
}

impl Fleet<'_> {
    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    /// Writes an inventory of two instances; the first one's agent is the fleet's.
    fn write_inventory(&self, moving: &str) -> Result<()> {
        let instances = json!([
            {"id": "i0", "agent_id": "a0", "az": "z1", "networks": {"default": "10.0.0.1"}},
            {"id": "i1", "az": "z1", "networks": {"default": moving}},
        ]);
        let groups = json!([{"name": "web_server", "instances": instances}]);
        let inventory = json!({"deployments": [{"name": "dep", "instance_groups": groups}]});
        fs::write(self.path("inventory.new"), inventory.to_string())?;
        Ok(fs::rename(
            self.path("inventory.new"),
            self.path("inventory.json"),
        )?)
    }

    /// Builds a `bosh-dns-sync` command, with a party's certificates if given.
    fn sync(&self, command: &str, who: Option<&str>) -> Result<Command> {
        let program = server::companion("bosh-dns-sync")?;
        let mut sync = self.namespace.command(program)?;
        sync.arg(command).stdin(Stdio::null());
        if let Some(who) = who {
            sync.args([
                "--tls-ca",
                &self.path("ca.crt"),
                "--tls-certificate",
                &self.path(&format!("{who}.crt")),
            ]);
            sync.args(["--tls-key", &self.path(&format!("{who}.key"))]);
        }
        Ok(sync)
    }

    /// Keeps a command running, with its log in `<name>.log`.
    fn keep(&self, mut command: Command, name: &str) -> Result<Kept> {
        let log = fs::File::create(self.path(&format!("{name}.log")))?;
        Kept::spawn(
            command
                .env("NO_COLOR", "1")
                .stdout(log.try_clone()?)
                .stderr(log),
        )
    }

    /// Starts nats-server, the publisher and the agent.
    fn start(&self) -> Result<[Kept; 3]> {
        write_director_files(self.folder)?;
        self.write_inventory("10.0.0.2")?;
        fs::create_dir(self.path("blobs"))?;
        let inventory = self.path("inventory.json");
        let blobs = format!("file://{}", self.path("blobs"));
        let mut config = self.sync("nats-config", Some("nats"))?;
        capture(config.args([
            "--inventory",
            &inventory,
            "--listen",
            NATS,
            "--output",
            &self.path("nats.conf"),
        ]))?;
        let mut nats = self.namespace.command("nats-server")?;
        nats.args(["-c", &self.path("nats.conf")]);
        let nats = self.keep(nats, "nats")?;
        let bus = ["--nats", &format!("tls://{NATS}"), "--blobstore", &blobs].map(str::to_owned);
        let mut publisher = self.sync("publish", Some("director"))?;
        publisher.args(&bus).args([
            "--watch",
            "--inventory",
            &inventory,
            "--state",
            &self.path("state"),
        ]);
        let publisher = self.keep(publisher, "publisher")?;
        let mut agent = self.sync("agent", Some("a0"))?;
        agent.args(&bus).args([
            "--id",
            "a0",
            "--records",
            &self.path("records.json"),
            "--mode",
            "644",
        ]);
        Ok([nats, publisher, self.keep(agent, "agent")?])
    }

    fn logs(&self) -> String {
        let read = |name| fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
        ["nats", "publisher", "agent"].map(read).concat()
    }
}

/// Queries from the client's namespace; `None` on timeout.
fn ask(from: &Namespace) -> Result<Option<Vec<IpAddr>>> {
    pair::addresses(from, SERVER, NAME, Duration::from_secs(2))
}

#[test]
fn inventory_changes_reach_interface() -> Result<()> {
    requires!(namespaces, bpf);
    let Pair {
        server: inside,
        client: outside,
    } = Pair::new("records")?;
    let bpffs = Bpffs::new()?;
    let folder = server::folder(b"", None)?;
    let place = folder.path().to_owned();
    let fleet = Fleet {
        namespace: &inside,
        folder: &place,
    };
    let _fleet = fleet.start()?;
    wait_until("the first version", TIMEOUT, || {
        fs::read_to_string(fleet.path("records.json")).is_ok_and(|text| text.contains("10.0.0.2"))
    })
    .with_context(|| fleet.logs())?;
    let settings = json!({
        "metrics": {"enabled": true},
        "xdp": {"mode": "auto", "interfaces": ["srv"], "bpffs": bpffs.path()},
    });
    let server = Server::start(Some(&inside), folder, SERVER, &settings)?;
    wait_for_fast_path(&inside).with_context(|| server.log())?;

    let mut last = vec![IpAddr::from([10, 0, 0, 2])];
    for (number, change) in ["10.9.9.9", "10.0.0.2", "10.7.7.7"].into_iter().enumerate() {
        let new = vec![change.parse::<IpAddr>()?];
        match number {
            0 | 1 => fleet.write_inventory(change)?,
            // A move by command overrides the file.
            _ => drop(capture(&mut move_by_command(&fleet, change)?)?),
        }
        let mut wrong = None;
        let waited = wait_until("the new address", TIMEOUT, || {
            let found = ask(&outside).ok().flatten();
            if found
                .as_ref()
                .is_some_and(|found| *found != last && *found != new)
            {
                wrong = found.clone();
            }
            found.is_some_and(|found| found == new)
        });
        waited.with_context(|| format!("{change}: {}{}", fleet.logs(), server.log()))?;
        ensure!(
            wrong.is_none(),
            "neither the old nor the new address: {wrong:?}"
        );
        // Answered at the interface, not only by the server behind it.
        wait_until("the interface", TIMEOUT, || {
            let replies =
                || Metrics::read(&inside).map_or(0, |metrics| metrics.fast_path_replies());
            let before = replies();
            ask(&outside).is_ok_and(|found| found.as_ref() == Some(&new)) && replies() == before + 1
        })
        .with_context(|| server.log())?;
        last = new;
    }
    Ok(())
}

/// Builds the command `instance move i1 ADDRESS` on the publisher's state folder.
fn move_by_command(fleet: &Fleet<'_>, address: &str) -> Result<Command> {
    let mut command = fleet.sync("instance", None)?;
    command.args(["move", "i1", address, "--state", &fleet.path("state")]);
    command.args(["--inventory", &fleet.path("inventory.json")]);
    Ok(command)
}
