//! The C library for linking: Debian 11's, so the binary starts on every newer system (Ubuntu
//! 22.04, the oldest stemcell, has glibc 2.35).
//!
//! Debian's packages are unpacked, not installed, in `.toolchain/glibc-2.31`. This folder also
//! serves as the root in which the binary is started for verification.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::archive::make_anew;
use crate::{
    packages::unpack,
    process::{capture, root, run},
};

/// Debian release of the C library.
const SUITE: &str = "bullseye";

/// Version of the C library; binaries must not need newer symbols.
pub(super) const VERSION: (u32, u32) = (2, 31);

/// The C library, its headers and start files, and the unwinder.
const PACKAGES: &[&str] = &["libc6", "libc6-dev", "libcrypt1", "libgcc-s1", "linux-libc-dev"];

/// Keyring with Debian's archive keys.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Returns the root with the old C library, unpacking it if necessary.
pub(super) fn ensure() -> Result<PathBuf> {
    let folder = root().join(format!(".toolchain/glibc-{}.{}", VERSION.0, VERSION.1));
    if !folder.exists() {
        println!("downloading the C library of Debian {SUITE} to link against");
        let apt = Apt::new(&root().join("target/dist/apt"))?;
        let downloads = apt.download(PACKAGES)?;
        unpack(&downloads, &folder)?;
    }
    let folder = folder.canonicalize()?;
    make_links_relative(&folder)?;
    Ok(folder)
}

/// Returns rustc's linker arguments for the old C library. Without the search paths gcc's defaults
/// would come first and select the machine's library.
pub(super) fn link_arguments(old: &Path) -> Vec<String> {
    let old = old.display();
    let libraries = format!("{old}/usr/lib/x86_64-linux-gnu");
    [
        format!("--sysroot={old}"),
        format!("-B{libraries}"),
        format!("-L{libraries}"),
        format!("-L{old}/lib/x86_64-linux-gnu"),
    ]
    .map(|argument| format!("-Clink-arg={argument}"))
    .into()
}

/// Redirects absolute symbolic links into `folder`, because the linker resolves them like the
/// kernel.
fn make_links_relative(folder: &Path) -> Result<()> {
    let links = capture(Command::new("find").arg(folder).args(["-type", "l", "-lname", "/*"]))?;
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

/// An isolated apt configuration that only knows [`SUITE`].
struct Apt {
    folder: PathBuf,
}

impl Apt {
    /// Downloads the package lists of the suite.
    fn new(folder: &Path) -> Result<Self> {
        make_anew(folder)?;
        let folder = folder.canonicalize()?;
        for below in ["lists/partial", "cache/archives/partial", "downloads"] {
            fs::create_dir_all(folder.join(below))?;
        }
        let source = format!("deb [signed-by={KEYRING}] http://deb.debian.org/debian {SUITE} main\n");
        fs::write(folder.join("sources.list"), source)?;
        fs::write(folder.join("status"), "")?;
        let apt = Self { folder };
        run(apt.command().args(["update", "-qq"])).context("the old C library is unavailable")?;
        Ok(apt)
    }

    /// Downloads packages; returns their folder.
    fn download(&self, packages: &[&str]) -> Result<PathBuf> {
        let downloads = self.folder.join("downloads");
        capture(self.command().args(["download", "-qq"]).args(packages).current_dir(&downloads))?;
        Ok(downloads)
    }

    /// Returns an apt-get command with the isolated folders.
    fn command(&self) -> Command {
        let mut command = Command::new("apt-get");
        for (option, below) in [
            ("Dir::Etc::SourceList", "sources.list"),
            ("Dir::State::Lists", "lists"),
            ("Dir::State::Status", "status"),
            ("Dir::Cache", "cache"),
        ] {
            command.arg("-o").arg(format!("{option}={}", self.folder.join(below).display()));
        }
        command.args(["-o", "Dir::Etc::SourceParts=/dev/null", "-o", "APT::Sandbox::User=root"]);
        command
    }
}
