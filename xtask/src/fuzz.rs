//! `cargo xtask fuzz`: runs the targets of `tests/fuzz` for a bounded time each, the BPF programs
//! against their model, and a server with the fast path against one without.
//!
//! The stable compiler builds the targets in the workspace's target folder (explained in
//! `tests/fuzz/rustc.sh`); only this project's crates are compiled again. `cargo xtask test` runs the same
//! targets as ordinary tests (`tests/fuzz/tests/smoke.rs`).

use std::{
    ffi::OsString,
    fs::{self, File},
    path::Path,
    process::Command,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    Profile, SERVER, build, packages,
    process::{capture, root, run as run_command},
    toolchain,
};

/// Memory limit of a run in MiB; a small input that needs more is a finding.
const MEMORY_LIMIT: u32 = 1024;

/// Time in seconds after which an input counts as a hang.
const INPUT_TIMEOUT: u32 = 10;

/// Options of `cargo xtask fuzz`.
#[derive(Debug, clap::Args)]
pub(crate) struct Fuzz {
    /// Run only targets whose name contains one of these.
    filters: Vec<String>,
    /// Duration of each target in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Fuzz the BPF programs instead of the targets.
    #[arg(long, conflicts_with_all = ["filters", "seconds"])]
    program: bool,
    /// Compare interfaces with userspace instead; needs root.
    #[arg(long, conflicts_with_all = ["filters", "seconds", "program"])]
    interfaces: bool,
    /// Compare forwarded answers of interfaces with userspace's answers instead.
    #[arg(long, conflicts_with_all = ["filters", "seconds", "program", "interfaces"])]
    replies: bool,
    /// Number of packets: for each BPF program 10,000,000; for interfaces 100,000 whose replies
    /// are compared; of replies 100,000,000.
    #[arg(long)]
    packets: Option<u64>,
    /// Number of set-ups of interfaces.
    #[arg(long, default_value_t = 200, requires = "interfaces")]
    set_ups: u64,
    /// Seed of the inputs or packets; chosen at random and printed if not given.
    #[arg(long)]
    seed: Option<u64>,
}

impl Fuzz {
    pub(crate) fn run(self) -> Result<()> {
        let Self {
            filters,
            seconds,
            program,
            interfaces,
            replies,
            packets,
            set_ups,
            seed,
        } = self;
        if interfaces {
            packages::ensure(packages::TEST)?;
        }
        toolchain::ensure()?;
        if program {
            return fuzz_programs(packets.unwrap_or(10_000_000), seed);
        }
        if interfaces {
            build(Profile::Release, &[SERVER])?;
            return compare_servers(packets.unwrap_or(100_000), set_ups, seed);
        }
        if replies {
            return compare_replies(packets.unwrap_or(100_000_000), seed);
        }
        let seed = seed
            .map(u32::try_from)
            .transpose()
            .context("seeds of fuzz targets are below 2^32")?;
        run_targets(&filters, seconds, seed)
    }
}

/// Runs the targets whose names contain one of `filters` (all, if empty) for this many seconds each, one per
/// core at a time.
///
/// Inputs that reach new code go to `target/fuzz/<target>`, from which the next run continues; the committed
/// corpus stays unchanged. Inputs that make a target fail are stored there too and named in the error.
fn run_targets(filters: &[String], seconds: u32, seed: Option<u32>) -> Result<()> {
    let folder = root().join("tests/fuzz");
    let mut waiting = targets(&folder)?;
    waiting.retain(|target| {
        filters.is_empty() || filters.iter().any(|filter| target.contains(filter))
    });
    ensure!(
        !waiting.is_empty(),
        "no fuzz target has {} in its name; tests/fuzz/corpus has a folder for each",
        filters.join(" or ")
    );
    run_command(
        Command::new("cargo")
            .args([
                "build",
                "--package",
                "bosh-dns-xdp-fuzz",
                "--features",
                "libfuzzer",
                "--bin",
                "fuzz",
            ])
            // libFuzzer needs coverage of this project's crates only; dependencies stay as they are
            // built.
            .env("RUSTC_WORKSPACE_WRAPPER", folder.join("rustc.sh"))
            .current_dir(root()),
    )?;
    println!("{} for at most {} s each", waiting.join(", "), seconds);
    let cores = thread::available_parallelism()?.get();
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(target) = waiting.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // The other targets go on: they may find something else.
                    if let Err(failure) = run_target(&folder, target, seconds, seed) {
                        let mut failures = failures.lock().unwrap_or_else(PoisonError::into_inner);
                        failures.push(format!("{failure:#}"));
                    }
                }
            });
        }
    });
    let failures = failures
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// Runs `count` random packets through each BPF program and compares the replies with the model.
fn fuzz_programs(count: u64, seed: Option<u64>) -> Result<()> {
    random_test(
        "random::random_packets_match_model",
        &[("PACKETS", count)],
        seed,
    )
}

