//! The targets of the project, compared with the medians of a run.

use super::{Data, Report, Rounds, number};

/// A title, subject or point of a report.
type Label = &'static str;

/// A target: a measured value, or its ratio to another one.
struct Target {
    what: Label,
    of: Source,
    over: Option<Source>,
    /// Divides each value at the same point first, because the machine's speed differs from point to point.
    baseline: Option<Label>,
    bound: Bound,
    /// On Intel's processors, where it differs.
    intel: Option<Bound>,
}

/// Title of the figure, label of the subject, and point; without a point if the figure has bars.
#[derive(Clone, Copy)]
struct Source(Label, Label, Label);

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
    pub const START_CPU: &str = "CPU time of server and attacher until the first answer";
    pub const RSS: &str = "Resident memory of the server by size";
    pub const PSS: &str = "Memory of server and attacher by size, PSS";
    pub const SERVED: &str = "Many busy interfaces: all served after";
    pub const RTNL: &str = "Many busy interfaces: RTNL lock for an attach";
    pub const PROBES: &str = "Many busy interfaces: probes of a proven admission";
}

use titles::*;

// Labels as `Subject::label` forms them, and points as the parts name them: a value that is not
// found is left out, as one that was not measured.
const TC: &str = "ours, tc";
const CONSTANT_TC: &str = "constant answers, tc";
const NATIVE: &str = "ours, native";
const CONSTANT_NATIVE: &str = "constant answers, native";
const USERSPACE: &str = "ours, userspace only";
const RANDOM: [&str; 2] = ["1,000, at random", "100,000, at random"];
const ZIPF: [&str; 2] = ["1,000, by Zipf", "100,000, by Zipf"];

/// Returns a target of a single value in the mode tc.
const fn value(what: Label, title: Label, point: Label, bound: Bound) -> Target {
    Target {
        what,
        of: Source(title, TC, point),
        over: None,
        baseline: None,
        bound,
        intel: None,
    }
}

/// Returns a target of the ratio of two subjects at the same point.
const fn ratio(
    what: Label,
    title: Label,
    [subject, over]: [Label; 2],
    point: Label,
    bound: Bound,
) -> Target {
    let over = Some(Source(title, over, point));
    Target {
        what,
        of: Source(title, subject, point),
        over,
        baseline: None,
        bound,
        intel: None,
    }
}

/// Returns a target of the rate with few names over the rate with many, as shares of the constant reflector's rates.
const fn scaling(
    what: Label,
    [subject, base]: [Label; 2],
    [few, many]: [Label; 2],
    bound: Bound,
) -> Target {
    let over = Some(Source(SCALE, subject, many));
    Target {
        what,
        of: Source(SCALE, subject, few),
        over,
        baseline: Some(base),
        bound,
        intel: None,
    }
}

const TARGETS: [Target; 28] = [
    value(
        "500 busy interfaces: all served, s",
        SERVED,
        "",
        AtMost(3.0),
    ),
    value(
        "500 busy interfaces: RTNL lock held for each, ms",
        RTNL,
        "",
        AtMost(0.2),
    ),
    value(
        "New answer, hot name, 1,000 instances, ms",
        HOT,
        "1,000",
        AtMost(3.0),
    ),
    value(
        "New answer, hot name, 10,000 instances, ms",
        HOT,
        "10,000",
        AtMost(3.0),
    ),
    value(
        "New answer, hot name, 100,000 instances, ms",
        HOT,
        "100,000",
        AtMost(10.0),
    ),
    value(
        "New answer, cold name, 1,000 instances, ms",
        COLD,
        "1,000",
        AtMost(3.0),
    ),
    value(
        "New answer, cold name, 10,000 instances, ms",
        COLD,
        "10,000",
        AtMost(3.0),
    ),
    value(
        "New answer, cold name, 100,000 instances, ms",
        COLD,
        "100,000",
        AtMost(10.0),
    ),
    value(
        "CPU of that reload, 10,000 instances, ms",
        RELOAD_CPU,
        "10,000",
        AtMost(10.0),
    ),
    value(
        "CPU of that reload, 100,000 instances, ms",
        RELOAD_CPU,
        "100,000",
        AtMost(10.0),
    ),
    value(
        "Interface answers after a start, 100 instances, ms",
        START,
        "100",
        AtMost(50.0),
    ),
    value(
        "Interface answers after a start, 1,000 instances, ms",
        START,
        "1,000",
        AtMost(50.0),
    ),
    value(
        "Interface answers after a start, 10,000 instances, ms",
        START,
        "10,000",
        AtMost(50.0),
    ),
    value(
        "Interface answers after a start, 100,000 instances, ms",
        START,
        "100,000",
        AtMost(50.0),
    ),
    value(
        "RSS of the server, 10,000 instances, MiB",
        RSS,
        "10,000",
        AtMost(35.0),
    ),
    value(
        "PSS of server and attacher, 10,000 instances, MiB",
        PSS,
        "10,000",
        AtMost(30.0),
    ),
    value(
        "Probes of a proven admission per second",
        PROBES,
        "",
        AtMost(0.1),
    ),
    scaling(
        "1,000 names over 100,000, at random, tc",
        [TC, CONSTANT_TC],
        RANDOM,
        AtMost(1.4),
    ),
    scaling(
        "1,000 names over 100,000, at random, native",
        [NATIVE, CONSTANT_NATIVE],
        RANDOM,
        AtMost(1.75),
    ),
    scaling(
        "1,000 names over 100,000, by Zipf, tc",
        [TC, CONSTANT_TC],
        ZIPF,
        AtMost(1.15),
    ),
    scaling(
        "1,000 names over 100,000, by Zipf, native",
        [NATIVE, CONSTANT_NATIVE],
        ZIPF,
        AtMost(1.15),
    ),
    ratio(
        "Ours over the skeleton, tc",
        SATURATED,
        [TC, "skeleton, tc"],
        "",
        AtLeast(0.8),
    ),
    ratio(
        "Ours over the skeleton, native",
        SATURATED,
        [NATIVE, "skeleton, native"],
        "",
        AtLeast(0.8),
    ),
    ratio(
        "Ours over socket echo, userspace only",
        SATURATED,
        [USERSPACE, "socket echo"],
        "",
        AtLeast(0.9),
    ),
    ratio(
        "Ours over knotd, userspace only",
        SATURATED,
        [USERSPACE, "knotd"],
        "",
        AtLeast(1.0),
    ),
    ratio(
        "CPU per cached query over unbound's",
        FORWARDED,
        ["ours", "unbound"],
        "cached",
        AtMost(1.0),
    ),
    Target {
        intel: Some(AtMost(0.8)),
        ..ratio(
            "CPU per miss over unbound's",
            FORWARDED,
            ["ours", "unbound"],
            "uncached",
            AtMost(0.35),
        )
    },
    ratio(
        "New answer, hot name, 10,000 instances, over knotd's",
        HOT,
        [TC, "knotd"],
        "10,000",
        AtMost(1.0),
    ),
];

