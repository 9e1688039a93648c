//! Mounts that hang, as of a network file system whose server is gone: a FUSE file system whose server
//! answers nothing. The agent installs versions that do not need the mount, tells the reason for the others,
//! and stops promptly.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{Read, Write},
    os::fd::{AsFd, AsRawFd},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use test_support::requirements::root;

use crate::{
    lab::{Lab, TIMEOUT},
    nginx::Nginx,
    process::wait_until,
};

/// A mount point at which every call waits until this is dropped; then all fail. The test itself must not
/// touch it.
struct HungMount {
    path: PathBuf,
    /// The server's end; its closing aborts all calls.
    server: Option<File>,
}

/// Length of `fuse_in_header` (linux/fuse.h).
const IN_HEADER: usize = 40;
/// Length of `fuse_out_header` and `fuse_init_out`.
const INIT_REPLY: usize = 16 + 64;
/// Opcode of the first request.
const FUSE_INIT: u32 = 26;

impl HungMount {
    fn new(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path)?;
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let mut server = device.context("/dev/fuse: load the kernel module fuse")?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            server.as_raw_fd()
        );
        let options = CString::new(options)?;
        mount(
            Some("hung"),
            &path,
            Some("fuse"),
            MsFlags::empty(),
            Some(options.as_c_str()),
        )?;
        // Calls wait for the first reply in another way than in the field, so it is given.
        let mut request = vec![0; 1 << 20];
        let length = server.read(&mut request)?;
        ensure!(
            length > IN_HEADER && request[4..8] == FUSE_INIT.to_ne_bytes(),
            "not FUSE_INIT"
        );
        let mut reply = [0; INIT_REPLY];
        reply[..4].copy_from_slice(&(INIT_REPLY as u32).to_ne_bytes());
        reply[8..16].copy_from_slice(&request[8..16]);
        // Protocol 7.31, and a write size of a page.
        for (at, number) in [(16, 7_u32), (20, 31), (36, 4096)] {
            reply[at..at + 4].copy_from_slice(&number.to_ne_bytes());
        }
        server.write_all(&reply)?;
        Ok(Self {
            path,
            server: Some(server),
        })
    }

    /// Waits until a call hangs. It is not read: a call that the server has read cannot be killed.
    fn wait_for_call(&self) -> Result<()> {
        let server = self.server.as_ref().context("the server has ended")?;
        let mut calls = [PollFd::new(server.as_fd(), PollFlags::POLLIN)];
        ensure!(
            poll(&mut calls, PollTimeout::try_from(TIMEOUT)?)? == 1,
            "no call"
        );
        Ok(())
    }
}

impl Drop for HungMount {
    fn drop(&mut self) {
        drop(self.server.take());
        if let Err(error) = umount2(&self.path, MntFlags::MNT_DETACH) {
            eprintln!("{}: {error}", self.path.display());
        }
    }
}

/// Replaces `link` by a link to `target`.
fn point(link: &Path, target: &Path) -> Result<()> {
    let new = link.with_extension("new");
    std::os::unix::fs::symlink(target, &new)?;
    Ok(fs::rename(new, link)?)
}

/// Returns the command of an agent with other values of some options.
fn with_options(command: &Command, values: &[(&str, &Path)]) -> Command {
    let mut changed = Command::new(command.get_program());
    let mut value = None;
    for word in command.get_args() {
        let given = value.take().map_or(word, |value: &Path| value.as_os_str());
        value = values
            .iter()
            .find(|(option, _)| *option == word)
            .map(|(_, value)| *value);
        changed.arg(given);
    }
    changed
}

#[test]
fn hung_blobstore_delays_no_patch() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let lab = Lab::new(1)?;
    let shared = lab.path("shared");
    point(&shared, &lab.path("blobs"))?;
    let url = PathBuf::from(format!("file://{}", shared.display()));
    let command = lab.agent_as("a0", "a0", &["--blobstore-timeout", "1"])?;
    let mut agent = lab.keep(with_options(&command, &[("--blobstore", &url)]), "a0.log")?;
    let _publisher = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;

    let hung = HungMount::new(lab.path("hung"))?;
    point(&shared, &hung.path)?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for("a0", 2)?;

    // A lost file needs the blob.
    fs::remove_file(lab.records("a0"))?;
    let reason = format!(
        "{}/{}: not finished within 1s",
        shared.display(),
        lab.newest_blob()?
    );
    lab.wait_for_log("a0", &reason)?;
    let log = lab.log("a0");
    ensure!(
        log.contains("check its server, or unmount it with `umount --lazy`"),
        "{log}"
    );
    drop(hung);
    point(&shared, &lab.path("blobs"))?;
    lab.wait_for("a0", 2)?;

    let hung = HungMount::new(lab.path("hung-again"))?;
    point(&shared, &hung.path)?;
    let reported = || lab.log("a0").matches(&reason).count();
    let before = reported();
    fs::remove_file(lab.records("a0"))?;
    wait_until("the next call to hang", TIMEOUT, || reported() > before)?;
    agent.stop().map(drop)
}

