//! Queries per second of one saturated core, a figure that is comparable between all subjects.
//!
//! The generator offers more than the server's core can serve, so the core never sleeps and always
//! finds the next packet. All subjects are in the same regime, and the cost of wake-ups does not
//! distort the cost of a query.

use std::time::Duration;

use anyhow::Result;
use bosh_dns_xdp_benches::{
    figures::quoted,
    foundation::Foundation,
    generator::Load,
    is_wanted,
    peers::Peer,
    report::{self, Bar, Data, Figure, Rounds, number},
    yardstick::{Hook, MAX_ANSWERS},
};

use crate::{
    Plan,
    queries::{self, Order, Queries},
    subject::Subject,
    turns::{Saturated, Turns},
};

/// Offered rates of the curve: each twice the previous one, denser at the bend.
pub(super) const LADDER: [u32; 12] = [
    16_000, 31_000, 62_000, 125_000, 250_000, 354_000, 500_000, 707_000, 1_000_000, 1_414_000, 2_000_000,
    2_828_000,
];

/// Size of the foundation for the comparison of subjects.
const INSTANCES: usize = 1_000;

/// The hooks, by the names of this server's modes.
pub(super) const HOOKS: [(&str, Hook); 2] = [("tc", Hook::Tc), ("native", Hook::Native)];

/// Title of the main figure.
pub(super) const TITLE: &str = "Queries per second of one saturated core";

/// Title of the figure of CPU utilisation.
const BUSY_TITLE: &str = "CPU utilisation of that core";

/// Title of the figure of names and orders.
pub(super) const SCALE_TITLE: &str = "Saturated core by names and order of queries";

/// Returns the rates of all subjects, and answered against offered load.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(INSTANCES)?;
    let lines = queries::for_names(&foundation, queries::is_shared);
    let answers = mean_answers(&foundation, queries::is_shared);
    let queries = Queries::write(&queries::ordered(&lines, Order::Random))?;
    let subjects = subjects(plan, answers);
    let mut seen = vec![Saturated::default(); subjects.len()];
    let mut curves = Curves::new();
    for round in 0..plan.rounds {
        let turns = Turns::start(subjects.iter().map(|subject| (subject, &foundation)))?;
        turns.saturate(&vec![&queries; subjects.len()], plan.turns, &mut seen)?;
        if plan.with_curves() && round < plan.sweep_rounds {
            let misses = Queries::write(&queries::with_hits(&queries.lines, 0))?;
            curves.measure(&turns, &queries, &misses)?;
        }
    }
    for (subject, seen) in subjects.iter().zip(&seen) {
        seen.tell(subject, "");
    }
    let bars = |value: fn(&Saturated) -> &Rounds| -> Vec<Bar> {
        let bar = |(subject, seen): (&Subject, &Saturated)| Bar {
            label: subject.label(),
            value: value(seen).clone(),
            ours: subject.is_ours(),
        };
        subjects.iter().zip(&seen).map(bar).collect()
    };
    let busy = bars(|seen| &seen.busy);
    let mut bars = bars(|seen| &seen.rates);
    if plan.reference.is_none() {
        let label = format!("bosh-dns (quoted: measured {})", quoted::SATURATED_ON);
        bars.push(Bar { label, value: Rounds(vec![quoted::SATURATED]), ours: false });
    }
    let mut figures = vec![
        Figure::new(
            TITLE,
            format!(
                "{INSTANCES} instances; group names, aliases and long forms at random, A, no EDNS, {answers} \
                 answers on average. A generator in the kernel, on the other core, offers more than the \
                 server's core can answer, or the load at which it answers most; replies are counted, and \
                 freed, where they are sent. The rate is replies per second of that core's CPU time; loads \
                 under which it slept between packets do not count. The bare reflector sends an empty reply; \
                 the constant reflector sends {answers} fixed answers without a look-up, which is the \
                 minimum cost of any answer."
            ),
            "queries/s",
            Data::Bars(bars),
        ),
        Figure::new(
            BUSY_TITLE,
            "Below 100 %, the generator paused or reached its limit, or the server did not keep up with \
             the next higher rate.",
            "%",
            Data::Bars(busy),
        ),
    ];
    if plan.with_curves() {
        figures.extend(curves.figures());
    }
    Ok(figures)
}

