//! Runs the packet fixtures, and the real server in every mode, on other kernels, each in a virtual
//! machine. Older verifiers prune less, and older kernels lack tcx, so that the server attaches by
//! clsact.
//!
//! `cargo xtask test` fetches the kernels (`xtask/src/kernel.rs`); `cargo xtask kernel-test` takes
//! a kernel image as its argument.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsStr,
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

use crate::kernel_image;

/// Modules needed unless they are built in: the interface, the server's attachment to it, and those
/// of the set-ups in `tests/src/bin/vm-init/set_ups.rs`.
///
/// Debian's 6.1 has `drbg` in a module, the random numbers that `echainiv` needs; it uses
/// HMAC-SHA-512. The kernel looks for algorithms by name, so they are no dependencies of the
/// modules. `drbg` works without `jitterentropy_rng`, which rejects the virtual clock.
const MODULES: [&str; 13] = [
    "veth",
    "dummy",
    "sch_ingress",
    "cls_bpf",
    "xfrm_user",
    "esp4",
    "authenc",
    "sha512_generic",
    "drbg",
    "echainiv",
    "vrf",
    "bridge",
    "8021q",
];

/// Time limit of a virtual machine. It is emulated: about a minute on an idle host, many times that
/// on a busy one.
pub(super) const LIMIT: Duration = Duration::from_secs(1700);

/// Final line of a machine on success.
pub(super) const ALL_WELL: &str = "vm-init: success";

#[test]
fn other_kernel_6_1_for_clouds() -> Result<()> {
    Kernel::of_debian("bookworm-cloud").map_or(Ok(()), |kernel| kernel.try_everything())
}

/// Softirqs run in threads here, and programs can be preempted.
#[test]
fn other_kernel_6_1_preempt_rt() -> Result<()> {
    Kernel::of_debian("bookworm-rt").map_or(Ok(()), |kernel| kernel.try_everything())
}

#[test]
fn other_kernel_6_12_for_clouds() -> Result<()> {
    Kernel::of_debian("backports-cloud").map_or(Ok(()), |kernel| kernel.try_everything())
}

#[test]
#[ignore = "`cargo xtask kernel-test IMAGE` names a kernel and runs it"]
fn named_kernel() -> Result<()> {
    let image = env::var_os("KERNEL_IMAGE").context("KERNEL_IMAGE names no kernel")?;
    let modules = env::var_os("KERNEL_MODULES").map(PathBuf::from);
    let arm64 = env::var_os("KERNEL_ARM64").map(PathBuf::from);
    Kernel {
        image: image.into(),
        modules,
        arm64,
    }
    .try_everything()
}

/// A kernel for the virtual machine.
pub(super) struct Kernel {
    image: PathBuf,
    /// Parent folder of its modules; `None` if everything is built in.
    modules: Option<PathBuf>,
    /// For an arm64 kernel, the root of a file system with all programs, prepared by `cargo xtask arm64`;
    /// `None`: a kernel of this machine's architecture, which runs this machine's programs.
    arm64: Option<PathBuf>,
}

