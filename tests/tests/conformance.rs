//! Replays the recorded behaviour of bosh-dns (`tests/conformance`): with the fast path off and
//! with it on a namespace's loopback, both with all compatibility settings, and for fleet names
//! with the default configuration.
//!
//! Environment variables select another folder of scenarios or another server; see
//! [`whole_system_tests::conformance`].

use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use serde_json::{Value, json};
use whole_system_tests::{
    conformance::{
        Commands, Recorded,
        replay::{Crowd, Part, Verdict},
    },
    namespace::Namespace,
    requirements, requires, server,
};

/// Scenarios about fleet names, messages, files and startup, in which the default configuration
/// must match the recordings too.
const OF_THE_FLEET: &[&str] = &["01", "02", "03", "04", "05", "11", "12", "14", "15"];

/// Recorded cases on which the default configuration improves (`docs/differences.md`), although the
/// recording names no quirk: neither unusable health certificates nor invalid alias files keep DNS from
/// starting.
const BETTER_BY_DEFAULT: &[&str] = &[
    "14-044-health-on-ca-file-missing",
    "14-054-alias-file-with-a-text-instead-of-a-list",
    "14-055-alias-file-with-an-empty-name",
    "14-056-alias-file-which-is-a-list",
    "14-058-alias-loop",
    "14-062-alias-file-empty",
];

/// The most compatible setting, including recursion.
const FAITHFUL: &str = "nxdomain";

/// Compatibility settings for fleet names that bosh-dns and the default configuration do not share.
fn compat_of_the_fleet() -> Value {
    json!({
        "formerr_for_malformed_names": true,
        "nxdomain_for_empty_non_terminals": true,
        "any_class": true,
        "echo_opt": true,
    })
}

#[test]
fn userspace_matches_recordings() -> Result<()> {
    requires!(namespaces);
    let extra = json!({"xdp": {"mode": "off"}, "recursor_errors": FAITHFUL});
    all_pass("userspace", &Recorded::find()?, &extra, &[], &[])
}

#[test]
fn tc_fast_path_matches_recordings() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() || another_server_is_asked() {
        return Ok(());
    }
    let extra = json!({"xdp": {"mode": "tc", "interfaces": ["lo"]}, "recursor_errors": FAITHFUL});
    all_pass("tc", &Recorded::find()?, &extra, &[], &[])
}

#[test]
fn default_configuration_matches_fleet_recordings() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() || another_server_is_asked() {
        return Ok(());
    }
    // On a loopback this selects the tc hook.
    let extra =
        json!({"xdp": {"mode": "auto", "interfaces": ["lo"]}, "compat": compat_of_the_fleet()});
    all_pass(
        "default",
        &Recorded::find()?,
        &extra,
        OF_THE_FLEET,
        BETTER_BY_DEFAULT,
    )
}

/// Replays one recorded case, and the same case with another expectation.
#[test]
fn wrong_expectation_fails() -> Result<()> {
    requires!(namespaces);
    let own = Recorded::own();
    let folder = tempfile::tempdir()?;
    let scenario = own.scenarios.join("01_basic_fleet");
    let changed = folder.path().join("01_basic_fleet");
    fs::create_dir_all(changed.join("jobs"))?;
    for file in ["scenario.json", "records.json"] {
        fs::copy(scenario.join(file), changed.join(file))?;
    }
    let cases = fs::read_to_string(scenario.join("cases.jsonl"))?;
    let case = |line: &&str| line.contains("\"rcode\": \"NOERROR\"") && !line.contains("\"quirk\"");
    let right = cases.lines().find(case).context("a plain case")?;
    let wrong = right.replace("\"rcode\": \"NOERROR\"", "\"rcode\": \"NXDOMAIN\"");
    fs::write(changed.join("cases.jsonl"), format!("{right}\n{wrong}\n"))?;
    let recorded = Recorded {
        scenarios: folder.path().to_owned(),
        ..own
    };
    let verdicts = replay("wrong", &recorded, &json!({"xdp": {"mode": "off"}}), &[])?;
    let failed: Vec<bool> = verdicts["01_basic_fleet"]
        .iter()
        .map(Verdict::failed)
        .collect();
    ensure!(failed == [false, true], "{verdicts:?}");
    Ok(())
}

