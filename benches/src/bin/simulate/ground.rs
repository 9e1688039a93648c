//! The environment of a simulation: folder, certificates and processes.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use bosh_dns_xdp_benches::cpu::CpuTime;
use dns_sync::{
    bus::{BusOptions, PING_EVERY},
    nats_config::{self, PUBLISHER, agent_name},
    tls::TlsFiles,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair, SanType,
};
use serde_json::json;
use tokio::process::{Child, Command};
use whole_system_tests::process::status_line;

use super::SimulateOptions;

pub(super) struct Ground {
    /// The folder of all files, removed when dropped.
    folder: tempfile::TempDir,
    /// Port of nats-server.
    port: u16,
    /// Path of nats-server.
    nats_server: PathBuf,
    /// Path of bosh-dns-sync.
    sync: PathBuf,
    agents: usize,
}

impl Ground {
    /// Creates certificates, the inventory of version 1, and nats-server's configuration.
    pub(super) fn new(options: &SimulateOptions, agents: usize) -> Result<Self> {
        allow_open_files(agents)?;
        let beside = || anyhow::Ok(std::env::current_exe()?.with_file_name("bosh-dns-sync"));
        let sync = options.sync.clone().map_or_else(beside, Ok)?;
        ensure!(sync.is_file(), "{}: build it first, or use --sync FILE", sync.display());
        let folder = tempfile::TempDir::with_prefix("bosh-dns-sync-")?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let ground = Self { folder, port, nats_server: options.nats_server.clone(), sync, agents };
        fs::create_dir(ground.path("blobs"))?;
        ground.issue_all()?;
        ground.change(1)?;
        let ids: Vec<String> = (0..agents).map(agent_id).collect();
        let (listen, tls) = (format!("127.0.0.1:{port}"), ground.tls("nats"));
        let config =
            nats_config::write(&listen, &tls, None, options.users_by, ids.iter().map(String::as_str));
        fs::write(ground.path("nats.conf"), config)?;
        Ok(ground)
    }

    /// Returns the number of agents.
    pub(super) fn agents(&self) -> usize {
        self.agents
    }

    /// Returns the path of a file in the folder.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the certificate files of a participant. All agents share a key, because generating
    /// keys is not measured.
    pub(super) fn tls(&self, who: &str) -> TlsFiles {
        TlsFiles {
            ca: self.path("ca.crt"),
            certificate: self.path(&format!("{who}.crt")),
            key: self.path("all.key"),
        }
    }

    pub(super) fn bus(&self, who: &str) -> BusOptions {
        BusOptions {
            nats: vec![format!("tls://127.0.0.1:{}", self.port)],
            tls: self.tls(who),
            ping_every: PING_EVERY,
        }
    }

    fn issue_all(&self) -> Result<()> {
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = subject("simulation");
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        fs::write(self.path("ca.crt"), authority.pem())?;
        let key = KeyPair::generate()?;
        fs::write(self.path("all.key"), key.serialize_pem())?;
        let issue = |file: &str, name: &str| {
            let mut params = CertificateParams::new(Vec::<String>::new())?;
            params.distinguished_name = subject(name);
            let loopback = SanType::IpAddress([127, 0, 0, 1].into());
            params.subject_alt_names = vec![loopback, SanType::DnsName(name.try_into()?)];
            let certificate = params.signed_by(&key, &authority)?;
            anyhow::Ok(fs::write(self.path(&format!("{file}.crt")), certificate.pem())?)
        };
        issue("nats", "default.nats.bosh-internal")?;
        issue("publisher", PUBLISHER)?;
        (0..self.agents).map(agent_id).try_for_each(|id| issue(&id, &agent_name(&id)))
    }

    /// Returns the agent whose instance gets another address in every version.
    pub(super) fn moving(&self) -> usize {
        self.agents / 2
    }

    /// Writes the inventory of a version, with another address for one instance.
    pub(super) fn change(&self, version: u8) -> Result<()> {
        let instances: Vec<_> = (0..self.agents)
            .map(|agent| {
                let address = address_of(agent, if agent == self.moving() { version } else { 0 });
                let id = agent_id(agent);
                json!({"id": id, "agent_id": id, "az": "z1", "networks": {"default": address}})
            })
            .collect();
        let groups = json!([{"name": "group", "instances": instances}]);
        let inventory = json!({"deployments": [{"name": "simulation", "instance_groups": groups}]});
        fs::write(self.path("inventory.new"), inventory.to_string())?;
        Ok(fs::rename(self.path("inventory.new"), self.path("inventory.json"))?)
    }

