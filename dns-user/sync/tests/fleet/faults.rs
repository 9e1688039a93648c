//! Failures in the field: no change is lost, and every file is an old or a new version.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use crate::process::{capture, wait_until};
use anyhow::{Context, Result, ensure};
use test_support::requirements::root;

use crate::{
    lab::{Lab, TIMEOUT},
    nginx::Nginx,
    speaker::Speaker,
};

/// An agent is killed repeatedly while versions arrive; its file is complete at every check.
#[test]
fn killed_agent_leaves_a_whole_file() -> Result<()> {
    let lab = Lab::new(1)?;
    let _publisher = lab.watch(&[])?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let mut looks = 0_u64;
            while !done.load(Ordering::Relaxed) {
                lab.version("a0")?;
                looks += 1;
            }
            anyhow::Ok(looks)
        });
        let killed = || {
            for round in 0..12_u64 {
                let mut agent = lab.agent("a0", &[])?;
                lab.instance(&["move", "i0", &format!("10.1.0.{round}")])?;
                thread::sleep(Duration::from_millis(40 * round));
                agent.kill()?;
            }
            anyhow::Ok(())
        };
        let result = killed();
        done.store(true, Ordering::Relaxed);
        let looks = looks
            .join()
            .map_err(|_| anyhow::anyhow!("the looking thread failed"))??;
        ensure!(looks > 0, "nobody looked");
        result
    })?;
    // Moves that arrive together may share a version; only the last address counts.
    lab.instance(&["move", "i0", "10.2.0.0"])?;
    let _agent = lab.agent("a0", &[])?;
    wait_until("the last address", TIMEOUT, || {
        fs::read_to_string(lab.records("a0")).is_ok_and(|text| text.contains("10.2.0.0"))
    })
    .with_context(|| lab.log("a0"))?;
    assert_eq!(
        fs::read(lab.records("a0"))?,
        lab.dataset(lab.version("a0")?)?
    );
    let left = fs::read_dir(lab.path(""))?.flatten();
    let left: Vec<_> = left
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(".a0"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    Ok(())
}

/// nats-server is killed and restarted: changes made meanwhile arrive.
#[test]
fn bus_outage_loses_no_change() -> Result<()> {
    let mut lab = Lab::new(2)?;
    let _agents = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    let _publisher = lab.watch(&[])?;
    lab.wait_for("a1", 1)?;
    lab.kill_nats()?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for_log("publisher", "new version of the records created version=2")?;
    lab.start_nats()?;
    lab.wait_for("a0", 2)?;
    lab.wait_for("a1", 2)
}

/// The publisher is killed after storing the blob and before the announcement: its successor announces the
/// same version.
#[test]
fn killed_publisher_loses_no_version() -> Result<()> {
    let mut lab = Lab::new(1)?;
    let _agent = lab.agent("a0", &[])?;
    ensure!(lab.publish(&[])?.status.success());
    let mut publisher = lab.watch(&[])?;
    lab.wait_for_log("publisher", "publishing starts")?;
    // Without a bus the announcement cannot leave.
    lab.kill_nats()?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for_log("publisher", "new version of the records created version=2")?;
    let blob = lab.newest_blob()?;
    wait_until("the blob", TIMEOUT, || {
        lab.path("blobs").join(&blob).exists()
    })?;
    publisher.kill()?;
    lab.start_nats()?;
    thread::sleep(Duration::from_millis(300));
    assert_eq!(lab.version("a0")?, 1);
    let _successor = lab.watch(&[])?;
    lab.wait_for("a0", 2)?;
    assert_eq!(
        (lab.newest_blob()?, fs::read(lab.records("a0"))?),
        (blob, lab.dataset(2)?)
    );
    Ok(())
}

/// A missing, truncated or wrong blob: the old file stays and the reason is reported; once the blob is
/// correct, the file is updated.
#[test]
fn bad_blobs_are_never_taken() -> Result<()> {
    let lab = Lab::new(1)?;
    let blobs = lab.path("blobs");
    bad_blobs(&lab, |blob| blobs.join(blob), "No such file or directory")
}

