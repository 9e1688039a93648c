//! One machine: the publisher writes a local file, without NATS.

use std::{
    fs,
    io::Write,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::Value;
use tempfile::TempDir;
use test_support::requirements::root;

use crate::{
    lab::TIMEOUT,
    process::{Kept, wait_until},
};

/// A folder with an inventory, a state folder and records.
struct Machine {
    folder: TempDir,
    /// Option that names the inventory.
    source: &'static str,
}

impl Machine {
    fn new(source: &'static str) -> Result<Self> {
        Ok(Self {
            folder: TempDir::with_prefix("bdx-alone-")?,
            source,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn inventory(&self) -> PathBuf {
        self.path("inventory")
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bosh-dns-sync"));
        command.args(words).env("NO_COLOR", "1");
        command
    }

    fn publish(&self, more: &[&str]) -> Command {
        let mut command = self.command(&["publish", self.source]);
        command
            .arg(self.inventory())
            .arg("--state")
            .arg(self.path("state"));
        command
            .arg("--local")
            .arg(self.path("records.json"))
            .args(more);
        command
    }

    fn watch(&self) -> Result<Kept> {
        let log = fs::File::create(self.path("log"))?;
        Kept::spawn(self.publish(&["--watch"]).stderr(log))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Returns the ids and addresses of the published rows.
    fn rows(&self) -> Vec<(String, String)> {
        let Ok(bytes) = fs::read(self.path("records.json")) else {
            return Vec::new();
        };
        let records: Value = serde_json::from_slice(&bytes).expect("records.json is always whole");
        let rows = records["record_infos"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        rows.iter()
            .map(|row| (text(&row[0]), text(&row[9])))
            .collect()
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// Writes an inventory of these instances in place, with a pause before the last lines.
fn write_slowly(
    path: &Path,
    instances: std::ops::Range<usize>,
    rest: usize,
    pause: Duration,
) -> Result<()> {
    let mut file = fs::File::create(path)?;
    writeln!(
        file,
        "deployments:\n- name: dep\n  instance_groups:\n  - name: g\n    instances:"
    )?;
    let before = instances.end - rest;
    for instance in instances {
        if instance == before && !pause.is_zero() {
            thread::sleep(pause);
        }
        let address = format!("10.1.{}.{}", instance / 250, instance % 250);
        writeln!(
            file,
            "    - {{id: i{instance}, networks: {{default: {address}}}}}"
        )?;
    }
    Ok(())
}

#[test]
fn pausing_writer_removes_nothing() -> Result<()> {
    let machine = Machine::new("--inventory")?;
    write_slowly(&machine.inventory(), 0..1000, 0, Duration::ZERO)?;
    let _publisher = machine.watch()?;
    wait_until("1,000 rows", TIMEOUT, || machine.rows().len() == 1000)
        .with_context(|| machine.log())?;
    // Below the limit for removals that need a confirmation; one instance is new, in front.
    let text = fs::read_to_string(machine.inventory())?;
    let (head, rows) = text.split_once("    instances:\n").context("rows")?;
    let rows: Vec<&str> = rows.lines().collect();
    let mut file = fs::File::create(machine.inventory())?;
    writeln!(
        file,
        "{head}    instances:\n    - {{id: new, networks: {{default: 10.9.9.9}}}}"
    )?;
    writeln!(file, "{}", rows[..950].join("\n"))?;
    let (begun, mut least) = (Instant::now(), usize::MAX);
    let is_new = |rows: &[(String, String)]| rows.iter().any(|(id, _)| id == "new");
    let mut published = false;
    while begun.elapsed() < Duration::from_millis(1500) {
        let rows = machine.rows();
        published |= is_new(&rows);
        least = least.min(rows.len());
        thread::sleep(Duration::from_millis(20));
    }
    writeln!(file, "{}", rows[950..].join("\n"))?;
    drop(file);
    wait_until("the new instance", TIMEOUT, || is_new(&machine.rows()))
        .with_context(|| machine.log())?;
    assert!(
        least >= 1000 && machine.rows().len() == 1001,
        "{least} rows, then {}",
        machine.rows().len()
    );
    let log = machine.log();
    assert!(
        !published || log.contains("they stay until its files are unchanged for 5 s"),
        "{log}"
    );
    Ok(())
}

#[test]
fn damaged_inventory_keeps_the_last_records() -> Result<()> {
    let machine = Machine::new("--inventory")?;
    write_slowly(&machine.inventory(), 0..3, 0, Duration::ZERO)?;
    let _publisher = machine.watch()?;
    wait_until("3 rows", TIMEOUT, || machine.rows().len() == 3).with_context(|| machine.log())?;
    fs::write(machine.inventory(), "deployments: [")?;
    let is_reported = || machine.log().contains("the last good version stays in use");
    wait_until("the report", TIMEOUT, is_reported).with_context(|| machine.log())?;
    assert_eq!(machine.rows().len(), 3);
    write_slowly(&machine.inventory(), 0..4, 0, Duration::ZERO)?;
    wait_until("4 rows", TIMEOUT, || machine.rows().len() == 4).with_context(|| machine.log())?;
    Ok(())
}

#[test]
fn removal_waits_for_quiet_or_rename() -> Result<()> {
    let machine = Machine::new("--inventory")?;
    write_slowly(&machine.inventory(), 0..20, 0, Duration::ZERO)?;
    let _publisher = machine.watch()?;
    wait_until("20 rows", TIMEOUT, || machine.rows().len() == 20).with_context(|| machine.log())?;
    let begun = Instant::now();
    write_slowly(&machine.inventory(), 0..15, 0, Duration::ZERO)?;
    wait_until("15 rows", TIMEOUT, || machine.rows().len() == 15).with_context(|| machine.log())?;
    assert!(
        begun.elapsed() >= Duration::from_millis(4900),
        "{:?}",
        begun.elapsed()
    );
    assert!(
        machine.log().contains("lacks instances or links"),
        "{}",
        machine.log()
    );
    // A rename needs no wait; the file's content is older than its name.
    write_slowly(&machine.path("next"), 0..10, 0, Duration::ZERO)?;
    thread::sleep(Duration::from_millis(50));
    let begun = Instant::now();
    fs::rename(machine.path("next"), machine.inventory())?;
    wait_until("10 rows", TIMEOUT, || machine.rows().len() == 10).with_context(|| machine.log())?;
    println!("a removal by rename took {:?}", begun.elapsed());
    assert_eq!(
        machine.log().matches("lacks instances or links").count(),
        1,
        "{}",
        machine.log()
    );
    Ok(())
}

/// Replaces the inventory as within one tick of the kernel's clock: the rename is no later than the last write.
fn replace_within_a_tick(machine: &Machine, instances: usize) -> Result<()> {
    let next = machine.path("next");
    write_slowly(&next, 0..instances, 0, Duration::ZERO)?;
    let file = fs::File::options().append(true).open(&next)?;
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(3600))?;
    Ok(fs::rename(next, machine.inventory())?)
}

#[test]
fn rename_within_a_tick_is_seen() -> Result<()> {
    let machine = Machine::new("--inventory")?;
    write_slowly(&machine.inventory(), 0..20, 0, Duration::ZERO)?;
    let publisher = machine.watch()?;
    for instances in [15, 10] {
        replace_within_a_tick(&machine, instances)?;
        wait_until("fewer rows", TIMEOUT, || machine.rows().len() == instances)
            .with_context(|| machine.log())?;
    }
    // The next process knows which file the last one read.
    drop(publisher);
    replace_within_a_tick(&machine, 5)?;
    let output = machine.publish(&[]).output()?;
    assert_eq!(machine.rows().len(), 5, "{}", said(&output));
    let log = machine.log() + &said(&output);
    assert!(!log.contains("lacks instances or links"), "{log}");
    Ok(())
}

/// A process of root writes for the server's user, which reads its folder by the folder's group.
#[test]
fn local_file_has_the_folders_group() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let machine = Machine::new("--inventory")?;
    std::os::unix::fs::chown(machine.folder.path(), None, Some(12_345))?;
    write_slowly(&machine.inventory(), 0..1, 0, Duration::ZERO)?;
    for (options, expected) in [
        (&[][..], (0, 12_345, 0o640)),
        (
            &["--group", "0", "--user", "54321", "--mode", "604"],
            (54_321, 0, 0o604),
        ),
    ] {
        let _missing = fs::remove_file(machine.path("records.json"));
        let output = machine.publish(options).output()?;
        assert!(output.status.success(), "{}", said(&output));
        let facts = fs::metadata(machine.path("records.json"))?;
        let found = (facts.uid(), facts.gid(), facts.mode() & 0o777);
        assert_eq!(found, expected, "{options:?}");
    }
    Ok(())
}

#[test]
fn usual_hosts_files_are_published() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fleet/hosts");
    for (file, expected) in [
        ("two-families", vec![("db", "10.0.0.5"), ("db", "fd00::5")]),
        ("one-address-on-two-lines", vec![("cache", "10.0.0.7")]),
        ("zone-index", vec![("web-01", "10.0.0.9")]),
    ] {
        let machine = Machine::new("--nodes")?;
        fs::copy(folder.join(file), machine.inventory())?;
        let output = machine.publish(&[]).output()?;
        assert!(output.status.success(), "{file}: {}", said(&output));
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(id, address)| (id.to_owned(), address.to_owned()))
            .collect();
        assert_eq!(machine.rows(), expected, "{file}");
    }
    assert_eq!(
        fs::read_dir(folder)?.count(),
        3,
        "every file of the folder is published"
    );
    Ok(())
}

#[test]
fn hosts_file_without_machines_warns() -> Result<()> {
    let machine = Machine::new("--nodes")?;
    fs::write(machine.inventory(), "127.0.0.1 localhost\n::1 localhost\n")?;
    let output = machine.publish(&[]).output()?;
    assert!(
        said(&output).contains("no address that other machines can reach"),
        "{}",
        said(&output)
    );
    Ok(())
}

#[test]
fn mistyped_state_folder_is_refused() -> Result<()> {
    let machine = Machine::new("--inventory")?;
    write_slowly(&machine.inventory(), 0..2, 0, Duration::ZERO)?;
    let inventory = machine.inventory();
    let change = |state: &str| {
        let mut command = machine.command(&["instance", "add", "i9", "--deployment", "dep"]);
        command.args([
            "--instance-group",
            "g",
            "--network",
            "default=10.9.9.9",
            "--agent-id",
            "a9",
            "--inventory",
        ]);
        command
            .arg(&inventory)
            .arg("--state")
            .arg(machine.path(state))
            .output()
    };
    let refused = change("typo")?;
    assert!(
        !refused.status.success() && !machine.path("typo").exists(),
        "{}",
        said(&refused)
    );
    assert!(
        said(&refused).contains("no publisher has used this folder"),
        "{}",
        said(&refused)
    );
    let output = machine.publish(&[]).output()?;
    assert!(output.status.success(), "{}", said(&output));
    assert!(change("state")?.status.success());
    assert!(machine.publish(&[]).output()?.status.success());
    assert_eq!(machine.rows().len(), 3);
    let output = machine
        .command(&["status", "--state"])
        .arg(machine.path("state"))
        .output()?;
    assert!(!said(&output).contains("s ago"), "{}", said(&output));
    Ok(())
}

#[test]
fn results_need_no_reader() -> Result<()> {
    let machine = Machine::new("--nodes")?;
    fs::write(machine.inventory(), "10.0.0.1 a\n")?;
    let published = machine.publish(&[]).output()?;
    assert!(published.status.success(), "{}", said(&published));
    let state = machine.path("state").display().to_string();
    let inventory = machine.inventory().display().to_string();
    let tls = "--tls-ca a --tls-certificate b --tls-key c";
    for words in [
        format!("nats-config --nodes {inventory} {tls}"),
        format!("san --state {state} --deployment fleet --instance-group node"),
        format!("address --state {state} --deployment fleet --instance-group node"),
    ] {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let words: Vec<&str> = words.split(' ').collect();
        let output = machine.command(&words).stdout(writer).output()?;
        assert!(output.status.success(), "{words:?}: {}", said(&output));
    }
    Ok(())
}

#[test]
fn configuration_of_nats_follows_its_options() -> Result<()> {
    let machine = Machine::new("--inventory")?;
    let write = |instances: &str| {
        let text = format!(
            "deployments: [{{name: d, instance_groups: [{{name: g, instances: [{instances}]}}]}}]"
        );
        fs::write(machine.inventory(), text)
    };
    let [first, second] = [0, 1].map(|number| {
        format!("{{id: i{number}, agent_id: a{number}, networks: {{n: 10.0.0.{number}}}}}")
    });
    write(&format!("{first}, {second}"))?;
    let published = machine.publish(&[]).output()?;
    assert!(published.status.success(), "{}", said(&published));
    let state = machine.path("state");
    let removed = machine
        .command(&["instance", "remove", "i1", "--state"])
        .arg(&state)
        .arg("--inventory")
        .arg(machine.inventory())
        .output()?;
    assert!(removed.status.success(), "{}", said(&removed));
    let print = |more: &[&str]| -> Result<String> {
        let tls = ["--tls-ca", "a", "--tls-certificate", "b", "--tls-key", "c"];
        let output = machine
            .command(&["nats-config", "--inventory"])
            .arg(machine.inventory())
            .args(tls)
            .args(more)
            // Its files belong to the publisher, and no option names them.
            .current_dir(&state)
            .output()?;
        assert!(output.status.success(), "{}", said(&output));
        Ok(said(&output))
    };
    assert!(print(&[])?.contains("a1.agent"), "the change is not named");
    assert!(!print(&["--state", "."])?.contains("a1.agent"));
    // The file has the change now; only the publisher may forget it.
    write(&first)?;
    let changes = fs::read(state.join("changes.json"))?;
    print(&["--state", "."])?;
    assert_eq!(fs::read(state.join("changes.json"))?, changes);
    Ok(())
}
