//! Replays the recorded behaviour of the reference server: with the fast path off
//! and with it on the loopback of a namespace, as faithful as can be and, for the
//! names of the fleet, as configured by default.
//!
//! `BOSH_DNS_XDP_SCENARIOS="03 12a"` runs only the scenarios that begin so.

use std::{
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use whole_system_tests::{namespace::Namespace, requirements, server, shared};

/// Scenarios at the same time, each in a namespace of its own: nearly all of a
/// scenario's time is deliberate waiting. With more the whole would take no less,
/// because the longest one takes as long as all others by three.
const SIDE_BY_SIDE: usize = 4;

/// Scenarios about the names of the fleet, messages, files and the start: here the
/// default configuration has to answer as recorded, too.
const OF_THE_FLEET: &[&str] = &["01", "02", "03", "04", "05", "11", "12", "14", "15"];

/// What makes the server as faithful as can be, in recursion too.
const FAITHFUL: &str = "nxdomain";

/// The longest scenarios, in order: they go first.
const LONGEST: &[&str] = &["14_startup", "12a_hot_update"];

#[test]
fn userspace_alone_answers_as_recorded() -> Result<()> {
    if !requirements::namespaces() {
        return Ok(());
    }
    replay("off", &json!({"xdp": {"mode": "off"}, "recursor_errors": FAITHFUL}), &[])
}

#[test]
fn the_fast_path_in_generic_mode_answers_as_recorded() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    replay("generic", &json!({"xdp": {"mode": "generic"}, "recursor_errors": FAITHFUL}), &[])
}

#[test]
fn the_default_configuration_answers_as_recorded_for_the_fleet() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    // On a loopback this means the tc hook.
    replay("auto", &json!({"xdp": {"mode": "auto"}}), OF_THE_FLEET)
}

/// Replays the scenarios that begin with one of `only` (all, if there is none) with
/// `extra` laid over their configurations.
///
/// Some expect TTLs that count down in step with their own pauses, to the second. On a
/// machine that is slow for a moment that fails without any fault of the server's: what
/// failed beside others is replayed once more with nothing beside it, and that counts.
fn replay(label: &str, extra: &Value, only: &[&str]) -> Result<()> {
    let Some(conformance) = shared::conformance() else { return Ok(()) };
    let replay_one = |namespace: &Namespace, scenario: &str| {
        let pins = Pins::new(namespace, scenario);
        let mut config = extra.clone();
        server::merge(&mut config, &json!({"xdp": {"bpffs": pins.0}}));
        run(namespace, &conformance, scenario, &config)
    };
    let queue = Mutex::new(scenarios(&conformance, only)?);
    let again = Mutex::new(Vec::new());
    let work = |number: usize| -> Result<Counts> {
        let namespace = Namespace::new(&format!("{label}{number}"))?;
        let mut total = Counts::default();
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(scenario) = next else { return Ok(total) };
            let counts = replay_one(&namespace, &scenario)?;
            if counts.failed == 0 {
                total.add(counts);
            } else {
                again.lock().unwrap_or_else(PoisonError::into_inner).push(scenario);
            }
        }
    };
    let results = thread::scope(|scope| {
        let workers: Vec<_> = (0..SIDE_BY_SIDE).map(|number| scope.spawn(move || work(number))).collect();
        workers.into_iter().map(|worker| worker.join()).collect::<Vec<_>>()
    });
    let mut total = Counts::default();
    for result in results {
        total.add(result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
    }
    let again = again.into_inner().unwrap_or_else(PoisonError::into_inner);
    for scenario in again {
        println!("{scenario} failed beside others; once more with nothing beside it:");
        total.add(replay_one(&Namespace::new(label)?, &scenario)?);
    }
    println!("{label}: {} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped);
    ensure!(total.failed == 0, "{label}: {} recorded cases failed", total.failed);
    ensure!(total.passed > 0, "{label}: no recorded case was asked");
    Ok(())
}

/// The scenarios to run, the longest first.
fn scenarios(conformance: &Path, only: &[&str]) -> Result<VecDeque<String>> {
    let wanted = std::env::var("BOSH_DNS_XDP_SCENARIOS").unwrap_or_default();
    let wanted: Vec<&str> = wanted.split_whitespace().collect();
    let folder = conformance.join("scenarios");
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_among =
            |prefixes: &[&str]| prefixes.is_empty() || prefixes.iter().any(|prefix| name.starts_with(prefix));
        if is_among(&wanted) && is_among(only) && entry.path().join("scenario.json").exists() {
            names.push(name);
        }
    }
    names.sort_by_key(|name| {
        let rank = LONGEST.iter().position(|long| long == name).unwrap_or(LONGEST.len());
        (rank, name.clone())
    });
    Ok(names.into())
}

/// Replays one scenario and prints what differed.
fn run(namespace: &Namespace, conformance: &Path, scenario: &str, config: &Value) -> Result<Counts> {
    let program = server::program()?;
    let output = namespace
        .command("python3")?
        .arg(conformance.join("replay.py"))
        .arg("--cmd")
        .arg(format!("{} --config {{config}}", program.display()))
        .arg("--health-cmd")
        .arg(format!("{}-health {{config}}", program.display()))
        .arg("--config-merge")
        .arg(config.to_string())
        .arg(scenario)
        // Byte code would land beside the shared data.
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .context("python3 runs the replay tool")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let counts = text.lines().last().and_then(Counts::read).with_context(|| {
        format!("{scenario}: no summary\n{text}\n{}", String::from_utf8_lossy(&output.stderr))
    })?;
    let interesting: Vec<&str> = text.lines().rev().skip(1).collect();
    for line in interesting.into_iter().rev() {
        println!("{line}");
    }
    Ok(counts)
}

/// What the last line of the replay tool says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    /// As recorded.
    passed: u64,
    /// Not as recorded.
    failed: u64,
    /// Not as recorded, where that is allowed.
    skipped: u64,
}

impl Counts {
    /// Reads `N passed, M failed, K skipped`.
    fn read(line: &str) -> Option<Self> {
        let mut numbers = line.split(", ").map(|part| part.split(' ').next()?.parse().ok());
        let counts = Self { passed: numbers.next()??, failed: numbers.next()??, skipped: numbers.next()?? };
        line.ends_with(" skipped").then_some(counts)
    }

    /// Adds those of another scenario.
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// A folder of its own for the pins of a server, removed with what was left in it.
struct Pins(PathBuf);

impl Pins {
    /// Names a folder that does not exist yet.
    fn new(namespace: &Namespace, scenario: &str) -> Self {
        Self(PathBuf::from(format!("/sys/fs/bpf/{}-{scenario}", namespace.name())))
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        // A server that stopped in order left nothing to remove.
        let _ = fs::remove_dir_all(&self.0);
    }
}
