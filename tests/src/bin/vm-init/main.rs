//! The first process of the virtual machine in which the programs are tried on
//! another kernel (`tests/tests/packets/other_kernel.rs` makes and starts it).
//!
//! Runs the packet fixtures, then the real server in each mode, and switches the
//! machine off. What it says begins with `vm-init: `, one line a mode; its last line
//! says how it went.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use nix::mount::{MsFlags, mount};
use whole_system_tests::process::run;

mod modes;

/// Said at the end if all was well; `other_kernel.rs` looks for it.
const ALL_WELL: &str = "vm-init: all is well";

fn main() {
    if std::process::id() != 1 {
        eprintln!("this is the first process of a virtual machine, and does nothing anywhere else");
        std::process::exit(2);
    }
    match prepare().and_then(|()| try_everything()) {
        Ok(()) => println!("{ALL_WELL}"),
        Err(problem) => println!("vm-init: not well: {problem:#}"),
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
    let modules = fs::read_dir("/modules")?.map(|module| Ok(module?.path()));
    let mut modules = modules.collect::<Result<Vec<PathBuf>>>()?;
    modules.sort();
    for module in modules {
        load_module(&module).with_context(|| module.display().to_string())?;
    }
    run(Command::new("ip").args(["link", "set", "lo", "up"]))
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

/// Runs everything, whatever fails, so that each mode has its line.
fn try_everything() -> Result<()> {
    let fixtures = fixtures();
    let modes = modes::try_all();
    fixtures.and(modes)
}

/// The packet fixtures, and what the verifier has left. Every packet takes its time on an
/// emulated machine: so no others.
fn fixtures() -> Result<()> {
    let mut command = Command::new("/bin/packets");
    command.args(["--test-threads", "1", "--nocapture", "fixtures::", "the_verifier_has_room_left"]);
    // Without BPF they must fail, not be skipped.
    let status = command.env("CI", "1").stdin(Stdio::null()).status()?;
    ensure!(status.success(), "the packet fixtures failed ({status})");
    println!("vm-init: packet fixtures: pass at every hook");
    Ok(())
}
