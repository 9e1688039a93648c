//! The report: measurements as figures that can be drawn, read and parsed.

use serde::{Deserialize, Serialize};
pub use test_lab::figures::{Rounds, number};

mod html;
mod markdown;
mod plot;
mod targets;

pub use targets::titles;

/// The results of one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Facts about the run: commands, machine and time, as names and values.
    pub facts: Vec<(String, String)>,
    /// The figures in reading order.
    pub figures: Vec<Figure>,
    /// Number of figures in the summary; the others are details.
    pub main: usize,
}

/// A plot with its table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// Headline of the figure.
    pub title: String,
    /// The method, and how to read the figure.
    pub about: String,
    /// Unit of the values.
    pub unit: String,
    /// The values to plot.
    pub data: Data,
}

impl Figure {
    /// Creates a figure without subjects and points.
    pub fn new(title: impl Into<String>, about: impl Into<String>, unit: &str, data: Data) -> Self {
        Self {
            title: title.into(),
            about: about.into(),
            unit: unit.to_owned(),
            data,
        }
    }

    /// Whether higher values are better, as for rates and shares; for times and memory lower ones
    /// are.
    pub fn more_is_better(&self) -> bool {
        self.unit.ends_with("/s") || self.unit == "%" || self.unit == "packets"
    }
}

/// Data of a figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Data {
    /// One value per subject.
    Bars(Vec<Bar>),
    /// Several values per subject.
    Sweep(Sweep),
}

/// Values of all subjects along an axis.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sweep {
    /// Meaning of the axis, with its unit.
    pub axis: String,
    /// Points from left to right at equal distances; decades form a logarithmic axis.
    pub places: Vec<String>,
    /// Whether the points have an order, so that lines connect them.
    pub ordered: bool,
    /// One line per subject.
    pub series: Vec<Series>,
}

impl Sweep {
    /// Creates a sweep without measurements.
    pub fn new(axis: &str, places: Vec<String>, ordered: bool) -> Self {
        Self {
            axis: axis.to_owned(),
            places,
            ordered,
            series: Vec::new(),
        }
    }

    /// Adds one round's measurement of a subject at the point with this number.
    pub fn push(&mut self, label: &str, ours: bool, place: usize, value: f64) {
        // The quotient of a round without any reply: no axis is long enough for it.
        if !value.is_finite() {
            return;
        }
        // In the order of the first measurements, which is that of the plan's subjects.
        let known = self.series.iter().position(|line| line.label == label);
        let row = known.unwrap_or_else(|| {
            let values = vec![Rounds::default(); self.places.len()];
            self.series.push(Series {
                label: label.to_owned(),
                values,
                ours,
            });
            self.series.len() - 1
        });
        if let Some(rounds) = self.series[row].values.get_mut(place) {
            rounds.0.push(value);
        }
    }

    /// Returns the measurements of a subject at a point.
    pub fn value(&self, label: &str, place: &str) -> Option<&Rounds> {
        let at = self.places.iter().position(|name| name == place)?;
        self.series
            .iter()
            .find(|line| line.label == label)?
            .values
            .get(at)
    }
}

/// One bar of a chart.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Bar {
    /// Label of the subject.
    pub label: String,
    /// Measured values over all rounds.
    pub value: Rounds,
    /// Whether the subject is this server, drawn in another colour.
    pub ours: bool,
}

/// The values of one subject along the axis.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Series {
    /// Label of the subject.
    pub label: String,
    /// One value per point; empty if not measured.
    pub values: Vec<Rounds>,
    /// Whether the subject is this server, drawn stronger.
    pub ours: bool,
}

impl Report {
    /// Parses the facts and figures of a report.
    pub fn read(json: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(json)
    }

    /// Moves the figures with these titles to the front, in this order.
    pub fn put_first(&mut self, titles: &[&str]) {
        // The sort is stable, so that particulars stay in the order of measuring.
        let place = |figure: &Figure| titles.iter().position(|title| figure.title == *title);
        self.figures
            .sort_by_key(|figure| place(figure).unwrap_or(titles.len()));
        self.main = self
            .figures
            .iter()
            .filter(|figure| place(figure).is_some())
            .count();
    }

