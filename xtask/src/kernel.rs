//! Additional kernels for tests of the programs: Debian's, unpacked (not installed) in
//! `.toolchain/kernels`, and user-supplied ones.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::{
    fuzz,
    packages::{self, Lists},
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
    /// Debian architecture of the package.
    architecture: &'static str,
}

/// All Debian kernels under test. Cloud kernels boot in seconds.
const KERNELS: [Kernel; 4] = [
    Kernel {
        name: "bookworm-cloud",
        meta_package: "linux-image-cloud-amd64",
        suite: None,
        architecture: packages::THIS_ARCHITECTURE,
    },
    Kernel {
        name: "bookworm-rt",
        meta_package: "linux-image-rt-amd64",
        suite: None,
        architecture: packages::THIS_ARCHITECTURE,
    },
    Kernel {
        name: "backports-cloud",
        meta_package: "linux-image-cloud-amd64",
        suite: Some("bookworm-backports"),
        architecture: packages::THIS_ARCHITECTURE,
    },
    // With drivers of network cards, which kernels for clouds lack.
    Kernel {
        name: "backports",
        meta_package: "linux-image-amd64",
        suite: Some("bookworm-backports"),
        architecture: packages::THIS_ARCHITECTURE,
    },
];

/// Debian kernels under test by `cargo xtask arm64`.
const ARM64_KERNELS: [Kernel; 2] = [
    Kernel {
        name: "bookworm-cloud-arm64",
        meta_package: "linux-image-cloud-arm64",
        suite: Some("bookworm"),
        architecture: "arm64",
    },
    Kernel {
        name: "backports-cloud-arm64",
        meta_package: "linux-image-cloud-arm64",
        suite: Some("bookworm-backports"),
        architecture: "arm64",
    },
];

/// Downloads and unpacks missing kernels.
pub(crate) fn ensure() -> Result<()> {
    for kernel in &KERNELS {
        kernel.ensure()?;
    }
    Ok(())
}

/// Tests the programs and the server on every arm64 kernel in a virtual machine; `programs` is the root of the
/// arm64 file system that runs there.
pub(crate) fn test_arm64(programs: &Path) -> Result<()> {
    for kernel in &ARM64_KERNELS {
        kernel.ensure()?;
        println!("== {}", kernel.name);
        let boot = kernel.folder().join("boot");
        // The file's name ends with a version that changes with each update of the package.
        let image = fs::read_dir(&boot)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
            });
        let image = image.with_context(|| format!("no kernel in {}", boot.display()))?;
        test(
            &image,
            Some(&kernel.folder().join("lib/modules")),
            Some(programs),
        )?;
    }
    Ok(())
}

/// Tests the programs and the server on a kernel in a virtual machine; `modules` is the folder of
/// its modules, if it needs any. `arm64` is the file system of an arm64 machine.
pub(crate) fn test(image: &Path, modules: Option<&Path>, arm64: Option<&Path>) -> Result<()> {
    let mut environment = Vec::new();
    for (name, path) in [
        ("KERNEL_IMAGE", Some(image)),
        ("KERNEL_MODULES", modules),
        ("KERNEL_ARM64", arm64),
    ] {
        if let Some(path) = path {
            let path = path
                .canonicalize()
                .with_context(|| path.display().to_string())?;
            environment.push((name, path.into()));
        }
    }
    fuzz::packet_test("other_kernel::named_kernel", &["--workspace"], &environment)
}

impl Kernel {
    fn ensure(&self) -> Result<()> {
        let folder = self.folder();
        // `packages::unpack` renames it into place when it is complete.
        if folder.exists() {
            return Ok(());
        }
        let lists = match self.suite {
            None => Lists::of_this_machine(),
            Some(suite) => {
                Lists::of_suite(suite, self.architecture, &folder.with_extension("apt"))?
            }
        };
        let package = match self.package(&lists) {
            Ok(package) => package,
            // The lists are missing, or older than the suite.
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

    fn package(&self, lists: &Lists) -> Result<String> {
        let depends = lists.cache(&["depends", self.meta_package])?;
        let package = depends
            .lines()
            // The package with the kernel itself has the version in its name.
            .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
        let package =
            package.with_context(|| format!("{} depends on no kernel", self.meta_package))?;
        Ok(format!("linux-image-{package}"))
    }
}
