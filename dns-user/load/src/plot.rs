//! Draws reports as SVG: a panel of rates and one of latencies, with linear axes from 0.

use anyhow::{Result, anyhow};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::report::Report;

/// Size of a plot in SVG units.
const SIZE: (u32, u32) = (960, 520);

/// Colours of the first and the second line of a panel.
const COLOURS: [RGBColor; 2] = [RGBColor(0, 122, 135), RGBColor(214, 98, 18)];

/// A line: its name, and its points.
type Line = (&'static str, Vec<(f64, f64)>);

/// The result of drawing; the backend's own error only reports that a write failed.
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// Draws intervals of a load over time.
pub(crate) fn over_time(intervals: &[Report]) -> Result<String> {
    let mut places = Vec::with_capacity(intervals.len());
    let mut elapsed = 0.0;
    for report in intervals {
        elapsed += report.seconds;
        places.push(elapsed);
    }
    draw("seconds", &places, intervals)
}

/// Draws loads over their rates.
pub(crate) fn over_rates(trials: &[Report]) -> Result<String> {
    let mut trials = trials.to_vec();
    trials.sort_by_key(|trial| trial.rate);
    let mut places = Vec::with_capacity(trials.len());
    for trial in &trials {
        places.push(trial.rate.unwrap_or(0).into());
    }
    draw("wanted queries/s", &places, &trials)
}

fn draw(axis: &str, places: &[f64], reports: &[Report]) -> Result<String> {
    let mut svg = String::new();
    panels(&mut svg, axis, places, reports).map_err(|error| anyhow!("cannot draw: {error}"))?;
    Ok(svg)
}

fn panels(svg: &mut String, axis: &str, places: &[f64], reports: &[Report]) -> Drawn {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    // Viewers with a dark background would hide black text.
    area.fill(&WHITE)?;
    let (upper, lower) = area.split_vertically(SIZE.1 / 2);
    let points = |figure: fn(&Report) -> Option<f64>| {
        let mut points = Vec::new();
        for (&place, report) in places.iter().zip(reports) {
            points.extend(figure(report).map(|value| (place, value)));
        }
        points
    };
    let rates = [
        ("sent", points(|report| Some(report.sent_per_second))),
        (
            "received",
            points(|report| Some(report.received_per_second)),
        ),
    ];
    panel(&upper, axis, "per second", &rates)?;
    let latencies = [
        ("p50", points(|report| Some(report.latency?.p50))),
        ("p99", points(|report| Some(report.latency?.p99))),
    ];
    panel(&lower, axis, "latency in µs", &latencies)?;
    area.present()?;
    Ok(())
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    axis: &str,
    unit: &str,
    lines: &[Line; 2],
) -> Drawn {
    let mut ends = (f64::MIN_POSITIVE, f64::MIN_POSITIVE);
    for (_, points) in lines {
        for (x, y) in points {
            ends = (ends.0.max(*x), ends.1.max(*y));
        }
    }
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .x_label_area_size(45)
        .y_label_area_size(90)
        .build_cartesian_2d(0.0..ends.0 * 1.02, 0.0..ends.1 * 1.1)?;
    chart
        .configure_mesh()
        .x_desc(axis)
        .y_desc(unit)
        .x_label_formatter(&|value| format!("{value}"))
        .y_label_formatter(&|value| format!("{value}"))
        .light_line_style(WHITE)
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 15))
        .draw()?;
    for (row, ((name, points), colour)) in (0..).zip(lines.iter().zip(COLOURS)) {
        chart.draw_series(LineSeries::new(
            points.iter().copied(),
            colour.stroke_width(2),
        ))?;
        for &point in points {
            chart.draw_series([Circle::new(point, 3, colour.filled())])?;
        }
        let style = ("sans-serif", 15)
            .into_font()
            .color(&colour)
            .pos(Pos::new(HPos::Left, VPos::Center));
        area.draw(&Text::new(*name, (120 + 90 * row, 10), style))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn axes_are_linear_and_begin_at_zero() {
        let svg = over_time(&[report(2000, 1600), report(2000, 2000), report(0, 0)]).unwrap();
        for text in [
            "seconds",
            "per second",
            "latency in µs",
            "received",
            "p99",
            "\n0\n",
            "\n1000\n",
        ] {
            assert!(svg.contains(text), "{text:?}: {svg}");
        }
        assert!(over_rates(&[]).unwrap().contains("wanted queries/s"));
    }
}
