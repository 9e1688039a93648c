//! The kernel that the programs are tried on besides the machine's own: Debian's,
//! unpacked (not installed) in `.toolchain/kernel`. Made for virtual machines,
//! it boots in seconds.

use std::process::Command;

use anyhow::{Context, Result};

use crate::{
    packages,
    process::{capture, root},
};

/// Debian's package that depends on the newest kernel of the release.
const META_PACKAGE: &str = "linux-image-cloud-amd64";

/// Makes sure that the kernel is there.
pub(crate) fn ensure() -> Result<()> {
    let folder = root().join(".toolchain/kernel");
    if folder.exists() {
        return Ok(());
    }
    let package = match package() {
        Ok(package) => package,
        Err(_) => {
            packages::apt(&["update", "-qq"])?;
            package()?
        }
    };
    println!("downloading {package}, the kernel of the virtual machine");
    let downloads = folder.with_extension("debs");
    packages::download(&[package], &downloads)?;
    packages::unpack(&downloads, &folder)
}

/// Name of the package that holds the kernel.
fn package() -> Result<String> {
    let depends = capture(Command::new("apt-cache").args(["depends", META_PACKAGE]))?;
    let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
    Ok(format!("linux-image-{}", package.with_context(|| format!("{META_PACKAGE} depends on no kernel"))?))
}
