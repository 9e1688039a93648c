//! Plots as SVG, by plotters.

use anyhow::{Result, anyhow};
use plotters::{
    coord::{Shift, types::RangedCoordf64},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Bar, Data, Figure, Rounds, Series, Sweep, number};

/// Width of every plot in SVG units.
// As wide as the page (60rem of 16 pixels), so that letters are as large as those around the plot.
const WIDTH: u32 = 960;

/// Upper bound of the mean width of a letter of the labels, in SVG units: sans-serif at 16 units.
// The viewer's font is unknown when the plot is drawn; a label that is too wide would be cut off.
const LETTER: f64 = 8.0;

/// The axis is logarithmic where the largest value is this many times the smallest.
// On a linear axis, bars this far apart leave the shortest one 4 % of the width.
const TOO_FAR_APART: f64 = 25.0;

/// Colour of this server's bars.
const OURS: RGBColor = RGBColor(0, 122, 135);

/// Colour of the lines at the values of a logarithmic axis.
const TICKS: RGBColor = RGBColor(215, 220, 224);

/// Colour of all other bars.
const OTHERS: RGBColor = RGBColor(165, 172, 178);

/// Colours of this server's lines: cold ones.
const OUR_LINES: [RGBColor; 5] = [
    RGBColor(0, 122, 135),
    RGBColor(50, 90, 190),
    RGBColor(60, 160, 70),
    RGBColor(125, 80, 190),
    RGBColor(90, 185, 215),
];

/// Colours of all other lines: warm and grey ones.
const OTHER_LINES: [RGBColor; 5] = [
    RGBColor(90, 90, 90),
    RGBColor(214, 98, 18),
    RGBColor(190, 40, 75),
    RGBColor(215, 165, 20),
    RGBColor(140, 85, 45),
];

pub(super) fn draw(figure: &Figure) -> Result<String> {
    let mut svg = String::new();
    match &figure.data {
        Data::Bars(bars) => draw_bars(&mut svg, bars, &figure.unit),
        Data::Sweep(sweep) => draw_sweep(&mut svg, sweep, &figure.unit),
    }
    .map_err(|error| anyhow!("cannot draw {:?}: {error}", figure.title))?;
    Ok(svg)
}

/// The result of drawing; the backend's own error only reports that a write failed.
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// A part of the plot, with positions in SVG units.
type Area<'s> = DrawingArea<SVGBackend<'s>, Shift>;

/// A part of the plot, with positions on the axes of points and values.
type Chart<'c, 's> = ChartContext<'c, SVGBackend<'s>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// The range of the values of a figure.
struct ValueRange {
    smallest: f64,
    largest: f64,
    /// Whether values are drawn by their logarithms: on a linear axis the largest one would hide all others.
    is_logarithmic: bool,
}

impl ValueRange {
    fn of<'r>(values: impl IntoIterator<Item = &'r Rounds>) -> Self {
        let mut smallest = f64::INFINITY;
        let mut largest = f64::MIN_POSITIVE;
        for rounds in values {
            let (low, high) = rounds.spread();
            largest = largest.max(high);
            // 0 has no logarithm: such a value stands at the beginning of the axis.
            if low > 0.0 {
                smallest = smallest.min(low);
            }
        }
        // Without any value above 0.
        let smallest = smallest.min(largest);
        Self {
            smallest,
            largest,
            is_logarithmic: largest > smallest * TOO_FAR_APART,
        }
    }
}

/// Returns the style of black text of this size, of which `anchor` is at its position.
fn text(size: u32, anchor: Pos) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&BLACK).pos(anchor)
}

/// Draws one horizontal bar per subject, on a logarithmic axis a point, with the spread as a thin line and the median
/// as text.
fn draw_bars(svg: &mut String, bars: &[Bar], unit: &str) -> Drawn {
    let height = 40 * bars.len() as u32 + 60;
    let area = SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
    // Viewers with a dark background would hide black text.
    area.fill(&WHITE)?;
    let chart = BarChart::new(bars, unit);
    if chart.range.is_logarithmic {
        chart.draw_axis(&area)?;
    }
    for (row, bar) in bars.iter().enumerate() {
        chart.draw_bar(&area, bar, 30 + 40 * row as i32)?;
    }
    area.present()?;
    Ok(())
}

