//! moto, a server that emulates Amazon's services, from PyPI: Debian has no package of it.

use std::{ffi::OsString, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::process::{on_path, root, run};

/// pip requirement, used if no server is on the path.
const REQUIREMENT: &str = "moto[server]==5.2.1";

/// Returns the folder of the virtual environment.
fn environment() -> PathBuf {
    root().join("target/moto")
}

/// Installs the server into a virtual environment below `target`, if it is missing.
pub(crate) fn ensure() -> Result<()> {
    let folder = environment();
    if on_path("moto_server") || folder.join("bin/moto_server").is_file() {
        return Ok(());
    }
    println!("installing {REQUIREMENT}");
    run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    run(Command::new(folder.join("bin/pip")).args(["install", "--quiet", REQUIREMENT]))
}

/// Returns the search path with the server's folder appended.
pub(crate) fn search_path() -> Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([environment().join("bin")]);
    std::env::join_paths(folders).context("PATH has a folder with a colon")
}