impl Kernel {
    /// Returns a kernel fetched by `cargo xtask test`; `None` if it could not be fetched.
    pub(super) fn of_debian(name: &str) -> Option<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../.toolchain/kernels")
            .join(name);
        let find = || -> Result<Self> {
            on_path("qemu-system-x86_64")?;
            let image = find_below(&folder.join("boot"), &|file| file.starts_with("vmlinuz-"))?;
            let image = image.with_context(|| {
                format!("no kernel in {}: `cargo xtask test`", folder.display())
            })?;
            Ok(Self {
                image,
                modules: Some(folder.join("lib/modules")),
                arm64: None,
            })
        };
        let (kernel, met) = match find() {
            Ok(kernel) => (Some(kernel), Ok(())),
            Err(problem) => (None, Err(format!("{problem:#}"))),
        };
        requirements::met(&format!("Debian's kernel {name} and qemu"), met)
            .then_some(kernel)
            .flatten()
    }

    /// Boots the kernel; fails unless all checks inside succeed.
    fn try_everything(&self) -> Result<()> {
        let folder = tempfile::TempDir::with_prefix("bdx-vm-")?;
        let archive = self.archive(folder.path(), &MODULES)?;
        let console = folder.path().join("console");
        let mut machine = Kept::spawn(
            self.machine(&archive, self.environment())?
                .stdin(Stdio::null())
                .stdout(fs::File::create(&console)?)
                .stderr(Stdio::null()),
        )?;
        let ended = machine.wait(LIMIT);
        let said = String::from_utf8_lossy(&fs::read(&console)?).into_owned();
        println!("{said}");
        ended.context("the virtual machine")?;
        ensure!(
            said.contains(ALL_WELL),
            "output of the virtual machine:\n{said}"
        );
        Ok(())
    }

    /// Packs the initial file system: programs, and the kernel's modules in order of loading.
    pub(super) fn archive(&self, folder: &Path, modules: &[&str]) -> Result<PathBuf> {
        let files = folder.join("files");
        for empty in ["proc", "sys", "dev", "tmp", "run"] {
            fs::create_dir_all(files.join(empty))?;
        }
        if let Some(root) = &self.arm64 {
            run(Command::new("cp").arg("-a").arg(root.join(".")).arg(&files))?;
        } else {
            copy_program(Path::new(env!("CARGO_BIN_EXE_vm-init")), &files, "init")?;
            copy_program(&env::current_exe()?, &files, "bin/packets")?;
            copy_program(&server::program()?, &files, "bin/bosh-dns-xdp")?;
            for tool in ["ip", "bridge", "ethtool"] {
                copy_program(&on_path(tool)?, &files, &format!("bin/{tool}"))?;
            }
        }
        self.copy_modules(&files.join("modules"), modules)?;
        run(Command::new("sh")
            .args(["-c", "find . | cpio -o -H newc --quiet > ../initramfs"])
            .current_dir(&files))?;
        Ok(folder.join("initramfs"))
    }

    /// Returns the command that boots the machine; `environment` is for the init process.
    pub(super) fn machine(&self, archive: &Path, environment: &str) -> Result<Command> {
        // qemu 7.2's CMPXCHG16B corrupts the flags, which crashes Linux 6.12; four-level page tables are
        // faster to walk, and without ERMS memory is copied by words rather than by bytes, each an emulated
        // instruction. Of arm64's pointer authentication only the fast algorithm can be emulated in time.
        let (qemu, processor, console) = match self.arm64 {
            None => (
                "qemu-system-x86_64",
                "max,cx16=off,la57=off,erms=off",
                "ttyS0",
            ),
            Some(_) => ("qemu-system-aarch64", "max,pauth-impdef=on", "ttyAMA0"),
        };
        let kernel = match self.arm64 {
            None => kernel_image::unpack(
                &self.image,
                archive.parent().context("a file has a folder")?,
            )?,
            Some(_) => None,
        };
        let mut command = Command::new(qemu);
        if self.arm64.is_some() {
            command.args(["-machine", "virt,gic-version=3"]);
        }
        command
            // Only required devices: no boot card, no screen.
            .args(["-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"])
            .args(["-accel", "tcg", "-cpu", processor, "-m", "1024"])
            // An instruction takes 2 ns of virtual time however busy the host is, so load on
            // the host cannot exceed a time limit of the server.
            .args(["-icount", "shift=1", "-rtc", "clock=vm", "-kernel"])
            .arg(kernel.as_ref().unwrap_or(&self.image))
            .arg("-initrd")
            .arg(archive)
            .arg("-append")
            // The self-tests of the kernel's algorithms would take a fifth of the boot.
            .arg(format!(
                "console={console} quiet panic=-1 cryptomgr.notests BOSH_DNS_XDP=/bin/bosh-dns-xdp PATH=/bin \
                 {environment}"
            ));
        Ok(command)
    }

    /// Returns the environment of the init process. Debian's kernels have every module, so each set-up
    /// must work; a kernel without modules may lack some.
    fn environment(&self) -> &'static str {
        if self.modules.is_some() {
            "BOSH_DNS_SET_UPS=all"
        } else {
            ""
        }
    }

    /// Copies the wanted modules to the folder read by the init process, which loads them in the
    /// order of their names.
    fn copy_modules(&self, to: &Path, wanted: &[&str]) -> Result<()> {
        fs::create_dir(to)?;
        let Some(modules) = &self.modules else {
            return Ok(());
        };
        let mut copied = Vec::new();
        wanted
            .iter()
            .try_for_each(|module| copy_module(modules, module, to, &mut copied))
    }
}

