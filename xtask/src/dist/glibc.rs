//! The C library that is linked against: that of Debian 11, so that the binary starts on
//! every system since (Ubuntu 22.04, the oldest stemcell, has glibc 2.35).
//!
//! Debian's packages are unpacked, not installed, in `.toolchain/glibc-2.31`. The same folder,
//! being a root of that age, is where the binary is shown to start.

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

/// The release whose C library is taken.
const SUITE: &str = "bullseye";

/// Version of that C library: no symbol of a newer one may be asked for.
pub(super) const VERSION: (u32, u32) = (2, 31);

/// The C library, its headers and start files, and the unwinder.
const PACKAGES: &[&str] = &["libc6", "libc6-dev", "libcrypt1", "libgcc-s1", "linux-libc-dev"];

/// Where Debian's signatures are checked against.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The root with the old C library, unpacked if it is not there yet.
pub(super) fn ensure() -> Result<PathBuf> {
    let folder = root().join(format!(".toolchain/glibc-{}.{}", VERSION.0, VERSION.1));
    if !folder.exists() {
        println!("downloading the C library of Debian {SUITE}, which is linked against");
        let apt = Apt::new(&root().join("target/dist/apt"))?;
        let downloads = apt.download(PACKAGES)?;
        unpack(&downloads, &folder)?;
    }
    let folder = folder.canonicalize()?;
    make_links_relative(&folder)?;
    Ok(folder)
}

/// What rustc tells the linker, so that it takes the old C library. Without the search paths
/// gcc's own come first, which lead to the machine's.
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

/// Makes links that begin at the root lead into `folder`: the linker follows them as the kernel does.
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

/// An apt that knows nothing but [`SUITE`], with folders of its own.
struct Apt {
    folder: PathBuf,
}

impl Apt {
    /// Reads the suite's lists.
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
        run(apt.command().args(["update", "-qq"])).context("the old C library cannot be had")?;
        Ok(apt)
    }

    /// Downloads packages; the folder that they lie in.
    fn download(&self, packages: &[&str]) -> Result<PathBuf> {
        let downloads = self.folder.join("downloads");
        capture(self.command().args(["download", "-qq"]).args(packages).current_dir(&downloads))?;
        Ok(downloads)
    }

    /// apt-get on our folders.
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
