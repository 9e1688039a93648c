//! The queries of gRPC applications: A, AAAA, SRV, TXT and HTTPS at equal rates.

use std::{fs, time::Duration};

use anyhow::Result;
use bosh_dns_xdp_benches::{dnsperf, foundation::Foundation, lab::Lab};
use serde_json::json;
use tempfile::TempDir;
use whole_system_tests::{
    metrics::wait_for_fast_path,
    server::{self, Server},
};

use crate::{
    Plan,
    forwarding::{replies, share_of_interface, within},
    part::{Queries, Table},
    subject::{LATENCY_RATE, Subject, start_configured},
};

/// Targets of the applications.
pub(crate) const TARGETS: [&str; 2] = ["groups of the fleet", "services of Consul"];

/// Instances of the services.
const SIZES: [u8; 3] = [3, 20, 100];

/// Duration of the warm-up: replies of other types are published after their second query, and some
/// draws follow a second later.
const WARM_UP: Duration = Duration::from_millis(1500);

/// Measures CPU time, share of the interface and latency.
pub(crate) fn measure(plan: &Plan, subject: &Subject, table: &mut Table) -> Result<()> {
    let foundation = Foundation::generate(1_000)?;
    for point in 0..TARGETS.len() {
        let queries = Queries::write(lines(&foundation, point))?;
        let ask = |lab: &Lab, duration| {
            let load = dnsperf::Load {
                rate: Some(LATENCY_RATE),
                percentiles: true,
                ..dnsperf::Load::new(&queries.path, duration)
            };
            load.run(&lab.client_launcher())
        };
        let (cost, share) = {
            let lab = Lab::split()?;
            let _program = subject.program_of_client(&lab)?;
            let folder = TempDir::with_prefix("bdx-services-")?;
            let server = start(subject, &lab, &foundation, &folder)?;
            ask(&lab, WARM_UP)?;
            let meter = lab.meter(&[server.pid()])?;
            let cpu = meter.cpu()?;
            let before = replies(&lab)?;
            let seen = ask(&lab, plan.duration)?;
            let cost = (meter.cpu()? - cpu).as_secs_f64() * 1e6 / seen.completed as f64;
            (cost, share_of_interface(&lab, before)?)
        };
        // The NAPI threads to which CPU time is ascribed above would add a wake-up to each latency.
        let lab = Lab::plain()?;
        let _program = subject.program_of_client(&lab)?;
        let folder = TempDir::with_prefix("bdx-services-")?;
        let _server = start(subject, &lab, &foundation, &folder)?;
        ask(&lab, WARM_UP)?;
        let seen = ask(&lab, plan.duration)?;
        let values = [share, cost, within(&seen, 0.5), within(&seen, 0.99)];
        table.put_each(&subject.label(), point, &values);
    }
    Ok(())
}

/// Starts a server that knows the services.
fn start(
    subject: &Subject,
    lab: &Lab,
    foundation: &Foundation,
    folder: &TempDir,
) -> Result<Server> {
    let (program, mode) = match subject {
        Subject::Build(program, mode) => (program.clone(), *mode),
        _ => (server::program()?, subject.mode().unwrap_or("tc")),
    };
    let definitions = folder.path().join("services.json");
    let mut instances = Vec::new();
    for size in SIZES {
        for index in 0..size {
            instances.push(json!({
                "name": format!("web{size}"), "id": format!("web{size}-{index}"), "port": 8080,
                "address": format!("10.7.{size}.{index}"),
            }));
        }
    }
    fs::write(&definitions, json!({"services": instances}).to_string())?;
    let consul = json!({"consul": {
        "node_name": "here", "advertise_addr": "10.9.0.9", "node_meta": {"zone": "z1"},
        "sources": {"files": [definitions]},
    }});
    let server = start_configured(program, lab, foundation, mode, &consul)?;
    if mode != "off" {
        wait_for_fast_path(&lab.server)?;
    }
    lab.pin_napi()?;
    Ok(server)
}

/// Returns queries of each type for each target.
fn lines(foundation: &Foundation, point: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut add = |name: &str, srv: &str, txt: &str| {
        lines.push(format!("{name} A\n"));
        lines.push(format!("{name} AAAA\n"));
        lines.push(format!("{srv} SRV\n"));
        lines.push(format!("{txt} TXT\n"));
        lines.push(format!("{name} HTTPS\n"));
    };
    if point > 0 {
        for size in SIZES {
            let name = format!("web{size}.service.consul.");
            add(
                &name,
                &format!("_web{size}._tcp.service.consul."),
                // Of Consul's names, only nodes have TXT records: their metadata.
                "here.node.consul.",
            );
        }
        return lines;
    }
    let entries = foundation.entries(usize::MAX);
    let groups = entries.iter().filter(|(name, _)| name.starts_with("q-s0."));
    for (name, _) in groups.take(20) {
        add(
            name,
            &format!("_grpclb._tcp.{name}"),
            &format!("_grpc_config.{name}"),
        );
    }
    lines
}
