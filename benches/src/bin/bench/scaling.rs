//! What changes with the size of the foundation, the form of the names and the
//! share of hits.

use std::{fs, time::Instant};

use anyhow::Result;
use bosh_dns_xdp_benches::{
    cpu::{map_memory, resident_memory},
    foundation::Foundation,
    lab::Lab,
    report::{Bar, Data, Figure, Rounds, Series},
};
use tempfile::TempDir;

use crate::{
    Plan,
    cost::{cost, shared_names, warm_up},
    subject::Subject,
};

/// Queries per second: what userspace alone serves with ease, too.
const RATE: u32 = 50_000;

/// Names that are asked for in a foundation of any size: clients use what they
/// use, however many others there are.
const NAMES: usize = 1_000;

/// CPU, memory and start-up by size; CPU by form and by hit ratio.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = by_size(plan)?;
    figures.push(by_form(plan)?);
    figures.push(by_hit_ratio(plan)?);
    Ok(figures)
}

/// CPU per query, memory and start-up time by size of the foundation.
fn by_size(plan: &Plan) -> Result<Vec<Figure>> {
    let subjects = [Subject::Ours("tc"), Subject::Userspace];
    let line = |subject: &Subject| Series { label: subject.label(), points: Vec::new() };
    let mut costs = subjects.each_ref().map(line);
    let mut memory = subjects.each_ref().map(line);
    let mut starts = subjects.each_ref().map(line);
    let mut maps = line(&subjects[0]);
    for &size in &plan.sizes {
        let foundation = Foundation::generate(size)?;
        let folder = TempDir::new()?;
        let queries = folder.path().join("queries");
        fs::write(&queries, evenly(&shared_names(&foundation), NAMES))?;
        for (position, subject) in subjects.iter().enumerate() {
            let mut rounds: [Rounds; 4] = Default::default();
            for _ in 0..plan.rounds {
                let lab = Lab::split()?;
                let started = Instant::now();
                let running = subject.start(&lab, &foundation)?;
                rounds[2].0.push(started.elapsed().as_secs_f64() * 1e3);
                warm_up(&lab, &queries, RATE)?;
                rounds[0].0.push(cost(&lab, &running, &queries, RATE, plan.duration)?);
                let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                rounds[1].0.push(mebibytes(resident_memory(running.processes[0])?));
                rounds[3].0.push(mebibytes(map_memory(running.processes[0])?));
            }
            println!(
                "{size:>7} instances, {:<22} {:>6.2} µs/query  {:>6.1} MiB  {:>5.1} MiB of maps  {:>6.0} ms to start",
                subject.label(),
                rounds[0].median(),
                rounds[1].median(),
                rounds[3].median(),
                rounds[2].median(),
            );
            let [cost_rounds, memory_rounds, start_rounds, map_rounds] = rounds;
            costs[position].points.push((size as f64, cost_rounds));
            memory[position].points.push((size as f64, memory_rounds));
            starts[position].points.push((size as f64, start_rounds));
            if position == 0 {
                maps.points.push((size as f64, map_rounds));
            }
        }
    }
    let figure = |title: &str, about: &str, unit: &str, series: Vec<Series>| Figure {
        title: title.to_owned(),
        about: about.to_owned(),
        unit: unit.to_owned(),
        data: Data::Lines { x: "instances".to_owned(), series },
    };
    Ok(vec![
        figure(
            &format!("CPU per query by size, {RATE} queries/s"),
            "As many names in each, spread over the whole foundation; group sizes do not grow with it, so the answers \
             are alike.",
            "µs",
            costs.into(),
        ),
        figure("Resident memory of the process by size", "Mapped BPF maps included.", "MiB", memory.into()),
        figure(
            "Memory of the BPF maps by size",
            "What the kernel accounts to them (memlock). They are made for max_names at the start, so that no fleet that \
             grows needs memory that is not there.",
            "MiB",
            vec![maps],
        ),
        figure(
            "Start-up by size",
            "From the start of the process to its first answer; with the fast path, until the programs are loaded and \
             the entries published (userspace answers meanwhile).",
            "ms",
            starts.into(),
        ),
    ])
}

