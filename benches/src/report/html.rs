//! The report as one HTML page.

use std::fmt::Write;

use anyhow::Result;

use super::{Data, Figure, Report, number, plot};

/// Style sheet of the page, for light and dark mode.
// Plots stay white in dark mode, since their text is black.
const STYLE: &str = "
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0 } h2 { margin-top: 3rem }
svg { width: 100%; height: auto; background: #fff; border-radius: 6px }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #8884 }
details { margin: .5rem 0 }
";

pub(super) fn page(report: &Report) -> Result<String> {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>bosh-dns-xdp: measurements</title>\
         <style>{STYLE}</style><h1>bosh-dns-xdp: measurements</h1><table>"
    );
    for (key, value) in &report.facts {
        write!(
            page,
            "<tr><td>{}</td><td>{}</td></tr>",
            escape(key),
            escape(value)
        )?;
    }
    page.push_str("</table><table>");
    for row in report.targets() {
        let cells: String = row
            .iter()
            .map(|cell| format!("<td>{}</td>", escape(cell)))
            .collect();
        write!(page, "<tr>{cells}</tr>")?;
    }
    page.push_str("</table>");
    for (number, figure) in report.figures.iter().enumerate() {
        if let Some(heading) = report.heading(number) {
            write!(page, "<h1>{heading}</h1>")?;
        }
        write!(
            page,
            "<h2>{}</h2><p>{}</p>",
            escape(&figure.title),
            escape(&figure.about)
        )?;
        page.push_str(&plot::draw(figure)?);
        write!(
            page,
            "<details><summary>The numbers</summary>{}</details>",
            table(figure)?
        )?;
    }
    page.push_str("</html>\n");
    Ok(page)
}

/// The numbers behind a plot.
fn table(figure: &Figure) -> Result<String> {
    let mut text = format!(
        "<table><tr><th></th><th>{} (median)</th><th>best quartile</th><th>lowest</th><th>highest</th></tr>",
        escape(&figure.unit)
    );
    let mut row = |label: &str, rounds: &super::Rounds| {
        let (low, high) = rounds.spread();
        let best = rounds.best_quartile(figure.more_is_better());
        let cells = [rounds.median(), best, low, high]
            .map(|value| format!("<td>{}</td>", number(value)))
            .concat();
        write!(text, "<tr><td>{}</td>{cells}</tr>", escape(label))
    };
    match &figure.data {
        Data::Bars(bars) => {
            for bar in bars {
                row(&bar.label, &bar.value)?;
            }
        }
        Data::Sweep(sweep) => {
            for line in &sweep.series {
                for (place, rounds) in sweep.places.iter().zip(&line.values) {
                    row(&format!("{}, {} {place}", line.label, sweep.axis), rounds)?;
                }
            }
        }
    }
    text.push_str("</table>");
    Ok(text)
}

// Facts hold the command line and what other programs print.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
