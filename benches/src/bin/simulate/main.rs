//! Measures a whole fleet on one machine: `cargo run --release --bin simulate -- 10000`.
//!
//! A real nats-server with generated permissions, one TLS connection with its own certificate for each
//! agent, the publisher as a process, and a sample of agents as processes with files. The other agents
//! are connections that read calls and reply: they do not apply patches, and when told to fetch the whole
//! blob they read it from the folder of blobs and check its digest. With `--resolver` the DNS server reads
//! one agent's file and is queried for the changed address.

mod director;
mod fleet;
mod ground;
mod resolver;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use clap::{Parser, ValueEnum};
use dns_sync::{
    nats_config::UsersBy,
    distributor::{
        registry::AgentRegistry,
        state::{Made, State},
    },
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};

use self::{
    fleet::Fleet,
    ground::{Ground, address_of},
    resolver::Resolver,
};

/// Number of changes whose time to the last agent is measured.
const CHANGES: u8 = 3;

/// Measure a whole fleet on this machine: real connections to one real nats-server
#[derive(Clone, Debug, Parser)]
#[command(name = "simulate")]
struct SimulateOptions {
    /// Number of agents; several sizes run one after the other
    #[arg(required = true, value_name = "AGENTS")]
    sizes: Vec<usize>,
    /// Number of agents that are processes and write files
    #[arg(long, value_name = "NUMBER", default_value_t = 8)]
    sample: usize,
    /// Path of bosh-dns-sync; default: beside this program
    #[arg(long, value_name = "FILE")]
    sync: Option<PathBuf>,
    /// Path of nats-server
    #[arg(long, value_name = "FILE", default_value = "nats-server")]
    nats_server: PathBuf,
    /// Part of a certificate by which nats-server identifies its user
    #[arg(long, value_enum, default_value_t = UsersBy::DnsName)]
    users_by: UsersBy,
    /// Path of bosh-dns-xdp, which is queried for the changed address on lo of this network namespace
    #[arg(long, value_name = "FILE")]
    resolver: Option<PathBuf>,
    /// Time limit for each step, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 240)]
    limit: u64,
    /// Skip the director's method
    #[arg(long)]
    no_peer: bool,
    /// Measure a single size in this process, and write its figures to a file
    #[arg(long, value_name = "FILE", hide = true)]
    figures: Option<PathBuf>,
}

/// The figures that are compared between sizes, in seconds.
#[derive(Debug, Serialize, Deserialize)]
struct Figures {
    /// Number of agents in the fleet.
    agents: usize,
    /// Time to distribute a version as a whole blob.
    blob: f64,
    /// Times of changes by patch, to the last agent.
    patch: Vec<f64>,
    /// The same changes, to the DNS server's answer.
    answer: Vec<f64>,
    /// Whether the interface gave the answers.
    by_interface: bool,
    /// Time until all agents reconnected after nats-server was killed.
    storm: f64,
    /// Time of the director's method.
    peer: Option<f64>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = SimulateOptions::parse();
    if let (Some(file), &[agents]) = (&options.figures, &options.sizes[..]) {
        ensure!(agents > 0, "at least one agent is needed");
        println!("\n{agents} agents\n\n| step | seconds | more |\n|---|---|---|");
        // Dropping the future ends the processes.
        let figures = tokio::select! {
            figures = measure(&options, agents) => figures?,
            () = dns_kit::signals::ended() => bail!("told to end"),
        };
        return Ok(std::fs::write(file, serde_json::to_vec(&figures)?)?);
    }
    let mut all = Vec::new();
    for &agents in &options.sizes {
        all.push(in_separate_process(&options, agents).await?);
    }
    println!("\nSeconds by size of the fleet:\n");
    println!(
        "| agents | change to last agent, by patch | change to the DNS server's answer | by whole blob | \
         all connected after a crash of nats-server | peer: the director's method, emulated |"
    );
    println!("|---|---|---|---|---|---|");
    for Figures { agents, blob, patch, answer, by_interface, storm, peer } in all {
        let answer = match (answer.is_empty(), by_interface) {
            (true, _) => "not asked".to_owned(),
            (false, true) => format!("{} (interface)", range(&answer)),
            (false, false) => format!("{} (userspace)", range(&answer)),
        };
        let peer = peer.map_or("left out".to_owned(), |peer| format!("{peer:.2}"));
        println!("| {agents} | {} | {answer} | {blob:.2} | {storm:.2} | {peer} |", range(&patch));
    }
    Ok(())
}

/// Measures one size in a separate process, so that sizes do not influence each other.
///
/// The process does not see the machine's certification authorities: async-nats 0.51 reads all of them for every
/// connection, even with a TLS configuration that needs none. In a fleet these 25 ms of CPU for each agent are
/// spread over its machines.
async fn in_separate_process(options: &SimulateOptions, agents: usize) -> anyhow::Result<Figures> {
    let SimulateOptions {
        sizes: _,
        sample,
        sync,
        nats_server,
        users_by,
        resolver,
        limit,
        no_peer,
        figures: _,
    } = options;
    let file = tempfile::NamedTempFile::new()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(agents.to_string()).arg("--figures").arg(file.path());
    command.arg("--sample").arg(sample.to_string()).arg("--limit").arg(limit.to_string());
    command.arg("--nats-server").arg(nats_server);
    if let Some(by) = users_by.to_possible_value() {
        command.arg("--users-by").arg(by.get_name());
    }
    if let Some(sync) = sync {
        command.arg("--sync").arg(sync);
    }
    if let Some(resolver) = resolver {
        command.arg("--resolver").arg(resolver);
    }
    if *no_peer {
        command.arg("--no-peer");
    }
    let mut process = command.env("SSL_CERT_FILE", "/dev/null").env_remove("SSL_CERT_DIR").spawn()?;
    let status = tokio::select! {
        status = process.wait() => status?,
        () = dns_kit::signals::ended() => {
            if let Some(id) = process.id() {
                kill(Pid::from_raw(id.cast_signed()), Signal::SIGTERM)?;
            }
            process.wait().await?
        }
    };
    ensure!(status.success(), "{agents} agents: {status}");
    Ok(serde_json::from_slice(&std::fs::read(file.path())?)?)
}

