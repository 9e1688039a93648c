//! The first process of the virtual machine in which the programs are tried on
//! another kernel (`tests/tests/packets/other_kernel.rs` makes and starts it).
//!
//! Runs the packet fixtures, then the real server, and switches the machine off.
//! Its last line says how it went.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use dns_resolver::ops::metrics::names;
use hickory_proto::rr::RecordType;
use nix::mount::{MsFlags, mount};
use serde_json::json;
use whole_system_tests::{
    client,
    metrics::Metrics,
    process::{run, wait_until},
    server::{self, Server},
};

/// Said at the end if all was well; `other_kernel.rs` looks for it.
const ALL_WELL: &str = "vm-init: all is well";

/// Queries to the server.
const QUERIES: u64 = 20;

/// Instances of the one group; a reply with all of them finds no room at XDP.
const INSTANCES: u16 = 60;

fn main() {
    if std::process::id() != 1 {
        eprintln!("this is the first process of a virtual machine, and does nothing anywhere else");
        std::process::exit(2);
    }
    match prepare().and_then(|()| fixtures()).and_then(|()| real_server()) {
        Ok(()) => println!("{ALL_WELL}"),
        Err(problem) => println!("vm-init: {problem:#}"),
    }
    // SAFETY: nothing is kept on this machine.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
}

/// What a running system has: file systems, modules, an interface.
fn prepare() -> Result<()> {
    for (kind, place) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("tmpfs", "/run"),
        ("bpf", "/sys/fs/bpf"),
    ] {
        mount(Some(kind), place, Some(kind), MsFlags::empty(), None::<&str>).context(place)?;
    }
    println!("vm-init: {}", fs::read_to_string("/proc/version")?.trim());
    // Nothing loads modules on demand here.
    for module in fs::read_dir("/modules")? {
        let module = module?.path();
        load_module(&module).with_context(|| module.display().to_string())?;
    }
    run(Command::new("/bin/ip").args(["link", "set", "lo", "up"]))
}

/// Loads a kernel module.
fn load_module(path: &Path) -> Result<()> {
    use std::os::fd::AsRawFd as _;
    let file = fs::File::open(path)?;
    // SAFETY: the file is open, the parameters are an empty string.
    let loaded = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    ensure!(loaded == 0, std::io::Error::last_os_error());
    Ok(())
}

/// The packet fixtures. Every test loads the programs anew, and the verifier is
/// slow on an emulated machine: so no others.
fn fixtures() -> Result<()> {
    let mut command = Command::new("/bin/packets");
    command.args(["--test-threads", "1", "fixtures::"]);
    // Without BPF they must fail, not be skipped.
    let status = command.env("CI", "1").stdin(Stdio::null()).status()?;
    ensure!(status.success(), "the packet tests failed ({status})");
    Ok(())
}

/// The server answers over `lo` from the kernel, by the hooks that this kernel has:
/// clsact, alone and behind XDP.
fn real_server() -> Result<()> {
    let address: SocketAddr = ([127, 0, 0, 1], 53).into();
    for (mode, hook, handed_on) in [("auto", "clsact", 0), ("generic", "generic", QUERIES)] {
        let folder = server::folder(&server::records_of_groups(&[INSTANCES]), None)?;
        let settings = json!({
            "metrics": {"enabled": true},
            "xdp": {"mode": mode, "interfaces": ["lo"]},
        });
        let mut server = Server::start(None, folder, address, &settings)?;
        let outcome = answers_of_the_interface(address, hook, handed_on);
        let stopped = server.process().stop(Duration::from_secs(20));
        if let Err(problem) = outcome.and(stopped) {
            bail!("{mode}: {problem:#}; the server's log:\n{}", server.log());
        }
    }
    Ok(())
}

/// Asks the server, and looks at what it counted.
fn answers_of_the_interface(address: SocketAddr, hook: &str, handed_on: u64) -> Result<()> {
    let count = |family: &str, label: &str| Ok::<_, anyhow::Error>(Metrics::here()?.sum(family, label));
    wait_until("the fast path", Duration::from_secs(300), || {
        Metrics::here().is_ok_and(|metrics| metrics.is_fast_path_up())
    })?;
    let serving = format!("hook=\"{hook}\",interface=\"lo\"");
    let serves = count(names::FAST_PATH_INTERFACE_INFO, &serving)?;
    ensure!(serves == 1, "lo must be served by {hook}: before Linux 6.6 there is no tcx");
    let query = client::query(&format!("q-s0.q-g{INSTANCES}.bosh."), RecordType::A, Some(4096))?;
    for _ in 0..QUERIES {
        let reply = client::ask(address, &query)?;
        ensure!(
            client::addresses(&reply).len() == usize::from(INSTANCES),
            "not {INSTANCES} addresses: {reply}"
        );
    }
    let replies = count(names::FAST_PATH_INTERFACE_REPLIES_TOTAL, "interface=\"lo\"")?;
    ensure!(replies == QUERIES, "{replies} replies of the interface, not {QUERIES}");
    let packets = count(names::FAST_PATH_PACKETS_TOTAL, "outcome=\"handed_on\"")?;
    ensure!(packets == handed_on, "{packets} were handed on by XDP, not {handed_on}");
    Ok(())
}
