//! The report as Markdown tables.

use std::fmt::Write;

use super::{Data, Figure, Report, Rounds, number};

pub(super) fn tables(report: &Report) -> String {
    let mut text = String::from("# Measurements\n\n");
    for (key, value) in &report.facts {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "- {key}: {value}");
    }
    for (number, row) in report.targets().iter().enumerate() {
        let rule = if number == 0 {
            "\n|---|---:|---|---|"
        } else {
            ""
        };
        let start = if number == 0 { "\n" } else { "" };
        let _ = writeln!(text, "{start}| {} |{rule}", row.join(" | "));
    }
    for (number, figure) in report.figures.iter().enumerate() {
        if let Some(heading) = report.heading(number) {
            let _ = writeln!(text, "\n# {heading}");
        }
        let _ = writeln!(
            text,
            "\n## {}\n\n{}\n\n{}",
            figure.title,
            figure.about,
            table(figure)
        );
    }
    text
}

pub(super) fn table(figure: &Figure) -> String {
    match &figure.data {
        Data::Bars(bars) => {
            let mut text = format!(
                "| | {} (median) | best quartile | lowest–highest |\n|---|---:|---:|---:|\n",
                figure.unit
            );
            for bar in bars {
                let _ = writeln!(
                    text,
                    "| {} | {} | {} | {} |",
                    bar.label,
                    number(bar.value.median()),
                    number(bar.value.best_quartile(figure.more_is_better())),
                    spread(&bar.value)
                );
            }
            text
        }
        Data::Sweep(sweep) => {
            let head: String = sweep
                .places
                .iter()
                .map(|place| format!(" {} |", escape(place)))
                .collect();
            let rule = "---:|".repeat(sweep.places.len());
            let mut text = format!("| {} by {} |{head}\n|---|{rule}\n", figure.unit, sweep.axis);
            for line in &sweep.series {
                let cell = |rounds| format!(" {} |", cell(rounds, figure.more_is_better()));
                let cells: String = line.values.iter().map(cell).collect();
                let _ = writeln!(text, "| {} |{cells}", line.label);
            }
            text
        }
    }
}

/// Formats `median, best quartile (lowest–highest)`, or the median alone for one round.
fn cell(rounds: &Rounds, more_is_better: bool) -> String {
    let median = number(rounds.median());
    if rounds.0.len() < 2 {
        return median;
    }
    format!(
        "{median}, {} ({})",
        number(rounds.best_quartile(more_is_better)),
        spread(rounds)
    )
}

/// Escapes text so that none of it is parsed as HTML.
fn escape(text: &str) -> String {
    text.replace('<', "&lt;")
}

fn spread(rounds: &Rounds) -> String {
    let (low, high) = rounds.spread();
    format!("{}–{}", number(low), number(high))
}
