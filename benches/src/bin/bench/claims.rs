//! What the project claims, held against the figures of this run.

use bosh_dns_xdp_benches::report::{Claim, Data, Figure, Rounds};

/// All claims whose figures were measured.
pub(super) fn all(figures: &[Figure]) -> Vec<Claim> {
    let mut claims = Vec::new();
    let cost = |label: &str| bar(figures, "CPU per query at", label);
    for (ours, reflector) in
        [("tc", "generic"), ("tc, 1 % to userspace", "generic"), ("generic", "generic"), ("native", "native")]
    {
        let pair = (cost(&format!("ours, {ours}")), cost(&format!("bare reflector, {reflector}")));
        at_most(&mut claims, &format!("CPU per query, {ours}, over the bare reflector's"), pair, 1.25);
    }
    at_most(
        &mut claims,
        "CPU per query, userspace only, over knotd's",
        (cost("ours, userspace only"), cost("knotd")),
        1.0,
    );
    let rate = |label: &str| bar(figures, "Highest rate", label);
    at_most(
        &mut claims,
        "Highest rate of the reference over ours, userspace only",
        (rate("bosh-dns"), rate("ours, userspace only")),
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
    let harm = |label: &str| bar(figures, "Bulk TCP", label);
    at_most(
        &mut claims,
        "Bulk TCP without the fast path over that with it",
        (harm("nothing attached"), harm("ours, auto")),
        1.1,
    );
    if let Some(Data::Sweep(sweep)) =
        figures.iter().find(|f| f.title.starts_with("CPU per query by size")).map(|f| &f.data)
    {
        for subject in ["ours, tc", "ours, userspace only"] {
            let at = |place: &str| sweep.value(subject, place);
            let what = format!("CPU per query at 100,000 instances over that at 1,000, {subject}");
            // The cost of one and the same program varies by this much from run to run.
            at_most(&mut claims, &what, (at("100,000"), at("1,000")), 1.1);
        }
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

/// The value of a bar in the figure whose title begins so.
fn bar<'a>(figures: &'a [Figure], title: &str, label: &str) -> Option<&'a Rounds> {
    bar_of(figures.iter().find(|figure| figure.title.starts_with(title))?, label)
}

/// The value of a bar.
fn bar_of<'a>(figure: &'a Figure, label: &str) -> Option<&'a Rounds> {
    let Data::Bars(bars) = &figure.data else { return None };
    bars.iter().find(|bar| bar.label == label).map(|bar| &bar.value)
}
