//! Queries per second of one saturated core: the figure that every subject has alike.
//!
//! The generator offers more than the server's core can do, so the core never sleeps and
//! always finds the next packet: there is one regime only, and what a query costs is not
//! mixed with what waking up costs.

use std::{array, collections::BTreeMap};

use anyhow::Result;
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    generator::Load,
    is_wanted,
    lab::Lab,
    load::Offered,
    peers::Peer,
    reference::quoted,
    report::{self, Bar, Data, Figure, Rounds, number},
    yardstick::{Hook, MAX_ANSWERS},
};

use crate::{
    Plan,
    cell::Cell,
    queries::{self, Order, Queries},
    subject::Subject,
};

/// Rates that are offered for the curve: each twice the one before, closer where it bends.
const LADDER: [u32; 12] = [
    16_000, 31_000, 62_000, 125_000, 250_000, 354_000, 500_000, 707_000, 1_000_000, 1_414_000, 2_000_000,
    2_828_000,
];

/// Size of the foundation where the subjects are compared.
const INSTANCES: usize = 1_000;

/// The hooks, as ours calls them.
pub(super) const HOOKS: [(&str, Hook); 3] =
    [("tc", Hook::Tc), ("generic", Hook::Generic), ("native", Hook::Native)];

/// Title of the figure that claims rest on.
pub(super) const TITLE: &str = "Queries per second of one saturated core";

/// Title of the figure that tells whether a rate is the server's or the generator's.
pub(super) const BUSY_TITLE: &str = "Share of the time in which that core was busy";

/// A core that is busy for less than this percentage of the time is not saturated: nothing
/// is claimed of its rate.
pub(super) const SATURATED: f64 = 95.0;

/// Title of the figure of names and orders.
pub(super) const SCALE_TITLE: &str = "Saturated core by names and the order in which they are asked for";

/// Title of the figure that tells the same of these.
pub(super) const SCALE_BUSY_TITLE: &str = "Share of the time in which that core was busy, by names and order";

