//! Executes the recipes for one machine in docs/load-testing.md, with a real server behind a veth pair.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot prepare its input has failed"
)]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use test_lab::{
    namespace::Namespace,
    process::{Kept, capture, wait_until},
    server::{self, Server},
};
use whole_system_tests::requirements;

const PROGRAM: &str = env!("CARGO_BIN_EXE_bosh-dns-xdp-load");

/// The server's address in the recipes.
const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2)), 53);

const PAGE: &str = include_str!("../../../docs/load-testing.md");

/// Makes recipes short and light, so that they also pass on a busy machine.
const LIGHTER: [(&str, &str); 5] = [
    ("bosh-dns-xdp-load run", "bosh-dns-xdp-load run --seconds 2"),
    ("--rate 20000", "--rate 1000"),
    ("/var/lib/bosh-dns-xdp/records.json", "records.json"),
    ("-Q 20000", "-Q 500"),
    (" 10 -Q", " 1 -Q"),
];

/// Returns the command blocks of a section of the page.
fn recipes(section: &str) -> Vec<String> {
    let (_, text) = PAGE.split_once(&format!("\n## {section}\n")).unwrap();
    let text = text.split("\n## ").next().unwrap();
    let mut blocks = vec![String::new()];
    for line in text.lines() {
        match line.strip_prefix("    ") {
            Some(command) => *blocks.last_mut().unwrap() += &format!("{command}\n"),
            None if blocks.last().unwrap().is_empty() => {}
            None => blocks.push(String::new()),
        }
    }
    blocks.retain(|block| !block.is_empty());
    for (from, to) in LIGHTER {
        blocks
            .iter_mut()
            .for_each(|block| *block = block.replace(from, to));
    }
    blocks
}

/// The machine of the recipes for one machine: a server in a namespace with a private folder `/run/netns`, in which
/// the recipes create the client's.
struct Lab {
    server: Option<Server>,
    /// Keeps the mounts; ended first.
    holder: Kept,
    machine: Namespace,
    /// Folder of the records and query files.
    place: PathBuf,
}

impl Lab {
    /// Executes the recipes up to the set-up, and starts the server; `None` without the requirements.
    fn start(label: &str) -> Result<Option<Self>> {
        let Some((mut lab, folder)) = Self::without_server(label)? else {
            return Ok(None);
        };
        let extra = json!({"xdp": {"mode": "off"}});
        lab.server = Some(Server::start(Some(&lab.machine), folder, SERVER, &extra)?);
        Ok(Some(lab))
    }

    /// Executes the recipes up to the set-up; returns the folder of the records too.
    fn without_server(label: &str) -> Result<Option<(Self, TempDir)>> {
        if !requirements::namespaces() || !requirements::bpf() {
            return Ok(None);
        }
        let machine = Namespace::new(label)?;
        let mut unshare = machine.command("unshare")?;
        let script = "mount -t tmpfs tmpfs /run && echo ready && exec sleep infinity";
        unshare.args(["--mount", "--propagation=private", "sh", "-c", script]);
        let mut child = unshare
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut said = String::new();
        BufReader::new(child.stdout.take().context("no standard output")?).read_line(&mut said)?;
        let holder = Kept::from(child);
        ensure!(said == "ready\n", "the mounts could not be set up");
        let folder = server::folder(&server::records_of_groups(&[2, 3, 5]), None)?;
        let place = folder.path().to_owned();
        let in_place = |recipe: &str| shell(&machine, &holder, &place, recipe);
        let set_up = recipes("One machine").into_iter().next();
        for recipe in recipes("Queries").into_iter().chain(set_up) {
            in_place(&recipe)?;
        }
        machine.wait_for_link("s0")?;
        let lab = Self {
            server: None,
            holder,
            machine,
            place,
        };
        Ok(Some((lab, folder)))
    }

