//! Draws reports as SVG: panels of rates, medians and 99th percentiles, with linear axes from 0.

use anyhow::{Result, anyhow};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::report::Report;

/// Size of a plot in SVG units.
const SIZE: (u32, u32) = (960, 720);

/// Colours of the first and the second line of a panel.
const COLOURS: [RGBColor; 2] = [RGBColor(0, 122, 135), RGBColor(214, 98, 18)];

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
    draw("seconds", &of_loads(&places, intervals))
}

/// Draws loads over their rates.
pub(crate) fn over_rates(trials: &[Report]) -> Result<String> {
    let mut trials = trials.to_vec();
    // In the order of trying, the line would go back and forth.
    trials.sort_by_key(|trial| trial.rate);
    let mut places = Vec::with_capacity(trials.len());
    for trial in &trials {
        places.push(trial.rate.unwrap_or(0).into());
    }
    draw("wanted queries/s", &of_loads(&places, &trials))
}

/// Draws the turns of two servers.
pub(crate) fn over_turns(turns: &[Vec<Report>; 2]) -> Result<String> {
    let names = ["first", "second"];
    let mut rates = names.map(Line::new);
    let mut p50 = names.map(Line::new);
    let mut p99 = names.map(Line::new);
    for (server, reports) in turns.iter().enumerate() {
        for (turn, report) in (1..).map(f64::from).zip(reports) {
            rates[server]
                .points
                .push((turn, report.received_per_second));
            if let Some(latency) = report.latency {
                p50[server].points.push((turn, latency.p50));
                p99[server].points.push((turn, latency.p99));
            }
        }
    }
    let panels = [
        Panel::new("received per second", rates),
        Panel::new("p50 in µs", p50),
        Panel::new("p99 in µs", p99),
    ];
    draw("turn of each", &panels)
}

fn of_loads(places: &[f64], reports: &[Report]) -> [Panel; 3] {
    let mut sent = Line::new("sent");
    let mut received = Line::new("received");
    let mut p50 = Line::new("p50");
    let mut p99 = Line::new("p99");
    for (&place, report) in places.iter().zip(reports) {
        sent.points.push((place, report.sent_per_second));
        received.points.push((place, report.received_per_second));
        if let Some(latency) = report.latency {
            p50.points.push((place, latency.p50));
            p99.points.push((place, latency.p99));
        }
    }
    [
        Panel::new("per second", [sent, received]),
        // On the scale of the highest latencies the median would be a line at 0.
        Panel::new("p50 in µs", [p50]),
        Panel::new("p99 in µs", [p99]),
    ]
}

fn draw(axis: &str, panels: &[Panel; 3]) -> Result<String> {
    let mut svg = String::new();
    draw_panels(&mut svg, axis, panels).map_err(|error| anyhow!("cannot draw: {error}"))?;
    Ok(svg)
}

fn draw_panels(svg: &mut String, axis: &str, panels: &[Panel; 3]) -> Drawn {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    // Viewers with a dark background would hide black text.
    area.fill(&WHITE)?;
    for (part, panel) in area.split_evenly((panels.len(), 1)).iter().zip(panels) {
        panel.draw(part, axis)?;
    }
    area.present()?;
    Ok(())
}

/// A line: its name, and its points.
struct Line {
    name: &'static str,
    points: Vec<(f64, f64)>,
}

impl Line {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            points: Vec::new(),
        }
    }
}

/// Lines with a common scale.
struct Panel {
    unit: &'static str,
    lines: Vec<Line>,
}

impl Panel {
    fn new(unit: &'static str, lines: impl Into<Vec<Line>>) -> Self {
        Self {
            unit,
            lines: lines.into(),
        }
    }

    fn draw(&self, area: &DrawingArea<SVGBackend<'_>, Shift>, axis: &str) -> Drawn {
        // An axis needs a length, also where no query was answered.
        let mut ends = (f64::MIN_POSITIVE, f64::MIN_POSITIVE);
        for line in &self.lines {
            for (x, y) in &line.points {
                ends = (ends.0.max(*x), ends.1.max(*y));
            }
        }
        let mut chart = ChartBuilder::on(area)
            .margin(14)
            // Room for the names of the lines.
            .margin_top(28)
            .x_label_area_size(45)
            .y_label_area_size(90)
            .build_cartesian_2d(0.0..ends.0 * 1.02, 0.0..ends.1 * 1.1)?;
        chart
            .configure_mesh()
            .x_desc(axis)
            .y_desc(self.unit)
            .y_labels(6)
            .x_label_formatter(&grouped)
            .y_label_formatter(&grouped)
            .light_line_style(WHITE)
            .label_style(("sans-serif", 14))
            .axis_desc_style(("sans-serif", 15))
            .draw()?;
        for (row, (line, colour)) in (0..).zip(self.lines.iter().zip(COLOURS)) {
            chart.draw_series(LineSeries::new(
                line.points.iter().copied(),
                colour.stroke_width(2),
            ))?;
            for &point in &line.points {
                chart.draw_series([Circle::new(point, 3, colour.filled())])?;
            }
            let style = ("sans-serif", 15)
                .into_font()
                .color(&colour)
                .pos(Pos::new(HPos::Left, VPos::Center));
            area.draw(&Text::new(line.name, (120 + 90 * row, 14), style))?;
        }
        Ok(())
    }
}

