//! A fleet on one machine: certificates, nats-server, agents, a publisher.

use std::{
    collections::HashMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};
use test_support::free_address;

use crate::process::{Kept, capture, wait_until};
use anyhow::{Context, Result, ensure};
use dns_sync::http::TlsFiles;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::certificates::Authority;

/// Time limit for any wait; test machines are slow at times.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(180);

pub(crate) struct Lab {
    /// nats-server, while it runs.
    nats: Option<Kept>,
    folder: TempDir,
    /// Address on which nats-server listens.
    nats_port: u16,
    pub(crate) blobstore: Vec<String>,
    pub(crate) authority: Authority,
    /// Whether nats-server has JetStream.
    jetstream: bool,
    /// Additional options of `nats-config`.
    nats_options: Vec<String>,
    /// Proxies through which some parties reach nats-server.
    routes: HashMap<String, SocketAddr>,
}

/// Replaces the wall clock of a process, and no other clock, by the file `clock`.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

impl Lab {
    /// Creates a fleet of `agents` agents `a0`, `a1`..., with a folder as its blobstore.
    pub(crate) fn new(agents: usize) -> Result<Self> {
        let folder = TempDir::with_prefix("bdx-sync-")?;
        let path = folder.path();
        let authority = Authority::new(path)?;
        authority.issue(path, "nats", "default.nats.bosh-internal")?;
        authority.issue(path, "director", "default.director.bosh-internal")?;
        for agent in 0..agents {
            authority.issue(
                path,
                &format!("a{agent}"),
                &format!("a{agent}.agent.bosh-internal"),
            )?;
        }
        let blobs = path.join("blobs");
        fs::create_dir(&blobs)?;
        let blobstore = vec![
            "--blobstore".to_owned(),
            format!("file://{}", blobs.display()),
        ];
        let nats_port = free_address().port();
        let mut lab = Self {
            nats: None,
            nats_port,
            blobstore,
            authority,
            jetstream: false,
            nats_options: Vec::new(),
            routes: HashMap::new(),
            folder,
        };
        lab.write_inventory(agents, |agent| format!("10.0.0.{}", agent + 1))?;
        lab.start_nats()?;
        Ok(lab)
    }

    /// Returns the path of a file of the fleet.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the inventory: agent `n` is instance `i<n>`, with an address.
    pub(crate) fn write_inventory(
        &self,
        agents: usize,
        address: impl Fn(usize) -> String,
    ) -> Result<()> {
        let instances: Vec<Value> = (0..agents)
            .map(|agent| {
                let networks = json!({"default": address(agent)});
                json!({"id": format!("i{agent}"), "agent_id": format!("a{agent}"), "az": "z1", "networks": networks})
            })
            .collect();
        let links = json!([{"name": "web", "type": "http", "aliases": [
            {"domain": "_.web.internal", "placeholder_type": "uuid"}, {"domain": "web.internal"}]}]);
        let groups = json!([{"name": "web_server", "links": links, "instances": instances}]);
        let inventory = json!({"deployments": [{"name": "dep", "instance_groups": groups}]});
        // Replaced as by an editor.
        fs::write(self.path("inventory.new"), inventory.to_string())?;
        Ok(fs::rename(
            self.path("inventory.new"),
            self.path("inventory.json"),
        )?)
    }

    pub(crate) fn tls(&self, who: &str) -> Vec<String> {
        let TlsFiles {
            ca,
            certificate,
            key,
        } = self.tls_files(who);
        [
            ("--tls-ca", ca),
            ("--tls-certificate", certificate),
            ("--tls-key", key),
        ]
        .into_iter()
        .flat_map(|(option, file)| [option.to_owned(), file.display().to_string()])
        .collect()
    }

