//! Set-up of the BPF compiler, its clippy, and `.toolchain/env`, which configures the
//! build scripts of BPF crates (`dns-user/attacher/build/object.rs`).
//!
//! Of two toolchains the first available one is used:
//!
//! 1. rustup's nightly with the rust-src component, and bpf-linker on the path.
//! 2. Debian's rustc for the BPF target, unpacked in `.toolchain`, with a bpf-linker that is built there.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Error, Result, bail};

pub(crate) use self::bpf_cargo::bpf_cargo;
use crate::{
    packages,
    process::{install, on_path, root, run},
};

#[path = "../../dns-user/attacher/build/bpf_cargo.rs"]
mod bpf_cargo;

/// The BPF crates: the programs of the server, of benches and tests, and of the load generator.
pub(crate) const PROGRAMS: [&str; 3] = ["dns-ebpf", "benches/programs/ebpf", "dns-user/load/ebpf"];

/// Debian packages of rustc and of `core` for the host (proc macros) and the BPF target.
const RUSTC_PACKAGES: &[&str] = &[
    "rustc-web",
    "libstd-rust-web-1.96",
    "libstd-rust-web-dev",
    "libstd-rust-web-dev-bpf",
];

/// Debian package of clippy that matches [`RUSTC_PACKAGES`].
const CLIPPY_PACKAGE: &str = "rust-web-clippy";

/// Version of [`RUSTC_PACKAGES`] and [`CLIPPY_PACKAGE`].
const RUSTC_VERSION: &str = "1.96.0+dfsg1-1~deb12u2";

/// Debian suite of [`RUSTC_PACKAGES`].
const RUSTC_SUITE: &str = "bookworm-security";

/// Debian package of the LLVM used by rustc and bpf-linker.
const LLVM_PACKAGE: &str = "libllvm22";

/// Path of the library in [`LLVM_PACKAGE`].
const LLVM_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libLLVM.so.22.1";

/// Version of bpf-linker and its feature that matches [`LLVM_PACKAGE`].
const LINKER_VERSION: &str = "0.13.0";
const LINKER_FEATURE: &str = "llvm-22";

/// Sets up the BPF toolchain if necessary.
pub(crate) fn ensure() -> Result<()> {
    let folder = root().join(".toolchain");
    let settings_file = folder.join("env");
    // Each command calls this, and usually the settings hold.
    if fs::read_to_string(&settings_file).is_ok_and(|settings| still_valid(&settings)) {
        return Ok(());
    }
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    // A developer's own toolchain first: it needs no download.
    let settings = match nightly_settings() {
        Some(settings) => settings,
        None => install_debian(&folder)?,
    };
    // Written last, because it says that the set-up is complete.
    fs::write(&settings_file, settings).with_context(|| settings_file.display().to_string())
}

/// Runs clippy on the BPF crates with the BPF compiler; warnings are errors.
pub(crate) fn lint_programs() -> Result<()> {
    ensure()?;
    let folder = root().join(".toolchain");
    let settings = fs::read_to_string(folder.join("env"))?;
    // Rustup's nightly includes clippy; Debian's rustc needs Debian's clippy.
    let clippy = if settings.contains("RUSTUP_TOOLCHAIN=") {
        "cargo".into()
    } else {
        debian_clippy(&folder)?
    };
    for programs in PROGRAMS {
        let mut command =
            bpf_cargo(&clippy, "clippy", &root().join(programs), &settings).map_err(Error::msg)?;
        command
            .arg("--target-dir")
            // One folder for all of them: crates that they share are compiled once.
            .arg(root().join("dns-ebpf/target"));
        run(command.args(["--quiet", "--", "-D", "warnings"]))?;
    }
    Ok(())
}

/// Returns Debian's clippy, unpacking it into `folder` if necessary.
fn debian_clippy(folder: &Path) -> Result<PathBuf> {
    let clippy = folder.join("clippy");
    if !clippy.exists() {
        unpack(&[CLIPPY_PACKAGE], &clippy, folder)?;
    }
    Ok(clippy.join("usr/bin/cargo-clippy"))
}

/// Returns whether the paths in the settings still exist (the checkout may have moved, or the
/// toolchain was removed).
fn still_valid(settings: &str) -> bool {
    match (
        setting(settings, "RUSTC"),
        setting(settings, "PATH_FIRST"),
        setting(settings, "RUSTUP_TOOLCHAIN"),
    ) {
        (Some(rustc), Some(linker), _) => {
            Path::new(rustc).exists() && Path::new(linker).join("bpf-linker").exists()
        }
        (None, None, Some(_)) => nightly_settings().is_some(),
        _ => false,
    }
}

fn setting<'a>(settings: &'a str, key: &str) -> Option<&'a str> {
    let mut lines = settings.lines();
    lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
}

