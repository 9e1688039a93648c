//! Init process of the virtual machine that tests the programs on another kernel
//! (`tests/tests/packets/other_kernel.rs` builds and starts it).
//!
//! Runs the packet fixtures, then the real server in each mode and in set-ups that need modules of
//! the kernel, and powers the machine off. Its output lines begin with `vm-init: `, one per mode and
//! set-up; the last line is the overall result.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use nix::mount::{MsFlags, mount};
use whole_system_tests::process::run;

mod dummy;
mod modes;
mod netkit;
mod network_cards;
mod set_ups;

/// Final line on success; `other_kernel.rs` looks for it.
const ALL_WELL: &str = "vm-init: success";

fn main() {
    if std::process::id() != 1 {
        eprintln!("this is the init process of a virtual machine, and does nothing elsewhere");
        std::process::exit(2);
    }
    match prepare().and_then(|()| try_everything()) {
        Ok(()) => println!("{ALL_WELL}"),
        Err(problem) => println!("vm-init: failed: {problem:#}"),
    }
    // SAFETY: the machine has no persistent state.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
}

/// Sets up file systems, kernel modules and an interface.
fn prepare() -> Result<()> {
    for (kind, place) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("tmpfs", "/run"),
        ("bpf", "/sys/fs/bpf"),
    ] {
        mount(
            Some(kind),
            place,
            Some(kind),
            MsFlags::empty(),
            None::<&str>,
        )
        .context(place)?;
    }
    println!("vm-init: {}", fs::read_to_string("/proc/version")?.trim());
    // Modules are not loaded on demand here.
    let modules = fs::read_dir("/modules")?.map(|module| Ok(module?.path()));
    let mut modules = modules.collect::<Result<Vec<PathBuf>>>()?;
    modules.sort();
    for module in modules {
        load_module(&module).with_context(|| module.display().to_string())?;
    }
    run(Command::new("ip").args(["link", "set", "lo", "up"]))
}

fn load_module(path: &Path) -> Result<()> {
    use std::os::fd::AsRawFd as _;
    let file = fs::File::open(path)?;
    // SAFETY: the file is open, the parameters are an empty string.
    let loaded =
        unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    ensure!(loaded == 0, std::io::Error::last_os_error());
    Ok(())
}

/// Runs all checks even after a failure, so that each mode is reported.
fn try_everything() -> Result<()> {
    if std::env::var_os("CARDS").is_some() {
        return network_cards::try_all();
    }
    let fixtures = fixtures();
    let modes = modes::try_all();
    let netkit = netkit::try_it();
    let dummy = dummy::try_it();
    let set_ups = set_ups::try_all();
    fixtures.and(modes).and(netkit).and(dummy).and(set_ups)
}

/// Runs the packet fixtures, packets on another interface and runs that follow each other, the verifier's
/// headroom check, and the load generator. Packets are slow on an emulated machine, so no other tests run.
fn fixtures() -> Result<()> {
    let mut command = Command::new("/bin/packets");
    command.args([
        "--test-threads",
        "1",
        "--nocapture",
        "fixtures::",
        "interfaces::address_lists",
        "preemption::",
        "the_verifier_has_room_left",
        "generator::",
    ]);
    // Without BPF the tests must fail rather than be skipped.
    let status = command
        .env("CI", "1")
        .env("BOSH_DNS_SAMPLE", "1")
        .stdin(Stdio::null())
        .status()?;
    ensure!(status.success(), "the packet fixtures failed ({status})");
    println!("vm-init: packet fixtures: pass at every hook");
    Ok(())
}