    /// Runs the load with these arguments in the client, and returns what it printed and whether it succeeded.
    fn load(&self, arguments: &str) -> Result<(String, bool)> {
        let run = "ip netns exec client bosh-dns-xdp-load run --interface c0 --server 10.9.0.2";
        let commands = format!("{run} {arguments} 2>&1 && echo succeeded || true");
        let said = shell(&self.machine, &self.holder, &self.place, &commands)?;
        let succeeded = said.ends_with("succeeded\n");
        Ok((said, succeeded))
    }

    /// Runs the recipe that contains `text`, and returns its output.
    fn run(&self, section: &str, text: &str) -> Result<String> {
        let mut all = recipes(section).into_iter();
        let recipe = all
            .find(|recipe| recipe.contains(text))
            .context("no such recipe")?;
        shell(&self.machine, &self.holder, &self.place, &recipe)
            .with_context(|| self.server.as_ref().map(Server::log).unwrap_or_default())
    }
}

/// Runs commands in the machine, in the folder `place`.
fn shell(machine: &Namespace, holder: &Kept, place: &Path, commands: &str) -> Result<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    let programs = Path::new(PROGRAM)
        .parent()
        .context("a program has a folder")?;
    let mut command = machine.command("nsenter")?;
    command
        .arg("--target")
        .arg(holder.pid().to_string())
        .args(["--mount", "--", "bash", "-euo", "pipefail"]);
    // nsenter changes to the root of the mount namespace.
    command.args(["-c", &format!("cd {}\n{commands}", place.display())]);
    capture(command.env("PATH", format!("{}:{path}", programs.display())))
}

#[test]
fn queries_match_records() -> Result<()> {
    let Some(lab) = Lab::start("loadqueries")? else {
        return Ok(());
    };
    let text = fs::read_to_string(lab.place.join("queries"))?;
    ensure!(
        text.lines().any(|line| line == "q-s0.q-g2.bosh. A"),
        "{text}"
    );
    ensure!(
        text.lines().any(|line| line == "q-s0.q-g2.bosh. AAAA"),
        "{text}"
    );
    let few = fs::read_to_string(lab.place.join("few-queries"))?;
    ensure!(
        few.lines().all(|line| line.ends_with(" A")) && few.lines().count() > 0,
        "{few}"
    );
    Ok(())
}

#[test]
fn kernel_load_is_answered() -> Result<()> {
    let Some(lab) = Lab::start("loadrate")? else {
        return Ok(());
    };
    // At a rate, as a table; then saturating, as JSON.
    let said = lab.run("One machine", "--json")?;
    let (table, json) = said.split_once('{').context(said.clone())?;
    let line = |name: &str| {
        let line = table
            .lines()
            .find(|line| line.starts_with(name))
            .with_context(|| said.clone())?;
        Ok::<_, anyhow::Error>(
            line.split_whitespace()
                .skip(1)
                .map(str::to_owned)
                .collect::<Vec<_>>(),
        )
    };
    let figure = |name: &str| Ok::<_, anyhow::Error>(line(name)?[0].parse::<u64>()?);
    // A busy machine skips queries, but does not send others.
    let due = figure("queries")? + figure("skipped")?;
    ensure!((1500..=2200).contains(&due), "{said}");
    ensure!(
        figure("replies")? > 0 && figure("replies")? <= figure("queries")?,
        "{said}"
    );
    ensure!(
        figure("errors")? == 0 && line("latency")?[0] == "p50",
        "{said}"
    );
    // Saturation finds the limit of the server, so the queries exceed those of any rate that it can answer.
    let report: Value = serde_json::from_str(&format!("{{{json}"))?;
    ensure!(report["queries"].as_u64() > Some(2200), "{report}");
    ensure!(report["replies"].as_u64() > Some(0), "{report}");
    let latency = |key: &str| {
        report["latency"][key]
            .as_f64()
            .with_context(|| report.to_string())
    };
    ensure!(
        latency("p50")? > 0.0 && latency("p50")? <= latency("p99")?,
        "{report}"
    );
    Ok(())
}

