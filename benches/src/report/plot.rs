//! Plots as SVG, by plotters.

use anyhow::{Result, anyhow};
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Bar, Data, Figure, Sweep, number};

/// Width of every plot in SVG units.
const WIDTH: u32 = 960;

/// Upper bound of the mean width of a letter of the labels, in SVG units: sans-serif at 16 units.
const LETTER: f64 = 8.0;

/// The axis is logarithmic where the largest value is this many times the smallest.
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

/// Draws one horizontal bar per subject, on a logarithmic axis a point, with the spread as a thin line and the median
/// as text.
fn draw_bars(svg: &mut String, bars: &[Bar], unit: &str) -> Drawn {
    let height = 40 * bars.len() as u32 + 60;
    let area = SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
    // Viewers with a dark background would hide black text.
    area.fill(&WHITE)?;
    let longest = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0) as f64 * LETTER;
    let labels = longest(&mut bars.iter().map(|bar| bar.label.chars().count()));
    let values = longest(&mut bars.iter().map(|bar| value_text(bar, unit).chars().count()));
    // The bars begin behind the longest label and leave room for the longest value.
    let begin = (labels as i32 + 20).min(WIDTH as i32 / 2);
    let room = f64::from(WIDTH as i32 - begin - 8) - values - 10.0;
    let largest = bars
        .iter()
        .map(|bar| bar.value.spread().1)
        .fold(f64::MIN_POSITIVE, f64::max);
    let smallest = bars
        .iter()
        .map(|bar| bar.value.spread().0)
        .filter(|low| *low > 0.0)
        .fold(largest, f64::min);
    // On a linear axis the largest bar would hide all others.
    let logarithmic = largest > smallest * TOO_FAR_APART;
    let base = smallest / 2.0;
    let share = |value: f64| match logarithmic {
        true => (value.max(base) / base).ln() / (largest / base).ln(),
        false => value / largest,
    };
    let scale = |value: f64| begin + (share(value) * room) as i32;
    if logarithmic {
        let below = 40 * bars.len() as i32 + 10;
        let label = ("sans-serif", 14)
            .into_font()
            .color(&BLACK)
            .pos(Pos::new(HPos::Center, VPos::Top));
        for tick in ticks(base, largest) {
            let line = PathElement::new(
                [(scale(tick), 10), (scale(tick), below)],
                TICKS.stroke_width(1),
            );
            area.draw(&line)?;
            area.draw(&Text::new(
                number(tick),
                (scale(tick), below + 2),
                label.clone(),
            ))?;
        }
        let title = format!("{unit}, logarithmic axis");
        area.draw(&Text::new(title, (begin, below + 30), ("sans-serif", 14)))?;
    }
    let label = ("sans-serif", 16).into_font().color(&BLACK);
    let right = label.pos(Pos::new(HPos::Right, VPos::Center));
    let left = label.pos(Pos::new(HPos::Left, VPos::Center));
    for (row, bar) in bars.iter().enumerate() {
        let middle = 30 + 40 * row as i32;
        let median = bar.value.median();
        area.draw(&Text::new(
            bar.label.clone(),
            (begin - 10, middle),
            right.clone(),
        ))?;
        if median.is_finite() {
            let colour = if bar.ours { OURS } else { OTHERS };
            let (low, high) = bar.value.spread();
            let spread = [(scale(low), middle), (scale(high), middle)];
            if logarithmic {
                // The length of a bar would be an arbitrary choice: a logarithmic axis has no zero.
                area.draw(&PathElement::new(spread, colour.stroke_width(3)))?;
                area.draw(&Circle::new((scale(median), middle), 8, colour.filled()))?;
            } else {
                area.draw(&Rectangle::new(
                    [(begin, middle - 13), (scale(median), middle + 13)],
                    colour.filled(),
                ))?;
                area.draw(&PathElement::new(spread, BLACK.stroke_width(1)))?;
            }
            area.draw(&Text::new(
                value_text(bar, unit),
                (scale(high) + 8, middle),
                left.clone(),
            ))?;
        } else {
            area.draw(&Text::new(
                value_text(bar, unit),
                (begin + 8, middle),
                left.clone(),
            ))?;
        }
    }
    area.present()?;
    Ok(())
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
    area.fill(&WHITE)?;
    let (plot, legend) = area.split_horizontally(WIDTH - 220);
    let values = || {
        sweep
            .series
            .iter()
            .flat_map(|line| &line.values)
            .filter(|rounds| !rounds.0.is_empty())
    };
    let largest = values()
        .map(|rounds| rounds.spread().1)
        .fold(f64::MIN_POSITIVE, f64::max);
    let smallest = values()
        .map(|rounds| rounds.spread().0)
        .filter(|low| *low > 0.0)
        .fold(largest, f64::min);
    let logarithmic = largest > smallest * TOO_FAR_APART;
    let height = |value: f64| {
        if logarithmic {
            value.max(smallest).log10()
        } else {
            value
        }
    };
    let lowest = if logarithmic {
        height(smallest) - 0.2
    } else {
        0.0
    };
    let highest = if logarithmic {
        height(largest) + 0.1
    } else {
        largest * 1.05
    };
    let last = sweep.places.len().saturating_sub(1) as f64;
    let margin = if sweep.ordered { 0.2 } else { 0.5 };
    let mut chart = ChartBuilder::on(&plot)
        .margin(20)
        .x_label_area_size(45)
        .y_label_area_size(80)
        .build_cartesian_2d(-margin..last + margin, lowest..highest)?;
    let place = |at: &f64| {
        let near = at.round();
        // A negative number becomes 0: the axis begins to the left of the first point.
        let name = ((at - near).abs() < 0.01)
            .then(|| sweep.places.get(near as usize))
            .flatten();
        name.cloned().unwrap_or_default()
    };
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(&sweep.axis)
        .y_desc(unit)
        .x_labels(sweep.places.len())
        .x_label_formatter(&place);
    let label = |at: &f64| number(if logarithmic { 10f64.powf(*at) } else { *at });
    mesh.y_label_formatter(&label)
        .light_line_style(WHITE)
        .disable_x_mesh();
    mesh.label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 15))
        .draw()?;
    let width = 0.8 / sweep.series.len().max(1) as f64;
    let text = ("sans-serif", 15)
        .into_font()
        .color(&BLACK)
        .pos(Pos::new(HPos::Left, VPos::Center));
    let mut our_colours = OUR_LINES.iter().cycle();
    let mut other_colours = OTHER_LINES.iter().cycle();
    for (row, line) in sweep.series.iter().enumerate() {
        let colours = if line.ours {
            &mut our_colours
        } else {
            &mut other_colours
        };
        let colour = *colours.next().unwrap_or(&OURS);
        let measured = line
            .values
            .iter()
            .enumerate()
            .filter(|(_, rounds)| !rounds.0.is_empty())
            .map(|(at, rounds)| {
                // Bars stand side by side; lines are slightly offset, so that their spreads are
                // distinguishable.
                let step = if sweep.ordered { 0.012 } else { width };
                let shift = (row as f64 - (sweep.series.len() as f64 - 1.0) / 2.0) * step;
                (at as f64 + shift, rounds)
            });
        let middle = 40 + 26 * row as i32;
        if sweep.ordered {
            let points: Vec<(f64, f64)> = measured
                .clone()
                .map(|(at, rounds)| (at, height(rounds.median())))
                .collect();
            let stroke = colour.stroke_width(if line.ours { 3 } else { 2 });
            chart.draw_series(LineSeries::new(points.iter().copied(), stroke))?;
            chart.draw_series(
                points
                    .iter()
                    .map(|&point| Circle::new(point, 4, colour.filled())),
            )?;
            legend.draw(&PathElement::new([(0, middle), (26, middle)], stroke))?;
            legend.draw(&Circle::new((13, middle), 4, colour.filled()))?;
        } else if logarithmic {
            // As in `draw_bars`: such an axis has no zero from which a bar could begin.
            for (at, rounds) in measured.clone() {
                let point = (at, height(rounds.median()));
                chart.draw_series([Circle::new(point, 6, colour.filled())])?;
            }
            legend.draw(&Circle::new((14, middle), 6, colour.filled()))?;
        } else {
            let half = width * 0.46;
            chart.draw_series(measured.clone().map(|(at, rounds)| {
                Rectangle::new(
                    [(at - half, lowest), (at + half, height(rounds.median()))],
                    colour.filled(),
                )
            }))?;
            legend.draw(&Rectangle::new(
                [(6, middle - 8), (22, middle + 8)],
                colour.filled(),
            ))?;
        }
        let has_points = sweep.ordered || logarithmic;
        let thin = if has_points { colour } else { BLACK }.stroke_width(1);
        chart.draw_series(measured.map(|(at, rounds)| {
            let (low, high) = rounds.spread();
            PathElement::new([(at, height(low)), (at, height(high))], thin)
        }))?;
        legend.draw(&Text::new(line.label.clone(), (34, middle), text.clone()))?;
    }
    drop(chart);
    area.present()?;
    Ok(())
}
