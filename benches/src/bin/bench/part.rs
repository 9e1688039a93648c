//! A part of the bench as a row of a table: what is measured, of which subjects, at which points.

use anyhow::{Context as _, Result};
use bosh_dns_xdp_benches::{
    is_wanted,
    report::{Bar, Data, Figure, Rounds, Sweep, number},
};
use whole_system_tests::interrupt;

use crate::{Plan, subject::Subject};

/// A row of [`crate::PARTS`].
pub(crate) struct Part {
    pub(crate) name: &'static str,
    /// The method, for the report.
    pub(crate) about: &'static str,
    /// Meaning of the points.
    pub(crate) axis: &'static str,
    /// The points; `ordered` if lines connect them.
    pub(crate) points: fn(&Plan) -> Vec<String>,
    pub(crate) ordered: bool,
    /// The quantities measured at each point: title and unit.
    pub(crate) quantities: &'static [(&'static str, &'static str)],
    pub(crate) subjects: fn(&Plan) -> Vec<Subject>,
    pub(crate) measure: Measure,
}

/// How one round is measured.
pub(crate) enum Measure {
    /// One subject after the other.
    Each(fn(&Plan, &Subject, &mut Table) -> Result<()>),
    /// All subjects alternately: a disturbance of the machine affects all.
    Together(fn(&Plan, &[Subject], &mut Table) -> Result<()>),
}

/// Values by quantity, subject and point.
pub(crate) struct Table(Vec<Sweep>);

impl Part {
    /// Measures all rounds and returns a figure for each quantity.
    pub(crate) fn measure(&self, plan: &Plan) -> Result<Vec<Figure>> {
        let new = |_: &_| Sweep::new(self.axis, (self.points)(plan), self.ordered);
        let mut table = Table(self.quantities.iter().map(new).collect());
        let mut subjects = (self.subjects)(plan);
        subjects.retain(|subject| is_wanted(&plan.wanted, &subject.label()));
        for _ in 0..plan.rounds {
            match self.measure {
                Measure::Each(measure) => {
                    for subject in &subjects {
                        anyhow::ensure!(!interrupt::requested(), "interrupted");
                        measure(plan, subject, &mut table).with_context(|| subject.label())?;
                    }
                }
                Measure::Together(measure) => measure(plan, &subjects, &mut table)?,
            }
        }
        let figures = self.quantities.iter().zip(table.0).map(|(&(title, unit), sweep)| {
            let data = if sweep.places.len() == 1 { Data::Bars(bars(sweep)) } else { Data::Sweep(sweep) };
            Figure::new(title, self.about, unit, data)
        });
        Ok(figures.collect())
    }
}

impl Table {
    /// Adds the values of a subject at a point, one entry for each quantity (empty if not measured),
    /// and prints them.
    pub(crate) fn put(&mut self, label: &str, point: usize, values: &[Rounds]) {
        let place = self.0.first().and_then(|sweep| sweep.places.get(point)).map_or("", String::as_str);
        let medians: Vec<String> = values.iter().map(|value| number(value.median())).collect();
        println!("{label:<28} {place:<32} {}", medians.join("  "));
        for (sweep, value) in self.0.iter_mut().zip(values) {
            for &value in &value.0 {
                sweep.push(label, label.starts_with("ours"), point, value);
            }
        }
    }

    /// Like [`Self::put`], for single values.
    pub(crate) fn put_each(&mut self, label: &str, point: usize, values: &[f64]) {
        let values: Vec<Rounds> = values.iter().map(|&value| Rounds(vec![value])).collect();
        self.put(label, point, &values);
    }
}

/// Returns a sweep with a single point as bars.
fn bars(sweep: Sweep) -> Vec<Bar> {
    let bar = |series: bosh_dns_xdp_benches::report::Series| {
        let value = series.values.into_iter().next().unwrap_or_default();
        Bar { label: series.label, value, ours: series.ours }
    };
    sweep.series.into_iter().map(bar).collect()
}
