//! The command `run`: one load.

use std::{
    fs::File,
    io::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use hdrhistogram::serialization::V2DeflateSerializer;

use crate::{
    generator::{Generator, MAX_BURST},
    hlog::LatencyLog,
    measure::{self, Ended, Plan, measure},
    output::Output,
    plot,
    queries::Query,
    report::{self, Kind, Report},
    target::{Target, endpoint},
};

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Server: ADDRESS or ADDRESS:PORT, on the interface's link, private or loopback.
    #[arg(long, value_parser = endpoint)]
    server: SocketAddr,
    #[command(flatten)]
    target: Target,
    /// Queries per second by all CPUs together; without it, as many as possible.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rate: Option<u32>,
    /// Queries of each CPU that are due at the same moment, such as a client's A and AAAA: 1 to 16. The rate stays the mean.
    #[arg(long, default_value_t = 1, requires = "rate", value_parser = clap::value_parser!(u32).range(1..=MAX_BURST))]
    burst: u32,
    /// Length of the measurement.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Seconds between two lines.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Prints JSON Lines: an object for each interval, and one of the kind `total`.
    #[arg(long)]
    json: bool,
    /// Writes a table of percentiles, in the text format of HdrHistogram.
    #[arg(long, value_name = "FILE")]
    percentiles: Option<PathBuf>,
    /// Writes the latencies of each interval as a log that HdrHistogram's tools read; service times have the tag `service`.
    #[arg(long, value_name = "FILE")]
    hlog: Option<PathBuf>,
    /// Writes a line for each different query: name, type, queries sent, replies, answers in the first reply.
    #[arg(long, value_name = "FILE")]
    names: Option<PathBuf>,
    /// Draws rates and latencies over time, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

impl Run {
    pub(crate) fn run(&self) -> Result<()> {
        let prepared = self.target.prepare(&[self.server], Duration::ZERO)?;
        let percentiles = ResultFile::create(self.percentiles.as_deref())?;
        let hlog = ResultFile::create(self.hlog.as_deref())?;
        let counts = ResultFile::create(self.names.as_deref())?;
        let drawing = ResultFile::create(self.plot.as_deref())?;
        measure::end_by_signals()?;
        let plan = Plan {
            kind: Kind::Total,
            rate: self.rate,
            burst: self.burst,
            length: Duration::from_secs(self.seconds),
            part: prepared.generator.whole(),
        };
        let mut output = Output::new(self.json, Some(plan.length))?;
        let mut intervals = Vec::new();
        let mut log_text = Vec::new();
        let mut serializer = V2DeflateSerializer::new();
        let mut log = LatencyLog::begin(&mut log_text, &mut serializer)?;
        let generator = &prepared.generator;
        let (total, ended) = generator.during(&|| Ok(()), || {
            let mut tick = |report: &Report| {
                log.add(report)?;
                // An hour of histograms would be large.
                intervals.push(Report {
                    histograms: Vec::new(),
                    ..report.clone()
                });
                output.line(report)
            };
            let interval = Duration::from_secs(self.interval);
            measure(generator, &prepared.interface, &plan, interval, &mut tick)
        })?;
        // Before the files: a full disk hides no figures.
        output.total(&total)?;
        if let (Some(file), Some(histogram)) = (percentiles, total.histograms.first()) {
            file.write(report::percentiles(histogram))?;
        }
        log.end(&total)?;
        if let Some(file) = hlog {
            file.write(log_text)?;
        }
        if let Some(file) = counts {
            file.write(names(generator, &prepared.queries)?)?;
        }
        if let Some(file) = drawing {
            file.write(plot::over_time(&intervals)?)?;
        }
        // Last, so that the files have what was measured until then.
        if let Ended::Silent(unanswered) = ended {
            bail!(
                "{} stopped answering: no reply to the last {unanswered} queries; the load was ended after {:.1} s",
                self.server,
                total.seconds
            );
        }
        Ok(())
    }
}

/// A file for a result, created before the load: an hour of it would be for nothing if it could not be.
pub(crate) struct ResultFile<'a> {
    path: &'a Path,
    file: File,
}

impl<'a> ResultFile<'a> {
    /// Creates the file, if one is named.
    pub(crate) fn create(path: Option<&'a Path>) -> Result<Option<Self>> {
        let Some(path) = path else {
            return Ok(None);
        };
        let file = File::create(path).with_context(|| path.display().to_string())?;
        Ok(Some(Self { path, file }))
    }

    /// Writes the result.
    pub(crate) fn write(mut self, text: impl AsRef<[u8]>) -> Result<()> {
        let written = self.file.write_all(text.as_ref());
        written.with_context(|| self.path.display().to_string())
    }
}

/// Returns the counts of each query.
fn names(generator: &Generator, queries: &[Query]) -> Result<String> {
    let mut text = String::new();
    for (query, frame) in queries.iter().zip(generator.frames()?) {
        let answers = match frame.answers.checked_sub(1) {
            Some(answers) => answers.to_string(),
            None => "-".to_owned(),
        };
        text += &format!("{query} {} {} {answers}\n", frame.sent, frame.received);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn unwritable_results_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("result");
        let created = ResultFile::create(Some(&file)).unwrap().unwrap();
        created.write("text").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "text");
        let missing = folder.path().join("missing/result");
        let problem = format!("{:#}", ResultFile::create(Some(&missing)).err().unwrap());
        let expected = format!(
            "{}: No such file or directory (os error 2)",
            missing.display()
        );
        assert_eq!(problem, expected);
    }

    #[test]
    fn query_lines_show_counts() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("queries");
        fs::write(&file, "a.bosh. A\nb.bosh. AAAA\n").unwrap();
        let queries = crate::queries::of_file(&file, None).unwrap();
        crate::generator::alone(&[0], |generator| {
            // Nothing was sent yet, and there is no first reply.
            assert_eq!(
                names(&generator, &queries).unwrap(),
                "a.bosh. A 0 0 -\nb.bosh. AAAA 0 0 -\n"
            );
        });
    }
}
