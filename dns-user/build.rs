//! Builds the BPF object from `../dns-ebpf`, so that the binary can embed it.
//!
//! Which compiler to use stands in `.toolchain/env`, written by `cargo xtask
//! build` once it has found or installed one (`xtask/src/toolchain.rs`).

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

fn main() -> ExitCode {
    match build_object() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            // One clear line: cargo shows a failed build script's stderr.
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

/// Builds the object, copies it to `OUT_DIR/dns-ebpf` and tells cargo what it depends on.
fn build_object() -> Result<(), String> {
    let crate_dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("not run by cargo")?);
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("not run by cargo")?);
    let root = crate_dir.join("..");
    let toolchain = root.join(".toolchain/env");
    for input in [
        "dns-ebpf/src",
        "dns-ebpf/.cargo",
        "dns-ebpf/Cargo.toml",
        "dns-ebpf/Cargo.lock",
        "dns-common/src",
        ".toolchain/env",
    ] {
        println!("cargo::rerun-if-changed={}", root.join(input).display());
    }

    let settings = fs::read_to_string(&toolchain).map_err(
        |_| "the BPF toolchain is not set up yet: run `cargo xtask build` (it installs what is missing)",
    )?;
    let built = run_cargo(&root.join("dns-ebpf"), &settings)?;
    fs::copy(&built, out_dir.join("dns-ebpf"))
        .map_err(|error| format!("cannot copy {}: {error}", built.display()))?;
    Ok(())
}

/// Runs cargo in `dns-ebpf` with the settings of the toolchain; returns the object's path.
///
/// `settings`: lines of `KEY=VALUE`. `ARGS` holds further arguments of cargo
/// (separated by spaces), `PATH_FIRST` a folder to search first; everything
/// else is an environment variable.
fn run_cargo(dns_ebpf: &Path, settings: &str) -> Result<PathBuf, String> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(dns_ebpf).arg("build").arg("--release").args(["--target", "bpfel-unknown-none"]);
    // What cargo and clippy set for this build must not reach the other one.
    for (key, _) in env::vars_os() {
        let key_text = key.to_string_lossy();
        if key_text.starts_with("CARGO") && key_text != "CARGO_HOME"
            || key_text.starts_with("RUST") && key_text != "RUSTUP_HOME"
        {
            cargo.env_remove(&key);
        }
    }
    for line in settings.lines().filter(|line| !line.is_empty()) {
        let (key, value) =
            line.split_once('=').ok_or_else(|| format!(".toolchain/env: bad line {line:?}"))?;
        match key {
            "ARGS" => drop(cargo.args(value.split_whitespace())),
            "PATH_FIRST" => {
                let path = env::var("PATH").unwrap_or_default();
                cargo.env("PATH", format!("{value}:{path}"));
            }
            _ => drop(cargo.env(key, value)),
        }
    }
    let output = cargo.output().map_err(|error| format!("cannot run cargo for dns-ebpf: {error}"))?;
    if !output.status.success() {
        return Err(format!("building dns-ebpf failed:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(dns_ebpf.join("target/bpfel-unknown-none/release/dns-ebpf"))
}
