//! Builds of the server side by side: what a change, or a single mechanism, is worth.
//!
//! A build without the mechanism is measured in turns with ours by saturated core, on small
//! and large fleets and on several orders of names. What shows no gain beyond the spread on
//! any of them does not earn its place.

use std::{
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    generator::Load,
    lab::Lab,
    report::{self, Data, Figure, number},
};
use whole_system_tests::server;

use crate::{
    Plan,
    cell::Cell,
    queries::{self, Order, Queries},
    subject::Subject,
};

/// Sizes of the foundation, and how many of its names are asked for: all, or few of many.
const SHAPES: [(usize, usize); 3] = [(1_000, 1_000), (100_000, 100_000), (100_000, 1_000)];

/// How long the first load and the pause after it last: time for the publisher to look at
/// what is in use, which it does 1, 3 and 7 seconds after new records.
const SETTLED: Duration = Duration::from_secs(8);

/// Best rates of ours and of the other builds, in turns.
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
    let mut sweep = report::Sweep::new("names asked for, instances, order", places.clone(), false);
    let ours = server::program()?.canonicalize().context("our own program")?;
    let subjects: Vec<Subject> =
        [ours].iter().chain(others).map(|program| Subject::Build(program.clone(), mode)).collect();
    for (number_of_shape, &(size, count)) in shapes.iter().enumerate() {
        let mut foundation = Foundation::generate(size)?;
        foundation.max_names = (foundation.names().count() * 3 / 2).max(65_536) as u32;
        let lines = queries::evenly(&queries::for_names(&foundation, |_| true), count);
        let files = orders
            .iter()
            .map(|&order| Queries::write(&queries::ordered(&lines, order)))
            .collect::<Result<Vec<_>>>()?;
        for _ in 0..plan.rounds {
            for subject in &subjects {
                let started = Instant::now();
                let cell = Cell::start(Lab::split()?, subject, &foundation)?;
                if let Some(first) = files.first() {
                    cell.loaded(first)?
                        .offer(Load::Rate { rate: 100_000, burst: 1 }, Duration::from_millis(250))?;
                }
                if count < size {
                    thread::sleep(SETTLED.saturating_sub(started.elapsed()));
                }
                for (order, queries) in files.iter().enumerate() {
                    let place = number_of_shape * orders.len() + order;
                    let rate = cell.loaded(queries)?.saturate(plan.saturated_duration)?.answered.median();
                    println!("{:<44} {:<32} {:>10}/s", subject.label(), places[place], number(rate));
                    sweep.push(&subject.label(), *subject == subjects[0], place, rate);
                }
            }
        }
    }
    Ok(Figure {
        title: format!("Builds side by side, by saturated core, {mode}"),
        about: "Builds take turns, each started anew; one value a turn: the median of its slices.".to_owned(),
        unit: "queries/s".to_owned(),
        data: Data::Sweep(sweep),
    })
}
