//! What the project claims, held against the figures of this run.

use bosh_dns_xdp_benches::report::{Claim, Data, Figure, Measured, Rounds, Sweep};

use crate::{footprint, harm, saturated, subject::hook_label};

/// All claims whose figures were measured.
pub(super) fn all(figures: &[Figure]) -> Vec<Claim> {
    let mut claims = Vec::new();
    let saturated = |label: &str| saturated_bar(figures, |other| other == label);
    for (mode, hook) in saturated::HOOKS {
        let ending = format!("constant answers, {}", hook_label(hook));
        let constant = saturated_bar(figures, |label| label.ends_with(&ending));
        let what = format!("Saturated core, 1,000 names: a constant reflector's rate over ours, {mode}");
        at_most(&mut claims, &what, (constant, saturated(&format!("ours, {mode}"))), 1.25);
    }
    if let Some((figure, curves)) = sweep(figures, saturated::CURVE_TITLE) {
        for (mode, _) in saturated::HOOKS {
            let what = format!(
                "Overload, {mode}, {}: best rate over the worst when more is offered",
                saturated::MISSES
            );
            let label = format!("ours, {mode}, {}", saturated::MISSES);
            let pair = curves
                .series
                .iter()
                .find(|line| line.label == label)
                .and_then(|line| best_and_overloaded(figure, &line.values));
            at_most(&mut claims, &what, pair.unzip(), 1.0 / 0.9);
        }
    }
    if let Some((figure, rates)) = sweep(figures, saturated::SCALE_TITLE) {
        let value = |label: &str, place: &str| measured(figure, rates.value(label, place)?);
        for (mode, hook) in saturated::HOOKS {
            let at = |label: String| value(&label, "100,000 at random");
            let pair = (at(format!("constant answers, {}", hook_label(hook))), at(format!("ours, {mode}")));
            let what = format!(
                "Saturated core, 100,000 names at random: a constant reflector's rate over ours, {mode}"
            );
            at_most(&mut claims, &what, pair, 1.4);
        }
        for subject in ["ours, tc", "ours, generic", "ours, native", "ours, userspace only"] {
            for order in ["at random", "by Zipf"] {
                let at = |names: &str| value(subject, &format!("{names} {order}"));
                let what = format!(
                    "Saturated core {order}: rate with 1,000 names over that with 100,000, {subject}"
                );
                at_most(&mut claims, &what, (at("1,000"), at("100,000")), 1.2);
            }
        }
    }
    for peer in ["nsd", "knotd"] {
        let what = format!("Saturated core: {peer}'s rate over ours, userspace only");
        at_most(&mut claims, &what, (saturated(peer), saturated("ours, userspace only")), 1.0);
    }
    at_most(
        &mut claims,
        "Saturated core: the reference's rate over ours, userspace only",
        (saturated("bosh-dns"), saturated("ours, userspace only")),
        1.0 / 30.0,
    );
    for kind in ["cached", "uncached"] {
        let cost = |label: &str| {
            let forwarding = |figure: &&Figure| {
                figure.title.starts_with("CPU per forwarded query")
                    && figure.title.ends_with(&format!(", {kind}"))
            };
            bar_of(figures.iter().find(forwarding)?, |other| other == label)
        };
        let what = format!("CPU per forwarded query, {kind}, over unbound's");
        at_most(&mut claims, &what, (cost("ours"), cost("unbound")), 1.0);
    }
    let first = |label: &str| bar(figures, "From new records to the first new answer, 10000", label);
    at_most(
        &mut claims,
        "First new answer at 10,000 instances over knotd's",
        (first("ours, tc"), first("knotd")),
        1.0,
    );
    goal(&mut claims, "First new answer at 10,000 instances, ms", first("ours, tc"), 20.0);
    let slowest = bar(figures, "Slowest query during that reload, 10000", "ours, tc");
    goal(&mut claims, "Slowest query during that reload, ms", slowest, 1.0);
    for (what, title, place, most) in [
        (
            "First answer from the interface after a start, 1,000 instances, ms",
            footprint::START_TITLE,
            "1,000",
            100.0,
        ),
        ("Resident memory, maps included, 10,000 instances, MiB", footprint::MEMORY_TITLE, "10,000", 40.0),
    ] {
        let value = sweep(figures, title)
            .and_then(|(figure, sweep)| measured(figure, sweep.value("ours, tc", place)?));
        goal(&mut claims, what, value, most);
    }
    for figure in figures.iter().filter(|figure| figure.title.starts_with(harm::TITLE)) {
        let pair =
            (bar_of(figure, |label| label == harm::NOTHING), bar_of(figure, |label| label == "ours, auto"));
        at_most(
            &mut claims,
            &format!("{}: without the fast path over that with it", figure.title),
            pair,
            1.02,
        );
    }
    for claim in &claims {
        println!("{claim}");
    }
    claims
}

