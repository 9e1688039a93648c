//! What changes with the size of the foundation, the form of the names and the
//! share of hits.

use std::time::Instant;

use anyhow::Result;
use bosh_dns_xdp_benches::{
    cpu::{map_memory, resident_memory},
    foundation::Foundation,
    lab::Lab,
    peers::Peer,
    report::{self, Data, Figure, number},
    yardstick::Hook,
};

use crate::{
    Plan,
    cell::Cell,
    queries::{self, FORMS, Queries},
    subject::Subject,
    sweep::Sweep,
};

/// Names that are asked for in a foundation of any size: clients use what they use,
/// however many others there are. As many as a foundation of 1,000 instances has.
const NAMES: usize = 500;

/// What everything is held against.
const REFLECTOR: Subject = Subject::Reflector(Hook::Generic);

/// Ours with the fast path, by each mode.
const MODES: [Subject; 3] = [Subject::Ours("tc"), Subject::Ours("generic"), Subject::Ours("native")];

/// CPU, rates, latencies by size, by form and by hit ratio; memory and start-up by size.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = by_size(plan)?;
    let foundation = Foundation::generate(1_000)?;
    figures.extend(by_form(plan, &foundation)?);
    figures.extend(by_hits(plan, &foundation)?);
    Ok(figures)
}

/// Everything by size of the foundation.
///
/// In each round the sizes of one subject follow each other: they are what is compared first.
fn by_size(plan: &Plan) -> Result<Vec<Figure>> {
    let few = [Subject::Ours("tc"), Subject::Userspace, Subject::Peer(Peer::Knot)];
    let many = [
        Subject::Ours("tc"),
        Subject::Ours("generic"),
        Subject::Ours("native"),
        Subject::Userspace,
        Subject::Peer(Peer::Knot),
        Subject::Peer(Peer::Nsd),
        Subject::Peer(Peer::Unbound),
    ];
    let subjects = plan.pick(&few, &many);
    let mut towns = Vec::new();
    for &size in &plan.sizes {
        let foundation = Foundation::generate(size)?;
        let shared = queries::for_names(&foundation, queries::is_shared);
        towns.push((foundation, Queries::write(&queries::evenly(&shared, NAMES))?));
    }
    let places: Vec<String> = plan.sizes.iter().map(|&size| number(size as f64)).collect();
    let mut sweep = Sweep::new("instances", &places, true);
    let mut own = OwnFigures::new(&places);
    for _ in 0..plan.sweep_rounds {
        for subject in &subjects {
            for (place, (foundation, queries)) in towns.iter().enumerate() {
                let lab = Lab::split()?;
                let started = Instant::now();
                let cell = Cell::start(lab, subject, foundation)?;
                let start = started.elapsed().as_secs_f64() * 1e3;
                sweep.measure(plan, &cell, place..place + 1, queries)?;
                own.add(&cell, place, start)?;
            }
        }
        if let Some((foundation, queries)) = towns.first() {
            let cell = Cell::start(Lab::split()?, &REFLECTOR, foundation)?;
            sweep.measure(plan, &cell, 0..places.len(), queries)?;
        }
    }
    let mut figures = sweep.figures(
        "size",
        "As many names in each, spread over the whole foundation; group sizes do not grow with it, so the answers are \
         alike. In the split lab: each side of the veth has a core for its packets. The bare reflector, which knows no \
         names, is measured once a round.",
    );
    figures.extend(own.figures());
    Ok(figures)
}

/// Memory and start-up by size: of ours only.
struct OwnFigures {
    /// Resident memory, MiB.
    memory: report::Sweep,
    /// Memory of the BPF maps, MiB.
    maps: report::Sweep,
    /// Time to the first answer, ms.
    starts: report::Sweep,
}

impl OwnFigures {
    /// Nothing measured yet.
    fn new(places: &[String]) -> Self {
        let new = || report::Sweep::new("instances", places.to_vec(), true);
        Self { memory: new(), maps: new(), starts: new() }
    }

    /// Adds what a warm server shows, if it is one whose figures are drawn.
    fn add(&mut self, cell: &Cell<'_>, place: usize, start: f64) -> Result<()> {
        let (subject, processes) = (cell.subject, &cell.running.processes[..]);
        let (&[process], Subject::Ours("tc") | Subject::Userspace) = (processes, subject) else {
            return Ok(());
        };
        let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let memory = mebibytes(resident_memory(process)?);
        let label = subject.label();
        self.memory.push(&label, true, place, memory);
        self.starts.push(&label, true, place, start);
        if *subject != Subject::Userspace {
            self.maps.push(&label, true, place, mebibytes(map_memory(process)?));
        }
        println!("{:<26} {memory:.1} MiB, {start:.0} ms to start", "");
        Ok(())
    }

