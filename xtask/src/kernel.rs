//! The kernel that the programs are tried on besides the machine's own: Debian's,
//! unpacked (not installed) in `.toolchain/kernel`. Made for virtual machines,
//! it boots in seconds.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{
    packages,
    process::{capture, root, run},
};

/// Debian's package that depends on the newest kernel of the release.
const META_PACKAGE: &str = "linux-image-cloud-amd64";

/// Makes sure that the kernel is there.
pub(crate) fn ensure() -> Result<()> {
    let folder = root().join(".toolchain/kernel");
    if folder.exists() {
        return Ok(());
    }
    let part = folder.with_extension("part");
    // Half of an interrupted run is of no use.
    if part.exists() {
        fs::remove_dir_all(&part)?;
    }
    fs::create_dir_all(&part).with_context(|| part.display().to_string())?;
    let package = match package() {
        Ok(package) => package,
        Err(_) => {
            packages::apt(&["update", "-qq"])?;
            package()?
        }
    };
    println!("downloading {package}, the kernel of the virtual machine");
    unpack(&package, &part)?;
    fs::rename(&part, &folder).with_context(|| folder.display().to_string())
}

/// Name of the package that holds the kernel.
fn package() -> Result<String> {
    let depends = capture(Command::new("apt-cache").args(["depends", META_PACKAGE]))?;
    let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
    Ok(format!("linux-image-{}", package.with_context(|| format!("{META_PACKAGE} depends on no kernel"))?))
}

/// Downloads and unpacks the package into `folder`.
fn unpack(package: &str, folder: &Path) -> Result<()> {
    let get = || capture(Command::new("apt-get").args(["download", "-qq", package]).current_dir(folder));
    if get().is_err() {
        // The lists are older than the mirror.
        packages::apt(&["update", "-qq"])?;
        get()?;
    }
    for file in fs::read_dir(folder)? {
        let file = file?.path();
        run(Command::new("dpkg").arg("-x").arg(&file).arg(folder))?;
        fs::remove_file(&file)?;
    }
    Ok(())
}
