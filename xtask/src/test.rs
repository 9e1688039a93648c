//! `cargo xtask test`: everything there is, cheapest first.

use std::process::Command;

use anyhow::Result;

use crate::{
    fuzz,
    process::{capture, cargo, root, run as run_command},
};

/// Version of cargo-nextest to install where there is none.
const NEXTEST_VERSION: &str = "0.9.143";

/// Runs all checks, or only the tests whose names contain one of `filters`.
pub(crate) fn run(filters: &[String]) -> Result<()> {
    if filters.is_empty() {
        step("format");
        cargo(["fmt", "--all", "--check"])?;
        run_command(Command::new("cargo").args(["fmt", "--check"]).current_dir(root().join("dns-ebpf")))?;
        step("lints");
        cargo(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
        step("fuzzing");
        fuzz::run(&[], fuzz::SMOKE_SECONDS)?;
    }
    step("build");
    crate::release(&[])?;
    step("tests");
    ensure_nextest()?;
    run_command(
        crate::name_server(&mut Command::new("cargo"))?
            .args(["nextest", "run", "--workspace"])
            .args(filters)
            .current_dir(root()),
    )
}

/// Says what comes next.
fn step(name: &str) {
    println!("\n== {name}");
}

/// Installs cargo-nextest, which runs test programs side by side, where it is missing.
fn ensure_nextest() -> Result<()> {
    if capture(Command::new("cargo").args(["nextest", "--version"])).is_ok() {
        return Ok(());
    }
    println!("installing cargo-nextest {NEXTEST_VERSION}");
    cargo(["install", "--quiet", "--locked", "cargo-nextest", "--version", NEXTEST_VERSION])
}
