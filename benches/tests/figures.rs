//! The committed figures and reports follow from the recorded measurements and are readable.

use std::{env, fs, path::Path};

use anyhow::{Context, Result, ensure};
use bosh_dns_xdp_benches::report::Report;

#[test]
fn figures_follow_reports() -> Result<()> {
    for machine in ["intel", "amd"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../docs/measurements")
            .join(machine);
        let report = Report::read(&fs::read(folder.join("report.json"))?)?;
        let drawn = Report::plot(report.figures.first().context("no figure")?)?;
        for (file, content) in [
            ("figure-01.svg", &drawn),
            ("report.md", &report.to_markdown()),
        ] {
            let path = folder.join(file);
            if env::var_os("UPDATE_FIGURES").is_some() {
                fs::write(&path, content)?;
            }
            ensure!(
                fs::read_to_string(&path)? == *content,
                "{} is out of date: UPDATE_FIGURES=1 cargo nextest run -p bosh-dns-xdp-benches figures",
                path.display()
            );
        }
        ensure!(
            drawn.contains(r##"fill="#FFFFFF""##),
            "{machine}: no background"
        );
        check_labels(&drawn)?;
        // Points on a logarithmic axis cannot be compared without its values; bars cannot begin at its zero. The
        // background is a rectangle.
        let ticks = drawn.matches("text-anchor=\"middle\"").count();
        ensure!(
            !drawn.contains("logarithmic axis") || ticks >= 3,
            "{machine}: {ticks} ticks"
        );
        let rectangles = drawn.matches("<rect ").count();
        ensure!(
            !drawn.contains("logarithmic axis") || rectangles == 1,
            "{machine}: bars on a logarithmic axis"
        );
    }
    Ok(())
}

/// Checks that every label lies within the figure, with seven units for a letter.
fn check_labels(svg: &str) -> Result<()> {
    let mut lines = svg.lines();
    while let Some(line) = lines.next() {
        let Some(text) = line.strip_prefix("<text x=\"") else {
            continue;
        };
        let x: f64 = text.split('"').next().context("no position")?.parse()?;
        let label = lines.next().context("no text")?;
        let width = 7.0 * label.chars().count() as f64;
        let (left, right) = if line.contains("text-anchor=\"end\"") {
            (x - width, x)
        } else if line.contains("text-anchor=\"middle\"") {
            (x - width / 2.0, x + width / 2.0)
        } else {
            (x, x + width)
        };
        ensure!(
            left >= 0.0 && right <= 960.0,
            "{label:?} is cut off: {left} to {right}"
        );
    }
    Ok(())
}
