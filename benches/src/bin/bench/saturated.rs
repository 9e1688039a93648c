//! Queries per second of one saturated core: the figure that every subject has alike.
//!
//! The generator offers more than the server's core can do, so the core never sleeps and
//! always finds the next packet: there is one regime only, and what a query costs is not
//! mixed with what waking up costs.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    is_wanted,
    lab::Lab,
    peers::Peer,
    reference::quoted,
    report::{self, Bar, Data, Figure, Rounds, number},
    yardstick::{Hook, MAX_ANSWERS},
};

use crate::{
    Plan,
    cell::{Cell, Offered},
    queries::{self, Order, Queries},
    subject::Subject,
};

/// Rates that are offered: each 1.41 times the one before, up to what the generator can do.
const LADDER: [u32; 17] = [
    11_000, 16_000, 22_000, 31_000, 44_000, 62_000, 88_000, 125_000, 177_000, 250_000, 354_000, 500_000,
    707_000, 1_000_000, 1_414_000, 2_000_000, 2_828_000,
];

/// A rate of which less than this share is answered is past what the server can do.
const KEPT: f64 = 0.95;

/// A subject that answers less than this share of its best rate has collapsed.
const COLLAPSED: f64 = 0.9;

/// Size of the foundation where the subjects are compared.
const INSTANCES: usize = 1_000;

/// The hooks, as ours calls them.
pub(super) const HOOKS: [(&str, Hook); 3] =
    [("tc", Hook::Tc), ("generic", Hook::Generic), ("native", Hook::Native)];

/// Title of the figure that claims rest on.
pub(super) const TITLE: &str = "Queries per second of one saturated core";

/// Title of the figure that tells whether a rate is the server's or the generator's.
pub(super) const BUSY_TITLE: &str = "Share of the time in which the server's core was busy at its best rate";

/// A core that is busy for less than this percentage of the time is not saturated: nothing
/// is claimed of its rate.
pub(super) const SATURATED: f64 = 90.0;

/// Title of the figure of names and orders.
pub(super) const SCALE_TITLE: &str = "Saturated core by names and the order in which they are asked for";

