//! Subjects in turns: all of them run at once, each in a lab of its own, and one after the other
//! is asked for a moment, again and again.
//!
//! A machine that is shared with others is slower for seconds at a time (observed: by up to four
//! fifths). Subjects that take turns of less than that are disturbed alike, and each of them has
//! turns in which nothing disturbs it. A server that is not asked costs nothing meanwhile.
//! Where in memory a subject comes to lie is a matter of its start (observed: up to 15 % between
//! two starts of a reflector), so after some turns all are started anew.

use std::time::Duration;

use anyhow::Result;
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    generator::Load,
    lab::Lab,
    report::{Rounds, number},
};

use crate::{cell::Cell, queries::Queries, subject::Subject};

/// How long one turn of a subject is looked at.
const TURN: Duration = Duration::from_millis(250);

pub(super) struct Turns<'a> {
    /// Each in its lab.
    pub(super) cells: Vec<Cell<'a>>,
}

/// What a core gave in all turns of a subject.
#[derive(Clone, Debug, Default)]
pub(super) struct Saturated {
    /// Replies per second of the core's CPU time, slice by slice; without the turns in which the
    /// core slept between packets.
    pub(super) rates: Rounds,
    /// Percentage of the time in which the core was busy, turn by turn.
    pub(super) busy: Rounds,
}

impl<'a> Turns<'a> {
    pub(super) fn start(subjects: impl IntoIterator<Item = (&'a Subject, &'a Foundation)>) -> Result<Self> {
        let start = |(subject, foundation)| Cell::start(Lab::split()?, subject, foundation);
        Ok(Self { cells: subjects.into_iter().map(start).collect::<Result<_>>()? })
    }

    /// As much as a core answers of each one's queries, so many turns each, added to what other
    /// starts of the same subjects showed.
    pub(super) fn saturate(&self, queries: &[&Queries], turns: usize, sums: &mut [Saturated]) -> Result<()> {
        let pairs = self.cells.iter().zip(queries);
        let mut loaded = pairs
            .map(|(cell, queries)| Ok((cell.subject, cell.loaded(queries)?)))
            .collect::<Result<Vec<_>>>()?;
        for _ in 0..turns {
            for ((subject, loaded), sum) in loaded.iter_mut().zip(&mut *sums) {
                // One regime for all of them: at a rate the client takes replies, and the core that
                // sends one wakes the client up for it (observed: a seventh of its time).
                let seen = match subject.answers_at_interface() {
                    true => loaded.offer(Load::Flood, TURN)?,
                    false => loaded.saturate(TURN)?,
                };
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
    /// Says what it was, of whom and of which queries.
    pub(super) fn tell(&self, subject: &Subject, what: &str) {
        let best = self.rates.best_quartile(true);
        println!(
            "{:<28} {what:<18} {:>10}/s ({:>10} median), {:.3} µs each; core busy {:>3.0} %{}",
            subject.label(),
            number(best),
            number(self.rates.median()),
            1e6 / best,
            self.busy.median(),
            if self.rates.0.is_empty() { ": it slept between packets, nothing counts" } else { "" },
        );
    }
}