/// The positions in a chart of bars.
struct BarChart<'b> {
    bars: &'b [Bar],
    unit: &'b str,
    range: ValueRange,
    /// Where the bars begin.
    begin: i32,
    /// Length of the longest bar.
    room: f64,
}

impl<'b> BarChart<'b> {
    fn new(bars: &'b [Bar], unit: &'b str) -> Self {
        let mut label = 0;
        let mut value = 0;
        for bar in bars {
            label = label.max(bar.label.chars().count());
            value = value.max(value_text(bar, unit).chars().count());
        }
        // The bars begin behind the longest label and leave room for the longest value.
        let begin = ((label as f64 * LETTER) as i32 + 20).min(WIDTH as i32 / 2);
        let room = f64::from(WIDTH as i32 - begin - 8) - value as f64 * LETTER - 10.0;
        Self {
            bars,
            unit,
            range: ValueRange::of(bars.iter().map(|bar| &bar.value)),
            begin,
            room,
        }
    }

    /// Returns the value at the beginning of a logarithmic axis.
    fn base(&self) -> f64 {
        // The smallest value itself would stand on the edge of the labels.
        self.range.smallest / 2.0
    }

    /// Returns the horizontal position of a value.
    fn position(&self, value: f64) -> i32 {
        let largest = self.range.largest;
        let share = if self.range.is_logarithmic {
            let base = self.base();
            (value.max(base) / base).ln() / (largest / base).ln()
        } else {
            value / largest
        };
        self.begin + (share * self.room) as i32
    }

    /// Draws a logarithmic axis. A linear one needs none, since each bar shows its value.
    fn draw_axis(&self, area: &Area<'_>) -> Drawn {
        let below = 40 * self.bars.len() as i32 + 10;
        let style = text(14, Pos::new(HPos::Center, VPos::Top));
        for tick in ticks(self.base(), self.range.largest) {
            let at = self.position(tick);
            area.draw(&PathElement::new(
                [(at, 10), (at, below)],
                TICKS.stroke_width(1),
            ))?;
            area.draw(&Text::new(number(tick), (at, below + 2), style.clone()))?;
        }
        let title = format!("{}, logarithmic axis", self.unit);
        area.draw(&Text::new(
            title,
            (self.begin, below + 30),
            ("sans-serif", 14),
        ))?;
        Ok(())
    }

    /// Draws a bar with its middle at this height.
    fn draw_bar(&self, area: &Area<'_>, bar: &Bar, middle: i32) -> Drawn {
        let left = text(16, Pos::new(HPos::Left, VPos::Center));
        let right = text(16, Pos::new(HPos::Right, VPos::Center));
        let label = (self.begin - 10, middle);
        area.draw(&Text::new(bar.label.clone(), label, right))?;
        let mut end = self.begin;
        let median = bar.value.median();
        // Without a single round there is no median.
        if median.is_finite() {
            let colour = if bar.ours { OURS } else { OTHERS };
            let (low, high) = bar.value.spread();
            end = self.position(high);
            let median = self.position(median);
            let spread = [(self.position(low), middle), (end, middle)];
            if self.range.is_logarithmic {
                // The length of a bar would be an arbitrary choice: a logarithmic axis has no zero.
                area.draw(&PathElement::new(spread, colour.stroke_width(3)))?;
                area.draw(&Circle::new((median, middle), 8, colour.filled()))?;
            } else {
                let corners = [(self.begin, middle - 13), (median, middle + 13)];
                area.draw(&Rectangle::new(corners, colour.filled()))?;
                area.draw(&PathElement::new(spread, BLACK.stroke_width(1)))?;
            }
        }
        let value = value_text(bar, self.unit);
        area.draw(&Text::new(value, (end + 8, middle), left))?;
        Ok(())
    }
}