/// Best rates of all subjects, and what is answered of what is offered.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(INSTANCES)?;
    let lines = queries::for_names(&foundation, queries::is_shared);
    let answers = mean_answers(&foundation, queries::is_shared);
    let queries = Queries::write(&queries::ordered(&lines, Order::Random))?;
    let subjects = subjects(plan, answers);
    let mut best: BTreeMap<usize, Rounds> = BTreeMap::new();
    let mut busy: BTreeMap<usize, Rounds> = BTreeMap::new();
    let mut curve =
        report::Sweep::new("offered, queries/s", LADDER.map(|rate| number(rate.into())).to_vec(), true);
    for round in 0..plan.rounds {
        for (number, subject) in subjects.iter().enumerate() {
            let cell = Cell::start(Lab::split()?, subject, &foundation)?;
            let offers = climb(plan, &cell, &queries, plan.with_curves() && round == 0)?;
            for offered in &offers {
                if let Some(place) = LADDER.iter().position(|&rate| rate == offered.rate) {
                    for &value in &offered.answered.0 {
                        curve.push(&subject.label(), subject.is_ours(), place, value);
                    }
                }
            }
            if let Some(highest) = highest(&offers) {
                tell(subject, highest);
                best.entry(number).or_default().0.extend(&highest.answered.0);
                busy.entry(number).or_default().0.push(highest.busy * 100.0);
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
    let mut bars = bars(&best);
    if plan.reference.is_none() {
        let label = format!("bosh-dns (quoted: measured {})", quoted::SATURATED_ON);
        bars.push(Bar { label, value: Rounds(vec![quoted::SATURATED]), ours: false });
    }
    Ok(vec![
        Figure {
            title: TITLE.to_owned(),
            about: format!(
                "{INSTANCES} instances; group names, aliases and long forms at random, A, no EDNS, {answers} answers on \
                 average. kxdpgun offers ever more from one core until the server's core, busy all the time, answers no \
                 more: the best rate. The bare reflector sends an empty reply, the constant one {answers} answers, always \
                 the same, with no look-up: what any answer costs."
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
        Figure {
            title: "Answered of what is offered".to_owned(),
            about: "Past its best rate a server in userspace answers less than before: packets that nobody will read eat \
                    its core."
                .to_owned(),
            unit: "queries/s".to_owned(),
            data: Data::Sweep(curve),
        },
    ])
}

/// Best rates by number of names and by the order in which they are asked for.
pub(super) fn measure_scale(plan: &Plan) -> Result<Vec<Figure>> {
    let sizes = plan.pick(&[1_000, 100_000], &[1_000, 10_000, 100_000]);
    let orders = plan.pick(&[Order::Random], &[Order::AsListed, Order::Random, Order::Zipf]);
    let mut towns = Vec::new();
    for &size in &sizes {
        // As many names as there are instances, spread over the whole foundation.
        let mut foundation = Foundation::generate(size)?;
        foundation.max_names = (foundation.names().count() * 3 / 2).max(65_536) as u32;
        let lines = queries::evenly(&queries::for_names(&foundation, |_| true), size);
        let answers = mean_answers_of(&foundation, &lines);
        let files = orders
            .iter()
            .map(|&order| Queries::write(&queries::ordered(&lines, order)))
            .collect::<Result<Vec<_>>>()?;
        towns.push((size, foundation, files, answers));
    }
    let places: Vec<String> = towns
        .iter()
        .flat_map(|(size, ..)| {
            orders.iter().map(|order| format!("{} {}", number(*size as f64), order.label()))
        })
        .collect();
    let mut sweep = report::Sweep::new("names, order", places, false);
    for _ in 0..plan.sweep_rounds {
        let modes = plan.pick(&HOOKS[..1], &HOOKS);
        for (mode, hook) in modes {
            for (place, (_, foundation, files, answers)) in towns.iter().enumerate() {
                for subject in [Subject::Ours(mode), Subject::Constant(hook, *answers)] {
                    // The names make no difference to a constant: but their lengths do.
                    scale_of(plan, &subject, foundation, files, place * orders.len(), &mut sweep)?;
                }
            }
        }
        for (place, (_, foundation, files, _)) in towns.iter().enumerate() {
            scale_of(plan, &Subject::Userspace, foundation, files, place * orders.len(), &mut sweep)?;
        }
    }
    Ok(vec![Figure {
        title: SCALE_TITLE.to_owned(),
        about: "As many names as there are instances, of all forms, single instances among them, all of them published \
                (max_names is set for it); the constant reflector sends as many answers as these names have on average. \
                Zipf: the name of rank n is asked for in proportion to 1/n."
            .to_owned(),
        unit: "queries/s".to_owned(),
        data: Data::Sweep(sweep),
    }])
}

/// Best rates of one subject for the orders of one foundation, from place `first` on.
fn scale_of(
    plan: &Plan,
    subject: &Subject,
    foundation: &Foundation,
    files: &[Queries],
    first: usize,
    sweep: &mut report::Sweep,
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
        let offers = climb(plan, &cell, queries, false)?;
        if let Some(highest) = highest(&offers) {
            tell(subject, highest);
            for &value in &highest.answered.0 {
                sweep.push(&label, subject.is_ours(), first + offset, value);
            }
        }
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

/// Offers ever more, until more is not answered any more; with `whole` each rate of the
/// [`LADDER`]. Then a little less and a little more than what was best.
pub(super) fn climb(plan: &Plan, cell: &Cell<'_>, queries: &Queries, whole: bool) -> Result<Vec<Offered>> {
    let mut offers: Vec<Offered> = Vec::new();
    let start = if whole { 0 } else { first_rung(cell.subject) };
    let offer = |rate| cell.offer(queries, rate, plan.saturated_duration);
    for &rate in &LADDER[start..] {
        let offered = offer(rate)?;
        // A subject knows all names that it is asked for: else errors would be measured.
        ensure!(
            offered.wrong == 0,
            "{}: {} replies with another RCODE than NOERROR",
            cell.subject.label(),
            offered.wrong
        );
        let answered = offered.answered.median();
        offers.push(offered);
        let best = highest(&offers).map_or(0.0, |best| best.answered.median());
        if !whole && answered < COLLAPSED * best {
            break;
        }
    }
    // The first rate was too much already.
    for &rate in LADDER[..start].iter().rev() {
        if offers.iter().any(|offered| offered.answered.median() >= KEPT * f64::from(offered.rate)) {
            break;
        }
        offers.push(offer(rate)?);
    }
    if let Some(best) = highest(&offers).map(|best| best.rate) {
        for factor in [0.84, 1.19] {
            let rate = (f64::from(best) * factor) as u32;
            if rate < LADDER[LADDER.len() - 1] {
                offers.push(offer(rate)?);
            }
        }
    }
    Ok(offers)
}

/// The offer of which most was answered.
pub(super) fn highest(offers: &[Offered]) -> Option<&Offered> {
    offers.iter().max_by(|a, b| a.answered.median().total_cmp(&b.answered.median()))
}

/// Where on the [`LADDER`] to begin: what the subject surely answers.
fn first_rung(subject: &Subject) -> usize {
    match subject {
        Subject::Reference(_) => 0,
        Subject::Peer(Peer::KnotXdp) => 12,
        Subject::Peer(Peer::Dnsmasq) => 6,
        Subject::Peer(_) => 8,
        Subject::Userspace | Subject::Build(..) => 10,
        Subject::Ours("native") | Subject::Reflector(Hook::Native) | Subject::Constant(Hook::Native, _) => 12,
        Subject::Ours(_) | Subject::Reflector(_) | Subject::Constant(..) => 14,
    }
}

/// One line about a subject's best rate.
fn tell(subject: &Subject, best: &Offered) {
    println!(
        "{:<28} {:>10}/s of {:>10} offered; core busy {:>3.0} %, {:>4.1} % dropped before it",
        subject.label(),
        number(best.answered.median()),
        number(best.rate.into()),
        best.busy * 100.0,
        best.dropped_before * 100.0,
    );
}