/// Returns whether a foreign server is tested; it is tested only once, because it has no fast path.
fn another_server_is_asked() -> bool {
    let is_another = Commands::find().is_ok_and(|commands| commands.is_another);
    if is_another {
        requirements::not_run("testing another server, which has no fast path");
    }
    is_another
}

/// Replays the scenarios that begin with one of `only` (all if empty) with `extra` merged into
/// their configurations; fails unless every case passes, differs with a recorded quirk, or is one
/// of `better`.
fn all_pass(
    label: &str,
    recorded: &Recorded,
    extra: &Value,
    only: &[&str],
    better: &[&str],
) -> Result<()> {
    let verdicts = replay(label, recorded, extra, only)?;
    let (mut cases, mut differing, mut failed) = (0, 0, 0);
    for (scenario, verdicts) in &verdicts {
        for verdict in verdicts {
            cases += 1;
            let is_better = verdict.failed() && better.contains(&verdict.id.as_str());
            differing += usize::from(verdict.differs() || is_better);
            if verdict.failed() && !is_better {
                failed += 1;
                println!(
                    "{scenario}/{}:\n    {}",
                    verdict.id,
                    verdict.differences.join("\n    ")
                );
            }
        }
    }
    let passed = cases - differing - failed;
    println!(
        "{label}: {passed} as recorded, {differing} otherwise where a quirk allows it, {failed} failed"
    );
    ensure!(failed == 0, "{label}: {failed} recorded cases failed");
    ensure!(passed > 0, "{label}: no recorded case was replayed");
    Ok(())
}

/// Replays the scenarios that begin with one of `only`; returns the verdicts by scenario.
///
/// Each part runs in a separate namespace, in parallel with as many others as its [`Crowd`] allows.
fn replay(
    label: &str,
    recorded: &Recorded,
    extra: &Value,
    only: &[&str],
) -> Result<BTreeMap<String, Vec<Verdict>>> {
    let commands = Commands::find()?;
    let mut parts = Vec::new();
    for scenario in recorded.names(only)? {
        parts.extend(Part::all(recorded, &scenario)?);
    }
    // Longest first, so that no long part is left at the end.
    parts.sort_by_key(|part| std::cmp::Reverse(part.pauses_ms));
    let verdicts = Mutex::new(BTreeMap::<String, Vec<Verdict>>::new());
    for crowd in [Crowd::Many, Crowd::Few, Crowd::Alone] {
        let parts: VecDeque<Part> = parts.extract_if(.., |part| part.crowd == crowd).collect();
        let queue = Mutex::new(parts);
        let work = || -> Result<()> {
            loop {
                let next = queue.lock().pop_front();
                let Some(part) = next else { return Ok(()) };
                let found = replay_part(label, &part, recorded, &commands, extra)
                    .with_context(|| part.scenario.clone())?;
                let mut verdicts = verdicts.lock();
                verdicts.entry(part.scenario).or_default().extend(found);
            }
        };
        thread::scope(|scope| {
            let workers: Vec<_> = (0..crowd.at_once()).map(|_| scope.spawn(work)).collect();
            let ends = workers.into_iter().map(|worker| {
                worker
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            ends.collect::<Result<Vec<()>>>()
        })?;
    }
    Ok(verdicts.into_inner())
}

/// Replays a part in a fresh namespace.
fn replay_part(
    label: &str,
    part: &Part,
    recorded: &Recorded,
    commands: &Commands,
    extra: &Value,
) -> Result<Vec<Verdict>> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let namespace = Namespace::new(&format!("{label}{}", NEXT.fetch_add(1, Ordering::Relaxed)))?;
    let pins = Pins(Path::new("/sys/fs/bpf").join(namespace.name()));
    let mut config = extra.clone();
    if !commands.is_another {
        server::merge(&mut config, &json!({"xdp": {"bpffs": pins.0}}));
    }
    namespace.run(|| part.replay(recorded, commands, &config))?
}

/// A private folder for a server's pins, removed with its contents on drop.
struct Pins(PathBuf);

impl Drop for Pins {
    fn drop(&mut self) {
        // A server that stopped cleanly left nothing to remove.
        let _ = fs::remove_dir_all(&self.0);
    }
}
