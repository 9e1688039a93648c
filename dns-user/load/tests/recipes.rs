//! The one-machine recipes of docs/load-testing.md, with a real server behind a veth pair.

#![expect(clippy::unwrap_used, reason = "a test that cannot prepare its input has failed")]

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use test_lab::{
    namespace::{End, Namespace, join},
    process::capture,
    server::{self, Server},
};
use whole_system_tests::requirements;

const PROGRAM: &str = env!("CARGO_BIN_EXE_bosh-dns-xdp-load");

/// A server in one namespace, a client in another one, and a query file.
struct Lab {
    server: Server,
    client: Namespace,
    _machine: Namespace,
    queries: PathBuf,
}

impl Lab {
    fn start(label: &str) -> Result<Option<Self>> {
        if !requirements::namespaces() || !requirements::bpf() {
            return Ok(None);
        }
        let (client, machine) =
            (Namespace::new(&format!("{label}c"))?, Namespace::new(&format!("{label}s"))?);
        join(
            End { namespace: &client, interface: "c0", addresses: &["10.9.0.1/24"] },
            End { namespace: &machine, interface: "s0", addresses: &["10.9.0.2/24"] },
        )?;
        // As in the recipe: a veth receives XDP frames if its end has NAPI.
        capture(machine.command("ethtool")?.args(["-K", "s0", "gro", "on"]))?;
        let folder = server::folder(&server::records_of_groups(&[2, 3, 5]), None)?;
        let records = folder.path().join("records.json");
        let queries = folder.path().join("queries");
        let written = Command::new(PROGRAM).arg("querygen").arg("--records").arg(&records).output()?;
        ensure!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
        fs::write(&queries, written.stdout)?;
        let address = "10.9.0.2:53".parse().unwrap();
        let server = Server::start(Some(&machine), folder, address, &json!({"xdp": {"mode": "off"}}))?;
        Ok(Some(Self { server, client, _machine: machine, queries }))
    }

    fn load(&self, arguments: &[&str]) -> Result<Value> {
        let mut command = self.client.command(PROGRAM)?;
        command.args(["run", "--server", "10.9.0.2", "--interface", "c0", "--seconds", "2", "--json"]);
        command.arg("--queries").arg(&self.queries).args(arguments);
        let text = capture(&mut command).with_context(|| self.server.log())?;
        serde_json::from_str(&text).context(text)
    }
}

#[test]
fn kernel_load_is_answered() -> Result<()> {
    let Some(lab) = Lab::start("loadrate")? else { return Ok(()) };
    let report = lab.load(&["--rate", "1000", "--edns", "1232"])?;
    let figure = |key: &str| report[key].as_f64().with_context(|| report.to_string());
    // A busy machine skips queries, but does not send others.
    let due = figure("queries")? + figure("skipped")?;
    ensure!((1500.0..=2200.0).contains(&due), "{report}");
    ensure!(figure("replies")? > 0.0 && figure("replies")? <= figure("queries")?, "{report}");
    ensure!(figure("errors")? == 0.0, "{report}");
    let latency = |key: &str| report["latency"][key].as_f64().with_context(|| report.to_string());
    ensure!(latency("p50")? > 0.0 && latency("p50")? <= latency("p99")?, "{report}");
    // Saturation finds the limit of the server, so the queries exceed those of any rate that it can answer.
    let report = lab.load(&[])?;
    ensure!(report["queries"].as_u64() > Some(2200), "{report}");
    ensure!(report["replies"].as_u64() > Some(0), "{report}");
    Ok(())
}

#[test]
fn dnsperf_reads_generated_queries() -> Result<()> {
    let Some(lab) = Lab::start("loadperf")? else { return Ok(()) };
    let text = fs::read_to_string(&lab.queries)?;
    ensure!(text.lines().any(|line| line == "q-s0.q-g2.bosh. A"), "{text}");
    ensure!(text.lines().any(|line| line == "q-s0.q-g2.bosh. AAAA"), "{text}");
    let mut dnsperf = lab.client.command("dnsperf")?;
    dnsperf.args(["-s", "10.9.0.2", "-l", "1", "-Q", "500", "-d"]).arg(&lab.queries);
    let report = capture(&mut dnsperf)?;
    ensure!(report.contains("NOERROR") && !report.contains("SERVFAIL"), "{report}");
    Ok(())
}

#[test]
fn kxdpgun_reads_generated_queries() -> Result<()> {
    if !requirements::program("kxdpgun", "-V") {
        return Ok(());
    }
    let Some(lab) = Lab::start("loadgun")? else { return Ok(()) };
    let mut kxdpgun = lab.client.command("kxdpgun")?;
    kxdpgun.args(["-t", "1", "-Q", "500", "-I", "c0", "-i"]).arg(&lab.queries).arg("10.9.0.2");
    let report = capture(&mut kxdpgun)?;
    ensure!(report.contains("NOERROR") && !report.contains("SERVFAIL"), "{report}");
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
    let problem = run(&["run", "--server", "127.0.0.1", "--interface", "lo", "--queries", queries])?;
    ensure!(problem.contains("line 2") && problem.contains("no type"), "{problem}");
    let problem = run(&["run", "--server", "127.0.0.1", "--interface", "lo"])?;
    ensure!(problem.contains("--queries"), "{problem}");
    Ok(())
}