/// At most `count` of these lines, evenly spread.
fn evenly(lines: &str, count: usize) -> String {
    let lines: Vec<&str> = lines.lines().collect();
    let step = lines.len().div_ceil(count).max(1);
    lines.iter().step_by(step).map(|line| format!("{line}\n")).collect()
}

/// A form of name: how it is written, and which names are of it.
type Form = (&'static str, fn(&str) -> bool);

/// CPU per query by form of the name.
fn by_form(plan: &Plan) -> Result<Figure> {
    let foundation = Foundation::generate(1_000)?;
    let entries = foundation.entries(usize::MAX);
    let forms: [Form; 4] = [
        ("q-s0.q-g<id>.bosh", |name| name.starts_with("q-s0.q-g")),
        ("alias", |name| name.ends_with(".internal.")),
        ("q-s0.<group>.<network>.<deployment>.bosh", |name| {
            name.starts_with("q-s0.") && !name.starts_with("q-s0.q-g")
        }),
        ("<instance id>...", |name| !name.starts_with("q-") && name.ends_with(".bosh.")),
    ];
    let mut bars = Vec::new();
    for (label, belongs) in forms {
        let lines: String =
            entries.iter().filter(|(name, _)| belongs(name)).map(|(name, _)| format!("{name} A\n")).collect();
        let mut rounds = Rounds::default();
        for _ in 0..plan.rounds {
            rounds.0.push(cost_of(plan, &foundation, &lines)?);
        }
        println!("{label:<44} {:>6.2} µs/query", rounds.median());
        bars.push(Bar { label: label.to_owned(), value: rounds, ours: true });
    }
    Ok(Figure {
        title: format!("CPU per query by form of the name, {RATE} queries/s"),
        about: "1,000 instances, fast path by tc.".to_owned(),
        unit: "µs".to_owned(),
        data: Data::Bars(bars),
    })
}

/// CPU per query by share of hits.
fn by_hit_ratio(plan: &Plan) -> Result<Figure> {
    let foundation = Foundation::generate(1_000)?;
    let names: Vec<String> = foundation.entries(1_000).into_iter().map(|(name, _)| name).collect();
    let mut points = Vec::new();
    for percent in [0, 50, 90, 99, 100] {
        // Type ANY always goes up, and is answered from the same names.
        let lines: String = (0..100)
            .flat_map(|turn| names.iter().skip(turn).step_by(100))
            .enumerate()
            .map(|(position, name)| {
                format!("{name} {}\n", if position % 100 < percent { "A" } else { "ANY" })
            })
            .collect();
        let mut rounds = Rounds::default();
        for _ in 0..plan.rounds {
            rounds.0.push(cost_of(plan, &foundation, &lines)?);
        }
        println!("{percent:>3} % hits {:>6.2} µs/query", rounds.median());
        points.push((percent.max(1) as f64, rounds));
    }
    Ok(Figure {
        title: format!("CPU per query by share of hits, {RATE} queries/s"),
        about: "1,000 instances, fast path by tc; the rest (type ANY) is answered by userspace. 0 % is drawn at 1.".to_owned(),
        unit: "µs".to_owned(),
        data: Data::Lines { x: "% hits".to_owned(), series: vec![Series { label: "ours, tc".to_owned(), points }] },
    })
}

/// CPU per query of ours by tc on these query lines.
fn cost_of(plan: &Plan, foundation: &Foundation, lines: &str) -> Result<f64> {
    let folder = TempDir::new()?;
    let queries = folder.path().join("queries");
    fs::write(&queries, lines)?;
    let lab = Lab::split()?;
    let running = Subject::Ours("tc").start(&lab, foundation)?;
    cost(&lab, &running, &queries, RATE, plan.duration)
}