/// Answered against offered load, and losses before the server.
struct Curves {
    answered: report::Sweep,
    /// Percentage of the offered load.
    dropped: report::Sweep,
}

impl Curves {
    fn new() -> Self {
        let new = || {
            let places = LADDER.map(|rate| number(rate.into())).to_vec();
            report::Sweep::new("offered, queries/s", places, true)
        };
        Self { answered: new(), dropped: new() }
    }

    /// Offers each rate to each subject. This server also gets it as `misses`, which the program
    /// always leaves to userspace.
    fn measure(&mut self, turns: &Turns<'_>, queries: &Queries, misses: &Queries) -> Result<()> {
        let asked = turns.cells.iter().flat_map(|cell| {
            let label = cell.subject.label();
            let missed = cell.subject.is_ours().then(|| (cell, misses, format!("{label}, {MISSES}")));
            [(cell, queries, label)].into_iter().chain(missed)
        });
        for (cell, queries, label) in asked {
            let mut loaded = cell.loaded(queries)?;
            for (place, &rate) in LADDER.iter().enumerate() {
                let seen = loaded.offer(Load::Rate { rate, burst: BURST }, OFFERED_FOR)?;
                if seen.sent < OFFERED * f64::from(rate) {
                    println!("{label:<28} only {}/s were sent", number(seen.sent));
                    continue;
                }
                println!(
                    "{label:<42} {:>9}/s offered, {:>9}/s answered",
                    number(rate.into()),
                    number(seen.answered.median())
                );
                for &value in &seen.answered.0 {
                    self.answered.push(&label, cell.subject.is_ours(), place, value);
                }
                self.dropped.push(&label, cell.subject.is_ours(), place, seen.dropped_before * 100.0);
            }
        }
        Ok(())
    }

    fn figures(self) -> [Figure; 2] {
        [
            Figure::new(
                CURVE_TITLE,
                "Queries are sent at this rate whether answered or not, up to the generator's limit. Beyond \
                 its best rate a userspace server answers less, because its core spends time on packets that \
                 are never read. This server is also measured with queries of type ANY, which the program \
                 leaves to userspace: it sheds queries beyond userspace's capacity (not in mode off, which \
                 has no program).",
                "queries/s",
                Data::Sweep(self.answered),
            ),
            Figure::new(
                "Dropped before the server, share of offered load",
                "Queries for which the ring of the server's interface had no room.",
                "%",
                Data::Sweep(self.dropped),
            ),
        ]
    }
}

/// Title of the figure of answered against offered load.
pub(super) const CURVE_TITLE: &str = "Answered share of offered load";

/// Suffix of the label of a subject that is measured with misses only.
pub(super) const MISSES: &str = "all to userspace";

/// Least share of a rate that the generator must send for the rate to count as offered.
const OFFERED: f64 = 0.95;

/// Duration of each offered rate.
const OFFERED_FOR: Duration = Duration::from_millis(250);

/// Queries sent together at an offered rate.
const BURST: u32 = 16;