/// Copies a module after its dependencies, unless it is built in or was copied before.
fn copy_module(modules: &Path, module: &str, to: &Path, copied: &mut Vec<String>) -> Result<()> {
    let module = module.replace('-', "_");
    if copied.contains(&module) {
        return Ok(());
    }
    let is_it = |name: &str| {
        name.split_once(".ko").is_some_and(|(stem, rest)| {
            stem.replace('-', "_") == module && (rest.is_empty() || rest.starts_with('.'))
        })
    };
    let Some(found) = find_below(modules, &is_it)? else {
        return Ok(());
    };
    let unpack: &[&str] = match found.extension().and_then(OsStr::to_str) {
        Some("xz") => &["xz", "-dc"],
        Some("zst") => &["zstd", "-dc"],
        Some("gz") => &["gzip", "-dc"],
        _ => &["cat"],
    };
    let unpacked = Command::new(unpack[0])
        .args(&unpack[1..])
        .arg(&found)
        .output()?;
    ensure!(
        unpacked.status.success(),
        "{}: {}",
        found.display(),
        unpack.join(" ")
    );
    copied.push(module.clone());
    for dependency in dependencies(&unpacked.stdout) {
        copy_module(modules, &dependency, to, copied)?;
    }
    let number = fs::read_dir(to)?.count();
    Ok(fs::write(
        to.join(format!("{number:02}-{module}.ko")),
        unpacked.stdout,
    )?)
}

/// Returns the modules that a module depends on, from its section `.modinfo`.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let list = module[at + KEY.len()..]
        .split(|&byte| byte == 0)
        .next()
        .unwrap_or_default();
    let list = String::from_utf8_lossy(list);
    list.split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Finds a file below a folder by its name.
fn find_below(folder: &Path, is_it: &dyn Fn(&str) -> bool) -> Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            if let Some(found) = find_below(&entry.path(), is_it)? {
                return Ok(Some(found));
            }
        } else if is_it(&entry.file_name().to_string_lossy()) {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

/// Finds a program in `PATH`.
fn on_path(program: &str) -> Result<PathBuf> {
    let folders = env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut candidates = env::split_paths(&folders)
        .chain(sbin)
        .map(|folder| folder.join(program));
    candidates
        .find(|path| path.is_file())
        .with_context(|| format!("{program} is not installed"))
}

/// Copies a program without symbols and debug information, and its libraries to the paths where it
/// expects them.
fn copy_program(program: &Path, files: &Path, to: &str) -> Result<()> {
    let to = files.join(to);
    fs::create_dir_all(to.parent().context("a file has a folder")?)?;
    run(Command::new("strip").arg("-o").arg(&to).arg(program))?;
    let libraries = capture(Command::new("ldd").arg(program))?;
    let libraries: BTreeSet<&str> = libraries
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .collect();
    for library in libraries {
        let to = files.join(library.trim_start_matches('/'));
        if !to.exists() {
            fs::create_dir_all(to.parent().context("a file has a folder")?)?;
            fs::copy(library, &to)?;
        }
    }
    Ok(())
}
