//! `publish`, `status` and the exit codes agree with the files on the agents.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use dns_sync::digest::sha256;
use serde_json::Value;
use test_support::{precedence, requirements::root};

use crate::{
    faults::Disk,
    lab::{Lab, TIMEOUT},
    process::wait_until,
};

fn said(output: &std::process::Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Runs `publish`, which must succeed and agree with every agent's file.
fn publish_truly(lab: &Lab, agents: usize, version: u64) -> Result<()> {
    let published = lab.publish(&[])?;
    ensure!(published.status.success(), "{}", said(&published));
    let dataset = lab.dataset(version)?;
    for agent in 0..agents {
        let file = fs::read(lab.records(&format!("a{agent}")))?;
        ensure!(
            file == dataset,
            "a{agent} holds other records than version {version}: {}",
            said(&published)
        );
    }
    Ok(())
}

#[test]
fn lost_state_publishes_above_the_fleet() -> Result<()> {
    let lab = Lab::new(2)?;
    let _agents = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    ensure!(lab.publish(&["--above", "41"])?.status.success());
    fs::rename(lab.path("state"), lab.path("lost"))?;
    lab.write_inventory(2, |agent| format!("10.7.0.{agent}"))?;
    publish_truly(&lab, 2, 43)
}

#[test]
fn restored_state_publishes_above_the_fleet() -> Result<()> {
    let lab = Lab::new(2)?;
    let _agents = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    publish_truly(&lab, 2, 1)?;
    let copied = Command::new("cp")
        .arg("-a")
        .arg(lab.path("state"))
        .arg(lab.path("copy"))
        .status()?;
    ensure!(copied.success());
    lab.write_inventory(2, |agent| format!("10.7.0.{agent}"))?;
    publish_truly(&lab, 2, 2)?;
    fs::remove_dir_all(lab.path("state"))?;
    fs::rename(lab.path("copy"), lab.path("state"))?;
    // The version with the next number has different records from the fleet's.
    lab.write_inventory(2, |agent| format!("10.8.0.{agent}"))?;
    publish_truly(&lab, 2, 3)
}

#[test]
fn second_publisher_is_reported() -> Result<()> {
    let lab = Lab::new(2)?;
    let _agents = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    let _first = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;
    lab.wait_for("a1", 1)?;
    let state = lab.path("state").display().to_string();
    wait_until("the first publisher to know", TIMEOUT, || {
        lab.run(&["status", "--state", &state]).is_ok()
    })?;
    let mut second = lab.command(&["publish"])?;
    second
        .arg("--state")
        .arg(lab.path("second"))
        .args(lab.source())
        .args(lab.bus("director"));
    ensure!(second.args(&lab.blobstore).status()?.success());
    assert_eq!(lab.version("a0")?, 2);
    wait_until("the first publisher to object", TIMEOUT, || {
        let output = lab
            .command(&["status", "--state", &state])
            .and_then(|mut status| Ok(status.output()?));
        output
            .is_ok_and(|output| !output.status.success() && said(&output).contains("2 disagreeing"))
    })
    .with_context(|| lab.log("publisher"))?;
    assert!(
        lab.log("publisher")
            .contains("that this publisher did not make"),
        "{}",
        lab.log("publisher")
    );
    Ok(())
}

#[test]
fn later_file_change_beats_a_command() -> Result<()> {
    let lab = Lab::new(3)?;
    let _agents = [
        lab.agent("a0", &[])?,
        lab.agent("a1", &[])?,
        lab.agent("a2", &[])?,
    ];
    let _publisher = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.instance(&["remove", "i1"])?;
    let has =
        |text: &str| fs::read_to_string(lab.records("a0")).is_ok_and(|file| file.contains(text));
    wait_until("the commands' effect", TIMEOUT, || {
        has("10.9.9.9") && !has("\"i1\"")
    })?;
    // The file follows with the same content, then changes again.
    let address = |agent: usize| {
        if agent == 0 {
            "10.9.9.9".to_owned()
        } else {
            format!("10.0.0.{}", agent + 1)
        }
    };
    lab.write_inventory(1, address)?;
    lab.wait_for_log("publisher", "a change made by command is now in")?;
    lab.write_inventory(3, |agent| format!("10.5.0.{agent}"))?;
    wait_until("the file's effect", TIMEOUT, || {
        has("10.5.0.0") && has("\"i1\"") && !has("10.9.9.9")
    })
    .with_context(|| lab.log("publisher"))
}

#[test]
fn growing_inventory_is_never_published_in_part() -> Result<()> {
    for _ in 0..10 {
        if grow_inventory()? {
            return Ok(());
        }
    }
    bail!("the writer always paused")
}

/// Writes an inventory slowly while a publisher follows it. Returns false if the writer paused for as long
/// as a finished writer, which proves nothing.
fn grow_inventory() -> Result<bool> {
    precedence::take();
    let lab = Lab::new(1)?;
    let _agent = lab.agent("a0", &[])?;
    let path = lab.path("inventory.json");
    fs::remove_file(&path)?;
    let mut file = fs::File::create(&path)?;
    let _publisher = {
        writeln!(
            file,
            "deployments:\n- name: dep\n  instance_groups:\n  - name: g\n    instances:"
        )?;
        writeln!(
            file,
            "    - {{id: i0, agent_id: a0, networks: {{default: 10.0.0.1}}}}"
        )?;
        lab.watch(&[])?
    };
    let (mut pause, mut last) = (Duration::ZERO, Instant::now());
    for instance in 1..500 {
        writeln!(
            file,
            "    - {{id: i{instance}, networks: {{default: 10.1.{}.{}}}}}",
            instance / 250,
            instance % 250
        )?;
        pause = pause.max(last.elapsed());
        last = Instant::now();
        thread::sleep(Duration::from_millis(3));
    }
    drop(file);
    if pause > Duration::from_millis(100) {
        return Ok(false);
    }
    lab.wait_for("a0", 1)?;
    let records: Value = serde_json::from_slice(&fs::read(lab.records("a0"))?)?;
    assert_eq!(records["record_infos"].as_array().map(Vec::len), Some(500));
    Ok(true)
}

#[test]
fn mass_removal_needs_confirmation() -> Result<()> {
    let lab = Lab::new(1)?;
    let write = |instances: usize| {
        lab.write_inventory(instances, |agent| {
            format!("10.0.{}.{}", agent / 250, agent % 250)
        })
    };
    write(100)?;
    let _agent = lab.agent("a0", &[])?;
    let _publisher = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;
    write(80)?;
    lab.wait_for_log(
        "publisher",
        "the inventory removes 20 of 100 instances, and more than 10 need",
    )?;
    assert_eq!(lab.version("a0")?, 1);
    let state = lab.path("state").display().to_string();
    lab.run(&["confirm-removals", "20", "--state", &state])?;
    lab.wait_for("a0", 2)?;
    // The confirmation is used up; ten removals need none.
    write(70)?;
    lab.wait_for("a0", 3)?;
    write(30)?;
    lab.wait_for_log("publisher", "the inventory removes 40 of 70 instances")
}

#[test]
fn full_disk_needs_no_operator() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let lab = Lab::new(1)?;
    let _disk = Disk::new(&lab)?;
    std::os::unix::fs::symlink(lab.path("disk"), lab.path("state"))?;
    let _agent = lab.agent("a0", &[])?;
    let mut publisher = lab.watch(&[])?;
    for version in 1..7 {
        lab.wait_for("a0", version)?;
        lab.write_inventory(1, |_| format!("10.9.9.{version}"))?;
    }
    lab.wait_for("a0", 7)?;
    let state = lab.path("state").display().to_string();
    wait_until("the book", TIMEOUT, || {
        lab.run(&["status", "--state", &state]).is_ok()
    })?;
    let mut filler = OpenOptions::new()
        .create(true)
        .append(true)
        .open(lab.path("disk/filler"))?;
    while filler.write_all(&[0; 512]).is_ok() {}
    lab.write_inventory(1, |_| "10.9.9.99".to_owned())?;
    lab.wait_for("a0", 8)?;
    assert_eq!(
        sha256(&fs::read(lab.records("a0"))?),
        sha256(&lab.dataset(8)?)
    );
    publisher.stop()?;
    Ok(())
}

#[test]
fn altered_records_are_restored() -> Result<()> {
    let lab = Lab::new(1)?;
    let _agent = lab.agent("a0", &[])?;
    let _publisher = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;
    let good = fs::read(lab.records("a0"))?;
    let restored = || fs::read(lab.records("a0")).is_ok_and(|bytes| bytes == good);
    fs::remove_file(lab.records("a0"))?;
    wait_until("the removed file", TIMEOUT, restored).with_context(|| lab.log("a0"))?;
    fs::write(lab.records("a0"), [&good[..], b"\n"].concat())?;
    wait_until("the edited file", TIMEOUT, restored).with_context(|| lab.log("a0"))?;
    lab.wait_for_log("a0", "another program changed or removed the file")
}
