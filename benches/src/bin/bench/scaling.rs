//! Effects of the size of the foundation, the form of the names and the share of hits.

use anyhow::Result;
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    lab::Lab,
    peers::Peer,
    report::{Figure, number},
    yardstick::Hook,
};

use crate::{
    Plan,
    cell::Cell,
    queries::{self, FORMS, Queries},
    subject::Subject,
    sweep::Sweep,
};

/// Queried names in a foundation of any size: clients use the same names, however many others there
/// are. This is the number of names of a foundation of 1,000 instances.
const NAMES: usize = 500;

/// The baseline of all figures.
const REFLECTOR: Subject = Subject::Reflector(Hook::Tc);

/// This server with the fast path, by mode.
const MODES: [Subject; 2] = [Subject::Ours("tc"), Subject::Ours("native")];

/// CPU, rates, latencies by size, by form and by hit ratio.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = by_size(plan)?;
    let foundation = Foundation::generate(1_000)?;
    figures.extend(by_form(plan, &foundation)?);
    figures.extend(by_hits(plan, &foundation)?);
    Ok(figures)
}

/// Measures by size of the foundation.
///
/// In each round the sizes of one subject are consecutive, because they are compared with each
/// other first.
fn by_size(plan: &Plan) -> Result<Vec<Figure>> {
    let few = [Subject::Ours("tc"), Subject::Userspace, Subject::Peer(Peer::Knot)];
    let many = [
        Subject::Ours("tc"),
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
    for _ in 0..plan.sweep_rounds {
        for subject in &subjects {
            for (place, (foundation, queries)) in towns.iter().enumerate() {
                let cell = Cell::start(Lab::split()?, subject, foundation)?;
                sweep.measure(plan, &cell, place..place + 1, queries)?;
            }
        }
        if let Some((foundation, queries)) = towns.first() {
            let cell = Cell::start(Lab::split()?, &REFLECTOR, foundation)?;
            sweep.measure(plan, &cell, 0..places.len(), queries)?;
        }
    }
    Ok(sweep.figures(
        "size",
        "The same number of names in each, spread over the whole foundation; group sizes do not grow with \
         it, so the answers are comparable. In the split lab, each side of the veth has a core for its \
         packets. The bare reflector, which ignores names, is measured once per round.",
    ))
}

/// Measures by form of the name.
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
                // For the reflector all queries are alike except for some bytes.
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
        "1,000 instances; one server after the other, each form in turn, in the split lab.",
    ))
}

/// Measures by share of hits.
fn by_hits(plan: &Plan, foundation: &Foundation) -> Result<Vec<Figure>> {
    let shares = plan.pick(&[0, 99, 100], &[0, 50, 90, 99, 100]);
    let subjects = plan.pick(&MODES[..1], &MODES);
    // Subjects without a notion of hits get the same queries, without the misses.
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
        "1,000 instances, in the split lab. The rest are queries of type ANY, which the fast path leaves to \
         userspace. Without a fast path there are no hits: userspace only and knotd are measured once per \
         round, without such queries.",
    ))
}