/// Returns settings for rustup's nightly if it has rust-src and bpf-linker is available.
fn nightly_settings() -> Option<String> {
    let sysroot = Command::new("rustup")
        .args(["run", "nightly", "rustc", "--print", "sysroot"])
        .stderr(Stdio::null())
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let sysroot = PathBuf::from(String::from_utf8(sysroot.stdout).ok()?.trim());
    let complete =
        sysroot.join("lib/rustlib/src/rust/library/core").exists() && on_path("bpf-linker");
    complete.then(|| "RUSTUP_TOOLCHAIN=nightly\nARGS=-Z build-std=core\n".to_owned())
}

/// Unpacks Debian's rustc into `folder` and builds bpf-linker there; returns the settings.
fn install_debian(folder: &Path) -> Result<String> {
    println!(
        "setting up the BPF toolchain in {} (once, about two minutes)",
        folder.display()
    );
    packages::ensure(&format!("{LLVM_PACKAGE} gcc libc6-dev"))?;
    if !Path::new(LLVM_LIBRARY).exists() {
        bail!(
            "{LLVM_PACKAGE} is installed, but {LLVM_LIBRARY} is missing: another release of Debian?"
        );
    }
    let rustc = folder.join("sysroot/usr/bin/rustc");
    if !rustc.exists() {
        unpack(RUSTC_PACKAGES, &folder.join("sysroot"), folder)?;
    }
    let linker = folder.join("linker/bin");
    if !linker.join("bpf-linker").exists() {
        build_linker(folder)?;
    }
    Ok(format!(
        // The programs use unstable features, which a stable compiler accepts with this variable
        // only.
        "RUSTC={}\nRUSTC_BOOTSTRAP=1\nLD_LIBRARY_PATH={}\nPATH_FIRST={}\n",
        rustc.display(),
        folder.join("sysroot/usr/lib/x86_64-linux-gnu").display(),
        linker.display(),
    ))
}

/// Unpacks Debian's rustc for this machine with the standard libraries of an arm64 machine, and returns its root,
/// which is `sysroot/usr`. The libraries must have the compiler's version to the letter.
pub(crate) fn arm64_rustc() -> Result<PathBuf> {
    let folder = root().join(".toolchain/arm64");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let usr = folder.join("sysroot/usr");
    let target = usr.join("lib/rustlib/aarch64-unknown-linux-gnu");
    if !usr.exists() {
        unpack(RUSTC_PACKAGES, &folder.join("sysroot"), &folder)?;
    }
    if !target.exists() {
        println!("  downloading Debian's Rust libraries for arm64");
        let lists = packages::Lists::of_suite(RUSTC_SUITE, "arm64", &folder.join("apt"))?;
        lists.update()?;
        let names = ["libstd-rust-web-dev", "libstd-rust-web-1.96"]
            .map(|name| format!("{name}={RUSTC_VERSION}"));
        let downloads = folder.join("debs-arm64");
        lists.download(&names, &downloads)?;
        let libraries = folder.join("libraries");
        packages::unpack(&downloads, &libraries)?;
        fs::rename(
            libraries.join("usr/lib/rustlib/aarch64-unknown-linux-gnu"),
            &target,
        )?;
        fs::remove_dir_all(libraries)?;
    }
    Ok(usr)
}

/// Downloads packages of Debian's rustc at the pinned version and unpacks them into `place`, below
/// `folder`. If Debian no longer has that version, reports it and takes the current one.
fn unpack(names: &[&str], place: &Path, folder: &Path) -> Result<()> {
    if packages::candidate(names[0])?.is_none() {
        packages::apt(&["update", "-qq"])?;
    }
    println!("  downloading {} {RUSTC_VERSION}", names.join(", "));
    let downloads = folder.join("debs");
    let pinned: Vec<String> = names
        .iter()
        .map(|name| format!("{name}={RUSTC_VERSION}"))
        .collect();
    // Debian's archive keeps only the newest version of a package in each suite.
    if packages::download(&pinned, &downloads).is_err() {
        println!("  version {RUSTC_VERSION} is no longer there; taking the newest");
        packages::download(names, &downloads)
            .context("cannot download Debian's rustc for the BPF target")?;
    }
    packages::unpack(&downloads, place)
}

fn build_linker(folder: &Path) -> Result<()> {
    let llvm = folder.join("llvm");
    fs::create_dir_all(llvm.join("lib"))?;
    let link = llvm.join("lib/libLLVM.so");
    if !link.exists() {
        std::os::unix::fs::symlink(LLVM_LIBRARY, &link)?;
    }
    run(install("bpf-linker", LINKER_VERSION)
        .args(["--no-default-features", "--features", LINKER_FEATURE])
        .arg("--root")
        .arg(folder.join("linker"))
        .env("LLVM_PREFIX", &llvm))
}
