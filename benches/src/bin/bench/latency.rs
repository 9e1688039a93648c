//! How long a client waits.

use std::collections::HashMap;

use anyhow::Result;
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    lab::Lab,
    peers::Peer,
    report::{Bar, Data, Figure, Rounds},
    yardstick::Hook,
};

use crate::{
    Plan,
    cell::{Cell, LATENCY_RATE, PERCENTILES},
    queries::{self, Queries},
    subject::Subject,
};

/// Latency at a fixed rate.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(1_000)?;
    let queries = Queries::write(&queries::for_names(&foundation, queries::is_shared))?;
    let mut subjects = vec![
        Subject::Reflector(Hook::Generic),
        Subject::Ours("tc"),
        Subject::Ours("generic"),
        Subject::Userspace,
        Subject::Peer(Peer::Knot),
        Subject::Peer(Peer::Nsd),
        Subject::Peer(Peer::Unbound),
    ];
    subjects.extend(plan.pick(&[], &[Subject::Peer(Peer::Dnsmasq)]));
    subjects.extend(plan.reference.clone().map(Subject::Reference));
    let mut values: HashMap<(String, &'static str), Rounds> = HashMap::new();
    for _ in 0..plan.rounds {
        for subject in &subjects {
            let cell = Cell::start(Lab::plain()?, subject, &foundation)?;
            let asker = cell.asker()?;
            asker.warm_up(&queries)?;
            let mut line = format!("{:<28}", subject.label());
            for ((name, _), parts) in PERCENTILES.iter().zip(asker.latencies(&queries, plan.duration)?) {
                line.push_str(&format!(" {name} {:>8.0} µs", parts.median()));
                values.entry((subject.label(), name)).or_default().0.extend(parts.0);
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
            title: format!("Latency at {LATENCY_RATE} queries/s: {name}"),
            about: "As dnsperf sees it, over a veth as it comes.".to_owned(),
            unit: "µs".to_owned(),
            data: Data::Bars(bars.collect()),
        }
    };
    Ok(PERCENTILES.into_iter().map(figure).collect())
}
