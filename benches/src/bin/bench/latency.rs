//! How long a client waits.

use std::{collections::HashMap, fs};

use anyhow::Result;
use bosh_dns_xdp_benches::{
    dnsperf::Load,
    foundation::Foundation,
    lab::{Lab, SERVER_ADDRESS},
    peers::Peer,
    report::{Bar, Data, Figure, Rounds},
};
use tempfile::TempDir;

use crate::{Plan, cost::shared_names, subject::Subject};

/// Queries per second: what every subject can serve.
const RATE: u32 = 20_000;

/// Shares of queries whose latency is drawn.
const PERCENTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];

/// Latency at a fixed rate.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(1_000)?;
    let folder = TempDir::new()?;
    let queries = folder.path().join("queries");
    fs::write(&queries, shared_names(&foundation))?;
    let mut subjects = vec![
        Subject::Reflector("generic"),
        Subject::Ours("tc"),
        Subject::Ours("generic"),
        Subject::Userspace,
        Subject::Peer(Peer::Knot),
        Subject::Peer(Peer::Nsd),
        Subject::Peer(Peer::Unbound),
        Subject::Peer(Peer::Dnsmasq),
    ];
    subjects.extend(plan.reference.clone().map(Subject::Reference));
    let mut values: HashMap<(String, &str), Rounds> = HashMap::new();
    for _ in 0..plan.rounds {
        for subject in &subjects {
            let lab = Lab::plain()?;
            let _running = subject.start(&lab, &foundation)?;
            let address = SERVER_ADDRESS.to_string();
            let load = Load {
                server: &address,
                queries: &queries,
                duration: plan.duration,
                rate: Some(RATE),
                percentiles: true,
                edns: false,
            };
            let seen = load.run(&lab.client_launcher())?;
            let mut line = format!("{:<28}", subject.label());
            for (name, share) in PERCENTILES {
                let microseconds = seen.percentile(share).unwrap_or_default().as_secs_f64() * 1e6;
                line.push_str(&format!(" {name} {microseconds:>8.0} µs"));
                values.entry((subject.label(), name)).or_default().0.push(microseconds);
            }
            println!("{line}");
        }
    }
    let figure = |(name, _): (&'static str, f64)| {
        let bars = subjects.iter().map(|subject| Bar {
            label: subject.label(),
            value: values.get(&(subject.label(), name)).cloned().unwrap_or_default(),
            ours: subject.is_ours(),
        });
        Figure {
            title: format!("Latency at {RATE} queries/s: {name}"),
            about: "As dnsperf sees it, over a veth as it comes.".to_owned(),
            unit: "µs".to_owned(),
            data: Data::Bars(bars.collect()),
        }
    };
    Ok(PERCENTILES.into_iter().map(figure).collect())
}
