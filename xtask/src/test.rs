//! `cargo xtask test`: all checks and tests, cheapest first.

use std::{
    env,
    ffi::OsString,
    fmt::Write as _,
    fs,
    path::Path,
    process::{Command, Stdio},
    sync::mpsc,
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{
    Profile, arm64, docs, kernel, packages,
    process::{Step, capture, cargo, cargo_home, install, root, run as run_command},
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
const NEVER_RUN: [&str; 4] = [
    "the book and the crates' documentation: `cargo xtask docs` compiles mdBook and checks every dependency for rustdoc",
    "the programs on arm64 kernels, which are emulated for minutes: `cargo xtask arm64 test`",
    "reproducibility of the distribution, which takes half an hour: `cargo xtask dist --twice`",
    "the programs on a custom kernel: `cargo xtask kernel-test IMAGE` (Debian's kernels are tested)",
];

/// Runs all checks, or only the tests whose names contain one of `filters`; finally prints the time
/// of each group and the tests that could not run. `server` is the profile of the server in whole-system tests.
pub(crate) fn run(filters: &[String], server: Profile) -> Result<()> {
    let mut times = Times::default();
    // Downloads wait for the network while the format is checked.
    let set_up = SetUp::start();
    if filters.is_empty() {
        times.step("format", check_format)?;
    }
    let set_up = times.step("set-up: Debian packages, BPF toolchain", || set_up.tools())?;
    if let Profile::Release = server {
        times.step("build: optimised server", || {
            crate::build(server, &[crate::SERVER])
        })?;
    }
    times.step("build and lints: programs and tests", || {
        run_command(build_with_lints()?.args(ALL))
    })?;
    times.step("set-up: kernels, a Debian root, moto, arm64", || {
        set_up.finish()
    })?;
    let mut nextest = Command::new("cargo");
    nextest
        .args(["nextest", "run"])
        .args(list_test_programs()?)
        .args(filters);
    crate::name_server(&mut nextest, server);
    thread::scope(|scope| {
        // Tests wait more than they compute: meanwhile the compiler checks what they do not need.
        let checks = filters.is_empty().then(|| scope.spawn(Checked::run));
        run_tests(times, &mut nextest, checks)
    })
}

/// Programs, tests and benches, in one build: without tests, dependencies would be compiled with other features.
const ALL: [&str; 2] = ["--workspace", "--all-targets"];

/// Tests of `--quick`, as a nextest filter: all unit tests, and the recorded cases, on both paths where there are
/// two.
const QUICK: &str =
    "kind(lib) | kind(bin) | binary(/^(conformance|recorded_answers|plain_scan|replay)$/)";

/// Runs the checks that a first patch needs: format, lints, unit tests, recorded cases.
pub(crate) fn run_quick() -> Result<()> {
    let mut times = Times::default();
    times.step("format", check_format)?;
    ensure_nextest()?;
    times.step("build and lints", || {
        run_command(build_with_lints()?.args(ALL))
    })?;
    let mut nextest = Command::new("cargo");
    nextest
        .args(["nextest", "run"])
        .args(list_test_programs()?)
        .args(["-E", QUICK]);
    let passed = run_tests(times, crate::name_server(&mut nextest, Profile::Dev), None);
    println!("\nA quick run: `cargo xtask test` runs everything.");
    passed
}

/// Tests that go on for `SOAK_SECONDS`, as a nextest filter: several owners of a zone under faults, cells whose
/// identities are renewed and whose authorities change, the TTLs of both paths, and changes of names whose replies
/// interfaces give.
const SOAKS: &str = "test(owners_share_a_zone_through_faults) | test(/^soak::/) | test(both_paths_count_down) \
                     | test(finished_reload_leaves_no_older_reply)";

/// Runs the soak tests for an hour each, side by side.
pub(crate) fn run_soaks() -> Result<()> {
    ensure_nextest()?;
    let mut nextest = Command::new("cargo");
    nextest.args([
        "nextest",
        "run",
        "--workspace",
        "--profile",
        "soak",
        "--no-capture",
        "-E",
        SOAKS,
    ]);
    // They wait most of the time, so there may be more of them than CPUs.
    nextest.args(["--test-threads", "8"]);
    run_command(crate::name_server(
        nextest.env("SOAK_SECONDS", "3600").current_dir(root()),
        Profile::Release,
    ))
}

/// Runs nextest beside `checks`, then prints all times and what could not run.
fn run_tests(
    mut times: Times,
    nextest: &mut Command,
    checks: Option<ScopedJoinHandle<'_, Checked>>,
) -> Result<()> {
    let target = root().join("target");
    let not_run = target.join("not-run.txt");
    fs::create_dir_all(&target).with_context(|| target.display().to_string())?;
    // Tests append to it; lines of an earlier run would look like this one's.
    fs::write(&not_run, "").with_context(|| not_run.display().to_string())?;
    let report = target.join("nextest/default/junit.xml");
    // So would its report, and nextest writes none if it cannot start.
    let _ = fs::remove_file(&report);
    // Not returned at once if it failed: times and what was not run help to see why.
    let passed = times.step("tests", || {
        run_command(
            nextest
                .env(NOT_RUN_VARIABLE, &not_run)
                .env("PATH", packages::moto_search_path()?)
                .envs(
                    SEED_VARIABLES
                        .map(|name| (name, env::var(name).unwrap_or_else(|_| "1".to_owned()))),
                )
                .current_dir(root()),
        )
    });
    times.add_groups(&fs::read_to_string(report).unwrap_or_default());
    let mut list = fs::read_to_string(&not_run)?;
    let checked = checks.map(|checks| {
        checks
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let Checked {
        times: others,
        not_run,
        problem,
    } = checked.unwrap_or_default();
    times.0.extend(others.0);
    list.push_str(&not_run);
    times.print();
    print_not_run(&list);
    problem.map_or(passed, Err)
}

/// Writes lists of the built test programs into the target folder; returns nextest's arguments that name them. With
/// these, nextest starts no cargo, whose lock [`Checked::run`] holds meanwhile.
fn list_test_programs() -> Result<[OsString; 4]> {
    let programs = [
        "nextest",
        "list",
        "--workspace",
        "--list-type",
        "binaries-only",
        "--message-format",
        "json",
    ];
    let workspace = ["metadata", "--format-version", "1", "--all-features"];
    let programs = write_list("test-programs.json", &programs)?;
    let workspace = write_list("workspace.json", &workspace)?;
    Ok([
        "--binaries-metadata".into(),
        programs,
        "--cargo-metadata".into(),
        workspace,
    ])
}

fn write_list(name: &str, cargo: &[&str]) -> Result<OsString> {
    let path = root().join("target").join(name);
    fs::write(&path, capture(cargo_with_lints()?.args(cargo))?)
        .with_context(|| path.display().to_string())?;
    Ok(path.into_os_string())
}

/// Results of the checks of the sources.
#[derive(Default)]
struct Checked {
    times: Times,
    /// Lines for the list of what was not run.
    not_run: String,
    problem: Option<anyhow::Error>,
}

impl Checked {
    /// Runs the remaining lints, checks of links and advisories, and the unit tests for arm64, one after the other.
    fn run() -> Self {
        let mut times = Times::default();
        let mut not_run = String::new();
        let problem = check_sources(&mut times, &mut not_run).err();
        if let Some(problem) = &problem {
            eprintln!("\n{problem:#}; the tests go on");
        }
        Self {
            times,
            not_run,
            problem,
        }
    }
}

fn check_sources(times: &mut Times, not_run: &mut String) -> Result<()> {
    times.step(
        "lints: BPF programs, and the resolver without live Consul",
        || {
            toolchain::lint_programs()?;
            // With the libraries of the workspace, so that none is compiled again with other features.
            let reduced = ["--workspace", "--lib", "--no-default-features"];
            run_command(build_with_lints()?.args(reduced))
        },
    )?;
    times.step("links in the documentation", docs::check)?;
    if advisories_not_run(cargo_home().as_deref()).is_none() {
        times.step("advisories", || {
            cargo([
                "deny",
                "--offline",
                "check",
                "--disable-fetch",
                "advisories",
            ])
        })?;
    }
    // Debian's archive has only the newest version of the compiler's libraries.
    match arm64::ensure() {
        Ok(()) => times.step(
            "arm64: unit tests of the wire format, emulated",
            arm64::unit_tests,
        ),
        Err(problem) => {
            writeln!(
                not_run,
                "the wire format's unit tests on arm64: {problem:#}"
            )?;
            Ok(())
        }
    }
}

/// Set-up beside the first checks.
struct SetUp {
    tools: Step,
    rest: Step,
}

impl SetUp {
    /// Starts all installations and downloads. Those of Debian packages are one after the other, because apt
    /// locks its lists.
    fn start() -> Self {
        let (ready, begin) = mpsc::channel();
        let tools = Step::start("Debian packages and BPF toolchain", move || {
            packages::ensure(packages::TEST)?;
            toolchain::ensure()?;
            let _ = ready.send(());
            ensure_nextest()
        });
        let rest = Step::start("kernels, a Debian root, moto, arm64", move || {
            // Without packages nothing else can be set up, and the error is the first step's.
            let Ok(()) = begin.recv() else { return Ok(()) };
            kernel::ensure()?;
            packages::ensure_debian_root()?;
            packages::ensure_moto()?;
            packages::ensure_pycares()?;
            // Failures are reported where it is needed.
            let _ = arm64::ensure();
            Ok(())
        });
        Self { tools, rest }
    }

    /// Waits for packages and compilers; meanwhile a first build compiles what needs neither. Returns the rest.
    fn tools(self) -> Result<Step> {
        if is_first_build() {
            println!(
                "set-up: compiling dependencies meanwhile; the first run takes about half an hour on two cores"
            );
            // Fails at the BPF programs if their toolchain is not ready by then; the later builds go on.
            let _ = build_with_lints()?
                .arg("--keep-going")
                .args(ALL)
                .stderr(Stdio::null())
                .status();
        }
        self.tools.finish()?;
        Ok(self.rest)
    }
}

/// Returns whether the BPF toolchain, and therefore the server, has never been built here.
fn is_first_build() -> bool {
    !root().join(".toolchain/env").exists()
}

fn check_format() -> Result<()> {
    cargo(["fmt", "--all", "--check"])?;
    for programs in toolchain::PROGRAMS {
        run_command(
            Command::new("cargo")
                .args(["fmt", "--check"])
                .current_dir(root().join(programs)),
        )?;
    }
    Ok(())
}

/// Returns a cargo command that builds with lints.
fn build_with_lints() -> Result<Command> {
    let mut cargo = cargo_with_lints()?;
    cargo.args(["build", "--quiet"]);
    Ok(cargo)
}

/// Returns cargo with clippy as the compiler of this project's crates: it writes what rustc writes, and warnings of
/// either are errors. A check beside the build would read every dependency a second time.
fn cargo_with_lints() -> Result<Command> {
    let sysroot = capture(
        Command::new("rustc")
            .args(["--print", "sysroot"])
            .current_dir(root()),
    )?;
    let driver = Path::new(sysroot.trim()).join("bin/clippy-driver");
    ensure!(
        driver.exists(),
        "{} is missing: `rustup component add clippy`",
        driver.display()
    );
    let mut cargo = Command::new("cargo");
    cargo
        .env("RUSTC_WORKSPACE_WRAPPER", driver)
        .env(
            "CLIPPY_ARGS",
            "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__",
        )
        .current_dir(root());
    Ok(cargo)
}

/// Durations by step and group.
#[derive(Default)]
struct Times(Vec<(String, Duration)>);

impl Times {
    /// Announces a step, runs it and records its duration.
    fn step<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        println!("\n== {name}");
        let begin = Instant::now();
        let done = work();
        self.0.push((name.to_owned(), begin.elapsed()));
        done
    }

    /// Adds the test groups with the sum of their tests' durations; tests run in parallel.
    fn add_groups(&mut self, report: &str) {
        for (group, time) in groups(report) {
            self.0.push((format!("  {group}"), time));
        }
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
        // nextest writes each element on a line of its own, so no parser of XML is needed.
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
    let missing = if !has_database {
        "there is no database of advisories"
    } else if capture(Command::new("cargo").args(["deny", "--version"])).is_err() {
        "cargo-deny is not installed"
    } else {
        return None;
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
    for line in advisories
        .as_deref()
        .into_iter()
        .chain(list.lines())
        .chain(NEVER_RUN)
    {
        println!("- {line}");
    }
}

/// Installs cargo-nextest, which runs test programs in parallel, if it is missing.
fn ensure_nextest() -> Result<()> {
    if capture(Command::new("cargo").args(["nextest", "--version"])).is_ok() {
        return Ok(());
    }
    // Without its own update from the network.
    run_command(install("cargo-nextest", NEXTEST_VERSION).args([
        "--no-default-features",
        "--features",
        "default-no-update",
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_summed_up() {
        let report = "<testsuites name=\"nextest-run\" time=\"9\">\n  <testsuite name=\"a::b\" tests=\"2\">\n    \
                      <testcase name=\"x\" time=\"1.5\">\n    <testcase name=\"y\" time=\"0.25\"/>\n  \
                      </testsuite>\n  <testsuite name=\"c\" tests=\"0\">\n</testsuites>\n";
        let sums = [
            ("a::b".to_owned(), Duration::from_millis(1750)),
            ("c".to_owned(), Duration::ZERO),
        ];
        assert_eq!(groups(report), sums);
    }

    #[test]
    fn missing_advisories_are_reported() {
        let home = tempfile::tempdir().unwrap();
        let reason = advisories_not_run(Some(home.path())).unwrap();
        assert!(
            reason.contains("no database") && reason.contains("cargo deny check advisories"),
            "{reason}"
        );
        assert_eq!(advisories_not_run(None), Some(reason));
    }
}
