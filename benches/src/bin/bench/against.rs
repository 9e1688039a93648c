//! Compares builds of the server, to show the effect of a change or of a single mechanism.
//!
//! A build without the mechanism and the current one are measured alternately on a saturated core,
//! with small and large fleets and several orders of names. A mechanism without a gain beyond the
//! spread in any of them should be removed.

use std::{path::PathBuf, thread, time::Duration};

use anyhow::{Context as _, Result};
use bosh_dns_xdp_benches::{
    generator::Load,
    report::{self, Data, Figure, number},
};
use whole_system_tests::server;

use crate::{
    Plan,
    queries::Order,
    saturated::Size,
    subject::Subject,
    turns::{Saturated, Turns},
};

/// Sizes of the foundation, and how many of its names are queried: all, or few of many.
const SHAPES: [(usize, usize); 3] = [(1_000, 1_000), (100_000, 100_000), (100_000, 1_000)];

/// Pause after the first load. The publisher examines the use of names 1, 3 and 7 seconds after new
/// records.
const SETTLED: Duration = Duration::from_secs(8);

/// Best rates of the current build and of the others, measured alternately.
pub(super) fn measure(plan: &Plan, others: &[PathBuf], mode: &'static str) -> Result<Figure> {
    let shapes = plan.pick(&SHAPES[..2], &SHAPES);
    let orders = plan.pick(&[Order::Random], &[Order::AsListed, Order::Random, Order::Zipf]);
    let places: Vec<String> = shapes
        .iter()
        .flat_map(|(size, names)| {
            let (size, names) = (number(*size as f64), number(*names as f64));
            orders.iter().map(move |order| format!("{names} of {size}, {}", order.label()))
        })
        .collect();
    let mut sweep = report::Sweep::new("queried names, instances, order", places.clone(), false);
    let ours = server::program()?.canonicalize().context("our own program")?;
    let subjects: Vec<Subject> =
        [ours].iter().chain(others).map(|program| Subject::Build(program.clone(), mode)).collect();
    for (number_of_shape, &(size, count)) in shapes.iter().enumerate() {
        let Size { foundation, queries: files, .. } = Size::new(size, count, &orders)?;
        let mut sums = vec![vec![Saturated::default(); subjects.len()]; files.len()];
        for _ in 0..plan.rounds {
            let turns = Turns::start(subjects.iter().map(|subject| (subject, &foundation)))?;
            if let (Some(first), true) = (files.first(), count < size) {
                for cell in &turns.cells {
                    cell.loaded(first)?
                        .offer(Load::Rate { rate: 100_000, burst: 1 }, Duration::from_millis(250))?;
                }
                thread::sleep(SETTLED);
            }
            for (queries, sums) in files.iter().zip(&mut sums) {
                turns.saturate(&vec![queries; subjects.len()], plan.turns, sums)?;
            }
        }
        for (order, sums) in sums.iter().enumerate() {
            let place = number_of_shape * orders.len() + order;
            for (subject, seen) in subjects.iter().zip(sums) {
                seen.tell(subject, &places[place]);
                for &value in &seen.rates.0 {
                    sweep.push(&subject.label(), *subject == subjects[0], place, value);
                }
            }
        }
    }
    Ok(Figure::new(
        format!("Builds side by side, by saturated core, {mode}"),
        "Builds take turns of a quarter of a second; queries answered per second of the core's CPU time.",
        "queries/s",
        Data::Sweep(sweep),
    ))
}
