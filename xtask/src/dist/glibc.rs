//! The C library for linking: Debian 11's, so the binary starts on every newer system (Ubuntu
//! 22.04, the oldest stemcell, has glibc 2.35).
//!
//! Debian's packages are unpacked, not installed, in `.toolchain/glibc-2.31-ARCHITECTURE`. This folder also
//! serves as the root in which the binary is started for verification.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::architecture::Architecture;
use crate::{
    packages::{Lists, unpack},
    process::{capture, root},
};

/// Debian release of the C library.
const SUITE: &str = "bullseye";

/// Version of the C library; binaries must not need newer symbols.
pub(super) const VERSION: (u32, u32) = (2, 31);

/// The C library, its headers and start files, and the unwinder.
const PACKAGES: &[&str] = &[
    "libc6",
    "libc6-dev",
    "libcrypt1",
    "libgcc-s1",
    "linux-libc-dev",
];

/// Returns the root with the old C library, unpacking it if necessary.
pub(super) fn ensure(architecture: Architecture) -> Result<PathBuf> {
    let name = architecture.name();
    let folder = root().join(format!(
        ".toolchain/glibc-{}.{}-{name}",
        VERSION.0, VERSION.1
    ));
    if !folder.exists() {
        println!("downloading the C library of Debian {SUITE} for {name} to link against");
        let apt = root().join("target/dist").join(format!("apt-{name}"));
        let downloads = apt.join("downloads");
        // This machine's sources know other suites, and must not be changed.
        let lists = Lists::of_suite(SUITE, name, &apt)?;
        lists.update().context("the old C library is unavailable")?;
        lists.download(PACKAGES, &downloads)?;
        unpack(&downloads, &folder)?;
    }
    // Each time: an interrupted run may have left absolute ones.
    make_links_relative(&folder)?;
    Ok(folder)
}

/// Returns rustc's linker arguments for the old C library. Without the search paths gcc's defaults
/// would come first and select the machine's library.
pub(super) fn link_arguments(old: &Path, architecture: Architecture) -> Vec<String> {
    let old = old.display();
    let triplet = architecture.triplet();
    let libraries = format!("{old}/usr/lib/{triplet}");
    [
        format!("--sysroot={old}"),
        // gcc looks for the start files (crt1.o) here, for libraries in the folders after it.
        format!("-B{libraries}"),
        format!("-L{libraries}"),
        format!("-L{old}/lib/{triplet}"),
    ]
    .map(|argument| format!("-Clink-arg={argument}"))
    .into()
}

/// Redirects absolute symbolic links into `folder`, because the linker resolves them like the kernel.
fn make_links_relative(folder: &Path) -> Result<()> {
    let links = capture(
        Command::new("find")
            .arg(folder)
            // The links of Debian's libc6-dev are absolute and would lead to this machine's
            // library.
            .args(["-type", "l", "-lname", "/*"]),
    )?;
    for link in links.lines().map(Path::new) {
        let target = fs::read_link(link)?;
        let inside = link.strip_prefix(folder)?;
        let up = "../".repeat(inside.components().count() - 1);
        fs::remove_file(link)?;
        symlink(format!("{up}{}", target.strip_prefix("/")?.display()), link)
            .with_context(|| link.display().to_string())?;
    }
    Ok(())
}
