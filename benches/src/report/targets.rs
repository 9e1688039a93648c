//! The targets of the project, compared with the medians of a run.

use super::{Data, Report, Rounds, number};

/// A target: a measured value, or its ratio to another one.
struct Target {
    what: &'static str,
    of: Source,
    over: Option<Source>,
    bound: Bound,
    /// On Intel's processors, where it differs.
    intel: Option<Bound>,
}

/// Title of the figure, label of the subject, and point; without a point if the figure has bars.
#[derive(Clone, Copy)]
struct Source(&'static str, &'static str, &'static str);

#[derive(Clone, Copy)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

use Bound::{AtLeast, AtMost};

/// Titles of figures that have targets.
#[expect(missing_docs, reason = "each title says what the figure shows")]
pub mod titles {
    pub const SATURATED: &str = "Queries per second of one saturated core";
    pub const SCALE: &str = "Saturated core by names and order of queries";
    pub const FORWARDED: &str = "CPU per forwarded query";
    pub const HOT: &str = "From new records to the first new answer, hot name";
    pub const COLD: &str = "From new records to the first new answer, cold name";
    pub const RELOAD_CPU: &str = "CPU time of a reload";
    pub const START: &str = "Start-up by size";
    pub const RSS: &str = "Resident memory of the server by size";
    pub const PSS: &str = "Memory of server and attacher by size, PSS";
}

use titles::*;

const TC: &str = "ours, tc";
const NATIVE: &str = "ours, native";
const USERSPACE: &str = "ours, userspace only";
const FEW_AT_RANDOM: &str = "1,000, at random";
const MANY_AT_RANDOM: &str = "100,000, at random";

/// Returns a target of a single value in the mode tc.
const fn value(what: &'static str, title: &'static str, point: &'static str, bound: Bound) -> Target {
    Target { what, of: Source(title, TC, point), over: None, bound, intel: None }
}

/// Returns a target of the ratio of two subjects at the same point.
const fn ratio(
    what: &'static str,
    title: &'static str,
    [subject, over]: [&'static str; 2],
    point: &'static str,
    bound: Bound,
) -> Target {
    Target {
        what,
        of: Source(title, subject, point),
        over: Some(Source(title, over, point)),
        bound,
        intel: None,
    }
}

/// Returns a target of the rate with few names over the rate with many.
const fn scaling(
    what: &'static str,
    subject: &'static str,
    [few, many]: [&'static str; 2],
    bound: Bound,
) -> Target {
    Target {
        what,
        of: Source(SCALE, subject, few),
        over: Some(Source(SCALE, subject, many)),
        bound,
        intel: None,
    }
}

const TARGETS: [Target; 26] = [
    value("New answer, hot name, 1,000 instances, ms", HOT, "1,000", AtMost(3.0)),
    value("New answer, hot name, 10,000 instances, ms", HOT, "10,000", AtMost(3.0)),
    value("New answer, hot name, 100,000 instances, ms", HOT, "100,000", AtMost(10.0)),
    value("New answer, cold name, 1,000 instances, ms", COLD, "1,000", AtMost(3.0)),
    value("New answer, cold name, 10,000 instances, ms", COLD, "10,000", AtMost(3.0)),
    value("New answer, cold name, 100,000 instances, ms", COLD, "100,000", AtMost(10.0)),
    value("CPU of that reload, 10,000 instances, ms", RELOAD_CPU, "10,000", AtMost(10.0)),
    value("CPU of that reload, 100,000 instances, ms", RELOAD_CPU, "100,000", AtMost(10.0)),
    value("Interface answers after a start, 100 instances, ms", START, "100", AtMost(50.0)),
    value("Interface answers after a start, 1,000 instances, ms", START, "1,000", AtMost(50.0)),
    value("Interface answers after a start, 10,000 instances, ms", START, "10,000", AtMost(50.0)),
    value("Interface answers after a start, 100,000 instances, ms", START, "100,000", AtMost(50.0)),
    value("RSS of the server, 10,000 instances, MiB", RSS, "10,000", AtMost(35.0)),
    value("PSS of server and attacher, 10,000 instances, MiB", PSS, "10,000", AtMost(30.0)),
    scaling("1,000 names over 100,000, at random, tc", TC, [FEW_AT_RANDOM, MANY_AT_RANDOM], AtMost(1.4)),
    scaling(
        "1,000 names over 100,000, at random, native",
        NATIVE,
        [FEW_AT_RANDOM, MANY_AT_RANDOM],
        AtMost(1.75),
    ),
    scaling(
        "1,000 names over 100,000, by Zipf, tc",
        TC,
        ["1,000, by Zipf", "100,000, by Zipf"],
        AtMost(1.15),
    ),
    scaling(
        "1,000 names over 100,000, by Zipf, native",
        NATIVE,
        ["1,000, by Zipf", "100,000, by Zipf"],
        AtMost(1.15),
    ),
    ratio("Ours over the constant reflector, tc", SATURATED, [TC, "constant answers, tc"], "", AtLeast(0.92)),
    Target {
        intel: Some(AtLeast(0.7)),
        ..ratio(
            "Ours over the constant reflector, native",
            SATURATED,
            [NATIVE, "constant answers, native"],
            "",
            AtLeast(0.75),
        )
    },
    ratio("Ours over nsd, userspace only", SATURATED, [USERSPACE, "nsd"], "", AtLeast(1.5)),
    ratio(
        "Ours over the socket echo, userspace only",
        SATURATED,
        [USERSPACE, "socket echo"],
        "",
        AtLeast(0.85),
    ),
    ratio("Ours over knotd, userspace only", SATURATED, [USERSPACE, "knotd"], "", AtLeast(1.0)),
    ratio(
        "CPU per forwarded query over unbound's, cached",
        FORWARDED,
        ["ours", "unbound"],
        "cached",
        AtMost(1.0),
    ),
    Target {
        intel: Some(AtMost(0.8)),
        ..ratio(
            "CPU per forwarded query over unbound's, uncached",
            FORWARDED,
            ["ours", "unbound"],
            "uncached",
            AtMost(0.35),
        )
    },
    ratio("New answer, hot name, 10,000 instances, over knotd's", HOT, [TC, "knotd"], "10,000", AtMost(1.0)),
];

/// Returns the rows of the targets that this run measured: target, measured value, bound, and whether it was met.
pub(super) fn rows(report: &Report) -> Vec<[String; 4]> {
    let is_intel = report.facts.iter().any(|(key, value)| key == "machine" && value.contains("Intel"));
    let row = |target: &Target| {
        let over = match target.over {
            Some(source) => median(report, source)?,
            None => 1.0,
        };
        let measured = median(report, target.of)? / over;
        let (bound, is_met) = match target.intel.filter(|_| is_intel).unwrap_or(target.bound) {
            AtMost(limit) => (format!("at most {}", number(limit)), measured <= limit),
            AtLeast(limit) => (format!("at least {}", number(limit)), measured >= limit),
        };
        let verdict = if is_met { "met" } else { "missed" };
        Some([target.what.to_owned(), number(measured), bound, verdict.to_owned()])
    };
    TARGETS.iter().filter_map(row).collect()
}

/// Returns a median of this run, if it was measured.
fn median(report: &Report, Source(title, label, point): Source) -> Option<f64> {
    let value: &Rounds = match &report.figures.iter().find(|figure| figure.title == title)?.data {
        Data::Bars(bars) => &bars.iter().find(|bar| bar.label == label)?.value,
        Data::Sweep(sweep) => sweep.value(label, point)?,
    };
    Some(value.median()).filter(|median| median.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Figure, Sweep};

    #[test]
    fn measured_targets_are_compared() {
        let mut sweep = Sweep::new("kind", vec!["cached".into(), "uncached".into()], false);
        for (label, values) in [("ours", [2.0, 6.0]), ("unbound", [4.0, 10.0])] {
            values.iter().enumerate().for_each(|(place, &value)| sweep.push(label, true, place, value));
        }
        let report = |machine: &str| Report {
            facts: vec![("machine".into(), machine.into())],
            figures: vec![Figure::new(FORWARDED, "", "µs", Data::Sweep(sweep.clone()))],
            main: 0,
        };
        let verdicts =
            |machine| rows(&report(machine)).into_iter().map(|[_, rest @ ..]| rest).collect::<Vec<_>>();
        assert_eq!(
            verdicts("AMD EPYC"),
            [["0.50", "at most 1.00", "met"], ["0.60", "at most 0.35", "missed"]]
        );
        assert_eq!(verdicts("Intel(R)"), [["0.50", "at most 1.00", "met"], ["0.60", "at most 0.80", "met"]]);
    }
}
