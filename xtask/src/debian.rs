//! A minimal Debian root in `.toolchain/debian`, created by debootstrap (not installed), in which
//! tests install the packages. It boots with systemd in namespaces, isolated from the machine.

use std::{fs, process::Command};

use anyhow::{Context, Result};

use crate::{
    packages::{self, make_anew},
    process::{capture, root, run},
};

/// Packages in addition to the essential ones: an init system, and dig, which the package
/// recommends.
const INCLUDED: &str = "bind9-dnsutils,dbus,iproute2,libgcc-s1,procps,systemd,systemd-sysv";

/// Packages stored in the root's `/var/cache/resolvers` for installation by tests. They conflict,
/// because both manage `/etc/resolv.conf`.
const RESOLVERS: [&str; 2] = ["resolvconf", "systemd-resolved"];

/// Creates the root if necessary.
pub(crate) fn ensure() -> Result<()> {
    let folder = root().join(".toolchain/debian");
    if folder.exists() {
        return Ok(());
    }
    packages::ensure(&["debootstrap"])?;
    let suite = suite()?;
    println!("creating a root of Debian {suite} to test the packages in");
    let downloads = folder.with_extension("debs");
    packages::download(&RESOLVERS, &downloads)?;
    let part = folder.with_extension("part");
    make_anew(&part)?;
    capture(
        Command::new("debootstrap")
            .args(["--variant=minbase", &format!("--include={INCLUDED}"), &suite])
            .arg(&part),
    )?;
    let resolvers = part.join("var/cache/resolvers");
    run(Command::new("mv").arg(&downloads).arg(&resolvers))?;
    fs::rename(&part, &folder).with_context(|| folder.display().to_string())
}

/// Returns the release of this machine, on which its builds start.
fn suite() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release")?;
    let suite = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(suite.context("/etc/os-release names no release")?.trim_matches('"').to_owned())
}
