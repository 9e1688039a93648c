//! The queries of gRPC applications: A, AAAA, SRV, TXT and HTTPS at equal rates.

use std::{fs, time::Duration};

use anyhow::Result;
use bosh_dns_xdp_benches::{dnsperf, foundation::Foundation, lab::Lab, report::Rounds};
use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    metrics::wait_for_fast_path,
    server::{self, Server},
};

use crate::{
    Plan,
    forwarding::{replies, within},
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
            let folder = TempDir::with_prefix("bdx-services-")?;
            let server = start(subject, &lab, &foundation, &folder)?;
            ask(&lab, WARM_UP)?;
            let meter = lab.meter(&[server.pid()])?;
            let (cpu, [fast, slow]) = (meter.cpu()?, replies(&lab)?);
            let seen = ask(&lab, plan.duration)?;
            let cost = (meter.cpu()? - cpu).as_secs_f64() * 1e6 / seen.completed as f64;
            let [fast, slow] = [replies(&lab)?[0] - fast, replies(&lab)?[1] - slow];
            (cost, fast as f64 * 100.0 / (fast + slow).max(1) as f64)
        };
        let lab = Lab::plain()?;
        let folder = TempDir::with_prefix("bdx-services-")?;
        let _server = start(subject, &lab, &foundation, &folder)?;
        ask(&lab, WARM_UP)?;
        let seen = ask(&lab, plan.duration)?;
        let values = [share, cost, within(&seen, 0.5), within(&seen, 0.99)];
        table.put(
            &subject.label(),
            point,
            &values.map(|value| Rounds(vec![value])),
        );
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
    let instance = |size: u8, index: u8| {
        json!({"name": format!("web{size}"), "id": format!("web{size}-{index}"), "port": 8080,
            "address": format!("10.7.{size}.{index}")})
    };
    let instances: Vec<Value> = SIZES
        .iter()
        .flat_map(|&size| (0..size).map(move |index| instance(size, index)))
        .collect();
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
    let of_fleet = || {
        let groups = foundation
            .entries(usize::MAX)
            .into_iter()
            .map(|(name, _)| name);
        let groups = groups.filter(|name| name.starts_with("q-s0.")).take(20);
        groups.map(|name| {
            (
                name.clone(),
                format!("_grpclb._tcp.{name}"),
                format!("_grpc_config.{name}"),
            )
        })
    };
    let of_consul = || {
        SIZES.into_iter().map(|size| {
            let service = format!("web{size}.service.consul.");
            (
                service,
                format!("_web{size}._tcp.service.consul."),
                "here.node.consul.".to_owned(),
            )
        })
    };
    let targets: Vec<_> = if point == 0 {
        of_fleet().collect()
    } else {
        of_consul().collect()
    };
    let lines = targets.into_iter().flat_map(|(name, srv, txt)| {
        [
            (&name, "A"),
            (&name, "AAAA"),
            (&srv, "SRV"),
            (&txt, "TXT"),
            (&name, "HTTPS"),
        ]
        .map(|(name, kind)| format!("{name} {kind}\n"))
    });
    lines.collect()
}
