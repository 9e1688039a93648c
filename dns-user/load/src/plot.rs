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

/// Two panels, rates above latencies: the unit, and two lines.
type Panels = [(&'static str, [Line; 2]); 2];

/// Draws intervals of a load over time.
pub(crate) fn over_time(intervals: &[Report]) -> Result<String> {
    let mut places = Vec::with_capacity(intervals.len());
    let mut elapsed = 0.0;
    for report in intervals {
        elapsed += report.seconds;
        places.push(elapsed);
    }
    draw("seconds", of_loads(&places, intervals))
}

/// Draws loads over their rates.
pub(crate) fn over_rates(trials: &[Report]) -> Result<String> {
    let mut trials = trials.to_vec();
    trials.sort_by_key(|trial| trial.rate);
    let mut places = Vec::with_capacity(trials.len());
    for trial in &trials {
        places.push(trial.rate.unwrap_or(0).into());
    }
    draw("wanted queries/s", of_loads(&places, &trials))
}

/// Draws the turns of two servers.
pub(crate) fn over_turns(pairs: &[[Report; 2]]) -> Result<String> {
    let mut panels: Panels = [
        (
            "received per second",
            [("first", vec![]), ("second", vec![])],
        ),
        ("p50 in µs", [("first", vec![]), ("second", vec![])]),
    ];
    for (turn, pair) in (1..).zip(pairs) {
        let [(_, rates), (_, latencies)] = &mut panels;
        for (server, report) in pair.iter().enumerate() {
            rates[server]
                .1
                .push((f64::from(turn), report.received_per_second));
            if let Some(latency) = report.latency {
                latencies[server].1.push((f64::from(turn), latency.p50));
            }
        }
    }
    draw("pair of turns", panels)
}

fn of_loads(places: &[f64], reports: &[Report]) -> Panels {
    let mut panels: Panels = [
        ("per second", [("sent", vec![]), ("received", vec![])]),
        ("latency in µs", [("p50", vec![]), ("p99", vec![])]),
    ];
    let [(_, [sent, received]), (_, [p50, p99])] = &mut panels;
    for (&place, report) in places.iter().zip(reports) {
        sent.1.push((place, report.sent_per_second));
        received.1.push((place, report.received_per_second));
        if let Some(latency) = report.latency {
            p50.1.push((place, latency.p50));
            p99.1.push((place, latency.p99));
        }
    }
    panels
}

fn draw(axis: &str, panels: Panels) -> Result<String> {
    let mut svg = String::new();
    draw_panels(&mut svg, axis, &panels).map_err(|error| anyhow!("cannot draw: {error}"))?;
    Ok(svg)
}

fn draw_panels(svg: &mut String, axis: &str, panels: &Panels) -> Drawn {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    // Viewers with a dark background would hide black text.
    area.fill(&WHITE)?;
    let (upper, lower) = area.split_vertically(SIZE.1 / 2);
    for (part, (unit, lines)) in [upper, lower].iter().zip(panels) {
        panel(part, axis, unit, lines)?;
    }
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
        let turns = over_turns(&[[report(1000, 900), report(1000, 800)]]).unwrap();
        assert!(turns.contains("pair of turns") && turns.contains("second"));
        assert!(over_rates(&[]).unwrap().contains("wanted queries/s"));
    }
}