/// Rates of all subjects, and what is answered of what is offered.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(INSTANCES)?;
    let lines = queries::for_names(&foundation, queries::is_shared);
    let answers = mean_answers(&foundation, queries::is_shared);
    let queries = Queries::write(&queries::ordered(&lines, Order::Random))?;
    let subjects = subjects(plan, answers);
    let [mut rates, mut busy]: [BTreeMap<usize, Rounds>; 2] = Default::default();
    let places = LADDER.map(|rate| number(rate.into())).to_vec();
    let mut curve = report::Sweep::new("offered, queries/s", places.clone(), true);
    let mut dropped = report::Sweep::new("offered, queries/s", places, true);
    for round in 0..plan.rounds {
        for (position, subject) in subjects.iter().enumerate() {
            let cell = Cell::start(Lab::split()?, subject, &foundation)?;
            let mut loaded = cell.loaded(&queries)?;
            let seen = loaded.saturate(plan.saturated_duration)?;
            tell(subject, "", &seen);
            rates.entry(position).or_default().0.extend(&seen.answered.0);
            busy.entry(position).or_default().0.push(seen.busy * 100.0);
            if !plan.with_curves() || round > 0 {
                continue;
            }
            for (place, &rate) in LADDER.iter().enumerate() {
                let seen = loaded.offer(Load::Rate { rate, burst: BURST }, plan.sweep_duration)?;
                if seen.sent < OFFERED * f64::from(rate) {
                    println!("{:<28} only {}/s were sent", subject.label(), number(seen.sent));
                    continue;
                }
                for &value in &seen.answered.0 {
                    curve.push(&subject.label(), subject.is_ours(), place, value);
                }
                dropped.push(&subject.label(), subject.is_ours(), place, seen.dropped_before * 100.0);
            }
        }
    }
    let bars = |values: &BTreeMap<usize, Rounds>| -> Vec<Bar> {
        let bar = |(number, subject): (usize, &Subject)| {
            let value = values.get(&number)?.clone();
            Some(Bar { label: subject.label(), value, ours: subject.is_ours() })
        };
        subjects.iter().enumerate().filter_map(bar).collect()
    };
    let busy = bars(&busy);
    let mut bars = bars(&rates);
    if plan.reference.is_none() {
        let label = format!("bosh-dns (quoted: measured {})", quoted::SATURATED_ON);
        bars.push(Bar { label, value: Rounds(vec![quoted::SATURATED]), ours: false });
    }
    let mut figures = vec![
        Figure {
            title: TITLE.to_owned(),
            about: format!(
                "{INSTANCES} instances; group names, aliases and long forms at random, A, no EDNS, {answers} answers on \
                 average. A generator within the kernel, on the other core, asks for more than the server's core \
                 can do, or as much as it answers most of; replies are counted, and freed, where they are sent. The bare reflector sends an empty reply, \
                 the constant one {answers} answers, always the same, with no look-up: what any answer costs."
            ),
            unit: "queries/s".to_owned(),
            data: Data::Bars(bars),
        },
        Figure {
            title: BUSY_TITLE.to_owned(),
            about: format!(
                "Below {SATURATED} % the generator, which shares its core with the replies, was at its limit before the \
                 server was: the rate is at least what the figure above shows, and nothing is claimed of it."
            ),
            unit: "%".to_owned(),
            data: Data::Bars(busy),
        },
    ];
    if plan.with_curves() {
        let sweep = |title: &str, about: &str, unit: &str, sweep| Figure {
            title: title.to_owned(),
            about: about.to_owned(),
            unit: unit.to_owned(),
            data: Data::Sweep(sweep),
        };
        figures.push(sweep(
            "Answered of what is offered",
            "Whether they are answered or not, so many queries are sent each second, as far as the generator can. Past its \
             best rate a server in userspace answers less than before: packets that nobody will read eat its core.",
            "queries/s",
            curve,
        ));
        figures.push(sweep(
            "Dropped before the server, of what is offered",
            "Queries that the ring of the server's interface had no room for.",
            "%",
            dropped,
        ));
    }
    Ok(figures)
}

/// A rate of which the generator sent less than this share was not offered.
const OFFERED: f64 = 0.95;

/// Queries that leave together where a rate is offered.
const BURST: u32 = 16;

/// Rates of a saturated core by number of names and by the order in which they are asked for.
pub(super) fn measure_scale(plan: &Plan) -> Result<Vec<Figure>> {
    let sizes = plan.pick(&[1_000, 100_000], &[1_000, 10_000, 100_000]);
    let orders = plan.pick(&[Order::Random], &[Order::AsListed, Order::Random, Order::Zipf]);
    let modes = plan.pick(&HOOKS[..1], &HOOKS);
    let places: Vec<String> = sizes
        .iter()
        .flat_map(|size| orders.iter().map(|order| format!("{} {}", number(*size as f64), order.label())))
        .collect();
    let [mut rates, mut busy] = array::from_fn(|_| report::Sweep::new("names, order", places.clone(), false));
    for _ in 0..plan.sweep_rounds {
        for (place, &size) in sizes.iter().enumerate() {
            // As many names as there are instances, spread over the whole foundation.
            let mut foundation = Foundation::generate(size)?;
            foundation.max_names = (foundation.names().count() * 3 / 2).max(65_536) as u32;
            let lines = queries::evenly(&queries::for_names(&foundation, |_| true), size);
            let answers = mean_answers_of(&foundation, &lines);
            let files = orders
                .iter()
                .map(|&order| Queries::write(&queries::ordered(&lines, order)))
                .collect::<Result<Vec<_>>>()?;
            let pairs = modes
                .iter()
                .flat_map(|&(mode, hook)| [Subject::Ours(mode), Subject::Constant(hook, answers)]);
            for subject in pairs.chain([Subject::Userspace]) {
                scale_of(plan, &subject, &foundation, &files, place * orders.len(), [&mut rates, &mut busy])?;
            }
        }
    }
    let rates = Figure {
        title: SCALE_TITLE.to_owned(),
        about: "As many names as there are instances, of all forms, single instances among them, all of them published \
                (max_names is set for it); the constant reflector sends as many answers as these names have on average. \
                Zipf: the name of rank n is asked for in proportion to 1/n."
            .to_owned(),
        unit: "queries/s".to_owned(),
        data: Data::Sweep(rates),
    };
    let busy = Figure {
        title: SCALE_BUSY_TITLE.to_owned(),
        about: format!("Of a rate at which it was less than {SATURATED} % nothing is claimed."),
        unit: "%".to_owned(),
        data: Data::Sweep(busy),
    };
    Ok(vec![rates, busy])
}

