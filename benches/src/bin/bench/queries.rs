//! Selection and order of the queries.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use bosh_dns_xdp_benches::{foundation::Foundation, yardstick::MAX_ANSWERS};
use tempfile::TempDir;

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
        let is_shared = |name: &str| name.starts_with("q-s0.") || name.ends_with(".internal.");
        let selected: Vec<_> = match selection {
            Selection::Shared => entries.iter().filter(|(name, _)| is_shared(name)).collect(),
            Selection::Evenly(count) => {
                foundation.max_names = (foundation.names().count() * 3 / 2).max(65_536) as u32;
                let count = count.min(entries.len());
                (0..count).map(|number| &entries[number * entries.len() / count]).collect()
            }
        };
        let answers: usize = selected.iter().map(|(_, addresses)| addresses.len()).sum();
        let mean = (answers as f64 / selected.len().max(1) as f64).round() as u32;
        let lines: Vec<String> = selected.iter().map(|(name, _)| format!("{name} A\n")).collect();
        let queries = orders.iter().map(|&order| Queries::write(ordered(&lines, order)));
        let queries = queries.collect::<Result<_>>()?;
        let is_few = matches!(selection, Selection::Evenly(count) if count < instances);
        Ok(Self { foundation, answers: mean.min(MAX_ANSWERS), queries, is_few })
    }

    /// Returns the queries of the first order.
    pub(crate) fn queries(&self) -> Result<&Queries> {
        self.queries.first().context("an order")
    }
}

/// Queries as `name type` lines.
pub(crate) struct Queries {
    pub(crate) lines: Vec<String>,
    /// The same lines in a file, for dnsperf.
    pub(crate) path: PathBuf,
    /// Removes the file when dropped.
    _folder: TempDir,
}

impl Queries {
    pub(crate) fn write(lines: Vec<String>) -> Result<Self> {
        let folder = TempDir::with_prefix("bdx-queries-")?;
        let path = folder.path().join("queries");
        fs::write(&path, lines.concat()).with_context(|| path.display().to_string())?;
        Ok(Self { lines, path, _folder: folder })
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
    /// Returns the label of the order in the report.
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
        while drawn.len() < DRAWN.max(lines.len()) {
            random.shuffle(&mut shuffled);
            drawn.extend_from_slice(&shuffled);
        }
        return drawn;
    }
    random.shuffle(&mut shuffled);
    let mut all = 0.0;
    let mut sums = Vec::with_capacity(shuffled.len());
    for rank in 1..=shuffled.len() {
        all += 1.0 / rank as f64;
        sums.push(all);
    }
    for _ in 0..DRAWN.max(lines.len()) {
        let at = random.f64() * all;
        let rank = sums.partition_point(|&sum| sum < at).min(shuffled.len() - 1);
        drawn.push(shuffled[rank].clone());
    }
    drawn
}