#[test]
fn dnsperf_reads_generated_queries() -> Result<()> {
    let Some(lab) = Lab::start("loadperf")? else {
        return Ok(());
    };
    let report = lab.run("One machine", "dnsperf")?;
    ensure!(
        report.contains("NOERROR") && !report.contains("SERVFAIL"),
        "{report}"
    );
    Ok(())
}

#[test]
fn kxdpgun_reads_generated_queries() -> Result<()> {
    if !requirements::program("kxdpgun", "-V") {
        return Ok(());
    }
    let Some(lab) = Lab::start("loadgun")? else {
        return Ok(());
    };
    let report = lab.run("One machine", "kxdpgun")?;
    ensure!(
        report.contains("NOERROR") && !report.contains("SERVFAIL"),
        "{report}"
    );
    Ok(())
}

/// kxdpgun leaves its XDP program on the interface: the recipe removes it, so the next recipe can attach its own.
#[test]
fn recipes_follow_one_another() -> Result<()> {
    if !requirements::program("kxdpgun", "-V") {
        return Ok(());
    }
    let Some(lab) = Lab::start("loadnext")? else {
        return Ok(());
    };
    lab.run("One machine", "kxdpgun")?;
    let said = lab.run("CPU time per query", "busy()")?;
    ensure!(said.contains("µs per query"), "{said}");
    Ok(())
}

#[test]
fn program_in_the_way_is_named() -> Result<()> {
    let Some(lab) = Lab::start("loadbusy")? else {
        return Ok(());
    };
    let mut first = lab.machine.command("nsenter")?;
    let holder = lab.holder.pid().to_string();
    first.args([
        "--target", &holder, "--mount", "--", "ip", "netns", "exec", "client", PROGRAM,
    ]);
    first.args([
        "run",
        "--interface",
        "c0",
        "--server",
        "10.9.0.2",
        "--rate",
        "10",
        "--seconds",
        "3600",
    ]);
    first.arg("--queries").arg(lab.place.join("queries"));
    let _first = Kept::spawn(&mut first)?;
    let shown = || {
        let show = "ip -n client link show c0";
        shell(&lab.machine, &lab.holder, &lab.place, show).unwrap_or_default()
    };
    wait_until("the program is attached", Duration::from_secs(60), || {
        shown().contains("prog/xdp")
    })?;
    let (said, succeeded) = lab.load("--queries queries")?;
    ensure!(!succeeded, "{said}");
    ensure!(
        said.contains("(count)") && said.contains("`ip link set dev c0 xdp off`"),
        "{said}"
    );
    Ok(())
}

/// A server that answers every query with an RCODE until it has answered so many, and counts what it receives.
fn answers(lab: &Lab, code: u8, replies: u64) -> Result<JoinHandle<u64>> {
    let socket = lab.machine.run(|| UdpSocket::bind(SERVER))??;
    Ok(std::thread::spawn(move || {
        let mut received = 0;
        let mut message = [0; 512];
        // The test ends the server with an empty message.
        while let Ok((length @ 1.., from)) = socket.recv_from(&mut message) {
            received += 1;
            message[2] |= 0x80;
            message[3] = code;
            if received <= replies {
                let _sent = socket.send_to(&message[..length], from);
            }
        }
        received
    }))
}

/// Ends a server of [`answers`], and returns the number of queries that it received.
fn received(lab: &Lab, server: JoinHandle<u64>) -> Result<u64> {
    lab.machine.run(|| {
        let socket = UdpSocket::bind((SERVER.ip(), 0))?;
        socket.send_to(&[], SERVER)
    })??;
    server
        .join()
        .map_err(|_| anyhow::anyhow!("the server panicked"))
}

