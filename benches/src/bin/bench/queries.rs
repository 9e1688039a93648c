//! Selection and order of the queries.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use bosh_dns_xdp_benches::foundation::Foundation;
use tempfile::TempDir;

/// Queries as `name type` lines.
pub(super) struct Queries {
    pub(super) lines: Vec<String>,
    /// The same lines in a file, for dnsperf.
    pub(super) path: PathBuf,
    /// Removes the file when dropped.
    _folder: TempDir,
}

impl Queries {
    pub(super) fn write(lines: &[String]) -> Result<Self> {
        let folder = TempDir::with_prefix("bdx-queries-")?;
        let path = folder.path().join("queries");
        fs::write(&path, lines.concat()).with_context(|| path.display().to_string())?;
        Ok(Self { lines: lines.to_vec(), path, _folder: folder })
    }
}

/// A form of names: its label, and a test for it.
pub(super) type Form = (&'static str, fn(&str) -> bool);

/// The forms of names that applications query.
pub(super) const FORMS: [Form; 4] = [
    ("q-s0.q-g<id>.bosh", |name| name.starts_with("q-s0.q-g")),
    ("alias", |name| name.ends_with(".internal.")),
    ("q-s0.<group>.<network>...", |name| name.starts_with("q-s0.") && !name.starts_with("q-s0.q-g")),
    ("<instance id>...", |name| !name.starts_with("q-") && name.ends_with(".bosh.")),
];

/// Returns queries of type A for all published names that match `wanted`.
pub(super) fn for_names(foundation: &Foundation, wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let entries = foundation.entries(usize::MAX).into_iter();
    entries.filter(|(name, _)| wanted(name)).map(|(name, _)| format!("{name} A\n")).collect()
}

/// Returns whether a name is a group, an alias or a long form, and not a single instance.
pub(super) fn is_shared(name: &str) -> bool {
    name.starts_with("q-s0.") || name.ends_with(".internal.")
}

/// Order of the queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// As the foundation lists them: related names follow each other.
    AsListed,
    /// At random, each name equally often.
    Random,
    /// By Zipf's law at random: the name of rank n in proportion to 1/n.
    Zipf,
}

impl Order {
    /// Returns the label of the order in the report.
    pub(super) fn label(self) -> &'static str {
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
pub(super) fn ordered(lines: &[String], order: Order) -> Vec<String> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut shuffled = lines.to_vec();
    match order {
        Order::AsListed => shuffled,
        Order::Random => {
            let mut drawn = Vec::new();
            while drawn.len() < DRAWN.max(lines.len()) && !lines.is_empty() {
                random.shuffle(&mut shuffled);
                drawn.extend_from_slice(&shuffled);
            }
            drawn
        }
        Order::Zipf => {
            random.shuffle(&mut shuffled);
            let sums: Vec<f64> = (1..=shuffled.len())
                .scan(0.0, |sum, rank| {
                    *sum += 1.0 / rank as f64;
                    Some(*sum)
                })
                .collect();
            let Some(&all) = sums.last() else { return Vec::new() };
            let mut draw = || {
                let at = random.f64() * all;
                sums.partition_point(|&sum| sum < at).min(shuffled.len() - 1)
            };
            (0..DRAWN.max(lines.len())).map(|_| shuffled[draw()].clone()).collect()
        }
    }
}

/// Returns `count` of these lines, evenly spread; all if there are no more.
pub(super) fn evenly(lines: &[String], count: usize) -> Vec<String> {
    let count = count.min(lines.len());
    (0..count).filter_map(|number| lines.get(number * lines.len() / count)).cloned().collect()
}

/// Returns whole hundreds of these lines, with `percent` of each hundred unchanged. The others
/// become queries of type ANY for the same names, which the fast path always leaves to userspace.
pub(super) fn with_hits(lines: &[String], percent: usize) -> Vec<String> {
    // Similar names are adjacent, so a hundred takes lines from the whole list.
    let mixed = (0..100).flat_map(|turn| lines.iter().skip(turn).step_by(100));
    let whole = mixed.take(lines.len() / 100 * 100).enumerate();
    let asked = whole.map(|(position, line)| match line.strip_suffix(" A\n") {
        Some(name) if position % 100 >= percent => format!("{name} ANY\n"),
        _ => line.clone(),
    });
    asked.collect()
}