/// Like `bad_blobs`, with blobs at `place`; `missing` is the expected message about a missing one.
pub(crate) fn bad_blobs(lab: &Lab, place: impl Fn(&str) -> PathBuf, missing: &str) -> Result<()> {
    let agent = lab.agent("a0", &[])?;
    ensure!(lab.publish(&[])?.status.success());
    drop(agent);
    let old = fs::read(lab.records("a0"))?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    // As a director does: no patch that makes the blob unnecessary.
    let _publisher = lab.watch(&["--no-patches"])?;
    lab.wait_for_log("publisher", "new version of the records created version=2")?;
    let path = place(&lab.newest_blob()?);
    wait_until("the blob", TIMEOUT, || {
        fs::read(&path).is_ok_and(|bytes| Ok(bytes) == lab.dataset(2).map_err(drop))
    })?;
    let good = fs::read(&path)?;
    let mut other = good.clone();
    let last = other.len() - 1;
    other[last] = b' ';
    for (name, bytes, reason) in [
        (
            "short",
            Some(&good[..good.len() / 2]),
            "checking the blob: the digest of the blob is",
        ),
        (
            "other",
            Some(&other[..]),
            "checking the blob: the digest of the blob is",
        ),
        ("missing", None, "download of the blob failed 3 times"),
    ] {
        match bytes {
            Some(bytes) => fs::write(&path, bytes)?,
            None => fs::remove_file(&path)?,
        }
        fs::write(lab.records("a0"), &old)?;
        let _agent = lab.keep(lab.agent_as("a0", "a0", &[])?, &format!("{name}.log"))?;
        lab.wait_for_log(name, reason)?;
        assert_eq!(fs::read(lab.records("a0"))?, old, "{name}");
        if bytes.is_none() {
            assert!(lab.log(name).contains(missing), "{}", lab.log(name));
        }
        // Replaced in one step: the agent may be reading.
        let new = path.with_extension("new");
        fs::write(&new, &good)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o644))?;
        fs::rename(&new, &path)?;
        lab.wait_for("a0", 2)?;
    }
    Ok(())
}

/// The blobstore is unavailable when a version is created, and when agents fetch it.
#[test]
fn blobstore_outage_loses_no_version() -> Result<()> {
    let mut lab = Lab::new(1)?;
    let mut nginx = Nginx::start(&mut lab, false)?;
    let _publisher = lab.watch(&["--no-patches"])?;
    let _agent = lab.agent("a0", &[])?;
    lab.wait_for("a0", 1)?;
    nginx.stop()?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for_log(
        "publisher",
        "cannot store the blob; the fleet keeps the previous version",
    )?;
    assert_eq!(lab.version("a0")?, 1);
    nginx.start_again(&lab)?;
    lab.wait_for("a0", 2)
}

/// A full disk: the old file stays and the reason is reported; with free space the new version is installed.
#[test]
fn full_disk_keeps_the_old_file() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let lab = Lab::new(1)?;
    let disk = Disk::new(&lab)?;
    let records = lab.path("disk/records.json");
    let place = ["--records".to_owned(), records.display().to_string()];
    let command = lab.agent_as("a0", "a0", &[])?;
    let mut words: Vec<String> = command
        .get_args()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let at = words
        .iter()
        .position(|word| word == "--records")
        .context("no --records")?;
    words.splice(at..at + 2, place);
    let mut command = Command::new(command.get_program());
    command.args(words);
    let agent = lab.keep(command, "a0.log")?;
    let publisher = lab.watch(&[])?;
    lab.wait_for_log("a0", "new version of the records installed version=1")?;
    let old = fs::read(&records)?;
    let filler = lab.path("disk/filler");
    let mut file = OpenOptions::new().create(true).append(true).open(&filler)?;
    while std::io::Write::write_all(&mut file, &[0; 512]).is_ok() {}
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for_log("a0", "No space left on device")?;
    lab.wait_for_log(
        "publisher",
        "the agent could not install the version: writing: ",
    )?;
    assert_eq!(fs::read(&records)?, old);
    fs::remove_file(filler)?;
    drop(file);
    lab.wait_for_log("a0", "new version of the records installed version=2")?;
    assert_eq!(fs::read(&records)?, lab.dataset(2)?);
    drop(publisher);
    drop(agent);
    drop(disk);
    Ok(())
}