/// Returns the rates of a saturated core by number of names and by their order.
pub(super) fn measure_scale(plan: &Plan) -> Result<Vec<Figure>> {
    let sizes = plan.pick(&[1_000, 100_000], &[1_000, 10_000, 100_000]);
    let orders = plan.pick(&[Order::Random], &[Order::AsListed, Order::Random, Order::Zipf]);
    let modes = plan.pick(&HOOKS[..1], &HOOKS);
    let places: Vec<String> = sizes
        .iter()
        .flat_map(|size| orders.iter().map(|order| format!("{} {}", number(*size as f64), order.label())))
        .collect();
    let mut rates = report::Sweep::new("names, order", places, false);
    let sizes: Vec<Size> = sizes.iter().map(|&size| Size::new(size, size, &orders)).collect::<Result<_>>()?;
    let subjects: Vec<Vec<Subject>> = sizes
        .iter()
        .map(|size| {
            let pair = |&(mode, hook)| [Subject::Ours(mode), Subject::Constant(hook, size.answers)];
            let mut subjects: Vec<_> = modes.iter().flat_map(pair).chain([Subject::Userspace]).collect();
            subjects.retain(|subject| is_wanted(&plan.wanted, &subject.label()));
            subjects
        })
        .collect();
    // Each subject with the index of its size: the sizes of a subject are also interleaved.
    let all: Vec<(usize, &Subject)> = subjects
        .iter()
        .enumerate()
        .flat_map(|(number, subjects)| subjects.iter().map(move |subject| (number, subject)))
        .collect();
    let mut sums = vec![vec![Saturated::default(); all.len()]; orders.len()];
    for _ in 0..plan.sweep_rounds {
        let turns = Turns::start(all.iter().map(|&(size, subject)| (subject, &sizes[size].foundation)))?;
        for (number, sums) in sums.iter_mut().enumerate() {
            let queries: Vec<&Queries> = all.iter().map(|&(size, _)| &sizes[size].queries[number]).collect();
            turns.saturate(&queries, plan.scale_turns, sums)?;
        }
    }
    for (number, sums) in sums.iter().enumerate() {
        for (&(size, subject), seen) in all.iter().zip(sums) {
            let place = size * orders.len() + number;
            seen.tell(subject, rates.places.get(place).map_or("", String::as_str));
            // All constant reflectors share one label, whatever their number of answers.
            let label = match subject {
                Subject::Constant(hook, _) => {
                    format!("constant answers, {}", crate::subject::hook_label(*hook))
                }
                subject => subject.label(),
            };
            for &value in &seen.rates.0 {
                rates.push(&label, subject.is_ours(), place, value);
            }
        }
    }
    let about = "As many names as instances, of all forms including single instances, all published \
                 (max_names is raised accordingly); the constant reflector sends the mean number of answers \
                 of these names. Zipf: the name of rank n is queried in proportion to 1/n.";
    Ok(vec![Figure::new(SCALE_TITLE, about, "queries/s", Data::Sweep(rates))])
}

/// A foundation and its queries.
pub(super) struct Size {
    /// All its names fit into the map.
    pub(super) foundation: Foundation,
    /// Mean number of answers per name.
    answers: u32,
    /// Names spread over the whole foundation, by order.
    pub(super) queries: Vec<Queries>,
}

impl Size {
    /// Generates `instances` instances and selects `names` of their names.
    pub(super) fn new(instances: usize, names: usize, orders: &[Order]) -> Result<Self> {
        let mut foundation = Foundation::generate(instances)?;
        foundation.max_names = (foundation.names().count() * 3 / 2).max(65_536) as u32;
        let lines = queries::evenly(&queries::for_names(&foundation, |_| true), names);
        let answers = mean_answers_of(&foundation, &lines);
        let queries = orders.iter().map(|&order| Queries::write(&queries::ordered(&lines, order)));
        Ok(Self { answers, queries: queries.collect::<Result<_>>()?, foundation })
    }
}

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

/// Returns the mean number of A records of these names, rounded, within the constant reflector's
/// limit.
fn mean_answers(foundation: &Foundation, wanted: impl Fn(&str) -> bool) -> u32 {
    mean(foundation.entries(usize::MAX).iter().filter(|(name, _)| wanted(name)).map(|(_, v4)| v4.len()))
}

/// Returns the same for the names in these lines.
fn mean_answers_of(foundation: &Foundation, lines: &[String]) -> u32 {
    let names: std::collections::HashSet<&str> =
        lines.iter().filter_map(|line| line.strip_suffix(" A\n")).collect();
    mean_answers(foundation, |name| names.contains(name))
}

/// Returns the mean, rounded, within the constant reflector's limit.
fn mean(counts: impl Iterator<Item = usize>) -> u32 {
    let (sum, count) = counts.fold((0, 0), |(sum, count), one| (sum + one, count + 1));
    let mean = sum as f64 / f64::from(count.max(1));
    (mean.round() as u32).min(MAX_ANSWERS)
}