/// Claims that one figure is at most `limit` times the other, where both were measured.
fn at_most(
    claims: &mut Vec<Claim>,
    text: &str,
    (value, base): (Option<Measured<'_>>, Option<Measured<'_>>),
    limit: f64,
) {
    let (Some(value), Some(base)) = (value, base) else { return };
    claims.push(Claim::ratio(text, value, base, limit));
}

/// Claims that a figure is at most `limit`, where it was measured.
fn goal(claims: &mut Vec<Claim>, text: &str, value: Option<Measured<'_>>, limit: f64) {
    claims.extend(value.map(|value| Claim::value(text, value, limit)));
}

/// What was measured for a figure, if anything counts.
fn measured<'a>(figure: &Figure, rounds: &'a Rounds) -> Option<Measured<'a>> {
    (!rounds.0.is_empty()).then_some(Measured { rounds, more_is_better: figure.more_is_better() })
}

/// The best rate of what was answered of each offered rate, and the worst where more than that best
/// rate was offered.
fn best_and_overloaded<'a>(figure: &Figure, values: &'a [Rounds]) -> Option<(Measured<'a>, Measured<'a>)> {
    let rate = |rounds: &Rounds| rounds.best_quartile(figure.more_is_better());
    let measured_at = || saturated::LADDER.iter().zip(values).filter(|(_, rounds)| !rounds.0.is_empty());
    let (_, best) = measured_at().max_by(|(_, a), (_, b)| rate(a).total_cmp(&rate(b)))?;
    let overloaded = measured_at().filter(|(offered, _)| f64::from(**offered) > rate(best));
    let (_, worst) = overloaded.min_by(|(_, a), (_, b)| rate(a).total_cmp(&rate(b)))?;
    Some((measured(figure, best)?, measured(figure, worst)?))
}

/// The best rate of the subject whose label is as wanted.
fn saturated_bar(figures: &[Figure], wanted: impl Fn(&str) -> bool) -> Option<Measured<'_>> {
    let figure = figures.iter().find(|figure| figure.title == saturated::TITLE)?;
    bar_of(figure, wanted)
}

/// The sweep with this title.
fn sweep<'a>(figures: &'a [Figure], title: &str) -> Option<(&'a Figure, &'a Sweep)> {
    let figure = figures.iter().find(|figure| figure.title == title)?;
    match &figure.data {
        Data::Sweep(sweep) => Some((figure, sweep)),
        Data::Bars(_) => None,
    }
}

/// The value of a bar in the figure whose title begins so.
fn bar<'a>(figures: &'a [Figure], title: &str, label: &str) -> Option<Measured<'a>> {
    bar_of(figures.iter().find(|figure| figure.title.starts_with(title))?, |other| other == label)
}

/// The value of the bar whose label is as wanted.
fn bar_of(figure: &Figure, wanted: impl Fn(&str) -> bool) -> Option<Measured<'_>> {
    let Data::Bars(bars) = &figure.data else { return None };
    measured(figure, &bars.iter().find(|bar| wanted(&bar.label))?.value)
}