/// A full disk of the publisher: the publisher keeps running, the fleet keeps its version, and pending
/// changes are published as soon as there is space, without another change of the inventory.
#[test]
fn publisher_survives_a_full_disk() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let lab = Lab::new(1)?;
    let disk = Disk::new(&lab)?;
    std::os::unix::fs::symlink(lab.path("disk"), lab.path("state"))?;
    let agent = lab.agent("a0", &[])?;
    let mut publisher = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;
    let filler = lab.path("disk/filler");
    let mut file = OpenOptions::new().create(true).append(true).open(&filler)?;
    while std::io::Write::write_all(&mut file, &[0; 512]).is_ok() {}
    lab.write_inventory(1, |_| "10.9.9.9".to_owned())?;
    lab.wait_for_log(
        "publisher",
        "cannot use the inventory; the last good version stays in use: ",
    )?;
    // An agent that returns is heard, although the disk cannot store its report.
    drop(agent);
    let agent = lab.agent("a0", &[])?;
    lab.wait_for_log("publisher", "cannot save the agents' versions: ")?;
    assert_eq!(lab.version("a0")?, 1);
    fs::remove_file(filler)?;
    drop(file);
    lab.wait_for("a0", 2)?;
    assert!(fs::read_to_string(lab.records("a0"))?.contains("10.9.9.9"));
    ensure!(publisher.stop()?.success(), "{}", lab.log("publisher"));
    drop(agent);
    drop(disk);
    Ok(())
}

/// A small disk, unmounted when dropped.
pub(crate) struct Disk(PathBuf);

impl Disk {
    /// Mounts a disk of 64 KiB at `disk`.
    pub(crate) fn new(lab: &Lab) -> Result<Self> {
        Self::sized(lab, "64k")
    }

    /// Mounts a tmpfs of this size, such as `4m`, at `disk`.
    pub(crate) fn sized(lab: &Lab, size: &str) -> Result<Self> {
        let place = lab.path("disk");
        fs::create_dir(&place)?;
        let options = format!("size={size}");
        capture(
            Command::new("mount")
                .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
                .arg(&place),
        )?;
        Ok(Self(place))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = capture(Command::new("umount").arg("-l").arg(&self.0)) {
            eprintln!("{error:#}");
        }
    }
}

/// Two agents with the same id: every call is answered twice, once late, without harm.
#[test]
fn doubled_replies_do_no_harm() -> Result<()> {
    let lab = Lab::new(2)?;
    let _agents = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    let _double = lab.keep(lab.agent_as("a0", "a0", &[])?, "double.log")?;
    let _publisher = lab.watch(&[])?;
    for version in 1..6 {
        lab.wait_for("a0", version)?;
        lab.wait_for("a1", version)?;
        lab.instance(&["move", "i0", &format!("10.9.9.{version}")])?;
    }
    lab.wait_for("a1", 6)
}

/// Lost, late or duplicate replies: the agent is retried separately, with the version current at that time.
#[test]
fn lost_and_late_replies_do_no_harm() -> Result<()> {
    let synced = r#"{"value":"synced"}"#;
    let lab = Lab::new(2)?;
    let mut by_hand = Speaker::new(&lab, "a0", "agent.a0")?;
    let _agent = lab.agent("a1", &[])?;
    let _publisher = lab.watch(&[])?;
    // Its reply is lost.
    let first = by_hand.hear_call()?;
    assert_eq!(
        (&first["method"], &first["arguments"][2]),
        (&"sync_dns".into(), &1.into())
    );
    lab.wait_for("a1", 1)?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for("a1", 2)?;
    let second = by_hand.hear_call()?;
    // A BOSH agent gets no additional arguments.
    assert_eq!(
        (&second["arguments"][2], &second["arguments"][3]),
        (&2.into(), &().into())
    );
    // This one is also lost; the first one arrives late, and twice.
    let late = first["reply_to"].as_str().context("reply_to")?;
    by_hand.say(late, synced)?;
    by_hand.say(late, synced)?;
    let third = by_hand.hear_call()?;
    assert_eq!(third["arguments"][2], 2);
    let state = lab.path("state").display().to_string();
    assert!(
        lab.run(&["status", "--state", &state]).is_err(),
        "a reply about version 1 is none about 2"
    );
    let reply_to = third["reply_to"].as_str().context("reply_to")?;
    by_hand.say(reply_to, synced)?;
    by_hand.say(reply_to, synced)?;
    wait_until("the publisher to notice", TIMEOUT, || {
        lab.run(&["status", "--state", &state]).is_ok_and(|text| {
            text.contains("2 of 2 agents have it") && text.contains("1 unverified")
        })
    })?;
    lab.instance(&["move", "i0", "10.9.9.8"])?;
    assert_eq!(by_hand.hear_call()?["arguments"][2], 3);
    Ok(())
}
