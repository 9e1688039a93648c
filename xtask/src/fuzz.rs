//! `cargo xtask fuzz`: the targets of `tests/fuzz`, each for a bounded time, and the BPF
//! programs against their model.
//!
//! They are built by the stable compiler into the workspace's own target folder
//! (`tests/fuzz/rustc.sh` says how): only our own crates are compiled again.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{
    packets,
    process::{root, run as run_command},
};

/// How long each target runs, and on what.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    /// At most so many seconds.
    pub(crate) seconds: u32,
    /// At most so many inputs.
    pub(crate) inputs: Option<u32>,
    /// Makes the inputs; chosen by libFuzzer if it is not given.
    pub(crate) seed: Option<u32>,
    /// Whether to begin with what earlier runs found, and not with the committed corpus alone.
    pub(crate) goes_on: bool,
}

impl Effort {
    /// Part of all tests: the same inputs every time, so that a test which passed passes
    /// again. New inputs are looked for by `cargo xtask fuzz`; what it finds becomes part
    /// of the committed corpus.
    pub(crate) const SMOKE: Self = Self { seconds: 6, inputs: Some(100_000), seed: Some(1), goes_on: false };
}

/// Most memory of one run, in MiB: a small input that takes more is a finding.
const MEMORY_LIMIT: u32 = 1024;

/// Seconds after which one input counts as a hang.
const INPUT_TIMEOUT: u32 = 10;

/// Runs the targets whose names contain one of `filters` (all, if there is none)
/// from their corpora, as many at a time as there are cores.
///
/// Inputs that reach new code go to `target/fuzz/<target>`, which a later run
/// begins with if its effort goes on; the committed corpus stays as it is. Inputs that make a target
/// fail are kept beside them, and named in the error.
pub(crate) fn run(filters: &[String], effort: Effort) -> Result<()> {
    let folder = root().canonicalize()?.join("tests/fuzz");
    run_command(
        Command::new("cargo")
            .args(["build", "--package", "bosh-dns-xdp-fuzz"])
            .env("RUSTC_WORKSPACE_WRAPPER", folder.join("rustc.sh"))
            .current_dir(root()),
    )?;
    let mut waiting = targets(&folder)?;
    waiting.retain(|target| filters.is_empty() || filters.iter().any(|filter| target.contains(filter)));
    println!("{} for at most {} s each", waiting.join(", "), effort.seconds);
    waiting.reverse();
    let cores = thread::available_parallelism()?.get();
    let mut running: Vec<Run> = Vec::new();
    let mut failures = Vec::new();
    while !(waiting.is_empty() && running.is_empty()) {
        if running.len() < cores
            && let Some(target) = waiting.pop()
        {
            running.push(Run::start(&folder, target, effort)?);
            continue;
        }
        thread::sleep(Duration::from_millis(50));
        let mut unfinished = Vec::new();
        for mut run in running {
            match run.child.try_wait()? {
                None => unfinished.push(run),
                Some(status) if status.success() => {}
                Some(_) => failures.push(run.failure()),
            }
        }
        running = unfinished;
    }
    if !failures.is_empty() {
        bail!("{}", failures.join("\n"));
    }
    Ok(())
}

/// Runs so many random packets through each BPF program and holds the replies against the model.
pub(crate) fn program(count: u64, seed: Option<u64>) -> Result<()> {
    let mut environment = vec![("PACKETS", count.to_string().into())];
    environment.extend(seed.map(|seed| ("SEED", seed.to_string().into())));
    packets::test(
        "random::random_and_mutated_packets_are_treated_as_the_model_says",
        &["--release", "--package", "whole-system-tests"],
        &environment,
    )
}

/// The names of all targets, in order.
fn targets(folder: &Path) -> Result<Vec<String>> {
    let mut targets = Vec::new();
    for file in fs::read_dir(folder.join("fuzz_targets"))? {
        let file = file?.path();
        targets.extend(file.file_stem().map(|name| name.to_string_lossy().into_owned()));
    }
    targets.sort();
    Ok(targets)
}

/// One target at work.
struct Run {
    target: String,
    child: Child,
    log: PathBuf,
}

impl Run {
    fn start(folder: &Path, target: String, effort: Effort) -> Result<Self> {
        let built = root().canonicalize()?.join("target");
        let found = built.join(if effort.goes_on { "fuzz" } else { "fuzz-smoke" }).join(&target);
        if !effort.goes_on && found.exists() {
            fs::remove_dir_all(&found).with_context(|| found.display().to_string())?;
        }
        fs::create_dir_all(&found).with_context(|| found.display().to_string())?;
        let log = found.with_extension("log");
        let output = File::create(&log).with_context(|| log.display().to_string())?;
        let child = Command::new(built.join("debug").join(&target))
            .args([&found, &folder.join("corpus").join(&target)])
            .arg(format!("-max_total_time={}", effort.seconds))
            .args(effort.inputs.map(|inputs| format!("-runs={inputs}")))
            .args(effort.seed.map(|seed| format!("-seed={seed}")))
            .arg(format!("-timeout={INPUT_TIMEOUT}"))
            .arg(format!("-rss_limit_mb={MEMORY_LIMIT}"))
            .arg(format!("-artifact_prefix={}-", found.display()))
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot run the fuzz target {target}"))?;
        Ok(Self { target, child, log })
    }

    /// What made the target fail, from what it printed: the panic and where the input is.
    fn failure(self) -> String {
        let Self { target, child: _, log } = self;
        let text = fs::read_to_string(&log).unwrap_or_default();
        let telling = |line: &&str| {
            ["panicked at", "ERROR: libFuzzer", "Test unit written to"].iter().any(|part| line.contains(part))
        };
        let lines: Vec<&str> = text.lines().filter(telling).collect();
        format!("fuzz target {target} failed: {} (all of it: {})", lines.join("; "), log.display())
    }
}