    /// As figures.
    fn figures(self) -> Vec<Figure> {
        let figure = |title: &str, about: &str, unit: &str, data| Figure {
            title: title.to_owned(),
            about: about.to_owned(),
            unit: unit.to_owned(),
            data: Data::Sweep(data),
        };
        vec![
            figure("Resident memory of the process by size", "Mapped BPF maps included.", "MiB", self.memory),
            figure(
                "Memory of the BPF maps by size",
                "What the kernel accounts to them (memlock). They are made for max_names at the start, so that no fleet \
                 that grows needs memory that is not there.",
                "MiB",
                self.maps,
            ),
            figure(
                "Start-up by size",
                "From the start of the process to its first answer; with the fast path, until the programs are loaded \
                 and the entries published (userspace answers meanwhile).",
                "ms",
                self.starts,
            ),
        ]
    }
}

/// Everything by form of the name.
fn by_form(plan: &Plan, foundation: &Foundation) -> Result<Vec<Figure>> {
    let many = [
        Subject::Ours("tc"),
        Subject::Userspace,
        Subject::Peer(Peer::Knot),
        Subject::Peer(Peer::Nsd),
        Subject::Peer(Peer::Unbound),
        REFLECTOR,
    ];
    let subjects = plan.pick(&many[..1], &many);
    let files: Vec<Queries> = FORMS
        .iter()
        .map(|(_, is_of_it)| Queries::write(&queries::for_names(foundation, is_of_it)))
        .collect::<Result<_>>()?;
    let places = FORMS.map(|(form, _)| form.to_owned());
    let mut sweep = Sweep::new("form of the name", &places, false);
    for _ in 0..plan.sweep_rounds {
        for subject in &subjects {
            let cell = Cell::start(Lab::split()?, subject, foundation)?;
            if let (Subject::Reflector(_), Some(any)) = (subject, files.first()) {
                // To it all queries are alike, but for some bytes.
                sweep.measure(plan, &cell, 0..places.len(), any)?;
                continue;
            }
            for (place, queries) in files.iter().enumerate() {
                sweep.measure(plan, &cell, place..place + 1, queries)?;
            }
        }
    }
    Ok(sweep.figures(
        "form of the name",
        "1,000 instances; one server after the other, asked for each form in turn, in the split lab.",
    ))
}

/// Everything by share of hits.
fn by_hits(plan: &Plan, foundation: &Foundation) -> Result<Vec<Figure>> {
    let shares = plan.pick(&[0, 99, 100], &[0, 50, 90, 99, 100]);
    let subjects = plan.pick(&MODES[..1], &MODES);
    // They do not know of hits: the same queries to all of them, without the odd ones.
    let others = plan.pick(&[], &[Subject::Userspace, Subject::Peer(Peer::Knot)]);
    let names = queries::for_names(foundation, |_| true);
    let write = |&percent: &usize| Queries::write(&queries::with_hits(&names, percent));
    let files: Vec<Queries> = shares.iter().map(write).collect::<Result<_>>()?;
    let plain = Queries::write(&queries::with_hits(&names, 100))?;
    let places: Vec<String> = shares.iter().map(|percent| format!("{percent} %")).collect();
    let mut sweep = Sweep::new("share of hits", &places, true);
    for _ in 0..plan.sweep_rounds {
        for subject in &subjects {
            let cell = Cell::start(Lab::split()?, subject, foundation)?;
            for (place, queries) in files.iter().enumerate() {
                sweep.measure(plan, &cell, place..place + 1, queries)?;
            }
        }
        for subject in &others {
            let cell = Cell::start(Lab::split()?, subject, foundation)?;
            sweep.measure(plan, &cell, 0..places.len(), &plain)?;
        }
    }
    Ok(sweep.figures(
        "share of hits",
        "1,000 instances, in the split lab. The rest are queries of type ANY, which the fast path leaves to userspace. \
         Without a fast path nothing is a hit: userspace only and knotd are measured once a round, without such queries.",
    ))
}
