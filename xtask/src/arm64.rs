//! `cargo xtask arm64`: builds for arm64 from an x86-64 machine, and their tests.
//!
//! Compiler: Debian's rustc with the standard libraries of its arm64 packages, because rustup's are
//! not available everywhere; linker and C compiler: `gcc-aarch64-linux-gnu`. The BPF object is the
//! same for both architectures (`bpfel`).

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use clap::Subcommand;

use crate::{
    PROGRAMS, Profile, SERVER, kernel,
    packages::{self, Lists},
    process::{build_test, capture, root, run},
    toolchain,
};

pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Root of the C library in Debian's cross packages, for qemu-user.
pub(crate) const C_LIBRARY: &str = "/usr/aarch64-linux-gnu";

/// Runs arm64 programs on this machine (package `qemu-user-static`).
pub(crate) const EMULATOR: &str = "qemu-aarch64-static";

/// Programs that the tests in a virtual machine call, and the libraries of all programs there.
const ROOT_PACKAGES: &str = "\
    ethtool iproute2 libbpf1 libbsd0 libc6 libcap2 libelf1 libgcc-s1 libmd0 libmnl0 libpcre2-8-0 \
    libselinux1 libtirpc3 libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkrb5support0 libcom-err2 \
    libkeyutils1 libssl3 libxtables12 libdb5.3 libzstd1 zlib1g";

#[derive(Subcommand)]
pub(crate) enum Arm64 {
    /// Build all programs, optimised, into target/aarch64-unknown-linux-gnu/release.
    Build,
    /// Run the unit tests of the wire format under qemu-user, then everything in virtual machines; check packages,
    /// release and image of both architectures.
    Test {
        /// Only the unit tests under qemu-user
        #[arg(long)]
        unit: bool,
    },
}

impl Arm64 {
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Self::Build => build_all(),
            Self::Test { unit: true } => unit_tests(),
            // Cheapest first: an emulated kernel takes minutes to boot.
            Self::Test { unit: false } => {
                unit_tests()?;
                kernel::test_arm64(&file_system()?)?;
                test_artifacts()
            }
        }
    }
}

/// Builds programs; returns their folder.
fn build(profile: Profile, programs: &[[&str; 2]]) -> Result<PathBuf> {
    let mut cargo = crate::build_with(cargo()?, profile, programs)?;
    run(cargo.args(["--target", TARGET]))?;
    Ok(root().join("target").join(TARGET).join(profile.folder()))
}

fn build_all() -> Result<()> {
    let folder = build(Profile::Release, &PROGRAMS)?;
    for [_, program] in PROGRAMS {
        let about = capture(
            Command::new("file")
                .arg("--brief")
                .arg(folder.join(program)),
        )?;
        println!(
            // `file` names the architecture: a build for this machine would be noticed.
            "{}: {}",
            folder.join(program).display(),
            about.split(", dynamically").next().unwrap_or("")
        );
    }
    Ok(())
}

/// Runs the unit tests of the crates that read and write DNS messages and the maps' memory.
pub(crate) fn unit_tests() -> Result<()> {
    let tests = [
        "test",
        "--package",
        "dns-core",
        "--package",
        "dns-common",
        "--lib",
        "--target",
        TARGET,
    ];
    run(cargo()?
        .args(tests)
        // Emulated, a hundred inputs of each property take half a minute.
        .env("PROPTEST_CASES", "16")
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
            format!("{EMULATOR} -L {C_LIBRARY}"),
        ))
}

/// Installs the cross compiler and the emulator of programs.
pub(crate) fn ensure() -> Result<()> {
    packages::ensure("gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static")?;
    toolchain::arm64_rustc().map(drop)
}

/// Returns cargo with the cross compiler.
pub(crate) fn cargo() -> Result<Command> {
    ensure()?;
    toolchain::ensure()?;
    let usr = toolchain::arm64_rustc()?;
    let mut command = Command::new("cargo");
    command
        .env("RUSTC", usr.join("bin/rustc"))
        .env("LD_LIBRARY_PATH", usr.join("lib/x86_64-linux-gnu"))
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
            "aarch64-linux-gnu-gcc",
        )
        .env("CC_aarch64_unknown_linux_gnu", "aarch64-linux-gnu-gcc")
        // The programs go into a file system in memory, and are not debugged there.
        .env("CARGO_PROFILE_DEV_DEBUG", "false")
        .current_dir(root());
    Ok(command)
}