/// Returns round values within a logarithmic axis: powers of ten, and their triples if these are few.
fn ticks(from: f64, to: f64) -> Vec<f64> {
    let decades = from.log10().floor() as i32..=to.log10().ceil() as i32;
    let within = |steps: &[f64]| -> Vec<f64> {
        let values = decades
            .clone()
            .flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)));
        values.filter(|value| (from..=to).contains(value)).collect()
    };
    Some(within(&[1.0]))
        .filter(|powers| powers.len() > 2)
        .unwrap_or_else(|| within(&[1.0, 3.0]))
}

/// Returns the text behind a bar.
fn value_text(bar: &Bar, unit: &str) -> String {
    match bar.value.median() {
        median if median.is_finite() => format!("{} {unit}", number(median)),
        _ => "not measured".to_owned(),
    }
}

/// Draws one line per subject if the points have an order, else one bar per subject at each point (on a logarithmic
/// axis a point), with the spread as a thin line and the legend at the side.
fn draw_sweep(svg: &mut String, sweep: &Sweep, unit: &str) -> Drawn {
    let area = SVGBackend::with_string(svg, (WIDTH, 440)).into_drawing_area();
    // As in `draw_bars`.
    area.fill(&WHITE)?;
    let (plot, legend) = area.split_horizontally(WIDTH - 220);
    let layout = SweepLayout::new(sweep);
    let last = sweep.places.len().saturating_sub(1) as f64;
    // Bars around the first and the last point need more room than a line that ends there.
    let margin = if sweep.ordered { 0.2 } else { 0.5 };
    let mut chart = ChartBuilder::on(&plot)
        .margin(20)
        .x_label_area_size(45)
        .y_label_area_size(80)
        .build_cartesian_2d(-margin..last + margin, layout.lowest()..layout.highest())?;
    layout.draw_axes(&mut chart, unit)?;
    let mut our_colours = OUR_LINES.iter().cycle();
    let mut other_colours = OTHER_LINES.iter().cycle();
    for (row, line) in sweep.series.iter().enumerate() {
        let colours = if line.ours {
            &mut our_colours
        } else {
            &mut other_colours
        };
        let colour = *colours.next().unwrap_or(&OURS);
        layout.draw_series(&mut chart, row, line, colour)?;
        layout.draw_legend(&legend, row, line, colour)?;
    }
    area.present()?;
    Ok(())
}

/// The positions in the plot of a sweep.
struct SweepLayout<'s> {
    sweep: &'s Sweep,
    range: ValueRange,
}

impl<'s> SweepLayout<'s> {
    fn new(sweep: &'s Sweep) -> Self {
        let values = sweep.series.iter().flat_map(|line| &line.values);
        Self {
            sweep,
            range: ValueRange::of(values),
        }
    }

    /// Returns the position of a value on the vertical axis.
    fn height(&self, value: f64) -> f64 {
        if self.range.is_logarithmic {
            value.max(self.range.smallest).log10()
        } else {
            value
        }
    }

    fn lowest(&self) -> f64 {
        if self.range.is_logarithmic {
            self.height(self.range.smallest) - 0.2
        } else {
            // The heights of bars compare only if they begin at zero.
            0.0
        }
    }

    fn highest(&self) -> f64 {
        if self.range.is_logarithmic {
            self.height(self.range.largest) + 0.1
        } else {
            self.range.largest * 1.05
        }
    }

    /// Returns the part of the distance between two points that a subject's bars take.
    fn bar_width(&self) -> f64 {
        // The rest separates the bars of different points.
        0.8 / self.sweep.series.len().max(1) as f64
    }

    fn draw_axes(&self, chart: &mut Chart<'_, '_>, unit: &str) -> Drawn {
        let places = &self.sweep.places;
        let place = |at: &f64| {
            let near = at.round();
            // The library also labels positions between the points, which have no name.
            if (at - near).abs() >= 0.01 {
                return String::new();
            }
            // A negative number becomes 0: the axis begins to the left of the first point.
            places.get(near as usize).cloned().unwrap_or_default()
        };
        let is_logarithmic = self.range.is_logarithmic;
        let label = |at: &f64| number(if is_logarithmic { 10f64.powf(*at) } else { *at });
        chart
            .configure_mesh()
            .x_desc(&self.sweep.axis)
            .y_desc(unit)
            .x_labels(places.len())
            .x_label_formatter(&place)
            .y_label_formatter(&label)
            .light_line_style(WHITE)
            .disable_x_mesh()
            .label_style(("sans-serif", 14))
            .axis_desc_style(("sans-serif", 15))
            .draw()?;
        Ok(())
    }

