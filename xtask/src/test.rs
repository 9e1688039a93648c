//! `cargo xtask test`: everything there is, cheapest first.

use std::{ffi::OsStr, process::Command};

use anyhow::Result;

use crate::process::{capture, cargo, root, run as run_command};

/// Version of cargo-nextest to install where there is none.
const NEXTEST_VERSION: &str = "0.9.143";

/// Version of cargo-fuzz to install where there is none.
const FUZZ_VERSION: &str = "0.13.2";

/// Seconds that each fuzz target runs for: a smoke test, not a campaign.
const FUZZ_SECONDS: u32 = 5;

/// Runs all checks, or only the tests whose names contain one of `filters`.
pub(crate) fn run(filters: &[String]) -> Result<()> {
    if filters.is_empty() {
        step("format");
        cargo(["fmt", "--all", "--check"])?;
        run_command(Command::new("cargo").args(["fmt", "--check"]).current_dir(root().join("dns-ebpf")))?;
        step("lints");
        cargo(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
    }
    step("build");
    cargo(["build", "--release", "--package", "dns-user"])?;
    step("tests");
    ensure_nextest()?;
    // The server as operators run it: the debug build is too slow to be timed.
    let server = root().canonicalize()?.join("target/release/bosh-dns-xdp");
    run_command(
        Command::new("cargo")
            .args(["nextest", "run", "--workspace"])
            .args(filters)
            .env("BOSH_DNS_XDP", server)
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

/// Runs each fuzz target for a short, bounded time from its corpus. What is found
/// on the way stays in `tests/fuzz/target`, beside the committed corpus.
///
/// cargo-fuzz needs nightly for its sanitizers, but not rust-src.
pub(crate) fn fuzz_smoke() -> Result<()> {
    let folder = root().join("tests/fuzz");
    let Ok(targets) = std::fs::read_dir(folder.join("fuzz_targets")) else {
        return Ok(());
    };
    step("fuzz smoke");
    let tools = root().join(".toolchain");
    if !tools.join("bin/cargo-fuzz").exists() {
        println!("installing cargo-fuzz {FUZZ_VERSION}");
        let version = ["install", "--quiet", "--locked", "cargo-fuzz", "--version", FUZZ_VERSION, "--root"];
        cargo(version.map(OsStr::new).into_iter().chain([tools.as_os_str()]))?;
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([tools.join("bin")].into_iter().chain(std::env::split_paths(&path)))?;
    let mut targets: Vec<_> = targets.collect::<Result<_, _>>()?;
    targets.sort_by_key(std::fs::DirEntry::file_name);
    for target in targets {
        let target = target.path();
        let Some(name) = target.file_stem() else { continue };
        println!("{} ({FUZZ_SECONDS} s)", name.display());
        let found = folder.join("target/corpus").join(name);
        std::fs::create_dir_all(&found)?;
        run_command(
            Command::new("cargo")
                .args(["+nightly", "fuzz", "run", "--fuzz-dir", "."])
                .arg(name)
                .args([found, folder.join("corpus").join(name)])
                .args(["--", &format!("-max_total_time={FUZZ_SECONDS}")])
                .env("PATH", &path)
                .current_dir(&folder),
        )?;
    }
    Ok(())
}