/// Builds all programs, packs them beside this machine's programs, and checks packages, release and image.
fn test_artifacts() -> Result<()> {
    let debug = build(Profile::Dev, &PROGRAMS)?;
    let folder = root().join(".toolchain/arm64/programs");
    packages::recreate_folder(&folder)?;
    for [_, program] in PROGRAMS {
        install(&debug.join(program), &folder.join(program))?;
    }
    packages::ensure("lintian podman")?;
    // Unoptimised like the programs for arm64: only the packing is tested.
    crate::build(Profile::Dev, &PROGRAMS)?;
    let mut test = Command::new("cargo");
    test.args([
        "test",
        "--workspace",
        "--test",
        "deploy",
        "--",
        "--exact",
        "--include-ignored",
        "--nocapture",
    ]);
    run(test
        .arg("release::artifacts_hold_both_architectures")
        .env("ARM64_PROGRAMS", &folder)
        .current_dir(root()))
}

/// Builds the programs that a virtual machine runs; returns the root of their file system.
fn file_system() -> Result<PathBuf> {
    packages::ensure("cpio qemu-system-arm")?;
    // One after the other: together they would be compiled with the features that the tests need.
    let debug = build(Profile::Dev, &[SERVER])?;
    build(Profile::Dev, &[["whole-system-tests", "vm-init"]])?;
    let mut tests = cargo()?;
    tests
        .args(["test", "--package", "whole-system-tests"])
        .args(["--test", "packets", "--target", TARGET]);
    let packets = build_test(&mut tests, "packets")?;

    let folder = root().join(".toolchain/arm64");
    let libraries = libraries(&folder)?;
    let files = folder.join("files");
    packages::recreate_folder(&files)?;
    run(Command::new("cp")
        .arg("-a")
        .arg(libraries.join("."))
        .arg(&files))?;
    install(&debug.join("vm-init"), &files.join("init"))?;
    install(&debug.join("bosh-dns-xdp"), &files.join("bin/bosh-dns-xdp"))?;
    install(&packets, &files.join("bin/packets"))?;
    for tool in ["ip", "bridge", "ethtool"] {
        gather(tool, &files)?;
    }
    Ok(files)
}

/// Downloads the packages that the programs need, unless that was done before; returns the folder of their files.
fn libraries(folder: &Path) -> Result<PathBuf> {
    let libraries = folder.join("root");
    if !libraries.exists() {
        let lists = Lists::of_suite("bookworm", "arm64", &folder.join("apt-root"))?;
        lists.update()?;
        let downloads = folder.join("debs-root");
        let packages: Vec<&str> = ROOT_PACKAGES.split_whitespace().collect();
        lists.download(&packages, &downloads)?;
        packages::unpack(&downloads, &libraries)?;
        // The file system is unpacked into the machine's memory.
        for unused in ["usr/share", "usr/lib/aarch64-linux-gnu/gconv"] {
            fs::remove_dir_all(libraries.join(unused)).ok();
        }
    }
    Ok(libraries)
}

/// Copies a tool to the folder in which all programs lie.
fn gather(tool: &str, files: &Path) -> Result<()> {
    let place = ["bin", "sbin", "usr/sbin"].map(|place| files.join(place).join(tool));
    let from = place
        .iter()
        .find(|path| path.is_file())
        .with_context(|| format!("no {tool} for arm64"))?;
    if *from != place[0] {
        fs::copy(from, &place[0])?;
    }
    Ok(())
}

/// Copies a program without symbols.
fn install(from: &Path, to: &Path) -> Result<()> {
    // This machine's strip knows no arm64 programs.
    run(Command::new("aarch64-linux-gnu-strip")
        .arg("-o")
        .arg(to)
        .arg(from))
}
