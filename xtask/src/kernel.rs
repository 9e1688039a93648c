//! Additional kernels for tests of the programs: Debian's, unpacked (not installed) in
//! `.toolchain/kernels`, and user-supplied ones.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::{
    packages::{self, Lists},
    packets,
    process::root,
};

/// A kernel packaged by Debian.
struct Kernel {
    /// Folder name; `tests/tests/packets` has a test for each.
    name: &'static str,
    /// Meta package that depends on the latest version.
    meta_package: &'static str,
    /// Debian suite of the package; `None`: this machine's.
    suite: Option<&'static str>,
}

/// All Debian kernels under test. Cloud kernels boot in seconds.
const KERNELS: [Kernel; 4] = [
    Kernel { name: "bookworm-cloud", meta_package: "linux-image-cloud-amd64", suite: None },
    Kernel { name: "bookworm-rt", meta_package: "linux-image-rt-amd64", suite: None },
    Kernel {
        name: "backports-cloud",
        meta_package: "linux-image-cloud-amd64",
        suite: Some("bookworm-backports"),
    },
    // With drivers of network cards, which kernels for clouds lack.
    Kernel { name: "backports", meta_package: "linux-image-amd64", suite: Some("bookworm-backports") },
];

/// Downloads and unpacks missing kernels.
pub(crate) fn ensure() -> Result<()> {
    for kernel in &KERNELS {
        kernel.ensure()?;
    }
    Ok(())
}

/// Tests the programs and the server on a kernel in a virtual machine; `modules` is the folder of
/// its modules, if it needs any.
pub(crate) fn test(image: &Path, modules: Option<&Path>) -> Result<()> {
    let there = |path: &Path| path.canonicalize().with_context(|| path.display().to_string());
    let mut environment = vec![("KERNEL_IMAGE", there(image)?.into())];
    if let Some(modules) = modules {
        environment.push(("KERNEL_MODULES", there(modules)?.into()));
    }
    packets::test("other_kernel::named_kernel", &["--workspace"], &environment)
}

impl Kernel {
    /// Downloads and unpacks the kernel if it is missing.
    fn ensure(&self) -> Result<()> {
        let folder = self.folder();
        if folder.exists() {
            return Ok(());
        }
        let lists = match self.suite {
            None => Lists::of_this_machine(),
            Some(suite) => Lists::of_suite(suite, &folder.with_extension("apt"))?,
        };
        let package = match self.package(&lists) {
            Ok(package) => package,
            Err(_) => {
                lists.update()?;
                self.package(&lists)?
            }
        };
        println!("downloading {package}, a kernel for virtual machines");
        let downloads = folder.with_extension("debs");
        lists.download(&[package], &downloads)?;
        packages::unpack(&downloads, &folder)
    }

    fn folder(&self) -> PathBuf {
        root().join(".toolchain/kernels").join(self.name)
    }

    /// Returns the name of the package that contains the kernel.
    fn package(&self, lists: &Lists) -> Result<String> {
        let depends = lists.cache(&["depends", self.meta_package])?;
        let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
        let package = package.with_context(|| format!("{} depends on no kernel", self.meta_package))?;
        Ok(format!("linux-image-{package}"))
    }
}
