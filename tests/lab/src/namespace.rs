//! Network namespaces that clean up after themselves.

use std::{
    fs::File,
    io,
    os::{fd::AsFd, unix::process::CommandExt},
    process::Command,
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use aya::programs::{SchedClassifier, TcAttachType};
use nix::{
    errno::Errno,
    mount::{MntFlags, umount2},
    sched::{CloneFlags, setns},
};

use crate::process::{capture, run, wait_until};

/// Prefix of every name, so that leftovers of an interrupted run can be found.
const PREFIX: &str = "bdx-";

/// A network namespace with `lo` up, removed on drop.
#[derive(Debug)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Creates a namespace; its name contains this process's id and `label`.
    pub fn new(label: &str) -> Result<Self> {
        static SWEEP: Once = Once::new();
        static NEXT: AtomicU32 = AtomicU32::new(0);
        SWEEP.call_once(sweep);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}-{label}", std::process::id());
        // Constructed first, so that a failure below removes the namespace again.
        let namespace = Self { name };
        run(Command::new("ip").args(["netns", "add", namespace.name()]))?;
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    /// Returns the name for `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits until an interface is active. Before, the kernel drops what is sent through it; a work queue
    /// activates it once it has the RTNL lock.
    pub fn wait_for_link(&self, interface: &str) -> Result<()> {
        wait_until(
            "the interface to be active",
            Duration::from_secs(60),
            || {
                let link = capture(
                    Command::new("ip").args(["-n", &self.name, "-o", "link", "show", interface]),
                );
                link.is_ok_and(|link| link.contains(" state UP "))
            },
        )
    }

    /// Runs `ip` inside with these arguments, separated by spaces.
    pub fn ip(&self, arguments: &str) -> Result<()> {
        run(Command::new("ip")
            .args(["-n", &self.name])
            .args(arguments.split_whitespace()))
    }

    /// Runs a program inside, given with its arguments and separated by spaces; returns its output.
    pub fn capture(&self, line: &str) -> Result<String> {
        let mut words = line.split_whitespace();
        let program = words.next().context("no program")?;
        capture(self.command(program)?.args(words))
    }

    /// Builds a command that runs inside. Only the network differs: `/sys/fs/bpf` stays visible,
    /// which `ip netns exec` would hide.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let handle = self.open()?;
        let mut command = Command::new(program);
        // SAFETY: setns is a plain system call, allowed between fork and exec.
        unsafe {
            command.pre_exec(move || Ok(setns(handle.as_fd(), CloneFlags::CLONE_NEWNET)?));
        }
        Ok(command)
    }

    /// Builds an `ip netns exec` command, for which `/sys` shows the interfaces of this namespace.
    pub fn with_own_sysfs(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }

    /// Calls `inside` on a thread in the namespace; sockets and threads it creates belong to the
    /// namespace too.
    pub fn run<T: Send>(&self, inside: impl FnOnce() -> T + Send) -> Result<T> {
        let handle = self.open()?;
        let entered = || -> Result<T> {
            setns(handle.as_fd(), CloneFlags::CLONE_NEWNET)
                .context("cannot enter the namespace")?;
            Ok(inside())
        };
        thread::scope(|scope| match scope.spawn(entered).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }

    /// Enables forwarding between interfaces, as on a container host.
    pub fn forward(&self) -> Result<()> {
        let set = || {
            std::fs::write("/proc/sys/net/ipv4/conf/all/forwarding", "1")?;
            std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")
        };
        Ok(self.run(set)??)
    }

    /// Returns the index of an interface inside.
    pub fn interface_index(&self, interface: &str) -> Result<u32> {
        let index = self.run(|| nix::net::if_::if_nametoindex(interface))?;
        index.with_context(|| format!("no interface {interface} in {}", self.name))
    }

    /// Returns the XDP, tcx and clsact programs attached to the interfaces inside (Debian 12's bpftool does not show
    /// tcx).
    pub fn attached_programs(&self) -> Result<Vec<String>> {
        let links = capture(Command::new("ip").args(["-n", &self.name, "-o", "link", "show"]))?;
        let mut found: Vec<String> = links
            .lines()
            .filter(|line| line.contains("prog/xdp"))
            .map(str::to_owned)
            .collect();
        for line in links.lines() {
            let name = line
                .split([':', '@'])
                .nth(1)
                .context("ip shows number and name")?
                .trim()
                .to_owned();
            let (_, programs) =
                self.run(|| SchedClassifier::query_tcx(&name, TcAttachType::Ingress))??;
            found.extend(
                programs
                    .iter()
                    .map(|program| format!("{name}: {}", program.name_as_str().unwrap_or("?"))),
            );
        }
        let qdiscs = capture(Command::new("tc").args(["-n", &self.name, "qdisc", "show"]))?;
        for line in qdiscs
            .lines()
            .filter(|line| line.starts_with("qdisc clsact "))
        {
            let name = line
                .split(" dev ")
                .nth(1)
                .and_then(|rest| rest.split(' ').next());
            let name = name.context("tc shows the device")?;
            let shown = capture(
                Command::new("tc")
                    .args(["-n", &self.name, "filter", "show", "dev", name, "ingress"]),
            )?;
            let filters = shown.lines().filter(|line| line.contains("direct-action"));
            found.extend(filters.map(|line| format!("{name}: {line}")));
        }
        Ok(found)
    }

    /// Opens the namespace file.
    fn open(&self) -> Result<File> {
        let path = format!("/run/netns/{}", self.name);
        File::open(&path).context(path)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.name) {
            eprintln!("cannot remove the namespace {}: {error}", self.name);
        }
    }
}