    /// Returns the targets that this run measured: the head, and for each target its text, the measured median, the
    /// bound, and whether it was met.
    fn targets(&self) -> Vec<[String; 4]> {
        let rows = targets::rows(self);
        let head = (!rows.is_empty())
            .then(|| ["target", "measured (median)", "wanted", ""].map(str::to_owned));
        head.into_iter().chain(rows).collect()
    }

    /// Returns the heading before the figure with this number, if there is one.
    fn heading(&self, number: usize) -> Option<&'static str> {
        // A run of a few parts may have none of the summary's figures: then all are of one kind.
        (number == self.main && self.main > 0).then_some("Particulars")
    }

    /// Returns one page with all plots and no external resources.
    pub fn to_html(&self) -> anyhow::Result<String> {
        html::page(self)
    }

    /// Returns the figures as Markdown tables.
    pub fn to_markdown(&self) -> String {
        markdown::tables(self)
    }

    /// Returns the plot of one figure as an SVG document.
    pub fn plot(figure: &Figure) -> anyhow::Result<String> {
        plot::draw(figure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_drawn_and_written() {
        let figure = |data| Figure::new("Cost <1>", "About.", "µs", data);
        let bars = Data::Bars(vec![
            Bar {
                label: "ours".into(),
                value: Rounds(vec![1.0, 2.0]),
                ours: true,
            },
            Bar {
                label: "peer".into(),
                value: Rounds(vec![4.0]),
                ours: false,
            },
        ]);
        let sweep = |ordered| {
            let mut sweep = Sweep::new("instances", vec!["100".into(), "1,000".into()], ordered);
            for (label, place, value) in [
                ("ours", 0, 1.0),
                ("ours", 0, 2.0),
                ("ours", 1, 2.0),
                // A round without any reply.
                ("peer", 0, f64::INFINITY),
                ("peer", 1, 4.0),
            ] {
                sweep.push(label, label == "ours", place, value);
            }
            assert_eq!(sweep.value("ours", "100").unwrap().0, [1.0, 2.0]);
            assert!(sweep.value("ours", "10").is_none());
            Data::Sweep(sweep)
        };
        let mut unanswered = Sweep::new("instances", vec!["100".into()], true);
        unanswered.push("peer", false, 0, f64::INFINITY);
        assert!(Report::plot(&figure(Data::Sweep(unanswered))).is_ok());
        let last = Figure {
            title: "Main".into(),
            ..figure(sweep(false))
        };
        let mut report = Report {
            facts: vec![("machine".into(), "this".into())],
            figures: vec![figure(bars), figure(sweep(true)), last],
            main: 0,
        };
        assert!(!report.to_markdown().contains("Particulars"));
        let read = Report::read(&serde_json::to_vec(&report).unwrap()).unwrap();
        assert_eq!((read.figures.len(), read.facts), (3, report.facts.clone()));
        report.put_first(&["Main", "Not measured"]);
        let page = report.to_html().unwrap();
        assert_eq!(page.matches("<svg").count(), 3);
        assert!(page.contains("Cost &lt;1&gt;"));
        assert!(
            !page.contains("http://")
                || page.matches("http://").count() == page.matches("http://www.w3.org").count()
        );
        let text = report.to_markdown();
        let order = ["## Main", "# Particulars", "## Cost"].map(|head| text.find(head).unwrap());
        assert!(order.is_sorted(), "{order:?}");
        assert!(
            text.contains("| ours | 1.50 | 1.00 | 1.00–2.00 |"),
            "median, best quartile, spread"
        );
        assert!(text.contains("| µs by instances | 100 | 1,000 |"));
        assert!(text.contains("| ours | 1.50, 1.00 (1.00–2.00) | 2.00 |"));
        assert!(text.contains("| peer | – | 4.00 |"));
    }
}