#[test]
fn hung_records_folder_is_reported() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let lab = Lab::new(2)?;
    let hung = HungMount::new(lab.path("hung"))?;
    let link = lab.path("link");
    point(&link, &hung.path)?;
    let records = link.join("records.json");
    let command = with_options(&lab.agent_as("a0", "a0", &[])?, &[("--records", &records)]);
    let mut agent = lab.keep(command, "a0.log")?;
    let _other = lab.agent("a1", &[])?;
    let _publisher = lab.watch(&[])?;
    lab.wait_for("a1", 1)?;
    let reason = format!("{}: not finished within 10s", records.display());
    lab.wait_for_log("a0", &reason)?;
    lab.wait_for_log(
        "publisher",
        &format!("the agent could not install the version: {reason}"),
    )?;
    let log = lab.log("a0");
    ensure!(
        log.contains("check its server, or unmount it with `umount --lazy`"),
        "{log}"
    );
    // Other agents get further versions.
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for("a1", 2)?;
    agent.stop()?;

    // After a repair of the mount, a running agent installs the version.
    let command = with_options(&lab.agent_as("a0", "a0", &[])?, &[("--records", &records)]);
    let mut agent = lab.keep(command, "again.log")?;
    lab.wait_for_log("again", &reason)?;
    fs::create_dir(lab.path("repaired"))?;
    point(&link, &lab.path("repaired"))?;
    drop(hung);
    let repaired = lab.path("repaired/records.json");
    wait_until("the version", TIMEOUT, || {
        fs::read(&repaired).is_ok_and(|bytes| lab.dataset(2).is_ok_and(|dataset| bytes == dataset))
    })
    .with_context(|| lab.log("again"))?;
    agent.stop().map(drop)
}

#[test]
fn hung_certificates_delay_no_version() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let lab = Lab::new(1)?;
    let link = lab.path("certificates");
    point(&link, &lab.path(""))?;
    let [ca, certificate, key] = ["ca.crt", "a0.crt", "a0.key"].map(|name| link.join(name));
    let options: [(&str, &Path); 3] = [
        ("--tls-ca", &ca),
        ("--tls-certificate", &certificate),
        ("--tls-key", &key),
    ];
    let mut command = with_options(&lab.agent_as("a0", "a0", &[])?, &options);
    // As on a machine with one CPU: a call that hangs there would hold up everything else.
    command.env("TOKIO_WORKER_THREADS", "1");
    let mut agent = lab.keep(command, "a0.log")?;
    let _publisher = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;

    let hung = HungMount::new(lab.path("hung"))?;
    point(&link, &hung.path)?;
    hung.wait_for_call()?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for("a0", 2)?;
    agent.stop().map(drop)
}

#[test]
fn hung_ca_of_blobstore_delays_no_version() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let mut lab = Lab::new(1)?;
    let mut nginx = Nginx::start(&mut lab, false)?;
    let link = lab.path("certificates");
    point(&link, &lab.path(""))?;
    let ca = link.join("ca.crt");
    let mut command = with_options(&lab.agent_as("a0", "a0", &[])?, &[("--blobstore-ca", &ca)]);
    command.env("TOKIO_WORKER_THREADS", "1");
    let mut agent = lab.keep(command, "a0.log")?;
    let log = lab.path("a0.log");
    wait_until("the agent's start", TIMEOUT, || {
        fs::read_to_string(&log).is_ok_and(|log| log.contains("agent started"))
    })?;

    // Before the first connection: later ones resume its session, and check no certificate.
    let hung = HungMount::new(lab.path("hung"))?;
    point(&link, &hung.path)?;
    let _publisher = lab.watch(&[])?;
    hung.wait_for_call()?;
    lab.wait_for("a0", 1)?;
    agent.stop()?;
    nginx.stop()
}

#[test]
fn hung_inventory_delays_no_end() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let lab = Lab::new(1)?;
    let link = lab.path("inventory");
    point(&link, &lab.path(""))?;
    let records = lab.path("local.json");
    let mut command = lab.command(&["publish", "--watch"])?;
    command
        .arg("--inventory")
        .arg(link.join("inventory.json"))
        .arg("--state")
        .arg(lab.path("state"))
        .arg("--local")
        .arg(&records);
    let mut publisher = lab.keep(command, "local.log")?;
    wait_until("the records", TIMEOUT, || records.exists())?;

    let hung = HungMount::new(lab.path("hung"))?;
    point(&link, &hung.path)?;
    hung.wait_for_call()?;
    publisher.stop().map(drop)
}