/// Does the work of `ip netns del` in this process: children are killed when this program is
/// interrupted, but the removal must complete.
fn remove(name: &str) -> io::Result<()> {
    let path = format!("/run/netns/{name}");
    match umount2(path.as_str(), MntFlags::MNT_DETACH) {
        // Not mounted (yet), or nonexistent.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(error) => return Err(error.into()),
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// One end of a veth pair.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    pub namespace: &'a Namespace,
    /// Interface name; at most 8 bytes if its NAPI thread is looked up by name.
    pub interface: &'a str,
    /// Addresses with prefix length, such as `169.254.0.2/24`.
    pub addresses: &'a [&'a str],
}

impl<'a> End<'a> {
    pub const fn new(
        namespace: &'a Namespace,
        interface: &'a str,
        addresses: &'a [&'a str],
    ) -> Self {
        Self {
            namespace,
            interface,
            addresses,
        }
    }
}

/// Joins two namespaces by a veth pair, and waits until both ends can send.
pub fn join(one: End<'_>, other: End<'_>) -> Result<()> {
    run(Command::new("ip")
        .args(["-n", &one.namespace.name, "link", "add", one.interface])
        .args([
            "type",
            "veth",
            "peer",
            "name",
            other.interface,
            "netns",
            &other.namespace.name,
        ]))?;
    for end in [one, other] {
        for address in end.addresses {
            // Without duplicate address detection, an IPv6 address is usable immediately.
            let nodad = if address.contains(':') { "nodad" } else { "" };
            end.namespace
                .ip(&format!("addr add {address} dev {} {nodad}", end.interface))?;
        }
        end.namespace
            .ip(&format!("link set {} up", end.interface))?;
    }
    [one, other]
        .into_iter()
        .try_for_each(|end| end.namespace.wait_for_link(end.interface))
}

/// Removes namespaces whose creating process no longer exists: leftovers of killed runs.
fn sweep() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let maker = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split('-').next()?.parse::<i32>().ok());
        let Some(maker) = maker else { continue };
        let gone = nix::sys::signal::kill(nix::unistd::Pid::from_raw(maker), None)
            == Err(nix::Error::ESRCH);
        if gone && let Err(error) = remove(&name) {
            eprintln!("cannot remove the namespace {name}: {error}");
        }
    }
}

/// Checks whether namespaces can be created: root, and a kernel with support.
pub fn available() -> io::Result<()> {
    if nix::unistd::geteuid().is_root() {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, "not root"))
    }
}