/// Rows of targets that tests count instead.
const COUNTED: [[&str; 4]; 3] = [
    [
        "While shedding: reads of all counters in 10 ms",
        "–",
        "1",
        "test: counters_are_read_once_per_window",
    ],
    [
        "Lines of memory that two CPUs write per query",
        "–",
        "0",
        "test: no_line_is_written_per_query",
    ],
    [
        "Location of netkit devices",
        "–",
        "near",
        "tests: bridge_with_uplink_is_far, netkit in the VM",
    ],
];

/// Returns the rows of the targets that this run measured: target, measured value, bound, and whether it was met; then
/// targets that tests count.
pub(super) fn rows(report: &Report) -> Vec<[String; 4]> {
    // By the report's facts: `--from` renders what another machine has measured.
    let is_intel = report
        .facts
        .iter()
        .any(|(key, value)| key == "machine" && value.contains("Intel"));
    let row = |target: &Target| {
        let value = |Source(title, label, point)| {
            let median = |label| median(report, Source(title, label, point));
            Some(median(label)? / target.baseline.map_or(Some(1.0), median)?)
        };
        let measured = value(target.of)? / target.over.map_or(Some(1.0), value)?;
        let (bound, is_met) = match target.intel.filter(|_| is_intel).unwrap_or(target.bound) {
            AtMost(limit) => (format!("at most {}", number(limit)), measured <= limit),
            AtLeast(limit) => (format!("at least {}", number(limit)), measured >= limit),
        };
        let verdict = (if is_met { "met" } else { "missed" }).to_owned();
        Some([target.what.to_owned(), number(measured), bound, verdict])
    };
    TARGETS
        .iter()
        .filter_map(row)
        .chain(COUNTED.map(|row| row.map(str::to_owned)))
        .collect()
}

/// Returns a median of this run, if it was measured.
fn median(report: &Report, Source(title, label, point): Source) -> Option<f64> {
    let value: &Rounds = match &report
        .figures
        .iter()
        .find(|figure| figure.title == title)?
        .data
    {
        Data::Bars(bars) => &bars.iter().find(|bar| bar.label == label)?.value,
        Data::Sweep(sweep) => sweep.value(label, point)?,
    };
    // A point without rounds has no median, and its target is neither met nor missed.
    Some(value.median()).filter(|median| median.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Figure, Sweep};

    #[test]
    fn scaling_ignores_speed_of_machine() {
        let points = RANDOM.map(str::to_owned).to_vec();
        let mut sweep = Sweep::new("names", points, false);
        for (label, values) in [(TC, [80.0, 30.0]), (CONSTANT_TC, [100.0, 50.0])] {
            values
                .iter()
                .enumerate()
                .for_each(|(place, &value)| sweep.push(label, true, place, value));
        }
        let figures = vec![Figure::new(SCALE, "", "queries/s", Data::Sweep(sweep))];
        let [_, rest @ ..] = &rows(&Report {
            facts: vec![],
            figures,
            main: 0,
        })[0];
        assert_eq!(rest, &["1.33", "at most 1.40", "met"]);
    }

    #[test]
    fn measured_targets_are_compared() {
        let mut sweep = Sweep::new("kind", vec!["cached".into(), "uncached".into()], false);
        for (label, values) in [("ours", [2.0, 6.0]), ("unbound", [4.0, 10.0])] {
            values
                .iter()
                .enumerate()
                .for_each(|(place, &value)| sweep.push(label, true, place, value));
        }
        let report = |machine: &str| Report {
            facts: vec![("machine".into(), machine.into())],
            figures: vec![Figure::new(FORWARDED, "", "µs", Data::Sweep(sweep.clone()))],
            main: 0,
        };
        let verdicts = |machine| {
            rows(&report(machine))
                .into_iter()
                .map(|[_, rest @ ..]| rest)
                .take(2)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            verdicts("AMD EPYC"),
            [
                ["0.50", "at most 1.00", "met"],
                ["0.60", "at most 0.35", "missed"]
            ]
        );
        assert_eq!(
            verdicts("Intel(R)"),
            [
                ["0.50", "at most 1.00", "met"],
                ["0.60", "at most 0.80", "met"]
            ]
        );
    }
}