    /// Returns what was measured of the subject in this row, with positions on the horizontal axis.
    fn measured<'l>(&self, row: usize, line: &'l Series) -> Vec<(f64, &'l Rounds)> {
        // Bars stand side by side; lines are slightly offset, so that their spreads are
        // distinguishable.
        let step = if self.sweep.ordered {
            0.012
        } else {
            self.bar_width()
        };
        let shift = (row as f64 - (self.sweep.series.len() as f64 - 1.0) / 2.0) * step;
        let mut measured = Vec::new();
        for (at, rounds) in line.values.iter().enumerate() {
            // A program that cannot serve a point, or that failed there, has no rounds.
            if !rounds.0.is_empty() {
                measured.push((at as f64 + shift, rounds));
            }
        }
        measured
    }

    /// Whether values are drawn as points instead of bars.
    fn has_points(&self) -> bool {
        // As in `draw_bar`: a logarithmic axis has no zero from which a bar could begin.
        self.sweep.ordered || self.range.is_logarithmic
    }

    /// Returns how large the points are.
    fn point_size(&self) -> i32 {
        if self.sweep.ordered { 4 } else { 6 }
    }

    /// Draws the values of the subject in this row.
    fn draw_series(
        &self,
        chart: &mut Chart<'_, '_>,
        row: usize,
        line: &Series,
        colour: RGBColor,
    ) -> Drawn {
        let measured = self.measured(row, line);
        let mut points = Vec::new();
        for (at, rounds) in &measured {
            points.push((*at, self.height(rounds.median())));
        }
        if self.sweep.ordered {
            let stroke = colour.stroke_width(line_width(line));
            chart.draw_series(LineSeries::new(points.iter().copied(), stroke))?;
        }
        for (at, top) in points {
            if self.has_points() {
                let point = Circle::new((at, top), self.point_size(), colour.filled());
                chart.draw_series([point])?;
            } else {
                // Narrower than its place, which keeps neighbours apart.
                let half = self.bar_width() * 0.46;
                let corners = [(at - half, self.lowest()), (at + half, top)];
                chart.draw_series([Rectangle::new(corners, colour.filled())])?;
            }
        }
        // In front of a bar of the same colour the line would not be seen.
        let thin = if self.has_points() { colour } else { BLACK }.stroke_width(1);
        for (at, rounds) in measured {
            let (low, high) = rounds.spread();
            let ends = [(at, self.height(low)), (at, self.height(high))];
            chart.draw_series([PathElement::new(ends, thin)])?;
        }
        Ok(())
    }

    /// Draws the label of the subject in this row, with a sample of its line, points or bars.
    fn draw_legend(&self, legend: &Area<'_>, row: usize, line: &Series, colour: RGBColor) -> Drawn {
        let middle = 40 + 26 * row as i32;
        let size = self.point_size();
        if self.sweep.ordered {
            let stroke = colour.stroke_width(line_width(line));
            legend.draw(&PathElement::new([(0, middle), (26, middle)], stroke))?;
            legend.draw(&Circle::new((13, middle), size, colour.filled()))?;
        } else if self.has_points() {
            legend.draw(&Circle::new((14, middle), size, colour.filled()))?;
        } else {
            let corners = [(6, middle - 8), (22, middle + 8)];
            legend.draw(&Rectangle::new(corners, colour.filled()))?;
        }
        let style = text(15, Pos::new(HPos::Left, VPos::Center));
        legend.draw(&Text::new(line.label.clone(), (34, middle), style))?;
        Ok(())
    }
}

fn line_width(line: &Series) -> u32 {
    if line.ours { 3 } else { 2 }
}