/// Returns a number with its thousands apart.
fn grouped(value: &f64) -> String {
    // Sums of steps have errors in the last digits.
    let text = ((value * 1e6).round() / 1e6).to_string();
    let (whole, fraction) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut grouped = String::new();
    for (index, digit) in whole.char_indices() {
        if index > 0 && (whole.len() - index) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped + fraction
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
            "p50 in µs",
            "p99 in µs",
            "received",
            "\n0\n",
            "\n1,000\n",
        ] {
            assert!(svg.contains(text), "{text:?}: {svg}");
        }
        let turns = over_turns(&[vec![report(1000, 900)], vec![report(1000, 800)]]).unwrap();
        assert!(turns.contains("turn of each") && turns.contains("second"));
        assert_eq!(grouped(&1_234_567.0), "1,234,567");
        assert_eq!(grouped(&(0.1 + 0.2)), "0.3");
        for (value, text) in [
            (0.0, "0"),
            (12.0, "12"),
            (123.0, "123"),
            (1234.5, "1,234.5"),
            (123_456.0, "123,456"),
            (12_345_678.25, "12,345,678.25"),
        ] {
            assert_eq!(grouped(&value), text);
        }
        assert!(over_rates(&[]).unwrap().contains("wanted queries/s"));
    }

    #[test]
    fn points_are_the_reports() {
        let mut slow = report(2000, 1600);
        let mut fast = report(4000, 4000);
        (slow.rate, fast.rate) = (Some(7), Some(9));
        fast.latency = Some(crate::report::Latency {
            mean: 0.0,
            p50: 5.0,
            p90: 0.0,
            p99: 6.0,
            p999: 0.0,
            max: 0.0,
        });
        let panels = of_loads(&[1.0, 3.0], &[slow.clone(), fast.clone()]);
        let mut points = Vec::new();
        for line in panels.iter().flat_map(|panel| &panel.lines) {
            points.push(line.points.clone());
        }
        assert_eq!(
            points,
            [
                vec![(1.0, 1000.0), (3.0, 2000.0)],
                vec![(1.0, 800.0), (3.0, 2000.0)],
                vec![(3.0, 5.0)],
                vec![(3.0, 6.0)],
            ]
        );
        // Times add up, rates are in order: the ends of the axes.
        let ends = |svg: &str, label: &str| svg.contains(&format!("\n{label}\n"));
        let over_time = over_time(&[slow.clone(), slow.clone()]).unwrap();
        assert!(
            ends(&over_time, "4") && !ends(&over_time, "5"),
            "{over_time}"
        );
        let unordered = over_rates(&[fast.clone(), slow.clone()]).unwrap();
        assert_eq!(
            unordered,
            over_rates(&[slow.clone(), fast.clone()]).unwrap()
        );
        assert!(ends(&unordered, "9"), "{unordered}");
        let turns = over_turns(&[vec![slow.clone(), fast.clone()], vec![fast, slow]]).unwrap();
        assert!(ends(&turns, "2") && turns.contains("p50 in µs"), "{turns}");
    }

    #[test]
    fn lines_are_named_beside_one_another() {
        let svg = over_turns(&[vec![report(1000, 900)], vec![report(1000, 800)]]).unwrap();
        for (name, x) in [("first", 120), ("second", 210)] {
            let mut places = Vec::new();
            for part in svg.split("<text ").skip(1) {
                let (attributes, text) = part.split_once('>').unwrap();
                if text.trim_start().starts_with(name) {
                    let place: Vec<&str> = attributes.split(' ').take(2).collect();
                    places.push(place.join(" "));
                }
            }
            // At the top of each panel.
            let expected = [14, 254, 494].map(|y| format!(r#"x="{x}" y="{y}""#));
            assert_eq!(places, expected, "{svg}");
        }
    }

    /// A tenth above the highest value, a fiftieth behind the last one.
    #[test]
    fn axes_end_near_the_last_values() {
        let mut turn = report(2000, 2000);
        turn.latency = Some(crate::report::Latency {
            mean: 1.0,
            p50: 1.0,
            p90: 1.0,
            p99: 1.0,
            p999: 1.0,
            max: 1.0,
        });
        let svg = over_turns(&[vec![turn.clone()], vec![turn]]).unwrap();
        assert!(svg.contains("\n1\n") && svg.contains("\n1,000\n"), "{svg}");
        assert!(!svg.contains("\n2\n") && !svg.contains("\n1.5\n"), "{svg}");
    }
}
