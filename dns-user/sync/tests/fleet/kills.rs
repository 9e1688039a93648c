//! SIGKILL at random points: what was acknowledged is there afterwards, and nothing unfinished stays or is read.
//!
//! `SYNC_KILLS=200 cargo nextest run -p dns-sync kills --no-capture` kills more often.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use test_support::free_address;

use crate::{
    lab::{Lab, TIMEOUT},
    process::{Kept, wait_until},
};

/// Rounds in the ordinary check.
const ROUNDS: usize = 20;

/// A process is killed at most this long after its start or after its first acknowledged change.
const MAX_LIFE: Duration = Duration::from_millis(400);

fn rounds() -> usize {
    let text = std::env::var("SYNC_KILLS").ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(ROUNDS)
}

/// Requires that no unfinished file is in a folder or below.
fn assert_finished(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            assert_finished(&path)?;
        }
        ensure!(!path.to_string_lossy().contains(".part-"), "{path:?} stays");
    }
    Ok(())
}

/// Returns `instance add` of this number, through the API.
fn add(lab: &Lab, api: &str, number: usize) -> Result<Command> {
    let (id, network) = (
        format!("k{number}"),
        format!("default=10.7.{}.{}", number / 250, number % 250),
    );
    let mut command = lab.command(&["instance", "add", &id, "--api", api])?;
    command.args(["--deployment", "dep", "--instance-group", "web_server"]);
    command.args(["--network", &network]);
    command.args(lab.tls("director"));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

/// Ids of the instances in a dataset.
fn ids(bytes: &[u8]) -> Result<BTreeSet<String>> {
    let records: Value = serde_json::from_slice(bytes).context("half a file")?;
    let rows = records["record_infos"].as_array().context("rows")?;
    let id = |row: &Value| row[0].as_str().unwrap_or_default().to_owned();
    Ok(rows.iter().map(id).collect())
}

/// Notes the digests of the committed versions; a number never stands for two contents.
fn note_versions(lab: &Lab, digests: &mut BTreeMap<u64, String>) -> Result<()> {
    let Ok(bytes) = fs::read(lab.path("state/state.json")) else {
        return Ok(());
    };
    let state: Value = serde_json::from_slice(&bytes).context("half a state")?;
    for made in state["versions"].as_array().context("versions")? {
        let version = made["version"].as_u64().context("a version")?;
        let digest = made["digest"].as_str().context("a digest")?.to_owned();
        let known = digests.entry(version).or_insert_with(|| digest.clone());
        ensure!(*known == digest, "version {version} was made twice");
    }
    Ok(())
}

#[test]
fn acknowledged_changes_survive_kills() -> Result<()> {
    let lab = Lab::new(1)?;
    let seed = fastrand::get_seed();
    println!("seed {seed}");
    let address = free_address().to_string();
    let api = format!("https://{address}");
    let start = || lab.watch(&["--api", &address]);
    let mut acknowledged = BTreeSet::new();
    let mut digests = BTreeMap::new();
    let mut agent = lab.agent("a0", &[])?;
    let mut number = 0;
    for round in 0..rounds() {
        let mut publisher = start()?;
        // Kills while it starts, and while it works.
        let mut deadline = Instant::now() + MAX_LIFE.mul_f64(fastrand::f64());
        let mut first = acknowledged.len();
        if round % 2 == 0 {
            deadline += TIMEOUT;
        }
        while Instant::now() < deadline {
            let mut adding = Kept::spawn(&mut add(&lab, &api, number)?)?;
            let done = loop {
                if let Some(done) = adding.ended()? {
                    break Some(done);
                }
                if Instant::now() >= deadline {
                    break None;
                }
                thread::sleep(Duration::from_millis(1));
            };
            // A change that was not acknowledged may be there or not.
            match done {
                Some(status) if status.success() => {
                    acknowledged.insert(format!("k{number}"));
                    number += 1;
                    if acknowledged.len() == first + 1 {
                        first = usize::MAX - 1;
                        deadline = Instant::now() + MAX_LIFE.mul_f64(fastrand::f64());
                    }
                }
                Some(_) => {}
                None => {
                    // The kill comes while the call is under way.
                    publisher.kill()?;
                    adding.stop()?;
                    number += 1;
                }
            }
        }
        publisher.kill()?;
        if round % 3 == 0 {
            agent.kill()?;
            agent = lab.agent("a0", &[])?;
        }
        note_versions(&lab, &mut digests)?;
        // Never half a file.
        lab.version("a0")?;
    }
    let _publisher = start()?;
    wait_until("all acknowledged changes", TIMEOUT, || {
        let records = fs::read(lab.records("a0")).unwrap_or_default();
        ids(&records).is_ok_and(|found| acknowledged.is_subset(&found))
    })
    .with_context(|| {
        let records = fs::read(lab.records("a0")).unwrap_or_default();
        let found = ids(&records).unwrap_or_default();
        let lost: Vec<_> = acknowledged.difference(&found).collect();
        format!(
            "lost: {lost:?}\n{}\n{}",
            lab.log("publisher"),
            lab.log("a0")
        )
    })?;
    note_versions(&lab, &mut digests)?;
    println!(
        "{} changes acknowledged, {} versions",
        acknowledged.len(),
        digests.len()
    );
    ensure!(
        acknowledged.len() >= rounds() / 4,
        "{} acknowledged",
        acknowledged.len()
    );
    for folder in ["state", "blobs"] {
        wait_until("leftovers to be removed", TIMEOUT, || {
            assert_finished(&lab.path(folder)).is_ok()
        })
        .with_context(|| format!("{folder}: {:?}", assert_finished(&lab.path(folder))))?;
    }
    Ok(())
}

/// The next publisher sweeps the leftovers of a kill between the steps of a replacement, in each of its folders.
#[test]
fn leftovers_of_kills_are_swept() -> Result<()> {
    let lab = Lab::new(1)?;
    ensure!(
        !lab.publish(&["--timeout", "1"])?.status.success(),
        "no agent runs"
    );
    for file in [
        "state/.changes.json.part-aB3xY9",
        "state/.files.json.part-aB3xY9",
        "state/.confirmed.json.part-aB3xY9",
        "state/datasets/.1.json.part-aB3xY9",
        "blobs/.0f5a1f0c-0000-4000-8000-000000000001.part-aB3xY9",
    ] {
        fs::write(lab.path(file), "half")?;
    }
    let _agent = lab.agent("a0", &[])?;
    let _publisher = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;
    for folder in ["state", "blobs"] {
        wait_until("leftovers to be removed", TIMEOUT, || {
            assert_finished(&lab.path(folder)).is_ok()
        })
        .with_context(|| format!("{folder}: {:?}", assert_finished(&lab.path(folder))))?;
    }
    Ok(())
}
