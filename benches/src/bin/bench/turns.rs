//! Measures subjects alternately: all run at the same time, each in a separate lab, and get short
//! loads one after the other, repeatedly.
//!
//! A shared machine may be slower for seconds at a time (observed: by up to four fifths). Turns
//! shorter than that spread such disturbances over all subjects, and leave each some undisturbed
//! turns. An idle server costs nothing meanwhile. The memory addresses of a subject depend on its
//! start (observed: up to 15 % between two starts of a reflector), so all are restarted after some
//! turns.

use std::time::Duration;

use anyhow::Result;
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    lab::Lab,
    report::{Rounds, number},
};

use crate::{cell::Cell, queries::Queries, subject::Subject};

/// Measured duration of one turn.
const TURN: Duration = Duration::from_millis(250);

pub(super) struct Turns<'a> {
    /// The subjects, each in its lab.
    pub(super) cells: Vec<Cell<'a>>,
}

/// Results of a core in all turns of a subject.
#[derive(Clone, Debug, Default)]
pub(super) struct Saturated {
    /// Replies per second of the core's CPU time, slice by slice, without the turns in which the
    /// core slept between packets.
    pub(super) rates: Rounds,
    /// Percentage of the time in which the core was busy, by turn.
    pub(super) busy: Rounds,
}

impl<'a> Turns<'a> {
    pub(super) fn start(subjects: impl IntoIterator<Item = (&'a Subject, &'a Foundation)>) -> Result<Self> {
        let start = |(subject, foundation)| Cell::start(Lab::split()?, subject, foundation);
        Ok(Self { cells: subjects.into_iter().map(start).collect::<Result<_>>()? })
    }

    /// Saturates each subject's core for this many turns, and adds the results to `sums`, which
    /// also contains earlier starts.
    pub(super) fn saturate(&self, queries: &[&Queries], turns: usize, sums: &mut [Saturated]) -> Result<()> {
        let pairs = self.cells.iter().zip(queries);
        let mut loaded = pairs
            .map(|(cell, queries)| Ok((cell.subject, cell.loaded(queries)?)))
            .collect::<Result<Vec<_>>>()?;
        for _ in 0..turns {
            for ((subject, loaded), sum) in loaded.iter_mut().zip(&mut *sums) {
                let seen = loaded.fill(subject.answers_at_interface(), TURN)?;
                if seen.is_saturated() {
                    sum.rates.0.extend(seen.per_core().0);
                }
                sum.busy.0.push(seen.busy * 100.0);
            }
        }
        Ok(())
    }
}

impl Saturated {
    /// Prints the results with the subject and its queries.
    pub(super) fn tell(&self, subject: &Subject, what: &str) {
        let best = self.rates.best_quartile(true);
        println!(
            "{:<28} {what:<18} {:>10}/s ({:>10} median), {:.3} µs each; core busy {:>3.0} %{}",
            subject.label(),
            number(best),
            number(self.rates.median()),
            1e6 / best,
            self.busy.median(),
            if self.rates.0.is_empty() { ": it slept between packets; not counted" } else { "" },
        );
    }
}