    /// Starts nats-server with this process's limit of open files; it ends when dropped.
    pub(super) async fn start_nats(&self) -> Result<Child> {
        let log = fs::File::create(self.path("nats.log"))?;
        let mut command = Command::new(&self.nats_server);
        command.arg("-c").arg(self.path("nats.conf")).stdout(log.try_clone()?).stderr(log).kill_on_drop(true);
        let child = command
            .spawn()
            .with_context(|| format!("{}: install nats-server", self.nats_server.display()))?;
        for _ in 0..1000 {
            if tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.is_ok() {
                return Ok(child);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        anyhow::bail!("nats-server does not listen: {}", fs::read_to_string(self.path("nats.log"))?)
    }

    /// Returns a command of bosh-dns-sync with the options of a participant.
    fn own(&self, command: &str, who: &str, log: &str) -> Result<Command> {
        let log = fs::File::create(self.path(log))?;
        let BusOptions { nats, tls, ping_every: _ } = self.bus(who);
        let mut own = Command::new(&self.sync);
        own.arg(command).arg("--nats").args(nats).arg("--tls-ca").arg(tls.ca);
        own.arg("--tls-certificate").arg(tls.certificate).arg("--tls-key").arg(tls.key);
        own.arg("--blobstore").arg(self.blobstore()).kill_on_drop(true);
        own.stdout(log.try_clone()?).stderr(log);
        Ok(own)
    }

    /// Returns the URL of the folder of blobs.
    pub(super) fn blobstore(&self) -> String {
        format!("file://{}", self.path("blobs").display())
    }

    pub(super) fn start_publisher(&self) -> Result<Child> {
        let mut command = self.own("publish", "publisher", "publisher.log")?;
        command.arg("--watch").arg("--inventory").arg(self.path("inventory.json"));
        // The time over which downloads are spread does not belong to the figures.
        command.arg("--bandwidth").arg(u64::MAX.to_string());
        Ok(command.arg("--state").arg(self.path("state")).spawn()?)
    }

    /// Starts an agent that writes a file.
    pub(super) fn start_agent(&self, id: &str) -> Result<Child> {
        let mut command = self.own("agent", id, &format!("{id}.log"))?;
        Ok(command.arg("--id").arg(id).arg("--records").arg(self.records(id)).spawn()?)
    }

    /// Returns the path of an agent's file.
    pub(super) fn records(&self, id: &str) -> PathBuf {
        self.path(&format!("{id}.json"))
    }

    /// Returns a description of the size of `count` whole blobs.
    pub(super) fn blobs(&self, count: u64) -> Result<String> {
        let bytes = fs::metadata(self.path("blobs").join(super::newest(self)?.blob))?.len();
        Ok(format!("whole blobs: {count} of {bytes} bytes, read from a folder and checked"))
    }

    /// Returns the CPU seconds that a process has used.
    pub(super) fn cpu(&self, process: &Child) -> Result<f64> {
        let id = process.id().context("the process has ended")?;
        Ok(CpuTime::of_process(id)?.0.as_secs_f64())
    }

    /// Returns a description of a process's memory and CPU time.
    pub(super) fn load(&self, process: &Child) -> Result<String> {
        let id = process.id().context("the process has ended")?;
        let peak = status_line(id, "VmHWM")?;
        Ok(format!("{:.2} s of CPU in total, at most {peak} of memory", self.cpu(process)?))
    }
}

/// Descriptors in addition to one per connection: files, pipes, sockets being closed.
const MORE_FILES: u64 = 1024;

/// Raises the limit of open files as far as possible, for this process and, by inheritance, for
/// nats-server: both have one descriptor per connection.
fn allow_open_files(agents: usize) -> Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    let most = hard.saturating_sub(MORE_FILES);
    ensure!(
        agents as u64 <= most,
        "{agents} connections need as many open files; the hard limit (ulimit -Hn) is {hard}: at most {most} agents"
    );
    Ok(())
}

/// Returns the address of an agent's instance.
pub(super) fn address_of(agent: usize, version: u8) -> Ipv4Addr {
    let [.., high, low] = (agent as u32).to_be_bytes();
    Ipv4Addr::new(10, version, high, low)
}

/// Returns the id of an agent, which has the length of a UUID as in a real fleet.
pub(super) fn agent_id(number: usize) -> String {
    let mixed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{:08x}-{:04x}-4000-8000-{:012x}", mixed >> 32, mixed & 0xffff, number)
}

/// `C=USA, O=Cloud Foundry, CN=...`.
fn subject(common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CountryName, "USA");
    name.push(DnType::OrganizationName, "Cloud Foundry");
    name.push(DnType::CommonName, common_name);
    name
}