/// Rates of one subject for the orders of one foundation, from place `first` on.
fn scale_of(
    plan: &Plan,
    subject: &Subject,
    foundation: &Foundation,
    files: &[Queries],
    first: usize,
    [rates, busy]: [&mut report::Sweep; 2],
) -> Result<()> {
    if !is_wanted(&plan.wanted, &subject.label()) {
        return Ok(());
    }
    let cell = Cell::start(Lab::split()?, subject, foundation)?;
    // Constants of any number are one subject here.
    let label = match subject {
        Subject::Constant(hook, _) => format!("constant answers, {}", crate::subject::hook_label(*hook)),
        subject => subject.label(),
    };
    for (offset, queries) in files.iter().enumerate() {
        let seen = cell.loaded(queries)?.saturate(plan.saturated_duration)?;
        let place = first + offset;
        tell(subject, rates.places.get(place).map_or("", String::as_str), &seen);
        for &value in &seen.answered.0 {
            rates.push(&label, subject.is_ours(), place, value);
        }
        busy.push(&label, subject.is_ours(), place, seen.busy * 100.0);
    }
    Ok(())
}

/// All subjects.
fn subjects(plan: &Plan, answers: u32) -> Vec<Subject> {
    let mut subjects = Vec::new();
    for (mode, hook) in HOOKS {
        subjects.extend([Subject::Reflector(hook), Subject::Constant(hook, answers), Subject::Ours(mode)]);
    }
    subjects.push(Subject::Userspace);
    subjects.extend(
        plan.pick(
            &[Peer::KnotXdp, Peer::Knot, Peer::Nsd],
            &[Peer::KnotXdp, Peer::Knot, Peer::Nsd, Peer::Unbound, Peer::Dnsmasq],
        )
        .into_iter()
        .map(Subject::Peer),
    );
    subjects.extend(plan.reference.clone().map(Subject::Reference));
    subjects.retain(|subject| is_wanted(&plan.wanted, &subject.label()));
    subjects
}

/// Answers of type A that these names have on average, rounded; what the constant reflector can send.
fn mean_answers(foundation: &Foundation, wanted: impl Fn(&str) -> bool) -> u32 {
    mean(foundation.entries(usize::MAX).iter().filter(|(name, _)| wanted(name)).map(|(_, v4)| v4.len()))
}

/// The same of the names in these lines.
fn mean_answers_of(foundation: &Foundation, lines: &[String]) -> u32 {
    let names: std::collections::HashSet<&str> =
        lines.iter().filter_map(|line| line.strip_suffix(" A\n")).collect();
    mean_answers(foundation, |name| names.contains(name))
}

/// Mean of the counts, rounded, at most what the constant reflector can send.
fn mean(counts: impl Iterator<Item = usize>) -> u32 {
    let (sum, count) = counts.fold((0, 0), |(sum, count), one| (sum + one, count + 1));
    let mean = sum as f64 / f64::from(count.max(1));
    (mean.round() as u32).min(MAX_ANSWERS)
}

/// One line about what a saturated core answered; `what`: of which names.
fn tell(subject: &Subject, what: &str, seen: &Offered) {
    println!(
        "{:<28} {what:<18} {:>10}/s, {:.3} µs each; core busy {:>3.0} %",
        subject.label(),
        number(seen.answered.median()),
        seen.cpu.median(),
        seen.busy * 100.0,
    );
}