#[test]
fn refusing_server_gets_no_load() -> Result<()> {
    let Some((lab, _folder)) = Lab::without_server("loadrefused")? else {
        return Ok(());
    };
    let server = answers(&lab, 5, u64::MAX)?;
    let (said, succeeded) = lab.load("--queries queries --rate 1000")?;
    ensure!(!succeeded && said.contains("--expect"), "{said}");
    ensure!(received(&lab, server)? == 1, "{said}");
    // A load of refusals is possible where it is wanted.
    let server = answers(&lab, 5, u64::MAX)?;
    let (said, succeeded) =
        lab.load("--queries queries --rate 1000 --seconds 1 --expect refused")?;
    ensure!(succeeded, "{said}");
    ensure!(received(&lab, server)? > 1, "{said}");
    Ok(())
}

#[test]
fn load_ends_when_replies_stop() -> Result<()> {
    let Some((lab, _folder)) = Lab::without_server("loadsilent")? else {
        return Ok(());
    };
    let server = answers(&lab, 0, 3)?;
    // An hour, which the test would not survive.
    let (said, succeeded) = lab.load("--queries queries --rate 1000 --seconds 3600")?;
    ensure!(!succeeded && said.contains("stopped answering"), "{said}");
    received(&lab, server)?;
    Ok(())
}

/// Clients that randomize letters (0x20) are measured with what they send.
#[test]
fn letters_are_sent_as_written() -> Result<()> {
    let Some((lab, _folder)) = Lab::without_server("loadletters")? else {
        return Ok(());
    };
    fs::write(lab.place.join("letters"), "Q-S0.q-G2.bOsH. A\n")?;
    let socket = lab.machine.run(|| UdpSocket::bind(SERVER))??;
    let server = std::thread::spawn(move || -> Result<Vec<u8>> {
        let mut message = [0; 512];
        loop {
            let (length, from) = socket.recv_from(&mut message)?;
            // The load's source ports are below those of probes.
            if from.port() < 2064 {
                return Ok(message[..length].to_vec());
            }
            message[2] |= 0x80;
            socket.send_to(&message[..length], from)?;
        }
    });
    lab.load("--queries letters --rate 100 --seconds 3600")?;
    let query = server.join().unwrap()?;
    let name = b"\x04Q-S0\x04q-G2\x04bOsH\0";
    ensure!(
        query.get(12..).is_some_and(|rest| rest.starts_with(name)),
        "{query:x?}"
    );
    Ok(())
}

#[test]
fn cpu_time_includes_softirqs() -> Result<()> {
    let Some(lab) = Lab::start("loadcpu")? else {
        return Ok(());
    };
    let said = lab.run("CPU time per query", "busy()")?;
    let figures: Vec<f64> = said
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    // The second one may be 0 where the kernel samples time at ticks.
    ensure!(
        figures.len() == 2 && figures[0] > 0.0 && figures[1] <= figures[0],
        "{said}"
    );
    Ok(())
}

#[test]
fn errors_name_their_remedy() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("queries");
    fs::write(&file, "a.bosh A\nb.bosh\n")?;
    let run = |arguments: &[&str]| -> Result<String> {
        let mut command = Command::new(PROGRAM);
        let output = command.args(arguments).stdin(Stdio::null()).output()?;
        ensure!(!output.status.success(), "{arguments:?}");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let queries = file.to_str().context("a path")?;
    let problem = run(&[
        "run",
        "--server",
        "127.0.0.1",
        "--interface",
        "lo",
        "--queries",
        queries,
    ])?;
    ensure!(
        problem.contains("line 2") && problem.contains("no type"),
        "{problem}"
    );
    fs::write(&file, "a.bosh A\n")?;
    let public = [
        "run",
        "--server",
        "192.0.2.1",
        "--interface",
        "lo",
        "--queries",
        queries,
    ];
    let problem = run(&public)?;
    ensure!(
        problem.contains("not on the link of lo") && problem.contains("--public"),
        "{problem}"
    );
    let problem = run(&["run", "--server", "127.0.0.1", "--interface", "lo"])?;
    ensure!(problem.contains("--queries"), "{problem}");
    Ok(())
}
