//! `cargo xtask test`: all checks and tests, cheapest first.

use std::{
    env, fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::{
    docs, fuzz,
    process::{capture, cargo, cargo_home, root, run as run_command},
    toolchain,
};

/// Version of cargo-nextest to install if it is missing.
const NEXTEST_VERSION: &str = "0.9.143";

/// Path of the file in which tests report that they cannot run (`tests/src/requirements.rs`).
const NOT_RUN_VARIABLE: &str = "BOSH_DNS_NOT_RUN";

/// Seeds of random test inputs, for this project's tests and proptest. They are fixed so that
/// results are reproducible. For new inputs set other values, or run `cargo nextest` (random seeds)
/// or `cargo xtask fuzz`.
const SEED_VARIABLES: [&str; 2] = ["SEED", "PROPTEST_RNG_SEED"];

/// Checks that are not part of this command.
const NEVER_RUN: [&str; 2] = [
    "reproducibility of the distribution, which takes half an hour: `cargo xtask dist --twice`",
    "the programs on a custom kernel: `cargo xtask kernel-test IMAGE` (Debian's kernels are tested)",
];

/// Runs all checks, or only the tests whose names contain one of `filters`; finally prints the time
/// of each group and the tests that could not run.
pub(crate) fn run(filters: &[String]) -> Result<()> {
    let mut times = Times::default();
    if filters.is_empty() {
        times.step("format", || {
            cargo(["fmt", "--all", "--check"])?;
            for programs in toolchain::PROGRAMS {
                run_command(
                    Command::new("cargo").args(["fmt", "--check"]).current_dir(root().join(programs)),
                )?;
            }
            Ok(())
        })?;
        times.step("lints", || {
            cargo(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
            // The resolver without a live Consul. With the rest of the workspace, so that no library is checked again
            // with other features.
            let reduced = ["--workspace", "--all-targets", "--no-default-features"];
            cargo([&["clippy", "--quiet"][..], &reduced, &["--", "-D", "warnings"]].concat())?;
            toolchain::lint_programs()
        })?;
        times.step("documentation", || {
            docs::build()?;
            let denied = r#"build.rustdocflags=["-D", "warnings"]"#;
            let crates = ["--workspace", "--no-deps", "--document-private-items"];
            cargo([&["doc", "--quiet", "--config", denied][..], &crates].concat())
        })?;
        if advisories_not_run(cargo_home().as_deref()).is_none() {
            times.step("advisories", || {
                cargo(["deny", "--offline", "check", "--disable-fetch", "advisories"])
            })?;
        }
        times.step("fuzzing", || fuzz::run(&[], fuzz::Effort::SMOKE))?;
    }
    times.step("build", || crate::release(&[]))?;
    let target = root().canonicalize()?.join("target");
    let not_run = target.join("not-run.txt");
    fs::write(&not_run, "").with_context(|| not_run.display().to_string())?;
    let passed = times.step("tests", || {
        ensure_nextest()?;
        run_command(
            crate::name_server(&mut Command::new("cargo"))?
                .args(["nextest", "run", "--workspace"])
                .args(filters)
                .env(NOT_RUN_VARIABLE, &not_run)
                .env("PATH", crate::moto::search_path()?)
                .envs(SEED_VARIABLES.map(|name| (name, env::var(name).unwrap_or_else(|_| "1".to_owned()))))
                .current_dir(root()),
        )
    });
    times.add_groups(&target.join("nextest/default/junit.xml"))?;
    times.print();
    print_not_run(&fs::read_to_string(&not_run)?);
    passed
}

/// Durations by step and group.
#[derive(Default)]
struct Times(Vec<(String, Duration)>);

impl Times {
    /// Announces a step, runs it and records its duration.
    fn step(&mut self, name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        println!("\n== {name}");
        let begin = Instant::now();
        let done = work();
        self.0.push((name.to_owned(), begin.elapsed()));
        done
    }

    /// Adds the test groups with the sum of their tests' durations; tests run in parallel.
    fn add_groups(&mut self, report: &Path) -> Result<()> {
        let text = fs::read_to_string(report).with_context(|| report.display().to_string())?;
        for (group, time) in groups(&text) {
            self.0.push((format!("  {group}"), time));
        }
        Ok(())
    }

    fn print(&self) {
        println!("\n== time (of groups of tests: the sum of their tests)");
        for (name, time) in &self.0 {
            println!("{:8.1} s  {name}", time.as_secs_f64());
        }
    }
}

/// Returns the test programs in nextest's JUnit report, with the sum of their tests' durations.
fn groups(report: &str) -> Vec<(String, Duration)> {
    let mut groups: Vec<(String, Duration)> = Vec::new();
    for line in report.lines().map(str::trim) {
        if line.starts_with("<testsuite ") {
            groups.extend(attribute(line, "name").map(|name| (name.to_owned(), Duration::ZERO)));
        } else if line.starts_with("<testcase ")
            && let Some((_, sum)) = groups.last_mut()
            && let Some(seconds) = attribute(line, "time").and_then(|time| time.parse().ok())
        {
            *sum += Duration::from_secs_f64(seconds);
        }
    }
    groups
}

/// Returns an attribute of an XML element written on one line.
fn attribute<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!(" {name}=\""))?;
    rest.split_once('"').map(|(value, _)| value)
}

/// Returns why dependencies cannot be checked for advisories offline: cargo-deny is not installed or
/// has not fetched its database into this folder.
fn advisories_not_run(cargo_home: Option<&Path>) -> Option<String> {
    let has_database = cargo_home.is_some_and(|home| home.join("advisory-dbs").is_dir());
    let missing = match has_database {
        false => "there is no database of advisories",
        true if capture(Command::new("cargo").args(["deny", "--version"])).is_err() => {
            "cargo-deny is not installed"
        }
        true => return None,
    };
    Some(format!(
        "advisories about dependencies: {missing}, and a test must not need the network; \
         `cargo deny check advisories` fetches them, as the hosted workflow does every week"
    ))
}

/// Prints the tests that could not run, and the reasons.
fn print_not_run(list: &str) {
    println!("\n== not run, because");
    let advisories = advisories_not_run(cargo_home().as_deref());
    for line in advisories.as_deref().into_iter().chain(list.lines()).chain(NEVER_RUN) {
        println!("- {line}");
    }
}

/// Installs cargo-nextest, which runs test programs in parallel, if it is missing.
fn ensure_nextest() -> Result<()> {
    if capture(Command::new("cargo").args(["nextest", "--version"])).is_ok() {
        return Ok(());
    }
    println!("installing cargo-nextest {NEXTEST_VERSION}");
    cargo(["install", "--quiet", "--locked", "cargo-nextest", "--version", NEXTEST_VERSION])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_summed_up() {
        let report = "<testsuites name=\"nextest-run\" time=\"9\">\n  <testsuite name=\"a::b\" tests=\"2\">\n    \
                      <testcase name=\"x\" time=\"1.5\">\n    <testcase name=\"y\" time=\"0.25\"/>\n  \
                      </testsuite>\n  <testsuite name=\"c\" tests=\"0\">\n</testsuites>\n";
        let sums = [("a::b".to_owned(), Duration::from_millis(1750)), ("c".to_owned(), Duration::ZERO)];
        assert_eq!(groups(report), sums);
    }

    #[test]
    fn missing_advisories_are_reported() {
        let home = tempfile::tempdir().unwrap();
        let reason = advisories_not_run(Some(home.path())).unwrap();
        assert!(reason.contains("no database") && reason.contains("cargo deny check advisories"), "{reason}");
        assert_eq!(advisories_not_run(None), Some(reason));
    }
}
