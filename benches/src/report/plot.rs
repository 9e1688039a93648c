//! Plots as SVG, by plotters.

use anyhow::{Result, anyhow};
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Bar, Data, Figure, Series, number};

/// Width of every plot in SVG units.
const WIDTH: u32 = 960;

/// Colours of lines; the first is ours.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 122, 135),
    RGBColor(214, 98, 18),
    RGBColor(110, 84, 160),
    RGBColor(60, 130, 60),
    RGBColor(180, 50, 90),
    RGBColor(100, 100, 100),
];

/// Colour of the bars of others.
const OTHERS: RGBColor = RGBColor(165, 172, 178);

/// Draws a figure.
pub(super) fn draw(figure: &Figure) -> Result<String> {
    let mut svg = String::new();
    match &figure.data {
        Data::Bars(bars) => draw_bars(&mut svg, bars, &figure.unit),
        Data::Lines { x, series } => draw_lines(&mut svg, x, series, &figure.unit),
    }
    .map_err(|error| anyhow!("cannot draw {:?}: {error}", figure.title))?;
    Ok(svg)
}

/// What drawing may fail with; the backend's own error only says that a write failed.
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// One horizontal bar a subject, with the spread as a thin line and the median as text.
fn draw_bars(svg: &mut String, bars: &[Bar], unit: &str) -> Drawn {
    let height = 40 * bars.len() as u32 + 60;
    let area = SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
    let largest = bars.iter().map(|bar| bar.value.spread().1).fold(f64::MIN_POSITIVE, f64::max);
    let scale = |value: f64| 260 + (value / largest * 540.0) as i32;
    let label = ("sans-serif", 16).into_font().color(&BLACK);
    let right = label.pos(Pos::new(HPos::Right, VPos::Center));
    let left = label.pos(Pos::new(HPos::Left, VPos::Center));
    for (row, bar) in bars.iter().enumerate() {
        let middle = 30 + 40 * row as i32;
        let median = bar.value.median();
        area.draw(&Text::new(bar.label.clone(), (250, middle), right.clone()))?;
        if median.is_finite() {
            let colour = if bar.ours { COLOURS[0] } else { OTHERS };
            area.draw(&Rectangle::new([(260, middle - 13), (scale(median), middle + 13)], colour.filled()))?;
            let (low, high) = bar.value.spread();
            area.draw(&PathElement::new(
                [(scale(low), middle), (scale(high), middle)],
                BLACK.stroke_width(1),
            ))?;
            let value = format!("{} {unit}", number(median));
            area.draw(&Text::new(value, (scale(high) + 8, middle), left.clone()))?;
        } else {
            area.draw(&Text::new("not measured", (268, middle), left.clone()))?;
        }
    }
    area.present()?;
    Ok(())
}

/// One line a subject over a logarithmic x.
fn draw_lines(svg: &mut String, x: &str, series: &[Series], unit: &str) -> Drawn {
    let area = SVGBackend::with_string(svg, (WIDTH, 420)).into_drawing_area();
    let points = || series.iter().flat_map(|line| &line.points);
    let largest = points().map(|(_, rounds)| rounds.spread().1).fold(f64::MIN_POSITIVE, f64::max);
    let from = points().map(|point| point.0).fold(f64::INFINITY, f64::min).max(0.1);
    let to = points().map(|point| point.0).fold(from * 1.01, f64::max);
    let mut chart = ChartBuilder::on(&area)
        .margin(20)
        .x_label_area_size(45)
        .y_label_area_size(80)
        .build_cartesian_2d((from..to).log_scale(), 0.0..largest * 1.1)?;
    chart
        .configure_mesh()
        .x_desc(x)
        .y_desc(unit)
        .x_label_formatter(&|value| number(*value))
        .y_label_formatter(&|value| number(*value))
        .light_line_style(WHITE)
        .draw()?;
    for (line, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let medians: Vec<(f64, f64)> =
            line.points.iter().map(|(at, rounds)| (*at, rounds.median())).collect();
        chart
            .draw_series(LineSeries::new(medians.iter().copied(), colour.stroke_width(2)).point_size(4))?
            .label(line.label.clone())
            .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(3)));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK.mix(0.3)).draw()?;
    drop(chart);
    area.present()?;
    Ok(())
}
