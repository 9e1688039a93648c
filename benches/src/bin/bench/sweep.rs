//! Measures the same figures of each subject at each point of an axis.

use std::{array, ops::Range};

use anyhow::Result;
use bosh_dns_xdp_benches::{
    generator::Load,
    report::{self, Data, Figure, Rounds, number},
};

use crate::{
    Plan,
    cell::{Cell, LATENCY_RATE, PERCENTILES},
    queries::Queries,
};

/// Queries per second for cost measurements, low enough for all but the slowest subjects.
const COST_RATE: u32 = 50_000;

/// Figures at each point: cost, highest rate and latencies.
const FIGURES: usize = 2 + PERCENTILES.len();

/// Measurements so far: costs, highest rates, latencies.
pub(super) struct Sweep([report::Sweep; FIGURES]);

impl Sweep {
    /// Creates an empty sweep; `ordered` if the points have an order.
    pub(super) fn new(axis: &str, places: &[String], ordered: bool) -> Self {
        Self(array::from_fn(|_| report::Sweep::new(axis, places.to_vec(), ordered)))
    }

    /// Measures a subject at one point, or at several that are equivalent for it.
    pub(super) fn measure(
        &mut self,
        plan: &Plan,
        cell: &Cell<'_>,
        places: Range<usize>,
        queries: &Queries,
    ) -> Result<()> {
        let mut loaded = cell.loaded(queries)?;
        // The highest rate comes first: it warms everything up within hundredths of a second.
        let rate = loaded.saturate(plan.sweep_duration)?.per_core();
        let cost = loaded.offer(Load::Rate { rate: COST_RATE, burst: 1 }, plan.sweep_duration)?.cpu;
        drop(loaded);
        let [median, tail, far] = cell.asker()?.latencies(queries, plan.sweep_duration)?;
        let label = cell.subject.label();
        let named = self.0[0].places.get(places.clone()).unwrap_or_default();
        let values = [cost, rate, median, tail, far];
        let [cost, rate, median, tail, _] = values.each_ref().map(Rounds::median);
        println!(
            "{label:<26} {:<28} {cost:>6.2} µs/query  {:>9}/s of a saturated core  p50 {median:>5.0} µs  p99 {tail:>6.0} µs",
            named.join(", "),
            number(rate),
        );
        for place in places {
            for (figure, values) in self.0.iter_mut().zip(&values) {
                for &value in &values.0 {
                    figure.push(&label, cell.subject.is_ours(), place, value);
                }
            }
        }
        Ok(())
    }

    /// Returns the figures; `by` names the axis, `about` describes the method.
    pub(super) fn figures(self, by: &str, about: &str) -> Vec<Figure> {
        let latencies = PERCENTILES
            .map(|(name, _)| (format!("Latency by {by} at {LATENCY_RATE} queries/s: {name}"), "µs", ""));
        let heads = [
            (
                format!("CPU per query by {by}, {COST_RATE} queries/s"),
                "µs",
                " CPU time of the server's side, which is woken up for each of these queries; a server that \
                 cannot keep up is measured at the rate it answers.",
            ),
            (format!("Queries per second of one saturated core by {by}"), "queries/s", ""),
        ];
        let heads = heads.into_iter().chain(latencies);
        heads
            .zip(self.0)
            .map(|((title, unit, more), data)| {
                Figure::new(title, format!("{about}{more}"), unit, Data::Sweep(data))
            })
            .collect()
    }
}
