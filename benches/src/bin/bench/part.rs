//! A part of the bench as a row of a table: what is measured, of which subjects, at which points; and
//! the selection and order of the queries.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    is_wanted,
    lab::Lab,
    report::{Bar, Data, Figure, Rounds, Sweep, number},
    yardstick::MAX_ANSWERS,
};
use tempfile::TempDir;
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
                        // An error in place of the signal's effect: the namespaces and programs
                        // must be removed.
                        anyhow::ensure!(!interrupt::requested(), "interrupted");
                        measure(plan, subject, &mut table).with_context(|| subject.label())?;
                    }
                }
                Measure::Together(measure) => measure(plan, &subjects, &mut table)?,
            }
        }
        let mut figures = Vec::with_capacity(self.quantities.len());
        for (&(title, unit), sweep) in self.quantities.iter().zip(table.0) {
            let data = if sweep.places.len() == 1 {
                Data::Bars(bars(sweep))
            } else {
                Data::Sweep(sweep)
            };
            figures.push(Figure::new(title, self.about, unit, data));
        }
        Ok(figures)
    }
}

impl Table {
    /// Adds the values of a subject at a point, one entry for each quantity (empty if not measured),
    /// and prints them.
    pub(crate) fn put(&mut self, label: &str, point: usize, values: &[Rounds]) {
        let place = self
            .0
            .first()
            .and_then(|sweep| sweep.places.get(point))
            .map_or("", String::as_str);
        let medians: Vec<String> = values.iter().map(|value| number(value.median())).collect();
        println!("{label:<28} {place:<32} {}", medians.join("  "));
        for (sweep, value) in self.0.iter_mut().zip(values) {
            for &value in &value.0 {
                // Other builds of this server are drawn like other servers, which tells them apart.
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
    let mut bars = Vec::with_capacity(sweep.series.len());
    for mut series in sweep.series {
        bars.push(Bar {
            label: series.label,
            value: series.values.pop().unwrap_or_default(),
            ours: series.ours,
        });
    }
    bars
}

/// A foundation and the queries for some of its names.
pub(crate) struct Setting {
    /// All its queried names fit into the map.
    pub(crate) foundation: Foundation,
    /// Mean number of answers, within the constant reflector's limit.
    pub(crate) answers: u32,
    /// Queries by order.
    pub(crate) queries: Vec<Queries>,
    /// Whether few of many names are queried.
    pub(crate) is_few: bool,
    /// How server and client are joined.
    pub(crate) lab: fn() -> Result<Lab>,
    /// Contents of records.json that replace each other under load; none: it stays as it is.
    pub(crate) changes: Vec<Vec<u8>>,
}

/// The names of a foundation that are queried.
#[derive(Clone, Copy)]
pub(crate) enum Selection {
    /// Group names, aliases and long forms: the names that applications query.
    Shared,
    /// This many of all forms, evenly spread.
    Evenly(usize),
}

impl Setting {
    pub(crate) fn new(instances: usize, selection: Selection, orders: &[Order]) -> Result<Self> {
        let mut foundation = Foundation::generate(instances)?;
        let entries = foundation.entries(usize::MAX);
        let selected: Vec<_> = match selection {
            Selection::Shared => entries.iter().filter(|(name, _)| is_shared(name)).collect(),
            Selection::Evenly(count) => {
                // Three quarters of the map are for listed names, all of which must fit.
                foundation.max_names = (foundation.names().count() * 3 / 2).max(65_536) as u32;
                let count = count.min(entries.len());
                (0..count)
                    .map(|number| &entries[number * entries.len() / count])
                    .collect()
            }
        };
        let answers: usize = selected.iter().map(|(_, addresses)| addresses.len()).sum();
        let mean = (answers as f64 / selected.len().max(1) as f64).round() as u32;
        let mut lines = Vec::with_capacity(selected.len());
        for (name, _) in &selected {
            lines.push(format!("{name} A\n"));
        }
        let mut queries = Vec::with_capacity(orders.len());
        for &order in orders {
            queries.push(Queries::write(ordered(&lines, order))?);
        }
        let is_few = matches!(selection, Selection::Evenly(count) if count < instances);
        let answers = mean.min(MAX_ANSWERS);
        Ok(Self {
            foundation,
            answers,
            queries,
            is_few,
            lab: Lab::split,
            changes: Vec::new(),
        })
    }

    /// Returns the queries of the first order.
    pub(crate) fn queries(&self) -> Result<&Queries> {
        self.queries.first().context("an order")
    }
}

/// Returns whether applications query the name: those of groups, aliases and long forms.
pub(crate) fn is_shared(name: &str) -> bool {
    name.starts_with("q-s0.") || name.ends_with(".internal.")
}

/// Queries as `name type` lines.
pub(crate) struct Queries {
    pub(crate) lines: Vec<String>,
    /// The same lines in a file, for dnsperf.
    pub(crate) path: PathBuf,
    /// UDP payload size of queries with EDNS; not for dnsperf.
    pub(crate) edns: Option<u16>,
    /// Removes the file when dropped.
    _folder: TempDir,
}

impl Queries {
    pub(crate) fn write(lines: Vec<String>) -> Result<Self> {
        let folder = TempDir::with_prefix("bdx-queries-")?;
        let path = folder.path().join("queries");
        fs::write(&path, lines.concat()).with_context(|| path.display().to_string())?;
        Ok(Self {
            lines,
            path,
            edns: None,
            _folder: folder,
        })
    }
}

/// Order of the queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// As the foundation lists them: related names follow each other.
    AsListed,
    /// At random, each name equally often.
    Random,
    /// By Zipf's law at random: the name of rank n in proportion to 1/n.
    Zipf,
}

impl Order {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::AsListed => "in order",
            Self::Random => "at random",
            Self::Zipf => "by Zipf",
        }
    }
}

/// Least number of lines drawn for a random order.
const DRAWN: usize = 100_000;

/// Returns these lines in an order, repeated for random orders. The same lines always give the same
/// result.
fn ordered(lines: &[String], order: Order) -> Vec<String> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut shuffled = lines.to_vec();
    if order == Order::AsListed || lines.is_empty() {
        return shuffled;
    }
    let mut drawn = Vec::new();
    if order == Order::Random {
        // By whole rounds of the list, so that each name is drawn equally often.
        while drawn.len() < DRAWN.max(lines.len()) {
            random.shuffle(&mut shuffled);
            drawn.extend_from_slice(&shuffled);
        }
        return drawn;
    }
    random.shuffle(&mut shuffled);
    // By the ranks after the shuffle: the first names of a foundation are related.
    let mut all = 0.0;
    let mut sums = Vec::with_capacity(shuffled.len());
    for rank in 1..=shuffled.len() {
        all += 1.0 / rank as f64;
        sums.push(all);
    }
    for _ in 0..DRAWN.max(lines.len()) {
        let at = random.f64() * all;
        let rank = sums
            .partition_point(|&sum| sum < at)
            .min(shuffled.len() - 1);
        drawn.push(shuffled[rank].clone());
    }
    drawn
}
