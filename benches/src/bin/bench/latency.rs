//! Latency of queries at a fixed rate.

use anyhow::Result;
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    lab::Lab,
    peers::Peer,
    report::{Data, Figure, Sweep, number},
    yardstick::Hook,
};

use crate::{
    Plan,
    cell::{Cell, LATENCY_RATE, PERCENTILES},
    queries::{self, Queries},
    subject::Subject,
};

/// Title of the figure.
pub(super) const TITLE: &str = "Latency at 20,000 queries/s";

/// Latency at a fixed rate.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(1_000)?;
    let queries = Queries::write(&queries::for_names(&foundation, queries::is_shared))?;
    let mut subjects = vec![
        Subject::Reflector(Hook::Tc),
        Subject::Ours("tc"),
        Subject::Userspace,
        Subject::Peer(Peer::Knot),
        Subject::Peer(Peer::Nsd),
        Subject::Peer(Peer::Unbound),
    ];
    subjects.extend(plan.pick(&[], &[Subject::Peer(Peer::Dnsmasq)]));
    subjects.extend(plan.reference.clone().map(Subject::Reference));
    let places = PERCENTILES.map(|(name, _)| name.to_owned()).to_vec();
    let mut sweep = Sweep::new("share of the queries", places, false);
    for _ in 0..plan.rounds {
        for subject in &subjects {
            let cell = Cell::start(Lab::plain()?, subject, &foundation)?;
            let asker = cell.asker()?;
            asker.warm_up(&queries)?;
            let mut line = format!("{:<28}", subject.label());
            for (place, parts) in asker.latencies(&queries, plan.duration)?.into_iter().enumerate() {
                line.push_str(&format!(" {} {:>8.0} µs", PERCENTILES[place].0, parts.median()));
                for value in parts.0 {
                    sweep.push(&subject.label(), subject.is_ours(), place, value);
                }
            }
            println!("{line}");
        }
    }
    Ok(vec![Figure::new(
        TITLE,
        format!(
            "Latency percentiles at {} queries per second, measured by dnsperf over an untuned veth.",
            number(LATENCY_RATE.into())
        ),
        "µs",
        Data::Sweep(sweep),
    )])
}
