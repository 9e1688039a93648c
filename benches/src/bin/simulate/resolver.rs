//! The DNS server on one agent's file, to measure when it answers with a changed address.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hickory_proto::rr::RecordType;
use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use tokio::{
    process::{Child, Command},
    task::JoinHandle,
};
use whole_system_tests::{client, metrics::Metrics};

use super::ground::{Ground, address_of, agent_id};

/// Longest wait for the first answer, and for the end of the process.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Resolver {
    process: Option<Child>,
    address: SocketAddr,
    /// Address of the metrics endpoint.
    metrics: SocketAddr,
    /// Mount point of a separate BPF file system for its pinned programs.
    bpffs: PathBuf,
    /// The query for the instance whose address changes.
    query: Vec<u8>,
}

impl Resolver {
    /// Starts the server on the first agent's file and waits until it answers, and, if permitted,
    /// until the interface answers.
    pub(super) async fn start(ground: &Ground, program: &Path) -> Result<Self> {
        let [address, metrics] = [free_port()?, free_port()?];
        let bpffs = ground.path("bpf");
        let none = |name: &str| ground.path("none").join(name);
        let config = json!({
            "address": address.ip(), "port": address.port(),
            "records_file": ground.records(&agent_id(0)),
            "alias_files_glob": none("aliases/*.json"), "handlers_files_glob": none("handlers/*.json"),
            "addresses_files_glob": none("addresses/*.json"), "jobs_dir": none("jobs"),
            "disable_recursors": true, "health": {"enabled": false},
            "metrics": {"enabled": true, "address": metrics.ip(), "port": metrics.port()},
            "xdp": {"interfaces": ["lo"], "bpffs": bpffs},
        });
        fs::write(ground.path("resolver.json"), config.to_string())?;
        let log = fs::File::create(ground.path("resolver.log"))?;
        let process = Command::new(program)
            .arg("--config")
            .arg(ground.path("resolver.json"))
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| program.display().to_string())?;
        let name = format!("{}.group.default.simulation.bosh", agent_id(ground.moving()));
        let query = client::query(&name, RecordType::A, None)?.to_vec()?;
        let resolver = Self { process: Some(process), address, metrics, bpffs, query };
        let first = resolver.when(address_of(ground.moving(), 1), PATIENCE).await?;
        first.with_context(|| fs::read_to_string(ground.path("resolver.log")).unwrap_or_default())?;
        let begun = Instant::now();
        // Programs are loaded in the background.
        while resolver.by_interface()? == 0 && begun.elapsed() < Duration::from_secs(10) {
            resolver.when(address_of(ground.moving(), 1), PATIENCE).await??;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(resolver)
    }

    /// Queries until the answer is `address`; returns the time of that answer.
    pub(super) fn when(&self, address: Ipv4Addr, limit: Duration) -> JoinHandle<Result<Instant>> {
        let (server, query) = (self.address, self.query.clone());
        tokio::task::spawn_blocking(move || {
            let begun = Instant::now();
            loop {
                ensure!(begun.elapsed() < limit, "the DNS server does not answer {address}");
                // Without EDNS the last four bytes of the reply are the address.
                let reply = client::ask_raw(server, &query, Duration::from_millis(100));
                if reply.is_ok_and(|reply| reply.ends_with(&address.octets())) {
                    return Ok(Instant::now());
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        })
    }

    /// Stops the server; returns whether the interface answered nearly all queries.
    pub(super) async fn stop(mut self) -> Result<bool> {
        let before = self.by_interface()?;
        client::ask_raw(self.address, &self.query, Duration::from_secs(1))?;
        let by_interface = self.by_interface()? > before;
        let mut process = self.process.take().context("it runs")?;
        if let Some(id) = process.id() {
            kill(Pid::from_raw(id.cast_signed()), Signal::SIGTERM)?;
        }
        tokio::time::timeout(PATIENCE, process.wait()).await.context("the DNS server does not end")??;
        Ok(by_interface)
    }

    /// Returns the number of replies from the interface so far.
    fn by_interface(&self) -> Result<u64> {
        Ok(Metrics::at(self.metrics)?.fast_path_replies())
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        // The process still runs only if a step failed; a clean stop detaches its programs.
        if let Some(id) = self.process.take().and_then(|process| process.id()) {
            let _ = kill(Pid::from_raw(id.cast_signed()), Signal::SIGTERM);
        }
        // Nothing is mounted if the process may not load programs.
        let _ = umount2(&self.bpffs, MntFlags::MNT_DETACH);
    }
}

/// Returns a free loopback port.
fn free_port() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}
