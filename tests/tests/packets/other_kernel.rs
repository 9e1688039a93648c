//! The packet fixtures, and the real server, on the oldest kernel at hand:
//! Debian's 6.1 in a virtual machine. Its verifier knows less than newer ones,
//! and it has no tcx, so that the server attaches by clsact.
//!
//! `cargo xtask test` fetches the kernel (`xtask/src/kernel.rs`).

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use whole_system_tests::{
    process::{Kept, capture, run},
    requirements, server,
};

/// Modules that the server's way onto an interface needs, in order of loading.
const MODULES: [&str; 2] = ["net/sched/sch_ingress.ko", "net/sched/cls_bpf.ko"];

/// How long the machine may take, in all. It is emulated: two and a half to five
/// minutes where nothing else runs, several times that on a busy machine.
const LIMIT: Duration = Duration::from_secs(1000);

#[test]
fn other_kernel_loads_and_answers() -> Result<()> {
    let Some(kernel) = kernel() else { return Ok(()) };
    let folder = tempfile::TempDir::with_prefix("bdx-vm-")?;
    let files = folder.path().join("files");
    for empty in ["proc", "sys", "dev", "tmp", "run"] {
        fs::create_dir_all(files.join(empty))?;
    }
    copy_program(Path::new(env!("CARGO_BIN_EXE_vm-init")), &files, "init")?;
    copy_program(&std::env::current_exe()?, &files, "bin/packets")?;
    copy_program(&server::program()?, &files, "bin/bosh-dns-xdp")?;
    copy_program(&on_path("ip")?, &files, "bin/ip")?;
    fs::create_dir(files.join("modules"))?;
    for (number, module) in MODULES.iter().enumerate() {
        fs::copy(kernel.modules.join(module), files.join(format!("modules/{number}.ko")))?;
    }
    let archive = folder.path().join("initramfs");
    run(Command::new("sh")
        .args(["-c", "find . | cpio -o -H newc --quiet > ../initramfs"])
        .current_dir(&files))?;

    let console = folder.path().join("console");
    let mut machine = Kept::spawn(
        Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-cpu", "max", "-m", "2048", "-nographic", "-no-reboot", "-kernel"])
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(&archive)
            .args(["-append", "console=ttyS0 quiet panic=-1 BOSH_DNS_XDP=/bin/bosh-dns-xdp PATH=/bin"])
            .stdin(Stdio::null())
            .stdout(fs::File::create(&console)?)
            .stderr(Stdio::null()),
    )?;
    let ended = machine.wait(LIMIT);
    let said = String::from_utf8_lossy(&fs::read(&console)?).into_owned();
    println!("{said}");
    ended.context("the virtual machine")?;
    ensure!(said.contains("vm-init: all is well"), "the virtual machine said:\n{said}");
    Ok(())
}

/// The kernel of the virtual machine.
struct Kernel {
    /// What qemu boots.
    image: PathBuf,
    /// Folder of its modules.
    modules: PathBuf,
}

/// The kernel, if it was fetched.
fn kernel() -> Option<Kernel> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.toolchain/kernel");
    let only = |below: &str, start: &str| -> Result<PathBuf> {
        let place = folder.join(below);
        let missing =
            || format!("nothing like {start}* in {}: `cargo xtask test` fetches it", place.display());
        let mut found = fs::read_dir(&place).with_context(missing)?.filter_map(Result::ok);
        let entry = found.find(|entry| entry.file_name().to_string_lossy().starts_with(start));
        Ok(entry.with_context(missing)?.path())
    };
    let kernel = only("boot", "vmlinuz-")
        .and_then(|image| Ok(Kernel { image, modules: only("lib/modules", "6.1")?.join("kernel") }));
    let kernel = kernel.and_then(|kernel| on_path("qemu-system-x86_64").map(|_| kernel));
    let (kernel, met) = match kernel {
        Ok(kernel) => (Some(kernel), Ok(())),
        Err(problem) => (None, Err(format!("{problem:#}"))),
    };
    requirements::met("Debian's kernel and qemu", met).then_some(kernel).flatten()
}

/// Where a program is.
fn on_path(program: &str) -> Result<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut candidates = std::env::split_paths(&folders).chain(sbin).map(|folder| folder.join(program));
    candidates.find(|path| path.is_file()).with_context(|| format!("{program} is not installed"))
}

/// Copies a program without its debug information, and the libraries that it
/// needs to where it looks for them.
fn copy_program(program: &Path, files: &Path, to: &str) -> Result<()> {
    let to = files.join(to);
    fs::create_dir_all(to.parent().context("a file has a folder")?)?;
    run(Command::new("strip").arg("--strip-debug").arg("-o").arg(&to).arg(program))?;
    let libraries = capture(Command::new("ldd").arg(program))?;
    let libraries: BTreeSet<&str> =
        libraries.split_whitespace().filter(|word| word.starts_with('/')).collect();
    for library in libraries {
        let to = files.join(library.trim_start_matches('/'));
        if !to.exists() {
            fs::create_dir_all(to.parent().context("a file has a folder")?)?;
            fs::copy(library, &to)?;
        }
    }
    Ok(())
}
