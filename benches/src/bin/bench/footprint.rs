//! What a server of ours takes for itself: the time to its first answer from the interface, and memory.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use bosh_dns_xdp_benches::{
    cpu::{map_memory, resident_memory},
    foundation::Foundation,
    lab::Lab,
    report::{Data, Figure, Sweep, number},
};

use crate::{
    Plan,
    cell::Cell,
    queries::{self, Queries},
    subject::Subject,
};

/// Title of the figure of memory.
pub(super) const MEMORY_TITLE: &str = "Resident memory of the process by size";

/// Title of the figure of starts.
pub(super) const START_TITLE: &str = "Start-up by size";

/// Starts of each.
const STARTS: usize = 5;

/// How long a server is left alone before its memory counts: what a start takes for a moment goes
/// back to the system.
const PAUSE: Duration = Duration::from_secs(1);

/// Start-up and memory by size, with the fast path and without.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let places: Vec<String> = plan.sizes.iter().map(|&size| number(size as f64)).collect();
    let new = || Sweep::new("instances", places.clone(), true);
    let (mut memory, mut maps, mut starts) = (new(), new(), new());
    for (place, &size) in plan.sizes.iter().enumerate() {
        let foundation = Foundation::generate(size)?;
        let queries = Queries::write(&queries::for_names(&foundation, queries::is_shared))?;
        for _ in 0..STARTS {
            for subject in [Subject::Ours("tc"), Subject::Userspace] {
                let lab = Lab::split()?;
                let started = Instant::now();
                let cell = Cell::start(lab, &subject, &foundation)?;
                starts.push(&subject.label(), true, place, started.elapsed().as_secs_f64() * 1e3);
                cell.asker()?.warm_up(&queries)?;
                thread::sleep(PAUSE);
                let process = *cell.running.processes.first().context("ours is a process")?;
                let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                memory.push(&subject.label(), true, place, mebibytes(resident_memory(process)?));
                if subject != Subject::Userspace {
                    maps.push(&subject.label(), true, place, mebibytes(map_memory(process)?));
                }
            }
        }
    }
    for (what, sweep) in [("ms to start", &starts), ("MiB", &memory)] {
        for line in &sweep.series {
            let medians: Vec<String> = line.values.iter().map(|value| number(value.median())).collect();
            println!("{:<22} {what}: {}", line.label, medians.join(", "));
        }
    }
    let figure = |title: &str, about: &str, unit: &str, data| Figure {
        title: title.to_owned(),
        about: about.to_owned(),
        unit: unit.to_owned(),
        data: Data::Sweep(data),
    };
    Ok(vec![
        figure(
            START_TITLE,
            "From the start of the process to its first answer; with the fast path, until the programs are loaded \
             and the entries published (userspace answers meanwhile). On one CPU.",
            "ms",
            starts,
        ),
        figure(
            MEMORY_TITLE,
            "Mapped BPF maps included; after some thousand queries and a pause.",
            "MiB",
            memory,
        ),
        figure(
            "Memory of the BPF maps by size",
            "What the kernel accounts to them (memlock). They are made for max_names at the start, so that no fleet \
             that grows needs memory that is not there.",
            "MiB",
            maps,
        ),
    ])
}
