//! `cargo xtask bench`: measures this server, its peers and the bare reflector in one run on one
//! machine, and writes the report.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use bosh_dns_xdp_benches::{
    figures::quoted,
    is_wanted, lab,
    report::{Figure, Report},
};
use clap::Parser as _;
use whole_system_tests::interrupt;

use self::arguments::Arguments;

mod against;
mod arguments;
mod cell;
mod consul;
mod containers;
mod cost;
mod flood;
mod footprint;
mod forwarding;
mod harm;
mod latency;
mod outside;
mod queries;
mod reload;
mod saturated;
mod scaling;
mod subject;
mod sweep;
mod turns;

/// The amount of measuring.
struct Plan {
    /// Rounds; each subject is measured once per round.
    rounds: usize,
    /// Duration of one measurement.
    duration: Duration,
    /// Rounds of measurements along an axis.
    sweep_rounds: usize,
    /// Duration of one measurement along an axis.
    sweep_duration: Duration,
    /// Turns of each subject on a saturated core, in each round.
    turns: usize,
    /// The same for measurements by number and order of names.
    scale_turns: usize,
    /// Whether `--quick` is set.
    quick: bool,
    /// Sizes of the foundation.
    sizes: Vec<usize>,
    /// Path of bosh-dns's binary.
    reference: Option<PathBuf>,
    /// Texts, one of which must be in a subject's label; empty for all subjects.
    wanted: Vec<String>,
}

impl Plan {
    /// Whether to also measure beyond the best rate.
    fn with_curves(&self) -> bool {
        !self.quick
    }

    /// Returns `few` if the run is quick, else `many`.
    fn pick<T: Clone>(&self, few: &[T], many: &[T]) -> Vec<T> {
        if self.quick { few } else { many }.to_vec()
    }
}

/// A part of the bench: its name and the function that returns its figures.
type Part = (&'static str, fn(&Plan) -> Result<Vec<Figure>>);

/// The parts in the order of measuring.
const PARTS: &[Part] = &[
    ("saturated", saturated::measure),
    ("scale", saturated::measure_scale),
    ("cost", cost::measure),
    ("latency", latency::measure),
    ("forwarding", forwarding::measure),
    ("outside", outside::measure),
    ("flood", flood::measure),
    ("sizes", scaling::measure),
    ("footprint", footprint::measure),
    ("reload", reload::measure),
    ("harm", harm::measure),
    ("cell", containers::measure),
    ("consul", consul::measure),
];

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match interrupt::install().and_then(|()| run(&arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if interrupt::requested() => ExitCode::from(130),
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures all parts and writes the report.
fn run(arguments: &Arguments) -> Result<()> {
    // First, so that a folder that cannot be created fails before measuring.
    fs::create_dir_all(&arguments.output).with_context(|| arguments.output.display().to_string())?;
    if let Some(file) = &arguments.from {
        let numbers = fs::read(file).with_context(|| file.display().to_string())?;
        let report = Report::read(&numbers).with_context(|| format!("{}: no report", file.display()))?;
        return finish(report, &arguments.output);
    }
    let most = arguments.rounds.map_or(usize::MAX, usize::from);
    let rounds = |count: usize| if arguments.quick { 1 } else { count.min(most) };
    let plan = Plan {
        rounds: rounds(3),
        duration: Duration::from_millis(if arguments.quick { 500 } else { 1_000 }),
        sweep_rounds: rounds(2),
        sweep_duration: Duration::from_millis(500),
        turns: if arguments.quick { 4 } else { 7 },
        scale_turns: if arguments.quick { 3 } else { 4 },
        quick: arguments.quick,
        sizes: if arguments.quick { vec![1_000, 10_000] } else { vec![100, 1_000, 10_000, 100_000] },
        reference: arguments.bosh_dns.clone(),
        wanted: arguments.subject.clone(),
    };
    let mut report = Report { facts: facts(arguments), figures: Vec::new(), main: 0 };
    let started = Instant::now();
    if !arguments.against.is_empty() {
        for mode in &arguments.mode {
            // Subjects hold the names of their modes for the life of the program.
            let mode = ["tc", "native", "off"].into_iter().find(|known| known == mode);
            let mode = mode.context("clap lets no other modes through")?;
            report.figures.push(against::measure(&plan, &arguments.against, mode)?);
        }
        return write(&report, &arguments.output);
    }
    for (position, (name, measure)) in PARTS.iter().enumerate() {
        if !is_wanted(&arguments.only, name) {
            continue;
        }
        let elapsed = started.elapsed().as_secs();
        println!("\n[{}/{}] {name} ({elapsed} s so far)", position + 1, PARTS.len());
        report.figures.extend(measure(&plan).with_context(|| (*name).to_owned())?);
    }
    println!("\nmeasured in {} s", started.elapsed().as_secs());
    finish(report, &arguments.output)
}

/// Writes the report with the main figures first.
fn finish(mut report: Report, folder: &Path) -> Result<()> {
    report.put_first(&[
        saturated::TITLE,
        latency::TITLE,
        saturated::SCALE_TITLE,
        harm::MAIN_TITLE,
        containers::TITLE,
    ]);
    write(&report, folder)
}

/// Returns the facts of the run: commands, machine and time.
fn facts(arguments: &Arguments) -> Vec<(String, String)> {
    let output = |program: &str, words: &[&str]| {
        let output =
            Command::new(program).args(words).output().map(|output| output.stdout).unwrap_or_default();
        String::from_utf8_lossy(&output).trim().to_owned()
    };
    let only: String = arguments.only.iter().map(|part| format!(" --only {part}")).collect();
    let quick = if arguments.quick { " --quick" } else { "" };
    let rounds = arguments.rounds.map(|count| format!(" --rounds {count}")).unwrap_or_default();
    let command = format!("cargo xtask bench{quick}{rounds}{only}");
    let mut facts = vec![
        ("date", output("date", &["--utc", "+%Y-%m-%d %H:%M UTC"])),
        ("machine", lab::machine()),
        ("command", command),
        ("commit", output("git", &["rev-parse", "--short", "HEAD"])),
        (
            "values",
            "median, best quartile, lowest and highest of all slices (125 ms) of a load in all rounds or \
             turns, or of all rounds"
                .to_owned(),
        ),
        ("generators", "in the kernel (live frames), one core; dnsperf for latencies".to_owned()),
    ];
    if arguments.bosh_dns.is_none() {
        facts.push(("quoted, not measured in this run", quoted::OTHERS.to_owned()));
    }
    facts.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// Writes the page, the tables, the numbers, and each plot.
fn write(report: &Report, folder: &Path) -> Result<()> {
    fs::write(folder.join("report.html"), report.to_html()?)?;
    fs::write(folder.join("report.md"), report.to_markdown())?;
    fs::write(folder.join("report.json"), serde_json::to_vec_pretty(report)?)?;
    for (number, figure) in report.figures.iter().enumerate() {
        fs::write(folder.join(format!("figure-{:02}.svg", number + 1)), Report::plot(figure)?)?;
    }
    println!("\n{}\nwritten: {}", report.to_markdown(), folder.join("report.html").display());
    Ok(())
}
