//! What the project claims, held against the figures of this run.

use bosh_dns_xdp_benches::report::{Claim, Data, Figure, Rounds, Sweep};

use crate::{harm, saturated, subject::hook_label};

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
    if let (Some(rates), Some(busy)) =
        (sweep(figures, saturated::SCALE_TITLE), sweep(figures, saturated::SCALE_BUSY_TITLE))
    {
        // Of a core that was not saturated nothing is claimed.
        let value = |label: &str, place: &str| {
            let busy = busy.value(label, place).is_some_and(|busy| busy.median() >= saturated::SATURATED);
            rates.value(label, place).filter(|_| busy)
        };
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
            bar_of(figures.iter().find(forwarding)?, label)
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
    for figure in figures.iter().filter(|figure| figure.title.starts_with(harm::TITLE)) {
        let pair = (bar_of(figure, harm::NOTHING), bar_of(figure, "ours, auto"));
        at_most(
            &mut claims,
            &format!("{}: without the fast path over that with it", figure.title),
            pair,
            1.02,
        );
    }
    claims
}

/// Claims that one figure is at most `limit` times the other, where both were measured.
fn at_most(
    claims: &mut Vec<Claim>,
    text: &str,
    (value, base): (Option<&Rounds>, Option<&Rounds>),
    limit: f64,
) {
    let (Some(value), Some(base)) = (value, base) else { return };
    let claim = Claim { text: text.to_owned(), ratio: value.ratio_to(base), at_most: limit };
    println!("{claim}");
    claims.push(claim);
}

/// The best rate of the subject whose label is as wanted; none if its core was not saturated.
fn saturated_bar(figures: &[Figure], wanted: impl Fn(&str) -> bool) -> Option<&Rounds> {
    let find = |title: &str| match &figures.iter().find(|figure| figure.title == title)?.data {
        Data::Bars(bars) => bars.iter().find(|bar| wanted(&bar.label)),
        Data::Sweep(_) => None,
    };
    let (rate, busy) = (find(saturated::TITLE)?, find(saturated::BUSY_TITLE)?);
    if busy.value.median() < saturated::SATURATED {
        println!("nothing is claimed of {}: its core was not saturated", rate.label);
        return None;
    }
    Some(&rate.value)
}

/// The sweep with this title.
fn sweep<'a>(figures: &'a [Figure], title: &str) -> Option<&'a Sweep> {
    match &figures.iter().find(|figure| figure.title == title)?.data {
        Data::Sweep(sweep) => Some(sweep),
        Data::Bars(_) => None,
    }
}

/// The value of a bar in the figure whose title begins so.
fn bar<'a>(figures: &'a [Figure], title: &str, label: &str) -> Option<&'a Rounds> {
    bar_of(figures.iter().find(|figure| figure.title.starts_with(title))?, label)
}

/// The value of a bar.
fn bar_of<'a>(figure: &'a Figure, label: &str) -> Option<&'a Rounds> {
    let Data::Bars(bars) = &figure.data else { return None };
    bars.iter().find(|bar| bar.label == label).map(|bar| &bar.value)
}
