//! The report as Markdown tables.

use std::fmt::Write;

use super::{Claim, Data, Figure, Report, Rounds, number};

/// All facts and figures.
pub(super) fn tables(report: &Report) -> String {
    let mut text = String::from("# Measurements\n\n");
    for (key, value) in &report.facts {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "- {key}: {value}");
    }
    let _ = writeln!(text, "\n{}", claims(&report.claims));
    for figure in &report.figures {
        let _ = writeln!(text, "\n## {}\n\n{}\n\n{}", figure.title, figure.about, table(figure));
    }
    text
}

/// The claims and what came of them.
fn claims(claims: &[Claim]) -> String {
    let mut text = String::from(
        "| what is claimed, a ratio within this run | median | lowest–highest | at most | holds |\n\
         |---|---:|---:|---:|---|\n",
    );
    for claim in claims {
        let (median, limit) = (number(claim.ratio.median()), number(claim.at_most));
        let verdict = if claim.holds() { "yes" } else { "**no**" };
        let _ =
            writeln!(text, "| {} | {median} | {} | {limit} | {verdict} |", claim.text, spread(&claim.ratio));
    }
    text
}

/// One figure's table.
pub(super) fn table(figure: &Figure) -> String {
    match &figure.data {
        Data::Bars(bars) => {
            let mut text = format!("| | {} (median) | lowest–highest |\n|---|---:|---:|\n", figure.unit);
            for bar in bars {
                let _ = writeln!(
                    text,
                    "| {} | {} | {} |",
                    bar.label,
                    number(bar.value.median()),
                    spread(&bar.value)
                );
            }
            text
        }
        Data::Lines { x, series } => {
            let columns: Vec<f64> = series
                .first()
                .map_or_else(Vec::new, |line| line.points.iter().map(|point| point.0).collect());
            let head: String = columns.iter().map(|&value| format!(" {} |", number(value))).collect();
            let mut text =
                format!("| {} by {x} |{head}\n|---|{}\n", figure.unit, "---:|".repeat(columns.len()));
            for line in series {
                let value_at = |column: &f64| line.points.iter().find(|point| point.0 == *column);
                let cells: String = columns
                    .iter()
                    .map(|column| {
                        value_at(column)
                            .map_or(" – |".to_owned(), |p| format!(" {} |", number(p.1.median())))
                    })
                    .collect();
                let _ = writeln!(text, "| {} |{cells}", line.label);
            }
            text
        }
    }
}

/// `lowest–highest`.
fn spread(rounds: &Rounds) -> String {
    let (low, high) = rounds.spread();
    format!("{}–{}", number(low), number(high))
}
