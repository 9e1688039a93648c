//! The report as Markdown tables.

use std::fmt::Write;

use super::{Data, Figure, Report, Rounds, number};

/// All facts and figures.
pub(super) fn tables(report: &Report) -> String {
    let mut text = String::from("# Measurements\n\n");
    for (key, value) in &report.facts {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "- {key}: {value}");
    }
    for shortfall in &report.shortfalls {
        let _ = writeln!(text, "- **falls short**: {shortfall}");
    }
    for figure in &report.figures {
        let _ = writeln!(text, "\n## {}\n\n{}\n\n{}", figure.title, figure.about, table(figure));
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
