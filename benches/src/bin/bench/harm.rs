//! What the fast path costs its neighbours: bulk TCP over the same interface.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    lab::{Lab, SERVER_ADDRESS},
    report::{Bar, Data, Figure, Rounds},
};
use serde_json::Value;
use whole_system_tests::process::{Kept, capture, wait_until};

use crate::{Plan, subject::Subject};

/// Port of iperf3.
const PORT: &str = "5201";

/// Throughput over veth with nothing attached, and with each mode.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(1_000)?;
    let modes = [None, Some("auto"), Some("tc"), Some("generic")];
    let mut values = modes.map(|mode| (mode, Rounds::default()));
    // It varies more than what is to be seen.
    let rounds = if plan.quick { 1 } else { plan.rounds * 2 };
    for _ in 0..rounds {
        for (mode, rounds) in &mut values {
            let lab = Lab::plain()?;
            let _running = mode.map(|mode| Subject::Ours(mode).start(&lab, &foundation)).transpose()?;
            rounds.0.push(throughput(&lab, plan)?);
        }
    }
    let bars = values.into_iter().map(|(mode, value)| {
        let label = mode.map_or("nothing attached".to_owned(), |mode| format!("ours, {mode}"));
        println!("{label:<20} {:>7.2} Gbit/s", value.median());
        Bar { label, value, ours: mode.is_some() }
    });
    Ok(vec![Figure {
        title: "Bulk TCP over the same veth".to_owned(),
        about: "iperf3, one stream, no DNS load: what it costs that every packet passes the program."
            .to_owned(),
        unit: "Gbit/s".to_owned(),
        data: Data::Bars(bars.collect()),
    }])
}

/// Throughput of one TCP stream from client to server in Gbit/s.
fn throughput(lab: &Lab, plan: &Plan) -> Result<f64> {
    let mut command = lab.server.command("iperf3")?;
    command.args(["--server", "--one-off", "--port", PORT]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = Kept::spawn(&mut command)?;
    let listens = || {
        let sockets = Command::new("ip").args(["netns", "exec", lab.server.name(), "ss", "-Hltn"]).output();
        sockets.is_ok_and(|sockets| String::from_utf8_lossy(&sockets.stdout).contains(PORT))
    };
    wait_until("iperf3", std::time::Duration::from_secs(5), listens)?;
    let seconds = plan.duration.as_secs().max(1).to_string();
    let mut client = lab.client.command("iperf3")?;
    client.args(["--client", &SERVER_ADDRESS.to_string(), "--port", PORT, "--time", &seconds, "--json"]);
    let report: Value = serde_json::from_str(&capture(&mut client)?)?;
    let rate = report["end"]["sum_received"]["bits_per_second"].as_f64().context("iperf3's report")?;
    server.wait(std::time::Duration::from_secs(5))?;
    Ok(rate / 1e9)
}
