//! The BPF object, built from `dns-ebpf` by a cargo and a compiler of its own.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// Runs cargo in `dns-ebpf` with the settings of the toolchain; returns the object's path.
///
/// `settings`: lines of `KEY=VALUE`. `ARGS` holds further arguments of cargo
/// (separated by spaces), `PATH_FIRST` a folder to search first; everything
/// else is an environment variable. What is built goes to `target`.
pub(crate) fn run_cargo(dns_ebpf: &Path, settings: &str, target: &Path) -> Result<PathBuf, String> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(dns_ebpf).arg("build").arg("--release").args(["--target", "bpfel-unknown-none"]);
    cargo.arg("--target-dir").arg(target);
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
    Ok(target.join("bpfel-unknown-none/release/dns-ebpf"))
}
