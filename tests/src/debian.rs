//! A Debian machine: real systemd, booted in its own namespaces on the bare root that `cargo xtask
//! test` builds (`xtask/src/packages.rs`). Nothing leaks out: the root lies below a tmpfs, and
//! `/proc/sys` and `/sys` are read-only.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, setns};
use tempfile::TempDir;

use crate::{
    process::{Kept, capture, wait_until},
    requirements,
};

/// Sets up the namespaces and executes init. `$1` is the root, `$2` the folder for mounts, `$3` the
/// shared folder.
///
/// Units that would change the host's kernel, or need hardware, are masked.
const BOOT: &str = r#"
set -eu
mount -t tmpfs tmpfs "$2"
mkdir "$2/upper" "$2/work" "$2/root"
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" overlay "$2/root"
mkdir "$2/root/shared"
mount --bind "$3" "$2/root/shared"
cd "$2/root"
ip link set lo up
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t bpf -o mode=0700 bpf sys/fs/bpf
mount -o remount,bind,ro sys
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/pts dev/shm
for device in full null random tty urandom zero; do
  touch "dev/$device"
  mount --bind "/dev/$device" "dev/$device"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
for unit in systemd-sysctl systemd-modules-load systemd-update-utmp console-getty; do
  ln -s /dev/null "etc/systemd/system/$unit.service"
done
echo 127.0.1.1 debian >>etc/hosts
hostname debian
mkdir old
pivot_root . old
umount -l /old
exec env -i container=namespaces PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --show-status=no --log-target=journal
"#;

/// A booted machine; everything is removed on drop.
#[derive(Debug)]
pub struct Debian {
    /// Parent of the first process; ended first.
    holder: Kept,
    /// Process id of init outside the machine.
    init: u32,
    cgroup: PathBuf,
    /// Holds the machine's mounts and the folder shared as `/shared`.
    folder: TempDir,
}

impl Debian {
    /// Boots the machine; returns `None` and reports the test as not run if that is impossible.
    pub fn boot() -> Result<Option<Self>> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.toolchain/debian");
        let there = fs::metadata(&root).map(drop);
        let there = there.map_err(|_| "`cargo xtask test` creates its root");
        if !requirements::namespaces() || !requirements::met("a Debian machine", there) {
            return Ok(None);
        }
        let folder = TempDir::with_prefix("bdx-debian-")?;
        let (mounts, shared) = (folder.path().join("mounts"), folder.path().join("shared"));
        fs::create_dir(&mounts)?;
        fs::create_dir(&shared)?;
        let cgroup = cgroup()?;
        fs::create_dir(&cgroup)?;
        // The shell enters the cgroup first, so that it is the root of the cgroup namespace. If the
        // test is killed, the machine ends with it.
        let enter = "echo $$ >\"$1/cgroup.procs\" && shift && exec setpriv --pdeathsig KILL unshare --mount \
                     --net --pid --uts --ipc --cgroup --fork --kill-child --propagation=private sh -c \"$@\"";
        let mut command = Command::new("sh");
        command
            .args(["-c", enter, "sh"])
            .arg(&cgroup)
            .args([BOOT, "sh"]);
        command.arg(root.canonicalize()?).arg(mounts).arg(shared);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let mut machine = Self {
            holder: Kept::from(child),
            init: 0,
            cgroup,
            folder,
        };
        machine.wait_until_booted()?;
        Ok(Some(machine))
    }

    /// Waits until systemd has started all units.
    fn wait_until_booted(&mut self) -> Result<()> {
        wait_until("systemd", Duration::from_secs(120), || {
            let holder = self.holder.pid();
            let children = fs::read_to_string(format!("/proc/{holder}/task/{holder}/children"));
            let child = children.ok().and_then(|text| text.trim().parse().ok());
            self.init = child.unwrap_or(0);
            // The shell executes systemd, which changes the name of the process.
            let name = fs::read_to_string(format!("/proc/{}/comm", self.init)).unwrap_or_default();
            name.trim() == "systemd" && self.run("test -S /run/systemd/private").is_ok()
        })?;
        let state = self.run("systemctl is-system-running --wait || true")?;
        let failed = self.run("systemctl list-units --failed --plain --no-legend")?;
        ensure!(
            state.trim() == "running",
            "systemd is {}: {failed}",
            state.trim()
        );
        Ok(())
    }

    /// Returns the folder that the machine sees as `/shared`.
    pub fn shared(&self) -> PathBuf {
        self.folder.path().join("shared")
    }

    /// Returns the machine's root as seen from outside.
    pub fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.init))
    }

    /// Builds a command that runs inside.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init.to_string(), "--all", "--", program]);
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    /// Runs a shell command inside, in `/shared`; returns its output.
    pub fn run(&self, line: &str) -> Result<String> {
        capture(
            self.command("sh")
                .args(["-c", &format!("cd /shared; {line}")]),
        )
    }

    /// Returns the journal of a unit, for failure messages.
    pub fn journal(&self, unit: &str) -> String {
        self.run(&format!("journalctl --no-pager --unit={unit}"))
            .unwrap_or_default()
    }

    /// Calls `inside` on a thread in the machine's network namespace.
    pub fn in_network<T: Send>(&self, inside: impl FnOnce() -> T + Send) -> Result<T> {
        let path = format!("/proc/{}/ns/net", self.init);
        let network = fs::File::open(&path).context(path)?;
        let entered = || -> Result<T> {
            setns(&network, CloneFlags::CLONE_NEWNET).context("cannot enter the namespace")?;
            Ok(inside())
        };
        thread::scope(|scope| match scope.spawn(entered).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }
}

impl Drop for Debian {
    fn drop(&mut self) {
        // Killed, because unshare ignores SIGTERM. The kernel ends all of its descendants.
        if let Err(error) = self.holder.kill(Duration::from_secs(120)) {
            eprintln!("a machine could not be ended: {error}");
        }
        let empty = || {
            let populated = fs::read_to_string(self.cgroup.join("cgroup.events"));
            populated.is_ok_and(|text| text.contains("populated 0"))
        };
        let removed = wait_until(
            "the machine's processes to end",
            Duration::from_secs(120),
            empty,
        )
        .and_then(|()| Ok(remove_cgroup(&self.cgroup)?));
        if let Err(error) = removed {
            eprintln!("{} stays behind: {error}", self.cgroup.display());
        }
    }
}

/// Creates a cgroup (version 2).
fn cgroup() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mounted = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (place, kind) = (words.next()?, words.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(place))
    });
    let name = format!("bdx-{}-{}", std::process::id(), fastrand::u32(..));
    Ok(mounted
        .context("no hierarchy of cgroups, version 2, is mounted")?
        .join(name))
}

/// Removes a cgroup and its children.
fn remove_cgroup(cgroup: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(cgroup)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroup(&entry.path())?;
        }
    }
    fs::remove_dir(cgroup)
}