    /// Returns the program with a subcommand.
    pub(crate) fn command(&self, words: &[&str]) -> Result<Command> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bosh-dns-sync"));
        command.args(words).stdin(Stdio::null());
        let clock = self.path("clock");
        if clock.exists() {
            command
                .env("LD_PRELOAD", FAKETIME)
                .env("FAKETIME_TIMESTAMP_FILE", clock);
            command
                .env("FAKETIME_CACHE_DURATION", "1")
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
            command.env("NO_FAKE_STAT", "1");
        }
        Ok(command)
    }

    /// Sets the wall clock of all processes of the program (including running ones started after the first
    /// call) to an offset in seconds, such as `-3600`.
    pub(crate) fn set_clock(&self, offset: &str) -> Result<()> {
        ensure!(
            Path::new(FAKETIME).exists(),
            "{FAKETIME} is missing: `cargo xtask test` installs faketime"
        );
        fs::write(self.path("clock.new"), offset)?;
        Ok(fs::rename(self.path("clock.new"), self.path("clock"))?)
    }

    /// Starts nats-server with the generated configuration.
    pub(crate) fn start_nats(&mut self) -> Result<()> {
        self.write_nats_config()?;
        self.start_nats_again()
    }

    /// Writes nats-server's configuration.
    fn write_nats_config(&self) -> Result<()> {
        let listen = format!("127.0.0.1:{}", self.nats_port);
        let mut generate = self.command(&["nats-config", "--listen", &listen])?;
        generate
            .args(self.source())
            .args(self.tls("nats"))
            .arg("--output")
            .arg(self.path("nats.conf"));
        if self.jetstream {
            generate
                .arg("--jetstream")
                .arg(self.path("jetstream"))
                .args(["--bucket", "dns"]);
        }
        generate.args(&self.nats_options);
        capture(&mut generate)?;
        Ok(())
    }

    /// Starts nats-server with the existing configuration.
    pub(crate) fn start_nats_again(&mut self) -> Result<()> {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path("nats.log"))?;
        let mut server = Command::new("nats-server");
        server
            .arg("-c")
            .arg(self.path("nats.conf"))
            .stdout(log.try_clone()?)
            .stderr(log);
        self.nats = Some(Kept::spawn(&mut server)?);
        let port = self.nats_port;
        wait_until("nats-server", TIMEOUT, || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        })
    }

    /// Stores blobs in JetStream's object store from now on.
    pub(crate) fn use_jetstream(&mut self) -> Result<()> {
        self.kill_nats()?;
        self.jetstream = true;
        self.blobstore = ["--blobstore", "nats:dns"].map(str::to_owned).to_vec();
        self.start_nats()
    }

    /// Makes nats-server identify users by their certificates' DNS names from now on.
    pub(crate) fn use_dns_names(&mut self, agents: usize) -> Result<()> {
        self.kill_nats()?;
        self.nats_options = ["--users-by", "dns-name"].map(str::to_owned).to_vec();
        let path = self.path("");
        self.authority
            .issue_named(&path, "director", "default.director.bosh-internal")?;
        for agent in 0..agents {
            let name = format!("a{agent}.agent.bosh-internal");
            self.authority
                .issue_named(&path, &format!("a{agent}"), &name)?;
        }
        self.start_nats()
    }

    pub(crate) fn nats_address(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.nats_port).into()
    }

    pub(crate) fn nats_url(&self) -> String {
        format!("tls://{}", self.nats_address())
    }

    /// Makes a party connect to this address instead of nats-server's.
    pub(crate) fn set_route(&mut self, party: &str, address: SocketAddr) {
        self.routes.insert(party.to_owned(), address);
    }

    /// Returns the certificate files of a party.
    pub(crate) fn tls_files(&self, who: &str) -> TlsFiles {
        let file = |name: String| self.path(&name);
        TlsFiles {
            ca: self.path("ca.crt"),
            certificate: file(format!("{who}.crt")),
            key: file(format!("{who}.key")),
        }
    }

    /// Replaces the newest blob with a FIFO.
    pub(crate) fn make_newest_blob_a_fifo(&self) -> Result<()> {
        let blob = self.path("blobs").join(self.newest_blob()?);
        fs::remove_file(&blob)?;
        Ok(nix::unistd::mkfifo(&blob, nix::sys::stat::Mode::S_IRWXU)?)
    }

    /// Suspends nats-server (SIGSTOP), or resumes it.
    pub(crate) fn pause_nats(&self, pause: bool) -> Result<()> {
        self.nats
            .as_ref()
            .context("nats-server does not run")?
            .pause(pause)
    }

    pub(crate) fn kill_nats(&mut self) -> Result<()> {
        self.nats.take().context("nats-server does not run")?.kill()
    }

    /// Returns the log of nats-server.
    pub(crate) fn nats_log(&self) -> String {
        fs::read_to_string(self.path("nats.log")).unwrap_or_default()
    }

    pub(crate) fn source(&self) -> Vec<String> {
        vec![
            "--inventory".to_owned(),
            self.path("inventory.json").display().to_string(),
        ]
    }

    pub(crate) fn bus(&self, who: &str) -> Vec<String> {
        let url = self
            .routes
            .get(who)
            .map_or_else(|| self.nats_url(), |address| format!("tls://{address}"));
        ["--nats".to_owned(), url]
            .into_iter()
            .chain(self.tls(who))
            .collect()
    }

    /// Returns `publish` with more options.
    pub(crate) fn publisher(&self, more: &[&str]) -> Result<Command> {
        let mut command = self.command(&["publish"])?;
        command
            .arg("--state")
            .arg(self.path("state"))
            .args(self.source())
            .args(self.bus("director"));
        command.args(&self.blobstore).args(more);
        Ok(command)
    }

    /// Runs `publish` until it exits.
    pub(crate) fn publish(&self, more: &[&str]) -> Result<Output> {
        Ok(self.publisher(more)?.output()?)
    }

    /// Starts `publish --watch`; its log is written to `publisher.log`.
    pub(crate) fn watch(&self, more: &[&str]) -> Result<Kept> {
        self.keep(
            self.publisher(&[&["--watch"], more].concat())?,
            "publisher.log",
        )
    }

    /// Returns `agent` with the certificate of another party; its file is `<id>.json`.
    pub(crate) fn agent_as(&self, id: &str, who: &str, more: &[&str]) -> Result<Command> {
        let mut command = self.command(&["agent", "--id", id, "--ask-jitter", "50"])?;
        command.args(self.bus(who)).args(&self.blobstore);
        command.arg("--records").arg(self.records(id)).args(more);
        Ok(command)
    }

    /// Starts an agent; its log is written to `<id>.log`.
    pub(crate) fn agent(&self, id: &str, more: &[&str]) -> Result<Kept> {
        self.keep(self.agent_as(id, id, more)?, &format!("{id}.log"))
    }

    /// Starts a command with its log file.
    pub(crate) fn keep(&self, mut command: Command, log: &str) -> Result<Kept> {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path(log))?;
        Kept::spawn(
            command
                .env("NO_COLOR", "1")
                .stdout(log.try_clone()?)
                .stderr(log),
        )
    }

    /// Returns the path of an agent's file.
    pub(crate) fn records(&self, id: &str) -> PathBuf {
        self.path(&format!("{id}.json"))
    }

    pub(crate) fn log(&self, who: &str) -> String {
        fs::read_to_string(self.path(&format!("{who}.log"))).unwrap_or_default()
    }

    /// Returns the version of an agent's file; 0 without one. An incomplete file is an error.
    pub(crate) fn version(&self, id: &str) -> Result<u64> {
        let Ok(bytes) = fs::read(self.records(id)) else {
            return Ok(0);
        };
        let parsed: Value = serde_json::from_slice(&bytes).context("half a file")?;
        parsed["version"].as_u64().context("no version")
    }

    /// Waits until an agent has a version.
    pub(crate) fn wait_for(&self, id: &str, version: u64) -> Result<()> {
        let waited = wait_until(&format!("version {version} at {id}"), TIMEOUT, || {
            self.version(id).is_ok_and(|found| found == version)
        });
        waited.with_context(|| {
            format!(
                "{id}:\n{}publisher:\n{}nats:\n{}",
                self.log(id),
                self.log("publisher"),
                self.nats_log()
            )
        })
    }

    /// Waits for a line in a log.
    pub(crate) fn wait_for_log(&self, who: &str, text: &str) -> Result<()> {
        wait_until(text, TIMEOUT, || self.log(who).contains(text))
            .with_context(|| format!("{who}:\n{}", self.log(who)))
    }

    /// Returns the dataset of a version as created by the publisher.
    pub(crate) fn dataset(&self, version: u64) -> Result<Vec<u8>> {
        Ok(fs::read(
            self.path(&format!("state/datasets/{version}.json")),
        )?)
    }

    /// Returns the id of the newest version's blob.
    pub(crate) fn newest_blob(&self) -> Result<String> {
        let state: Value = serde_json::from_slice(&fs::read(self.path("state/state.json"))?)?;
        let newest = state["versions"]
            .as_array()
            .and_then(|versions| versions.last());
        let blob = newest.and_then(|newest| newest["blob"].as_str());
        Ok(blob.context("no version yet")?.to_owned())
    }

    /// Runs a command of the program, which must succeed.
    pub(crate) fn run(&self, words: &[&str]) -> Result<String> {
        let output = self.command(words)?.output()?;
        ensure!(
            output.status.success(),
            "{words:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs `instance ...` on the state folder.
    pub(crate) fn instance(&self, words: &[&str]) -> Result<String> {
        let (state, inventory) = (self.path("state"), self.path("inventory.json"));
        // A publisher that was just started creates its folder before it needs it.
        wait_until("the publisher's state", TIMEOUT, || {
            state.join("datasets").is_dir()
        })?;
        let place = [
            "--state",
            &state.display().to_string(),
            "--inventory",
            &inventory.display().to_string(),
        ]
        .map(str::to_owned);
        let words: Vec<&str> = std::iter::once("instance")
            .chain(words.iter().copied())
            .chain(place.iter().map(String::as_str))
            .collect();
        self.run(&words)
    }
}