/// Measures a fleet of one size.
async fn measure(options: &SimulateOptions, agents: usize) -> anyhow::Result<Figures> {
    let limit = Duration::from_secs(options.limit);
    let ground = Ground::new(options, agents)?;
    let mut nats = ground.start_nats().await?;
    let begun = Instant::now();
    let fleet = Fleet::connect(&ground, options.sample).await?;
    until("all to connect", limit, || fleet.all_connected()).await?;
    row("all agents connect, 256 at a time", begun, &format!("nats-server: {}", ground.load(&nats)?));

    let publisher = ground.start_publisher()?;
    let begun = Instant::now();
    until("the first version", limit, || fleet.all_have(1)).await?;
    let blob = row("version to last agent, by whole blob", begun, &ground.blobs(fleet.fetched())?);
    until("the publisher to notice", limit, || synced(&ground, 1)).await?;

    let resolver = match &options.resolver {
        Some(program) => Some(Resolver::start(&ground, program).await?),
        None => None,
    };
    let (mut patch, mut answer) = (Vec::new(), Vec::new());
    for version in 2..2 + CHANGES {
        let took = change(&ground, &fleet, &publisher, resolver.as_ref(), version, limit).await?;
        patch.push(took.0);
        answer.extend(took.1);
    }
    let by_interface = match resolver {
        Some(resolver) => resolver.stop().await?,
        None => false,
    };

    nats.kill().await?;
    fleet.forget_connections();
    let begun = Instant::now();
    nats = ground.start_nats().await?;
    until("all to connect again", limit, || fleet.all_connected()).await?;
    let more = format!("nats-server: {}", ground.load(&nats)?);
    let storm = row("all connected again after nats-server was killed", begun, &more);
    change(&ground, &fleet, &publisher, None, 2 + CHANGES, limit).await?;
    println!("| publisher in all | | {} |", ground.load(&publisher)?);
    drop(publisher);

    let peer = match options.no_peer {
        true => None,
        false => {
            let begun = Instant::now();
            let told = director::announce(&ground, &fleet, limit).await?;
            Some(row("peer: the director's method, emulated", begun, &told))
        }
    };
    Ok(Figures { agents, blob, patch, answer, by_interface, storm, peer })
}

/// Changes an address: seconds to the last agent, and to the DNS server's answer.
async fn change(
    ground: &Ground,
    fleet: &Fleet,
    publisher: &Child,
    resolver: Option<&Resolver>,
    version: u8,
    limit: Duration,
) -> anyhow::Result<(f64, Option<f64>)> {
    fleet.fetched();
    let before = ground.cpu(publisher)?;
    let asking = resolver.map(|resolver| resolver.when(address_of(ground.moving(), version), limit));
    let begun = Instant::now();
    ground.change(version)?;
    until("the change", limit, || fleet.all_have(version.into())).await?;
    let blobs = fleet.fetched();
    let took = row("change to last agent, by patch", begun, &format!("whole blobs: {blobs}"));
    let answered = match asking {
        Some(asking) => {
            let at = asking.await??;
            let seconds = at.duration_since(begun).as_secs_f64();
            println!("| change to the DNS server's answer | {seconds:.3} | |");
            Some(seconds)
        }
        None => None,
    };
    until("the publisher to notice", limit, || synced(ground, version.into())).await?;
    let bytes = book(ground).map_or(0, |book| book.bytes_sent);
    let cpu = ground.cpu(publisher)? - before;
    println!(
        "| publisher for it | {cpu:.2} of CPU | bytes of messages: {bytes}, {} an agent |",
        bytes / ground.agents() as u64
    );
    Ok((took, answered))
}

/// Prints a row; returns the seconds.
fn row(step: &str, begun: Instant, more: &str) -> f64 {
    let seconds = begun.elapsed().as_secs_f64();
    println!("| {step} | {seconds:.2} | {more} |");
    seconds
}

/// Formats the smallest and the largest figure.
fn range(figures: &[f64]) -> String {
    let least = figures.iter().copied().fold(f64::INFINITY, f64::min);
    let most = figures.iter().copied().fold(0.0, f64::max);
    format!("{least:.2}–{most:.2}")
}

/// Polls until `ready` returns true, or fails after `limit`.
async fn until(what: &str, limit: Duration, ready: impl Fn() -> bool) -> anyhow::Result<()> {
    let begun = Instant::now();
    while !ready() {
        ensure!(begun.elapsed() < limit, "waited {limit:?} for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Reads the book that the publisher wrote last.
fn book(ground: &Ground) -> Option<AgentRegistry> {
    serde_json::from_slice(&std::fs::read(ground.path("state/agents.json")).ok()?).ok()
}

/// Returns whether the publisher knows that all agents hold a version.
fn synced(ground: &Ground, version: u64) -> bool {
    book(ground).is_some_and(|book| {
        let count = book.count();
        book.version == version && count.agents > 0 && count.synced == count.agents
    })
}

/// Returns the newest version.
fn newest(ground: &Ground) -> anyhow::Result<Made> {
    let state: State = serde_json::from_slice(&std::fs::read(ground.path("state/state.json"))?)?;
    state.versions.last().cloned().context("no version yet")
}
