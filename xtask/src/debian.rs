//! A bare Debian root, made by debootstrap (not installed) in `.toolchain/debian`: what the
//! package is installed on in tests. It boots with systemd in namespaces; nothing of it runs
//! on the machine itself.

use std::{fs, process::Command};

use anyhow::{Context, Result};

use crate::{
    packages::{self, make_anew},
    process::{capture, root, run},
};

/// What is there besides the essential packages: an init system, and dig, which the package recommends.
const INCLUDED: &str = "bind9-dnsutils,dbus,iproute2,libgcc-s1,procps,systemd,systemd-sysv";

/// Packages that lie in the root's `/var/cache/resolvers`, to be installed by tests: both want
/// `/etc/resolv.conf`, so they exclude each other.
const RESOLVERS: [&str; 2] = ["resolvconf", "systemd-resolved"];

/// Makes sure that the root is there.
pub(crate) fn ensure() -> Result<()> {
    let folder = root().join(".toolchain/debian");
    if folder.exists() {
        return Ok(());
    }
    packages::ensure(&["debootstrap"])?;
    let suite = suite()?;
    println!("making a root of Debian {suite}, on which packages are tried");
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

/// The release of this machine: what is built here starts there.
fn suite() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release")?;
    let suite = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(suite.context("/etc/os-release names no release")?.trim_matches('"').to_owned())
}