/// Compares the model of the programs with the cache in userspace for `count` random replies of
/// recursors, then the programs themselves for a thousandth of them.
fn compare_replies(count: u64, seed: Option<u64>) -> Result<()> {
    random_test(
        "random_replies::model_replies_equal_userspace",
        &[("REPLIES", count)],
        seed,
    )?;
    let replies = ("REPLIES", count.div_ceil(1000));
    random_test(
        "random_replies::random_replies_equal_userspace",
        &[replies],
        seed,
    )
}

/// Compares the replies to `packets` random packets, in `set_ups` random set-ups, of a server with the
/// fast path and of one without.
fn compare_servers(packets: u64, set_ups: u64, seed: Option<u64>) -> Result<()> {
    let numbers = [("PACKETS", packets), ("SETUPS", set_ups)];
    random_test(
        "differential::interfaces_answer_as_userspace",
        &numbers,
        seed,
    )
}

/// Runs a test with these numbers, and this seed if there is one, in its environment.
fn random_test(name: &str, numbers: &[(&'static str, u64)], seed: Option<u64>) -> Result<()> {
    let numbers = numbers
        .iter()
        .copied()
        .chain(seed.map(|seed| ("SEED", seed)));
    let environment: Vec<_> = numbers
        .map(|(name, number)| (name, number.to_string().into()))
        .collect();
    packet_test(
        name,
        &["--release", "--package", "whole-system-tests"],
        &environment,
    )
}

/// Returns the names of all targets, sorted.
fn targets(folder: &Path) -> Result<Vec<String>> {
    let mut targets = Vec::new();
    for corpus in fs::read_dir(folder.join("corpus"))? {
        targets.push(corpus?.file_name().to_string_lossy().into_owned());
    }
    targets.sort();
    Ok(targets)
}

/// Runs a target. The error has the panic message and the path of the failing input.
fn run_target(folder: &Path, target: &str, seconds: u32, seed: Option<u32>) -> Result<()> {
    let built = root().join("target");
    let found = built.join("fuzz").join(target);
    fs::create_dir_all(&found).with_context(|| found.display().to_string())?;
    let log = found.with_extension("log");
    let output = File::create(&log).with_context(|| log.display().to_string())?;
    let status = Command::new(built.join("debug/fuzz"))
        .env("FUZZ_TARGET", target)
        // libFuzzer writes new inputs to the first folder and only reads the others.
        .args([&found, &folder.join("corpus").join(target)])
        .arg(format!("-max_total_time={seconds}"))
        .args(seed.map(|seed| format!("-seed={seed}")))
        .arg(format!("-timeout={INPUT_TIMEOUT}"))
        .arg(format!("-rss_limit_mb={MEMORY_LIMIT}"))
        .arg(format!("-artifact_prefix={}-", found.display()))
        .stdout(output.try_clone()?)
        .stderr(output)
        .status()
        .with_context(|| format!("cannot run the fuzz target {target}"))?;
    if status.success() {
        return Ok(());
    }
    let text = fs::read_to_string(&log).unwrap_or_default();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.retain(|line| {
        ["panicked at", "ERROR: libFuzzer", "Test unit written to"]
            .iter()
            .any(|part| line.contains(part))
    });
    bail!(
        "fuzz target {target} failed: {} (full log: {})",
        lines.join("; "),
        log.display()
    )
}

/// Builds the program of `tests/tests/packets` with `cargo test <build>` and runs the test with this name, showing its
/// output. Fails if there is no such test, which the test harness treats as success.
pub(crate) fn packet_test(
    name: &str,
    build: &[&str],
    environment: &[(&str, OsString)],
) -> Result<()> {
    run_command(&mut cargo_test(build, environment, &["--no-run"])?)?;
    let listed = ["--", name, "--exact", "--include-ignored", "--list"];
    let listed = capture(&mut cargo_test(build, environment, &listed)?)?;
    ensure!(
        listed
            .lines()
            .any(|line| line.strip_suffix(": test") == Some(name)),
        "tests/tests/packets has no test {name}"
    );
    let test = ["--", name, "--exact", "--include-ignored", "--nocapture"];
    run_command(&mut cargo_test(build, environment, &test)?)
}

fn cargo_test(build: &[&str], environment: &[(&str, OsString)], more: &[&str]) -> Result<Command> {
    let mut command = Command::new("cargo");
    command
        .arg("test")
        .args(build)
        .args(["--test", "packets"])
        .args(more)
        .envs(environment.iter().cloned())
        .current_dir(root());
    // Some of the tests start the server.
    crate::name_server(&mut command, Profile::Release);
    Ok(command)
}
