//! Single tests of `tests/tests/packets`, run on demand.

use std::{ffi::OsString, process::Command};

use anyhow::{Result, ensure};

use crate::process::{capture, root, run};

/// Builds the test program with `cargo test <build>` and runs the test with this name, showing its
/// output. Fails if there is no such test, which the test harness treats as success.
pub(crate) fn test(name: &str, build: &[&str], environment: &[(&str, OsString)]) -> Result<()> {
    let cargo = |more: &[&str]| {
        let mut command = Command::new("cargo");
        command.arg("test").args(build).args(["--test", "packets"]).args(more);
        command.envs(environment.iter().cloned()).current_dir(root());
        // Some of the tests start the server.
        crate::name_server(&mut command)?;
        anyhow::Ok(command)
    };
    run(&mut cargo(&["--no-run"])?)?;
    let only = ["--", name, "--exact", "--include-ignored"];
    let listed = capture(&mut cargo(&[&only[..], &["--list"]].concat())?)?;
    ensure!(
        listed.lines().any(|line| line.strip_suffix(": test") == Some(name)),
        "tests/tests/packets has no test {name}"
    );
    run(&mut cargo(&[&only[..], &["--nocapture"]].concat())?)
}
